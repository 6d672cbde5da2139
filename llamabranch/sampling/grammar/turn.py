"""The grammar of a turn that may call functions: free text, and calls that are valid once they begin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache

from ...errors import GrammarError, GrammarWarning, UnsupportedError, warn
from ...model import Model
from ...model.call_form import (
    ArgumentTags,
    Around,
    CallForm,
    Slot,
    Values,
    is_text_schema,
    properties_of,
)
from ...model.shape import pointed
from ...model.tools import Tools
from . import schema as json_schemas
from .gbnf import ranges
from .grammar import Grammar
from .patterns import exactly

_MOST_LOOSE = 64  # with more functions, the grammar covers only calls in the template's form


def turn_grammar(model: Model, tools: Tools, content: Grammar | None = None) -> Grammar:
    """Return the grammar of an answer by ``model`` that may or must call tools.

    Text and control tokens that do not begin a call are free. Once a call has begun, it must name a
    known function and have arguments that follow its schema, in the form of the model's template. This
    also holds for calls as bare or fenced JSON, which models write whatever their template says. After
    a call there may only be calls, or the end. If a tool is forced, the answer begins with a call. If
    the model cannot write the template's form, because one of its tags would end the text, a forced
    call is bare JSON.

    Args:
        model: the model whose control tokens the form may name.
        tools: the tools of the request, with their ``turns``.
        content: the grammar of an answer without a call; None = free text.

    If the schema of a tool is refused, its arguments may be any JSON object. A `GrammarWarning`
    says so, and ``tools.unchecked`` has the reason.

    Raises:
        UnsupportedError: ``content`` cannot be combined with calls; the message says why.
        GrammarError: the schema of a tool with ``strict: true`` is refused; the message names the tool.
    """
    with suppress(GrammarError):
        return _of(model, tools, content)
    for name, schema in tools.schemas.items():
        reason = _refusal(name, schema)
        if reason is None:
            continue
        if name in tools.strict:
            raise reason
        tools.unchecked[name] = reason.message
        warn(f"any JSON object is allowed as arguments: {reason.message}", GrammarWarning)
    for name in tools.unchecked:
        is_tagged = tools.turns.form.tags is not None
        tools.schemas[name] = _freed(tools.schemas[name]) if is_tagged else {"type": "object"}
    return _of(model, tools, content)


def _of(model: Model, tools: Tools, content: Grammar | None) -> Grammar:
    try:
        lark = _Writer(model, tools, tools.turns.form).written(content)
    except UnsupportedError:
        if not tools.forced:
            raise
        lark = _Writer(model, tools, type(tools.turns)().form).written()
    return _compiled(lark)


_compiled = lru_cache(maxsize=64)(Grammar.from_lark)  # a conversation needs one at every turn


def _refusal(name: str, schema: object) -> GrammarError | None:
    """Return why the schema of a tool is refused; None if it is not."""
    try:
        _compiled_schema(_source(schema))
    except RecursionError:
        return GrammarError(f"the parameters of {name}: nested too deep")
    except GrammarError as error:
        return GrammarError(f"the parameters of {name}: {error.message}", hint=error.hint)
    return None


def _source(schema: object) -> str:
    """Return a tool's schema as text. For a Python function that takes a set, items may be repeated."""
    source = dict(schema) if isinstance(schema, Mapping) else {}
    return json.dumps(json_schemas.without_unique(source), ensure_ascii=False)


_compiled_schema = lru_cache(maxsize=64)(Grammar.from_json_schema)


def _freed(schema: object) -> dict[str, object]:
    """Return a schema for an object with any values, in forms that write properties in tags."""
    kinds = {
        key: str(inner.get("type")) if isinstance(inner, Mapping) else ""
        for key, inner in properties_of(schema).items()
    }
    return {
        "type": "object", "additionalProperties": True,
        "properties": {key: {"type": k} if k in _EXAMPLES else {} for key, k in kinds.items()},
    }  # fmt: skip


def _as_content(grammar: Grammar) -> str:
    """Return the rules of a grammar; the first is called ``content``."""
    if grammar.names_tokens:
        raise UnsupportedError("a grammar that names tokens cannot be combined with calls of tools")
    (compiled,) = json.loads(grammar.guidance)["grammars"]
    if compiled.get("json_schema") is not None:
        return f"content: %json {json.dumps(compiled['json_schema'], ensure_ascii=False)}"
    return re.sub(r"(?m)\bstart\b(?=.*:)", "content", str(compiled["lark_grammar"]), count=1)


