"""The harness of all benchmarks: settings, turns, tables, and the JSON line at the end."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import llamabranch as lb
from llamabranch.bench.machine import Machine

from .timing import Series, Spread

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
    threads: int
    runs: int
    tokens: int
    quick: bool
    peers: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace, tokens: int = 8) -> Settings:
        """Return the settings of a parsed command line; --quick uses one run of ``tokens``."""
        small = {"runs": 1, "tokens": tokens, "threads": 1}

        def pick(name: str) -> int:
            value = getattr(args, name)
            if value is None:
                value = small[name] if args.quick else args.defaults[name]
            if value < 1:
                raise SystemExit(f"--{name} must be at least 1")
            return int(value)

        threads, runs, tokens = map(pick, ("threads", "runs", "tokens"))
        return cls(args.target, threads, runs, tokens, args.quick, args.peers)

    def context(self, name: str, n_ctx: int = 1024, n_seq_max: int = 8) -> lb.Context:
        """Open a context on a model by name or path."""
        return lb.load(name, n_ctx=n_ctx, n_threads=self.threads, n_seq_max=n_seq_max)

    def as_dict(self) -> JSON:
        """Return the settings that go into the JSON line."""
        names = ("threads", "runs", "tokens", "quick")
        return {name: getattr(self, name) for name in names}


def parser(
    description: str, *, runs: int = 1, tokens: int = 1, target: str = "tale-target"
) -> argparse.ArgumentParser:
    """Return a parser with the options all benchmarks share."""
    described = argparse.ArgumentParser(description=description)
    defaults = {"threads": Machine.now().cores, "runs": runs, "tokens": tokens}
    add = described.add_argument
    add("--target", default=target, help="GGUF file, or a name from `llamabranch models`")
    add("--threads", type=int, help=f"for each program; default: {defaults['threads']}")
    add("--runs", type=int, help=f"default: {runs}")
    add("--tokens", type=int, help=f"generated for each text; default: {tokens}")
    add("--quick", action="store_true", help="only check that it runs: the times mean nothing")
    add("--peers", type=Path, help="folder with llama.cpp's programs; default: without them")
    described.set_defaults(defaults=defaults)
    return described


# -- tables ----------------------------------------------------------------------------------------


def title(model: lb.Model) -> str:
    """Return the model's name and size for the head of a table."""
    return f"{model.name} ({model.n_params / 1e6:.1f}M, {model.file_type})"


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n**{caption}**\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(row)} |")


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


def series_json(series: Series, base: Series) -> JSON:
    """Return a contestant's speed, its ratio to ``base``, and its statistics."""
    return {
        "tokens_per_second": series.rate.as_dict(),
        "ratio": series.ratio(base).as_dict(),
        "runs": series.rates,
        "n_tokens": series.total.n_tokens,
        "stats": series.stats.as_dict(),
    }


def emit(
    name: str, settings: Settings, models: Mapping[str, lb.Model], results: JSON, **more: object
) -> None:
    """Print the JSON line, the last line of every benchmark."""
    machine = Machine.now()
    line = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": machine.as_dict(),
        "versions": {
            "llamabranch": lb.__version__,
            "llama_cpp_python": machine.llama_cpp_python,
            "llama_cpp": machine.llama_cpp,
        },
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


def _clean(value: object) -> object:
    """Return ``value`` with None for nan and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
