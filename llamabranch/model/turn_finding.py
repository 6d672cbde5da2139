"""Find the form of a template's turns by comparing rendered answers that differ in one thing.

Templates are not recognised by name. We render an answer with and without a thought, with one call,
with two calls, and with other arguments. The form is the text around what we put in. All renderings
take two or three exchanges with the process that runs templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from ..errors import UnsupportedError
from .call_form import ArgumentTags, Around, CallForm, Mismatch, Part, Slot, Values, json_end
from .templates import ChatTemplate
from .text import n_common

_USER, _CONTENT, _THOUGHT = "Quz zuserz", "Canz zanswerz", "Thoz zmusingz"
_NAME, _OTHER = "zqfind", "zqseek"
_KEY, _KEY2, _VALUE, _VALUE2 = "kxone", "kxtwo", "Vztext", "Wzmore"
_IDS = ("zqid00001", "zqid00002")
_RAW = "Vz'a\"b\\c"
_NESTED = {"kxb": [17, "Vzs", True, {"kxd": 2.5}], "kxe": "Vzt"}
_OTHERS: dict[str, object] = {
    "number": 4711, "bool": True, "null": None, "object": _NESTED, "list": [7, "Vzs"],
}  # fmt: skip
_PAIRS = {"start", "begin", "open", "end", "close", "stop"}
_TAG_ENDS, _TAG_STARTS = ">]", "<["
_JOINT = re.compile(r"(?<=[>\]])\s*(?=[<\[])")


@dataclass(frozen=True)
class TurnParts:
    """The form of a template's turns.

    Attributes:
        thought_start, thought_end: the tags of a thought, without white space around them; None = the
            template has no thoughts.
        starts_in_thought: the generation prompt ends inside a thought.
        thinking: the template's variables that switch thoughts on or off, such as ``enable_thinking``.
        thought_off: the end of the generation prompt when thoughts are switched off.
        thought_open, thought_close: the texts around a thought, including white space.
        content_start, content_end: the texts around the content of an answer.
        turn_end: the text after an answer.
        header: the beginning of a turn, before thought, content or calls.
        prompt_end: the end of a prompt, if that is not the header.
        lead: the end of the header that is also the beginning of a call.
        calls: the form of calls; None = the template writes none, or none that we can read.
        takes_tools: the template writes tools into the prompt.
        arguments_as_text: it needs the arguments of earlier calls as OpenAI's JSON string.
        takes_thoughts: it handles the thoughts of earlier answers (it writes them or leaves them out),
            so they are passed separately from the content.
        short_ids: it refuses call ids that are not nine letters and digits.
        roles: the roles among "system", "developer" and "tool" that it writes.
        asks_after_results: it accepts a user message right after the result of a function.
        reason: why thoughts or calls were not found; "" if both were.
    """

    thought_start: str | None = None
    thought_end: str | None = None
    starts_in_thought: bool = False
    thinking: tuple[str, ...] = ()
    thought_off: str | None = None
    thought_open: str = ""
    thought_close: str = ""
    content_start: str = ""
    content_end: str = ""
    turn_end: str = ""
    header: str = ""
    prompt_end: str = ""
    lead: str = ""
    calls: CallForm | None = None
    takes_tools: bool = False
    arguments_as_text: bool = False
    takes_thoughts: bool = False
    short_ids: bool = False
    roles: frozenset[str] = frozenset()
    asks_after_results: bool = True
    reason: str = ""

    @property
    def headers(self) -> list[str]:
        """The texts that mark the beginning of a turn. A header may contain the end of a turn."""
        tails = (self.header[joint.end() :] for joint in _JOINT.finditer(self.header))
        return [h for h in (self.prompt_end, self.header, *tails) if len(h.strip()) > 4]


def _call(name: str, arguments: object, call_id: str) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(name: str) -> dict[str, object]:
    any_of: dict[str, object] = {"type": "string", "description": "a value"}
    properties = dict.fromkeys((_KEY, _KEY2), any_of)
    return {
        "type": "function",
        "function": {
            "name": name, "description": "does something",
            "parameters": {"type": "object", "properties": properties, "required": [_KEY]},
        },
    }  # fmt: skip


_TOOLS = [_tool(_NAME), _tool(_OTHER)]
_ASKED: list[dict[str, object]] = [{"role": "user", "content": _USER}]
_FINE = {"role": "assistant", "content": "Fine"}
_THOUGHTS = dict.fromkeys(("reasoning_content", "thinking", "reasoning", "thought"), _THOUGHT)
_BLOCKS: tuple[object, ...] = (  # other forms of a thought in a message
    {"blocks": [{"type": "thoughts", "text": _THOUGHT}, {"type": "response", "text": _CONTENT}]},
    [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _CONTENT}],
    [
        {"type": "thinking", "thinking": [{"type": "text", "text": _THOUGHT}]},
        {"type": "text", "text": _CONTENT},
    ],
)
_SINGLE: dict[str, dict[str, object]] = {
    "none": {}, "one": {_KEY: _VALUE}, "two": {_KEY: _VALUE, _KEY2: _VALUE2}, "raw": {_KEY: _RAW},
    **{kind: {_KEY: value} for kind, value in _OTHERS.items()},
}  # fmt: skip


def _answers(as_text: bool, tools: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Return the template's variables for answers with calls, by purpose."""

    def called(*calls: tuple[str, object], **more: object) -> list[dict[str, object]]:
        written = [
            _call(name, json.dumps(a, ensure_ascii=False) if as_text else a, call_id)
            for (name, a), call_id in zip(calls, _IDS, strict=False)
        ]
        return [*_ASKED, {"role": "assistant", "content": "", "tool_calls": written, **more}]

    answers = {kind: called((_NAME, arguments)) for kind, arguments in _SINGLE.items()}
    answers["pair"] = called((_NAME, _SINGLE["one"]), (_OTHER, _SINGLE["one"]))
    answers["thought"] = called((_NAME, _SINGLE["one"]), **_THOUGHTS)
    answers["long"] = json.loads(json.dumps(answers["one"]).replace(_IDS[0], f"call_{_IDS[0]}x24"))
    result = {"role": "tool", "content": "Rez zresult", "tool_call_id": _IDS[0], "name": _NAME}
    answers["tool"] = [*answers["one"], {**result}]
    answers["tool, user"] = [*answers["tool"], *_ASKED]
    return {kind: {"messages": messages, **tools} for kind, messages in answers.items()}


