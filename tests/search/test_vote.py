"""vote: the answers, their forms, and the moment at which a vote is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from fractions import Fraction
from itertools import product
from math import comb
from statistics import fmean
from typing import Any

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SuffixDrafter, search
from llamabranch.errors import LlamaBranchWarning
from llamabranch.search.continuations import slot_seed
from llamabranch.search.vote import chance_to_stay

STORY = "The wolf ran and the wolf ran and the wolf"
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


def test_adaptive_votes_stop_at_agreement(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        agreed = search.vote(root, lambda text: "same", 16, 4, adaptive=True)
        assert len(agreed.hypotheses) == 2
        split = search.vote(root, lambda text: text, 16, 12, adaptive=True).hypotheses
        whole = search.vote(root, lambda text: text, 16, 12).hypotheses
        assert len(split) == 16
        assert sorted(h.tokens for h in split) == sorted(h.tokens for h in whole)


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


def chance_by_enumeration(first: int, second: int, n_left: int) -> Fraction:
    """Return the same as a sum over every order in which the rest can vote (Polya's urn)."""
    total = Fraction(0)
    for votes in product((0, 1), repeat=n_left):
        counts, p = [first, second], Fraction(1)
        for vote in votes:
            p *= Fraction(counts[vote] + 1, sum(counts) + 2)
            counts[vote] += 1
        total += p * (
            Fraction(1, 2) if counts[0] == counts[1] else Fraction(int(counts[0] > counts[1]))
        )
    return total


def test_the_chance_to_stay_is_that_of_all_ways_to_go_on() -> None:
    for first in range(6):
        for second in range(first + 1):
            for n_left in range(7):
                expected = float(chance_by_enumeration(first, second, n_left))
                assert chance_to_stay(first, second, n_left) == pytest.approx(expected, abs=1e-12)


def test_with_many_texts_left_it_is_the_rule_of_the_paper() -> None:
    for first, second in ((4, 0), (6, 1), (8, 2), (3, 0), (5, 1)):
        n = first + second + 1
        beta = sum(comb(n, i) for i in range(first + 1)) / 2**n
        assert chance_to_stay(first, second, 20_000) == pytest.approx(beta, abs=2e-3)


@pytest.mark.filterwarnings("ignore:no text has an answer")
@pytest.mark.parametrize(("width", "n_seeds"), [(1, 24), (3, 24), (None, 24), (2, 160)])
def test_the_lossless_stop_has_the_winner_of_the_whole_vote(
    ctx: Context, width: int | None, n_seeds: int
) -> None:
    stopped = 0
    with Branch.start(ctx, "The", sampling=WARM) as root:
        for seed in range(n_seeds):
            n = 1 + seed % 8
            whole = search.vote(root, first_letter, n, 5, seed=seed, stop=["e"])
            found = search.vote(
                root, first_letter, n, 5, seed=seed, stop=["e"], confidence=1.0, width=width
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


def test_a_likely_winner_does_not_depend_on_width_drafter_or_lengths(ctx: Context) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:

        def decided(seed: int, **settings: Any) -> tuple[object, ...]:
            found = search.vote(
                root, first_letter, 12, 9, stop=["e"], confidence=0.8, seed=seed, **settings
            )
            voted = [h.tokens for h in found.hypotheses if h.finish_reason != "decided"]
            return found.answer, found.votes, voted

        used = []
        for seed in range(6):
            one_by_one = decided(seed, width=1)
            for width in (2, 5, 12):
                assert decided(seed, width=width) == one_by_one
            assert decided(seed, drafter=SuffixDrafter()) == one_by_one
            used.append(len(one_by_one[2]))  # type: ignore[arg-type]
        assert min(used) < 12


def test_unanimous_texts_decide_as_soon_as_they_can(ctx: Context) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:
        for confidence, n_voted in ((1.0, 9), (0.95, 3), (0.9, 3), (0.8, 2)):
            assert chance_to_stay(n_voted, 0, 16 - n_voted) >= confidence
            assert chance_to_stay(n_voted - 1, 0, 17 - n_voted) < confidence
            found = search.vote(root, lambda _: "same", 16, 6, confidence=confidence, width=1)
            reasons = Counter(h.finish_reason for h in found.hypotheses)
            assert found.votes == {"same": n_voted}
            assert reasons.total() - reasons["decided"] == n_voted and found.best.score == 1.0
        wide = search.vote(root, lambda _: "same", 16, 6, confidence=1.0, width=7)
        assert [h.finish_reason for h in wide.hypotheses].count("decided") == 16 - 9
        assert not any(h.node.status == "open" for h in wide.hypotheses)


def test_texts_without_an_answer_count_as_done(ctx: Context) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:
        given = iter([None, None, "a", None, "a", "b"])
        found = search.vote(root, lambda _: next(given), 6, 3, confidence=1.0, width=1)
    assert found.votes == {"a": 2} and next(given) == "b"


def test_a_vote_of_texts_that_share_draws(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        found = search.vote(root, first_word, 8, 4, entropy=1e9)
        assert len({tuple(h.tokens) for h in found.hypotheses}) == 1
        assert search.vote(root, first_word, 8, 4, entropy=1e9, confidence=1.0).answer


@pytest.mark.parametrize(
    "settings", [{}, {"width": 1}, {"drafter": SuffixDrafter()}], ids=["", "width", "drafter"]
)
def test_unsure_texts_are_given_up_where_the_model_becomes_unsure(
    ctx: Context, settings: dict[str, Any]
) -> None:
    """The rule again, over the alternatives of the same texts, each generated by itself."""
    n, keep, most = 16, 0.5, 40
    lowest: list[list[float]] = []  # of each text, up to each of its tokens
    texts = []
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        found = search.vote(root, first_word, n, most, keep=keep, **settings)
        for i in range(n):
            with root.fork() as branch:
                branch.resample(WARM.replace(seed=slot_seed(5, i)))
                its = list(branch.generate(most, top_logprobs=20))
            sure = [-fmean(p for _, p in one.alternatives) for one in its]
            groups = [fmean(sure[max(0, j - 15) : j + 1]) for j in range(len(sure))]
            lowest.append([min(groups[15 : j + 1] or [groups[j]]) for j in range(len(sure))])
            texts.append([one.token for one in its])
    first = sorted((its[-1] for its in lowest[:4]), reverse=True)
    threshold = first[1]  # round(0.5 * 5) = 2 of four are kept
    given_up = {}
    for i in range(4, n):
        at = next((j for j, p in enumerate(lowest[i]) if j >= 15 and p < threshold), None)
        if at is not None:
            given_up[tuple(texts[i][: at + 1])] = i
    uncertain = [h for h in found.hypotheses if h.finish_reason == "uncertain"]
    assert 0 < len(given_up) < n - 4 and len(uncertain) == len(given_up)
    for h in uncertain:
        i = given_up.pop(next(key for key in given_up if key == tuple(h.tokens[: len(key)])))
        assert h.tokens == texts[i][: len(h.tokens)] and h.score == 0.0
        assert "drafter" in settings or len(h.tokens) < most
    assert found.hypotheses[-len(uncertain) :] == uncertain
    assert sum(found.votes.values()) <= n - len(uncertain)


def test_all_texts_are_kept_where_the_first_ones_are_the_least_sure(ctx: Context) -> None:
    with Branch.start(ctx, STORY, temperature=0.0) as root:
        found = search.vote(root, first_word, 6, 30, keep=1e-6)
        whole = search.vote(root, first_word, 6, 30)
    assert [h.tokens for h in found.hypotheses] == [h.tokens for h in whole.hypotheses]
    assert found.votes == whole.votes
