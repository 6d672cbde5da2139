"""Run all benchmarks: on the bundled pair, and on padded targets, where speculation can pay.

    python -m benchmarks.run [--quick] [--output FILE.jsonl]

Each benchmark runs in a process of its own, so that its memory and threads do not affect the next. Tables
are printed as they come. The last line is a JSON object with all results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import llamabranch as lb

from . import llama_tools
from .report import parser


@dataclass(frozen=True)
class Padded:
    """A padded target. It gets fewer and shorter texts, since each takes a minute or more."""

    n_params: int
    file_type: str
    prompts: int = 4
    speculative: tuple[float, ...] = (0.0,)  # temperatures
    peers: tuple[float, ...] = (0.0, 0.8)

    @property
    def name(self) -> str:
        """The size and type, as they appear in the names of the steps."""
        return f"{self.n_params // 1_000_000}M-{self.file_type}"


PADDED = (
    Padded(50_000_000, "q8_0", prompts=6, speculative=(0.0, 1.0)),
    Padded(150_000_000, "f16"),
    Padded(350_000_000, "f16", peers=(0.0,)),
)
QUICK = (Padded(12_000_000, "q8_0", prompts=1, peers=(0.0,)),)


@dataclass(frozen=True)
class Step:
    """A program and its arguments; ``padded:N:TYPE`` is replaced by the path of such a model."""

    name: str
    program: str
    arguments: tuple[str, ...]


def main() -> None:
    """Run the selected steps."""
    described = parser("all benchmarks", temperatures=None)
    described.add_argument(
        "--only", nargs="+", metavar="WORD", help="only steps whose name contains one of these"
    )
    described.add_argument("--no-padded", action="store_true", help="the bundled pair only")
    described.add_argument("--output", type=Path, help="append each benchmark's JSON line here")
    described.add_argument("--list", action="store_true", help="print the steps and stop")
    args = described.parse_args()
    steps = [
        step
        for step in _steps(args)
        if not args.only or any(word in step.name for word in args.only)
    ]
    if args.list:
        print("\n".join(f"{step.name}: {' '.join(step.arguments)}" for step in steps))
        return
    if not args.no_peers and args.peers_bin is None:
        args.peers_bin = llama_tools.build(args.cache)
    lines, failed = [], []
    for step in steps:
        line = _run(step, args)
        if line is None:
            failed.append(step.name)
            continue
        lines.append({"step": step.name, **line})
        if args.output is not None:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(json.dumps({"benchmark": "run", "failed": failed, "steps": lines}))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _steps(args: argparse.Namespace) -> Iterator[Step]:
    """Yield all steps."""
    for program in (
        "decode",
        "peers",
        "speculative",
        "batch",
        "layouts",
        "resident",
        "chat",
        "search",
        "fork",
        "sampling",
    ):
        yield Step(program, program, ())
    for part in ("plain", "drafted", "folders", "growth"):
        yield Step(f"step-{part}", "step", ("--only", part))
    if args.no_padded:
        return
    for padded in QUICK if args.quick else PADDED:
        target = ("--target", f"padded:{padded.n_params}:{padded.file_type}")
        size = ["--prompts", str(padded.prompts)]
        if not args.quick:
            size += ["--tokens", "128", "--runs", "3"]
        for program in ("speculative", "peers"):
            chosen = padded.speculative if program == "speculative" else padded.peers
            temperatures = ("--temperatures", *(f"{t:g}" for t in chosen))
            name = f"{program}-{padded.name}"
            yield Step(name, program, (*target, *size, *temperatures))


def _run(step: Step, args: argparse.Namespace) -> dict[str, object] | None:
    """Run a step and print its tables; return its JSON line, None if it failed."""
    arguments = [_made(argument, args.cache) for argument in step.arguments]
    if "--target" not in arguments:
        arguments += ["--target", args.target]
    arguments += ["--draft", args.draft, "--cache", str(args.cache)]
    arguments += ["--n-ctx", str(args.n_ctx)]
    for name in (
        "threads",
        "runs",
        "prompts",
        "tokens",
    ):  # if an option is repeated, the last one counts
        if getattr(args, name) is not None:
            arguments += [f"--{name}", str(getattr(args, name))]
    if args.temperatures is not None:
        arguments += ["--temperatures", *map(str, args.temperatures)]
    if args.peers_bin is not None:
        arguments += ["--peers-bin", str(args.peers_bin)]
    arguments += [
        flag for flag, on in (("--quick", args.quick), ("--no-peers", args.no_peers)) if on
    ]
    start = time.perf_counter()
    print(f"\n## {step.name}", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{step.program}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    *shown, last = done.stdout.splitlines() or [""]
    if done.returncode != 0:
        print(done.stdout, flush=True)
        return None
    print("\n".join(shown))
    print(f"\n({step.name}: {time.perf_counter() - start:.0f} s)", flush=True)
    line: dict[str, object] = json.loads(last)
    return line


def _made(argument: str, cache: Path) -> str:
    """Return the argument. ``padded:N:TYPE`` becomes the path of that model, written if missing."""
    word, *rest = argument.split(":")
    if word != "padded":
        return argument
    from .padded import cached_padded

    return str(cached_padded(lb.hub.resolve("tale-target"), cache, int(rest[0]), rest[1]))


if __name__ == "__main__":
    main()
