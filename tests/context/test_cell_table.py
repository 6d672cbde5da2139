"""The cell table agrees with a simulated cache of individual cells."""

from __future__ import annotations

import itertools
import random

import pytest

from llamabranch.context.cell_table import CellTable

N_SEQ = 4
END = 1 << 31

MOVES = ("append", "append", "copy", "remove", "truncate", "clear")


@pytest.mark.parametrize("seed", range(150))
def test_table_counts_like_real_cells(seed: int) -> None:
    rng = random.Random(seed)
    table = CellTable(1000, N_SEQ)
    cells = itertools.count()
    real: list[dict[int, int]] = [{} for _ in range(N_SEQ)]  # position -> cell, per sequence
    for _ in range(30):
        move, seq, other = rng.choice(MOVES), rng.randrange(N_SEQ), rng.randrange(N_SEQ)
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        low, high = min(a, b), max(a, b)
        if move == "append":
            start = max(real[seq], default=-1) + 1
            real[seq].update((start + i, next(cells)) for i in range(1 + a))
            table.append(seq, 1 + a)
        elif move == "copy" and seq != other:
            real[other] = {p: c for p, c in real[seq].items() if low <= p}
            table.copy(seq, other, low, END)
        elif move == "remove":
            real[seq] = {p: c for p, c in real[seq].items() if not low <= p < high}
            table.remove(seq, low, high)
        elif move == "truncate":
            real[seq] = {p: c for p, c in real[seq].items() if p < low}
            table.remove(seq, low, END)
        elif move == "clear" and a == 0:
            real = [{} for _ in range(N_SEQ)]
            table.clear()
        for s, held in enumerate(real):
            assert table.length(s) == len(held)
            assert table.next_position(s) == max(held, default=-1) + 1
            assert table.first_position(s) == min(held, default=-1)
            later = [position for position in held if position >= 2]
            assert table.first_position(s, 2) == min(later, default=-1)
            others = {cell for i, more in enumerate(real) if i != s for cell in more.values()}
            alone = [p for p in held if low <= p < high and held[p] not in others]
            assert table.exclusive(s, low, high) == (min(alone, default=None), len(alone))
        uses = [cell for held in real for cell in held.values()]
        usage = table.usage()
        assert usage.cells_used == len(set(uses))
        assert usage.cells_shared == sum(uses.count(cell) > 1 for cell in set(uses))
        assert usage.cells_free == 1000 - usage.cells_used
        assert usage.sequences == {s: len(held) for s, held in enumerate(real) if held}
