"""A clock for methods that take turns."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from llamabranch.bench import timing
from llamabranch.bench.timing import Maker, Series


def interleave(makers: Mapping[str, Maker], *, n_runs: int, n_items: int) -> dict[str, Series]:
    """Time all methods in turns, after each has warmed up on item 0, untimed and with separate state."""
    for name, maker in makers.items():
        show_progress(f"warming up: {name}")
        maker(-1)(0)
    return timing.interleave(makers, n_runs=n_runs, n_items=n_items, progress=show_progress)


def show_progress(text: str) -> None:
    """Show progress on one line of standard error, if that is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
