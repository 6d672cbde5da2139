"""The settings of a benchmark, its tables, and the JSON line at its end."""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

import llamabranch as lb
from llamabranch.bench.machine import processor_name
from llamabranch.bench.timing import Series, Spread

from .prompts import PROMPTS

__all__ = [
    "Settings",
    "emit",
    "number",
    "parser",
    "percent",
    "pm",
    "series_json",
    "table",
    "title",
]

JSON = Mapping[str, object]


@dataclass(frozen=True)
class Settings:
    """The options that all benchmarks share."""

    target: str
    draft: str
    threads: int
    runs: int
    prompts: int
    tokens: int
    temperatures: tuple[float, ...]
    n_ctx: int
    quick: bool
    cache: Path
    peers_bin: Path | None
    peers: bool

    @classmethod
    def of(cls, args: argparse.Namespace, **quick: int) -> Settings:
        """Return the settings of a parsed command line; --quick uses small values.

        ``quick`` changes the small values. Without a profile in the environment, this process uses a
        new one.
        """
        profile = args.cache / f"benchmark-profile-{os.getpid()}.json"
        if os.environ.setdefault("LLAMABRANCH_PROFILE", str(profile)) == str(profile):
            atexit.register(profile.unlink, missing_ok=True)
        small = {"runs": 1, "prompts": 1, "tokens": 8, "threads": 1} | quick

        def pick(name: str) -> int:
            value = getattr(args, name)
            if value is None:
                value = small[name] if args.quick else args.defaults[name]
            if value < 1:
                raise SystemExit(f"--{name} must be at least 1")
            return int(value)

        temperatures = args.temperatures or (
            (0.8,) if args.quick else args.defaults["temperatures"]
        )
        return cls(
            target=args.target,
            draft=args.draft,
            threads=pick("threads"),
            runs=pick("runs"),
            prompts=min(pick("prompts"), len(PROMPTS)),
            tokens=pick("tokens"),
            temperatures=tuple(temperatures),
            n_ctx=args.n_ctx,
            quick=args.quick,
            cache=args.cache,
            peers_bin=args.peers_bin,
            peers=not args.no_peers,
        )

    def context(self, name: str, **options: int) -> lb.Context:
        """Open a context on a model by name or path."""
        wanted = {"n_ctx": self.n_ctx, "n_threads": self.threads, **options}
        return lb.load(
            name,
            n_ctx=wanted.pop("n_ctx"),
            n_threads=wanted.pop("n_threads"),
            n_seq_max=wanted.pop("n_seq_max", 8),
        )

    def as_dict(self) -> JSON:
        """Return the settings that go into the JSON line."""
        return {
            "threads": self.threads,
            "runs": self.runs,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "temperatures": list(self.temperatures),
            "n_ctx": self.n_ctx,
            "quick": self.quick,
            "profile": Path(os.environ["LLAMABRANCH_PROFILE"]).name,
        }


def parser(
    description: str,
    *,
    runs: int | None = None,
    prompts: int | None = None,
    tokens: int | None = None,
    temperatures: Sequence[float] | None = (0.0,),
) -> argparse.ArgumentParser:
    """Return a parser with the options all benchmarks share; None = each benchmark's own default."""
    described = argparse.ArgumentParser(description=description)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    home = Path(os.environ.get("LLAMABRANCH_CACHE") or "~/.cache/llamabranch").expanduser()
    add = described.add_argument
    add("--target", default="tale-target", help="GGUF file, or a name from `llamabranch models`")
    add("--draft", default="tale-draft", help="the same, for the draft model")
    add(
        "--threads",
        type=int,
        help=f"for each program that is compared; default: {cores}, the available cores",
    )
    add("--runs", type=int, help=_default(runs))
    add("--prompts", type=int, help=f"how many of the {len(PROMPTS)} prompts; {_default(prompts)}")
    add("--tokens", type=int, help=f"generated for each prompt; {_default(tokens)}")
    add("--temperatures", type=float, nargs="+", help=_default(temperatures))
    add("--n-ctx", type=int, default=1024, help="cells of each K/V cache; default: 1024")
    add("--quick", action="store_true", help="only check that it runs: the times mean nothing")
    add(
        "--cache",
        type=Path,
        default=home / "benchmarks",
        help="folder for the programs and models that are built",
    )
    add("--peers-bin", type=Path, help="folder with llama.cpp's programs; default: build them")
    add("--no-peers", action="store_true", help="skip llama.cpp's own programs")
    defaults = {
        "threads": cores or 1, "runs": runs, "prompts": prompts, "tokens": tokens,
        "temperatures": temperatures,
    }  # fmt: skip
    described.set_defaults(defaults=defaults)
    return described


