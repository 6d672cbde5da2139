"""docs/architecture.md: its vectors, computed from the page alone, and the tokens of a branch."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from llamabranch import Branch, Context, Distribution
from llamabranch.sampling import noise

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
WORD = 1 << 64
G, M1, M2 = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


def mix(x: int) -> int:
    x %= WORD
    x = (x ^ (x >> 33)) * M1 % WORD
    x = (x ^ (x >> 33)) * M2 % WORD
    return x ^ (x >> 33)


def key(seed: int, position: int, purpose: int) -> int:
    k = mix(seed + G)
    k = mix(k ^ ((position + 1) * G % WORD))
    return mix(k ^ ((purpose + 1) * M2 % WORD))


def u(k: int, i: int) -> float:
    return ((mix(k ^ ((i + 1) * G % WORD)) >> 11) + 0.5) / 2**53


def draw(seed: int, position: int, probs: dict[int, float]) -> int:
    k = key(seed, position, 0)
    return max(probs, key=lambda i: math.log(u(k, i)) / probs[i])


def test_vectors_follow_from_the_page() -> None:
    text = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| (-?\d+) \| (\d+) \| (\d+) \| (\d+) \| (0x\w+) \| (\S+) \|$", text, re.M)
    assert len(rows) >= 12
    for seed, position, purpose, i, expected, unit in rows:
        k = key(int(seed), int(position), int(purpose))
        assert k == int(expected, 16) and u(k, int(i)) == float(unit)
        assert u(k, int(i)) == noise.uniform(int(seed), int(position), int(purpose), int(i))
        assert u(k, int(i)) == noise._unit(k, np.array([int(i)], dtype=np.int32))[0]  # of an array
        if purpose == "3":
            assert noise.derive_seed(int(seed), int(position)) == k >> 1
    (drawn,) = re.findall(r"0 to 15: `([\d ]+)`", text)
    probs = {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}
    library = Distribution.from_probs(np.array(list(probs.values())))
    for position, token in enumerate(map(int, drawn.split())):
        assert draw(1, position, probs) == library.draw(1, position) == token


def test_tokens_of_a_branch_are_those_of_the_page(ctx: Context) -> None:
    with Branch.start(ctx, "The old king", temperature=1.0, seed=77) as root:
        first, second = root.fork_many(2)
        assert [first.seed, second.seed] == [key(77, n, 3) >> 1 for n in (1, 2)]
        for branch in (root, second):
            for _ in range(8):
                distribution = branch.distribution()
                probs = dict(
                    zip(distribution.ids.tolist(), distribution.probs.tolist(), strict=True)
                )
                assert draw(branch.seed, branch.position, probs) == branch.step().token
