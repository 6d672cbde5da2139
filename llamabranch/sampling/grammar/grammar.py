"""Grammars for generated text: a JSON schema, a regular expression, a choice, Lark or GBNF."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast, get_origin

from ...arguments import instance, items
from ...errors import ConfigError, GrammarError
from ...model import Model
from . import schema as json_schemas
from .gbnf import NO_FORCING, Gbnf
from .guidance import Matcher, compiled
from .patterns import exactly

_KINDS = ("gbnf", "json_schema", "regex", "choice", "lark")
_UNSUPPORTED = re.compile(r'Unimplemented keys: \["([^"]*)"')
_MOST_BYTES = 1 << 20
_RULE = re.compile(r"(?m)^[ \t]*(?:[?!]?(\w+).*?)?:")  # the beginning of a rule in Lark
# With a chain of more than 2,000 rules or groups, llguidance would overflow its stack and end the
# process.
_MOST_DEEP = 1000
_REASONS = (  # replaces llguidance's reasons, which quote expressions
    ("^the grammar is refused: ", ""),
    ("^(lookarounds not supported).*", r"pattern: \1"),
    ("^Unsatisfiable schema: ", "no text satisfies it: "),
    ("Regex is empty: .*", "pattern and the other keywords exclude each other"),
    ("^Failed to generate regex for (.*?): .*", r"\1 out of bounds"),
)
_WHITESPACE = ("single", "none", "any")


@dataclass(frozen=True)
class Grammar:
    """A grammar that the generated text must follow from its beginning to its end.

    For anything but GBNF use ``from_json_schema``, ``from_regex``, ``from_choices`` or ``from_lark``.

    Args:
        source: the text of the grammar; for a choice, a JSON list.
        kind: "gbnf" (its start symbol is ``root``), "json_schema", "regex", "choice" or "lark".
        whitespace: for a JSON schema; see ``from_json_schema``.

    Raises:
        GrammarError: it does not parse (the message has the reason), needs something unsupported, is
            larger than 1 MiB, or no text satisfies it. Whether the tokens that it names exist is
            checked when a branch uses it.
    """

    source: str
    kind: str = "gbnf"
    whitespace: str = "single"
    model: type | None = field(default=None, compare=False, repr=False)
    names_tokens: bool = field(default=False, init=False, repr=False, compare=False)
    guidance: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"unknown kind of grammar {self.kind!r}: use one of {_KINDS}")
        if self.whitespace not in _WHITESPACE:
            raise ConfigError(f"whitespace must be one of {_WHITESPACE}, not {self.whitespace!r}")
        if not isinstance(self.source, str) or not self.source.strip():
            raise GrammarError("a grammar must be a string that is not empty")
        try:
            n_bytes = len(self.source.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise GrammarError(f"the grammar is not valid Unicode: {error}") from error
        if n_bytes > _MOST_BYTES:
            raise GrammarError(
                f"the grammar has {n_bytes} bytes, above the limit of {_MOST_BYTES}",
                hint="leave out what does not constrain the text, such as descriptions",
            )
        if "\0" in self.source:
            raise GrammarError("the grammar contains a NUL character")
        object.__setattr__(self, "guidance", self._compile())

    def _compile(self) -> str:
        """Return the grammar in llguidance's form."""
        if self.kind == "gbnf":
            return self._compile_gbnf()
        if self.kind == "json_schema":
            try:
                return self._compile_schema()
            except RecursionError:
                raise GrammarError("the JSON schema is nested too deep") from None
        if self.kind == "choice":
            return compiled("regex", "|".join(map(exactly, _choices(self.source))))
        if self.kind == "lark":
            _check_lark(self.source)
        return compiled(self.kind, self.source)

    def _compile_schema(self) -> str:
        schema = json_schemas.parse(self.source)
        guidance, reason = _of_schema(schema, self.whitespace)
        if guidance:
            return guidance
        raise _refusal(schema, reason, self.whitespace)

    def _compile_gbnf(self, model: Model | None = None) -> str:
        parsed = Gbnf(self.source)
        object.__setattr__(self, "names_tokens", bool(parsed.tokens))
        lark = parsed.lark(model)
        _check_lark(lark)
        return compiled("lark", lark)

    @classmethod
    def from_json_schema(
        cls, schema: str | Mapping[str, object] | type, *, whitespace: str = "single"
    ) -> Grammar:
        """Return a grammar for JSON texts that are valid against a schema.

        Args:
            schema: a JSON schema as text or object; or a pydantic model, a TypedDict, a dataclass, or a
                list of them (``list[Person]``), for which pydantic must be installed. ``parse`` then
                returns an instance.
            whitespace: "single" = a space after each comma and colon, as ``json.dumps`` writes it;
                "none"; "any" = all white space that JSON allows, so a text may be long.

        Raises:
            GrammarError: it is not a schema, no text satisfies it, or something in it is unsupported;
                the message names it.
            ConfigError: pydantic is missing, or cannot describe the type.
        """
        model: type | None = None
        is_named = hasattr(schema, "__supertype__") or hasattr(
            schema, "__value__"
        )  # NewType, type X
        if isinstance(schema, type) or get_origin(schema) is not None or is_named:
            model = cast(type, schema)  # list[Person] too
            schema = json_schemas.of_type(model)
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise GrammarError(
                    f"the JSON schema is not JSON: {error}", hint=json_schemas.TAKEN
                ) from error
        return cls(schema, "json_schema", whitespace, model)

    @classmethod
    def from_regex(cls, pattern: str) -> Grammar:
        r"""Return a grammar for texts that match a regular expression as a whole.

        Args:
            pattern: in the syntax of Rust's ``regex``: like Python's, but without look-around,
                backreferences and word boundaries; ``\d`` is an ASCII digit. ``^`` at the beginning and
                ``$`` at the end are allowed.

        Raises:
            GrammarError: it does not parse, or nothing matches it.
        """
        return cls(pattern, "regex")

    @classmethod
    def from_choices(cls, choices: Sequence[str]) -> Grammar:
        """Return a grammar for exactly these texts.

        Raises:
            GrammarError: there is no choice, or an empty one. ConfigError: a text instead of a list.
        """
        return cls(json.dumps(items("choices", choices), ensure_ascii=False), "choice")

    @classmethod
    def from_lark(cls, lark: str) -> Grammar:
        """Return a grammar written in llguidance's dialect of Lark; its start symbol is ``start``.

        Raises:
            GrammarError: it does not parse.
        """
        return cls(lark, "lark")

    @classmethod
    def from_dict(cls, given: str | Mapping[str, object]) -> Grammar:
        """Return the grammar from a result of ``as_dict``, or from GBNF text.

        Raises:
            GrammarError, ConfigError: see the class.
        """
        if isinstance(given, str):
            return cls(given)
        given = instance("a grammar", given, dict)
        fields = {name: given.get(name) for name in ("source", "kind", "whitespace")}
        if set(given) - set(fields) or not all(isinstance(v, str) for v in fields.values()):
            raise ConfigError(f"not the description of a grammar: {given!r:.60}")
        return cls(str(fields["source"]), str(fields["kind"]), str(fields["whitespace"]))

    def as_dict(self) -> str | dict[str, str]:
        """Return the grammar as JSON types; for GBNF, just its text."""
        if self.kind == "gbnf":
            return self.source
        return {"source": self.source, "kind": self.kind, "whitespace": self.whitespace}

    def start(self, model: Model, *, forcing: bool = False) -> Matcher:
        """Return the state of this grammar before the first token.

        Args:
            model: the model whose tokens it matches.
            forcing: True = if the next text is certain, allow only the tokens that the tokenizer makes
                of it. Without it a GBNF grammar allows any tokens with that text.

        Raises:
            GrammarError: the model has no text, the grammar names a token that the vocabulary lacks, or
                no text satisfies it.
        """
        if not model.has_text:
            raise GrammarError("a grammar needs a model with a vocabulary")
        guidance = self._compile_gbnf(model) if self.names_tokens else self.guidance
        is_split = forcing and self.kind == "gbnf"
        return Matcher(model, guidance.replace(NO_FORCING, "{}") if is_split else guidance)

    def parse(self, text: str) -> object:
        """Return the value of a complete JSON text: a JSON value, or an instance of the schema's type.

        For other grammars, return the text.

        Raises:
            ParseError: the text is incomplete, or the type refuses it (for example a validator).
        """
        if self.kind != "json_schema":
            return text
        return json_schemas.value(self.model, text)


