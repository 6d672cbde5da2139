"""``llamabranch quants``: quantisations of one model side by side, to choose a file."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, ClassVar

import typer

import llamabranch as lb
from llamabranch import ConfigError, VocabularyMismatchError
from llamabranch.eval import KLDivergence, Perplexity, divergence, save_logits

from .bundles import option, with_bundles
from .console import Console, print_json
from .files import check_new_file
from .formats import base_name, decimal_size, number
from .measuring import (
    Kept,
    KeptOptions,
    Progress,
    TextFile,
    interruptible,
    open_for_chunks,
    window_of,
)
from .options import (
    MODELS,
    OUTPUT,
    REQUESTS,
    HubOptions,
    OutputOptions,
    RuntimeOptions,
    TargetOptions,
)
from .prompts import read_prompt_file

_CHUNKS = 16
_N_WRITTEN = 48
_BAR = 30


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


@dataclass(frozen=True)
class QuantsOptions:
    """What is compared, and on which text."""

    panel: ClassVar[str] = REQUESTS

    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Quantisations of one model, two or more.",
            rich_help_panel="Arguments",
        ),
    ]
    file: TextFile
    base: str | None = option(
        None,
        "What the others are compared with. Default: the largest, or what that was made from.",
        metavar="MODEL",
        rich_help_panel=MODELS,
    )
    chunks: int = option(_CHUNKS, "Chunks of the text at most.", min=1)
    plot: Path | None = option(
        None,
        "Also draw size and divergence to this PNG file; needs matplotlib.",
        rich_help_panel=OUTPUT,
    )


@with_bundles
def quants(
    *,
    given: QuantsOptions,
    keeping: KeptOptions,
    hub: HubOptions,
    runtime: RuntimeOptions,
    output: OutputOptions,
) -> None:
    """Compare quantisations of one model on one text, to choose a file.

    For each its size, perplexity, KL divergence from the base, how often both find the same token most
    probable, speed, and whether its batches are exact.
    """
    with output.console() as console, ExitStack() as stack:
        base, plot = given.base, given.plot
        names = list(dict.fromkeys(given.names if base is None else [base, *given.names]))
        if len(names) < 2:
            raise ConfigError("give two models or more", hint="quants a.gguf b.gguf -f text.txt")
        text = read_prompt_file(given.file)
        if plot is not None and not keeping.resume:
            check_new_file(plot)
        kept = keeping.open("quants")
        sizes = {
            name: sum(p.stat().st_size for p in lb.hub.parts(hub.find(name))) for name in names
        }
        largest = max(names, key=sizes.__getitem__)
        origin = lb.hub.made_from(largest)
        first = base or (origin if origin in names else None) or largest
        names = [first, *sorted((n for n in names if n != first), key=lambda n: -sizes[n])]
        _check_vocabularies(names)
        window = window_of(first, runtime)
        settings: dict[str, object] = {
            "models": names, "file": str(given.file), "chunks": given.chunks, "window": window,
            "kv_type": runtime.kv_type or "f16",
        }  # fmt: skip
        if kept.data and kept.data.get("settings") != settings:
            raise ConfigError(
                f"{keeping.kept_file} is of other models, another text or other settings",
                hint="resume with the same command",
            )
        state = _State(kept, settings)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        logits = state.logits_path(Path(folder))
        if not kept.data:
            check_new_file(logits)
            state.save()
        task = _Task(first, text, window, given.chunks, logits, state)
        with interruptible(console) as interrupted:
            for name in names:
                if name not in state.rows:
                    models = TargetOptions(download=hub.download, offline=hub.offline, target=name)
                    with ExitStack() as opened:
                        ctx = open_for_chunks(models, name, runtime, window, console, opened)
                        state.add(_measure(ctx, name, sizes[name], task, console))
        rows = [state.rows[name] for name in names if name in state.rows]
        if not interrupted:
            state.end()
        if output.as_json:
            print_json({"base": first, "window": window, "models": [asdict(row) for row in rows]})
        elif rows:
            _print(console, rows)
        if plot is not None and len(rows) > 1:
            _plot(plot, rows)
        if interrupted:
            raise interrupted[0]


class _State:
    """What is done, in the file that is kept, with the base's log-probabilities beside it."""

    def __init__(self, kept: Kept, settings: dict[str, object]) -> None:
        self._kept = kept
        self._settings = settings
        self._begun = kept.data.get("begun")
        found = kept.data.get("rows")
        rows = found if isinstance(found, dict) else {}
        self.rows = {name: _Row(**row) for name, row in rows.items()}

    def logits_path(self, folder: Path) -> Path:
        """Return where the base's log-probabilities are: beside the kept file, or in ``folder``."""
        if self._kept.path is None:
            return folder / "logits"
        return self._kept.path.with_name(self._kept.path.name + ".logits")

    def begun(self, name: str) -> Mapping[str, object] | None:
        """Return what is done of a model whose turn was interrupted."""
        found = self._begun if isinstance(self._begun, dict) else {}
        return found.get("data") if found.get("model") == name else None

    def note(self, name: str, done: Perplexity | KLDivergence, *, now: bool = False) -> None:
        """Keep what is done of a model."""
        self._kept.save(lambda: self._as_dict({"model": name, "data": done.as_dict()}), now=now)

    def add(self, row: _Row) -> None:
        """Keep the row of a model."""
        self.rows[row.model] = row
        self._begun = None
        self.save()

    def save(self) -> None:
        """Keep the rows."""
        self._kept.save(lambda: self._as_dict(None), now=True)

    def end(self) -> None:
        """Delete the log-probabilities: all is done."""
        if self._kept.path is not None:
            self.logits_path(Path()).unlink(missing_ok=True)

    def _as_dict(self, begun: dict[str, object] | None) -> dict[str, object]:
        rows = {name: asdict(row) for name, row in self.rows.items()}
        return {"settings": self._settings, "rows": rows, "begun": begun}


