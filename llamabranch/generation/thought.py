"""The output while a text thinks: where the thought ends, and the tokens before the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..model import Model
from ..model.thoughts import Thinking
from .output import OutputBuffer, Produced


class Thought(NamedTuple):
    """A thought that has ended.

    Attributes:
        text: the thought, without the tags and the white space around it.
        n_kept: how many of the generated tokens belong to the thought, including its tags; the
            answer begins after them.
        forced: token ids to read before the answer.
    """

    text: str
    n_kept: int
    forced: list[int]


class ThoughtBuffer(OutputBuffer):
    """The tokens of a text up to the end of its thought.

    Together, the texts of its tokens are the thought without tags. If the generated text does not begin
    with a thought, this output ends at once, and ``ended`` is an empty thought. Until that is clear,
    tokens are withheld, because an answer's tokens are drawn again.

    Args:
        model: the model of the tokens.
        thinking: where the thought begins and ends.
        max_tokens: the maximum number of tokens of the whole text; None = until the model ends it.
        continues: whether this continues an earlier thought that had text.
    """

    def __init__(
        self, model: Model, thinking: Thinking, max_tokens: int | None, *, continues: bool = False
    ) -> None:
        limits = [limit for limit in (max_tokens, thinking.budget) if limit is not None]
        super().__init__(min(limits) if limits else None, (thinking.end,))
        self._model, self._thinking = model, thinking
        self._total = max_tokens
        self._is_open = thinking.is_open
        self._written = ""  # the text so far, with control tokens
        self._start = 0  # where the thought begins in ``_written``
        # White space, which is part of the thought only if more text follows.
        self._space = "\n\n" if continues else ""
        self._is_begun, self._has_text = False, continues

    @property
    def thought(self) -> str:
        """The text of the thought so far."""
        return self.text.strip()

    @property
    def ended(self) -> Thought | None:
        """The thought, once an answer may follow. None while it lasts, or if the text ended within it."""
        model, thinking, n = self._model, self._thinking, len(self.tokens)
        if self.finish_reason is None:
            return None
        begun = self._written.lstrip()
        is_in_tag = bool(begun) and begun != thinking.start and thinking.start.startswith(begun)
        if is_in_tag and not self._is_open and self.finish_reason != "stop":
            return None  # the text was cut off before a thought or an answer
        if not self._is_open:  # there is no thought; the answer is drawn again under its grammar
            return Thought("", 0, _tokens(model, thinking.head))
        if self.stop_reason is not None:
            end = self._written.index(thinking.end, self._start) + len(thinking.end)
            after, tail = self._written[end:], thinking.tail
            if not after.strip():
                tail = tail[len(after) :] if tail.startswith(after) else tail.lstrip()
                return Thought(self.thought, n, _tokens(model, tail))
            last = _named(model, self.emitted[-1])  # a token that runs past the tag is cut there
            return Thought(
                self.thought, n - 1, _tokens(model, last[: len(last) - len(after)] + tail)
            )
        is_cut = self.finish_reason == "length" and (self._total is None or n < self._total)
        if not is_cut and not (thinking.insists and self.finish_reason == "stop"):
            return None
        while n and not self.emitted[n - 1].text and model.piece(self.tokens[n - 1]):
            n -= 1  # leave out the tokens of an incomplete character
        forced = model.tokenize(thinking.ending, add_special=False) if thinking.ending else []
        return Thought(self.thought, n, forced + _tokens(model, thinking.close))

    def break_off(self, reason: str | None = None) -> Produced | None:
        """End the thought without a tag, as ``OutputBuffer.break_off`` does."""
        pending = super().break_off(reason)
        return None if pending is None else pending._replace(is_thought=True)

    def add(self, emitted: Produced) -> Produced | None:
        """Add the next token; return it with the text to emit, or None if there is no text."""
        if emitted.is_stop:
            return self._decide(super().add(emitted._replace(is_thought=True)))
        text = _named(self._model, emitted)
        self._written += text
        is_answer = False
        if not self._is_begun:
            begun, start = self._written.lstrip(), self._thinking.start
            if begun != start and start.startswith(begun):  # the tag may be incomplete
                text = ""
            elif start and begun.startswith(start):
                self._is_open = self._is_begun = True
                text = begun[len(start) :]
            elif self._is_open:
                self._is_begun, text = bool(begun), begun
            else:
                is_answer, text = True, ""
            self._start = len(self._written) - len(text)
        produced = super().add(emitted._replace(text=text, is_thought=True))
        if is_answer:
            self.finish_reason = "stop"
        shown = self._space + self.texts[-1]
        if not self._has_text:
            shown = shown.lstrip()
        core = shown.rstrip()
        self._space, self.texts[-1] = shown[len(core) :], core
        self._has_text = self._has_text or bool(core)
        return self._decide(None if produced is None else produced._replace(text=core))

    def _decide(self, shown: Produced | None) -> Produced | None:
        """Return ``shown``, or None if there is no thought, in which case the answer is drawn again."""
        self.holds = not self._is_open and self.finish_reason is None
        if self._is_open or self.holds:
            return shown
        self.withheld.clear()
        return None


class AnswerBuffer(OutputBuffer):
    """The answer after a thought. If another thought begins instead, it ends after that tag.

    Args:
        model: the model of the tokens.
        start: the tag that begins a thought; "" = no tag.
        max_tokens, stop, stop_tokens, min_tokens: as for `OutputBuffer`.
    """

    def __init__(
        self,
        model: Model,
        start: str,
        max_tokens: int | None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        super().__init__(max_tokens, stop, stop_tokens, min_tokens)
        self._model, self._start, self._written = model, start, ""
        self.ended: Thought | None = None  # set if another thought begins: its tag

    def add(self, emitted: Produced) -> Produced | None:
        """Add the next token; return it with the text to emit, or None if there is no text."""
        shown = super().add(emitted)
        if self._start and self.finish_reason is None:
            self._written += _named(self._model, emitted)
            begun = self._written.lstrip()
            if begun.startswith(self._start):
                self.ended = Thought(begun[len(self._start) :].strip(), len(self.tokens), [])
                self.finish_reason, shown = "stop", None
                self.withheld.clear()
            elif not self._start.startswith(begun):
                self._start = ""
        self.holds = bool(self._start) and self.finish_reason is None
        return shown


def forced_token(token: int) -> Produced:
    """Return the `Produced` of a token that was read between a thought and its answer."""
    return Produced(token, "", False, math.nan, math.nan, "forced", is_thought=True)


def token_text(model: Model, one: Produced) -> str:
    """Return an emitted token's text, or the name of a control token that may be part of a tag."""
    return one.text or ("" if _is_silent(model, one.token) else _named(model, one))


def _named(model: Model, one: Produced) -> str:
    if one.text or not model.entry(one.token)[1]:
        return one.text
    return model.detokenize([one.token], special=True)


def _is_silent(model: Model, token: int) -> bool:
    """Return whether a token is a control token whose name is in no tag of the model's turns."""
    name, is_control = model.entry(token)
    return is_control and not model.turn_format.has_tag(name.decode("utf-8", "replace"))


def _tokens(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=True) if text else []


def named_text(model: Model, text: str, tokens: Sequence[int], *, is_cut: bool = False) -> str:
    """Return a text including the names of control tokens that may be tags of tool calls.

    Args:
        model, text, tokens: the model, and its generated text and tokens.
        is_cut: whether a stop string ended the text, so that it is shorter than its tokens.
    """
    spoken = [token for token in tokens if not _is_silent(model, token)]
    if is_cut or not any(model.entry(token)[1] for token in spoken):
        return text
    return model.detokenize(spoken, special=True)
