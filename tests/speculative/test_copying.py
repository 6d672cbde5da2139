"""The search for repeats compared with brute force; what copies and chains propose.

`test_drafted_text` tests the texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from llamabranch import Branch, Context, Model
from llamabranch.errors import SequencesExhaustedError
from llamabranch.generation.drafter import FixedLength
from llamabranch.speculative import Draft, DraftState, ModelDrafter
from llamabranch.speculative.combined import ChainDrafter
from llamabranch.speculative.copying import (
    Match,
    SuffixDrafter,
    doubling,
    longest_match,
    packed,
)

FEW = (0, 1, 1 << 8)  # the bytes of a 0 are there between a 1 and a 256, too


def chunk(source: random.Random, most: int = 20, alphabet: Sequence[int] = FEW) -> list[int]:
    """Return a few random tokens with few values, so that there are many repeats and long matches."""
    return [source.choice(alphabet) for _ in range(source.randint(0, most))]


def common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def brute_longest(tokens: Sequence[int], shortest: int, longest: int) -> tuple[int, list[int]]:
    """Return the longest match and where it is followed, the newest place first."""
    lengths = {n: min(common_suffix(tokens[:n], tokens), longest) for n in range(1, len(tokens))}
    best = max(lengths.values(), default=0)
    if best < shortest:
        return 0, []
    return best, [n for n in sorted(lengths, reverse=True) if lengths[n] == best]


def longest(tokens: Sequence[int], lengths: Sequence[int], most: int) -> Match | None:
    return longest_match(tokens, packed(tokens), lengths, most)


@pytest.mark.parametrize("lengths", [(1, 2, 3), (2, 3, 4), (2, 4, 8, 16), (1,), (3,), (1, 2, 3, 6)])
def test_longest_equals_brute_force(lengths: tuple[int, ...]) -> None:
    for seed in range(300):
        source = random.Random(seed)
        tokens = [token for _ in range(source.randint(0, 8)) for token in chunk(source)]
        best, places = brute_longest(tokens, lengths[0], lengths[-1])
        match = longest(tokens, lengths, 1000)
        if not best:
            assert match is None
            continue
        assert match == (best, places)
        few = longest(tokens, lengths, 2)  # the newest place after the longest indexed n-gram
        assert few is not None
        assert lengths[0] <= few.length <= best
        assert 1 <= len(few.places) <= 2
        if few.length == best:
            assert {*few.places} <= {*places}
        if lengths == (1, 2, 3):  # without gaps between the lengths, fewer places are the newest
            for most in (1, 2, 3):
                assert longest(tokens, lengths, most) == (best, places[:most])


@pytest.mark.parametrize(
    ("tokens", "expected", "probability"),
    [
        ([9, 5, 9, 6, 9, 5, 9, 7, 9], [5], 2 / (4 + 1)),  # the most frequent one
        ([9, 5, 9, 6, 9], [6], 1 / (2 + 1)),  # the newest place decides a tie
        ([8, 9, 1, 2, 9, 1, 2, 9], [1, 2, 9, 1, 2, 9, 1, 2], 2 / (2 + 1)),  # a loop is continued
    ],
)
def test_what_follows_is_guessed(
    tokens: list[int], expected: list[int], probability: float
) -> None:
    match = longest(tokens, (1,), 100)
    assert match is not None
    guess = match.follow(tokens, len(expected), 0.0)
    assert [token for token, _ in guess] == expected
    assert guess[0][1] == probability


def test_floor_ends_a_guess_and_longer_matches_are_trusted_more() -> None:
    tokens = [9, 1, 2]
    match = Match(1, [1])
    reach = [1 / 2, 1 / 2 * 2 / 3]
    assert match.follow(tokens, 9, reach[0]) == [(1, 1 / 2)]
    assert [token for token, _ in match.follow(tokens, 9, reach[1])] == [1, 2]
    assert match.follow(tokens, 9, 0.51) == []
    assert doubling(3, 16) == (3, 6, 12, 16) and doubling(5, 5) == (5,)
    probabilities = [Match(m, match.places).follow(tokens, 1, 0.0)[0][1] for m in (1, 2, 8)]
    assert probabilities == sorted(probabilities)
    assert probabilities[0] == 0.5


# -- the drafter -------------------------------------------------------------------------------------


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


def test_a_state_that_is_cut_and_forked_proposes_what_a_new_one_does(branch: Branch) -> None:
    """States that grow, shrink and fork, each beside a plain list."""
    drafter = SuffixDrafter(min_match=1)
    for seed in range(20):
        source = random.Random(seed)
        texts: list[tuple[DraftState, list[int]]] = [(drafter.start(branch.sequence, "seeded"), [])]
        for _ in range(25):
            state, known = source.choice(texts)
            deed = source.choice(["extend", "extend", "observe", "fork"])
            if deed == "extend":
                known += chunk(source, alphabet=(3, 4, 1 << 8))
            elif deed == "observe":
                n = source.randint(0, len(known))
                state.observe(n)
                del known[n:]
            else:
                texts.append((state.fork(branch.sequence), list(known)))
            for old, tokens in (*texts[-2:], texts[0], (state, known)):
                new = drafter.start(branch.sequence, "seeded")
                drafts = propose(old, tokens), propose(new, tokens)
                assert drafts[0].tokens == drafts[1].tokens
                assert drafts[0].entropies == drafts[1].entropies


# -- chain -----------------------------------------------------------------------------------------


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
