"""A parser for GBNF that accepts what llama.cpp's parser accepts, and its translation to Lark.

It follows llama.cpp's parser step by step, so an error has its line, column and reason. It also rejects
grammars that llama.cpp accepts but that make it hang or overflow its stack, because grammars that name
tokens run on llama.cpp's own sampler.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from graphlib import TopologicalSorter
from itertools import accumulate

from ...errors import GrammarError

__all__ = ["NO_FORCING", "Gbnf"]

NO_FORCING = '{"no_forcing": true}'  # text that is certain may be split into any tokens

_MAX_DEPTH = 200
_MAX_REPEAT = 2000
_MAX_PATH = 1000  # nested groups and rules: with about 2,500 llguidance overflows a stack of 8 MB
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", **{c: c for c in '\\"[]-'}}
_WORD = re.compile(r"[a-zA-Z0-9-]*")
_HEX = re.compile(r"[0-9a-fA-F]*")
_INT = re.compile(r"[0-9]*")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
# What may follow a name or a blank inside a sequence. The beginning of a rule does not match.
_CONTINUES = re.compile(r"""[|"\[(<!.)*+?{\r\na-zA-Z0-9]|\Z""")
_LINES_OF_RULES = (
    "a rule continues on the next line only after '::=' or '|', or inside parentheses; "
    "a '|' with nothing before it allows the empty text"
)
_REFERENCE = re.compile("@([0-9]+)@")  # a reference to a rule in a translation

# A sequence of symbols. Each is the number of a rule, or None for a character or a token.
Sequence = list[int | None]


