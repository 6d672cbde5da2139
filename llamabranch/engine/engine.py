"""Any number of requests over the sequences of one context."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import cast

from ..arguments import bounded, function, instance, whole
from ..context import Context
from ..context.context import text_context
from ..context.params import DEFAULT_N_CTX, MOST_WITH_PREFIXES
from ..errors import (
    ClosedError,
    ConfigError,
    DecodeInterruptedError,
    LlamaBranchError,
    QueueFullError,
)
from ..generation.drafting import Drafting
from ..hub import resolve
from ..model import Message, Model, is_chat
from ..sampling import SamplingParams
from ..sampling.noise import random_seed
from ..sampling.params import settings_of
from ..speculative import Drafter, NullDrafter, SpeculativeConfig
from ..speculative.combined import DrafterChoice, auto_drafter
from .core import EngineCore
from .job import EngineSettings
from .request import Event, Request, Result

__all__ = ["AnyRequest", "Engine", "Target"]

Target = Context | Model | str | os.PathLike[str]
Messages = Sequence[Message]
AnyRequest = Request | str | Messages
# One conversation is an iterable of messages; one text is an iterable of str.
Requests = Iterable[AnyRequest | Message] | Request
_Skip = Collection[tuple[str, int]]
_PARALLEL = 8  # texts at a time of an engine that opens its model: each has its part of the cache


class Engine:
    """Continues any number of prompts over the sequences of one context.

    Every token carries its own position and sequence, so ragged prompts and ragged acceptance need no
    padding. The sequence of a finished text is reused at once; prompts are prefilled in chunks that
    share decodes with the running texts.

    Requests come one at a time (``add_request``, ``step``), or all of a job together (``generate``,
    ``stream``); both at once is possible. On a context with a prefix cache, prompts and
    finished texts stay readable for later requests.

    Args:
        target: the context that generates; at most its n_seq_max texts run at a time. Or a `Model`, or a
            name or path as for `load`: then the engine has a context of its own, closed with it, with
            2,048 tokens for each of ``parallel`` texts (8); each has its part of the cache where the
            memory can be divided and no model drafts.
        drafter: proposes the drafts. "auto" = what the model and the text offer, where it was measured to
            be faster: MTP layers, copies from the text so far, what a grammar forces; None = plain
            decoding. To draft for every text, a draft model's context needs as many sequences as the
            target.
        config: how much to draft; "auto" drafts as many tokens as raise the throughput of the batch.
        sampling: the settings of requests that give none.
        max_tokens: the limit of requests that give none.
        seed: the seed from which those of requests without one are derived: the same requests get the
            same texts each time. None = each call of ``generate`` or ``stream``, and each request that is
            added, draws others; a request with the ``seed`` of a result in its ``sampling`` repeats it.
        wait_s: how long to wait, in seconds, when others hold every sequence of the context and none of
            the engine's own requests is running; then the waiting requests end with "capacity". Only
            time in which nothing is decoded on the context counts; 0 = do not wait.
        max_waiting: how many requests may wait at most; None = any number. ``add_request`` raises beyond.
        parallel: how many texts run at a time at most; None = as many as the target has sequences.

    Raises:
        ConfigError: an invalid limit, seed or ``wait_s``; an argument of another type.
        UnsupportedError: ``target`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the target's vocabulary.

    Attributes:
        stats: totals over all requests so far.
        seed: the seed in use.
        sampling: the settings of requests that give none.
        owns_target: whether the target is closed with the engine.
        core: runs the requests that are added; for ``AsyncEngine``, not for users.
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
        self.owns_target = not isinstance(target, Context)
        self.target = target = _opened(target, drafter, parallel)
        with ExitStack() as failing:
            if self.owns_target:
                failing.callback(target.close)
            if drafter == "auto":
                drafter = auto_drafter(target)
            drafting = Drafting(target, drafter, config, batched=True)
            self.drafter = drafting.drafter
            self.config = drafting.config
            self._max_waiting = (
                None if max_waiting is None else whole("max_waiting", max_waiting, 0)
            )
            self.sampling = settings_of(sampling)
            self._settings = EngineSettings(
                target=target,
                drafting=drafting,
                sampling=self.sampling,
                max_tokens=None if max_tokens is None else whole("max_tokens", max_tokens, 0),
                wait_s=bounded("wait_s", wait_s, 0.0, math.inf),
                parallel=None if parallel is None else whole("parallel", parallel, 1),
                seed=random_seed() if seed is None else whole("seed", seed),
                repeats=seed is not None,
            )
            failing.pop_all()
        self.stats = self._settings.stats
        self.core = EngineCore(self._settings, redraws=True)
        self._adding = threading.Lock()
        self._is_closed = False
        # Every call of ``stream`` has a core of its own, with its own ids. A core that is
        # garbage-collected removes itself from the list; these list operations are atomic, so
        # ``abort`` needs no lock.
        self._streams: list[weakref.ref[EngineCore]] = []

    @property
    def seed(self) -> int:
        """The seed from which those of requests without one are derived."""
        return self._settings.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._settings.seed, self._settings.repeats = whole("seed", seed), True

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests at any time ------------------------------------------------------------------------

    def add_request(self, request: AnyRequest, *, reports_tokens: bool = True) -> str:
        """Queue a request; return its id. From any thread.

        A request without an id gets its number among those added.

        Args:
            request: it.
            reports_tokens: False = there are no events for its tokens, only one for each result. Unless
                it has ``top_logprobs``, no log-probabilities are computed then.

        Raises:
            ConfigError, TokenizeError: the request is invalid, or another of this id is unfinished.
            QueueFullError: ``max_waiting`` requests wait already.
            ClosedError: the engine is closed.
        """
        with self._adding:
            self._check_open()
            name, n = _identity(request, self.core.n_added)
            if name in self.core:
                raise ConfigError(f"a request with the id {name!r} is unfinished")
            n_waiting = self.core.n_waiting
            if self._max_waiting is not None and n_waiting >= self._max_waiting:
                raise QueueFullError(
                    f"the queue is full: {n_waiting} requests wait, max_waiting is {self._max_waiting}",
                    hint="add it again after some steps, or raise max_waiting",
                )
            samples = list(range(n))
            self.core.add(_as_request(request), name, samples, reports_tokens=reports_tokens)
            return name

    def step(self) -> list[Event]:
        """Run one step for the requests that were added; return its events.

        Most steps are one decode: the next tokens of all running texts, and chunks of prompts. An empty
        list does not mean that nothing is left to do: see ``has_unfinished``.

        Raises:
            DecodeError: the decode failed or was interrupted. No request is lost: the next step goes on.
        """
        return self.core.step()

    def has_unfinished(self) -> bool:
        """Return whether a request that was added has no result yet."""
        return self.core.has_unfinished

    def abort(self, request_id: str) -> None:
        """End a request at its next step; its result holds what it has generated. From any thread.

        It applies to a request that was added, and to every open ``stream`` that has an unfinished
        request of this id, or a list of requests with one that is still to come; ids are unique only
        within one stream. An unknown id is ignored.
        """
        self.core.abort(instance("request_id", request_id, str))
        for core in [ref() for ref in list(self._streams)]:
            if core is not None:
                core.abort(request_id)

    def close(self, *, drain: bool = False) -> list[Event]:
        """Accept no more requests; end those that were added, and return their last events.

        Args:
            drain: finish them first. Otherwise they end with "cancelled".

        The prefix cache of a context that was given stays. A second call does nothing.
        """
        with self._adding:
            self._is_closed = True
        try:
            if self.target.closed:
                self.core.close()
                return []
            if not drain:
                self.core.abort_all()
            return self.core.drain()
        finally:
            if self.owns_target:
                self.target.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the engine is closed")

    # -- jobs ------------------------------------------------------------------------------------------

    def generate(
        self,
        requests: Requests,
        *,
        on_event: Callable[[Event], None] | None = None,
        skip: _Skip = (),
    ) -> list[Result]:
        """Generate for all prompts; return one result for each text, in the order of the requests.

        Args:
            requests: requests or prompts (text, or messages for the model's chat template), read as they
                are needed; a single one is a list of one.
            on_event: called with every event (a token, or the end of a text) as it happens.
            skip: texts not to generate, as (id, sample): those that exist already.

        A request that fails has its error in its result; the others finish.

        Raises:
            ConfigError: two requests with the same id, or no requests.
        """
        order: dict[str, int] = {}
        results: list[Result] = []
        source = _Source(requests, skip, order)
        if on_event is not None:
            function("on_event", on_event)
        core = self._open(source, reports_tokens=on_event is not None)
        with closing(self._run(core, source)) as events:  # also if ``on_event`` raises
            for event in events:
                if on_event is not None:
                    on_event(event)
                if event.result is not None:
                    results.append(event.result)
        return sorted(results, key=lambda r: (order.get(r.id, len(order)), r.sample))

    def stream(self, requests: Requests, *, skip: _Skip = ()) -> Generator[Event, None, None]:
        """Yield every event (a token, or the end of a text) as it happens; ``skip`` as in ``generate``.

        Requests are read as they are needed: a few more than can run at a time. If reading them
        raises, the exception comes once those that were read have ended.

        All sequences are freed when the iterator ends or is closed.

        Raises:
            ConfigError: two requests with the same id, or no requests.
            DecodeInterruptedError: a decode was interrupted. The results of the unfinished requests that
                were read come before, with what they have, as "cancelled".
        """
        source = _Source(requests, skip)
        return self._run(self._open(source), source)

    def _open(self, source: _Source, *, reports_tokens: bool = True) -> EngineCore:
        self._check_open()
        core = EngineCore(self._settings, reports_tokens=reports_tokens, expected=source.expected)
        self._streams.append(weakref.ref(core, self._streams.remove))
        return core

    def _run(self, core: EngineCore, source: _Source) -> Generator[Event, None, None]:
        """Yield the events of all steps until ``source`` and all requests have ended."""
        ahead = max(2, self.target.n_seq_max)  # requests that wait, besides those that run
        try:
            while True:
                while core.n_ahead < ahead and source.feed(core):
                    pass
                if not core.has_unfinished:
                    if source.failure is not None:
                        raise source.failure
                    return
                try:
                    events = core.step()
                except DecodeInterruptedError:
                    core.abort_all()
                    yield from core.drain()
                    raise
                yield from events
        finally:
            core.close()

    def explain(self) -> str:
        """Return a description of how it drafts and fills decodes, with the measurements behind it."""
        loop = self._settings.drafting.loop
        if loop.drafter is not None:
            return loop.length.explain()
        if isinstance(self.drafter, NullDrafter):
            return "plain decoding: there is no drafter"
        return "plain decoding: this model's memory cannot remove the rejected tokens of a draft"


def _opened(target: object, drafter: DrafterChoice, parallel: int | None) -> Context:
    """Return the context that generates, one of the engine's own unless it is given."""
    if not isinstance(target, (Model, str, os.PathLike)):
        return text_context("target", target)
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


class _Source:
    """The requests of a job, read one by one.

    Args:
        requests: requests or prompts, or a single one. Those of a sequence are checked at once, and begin
            in the order of their priorities.
        skip: texts not to generate.
        order: gets the id of each request that is read, with its number.

    Raises:
        ConfigError: two requests with the same id, something that is no request, no requests.

    Attributes:
        failure: what reading has raised.
        expected: the ids that were given at once and are not read yet.
    """

    def __init__(
        self,
        requests: Requests,
        skip: _Skip,
        order: dict[str, int] | None = None,
    ) -> None:
        if isinstance(requests, (str, Request)) or is_chat(requests):
            requests = [requests]
        refused = (bytes, bytearray, memoryview, Mapping)
        if isinstance(requests, refused) or not isinstance(requests, Iterable):
            raise ConfigError(
                f"requests are prompts or Requests, not {requests!r:.40}",
                hint="give text, a conversation, a Request, or a list of these; decode bytes first",
            )
        given = cast(Iterable[AnyRequest], requests)
        self._skip = _skipped(skip)
        self._order = order
        self.failure: Exception | None = None
        self.expected: set[str] = set()
        numbered: Iterable[tuple[int, AnyRequest]] = enumerate(given)
        if isinstance(given, Sequence):
            numbered = list(numbered)
            for number, request in numbered:
                name, _ = _identity(request, number)
                if name in self.expected:
                    raise ConfigError(f"two requests have the id {name!r}")
                self.expected.add(name)
            numbered.sort(key=lambda pair: getattr(pair[1], "priority", 0))
        self._numbered: Iterator[tuple[int, AnyRequest]] = iter(numbered)

    def feed(self, core: EngineCore) -> bool:
        """Add the next request to ``core``; False if there is none."""
        if self.failure is not None:
            return False
        try:
            number, given = next(self._numbered)
        except StopIteration:
            return False
        except Exception as error:
            self.failure = error
            return False
        name, request = str(number), Request("")
        samples = [0]
        try:
            name, n = _identity(given, number)
            request = _as_request(given)
            if self._order is not None:
                self._order[name] = number
            samples = [i for i in range(n) if (name, i) not in self._skip]
            if name in core:
                raise ConfigError(f"two unfinished requests have the id {name!r}")
            core.add(request, name, samples)
        except LlamaBranchError as error:
            core.refuse(request, name, samples, error)
        self.expected.discard(name)  # once ``core`` knows it
        return True


def _identity(request: AnyRequest, number: int) -> tuple[str, int]:
    """Return the id of a request and how many texts it asks for."""
    if isinstance(request, str) or is_chat(request):
        return str(number), 1
    if not isinstance(request, Request):
        raise ConfigError(
            f"a request is a Request or text, or messages, not {request!r:.40}",
            hint="give token ids as Request([1, 2, 3]), bytes as text: prompt.decode()",
        )
    return (str(number) if request.id is None else request.id), request.n


def _as_request(request: AnyRequest) -> Request:
    return request if isinstance(request, Request) else Request(request)


def _skipped(skip: Collection[tuple[str, int]]) -> frozenset[tuple[str, int]]:
    """Return ``skip`` as a set, after checking that it consists of pairs (id, sample)."""
    pairs = list(skip) if isinstance(skip, Iterable) else [skip]
    for pair in pairs:
        match pair:
            case (str(), int()):
                continue
        raise ConfigError(
            f"skip is a collection of pairs (id, sample), not of {pair!r:.40}",
            hint='for example [("0", 0), ("0", 1)]',
        )
    return frozenset(pairs)
