"""Perplexity and KL divergence of models on a text, for ``llamabranch eval``."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import llamabranch as lb
from llamabranch import ConfigError, Context
from llamabranch.eval import KLDivergence, Perplexity, Uncertain

from ..files import atomic_write
from ..loading import LoadOptions
from .bundles import option
from .console import Console, Progress, finite
from .files import check_new_file, read_prompt_file, writing
from .formats import base_name, decimal_size, number
from .options import OUTPUT, ModelOptions, trained_length, vocabulary

_CHUNKS, _WINDOW = 16, 512  # where models are compared; tokens a chunk
_N_WRITTEN = 48
_ROW_BYTES = 64 * 2**20  # of logits at a time
_SAVED_EVERY_S = 10.0
_FRACTIONS = {
    "minimum": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "95 %": 0.95, "99 %": 0.99,
    "99.9 %": 0.999, "maximum": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class ReadingOptions:
    """Which text is read, and what the models are compared with."""

    panel: ClassVar[str] = "Perplexity and KL divergence"
    first: ClassVar[str] = "text_file against chunks output_file"

    text_file: Path | None = option(
        None,
        "The text: a file in UTF-8. It is cut into chunks of --ctx-size tokens (512), of which the "
        "second half is scored, as llama-perplexity does.",
        "--perplexity --file -f",
        metavar="FILE",
    )
    against: str | None = option(
        None,
        "A model that the others are compared with by KL divergence; or what --save-logits or "
        "llama-perplexity wrote of one, which holds the text too.",
        metavar="MODEL|FILE",
    )
    chunks: int | None = option(
        None, "Score at most N chunks.  [default: all; 16 with --against MODEL]", min=1
    )
    save_to: Path | None = option(
        None,
        "Write the log-probabilities to this file, for --against and llama-perplexity.",
        "--save-logits --save-all-logits --kl-divergence-base",
    )
    output_file: Path | None = option(
        None,
        "Write the results to this file, also when interrupted; of tasks, each item on a line.",
        "--output -o",
        rich_help_panel=OUTPUT,
    )

    def check_output(self) -> Path | None:
        """Return --output. Raises ConfigError if a file is there."""
        if self.output_file is not None:
            check_new_file(self.output_file, hint="name another file")
        return self.output_file

    @property
    def logits(self) -> Path | None:
        """The file of log-probabilities to compare with; None where that is a model, or nothing."""
        path = Path(self.against or "")
        if self.against is None or not path.is_file():
            return None
        with path.open("rb") as file:
            return None if file.read(4) == b"GGUF" else path

    def text(self) -> str:
        """Return the text. Raises ConfigError if it cannot be read."""
        if self.text_file is None:
            raise ConfigError("there is no text", hint="--perplexity FILE")
        return read_prompt_file(self.text_file)


# -- what all that scores shares -----------------------------------------------------------------------


def scoring_options(name: str, models: ModelOptions, n_seq_max: int) -> LoadOptions:
    """Return options of a context whose rows of logits take a bounded memory, whatever the vocabulary."""
    with vocabulary(name) as model:
        rows = _ROW_BYTES // (4 * model.n_vocab)
    n_batch = models.set("load").get("n_batch") or 512
    n_seq_max = min(n_seq_max, n_batch)
    return {"n_seq_max": n_seq_max, "n_outputs_max": max(n_seq_max, min(n_batch, 256, rows))}


def open_for_chunks(name: str, models: ModelOptions, window: int, console: Console) -> Context:
    """Open a context for texts that are read in chunks, with llama-perplexity's K/V type, f16."""
    more = scoring_options(name, models, 1)
    n_batch = models.set("load").get("n_batch") or min(512, window)
    n_outputs = min(more["n_outputs_max"] or n_batch, n_batch)
    more |= {"n_ctx": window, "n_batch": n_batch, "n_outputs_max": n_outputs}
    more |= {"batch_invariant": False, "kv_type": models.kv_type or "f16"}
    return models.open(name, console, **more)


def _window_of(name: str, models: ModelOptions) -> int:
    """Return the tokens of a chunk: ``--ctx-size`` as in llama-perplexity; 0 is the trained length."""
    return (trained_length(name) if models.n_ctx == 0 else models.n_ctx) or _WINDOW


class Checkpoint:
    """Results in a JSON file that is replaced as a whole while a command goes on.

    Args:
        reading: names the file, if any.
        kind: what it is of.

    Raises:
        ConfigError: a file is there.
    """

    def __init__(self, reading: ReadingOptions, kind: str) -> None:
        self.path = path = reading.check_output()
        self._kind, self._saved_s = kind, perf_counter()
        if path is not None and path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file", hint="leave out --output")

    def save(self, data: Callable[[], dict[str, object]], *, now: bool = False) -> None:
        """Write the file, unless that was done some seconds ago and is not wanted ``now``.

        Raises:
            OutputError: the disk is full.
        """
        if self.path is None or (not now and perf_counter() - self._saved_s < _SAVED_EVERY_S):
            return
        text = json.dumps(finite({"kind": self._kind, **data()}), ensure_ascii=False)
        with writing(self.path), atomic_write(self.path) as file:
            file.write(f"{text}\n".encode())
        self._saved_s = perf_counter()


