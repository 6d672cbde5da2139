"""Any number of requests over the sequences of one context."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, suppress
from typing import cast

from ..arguments import bounded, function, instance, whole
from ..context import Context as AnyContext
from ..context.context import text_context
from ..context.params import DEFAULT_N_CTX, MOST_WITH_PREFIXES
from ..errors import (
    ClosedError,
    ConfigError,
    DecodeInterruptedError,
    QueueFullError,
)
from ..hub import resolve
from ..model import Model
from ..request.request import AnyRequest, Request, Requests, as_request, identity
from ..request.result import EngineStats, Event, Result
from ..run.client import Client
from ..run.drafting import Drafting
from ..run.job import Job
from ..sampling import SamplingParams
from ..sampling.noise import derive_seed
from ..sampling.params import settings_of
from ..speculative import Drafter, NullDrafter, SpeculativeConfig
from ..speculative.combined import DrafterChoice, auto_drafter
from .context import Context
from .stream import RequestStream

Target = AnyContext | Model | str | os.PathLike[str]
_PARALLEL = 8  # texts at a time, if the engine opens the context; each has its part of the cache


class Engine:
    """Continues any number of prompts over the sequences of one context.

    Every token carries its own position and sequence, so prompts and drafts of different lengths need no
    padding. The sequence of a finished text is reused at once. Prompts are prefilled in chunks that share
    decodes with the running texts.

    You can add requests one at a time (``add_request``, ``step``), or run a job (``generate``,
    ``stream``), or both at once. With a prefix cache, later requests reuse the K/V of prompts and
    finished texts.

    Args:
        target: the context that generates; at most its n_seq_max texts run at a time. If you pass a
            `Model`, or a name or path as for `load`, the engine opens a context with 2,048 tokens
            for each of ``parallel`` texts (8), and closes that context when the engine is closed.
            Each text has its own part of the cache if the memory can be divided and there is no
            draft model.
        drafter: proposes the drafts. "auto" = drafts from MTP layers, from copies of the text so far and
            from text that a grammar forces, if measurements show that this is faster; None = plain
            decoding. To draft for every text, a draft model's context needs as many sequences as
            the target.
        config: how much to draft; "auto" drafts as many tokens as raise the throughput of the batch.
        sampling: the settings for requests that have none.
        max_tokens: the limit for requests without one.
        seed: a request without a seed gets one that is derived from this seed. So the same requests
            get the same texts each time. None = each call of ``generate`` or ``stream``, and each
            added request, gets different texts. To repeat a result, pass its ``seed`` in the
            ``sampling`` of a request.
        wait_s: how many seconds to wait for a sequence if branches hold every sequence and no
            request on the context is running. After that the waiting requests end with
            "capacity". Time in which the context decodes for others does not count. 0 = do not
            wait.
        max_waiting: how many requests may wait at most; None = any number. If more would wait,
            ``add_request`` raises.
        parallel: the maximum number of texts at a time; None = as many as the target has sequences.

    Raises:
        ConfigError: an invalid limit, seed or ``wait_s``; an argument of another type.
        UnsupportedError: ``target`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the target's vocabulary.

    Attributes:
        stats: totals over all requests so far.
        seed: the seed in use.
        sampling: the settings for requests that have none.
        owns_target: whether the target is closed with the engine.
        client: queues the added requests; for ``AsyncEngine``, not for users.
    """

    def __init__(
        self,
        target: Target,
        drafter: DrafterChoice = "auto",
        config: SpeculativeConfig | None = None,
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = 128,
        seed: int | None = None,
        wait_s: float = 2.0,
        max_waiting: int | None = None,
        parallel: int | None = None,
    ) -> None:
        self._max_waiting = None if max_waiting is None else whole("max_waiting", max_waiting, 0)
        self.sampling = settings_of(sampling)
        self._max_tokens = None if max_tokens is None else whole("max_tokens", max_tokens, 0)
        self._wait_s = bounded("wait_s", wait_s, 0.0, math.inf)
        self._seed = SamplingParams(seed=seed).drawn_seed()
        self._repeats = seed not in (None, -1)
        self._n_seeds = 0
        with ExitStack() as failing:
            self.target = ctx = _context(target, drafter, parallel)
            self.owns_target = ctx is not target
            if self.owns_target:
                failing.callback(ctx.close)
            if drafter == "auto":
                drafter = auto_drafter(ctx)
            self._drafting = Drafting(ctx, drafter, config, batched=True)
            self._parallel = None if parallel is None else whole("parallel", parallel, 1)
            failing.pop_all()
        self.drafter, self.config = self._drafting.drafter, self._drafting.config
        self.stats = EngineStats()
        self.client = self.new_client()
        self._adding = threading.RLock()  # a handler of a signal may abort too
        self._n_added = 0
        self._is_closed = False
        # Every call of ``stream`` has a client and ids of its own. A stream that is
        # garbage-collected removes itself from the list; these list operations are atomic, so
        # ``abort`` needs no lock.
        self._streams: list[weakref.ref[RequestStream]] = []

    @property
    def seed(self) -> int:
        """The engine's seed. A request without a seed gets one that is derived from it."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed, self._repeats = SamplingParams(seed=seed).drawn_seed(), True

    def _draw_seed(self) -> int:
        """Return the seed for a call or an added request.

        If the user passed no seed, each call of this method returns a different one.
        """
        n, self._n_seeds = self._n_seeds, self._n_seeds + 1
        return self._seed if self._repeats or not n else derive_seed(self._seed, n)

    def new_client(self) -> Client:
        """Return a new client with the settings of the engine."""
        return Client(
            self._drafting, self.stats, self._parallel, self._wait_s, self.sampling,
            self._max_tokens,
        )  # fmt: skip

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Free the sequences of an unclosed engine; functions of its requests may refer to it."""
        with suppress(Exception):
            self.client.close()

    # -- requests at any time ------------------------------------------------------------------------

    def add_request(self, request: AnyRequest, *, reports_tokens: bool = True) -> str:
        """Queue a request and return its id. You may call it from any thread.

        A request without an id gets one: its number, counted over all added requests.

        Args:
            request: the request.
            reports_tokens: False = no events for tokens, only one for each result. Log-probabilities are
                then computed only with ``top_logprobs``.

        Raises:
            ConfigError, TokenizeError: the request is invalid, or another one with this id is unfinished.
            QueueFullError: ``max_waiting`` requests are already waiting.
            ClosedError: the engine is closed.
        """
        job = self.prepare(request, reports_tokens=reports_tokens)
        self.queue(job)
        return job.name

    def submit(self, request: AnyRequest) -> Job:
        """Ask for the texts of a request; iterate over the job for its events, or read ``results``.

        Every step on the context continues them, no matter which caller runs it. The id is unique in
        the job only.

        Raises:
            ConfigError, TokenizeError: the request is invalid. ClosedError: the engine is closed.
        """
        self._check_open()
        return self.new_client().submit(request, self._draw_seed())

    def prepare(self, request: AnyRequest | Job, *, reports_tokens: bool = True) -> Job:
        """Check a request and return its job, for ``queue``; a job is returned as it is.

        Raises:
            LlamaBranchError: as ``add_request``.
        """
        if isinstance(request, Job):
            return request
        with self._adding:
            has_id = isinstance(request, Request) and request.id is not None
            while (name := identity(request, self._n_added)) in self.client.jobs and not has_id:
                self._n_added += 1
            self._check_addable(name)
            seed = self._draw_seed()
            job = Job(as_request(request), name, self.client, seed, reports_tokens=reports_tokens)
            self._n_added += 1
            return job

    def queue(self, *jobs: Job) -> None:
        """Queue prepared requests, all or none. Raise as ``add_request`` does."""
        with self._adding:
            for more, job in enumerate(jobs):
                self._check_addable(job.name, more)
            for job in jobs:
                self.client.queue(job)

    def _check_addable(self, name: str, more: int = 0) -> None:
        """Raise unless a request with this id may be queued after ``more`` others."""
        self._check_open()
        if name in self.client.jobs:
            raise ConfigError(f"a request with the id {name!r} is unfinished")
        most = self._max_waiting
        if most is not None and (n_waiting := self.client.n_waiting + more) >= most:
            raise QueueFullError(
                f"the queue is full: {n_waiting} requests wait, max_waiting is {most}",
                hint="add it again after some steps, or raise max_waiting",
            )

    def step(self) -> list[Event]:
        """Run one step for the added requests; return its events.

        Most steps are one decode, with the next tokens of all running texts and chunks of prompts, also
        of the context's other callers. If another thread has just run a step, its events are returned. An
        empty list does not mean that everything is done: see ``has_unfinished``.

        Raises:
            DecodeError: the decode failed or was interrupted. The next step continues; nothing is lost.
            UsageError: a function that a step calls, such as a constraint, called this method.
        """
        return self.client.step()

    def has_unfinished(self) -> bool:
        """Return whether an added request has no result yet."""
        return self.client.has_unfinished

    def abort(self, request_id: str) -> None:
        """End a request at its next step; its result has the text so far. Callable from any thread.

        If its prompt is being read, the running decode is stopped.

        This applies to an added request, and also to every open ``stream`` that has an unfinished
        request with this id, or a list with such a request that was not read yet. Ids are unique
        only within one stream. An unknown id is ignored.
        """
        self.client.abort(instance("request_id", request_id, str))
        for stream in [ref() for ref in list(self._streams)]:
            if stream is not None:
                stream.abort(request_id)

    def close(self, *, drain: bool = False) -> list[Event]:
        """Accept no more requests; end the added ones, and return their last events.

        Args:
            drain: finish the added requests first. Otherwise they end with "cancelled".

        If you passed a context, its prefix cache is kept. A second call does nothing.

        Raises:
            UsageError: a function that a step calls called this method. The engine stays open.
        """
        self.client.check_free()
        with self._adding:
            self._is_closed = True
        try:
            if self.target.closed:
                self.client.close()
                return []
            if not drain:
                self.client.abort_all()
            return self.client.drain()
        finally:
            if self.owns_target:
                self.target.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the engine is closed")

    # -- jobs ------------------------------------------------------------------------------------------

    def generate(
        self, requests: Requests, *, on_event: Callable[[Event], None] | None = None
    ) -> list[Result]:
        """Generate for all prompts; return one result for each text, in the order of the requests.

        Args:
            requests: requests or prompts (text, or messages for the model's chat template), read as they
                are needed; a single one is a list of one.
            on_event: called with every event (a token, or the end of a text).

        If a request fails, its result has the error; the others finish.

        Raises:
            ConfigError: two requests have the same id, or there are no requests.
            DecodeInterruptedError: a decode was interrupted; ``results`` of the error has the texts.
        """
        results: list[Result] = []
        if on_event is not None:
            function("on_event", on_event)
        stream = self._stream(requests, reports_tokens=on_event is not None)
        order = stream.order

        def in_order(found: list[Result]) -> list[Result]:
            return sorted(found, key=lambda r: (order.get(r.id, len(order)), r.sample))

        try:
            with closing(stream.events()) as events:  # also if ``on_event`` raises
                for event in events:
                    if event.result is not None:
                        results.append(event.result)
                    if on_event is not None:
                        on_event(event)
        except DecodeInterruptedError as error:
            error.results = in_order(results)
            raise
        return in_order(results)

    def stream(self, requests: Requests) -> Generator[Event, None, None]:
        """Yield every event (a token, or the end of a text) as it happens.

        Requests are read as they are needed, a few more than can run at a time. If reading them raises,
        the exception is raised once the requests read so far have ended.

        All sequences are freed when the iterator ends or is closed.

        Raises:
            ConfigError: two requests have the same id, or there are no requests.
            DecodeInterruptedError: a decode was interrupted. Before that come the results of the
                unfinished requests that were read, with their texts so far and "cancelled".
        """
        return self._stream(requests).events()

    def _stream(self, requests: Requests, *, reports_tokens: bool = True) -> RequestStream:
        self._check_open()
        stream = RequestStream(
            self.new_client(), requests, self._draw_seed(), reports_tokens=reports_tokens
        )
        self._streams.append(weakref.ref(stream, self._streams.remove))
        return stream

    def explain(self) -> str:
        """Describe how the engine drafts and batches, and the measurements that led to this."""
        if self._drafting.drafts:
            return self._drafting.length.explain()
        if isinstance(self.drafter, NullDrafter):
            return "plain decoding: there is no drafter"
        return "plain decoding: this model's memory cannot remove the rejected tokens of a draft"


def _context(target: object, drafter: DrafterChoice, parallel: int | None) -> Context:
    """Return ``target`` if it is a context; open one for a model."""
    if not isinstance(target, (Model, str, os.PathLike)):
        return cast(Context, text_context("target", target))
    model = target if isinstance(target, Model) else Model(resolve(target))
    try:
        n = _PARALLEL if parallel is None else parallel
        n = whole("parallel", n, 1, MOST_WITH_PREFIXES)
        return Context(
            model,
            n_ctx=n * min(DEFAULT_N_CTX, model.n_ctx_train or DEFAULT_N_CTX),
            n_seq_max=n,
            kv_unified=True if isinstance(drafter, Drafter) and drafter.contexts else "auto",
            owns_model=model is not target,
        )
    except BaseException:
        if model is not target:
            model.close()
        raise