class _Writer:
    """Writes the grammar of the turns of one request.

    Control tokens have no text, so the grammar names them by their ids, ``<[5]>``. A grammar cannot
    contain a token that ends the text (EOG), so the form is written up to that token.
    """

    def __init__(self, model: Model, tools: Tools, form: CallForm) -> None:
        self._tools, self._form = tools, form
        control = {
            text: known[0]
            for text, known in model.handle.control_tokens().items()
            if model.handle.is_control(known[0])
        }
        self._eog = {text for text, token in control.items() if model.is_eog(token)}
        self._control = control
        texts = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._rules: dict[str, str] = {}
        self._names = tools.forced or list(tools.schemas)

    def written(self, content: Grammar | None = None) -> str:
        """Return the grammar's source."""
        form, tools, own = self._form, self._tools, list[str]()
        self._rule("TEXT", "/(.|\\n)*/")
        self._rule("WS", "/[ \\n\\t]{1,8}/")
        whole = form.opening.removeprefix(tools.turns.lead if tools.forced else "")
        opening = whole.lstrip()
        if tools.forced:
            space = whole[: len(whole) - len(opening)]
            start = f"{self._literal(space)}? {self._literal(opening)} {self._calls(form)}"
        elif content is not None:
            own.append(_as_content(content))
            start = f"content | {self._literal(opening)} {self._calls(form)}"
        else:
            choices, trigger = self._loose(), self._trigger(opening)
            with suppress(UnsupportedError):  # the model may be unable to write this form
                if trigger:
                    choices.append(f"{self._opened(trigger)} {self._any_calls()} WS?")
            start = f"{self._free(trigger)} ({' | '.join(choices)})?" if choices else "TEXT"
        own += (f"{name}: {text}" for name, text in self._rules.items())
        return "\n".join([f"start: {start}", *own])

    def _any_calls(self) -> str:
        """Return calls in the template's form, or in its other form if both openings end alike."""
        form = self._form
        if form.other is None or not form.other.opening.endswith(form.opening.strip()):
            return self._calls(form)
        return f"({self._calls(form)} | {self._calls(form.other)})"

    def _calls(self, form: CallForm) -> str:
        """Return the rule of all calls, beginning with the opening of the first."""
        tools, place = self._tools, "" if form is self._form else "other_"
        units = [self._unit(form, f"{place}{i}", name) for i, name in enumerate(self._names)]
        any_unit = self._rule(f"{place}call", " | ".join(units))
        between, ends = (
            form.separator + form.call_start,
            self._before_end(form.call_end) != form.call_end,
        )
        is_many = form.several is True and tools.parallel and not tools.is_named
        more = f" (WS? {self._literal(between)} {any_unit})*" if is_many and not ends else ""
        end = "" if ends else self._literal(self._before_end(form.section_end.rstrip()))
        return self._rule(f"{place}calls", f"{any_unit}{more} {end}")

    def _rule(self, name: str, text: str, attributes: str = "") -> str:
        self._rules[f"{name}{attributes}"] = text
        return name

    # -- text --------------------------------------------------------------------------------------

    def _before_end(self, text: str) -> str:
        """Return a text up to the first token that would end it (EOG), if there is one."""
        ends = (m.start() for m in self._pattern.finditer(text) if m[0] in self._eog)
        return text[: next(ends, None)]

    def _literal(self, text: str) -> str:
        """Return a literal, with control tokens written as ids."""
        parts, at = [], 0
        for match in self._pattern.finditer(text):
            if match[0] in self._eog:
                raise UnsupportedError(
                    f"the form of calls contains {match[0]}, which ends every text of this model"
                )
            if match.start() > at:
                parts.append(_quoted(text[at : match.start()]))
            parts.append(f"<[{self._control[match[0]]}]>")
            at = match.end()
        if text[at:]:
            parts.append(_quoted(text[at:]))
        return " ".join(parts) or '""'

    def _until(self, name: str, literal: str) -> str:
        """Return a rule for free text that ends with a literal."""
        match = self._pattern.search(literal)
        if match is None:
            return self._rule(name, f"TEXT {_quoted(literal)}", "[lazy]")
        if match.start() == 0:
            return f"TEXT {self._literal(literal)}"
        lazy = self._rule(name, f"TEXT {_quoted(literal[: match.start()])}", "[lazy]")
        return f"{lazy} {self._literal(literal[match.start() :])}"

    def _trigger(self, opening: str) -> str:
        """Return the part of an opening that tells a call from text."""
        match = self._pattern.search(re.split(r"\s", opening, maxsplit=1)[0])
        return opening[match.start() :] if match else opening

    def _opened(self, trigger: str) -> str:
        """Return a rule for free text that ends with an opening."""
        if self._pattern.match(trigger):
            return self._literal(trigger)
        word = re.split(r"\s", trigger, maxsplit=1)[0]
        return f"{self._until('open', word)} {self._literal(trigger[len(word) :])}"

    def _free(self, trigger: str) -> str:
        """Return a rule for the part before calls: text and control tokens that do not begin a call."""
        self._rule("SOME", "/(.|\\n)+/")
        match = self._pattern.match(trigger)
        first = match[0] if match else ""
        free = [token for text, token in self._control.items() if text not in {first, *self._eog}]
        choices = [f"<[{ranges(free)}]> SOME?"] if free else []
        rest = trigger[len(first) :]
        after = self._pattern.search(rest)
        rest = rest[: after.start()] if after else rest
        if first and rest and self._is_shared(first, trigger):
            self._rule("OTHER", f"/(.|\\n)+/ & ~/{exactly(rest)}(.|\\n)*/")
            choices.append(f"<[{self._control[first]}]> OTHER?")
        return f"SOME? ({' | '.join(choices)})*" if choices else "SOME?"

    def _is_shared(self, tag: str, trigger: str) -> bool:
        """Return whether a tag that begins a call also begins other parts of a turn."""
        turns = self._tools.turns
        return any(
            tag in text
            for text in (turns.header, turns.thought_open, turns.thought_close, turns.content_start,
                         turns.content_end, turns.turn_end)
            if not text.strip().startswith(trigger.strip())
        )  # fmt: skip

    # -- calls -------------------------------------------------------------------------------------

    def _unit(self, form: CallForm, i: str, name: str) -> str:
        """Return the rule of a call of one function, without the literal that calls begin with."""
        schema = self._tools.schemas[name]
        is_json = form.kind == "json"
        parts = [*form.unit[form.object_at if is_json else isinstance(form.unit[0], str) :]]
        words: list[str] = []
        text = ""
        for at, part in enumerate(parts):
            if isinstance(part, str):
                text += part
                continue
            if part is Slot.NAME:
                text += json.dumps(name, ensure_ascii=False)[1:-1] if is_json else name
                continue
            if part is Slot.ID and form.name_in_id:
                text += form.name_in_id[0] + name + form.name_in_id[1]
            words += [self._literal(text)] if text else []
            text = ""
            if part is Slot.ARGUMENTS:
                words.append(self._arguments(form, i, schema))
            elif part is Slot.WORDS and self._pattern.match(str(parts[at + 1])):
                others = [t for tag, t in self._control.items() if tag not in self._eog]
                words.append(f"{self._rule('WORDS', '/ ?[a-z]*/')}? (<[{ranges(others)}]> WORDS?)?")
            elif part is Slot.WORDS:
                # The lexer does not backtrack, so tags that are plain text are one lexeme.
                pattern = f"/ ?[a-z]*(<\\|[a-z]+\\|>[a-z]+)?{exactly(str(parts[at + 1]))}/"
                words.append(self._rule("WORDS", pattern))
                parts[at + 1] = ""
            elif part is Slot.INDEX or form.name_in_id is not None:
                words.append(self._rule("NUMBER", "/[0-9]+/"))
            else:
                words.append(self._rule("ID", "/[a-zA-Z0-9_\\-]{1,64}/"))
        words += [self._literal(self._before_end(text.rstrip()))] if text.strip() else []
        return self._rule(f"call_{i}", " ".join(words))

    def _arguments(self, form: CallForm, i: str, schema: object) -> str:
        if form.tags is not None:
            return self._tagged(i, schema, form.tags)
        if form.arguments_as_text:
            return f'"\\"" {self._value(f"text_{i}", schema, _IN_TEXT, schema)} "\\""'
        return self._json(schema)

    def _tagged(self, i: str, schema: object, tags: ArgumentTags) -> str:
        """Return the rule of arguments in tags, in the order of the schema's properties."""
        inner, may_be_empty = _members(
            schema, lambda k, key, inner: self._argument(f"arg_{i}_{k}", key, inner, schema, tags)
        )
        if not inner:
            return '""'
        text = f"{self._literal(tags.start)} {inner} {self._literal(tags.end)}"
        is_open = may_be_empty and bool(tags.start or tags.end)
        return self._rule(f"args_{i}", f"({text})?" if is_open else text)

    def _argument(
        self, rule: str, key: str, schema: object, root: object, tags: ArgumentTags
    ) -> tuple[str, str]:
        """Return two rules for an argument: one if it comes first, and one if it follows others.

        The separator and the text after it are one literal, because the lexer takes the longest match
        and does not backtrack.
        """
        is_text = is_text_schema(schema, root)
        other = tags.around(_EXAMPLES.get(str(_resolved(schema, root).get("type")), 0))
        choices: list[tuple[Around, bool]] = []
        if tags.text is not None and is_text is not False:
            choices.append((tags.text, True))
        if not choices or (is_text is None and tags.text != other):  # the schema does not say which
            choices.append((other, False))
        firsts, others = [], []
        for k, (around, is_raw) in enumerate(choices):
            after = around.closing(key)
            if is_raw and after.strip():
                value = self._raw(f"{rule}_t{k}", schema, root, after)
            else:
                value = f"{self._value(f'{rule}_v{k}', schema, tags.values, root)} {self._literal(after)}"
            inner = self._rule(f"{rule}_value{k}", value)
            heads = (around.before, tags.separator + around.before)
            first, later = (self._literal(head + key + around.between) for head in heads)
            firsts.append(f"{first} {inner}")
            others.append(f"{later} {inner}")
        first = self._rule(rule, " | ".join(firsts))
        return first, self._rule(f"{rule}_later", " | ".join(others)) if tags.separator else first

    def _raw(self, rule: str, schema: object, root: object, after: str) -> str:
        """Return a rule for an unquoted string and the literal after it."""
        enum = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(enum, list) and is_text_schema(schema, root):
            return f"({' | '.join(self._literal(str(v)) for v in enum)}) {self._literal(after)}"
        return self._until(rule, after)

    # -- values ------------------------------------------------------------------------------------

    def _json(
        self, schema: object, values: Values | None = None, *, is_flexible: bool = False
    ) -> str:
        """Return a rule for a JSON value that follows a schema, spaced as the template does."""
        values = values or self._form.values
        try:
            parsed = json_schemas.parse(_source(schema))
        except RecursionError:
            raise GrammarError("the JSON schema is nested too deep") from None
        options: dict[str, object] = {
            "whitespace_flexible": is_flexible, "json_allow_general_unicode_escapes": True,
        }  # fmt: skip
        if not is_flexible:
            options |= {"item_separator": values.item, "key_separator": values.pair}
        return f"%json {json.dumps({'x-guidance': options, **parsed}, ensure_ascii=False)}"

    def _value(
        self, rule: str, schema: object, values: Values, root: object, depth: int = 0
    ) -> str:
        """Return a rule for a value that follows a schema, written as ``values``."""
        schema = _resolved(schema, root)
        if values.is_json:
            shared = {}
            if isinstance(root, Mapping):
                shared = {k: v for k, v in root.items() if k in ("$defs", "definitions")}
            return self._json({**shared, **schema}, values)
        if values.tags is not None:
            return self._in_tags(rule, schema, values, root, depth)
        enum = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(enum, list) and enum:
            return f"({' | '.join(self._literal(_written(values, v)) for v in enum)})"
        choices = schema.get("anyOf", schema.get("oneOf"))
        kind = schema.get("type")
        if isinstance(kind, list):
            choices = [{**schema, "type": name} for name in kind]
        if depth > 8:
            return self._any(values)
        if isinstance(choices, list) and choices:
            rules = [
                self._value(f"{rule}_{k}", choice, values, root, depth + 1)
                for k, choice in enumerate(choices)
            ]
            return self._rule(rule, " | ".join(rules))
        if kind == "string":
            return self._text(values)
        if kind in ("integer", "number"):
            return self._json(schema, Values())
        if kind in ("boolean", "null"):
            words = values.words[:2] if kind == "boolean" else values.words[2:]
            return f"({' | '.join(map(_quoted, words))})"
        if kind == "array":
            item = self._value(f"{rule}_item", schema.get("items"), values, root, depth + 1)
            more = self._repeated(schema, f"{self._literal(values.item)} {item}")
            inner = f"{item} {more}" if schema.get("minItems") else f"({item} {more})?"
            if schema.get("maxItems") == 0:
                inner = '""'
            return self._rule(rule, f'"[" {inner} "]"')
        if kind == "object" and isinstance(schema.get("properties"), Mapping):

            def member(k: int, key: str, inner: object) -> tuple[str, str]:
                value = self._value(f"{rule}_{k}", inner, values, root, depth + 1)
                head = (key if values.bare_keys else _written(values, key)) + values.pair
                first, later = self._literal(head), self._literal(values.item + head)
                return f"{first} {value}", f"{later} {value}"

            return self._rule(rule, f'"{{" {_members(schema, member)[0]} "}}"')
        return self._any(values, kind)

    @staticmethod
    def _repeated(schema: Mapping[str, object], item: str) -> str:
        """Return a rule for the items of an array after the first."""
        least, most = schema.get("minItems"), schema.get("maxItems")
        low = max(0, least - 1) if isinstance(least, int) else 0
        high = str(max(low, most - 1)) if isinstance(most, int) else ""
        return f"({item}){{{low},{high}}}"

    def _text(self, values: Values) -> str:
        """Return a rule for a string with the quotes of ``values``."""
        if values.quote == "'":
            self._rule("STRING", r"""/'([^'\\\n]|\\.)*'|"([^"\\\n]|\\.)*"/""")
        elif values.quote == _IN_TEXT.quote:
            outer, inner = _escapes(r"\\", "[89a-fA-F]"), _escapes(r"\\\\", "[0-9a-fA-F]")
            inner = rf"{inner}|\\\\([nrtbf\/]|\\\/|\\[\\\"])"
            self._rule("STRING", rf'/\\"([^"\\\x00-\x1f]|\\\/|{outer}|{inner})*\\"/')
        elif values.quote:
            return f"{self._literal(values.quote)} {self._until('quoted', values.quote)}"
        else:
            return self._json({"type": "string"}, Values())
        return "STRING"

    def _any(self, values: Values, kind: object = None) -> str:
        """Return a rule for any value, or any object or array, written as ``values``."""
        if "any" not in self._rules:
            self._rules["any"] = ""
            item, pair = self._literal(values.item), self._literal(values.pair)
            key = self._text(values)
            if values.bare_keys:
                key = self._rule("KEY", r"/[^\s,:{}\[\]\"'<>]+/")
            words = " | ".join(map(_quoted, values.words))
            number = self._json({"type": "number"}, Values())
            self._rule("any_list", f'"[" (any ({item} any)*)? "]"')
            self._rule("any_object", f'"{{" ({key} {pair} any ({item} {key} {pair} any)*)? "}}"')
            self._rule("any", f"{self._text(values)} | {number} | {words} | any_list | any_object")
        return {"object": "any_object", "array": "any_list"}.get(str(kind), "any")

    def _in_tags(
        self, rule: str, schema: Mapping[str, object], values: Values, root: object, depth: int
    ) -> str:
        """Return a rule for the inside of a tag: a text, or nested tags."""
        before, between, after, end = values.tags or ("", "", "", "")
        kind = schema.get("type")

        def member(name: str, key: str, inner: object) -> str:
            closing = f"{after}{key}{end}"
            opening = self._literal(f"{before}{key}{between}")
            if is_text_schema(inner, root) is not False or depth > 8:
                return f"{opening} {self._until(f'{name}_text', closing)}"
            value = self._value(name, inner, values, root, depth + 1)
            return f"{opening} {value} {self._literal(closing)}"

        if kind == "array":
            item = self._rule(f"{rule}_item", member(f"{rule}_i", "item", schema.get("items")))
            return self._rule(rule, f"({item})" + ("+" if schema.get("minItems") else "*"))
        if kind == "object" and properties_of(schema):

            def written(k: int, key: str, inner: object) -> tuple[str, str]:
                text = self._rule(f"{rule}_{k}", member(f"{rule}_{k}v", key, inner))
                return text, text

            return self._rule(rule, _members(schema, written)[0])
        if kind in ("integer", "number", "boolean", "null"):
            return self._json(schema, Values())
        key = self._rule("TAG", r"/[^\s<>]+/")
        self._rule("any_tag", f"{_quoted(before)} {key} {_quoted(between)} (INNER | any_tag*) "
                   f"{_quoted(after)} {key} {_quoted(end)}")  # fmt: skip
        self._rule("INNER", r"/[^<>\[\]]+/")
        return "any_tag*" if kind == "object" else "(INNER | any_tag*)"

    # -- calls in other forms than the template's --------------------------------------------------

    def _loose(self) -> list[str]:
        """Return rules for calls as bare, fenced or tagged JSON, or in a list; braces may be doubled."""
        if len(self._names) > _MOST_LOOSE:
            return []
        is_json = self._form.kind == "json"
        keys = {"arguments", "parameters", *(self._form.arguments_path[-1:] if is_json else ())}
        named = {"name", *(self._form.name_path[-1:] if is_json else ())}
        opening = r"[ \t]*(```[ \t]*[\w.+\-]*\s*|<tool_call>\s*)?(\[\s*)?\{\s*(\{\s*)?"
        firsts, others = [], []
        for i, name in enumerate(self._names):
            body = (
                f'{opening}"({_choice(named)})"\\s*:\\s*'
                f'{exactly(json.dumps(name, ensure_ascii=False))}\\s*,\\s*"({_choice(keys)})"\\s*:'
            )
            schema = self._tools.schemas[name]
            rest = self._rule(
                f"loose_{i}", f"WS? {self._json(schema, is_flexible=True)} LOOSE_END?"
            )
            first = self._rule(f"head_{i}", f"/((.|\\n)*\\n)?{body}/", "[lazy]")
            firsts.append(f"{first} {rest}")
            if self._tools.parallel and self._form.several is not False:
                other = self._rule(f"next_{i}", f"/\\s*,?\\s*{body}/", "[lazy]")
                others.append(f"{other} {rest}")
        self._rule("LOOSE_END", r"/\s*\}\s*(\}\s*)?(\]\s*)?(```|<\/tool_call>)?\s*/")
        more = f" ({' | '.join(others)})*" if others else ""
        return [f"({' | '.join(firsts)}){more}"]