class _Renderings:
    """A template's renderings, by purpose."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.texts: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.names: list[str] = []

    def add(self, probes: Mapping[str, Mapping[str, object]]) -> None:
        """Render these variables and keep the results instead of earlier ones."""
        names, replies = self.template.render_many(list(probes.values()))
        self.names = names
        for key, reply in zip(probes, replies, strict=True):
            self.texts.pop(key, None)
            self.faults.pop(key, None)
            if "text" in reply:
                self.texts[key] = reply["text"]
            else:
                self.faults[key] = next(iter(reply.values()), "it failed")

    def tail(self, key: str) -> str | None:
        """Return the text of a rendering after the user's message."""
        text = self.texts.get(key)
        if text is None or _USER not in text:
            return None
        return text[text.rindex(_USER) + len(_USER) :]


def find_parts(template: ChatTemplate) -> TurnParts:
    """Return the form of a template's turns, as far as we can find it.

    Raises:
        UnsupportedError: the template is not valid Jinja, or took too much time or memory.
    """
    tools = {"tools": _TOOLS, "functions": json.dumps([t["function"] for t in _TOOLS])}
    answer = {"role": "assistant", "content": _CONTENT}
    prompt = {"messages": _ASKED, "add_generation_prompt": True}
    probes: dict[str, Mapping[str, object]] = {
        "prompt": prompt,
        "tools prompt": {**prompt, **tools},
        "answer": {"messages": [*_ASKED, answer]},
        "thoughtful": {"messages": [*_ASKED, {**answer, **_THOUGHTS}]},
        "system": {**prompt, "messages": [{"role": "system", "content": "Syz zrole"}, *_ASKED]},
        "developer": {
            **prompt,
            "messages": [{"role": "developer", "content": "Dez zrole"}, *_ASKED],
        },
    }
    probes |= _answers(False, tools)
    for _ in range(5):
        seen = _Renderings(template)
        seen.add(probes)
        lacks = re.search(r"'(\w+)' is undefined", next(iter(seen.faults.values()), ""))
        if seen.texts or lacks is None:
            break
        # It needs a variable that no other template has.
        template = template.with_variables({lacks[1]: ""})
    if not seen.texts:
        raise UnsupportedError(f"the template renders nothing: {seen.faults['prompt']}")
    as_text = _needs_text(seen, tools)
    switches = tuple(n for n in seen.names if re.search(r"think|reason", n) and "effort" not in n)
    more: dict[str, Mapping[str, object]] = {
        f"{name} {state}": {**prompt, name: state} for name in switches for state in (True, False)
    }
    for state in (True, False) if switches else ():
        values = dict.fromkeys(switches, state)
        more[f"prompt {state}"] = {**prompt, **values}
        more[f"thoughtful {state}"] = {"messages": [*_ASKED, {**answer, **_THOUGHTS}], **values}
    for i, blocks in enumerate(_BLOCKS):
        more[f"blocks {i}"] = {"messages": [*_ASKED, {"role": "assistant", "content": blocks}]}
    for i, literal in enumerate(_closers(template)):
        content = f"{_THOUGHT}{literal}{_CONTENT}"
        earlier = {**answer, "content": content}
        more[f"split {i}"] = {"messages": [*_ASKED, earlier, *_ASKED, _FINE, *_ASKED]}
    seen.add(more)
    return _Finder(seen, switches, as_text=as_text).found()