def _default(value: int | Sequence[float] | None) -> str:
    if value is None:
        return "default: each benchmark's own"
    shown = value if isinstance(value, int) else " ".join(f"{x:g}" for x in value)
    return f"default: {shown}"


# -- tables ----------------------------------------------------------------------------------------


def title(*models: lb.Model) -> str:
    """Return the models' names and sizes for the head of a table."""
    parts = []
    for model in models:
        size = f"{model.n_params / 1e6:.1f}M, {model.file_type}"
        parts.append(f"{model.name} ({size})")
    return " with ".join(parts)


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; in Markdown if standard output is not a terminal."""
    shown = Table(*columns, title=caption, box=box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(shown.columns):
        if i and all(row[i][:1].isdigit() or row[i] == "-" for row in rows):
            column.justify = "right"
    for row in rows:
        shown.add_row(*row)
    if sys.stdout.isatty():
        Console().print(shown)
        return
    print(f"\n**{caption}**\n")
    shown.box, shown.title = box.MARKDOWN, None
    console = Console(file=sys.stdout, width=400, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()))


def number(value: float, digits: int = 2) -> str:
    """Return a number for a table, "-" for nan."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def percent(value: float) -> str:
    """Return a share as a percentage for a table, "-" for nan."""
    return "-" if math.isnan(value) else f"{100 * value:.1f} %"


def pm(spread: Spread, digits: int = 2) -> str:
    """Return a median with the lowest and the highest value."""
    if math.isnan(spread.median):
        return "-"
    low, high = number(spread.low, digits), number(spread.high, digits)
    return f"{number(spread.median, digits)} ({low} to {high})"


# -- the JSON line ---------------------------------------------------------------------------------


def series_json(series: Series, base: Series | None = None) -> JSON:
    """Return a contestant's speed, its ratio to ``base``, and its statistics."""
    entry: dict[str, object] = {
        "tokens_per_s": series.rate.as_dict(),
        "runs": series.rates,
        "n_tokens": series.total.n_tokens,
        "seconds": series.total.seconds,
    }
    if base is not None:
        entry["ratio"] = series.ratio(base).as_dict()
    stats = series.stats
    if stats.num_drafts or stats.target_forward_passes:
        entry["stats"] = stats.as_dict()
    return entry


def emit(
    name: str, settings: Settings, models: Mapping[str, lb.Model], results: JSON, **more: object
) -> None:
    """Print the JSON line, the last line of every benchmark."""
    line = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "versions": versions(),
        "models": {role: describe(model) for role, model in models.items()},
        "settings": settings.as_dict(),
        **more,
        "results": results,
    }
    print(json.dumps(_clean(line)), flush=True)


def describe(model: lb.Model) -> JSON:
    """Return what identifies the model."""
    return {
        "name": model.name,
        "file": model.path.name,
        "hash": model.fingerprint,
        "n_params": model.n_params,
        "file_type": model.file_type,
        "bytes": model.size_bytes,
    }


def hardware() -> JSON:
    """Return processor, cores, memory, system and the load average before the run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": processor_name(),
        "machine": platform.machine(),
        "cores": cores,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": load,
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def versions() -> JSON:
    """Return the versions of everything that can change the figures."""
    from .llama_python import llama_cpp_version

    return {
        "llamabranch": lb.__version__,
        "llama_cpp_python": metadata.version("llama-cpp-python"),
        "llama_cpp": llama_cpp_version(),
        "numpy": metadata.version("numpy"),
        "python": platform.python_version(),
    }


def _clean(value: object) -> object:
    """Return ``value`` with None for nan and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
