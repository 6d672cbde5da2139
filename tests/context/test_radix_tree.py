"""The radix tree against a list of texts that is searched from end to end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabranch.context.radix_tree import RadixTree

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=9)
STEP = st.tuples(st.sampled_from(["insert", "insert", "remove"]), TEXT)


def n_same(left: list[int], right: list[int]) -> int:
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(steps=st.lists(STEP, max_size=30), asked=st.lists(TEXT, max_size=5))
def test_tree_finds_what_a_search_finds(
    steps: list[tuple[str, list[int]]], asked: list[list[int]]
) -> None:
    tree: RadixTree[int] = RadixTree()
    texts: dict[tuple[int, ...], int] = {}
    for number, (deed, tokens) in enumerate(steps):
        if deed == "insert":
            assert tree.insert(tokens, number) == texts.get(tuple(tokens))
            texts[tuple(tokens)] = number
        elif tuple(tokens) in texts:
            tree.remove(tokens)
            del texts[tuple(tokens)]
        else:
            with pytest.raises(KeyError):
                tree.remove(tokens)
        for text in [*asked, tokens]:
            expected = max((n_same(list(known), text) for known in texts), default=0)
            n, value = tree.find(text)
            assert n == expected
            found = [known for known, its in texts.items() if its == value]
            assert (value is None) if n == 0 else n_same(list(found[0]), text) == n
            wholes = [known for known in texts if list(known) == text[: len(known)]]
            longest = max(wholes, key=len, default=())
            assert tree.find_whole(text) == (len(longest), texts.get(longest))


def test_empty_tree_finds_nothing() -> None:
    tree: RadixTree[str] = RadixTree()
    assert tree.find([1, 2]) == (0, None)
    assert tree.find_whole([1, 2]) == (0, None)
    assert tree.find([]) == (0, None)
