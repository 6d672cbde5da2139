"""``llamabranch score``: how probable a model finds given text, and which of several it prefers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llamabranch import Branch, BranchStore, ConfigError, Context, TokenScore
from llamabranch.search import Selection, select

from ..arguments import choice
from ..eval.perplexity import exp
from ..loading import LoadOptions
from ..search.selection import METHODS
from .bundles import argument, option, with_bundles
from .console import Console
from .files import read_prompt_file
from .formats import number
from .job import with_room
from .options import TEXT, ModelOptions, OutputOptions
from .search import stats_text

_SEQUENCES = 33


@dataclass(frozen=True)
class ScoreOptions:
    """What is scored."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "context files best top"

    texts: list[str] | None = argument(
        "What to score; with --context its continuations. Begin them with a space where the text needs "
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
        """Return the texts that are to be scored.

        Raises:
            ConfigError: there is none, or a file cannot be read.
        """
        texts = (*(self.texts or ()), *map(read_prompt_file, self.files or ()))
        if not texts and self.context is not None:
            raise ConfigError("--context needs a text that continues it")
        if not texts:
            raise ConfigError("there is no text", hint="give a text, or --file")
        if self.best is not None:
            choice("measure", self.best, METHODS)
            if self.context is None:
                raise ConfigError("--best needs a --context, which the texts continue")
            if not all(texts):
                raise ConfigError("a choice must not be empty")
        return texts


@with_bundles
def score(*, given: ScoreOptions, models: ModelOptions, output: OutputOptions) -> None:
    """Score given text: log-probabilities of its tokens, perplexity, or the best of several.

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
            _print_choices(console, texts, chosen)
            about = {"id": "0", "context": context, "method": best, **chosen.as_dict()}
            console.answer({"items": [about]})
            return
        found: list[dict[str, Any]] = []
        for i, group in enumerate([(text,) for text in texts] if context is None else [texts]):
            scores = _score(ctx, context, group, given.top)
            records = [_record(ctx, *pair) for pair in zip(group, scores, strict=True)]
            if context is None and len(texts) > 1:
                console.line(f"[{i}]", "bold")
            _print(console, records, given.top, with_tokens=context is None)
            found.append({"id": str(i), "context": context, "scores": records})
        records = [record for item in found for record in item["scores"]]
        n_tokens = sum(record["n_tokens"] for record in records)
        total = _totals([record["logprob"] for record in records], n_tokens)
        if len(found) > 1:
            console.line(
                f"{total['n_tokens']} tokens, log-probability {total['logprob']:.3f} nats, "
                f"perplexity {total['perplexity']:.3f}"
            )
        console.answer({"items": found, "total": total})


def _score(
    ctx: Context, context: str | None, texts: Sequence[str], top: int
) -> list[list[TokenScore]]:
    if context is None:
        tokens = ctx.model.prompt_tokens(texts[0])
        if len(tokens) == 1:
            return [[]]
        with Branch.start(ctx, tokens[:1]) as branch:
            return [branch.score(tokens[1:], top)]
    continuations = [ctx.tokenize(text, add_special=False, parse_special=True) for text in texts]
    if not all(continuations):
        raise ConfigError(f"a continuation has no tokens: {texts[continuations.index([])]!r}")
    with Branch.start(ctx, context) as branch:
        return BranchStore(ctx).score({branch: continuations}, top)[branch]


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
    return {"text": text, **_totals([score.logprob for score in scores]), "tokens": tokens}


def _totals(logprobs: Sequence[float], n_tokens: int | None = None) -> dict[str, Any]:
    """Return the sums over tokens, or over parts of texts that have ``n_tokens`` together."""
    n, total = len(logprobs) if n_tokens is None else n_tokens, math.fsum(logprobs)
    return {"n_tokens": n, "logprob": total, "perplexity": exp(-total / n) if n else math.nan}


def _print_choices(console: Console, texts: Sequence[str], found: Selection) -> None:
    order = sorted(range(len(texts)), key=lambda i: (i != found.index, -found.scores[i]))
    rows = [
        (texts[i], f"{found.scores[i]:.4f}", f"{sum(found.logprobs[i]):.3f}", len(found.tokens[i]))
        for i in order
    ]
    console.table(("choice", "score", "log p, nats", "tokens"), rows)
    console.line(stats_text(found.stats), "dim")


def _print(
    console: Console, records: Sequence[dict[str, Any]], top: int, *, with_tokens: bool
) -> None:
    if with_tokens:
        columns = ("token", "logprob", "rank", "entropy", *("most probable",) * (top > 0))
        rows = []
        for its in records[0]["tokens"]:
            figures = number(its["logprob"], 3), its["rank"], number(its["entropy"], 3)
            others = " ".join(repr(other["text"]) for other in its["top"])
            rows.append((repr(its["text"]), *figures, others)[: len(columns)])
        console.table(columns, rows, left=columns[4:])
        console.line()
    summary = [
        (
            its["text"] if len(its["text"]) <= 40 else its["text"][:37] + "...",
            its["n_tokens"],
            number(its["logprob"], 3),
            number(its["perplexity"], 3),
            max((token["rank"] for token in its["tokens"]), default=None),
        )
        for its in records
    ]
    console.table(("text", "tokens", "logprob", "perplexity", "worst rank"), summary)
