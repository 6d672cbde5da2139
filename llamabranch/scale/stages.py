"""The classes for ``Dataset.map_batches``: each worker process holds one model and one engine.

Ray Data runs several batches of a block at a time where ``__call__`` is a coroutine; with two concurrent
calls for each actor also batches of two blocks. All of them feed the worker's one engine.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from typing_extensions import Unpack

from ..arguments import whole
from ..context import Context
from ..engine import Engine, Result
from ..errors import ConfigError, LlamaBranchError, ModelLoadError
from ..hub import resolve
from ..loading import LoadOptions, load
from ..speculative import ModelDrafter
from .ledger import MOST_DEATHS, Row
from .placement import CoreClaim, cache_domains, claim_cores, lock_folder
from .resident import ResidentEngine, end_process
from .rows import (
    GenerateRows,
    Prepared,
    Record,
    RowKind,
    RowOptions,
    ScoreRows,
    describe,
    error_record,
)
from .tables import output_table, read_rows

if TYPE_CHECKING:
    import pyarrow

__all__ = ["Generate", "LedgerHandle", "Score", "WorkerOptions"]

_CELLS_PER_TEXT = 512  # of the cache, unless n_ctx is given
_LEAST_CELLS = 2048
_MOST_LOADING_DEATHS = 3


class _Method(Protocol):
    def remote(self, *args: object) -> Awaitable[object]: ...


class LedgerHandle(Protocol):
    """The handle of the actor that keeps a job's `Ledger`."""

    register: _Method
    ready: _Method
    deaths: _Method
    begin: _Method
    end: _Method
    last_words: _Method
    totals: _Method


@dataclass(frozen=True)
class WorkerOptions:
    """How a worker runs; none of this changes a text.

    Args:
        streams: texts at a time.
        draft: a draft model.
        ledger: the handle of the job's ledger; None = a row that ends its process is tried for ever.
        fingerprint: the model's, which its file must have; None = any.
        stall_s: seconds without progress after which a worker ends itself.
        pin: keep the worker on cores of its own.
    """

    streams: int = 8
    draft: str | None = None
    ledger: LedgerHandle | None = None
    fingerprint: str | None = None
    stall_s: float = 600.0
    pin: bool = True