# -- one model -----------------------------------------------------------------------------------------


def measure(reading: ReadingOptions, name: str, models: ModelOptions, console: Console) -> None:
    """Print the perplexity of a model, or how far it is from the one that a file has logits of.

    What is done is kept and printed when it is interrupted, too.
    """
    logits, save_to = reading.logits, reading.save_to
    if logits is not None and (reading.text_file or reading.chunks or save_to):
        message = f"{logits} holds the text and its chunks, and is compared with one model"
        raise ConfigError(message, hint="--against MODEL compares several")
    text = reading.text() if logits is None else ""
    checkpoint = Checkpoint(reading, "perplexity" if logits is None else "kld")
    if save_to is not None:
        hint = f"--against {save_to} reads it; to write, name another file, or delete it"
        check_new_file(save_to, hint=hint)
    found: Perplexity | KLDivergence | None = None

    def note(done: Perplexity | KLDivergence) -> None:
        nonlocal found
        found = done
        message = f"perplexity {number(done.value, 4)}" if isinstance(done, Perplexity) else ""
        shown.show(done.n_done, done.n_chunks, message)
        checkpoint.save(done.as_dict)

    if logits is None:
        window = _window_of(name, models)
    else:
        with lb.eval.LogitsFile.open(logits) as file:
            window = file.window
    with open_for_chunks(name, models, window, console) as ctx:
        shown = Progress(console, "chunks")
        try:
            if logits is not None:
                found = lb.eval.divergence(ctx, logits, progress=note)
            else:
                found = lb.eval.perplexity(
                    ctx, text, window, chunks=reading.chunks, save_to=save_to, progress=note
                )
        finally:
            console.progress("")
            if found is not None and found.n_done:
                checkpoint.save(found.as_dict, now=True)
                _print(console, ctx, found)


def _print(console: Console, ctx: Context, found: Perplexity | KLDivergence) -> None:
    its = {k: v for k, v in found.as_dict().items() if k not in ("losses", "rows")}
    n_chunks = f"{found.n_done} of {found.n_chunks}"
    if isinstance(found, KLDivergence):
        for names, *rows in divergence_tables(found):
            console.table(names, rows)
            console.line()
        console.line(f"{found.n_tokens} tokens, {n_chunks} chunks", "dim")
        if found.n_tokens < 100:
            console.note("fewer than 100 tokens: llama-perplexity gives no statistics for so few")
    else:
        its |= {"by_chunk": found.by_chunk, "running": found.running}
        row = (number(found.value, 4), number(found.stderr, 4), found.n_tokens, n_chunks)
        columns = ("perplexity", "±", "tokens scored", "chunks", "window", "K/V")
        console.table(columns, [(*row, found.window, ctx.kv_type)])
    console.answer({"name": ctx.model.name, "kv_type": ctx.kv_type, **its})


def divergence_tables(found: KLDivergence) -> list[list[tuple[str, ...]]]:
    """Return the statistics and the percentiles as tables, each with a first row of names."""
    its = found.statistics
    natural = {
        "perplexity": its.perplexity,
        "perplexity of the base": its.base_perplexity,
        "log of their ratio": its.log_ratio,
        "ratio": its.ratio,
        "difference": its.difference,
        "correlation of the losses": Uncertain(its.correlation, math.nan),
        "mean KL divergence, nats": its.mean,
    }
    percent = {
        "same most probable token, %": its.same_top,
        "mean change of probability, %": its.p_change,
        "root mean square change, %": its.p_change_rms,
    }
    kls = (number(found.percentile(f), 6) for f in _FRACTIONS.values())
    changes = (number(100 * found.p_change_percentile(f), 3) for f in _FRACTIONS.values())
    return [
        [
            ("", "value", "±"),
            *((name, *(number(v, 6) for v in each)) for name, each in natural.items()),
            *((name, *(number(100 * v, 3) for v in each)) for name, each in percent.items()),
        ],
        [
            ("percentiles", *_FRACTIONS),
            ("KL divergence", *kls),
            ("change of probability, %", *changes),
        ],
    ]


# -- several models ------------------------------------------------------------------------------------


