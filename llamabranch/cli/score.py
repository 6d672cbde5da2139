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
    before: Annotated[
        str | None, option("--context", "Text before each TEXT, not scored.", TEXT, metavar="TEXT")
    ] = None,
    file: Annotated[
        Path | None,
        option("-f --file", "Its perplexity, in chunks of -c tokens.", TEXT, metavar="FILE"),
    ] = None,
    against: Annotated[
        str | None,
        option("--against", "KL divergence of -m from this model.", TEXT, metavar="MODEL"),
    ] = None,
    top: Annotated[
        int, option("--top", "Show the most probable tokens.", TEXT, metavar="N", min=0)
    ] = 0,
) -> None:
    """Score a text or a file: perplexity, and the KL divergence of two models.

    llamabranch score "The king was old." --context "Once upon a time."
    llamabranch score -f text.txt -m a-q4.gguf --against a-bf16.gguf

    The first token of a text is not scored without a context or a BOS token.
    """
    if file is None and against is not None:
        raise ConfigError("--against needs a --file")
    if file is not None:
        if texts or before is not None:
            raise ConfigError("--file is scored alone: leave out TEXT and --context")
        text = read_text(file, newline="").removesuffix("\n")  # as llama.cpp reads it
        console.answer(_measured(given, console, text, against))
        return
    words = piped_or_read(texts or [])
    if not words:
        raise ConfigError("there is no text", hint="pass a text, pipe it in, or use --file")
    ctx = given.open(given.announce(console), console)
    records = []
    for text in words:
        if before is None:
            first, *tokens = ctx.model.prompt_tokens(text)
            start: str | list[int] = [first]
        else:
            start, tokens = before, ctx.tokenize(text, add_special=False, parse_special=True)
            if not tokens:
                raise ConfigError(f"a continuation has no tokens: {text!r}")
        with lb.Branch.start(ctx, start) as branch:
            scores = branch.score(tokens, top) if tokens else []
        records.append(_record(ctx, text, scores))
    for record in records:
        _print(console, record, top, with_tokens=len(records) == 1)
    console.answer({"context": before, "scores": records})


def _measured(given: Given, console: Console, text: str, against: str | None) -> dict[str, Any]:
    """Return and print the perplexity of a long text, and the KL divergence from another model."""
    window = given.n_ctx or WINDOW
    name = given.announce(console)
    ctx = given.open(name, console, n_ctx=window)

    def progress(part: Any) -> None:
        console.progress(f"{part.n_done} of {part.n_chunks} chunks")

    if against is None:
        found = perplexity(ctx, text, window, progress=progress)
        figures = {"perplexity": (found.value, found.stderr)}
    else:
        base = given.open(against, console, n_ctx=window)
        statistics = divergence(base, ctx, text, window, progress=progress).statistics
        figures = {
            "perplexity": statistics.perplexity,
            "perplexity of the other": statistics.base_perplexity,
            "KL divergence, nats": statistics.mean,
            "same most probable token": statistics.same_top,
            "change of p, rms": statistics.p_change_rms,
        }
    console.progress("")
    rows = [(label, f"{value:.6g} ± {error:.2g}") for label, (value, error) in figures.items()]
    console.table(("", ""), rows, left=("",))
    json = {
        label.partition(",")[0].replace(" ", "_").lower(): {"value": value, "stderr": error}
        for label, (value, error) in figures.items()
    }
    return {"model": name, "against": against, **json}


def _record(ctx: lb.Context, text: str, scores: list[lb.context.TokenScore]) -> dict[str, Any]:
    def named(token: int) -> dict[str, Any]:
        return {"token": token, "text": ctx.detokenize([token], special=True)}

    tokens = [
        {
            **named(score.token),
            "logprob": score.logprob,
            "rank": score.rank,
            "entropy": score.entropy,
            "top": [{**named(token), "logprob": p} for token, p in score.alternatives],
        }
        for score in scores
    ]
    total, n = math.fsum(score.logprob for score in scores), len(scores)
    perplexity = math.exp(min(-total / n, 700.0)) if n else math.nan
    figures = {"n_tokens": n, "logprob": total, "perplexity": perplexity}
    return {"text": text, **figures, "tokens": tokens}


def _print(console: Console, record: dict[str, Any], top: int, *, with_tokens: bool) -> None:
    """Print the figures of a text and, if ``with_tokens``, a row for each token."""
    if not record["tokens"]:
        text = shortened(record["text"], 40)
        console.line(f"{text!r} is a single token, which has no score without a --context")
        return
    if with_tokens:
        columns = ("token", "text", "logprob", "rank", "entropy", *("most probable",) * (top > 0))
        rows = []
        for token in record["tokens"]:
            figures = number(token["logprob"], 4), token["rank"], number(token["entropy"], 4)
            others = " ".join(repr(other["text"]) for other in token["top"])
            rows.append((token["token"], repr(token["text"]), *figures, others)[: len(columns)])
        console.table(columns, rows, left=("text", "most probable"))
        console.line()
    console.line(
        f"{shortened(record['text'], 40)}: {record['n_tokens']} tokens, log-probability "
        f"{record['logprob']:.4f} nats, perplexity {record['perplexity']:.4f}"
    )
