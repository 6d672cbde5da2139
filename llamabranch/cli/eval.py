"""``llamabranch eval``: how well models predict a text."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import typer

import llamabranch as lb
from llamabranch import ConfigError, Context
from llamabranch.eval import KLDivergence, Perplexity

from ..files import atomic_write
from ..loading import LoadOptions
from .bundles import option, with_bundles
from .console import Console, base_name, decimal_size, finite, number
from .files import check_new_file, read_prompt_file, writing
from .interrupts import EXIT_FAILURE
from .options import OUTPUT, ModelFlags, OutputFlags, trained_length, vocabulary
from .pair_report import divergence_tables, print_comparison

if TYPE_CHECKING:
    from llamabranch.eval.comparison import Comparison

_CHUNKS, _WINDOW = 16, 512  # the number of chunks if models are compared, and the tokens of a chunk
_N_WRITTEN = 48
_ROW_BYTES = 64 * 2**20  # bytes of logits that are in memory at a time
_SAVED_EVERY_S = 10.0


@dataclass(frozen=True)
class ReadingFlags:
    """The text, and what the models are compared with."""

    panel: ClassVar[str] = "Perplexity and KL divergence"
    first: ClassVar[str] = "text_file against chunks output_file"

    text_file: Path | None = option(
        None,
        "The text: a file in UTF-8. It is cut into chunks of --ctx-size tokens (512), and the "
        "second half of each is scored, as llama-perplexity does.",
        "--perplexity --file -f",
        metavar="FILE",
    )
    against: str | None = option(
        None,
        "The model that the others are compared with by KL divergence, or its file from --save-logits "
        "or llama-perplexity, which contains the text too. One model is compared in detail, several "
        "in one table.",
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
        "Write the results to this file, even if interrupted.",
        "--output -o",
        rich_help_panel=OUTPUT,
    )

    fail_kl: float | None = option(
        None, "Exit 1 if the mean KL divergence is above this, in nats.", min=0
    )
    fail_top: float | None = option(
        None, "Exit 1 if a smaller share (0 to 1) of most probable tokens agrees.", min=0, max=1
    )

    def check_output(self) -> Path | None:
        """Return --output. Raises ConfigError if the file exists."""
        if self.output_file is not None:
            check_new_file(self.output_file, hint="name another file")
        return self.output_file

    @property
    def logits(self) -> Path | None:
        """The file of log-probabilities of --against; None if it names a model or was not set."""
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


# -- shared by all measurements ------------------------------------------------------------------------


def open_for_chunks(name: str, models: ModelFlags, window: int, console: Console) -> Context:
    """Open a context to read texts in chunks; K/V is f16 by default, as in llama-perplexity.

    The memory of logits is limited, for a vocabulary of any size.
    """
    with vocabulary(name) as model:
        most_rows = max(1, _ROW_BYTES // (4 * model.n_vocab))
    n_batch = models.set("load").get("n_batch") or min(512, window)
    more = LoadOptions(n_seq_max=1, n_ctx=window, n_batch=n_batch, batch_invariant=False)
    more |= {"n_outputs_max": min(256, n_batch, most_rows), "kv_type": models.kv_type or "f16"}
    return models.open(name, console, **more)


def _window_of(name: str, models: ModelFlags) -> int:
    """Return the tokens per chunk: ``--ctx-size``, as in llama-perplexity; 0 is the trained length."""
    return (trained_length(name) if models.n_ctx == 0 else models.n_ctx) or _WINDOW


def save(path: Path | None, kind: str, data: Mapping[str, object]) -> None:
    """Replace a JSON file with results; OutputError if that fails."""
    if path is not None:
        text = json.dumps(finite({"kind": kind, **data}), ensure_ascii=False)
        with writing(path), atomic_write(path) as file:
            file.write(f"{text}\n".encode())


# -- one model -----------------------------------------------------------------------------------------


def measure(reading: ReadingFlags, name: str, models: ModelFlags, console: Console) -> None:
    """Print the perplexity of a model, or its divergence from a model whose logits are in a file.

    If it is interrupted, the results so far are saved and printed.
    """
    logits, save_to = reading.logits, reading.save_to
    if logits is not None and (reading.text_file or reading.chunks):
        message = (
            f"{logits} contains the text and its chunks, and can be compared with only one model"
        )
        raise ConfigError(message, hint="--against MODEL compares several")
    kind, output = "perplexity" if logits is None else "kld", reading.check_output()
    if save_to is not None:
        hint = (
            f"--against {save_to} reads it; to write logits, name another file, or delete this one"
        )
        check_new_file(save_to, hint=hint)
    result: Perplexity | KLDivergence | None = None
    saved_s = perf_counter()

    def note(done: Perplexity | KLDivergence) -> None:
        nonlocal result, saved_s
        result = done
        console.progress(f"{done.n_done} of {done.n_chunks} chunks")
        if perf_counter() - saved_s > _SAVED_EVERY_S:
            save(output, kind, done.as_dict())
            saved_s = perf_counter()

    if logits is None:
        text, window = reading.text(), _window_of(name, models)
    else:
        with lb.eval.LogitsFile.open(logits) as file:
            window = file.window
    with open_for_chunks(name, models, window, console) as ctx:
        try:
            if logits is None:
                result = lb.eval.perplexity(
                    ctx, text, window, chunks=reading.chunks, save_to=save_to, progress=note
                )
            else:
                result = lb.eval.divergence(ctx, logits, progress=note)
        finally:
            console.progress("")
            if result is not None and result.n_done:
                save(output, kind, result.as_dict())
                _print(console, ctx, result)


def _print(console: Console, ctx: Context, found: Perplexity | KLDivergence) -> None:
    answer = {k: v for k, v in found.as_dict().items() if k not in ("losses", "rows")}
    n_chunks = f"{found.n_done} of {found.n_chunks}"
    if isinstance(found, KLDivergence):
        for names, *rows in divergence_tables(found):
            console.table(names, rows)
            console.line()
        console.line(f"{found.n_tokens} tokens, {n_chunks} chunks", "dim")
    else:
        answer |= {"by_chunk": found.by_chunk, "running": found.running}
        row = (number(found.value, 4), number(found.stderr, 4), found.n_tokens, n_chunks)
        columns = ("perplexity", "±", "tokens scored", "chunks", "window", "K/V")
        console.table(columns, [(*row, found.window, ctx.kv_type)])
    console.answer({"name": ctx.model.name, "kv_type": ctx.kv_type, **answer})


# -- two models ----------------------------------------------------------------------------------------


def compare(
    reading: ReadingFlags, base: str, name: str, models: ModelFlags, console: Console
) -> None:
    """Print how two models differ on a text; exit with 1 if they differ more than a limit allows.

    If it is interrupted, the results so far are saved and printed.
    """
    from llamabranch.eval.comparison import compare_models

    text, path = reading.text(), reading.check_output()
    window, chunks = _window_of(base, models), reading.chunks or _CHUNKS
    first, second = (
        open_for_chunks(model_name, models, window, console) for model_name in (base, name)
    )
    comparison: Comparison | None = None

    def note(done: Comparison) -> None:
        nonlocal comparison
        comparison = done
        if done.n_forks:
            console.progress(f"greedy texts at place {len(done.forks) + 1} of {done.n_forks}")
        else:
            console.progress(f"{done.n_chunks} of {chunks} chunks")

    try:
        comparison = compare_models(first, second, text, window, chunks, progress=note)
    finally:
        console.progress("")
        if comparison is not None:
            save(path, "compare", comparison.as_dict())
            print_comparison(console, comparison)
            console.answer(comparison.as_dict())
    if comparison.divergence is None:
        if reading.fail_kl is not None or reading.fail_top is not None:
            raise ConfigError("--fail-kl and --fail-top need models with one tokenizer")
        return
    statistics, most, least = comparison.divergence.statistics, reading.fail_kl, reading.fail_top
    is_far = most is not None and not statistics.mean.value <= most
    if is_far or (least is not None and not statistics.same_top.value >= least):
        console.note("the models are further apart than --fail-kl or --fail-top allows")
        raise typer.Exit(EXIT_FAILURE)


# -- several models ------------------------------------------------------------------------------------


def compare_several(
    reading: ReadingFlags,
    names: Sequence[str],
    base: str | None,
    models: ModelFlags,
    console: Console,
) -> None:
    """Measure several models on a text; with a base, also their divergence from it.

    If it is interrupted, the results so far are printed and written to ``--output``.
    """
    text, path = reading.text(), reading.check_output()
    names = list(names) if base is None else [base, *names]
    files = {name: lb.hub.parts(lb.hub.resolve(name, download=None)) for name in names}
    sizes = {name: sum(part.stat().st_size for part in parts) for name, parts in files.items()}
    if base is not None:
        names = [base, *sorted(names[1:], key=lambda n: -sizes[n])]
        _check_vocabularies(base, names[1:])
    window, chunks = _window_of(names[0], models), reading.chunks or _CHUNKS
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        # The base's log-probabilities, which the others are compared with.
        logits = None if base is None else Path(folder, "logits")
        try:
            for name in names:
                about = {"model": name, "size_bytes": sizes[name]}
                with open_for_chunks(name, models, window, console) as ctx:
                    rows.append(about | _row(ctx, name, text, window, chunks, logits, console))
        finally:
            console.progress("")
            if rows:
                answer: dict[str, object] = {"base": base, "window": window, "models": rows}
                save(path, "quants", answer)
                _print_rows(console, rows, with_base=base is not None)
                console.answer(answer)


def _check_vocabularies(base: str, names: Sequence[str]) -> None:
    with vocabulary(base) as first:
        for name in names:
            with vocabulary(name) as other:
                if first.compatibility(other).path != "tokens":
                    message = f"{name} has another vocabulary than {base}"
                    hint = "compare quantisations of one model"
                    raise lb.errors.VocabularyMismatchError(message, hint=hint)


def _row(
    ctx: Context,
    name: str,
    text: str,
    window: int,
    chunks: int,
    logits: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Return the figures of a model. The base is the first model and writes the file ``logits``."""

    def note(done: Perplexity | KLDivergence) -> None:
        console.progress(f"{done.n_done} of {chunks} chunks of {base_name(name)}")

    start_s, measured = perf_counter(), None
    row: dict[str, Any] = {"file_type": ctx.model.file_type}
    if logits is not None and logits.exists():
        measured = lb.eval.divergence(ctx, logits, progress=note)
        statistics, n_done = measured.statistics, measured.n_done
        figures = statistics.perplexity.value, statistics.perplexity.stderr
        kl = (*statistics.mean, measured.percentile(0.99), statistics.same_top.value)
    else:
        read = lb.eval.perplexity(ctx, text, window, chunks=chunks, progress=note, save_to=logits)
        n_done, figures, kl = read.n_done, (read.value, read.stderr), (0.0, 0.0, 0.0, 1.0)
    row |= zip(("kl", "kl_stderr", "kl_99", "same_top"), kl, strict=True)
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
        "read_tokens_per_s": n_done * window / read_s,
        "write_tokens_per_s": n / write_s,
        "exact": can.batch_invariant,
        "why": can.batch_invariant_reason,
        "made_from": lb.hub.made_from(name),
    }


