"""Read a model's turns (thought, content and calls) in the form of its chat template."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..arguments import shown
from ..errors import ConfigError, UnsupportedError
from .call_form import (
    ArgumentTags,
    Around,
    CallForm,
    Cursor,
    Incomplete,
    Known,
    Mismatch,
    Slot,
    ToolCall,
    Values,
    json_end,
)  # fmt: skip
from .templates import ChatTemplate
from .turn_finding import TurnParts, find_parts

_LIMIT_S = 5.0  # for all renderings of a template; an ordinary template takes 0.1 s
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WORDS = ("True", "False", "None")
_BARE = CallForm(
    ('{"name": "', Slot.NAME, '", "arguments": ', Slot.ARGUMENTS, "}"),
    object_end=5,
    separator="\n",
)
_PYTHON = CallForm(
    (Slot.NAME, "(", Slot.ARGUMENTS, ")"),
    section_start="[",
    section_end="]",
    separator=", ",
    tags=ArgumentTags(None, {"number": Around("", "=", ())}, ", ", Values("'", words=_WORDS)),
)
# A tag that begins a message, and the assistant's role.
_ROLE = re.compile(r"([<\[][^<>\[\]\s]+[>\]])\s*([<\[][^<>\[\]\s]+[>\]]|\w+)\s*$")
_OF_CALLS = ("call", "other call", "bare", "section end")
_FENCE = re.compile(r"```[ \t]*[\w.+-]*\s*")
_CLOSES = {"fence": "```", "tagged": "</tool_call>"}
_LOOSE_HEAD = re.compile(r"(?:```[ \t]*[\w.+-]*\s*)?[\[{][\[{\s]*")
_BARE_KEYS = ("arguments", "parameters")
FUNCTION = '{"type": "function", "function": {"name": ..., "parameters": SCHEMA}}'


class Turn(NamedTuple):
    """What a model wrote in one turn.

    Attributes:
        thought: "" without one.
        content: the answer's text, without thought and calls.
        calls: the calls of functions, in order.
    """

    thought: str
    content: str
    calls: list[ToolCall]


class TurnEvent(NamedTuple):
    """A piece of text that was added to a turn.

    Attributes:
        kind: "thought" or "content"; "name": a call begins, and ``text`` is the function's name;
            "arguments": a piece of the call's JSON arguments; "cut" (only from an eager reader): it was
            not a call after all, and its text follows as content.
        text: the piece.
        call: the number of the call in the turn, from 0; None for thought and content.
        id: the id of the call, with "name".
    """

    kind: str
    text: str
    call: int | None = None
    id: str = ""


class TurnSpan(NamedTuple):
    """A part of a turn's text that is not content.

    Attributes:
        kind: "thought" or "call", including the tags.
        start, end: its place in the text, in characters.
        calls: the calls in it.
    """

    kind: str
    start: int
    end: int
    calls: tuple[ToolCall, ...] = ()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def call_id(salt: str, index: int, name: str) -> str:
    """Return an id for a call: nine letters and digits, as Mistral's templates require."""
    digest = hashlib.sha256(json.dumps([salt, index, name]).encode()).digest()
    number, letters = int.from_bytes(digest, "big"), ""
    for _ in range(9):
        number, rest = divmod(number, len(_ALPHABET))
        letters += _ALPHABET[rest]
    return letters


def function_of(tool: object) -> tuple[str, Mapping[str, object]]:
    """Return the name and the function from OpenAI's tool object or a bare function object.

    Raises:
        ConfigError: it is not a function with a name.
    """
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ConfigError(
            f"a tool must be a function with a name, not {shown(tool)}", hint=FUNCTION
        )
    return name, function


