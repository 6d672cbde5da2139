"""The thought, the content and the calls of a text while it is generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import nan

from ..generation.output import Produced
from ..generation.thought import token_text
from ..model import NO_TOKEN, Model, Turn, TurnEvent
from ..model.tools import Tools


def shown_pieces(token: Produced | None, events: Sequence[TurnEvent]) -> list[Produced]:
    """Return the events' texts as tokens: ``token`` gets the text of its kind; others come before it.

    Args:
        token: a token of a thought or an answer; None = return only texts without a token.
        events: from `TurnPieces`.
    """
    shown = []
    own = "" if token is None else "thought" if token.is_thought else "content"
    for event in events:
        if event.kind in ("thought", "content") and event.kind != own:
            is_thought = event.kind == "thought"
            shown.append(Produced(NO_TOKEN, event.text, True, nan, nan, is_thought=is_thought))
    if token is not None:
        text = "".join(event.text for event in events if event.kind == own)
        shown.append(token._replace(text=text))
    return shown


class TurnPieces:
    """Reads a text in pieces; all events together are the turn of the complete text.

    Args:
        tools: the functions that the text may call.
        salt: see `TurnReader`.
        begun: the beginning of the answer, which is not part of the text.
        eager: see `TurnReader`.

    Attributes:
        reads_calls: whether the text may have calls.
        content: the content so far.
    """

    def __init__(self, tools: Tools, salt: str, begun: str = "", *, eager: bool = False) -> None:
        self.reads_calls = tools.is_used
        self._thoughts = tools.reader(in_thought=True, salt=salt)
        self._answer = tools.reader(eager=eager, salt=salt)
        self._n_begun = len(tools.read(begun).content) if begun else 0
        self._thought = ""
        self._n_told = 0  # characters of the thought
        self.content = ""
        self._answer_events(self._answer.feed(begun) if begun else [])

    def feed_token(self, model: Model, token: Produced) -> list[TurnEvent]:
        """Return the events of the next token."""
        if token.is_thought:
            return self.feed(token.text, "")
        is_plain = token.is_stop or not self.reads_calls
        return self.feed("", token.text if is_plain else token_text(model, token))

    def feed(self, thought: str, written: str) -> list[TurnEvent]:
        """Return the events of the next piece.

        Args:
            thought: a piece of the thought.
            written: a piece of the answer, with the names of control tokens.
        """
        events: list[TurnEvent] = []
        if thought:
            self._thought += thought
            # A call counts only at the end of a text that never ends its thought.
            found = self._thoughts.feed(thought)
            events += self._tell_thought("".join(e.text for e in found if e.kind == "thought"))
        if written:
            events += self._tell_thought(self._thought[self._n_told :])
            events += self._answer_events(self._answer.feed(written))
        return events

    def finish(self, turn: Turn, *, is_cut: bool) -> list[TurnEvent]:
        """Return the events at the end of the text.

        Args:
            turn: the complete turn.
            is_cut: whether the model did not end the text itself.
        """
        events = self._tell_thought(turn.thought[self._n_told :])
        events += self._answer_events(self._answer.finish(is_cut=is_cut))
        for i, call in [*enumerate(turn.calls)][len(self._answer.turn.calls) :]:
            events.append(TurnEvent("name", call.name, i, call.id))
            text = json.dumps(call.arguments, ensure_ascii=False)
            events.append(TurnEvent("arguments", text, i))
        return events

    def _tell_thought(self, text: str) -> list[TurnEvent]:
        self._n_told += len(text)
        return [TurnEvent("thought", text)] if text else []

    def _answer_events(self, found: list[TurnEvent]) -> list[TurnEvent]:
        """Return the events without the content of ``begun``."""
        events = []
        for event in found:
            if event.kind == "thought":  # in the answer; only the first thought counts
                events += [] if self._thought else self._tell_thought(event.text)
                continue
            if event.kind == "content":
                n = min(self._n_begun, len(event.text))
                self._n_begun -= n
                event = event._replace(text=event.text[n:])
                self.content += event.text
            if event.text or event.kind != "content":
                events.append(event)
        return events
