"""Perplexity and KL divergence of models on a text, for ``llamabranch eval``."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import llamabranch as lb
from llamabranch import ConfigError, Context, VocabularyMismatchError
from llamabranch.eval import (
    KLDivergence,
    LogitsFile,
    Perplexity,
    Uncertain,
    divergence,
    perplexity,
    save_logits,
    strided_perplexity,
)

from .console import Console, print_json
from .files import check_new_file
from .formats import base_name, decimal_size, number
from .measuring import Kept, Progress, interruptible, open_for_chunks, window_of
from .options import ModelOptions
from .prompts import read_prompt_file

__all__ = ["Reading", "compare_models", "measure_against", "measure_perplexity"]

_CHUNKS = 16  # where models are compared
_N_WRITTEN = 48
_BAR = 30


@dataclass(frozen=True)
class Reading:
    """What is read, and where the results go: the options of the command by their names there."""

    text_file: Path | None
    chunks: int | None
    stride: int | None
    save_to: Path | None
    kept_file: Path | None
    resume: bool
    as_json: bool

    def text(self) -> str:
        """Return the text. Raises ConfigError if it cannot be read."""
        if self.text_file is None:
            raise ConfigError("there is no text", hint="--perplexity FILE")
        return read_prompt_file(self.text_file)


# -- perplexity ----------------------------------------------------------------------------------------


def measure_perplexity(
    task: Reading, name: str, models: ModelOptions, console: Console, stack: ExitStack
) -> None:
    """Measure and print the perplexity of a model."""
    stride, chunks, save_to = task.stride, task.chunks, task.save_to
    if stride is not None and (save_to is not None or chunks is not None):
        raise ConfigError("--stride goes with neither --save-logits nor --chunks")
    text = task.text()
    kept = Kept(task.kept_file, task.resume, "perplexity")
    if save_to is not None and not kept.data:
        hint = f"--against {save_to} reads it; to write, name another file, or delete it"
        check_new_file(save_to, hint=hint)
    earlier = Perplexity.from_dict(kept.data) if kept.data else None
    window = window_of(name, models)
    ctx = open_for_chunks(name, models, window, console, stack)

    def work(note: Callable[[Perplexity], None]) -> Perplexity:
        if stride is not None:
            return strided_perplexity(ctx, text, window, stride, progress=note, resume=earlier)
        if save_to is None:
            return perplexity(ctx, text, window, chunks=chunks, progress=note, resume=earlier)
        return save_logits(ctx, text, save_to, window, chunks=chunks, progress=note, resume=earlier)

    def show(found: Perplexity) -> None:
        _print_perplexity(console, ctx, found, as_json=task.as_json)

    def told(done: Perplexity) -> str:
        return f"perplexity {number(done.value, 4)}"

    _measured(work, earlier, kept, console, told, show)


_Found = TypeVar("_Found", Perplexity, KLDivergence)


def _measured(
    work: Callable[[Callable[[_Found], None]], _Found],
    earlier: _Found | None,
    kept: Kept,
    console: Console,
    told: Callable[[_Found], str],
    show: Callable[[_Found], None],
) -> None:
    """Do ``work`` with a line of progress, keep what is done, and ``show`` it, also when interrupted."""
    found: list[_Found] = [] if earlier is None else [earlier]
    shown: list[Progress] = []

    def note(done: _Found) -> None:
        if not shown:
            n_before = 0 if earlier is None else earlier.n_done
            shown.append(Progress(console, "chunks", done.n_chunks, n_before))
        found[:] = [done]
        shown[0].show(done.n_done, told(done))
        kept.save(done.as_dict)

    with interruptible(console) as interrupted:
        found[:] = [work(note)]
    if found and found[0].n_done:
        kept.save(found[0].as_dict, now=True)
        show(found[0])
    if interrupted:
        raise interrupted[0]


def _print_perplexity(console: Console, ctx: Context, found: Perplexity, *, as_json: bool) -> None:
    if as_json:
        about = {"name": ctx.model.name, "kv_type": ctx.kv_type}
        answer = {k: v for k, v in found.as_dict().items() if k != "losses"}
        print_json({**about, **answer, "by_chunk": found.by_chunk, "running": found.running})
        return
    console.table(
        ("perplexity", "±", "tokens scored", "chunks", "window", "method", "K/V"),
        [
            (
                number(found.value, 4),
                number(found.stderr, 4),
                str(found.n_tokens),
                f"{found.n_done} of {found.n_chunks}",
                str(found.window),
                found.method,
                ctx.kv_type,
            )
        ],
    )


# -- against saved log-probabilities -------------------------------------------------------------------


def measure_against(
    logits: Path,
    task: Reading,
    names: Sequence[str],
    models: ModelOptions,
    console: Console,
    stack: ExitStack,
) -> None:
    """Compare a model with the log-probabilities that a file has of another, as llama-perplexity does."""
    if len(names) > 1 or task.text_file or task.chunks or task.stride or task.save_to:
        raise ConfigError(
            f"{logits} holds the text and its chunks, and is compared with one model",
            hint="--against MODEL compares several",
        )
    kept = Kept(task.kept_file, task.resume, "kld")
    earlier = KLDivergence.from_dict(kept.data) if kept.data else None
    with LogitsFile.open(logits) as file:
        window = file.window
    ctx = open_for_chunks(names[0], models, window, console, stack)

    def work(note: Callable[[KLDivergence], None]) -> KLDivergence:
        return divergence(ctx, logits, progress=note, resume=earlier)

    def show(found: KLDivergence) -> None:
        if task.as_json:
            answer = {k: v for k, v in found.as_dict().items() if k != "rows"}
            print_json({"name": ctx.model.name, "kv_type": ctx.kv_type, **answer})
        else:
            _print_divergence(console, found)

    def told(done: KLDivergence) -> str:
        return f"KL divergence {number(done.statistics.mean.value, 5)}"

    _measured(work, earlier, kept, console, told, show)


def _print_divergence(console: Console, found: KLDivergence) -> None:
    def row(name: str, value: Uncertain, digits: int = 6, factor: float = 1) -> tuple[str, ...]:
        return name, number(factor * value.value, digits), number(factor * value.stderr, digits)

    its = found.statistics
    console.table(
        ("", "value", "±"),
        [
            row("perplexity", its.perplexity),
            row("perplexity of the base", its.base_perplexity),
            row("log of their ratio", its.log_ratio),
            row("ratio", its.ratio),
            row("difference", its.difference),
            ("correlation of the losses", number(its.correlation, 6), ""),
            row("mean KL divergence, nats", its.mean),
            row("same most probable token, %", its.same_top, 3, 100),
            row("mean change of probability, %", its.p_change, 3, 100),
            row("root mean square change, %", its.p_change_rms, 3, 100),
        ],
    )
    console.line()
    fractions = (0.0, 0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
    names = ["minimum", "1 %", "10 %", "median", "90 %", "95 %", "99 %", "99.9 %", "maximum"]
    changes = (number(100 * found.p_change_percentile(f), 3) for f in fractions)
    console.table(
        ("percentiles", *names),
        [
            ("KL divergence", *(number(found.percentile(f), 5) for f in fractions)),
            ("change of probability, %", *changes),
        ],
    )
    console.line()
    console.line(f"{found.n_tokens} tokens, {found.n_done} of {found.n_chunks} chunks", "dim")
    if found.n_tokens < 100:
        console.note("fewer than 100 tokens: llama-perplexity gives no statistics for so few")


# -- several models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """What is known of one file."""

    model: str
    file_type: str
    size_bytes: int
    perplexity: float
    perplexity_stderr: float
    kl: float = 0.0
    kl_stderr: float = 0.0
    kl_99: float = 0.0
    same_top: float = 1.0
    read_tokens_per_s: float = math.nan
    write_tokens_per_s: float = math.nan
    exact: bool = False
    why: str = ""
    made_from: str | None = None


def compare_models(
    task: Reading, names: Sequence[str], base: str | None, models: ModelOptions, console: Console
) -> None:
    """Measure several models on a text; with a base also how far the others are from it."""
    if task.stride is not None or task.save_to is not None:
        raise ConfigError("--stride and --save-logits are for one model")
    text = task.text()
    names = list(dict.fromkeys(names if base is None else [base, *names]))
    if len(names) < 2:
        raise ConfigError("--against compares with another model", hint="-m names one")
    kept = Kept(task.kept_file, task.resume, "quants")
    sizes = {
        n: sum(p.stat().st_size for p in lb.hub.parts(lb.hub.resolve(n, download=None)))
        for n in names
    }
    if base is not None:
        names = [base, *sorted((n for n in names if n != base), key=lambda n: -sizes[n])]
        _check_vocabularies(names)
    window, chunks = window_of(names[0], models), task.chunks or _CHUNKS
    settings: dict[str, object] = {
        "models": names, "file": str(task.text_file), "chunks": chunks, "window": window,
        "kv_type": models.kv_type or "f16",
    }  # fmt: skip
    if kept.data and kept.data.get("settings") != settings:
        raise ConfigError(
            f"{task.kept_file} is of other models, another text or other settings",
            hint="resume with the same command",
        )
    found = kept.data.get("rows")
    rows = {n: _Row(**row) for n, row in (found if isinstance(found, dict) else {}).items()}
    with tempfile.TemporaryDirectory() as folder:
        # The base's log-probabilities, which the others are compared with.
        logits = Path(folder, "logits")
        if kept.path is not None:
            logits = kept.path.with_name(kept.path.name + ".logits")
            if not kept.data:
                check_new_file(logits)
            if base not in rows:
                logits.unlink(missing_ok=True)

        def save() -> None:
            data = {"settings": settings, "rows": {n: asdict(row) for n, row in rows.items()}}
            kept.save(lambda: data, now=True)

        save()
        with interruptible(console) as interrupted:
            for name in (name for name in names if name not in rows):
                with ExitStack() as opened:
                    ctx = open_for_chunks(name, models, window, console, opened)
                    shown = Progress(console, f"chunks, {base_name(name)}", chunks)
                    row = _row(ctx, name, text, window, chunks, base, logits, shown)
                    rows[name] = replace(row, size_bytes=sizes[name])
                    save()
        if not interrupted:
            logits.unlink(missing_ok=True)
    done = [rows[name] for name in names if name in rows]
    if task.as_json:
        print_json({"base": base, "window": window, "models": [asdict(row) for row in done]})
    elif done:
        _print_rows(console, done, with_base=base is not None)
    if interrupted:
        raise interrupted[0]


def _check_vocabularies(names: Sequence[str]) -> None:
    with lb.Model(lb.hub.resolve(names[0]), vocab_only=True) as first:
        for name in names[1:]:
            with lb.Model(lb.hub.resolve(name), vocab_only=True) as other:
                if first.compatibility(other).path != "tokens":
                    raise VocabularyMismatchError(
                        f"{name} has another vocabulary than {names[0]}",
                        hint="compare quantisations of one model",
                    )


def _row(
    ctx: Context,
    name: str,
    text: str,
    window: int,
    chunks: int,
    base: str | None,
    logits: Path,
    shown: Progress,
) -> _Row:
    """Return the row of a model; that of the base writes its log-probabilities to ``logits``."""
    start_s = perf_counter()

    def note(done: Perplexity | KLDivergence) -> None:
        shown.show(done.n_done)

    if base in (None, name):
        if base is None:
            found = perplexity(ctx, text, window, chunks=chunks, progress=note)
        else:
            found = save_logits(ctx, text, logits, window, chunks=chunks, progress=note)
        n_read, figures = found.n_done * window, (found.value, found.stderr)
        row = _Row(name, ctx.model.file_type, 0, *figures)
    else:
        kl = divergence(ctx, logits, progress=note)
        its, n_read = kl.statistics, kl.n_done * window
        row = _Row(
            name, ctx.model.file_type, 0, *its.perplexity, *its.mean, kl.percentile(0.99),
            its.same_top.value,
        )  # fmt: skip
    read_s = perf_counter() - start_s
    with lb.Context(ctx.model, n_ctx=256, n_seq_max=2, n_threads=ctx.n_threads) as plain:
        can = plain.capabilities
    return replace(
        row,
        read_tokens_per_s=n_read / read_s,
        write_tokens_per_s=_write_speed(ctx, text),
        exact=can.batch_invariant,
        why=can.batch_invariant_reason,
        made_from=lb.hub.made_from(name),
    )


def _write_speed(ctx: Context, text: str) -> float:
    """Return tokens a second of plain generation."""
    with lb.Branch.start(ctx, ctx.model.tokenize(text)[:64], temperature=0.8, seed=1) as branch:
        start_s = perf_counter()
        n = sum(1 for _ in branch.generate(min(_N_WRITTEN, ctx.n_ctx - 64)))
        return n / (perf_counter() - start_s)


def _print_rows(console: Console, rows: Sequence[_Row], *, with_base: bool) -> None:
    columns = ("model", "type", "size", "perplexity", "±", "read/s", "write/s", "exact")
    between = ("KL, nats", "±", "99 % KL", "same top") if with_base else ()
    table = []
    for i, row in enumerate(rows):
        compared: tuple[str, ...] = ()
        if with_base:
            compared = (
                number(row.kl, 5), number(row.kl_stderr, 5), number(row.kl_99, 4),
                f"{row.same_top:.2%}",
            ) if i else ("base", "", "", "")  # fmt: skip
        table.append(
            (
                base_name(row.model),
                row.file_type,
                decimal_size(row.size_bytes),
                number(row.perplexity, 3),
                number(row.perplexity_stderr, 3),
                *compared,
                number(row.read_tokens_per_s, 0),
                number(row.write_tokens_per_s, 0),
                "yes" if row.exact else "no",
            )
        )
    console.table((*columns[:5], *between, *columns[5:]), table, left=("type",))
    for row in rows if with_base else ():
        if row.made_from is not None:
            console.line()
            console.line(
                f"{base_name(row.model)} was made from {row.made_from}, whose losses it has: its figures "
                "show what that step changed, not how near it is to the original model."
            )
    largest = max(row.kl for row in rows)
    if largest > 0:
        console.line()
        bars = [
            (
                base_name(row.model),
                decimal_size(row.size_bytes),
                "█" * max(round(_BAR * row.kl / largest), row.kl > 0) + f" {row.kl:.5f}",
            )
            for row in rows[1:]
        ]
        console.table(("KL divergence by size", "size", ""), bars, left=("",))