def compare_models(
    reading: ReadingOptions,
    names: Sequence[str],
    base: str | None,
    models: ModelOptions,
    console: Console,
) -> None:
    """Measure several models on a text; with a base also how far the others are from it."""
    if reading.save_to is not None:
        raise ConfigError("--save-logits is for one model")
    text = reading.text()
    names = list(dict.fromkeys(names if base is None else [base, *names]))
    if len(names) < 2:
        raise ConfigError("--against compares with another model", hint="-m names one")
    checkpoint = Checkpoint(reading, "quants")
    files = {name: lb.hub.parts(lb.hub.resolve(name, download=None)) for name in names}
    sizes = {name: sum(part.stat().st_size for part in parts) for name, parts in files.items()}
    if base is not None:
        names = [base, *sorted((n for n in names if n != base), key=lambda n: -sizes[n])]
        _check_vocabularies(names)
    window, chunks = _window_of(names[0], models), reading.chunks or _CHUNKS
    settings: dict[str, object] = {
        "models": names, "file": str(reading.text_file), "chunks": chunks, "window": window,
        "kv_type": models.kv_type or "f16",
    }  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    kept: dict[str, object] = {"settings": settings, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        # The base's log-probabilities, which the others are compared with.
        logits = Path(folder, "logits")
        checkpoint.save(lambda: kept, now=True)
        try:
            for name in names:
                with open_for_chunks(name, models, window, console) as ctx:
                    saved = None if base is None else logits
                    row = _row(
                        ctx, name, text, window, chunks, saved, console, is_base=name == base
                    )
                rows[name] = {"model": name, "size_bytes": sizes[name], **row}
                checkpoint.save(lambda: kept, now=True)
        finally:
            console.progress("")
            done = [rows[name] for name in names if name in rows]
            if done:
                _print_rows(console, done, with_base=base is not None)
                console.answer({"base": base, "window": window, "models": done})


def _check_vocabularies(names: Sequence[str]) -> None:
    with vocabulary(names[0]) as first:
        for name in names[1:]:
            with vocabulary(name) as other:
                if first.compatibility(other).path != "tokens":
                    raise lb.errors.VocabularyMismatchError(
                        f"{name} has another vocabulary than {names[0]}",
                        hint="compare quantisations of one model",
                    )


def _row(
    ctx: Context,
    name: str,
    text: str,
    window: int,
    chunks: int,
    logits: Path | None,
    console: Console,
    *,
    is_base: bool,
) -> dict[str, Any]:
    """Return what is known of a model; the base writes its log-probabilities to ``logits``."""
    shown = Progress(console, f"chunks, {base_name(name)}")

    def note(done: Perplexity | KLDivergence) -> None:
        shown.show(done.n_done, chunks)

    start_s = perf_counter()
    row: dict[str, Any] = {"file_type": ctx.model.file_type}
    row |= {"kl": 0.0, "kl_stderr": 0.0, "kl_99": 0.0, "same_top": 1.0}
    found: Perplexity | KLDivergence
    if is_base or logits is None:
        options: Any = {"chunks": chunks, "progress": note, "save_to": logits}
        found = lb.eval.perplexity(ctx, text, window, **options)
        figures = found.value, found.stderr
    else:
        found = lb.eval.divergence(ctx, logits, progress=note)
        its, figures = found.statistics, found.statistics.perplexity
        row |= {"kl": its.mean.value, "kl_stderr": its.mean.stderr, "same_top": its.same_top.value}
        row["kl_99"] = found.percentile(0.99)
    read_s = perf_counter() - start_s
    with lb.Context(ctx.model, n_ctx=256, n_seq_max=2, n_threads=ctx.n_threads) as plain:
        can = plain.capabilities
    with lb.Branch.start(ctx, ctx.model.tokenize(text)[:64], temperature=0.8, seed=1) as branch:
        start_s = perf_counter()
        n = sum(1 for _ in branch.generate(min(_N_WRITTEN, ctx.n_ctx - 64)))
        write_s = perf_counter() - start_s
    return row | {
        "perplexity": figures[0],
        "perplexity_stderr": figures[1],
        "read_tokens_per_s": found.n_done * window / read_s,
        "write_tokens_per_s": n / write_s,
        "exact": can.batch_invariant,
        "why": can.batch_invariant_reason,
        "made_from": lb.hub.made_from(name),
    }


def _print_rows(console: Console, rows: Sequence[dict[str, Any]], *, with_base: bool) -> None:
    def cells(names: Sequence[str], row: dict[str, Any], digits: Sequence[int]) -> list[str]:
        values = (math.nan if row[name] is None else row[name] for name in names)  # of a file
        return [number(value, n) for value, n in zip(values, digits, strict=True)]

    columns = ("model", "type", "size", "perplexity", "±", "read/s", "write/s", "exact")
    between = ("KL, nats", "±", "99 % KL", "same top") if with_base else ()
    table = []
    for i, row in enumerate(rows):
        compared = cells(("kl", "kl_stderr", "kl_99"), row, (5, 5, 4)) if i else ["base", "", ""]
        compared.append(f"{row['same_top']:.2%}" if i else "")
        about = (base_name(row["model"]), row["file_type"], decimal_size(row["size_bytes"]))
        first = cells(("perplexity", "perplexity_stderr"), row, (3, 3))
        speeds = cells(("read_tokens_per_s", "write_tokens_per_s"), row, (0, 0))
        table.append([*about, *first, *(compared if with_base else ()), *speeds, row["exact"]])
    console.table((*columns[:5], *between, *columns[5:]), table, left=("type",))
    for row in rows if with_base else ():
        if row["made_from"] is not None:
            console.line()
            console.line(
                f"{base_name(row['model'])} was made from {row['made_from']}, whose losses it has: its "
                "figures show what that step changed, not how near it is to the original model."
            )
