"""From the rows of a batch to requests, and from their results to a table.

A row that cannot be a request becomes a row with ``finish_reason`` "error", not an exception: in Ray Data
an exception ends the job, and the row would be lost. The schema of a table does not depend on its rows:
blocks with other types could not be written into one folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypedDict

from ..arguments import flag, whole
from ..context import Context
from ..engine import Request, Result
from ..errors import ConfigError, LlamaBranchError
from ..sampling import Grammar, SamplingParams

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "ROW", "GenerateRows", "Record", "RowOptions", "ScoreRows", "describe", "error_record",
    "output_table", "read_rows",
]  # fmt: skip

Record = dict[str, object]

ROW = (
    "llamabranch_row"  # the column of a job's blocks that holds what requests are made of, as JSON
)


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

    Raises:
        ConfigError: ``max_tokens`` or ``n`` is out of range, or the grammar is invalid.
    """

    columns: ClassVar = ("prompt", "max_tokens", "stop", "grammar", "seed", "parse_special")

    max_tokens: int | None = 128
    sampling: SamplingParams | None = None
    stop: Sequence[str] = ()
    grammar: Grammar | str | None = None
    n: int = 1
    chat: bool = False
    parse_special: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            object.__setattr__(self, "max_tokens", whole("max_tokens", self.max_tokens, 0))
        if isinstance(self.grammar, str):
            object.__setattr__(self, "grammar", Grammar(self.grammar))
        object.__setattr__(self, "sampling", self.sampling or SamplingParams())
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "n", whole("n", self.n, 1))

    def request(self, context: Context, row: Record, name: str) -> Request:
        """Return the request of a row; ``name`` is its id.

        Raises:
            ConfigError, UnsupportedError: a value is missing, of the wrong type or out of range.
        """
        text = _texts("prompt", row.get("prompt"))
        prompt: str | list[int]
        if self.chat:
            message = {"role": "user", "content": _text("prompt", text)}
            prompt = context.model.prompt_tokens([message])
        elif isinstance(text, str):
            prompt = text
        else:
            prompt = [whole("a token of the prompt", token, 0) for token in text]
        given, sampling = row.get("max_tokens"), self.sampling or SamplingParams()
        if (seed := row.get("seed")) is not None:
            sampling = sampling.replace(seed=whole("seed", seed, -(2**63), 2**63 - 1))
        stop, grammar = row.get("stop"), row.get("grammar")
        return Request(
            prompt,
            id=name,
            max_tokens=self.max_tokens if given is None else whole("max_tokens", given, 0),
            sampling=sampling.replace(logprobs=False),
            stop=self.stop
            if stop is None
            else [_text("stop", s) for s in _texts("stop", stop, True)],
            grammar=self.grammar if grammar is None else _text("grammar", grammar),
            n=self.n,
            parse_special=_parses(row, self.parse_special),
        )

    def record(self, results: Sequence[Result]) -> Record:
        """Return the output columns of a row; with ``n`` above 1 they are lists, in sample order."""
        found = sorted(results, key=lambda result: result.sample)
        lists: dict[str, list[object]] = {
            "text": [result.text for result in found],
            "tokens": [result.tokens for result in found],
            "finish_reason": [result.finish_reason for result in found],
            "seed": [result.seed % 2**64 for result in found],
        }
        errors = [describe(result.error) for result in found if result.error is not None]
        return {
            **({name: values[0] for name, values in lists.items()} if self.n == 1 else lists),
            "n_prompt_tokens": found[0].num_prompt_tokens,
            "error": errors[0] if errors else None,
        }

    def fields(self) -> list[tuple[str, pyarrow.DataType]]:
        """Return the names and types of the output columns."""
        import pyarrow as pa

        of_text = [
            ("text", pa.string()), ("tokens", pa.list_(pa.int32())), ("finish_reason", pa.string()),
            ("seed", pa.uint64()),
        ]  # fmt: skip
        if self.n > 1:
            of_text = [(name, pa.list_(type_)) for name, type_ in of_text]
        return [*of_text, ("n_prompt_tokens", pa.int32())]


