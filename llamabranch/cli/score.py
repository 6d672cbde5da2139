"""``llamabranch score``: how probable a text is for a model, and how two models differ on it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llamabranch as lb
from llamabranch import ConfigError
from llamabranch.eval import divergence, perplexity

from .console import Console, number, plural, shortened
from .files import piped_or_read, read_text
from .options import MEMORY_OPTIONS, TEXT, Given, argument, option, with_options

WINDOW = 512  # tokens of a chunk, as in llama-perplexity
_SHARES = ("same_most_probable_token", "change_of_p")  # shown in per cent


@with_options(f"settings model {MEMORY_OPTIONS} as_json verbose")
def score(
    given: Given,
    console: Console,
    texts: list[str] | None = argument("TEXT|FILE", "A text, or a file that exists, as with -f."),
    file: Path | None = option(TEXT, "-f --file FILE", "Its perplexity, in chunks of -c tokens."),
    against: str | None = option(TEXT, "--against MODEL", "KL divergence of -m from this model."),
) -> None:
    """Score a text: log-probabilities, perplexity, KL divergence.

    llamabranch score "Once upon a time there was a king."
    llamabranch score -m a-q4.gguf text.txt --against a-bf16.gguf
    """
    words = [*(texts or [])]
    if file is None and len(words) == 1 and os.path.isfile(words[0]):
        file = Path(words.pop())
    if file is None and against is not None:
        raise ConfigError("--against needs a file")
    if file is not None:
        if words:
            raise ConfigError("a file is scored alone: leave out the texts")
        text = read_text(file, newline="").removesuffix("\n")  # as llama.cpp reads it
        console.answer(_measured(given, console, text, against))
        return
    if len(words) == 1 and " " not in words[0] and Path(words[0]).suffix[1:].isalpha():
        console.note(f"{words[0]} is not a file: these letters are scored")
    words = piped_or_read(words)
    if not words:
        raise ConfigError("there is no text", hint="pass a text or a file, or pipe a text in")
    ctx = given.open(given.announce(console), console)
    records = [_record(ctx, text) for text in words]
    if len(records) == 1:
        _print_tokens(console, records[0])
    else:
        rows = [(shortened(r["text"], 40), r["n_tokens"], *_figures(r)) for r in records]
        console.table(("text", "tokens", "logprob", "perplexity"), rows)
    console.answer({"scores": records})


def _measured(given: Given, console: Console, text: str, against: str | None) -> dict[str, Any]:
    """Return and print the perplexity of a long text, and the KL divergence from another model."""
    window = given.n_ctx or WINDOW
    name = given.announce(console)
    ctx = given.open(name, console, n_ctx=window)
    n_tokens = len(ctx.model.prompt_tokens(text))
    if given.n_ctx is None and n_tokens < 2 * WINDOW:
        window = n_tokens // 2
        if window < 4:
            size = plural(n_tokens if text else 0, "token")
            hint = "llamabranch score - < FILE scores its tokens"
            raise ConfigError(f"a text of {size} is too short for a perplexity", hint=hint)
        console.note(f"a short text: chunks of {window} tokens, not {WINDOW}")

    def progress(part: Any) -> None:
        console.progress(f"{part.n_done} of {part.n_chunks} chunks")

    if against is None:
        found = perplexity(ctx, text, window, progress=progress)
        figures: dict[str, tuple[float, float]] = {"perplexity": (found.value, found.stderr)}
    else:
        base = given.open(against, console, n_ctx=given.n_ctx or WINDOW)
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
        shown = f"{value:.5g} ± {error:.2g}"
        if label in _SHARES:
            shown = f"{value * 100:.1f} % ± {error * 100:.1f} %"
        console.line(f"{label.replace('_', ' ').replace('kl ', 'KL '):<24}  {shown}")
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
        "given": {"token": first, "text": ctx.detokenize([first], special=True)},
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


def _print_tokens(console: Console, record: dict[str, Any]) -> None:
    """Print a row for each token of a text, and one for all of them."""
    first, (logprob, perplexity) = record["given"], _figures(record)
    rows: list[Sequence[object]] = [(first["token"], repr(first["text"]), "given", "", "")]
    for token in record["tokens"]:
        figures = number(token["logprob"], 4), token["rank"], number(token["entropy"], 4)
        rows.append((token["token"], repr(token["text"]), *figures))
    rows.append((plural(record["n_tokens"], "token"), f"perplexity {perplexity}", logprob, "", ""))
    console.table(("token", "text", "logprob", "rank", "entropy"), rows, left=("text",))


def _figures(record: dict[str, Any]) -> tuple[str, str]:
    return number(record["logprob"], 4), number(record["perplexity"], 4)
