"""Texts found by their beginnings, compared with a search through the whole list."""

from __future__ import annotations

import random

import pytest

from llamabranch.context.prefix_cache import CachedPrefix, CachedPrefixes


def text_of(rng: random.Random) -> list[int]:
    return rng.choices((0, 1, 2), k=rng.randint(1, 9))


def n_same(left: list[int], right: list[int]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


@pytest.mark.parametrize("seed", range(200))
def test_what_is_found_is_what_a_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    asked = [text_of(rng) for _ in range(5)]
    kept = CachedPrefixes()
    known: list[CachedPrefix] = []  # the least recently used first
    for _ in range(30):
        deed, n = rng.choice(("add", "add", "use", "cut", "remove")), rng.randint(1, 9)
        tokens = rng.choice(known).tokens if known and rng.random() < 0.3 else text_of(rng)
        text = next((text for text in known if text.tokens == tokens), None)
        others = [other.tokens for other in known if other is not text]
        if text is None:
            with pytest.raises(KeyError):
                kept.remove(CachedPrefix(tokens))
            if deed == "add":
                known.append(CachedPrefix(tokens))
                kept.add(known[-1])
        elif deed == "use":
            known.remove(text)
            known.append(text)
            kept.use(text)
        elif deed == "cut" and n < len(tokens):
            is_new = all(n_same(other, tokens[:n]) < n for other in others)
            assert kept.cut(text, n) == is_new
            assert text.tokens == (tokens[:n] if is_new else tokens)
        elif deed == "remove":
            known.remove(text)
            kept.remove(text)
        assert list(kept) == known and len(kept) == len(known)
        for wanted in [*asked, tokens]:
            n, nearest = kept.find(wanted)
            assert n == max((n_same(text.tokens, wanted) for text in known), default=0)
            assert (0 if nearest is None else n_same(nearest.tokens, wanted)) == n
            wholes = [text for text in known if text.tokens == wanted[: len(text.tokens)]]
            longest = max(wholes, key=lambda text: len(text.tokens), default=None)
            expected = (0, None) if longest is None else (len(longest.tokens), longest)
            assert kept.find_whole(wanted) == expected
