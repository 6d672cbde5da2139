"""What drafters that copy and chains propose. `test_drafted_text` tests their texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from llamabranch import Branch, Context, Model
from llamabranch.errors import SequencesExhaustedError
from llamabranch.generation.drafter import DraftLength, FixedLength, NullState
from llamabranch.speculative import Draft, Drafter, DraftState, ModelDrafter, Text
from llamabranch.speculative.combined import ChainDrafter
from llamabranch.speculative.copying import SuffixDrafter


@pytest.fixture
def branch(ctx: Context) -> Iterator[Branch]:
    with Branch.start(ctx, [5], temperature=0.0) as started:
        yield started


def propose(line: DraftState, tokens: Sequence[int], k: int = 8) -> Draft:
    return line.propose(tokens, FixedLength(k), k)


@pytest.mark.parametrize(
    ("tokens", "k", "expected"),
    [
        ([20, 21, 30, 20, 21, 40, 41, 20, 21], 2, [40, 41]),  # the newest of two
        ([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3], 1, [50]),  # after the longest suffix
        ([1, 2, 3, 4, 3], 8, []),  # no evidence
        ([1, 2, 3, 4, 3, 4], 1, [3]),
        # a match of m tokens allows a draft of m
        *(
            ([*range(100, 130), 0, *range(100, 100 + m)], 100, list(range(100 + m, 100 + 2 * m)))
            for m in (2, 3, 5)
        ),
    ],
)
def test_what_followed_the_same_tokens_is_proposed(
    tokens: list[int], k: int, expected: list[int], branch: Branch
) -> None:
    draft = propose(SuffixDrafter().start(branch.sequence, "seeded"), tokens, k)
    assert (draft.tokens, draft.n_decodes) == (expected, 0)
    assert draft.seconds > 0


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
        chain = ChainDrafter([SuffixDrafter(), ModelDrafter(draft_ctx)])
        line = chain.start(branch.sequence, "seeded")
        # The prompt, without the last draft's decode. Then a copy, and after it the missed tokens.
        for added, k, n_decodes in (([], 1, 1), ([5, 6, 7], 4, 0), ([30, 31, 32, 33], 1, 1)):
            tokens += added
            line.observe(len(tokens))
            assert propose(line, tokens, k).n_decodes == n_decodes
        line.close()


def test_failed_fork_leaves_nothing_open(ctx: Context, draft: Model) -> None:
    with (
        Context(draft, n_ctx=256, n_seq_max=4, n_threads=1, exact=True) as small,
        Branch.start(ctx, [5]) as branch,
    ):
        line = ChainDrafter([ModelDrafter(small)] * 3).start(branch.sequence, "seeded")
        with branch.fork() as other, pytest.raises(SequencesExhaustedError):
            line.fork(other.sequence)  # three of four sequences are taken: the second fork fails
        line.close()
        line.close()
        assert small.n_seq_free == 4
