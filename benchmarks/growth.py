"""How the time of plain steps, forks and joint steps grows, inside llama.cpp and in this library.

    python -m benchmarks.growth [--target T] [--plots DIR]

The context goes from 256 to 32,768 cells, the branches from 1 to 64. No part of this library should grow
faster than that of llama.cpp: the last column of each table is the growth of ours over the growth of
theirs, both relative to the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import llamabranch as lb
from llamabranch.bench import CallClock, Curve, DecodeClock, Spread, save_plot

from .fork import prompt_of
from .report import Settings, emit, number, parser, table, title

N_TOGETHER = 8  # branches in one decode, where the context grows
BRANCH_CELLS = 256  # context, where the branches grow
SPARE = 2048  # cells for the tokens generated after the prefix

PLAIN, FORK, JOINT = "plain step", "fork and prune", f"step of {N_TOGETHER} branches"
JOINT_OF, FORK_OF = "step of all branches", "fork and prune beside them"


@dataclass(frozen=True)
class Part:
    """Seconds of one kind of work: inside llama.cpp, and in this library."""

    theirs: Spread
    ours: Spread

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {"llama_cpp_s": self.theirs.as_dict(), "ours_s": self.ours.as_dict()}


Found = Mapping[int, Mapping[str, Part]]  # at each size, each kind of work


def main() -> None:
    """Measure one model."""
    described = parser("growth", runs=1, prompts=1, tokens=64)
    described.add_argument(
        "--cells", type=int, nargs="+", help="context sizes; default: 256 to 32768"
    )
    described.add_argument("--branches", type=int, nargs="+", help="default: 1 to 64")
    described.add_argument(
        "--plots", type=Path, help="folder for growth-*.png; default: that of --cache"
    )
    args = described.parse_args()
    settings = Settings.of(args)
    cells = sorted(args.cells or ([64, 128] if settings.quick else [256 << i for i in range(8)]))
    branches = sorted(args.branches or ([1, 2] if settings.quick else [1 << i for i in range(7)]))
    n_seq_max = max(*branches, N_TOGETHER) + 2
    with settings.context(settings.target, n_ctx=max(cells) + SPARE, n_seq_max=n_seq_max) as ctx:
        by_cells = _by_cells(ctx, cells, settings.tokens)
        by_branches = _by_branches(ctx, branches, settings.tokens)
        about = f"{title(ctx.model)}: {settings.threads} threads, medians of {settings.tokens}"
        _show(f"As the context grows, {about}", "cells", by_cells)
        _show(f"As the branches grow, {BRANCH_CELLS} cells, {about}", "branches", by_branches)
        folder = args.plots or settings.cache
        folder.mkdir(parents=True, exist_ok=True)
        _plot(folder / "growth-cells.png", f"As the context grows, {about}", "cells", by_cells)
        _plot(
            folder / "growth-branches.png",
            f"As the branches grow, {about}",
            "branches",
            by_branches,
        )
        results = {"cells": _json(by_cells), "branches": _json(by_branches)}
        emit("growth", settings, {"target": ctx.model}, results, kv_type=ctx.kv_type)


# -- what is run -----------------------------------------------------------------------------------


def _by_cells(ctx: lb.Context, cells: Sequence[int], n: int) -> Found:
    found = {}
    text = prompt_of(ctx, max(cells))
    sampling = lb.SamplingParams(temperature=0.8, seed=1)
    with lb.Branch.start(ctx, text[: cells[0]], sampling=sampling) as root:
        for size in cells:
            if size > root.position:
                root.prefill(text[root.position : size])
            parts = {FORK: _forks(ctx, root, n)}
            with root.fork() as child:
                parts[PLAIN] = _steps(ctx, _alone(child), n)
            children = root.fork_many(N_TOGETHER)
            parts[JOINT] = _steps(ctx, _joint(ctx, children), max(1, n // 2))
            for child in children:
                child.prune()
            found[size] = parts
    return found


def _by_branches(ctx: lb.Context, branches: Sequence[int], n: int) -> Found:
    found = {}
    sampling = lb.SamplingParams(temperature=0.8, seed=1)
    for size in branches:
        with lb.Branch.start(ctx, prompt_of(ctx, BRANCH_CELLS), sampling=sampling) as root:
            children = root.fork_many(size)
            found[size] = {
                FORK_OF: _forks(ctx, root, n),
                # As many rounds as the spare cells allow.
                JOINT_OF: _steps(ctx, _joint(ctx, children), min(n, SPARE // size // 2)),
            }
    return found


def _alone(branch: lb.Branch) -> Callable[[], object]:
    """Return the work of a plain step."""
    return lambda: branch.commit(branch.produce().token)


def _joint(ctx: lb.Context, branches: Sequence[lb.Branch]) -> Callable[[], object]:
    """Return the work of a step of all branches in one decode; EOG tokens do not end it."""
    store = lb.BranchStore(ctx)
    return lambda: store.commit({branch: branch.produce().token for branch in branches})


def _steps(ctx: lb.Context, step: Callable[[], object], n: int) -> Part:
    with DecodeClock(ctx) as clock:
        return _timed(clock, step, n)


def _forks(ctx: lb.Context, root: lb.Branch, n: int) -> Part:
    with CallClock(ctx.decoder.handle, "copy", "remove") as clock:
        return _timed(clock, lambda: root.fork().prune(), n)


def _timed(
    clock: CallClock | DecodeClock, work: Callable[[], object], n: int, warm_up: int = 3
) -> Part:
    theirs, ours = [], []
    for i in range(warm_up + n):
        before, start = clock.seconds, perf_counter()
        work()
        whole, inside = perf_counter() - start, clock.seconds - before
        if i >= warm_up:
            theirs.append(inside)
            ours.append(whole - inside)
    return Part(Spread.of(theirs), Spread.of(ours))


# -- tables and plots ------------------------------------------------------------------------------


def _growth(found: Found, kind: str, size: int) -> tuple[float, float]:
    """Return the times of theirs and ours, divided by those of the first size."""
    first, now = found[min(found)][kind], found[size][kind]
    return now.theirs.median / first.theirs.median, now.ours.median / first.ours.median


def _kinds(found: Found) -> list[str]:
    return list(found[min(found)])


def _show(caption: str, what: str, found: Found) -> None:
    rows = []
    for kind in _kinds(found):
        for size, parts in found.items():
            theirs, ours = _growth(found, kind, size)
            rows.append(
                (
                    kind,
                    f"{size:,}",
                    number(1e6 * parts[kind].theirs.median, 1),
                    number(1e6 * parts[kind].ours.median, 1),
                    number(theirs),
                    number(ours),
                    number(ours / theirs),
                )
            )
    columns = (
        "", what, "llama.cpp, µs", "ours, µs", "llama.cpp, times the first", "ours, times the first",
        "ours over theirs",
    )  # fmt: skip
    table(caption, columns, rows)


def _plot(path: Path, caption: str, what: str, found: Found) -> None:
    curves = []
    sizes = list(found)
    for colour, kind in enumerate(_kinds(found)):
        for whose in ("llama.cpp", "ours"):
            parts = [found[size][kind] for size in sizes]
            spreads = [part.theirs if whose == "llama.cpp" else part.ours for part in parts]
            y = [1e6 * spread.median for spread in spreads]
            label, dashed = f"{kind}, {whose}", whose == "llama.cpp"
            curves.append(Curve(label, sizes, y, computed=dashed, colour=colour))
    save_plot(path, caption, (what, "µs"), curves, log=True)


def _json(found: Found) -> dict[str, object]:
    return {
        str(size): {kind: part.as_dict() for kind, part in parts.items()}
        for size, parts in found.items()
    }


if __name__ == "__main__":
    main()
