"""A parser for GBNF that accepts what llama.cpp's parser accepts. Pure Python.

It follows llama.cpp's parser step by step, so that a grammar is checked before llama.cpp reads it, for
two
reasons: llama.cpp prints its errors to standard error instead of its log, and some grammars that it
    accepts
make it hang or overflow its stack. These are rejected, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ...errors import GrammarError

__all__ = ["Gbnf"]

_MAX_DEPTH = 200
_MAX_REPEAT = 2000
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPED = set('tnr\\"[]-')
_WORD = re.compile(r"[a-zA-Z0-9-]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
_INT = re.compile(r"[0-9]*")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")

# A sequence of symbols: the number of a rule, or None for a character or a token.
Sequence = list[int | None]


class Gbnf:
    """A GBNF grammar that llama.cpp accepts, as the rules that its parser creates.

    ``rules`` maps each rule's number to its alternatives, ``token_texts`` lists the tokens written as
    ``<text>``: each must be one token of the vocabulary.

    Raises:
        GrammarError: with line, column and reason.
    """

    def __init__(self, text: str, root: str = "root") -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._numbers: dict[str, int] = {}
        self._n_symbols = 0
        self._end = 0  # one above the highest number of a defined rule
        self.rules: dict[int, list[Sequence]] = {}
        self.token_texts: list[str] = []
        self._skip(_LINES)
        while self._next():
            self._rule()
        if not self.rules:
            raise GrammarError("the grammar does not parse: it has no rule")
        if root not in self._numbers:
            raise GrammarError(f"the grammar has no rule {root!r}, its start symbol")
        # An undefined name is allowed if only a rule that was replaced used it, and no later rule is
        # defined.
        used = {symbol for ways in self.rules.values() for way in ways for symbol in way}
        for name, number in self._numbers.items():
            if number not in self.rules and (number in used or number < self._end):
                raise GrammarError(f"the grammar does not parse: the rule {name!r} is not defined")
        self.root = self._numbers[root]
        self._names = {number: name for name, number in self._numbers.items()}
        self._check_left_recursion()

    # -- the text ----------------------------------------------------------------------------------

    def _next(self, ahead: int = 0) -> str:
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _skip(self, what: re.Pattern[str]) -> str:
        """Skip the text that matches here, and return it."""
        match = what.match(self._text, self._at)
        found = match.group() if match else ""
        self._at += len(found)
        return found

    def _blank(self, nested: bool) -> None:
        self._skip(_LINES if nested else _SPACE)

    def _fail(self, reason: str, at: int | None = None) -> GrammarError:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        return GrammarError(f"the grammar does not parse: line {line}, column {column}: {reason}")

    def _expect(self, symbol: str) -> None:
        if not self._text.startswith(symbol, self._at):
            found = self._next()
            raise self._fail(
                f"expected {symbol!r}, found {found!r}"
                if found
                else f"expected {symbol!r}, found the end"
            )
        self._at += len(symbol)

    def _number_of(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = self._new()
        return self._numbers[name]

    def _new(self) -> int:
        self._n_symbols += 1
        return self._n_symbols - 1

    def _define(self, number: int, ways: list[Sequence]) -> None:
        self.rules[number] = ways
        self._end = max(self._end, number + 1)

    # -- llama_grammar_parser ----------------------------------------------------------------------

    def _rule(self) -> None:
        name = self._skip(_WORD)
        if not name:
            raise self._fail(f"expected the name of a rule, found {self._next()!r}")
        self._skip(_SPACE)
        number = self._number_of(name)
        self._expect("::=")
        self._skip(_LINES)
        self._define(number, self._alternatives(nested=False))
        if self._next() not in ("\r", "\n", ""):
            raise self._fail(f"expected a new line or the end, found {self._next()!r}")
        self._skip(_LINES)

    def _alternatives(self, nested: bool) -> list[Sequence]:
        found = [self._sequence(nested)]
        while self._next() == "|":
            self._at += 1
            self._skip(_LINES)
            found.append(self._sequence(nested))
        return found

    def _sequence(self, nested: bool) -> Sequence:
        sequence: Sequence = []
        last = 0  # where the item starts that a repetition would repeat
        n_rules = 1  # the number of rules in that item
        while c := self._next():
            at = self._at
            if c in "*+?{":
                self._at += 1
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(c) or self._bounds(
                    at, nested
                )
                self._blank(nested)
                if last == len(sequence):
                    raise self._fail(f"{c!r} has nothing to repeat", at)
                times = high or low or 1
                n_rules *= times
                if n_rules > _MAX_REPEAT:
                    raise self._fail(
                        f"the repetition makes {n_rules} rules, above the limit of {_MAX_REPEAT}",
                        at,
                    )
                item = sequence[last:]
                if low == 0:
                    del sequence[last:]
                n_optional = 1 if high is None else high - low
                if n_optional:
                    # llama.cpp creates one rule for each optional item; one of them is enough here.
                    number = self._new()
                    self._n_symbols += n_optional - 1
                    self._define(number, [[*item, number] if high is None else item, []])
                    self._end = max(self._end, self._n_symbols)
                    sequence.append(number)
                continue
            if c == "(":
                sequence, last, n_rules = self._group(sequence, nested)
                continue
            start = len(sequence)
            if c == '"':
                sequence.extend(self._literal())
            elif c == "[":
                sequence.extend(self._set())
            elif c in "<!":
                self._token()
                sequence.append(None)
            elif c == ".":
                self._at += 1
                sequence.append(None)
            elif name := self._skip(_WORD):
                sequence.append(self._number_of(name))
            else:
                break
            self._blank(nested)
            last, n_rules = start, 1
        return sequence

    def _group(self, sequence: Sequence, nested: bool) -> tuple[Sequence, int, int]:
        at = self._at
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._fail(
                f"nested deeper than {_MAX_DEPTH}: llama.cpp's parser would overflow", at
            )
        self._at += 1
        self._skip(_LINES)
        before = self._n_symbols
        number = self._new()
        self._define(number, self._alternatives(nested=True))
        self._depth -= 1
        n_rules = max(1, self._n_symbols - before)
        self._expect(")")
        self._blank(nested)
        return [*sequence, number], len(sequence), n_rules

    def _bounds(self, at: int, nested: bool) -> tuple[int, int | None]:
        self._blank(nested)
        low = self._skip(_INT)
        if not low:
            raise self._fail("expected a number after '{'")
        self._blank(nested)
        least, most = _capped(low), None
        if self._next() == "}":
            most = least
        else:
            self._expect(",")
            self._blank(nested)
            if high := self._skip(_INT):
                most = _capped(high)
            self._blank(nested)
        self._expect("}")
        if most is not None and most < least:
            raise self._fail(f"the maximum of {{{low},{most}}} is below its minimum", at)
        if max(least, most or 0) > _MAX_REPEAT:
            raise self._fail(f"a repetition is above the limit of {_MAX_REPEAT}", at)
        return least, most

    def _literal(self) -> Sequence:
        at = self._at
        self._at += 1
        found: Sequence = []
        while self._next() != '"':
            if not self._next():
                raise self._fail("the string does not end", at)
            self._character()
            found.append(None)
        self._at += 1
        return found

    def _set(self) -> Sequence:
        at = self._at
        self._at += 1
        if self._next() == "^":
            self._at += 1
        found: Sequence = []
        while self._next() != "]":
            if not self._next():
                raise self._fail("the set does not end", at)
            self._character()
            found = [None]  # a set matches one character
            if self._next() == "-" and self._next(1) != "]":
                self._at += 1
                if not self._next():
                    raise self._fail("the set does not end", at)
                self._character()
        self._at += 1
        return found

    def _character(self) -> None:
        if self._next() != "\\":
            self._at += 1
            return
        kind = self._next(1)
        if kind not in _HEX_DIGITS and (not kind or kind not in _ESCAPED):
            raise self._fail(f"unknown escape \\{kind}")
        self._at += 2
        if kind in _HEX_DIGITS:
            match = _HEX.match(self._text, self._at, self._at + _HEX_DIGITS[kind])
            if match is None or len(match.group()) < _HEX_DIGITS[kind]:
                raise self._fail(f"expected {_HEX_DIGITS[kind]} hexadecimal digits after \\{kind}")
            self._at = match.end()

    def _token(self) -> None:
        if self._next() == "!":
            self._at += 1
        at = self._at
        self._expect("<")
        if self._next() == "[":
            self._at += 1
            digits = self._skip(_INT)
            if not digits or len(digits) > 10 or int(digits) >= 1 << 32:
                raise self._fail(f"expected the id of a token, found {digits or self._next()!r}")
            self._expect("]>")
            return
        end = self._text.find(">", self._at)
        if end < 0:
            raise self._fail("expected '>', found the end", at)
        self._at = end + 1
        self.token_texts.append(self._text[at : self._at])

    # -- the rules ---------------------------------------------------------------------------------

    def _check_left_recursion(self) -> None:
        """Reject left recursion: what llama.cpp rejects, and what it overlooks and then loops forever."""
        direct = {n for n, ways in self.rules.items() if [] in ways}  # all that llama.cpp considers
        nullable = _closure(self.rules, lambda way, known: all(x in known for x in way))
        for empty, forbids_last in ((direct, True), (nullable, False)):
            firsts = {n: list(_leftmost(ways, empty)) for n, ways in self.rules.items()}
            component = _components({n: [to for to, _ in found] for n, found in firsts.items()})
            for number, found in firsts.items():
                for to, is_last in found:
                    # If the recursion is at the end of the alternative, llama.cpp detects it.
                    if component[to] == component[number] and (forbids_last or not is_last):
                        raise self._left_recursion(number)

    def _left_recursion(self, number: int) -> GrammarError:
        name = self._names.get(number)
        where = f"the rule {name!r}" if name else "a group or a repetition"
        return GrammarError(
            f"the grammar has left recursion: {where} can begin with itself",
            hint="write the repetition with * or +, or put something before it",
        )

    @property
    def endless(self) -> bool:
        """True if no finite text completes the grammar."""
        ends = _closure(self.rules, lambda s, known: all(x is None or x in known for x in s))
        return self.root not in ends


def _capped(digits: str) -> int:
    return int(digits) if len(digits) < 9 else 10**9


def _leftmost(ways: Iterable[Sequence], empty: set[int]) -> Iterable[tuple[int, bool]]:
    """Yield each rule that an alternative can begin with, and whether it is its last symbol."""
    for way in ways:
        for i, symbol in enumerate(way):
            if symbol is None:
                break
            yield symbol, i == len(way) - 1
            if symbol not in empty:
                break


def _closure(
    rules: dict[int, list[Sequence]], holds: Callable[[Sequence, set[int]], bool]
) -> set[int]:
    """Return the smallest set of rules with an alternative that ``holds``, given that set."""
    users: dict[int, set[int]] = {n: set() for n in rules}
    for number, ways in rules.items():
        for way in ways:
            for symbol in way:
                if symbol is not None:
                    users[symbol].add(number)
    known: set[int] = set()
    todo = list(rules)
    while todo:
        number = todo.pop()
        if number not in known and any(holds(way, known) for way in rules[number]):
            known.add(number)
            todo.extend(users[number])
    return known


def _components(edges: dict[int, list[int]]) -> dict[int, int]:
    """Return one member of each node's strongly connected component (Kosaraju's algorithm)."""
    order: list[int] = []
    seen: set[int] = set()
    for start in edges:
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(edges[start]))]
        while stack:
            node, following = stack[-1]
            new = next((n for n in following if n not in seen), None)
            if new is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(new)
                stack.append((new, iter(edges[new])))
    back: dict[int, list[int]] = {n: [] for n in edges}
    for node, targets in edges.items():
        for target in targets:
            back[target].append(node)
    component: dict[int, int] = {}
    for start in reversed(order):
        todo = [start]
        while todo:
            node = todo.pop()
            if node not in component:
                component[node] = start
                todo.extend(back[node])
    return component
