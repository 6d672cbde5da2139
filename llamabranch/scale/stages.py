"""The classes for ``Dataset.map_batches``: each worker process holds one model and one engine.

``__call__`` is a coroutine, so Ray Data runs several batches of a block at a time. With two
concurrent calls for each worker it also runs batches of two blocks. All batches feed the worker's
one engine, so the engine always has texts to run. If the engine breaks, the process ends. Then Ray
starts another process and gives it the batches again. After an exception, Ray would give the
batches back to the broken engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NoReturn, cast

from ..arguments import items, whole
from ..context import Context
from ..engine import AsyncEngine, Request, Result
from ..errors import ConfigError, DecodeError, LlamaBranchError, ModelLoadError
from ..hub import resolve
from ..loading import LoadOptions, load
from ..speculative import ModelDrafter, NullDrafter
from .rows import (
    GenerateRows,
    Record,
    RowOptions,
    ScoreRows,
    describe,
    error_record,
    output_table,
    read_rows,
)

if TYPE_CHECKING:
    import pyarrow
    from ray.runtime_context import RuntimeContext
    from typing_extensions import Unpack

_CELLS_PER_TEXT = 512  # cache cells (tokens) for each text at a time, unless n_ctx is set
_LEAST_CELLS = 2048


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker runs. These options do not change the texts.

    Args:
        streams: how many texts run at a time.
        draft: a draft model; None = no drafts.
        fingerprint: the fingerprint that the model's file must have; None = any.
        stall_s: seconds without progress after which a worker ends its process. It may take up to
            twice as long to notice.
    """

    streams: int = 8
    draft: str | None = None
    fingerprint: str | None = None
    stall_s: float = 600.0


class StageOptions(LoadOptions, RowOptions, total=False):
    """Options of `load`, and the settings of `Generate` and `Score` for their rows."""


class _Stage:
    """A worker: opens the model, then turns batches of rows into batches of results."""

    _rows: ClassVar[type[GenerateRows | ScoreRows]]

    def __init__(
        self,
        model: str,
        *,
        seed: int | None = None,
        id_column: str = "id",
        keep: Sequence[str] = (),
        worker: WorkerOptions | None = None,
        **options: Unpack[StageOptions],
    ) -> None:
        load = dict[str, object](options)
        names = {field.name for field in fields(self._rows)}
        of_rows = {name: load.pop(name) for name in names & load.keys()}
        self._kind = self._rows(**of_rows)  # type: ignore[arg-type]
        self._id_column, self._keep = id_column, items("keep", keep)
        self._worker = worker = worker or WorkerOptions()
        streams = whole("streams", worker.streams, 1, 255)
        n_ctx = max(_LEAST_CELLS, _CELLS_PER_TEXT * streams)
        usual = LoadOptions(n_seq_max=streams, prefix_cache=True, n_ctx=n_ctx)
        self._model, self._seed = model, seed
        self._load = cast(LoadOptions, {**usual, **_assigned(), **load})
        self._is_open = False
        # Ray restarts a dead worker without a limit, but retries a batch only a limited number of
        # times. So a restarted worker opens its model when it gets its first batch. If opening the
        # model kills the worker again, that counts as a retry, and so the job ends at some point.
        if not _is_restarted():
            self._open()

    def _open(self) -> None:
        """Open the model, and the draft model if there is one."""
        self._context, worker = _opened(self._model, self._load), self._worker
        fingerprint = self._context.model.fingerprint
        if worker.fingerprint not in (None, fingerprint):
            raise ModelLoadError(
                f"{self._model} is another file on this node: its fingerprint is "
                f"{fingerprint[:16]}, the job's {str(worker.fingerprint)[:16]}",
                hint="remove the other file, or name the model by its path",
            )
        drafter = ModelDrafter(_opened(worker.draft, self._load)) if worker.draft else NullDrafter()
        sampling = self._kind.sampling if isinstance(self._kind, GenerateRows) else None
        self._engine = AsyncEngine(
            self._context, drafter, sampling=sampling, max_tokens=None, seed=self._seed
        )
        self._is_open = True

    async def __call__(self, batch: object) -> pyarrow.Table:
        """Return a batch's rows with their results, in the same order."""
        if not self._is_open:
            self._open()
        rows = read_rows(batch)
        names = [str(_identity(row, self._id_column)) for row in rows]
        running = [
            asyncio.ensure_future(self._row(row, name))
            for row, name in zip(rows, names, strict=True)
        ]
        pending: set[asyncio.Future[Record]] = set(running)
        n_passes = -1
        while pending:
            _, pending = await asyncio.wait(pending, timeout=self._worker.stall_s)
            before, n_passes = n_passes, self._engine.stats.target_forward_passes
            if pending and n_passes == before:  # for example, a decode that never returns
                _end_process(f"no progress for {self._worker.stall_s:g} s")
        invariant = self._context.capabilities.exact
        records = [
            {name: row.get(name) for name in (self._id_column, *self._keep)}
            | {**record.result(), "exact": invariant}
            for row, record in zip(rows, running, strict=True)
        ]
        return output_table(records, batch, self._kind, self._id_column, self._keep)

    async def _row(self, row: Record, name: str) -> Record:
        """Return the output columns of a row."""
        try:
            request = self._kind.request(self._context, row, name)
            return self._kind.record(await self._results(request))
        except LlamaBranchError as error:
            if isinstance(error, DecodeError):
                _end_process(f"the engine failed: {error}")
            return error_record(self._kind, describe(error))
        except Exception as error:  # any other error leaves the engine in an unknown state
            _end_process(f"the engine failed: {error}")

    async def _results(self, request: Request) -> list[Result]:
        """Return the results of a request's texts when all texts have ended."""
        async with aclosing(self._engine.steps(request, reports_tokens=False)) as steps:
            events = [event async for events_of_step in steps for event in events_of_step]
        return [event.result for event in events if event.result is not None]


