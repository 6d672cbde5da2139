"""Long runs of what the test suite runs briefly: ``python -m tests.soak --steps 200000``.

    --steps N            steps of the state machine: half on a toy, a quarter on a toy without
                         batch-invariance, a quarter on the bundled draft
    --seed S             seed of the random steps; the same seed gives the same steps
    --memory             10,000 rounds of fork and prune, 1,000 of opening and closing a context
    --snapshots N        mutated snapshots; none may be accepted
    --engine-minutes M   random requests through the engine, compared with the same ones alone

It prints its progress, ends with one JSON line of figures, and exits with 1 at the first mismatch.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("", "branch", "engine"))

import loads
import toys
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test
from state_machine import long_settings, machine, tiny
from test_snapshot import refuse_mutated, write_sample

import llamabranch as lb

N_RUNS, N_STEPS = 50, 100  # of the machine between two lines of progress
Figures = dict[str, object]


def say(text: str) -> None:
    print(text, flush=True)


def machine_steps(n_steps: int, seed: int, folder: Path) -> Figures:
    """Run the state machine on three models until ``n_steps`` steps have been taken."""
    draft = lb.hub.resolve(lb.hub.BUNDLED_DRAFT)
    shares = [
        ("toy", tiny(folder / "q8.gguf"), True, 0.5),
        ("plain", tiny(folder / "f32.gguf", "f32"), False, 0.25),
        ("draft", draft, True, 0.25),
    ]
    figures: Figures = {"seed": seed}
    steps: Counter[str] = Counter()
    for number, (name, path, exact, share) in enumerate(shares):
        with (
            lb.Model(path) as model,
            lb.Context(model, n_ctx=256, n_seq_max=2, n_threads=1, batch_invariant=exact) as clean,
        ):
            kind = machine(model, clean, exact=exact, name=f"{name.title()}Machine")
            tally, start, batch = kind.tally, perf_counter(), seed + 1_000_000 * number
            while tally.n_steps < n_steps * share:
                gc.collect()
                gc.freeze()  # the library collects garbage whenever sequences run out
                left = -(-(n_steps * share - tally.n_steps) // N_STEPS)
                runs = long_settings(min(N_RUNS, int(left)), N_STEPS, soak=True)
                run_state_machine_as_test(seeded(batch)(kind), settings=runs)
                batch += 1
                say(f"{name}: {tally.n_steps} steps, {perf_counter() - start:.0f} s")
        steps += tally.steps
        figures[name] = {k: v for k, v in vars(tally).items() if k != "steps"}
    return {**figures, "steps": sum(steps.values()), "by_rule": dict(steps.most_common())}


def memory(folder: Path) -> Figures:
    """Measure by how much resident memory grows over the rounds."""
    with lb.Model(lb.hub.resolve(lb.hub.BUNDLED_TARGET)) as model:
        figures: Figures = {}
        for name, rounds, warm_up, call in (
            ("fork_prune", 10_000, 1000, loads.fork_and_prune),
            ("open_close", 1000, 100, loads.open_and_close),
        ):
            grown = loads.growth_bytes(model, call, rounds=rounds, warm_up=warm_up)
            say(f"{name}: {rounds} rounds, resident memory grew by {grown} bytes")
            if grown > loads.TOLERANCE_BYTES:
                raise AssertionError(f"{name} grew by {grown} bytes")
            figures[name] = {"rounds": rounds, "grown_bytes": grown}
    return figures


def mutated_snapshots(n: int, seed: int, folder: Path) -> Figures:
    """Let a context refuse ``n`` mutated files."""
    path = toys.write_llama(folder / "snapshots.gguf")
    with (
        lb.Model(path) as model,
        lb.Context(model, n_ctx=256, n_seq_max=4, n_batch=32, n_threads=1) as ctx,
    ):
        saved = write_sample(ctx, folder / "sample.branch")
        for done in range(0, n, 5000):
            refuse_mutated(ctx, saved, folder / "mutated.branch", min(5000, n - done), seed + done)
            say(f"snapshots: {min(done + 5000, n)} mutated, all refused")
    return {"refused": n}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--snapshots", type=int, default=0)
    parser.add_argument("--engine-minutes", type=float, default=0.0)
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parts: dict[str, tuple[object, Callable[[], Figures]]] = {
            "machine": (given.steps, lambda: machine_steps(given.steps, given.seed, folder)),
            "memory": (given.memory, lambda: memory(folder)),
            "snapshots": (
                given.snapshots,
                lambda: mutated_snapshots(given.snapshots, given.seed, folder),
            ),
            "engine": (
                given.engine_minutes,
                lambda: loads.engine_load(60 * given.engine_minutes, given.seed, say),
            ),
        }
        if not any(wanted for wanted, _ in parts.values()):
            parser.error("nothing to do: give --steps, --memory, --snapshots or --engine-minutes")
        figures: Figures = {}
        for name, (wanted, run) in parts.items():
            if wanted:
                start = perf_counter()
                try:
                    figures[name] = {**run(), "seconds": round(perf_counter() - start, 1)}
                except Exception:
                    traceback.print_exc()
                    say(f"MISMATCH in {name}")
                    return 1
    say(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
