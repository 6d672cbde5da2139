"""Runs the requests of one call: reads them as they are needed, and yields their events."""

from __future__ import annotations

from collections.abc import Generator

from ..errors import ConfigError, DecodeInterruptedError, LlamaBranchError
from ..generation.drafter import SpeculativeStats
from ..request.request import Event, RequestSource, Result
from ..run.core import EngineCore

__all__ = ["RequestStream"]


class RequestStream:
    """Runs the requests of one source.

    Any thread may call ``abort``.

    Args:
        core: runs them; it must have no other requests.
        source: the requests.
        seed: the seeds of the texts are derived from it, unless a request has one.
        reports_tokens: whether there are events for tokens.
    """

    def __init__(
        self, core: EngineCore, source: RequestSource, seed: int, *, reports_tokens: bool = True
    ) -> None:
        self._core = core
        self._source = source
        self._seed = seed
        self._reports_tokens = reports_tokens
        self._aborted: set[str] = set()  # ids that were aborted before their request was read

    def abort(self, name: str) -> None:
        """End a request as `EngineCore.abort` does. The request may be one that is not read yet."""
        if name in self._source.expected:
            self._aborted.add(name)
        self._core.abort(name)

    def events(self) -> Generator[Event, None, None]:
        """Yield the events of all steps, until the source and all requests have ended.

        Requests are read as they are needed. When the iterator ends or is closed, all sequences are
        free.

        Raises:
            DecodeInterruptedError: a decode was interrupted. The requests read so far end with
                "cancelled"; their last events come before the exception.
            Exception: reading the source failed. The requests read before it end first.
        """
        core, source = self._core, self._source
        ahead = max(2, core.ctx.n_seq_max)  # read on while fewer requests than this wait
        more = True
        try:
            while True:
                while more and core.n_ahead < ahead:
                    more = self._read_next()
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

    def _read_next(self) -> bool:
        """Add the next request; return False if no request is left.

        An invalid request gets a result with its error.
        """
        core, source = self._core, self._source
        if (asked := next(source, None)) is None:
            return False
        name, request, error = asked
        if name in core and error is None:
            error = ConfigError(f"two unfinished requests have the id {name!r}")
        try:
            if error is None:
                core.add(request, name, self._seed, reports_tokens=self._reports_tokens)
        except LlamaBranchError as refused:
            error = refused
        if error is not None:
            seed = 0 if request.sampling is None else max(0, request.sampling.seed or 0)
            for i in range(request.n):
                stats = SpeculativeStats()
                result = Result(name, i, request.prompt, "", [], "error", seed, stats, error=error)
                core.refuse(Event(name, i, result=result))
        elif name in self._aborted:
            core.abort(name)
        source.expected.discard(name)  # from now on ``core.abort`` finds the id
        return True
