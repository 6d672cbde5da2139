"""GBNF grammars, and their creation from JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import GrammarError
from .gbnf import Gbnf
from .json_schema import gbnf_of_schema

__all__ = ["Grammar"]


@dataclass(frozen=True)
class Grammar:
    """A GBNF grammar that the generated text must follow; its start symbol is ``root``.

    Raises:
        GrammarError: empty; a syntax error (with line, column and reason); nested too deep; repetitions
            that llama.cpp cannot expand. Whether a token written as ``<text>`` exists is checked when a
            branch uses the grammar.
    """

    gbnf: str
    token_texts: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.gbnf, str) or not self.gbnf.strip():
            raise GrammarError("a grammar must be a string that is not empty")
        try:
            self.gbnf.encode("utf-8")
        except UnicodeEncodeError as error:
            raise GrammarError(f"the grammar is not valid Unicode: {error}") from error
        if "\0" in self.gbnf:
            raise GrammarError(
                "the grammar contains a NUL character: llama.cpp would stop reading there"
            )
        object.__setattr__(self, "token_texts", tuple(Gbnf(self.gbnf).token_texts))

    @classmethod
    def from_json_schema(cls, schema: str | Mapping[str, object]) -> Grammar:
        """Return a grammar for JSON texts that are valid against the schema.

        Raises:
            GrammarError: not a schema, one that no text satisfies, or one with an unsupported keyword,
                which the message names.
        """
        if not isinstance(schema, str):
            try:
                schema = json.dumps(schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise GrammarError(f"the JSON schema is not JSON: {error}") from error
        return cls(gbnf_of_schema(schema))
