"""``llamabranch score``: how probable a model finds given text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import typer

from llamabranch import Branch, BranchStore, ConfigError, Context, TokenScore

from .bundles import option, with_bundles
from .console import Console, print_json
from .formats import number
from .jsonl import InvalidLines, parse_json, parse_lines, read_text, text_id
from .options import (
    REQUESTS,
    ChatOptions,
    OutputOptions,
    ParseSpecial,
    RuntimeOptions,
    TargetOptions,
)
from .prompts import read_prompt_file, read_standard_input
from .ray_jobs import RayOptions, finish_job, job_paths

_FIELDS = {"id", "text", "context", "continuations"}


class _Item(NamedTuple):
    """A text, or a context with the texts that may continue it."""

    name: str
    context: str | None
    texts: tuple[str, ...]


@dataclass(frozen=True)
class TextArguments:
    """What is scored."""

    panel: ClassVar[str] = REQUESTS

    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="What to score; with --context its continuations.",
            rich_help_panel="Arguments",
        ),
    ] = None
    context: str | None = option(None, "Text before each TEXT, not scored.", "--context")
    files: list[Path] | None = option(
        None,
        "A file whose whole text is scored, without its last newline; may be repeated.",
        "--file",
        "-f",
    )
    input_file: str | None = option(
        None,
        "A file of JSON objects, one a line, with text, or context and continuations; "
        "- is standard input.",
        "--input",
        "-i",
        metavar="FILE|-",
    )
    top: int = option(0, "Show the N most probable tokens.", min=0)
    parse_special: ParseSpecial = True


@dataclass(frozen=True)
class ScoreJobOptions(RayOptions):
    """A job on Ray, and where its results go."""

    output_folder: Path | None = option(None, "The folder of the results.", "--output", "-o")
    resume: bool = option(False, "Continue the job in --output.", "--resume")


@with_bundles
def score(
    *,
    given: TextArguments,
    models: TargetOptions,
    runtime: RuntimeOptions,
    job: ScoreJobOptions,
    output: OutputOptions,
) -> None:
    """Score given text: log-probabilities of its tokens, their sum, perplexity and ranks.

    The first token of a text is not scored unless the model begins every text with a BOS token. With a
    context, each text is a continuation of it, and all are decoded together.
    """
    with output.console() as console, ExitStack() as stack:
        if job.ray is not None:
            from llamabranch import scale

            inputs, folder = job_paths(given.input_file, job.output_folder, given.texts)
            options = job.options(console, resume=job.resume, streams=8)
            load = runtime.options()
            report = scale.score(
                inputs,
                folder,
                model=models.announce(console),
                load=load,
                parse_special=given.parse_special,
                **options,
            )
            finish_job(console, report, as_json=output.as_json)
            return
        whole = [read_prompt_file(path) for path in given.files or ()]
        items = list(_given([*(given.texts or ()), *whole], given.context))
        if given.input_file is not None:
            invalid = InvalidLines()
            items += _lines(given.input_file, invalid)
            invalid.report(console)
        if not items:
            raise ConfigError("there is no text", hint="give a text, --file or --input")
        name = models.announce(console)
        models.find(name)
        longest = max(
            ((item.context or "") + text for item in items for text in item.texts), key=len
        )
        special = ChatOptions(parse_special=given.parse_special)
        runtime = runtime.with_room(name, longest, 0, special)
        ctx = runtime.open(name, console, stack)
        found: list[dict[str, object]] = []
        for item in items:
            scores = _score(ctx, item, given.top, given.parse_special)
            records = [
                _record(ctx, text, its) for text, its in zip(item.texts, scores, strict=True)
            ]
            found.append({"id": item.name, "context": item.context, "scores": records})
            if not output.as_json:
                if len(items) > 1:
                    console.line(f"[{item.name}]", "bold")
                _print(console, ctx, item, scores)
        if output.as_json:
            print_json({"items": found, "total": _total(found)})
        elif len(items) > 1:
            total = _total(found)
            console.line(
                f"{total['n_tokens']} tokens, log-probability {total['logprob']:.3f} nats, "
                f"perplexity {total['perplexity']:.3f}"
            )


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


def _score(ctx: Context, item: _Item, top: int, parse_special: bool) -> list[list[TokenScore]]:
    if item.context is None:
        tokens = ctx.model.prompt_tokens(item.texts[0], parse_special=parse_special)
        if len(tokens) == 1:
            return [[]]
        with Branch.start(ctx, tokens[:1]) as branch:
            return [branch.score(tokens[1:], top)]
    continuations = [
        ctx.tokenize(text, add_special=False, parse_special=parse_special) for text in item.texts
    ]
    for text, tokens in zip(item.texts, continuations, strict=True):
        if not tokens:
            raise ConfigError(f"a continuation has no tokens: {text!r}")
    with Branch.start(ctx, item.context, parse_special=parse_special) as branch:
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
