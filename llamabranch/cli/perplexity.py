"""``llamabranch perplexity``: how well a model predicts a text."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from llamabranch import ConfigError, Context
from llamabranch.eval import Perplexity, save_logits, strided_perplexity
from llamabranch.eval import perplexity as measure

from .bundles import option, with_bundles
from .console import Console, print_json
from .files import check_new_file
from .formats import number
from .measuring import KeptOptions, Progress, TextFile, interruptible, open_for_chunks, window_of
from .options import OUTPUT, REQUESTS, OutputOptions, RuntimeOptions, TargetOptions
from .prompts import read_prompt_file


@dataclass(frozen=True)
class TextOptions:
    """What is measured."""

    panel: ClassVar[str] = REQUESTS

    file: TextFile
    stride: int | None = option(
        None,
        "Sliding windows, each so many tokens after the last one: another number.",
        "--stride",
        "--ppl-stride",
        min=1,
    )
    chunks: int | None = option(None, "Score so many chunks at most.", min=1)
    save_to: Path | None = option(
        None,
        "Write the log-probabilities to this file, for `kld` and llama-perplexity.",
        "--save-logits",
        "--save-all-logits",
        "--kl-divergence-base",
        rich_help_panel=OUTPUT,
    )


@with_bundles
def perplexity(
    *,
    given: TextOptions,
    keeping: KeptOptions,
    models: TargetOptions,
    runtime: RuntimeOptions,
    output: OutputOptions,
) -> None:
    """Measure the perplexity of a model on a text, as llama-perplexity does.

    The text is cut into chunks of --n-ctx tokens (default: 512); the second half of each is scored.
    """
    with output.console() as console, ExitStack() as stack:
        stride, chunks, save_to = given.stride, given.chunks, given.save_to
        if stride is not None and (save_to is not None or chunks is not None):
            raise ConfigError("--stride goes with neither --save-logits nor --chunks")
        text = read_prompt_file(given.file)
        kept = keeping.open("perplexity")
        if save_to is not None and not kept.data:
            hint = (
                f"`llamabranch kld {save_to}` reads it; to write, name another file, or delete it"
            )
            check_new_file(save_to, hint=hint)
        earlier = Perplexity.from_dict(kept.data) if kept.data else None
        name = models.announce(console)
        models.find(name)
        window = window_of(name, runtime)
        ctx = open_for_chunks(models, name, runtime, window, console, stack)
        found: list[Perplexity] = [] if earlier is None else [earlier]
        shown: list[Progress] = []

        def note(done: Perplexity) -> None:
            if not shown:
                n_before = 0 if earlier is None else earlier.n_done
                shown.append(Progress(console, "chunks", done.n_chunks, n_before))
            found[:] = [done]
            shown[0].show(done.n_done, f"perplexity {number(done.value, 4)}")
            kept.save(done.as_dict)

        with interruptible(console) as interrupted:
            if stride is not None:
                result = strided_perplexity(
                    ctx, text, window, stride, progress=note, resume=earlier
                )
            elif save_to is not None:
                result = save_logits(
                    ctx, text, save_to, window, chunks=chunks, progress=note, resume=earlier
                )
            else:
                result = measure(ctx, text, window, chunks=chunks, progress=note, resume=earlier)
            found[:] = [result]
        if found:
            kept.save(found[0].as_dict, now=True)
            _print(console, ctx, found[0], as_json=output.as_json)
        if interrupted:
            raise interrupted[0]


def _print(console: Console, ctx: Context, found: Perplexity, *, as_json: bool) -> None:
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
