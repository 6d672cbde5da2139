"""best_of_n: texts, their seeds and order. vote: answers, and the moment at which it is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from test_every_search import STORY, first_letter

import llamabranch as lb
from llamabranch import Branch, Context, search
from llamabranch.errors import LlamaBranchWarning
from llamabranch.sampling.noise import derive_seed

WARM = lb.SamplingParams(temperature=1.0, seed=5)


# -- best_of_n -------------------------------------------------------------------------------------


def alone(root: Branch, index: int, n: int, stop: Sequence[str] = ()) -> list[int]:
    """Return the tokens that text number ``index`` gets when nothing else is generated."""
    with root.fork() as branch:
        if index:
            branch.reseed(derive_seed(root.seed, index))
        return branch.generate(n, stop).finish().tokens


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": t} for t in (0.0, 0.4, 0.8)),
        {"temperature": 0.3, "repeat_penalty": 1.1, "grammar": 'root ::= " " [a-z ]+ "."'},
    ],
    ids=str,
)
def test_texts_are_those_of_their_seeds_alone(ctx: Context, settings: dict[str, Any]) -> None:
    """Penalties and grammars have a state."""
    stops: list[list[str]] = [[], ["."]]
    with Branch.start(ctx, STORY, seed=5, **settings) as root:
        for seed in (5, 6, 7):
            root.reseed(seed)
            for stop in stops:
                result = search.best_of_n(root, 6, 20, stop=stop)
                expected = [alone(root, i, 20, stop) for i in range(6)]
                assert sorted(h.tokens for h in result.hypotheses) == sorted(expected)
            for h in result.hypotheses:
                with root.fork() as branch:
                    branch.extend(h.tokens)
                    if h.finish_reason == "length":
                        assert h.logprob == pytest.approx(branch.log_likelihood(), abs=1e-3)
        given = search.best_of_n(root, 1, 20, seed=9).best
        root.reseed(9)
        assert given.tokens == alone(root, 0, 20)
        shown = repr(result)
        assert shown.startswith("<SearchResult 6 hypotheses, best -") and len(shown) < 100
        assert [h.tokens for h in search.best_of_n(root, 3, 0).hypotheses] == [[]] * 3


def test_a_reward_decides_the_order(ctx: Context) -> None:
    with Branch.start(ctx, STORY, temperature=0.8, seed=5) as root:
        by_length = search.best_of_n(root, 5, 20, reward=lambda text: -len(text))
        lengths = [len(h.text) for h in by_length.hypotheses]
        assert lengths == sorted(lengths)
        own = search.best_of_n(root, 5, 20).hypotheses
        assert [h.score for h in own] == sorted((h.score for h in own), reverse=True)
        for h in own:
            n = len(h.tokens) + (h.finish_reason == "stop")  # with its EOG token
            assert h.score == pytest.approx(h.logprob / n)


# -- answers ---------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[list[Any], dict[Any, int], str]] = {  # answers, votes, and what is warned of
    "equal numbers": (
        ["1", "1.00", "1,000", "1e3", "one", "1.00", None, " 1", 1000.0, "1,00"],
        {"1": 4, "1e3": 3, "one": 1, "1,00": 1},
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
    parsed, votes, message = GIVEN[name]
    answers: Iterator[Any] = iter(parsed)

    def answer(_: str) -> Any:
        next_answer = next(answers)
        if next_answer is KeyError:
            raise KeyError
        return next_answer

    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        with (
            pytest.warns(LlamaBranchWarning, match=message) if message else nullcontext() as warned
        ):
            result = search.vote(root, answer, len(parsed), 3)
        whole = search.best_of_n(root, len(parsed), 3)
    assert warned is None or len(warned) == 1
    assert sorted(h.text for h in result.hypotheses) == sorted(h.text for h in whole.hypotheses)
    assert result.votes == votes
    assert [type(key) for key in result.votes] == [type(key) for key in votes]
    shares = [n / len(parsed) for n in votes.values() for _ in range(n)]
    shares += [0.0] * (len(parsed) - len(shares))
    assert [h.score for h in result.hypotheses] == shares
    assert result.answer == next(iter(votes), None)


def test_ties_are_broken_by_the_seed_and_not_by_the_order(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0) as root:
        winners = set()
        for seed in range(12):
            asked = ["b", "a"]
            result = search.vote(root, lambda _: asked.pop(), 2, 1, seed=seed)  # noqa: B023
            winners.add(next(iter(result.votes)))
        assert winners == {"a", "b"}


# -- when it is decided ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no text has an answer")
@pytest.mark.parametrize(
    ("settings", "n_seeds"),
    [({"width": 1}, 24), ({"width": 3}, 24), ({}, 24), ({"width": 2}, 160)],
)
def test_the_lossless_stop_has_the_winner_of_the_whole_vote(
    ctx: Context, settings: dict[str, Any], n_seeds: int
) -> None:
    stopped = 0
    with Branch.start(ctx, "The", sampling=WARM) as root:
        for seed in range(n_seeds):
            n = 1 + seed % 8
            whole = search.vote(root, first_letter, n, 5, seed=seed, stop=["e"])
            result = search.vote(
                root, first_letter, n, 5, seed=seed, stop=["e"], confidence=1.0, **settings
            )
            assert result.answer == whole.answer
            for vote in (result, whole):
                assert first_letter(vote.text) == vote.answer
            known = {tuple(h.tokens): h for h in whole.hypotheses}
            for h in result.hypotheses:
                if h.finish_reason == "decided":
                    assert any(key[: len(h.tokens)] == tuple(h.tokens) for key in known)
                    assert h.score == 0.0
                else:
                    assert h.text == known[tuple(h.tokens)].text
            n_voted = sum(h.finish_reason != "decided" for h in result.hypotheses)
            assert sum(result.votes.values()) <= n_voted <= n
            assert len(result.hypotheses) <= n
            stopped += n_voted < n
        assert stopped >= n_seeds // 8


def test_unanimous_texts_decide_as_soon_as_they_can(ctx: Context) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:
        result = search.vote(root, lambda _: "same", 16, 6, confidence=1.0, width=1)
        reasons = Counter(h.finish_reason for h in result.hypotheses)
        assert result.votes == {"same": 9} and result.best.score == 1.0
        # Of 16: the seven others cannot change the result.
        assert reasons.total() - reasons["decided"] == 9
        wide = search.vote(root, lambda _: "same", 16, 6, confidence=1.0, width=7)
        assert [h.finish_reason for h in wide.hypotheses].count("decided") == 14 - 9


def test_texts_without_an_answer_count_as_done(ctx: Context) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:
        answers = iter([None, None, "a", None, "a", "b"])
        result = search.vote(root, lambda _: next(answers), 6, 3, confidence=1.0, width=1)
    assert result.votes == {"a": 2} and next(answers) == "b"