class _Stage:
    """A worker: opens the model, then turns batches of rows into batches of results."""

    def __init__(
        self,
        model: str,
        kind: RowKind,
        worker: WorkerOptions,
        *,
        seed: int | None,
        id_column: str,
        keep: Sequence[str],
        options: LoadOptions,
    ) -> None:
        self._kind = kind
        self._id_column = id_column
        self._keep = tuple(keep)
        self._ledger = worker.ledger
        self._actor, self._process = "", uuid.uuid4().hex
        self._gate = _Gate()
        self._n_streams = whole("streams", worker.streams, 1, 255)
        self._register()
        options = LoadOptions(**options)
        n_cpus, n_gpus = _assigned()
        self._claim: CoreClaim | None = None
        if n_cpus is not None:
            n_threads = max(1, int(n_cpus))
            options.setdefault("n_threads", n_threads)
            options.setdefault("n_threads_batch", n_threads)
            if worker.pin and hasattr(os, "sched_setaffinity"):
                self._claim = claim_cores(n_threads, lock_folder(), cache_domains())
                if self._claim is not None:  # llama.cpp's threads inherit it from this one
                    os.sched_setaffinity(0, self._claim.cores)
        if n_gpus:
            options.setdefault("n_gpu_layers", -1)
        options.setdefault("n_seq_max", self._n_streams)
        options.setdefault("prefix_cache", True)
        options.setdefault("n_ctx", max(_LEAST_CELLS, _CELLS_PER_TEXT * self._n_streams))
        self._context = _open(model, options)
        fingerprint = self._context.model.fingerprint
        if worker.fingerprint is not None and fingerprint != worker.fingerprint:
            raise ModelLoadError(
                f"{model} is another file on this node: its fingerprint is {fingerprint[:16]}, the "
                f"job's {worker.fingerprint[:16]}",
                hint="remove the other file, or name the model by its path",
            )
        drafter = None
        if worker.draft is not None:
            drafter = ModelDrafter(_open(worker.draft, options))
        engine = Engine(
            self._context,
            drafter,
            sampling=kind.sampling if isinstance(kind, GenerateRows) else None,
            seed=seed,
        )
        self._engine = ResidentEngine(engine, stall_s=worker.stall_s, on_broken=self._end_process)
        self._counted = (0, 0)
        self._tell("ready", self._actor)

    async def __call__(self, batch: object) -> pyarrow.Table:
        """Return the rows of a batch with their results, in the same order."""
        rows = read_rows(batch)
        ids = [_identity(row, self._id_column) for row in rows]
        records: dict[int, Record] = {}
        everything = range(len(rows))
        deaths = await self._deaths(ids)
        groups: dict[int, list[int]] = {}
        for i in everything:
            groups.setdefault(min(deaths[i][0], MOST_DEATHS), []).append(i)
        for i in groups.pop(MOST_DEATHS, ()):
            why = deaths[i][1] or "it was killed, or llama.cpp aborted it"
            text = (
                f"its worker process died {deaths[i][0]} times while it ran, at last alone: {why}"
            )
            records[i] = error_record(self._kind, text)
            await self._end([ids[i]], [records[i]], [])
        if 0 in groups:
            async with self._gate.shared():
                await self._run(groups[0], rows, ids, records)
        # The rows of a batch that has killed its worker: first some at a time, then one by one.
        for n_deaths, size in ((1, self._n_streams), (2, 1)):
            group = groups.get(n_deaths, [])
            for start in range(0, len(group), size):
                async with self._gate.exclusive():
                    await self._run(group[start : start + size], rows, ids, records)
        kept = [{name: row.get(name) for name in (self._id_column, *self._keep)} for row in rows]
        invariant = self._context.capabilities.batch_invariant
        found = [{**kept[i], **records[i], "batch_invariant": invariant} for i in everything]
        return output_table(found, batch, self._kind, self._id_column, self._keep)

    async def _run(
        self,
        lot: Sequence[int],
        rows: Sequence[Record],
        ids: Sequence[Row],
        records: dict[int, Record],
    ) -> None:
        """Run some rows of a batch together; their records go to ``records``."""
        names = [ids[i] for i in lot]
        if self._ledger is not None:
            await self._ledger.begin.remote(self._actor, self._process, names)
        waiting: dict[int, tuple[Prepared, asyncio.Future[list[Result]]]] = {}
        for i in lot:
            try:
                prepared = self._kind.prepare(self._context, rows[i], str(ids[i]))
                future = self._engine.submit(prepared.request)
            except LlamaBranchError as error:
                records[i] = error_record(self._kind, describe(error))
            else:
                waiting[i] = prepared, asyncio.wrap_future(future)
        results: list[Result] = []
        for i, (prepared, outcome) in waiting.items():
            found = await outcome
            records[i] = self._kind.record(prepared, found)
            results += found
        await self._end(names, [records[i] for i in lot], results)

    # -- the ledger ------------------------------------------------------------------------------------

    def _register(self) -> None:
        if self._ledger is None:
            return
        import ray

        runtime = ray.get_runtime_context()
        self._actor = str(runtime.get_actor_id())
        node = str(runtime.get_node_id())
        n_deaths = ray.get(self._ledger.register.remote(self._actor, self._process, node))
        if n_deaths >= _MOST_LOADING_DEATHS:
            raise ModelLoadError(
                f"{n_deaths} worker processes in a row died while they loaded the model",
                hint="see Ray's logs of these workers; is there enough memory for each of them?",
            )

    def _tell(self, method: str, *args: object) -> None:
        """Tell the ledger something, and wait until it has heard it."""
        if self._ledger is not None:
            import ray

            ray.get(getattr(self._ledger, method).remote(*args), timeout=60)

    async def _deaths(self, ids: Sequence[Row]) -> list[tuple[int, str | None]]:
        if self._ledger is None:
            return [(0, None)] * len(ids)
        found = await self._ledger.deaths.remote(ids)
        return cast("list[tuple[int, str | None]]", found)

    async def _end(
        self, ids: Sequence[Row], records: Sequence[Record], results: Sequence[Result]
    ) -> None:
        if self._ledger is None:
            return
        stats = self._engine.stats
        counted = (stats.prompt_tokens, stats.generated_tokens)
        new = [now - before for now, before in zip(counted, self._counted, strict=True)]
        self._counted = counted
        counts = {
            "rows": len(records),
            "errors": sum(record["error"] is not None for record in records),
            "prompt_tokens": sum(r.num_prompt_tokens for r in results if r.sample == 0),
            "evaluated_tokens": new[0],
            "generated_tokens": sum(len(result.tokens) for result in results),
        }
        await self._ledger.end.remote(self._actor, self._process, ids, counts)

    def _end_process(self, reason: str) -> None:
        try:
            self._tell("last_words", self._actor, reason)
        except Exception as error:  # the reason is lost, the process ends all the same
            reason += f" (the ledger could not be told: {error})"
        end_process(reason)


class _GenerateOptions(RowOptions, LoadOptions, total=False):
    """The keywords of `Generate`."""


