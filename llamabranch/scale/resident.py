"""One engine for all batches of a worker, on a thread of its own, so that it never drains between them.

What breaks the engine ends the process: Ray starts another one and gives it the batches again. Raising
would send them back to the broken engine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic

from ..engine import Engine, EngineStats, Request, Result

__all__ = ["ResidentEngine", "end_process"]


def end_process(reason: str) -> None:
    """End this process at once, without cleaning up what may be broken."""
    print(f"llamabranch: this worker ends: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


class ResidentEngine:
    """Runs an engine's steps while it has requests.

    Args:
        engine: the engine; nobody else may call its ``step``.
        stall_s: seconds without any progress, while there are requests, after which it counts as broken.
        on_broken: called with the reason when a step fails or stalls.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        stall_s: float = 600.0,
        on_broken: Callable[[str], None] = end_process,
    ) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._on_broken = on_broken
        self._wake = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._is_closed = False
        self._progress = monotonic()
        self._is_idle = True
        self._threads = [
            threading.Thread(target=self._run, name="ResidentEngine", daemon=True),
            threading.Thread(target=self._watch, name="ResidentEngine watch", daemon=True),
        ]
        engine.target.release_threads()
        for thread in self._threads:
            thread.start()

    @property
    def stats(self) -> EngineStats:
        """Totals of the engine so far."""
        return self._engine.stats

    def submit(self, request: Request) -> Future[list[Result]]:
        """Add a request; the future gets the results of its texts.

        Raises:
            ConfigError, TokenizeError: as `Engine.add_request`.
        """
        future: Future[list[Result]] = Future()
        with self._wake:
            name = self._engine.add_request(request)
            self._waiting[name] = _Waiting(future, request.n)
            self._wake.notify_all()
        return future

    def close(self) -> None:
        """End the threads; requests that are unfinished get no result."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        engine = self._engine
        while True:
            with self._wake:
                while not (self._is_closed or engine.has_unfinished()):
                    self._is_idle = True
                    self._wake.wait()
                if self._is_closed:
                    return
                if self._is_idle:
                    self._is_idle, self._progress = False, monotonic()
            n_passes = engine.stats.target_forward_passes
            try:
                events = engine.step()
            except Exception as error:  # whatever it is, the requests cannot go on here
                self._on_broken(f"the engine failed: {error}")
                return
            if events or engine.stats.target_forward_passes > n_passes:
                self._progress = monotonic()
            done: list[_Waiting] = []
            with self._wake:
                for event in events:
                    if event.result is not None and event.id in self._waiting:
                        waiting = self._waiting[event.id]
                        waiting.results.append(event.result)
                        if len(waiting.results) == waiting.n:
                            done.append(self._waiting.pop(event.id))
            for waiting in done:
                waiting.future.set_result(waiting.results)

    def _watch(self) -> None:
        """Report an engine that makes no progress, such as a decode that never returns."""
        while True:
            with self._wake:
                if not self._is_closed:
                    self._wake.wait(min(1.0, self._stall_s / 4))
                if self._is_closed:
                    return
                idle_s = 0.0 if self._is_idle else monotonic() - self._progress
            if idle_s > self._stall_s:
                self._on_broken(f"the engine has made no progress for {idle_s:.0f} s")
                return


class _Waiting:
    """A request whose texts have not all ended."""

    def __init__(self, future: Future[list[Result]], n: int) -> None:
        self.future = future
        self.n = n
        self.results: list[Result] = []
