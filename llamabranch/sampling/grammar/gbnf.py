"""GBNF for llguidance: parsed as llama.cpp parses it, and translated to Lark.

It follows llama.cpp's parser step by step, so an error has its line, column and reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from ...errors import GrammarError

__all__ = ["NO_FORCING", "Gbnf"]

NO_FORCING = '{"no_forcing": true}'  # texts that are certain may be split into any tokens

_MAX_DEPTH = 200
_MAX_REPEAT = 2000
_MAX_RULES = 1000
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", **{c: c for c in '\\"[]-'}}
_WORD = re.compile(r"[a-zA-Z0-9-]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
_INT = re.compile(r"[0-9]*")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_RULE = re.compile("@([0-9]+)@")  # a reference to a rule, in a translation
_TOKEN = re.compile("%([0-9]+)%")  # and to a token that is named by its text


class Gbnf:
    """A GBNF grammar that llama.cpp accepts.

    ``token_texts`` lists the tokens written as ``<text>``: each must be one token of the vocabulary.

    Raises:
        GrammarError: with line, column and reason.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = self._n_repeated = 0
        self._numbers: dict[str, int] = {}
        self._rules: dict[int, str] = {}  # their translations
        self._names_tokens = False
        self.token_texts: list[str] = []
        self._skip(_LINES)
        while self._next():
            self._rule()
        if not self._rules:
            raise GrammarError("the grammar does not parse: it has no rule")
        if len(self._numbers) > _MAX_RULES:  # in a chain they would overflow llguidance's stack
            raise GrammarError(
                f"the grammar has {len(self._numbers)} rules, more than {_MAX_RULES}"
            )
        if "root" not in self._numbers:
            raise GrammarError("the grammar has no rule 'root', its start symbol")
        for name, number in self._numbers.items():
            if number not in self._rules:
                raise GrammarError(f"the grammar does not parse: the rule {name!r} is not defined")

    # -- the text ----------------------------------------------------------------------------------

    def _next(self, ahead: int = 0) -> str:
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _skip(self, what: re.Pattern[str]) -> str:
        """Skip the text that matches here, and return it."""
        match = what.match(self._text, self._at)
        found = match.group() if match else ""
        self._at += len(found)
        return found

    def _fail(self, reason: str, at: int | None = None) -> GrammarError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        return GrammarError(f"the grammar does not parse: line {line}, column {column}: {reason}")

    def _expect(self, symbol: str) -> None:
        if not self._text.startswith(symbol, self._at):
            found = repr(self._next()) if self._next() else "the end"
            raise self._fail(f"expected {symbol!r}, found {found}")
        self._at += len(symbol)

    # -- llama_grammar_parser ----------------------------------------------------------------------

    def _number_of(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _rule(self) -> None:
        name = self._skip(_WORD)
        if not name:
            raise self._fail(f"expected the name of a rule, found {self._next()!r}")
        self._skip(_SPACE)
        number = self._number_of(name)
        self._expect("::=")
        self._skip(_LINES)
        self._rules[number] = self._alternatives(nested=False)
        if self._next() not in ("\r", "\n", ""):
            raise self._fail(f"expected a new line or the end, found {self._next()!r}")
        self._skip(_LINES)

    def _alternatives(self, nested: bool) -> str:
        """Read alternatives; return their translation."""
        found = [self._sequence(nested)]
        while self._next() == "|":
            self._at += 1
            self._skip(_LINES)
            found.append(self._sequence(nested))
        return " | ".join(found)

    def _sequence(self, nested: bool) -> str:
        items: list[str] = []
        n = 1  # how many repetitions the last item makes
        while c := self._next():
            at = self._at
            if c in "*+?{":
                self._at += 1
                low, high = _REPEATS.get(c) or self._bounds(at, nested)
                if not items or not items[-1]:
                    raise self._fail(f"{c!r} has nothing to repeat", at)
                n *= high or low or 1
                self._n_repeated += n
                if n > _MAX_REPEAT:
                    raise self._fail(f"{n} repetitions are above the limit of {_MAX_REPEAT}", at)
                most = "" if high is None else high
                items[-1] = f"({items[-1]}{{{low},{most}}})" if high != 0 else ""
                self._skip(_LINES if nested else _SPACE)
                continue
            before = self._n_repeated
            if c == "(":
                items.append(self._group(at))
            elif c == '"':
                literal = self._literal()
                items.append(f"({' '.join(f'/{one}/' for one in literal)})" if literal else "")
            elif c == "[":
                items.append(self._set())
            elif c in "<!":
                items.append(self._token())
            elif c == ".":
                self._at += 1
                items.append(r"/[^\x{0}]/")
            elif name := self._skip(_WORD):
                items.append(f"(@{self._number_of(name)}@)")
            else:
                break
            n = max(1, self._n_repeated - before)
            self._skip(_LINES if nested else _SPACE)
        return " ".join(filter(None, items)) or '""'

    def _group(self, at: int) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._fail(f"nested deeper than {_MAX_DEPTH}", at)
        self._at += 1
        self._skip(_LINES)
        found = self._alternatives(nested=True)
        self._depth -= 1
        self._expect(")")
        return f"({found})"

    def _bounds(self, at: int, nested: bool) -> tuple[int, int | None]:
        blank = _LINES if nested else _SPACE
        self._skip(blank)
        low = self._skip(_INT)
        if not low:
            raise self._fail("expected a number after '{'")
        self._skip(blank)
        least, most = _capped(low), None
        if self._next() == "}":
            most = least
        else:
            self._expect(",")
            self._skip(blank)
            if high := self._skip(_INT):
                most = _capped(high)
            self._skip(blank)
        self._expect("}")
        if most is not None and most < least:
            raise self._fail(f"the maximum of {{{low},{most}}} is below its minimum", at)
        if max(least, most or 0) > _MAX_REPEAT:
            raise self._fail(f"a repetition is above the limit of {_MAX_REPEAT}", at)
        return least, most

    def _literal(self) -> list[str]:
        """Read a string; return its characters as regular expressions."""
        at = self._at
        self._at += 1
        found: list[str] = []
        while self._next() != '"':
            if not self._next():
                raise self._fail("the string does not end", at)
            found.append(self._character())
        self._at += 1
        return found

    def _set(self) -> str:
        """Read a set; return its translation, "" where it matches the empty text, as llama.cpp does."""
        at = self._at
        self._at += 1
        found: list[str] = []
        opening = "/["
        if self._next() == "^":
            self._at += 1
            opening = r"/[^\x{0}"  # a NUL ends the text for llama.cpp
        while self._next() != "]":
            if not self._next():
                raise self._fail("the set does not end", at)
            found.append(self._character())
            if self._next() == "-" and self._next(1) != "]":
                self._at += 1
                if not self._next():
                    raise self._fail("the set does not end", at)
                last = self._character()
                if int(last[3:-1], 16) < int(found[-1][3:-1], 16):
                    raise self._fail("a range of the set is empty", at)
                found[-1] += f"-{last}"
        self._at += 1
        return f"{opening}{''.join(found)}]/" if found else ""

    def _character(self) -> str:
        """Read a character; return it as a regular expression."""
        if self._next() != "\\":
            self._at += 1
            return f"\\x{{{ord(self._text[self._at - 1]):x}}}"
        kind = self._next(1)
        if kind not in _HEX_DIGITS and (not kind or kind not in _ESCAPED):
            raise self._fail(f"unknown escape \\{kind}")
        self._at += 2
        if kind not in _HEX_DIGITS:
            return f"\\x{{{ord(_ESCAPED[kind]):x}}}"
        match = _HEX.match(self._text, self._at, self._at + _HEX_DIGITS[kind])
        if match is None or len(match.group()) < _HEX_DIGITS[kind]:
            raise self._fail(f"expected {_HEX_DIGITS[kind]} hexadecimal digits after \\{kind}")
        self._at = match.end()
        return f"\\x{{{match.group()}}}"

    def _token(self) -> str:
        self._names_tokens = True
        inverse = "^" if self._next() == "!" else ""
        self._at += len(inverse)
        at = self._at
        self._expect("<")
        if self._next() == "[":
            self._at += 1
            digits = self._skip(_INT)
            if not digits or len(digits) > 10 or int(digits) >= 1 << 32:
                raise self._fail(f"expected the id of a token, found {digits or self._next()!r}")
            self._expect("]>")
            return f"<[{inverse}{digits}]>"
        end = self._text.find(">", self._at)
        if end < 0:
            raise self._fail("expected '>', found the end", at)
        self._at = end + 1
        self.token_texts.append(self._text[at : self._at])
        return f"<[{inverse}%{len(self.token_texts) - 1}%]>"

    # -- the translation ---------------------------------------------------------------------------

    def lark(self, ids: Sequence[int] = ()) -> str:
        """Return the same grammar in llguidance's dialect of Lark.

        Without recursion it is one terminal, a regular expression, unless it names tokens. Else every
        character is a terminal of its own: longer ones would be matched greedily. Texts that are forced
        may be split into any tokens, as llama.cpp allows it.

        Args:
            ids: those of ``token_texts``; without them the result can be checked, but not used.
        """
        reached, is_recursive = self._reached()
        name = r"r\1" if is_recursive or self._names_tokens else r"R\1"
        lines = [f"%llguidance {NO_FORCING}", f"start: @{self._numbers['root']}@"]
        lines += [f"@{number}@: {self._rules[number]}" for number in reached]
        text = _RULE.sub(name, "\n".join(lines))
        return _TOKEN.sub(lambda found: str(ids[int(found[1])] if ids else 0), text)

    def _reached(self) -> tuple[list[int], bool]:
        """Return the rules that the start symbol needs, and whether one contains itself."""
        uses = {
            number: [int(n) for n in _RULE.findall(text)] for number, text in self._rules.items()
        }
        reached = [self._numbers["root"]]
        for number in reached:  # which grows
            reached += dict.fromkeys(n for n in uses[number] if n not in reached)
        try:
            TopologicalSorter({number: uses[number] for number in reached}).prepare()
        except CycleError:
            return reached, True
        return reached, False


def _capped(digits: str) -> int:
    return int(digits) if len(digits) < 9 else 10**9
