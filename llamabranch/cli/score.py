"""``llamabranch score``: how probable a model finds given text, and which of several it prefers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from llamabranch import Branch, BranchStore, ConfigError, Context, TokenScore
from llamabranch.search import Selection, select

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


class _Item(NamedTuple):
    """A text, or a context with the texts that may continue it."""

    name: str
    context: str | None
    texts: tuple[str, ...]


@dataclass(frozen=True)
class ScoreOptions:
    """What is scored."""

    panel: ClassVar[str] = TEXT

    texts: list[str] | None = argument(
        "What to score; with --context its continuations. Begin them with a space where the text needs "
        "one.",
        metavar="TEXT",
    )
    context: str | None = option(
        None, "Text before each TEXT, not scored.", "--context", first=True
    )
    files: list[Path] | None = option(
        None,
        "A file whose whole text is scored, without its last newline; may be repeated.",
        *("--file", "-f"),
        first=True,
    )
    best: str | None = option(
        None,
        "Print the best continuation first, by this measure of the log-probabilities of its tokens.",
        metavar="|".join(METHODS),
        first=True,
    )
    top: int = option(0, "Show the N most probable tokens.", min=0, first=True)

    def items(self) -> list[_Item]:
        """Return what is to be scored.

        Raises:
            ConfigError: nothing, or a file that cannot be read.
        """
        texts = (*(self.texts or ()), *map(read_prompt_file, self.files or ()))
        items = [_Item(str(i), None, (text,)) for i, text in enumerate(texts)]
        if self.context is not None:
            if not texts:
                raise ConfigError("--context needs a text that continues it")
            items = [_Item("0", self.context, texts)]
        if not items:
            raise ConfigError("there is no text", hint="give a text, or --file")
        if self.best not in (None, *METHODS):
            hint = f"measures: {', '.join(METHODS)}"
            raise ConfigError(f"unknown measure {self.best!r}", hint=hint)
        if self.best is not None and self.context is None:
            raise ConfigError("--best needs a --context, which the texts continue")
        if self.best is not None and not all(texts):
            raise ConfigError("a choice must not be empty")
        return items


@with_bundles
def score(*, given: ScoreOptions, models: ModelOptions, output: OutputOptions) -> None:
    """Score given text: log-probabilities of its tokens, perplexity, or the best of several.

    The first token of a text is not scored unless the model begins every text with a BOS token. With a
    context, each text is a continuation of it, and all are decoded together; --best prints the one that
    the model prefers first.
    """
    with output.console() as console, ExitStack() as stack:
        items = given.items()
        name = models.announce(console)
        longest = max(
            ((item.context or "") + text for item in items for text in item.texts), key=len
        )
        models = with_room(models, name, longest, 0)
        more = LoadOptions() if given.best is None else LoadOptions(n_seq_max=_SEQUENCES)
        ctx = models.open(name, console, stack, **more)
        found: list[dict[str, Any]] = []
        for item in items:
            if len(items) > 1:
                console.line(f"[{item.name}]", "bold")
            record: dict[str, Any] = {"id": item.name, "context": item.context}
            if given.best is not None:
                with Branch.start(ctx, item.context or "") as branch:
                    chosen = select(branch, item.texts, method=given.best)
                record |= {"method": given.best, **chosen.as_dict()}
                _print_choices(console, item, chosen)
            else:
                scores = _score(ctx, item, given.top)
                pairs = zip(item.texts, scores, strict=True)
                record["scores"] = [_record(ctx, text, its) for text, its in pairs]
                _print(console, item, record["scores"], given.top)
            found.append(record)
        if given.best is not None:
            answer: dict[str, Any] = {"items": found}
        else:
            records = [record for item in found for record in item["scores"]]
            n_tokens = sum(record["n_tokens"] for record in records)
            logprob = math.fsum(record["logprob"] for record in records)
            total = {"n_tokens": n_tokens, "logprob": logprob}
            total["perplexity"] = _perplexity(logprob, n_tokens)
            answer = {"items": found, "total": total}
            if len(items) > 1:
                console.line(
                    f"{n_tokens} tokens, log-probability {logprob:.3f} nats, "
                    f"perplexity {total['perplexity']:.3f}"
                )
        console.answer(answer)


def _score(ctx: Context, item: _Item, top: int) -> list[list[TokenScore]]:
    if item.context is None:
        tokens = ctx.model.prompt_tokens(item.texts[0])
        if len(tokens) == 1:
            return [[]]
        with Branch.start(ctx, tokens[:1]) as branch:
            return [branch.score(tokens[1:], top)]
    continuations = [
        ctx.tokenize(text, add_special=False, parse_special=True) for text in item.texts
    ]
    for text, tokens in zip(item.texts, continuations, strict=True):
        if not tokens:
            raise ConfigError(f"a continuation has no tokens: {text!r}")
    with Branch.start(ctx, item.context) as branch:
        return BranchStore(ctx).score({branch: continuations}, top)[branch]


def _record(ctx: Context, text: str, scores: Sequence[TokenScore]) -> dict[str, Any]:
    def named(token: int) -> dict[str, Any]:
        return {"token": token, "text": ctx.detokenize([token], special=True)}

    total = math.fsum(score.logprob for score in scores)
    return {
        "text": text,
        "n_tokens": len(scores),
        "logprob": total,
        "perplexity": _perplexity(total, len(scores)),
        "tokens": [
            {
                **named(score.token),
                "logprob": score.logprob,
                "rank": score.rank,
                "entropy": score.entropy,
                "top": [{**named(token), "logprob": p} for token, p in score.alternatives],
            }
            for score in scores
        ],
    }


def _perplexity(total: float, n: int) -> float:
    return exp(-total / n) if n else math.nan


def _print_choices(console: Console, item: _Item, found: Selection) -> None:
    order = sorted(range(len(item.texts)), key=lambda i: (i != found.index, -found.scores[i]))
    columns = (item.texts, found.scores, found.logprobs, found.tokens)
    rows = [
        (text, f"{score:.4f}", f"{sum(logprobs):.3f}", len(tokens))
        for text, score, logprobs, tokens in zip(*columns, strict=True)
    ]
    console.table(("choice", "score", "log p, nats", "tokens"), [rows[i] for i in order])
    console.line(stats_text(found.stats), "dim")


def _print(console: Console, item: _Item, records: Sequence[dict[str, Any]], top: int) -> None:
    if item.context is None:
        columns = ("token", "logprob", "rank", "entropy", "most probable")
        rows = [
            (
                repr(its["text"]),
                number(its["logprob"], 3),
                its["rank"],
                number(its["entropy"], 3),
                " ".join(repr(other["text"]) for other in its["top"]),
            )
            for its in records[0]["tokens"]
        ]
        width = 5 if top else 4
        console.table(columns[:width], [row[:width] for row in rows], left=columns[4:])
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
