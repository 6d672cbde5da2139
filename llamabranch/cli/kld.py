"""``llamabranch kld``: how far a model is from one whose log-probabilities were saved."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from llamabranch.eval import KLDivergence, LogitsFile, Uncertain, divergence

from .bundles import with_bundles
from .console import Console, print_json
from .formats import number
from .measuring import KeptOptions, Progress, interruptible, open_for_chunks
from .options import OutputOptions, RuntimeOptions, TargetOptions


@with_bundles
def kld(
    logits: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="What `perplexity --save-logits` or llama-perplexity wrote of the base model.",
        ),
    ],
    *,
    keeping: KeptOptions,
    models: TargetOptions,
    runtime: RuntimeOptions,
    output: OutputOptions,
) -> None:
    """Compare a model with saved log-probabilities: KL divergence, perplexities, agreement.

    The file holds the text. The numbers are those of llama-perplexity --kl-divergence.
    """
    with output.console() as console, ExitStack() as stack:
        kept = keeping.open("kld")
        earlier = KLDivergence.from_dict(kept.data) if kept.data else None
        with LogitsFile.open(logits) as file:
            window, n_chunks = file.window, len(file.chunks)
        ctx = open_for_chunks(models, models.announce(console), runtime, window, console, stack)
        found: list[KLDivergence] = [] if earlier is None else [earlier]
        shown = Progress(console, "chunks", n_chunks, 0 if earlier is None else earlier.n_done)

        def note(done: KLDivergence) -> None:
            found[:] = [done]
            shown.show(done.n_done, f"KL divergence {number(done.statistics.mean.value, 5)}")
            kept.save(done.as_dict)

        with interruptible(console) as interrupted:
            found[:] = [divergence(ctx, logits, progress=note, resume=earlier)]
        if found and found[0].n_done:
            kept.save(found[0].as_dict, now=True)
            if output.as_json:
                answer = {k: v for k, v in found[0].as_dict().items() if k != "rows"}
                print_json({"name": ctx.model.name, "kv_type": ctx.kv_type, **answer})
            else:
                _print(console, found[0])
        if interrupted:
            raise interrupted[0]


def _print(console: Console, found: KLDivergence) -> None:
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
    console.table(
        ("percentiles", *names),
        [
            ("KL divergence", *(number(found.percentile(f), 5) for f in fractions)),
            (
                "change of probability, %",
                *(number(100 * found.p_change_percentile(f), 3) for f in fractions),
            ),
        ],
    )
    console.line()
    console.line(f"{found.n_tokens} tokens, {found.n_done} of {found.n_chunks} chunks", "dim")
    if found.n_tokens < 100:
        console.note("fewer than 100 tokens: llama-perplexity gives no statistics for so few")
