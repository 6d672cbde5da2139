"""``llamabranch bench``: measure how fast the available settings are, and name the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pydoc_data.topics import topics
from typing import Any

import typer

from llamabranch.bench.machine import Machine
from llamabranch.bench.speed import Speeds, fastest, measure, median
from llamabranch.errors import ConfigError, DecodeInterruptedError, UnsupportedError

from . import options as opt
from .console import Console, number
from .drafters import open_pair, resolve
from .interrupts import EXIT_INTERRUPTED, InterruptHandler
from .options import Given, option, with_options

COLUMNS = ("tokens a second", "after", "read", "generate", "with drafts")
FLAGS = {"flash_attn": "-fa", "kv_type": "-ctk", "threads": "-t"}
_ROOM = 256  # cells for tokens generated in addition to -n


@with_options(
    f"max_tokens temperature settings model draft {opt.MEMORY_OPTIONS} as_json verbose",
    max_tokens=32,
)
def bench(
    given: Given,
    console: Console,
    lengths: str = option(opt.TEXT, "--lengths N,N", "Tokens of a prompt.", "64,2000,6000"),
    runs: int = option(opt.TEXT, "-r --runs N", "Runs of each setting.", 2, min=1),
) -> None:
    """Measure which settings are fastest on this machine.

    llamabranch bench -m qwen3-4b -md qwen3-0.6b
    llamabranch bench -m tale-target --lengths 64,500 -n 16 -r 1 -fa 1

    The settings take turns: flash attention, K/V types, threads, exact or not.
    What you set is not varied. The last line names the fastest setting.
    """
    names, machine = resolve(given, console), Machine.now()
    n_tokens = 32 if given.max_tokens is None else given.max_tokens
    fitting = _lengths(given, lengths, names[0], n_tokens)
    n_ctx = given.n_ctx or max(fitting) + n_tokens + _ROOM
    given = replace(given, n_ctx=n_ctx, max_tokens=n_tokens)
    speeds: dict[str, Speeds] = {}
    complete = _measure_all(given, console, names, fitting, runs, speeds)
    console.progress("")
    rows = [
        (name, f"{n:,}", *(number(median(rates.get(n, [])), 1) for rates in vars(each).values()))
        for name, each in speeds.items()
        for n in each.read
    ]
    console.table(COLUMNS, rows)
    best = fastest(speeds)
    if best and names[1]:  # there is a choice
        best += f" -md {'+'.join(names[1]) if speeds[best].drafts_pay else 'none'}"
    if best:
        console.line(f"fastest here: {best}")
    console.answer(
        {
            "model": names[0],
            "drafters": list(names[1]),
            "machine": machine.as_dict(),
            "interrupted": not complete,
            "tokens_per_second": {name: asdict(each) for name, each in speeds.items()},
            "fastest": best,
        }
    )
    if not complete:
        console.note("interrupted: these are the measurements so far")
        raise typer.Exit(EXIT_INTERRUPTED)


def _lengths(given: Given, text: str, model: str, n_tokens: int) -> list[int]:
    """Return the prompt lengths that fit into -c, or into the trained context length, in order."""
    parts = filter(None, map(str.strip, text.split(",")))
    lengths = sorted({int(part) if part.isdecimal() else 0 for part in parts})
    most = given.n_ctx - _ROOM if given.n_ctx else opt.trained_length(model)
    fitting = [n for n in lengths if most is None or n + n_tokens <= most]
    if not fitting or fitting[0] < 2:
        limit = "" if most is None else f" to {most - n_tokens}"
        raise ConfigError(f"--lengths {text}: use numbers from 2{limit}, as in 64,500")
    return fitting


def _settings(given: Given) -> Iterator[tuple[str, Given]]:
    """Yield each setting: its flags, and all options. The user's own options never change."""
    machine, is_set = Machine.now(), given.load_options()
    varied: dict[str, list[Any]] = {}
    if given.flash_attn == "auto":
        varied["flash_attn"] = ["1", "0"]
    if "kv_type" not in is_set:
        varied["kv_type"] = ["f16", "bf16"] if "AVX512_BF16" in machine.features else ["f16"]
    if not given.threads:
        varied["threads"] = sorted({machine.cores, machine.cores // 2 or 1}, reverse=True)
    for values in product(*varied.values()):
        changes: dict[str, Any] = dict(zip(varied, values, strict=True))
        flags = " ".join(f"{FLAGS[name]} {value}" for name, value in changes.items())
        yield flags or "as set", replace(given, **changes)
    if "exact" not in is_set:
        yield "-S exact=true", replace(given, settings=[*(given.settings or ()), "exact=true"])


def _measure_all(
    given: Given,
    console: Console,
    names: tuple[str, tuple[str, ...]],
    lengths: Sequence[int],
    runs: int,
    speeds: dict[str, Speeds],
) -> bool:
    """Add ``runs`` runs of each setting to ``speeds``; return False if Ctrl-C ended them."""
    settings = list(_settings(given))
    for run in range(runs):
        for flags, options in settings[:: 1 if run % 2 == 0 else -1]:
            console.progress(f"run {run + 1} of {runs}: {flags}")
            each = speeds.get(flags) or Speeds()
            try:
                context, drafter = open_pair(options, names, console)
                text = context.tokenize("\n".join(topics.values()))[: max(lengths)]
                banned = dict.fromkeys(context.model.eog_tokens, -math.inf)  # so that no text ends
                sampling = options.params().replace(logit_bias=banned)
                with InterruptHandler([context, *drafter.contexts]):
                    measure(
                        context, drafter if names[1] else None, text, lengths, given.max_tokens or 0,
                        sampling, each,
                    )  # fmt: skip
                speeds[flags] = each
            except UnsupportedError as error:
                console.note(f"without {flags}: {error}")
            except DecodeInterruptedError:
                return False
            finally:
                console.resources.close()
    return True
