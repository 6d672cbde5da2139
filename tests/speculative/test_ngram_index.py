"""The token indexes against brute force: random streams, rewinds, forks, forgetting."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamabranch.speculative.copying import (
    Match,
    Place,
    SharedIndex,
    TokenIndex,
    doubling,
)

DETERMINISTIC = settings(derandomize=True, deadline=None, database=None, max_examples=60)
TOKENS = st.lists(st.integers(0, 2), max_size=40)  # three letters: many repeats, long matches


def chunk(seed: int, n: int, alphabet: int) -> list[int]:
    """Return n random tokens; hypothesis alone would mostly think of very short lists."""
    source = random.Random(seed)
    return [source.randrange(alphabet) for _ in range(n)]


CHUNKS = st.builds(chunk, st.integers(0, 999), st.integers(1, 20), st.integers(2, 3))


def common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def brute_longest(
    sequences: Sequence[Sequence[int]], tokens: Sequence[int], shortest: int, longest: int
) -> tuple[int, set[tuple[int, int]]]:
    """Return the longest match and where it is followed: (which sequence, position)."""
    best = 0
    places: set[tuple[int, int]] = set()
    for s, sequence in enumerate(sequences):
        for position in range(1, len(sequence)):
            m = min(common_suffix(sequence[:position], tokens), longest)
            if m >= shortest and m >= best:
                places = {*places, (s, position)} if m == best else {(s, position)}
                best = m
    return best, places


def assert_same(index: TokenIndex, tokens: list[int], shortest: int, longest: int) -> None:
    assert list(index.tokens) == tokens
    assert len(index) == len(tokens)
    best, places = brute_longest([tokens], tokens, shortest, longest)
    match = index.longest(1000)
    if not best:
        assert match is None
        return
    assert match is not None
    assert match.length == best
    newest_first = sorted((position for _, position in places), reverse=True)
    assert [place.position for place in match.places] == newest_first
    few = index.longest(2)  # the newest of those that follow the longest n-gram indexed
    assert few is not None
    assert shortest <= few.length <= best
    assert 1 <= len(few.places) <= 2
    if few.length == best:
        assert {place.position for place in few.places} <= set(newest_first)


# -- one line --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1, 2, 3), (2, 3, 4), (2, 4, 8, 16), (1,), (3,), (1, 2, 3, 6)])
@given(tokens=TOKENS)
@DETERMINISTIC
def test_longest_equals_brute_force(lengths: tuple[int, ...], tokens: list[int]) -> None:
    index = TokenIndex(lengths)
    for n, token in enumerate(tokens):
        index.extend([token])
        assert_same(index, tokens[: n + 1], lengths[0], lengths[-1])


@given(chunks=st.lists(CHUNKS, max_size=6), most=st.integers(1, 3))
@DETERMINISTIC
def test_places_are_the_newest(chunks: list[list[int]], most: int) -> None:
    index = TokenIndex((1, 2, 3))
    for tokens in chunks:
        index.extend(tokens)
        few, all_of_them = index.longest(most), index.longest(1000)
        assert (few is None) == (all_of_them is None)
        if few is not None and all_of_them is not None:
            assert few == Match(all_of_them.length, all_of_them.places[:most])


class Forks(RuleBasedStateMachine):
    """Indexes that grow, shrink and fork, each beside a plain list."""

    lengths = (2, 4, 8)

    @initialize()
    def begin(self) -> None:
        self.lines = [(TokenIndex(self.lengths), [0, 1])]
        self.lines[0][0].extend([0, 1])

    @rule(which=st.integers(0, 99), tokens=CHUNKS)
    def extend(self, which: int, tokens: list[int]) -> None:
        index, known = self.lines[which % len(self.lines)]
        index.extend(tokens)
        known += tokens

    @rule(which=st.integers(0, 99), share=st.floats(0, 1))
    def rewind(self, which: int, share: float) -> None:
        index, known = self.lines[which % len(self.lines)]
        n = round(share * len(known))
        index.rewind(n)
        del known[n:]

    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        index, known = self.lines[which % len(self.lines)]
        self.lines.append((index.fork(), list(known)))

    @invariant()
    def each_equals_brute_force(self) -> None:
        for index, known in self.lines[-3:] + self.lines[:1]:
            assert_same(index, known, self.lengths[0], self.lengths[-1])


Forks.TestCase.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=40, stateful_step_count=25
)
TestForks = Forks.TestCase


def test_rewound_line_is_as_if_never_extended() -> None:
    index, fresh = TokenIndex((1, 2)), TokenIndex((1, 2))
    index.extend([1, 2, 3, 1, 2, 4, 1, 2])
    index.rewind(5)
    fresh.extend([1, 2, 3, 1, 2])
    assert list(index.tokens) == list(fresh.tokens)
    assert index.longest(9) == fresh.longest(9)


def test_forks_are_small() -> None:
    index = TokenIndex((2, 4, 8))
    source = random.Random(7)
    index.extend(source.randrange(1000) for _ in range(4000))
    tracemalloc.start()
    twins = [index.fork() for _ in range(10)]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(twins) == 10
    assert size < 10 * (8 * 4000 + 4 * 4000 + 4000)  # tokens, bytes, and next to nothing else


def test_tokens_are_not_found_between_two_others() -> None:
    index = TokenIndex((1,))
    index.extend([1 << 8, 0, 256 << 16, 1, 5, 1])  # the bytes of a 1 are there in the first ones
    match = index.longest(9)
    assert match is not None
    assert [place.position for place in match.places] == [4]


# -- following -------------------------------------------------------------------------------------


def test_most_frequent_token_is_followed() -> None:
    index = TokenIndex((1,))
    index.extend([9, 5, 9, 6, 9, 5, 9, 7, 9])
    match = index.longest(100)
    assert match is not None
    guess = match.follow(index.tokens, 1, 0.0)
    assert guess.tokens == [5]
    assert guess.probabilities == [2 / (4 + 1)]


def test_newest_place_decides_a_tie() -> None:
    index = TokenIndex((1,))
    index.extend([9, 5, 9, 6, 9])
    match = index.longest(100)
    assert match is not None
    assert match.follow(index.tokens, 1, 0.0).tokens == [6]


def test_loop_is_continued_past_its_end() -> None:
    index = TokenIndex((1, 2, 3))
    index.extend([8, 1, 2, 3, 1, 2, 3])
    match = index.longest(1)
    assert match is not None
    assert match.follow(index.tokens, 8, 0.0).tokens == [1, 2, 3, 1, 2, 3, 1, 2]


def test_floor_ends_a_guess() -> None:
    tokens = [9, 1, 2]
    match = Match(1, [Place(tokens, 1)])
    reach = [1 / 2, 1 / 2 * 2 / 3]
    assert match.follow(tokens, 9, reach[0]).tokens == [1]
    assert match.follow(tokens, 9, reach[1]).tokens == [1, 2]
    assert match.follow(tokens, 9, 0.51).tokens == []


def test_longer_match_is_trusted_more() -> None:
    tokens = [1, 2, 3, 4]
    probabilities = [
        Match(m, [Place(tokens, 1)]).follow(tokens, 1, 0.0).probabilities[0] for m in (1, 2, 8)
    ]
    assert probabilities == sorted(probabilities)
    assert probabilities[0] == 0.5


def brute_follow(
    sequences: Sequence[list[int]], places: Sequence[tuple[int, int]], m: int, most: int
) -> tuple[list[int], list[float]]:
    """Follow the most frequent child, ties to the first place, by counting from scratch."""
    said: list[int] = []
    chances: list[float] = []
    while len(said) < most:
        nexts = []
        for s, at in places:
            rest = sequences[s][at:]
            if s == 0:  # the line itself goes on into what is being said
                rest = (sequences[0] + said)[at:]
            if len(rest) > len(said) and rest[: len(said)] == said:
                nexts.append(rest[len(said)])
        if not nexts:
            break
        token = max(nexts, key=lambda t: (nexts.count(t), -nexts.index(t)))
        chances.append(nexts.count(token) / (len(nexts) + 1 / (m + len(said))))
        said.append(token)
    return said, chances


@given(tokens=TOKENS, other=TOKENS, most=st.integers(0, 12))
@DETERMINISTIC
def test_follow_equals_counting_from_scratch(
    tokens: list[int], other: list[int], most: int
) -> None:
    best, found = brute_longest([tokens, other], tokens, 1, 8)
    if best:
        places = sorted(found)
        sequences = [tokens, other]
        match = Match(best, [Place(sequences[s], at) for s, at in places])
        guess = match.follow(tokens, most, 0.0)
        assert (guess.tokens, guess.probabilities) == brute_follow(sequences, places, best, most)
        products = [math.prod(guess.probabilities[: j + 1]) for j in range(len(guess.tokens))]
        assert guess.expected == pytest.approx(sum(products))


def test_doubling_ends_at_the_longest() -> None:
    assert doubling(2, 16) == (2, 4, 8, 16)
    assert doubling(3, 16) == (3, 6, 12, 16)
    assert doubling(5, 5) == (5,)


# -- many lines ------------------------------------------------------------------------------------


@given(said=st.lists(TOKENS, max_size=4), tokens=TOKENS)
@DETERMINISTIC
def test_shared_index_equals_brute_force(said: list[list[int]], tokens: list[int]) -> None:
    shared = SharedIndex((2, 4, 8), max_tokens=4096, most=1000)
    for line in said:
        shared.write(None, line, 0)
    best, places = brute_longest(said, tokens, 2, 8)
    match = shared.longest(tokens)
    assert (match.length if match else 0) == best
    assert len(match.places if match else ()) == len(places)
    if match:
        assert all(common_suffix(s[:at], tokens) >= best for s, at in match.places)


def test_lines_written_by_turns_stay_apart() -> None:
    shared = SharedIndex((2,), max_tokens=64, most=8)
    a = b = None
    for n in range(1, 6):
        a = shared.write(a, [1, 2, 3, 4, 5][:n], n - 1)
        b = shared.write(b, [6, 7, 8, 9, 0][:n], n - 1)
    match = shared.longest([1, 2])
    assert match is not None
    assert match.follow([1, 2], 9, 0.0).tokens == [3, 4, 5]
    assert shared.longest([1, 2], skip=a) is None
    assert shared.longest([5, 6]) is None


def n_stored(shared: SharedIndex) -> int:
    """Return how many tokens its segments hold in memory, context and forgotten tokens included."""
    return sum(len(segment.text) for segment in shared._segments)


def test_what_a_branch_generated_before_is_context() -> None:
    shared = SharedIndex((2,), max_tokens=64, most=8)
    shared.write(None, [1, 2, 3, 4], 2)  # only [3, 4] is said
    match = shared.longest([1, 2])
    assert match is not None
    assert match.follow([1, 2], 9, 0.0).tokens == [3, 4]
    assert shared.longest([0, 1]) is None
    assert (shared._n_tokens, n_stored(shared)) == (2, 4)


@pytest.mark.parametrize("alphabet", [1, 3, 500])
def test_shared_memory_is_bounded(alphabet: int) -> None:
    source = random.Random(alphabet)
    shared = SharedIndex((2, 4, 8), max_tokens=256, most=4)
    lines: list[list[int]] = [[] for _ in range(5)]
    segments = [shared.write(None, [], 0) for _ in lines]
    for _ in range(3000):
        i = source.randrange(len(lines))
        start = len(lines[i])
        lines[i] += [source.randrange(alphabet) for _ in range(source.randrange(5))]
        segments[i] = shared.write(segments[i], lines[i], start)
        assert shared._n_tokens <= 256
    assert shared._n_tokens == sum(len(s.text) - s.start for s in shared._segments) == 256
    n_segments = 5 + 256 // (64 - 8)  # written to, and full
    assert n_stored(shared) <= 256 + 64 + 8 * n_segments


def test_oldest_text_is_forgotten_first() -> None:
    shared = SharedIndex((2,), max_tokens=64, most=8)
    old = shared.write(None, [1, 2, 3, 4], 0)
    new = shared.write(None, list(range(100, 160)), 0)
    assert shared.longest([1, 2]) is not None
    new = shared.write(new, [*range(100, 160), 160, 161, 162], 60)
    assert shared.longest([1, 2]) is None
    assert shared.longest([2, 3]) is not None
    shared.write(new, [*range(100, 163), 163], 63)
    assert shared.longest([2, 3]) is None
    shared.write(old, [1, 2, 3, 4, 5, 6], 4)  # its segment is gone: it goes on in a new one
    match = shared.longest([3, 4])
    assert match is not None
    assert match.follow([3, 4], 9, 0.0).tokens == [5, 6]
