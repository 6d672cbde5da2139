"""Drafters that copy: what they propose, and what texts share. `test_drafted_text` tests their texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest

from llamabranch import Branch, Context, Model, SamplingParams
from llamabranch.errors import SequencesExhaustedError
from llamabranch.generation.drafter import DraftLength, FixedLength, NullState
from llamabranch.speculative import (
    Draft,
    Drafter,
    DraftState,
    ModelDrafter,
    SpeculativeConfig,
    Speculator,
    Text,
)
from llamabranch.speculative.combined import ChainDrafter
from llamabranch.speculative.copying import PromptLookupDrafter, SuffixDrafter


@pytest.fixture
def branch(ctx: Context) -> Iterator[Branch]:
    with Branch.start(ctx, [5], temperature=0.0) as started:
        yield started


class Refuses(FixedLength):
    """A draft-length controller for which drafting never pays."""

    def consider(self, drafter: str) -> bool:
        return False


def propose(line: DraftState, tokens: Sequence[int], k: int = 8) -> Draft:
    return line.propose(tokens, FixedLength(k), k)


def lookup(most: int, least: int) -> Drafter:
    return PromptLookupDrafter(max_ngram=most, min_ngram=least)


EITHER = pytest.mark.parametrize(
    "make", [PromptLookupDrafter, lambda: SuffixDrafter(shared_tokens=0)]
)


# -- any of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "tokens", "k", "expected"),
    [
        (lookup(3, 2), [20, 21, 30, 20, 21, 40, 41, 20, 21], 2, [40, 41]),  # the newest occurrence
        (lookup(3, 1), [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 1, [50]),  # after the longest suffix
        (lookup(3, 2), [1, 2, 3, 4, 3], 8, []),  # no evidence
        (lookup(3, 2), [1, 2, 3, 4, 3, 4], 1, [3]),
        # a match of m tokens allows a draft of m
        *(
            (
                SuffixDrafter(),
                [*range(100, 130), 0, *range(100, 100 + m)],
                100,
                list(range(100 + m, 100 + 2 * m)),
            )
            for m in (2, 3, 5)
        ),
    ],
)
def test_what_followed_the_same_tokens_is_proposed(
    drafter: Drafter, tokens: list[int], k: int, expected: list[int], branch: Branch
) -> None:
    draft = propose(drafter.start(branch.sequence, "seeded"), tokens, k)
    assert (draft.tokens, draft.n_decodes) == (expected, 0)
    assert draft.seconds > 0


def test_surprisal_takes_the_place_of_the_entropy(branch: Branch) -> None:
    draft = propose(lookup(2, 2).start(branch.sequence, "seeded"), [1, 2, 3, 1, 2], k=3)
    assert draft.entropies == pytest.approx([-math.log(m / (m + 1)) for m in (2, 3, 4)])
    state = lookup(2, 1).start(branch.sequence, "seeded")
    tokens = [1, 2, 3, 1]  # one token of evidence: probability 1/2, 0.69 nats
    assert state.propose(tokens, FixedLength(4, 0.6), 4).tokens == []
    assert len(state.propose(tokens, FixedLength(4, 0.7), 4).tokens) == 4


@EITHER
def test_limit_refusal_and_ends_hold(branch: Branch, make: Callable[[], Drafter]) -> None:
    state = make().start(branch.sequence, "seeded")
    tokens = [2, 3, 4, 5] * 4
    assert state.propose(tokens, FixedLength(8), 0).tokens == []
    assert len(state.propose(tokens, FixedLength(8), 3).tokens) == 3
    assert len(state.propose(tokens, FixedLength(2), 8).tokens) == 2
    assert state.propose(tokens, Refuses(8), 8).tokens == []
    end = min(branch.ctx.model.eog_tokens)
    state = make().start(branch.sequence, "seeded")
    assert propose(state, [20, 21, 22, end, 30, 31, 20, 21, 22]).tokens == [end]


@EITHER
def test_states_are_rewound_and_forked_as_their_texts(
    branch: Branch, make: Callable[[], Drafter]
) -> None:
    parent, fresh = (make().start(branch.sequence, "seeded") for _ in range(2))
    tokens = [1, 2, 3, 4, 1, 2, 8, 9]
    propose(parent, tokens)
    parent.observe(6)
    parent.observe(6)
    past = tokens[:6]
    assert propose(parent, past).tokens == propose(fresh, past).tokens != []
    child = parent.fork(branch.sequence)
    assert propose(child, past).tokens == propose(parent, past).tokens
    child_text, parent_text = [*past, 7, 1, 2], [*past, 8, 1, 2]
    assert propose(child, child_text).tokens[0] == 7
    assert propose(parent, parent_text).tokens[0] == 8
    parent.close()
    parent.close()
    assert propose(child, child_text).tokens[0] == 7


# -- suffix ----------------------------------------------------------------------------------------


def test_state_learns_from_what_others_say_of_the_same_model(
    branch: Branch, draft_ctx: Context
) -> None:
    drafter = SuffixDrafter()
    tale = list(range(200, 212))
    first = drafter.start(branch.sequence, "seeded")
    propose(first, [5, *tale])  # the line starts at position 1: all of this is said
    first.close()
    second = drafter.start(branch.sequence, "seeded")
    assert propose(second, [5, *tale[:4]]).tokens == tale[4:9]  # five tokens match
    assert propose(SuffixDrafter().start(branch.sequence, "seeded"), [5, *tale[:4]]).tokens == []
    with Branch.start(draft_ctx, [5]) as other:
        assert propose(drafter.start(other.sequence, "seeded"), [5, *tale[:4]]).tokens == []


def test_texts_that_are_read_later_are_not_shared(ctx: Context) -> None:
    drafter = SuffixDrafter()
    prompt, reply, answer = list(range(200, 212)), [70, 71, 72, 73], list(range(300, 312))
    with Branch.start(ctx, prompt[:4]) as branch, Branch.start(ctx, prompt) as other:
        line = drafter.start(branch.sequence, "seeded")
        propose(line, [*prompt[:4], *reply])
        # Copied for another prompt with the same beginning, as in an engine.
        twin = line.fork(other.sequence)
        twin.observe(4)
        propose(twin, [*prompt, 90, 91, 92])
        branch.extend(reply)
        branch.append(answer)
        propose(line, [*branch.tokens, 80, 81, 82])
        new = drafter.start(other.sequence, "seeded")
        assert propose(new, prompt[:9]).tokens == propose(new, answer[:4]).tokens == []
        for before, after in (
            (prompt[-2:], [90, 91]), (answer[-2:], [80, 81]), (reply[:2], reply[2:]),
        ):  # fmt: skip
            assert propose(drafter.start(other.sequence, "seeded"), before).tokens == after


def test_what_others_say_and_what_was_rewound_is_evidence(branch: Branch) -> None:
    line = SuffixDrafter().start(branch.sequence, "seeded")
    propose(line, [5, 6, 70, 71, 72])
    line.observe(3)
    assert propose(line, [5, 6, 70]).tokens == [71, 72]
    # The accepted text is copied first.
    assert propose(line, [5, 6, 70, 90, 6, 70]).tokens == [90, 6]
    parent = SuffixDrafter().start(branch.sequence, "seeded")
    propose(parent, [5, 6])
    a, b = parent.fork(branch.sequence), parent.fork(branch.sequence)  # siblings that both run
    propose(a, [5, 6, 70, 71, 72, 73])
    assert propose(b, [5, 6, 80, 70, 71]).tokens == [72, 73]
    drafter = SuffixDrafter()
    drafter.floor = 0.0  # improbable tokens are drafted too
    propose(drafter.start(branch.sequence, "seeded"), [5, *range(40, 48)])
    for tokens, better in (
        ([5, 42, 43, 9, *range(40, 44)], [44, 45, 46, 47]),
        ([1, 2, 9, 1, 2], [9, 1]),
    ):
        assert propose(drafter.start(branch.sequence, "seeded"), tokens).tokens == better


# -- chain -----------------------------------------------------------------------------------------


class Script(NullState, Drafter):
    """A drafter and its own state: it proposes given tokens and remembers what it observes."""

    name = "script"

    def __init__(self, says: Sequence[int]) -> None:
        self.says = list(says)
        self.log: list[tuple[str, int]] = []

    def check(self, target: Model) -> None:
        self.log.append(("check", 0))

    def start(self, target: Text, rule: str) -> DraftState:
        return self

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        self.log.append(("propose", len(tokens)))
        return Draft(self.says[:limit], seconds=1.0, n_decodes=1)

    def observe(self, n_tokens: int) -> None:
        self.log.append(("observe", n_tokens))

    def close(self) -> None:
        self.log.append(("close", 0))


def test_chain_asks_in_order_and_tells_everyone(branch: Branch) -> None:
    silent, first, last = Script([]), Script([7]), Script([8])
    chain = ChainDrafter([silent, first, last])
    assert chain.name == "script+script+script"
    chain.check(branch.ctx.model)
    line = chain.start(branch.sequence, "seeded")
    draft = propose(line, [5, 6])
    line.observe(3)
    line.close()
    assert draft == Draft([7], seconds=2.0, n_decodes=2)
    assert silent.log == [("check", 0), ("propose", 2), ("observe", 3), ("close", 0)]
    assert first.log == silent.log
    assert last.log == [("check", 0), ("observe", 3), ("close", 0)]


def test_model_behind_ngrams_catches_up_in_one_decode(ctx: Context, draft_ctx: Context) -> None:
    tokens = [5, 6, 7]
    with Branch.start(ctx, tokens, temperature=0.0) as branch:
        chain = ChainDrafter([PromptLookupDrafter(), ModelDrafter(draft_ctx)])
        line = chain.start(branch.sequence, "seeded")
        # The prompt, without the last draft's decode. Then a copy, and after it the missed tokens.
        for added, k, n_decodes in (([], 1, 1), ([5, 6, 7], 4, 0), ([30, 31, 32, 33], 1, 1)):
            tokens += added
            line.observe(len(tokens))
            assert propose(line, tokens, k).n_decodes == n_decodes
        line.close()


def test_failed_fork_leaves_nothing_open(ctx: Context, draft: Model) -> None:
    with (
        Context(draft, n_ctx=256, n_seq_max=4, n_threads=1) as small,
        Branch.start(ctx, [5]) as branch,
    ):
        line = ChainDrafter([ModelDrafter(small)] * 3).start(branch.sequence, "seeded")
        with branch.fork() as other, pytest.raises(SequencesExhaustedError):
            line.fork(other.sequence)  # three of four sequences are taken: the second fork fails
        line.close()
        line.close()
        assert small.n_seq_free == 4


# -- in a text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [PromptLookupDrafter, SuffixDrafter])
def test_repetition_and_a_second_telling_are_exploited(
    ctx: Context, make: Callable[[], Drafter]
) -> None:
    speculator = Speculator(ctx, make(), SpeculativeConfig(draft_k=8))
    repetitive = "The cat sat on the mat. The dog sat on the log. " * 3 + "The cat sat"
    greedy, warm = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)
    stats = speculator.generate(repetitive, max_tokens=48, sampling=greedy).finish().stats
    assert stats.num_accepted_tokens > 0
    assert stats.target_forward_passes < 48
    first, second = (
        speculator.generate("Once upon a time", max_tokens=64, sampling=warm).finish()
        for _ in range(2)
    )
    assert first.tokens == second.tokens
    is_shared = second.stats.target_forward_passes < 0.5 * first.stats.target_forward_passes
    assert is_shared == (make is SuffixDrafter)
