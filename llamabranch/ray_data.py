"""Texts for the rows of a Ray Data dataset: one engine per actor, rows in, rows out.

Reading, writing, retries, progress and resuming are Ray Data's. Importing this module imports neither
Ray nor pyarrow: ``pip install 'llamabranch[ray]'`` installs both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .engine import Engine, Request, Result
from .errors import ConfigError, LlamaBranchError
from .loading import LoadOptions, load
from .sampling import SamplingParams

if TYPE_CHECKING:
    import pyarrow

__all__ = ["Generate"]

# Columns that are read as the fields of a request; see `Request.from_json`.
_FIELDS = (
    "prompt", "messages", "max_tokens", "stop", "seed", "grammar", "json_schema", "regex", "choices",
)  # fmt: skip


class Generate:
    """A class for ``ray.data.Dataset.map_batches`` with ``batch_format="pyarrow"``.

    The columns ``prompt``, ``messages``, ``max_tokens``, ``stop``, ``seed``, ``grammar``,
    ``json_schema``, ``regex`` and ``choices`` of a row are fields of `Request.from_json`; ``prompt`` or
    ``messages`` is needed. Each row gets the columns ``text``, ``tokens``, ``finish_reason``,
    ``text_seed``, ``n_prompt_tokens`` and ``error``. A row that is not a valid request, or whose
    text fails, has ``finish_reason`` "error" and its reason in ``error``.

    A row without a seed gets one from ``seed`` and its id. So in an exact context
    (``load={"exact": True}``) the text of a row depends on neither its batch nor its actor.

    Args:
        model: a file or a name; each node must have it, or can download it.
        id: the column of ids, unique in the dataset: integers or text.
        max_tokens: the maximum number of tokens of a text; None = until the model ends it.
        seed: where the rows' seeds come from; None = a random one for each.
        sampling: the settings for everything that a row leaves out.
        load: options of `llamabranch.load`, such as ``n_ctx``, ``n_seq_max`` and ``n_threads``.

    Raises:
        LlamaBranchError: an argument is wrong, or the model cannot be loaded. Ray ends the job.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        id: str = "id",
        max_tokens: int | None = 128,
        seed: int | None = None,
        sampling: SamplingParams | None = None,
        load: LoadOptions | None = None,
    ) -> None:
        options: LoadOptions = {"prefix_cache": True, **(load or {})}
        self._id = id
        self._engine = Engine(
            _load(model, **options), sampling=sampling, max_tokens=max_tokens, seed=seed
        )
        self._sampling = sampling

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Return the rows with the columns of their texts.

        Raises:
            ConfigError: a row has no id, or two have the same. DecodeError: the engine failed.
        """
        import pyarrow as pa

        requests: list[Request] = []
        errors: dict[str, str] = {}
        names = []
        for row in batch.to_pylist():
            if row.get(self._id) is None:
                raise ConfigError(f"every row needs an id, in the column {self._id!r}")
            names.append(name := str(row[self._id]))
            try:
                requests.append(self._request(row, name))
            except LlamaBranchError as error:
                errors[name] = f"{type(error).__name__}: {error.message}"
        if len({*names}) < len(names):
            raise ConfigError(f"two rows have the same id, in the column {self._id!r}")
        results = {r.id: r for r in self._engine.generate(requests)} if requests else {}
        texts = [_columns(results.get(name), errors.get(name)) for name in names]
        schema = pa.schema(
            [
                ("text", pa.string()), ("tokens", pa.list_(pa.int32())), ("finish_reason", pa.string()),
                ("text_seed", pa.uint64()), ("n_prompt_tokens", pa.int32()), ("error", pa.string()),
            ]
        )  # fmt: skip
        for name, column in zip(schema.names, pa.Table.from_pylist(texts, schema), strict=True):
            batch = batch.append_column(name, column)
        return batch

    def _request(self, row: Mapping[str, object], name: str) -> Request:
        data = {field: row[field] for field in _FIELDS if row.get(field) is not None}
        return Request.from_json(data, name, self._sampling)


def _columns(result: Result | None, error: str | None) -> dict[str, object]:
    """Return the values of a row's new columns."""
    if result is None:
        return {"text": "", "tokens": [], "finish_reason": "error", "error": error}
    failure = result.error
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "text_seed": result.seed % 2**64,
        "n_prompt_tokens": result.num_prompt_tokens,
        "error": None if failure is None else f"{type(failure).__name__}: {failure}",
    }


_load = load  # the argument of that name hides it