def _print_rows(console: Console, rows: Sequence[dict[str, Any]], *, with_base: bool) -> None:
    def cells(names: Sequence[str], row: dict[str, Any], digits: Sequence[int]) -> list[str]:
        values = (math.nan if row[name] is None else row[name] for name in names)  # None = nan
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
                f"{base_name(row['model'])} was made from {row['made_from']} and has the errors of that "
                "file. Its figures show what this step changed, not how near it is to the original model."
            )


@dataclass(frozen=True)
class EvalModels(ModelFlags):
    """The models that are measured."""

    first: ClassVar[str] = "target"

    target: list[str] | None = option(  # type: ignore[assignment]
        None,
        "A GGUF file, a name from `llamabranch models`, or user/repo[:tag]; repeat it for several. "
        "Default: smollm2-135m if it is installed, else tale-target.",
        "--model -m --target -hf",
    )

    def names(self, console: Console) -> list[str]:
        """Return the names of the models, each once; the default is named on standard error."""
        if self.target is not None:
            return list(dict.fromkeys(self.target))
        return [self.announce(console)]


@with_bundles
def eval(
    *,
    reading: ReadingFlags,
    models: EvalModels,
    output: OutputFlags,
) -> None:
    """Measure models by the text they predict: perplexity, KL divergence.

    One model is compared with that of --against in detail, several in one table. Tasks with right answers
    run through lm-evaluation-harness: `llamabranch.eval.LlamaBranchLM` in Python,
    `llamabranch.eval.suite` for three that need no network.
    """
    with output.console() as console:
        against = reading.against
        if reading.text_file is None and reading.logits is None:
            hint = "--perplexity FILE; or give --against a file of --save-logits, which holds it"
            if against is None:
                hint = "--perplexity FILE; tasks run in Python, with llamabranch.eval.LlamaBranchLM"
            raise ConfigError("there is no text to measure", hint=hint)
        given = models.names(console)
        names = [name for name in given if name != against]
        if not names:
            raise ConfigError("--against compares with another model", hint="-m names one")
        if reading.save_to is not None and (against is not None or len(names) > 1):
            raise ConfigError("--save-logits is for one model without --against")
        is_pair = against is not None and reading.logits is None and len(given) == 1
        if not is_pair and (reading.fail_kl, reading.fail_top) != (None, None):
            message = "--fail-kl and --fail-top compare two models"
            raise ConfigError(message, hint="--against MODEL, and one model with -m")
        if is_pair:
            compare(reading, str(against), names[0], models, console)
        elif len(names) == 1 and (against is None or reading.logits is not None):
            measure(reading, names[0], models, console)
        elif reading.logits is not None:
            hint = "--against MODEL compares several"
            raise ConfigError(f"{against} is compared with one model", hint=hint)
        else:
            compare_several(reading, names, against, models, console)
