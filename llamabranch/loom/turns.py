"""Conversations in a document: turns are rendered by the model's chat template.

The template renders the whole conversation each time. The page keeps the text's tokens up to the first
one that is rendered differently, and forks there, because many templates leave out earlier thoughts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..errors import LlamaBranchError
from ..model import Model, TurnReader
from ..model.text import n_common
from ..model.thoughts import Thinking, plan_thinking, thinking_budget, thinking_variables
from ..model.tools import Tools, conversation
from ..request.openai import answer_message
from .document import Document, Made, Node, Turn
from .document import Thinking as Choice

_CONTROL = b"\xff"  # written before the id of a control token, because UTF-8 never has this byte


class Talk(NamedTuple):
    """The template's input: messages, OpenAI's tool objects, other variables."""

    messages: list[dict[str, object]]
    tools: Sequence[Mapping[str, object]] = ()
    variables: Mapping[str, object] = {}

    def thinking(self, model: Model, thinking: Choice) -> Talk:
        """Return it with the template's variables that switch thoughts on or off."""
        choice = thinking_variables(model.turn_format, thinking)
        return self._replace(variables={**self.variables, **choice})

    def tokens(self, model: Model, n: int | None = None, *, generates: bool = True) -> list[int]:
        """Return the tokens of all messages, or of the first ``n``, up to where an answer begins."""
        tools = Tools(self.tools, None, model.turn_format)
        rendered = conversation(
            model, self.messages[:n], tools, self.variables, continues=False, generates=generates
        )
        return rendered.tokens(model)


class Written(NamedTuple):
    """Tokens that continue a text as a conversation.

    Attributes:
        at: how many of the text's tokens are kept.
        ids: the tokens after them.
        turns: the turns that begin or end in the new tokens.
    """

    at: int
    ids: list[int]
    turns: list[Turn]


class Part(NamedTuple):
    """A thought or a call in an answer, by positions of tokens.

    Attributes:
        kind: "thought", "thinking" (a thought that has not ended) or "call".
        start, end: its tokens.
        calls: the names of called functions and their arguments.
    """

    kind: str
    start: int
    end: int
    calls: list[tuple[str, object]]


def chat_fields(model: Model) -> dict[str, object] | None:
    """Return the roles that the chat template supports; None without a template."""
    if model.chat_template is None:
        return None
    known = model.turn_format.roles & {"system", "tool"}
    return {"roles": ["user", *sorted(known, reverse=True)]}


def head_of(turns: Sequence[Turn], ids: Sequence[int], model: Model) -> int:
    """Return how many tokens at a text's beginning stay in the context: BOS, and a system message."""
    if turns and turns[0].role == "system" and len(turns) > 1:
        return turns[1].at
    first, later = turns[:1], [turn for turn in turns[1:] if turn.role == "user"]
    for turn, other in zip(first, later, strict=False):  # the template may write a system message
        opening = ids[other.at : other.begin]
        if ids[turn.begin - len(opening) : turn.begin] == opening:
            return turn.begin - len(opening)
    return int(ids[:1] == [model.bos])


def beginning(node: Node) -> Made:
    """Return the record that begins a node's conversation, with its tools; else an empty one."""
    return next((owner.made for owner, *_ in node.stretches() if owner.made.turns), Made(id=""))


def answers(document: Document, model: Model, node: Node) -> list[tuple[int, list[Part]]]:
    """Return for each answer in a node's own tokens where it begins, and its parts."""
    parts_of_answers: list[tuple[int, list[Part]]] = []
    turns = document.turns(node) if model.chat_template is not None else []
    for turn in turns:
        if turn.role != "assistant" or not max(node.at, turn.begin) < (turn.end or 0):
            continue
        parts_of_answers.append((turn.begin, _parts(document, model, node, turn)))
    return parts_of_answers


def _parts(document: Document, model: Model, node: Node, turn: Turn) -> list[Part]:
    begin = turn.begin
    ends = [*accumulate(map(len, document.texts(node.tokens(turn.end, begin), names=True)))]
    reader, text = _read(document, model, node, turn)
    parts: list[Part] = []
    for span in reader.spans:
        kind, start, end = span.kind, span.start, span.end
        if kind == "call":
            start += len(text[start:end]) - len(text[start:end].lstrip())
        elif not text[:start].strip():
            start = 0
        first = max(bisect_right(ends, start), parts[-1].end - begin if parts else 0)
        last = min(bisect_left(ends, end) + 1, len(ends))
        if kind == "thought":  # with the whitespace after it
            last = bisect_right(ends, end + len(text[end:]) - len(text[end:].lstrip()))
        if last > first:
            calls = [(call.name, call.arguments) for call in span.calls]
            parts.append(Part(kind, begin + first, begin + last, calls))
    if reader.is_in_thought and parts and parts[-1].kind == "thought":
        parts[-1] = parts[-1]._replace(kind="thinking", end=begin + len(ends))
    return parts