def _check_vocabularies(names: Sequence[str]) -> None:
    with lb.Model(lb.hub.resolve(names[0]), vocab_only=True) as first:
        for name in names[1:]:
            with lb.Model(lb.hub.resolve(name), vocab_only=True) as other:
                if first.compatibility(other).path != "tokens":
                    raise VocabularyMismatchError(
                        f"{name} has another vocabulary than {names[0]}",
                        hint="compare quantisations of one model",
                    )


@dataclass(frozen=True)
class _Task:
    """What every model is measured on; the base writes its log-probabilities to ``logits`` first."""

    base: str
    text: str
    window: int
    chunks: int
    logits: Path
    state: _State


def _measure(ctx: lb.Context, name: str, size: int, task: _Task, console: Console) -> _Row:
    """Return the row of a model."""
    start_s = perf_counter()
    row, n_read = _compare(ctx, name, size, task, console)
    read_s = perf_counter() - start_s
    with lb.Context(ctx.model, n_ctx=256, n_seq_max=2, n_threads=ctx.n_threads) as plain:
        can = plain.capabilities
    return replace(
        row,
        read_tokens_per_s=n_read / read_s if n_read else math.nan,
        write_tokens_per_s=_write_speed(ctx, task.text),
        exact=can.batch_invariant,
        why=can.batch_invariant_reason,
        made_from=lb.hub.made_from(name),
    )


def _compare(
    ctx: lb.Context, name: str, size: int, task: _Task, console: Console
) -> tuple[_Row, int]:
    """Return the row of a model without its speed, and how many tokens were read for it."""
    earlier = task.state.begun(name)
    last: list[Perplexity | KLDivergence] = []
    shown = Progress(console, f"chunks, {base_name(name)}", task.chunks)

    def note(done: Perplexity | KLDivergence) -> None:
        last[:] = [done]
        shown.show(done.n_done)
        task.state.note(name, done)

    try:
        if name == task.base:
            begun = Perplexity.from_dict(earlier) if earlier else None
            n_before = begun.n_done if begun else 0
            found = save_logits(
                ctx, task.text, task.logits, task.window,
                chunks=task.chunks, progress=note, resume=begun,
            )  # fmt: skip
            row = _Row(name, ctx.model.file_type, size, found.value, found.stderr)
        else:
            compared = KLDivergence.from_dict(earlier) if earlier else None
            n_before = compared.n_done if compared else 0
            kl = divergence(ctx, task.logits, progress=note, resume=compared)
            its = kl.statistics
            row = _Row(
                name, ctx.model.file_type, size, *its.perplexity, *its.mean,
                kl.percentile(0.99), its.same_top.value,
            )  # fmt: skip
    except BaseException:
        if last:
            task.state.note(name, last[0], now=True)
        raise
    return row, (last[0].n_done - n_before) * task.window if last else 0


def _write_speed(ctx: lb.Context, text: str) -> float:
    """Return tokens a second of plain generation."""
    with lb.Branch.start(ctx, ctx.model.tokenize(text)[:64], temperature=0.8, seed=1) as branch:
        start_s = perf_counter()
        n = sum(1 for _ in branch.generate(min(_N_WRITTEN, ctx.n_ctx - 64)))
        return n / (perf_counter() - start_s)


def _print(console: Console, rows: Sequence[_Row]) -> None:
    console.table(
        (
            "model", "type", "size", "perplexity", "±", "KL, nats", "±", "99 % KL", "same top",
            "read/s", "write/s", "exact",
        ),
        [
            (
                base_name(row.model),
                row.file_type,
                decimal_size(row.size_bytes),
                number(row.perplexity, 3),
                number(row.perplexity_stderr, 3),
                "base" if i == 0 else number(row.kl, 5),
                "" if i == 0 else number(row.kl_stderr, 5),
                "" if i == 0 else number(row.kl_99, 4),
                "" if i == 0 else f"{row.same_top:.2%}",
                number(row.read_tokens_per_s, 0),
                number(row.write_tokens_per_s, 0),
                "yes" if row.exact else "no",
            )
            for i, row in enumerate(rows)
        ],
        left=("type",),
    )  # fmt: skip
    for row in rows:
        if row.made_from is not None:
            console.line()
            console.line(
                f"{base_name(row.model)} was made from {row.made_from}, whose losses it has: its figures "
                "tell what that step changed, not how near it is to the original model."
            )
    largest = max(row.kl for row in rows)
    if largest > 0:
        console.line()
        console.table(
            ("KL divergence by size", "size", ""),
            [
                (
                    base_name(row.model),
                    decimal_size(row.size_bytes),
                    "█" * max(round(_BAR * row.kl / largest), row.kl > 0) + f" {row.kl:.5f}",
                )
                for row in rows[1:]
            ],
            left=("",),
        )


def _plot(path: Path, rows: Sequence[_Row]) -> None:
    from llamabranch.bench import Curve, Spread, save_plot

    curves = [
        Curve(
            base_name(row.model),
            [row.size_bytes / 1e6],
            [Spread(row.kl, max(0.0, row.kl - row.kl_stderr), row.kl + row.kl_stderr)],
        )
        for row in rows
    ]
    axes = ("size of the file, MB", "KL divergence from the base, nats")
    save_plot(path, f"KL divergence from {base_name(rows[0].model)}", axes, curves)