def _needs_text(seen: _Renderings, tools: Mapping[str, object]) -> bool:
    """Return whether arguments must be passed as text; the answers are then rendered that way.

    This is so if objects fail, or are not written as JSON.
    """

    def is_called(text: str | None) -> bool:
        return text is not None and (_NAME in text or _IDS[0] in text)

    single = seen.tail("one")
    is_python = "{'" in (single or "")  # Python's text of a dict
    if is_called(single) and not is_python:
        return False
    before = seen.texts.copy(), seen.faults.copy()
    seen.add(_answers(True, tools))
    text = seen.tail("one")
    if text is None or ("{'" in text if is_called(single) else not is_called(text)):
        seen.texts, seen.faults = before
        return False
    return True


def _closers(template: ChatTemplate) -> list[str]:
    """Return the texts in a template's source that could close a thought inside the content."""
    fits = {s.strip() for s in template.strings if 2 < len(s.strip()) < 40 and "/" in s}
    return sorted(s for s in fits if s[0] in _TAG_STARTS and s[-1] in _TAG_ENDS)[:24]


class _Finder:
    def __init__(self, seen: _Renderings, switches: tuple[str, ...], *, as_text: bool) -> None:
        self._seen, self._switches, self._as_text = seen, switches, as_text
        self._reasons: list[str] = []
        self._prompt_end = ""  # set if a prompt does not end with the header

    def found(self) -> TurnParts:
        seen = self._seen
        if seen.tail("prompt") is None:
            why = seen.faults.get("prompt") or "it does not write the user's message"
            self._reasons.append(f"the template does not render a question: {why}")
        self._header = self._find_header()
        parts = self._with_thoughts(TurnParts(header=self._header))
        parts = self._with_content(parts)
        parts = self._with_calls(parts)
        needles = {"system": "Syz zrole", "developer": "Dez zrole", "tool": "Rez zresult"}
        roles = (role for role, text in needles.items() if text in seen.texts.get(role, ""))
        return replace(
            parts,
            takes_tools=_NAME in seen.texts.get("tools prompt", ""),
            arguments_as_text=self._as_text,
            takes_thoughts=self._takes_thoughts(parts),
            short_ids="long" in seen.faults and "one" in seen.texts,
            roles=frozenset(roles),
            asks_after_results="tool, user" not in seen.faults or "tool" in seen.faults,
            reason="; ".join(self._reasons),
        )

    def _takes_thoughts(self, parts: TurnParts) -> bool:
        """Return whether the template moves or drops a thought in an answer's content."""
        names, end = {"reasoning_content", "thinking", "reasoning"}, parts.thought_end
        return end is not None and (
            any(end in text or text in names for text in self._seen.template.strings)
            or any(_THOUGHT in self._seen.texts.get(f"thoughtful{s}", "") for s in ("", " True"))
        )

    # -- header, ends ------------------------------------------------------------------------------

    def _find_header(self) -> str:
        """Return the common beginning of all turns, after the user's text."""
        keys = ["prompt", "answer", "thoughtful", "prompt True", "prompt False"]
        keys += ["one", "thought", "thoughtful True"]
        header = self._common(keys)
        if not header.strip():  # a switch may be written into the user's message
            header = self._common(keys[:4])
        header = _whole_tags(header)
        rests = self._after(header).values()
        if any(rest[:1].isalnum() for rest in rests) and len(set(rests)) > 1:
            joints = [match.end() for match in _JOINT.finditer(header)]
            header = header[: joints[-1]] if joints else header
        return header

    def _common(self, keys: Sequence[str]) -> str:
        """Return the text that all renderings begin with after the user's message."""
        tails = [tail for key in keys if (tail := self._seen.tail(key)) is not None] or [""]
        first, last = min(tails), max(tails)
        return first[: n_common(first, last)]

    def _after(self, header: str) -> dict[str, str]:
        """Return the text of generation prompts after the header, by purpose."""
        tails = {key: self._seen.tail(key) for key in ("prompt", "prompt True", "prompt False")}
        return {
            key: tail[tail.find(header) + len(header) :]
            for key, tail in tails.items()
            if tail is not None and header in tail
        }

    def _strip_end(self, text: str, end: str) -> str:
        """Return the content of a turn without its end."""
        prompt = self._seen.tail("prompt") or ""
        while True:
            before = text
            for ending in (prompt, end, end.strip(), self._header, self._header.strip()):
                if ending.strip() and text.rstrip().endswith(ending.strip()):
                    text = text.rstrip()[: -len(ending.strip())]
            if text == before:
                return text

    # -- thoughts ----------------------------------------------------------------------------------

    def _with_thoughts(self, parts: TurnParts) -> TurnParts:
        seen, header = self._seen, self._header
        rests = self._after(header)
        tags: tuple[str, str] | None = None
        opening = closing = ""
        keys = ["thoughtful", "thoughtful True", "thought"]
        keys += [f"blocks {i}" for i in range(len(_BLOCKS))]
        for key in keys:
            tail = seen.tail(key)
            if tail is None or _THOUGHT not in tail or not tail.startswith(header):
                continue
            if key.startswith("blocks") and re.search(rf"['\"]\s*:\s*['\"]{_THOUGHT}", tail):
                continue  # the template writes a block of an unknown kind as Python text
            opening, _, rest = tail[len(header) :].partition(_THOUGHT)
            rest = re.split(f"{_CONTENT}|{_NAME}|{_IDS[0]}", rest, maxsplit=1)[0]
            joint = _JOINT.search(rest)
            closing = rest[: joint.end()] if joint else rest
            if not opening.strip():
                opening = next((r for r in rests.values() if r.strip()), opening)
            if closing.strip():
                tags = opening.strip(), closing.strip()
                break
        tags = tags or self._from_prompts(rests) or self._from_content(rests) or self._from_words()
        if tags is None:
            return parts
        start, end = tags
        tag = re.search(r"[<\[][^<\[\s]*[>\]]$", header.rstrip())
        last = tag[0] if tag else ""
        if last and last != end and _words(last) == _words(end) != set() and "/" not in last:
            # All renderings begin a thought, so its tag is not part of the header.
            cut = header.rindex(last)
            rests = {key: header[cut:] + rest for key, rest in rests.items()}
            start, opening, self._header = last, header[cut:] + opening, header[:cut]
            parts = replace(parts, header=self._header)
        is_inside = _is_open(rests.get("prompt", ""), start, end)
        off = rests.get("prompt False")
        plain = seen.texts.get("prompt")
        thinking = tuple(
            name
            for name in self._switches
            if any(seen.texts.get(f"{name} {state}", plain) != plain for state in (True, False))
        )
        if rests.get("prompt True") == off or off is None or _is_open(off, start, end):
            off = None
        return replace(
            parts, thought_start=start, thought_end=end, starts_in_thought=is_inside,
            thinking=thinking, thought_off=off, thought_open=opening or start,
            thought_close=closing or end,
        )  # fmt: skip

    def _from_prompts(self, rests: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the tags from two generation prompts that end inside and after a thought."""
        texts = sorted({rest.strip() for rest in rests.values()} - {""}, key=len)
        for text in texts:
            pieces = [piece.strip() for piece in _JOINT.split(text)]
            if len(pieces) == 2 and _words(pieces[0]) == _words(pieces[1]) != set():
                return pieces[0], pieces[1]
        return None

    def _from_content(self, rests: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the tags of a thought that the template removes from an answer's content."""
        for i, end in enumerate(_closers(self._seen.template)):
            text = self._seen.texts.get(f"split {i}", "")
            if _CONTENT in text and (_THOUGHT not in text or end not in text):
                return end.replace("/", "", 1), end
        for rest in rests.values():
            start = rest.strip()
            if re.fullmatch(r"<\w[\w:.-]*>", start):  # such an opened thought is closed like this
                return start, f"</{start[1:]}"
        if any("/" in rest for rest in rests.values()):
            self._reasons.append("the generation prompt closes a thought that nothing opens")
        return None

    def _from_words(self) -> tuple[str, str] | None:
        """Return the tags that the system message names when thoughts are switched on."""
        on, off = (self._seen.texts.get(f"prompt {state}", "") for state in (True, False))
        n = n_common(on, off)
        match = re.search(r"(<[\w:|]+>)\s*(</[\w:|]+>)", on[n:])
        if match and "</" not in off[n : n + 200] and _words(match[1]) == _words(match[2]):
            return match[1], match[2]
        return None

    # -- content -----------------------------------------------------------------------------------

    def _with_content(self, parts: TurnParts) -> TurnParts:
        """Add the texts around the content of an answer, and after the answer."""
        before, found, end = (self._seen.tail("answer") or "").partition(_CONTENT)
        if not found:
            return parts
        prompt = self._seen.tail("prompt") or ""
        if prompt.strip() and end.endswith(prompt):  # it always ends with a generation prompt
            end = end[: -len(prompt)]
        start = before[len(self._header) :] if before.startswith(self._header) else ""
        if start.strip() and prompt.rstrip().endswith(start.strip()):
            return replace(parts, turn_end=_JOINT.split(end)[0])
        if parts.thought_end and parts.thought_end in start:
            start = start[start.rindex(parts.thought_end) + len(parts.thought_end) :]
        if not start.strip():
            return replace(parts, turn_end=end)
        content_end, *rest = _JOINT.split(end, maxsplit=1)
        return replace(parts, content_start=start, content_end=content_end, turn_end="".join(rest))

    # -- calls -------------------------------------------------------------------------------------

    def _with_calls(self, parts: TurnParts) -> TurnParts:
        bodies = {key: self._body(key, parts) for key in (*_SINGLE, "pair")}
        if bodies["one"] is None:
            why = self._seen.faults.get("one")
            self._reasons.append(
                f"the template refuses calls: {why}" if why else "the template writes no calls"
            )
            return parts
        lead = ""
        if bodies["one"].startswith(_NAME):
            lead = re.split(r"\s", self._header)[-1]
            bodies = {key: body and lead + body for key, body in bodies.items()}
        try:
            form = _form(bodies)
        except Mismatch:
            self._reasons.append("the form in which the template writes calls is not understood")
            return parts
        return replace(parts, calls=form, lead=lead, prompt_end=self._prompt_end)

    def _body(self, key: str, parts: TurnParts) -> str | None:
        """Return the calls of a rendering without the header and the end of the turn."""
        tail = self._seen.tail(key)
        if tail is None or not (_NAME in tail or _IDS[0] in tail):
            return None
        if tail.startswith(self._header):
            tail = tail[len(self._header) :]
        body = self._strip_end(tail, parts.turn_end or parts.content_end)
        ends = [body.rfind(word) for word in (_NAME, _OTHER, _VALUE, _VALUE2, *_IDS)]
        rest = body[max(ends) :]
        if len(rest) > 200:  # the text there is about the next turn
            tags = re.findall(r"<[^<>\s]+>", self._header)
            cuts = [at for tag in tags if (at := rest.find(tag)) >= 0]
            body = body[: max(ends) + min(cuts)] if cuts else body
        first = min(i for word in (_NAME, _IDS[0]) if (i := body.find(word)) >= 0)
        skip = 0
        if parts.thought_end and (at := body.rfind(parts.thought_end, 0, first)) >= 0:
            skip = at + len(parts.thought_end)
        if parts.content_start.strip():
            empty = (parts.content_start + parts.content_end).strip()
            at = body.find(empty, skip, first)
            if empty and at >= 0:
                skip = at + len(empty)
        body = body[skip:]
        body = body.lstrip() if skip else body
        prompt = (self._seen.tail("prompt") or "").rstrip()
        tags = [match.end() for match in _JOINT.finditer(prompt)]
        lead = next((prompt[at:] for at in tags if body.startswith(prompt[at:])), "")
        self._prompt_end = lead or self._prompt_end
        return body[len(lead) :]


def _form(bodies: Mapping[str, str | None]) -> CallForm:
    """Return the form of calls in the renderings."""
    single = bodies["one"] or ""
    pair = bodies.get("pair")
    if pair is not None and not (_OTHER in pair and pair.count(_VALUE) >= 2):
        pair = None  # the template left out the second call
    form = _json_form(single, pair)
    if form is None:
        form = _tag_form(single, pair, bodies)
        if not form.opening.strip():
            raise Mismatch  # there is no way to tell a call from text
    is_apart = form.opening.strip() or pair is not None
    separator = form.separator or ("" if is_apart else "\n")
    form = replace(form, several=pair is not None, separator=separator)
    return replace(form, other=_named_later(form))


def _named_later(form: CallForm) -> CallForm | None:
    """Return the form of calls whose header names the function after the channel instead of before it.

    A template with channels may write ``to=f<|channel|>tools json<|message|>``; the model writes
    ``<|channel|>tools to=f <|constrain|>json<|message|>``.
    """
    if form.kind != "tag" or len(form.unit) < 4 or form.unit[1] is not Slot.NAME:
        return None
    before, _, header, *rest = form.unit
    match = re.fullmatch(r"(<[^<>]+>\w+)[\s\w]*(<[^<>]+>)", str(header))
    if match is None or not re.fullmatch(r"\s*\w+=[\w.]*", str(before)):
        return None
    unit = (f"{match[1]} {str(before).strip()}", Slot.NAME, Slot.WORDS, match[2], *rest)
    return replace(form, unit=unit)


# -- JSON objects with name and arguments ----------------------------------------------------------


def _json_form(single: str, pair: str | None) -> CallForm | None:
    call_object = _object_of(single, _NAME)
    if call_object is None:
        return None
    start, end, value, in_list = call_object
    name_path = _path_to(value, lambda v: v == _NAME)
    arguments_path = _path_to(value, lambda v: v == {_KEY: _VALUE})
    is_text = arguments_path is None
    if is_text:
        arguments_path = _path_to(value, lambda v: isinstance(v, str) and _KEY in v)
    written = _arguments_in(single[start:end], as_text=is_text)
    if arguments_path is None or written is None:
        return None
    if name_path is None:
        name_path, arguments_path = (), ()
    inner, values = written
    second = None if pair is None else (_object_of(pair, _NAME), _object_of(pair, _OTHER))
    spans = [place[:2] for place in second or () if place is not None]
    form = _surrounded(inner, single, (start, end), pair or "", spans, in_list=in_list)
    id_path = _path_to(value, lambda v: v == _IDS[0])
    if Slot.INDEX in form.unit:
        id_path = _path_to(value, lambda v: str(v) == str(form.index_from))
    return replace(
        form, name_path=name_path, arguments_path=arguments_path, id_path=id_path, values=values,
        arguments_as_text=is_text,
    )  # fmt: skip


def _object_of(text: str, name: str) -> tuple[int, int, object, bool] | None:
    """Return the outermost JSON object with a call of ``name``: place, value, whether in a list."""
    for match in re.finditer(r"\{", text):
        with suppress(Mismatch):
            value, end = json_end(text, match.start(), last=True)
            if name in text[match.start() : end]:
                return match.start(), end, value, text[: match.start()].rstrip()[-1:] == "["
    return None


def _path_to(value: object, fits: Callable[[object], bool]) -> tuple[str, ...] | None:
    """Return the keys that lead to the first value that fits in an object, or None."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        path = () if fits(inner) else _path_to(inner, fits)
        if path is not None:
            return (key, *path)
    return None


def _arguments_in(text: str, *, as_text: bool) -> tuple[str, Values] | None:
    """Return the text that writes the arguments of our trial call."""
    quote, outer = (r"\\\"", '"') if as_text else ('"', "")
    pattern = rf"{outer}\{{\s*{quote}{_KEY}{quote}(\s*:\s*){quote}{_VALUE}{quote}\s*\}}{outer}"
    match = re.search(pattern, text)
    if match is None:
        return None
    return match[0], Values(item=",", pair=":") if match[1] == ":" else Values()


def _split(text: str, inner: str, needles: Mapping[str, Slot]) -> tuple[Part, ...]:
    """Return the parts of a call: literals, and slots for the texts that we put in."""
    slots = {inner: Slot.ARGUMENTS, **needles} if inner else dict(needles)
    pattern = "|".join(map(re.escape, sorted(slots, key=len, reverse=True)))
    parts: list[Part] = []
    at = 0
    for match in re.finditer(pattern, text):
        if match.start() > at:
            parts.append(text[at : match.start()])
        parts.append(slots[match[0]])
        at = match.end()
    if at < len(text):
        parts.append(text[at:])
    return tuple(parts)


def _surrounded(
    inner: str,
    single: str,
    span: tuple[int, int],
    pair: str,
    spans: Sequence[tuple[int, int]],
    *,
    in_list: bool | None = None,
) -> CallForm:
    """Return the form of calls, with the texts around the whole list and around each call.

    Args:
        inner: the text of the arguments.
        single, span: a rendering of one call, and its place.
        pair, spans: a rendering of two calls, and their places; without places, they were not rendered.
        in_list: whether the calls are items of a JSON list; None = they are not JSON objects.
    """
    head, core, tail = single[: span[0]], single[slice(*span)], single[span[1] :]
    parts = _split(core, inner, {_NAME: Slot.NAME, _IDS[0]: Slot.ID})
    first_index = 0
    section_start, call_start, call_end, separator, section_end = "", head, tail, "", ""
    if len(spans) == 2:
        (_, first_end), second = spans
        section_start, call_start, call_end, separator, section_end = _shared(
            head, pair[first_end : second[0]], pair[second[1] :], bool(in_list)
        )
        others = _split(pair[slice(*second)], inner, {_OTHER: Slot.NAME, _IDS[1]: Slot.ID})
        parts, first_index = _numbered(parts, others)
    elif in_list:
        section_start, call_start, call_end, section_end = head, "", "", tail
    unit: list[Part] = [call_start, *parts, call_end]
    at = 0 if in_list is None or not call_start else 1
    return CallForm(
        tuple(filter(None, unit)), object_at=at, object_end=0 if in_list is None else at + len(parts),
        section_start=section_start, section_end=section_end, separator=separator,
        index_from=first_index,
    )  # fmt: skip


def _numbered(parts: tuple[Part, ...], others: tuple[Part, ...]) -> tuple[tuple[Part, ...], int]:
    """Return a call's parts, with a slot for its number if it has one, and the first number.

    Args:
        parts, others: the parts of the first and of the second call.
    """
    for i, (part, other) in enumerate(zip(parts, others, strict=False)):
        if not isinstance(part, str):
            continue
        for match in re.finditer(r"\d+", part):
            before, after = part[: match.start()], part[match.end() :]
            if other == f"{before}{int(match[0]) + 1}{after}":
                pieces: list[Part] = [piece for piece in (before, Slot.INDEX, after) if piece]
                return (*parts[:i], *pieces, *parts[i + 1 :]), int(match[0])
    return parts, 0


def _shared(head: str, middle: str, tail: str, in_list: bool) -> tuple[str, str, str, str, str]:
    """Work out the texts around all calls and around each call from the text between two calls.

    Returns:
        section_start, call_start, call_end, separator, section_end.
    """
    if in_list:
        return head, "", "", middle, tail
    n_start = n_common(head[::-1], middle[::-1])
    before = head[: len(head) - n_start]
    is_cut = before.rfind("<") > before.rfind(">")
    if is_cut and ">" in head[len(before) :]:
        n_start -= head[len(before) :].index(">") + 1
    start = head[len(head) - n_start :]
    left = middle[: len(middle) - n_start]
    n_end = len(_whole_tags(tail[: n_common(tail, left)]))
    return head[: len(head) - n_start], start, tail[:n_end], left[n_end:], tail[n_end:]


# -- a tag with the name, then arguments -----------------------------------------------------------


def _tag_form(single: str, pair: str | None, bodies: Mapping[str, str | None]) -> CallForm:
    written = _arguments_in(single, as_text=False)
    tags, values = None, Values()
    if written is not None:
        inner, values = written
    else:
        tags, inner = _tags_of(bodies, single)
    first, second = (_NAME, _IDS[0], inner), (_OTHER, _IDS[1], inner)
    span = _span(single, first)
    spans: list[tuple[int, int]] = []
    if pair is not None:
        at = min(i for word in second[:2] if (i := pair.find(word)) >= 0)
        spans = [_span(pair[:at], first), (at, _span(pair, second)[1])]
    form = _surrounded(inner, single, span, pair or "", spans)
    # If only the id is written, the template expects the id to contain the name.
    name_in_id = None if _NAME in single else ("functions.", ":")
    return replace(form, tags=tags, values=values, name_in_id=name_in_id)


def _span(text: str, words: Iterable[str]) -> tuple[int, int]:
    """Return the place from the first to the last of these words."""
    starts = [i for word in words if (i := text.find(word)) >= 0]
    ends = [i + len(word) for word in words if (i := text.rfind(word)) >= 0]
    if not starts:
        raise Mismatch
    return min(starts), max(ends)


def _tags_of(bodies: Mapping[str, str | None], single: str) -> tuple[ArgumentTags, str]:
    """Return the form of arguments that are not a JSON object, and the text of our trial call's."""
    none, two = bodies.get("none"), bodies.get("two")
    if none is None or two is None:
        raise Mismatch
    rest = single[len(_whole_tags(single[: n_common(single, none)])) :]
    rest_of_none = none[len(single) - len(rest) :]
    inner = rest[: len(rest) - n_common(rest[::-1], rest_of_none[::-1])]
    first, at_value = inner.find(_KEY), inner.find(_VALUE)
    if not 0 <= first < at_value:
        raise Mismatch
    between = inner[first + len(_KEY) : at_value]
    after = inner[inner.rfind(_VALUE) + len(_VALUE) :]
    at = two.find(_VALUE) + len(_VALUE)
    middle = two[at : two.rfind(_KEY2) if two.count(_KEY2) == 1 else two.find(_KEY2)]
    start, before, after_each, separator, end = _shared(
        inner[:first], middle.replace(_KEY, "\0"), after.replace(_KEY, "\0"), in_list=False
    )
    text = Around(before, between, _split(after_each, "", {"\0": Slot.NAME}))
    is_raw = f"{between}{_RAW}" in (bodies.get("raw") or "")
    prefix = single[: single.find(inner)] + start
    suffix = end + single[single.find(inner) + len(inner) :]
    texts = {
        kind: body[len(prefix) : len(body) - len(suffix)]
        for kind in _OTHERS
        if (body := bodies.get(kind)) and body.startswith(prefix) and body.endswith(suffix)
    }
    values = _values_of(texts, between)
    arounds = {kind: _around(body, values.write(_OTHERS[kind])) for kind, body in texts.items()}
    others = {"number": text, **{kind: around for kind, around in arounds.items() if around}}
    tags = ArgumentTags(text if is_raw else None, others, separator, values, start, end)
    return tags, inner


def _around(whole: str, written: str) -> Around | None:
    key_at = whole.find(_KEY)
    at = whole.rfind(written, key_at + len(_KEY))
    if key_at < 0 or at < 0 or not written:
        return None
    after = _split(whole[at + len(written) :], "", {_KEY: Slot.NAME})
    return Around(whole[:key_at], whole[key_at + len(_KEY) : at], after)


def _values_of(texts: Mapping[str, str], between: str) -> Values:
    """Return the form of values other than text."""
    lists, objects = texts.get("list", ""), texts.get("object", "")
    quotes = ["", "'"]
    match = re.search(r"7(,\s*)(\S*?)Vzs", lists)
    if match:
        quotes.append(match[2])
    words = ("true", "false", "null")
    if "True" in texts.get("bool", ""):
        words = ("True", "False", "None")
    elif "None" in texts.get("null", ""):
        words = ("true", "false", "None")
    for item, pair, bare, quote in product((", ", ","), (": ", ":"), (False, True), quotes):
        values = Values("" if quote == '"' else quote, item, pair, bare, words)
        if values.write(_OTHERS["object"]) in objects:
            return values
    inner = objects[objects.find(_KEY) + len(_KEY) + len(between) :]
    pieces = re.split("kxb|kxe|Vzt", inner)
    if inner.count("kxb") == inner.count("kxe") == 2 and len(pieces) == 6:
        a, between_tags = pieces[0], pieces[2]  # <a>kxb<b>...<c>kxb<d><a>kxe<b>Vzt<c>kxe<d>
        if a and between_tags.endswith(a):
            return Values(words=words, tags=(a, pieces[3], pieces[4], between_tags[: -len(a)]))
    return Values(words=words)


# -- texts -----------------------------------------------------------------------------------------


def _whole_tags(text: str) -> str:
    """Return a text without an incomplete tag at its end."""
    at = text.rfind("<")
    return text[:at] if at >= 0 and text.find(">", at) < 0 else text


def _words(tag: str) -> set[str]:
    return set(re.findall(r"[a-z]+", tag.lower())) - _PAIRS


def _is_open(text: str, start: str, end: str) -> bool:
    """Return whether a text ends inside a thought."""
    return bool(start) and start in text and text.rfind(end) < text.rfind(start)