@dataclass(frozen=True)
class ScoreRows:
    """Rows with a text to score, and optionally a context that it continues, which is not scored.

    Args:
        parse_special: parse control tokens written in the texts; a row's own can turn it off.
    """

    columns: ClassVar = ("text", "context", "parse_special")
    n: ClassVar = 1

    parse_special: bool = True

    def request(self, context: Context, row: Record, name: str) -> Request:
        """Return the request that scores a row; ``name`` is its id.

        Raises:
            ConfigError: the text is missing or has no tokens.
            TokenizeError: it cannot be tokenized.
        """
        text, before = _text("text", row.get("text")), row.get("context")
        model, parses = context.model, _parses(row, self.parse_special)
        start = 1
        if before is None:
            tokens = model.prompt_tokens(text, parse_special=parses)
        else:
            prefix = model.prompt_tokens(_text("context", before), parse_special=parses)
            own = context.tokenize(text, add_special=False, parse_special=parses)
            if not own:
                raise ConfigError("the text has no tokens")
            tokens, start = [*prefix, *own], len(prefix)
        return Request(tokens, id=name, max_tokens=0, prompt_logprobs=0, logprobs_from=start)

    def record(self, results: Sequence[Result]) -> Record:
        """Return the output columns of a row."""
        (result,) = results
        rated = result.prompt_logprobs if result.error is None else None
        scores = [score for score in rated or () if score is not None]
        logprobs = [score.logprob for score in scores]
        return {
            "tokens": [score.token for score in scores],
            "logprobs": logprobs,
            "ranks": [score.rank for score in scores],
            "logprob": math.fsum(logprobs) if result.error is None else None,
            "n_tokens": len(scores),
            "finish_reason": "scored" if result.error is None else "error",
            "error": None if result.error is None else describe(result.error),
        }

    def fields(self) -> list[tuple[str, pyarrow.DataType]]:
        """Return the names and types of the output columns."""
        import pyarrow as pa

        return [
            ("tokens", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float64())),
            ("ranks", pa.list_(pa.int32())), ("logprob", pa.float64()), ("n_tokens", pa.int32()),
            ("finish_reason", pa.string()),
        ]  # fmt: skip


def error_record(kind: GenerateRows | ScoreRows, error: str) -> Record:
    """Return the output columns of a row that has no result; those that are missing are null."""
    return {"finish_reason": ["error"] if kind.n > 1 else "error", "error": error}


def describe(error: LlamaBranchError) -> str:
    """Return an error's message and hint as one text."""
    return error.message if error.hint is None else f"{error.message} ({error.hint})"


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text, not {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is not valid Unicode") from None
    return value


def _texts(name: str, value: object, several: bool = False) -> str | Sequence[object]:
    """Return text as it is, as a list of it if ``several``; a list as it is."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be text or a list, not {value!r:.40}")
    return [value] if several else _text(name, value)


def _parses(row: Record, default: bool) -> bool:
    given = row.get("parse_special")
    if given is not None:
        flag("parse_special", given)
    return default and given is not False


# -- tables ----------------------------------------------------------------------------------------


def read_rows(batch: object) -> list[Record]:
    """Return the rows of a batch: a table, a data frame, or a mapping of columns.

    Raises:
        ConfigError: something else.
    """
    import pyarrow as pa

    if isinstance(batch, Mapping):  # NumPy's arrays of objects hold lists and texts
        plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in batch.items()}
        batch = pa.table(plain)
    elif hasattr(batch, "to_dict"):
        batch = pa.Table.from_pandas(batch, preserve_index=False)
    if not isinstance(batch, pa.Table):
        raise ConfigError(f"a batch is a table or a mapping of columns, not {type(batch).__name__}")
    rows: list[Record] = batch.to_pylist()
    return [row | json.loads(str(row.pop(ROW))) if ROW in row else row for row in rows]


def output_table(
    records: Sequence[Record],
    batch: object,
    kind: GenerateRows | ScoreRows,
    id_column: str,
    keep: Sequence[str],
) -> pyarrow.Table:
    """Return records as a table; the id and the kept columns have the types of the batch."""
    import pyarrow as pa

    given = batch.schema if isinstance(batch, pa.Table) else pa.schema([])
    fields = []
    for name in (id_column, *keep):
        values = [record.get(name) for record in records]
        known = name in given.names
        fields.append((name, given.field(name).type if known else pa.array(values).type))
    fields += [*kind.fields(), ("error", pa.string()), ("batch_invariant", pa.bool_())]
    return pa.Table.from_pylist(list(records), schema=pa.schema(fields))
