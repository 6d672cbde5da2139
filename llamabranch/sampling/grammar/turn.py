"""The grammar of a turn that may call functions: free text, and calls that are valid once begun."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ...errors import GrammarError, UnsupportedError
from ...model import Model
from ...model.call_form import ArgumentTags, Around, CallForm, Slot, Values
from ...model.tools import Tools
from . import schema as json_schemas
from .grammar import Grammar

__all__ = ["turn_grammar"]

_MOST_LOOSE = 64  # functions: the lexer looks for the beginning of each
_TEXT = "TEXT: /(.|\\n)*/"


def turn_grammar(model: Model, tools: Tools, content: Grammar | None = None) -> Grammar:
    """Return the grammar of an answer by ``model`` that may call, or has to call, some tools.

    Text is free; from the opening of a call on, the call is one of a known function, with arguments that
    follow its schema, in the form of the model's template. After a call come calls, or the end. Where a
    tool is forced, the answer begins with a call. Where the template's form cannot be written as a
    grammar, a forced call is bare JSON.

    Args:
        model: whose control tokens the form may name.
        tools: those of the request, with their ``turns``.
        content: what an answer without a call must follow; None = its text is free.

    Raises:
        UnsupportedError: no tool is forced, and the template's form has no grammar; says why.
        GrammarError: a tool's schema is refused; names the tool.
    """
    form = tools.turns.form
    try:
        lark = _Writer(model, tools, form).written(content)
    except UnsupportedError:
        if not tools.forced:
            raise
        lark = _Writer(model, tools, type(tools.turns)().form).written()
    try:
        return _compiled(lark)
    except GrammarError:
        for name, schema in tools.schemas.items():
            _check(name, schema)
        raise


_compiled = lru_cache(maxsize=64)(Grammar.from_lark)  # a conversation asks for one at every turn


def _check(name: str, schema: object) -> None:
    try:
        Grammar.from_json_schema(schema)  # type: ignore[arg-type]
    except GrammarError as error:
        raise GrammarError(f"the parameters of {name}: {error.message}", hint=error.hint) from None


def _as_rule(name: str, grammar: Grammar) -> str:
    """Return the rules of a grammar, the first of which has this name."""
    if not grammar.guidance:
        raise UnsupportedError("a grammar that names tokens cannot be combined with calls of tools")
    (found,) = json.loads(grammar.guidance)["grammars"]
    if found.get("json_schema") is not None:
        return f"{name}: %json {json.dumps(found['json_schema'], ensure_ascii=False)}"
    return re.sub(r"(?m)\bstart\b(?=.*:)", name, str(found["lark_grammar"]), count=1)


class _Writer:
    def __init__(self, model: Model, tools: Tools, form: CallForm) -> None:
        self._tools, self._form = tools, form
        self._control = {
            text: known[0]
            for text, known in model.handle.control_tokens().items()
            if model.handle.is_control(known[0])
        }
        texts = sorted(self._control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._rules: list[str] = []
        self._names = tools.forced or list(tools.schemas)

    def written(self, content: Grammar | None = None) -> str:
        """Return the grammar's source."""
        form, tools = self._form, self._tools
        if form.arguments_as_text and form.kind == "json":
            raise UnsupportedError("arguments that are JSON in a JSON string have no grammar")
        units = [self._unit(i, name) for i, name in enumerate(self._names)]
        any_unit = self._rule("call", " | ".join(units))
        again = self._literal(form.separator + form.call_start)
        end = self._literal(form.section_end.rstrip())
        is_many = form.several is True and tools.parallel and not tools.is_named
        more = f" (WS? {again} {any_unit})*" if is_many else ""
        last = "" if tools.forced else " WS?"
        calls = self._rule("calls", f"{any_unit}{more} {end}{last}")
        whole = form.opening.removeprefix(tools.turns.parts.lead if tools.forced else "")
        opening = whole.lstrip()
        space = whole[: len(whole) - len(opening)]
        if tools.forced:
            start = f"{self._literal(space)}? {self._literal(opening)} {calls}"
        elif content is not None:
            self._rules.append(_as_rule("content", content))
            start = f"content | {self._literal(opening)} {calls}"
        else:
            starts = ["TEXT"]
            if opening:
                starts.append(f"{self._opened(opening)} {calls}")
            if self._is_loose():
                starts += self._loose()
            start = " | ".join(starts)
        return "\n".join([f"start: {start}", *self._rules, _TEXT, "WS: /[ \\n\\t]{1,8}/"])

    def _rule(self, name: str, text: str, attributes: str = "") -> str:
        self._rules.append(f"{name}{attributes}: {text}")
        return name

    # -- text --------------------------------------------------------------------------------------

    def _literal(self, text: str) -> str:
        """Return a literal: text, and control tokens by their ids."""
        parts, at = [], 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                parts.append(json.dumps(text[at : match.start()], ensure_ascii=False))
            parts.append(f"<[{self._control[match[0]]}]>")
            at = match.end()
        if text[at:]:
            parts.append(json.dumps(text[at:], ensure_ascii=False))
        return " ".join(parts) or '""'

    def _until(self, name: str, literal: str) -> str:
        """Return free text up to a literal, and the literal."""
        match = self._pattern.search(literal)
        if match is None:
            return self._rule(name, f"TEXT {json.dumps(literal, ensure_ascii=False)}", "[lazy]")
        if match.start() == 0:
            return f"TEXT {self._literal(literal)}"
        head = json.dumps(literal[: match.start()], ensure_ascii=False)
        lazy = self._rule(name, f"TEXT {head}", "[lazy]")
        return f"{lazy} {self._literal(literal[match.start() :])}"

    def _opened(self, opening: str) -> str:
        """Return free text up to the first word of an opening, and the opening."""
        match = self._pattern.match(opening)
        if match is not None:
            return self._until("open", opening)
        word = re.split(r"\s", opening)[0]
        first = self._pattern.search(word)
        word = word[: first.start()] if first else word
        rest = self._literal(opening[len(word) :]) if opening[len(word) :] else ""
        return f"{self._until('open', word)} {rest}".rstrip()

    # -- calls -------------------------------------------------------------------------------------

    def _unit(self, i: int, name: str) -> str:
        """Return the rule of a call of one function, without the literal that calls begin with."""
        form, schema = self._form, self._tools.schemas[name]
        parts = list(form.unit)
        if form.kind != "json" and parts and isinstance(parts[0], str):
            parts = parts[1:]
        if form.kind == "json":
            parts = parts[form.object_at :]
        words: list[str] = []
        text = ""
        for at, part in enumerate(parts):
            if isinstance(part, str):
                is_last = at == len(parts) - 1
                text += part.rstrip() if is_last else part
                continue
            if part is Slot.NAME:
                is_json = form.kind == "json"
                text += json.dumps(name, ensure_ascii=False)[1:-1] if is_json else name
                continue
            if part is Slot.ID and form.name_in_id:
                text += form.name_in_id[0] + name + form.name_in_id[1]
            words += [self._literal(text)] if text else []
            text = ""
            if part is Slot.ARGUMENTS:
                words.append(self._arguments(i, name, schema))
            else:
                is_number = part is Slot.INDEX or form.name_in_id is not None
                words.append("NUMBER" if is_number else "ID")
        words += [self._literal(text)] if text else []
        for symbol, pattern in (("NUMBER", "/[0-9]+/"), ("ID", "/[a-zA-Z0-9]{9}/")):
            line = f"{symbol}: {pattern}"
            if symbol in words and line not in self._rules:
                self._rules.append(line)
        return self._rule(f"call_{i}", " ".join(words))

    def _json(self, schema: object, values: Values | None = None) -> str:
        """Return a value that follows a schema, spaced as the template writes it."""
        given = schema if isinstance(schema, Mapping) else {}
        values = values or self._form.values
        try:
            made = json_schemas.closed(json_schemas.parse(json.dumps(given, ensure_ascii=False)))
        except RecursionError:
            raise GrammarError("the JSON schema is nested too deep") from None
        options = {
            "whitespace_flexible": False,
            "item_separator": values.item,
            "key_separator": values.pair,
        }
        return f"%json {json.dumps({'x-guidance': options, **made}, ensure_ascii=False)}"

    def _arguments(self, i: int, name: str, schema: object) -> str:
        form = self._form
        try:
            if form.tags is None:
                return self._json(schema)
            return self._tagged(i, schema, form.tags)
        except GrammarError as error:
            raise GrammarError(f"the parameters of {name}: {error.message}") from None

    def _tagged(self, i: int, schema: object, tags: ArgumentTags) -> str:
        """Return the rule of arguments in tags, in the order of the schema's properties."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(schema, Mapping) or not isinstance(properties, Mapping):
            raise UnsupportedError("a function without named parameters has no grammar in tags")
        required = schema.get("required")
        needs = set(required) if isinstance(required, list) else set()
        shared = {k: v for k, v in schema.items() if k in ("$defs", "definitions")}
        rules = [
            self._argument(f"arg_{i}_{k}", key, {**shared, **one}, tags)
            for k, (key, one) in enumerate(properties.items())
            if isinstance(one, Mapping)
        ]
        keys = [key for key, one in properties.items() if isinstance(one, Mapping)]
        rest, first = "", ""
        for (rule, later), key in reversed(list(zip(rules, keys, strict=True))):
            following = f"{rule} {rest}".rstrip()
            if key in needs:
                first, rest = following, f"{later} {rest}".strip()
            else:
                first = f"({following} | {first})" if first else f"({following})?"
                rest = f"({later})? {rest}".strip()
        if not first:
            return '""'
        around = self._literal(tags.start), self._literal(tags.end)
        is_open = first.endswith(")?") and (tags.start or tags.end)
        text = f"{around[0]} {first} {around[1]}"
        return self._rule(f"args_{i}", f"({text})?" if is_open else text)

    def _argument(
        self, rule: str, key: str, schema: Mapping[str, object], tags: ArgumentTags
    ) -> tuple[str, str]:
        """Return the rules of an argument: the first, and one after others.

        The separator and what follows it are one literal: the lexer takes the longest and does not go
        back.
        """
        kind, values = schema.get("type"), schema.get("enum")
        names = {"integer": "number", "boolean": "bool", "array": "list"}
        is_enum = isinstance(values, list) and all(isinstance(v, str) for v in values)
        is_text = tags.text is not None and (kind == "string" or is_enum)
        if tags.text is not None and is_text:
            around: Around = tags.text
        else:
            around = tags.around({"bool": True, "null": None, "list": [], "object": {}}.get(
                names.get(str(kind), str(kind)), 0))  # fmt: skip
        heads = (around.before, tags.separator + around.before)
        first, later = (self._literal(head + key + around.between) for head in heads)

        def both(rest: str) -> tuple[str, str]:
            inner = self._rule(f"{rule}_value", rest)
            if not tags.separator:
                return (self._rule(rule, f"{first} {inner}"),) * 2
            return (
                self._rule(rule, f"{first} {inner}"), self._rule(f"{rule}_later", f"{later} {inner}")
            )  # fmt: skip

        after = "".join(key if part is Slot.NAME else str(part) for part in around.after)
        if is_text and is_enum and isinstance(values, list):
            texts = " | ".join(self._literal(v) for v in values)
            return both(f"({texts}) {self._literal(after)}")
        if is_text:
            return both(self._until(f"{rule}_text", after))
        if kind is None and tags.text is not None and after.strip():
            return both(self._until(f"{rule}_text", after))
        if kind == "boolean" and not tags.values.is_json:
            value = " | ".join(json.dumps(word) for word in tags.values.words[:2])
        elif (
            tags.values.is_json
            or kind in ("integer", "number", "boolean")
            or (tags.text is None and (kind == "string" or is_enum))
        ):
            value = self._json(schema, tags.values)
        elif kind in ("object", "array") and after.strip() and not tags.values.tags:
            value = self._json(schema, Values())  # a reader takes JSON too
        else:
            raise UnsupportedError(f"an argument of type {kind} has no grammar in this form")
        return both(f"({value}) {self._literal(after)}")

    # -- calls that are not in the template's form -------------------------------------------------

    def _is_loose(self) -> bool:
        return self._form.kind == "json" and len(self._names) <= _MOST_LOOSE

    def _loose(self) -> Sequence[str]:
        """Return calls as bare or fenced JSON, whose braces may be doubled."""
        keys = {"arguments", "parameters", *self._form.arguments_path[-1:]}
        named = {"name", *self._form.name_path[-1:]}
        choices = []
        for i, name in enumerate(self._names):
            word = re.escape(json.dumps(name, ensure_ascii=False)).replace("/", "\\/")
            head = (
                r"/(```(json)?\n)?\s*\{{1,2}\s*\"(" + "|".join(map(re.escape, sorted(named)))
                + rf')":\s*{word},\s*"(' + "|".join(map(re.escape, sorted(keys))) + r')":/'
            ).replace('\\"', '"')  # fmt: skip
            lazy = self._rule(f"head_{i}", head, "[lazy]")
            choices.append(f"{lazy} WS? {self._arguments_json(name)} WS? BRACES FENCE? WS?")
        self._rules += ["BRACES: /\\}{1,2}/", "FENCE: /\\s*```/"]
        return choices

    def _arguments_json(self, name: str) -> str:
        return self._json(self._tools.schemas[name])
