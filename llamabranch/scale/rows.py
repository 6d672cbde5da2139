"""From a row of a table to requests, and from results to a row.

A row that cannot be a request becomes a row with ``finish_reason`` "error", not an exception: in Ray Data
an exception ends the job, and the row would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypedDict

from ..arguments import whole
from ..context import Context, TokenScore
from ..engine import Request, Result
from ..errors import ConfigError, LlamaBranchError
from ..sampling import Grammar, SamplingParams

__all__ = [
    "PROBLEM",
    "GenerateRows",
    "Prepared",
    "Record",
    "RowKind",
    "RowOptions",
    "ScoreRows",
    "describe",
    "error_record",
]

Record = dict[str, object]

PROBLEM = "problem"  # the column that tells why a row cannot be run


class Prepared(NamedTuple):
    """The request of a row, and the index of its first prompt token that is scored."""

    request: Request
    start: int = 0


class RowKind(Protocol):
    """What a job does with its rows."""

    @property
    def n(self) -> int:
        """How many texts each row gets."""

    def prepare(self, context: Context, row: Record, name: str) -> Prepared:
        """Return the request of a row; ``name`` is its id."""

    def record(self, prepared: Prepared, results: Sequence[Result]) -> Record:
        """Return the output columns of a row."""


class RowOptions(TypedDict, total=False):
    """What `GenerateRows` takes, as keywords of `Generate` and `generate`."""

    max_tokens: int | None
    sampling: SamplingParams | None
    stop: Sequence[str]
    grammar: Grammar | str | None
    n: int
    chat: bool
    parse_special: bool


@dataclass(frozen=True)
class GenerateRows:
    """Rows with a prompt, to be continued.

    Args:
        max_tokens: the limit of rows without one.
        sampling: the settings; a row's ``seed`` replaces theirs.
        stop: strings that end a text, for rows that have none.
        grammar: a grammar, or GBNF, for rows that have none.
        n: texts for each row; more than one gives columns of lists.
        chat: wrap each prompt in the model's chat template.
        parse_special: parse control tokens written in a prompt; a row's own can turn it off.
    """

    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    grammar: Grammar | str | None = None
    n: int = 1
    chat: bool = False
    parse_special: bool = True

    @classmethod
    def of(cls, options: RowOptions) -> GenerateRows:
        """Return them with the defaults for what is not given.

        Raises:
            ConfigError: ``max_tokens`` or ``n`` is out of range, or the grammar is invalid.
        """
        max_tokens, grammar = options.get("max_tokens", 128), options.get("grammar")
        return cls(
            None if max_tokens is None else whole("max_tokens", max_tokens, 0),
            options.get("sampling") or SamplingParams(),
            tuple(options.get("stop", ())),
            Grammar(grammar) if isinstance(grammar, str) else grammar,
            whole("n", options.get("n", 1), 1),
            options.get("chat", False),
            options.get("parse_special", True),
        )

    def prepare(self, context: Context, row: Record, name: str) -> Prepared:
        """Return the request of a row.

        Raises:
            ConfigError, UnsupportedError: a value is missing, of the wrong type or out of range.
        """
        _check(row)
        tokens = row.get("prompt_tokens")
        prompt = _prompt(row.get("prompt") if tokens is None else tokens)
        if self.chat:
            if not isinstance(prompt, str):
                raise ConfigError("a chat prompt must be text")
            prompt = context.model.prompt_tokens([{"role": "user", "content": prompt}])
        limit, seed, grammar = row.get("max_tokens"), row.get("seed"), row.get("grammar")
        stop = row.get("stop")
        if stop is not None and not isinstance(stop, (str, Sequence)):
            raise ConfigError(f"stop must be a list of strings, not {stop!r:.40}")
        if grammar is not None and not isinstance(grammar, str):
            raise ConfigError(f"a grammar must be text, not {grammar!r:.40}")
        sampling = self.sampling.replace(logprobs=False)
        if seed is not None:
            sampling = sampling.replace(seed=whole("seed", seed))
        texts = (stop,) if isinstance(stop, str) else tuple(stop or self.stop)
        request = Request(
            prompt,
            id=name,
            max_tokens=self.max_tokens if limit is None else whole("max_tokens", limit, 0),
            sampling=sampling,
            stop=texts,
            grammar=grammar or self.grammar,
            n=self.n,
            parse_special=_parses(row, self.parse_special),
        )
        return Prepared(request)

    def record(self, prepared: Prepared, results: Sequence[Result]) -> Record:
        """Return the output columns of a row; with ``n`` above 1 they are lists, in sample order."""
        found = sorted(results, key=lambda result: result.sample)
        errors = [describe(result.error) for result in found if result.error is not None]
        record: Record = {
            "text": [result.text for result in found],
            "tokens": [result.tokens for result in found],
            "finish_reason": [result.finish_reason for result in found],
            "seed": [result.seed % 2**64 for result in found],
        }
        if self.n == 1:
            record = {
                name: values[0] for name, values in record.items() if isinstance(values, list)
            }
        record["n_prompt_tokens"] = found[0].num_prompt_tokens
        record["error"] = errors[0] if errors else None
        return record


@dataclass(frozen=True)
class ScoreRows:
    """Rows with a text to score, and optionally a context that it continues, which is not scored.

    Args:
        n: how many results a row has.
        parse_special: parse control tokens written in the texts; a row's own can turn it off.
    """

    n: int = 1
    parse_special: bool = True

    def prepare(self, context: Context, row: Record, name: str) -> Prepared:
        """Return the request that scores a row.

        Raises:
            ConfigError: the text is missing or has no tokens.
            TokenizeError: it cannot be tokenized.
        """
        _check(row)
        text, before = row.get("text"), row.get("context")
        if not isinstance(text, str):
            raise ConfigError(f"a row needs a text to score, not {text!r:.40}")
        parses = _parses(row, self.parse_special)
        if before is None:
            tokens, start = context.model.prompt_tokens(text, parse_special=parses), 1
        elif isinstance(before, str):
            prefix = context.model.prompt_tokens(before, parse_special=parses)
            own = context.tokenize(text, add_special=False, parse_special=parses)
            if not own:
                raise ConfigError("the text has no tokens")
            tokens, start = [*prefix, *own], len(prefix)
        else:
            raise ConfigError(f"a context must be text, not {before!r:.40}")
        return Prepared(Request(tokens, id=name, max_tokens=0, prompt_logprobs=0), start)

    def record(self, prepared: Prepared, results: Sequence[Result]) -> Record:
        """Return the output columns of a row."""
        (result,) = results
        scores: list[TokenScore] = []
        if result.error is None:
            found = (result.prompt_logprobs or [])[prepared.start :]
            scores = [score for score in found if score is not None]
        logprobs = [score.logprob for score in scores]
        return {
            "tokens": [score.token for score in scores],
            "logprobs": logprobs,
            "ranks": [score.rank for score in scores],
            "logprob": math.fsum(logprobs) if result.error is None else None,
            "n_tokens": len(scores),
            "finish_reason": "error" if result.error is not None else "scored",
            "error": None if result.error is None else describe(result.error),
        }


def error_record(kind: RowKind, error: str) -> Record:
    """Return the output columns of a row that has no result; those that are missing are null."""
    return {"finish_reason": ["error"] if kind.n > 1 else "error", "error": error}


def describe(error: LlamaBranchError) -> str:
    """Return an error's message and hint as one text."""
    return error.message if error.hint is None else f"{error.message} ({error.hint})"


def _check(row: Record) -> None:
    """Raise a ConfigError if the row was found to be unusable when the job began."""
    problem = row.get(PROBLEM)
    if problem is not None:
        raise ConfigError(str(problem))


def _parses(row: Record, default: bool) -> bool:
    given = row.get("parse_special")
    if given is not None and not isinstance(given, bool):
        raise ConfigError(f"parse_special must be true or false, not {given!r:.40}")
    return default and given is not False


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [whole("a token of the prompt", token, 0) for token in value]
    raise ConfigError(f"a prompt must be text or a list of token ids, not {value!r:.40}")
