"""A parser for GBNF that accepts what llama.cpp's parser accepts, and its translation to Lark.

It follows llama.cpp's parser step by step, so an error has its line, column and reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

from ...errors import GrammarError
from ...model import Model

NO_FORCING = '{"no_forcing": true}'  # forced text may be split into any tokens

_MAX_DEPTH = 200
_MAX_REPEAT = 2000
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", **{c: c for c in '\\"[]-'}}
_WORD = re.compile(r"[a-zA-Z0-9-]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
_INT = re.compile(r"[0-9]*")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
# What may follow a name or a blank in a sequence. The beginning of a rule does not match.
_CONTINUES = re.compile(r"""[|"\[(<!.)*+?{\r\na-zA-Z0-9]|\Z""")
_LINES_OF_RULES = (
    "a rule continues on the next line only after '::=' or '|', or inside parentheses; "
    "a '|' with nothing before it allows the empty text"
)
_REFERENCE = re.compile("@([0-9]+)@")  # a reference to a rule in a translation
_TOKEN = re.compile("<([0-9]+)>")  # a reference to an item of ``tokens``


class Gbnf:
    """A GBNF grammar, as llama.cpp's parser accepts it. Left recursion is accepted too.

    ``tokens`` has the tokens that it names: their text (``<text>``) or id, and whether any other token
    is meant instead (``!<text>``).

    Raises:
        GrammarError: with line, column and reason.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._previous = ""  # the name of the last rule
        self._numbers: dict[str, int] = {}  # of all names
        self._translations: dict[int, str] = {}  # of the rules
        self.tokens: list[tuple[str | int, bool]] = []
        self._skip(_LINES)
        while self._next():
            self._rule()
        if not self._translations:
            raise GrammarError("the grammar does not parse: it has no rule")
        if "root" not in self._numbers:
            raise GrammarError("the grammar has no rule 'root', its start symbol")
        for name, number in self._numbers.items():
            if number not in self._translations:
                raise GrammarError(f"the grammar does not parse: the rule {name!r} is not defined")

    # -- the text ----------------------------------------------------------------------------------

    def _next(self, ahead: int = 0) -> str:
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Skip the text that matches here, and return it."""
        match = pattern.match(self._text, self._at)
        text = match.group() if match else ""
        self._at += len(text)
        return text

    def _blank(self, nested: bool) -> None:
        self._skip(_LINES if nested else _SPACE)

    def _fail(self, reason: str, at: int | None = None, *, hint: str | None = None) -> GrammarError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        return GrammarError(
            f"the grammar does not parse: line {line}, column {column}: {reason}", hint=hint
        )

    def _expect(self, symbol: str) -> None:
        if not self._text.startswith(symbol, self._at):
            raise self._fail(f"expected {symbol!r}, found {self._found()}")
        self._at += len(symbol)

    def _found(self) -> str:
        return repr(self._next()) if self._next() else "the end"

    def _number_of(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    # -- llama_grammar_parser ----------------------------------------------------------------------

    def _rule(self) -> None:
        name = self._skip(_WORD)
        self._skip(_SPACE)
        if self._previous and _CONTINUES.match(self._text, self._at):
            expected = "'::='" if name else "the name of a rule"
            raise self._fail(
                f"expected {expected}, found {self._found()}: "
                f"a line break ended the rule {self._previous!r}",
                hint=_LINES_OF_RULES,
            )
        if not name:
            raise self._fail(
                f"expected the name of a rule, found {self._next()!r}",
                hint='a grammar is a list of rules, for example: root ::= "yes" | "no"',
            )
        number = self._number_of(name)
        self._expect("::=")
        self._skip(_LINES)
        self._translations[number] = self._alternatives(nested=False)
        if self._text.startswith("::=", self._at):
            raise self._fail(
                "expected a new line or the end, found '::=': "
                f"what precedes it was read as part of the rule {name!r}",
                hint=_LINES_OF_RULES,
            )
        if self._next() not in ("\r", "\n", ""):
            raise self._fail(f"expected a new line or the end, found {self._next()!r}")
        self._previous = name
        self._skip(_LINES)

    def _alternatives(self, nested: bool) -> str:
        """Read alternatives; return their translation."""
        sequences = [self._sequence(nested)]
        while self._next() == "|":
            self._at += 1
            self._skip(_LINES)
            sequences.append(self._sequence(nested))
        return " | ".join(sequences)

    def _sequence(self, nested: bool) -> str:
        items: list[str] = []  # the translations of the items
        may_repeat = False  # whether an item comes before
        while c := self._next():
            at = self._at
            if c in "*+?{":
                self._at += 1
                bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(c)
                low, high = bounds or self._bounds(at, nested)
                self._blank(nested)
                if not may_repeat:
                    raise self._fail(f"{c!r} has nothing to repeat", at)
                items[-1] = f"({items[-1]}{{{low},{'' if high is None else high}}})"
                may_repeat = high != 0
                continue
            may_repeat = True
            if c == "(":
                items.append(self._group())
            elif c == '"':
                inside = self._characters("string", '"', at)
                literal = " ".join(f"/{character}/" for character in inside)
                items.append(f"({literal})" if literal else "")
                may_repeat = bool(literal)
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
            self._blank(nested)
        return " ".join(filter(None, items)) or '""'

    def _group(self) -> str:
        """Read a group; return its translation."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._fail(f"nested deeper than {_MAX_DEPTH}")
        self._at += 1
        self._skip(_LINES)
        translation = self._alternatives(nested=True)
        self._depth -= 1
        self._expect(")")
        return f"({translation})"

    def _bounds(self, at: int, nested: bool) -> tuple[int, int | None]:
        self._blank(nested)
        low = high = self._skip(_INT)
        if not low:
            raise self._fail("expected a number after '{'")
        self._blank(nested)
        if self._next() != "}":
            self._expect(",")
            self._blank(nested)
            high = self._skip(_INT)
            self._blank(nested)
        self._expect("}")
        least, most = _capped(low), _capped(high) if high else None
        if most is not None and most < least:
            raise self._fail(f"the maximum of {{{low},{most}}} is below its minimum", at)
        if max(least, most or 0) > _MAX_REPEAT:
            raise self._fail(f"a repetition is above the limit of {_MAX_REPEAT}", at)
        return least, most

    def _set(self) -> str:
        """Read a set; return its translation."""
        at = self._at
        opening = "/["
        if self._next(1) == "^":
            self._at += 1
            opening = r"/[^\x{0}"  # llama.cpp's text ends at a NUL
        members = self._characters("set", "]", at)
        if not members:
            raise self._fail("an empty set matches nothing", at)
        return f"{opening}{''.join(members)}]/"

    def _characters(self, kind: str, end: str, at: int) -> list[str]:
        """Read the inside of a string or a set, which begins at ``at``, and its end.

        Return its characters as regular expressions; a set may have ranges.
        """
        self._at += 1
        members: list[str] = []
        while self._next() != end:
            start, first = self._at, self._character(kind, at)
            members.append(f"\\x{{{first:x}}}")
            if end == "]" and self._next() == "-" and self._next(1) != "]":
                self._at += 1
                last = self._character(kind, at)
                if last < first:
                    raise self._fail("the range ends before it begins", start)
                members[-1] += f"-\\x{{{last:x}}}"
        self._at += 1
        return members

    def _character(self, kind: str, at: int) -> int:
        """Read a character of a string or a set; return its code point."""
        if not self._next():
            raise self._fail(f"the {kind} does not end", at)
        if self._next() != "\\":
            self._at += 1
            return ord(self._text[self._at - 1])
        letter = self._next(1)
        n_digits = _HEX_DIGITS.get(letter, 0)
        if not n_digits and letter not in _ESCAPED:
            raise self._fail(f"unknown escape \\{letter}")
        self._at += 2
        digits = self._text[self._at : self._at + n_digits]
        if not _HEX.fullmatch(digits) or len(digits) < n_digits:
            raise self._fail(f"expected {n_digits} hexadecimal digits after \\{letter}")
        self._at += n_digits
        return int(digits, 16) if n_digits else ord(_ESCAPED[letter])

    def _token(self) -> str:
        """Read the name of a token; return a reference to it."""
        is_other = self._next() == "!"
        self._at += is_other
        at = self._at
        self._expect("<")
        if self._next() == "[":
            self._at += 1
            digits = self._skip(_INT)
            if not digits or len(digits) > 10 or int(digits) >= 1 << 32:
                raise self._fail(f"expected the id of a token, found {digits or self._next()!r}")
            self._expect("]>")
            self.tokens.append((int(digits), is_other))
        else:
            end = self._text.find(">", self._at)
            if end < 0:
                raise self._fail("expected '>', found the end", at)
            self._at = end + 1
            self.tokens.append((self._text[at : self._at], is_other))
        return f"<{len(self.tokens) - 1}>"

    # -- the translation ---------------------------------------------------------------------------

    def lark(self, model: Model | None = None) -> str:
        """Return the same grammar in llguidance's dialect of Lark.

        Without recursion, it is a single terminal, a regular expression. With recursion, or if it names
        tokens, each character is its own terminal, because longer terminals would be matched greedily.
        Forced text may be split into any tokens, as in llama.cpp.

        Args:
            model: has the tokens that the grammar names; None = use an arbitrary token for each.

        Raises:
            GrammarError: the vocabulary lacks such a token, or the token is one that ends the text.
        """
        root = self._numbers["root"]
        uses = {n: map(int, _REFERENCE.findall(text)) for n, text in self._translations.items()}
        reached: dict[int, list[int]] = {}
        todo = [root]
        while todo:
            number = todo.pop()
            if number not in reached:
                reached[number] = list(uses[number])
                todo += reached[number]
        try:
            TopologicalSorter(reached).prepare()
            name = r"r\1" if self.tokens else r"R\1"
        except CycleError:
            name = r"r\1"
        lines = [f"%llguidance {NO_FORCING}", f"start: @{root}@"]
        lines += [f"@{number}@: {self._translations[number]}" for number in reached]
        text = _REFERENCE.sub(name, "\n".join(lines))
        return _TOKEN.sub(lambda at: f"<[{self._ids(int(at[1]), model)}]>", text)

    def _ids(self, number: int, model: Model | None) -> str:
        """Return the ids of a token, or of all others, as Lark writes them."""
        if model is None:
            return "0"
        token, is_other = self.tokens[number]
        if isinstance(token, str):
            ids = {*model.handle.tokenize(token.encode(), False, True)}
            lacks = (
                f"{token!r}, which is several tokens in this vocabulary" if len(ids) != 1 else ""
            )
        else:
            ids = {token}
            lacks = f"<[{token}]>, but this vocabulary has {model.n_vocab} tokens"
            lacks = lacks if token >= model.n_vocab else ""
        if not (lacks or is_other) and model.is_eog(*ids):
            lacks = f"{token!r}, which ends every text of this model"
        if lacks:
            raise GrammarError(f"the grammar refers to {lacks}")
        return ranges({*range(model.n_vocab)} - ids - model.eog_tokens if is_other else ids)


def ranges(ids: Iterable[int]) -> str:
    """Return token ids as Lark's ranges: "2-5,9"."""
    runs: list[list[int]] = []
    for token in sorted(ids):
        if runs and token == runs[-1][1] + 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def _capped(digits: str) -> int:
    return int(digits) if len(digits) < 9 else 10**9
