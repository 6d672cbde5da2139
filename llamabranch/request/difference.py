"""Where two prompts part, and which tokens after that place were read before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, cast

from ..model import Message, Model, is_chat
from ..model.text import n_common

_RUN = 16  # tokens; a repeated run of twice this length is always found, a shorter one sometimes
_AROUND = 200  # characters of a text on each side of a difference
_WORD = 40  # the maximum number of characters of a word that is shown


class Run(NamedTuple):
    """A run of tokens that occurs in both of two texts.

    Attributes:
        start, old_start: where it begins in the new and in the old text.
        n: how many.
    """

    start: int
    old_start: int
    n: int


def repeated(old: Sequence[int], new: Sequence[int]) -> list[Run]:
    """Return the runs of ``new`` that also occur in ``old``, in the order of ``new``."""
    places = {tuple(old[i : i + _RUN]): i for i in range(0, len(old) - _RUN + 1, _RUN)}
    runs, at, end = list[Run](), 0, 0
    while at + _RUN <= len(new) and places:
        place = places.get(tuple(new[at : at + _RUN]))
        if place is None:
            at += 1
            continue
        n = n_common(old[place:], new[at:])
        before = n_common(old[:place][::-1], new[end:at][::-1])
        runs.append(Run(at - before, place - before, n + before))
        at = end = at + n
    return runs


class Place(NamedTuple):
    """Where a token is in a prompt.

    Attributes:
        name: the place in words, such as "in the system prompt, line 2".
        line: the text of that line up to the token; "" outside of messages.
    """

    name: str
    line: str = ""


class PromptText:
    """The text of a prompt, and where its messages are in it.

    Args:
        model: reads the tokens.
        prompt: the prompt of the request.
        tokens: its token ids.
        has_tools: whether the chat template writes tools before the messages.
    """

    def __init__(
        self, model: Model, prompt: object, tokens: Sequence[int], *, has_tools: bool = False
    ) -> None:
        self._model = model
        self._messages: Sequence[Message] = prompt if is_chat(prompt) else ()
        self._tokens = tokens
        self._has_tools = has_tools

    @cached_property
    def _ends(self) -> list[int]:
        return [*accumulate(len(self._model.piece(token)) for token in self._tokens)]

    @cached_property
    def _bytes(self) -> bytes:
        return b"".join(map(self._model.piece, self._tokens))

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """The bytes of each message's content; (end, end) if a content is not found."""
        contents = [
            str(cast("Mapping[str, object]", message).get("content") or "").strip().encode()
            for message in self._messages
        ]
        # Search backwards, because a short message may also occur in the tools before it.
        starts, end = list[int](), len(self._bytes)
        for content in reversed(contents):
            starts.append(self._bytes.rfind(content, 0, end) if content else -1)
            end = starts[-1] if starts[-1] >= 0 else end
        spans, at = list[tuple[int, int]](), 0
        for start, content in zip(reversed(starts), contents, strict=True):
            spans.append((start, start + len(content)) if start >= 0 else (at, at))
            at = spans[-1][1]
        return spans

    def _offset(self, position: int) -> int:
        return self._ends[position - 1] if position else 0

    def text(self, start: int, end: int) -> str:
        """Return the text of tokens [start, end)."""
        return self._bytes[self._offset(start) : self._offset(end)].decode("utf-8", "replace")

    def raw(self, start: int) -> bytes:
        """Return the bytes of the tokens from ``start`` on."""
        return self._bytes[self._offset(start) :]

    def position(self, offset: int) -> int:
        """Return the index of the token that contains a byte."""
        return bisect_right(self._ends, offset)

    def place(self, position: int) -> Place:
        """Return where the last byte of a token is."""
        offset, last = self._offset(position), self._offset(position + 1) - 1
        if not self._messages:
            lines = self._bytes[: max(offset, last)].split(b"\n")
            return Place(f"in the prompt, line {len(lines)}", lines[-1].decode("utf-8", "replace"))
        for i, (start, end) in enumerate(self._spans):
            role = cast("Mapping[str, object]", self._messages[i]).get("role")
            name = "the system prompt" if role == "system" else f"message {i + 1} ({role})"
            if start <= last < end:
                n_lines = self._bytes[start:last].count(b"\n") + 1
                text = self._bytes[start:offset].rpartition(b"\n")[2].decode("utf-8", "replace")
                return Place(f"in {name}, line {n_lines}", text)
            if last < start:
                what = "the tools" if self._has_tools and i < 2 else "what the chat template writes"
                return Place(f"in {what}, before {name}")
        return Place("after the last message")

    def end_of(self, message: int) -> int:
        """Return the position after a message; one without text ends where the next one begins."""
        start, end = self._spans[message]
        following = [other for other, _ in self._spans[message + 1 :]]
        if start == end:
            end = following[0] if following else len(self._bytes)
        return self.position(end - 1) + 1

    def answer_at(self, position: int) -> int | None:
        """Return the index of the assistant's message that a token is in, or that follows it."""
        offset = self._offset(position)
        for i, (_, end) in enumerate(self._spans):
            if offset <= end:
                role = cast("Mapping[str, object]", self._messages[i]).get("role")
                return i if role == "assistant" else None
        return None


def around(text: PromptText, position: int, end: int) -> str:
    """Return the text on both sides of a token."""
    low, high = max(0, position - _AROUND // 2), min(end, position + _AROUND // 2)
    before, after = text.text(low, position), text.text(position, high)
    return before[-_AROUND:] + after[:_AROUND]


def words(before: str, after: str) -> tuple[str, str]:
    """Return the first word of each text that differs; the texts begin alike."""
    n = n_common(before, after)
    start = max(before.rfind(space, 0, n) for space in " \n\t") + 1
    first = [(text[start:].split() or [""])[0] for text in (before, after)]
    short = [word if len(word) <= _WORD else word[: _WORD - 1] + "…" for word in first]
    return short[0], short[1]
