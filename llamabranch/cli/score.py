"""``llamabranch score``: how probable a model finds given text, and which of several it prefers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import typer

from llamabranch import Branch, BranchStore, ConfigError, Context, TokenScore
from llamabranch.search import Selection, select

from ..arguments import choice
from ..loading import LoadOptions
from ..search.selection import METHODS
from .bundles import option, with_bundles
from .console import Console, print_json
from .files import read_text
from .formats import number
from .jsonl import InvalidLines, parse_json, parse_lines, text_id
from .options import TEXT, ChatOptions, ModelOptions, OutputOptions
from .prompts import read_prompt_file, read_standard_input
from .ray_jobs import RayOptions, finish_job
from .search import stats_text

_SEQUENCES = 33
_FIELDS = {"id", "text", "context", "continuations"}


class _Item(NamedTuple):
    """A text, or a context with the texts that may continue it."""

    name: str
    context: str | None
    texts: tuple[str, ...]


@dataclass(frozen=True)
class ScoreOptions(RayOptions):
    """What is scored."""

    panel: ClassVar[str] = TEXT

    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="What to score; with --context its continuations. Begin them with a space where the "
            "text needs one.",
            rich_help_panel="Arguments",
        ),
    ] = None
    context: str | None = option(
        None, "Text before each TEXT, not scored.", "--context", first=True
    )
    files: list[Path] | None = option(
        None,
        "A file whose whole text is scored, without its last newline; may be repeated.",
        *("--file", "-f"),
        first=True,
    )
    input_file: str | None = option(
        None,
        "A file of JSON objects, one a line, with text, or context and continuations; "
        "- is standard input.",
        *("--input", "-i"),
        metavar="FILE|-",
        first=True,
    )
    best: str | None = option(
        None,
        "Print the best continuation first, by this measure of the log-probabilities of its tokens.",
        metavar="mean|greedy|contrast|sum|bytes",
        first=True,
    )
    top: int = option(0, "Show the N most probable tokens.", min=0, first=True)
    output_folder: Path | None = option(
        None, "With --ray: the folder of the results.", *("--output", "-o")
    )
    resume: bool = option(False, "With --ray: continue the job in --output.", "--resume")

    def items(self, console: Console) -> list[_Item]:
        """Return what is to be scored.

        Raises:
            ConfigError: nothing, a file that cannot be read, or lines that are no items.
        """
        whole = [read_prompt_file(path) for path in self.files or ()]
        items = list(_given([*(self.texts or ()), *whole], self.context))
        if self.input_file is not None:
            invalid = InvalidLines()
            items += _lines(self.input_file, invalid)
            invalid.report(console)
        if not items:
            raise ConfigError("there is no text", hint="give a text, --file or --input")
        if self.best is not None:
            choice("--best", self.best, METHODS)
            for item in items:
                if item.context is None:
                    raise ConfigError("--best needs a --context, which the texts continue")
                if not all(item.texts):
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
        if given.ray is not None:
            from llamabranch import scale

            inputs, folder = given.paths(given.input_file, given.output_folder, given.texts)
            options = given.ray_options(console, resume=given.resume, streams=8)
            model, load = models.announce(console), models.load_options()
            report = scale.score(inputs, folder, model=model, load=load, **options)
            finish_job(console, report, as_json=output.as_json)
            return
        items = given.items(console)
        name = models.announce(console)
        longest = max(
            ((item.context or "") + text for item in items for text in item.texts), key=len
        )
        models = models.with_room(name, longest, 0, ChatOptions())
        more = LoadOptions() if given.best is None else LoadOptions(n_seq_max=_SEQUENCES)
        ctx = models.open(name, console, stack, **more)
        found: list[dict[str, object]] = []
        for item in items:
            if not output.as_json and len(items) > 1:
                console.line(f"[{item.name}]", "bold")
            record: dict[str, object] = {"id": item.name, "context": item.context}
            if given.best is not None:
                chosen = _choose(ctx, item, given.best)
                record |= {"method": given.best, **chosen.as_dict()}
                if not output.as_json:
                    _print_choices(console, item, chosen)
            else:
                scores = _score(ctx, item, given.top)
                pairs = zip(item.texts, scores, strict=True)
                record["scores"] = [_record(ctx, text, its) for text, its in pairs]
                if not output.as_json:
                    _print(console, ctx, item, scores)
            found.append(record)
        if output.as_json:
            answer: dict[str, object] = {"items": found}
            print_json(answer if given.best else {**answer, "total": _total(found)})
        elif len(items) > 1 and given.best is None:
            total = _total(found)
            console.line(
                f"{total['n_tokens']} tokens, log-probability {total['logprob']:.3f} nats, "
                f"perplexity {total['perplexity']:.3f}"
            )


def _choose(ctx: Context, item: _Item, method: str) -> Selection:
    with Branch.start(ctx, item.context or "") as branch:
        return select(branch, item.texts, method=method)


def _print_choices(console: Console, item: _Item, found: Selection) -> None:
    order = sorted(range(len(item.texts)), key=lambda i: (i != found.index, -found.scores[i]))
    rows = [
        (
            item.texts[i],
            f"{found.scores[i]:.4f}",
            f"{sum(found.logprobs[i]):.3f}",
            str(len(found.tokens[i])),
        )
        for i in order
    ]
    console.table(("choice", "score", "log p, nats", "tokens"), rows)
    console.line(stats_text(found.stats), "dim")


def _given(texts: Sequence[str], context: str | None) -> Iterator[_Item]:
    if context is None:
        yield from (_Item(str(i), None, (text,)) for i, text in enumerate(texts))
    elif not texts:
        raise ConfigError("--context needs a text that continues it")
    else:
        yield _Item("0", context, tuple(texts))


def _lines(input_file: str, invalid: InvalidLines) -> Iterator[_Item]:
    text = read_standard_input() if input_file == "-" else read_text(Path(input_file))
    lines = text.split("\n")
    return parse_lines(
        lines, lambda line, number, _: _item(parse_json(line), str(number)), "item", invalid.add
    )


def _item(data: object, name: str) -> _Item:
    if not isinstance(data, dict):
        raise ConfigError("an item is an object with text, or with context and continuations")
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r}")
    name = name if data.get("id") is None else text_id(data["id"])
    text, context, continuations = (data.get(k) for k in ("text", "context", "continuations"))
    if isinstance(text, str) and context is None and continuations is None:
        return _Item(name, None, (text,))
    is_list = isinstance(continuations, list) and all(isinstance(c, str) for c in continuations)
    if text is None and isinstance(context, str) and isinstance(continuations, list) and is_list:
        return _Item(name, context, tuple(continuations))
    raise ConfigError("give text, or context and a list of continuations, as texts")


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


def _record(ctx: Context, text: str, scores: Sequence[TokenScore]) -> dict[str, object]:
    total = math.fsum(score.logprob for score in scores)
    return {
        "text": text,
        "n_tokens": len(scores),
        "logprob": _finite(total),
        "perplexity": _finite(_perplexity(total, len(scores))),
        "tokens": [
            {
                "token": score.token,
                "text": _shown(ctx, score.token),
                "logprob": _finite(score.logprob),
                "rank": score.rank,
                "entropy": _finite(score.entropy),
                "top": [
                    {"token": token, "text": _shown(ctx, token), "logprob": _finite(logprob)}
                    for token, logprob in score.alternatives
                ],
            }
            for score in scores
        ],
    }


def _total(found: Sequence[dict[str, object]]) -> dict[str, object]:
    records = [record for item in found for record in _records(item)]
    n_tokens = sum(int(str(record["n_tokens"])) for record in records)
    logprob = math.fsum(float(str(record["logprob"] or 0.0)) for record in records)
    return {
        "n_tokens": n_tokens,
        "logprob": logprob,
        "perplexity": _perplexity(logprob, n_tokens) if n_tokens else None,
    }


def _records(item: dict[str, object]) -> list[dict[str, object]]:
    records = item["scores"]
    return records if isinstance(records, list) else []


def _print(
    console: Console, ctx: Context, item: _Item, scores: Sequence[Sequence[TokenScore]]
) -> None:
    if item.context is None:
        rows = [
            (
                repr(_shown(ctx, score.token)),
                number(score.logprob, 3),
                str(score.rank),
                number(score.entropy, 3),
                " ".join(repr(_shown(ctx, token)) for token, _ in score.alternatives),
            )
            for score in scores[0]
        ]
        width = 5 if any(score.alternatives for score in scores[0]) else 4
        columns = ("token", "logprob", "rank", "entropy", "most probable")
        console.table(columns[:width], [row[:width] for row in rows], left=columns[4:])
        console.line()
    summary = []
    for text, its in zip(item.texts, scores, strict=True):
        total, n = math.fsum(score.logprob for score in its), len(its)
        ranks = sorted(score.rank for score in its)
        summary.append(
            (
                text if len(text) <= 40 else text[:37] + "...",
                str(n),
                number(total, 3),
                number(_perplexity(total, n), 3),
                str(ranks[-1]) if ranks else "-",
            )
        )
    console.table(("text", "tokens", "logprob", "perplexity", "worst rank"), summary)


def _shown(ctx: Context, token: int) -> str:
    return ctx.detokenize([token], special=True)


def _perplexity(total: float, n: int) -> float:
    try:
        return math.exp(-total / n) if n else math.nan
    except OverflowError:
        return math.inf


def _finite(value: float) -> float | None:
    """Return it, or None for what JSON cannot hold."""
    return value if math.isfinite(value) else None