def _check_lark(source: str) -> None:
    """Refuse rules and schemas that are nested too deep for llguidance."""
    depth = _lark_depth(source)
    if depth > _MOST_DEEP:
        raise GrammarError(
            f"the grammar is {depth} groups deep, rule in rule, above the limit of {_MOST_DEEP}",
            hint="use fewer groups, or fewer rules that stand for other rules",
        )
    for place in re.finditer(r"%json\s*", source):
        with contextlib.suppress(ValueError, RecursionError):  # llguidance refuses these itself
            schema, _ = json.JSONDecoder().raw_decode(source, place.end())
            json_schemas.check_depth(schema)


def _lark_depth(source: str) -> int:
    """Return how deeply the groups and rules of a Lark grammar are nested."""
    heads = list(_RULE.finditer(source))
    ends = [*(head.start() for head in heads), len(source)][1:]
    bodies = {str(h[1]): source[h.end() : end] for h, end in zip(heads, ends, strict=True)}
    inside = {name: bodies.keys() & set(re.findall(r"\w+", text)) for name, text in bodies.items()}
    depths, entered, path = dict.fromkeys(inside, 0), set[str](), list(inside)
    while path:  # a rule is done once the rules inside it are
        name = path[-1]
        if name not in entered:
            entered.add(name)
            path += inside[name] - entered
            continue
        path.pop()
        if not depths[name]:
            groups = max(accumulate((c == "(") - (c == ")") for c in bodies[name]), default=0)
            below = max((depths[inner] for inner in inside[name]), default=0)
            depths[name] = max(1, groups) + below
    return max(depths.values(), default=0)