class Generate(_Stage):
    """Continue the prompts of batches, for `ray.data.Dataset.map_batches`.

    A batch is a table with the columns ``id`` and ``prompt`` (text, or a list of token ids). It may have
    ``max_tokens``, ``stop``, ``seed``, ``parse_special``, and one of ``grammar`` (GBNF),
    ``json_schema`` (as text), ``regex`` and ``choice`` (a list of texts). These columns mean the
    same as in a file of requests, see `Request.from_json`. In a row they replace the settings
    below.

    The result has ``id``, the columns of ``keep``, and ``text``, ``tokens``, ``finish_reason``,
    ``seed``, ``n_prompt_tokens``, ``error`` and ``exact`` (whether the same row gives the
    same bytes again). If a row fails, no exception is raised; its ``finish_reason`` is "error".

    Args:
        model: a path to a GGUF file, or a name that each node finds in its own cache or downloads.
        max_tokens: the most tokens to generate for each text (128); None = no limit.
        seed: each row's seed is derived from this seed and the row's id.
        sampling: the sampling settings; None = the defaults.
        stop: strings that end a text.
        grammar: a grammar, or GBNF, that texts must follow.
        n: how many texts each row gets (1). If it is above 1, the output columns are lists.
        chat: wrap each prompt in the model's chat template (False).
        parse_special: parse control tokens written in a prompt (True), see ``Model.prompt_tokens``. A
            row can turn it off, not on.
        id_column: the name of the column of ids, int64 or text.
        keep: input columns to keep in the output.
        worker: how a worker runs.
        options: the options of `lb.load`. By default there is a prefix cache, and 512 cells for
            each text at a time.

    Raises:
        ConfigError, ModelLoadError, DownloadError: as `lb.load`.
    """

    _rows = GenerateRows


class Score(_Stage):
    """Score the texts of batches, for `ray.data.Dataset.map_batches`.

    A batch is a table with the columns ``id`` and ``text``, and optionally ``context`` and
    ``parse_special``. The text continues the context, which is not scored. The result has ``id``,
    the columns of ``keep``, and ``tokens``, ``logprobs`` (nats), ``ranks``, ``logprob`` (their
    sum), ``n_tokens``, ``finish_reason``, ``error`` and ``exact``.

    Args:
        model, parse_special, id_column, keep, worker, options: as for `Generate`.
    """

    _rows = ScoreRows


def _end_process(reason: str) -> NoReturn:
    """End this process at once. Nothing is cleaned up, because the engine may be broken."""
    print(f"llamabranch: this worker ends: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _opened(model: str, options: LoadOptions) -> Context:
    # Two workers of a node download the same model only once: each cached file has a lock.
    return load(resolve(model, download=True), **options)


def _ray_worker() -> RuntimeContext | None:
    """Return Ray's information about this process; None outside of Ray."""
    try:
        import ray
    except ImportError:
        return None
    return ray.get_runtime_context() if ray.is_initialized() else None


def _is_restarted() -> bool:
    """Return whether this process replaces one that died."""
    worker = _ray_worker()
    return worker is not None and bool(
        worker.get_actor_id() and worker.was_current_actor_reconstructed
    )


def _assigned() -> LoadOptions:
    """Return load options for the CPUs and GPUs that Ray gave to this process; {} without Ray."""
    worker = _ray_worker()
    if worker is None:
        return {}
    resources = worker.get_assigned_resources()
    n = max(1, int(resources.get("CPU", 1.0)))
    options = LoadOptions(n_threads=n, n_threads_batch=n)
    return {**options, "n_gpu_layers": -1} if resources.get("GPU") else options


def _identity(row: Record, column: str) -> int | str:
    value = row.get(column)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise ConfigError(
        f"every row needs an id, a number or text, in the column {column!r}, not {value!r:.40}"
    )
