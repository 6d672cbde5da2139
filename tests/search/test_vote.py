"""vote: the answers, their forms, and the moment at which a vote is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from math import comb
from statistics import fmean
from typing import Any

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, SuffixDrafter, search
from llamabranch.errors import ConfigError, LlamaBranchWarning
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


def test_equal_numbers_are_one_answer(ctx: Context) -> None:
    given: list[Any] = ["1", "1.00", "1,000", "1e3", "one", "1.00", None, " 1", 1000.0, "1,00"]
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        answers = iter(given)
        found = search.vote(root, lambda _: next(answers), len(given), 2)
    assert found.votes == {"1.00": 4, "1e3": 3, "one": 1, "1,00": 1}
    assert found.answer == "1.00"
    assert found.answer_forms["1.00"] == {"1": 1, "1.00": 2, " 1": 1}
    assert found.answer_forms["1e3"] == {"1,000": 1, "1e3": 1, "1000.0": 1}
    assert found.best.score == 4 / len(given)
    assert found.as_dict()["answer_forms"] == found.answer_forms


def test_adaptive_votes_stop_at_agreement(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        agreed = search.vote(root, lambda text: "same", 16, 4, adaptive=True)
        assert len(agreed.hypotheses) == 2
        split = search.vote(root, lambda text: text, 16, 12, adaptive=True)
        assert len(split.hypotheses) == 16
        whole = search.vote(root, lambda text: text, 16, 12)
        assert sorted(h.tokens for h in split.hypotheses) == sorted(
            h.tokens for h in whole.hypotheses
        )


def test_ties_are_broken_by_the_seed_and_not_by_the_order(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0) as root:
        winners = set()
        for seed in range(12):
            asked = ["b", "a"]
            found = search.vote(root, lambda _: asked.pop(), 2, 1, seed=seed)  # noqa: B023
            winners.add(next(iter(found.votes)))
        assert winners == {"a", "b"}


def test_texts_without_an_answer_do_not_vote(ctx: Context) -> None:
    with (
        Branch.start(ctx, "The", temperature=1.0, seed=2) as root,
        pytest.warns(LlamaBranchWarning, match="no text has an answer"),
    ):
        found = search.vote(root, lambda text: None, 3, 3)
    assert not found.votes and found.answer is None
    assert [h.score for h in found.hypotheses] == [0.0] * 3


def test_answers_are_what_the_parser_returned(ctx: Context) -> None:
    for given in ([4, 4, 5], [True, True, False], [2.5, 2.5, 1.0]):
        with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
            answers: Iterator[Any] = iter(given)
            found = search.vote(root, lambda _: next(answers), 3, 3)  # noqa: B023
        assert found.answer is given[0] and type(found.answer) is type(given[0])
        assert found.votes == {given[0]: 2, given[2]: 1}
        assert found.as_dict()["votes"] == {str(given[0]): 2, str(given[2]): 1}


def test_parser_that_raises_loses_no_text(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        steps = iter([1, 0, 2, 0, 1])
        with pytest.warns(LlamaBranchWarning, match="2 of 5 texts, .*ZeroDivisionError") as told:
            found = search.vote(root, lambda _: 10 // next(steps), 5, 4)
        assert len(told) == 1
        assert [h.score for h in found.hypotheses] == [0.4, 0.4, 0.2, 0.0, 0.0]
        whole = search.vote(root, lambda _: 1, 5, 4)
    assert found.answer == 10 and found.votes == {10: 2, 5: 1}
    assert sorted(h.text for h in found.hypotheses) == sorted(h.text for h in whole.hypotheses)


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
@pytest.mark.parametrize("width", [1, 3, None])
def test_the_lossless_stop_has_the_winner_of_the_whole_vote(
    ctx: Context, width: int | None
) -> None:
    stopped = 0
    with Branch.start(ctx, "The", sampling=WARM) as root:
        for seed in range(24):
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
        assert stopped >= 3
        assert ctx.n_seq_free == 7


@pytest.mark.filterwarnings("ignore:no text has an answer")
def test_the_lossless_stop_for_two_hundred_seeds(ctx: Context) -> None:
    n_heard = 0
    with Branch.start(ctx, "The", sampling=WARM) as root:
        for seed in range(200):
            n = 1 + seed % 8
            whole = search.vote(root, first_letter, n, 2, seed=seed)
            found = search.vote(root, first_letter, n, 2, seed=seed, confidence=1.0, width=2)
            assert found.answer == whole.answer
            n_heard += sum(h.finish_reason != "decided" for h in found.hypotheses)
    assert n_heard < 200 * 4.5


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


@pytest.mark.parametrize(
    "wrong",
    [
        {"agreement": 0.0},
        {"agreement": 1.1},
        {"answer": "word"},
        {"n": 0},
        {"confidence": 0.5},
        {"confidence": 1.1},
        {"confidence": float("nan")},
        {"confidence": "1"},
        {"confidence": True},
        {"confidence": 1.0, "adaptive": True},
        {"keep": 0.0},
        {"keep": 1.5},
        {"keep": "half"},
        {"keep": 0.5, "adaptive": True},
        {"keep": 0.5, "confidence": 1.0},
        {"width": 0},
        {"width": 1.5},
    ],
    ids=str,
)
def test_wrong_limits_are_refused_before_anything_happens(
    ctx: Context, wrong: dict[str, Any]
) -> None:
    with Branch.start(ctx, "The", sampling=WARM) as root:
        n_decodes = ctx.decoder.n_decodes
        given: dict[str, Any] = {"answer": first_letter, "n": 4, "max_tokens": 3, **wrong}
        with pytest.raises(ConfigError):
            search.vote(root, **given)
        assert ctx.decoder.n_decodes == n_decodes and ctx.n_seq_free == 7


@pytest.mark.smollm2
def test_early_votes_of_a_real_model_generate_fewer_tokens() -> None:
    def starting_word(text: str) -> str | None:
        return next(iter(text.split()), None)

    n_whole = n_early = 0
    with lb.load("smollm2-135m:Q8_0", n_ctx=2048, n_seq_max=9) as ctx:
        for prompt in ("The capital of France is", "Two and two make", "The sun rises in the"):
            with Branch.start(ctx, prompt, temperature=0.8, seed=1) as root:
                whole = search.vote(root, starting_word, 8, 16)
                early = search.vote(root, starting_word, 8, 16, confidence=1.0, width=2)
                assert early.answer == whole.answer
                n_whole += whole.stats.tokens_decoded
                n_early += early.stats.tokens_decoded
    assert n_early < n_whole


def test_a_vote_of_texts_that_share_draws(ctx: Context) -> None:
    with Branch.start(ctx, "The", temperature=1.0, seed=2) as root:
        found = search.vote(root, first_word, 8, 4, entropy=1e9)
        assert len({tuple(h.tokens) for h in found.hypotheses}) == 1
        assert search.vote(root, first_word, 8, 4, entropy=1e9, confidence=1.0).answer
        with pytest.raises(ConfigError, match="independent"):
            search.vote(root, first_word, 8, 4, entropy=0.5, confidence=0.95)


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
    assert ctx.n_seq_free == 8


def test_all_texts_are_kept_where_the_first_ones_are_the_least_sure(ctx: Context) -> None:
    with Branch.start(ctx, STORY, temperature=0.0) as root:
        found = search.vote(root, first_word, 6, 30, keep=1e-6)
        whole = search.vote(root, first_word, 6, 30)
    assert [h.tokens for h in found.hypotheses] == [h.tokens for h in whole.hypotheses]
    assert found.votes == whole.votes
