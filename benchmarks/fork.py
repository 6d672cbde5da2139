"""The cost of a fork as the prefix grows and as the tree grows: time, cells, bytes.

    python -m benchmarks.fork

A fork tags the cells of its prefix with another sequence id. No K/V is copied. Two things grow with the
prefix: llama.cpp's scan of the cells, and the branch's list of tokens. The cost of a step is shown for
comparison.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import llamabranch as lb
from llamabranch.bench.timing import Spread

from .clocks import DecodeClock
from .prompts import long_prompt
from .report import Settings, emit, number, parser, percent, table, title
from .step import StepCost, step_cost

GROWTH = 256  # cells for the tokens generated after the prefix


def main() -> None:
    """Measure one model."""
    described = parser("forking", runs=1, prompts=1, tokens=32)
    described.add_argument("--forks", type=int, help="forks timed at each size; default: 200")
    described.add_argument(
        "--cells", type=int, nargs="+", help="lengths of the prefix; default: 256 to 32768"
    )
    described.add_argument(
        "--branches", type=int, nargs="+", help="numbers of siblings; default: 1 to 64"
    )
    args = described.parse_args()
    settings = Settings.of(args)
    n_forks = args.forks or (3 if settings.quick else 200)
    cells = args.cells or ([64, 128] if settings.quick else [256 << i for i in range(8)])
    branches = args.branches or ([1, 2] if settings.quick else [1 << i for i in range(7)])
    n_ctx = max(cells) + GROWTH + settings.tokens
    with settings.context(settings.target, n_ctx=n_ctx, n_seq_max=max(8, max(branches) + 2)) as ctx:
        by_cells = _by_cells(ctx, sorted(cells), settings, n_forks)
        by_branches = _by_branches(ctx, sorted(branches), settings, n_forks)
        results = {"cells": by_cells, "branches": by_branches}
        emit("fork", settings, {"target": ctx.model}, results, kv_type=ctx.kv_type)


# -- the prefix grows ------------------------------------------------------------------------------


def _by_cells(
    ctx: lb.Context, cells: Sequence[int], settings: Settings, n_forks: int
) -> list[dict[str, object]]:
    forks = []
    tokens = long_prompt(ctx, max(cells))
    with lb.Branch.start(ctx, tokens[: cells[0]], temperature=0.0, seed=1) as root:
        prefill_s = 0.0
        for n in cells:
            start = perf_counter()
            if n > root.position:
                root.prefill(tokens[root.position : n])
            prefill_s += perf_counter() - start
            forks.append(_at(ctx, root, settings, n_forks, prefill_s))
    first = forks[0]
    rows = []
    for fork in forks:
        step = fork.step
        rows.append(
            (
                f"{fork.cells:,}",
                number(1e6 * fork.fork.median, 1),
                number(1e6 * fork.prune.median, 1),
                number(fork.total / first.total),
                str(fork.weight.new_cells),
                str(fork.weight.new_cells * fork.cell_bytes),
                f"{fork.cells * fork.cell_bytes / 1e6:,.1f}",
                f"{fork.weight.python_bytes / 1024:,.1f}",
                f"{fork.weight.rss_bytes / 1024:,.0f}",
                number(1e3 * fork.prefill_s, 0),
                number(1e6 * step.decode.median, 0),
                number(1e6 * step.ours, 0),
                percent(step.share),
            )
        )
    columns = (
        "cells", "fork, µs", "prune, µs", f"both over {first.cells:,}", "cells taken", "K/V bytes copied",
        "K/V of the prefix, MB", "Python, KiB a fork", "process, KiB a fork",
        "computing it again, ms", "llama_decode, µs", "ours, µs a step", "our share",
    )  # fmt: skip
    caption = (
        f"Forking {title(ctx.model)}: {settings.threads} threads, medians of {n_forks} forks, "
        f"{settings.tokens} steps after each prefix, K/V type {ctx.kv_type}"
    )
    table(caption, columns, rows)
    return [fork.as_dict() for fork in forks]


@dataclass(frozen=True)
class _Weight:
    """The memory that a fork takes: the mean over several forks."""

    new_cells: int  # of all forks together
    python_bytes: int
    rss_bytes: int


@dataclass(frozen=True)
class _Fork:
    """The cost of forking a prefix of some length."""

    cells: int
    cell_bytes: int
    prefill_s: float
    fork: Spread
    prune: Spread
    weight: _Weight
    step: StepCost

    @property
    def total(self) -> float:
        """Seconds of a fork and its prune."""
        return self.fork.median + self.prune.median

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "cells": self.cells,
            "fork_s": self.fork.as_dict(),
            "prune_s": self.prune.as_dict(),
            "cells_taken": self.weight.new_cells,
            "kv_bytes_copied": self.weight.new_cells * self.cell_bytes,
            "kv_bytes_of_prefix": self.cells * self.cell_bytes,
            "python_bytes_a_fork": self.weight.python_bytes,
            "process_bytes_a_fork": self.weight.rss_bytes,
            "prefill_s": self.prefill_s,
            "step": self.step.as_dict(),
        }


def _at(
    ctx: lb.Context, root: lb.Branch, settings: Settings, n_forks: int, prefill_s: float
) -> _Fork:
    forks, prunes = [], []
    for i in range(n_forks + 3):
        start = perf_counter()
        child = root.fork()
        forked = perf_counter()
        child.prune()
        end = perf_counter()
        if i >= 3:
            forks.append(forked - start)
            prunes.append(end - forked)
    with root.fork() as child:  # its steps are appended to the prefix and pruned with it
        step = step_cost(child, settings.tokens)
    return _Fork(
        root.position,
        _cell_bytes(ctx),
        prefill_s,
        Spread.of(forks),
        Spread.of(prunes),
        _weigh(ctx, root),
        step,
    )


def _weigh(ctx: lb.Context, root: lb.Branch) -> _Weight:
    """Measure the memory that forks take: cells, Python's heap, the process."""
    n = ctx.n_seq_free
    gc.collect()
    before, resident = ctx.usage().cells_used, _resident_bytes()
    tracemalloc.start()
    traced = tracemalloc.get_traced_memory()[0]
    children = [root.fork() for _ in range(n)]
    python_bytes = (tracemalloc.get_traced_memory()[0] - traced) // n
    tracemalloc.stop()
    rss_bytes = max(0, _resident_bytes() - resident) // n
    new_cells = ctx.usage().cells_used - before
    ctx.audit()  # llama.cpp's own positions agree with the ledger
    for child in children:
        child.prune()
    return _Weight(new_cells, python_bytes, rss_bytes)