def _of_schema(schema: dict[str, object], whitespace: str) -> tuple[str, str]:
    """Return the grammar of a schema, or "" and why it is refused."""
    try:
        return compiled("json_schema", json.dumps(schema, ensure_ascii=False), whitespace), ""
    except GrammarError as error:
        return "", str(error)


def _refusal(schema: dict[str, object], reason: str, whitespace: str) -> GrammarError:
    """Return an error that says where a schema is refused, and why."""
    if "recursion limit" in reason:
        return GrammarError("the JSON schema is nested too deep")
    if reason.startswith(json_schemas.REFUSED):
        return GrammarError(reason)
    path, reason = json_schemas.place(schema, reason, lambda part: _of_schema(part, whitespace)[1])
    match, is_one_of = _UNSUPPORTED.search(reason), "oneOf constraints" in reason
    if match or is_one_of:
        hint = "use anyOf if the parts exclude each other anyway" if is_one_of else None
        keyword = match[1] if match else "oneOf"
        return GrammarError(
            f"the JSON-schema keyword {keyword!r} at {path} is not supported", hint=hint
        )
    for pattern, shorter in _REASONS:
        reason = re.sub(pattern, shorter, reason, flags=re.DOTALL)
    return GrammarError(f"{json_schemas.REFUSED} {path}: {reason}")


def _choices(source: str) -> list[str]:
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the choices are not a JSON list: {error}") from error
    if not isinstance(choices, list) or not choices:
        raise GrammarError("a choice needs a list of texts, at least one")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            raise GrammarError(f"a choice must be a text that is not empty, not {choice!r:.40}")
    return choices
