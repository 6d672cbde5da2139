"""``llamabranch score``: how probable a text is for a model, and which text it prefers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llamabranch import Branch, BranchStore, ConfigError, Context, TokenScore
from llamabranch.search import select

from ..eval.perplexity import exp
from ..loading import LoadOptions
from ..search.selection import METHODS
from .bundles import argument, option, with_bundles
from .console import Console, number, shortened
from .files import read_piped_text, read_prompt_file
from .job import with_room
from .options import TEXT, ModelFlags, OutputFlags
from .search import stats_text

_SEQUENCES = 33


@dataclass(frozen=True)
class ScoreFlags:
    """The texts to score."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "context files best top"

    texts: list[str] | None = argument(
        "The text to score; with --context its continuations. Begin them with a space if the text needs "
        "one.",
        metavar="TEXT",
    )
    context: str | None = option(None, "Text before each TEXT, not scored.", "--context")
    files: list[Path] | None = option(
        None,
        "A file whose whole text is scored, without its last newline; may be repeated.",
        "--file -f",
    )
    best: str | None = option(
        None,
        "Print the best continuation first, by this measure of the log-probabilities of its tokens.",
        metavar="|".join(METHODS),
    )
    top: int = option(0, "Show the N most probable tokens.", min=0)

    def given(self) -> tuple[str, ...]:
        """Return the texts to score; ConfigError without texts."""
        texts = (*(self.texts or ()), *map(read_prompt_file, self.files or ()))
        if not texts:
            piped = read_piped_text()
            if piped is None:
                raise ConfigError("there is no text", hint="pass a text, pipe it in, or use --file")
            texts = (piped,)
        if self.best is not None and self.context is None:
            raise ConfigError("--best needs a --context, which the texts continue")
        return texts


@with_bundles
def score(*, given: ScoreFlags, models: ModelFlags, output: OutputFlags) -> None:
    """Score a text: log-probabilities of its tokens, perplexity, or the best of several.

    The first token of a text is not scored unless the model begins every text with a BOS token. With a
    context, each text is a continuation of it, and all are decoded together; --best prints the one that
    the model prefers first.
    """
    with output.console() as console:
        texts, context, best = given.given(), given.context, given.best
        name = models.announce(console)
        models = with_room(models, name, (context or "") + max(texts, key=len), 0)
        more = LoadOptions() if best is None else LoadOptions(n_seq_max=_SEQUENCES)
        ctx = models.open(name, console, **more)
        if best is not None:
            with Branch.start(ctx, context or "") as branch:
                chosen = select(branch, texts, method=best)
            order = sorted(range(len(texts)), key=lambda i: (i != chosen.index, -chosen.scores[i]))
            rows = [
                (texts[i], f"{chosen.scores[i]:.4f}", f"{sum(p):.3f}", len(p))
                for i, p in ((i, chosen.logprobs[i]) for i in order)
            ]
            console.table(("choice", "score", "log p, nats", "tokens"), rows)
            if console.verbose:
                console.line(stats_text(chosen.stats), "dim")
            about = {"id": "0", "context": context, "method": best, **chosen.as_dict()}
            console.answer({"items": [about]})
            return
        if context is None:
            groups = [[_record(ctx, text, _alone(ctx, text, given.top))] for text in texts]
        else:
            tokens = [ctx.tokenize(text, add_special=False, parse_special=True) for text in texts]
            if not all(tokens):
                raise ConfigError(f"a continuation has no tokens: {texts[tokens.index([])]!r}")
            with Branch.start(ctx, context) as branch:
                scores = BranchStore(ctx).score({branch: tokens}, given.top)[branch]
            groups = [[_record(ctx, *pair) for pair in zip(texts, scores, strict=True)]]
        for i, records in enumerate(groups):
            if len(groups) > 1:
                console.line(f"[{i}]", "bold")
            if context is None and not records[0]["tokens"]:
                console.line(
                    f"{shortened(texts[i], 40)!r} is a single token. The first token of a text is not "
                    "scored: use a longer text, or a --context before it."
                )
                continue
            _print(console, records, given.top, with_tokens=context is None)
        every = [record for records in groups for record in records]
        total = _totals([record["logprob"] for record in every], sum(e["n_tokens"] for e in every))
        if len(groups) > 1:
            console.line(
                f"{total['n_tokens']} tokens, log-probability {total['logprob']:.3f} nats, "
                f"perplexity {number(total['perplexity'], 3)}"
            )
        items = [{"id": str(i), "context": context, "scores": g} for i, g in enumerate(groups)]
        console.answer({"items": items, "total": total})


def _alone(ctx: Context, text: str, top: int) -> list[TokenScore]:
    """Return the scores of all tokens of a text except the first."""
    tokens = ctx.model.prompt_tokens(text)
    if len(tokens) == 1:
        return []
    with Branch.start(ctx, tokens[:1]) as branch:
        return branch.score(tokens[1:], top)


def _record(ctx: Context, text: str, scores: Sequence[TokenScore]) -> dict[str, Any]:
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
    return {
        "text": text,
        **_totals([score.logprob for score in scores], len(scores)),
        "tokens": tokens,
    }


def _totals(logprobs: Sequence[float], n: int) -> dict[str, Any]:
    """Return the number of tokens, their log-probability and their perplexity."""
    total = math.fsum(logprobs)
    return {"n_tokens": n, "logprob": total, "perplexity": exp(-total / n) if n else math.nan}


def _print(
    console: Console, records: Sequence[dict[str, Any]], top: int, *, with_tokens: bool
) -> None:
    """Print a row for each text and, if ``with_tokens``, one for each token of the first text."""
    if with_tokens:
        columns = ("token", "text", "logprob", "rank", "entropy", *("most probable",) * (top > 0))
        rows = []
        for token in records[0]["tokens"]:
            figures = number(token["logprob"], 4), token["rank"], number(token["entropy"], 4)
            others = " ".join(repr(other["text"]) for other in token["top"])
            rows.append((token["token"], repr(token["text"]), *figures, others)[: len(columns)])
        console.table(columns, rows, left=("text", "most probable"))
        console.line()
    summary = [
        (
            shortened(record["text"], 40),
            record["n_tokens"],
            number(record["logprob"], 4),
            number(record["perplexity"], 4),
            max((token["rank"] for token in record["tokens"]), default=None),
        )
        for record in records
    ]
    console.table(("text", "n tokens", "logprob", "perplexity", "worst rank"), summary)
    console.line()