class Generate(_Stage):
    """Continue the prompts of batches, for `ray.data.Dataset.map_batches`.

    A batch is a table with the columns ``id`` and ``prompt`` (text, or a list of token ids) and
    optionally ``max_tokens``, ``stop``, ``grammar`` (GBNF), ``seed`` and ``parse_special``, which replace
    the settings below for their row. The result has ``id``, the columns of ``keep``, and ``text``,
    ``tokens``, ``finish_reason``, ``seed``, ``n_prompt_tokens``, ``error`` and ``batch_invariant``:
    whether the same row gives the same bytes again. A row that fails has ``finish_reason`` "error",
    nothing is raised.

    Args:
        model: a path to a GGUF file, or a name that each node finds in its own cache or downloads.
        max_tokens: the most tokens of a row (128); None = no limit.
        seed: the seed from which each row's own is derived, together with its id.
        sampling: the settings.
        stop: strings that end a text.
        grammar: a grammar, or GBNF, that texts must follow.
        n: texts for each row (1); with more than one the output columns are lists.
        chat: wrap each prompt in the model's chat template (False).
        parse_special: parse control tokens written in a prompt (True), see ``Model.prompt_tokens``. A
            row can turn it off, not on.
        id_column: the name of the column of ids, int64 or text.
        keep: input columns to keep in the output.
        worker: how a worker runs.
        options: those of `lb.load`; by default a prefix cache, and 512 cells for each text at a time.

    Raises:
        ConfigError, ModelLoadError, DownloadError: as `lb.load`.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int | None = None,
        id_column: str = "id",
        keep: Sequence[str] = (),
        worker: WorkerOptions | None = None,
        **options: Unpack[_GenerateOptions],
    ) -> None:
        of_rows = RowOptions.__annotations__
        super().__init__(
            model,
            GenerateRows.of(cast(RowOptions, {k: v for k, v in options.items() if k in of_rows})),
            worker or WorkerOptions(),
            seed=seed,
            id_column=id_column,
            keep=keep,
            options=cast(LoadOptions, {k: v for k, v in options.items() if k not in of_rows}),
        )


class Score(_Stage):
    """Score the texts of batches, for `ray.data.Dataset.map_batches`.

    A batch is a table with the columns ``id``, ``text`` and optionally ``context``, which the text
    continues and which is not scored, and ``parse_special``. The result has ``id``, the columns of
    ``keep``, and ``tokens``, ``logprobs`` (nats), ``ranks``, ``logprob`` (their sum), ``n_tokens``,
    ``finish_reason``, ``error`` and ``batch_invariant``.

    Args:
        model, parse_special, id_column, keep, worker, options: as for `Generate`.
    """

    def __init__(
        self,
        model: str,
        *,
        parse_special: bool = True,
        id_column: str = "id",
        keep: Sequence[str] = (),
        worker: WorkerOptions | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        super().__init__(
            model,
            ScoreRows(parse_special=parse_special),
            worker or WorkerOptions(),
            seed=0,
            id_column=id_column,
            keep=keep,
            options=options,
        )


class _Gate:
    """Many may pass together, or one alone, for batches of one event loop."""

    def __init__(self) -> None:
        self._changed: asyncio.Condition | None = None
        self._n_inside = 0
        self._n_alone = 0  # those that wait to be alone, or are

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        changed = self._condition()
        async with changed:
            await changed.wait_for(lambda: not self._n_alone)
            self._n_inside += 1
        try:
            yield
        finally:
            async with changed:
                self._n_inside -= 1
                changed.notify_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        changed = self._condition()
        async with changed:
            self._n_alone += 1
            await changed.wait_for(lambda: not self._n_inside)
            self._n_inside = 1
        try:
            yield
        finally:
            async with changed:
                self._n_inside = 0
                self._n_alone -= 1
                changed.notify_all()

    def _condition(self) -> asyncio.Condition:
        if self._changed is None:  # made in the loop that uses it
            self._changed = asyncio.Condition()
        return self._changed


def _open(model: str, options: LoadOptions) -> Context:
    # Two workers of a node download a model once: the cache has a lock for each file.
    return load(resolve(model, download=True), **options)


def _assigned() -> tuple[float | None, float]:
    """Return the CPUs and GPUs that Ray has given to this process; None and 0 outside of Ray."""
    try:
        import ray
    except ImportError:
        return None, 0.0
    if not ray.is_initialized():
        return None, 0.0
    assigned = ray.get_runtime_context().get_assigned_resources()
    return float(assigned.get("CPU", 1.0)), float(assigned.get("GPU", 0.0))


def _identity(row: Record, column: str) -> Row:
    value = row.get(column)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise ConfigError(
        f"every row needs an id, a number or text, in the column {column!r}, not {value!r:.40}"
    )
