"""vote: the answers, their forms, and the moment at which a vote is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SuffixDrafter, search
from llamabranch.errors import LlamaBranchWarning

WARM = lb.SamplingParams(temperature=1.0, seed=5)


def first_word(text: str) -> str | None:
    words = text.split()
    return words[0] if words and words[0].isalpha() else None


def test_the_most_frequent_answer_wins(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        found = search.vote(root, first_word, 12, 6)
        texts = [h.text for h in search.best_of_n(root, 12, 6).hypotheses]
        votes = Counter(word for word in map(first_word, texts) if word is not None)
        assert dict(found.votes) == dict(votes)
        assert list(found.votes.values()) == sorted(votes.values(), reverse=True)
        winner = next(iter(found.votes))
        assert first_word(found.text) == winner
        assert found.best.score == votes[winner] / 12
        assert [h.score for h in found.hypotheses] == sorted(
            (h.score for h in found.hypotheses), reverse=True
        )


GIVEN: dict[str, tuple[list[Any], dict[Any, int], str]] = {  # answers, votes, and what is warned of
    "equal numbers": (
        ["1", "1.00", "1,000", "1e3", "one", "1.00", None, " 1", 1000.0, "1,00"],
        {"1.00": 4, "1e3": 3, "one": 1, "1,00": 1},
        "",
    ),
    "integers": ([4, 4, 5], {4: 2, 5: 1}, ""),
    "bools": ([True, True, False], {True: 2, False: 1}, ""),
    "floats": ([2.5, 2.5, 1.0], {2.5: 2, 1.0: 1}, ""),
    "none": ([None, None, None], {}, "no text has an answer"),
    "failing": ([10, KeyError, 5, KeyError, 10], {10: 2, 5: 1}, "2 of 5 texts, .*KeyError"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_answers_are_counted_as_the_parser_returned_them(ctx: Context, name: str) -> None:
    """A parser that raises loses no text; numbers that are equal are one answer."""
    given, votes, told = GIVEN[name]
    answers: Iterator[Any] = iter(given)

    def answer(_: str) -> Any:
        found = next(answers)
        if found is KeyError:
            raise KeyError
        return found

    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        with pytest.warns(LlamaBranchWarning, match=told) if told else nullcontext() as warned:
            found = search.vote(root, answer, len(given), 3)
        whole = search.best_of_n(root, len(given), 3)
    assert warned is None or len(warned) == 1
    assert sorted(h.text for h in found.hypotheses) == sorted(h.text for h in whole.hypotheses)
    assert found.votes == votes and found.as_dict().get("votes", {}) == {
        str(one): n for one, n in votes.items()
    }
    assert [type(one) for one in found.votes] == [type(one) for one in votes]
    shares = [n / len(given) for n in votes.values() for _ in range(n)]
    shares += [0.0] * (len(given) - len(shares))
    assert [h.score for h in found.hypotheses] == shares
    assert found.answer == next(iter(votes), None)
    if name == "equal numbers":
        assert found.answer_forms["1.00"] == {"1": 1, "1.00": 2, " 1": 1}
        assert found.answer_forms["1e3"] == {"1,000": 1, "1e3": 1, "1000.0": 1}
        assert found.as_dict()["answer_forms"] == found.answer_forms


def test_ties_are_broken_by_the_seed_and_not_by_the_order(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0) as root:
        winners = set()
        for seed in range(12):
            asked = ["b", "a"]
            found = search.vote(root, lambda _: asked.pop(), 2, 1, seed=seed)  # noqa: B023
            winners.add(next(iter(found.votes)))
        assert winners == {"a", "b"}


# -- when it is decided ----------------------------------------------------------------------------


def first_letter(text: str) -> str | None:
    """Return one of three answers, or none for some texts."""
    letters = [c for c in text.lower() if c.isalpha()]
    place = ord(letters[0]) % 7 if letters else 6
    return None if place == 6 else "aaabbc"[place]


@pytest.mark.filterwarnings("ignore:no text has an answer")
@pytest.mark.parametrize(
    ("settings", "n_seeds"),
    [({"width": 1}, 24), ({"width": 3}, 24), ({}, 24), ({"width": 2}, 160), ({"drafter": 1}, 24)],
)
def test_the_lossless_stop_has_the_winner_of_the_whole_vote(
    ctx: Context, settings: dict[str, Any], n_seeds: int
) -> None:
    if "drafter" in settings:
        settings = {"drafter": SuffixDrafter()}
    stopped = 0
    with Branch.start(ctx, "The", sampling=WARM) as root:
        for seed in range(n_seeds):
            n = 1 + seed % 8
            whole = search.vote(root, first_letter, n, 5, seed=seed, stop=["e"])
            found = search.vote(
                root, first_letter, n, 5, seed=seed, stop=["e"], confidence=1.0, **settings
            )
            assert found.answer == whole.answer
            known = {tuple(h.tokens): h for h in whole.hypotheses}
            for h in found.hypotheses:
                if h.finish_reason == "decided":
                    assert any(key[: len(h.tokens)] == tuple(h.tokens) for key in known)
                    assert h.score == 0.0
                else:
                    assert h.text == known[tuple(h.tokens)].text
            n_voted = sum(h.finish_reason != "decided" for h in found.hypotheses)
            assert sum(found.votes.values()) <= n_voted <= n
            assert len(found.hypotheses) <= n
            stopped += n_voted < n
        assert stopped >= n_seeds // 8


def test_unanimous_texts_decide_as_soon_as_they_can(ctx: Context) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:
        found = search.vote(root, lambda _: "same", 16, 6, confidence=1.0, width=1)
        reasons = Counter(h.finish_reason for h in found.hypotheses)
        assert found.votes == {"same": 9} and found.best.score == 1.0
        assert reasons.total() - reasons["decided"] == 9  # of 16: seven others cannot change it
        wide = search.vote(root, lambda _: "same", 16, 6, confidence=1.0, width=7)
        assert [h.finish_reason for h in wide.hypotheses].count("decided") == 16 - 9
        assert not any(h.node.status == "open" for h in wide.hypotheses)


def test_texts_without_an_answer_count_as_done(ctx: Context) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:
        given = iter([None, None, "a", None, "a", "b"])
        found = search.vote(root, lambda _: next(given), 6, 3, confidence=1.0, width=1)
    assert found.votes == {"a": 2} and next(given) == "b"