def _read(document: Document, model: Model, node: Node, turn: Turn) -> tuple[TurnReader, str]:
    """Return the reader of an answer, and the answer's text."""
    ids, form = node.tokens(turn.end), model.turn_format
    header, text = (
        document.written(part) for part in (ids[turn.at : turn.begin], ids[turn.begin :])
    )
    tools = beginning(node).tools
    reader = TurnReader(form, tools, in_thought=form.is_in_thought(header))
    reader.feed(text)
    reader.finish()
    return reader, text


def thinking_at(
    document: Document, model: Model, node: Node, at: int
) -> tuple[Thinking | None, int]:
    """Return the thought that a text continues with, or None, and where the answer begins."""
    turns, ids = document.turns(node, at), node.tokens(at)
    if model.chat_template is None or not turns or turns[-1].role != "assistant":
        return None, 0
    turn, has_calls, choice = turns[-1], bool(beginning(node).tools), node.made.thinking
    if at <= turn.begin:
        return plan_thinking(model, ids, choice, has_calls=has_calls)[1], at
    if _read(document, model, node, turn)[0].is_in_thought:
        budget = thinking_budget(choice or True)
        left = True if budget is None else max(1, budget - (at - turn.begin))
        return plan_thinking(model, ids[: turn.begin], left, has_calls=has_calls)[1], at
    parts = _parts(document, model, node, turn)
    return None, max((part.end for part in parts if part.kind == "thought"), default=turn.begin)


def messages_of(
    document: Document, model: Model, node: Node, turns: Sequence[Turn]
) -> list[dict[str, object]]:
    """Return turns of a node's text as messages; thoughts and calls are fields of their own."""
    messages: list[dict[str, object]] = []
    last_call = ""
    for turn in turns:
        if turn.role == "assistant":
            answer = _read(document, model, node, turn)[0].turn
            messages.append(answer_message(answer))
            last_call = answer.calls[0].id if answer.calls else last_call
            continue
        text = turn.text
        if text is None:
            text = document.written(node.tokens(turn.end)[turn.begin :])
        message: dict[str, object] = {"role": turn.role, "content": text}
        if turn.role == "tool":
            message["tool_call_id"] = last_call
        messages.append(message)
    return messages


def write(
    model: Model,
    talk: Talk,
    before: Sequence[int],
    known: Sequence[Turn],
    answer: str | None = None,
) -> Written:
    """Return tokens that continue ``before`` as a conversation, up to where an answer begins.

    Args:
        model: its chat template renders the conversation.
        talk: the conversation.
        before: the tokens of the text so far, which may differ from the conversation.
        known: the turns in ``before``.
        answer: the beginning of the answer, with control tokens.

    Raises:
        ConfigError: the template refuses the messages.
        LlamaBranchError: the template cannot be rendered.
    """
    full = talk.tokens(model)
    n_prompt = len(full)
    if answer:
        full += model.tokenize(answer, add_special=False, parse_special=True)
    words, own = ([_word(model, token) for token in ids] for ids in (full, before))
    places = common(own, words)
    at, skipped = places[-1]
    for i, turn in enumerate(known[: len(talk.messages) - 1]):
        end = turn.end or len(before)
        if turn.role != "assistant" or not turn.at <= at < end:
            continue
        # An answer stays as the model wrote it, even if the template would write it in another way, for
        # example a call. The template's tokens continue where it ends this turn.
        head, (following, *rest) = talk.messages[: i + 1], talk.messages[i + 1 :]
        other = [*head, {**following, "content": f"x{following['content']}"}, *rest]
        n = n_common(full, talk._replace(messages=other).tokens(model))
        there = next((j for j in range(n - 1, skipped - 1, -1) if model.is_eog(full[j])), None)
        thought = str(head[-1].get("reasoning_content") or "").strip().encode()
        # Whether it is rendered without its thought.
        is_shorter = at <= turn.begin or thought not in b"".join(words[:there])
        is_old = any(message["role"] == "user" for message in [following, *rest])
        if there is None or (is_old and is_shorter):
            break
        places += [(end + i, there + j) for i, j in common(own[end:], words[there:])]
        at, skipped = places[-1]
    spans = _Spans(model, talk, full, n_prompt, words, places)
    stays = 0  # turns that end before the fork
    while stays < min(len(known), len(talk.messages)) and (known[stays].end or at + 1) < at:
        stays += 1
    turns, low = [], spans.boundary(stays)
    for i, message in enumerate(talk.messages[stays:], stays):
        old = known[i] if i < len(known) and known[i].begin <= at else None
        high = max(low, spans.boundary(i + 1))
        turns.append(spans.turn(i, message, low, high, old))
        low = high
    turns.append(Turn("assistant", spans.position(low), at + n_prompt - skipped))
    return Written(at, full[skipped:], turns)


