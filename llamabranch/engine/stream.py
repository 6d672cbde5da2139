"""Runs the requests of one call: reads them as they are needed, and yields their events."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import cast

from ..errors import ConfigError, LlamaBranchError
from ..generation.drafter import SpeculativeStats
from ..model import is_chat
from ..request.request import AnyRequest, Request, Requests, as_request, identity
from ..request.result import Event, Result
from ..run.client import Client
from ..run.job import Job


class RequestStream:
    """Runs the requests of one call.

    Any thread may call ``abort``.

    Args:
        client: queues them; it must have no other requests.
        requests: requests or prompts, or a single one. The requests in a list are checked at once,
            and begin in the order of their priorities.
        seed: the seeds of the texts are derived from it, unless a request has one.
        reports_tokens: whether there are events for tokens.

    Raises:
        ConfigError: two requests have the same id, an item is not a request, or there are no requests.

    Attributes:
        order: the number of each request that was read, by its id.
    """

    def __init__(
        self, client: Client, requests: Requests, seed: int, *, reports_tokens: bool = True
    ) -> None:
        if isinstance(requests, (str, Request)) or is_chat(requests):
            requests = [requests]
        refused = (bytes, bytearray, memoryview, Mapping)
        if isinstance(requests, refused) or not isinstance(requests, Iterable):
            raise ConfigError(
                f"requests are prompts or Requests, not {requests!r:.40}",
                hint="pass text, a conversation, a Request, or a list of these; decode bytes first",
            )
        given = cast(Iterable[AnyRequest], requests)
        self._client = client
        self._seed = seed
        self._reports_tokens = reports_tokens
        self._failure: Exception | None = None  # the error that reading raised
        self._expected: set[str] = set()  # ids of the requests in a list that are not read yet
        self._aborted: set[str] = set()  # ids that were aborted before their request was read
        self.order: dict[str, int] = {}
        numbered: Iterable[tuple[int, AnyRequest]] = enumerate(given)
        if isinstance(given, Sequence):
            numbered = list(numbered)
            for number, request in numbered:
                name = identity(request, number)
                if name in self._expected:
                    raise ConfigError(f"two requests have the id {name!r}")
                self._expected.add(name)
            numbered.sort(key=lambda pair: getattr(pair[1], "priority", 0))
        self._numbered: Iterator[tuple[int, AnyRequest]] = iter(numbered)

    def abort(self, name: str) -> None:
        """End a request as `Client.abort` does. The request may be one that is not read yet."""
        if name in self._expected:
            self._aborted.add(name)
        self._client.abort(name)

    def events(self) -> Generator[Event, None, None]:
        """Yield the events of all steps, until all requests have been read and have ended.

        Requests are read as they are needed. When the iterator ends or is closed, all sequences are
        free.

        Raises:
            DecodeInterruptedError: a decode was interrupted. The requests read so far end with
                "cancelled"; their last events come before the exception.
            Exception: reading the requests failed. Requests read before that are finished first.
        """
        yield from self._client.run(self._read_next)
        if self._failure is not None:
            raise self._failure

    def _read_next(self) -> bool:
        """Add the next request; return False if no request is left, or reading failed.

        An invalid request gets a result with its error.
        """
        client, request, name = self._client, Request(""), ""
        try:
            number, given = next(self._numbered)
        except StopIteration:
            return False
        except Exception as error:
            self._failure = error
            return False
        try:
            name = identity(given, number)
            request = as_request(given)
            if name in client.jobs:
                raise ConfigError(f"two unfinished requests have the id {name!r}")
            reports = self._reports_tokens
            client.queue(Job(request, name, client, self._seed, reports_tokens=reports))
        except LlamaBranchError as error:
            name = name or str(number)
            seed = 0 if request.sampling is None else max(0, request.sampling.seed or 0)
            for i in range(request.n):
                stats = SpeculativeStats()
                result = Result(name, i, request.prompt, "", [], "error", seed, stats, error=error)
                client.refuse(Event(name, i, result=result))
        else:
            if name in self._aborted:
                client.abort(name)
        self.order.setdefault(name, number)
        self._expected.discard(name)  # from now on ``abort`` finds the id
        return True
