"""Sessions: texts that belong together, such as the turns of one conversation of an agent.

The prefix cache keeps the longest text of a session longer than other texts. The names come from
requests: ``Request.session_id``, ``Request.parent_session_id`` and ``Request.ttl``.
"""

from __future__ import annotations

from time import monotonic
from weakref import WeakSet, WeakValueDictionary

from ..model.tree import TextNode


class Session(TextNode):
    """A session, below the session that started it.

    Attributes:
        name: its id.
        ttl: it counts as ended this many seconds after its last request.
        running: its texts that hold a sequence.
        requests: its requests that have not ended.
    """

    def __init__(self, name: str, parent: Session | None) -> None:
        super().__init__(parent)
        self.name = name
        self.ttl = 0.0
        self.running: WeakSet[object] = WeakSet()
        self.requests: WeakSet[object] = WeakSet()
        self._used = monotonic()

    def __repr__(self) -> str:
        return f"<Session {self.name!r}>"

    def begin(self, text: object) -> None:
        """Note that one of its texts holds a sequence."""
        self.running.add(text)

    def end(self, text: object) -> None:
        """Note that one of its texts no longer holds a sequence. A second call only notes the time."""
        self.running.discard(text)
        self._used = monotonic()

    @property
    def has_ended(self) -> bool:
        """Whether its texts are the first to be evicted."""
        return not (self.running or self.requests) and monotonic() - self._used >= self.ttl


class Sessions:
    """The sessions that have a cached text, a request, or a session below them."""

    def __init__(self) -> None:
        self._by_name: WeakValueDictionary[str, Session] = WeakValueDictionary()

    def of(self, name: str, parent: str | None, ttl: float) -> Session:
        """Return a session, after moving it below ``parent``, unless ``parent`` is below it."""
        session = self._by_name.get(name)
        if session is None:
            session = self._by_name[name] = Session(name, None)
        if parent is not None:
            above = self._by_name.get(parent) or self.of(parent, None, ttl)
            if session not in above.ancestors():
                session.hang(above)
        session.ttl = ttl
        return session

    def running(self) -> list[Session]:
        """Return the sessions with a text that holds a sequence."""
        return [session for session in list(self._by_name.values()) if session.running]

    def asked(self) -> list[Session]:
        """Return the sessions with a request that has not ended."""
        return [session for session in list(self._by_name.values()) if session.requests]