def _cell_bytes(ctx: lb.Context) -> int:
    """Return the bytes of K and V in one cell, from the model's metadata; 0 if it does not say."""
    metadata, arch = ctx.model.metadata, ctx.model.architecture
    try:
        heads = int(metadata[f"{arch}.attention.head_count"])
        kv_heads = int(metadata.get(f"{arch}.attention.head_count_kv", heads))
        size = int(metadata.get(f"{arch}.attention.key_length", ctx.model.n_embd // heads))
    except (KeyError, ValueError):
        return 0
    bits = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5}.get(ctx.kv_type, 16.0)
    return int(2 * ctx.model.n_layer * kv_heads * size * bits / 8)


def _resident_bytes() -> int:
    """Return the bytes of resident memory of this process; 0 if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource

    return pages * resource.getpagesize()


# -- the tree grows --------------------------------------------------------------------------------


def _by_branches(
    ctx: lb.Context, branches: Sequence[int], settings: Settings, n_forks: int
) -> list[dict[str, object]]:
    """Fork beside n siblings, and step all of them in one decode."""
    results: list[dict[str, object]] = []
    rows = []
    sampling = lb.SamplingParams(temperature=0.8, seed=1)
    store = lb.BranchStore(ctx)
    n_steps = min(settings.tokens, GROWTH // 4)
    for n in branches:
        with lb.Branch.start(ctx, long_prompt(ctx, 128), sampling=sampling) as root:
            children = root.fork_many(n)
            forks = []
            for _ in range(n_forks):
                start = perf_counter()
                child = root.fork()
                child.prune()
                forks.append(perf_counter() - start)
            clocks = _steps(ctx, store, children, n_steps)
        fork, inside, ours = Spread.of(forks), Spread.of(clocks[0]), Spread.of(clocks[1])
        rows.append(
            (
                str(n),
                number(1e6 * fork.median, 1),
                number(1e6 * inside.median, 0),
                number(1e6 * ours.median / n, 1),
                percent(ours.median / (ours.median + inside.median)),
            )
        )
        results.append(
            {
                "branches": n,
                "fork_and_prune_s": fork.as_dict(),
                "decode_s": inside.as_dict(),
                "ours_s": ours.as_dict(),
            }
        )
    columns = (
        "branches", "one more fork and prune, µs", "llama_decode of all, µs", "ours, µs a branch",
        "our share",
    )  # fmt: skip
    caption = f"Many branches of 128 tokens, {title(ctx.model)}: BranchStore.step, T = 0.8"
    table(caption, columns, rows)
    return results


def _steps(
    ctx: lb.Context, store: lb.BranchStore, branches: Sequence[lb.Branch], n: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of each joint step inside llama.cpp, and outside it."""
    inside, outside = [], []
    running = list(branches)
    with DecodeClock(ctx) as clock:
        for i in range(n + 2):
            before, start = clock.seconds, perf_counter()
            produced = store.step(running)
            whole, decode = perf_counter() - start, clock.seconds - before
            if i >= 2 and len(running) == len(branches):
                inside.append(decode)
                outside.append(whole - decode)
            running = [branch for branch in running if not produced[branch].is_stop]
            if not running:
                break
    return inside, outside


if __name__ == "__main__":
    main()