_EXAMPLES: dict[str, object] = {
    "boolean": True, "null": None, "array": [], "object": {}, "string": "",
}  # fmt: skip
_IN_TEXT = Values(quote='\\"')  # values inside a JSON string, with escaped quotes


def _written(values: Values, value: object) -> str:
    """Return a value as text, which is escaped once more inside a JSON string."""
    if values is not _IN_TEXT:
        return values.write(value)
    return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escapes(backslash: str, third: str) -> str:
    """Return a regular expression for JSON's escapes of a character by its number.

    Args:
        backslash: how the backslash is written.
        third: the third digits that may follow 00.
    """
    digit, u = "[0-9a-fA-F]", f"{backslash}u"
    return (
        f"{u}(00{third}{digit}|0[1-9a-fA-F]{digit}{{2}}|[1-9a-ce-fA-CE-F]{digit}{{3}}|"
        f"[dD][0-7]{digit}{{2}}|[dD][89abAB]{digit}{{2}}{u}[dD][c-fC-F]{digit}{{2}})"
    )


def _choice(words: Iterable[str]) -> str:
    return "|".join(map(exactly, sorted(words)))


def _members(
    schema: object, write: Callable[[int, str, object], tuple[str, str]]
) -> tuple[str, bool]:
    """Return a rule for an object's properties in their order, and whether all may be missing.

    Args:
        schema: the schema of the object.
        write: gets a property's number, name and schema; returns two rules for it: one if it comes
            first, and one if it follows others.
    """
    required = schema.get("required") if isinstance(schema, Mapping) else None
    first = rest = ""
    may_be_empty = True
    known = enumerate(properties_of(schema).items())
    members = [(key, *write(k, key, inner)) for k, (key, inner) in known]
    for key, text, later in reversed(members):
        following = f"{text} {rest}".rstrip()
        if isinstance(required, list) and key in required:
            first, rest, may_be_empty = following, f"{later} {rest}".rstrip(), False
        else:
            first = f"({following} | {first})" if first else f"({following})?"
            rest = f"({later})? {rest}".rstrip()
    return first, may_be_empty


def _resolved(schema: object, root: object) -> Mapping[str, object]:
    """Return a schema with the reference at its top resolved."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = pointed(reference, root)
    return schema if isinstance(schema, Mapping) else {}