class Gbnf:
    """A GBNF grammar that llama.cpp accepts, as the rules that its parser creates.

    ``rules`` maps each rule's number to its alternatives, ``token_texts`` lists the tokens written as
    ``<text>``: each must be one token of the vocabulary. ``names_tokens`` is True if it refers to any
    token, by its text or its id, ``token_ids`` has these ids. ``repeats_empty`` is True if something that
    may be empty is repeated: llguidance can do that, llama.cpp cannot.

    Raises:
        GrammarError: with line, column and reason.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._previous = ""  # the name of the last rule
        self._numbers: dict[str, int] = {}
        self._n_symbols = 0
        self._end = 0  # one above the highest number of a defined rule
        self.rules: dict[int, list[Sequence]] = {}
        self.token_texts: list[str] = []
        self.token_ids: list[int] = []
        self.names_tokens = False
        self._translations: dict[int, str] = {}  # the translations of named rules
        self._skip(_LINES)
        while self._next():
            self._rule()
        if not self.rules:
            raise GrammarError("the grammar does not parse: it has no rule")
        if "root" not in self._numbers:
            raise GrammarError("the grammar has no rule 'root', its start symbol")
        # An undefined name is allowed if only a rule that was replaced used it, and no later rule is
        # defined.
        used = {symbol for ways in self.rules.values() for way in ways for symbol in way}
        for name, number in self._numbers.items():
            if number not in self.rules and (number in used or number < self._end):
                raise GrammarError(f"the grammar does not parse: the rule {name!r} is not defined")
        self.root = self._numbers["root"]
        self._names = {number: name for name, number in self._numbers.items()}
        self.repeats_empty = False
        self._check_left_recursion()

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
        ways, self._translations[number] = self._alternatives(nested=False)
        self._define(number, ways)
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

    def _alternatives(self, nested: bool) -> tuple[list[Sequence], str]:
        """Read alternatives; return them, and their translation."""
        sequences = [self._sequence(nested)]
        while self._next() == "|":
            self._at += 1
            self._skip(_LINES)
            sequences.append(self._sequence(nested))
        return [sequence for sequence, _ in sequences], " | ".join(text for _, text in sequences)

    def _sequence(self, nested: bool) -> tuple[Sequence, str]:
        sequence: Sequence = []
        items: list[str] = []  # the translations of the items
        last = 0  # the start of the item that a repetition would repeat
        n_rules = 1  # the number of rules in that item
        while c := self._next():
            at = self._at
            if c in "*+?{":
                self._at += 1
                bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(c)
                low, high = bounds or self._bounds(at, nested)
                self._blank(nested)
                if last == len(sequence):
                    raise self._fail(f"{c!r} has nothing to repeat", at)
                n_rules *= high or low or 1
                if n_rules > _MAX_REPEAT:
                    most = f"the repetition makes {n_rules} rules, above the limit of {_MAX_REPEAT}"
                    raise self._fail(most, at)
                items[-1] = f"({items[-1]}{{{low},{'' if high is None else high}}})"
                self._repeat(sequence, last, low, high)
                continue
            if c == "(":
                sequence, last, n_rules = self._group(sequence, items, nested)
                continue
            start = len(sequence)
            if c == '"':
                literal = self._literal()
                sequence.extend([None] * len(literal))
                items.append(
                    f"({' '.join(f'/{character}/' for character in literal)})" if literal else ""
                )
            elif c == "[":
                items.append(self._set())
                sequence.append(None)
            elif c in "<!":
                self._token()
                sequence.append(None)
                items.append("")
            elif c == ".":
                self._at += 1
                sequence.append(None)
                items.append(r"/[^\x{0}]/")
            elif name := self._skip(_WORD):
                sequence.append(self._number_of(name))
                items.append(f"(@{sequence[-1]}@)")
            else:
                break
            self._blank(nested)
            last, n_rules = start, 1
        return sequence, " ".join(filter(None, items)) or '""'

    def _repeat(self, sequence: Sequence, last: int, low: int, high: int | None) -> None:
        """Repeat the item that starts at ``last`` ``low`` to ``high`` times."""
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

    def _group(
        self, sequence: Sequence, items: list[str], nested: bool
    ) -> tuple[Sequence, int, int]:
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
        ways, translation = self._alternatives(nested=True)
        self._define(number, ways)
        items.append(f"({translation})")
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

    def _literal(self) -> list[str]:
        """Read a string; return its characters as regular expressions."""
        at = self._at
        self._at += 1
        characters: list[str] = []
        while self._next() != '"':
            if not self._next():
                raise self._fail("the string does not end", at)
            characters.append(self._character())
        self._at += 1
        return characters

    def _set(self) -> str:
        """Read a set; return its translation."""
        at = self._at
        self._at += 1
        members: list[str] = []
        opening = "/["
        if self._next() == "^":
            self._at += 1
            opening = r"/[^\x{0}"  # a NUL ends the text for llama.cpp
        while self._next() != "]":
            if not self._next():
                raise self._fail("the set does not end", at)
            start = self._at
            members.append(first := self._character())
            if self._next() == "-" and self._next(1) != "]":
                self._at += 1
                if not self._next():
                    raise self._fail("the set does not end", at)
                last = self._character()
                if int(last[3:-1], 16) < int(first[3:-1], 16):
                    raise self._fail("the range ends before it begins", start)
                members[-1] += f"-{last}"
        if not members:
            raise self._fail("an empty set matches nothing", at)
        self._at += 1
        return f"{opening}{''.join(members)}]/"

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

    def _token(self) -> None:
        self.names_tokens = True
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
            self.token_ids.append(int(digits))
            return
        end = self._text.find(">", self._at)
        if end < 0:
            raise self._fail("expected '>', found the end", at)
        self._at = end + 1
        self.token_texts.append(self._text[at : self._at])

    # -- the rules ---------------------------------------------------------------------------------

    def _check_left_recursion(self) -> None:
        """Reject left recursion, also of kinds that llama.cpp overlooks (it then loops for ever)."""
        direct = {n for n, ways in self.rules.items() if [] in ways}  # as in llama.cpp
        nullable = _nullable(self.rules)
        for empty, forbids_last in ((direct, True), (nullable, False)):
            firsts = {n: list(_leftmost(ways, empty)) for n, ways in self.rules.items()}
            component = _components({n: [to for to, _ in symbols] for n, symbols in firsts.items()})
            named = {component[number] for number in self._names}
            for number, symbols in firsts.items():
                for to, is_last in symbols:
                    # If the recursion is at the end of the alternative, llama.cpp detects it.
                    if component[to] == component[number] and (forbids_last or not is_last):
                        if self.names_tokens or component[number] in named:
                            raise self._left_recursion(number)
                        self.repeats_empty = True

    def _left_recursion(self, number: int) -> GrammarError:
        name = self._names.get(number)
        where = f"the rule {name!r}" if name else "a group or a repetition"
        return GrammarError(
            f"the grammar has left recursion: {where} can begin with itself",
            hint="write the repetition with * or +, or put something before it",
        )

    @property
    def lark(self) -> str:
        """The same grammar in llguidance's dialect of Lark.

        Without recursion it is one terminal, a regular expression. With recursion every character is a
        terminal of its own, because longer ones would be matched greedily. Forced text may be split into
        any tokens, as in llama.cpp.
        """
        reached, is_recursive, path = self._reached()
        if path > _MAX_PATH:
            raise GrammarError(
                f"the grammar is {path} groups deep, rule in rule, above the limit of {_MAX_PATH}",
                hint="use fewer groups, or fewer rules that stand for other rules",
            )
        name = r"r\1" if is_recursive else r"R\1"
        lines = [f"%llguidance {NO_FORCING}", f"start: @{self.root}@"]
        lines += [f"@{number}@: {self._translations[number]}" for number in reached]
        return _REFERENCE.sub(name, "\n".join(lines))

    def _reached(self) -> tuple[list[int], bool, int]:
        """Return the named rules that the start symbol needs, whether one contains itself, and the depth.

        The depth is the number of groups on the deepest path from rule to rule. For rules that contain
        each other it counts the groups of all of them.
        """
        uses = {
            number: [int(n) for n in _REFERENCE.findall(text)]
            for number, text in self._translations.items()
        }
        reached, todo = [self.root], [self.root]
        while todo:
            for number in uses[todo.pop()]:
                if number not in reached:
                    reached.append(number)
                    todo.append(number)
        of = _components({number: uses[number] for number in reached})
        depths = dict.fromkeys(of.values(), 0)
        below: dict[int, set[int]] = {group: set() for group in depths}
        for number in reached:
            depths[of[number]] += _n_nested(self._translations[number])
            below[of[number]] |= {of[n] for n in uses[number]} - {of[number]}
        for group in TopologicalSorter(below).static_order():
            depths[group] += max((depths[other] for other in below[group]), default=0)
        recursive = len(depths) < len(reached) or any(n in uses[n] for n in reached)
        return reached, recursive, depths[of[self.root]]


def _n_nested(text: str) -> int:
    """Return how many parentheses are open at once in a translation."""
    return max(accumulate((c == "(") - (c == ")") for c in text), default=0)


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


def _nullable(rules: dict[int, list[Sequence]]) -> set[int]:
    """Return the rules that match the empty text: the smallest set with an alternative within it."""
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
        if number not in known and any(known.issuperset(way) for way in rules[number]):
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
