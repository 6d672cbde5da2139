"""``llamabranch score``: how probable a text is for a model, and how two models differ on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

import llamabranch as lb
from llamabranch import ConfigError
from llamabranch.eval import divergence, perplexity

from .console import Console, number, shortened
from .files import piped_or_read, read_text
from .options import MODEL_OPTIONS, OUTPUT_OPTIONS, TEXT, Given, option, with_options

WINDOW = 512  # tokens of a chunk, as in llama-perplexity


@with_options("settings", *MODEL_OPTIONS, *OUTPUT_OPTIONS)
def score(
    given: Given,
    console: Console,
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT")] = None,
    file: Annotated[
        Path | None,
        option("-f --file", "Its perplexity, in chunks of -c tokens.", TEXT, metavar="FILE"),
    ] = None,
    against: Annotated[
        str | None,
        option("--against", "KL divergence of -m from this model.", TEXT, metavar="MODEL"),
    ] = None,
) -> None:
    """Score a text or a file: perplexity, and the KL divergence of two models.

    llamabranch score "Once upon a time there was a king."
    llamabranch score -f text.txt -m a-q4.gguf --against a-bf16.gguf

    The first token of a text is not scored without a BOS token.
    """
    if file is None and against is not None:
        raise ConfigError("--against needs a --file")
    if file is not None:
        if texts:
            raise ConfigError("--file is scored alone: leave out TEXT")
        text = read_text(file, newline="").removesuffix("\n")  # as llama.cpp reads it
        console.answer(_measured(given, console, text, against))
        return
    words = piped_or_read(texts or [])
    if not words:
        raise ConfigError("there is no text", hint="pass a text, pipe it in, or use --file")
    ctx = given.open(given.announce(console), console)
    records = [_record(ctx, text) for text in words]
    for record in records:
        _print(console, record, with_tokens=len(records) == 1)
    console.answer({"scores": records})


def _measured(given: Given, console: Console, text: str, against: str | None) -> dict[str, Any]:
    """Return and print the perplexity of a long text, and the KL divergence from another model."""
    window = given.n_ctx or WINDOW
    name = given.announce(console)
    ctx = given.open(name, console, n_ctx=window)

    def progress(part: Any) -> None:
        console.progress(f"{part.n_done} of {part.n_chunks} chunks")

    if against is None:
        found = perplexity(ctx, text, window, progress=progress)
        figures: dict[str, tuple[float, float]] = {"perplexity": (found.value, found.stderr)}
    else:
        base = given.open(against, console, n_ctx=window)
        statistics = divergence(base, ctx, text, window, progress=progress).statistics
        figures = {
            "perplexity": statistics.perplexity,
            "perplexity_of_the_other": statistics.base_perplexity,
            "kl_divergence": statistics.mean,
            "same_most_probable_token": statistics.same_top,
            "change_of_p": statistics.p_change_rms,
        }
    console.progress("")
    for label, (value, error) in figures.items():
        console.line(f"{label.replace('_', ' '):<24} {value:.6g} ± {error:.2g}")
    pairs = {label: {"value": value, "stderr": error} for label, (value, error) in figures.items()}
    return {"model": name, "against": against, **pairs}


def _record(ctx: lb.Context, text: str) -> dict[str, Any]:
    """Return the scores of a text and of its tokens."""
    first, *tokens = ctx.model.prompt_tokens(text)
    with lb.Branch.start(ctx, [first]) as branch:
        scores = branch.score(tokens) if tokens else []
    total, n = math.fsum(score.logprob for score in scores), len(scores)
    return {
        "text": text,
        "n_tokens": n,
        "logprob": total,
        "perplexity": math.exp(min(-total / n, 700.0)) if n else math.nan,
        "tokens": [
            {
                "token": score.token,
                "text": ctx.detokenize([score.token], special=True),
                "logprob": score.logprob,
                "rank": score.rank,
                "entropy": score.entropy,
            }
            for score in scores
        ],
    }


def _print(console: Console, record: dict[str, Any], *, with_tokens: bool) -> None:
    """Print the figures of a text and, if ``with_tokens``, a row for each token."""
    text = shortened(record["text"], 40)
    if not record["tokens"]:
        console.line(f"{text!r} is a single token, which has no score")
        return
    if with_tokens:
        rows = []
        for token in record["tokens"]:
            figures = number(token["logprob"], 4), token["rank"], number(token["entropy"], 4)
            rows.append((token["token"], repr(token["text"]), *figures))
        console.table([*record["tokens"][0]], rows, left=("text",))
        console.line()
    console.line(
        f"{text}: {record['n_tokens']} tokens, log-probability {record['logprob']:.4f} nats, "
        f"perplexity {record['perplexity']:.4f}"
    )