@dataclass(frozen=True)
class TurnFormat(TurnParts):
    """The form of a model's turns, found by rendering its chat template.

    Use ``TurnFormat.of(template)`` or ``model.turn_format``. It has the attributes of ``TurnParts``.
    """

    @classmethod
    def of(
        cls, template: str | ChatTemplate, bos_token: str = "", eos_token: str = ""
    ) -> TurnFormat:
        """Return the form of a template's turns.

        If a template cannot be run, or contradicts itself, return the general form: no thoughts, and
        calls as bare JSON. ``reason`` says why.

        Args:
            template: its Jinja source.
            bos_token, eos_token: texts of special tokens that the template may write.

        Raises:
            ConfigError: the template is not text.
        """
        if isinstance(template, str):
            special = {"bos_token": bos_token, "eos_token": eos_token}
            template = ChatTemplate(template, special, limit_s=_LIMIT_S)
        elif not isinstance(template, ChatTemplate):
            raise ConfigError(f"a template must be Jinja source, not {shown(template)}")
        return _found(template)

    @classmethod
    def built_in(cls) -> TurnFormat:
        """Return the form for a built-in template, which takes only roles and texts."""
        return cls(roles=frozenset({"system"}))

    # -- properties of the template ----------------------------------------------------------------

    @property
    def form(self) -> CallForm:
        """How calls are written: the template's own form if there is one, otherwise bare JSON."""
        return self.calls or _BARE

    @property
    def is_general(self) -> bool:
        """Whether calls are bare JSON because the template's own form cannot be read."""
        return self.calls is None

    def has_tag(self, name: str) -> bool:
        """Return whether ``name`` occurs in a text that marks thoughts, calls or turns."""
        return name in self._tags

    @cached_property
    def _tags(self) -> str:
        return "\n".join([*_texts(astuple(self)), "<tool_call>", "</tool_call>"])

    def thinking_variables(self, on: bool) -> dict[str, object]:
        """Return the template variables that switch thoughts on or off; {} = no such variables."""
        names = self.thinking
        return {
            name: on for name in names if not (on and re.search("budget|effort|strength", name))
        }

    def begun_turn(self, prompt: str) -> str:
        """Return a prompt's text after its last header, or all of it if there is no header."""
        header = self.header.strip()
        return prompt.rpartition(header)[2] if header else prompt

    def is_in_thought(self, prompt: str) -> bool:
        """Return whether the text of a prompt ends inside a thought."""
        start, end = self.thought_start, self.thought_end
        if not start or not end:
            return False
        turn_text = self.begun_turn(prompt)
        return turn_text.rfind(start) > turn_text.rfind(end)

    def closing(self, *, has_calls: bool = False) -> str:
        """Return the text that ends a thought, up to the content of an answer.

        ``has_calls``: functions may be called, so the model itself writes what follows the tag.
        """
        end = self.thought_end or ""
        close = self.thought_close if end in self.thought_close else end
        if has_calls:
            return close
        # Text after the tag may belong to the header.
        rest = self.header[len(end) :] if end and self.header.startswith(end) else ""
        return close + rest + self.content_start

    def continued(self, prompt: str, begun: str) -> tuple[str, str]:
        """Return the text that the template writes before an answer, and the answer's beginning.

        If the prompt ends inside a thought, the thought is closed, unless ``begun`` belongs to it. It
        does if it begins with the tag of a thought, which is not written twice, or contains the end of
        one.

        Args:
            prompt: the text of the prompt, or its end.
            begun: the beginning of the answer.
        """
        own, start, end = begun.lstrip(), self.thought_start or "", self.thought_end or ""
        is_thought = bool(start) and own.startswith(start)
        if self.is_in_thought(prompt):
            if is_thought:
                return "", own[len(start) :].lstrip()
            return ("" if end in begun else self.closing().lstrip()), begun
        head = self.content_start
        is_headed = is_thought or prompt.endswith(head) or own.startswith(head.strip())
        return "" if is_headed else head, begun

    def describe(self) -> str:
        """Return a description of the form in words."""
        words = []
        if self.thought_end is None:
            words.append("does not think")
        else:
            always = "" if self.thinking else ", always"
            begins = f"between {self.thought_start} and {self.thought_end}"
            if not self.thought_start:
                begins = f"up to {self.thought_end}"
            is_on = self.starts_in_thought or self.thought_off is not None
            state = always or (", on by default" if is_on else ", off by default")
            if always and not self.starts_in_thought:
                state = ", when the model chooses to"
            words.append(f"thinks {begins}{state}")
        form = self.form
        opening = " ".join(form.opening.split())
        kinds = {"json": "JSON", "tag": "a name + JSON", "tags": "a name + tagged arguments"}
        if form.tags is not None and form.tags.is_quoted:
            kinds["tags"] = "a name + arguments"
        if self.is_general:
            words.append("calls: bare JSON, described in the system message")
        else:
            several = {True: "yes", False: "no", None: "unknown"}[form.several]
            words.append(
                f"calls: {opening + ' + ' if opening and opening[0] != '{' else ''}"
                f"{kinds[form.kind]}; several at once: {several}"
            )
        if self.reason:
            words.append(self.reason)
        return "; ".join(words)

    # -- reading and writing -----------------------------------------------------------------------

    def read(
        self, text: str, tools: Iterable[object] = (), *, in_thought: bool | None = None
    ) -> Turn:
        """Return the thought, the content and the calls of a turn that a model wrote.

        A call that is broken or names an unknown function counts as content.

        Args:
            text: the complete turn, including the texts of control tokens.
            tools: OpenAI's tool objects, or bare function objects. If there are any, calls of other
                functions are content, and the schemas tell strings from other values.
            in_thought: whether the prompt ended inside a thought; None = as ``starts_in_thought``.

        Raises:
            ConfigError: a tool is not a function with a name.
        """
        reader = TurnReader(self, tools, in_thought=in_thought)
        reader.feed(text)
        reader.finish()
        return reader.turn

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of calls in the template's own form, as the model would write it.

        Calls without an id get one if the form has ids.
        """
        named = [
            call if call.id else call._replace(id=call_id("", i, call.name))
            for i, call in enumerate(calls)
        ]
        return self.form.write(named).removeprefix(self.lead)


@lru_cache(maxsize=32)
def _found(template: ChatTemplate) -> TurnFormat:
    try:
        parts = find_parts(template)
    except UnsupportedError as error:
        return TurnFormat(roles=frozenset({"system"}), reason=error.message)
    return TurnFormat(**vars(parts))


def _beginnings(tags: Iterable[str]) -> frozenset[str]:
    """Return all incomplete beginnings of the tags."""
    return frozenset(tag[:n] for tag in tags for n in range(1, len(tag)))


class TurnReader:
    """Reads a turn as it is generated.

    Each piece of the text yields events. Together, the events give the same turn as ``TurnFormat.read``
    for the whole text, however it was split. Text that may be the beginning of a tag is held back.

    Args:
        form: the form of the turns.
        tools: see ``TurnFormat.read``.
        in_thought: see ``TurnFormat.read``.
        eager: True = report the name of a call and pieces of its JSON arguments as they are generated,
            for texts that follow a grammar; if the call is cut off, it is taken back ("cut"). False =
            report a call when it is complete.
        salt: the ids of calls are derived from it, from their position and from their name.
        calls: False = calls are content.

    Attributes:
        turn: the turn so far.
        spans: where its thoughts and calls are, in order.
        is_in_thought: whether the text ends inside a thought.
    """

    def __init__(
        self,
        form: TurnFormat,
        tools: Iterable[object] = (),
        *,
        in_thought: bool | None = None,
        eager: bool = False,
        salt: str = "",
        calls: bool = True,
    ) -> None:
        self._tools = list(tools)
        functions = [function_of(tool) for tool in self._tools]
        known = {name: function.get("parameters") for name, function in functions}
        self._turns, self._form, self._known = form, form.form, Known(known or None)
        self._salt, self._eager, self._reads_calls = salt, eager, calls
        inside = form.starts_in_thought if in_thought is None else in_thought
        self._in_thought = inside and bool(form.thought_end)
        self._buffer = ""
        self._ruled_out: dict[tuple[object, ...], int] = {}  # about a call that begins the buffer
        self._at = 0  # how much of the buffer has been read
        self._n_cut = 0  # characters of the text before the buffer
        self.spans: list[TurnSpan] = []
        self._space = ""  # white space that is content only if content follows
        self._thought: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._events: list[TurnEvent] = []
        self._is_first = True  # only white space has been read so far
        self._trims = False  # drop white space, after a thought or a call
        self._in_section = False
        self._n_sent: int | None = None  # characters of the arguments that were already reported
        self._is_started = False
        self._is_over = False  # another role's message has begun
        self._is_anew = False  # a header was read, but nothing after it yet
        self._headers = self._turns.headers
        role = _ROLE.search(self._turns.header + self._turns.prompt_end)
        self._role = (role[1], role[2]) if role else ("", "")
        self._marks = self._all_marks()
        self._keys: dict[str, list[str]] = {}  # the marks that a first word may begin
        for kind, text in self._marks.items():
            self._keys.setdefault(text.split()[0], []).append(kind)
        pattern = "|".join(map(re.escape, sorted(self._keys, key=len, reverse=True))) or "(?!)"
        self._pattern = re.compile(pattern)
        self._begun = _beginnings(self._keys)
        in_thought_too = (self._turns.thought_end or "", *self._form.opening.split()[:1])
        self._begun_in_thought = _beginnings(in_thought_too)
        self._longest = max(map(len, [*self._keys, *in_thought_too]))

    @property
    def turn(self) -> Turn:
        """The turn so far."""
        return Turn("".join(self._thought), "".join(self._content), list(self._calls))

    @property
    def is_in_thought(self) -> bool:
        """Whether the text ends inside a thought."""
        return self._in_thought

    def feed(self, text: str) -> list[TurnEvent]:
        """Return the events of the next piece of the text."""
        if not self._is_started and (self._buffer or text):
            self._is_started = True
            lead = self._turns.lead
            self._buffer = "" if text.startswith(lead) else lead
            self._n_cut = -len(self._buffer)
        self._buffer += text
        return self._read(last=False)

    def finish(self, *, is_cut: bool = False) -> list[TurnEvent]:
        """Return the events at the end of the text.

        Args:
            is_cut: whether the text was cut off before the model ended it. The beginning of a tag or a
                call at its end is then not content.
        """
        events: list[TurnEvent] = []
        if is_cut and self._is_begun_call(self._buffer):
            self._events = events
            self._take_back()
            self._buffer = self._space = ""
        events += self._read(last=True)
        if self._space and not self._calls and not self._trims:
            self._events = []
            self._tell("content", self._space)
            self._space = ""
            events += self._events
        return events

    def _read(self, *, last: bool) -> list[TurnEvent]:
        self._events = []
        with contextlib.suppress(Incomplete):
            while self._at < len(self._buffer) and self._noted_step(last):
                pass
        if self._at:
            self._n_cut += self._at
            self._buffer, self._at = self._buffer[self._at :], 0
            self._ruled_out.clear()
        return self._events

    def _noted_step(self, last: bool) -> bool:
        """Read something and note its span; return whether to continue."""
        start, n_calls = self._at, len(self._calls)
        was_thought, was_section = self._in_thought, self._in_section
        try:
            return self._step(last)
        finally:
            calls = tuple(self._calls[n_calls:])
            is_empty = not self._buffer[start : self._at].strip() and not self._in_thought
            if calls or (was_section and not is_empty):
                self._note("call", start, calls)
            elif (was_thought or self._in_thought) and not is_empty:
                self._note("thought", start)

    def _note(self, kind: str, start: int, calls: tuple[ToolCall, ...] = ()) -> None:
        start, end = max(0, self._n_cut + start), self._n_cut + self._at
        old = self.spans[-1] if self.spans else None
        if old is not None and (old.kind, old.end) == (kind, start) and not calls:
            start, calls = old.start, old.calls
            self.spans.pop()
        self.spans.append(TurnSpan(kind, start, end, calls))

    # -- events ------------------------------------------------------------------------------------

    def _tell(self, kind: str, text: str) -> None:
        if text:
            (self._thought if kind == "thought" else self._content).append(text)
            self._events.append(TurnEvent(kind, text))

    def _say(self, text: str) -> None:
        """Add text to the content; hold back white space at its end until more content comes."""
        text = self._space + text
        if self._trims:  # white space at the very beginning of the answer is kept
            text = text.lstrip()
        core = text.rstrip()
        self._space = text[len(core) :]
        if core:
            self._tell("content", core)
            self._trims = self._is_first = self._is_anew = False

    def _call(self, call: ToolCall, raw: str | None = None) -> None:
        index = len(self._calls)
        own = call.id or call_id(self._salt, index, call.name)
        self._calls.append(call._replace(id=own))
        text = raw if raw is not None else json.dumps(call.arguments, ensure_ascii=False)
        if self._n_sent is None:
            self._events.append(TurnEvent("name", call.name, index, own))
        if self._n_sent is None or text[self._n_sent :]:
            self._events.append(TurnEvent("arguments", text[self._n_sent or 0 :], index))
        self._n_sent, self._space, self._trims, self._is_first = None, "", True, False

    # -- steps -------------------------------------------------------------------------------------

    def _step(self, last: bool) -> bool:
        """Read the next thing; return whether to continue."""
        if self._is_over:
            self._at = len(self._buffer)
            return False
        if self._in_thought:
            return self._step_thought(last)
        if self._in_section:
            return self._step_section(last)
        match = self._pattern.search(self._buffer, self._at)
        end = len(self._buffer) - (0 if last else self._n_begun(self._begun))
        if match is None or end < match.start():
            self._say(self._buffer[self._at : end])
            self._at = end
            return False
        if match.start() > self._at:
            self._say(self._buffer[self._at : match.start()])
            self._at = match.start()
            return True
        start = self._at
        rest = self._buffer[start:]
        if not last and rest in self._begun:
            raise Incomplete
        for kind in sorted(self._keys[match[0]], key=lambda kind: kind.startswith("header")):
            try:
                if self._tag(kind, start, last):
                    return True
            except Mismatch:
                self._at = start
        self._take_back()
        self._say(self._buffer[start])
        self._at = start + 1
        return True

    def _take_back(self) -> None:
        if self._n_sent is not None:
            self._events.append(TurnEvent("cut", "", len(self._calls)))
            self._n_sent = None

    def _is_begun_call(self, rest: str) -> bool:
        """Return whether the rest of a text that was cut begins a tag or a call.

        JSON without a tag counts until the function's arguments begin.
        """
        if self._in_thought or not rest.strip():
            return False
        if self._in_section:
            return True
        kinds = {"call", "other call", "tagged", "thought", "content start", "preamble"}
        for word, found in self._keys.items():
            if kinds & set(found) and word[0] != "{" and rest.startswith(word[: len(rest)]):
                return True
        head = _LOOSE_HEAD.match(rest)
        if head is None or not self._reads_calls:
            return False
        written = "".join(rest[head.end() :].split())
        keys = (*_BARE_KEYS, *self._form.arguments_path[-1:])
        heads = ['"type":"function"', '"function":{', *(f'"{key}":{{' for key in keys)]
        for name in self._known.schemas or ():
            heads.append(f"{name}(")
            for key in {"name", *self._form.name_path[-1:]}:
                heads += (f'"{key}":"{name}","{other}":' for other in keys)
        return any("".join(each.split()).startswith(written) for each in heads)

    def _n_begun(self, beginnings: Collection[str]) -> int:
        """Return how many characters at the end of the buffer may be the beginning of a tag."""
        end = len(self._buffer)
        places = range(max(self._at, end - self._longest), end)
        return next((end - at for at in places if self._buffer[at:] in beginnings), 0)

    def _cursor(self, at: int, *, last: bool = False) -> Cursor:
        return Cursor(self._buffer, at, last=last, ruled_out=self._ruled_out)

    def _all_marks(self) -> dict[str, str]:
        """Return the texts that can end content by beginning another part, by kind of part."""
        turns, form = self._turns, self._form
        marks = {
            "call": form.opening,
            "other call": form.other.opening if form.other else "",
            "thought": (turns.thought_start or "") if turns.thought_end else "",
            "stray end": turns.thought_end or "",
            "content start": turns.lead + turns.content_start if turns.content_start else "",
            "preamble": self._preamble,
            "role": self._role[0],
            "content end": turns.content_end,
            "section end": form.section_end.strip() if len(form.section_end) > 4 else "",
            "turn end": turns.turn_end,
            "bare": "{" if self._known.schemas is not None or not form.opening.strip() else "",
        }
        if not self._reads_calls:
            marks = {kind: text for kind, text in marks.items() if kind not in _OF_CALLS}
        elif self._known.schemas is not None:
            marks |= {"fence": "```", "tagged": "<tool_call>", "python": "["}
        marks |= {f"header {i}": header for i, header in enumerate(turns.headers)}
        return {kind: text.lstrip() for kind, text in marks.items() if text.strip()}

    @property
    def _preamble(self) -> str:
        """How a text in the channel of calls begins; "" = the form has no such channel."""
        unit = self._form.other.unit if self._form.other else ()
        return f"{str(unit[0]).split()[0]}{unit[3]}" if unit else ""

    def _tag(self, kind: str, start: int, last: bool) -> bool:
        """Read a tag of a kind, or its beginning. Return False, or raise Mismatch, for other text."""
        cursor = self._cursor(start, last=last)
        if kind in ("call", "other call"):
            form = self._form.other if kind == "other call" else self._form
            if form is not None:
                cursor.literal(form.section_start)
                self._read_calls(cursor, form)
                self._in_section = True
            return form is not None
        if kind in ("bare", "fence", "tagged", "python"):
            self._read_calls(cursor, self._form, kind)
            return True
        is_possible = {
            "thought": self._is_first or self._is_anew,
            "stray end": self._is_first,  # it closes a thought that the prompt opened, or none
            "section end": bool(self._calls),  # text between the calls and this is content
        }
        if not is_possible.get(kind, True):
            return False
        mark = self._marks[kind]
        cursor.literal(mark.rstrip() if kind == "turn end" else mark)
        if kind == "role":  # another message begins; some templates repeat their form after calls
            if not self._calls or cursor.tries(self._role[1]):
                return False
            self._is_over = True
        elif kind.startswith("header"):  # of another message in this turn, or of the next turn
            role = self._turns.prompt_end.strip()
            # After a call, some templates repeat what calls look like.
            self._is_over = bool(
                self._calls and role and mark.strip() != role and not cursor.tries(role)
            )
            if not self._is_over:
                self._is_anew = self._trims = True
        elif kind == "turn end":
            cursor.space()
            rest = cursor.text[cursor.at :]
            if rest and not any(rest.startswith(h.strip()) for h in self._headers):
                if not last and any(h.strip().startswith(rest) for h in self._headers):
                    raise Incomplete
                return False
            if not rest and not last:
                raise Incomplete
        elif kind == "thought":
            self._in_thought, self._space = True, ""
        elif kind in ("stray end", "content start", "preamble"):
            self._trims, self._space = True, ""
        self._at = len(cursor.text) if self._is_over else cursor.at
        return True

    # -- thoughts ----------------------------------------------------------------------------------

    def _step_thought(self, last: bool) -> bool:
        start, end = self._turns.thought_start or "", self._turns.thought_end or ""
        buffer = self._buffer
        if not self._thought:  # at its beginning the tag may be repeated
            cursor = Cursor(buffer, self._at, last=last)
            cursor.space()
            self._at = at = cursor.at
            if self._is_first and start:
                rest = buffer[at:]
                if rest.startswith(start):
                    self._at, self._is_first = at + len(start), False
                    return True
                if start.startswith(rest) and not last:
                    raise Incomplete
            if self._is_first and self._form.opening.strip() and self._reads_calls:
                if Cursor(buffer, at, last=last).tries(self._form.opening.lstrip()):
                    self._in_thought = False  # a call instead of a thought
                    return True
            elif self._is_first and buffer[at : at + 1] == "{" and "{" in self._keys:
                with contextlib.suppress(Mismatch):
                    self._read_calls(Cursor(buffer, at, last=last), self._form, "bare")
                    self._in_thought = False
                    return True
        end_at = buffer.find(end, self._at)
        at_call = self._call_in(self._at, last) if end_at < 0 else -1
        if at_call >= 0:
            # Hold it back, because a call at the end of the text counts even if the thought never
            # ended.
            self._think(buffer[self._at : at_call].rstrip())
            self._at = at_call
            if last and self._ends_in_call(at_call):
                self._in_thought, self._trims = False, True
                return True
            if not last:
                raise Incomplete
        if end_at >= 0:
            self._think(buffer[self._at : end_at].rstrip())
            self._at, self._in_thought, self._space = end_at + len(end), False, ""
            self._trims, self._is_first = True, not self._thought and self._is_first
            return True
        n_held = 0 if last else self._n_begun(self._begun_in_thought)
        piece = buffer[self._at : len(buffer) - n_held]
        core = piece.rstrip()
        self._think(core)
        self._at += len(core) if not last else len(piece)
        return False

    def _call_in(self, at: int, last: bool) -> int:
        """Return where a call begins, or may begin, inside a thought; -1 = nowhere."""
        key = (self._form.opening.split() or [""])[0] if self._reads_calls else ""
        begin = self._buffer.find(key, at) if key else -1
        while begin >= 0:
            try:
                Cursor(self._buffer, begin, last=last).literal(self._form.opening.lstrip())
                return begin
            except Incomplete:
                return begin
            except Mismatch:
                begin = self._buffer.find(key, begin + 1)
        return -1

    def _ends_in_call(self, at: int) -> bool:
        """Return whether the rest of the text is only calls and their end."""
        form = replace(self._turns, thought_end=None, lead="")
        reader = TurnReader(form, self._tools, in_thought=False)
        reader.feed(self._buffer[at:])
        reader.finish()
        turn = reader.turn
        return bool(turn.calls) and not turn.content.strip()

    def _think(self, text: str) -> None:
        if text:
            if not self._thought:
                text = text.lstrip()
            self._tell("thought", text)
            self._is_first = False

    # -- calls -------------------------------------------------------------------------------------

    def _read_calls(self, cursor: Cursor, form: CallForm, kind: str = "") -> None:
        """Read calls in one of the template's forms, or in a form that models write on their own."""
        start = cursor.at
        try:
            calls = self._loose(kind, cursor) if kind else form.read_call(cursor, self._known)
        except Incomplete:
            if self._eager:
                self._tell_early(start, form)
            raise
        raw = self._raw_arguments(start, calls, form)
        self._at = cursor.at
        for call in calls:
            self._call(call, raw)

    def _raw_arguments(self, at: int, calls: Sequence[ToolCall], form: CallForm) -> str | None:
        """Return the text of the arguments in the form in which it was reported early."""
        if self._n_sent is None or len(calls) != 1 or form.tags is not None:
            return None
        try:
            _, _, begin = form.head(self._cursor(at), self._known)
            return self._buffer[begin : json_end(self._buffer, begin, last=True)[1]]
        except (Mismatch, Incomplete):
            return None

    def _tell_early(self, at: int, form: CallForm) -> None:
        """Report the name of an unfinished call, and its JSON arguments as far as they are certain."""
        try:
            name, own_id, begin = form.head(self._cursor(at), self._known)
        except (Mismatch, Incomplete):
            return
        if not self._known.takes(name):
            return
        sure = "" if form.tags is not None else self._buffer[begin:]
        if form.tags is None and not sure.lstrip().startswith("{"):
            return
        with contextlib.suppress(Mismatch):
            _, end = json_end(sure, 0, last=True)
            sure = sure[:end]
        index = len(self._calls)
        if self._n_sent is None:
            own = own_id or call_id(self._salt, index, name)
            self._events.append(TurnEvent("name", name, index, own))
            self._n_sent = 0
        if sure[self._n_sent :]:
            self._events.append(TurnEvent("arguments", sure[self._n_sent :], index))
            self._n_sent = len(sure)

    def _step_section(self, last: bool) -> bool:
        form, start = self._form, self._at
        cursor = self._cursor(start, last=last)
        end = form.section_end.lstrip()
        if end.strip() and cursor.tries(end, skip=True):
            self._at, self._in_section = cursor.at, False
            return True
        with contextlib.suppress(Mismatch):
            cursor.space()
            cursor.literal(form.separator.lstrip())
            if (form.separator + form.call_start + form.section_start).strip():
                self._read_calls(cursor, form)
                return True
        self._take_back()
        self._in_section = False
        rest = self._buffer[start:].strip()
        if last and rest and form.section_end.strip().startswith(rest):
            self._at = len(self._buffer)  # the text was cut inside a tag that ends the turn
        return True

    def _loose(self, kind: str, cursor: Cursor) -> list[ToolCall]:
        """Return calls that a model wrote in a form other than its template's."""
        start, close = cursor.at, _CLOSES.get(kind, "")
        if not close and not (self._is_first or self._trims or "\n" in self._space):
            raise Mismatch  # not at the beginning of a line
        if kind == "python":
            return self._python(cursor)
        if not close:
            calls = self._objects(cursor, one=True)
            after = cursor.text[cursor.at : cursor.at + 1]
            if not after and not cursor.last:
                raise Incomplete
            if not after.isspace() and after not in "<[;,{`":
                raise Mismatch
            return calls
        opening = _FENCE.match(self._buffer, start)
        cursor.at = opening.end() if opening else start + len(self._marks[kind])
        if opening and not cursor.last and self._buffer[start + 3 :].strip(" ").isalnum():
            raise Incomplete  # the name of a language
        calls = self._objects(cursor, one=False)
        cursor.space()
        if cursor.last and close.startswith(cursor.text[cursor.at :]):
            cursor.at = len(cursor.text)
        else:
            cursor.literal(close)
        return calls

    def _python(self, cursor: Cursor) -> list[ToolCall]:
        """Return calls in the form of Llama 4 and LFM2: ``[find(text="x"), ping()]``."""
        calls: list[ToolCall] = []
        cursor.literal("[")
        while not calls or cursor.tries(","):
            cursor.space()
            calls += _PYTHON.read_call(cursor, self._known)
            cursor.space()
        cursor.literal("]")
        return calls

    def _objects(self, cursor: Cursor, *, one: bool) -> list[ToolCall]:
        """Return the calls in the first or in all JSON objects; their braces may be doubled."""
        forms = [self._form, _BARE] if self._form.kind == "json" else [_BARE]
        calls: list[ToolCall] = []
        while not (one and calls):
            cursor.space()
            text, at = cursor.text, cursor.at
            if text[at : at + 1] not in ("{", "["):
                break
            doubled = re.match(r"\{\s*\{", text[at:])
            if doubled:
                cursor.at = at + doubled.end() - 1
            elif not text[at + 1 :].strip() and not cursor.last:
                raise Incomplete
            value = cursor.json()
            for item in value if isinstance(value, list) else [value]:
                calls.append(self._of(item, forms))
            if doubled:
                cursor.tries("}", skip=True)
        if not calls:
            raise Mismatch
        return calls

    def _of(self, value: object, forms: Sequence[CallForm]) -> ToolCall:
        if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
            value = value["function"]
        if self._known.schemas is None and isinstance(value, Mapping):
            keys = {self._form.name_path[:1], self._form.arguments_path[:1]}
            if self._form.name_path and not all(path[0] in value for path in keys if path):
                raise Mismatch
        for form in forms:
            if form.name_path or form is not self._form or self._known.schemas is not None:
                with contextlib.suppress(Mismatch):
                    return form.of_object(value, self._known)
        raise Mismatch
