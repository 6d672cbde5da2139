"""Turn the rows of a batch into requests, and their results into a table.

If no request can be made of a row, its result has ``finish_reason`` "error". No exception is
raised, because in Ray Data an exception ends the job. The schema of a table does not depend on its
rows, because all blocks of a folder need the same types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypedDict

from ..arguments import instance, whole
from ..context import Context
from ..engine import Request, Result
from ..errors import ConfigError, LlamaBranchError
from ..sampling import Grammar, SamplingParams

if TYPE_CHECKING:
    import pyarrow

Record = dict[str, object]


class RowOptions(TypedDict, total=False):
    """The fields of `GenerateRows`, as keyword arguments of `Generate` and `generate`."""

    max_tokens: int | None
    sampling: SamplingParams | None
    stop: Sequence[str]
    grammar: Grammar | str | None
    n: int
    chat: bool
    parse_special: bool


@dataclass(frozen=True)
class GenerateRows:
    """Settings for rows whose prompt is continued; a row can have its own. See `Generate`.

    Raises:
        ConfigError: ``max_tokens`` or ``n`` is out of range, or the grammar is invalid.
    """

    columns: ClassVar = (
        "prompt", "max_tokens", "stop", "grammar", "json_schema", "regex", "choice", "seed",
        "parse_special",
    )  # fmt: skip

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
        data = {name: row.get(name) for name in self.columns}
        if self.chat:
            content = instance("prompt", data["prompt"], str)
            data["prompt"] = context.model.prompt_tokens([{"role": "user", "content": content}])
        if data["json_schema"] is not None:  # objects of a column all get the same keys
            instance("json_schema", data["json_schema"], str)
        sampling = (self.sampling or SamplingParams()).replace(logprobs=False)
        request = Request.from_json(data, name, sampling, needs=["prompt"])
        return replace(
            request,
            max_tokens=self.max_tokens if request.max_tokens is None else request.max_tokens,
            stop=request.stop or self.stop,
            grammar=request.grammar or self.grammar,
            n=self.n,
            # A row can turn parse_special off, not on.
            parse_special=self.parse_special and request.parse_special,
        )

    def record(self, results: Sequence[Result]) -> Record:
        """Return the output columns of a row; with ``n`` above 1 they are lists, in sample order."""
        ordered = sorted(results, key=lambda result: result.sample)
        lists: dict[str, list[object]] = {
            "text": [result.text for result in ordered],
            "tokens": [result.tokens for result in ordered],
            "finish_reason": [result.finish_reason for result in ordered],
            "seed": [result.seed % 2**64 for result in ordered],
        }
        errors = [describe(result.error) for result in ordered if result.error is not None]
        return {
            **({name: values[0] for name, values in lists.items()} if self.n == 1 else lists),
            "n_prompt_tokens": ordered[0].num_prompt_tokens,
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
    """Settings for rows whose text is scored. A context before the text is not scored.

    Args:
        parse_special: parse control tokens written in the texts; a row can turn it off, not on.
    """

    columns: ClassVar = ("text", "context", "parse_special")
    n: ClassVar = 1

    parse_special: bool = True

    def request(self, context: Context, row: Record, name: str) -> Request:
        """Return the request that scores a row; ``name`` is its id.

        Raises:
            ConfigError: the text is missing or has no tokens.
            TokenizeError: the text or its context cannot be tokenized.
        """
        model, before = context.model, row.get("context")
        text = instance("text", row.get("text"), str)
        parses = self.parse_special and row.get("parse_special") is not False
        start = 1
        if before is None:
            tokens = model.prompt_tokens(text, parse_special=parses)
        else:
            before = instance("context", before, str)
            prefix = model.prompt_tokens(before, parse_special=parses)
            own = context.tokenize(text, add_special=False, parse_special=parses)
            if not own:
                raise ConfigError("the text has no tokens")
            tokens, start = [*prefix, *own], len(prefix)
        return Request(tokens, id=name, max_tokens=0, prompt_logprobs=0, logprobs_from=start)

    def record(self, results: Sequence[Result]) -> Record:
        """Return the output columns of a row."""
        (result,) = results
        scored = result.prompt_logprobs if result.error is None else None
        scores = [score for score in scored or () if score is not None]
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
    """Return the output columns of a row that has no result. All other columns become null."""
    return {"finish_reason": ["error"] if kind.n > 1 else "error", "error": error}


def describe(error: LlamaBranchError) -> str:
    """Return an error's message and hint as one text."""
    return error.message if error.hint is None else f"{error.message} ({error.hint})"


# -- tables ----------------------------------------------------------------------------------------


def read_rows(batch: object) -> list[Record]:
    """Return the rows of a batch. It is a table, or a mapping of columns to NumPy arrays or lists.

    Raises:
        ConfigError: the batch is something else.
    """
    import pyarrow as pa

    if isinstance(batch, Mapping):  # arrays of objects hold lists and texts
        plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in batch.items()}
        batch = pa.table(plain)
    if not isinstance(batch, pa.Table):
        raise ConfigError(f"a batch is a table or a mapping of columns, not {type(batch).__name__}")
    rows: list[Record] = batch.to_pylist()
    return rows


def output_table(
    records: Sequence[Record],
    batch: object,
    kind: GenerateRows | ScoreRows,
    id_column: str,
    keep: Sequence[str],
) -> pyarrow.Table:
    """Return records as a table; the id and the kept columns keep their types."""
    import pyarrow as pa

    schema = batch.schema if isinstance(batch, pa.Table) else pa.schema([])
    fields = []
    for name in (id_column, *keep):
        values = [record.get(name) for record in records]
        known = name in schema.names
        fields.append((name, schema.field(name).type if known else pa.array(values).type))
    fields += [*kind.fields(), ("error", pa.string()), ("exact", pa.bool_())]
    return pa.Table.from_pylist(list(records), schema=pa.schema(fields))