class _Spans:
    """Finds where messages are in a conversation's tokens, by rendering it without the later ones."""

    def __init__(
        self,
        model: Model,
        talk: Talk,
        full: Sequence[int],
        n_prompt: int,
        words: Sequence[bytes],
        places: Sequence[tuple[int, int]],
    ) -> None:
        self._model, self._full, self._n_prompt = model, full, n_prompt
        self._words, self._places = words, places
        # A template may render the thought of the last answer and leave it out once turns follow.
        bare = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in talk.messages]
        self._talks = [talk] if bare == talk.messages else [talk, talk._replace(messages=bare)]

    def boundary(self, n: int, *, generates: bool = False) -> int:
        """Return how many tokens of the conversation the first ``n`` messages have."""
        if n == 0:
            return 0
        most, prompt = 0, self._full[: self._n_prompt]
        for talk in self._talks:
            try:
                part = talk.tokens(self._model, n, generates=generates)
            except LlamaBranchError:  # a template may refuse part of a conversation
                continue
            most = max(most, n_common(part, prompt))
        return most

    def position(self, token: int) -> int:
        """Return the position in the new text of a token of the conversation."""
        at, skipped = self._places[-1]
        if token >= skipped:
            return at + token - skipped
        return self._places[bisect_right([there for _, there in self._places], token) - 1][0]

    def turn(
        self, i: int, message: Mapping[str, object], low: int, high: int, old: Turn | None
    ) -> Turn:
        """Return the turn of message ``i``.

        Args:
            i, message: its index, and the message.
            low, high: where it begins and ends in the conversation.
            old: the turn in the text that is kept.
        """
        role, text = str(message["role"]), message.get("content")
        if role == "assistant":
            begin = max(low, min(high, self.boundary(i, generates=True)))
            ends = (j for j in range(high - 1, begin - 1, -1) if self._model.is_eog(self._full[j]))
            end = self.position(next(ends, high))
            if old is not None:
                return Turn(role, old.at, old.begin, max(old.begin, end))
            return Turn(role, self.position(low), self.position(begin), end)
        begin, end = self._span(low, high, str(text or ""))
        return Turn(
            role, self.position(low), self.position(begin), self.position(end), str(text or "")
        )

    def _span(self, low: int, high: int, text: str) -> tuple[int, int]:
        """Return the range of tokens between ``low`` and ``high`` that holds a text."""
        words = self._words[low:high]
        joined, wanted = b"".join(words), text.strip().encode()
        where = joined.rfind(wanted) if wanted else -1
        if where < 0:
            return high, high
        ends = [*accumulate(map(len, words), initial=0)]
        begin = bisect_right(ends, where) - 1
        return low + begin, low + bisect_right(ends, where + len(wanted) - 1)


def opened(document: Document, model: Model, node: Node, at: int, thinking: Choice) -> Written:
    """Return the tokens that make an answer begin with a thought, or without one.

    Where the answer begins, the conversation is written again with the template's variables for this
    choice, and then a thought that the template neither opens nor closes. Inside an open thought only
    the tag that closes it can be written. Without a choice, an answer that was opened for one is opened
    as the template does.

    Raises:
        UnsupportedError: the model does not think.
    """
    turns, new = document.turns(node, at), Written(at, [], [])
    if not turns or turns[-1].role != "assistant":
        return new
    turn, tools, ids = turns[-1], beginning(node).tools, node.tokens(at)
    (owner, *_), *_ = node.stretches(turn.begin - 1, turn.begin)
    if at > turn.begin and thinking_at(document, model, node, at)[0] is None:
        return new  # it is the answer's own text
    if at <= turn.begin and (thinking is not None or owner.made.thinking is not None):
        talk = Talk(
            messages_of(document, model, node, turns[:-1]), tools, beginning(node).variables
        )
        new = write(model, talk.thinking(model, thinking), ids, turns[:-1])
    ids = [*ids[: new.at], *new.ids]
    more = plan_thinking(model, ids, thinking, has_calls=bool(tools))[0][len(ids) :]
    if more and at <= turn.begin:
        begin = new.turns[-1].at if new.turns else turn.at
        opening = Turn("assistant", begin, len(ids) + len(more))
        new = new._replace(turns=[*new.turns[:-1], opening])
    return new._replace(ids=[*new.ids, *more])


def _word(model: Model, token: int) -> bytes:
    return model.piece(token) or _CONTROL + str(token).encode() + _CONTROL


def common(a: Sequence[bytes], b: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return pairs (i, j) for which ``a[:i]`` and ``b[:j]`` are the same bytes and whole characters."""
    left, right = b"".join(a), b"".join(b)
    n = n_common(left, right)
    there = {end: j for j, end in enumerate(accumulate(map(len, b), initial=0))}
    ends = (end for end in accumulate(map(len, a), initial=0) if end <= n)
    return [
        (i, there[end])
        for i, end in enumerate(ends)
        if end in there and (not end or not b"\x80" <= right[end : end + 1] < b"\xc0")
    ]
