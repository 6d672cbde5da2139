"""Five tasks for small models, each a generator of items: ``item(seed, level)``.

An item is a prompt with examples and functions that read the answer in a text. ``is_valid`` and
``constraint`` know the prompt and never the right answer, which is compared with what ``read`` finds. A
level is how hard a task is: `benchmarks.answers` chooses it on items of other seeds.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LEVELS", "TASKS", "Item", "Order", "item"]


class Order:
    """The constraint of an order in JSON: its total is the sum of its own lines."""

    _TOTAL = re.compile(r'"total":\s*(\d*)')

    def prefix(self, text: str) -> bool:
        """Return whether the digits of the total, as far as they go, begin the sum."""
        found = self._TOTAL.search(text)
        if found is None:
            return True
        total = str(_total(text[: found.start()]))
        digits = found[1]
        is_over = found.end() < len(text)
        return digits == total if is_over else total.startswith(digits)

    def complete(self, text: str) -> bool:
        """Return whether the total is there and right."""
        found = self._TOTAL.search(text)
        return found is not None and found[1] == str(_total(text[: found.start()]))


def _total(text: str) -> int:
    numbers = re.findall(r'"qty":\s*(\d+),\s*"price":\s*(\d+)', text)
    return sum(int(qty) * int(price) for qty, price in numbers)


@dataclass(frozen=True)
class Words:
    """The constraint of a list of words: how many, how each begins, and a letter that none has."""

    n: int
    initials: str = ""  # one for each word, or one for all
    without: str = ""

    def prefix(self, text: str) -> bool:
        """Return whether the finished words are right and the last one may become so."""
        return self._allows(text, is_end=False)

    def complete(self, text: str) -> bool:
        """Return whether these are the words."""
        return self._allows(text, is_end=True)

    def _allows(self, text: str, *, is_end: bool) -> bool:
        if not re.fullmatch(r"( [a-z]+)* ?", text) or (is_end and not text.strip()):
            return False
        words = text.split()
        finished = words if is_end or text.endswith(" ") else words[:-1]
        n_open = len(words) - len(finished)
        is_right = all(self._fits(word, i) for i, word in enumerate(words))
        is_new = len(set(finished)) == len(finished)
        if is_end:
            return is_right and is_new and len(words) == self.n
        return is_right and is_new and len(finished) + max(n_open, text.endswith(" ")) <= self.n

    def _fits(self, word: str, i: int) -> bool:
        initials = self.initials * self.n if len(self.initials) == 1 else self.initials
        begins = not initials or (i < len(initials) and word[0] == initials[i])
        return begins and not (self.without and self.without in word)


@dataclass(frozen=True)
class Copied:
    """The constraint of an answer that stands in a text, word by word."""

    source: str

    def prefix(self, text: str) -> bool:
        """Return whether the source goes on like this somewhere, at the beginning of a word."""
        text = text.lstrip(" ")
        return not text or re.search(rf"\b{re.escape(text)}", self.source) is not None

    def complete(self, text: str) -> bool:
        """Return whether these are whole words of the source."""
        text = text.strip()
        return bool(text) and re.search(rf"\b{re.escape(text)}(?!\w)", self.source) is not None


@dataclass(frozen=True)
class Item:
    """A problem.

    Attributes:
        prompt: with examples.
        answer: the right one; "" where there is none: then what is valid is right.
        read: finds the answer in a text; None = there is none.
        constraint: which texts are valid.
        max_tokens: of a text, which "\\n" ends.
        schema: of a text in JSON.
    """

    prompt: str
    answer: str
    read: Callable[[str], str | None]
    constraint: Order | Words | Copied | None = None
    max_tokens: int = 16
    schema: Mapping[str, object] | None = None

    def is_valid(self, text: str) -> bool:
        """Return whether a text keeps to the rule of its task, right or not."""
        if self.constraint is None:
            return self.read(text) is not None
        return self.constraint.complete(text)

    def is_right(self, text: str) -> bool:
        """Return whether a text has the right answer."""
        return self.judge(self.read(text)) if self.answer else self.is_valid(text)

    def judge(self, answer: object) -> bool:
        """Return whether an answer is the right one."""
        return str(answer) == self.answer


NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Jack", "Nina", "Max", "Kate", "Dan", "Eva")
THINGS = ("apples", "pens", "books", "coins", "eggs", "cards", "shells", "stamps", "nuts", "balls")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _asked(shots: Sequence[tuple[str, str]], question: str) -> str:
    examples = "".join(f"Question: {each}\nAnswer: {worked}\n\n" for each, worked in shots)
    return f"{examples}Question: {question}\nAnswer:"


def _number(text: str) -> str | None:
    """Return the number after the equals sign."""
    found = re.search(r"=\s*(\d+)", text)
    return found[1] if found else None


def _first_line(text: str) -> str | None:
    return text.strip().rstrip(".") or None


# -- word problems of one step -------------------------------------------------------------------------

_PROBLEMS: tuple[tuple[str, str], ...] = (
    ("+", "{name} has {a} {things} and finds {b} more. How many {things} does {name} have?"),
    ("+", "There are {a} red {things} and {b} blue {things}. How many {things} are there?"),
    ("+", "{name} reads {a} pages on Monday and {b} pages on Sunday. How many pages is that?"),
    ("+", "One box holds {a} {things}, another holds {b}. How many {things} do they hold?"),
    ("-", "{name} has {a} {things} and loses {b}. How many {things} are left?"),
    ("-", "A shop has {a} {things} and sells {b} of them. How many {things} are left?"),
    ("-", "There are {a} {things} on a table. {name} takes {b}. How many {things} are left?"),
    ("-", "{name} needs {a} {things} and has {b}. How many {things} are missing?"),
    ("x", "Each bag holds {b} {things}. How many {things} are in {a} bags?"),
    ("x", "{name} buys {a} {things} for {b} dollars each. How many dollars is that?"),
    ("x", "{name} walks {b} miles a day. How many miles are that in {a} days?"),
    ("x", "There are {a} rows of {b} {things}. How many {things} are there?"),
)
_PROBLEM_SHOTS = (
    ("Tim has 8 pens and finds 5 more. How many pens does he have?", "8 + 5 = 13"),
    ("A tree has 17 pears. 9 fall down. How many are left?", "17 - 9 = 8"),
    ("Each box has 6 cups. How many cups are in 7 boxes?", "7 x 6 = 42"),
    ("A bag has 34 beans, another has 28. How many beans are there?", "34 + 28 = 62"),
)


def _problem(rng: random.Random, most: int) -> Item:
    sign, text = rng.choice(_PROBLEMS)
    a, b = rng.randint(2, most), rng.randint(2, most)
    if sign == "-":
        a, b = max(a, b) + 1, min(a, b)
    if sign == "x":
        a, b = min(a, 12), min(b, 9)
    right = {"+": a + b, "-": a - b, "x": a * b}[sign]
    question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    return Item(_asked(_PROBLEM_SHOTS, question), str(right), _number)


# -- units, times, dates -------------------------------------------------------------------------------

_UNITS = (("weeks", "days", 7), ("hours", "minutes", 60), ("dozens", "eggs", 12))
_UNIT_SHOTS = (
    ("Which day is 2 days after Tuesday?", "Wednesday, Thursday = Thursday"),
    ("How many days are 2 weeks and 3 days?", "14 + 3 = 17"),
    ("It is 4 o'clock. Which hour is it 3 hours later?", "4 + 3 = 7"),
    ("Which day is 3 days after Friday?", "Saturday, Sunday, Monday = Monday"),
)


def _dated(rng: random.Random, most: int) -> Item:
    kind = rng.choice(("day", "unit", "hour"))
    offset = rng.randint(1, most)
    if kind == "day":
        day = rng.randrange(7)
        question = f"Which day is {offset} days after {DAYS[day]}?"
        right = DAYS[(day + offset) % 7]
    elif kind == "unit":
        large, small, size = rng.choice(_UNITS)
        rest = rng.randint(1, 9)
        question = f"How many {small} are {offset + 1} {large} and {rest} {small}?"
        right = str((offset + 1) * size + rest)
    else:
        hour = rng.randint(1, 12)
        question = f"It is {hour} o'clock. Which hour is it {offset} hours later?"
        right = str((hour + offset - 1) % 12 + 1)
    return Item(_asked(_UNIT_SHOTS, question), right, _after_equals, max_tokens=24)


def _after_equals(text: str) -> str | None:
    found = re.search(r"=\s*(\w+)\s*\.?\s*$", text)
    return found[1] if found else None


# -- rules of letters ----------------------------------------------------------------------------------

_NUMERALS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
_LETTERS = (
    "Three words that begin with t: table tree tiger\n"
    "Four words without the letter o: cat ship tree black\n"
    "Three words that begin with d, a, y: dog apple yellow\n"
    "Two words that begin with f: fish forest\n"
)


def _letters(rng: random.Random, n: int) -> Item:
    kind = rng.choice(("begin", "without", "acrostic"))
    if kind == "begin":
        letter = rng.choice("abcdghlmprsw")
        rule, words = f"that begin with {letter}", Words(n, initials=letter)
    elif kind == "without":
        letter = rng.choice("aeist")
        rule, words = f"without the letter {letter}", Words(n, without=letter)
    else:
        initials = "".join(rng.choice("abcdefghlmoprstw") for _ in range(n))
        rule, words = f"that begin with {', '.join(initials)}", Words(n, initials=initials)
    prompt = f"{_LETTERS}{_NUMERALS[n].capitalize()} words {rule}:"
    return Item(prompt, "", _first_line, words, max_tokens=8 * n)


# -- orders in JSON ------------------------------------------------------------------------------------

_ORDER_SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "qty": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["name", "qty", "price"],
                "additionalProperties": False,
            },
        },
        "total": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["items", "total"],
    "additionalProperties": False,
}


def _order_json(lines: Sequence[tuple[str, int, int]]) -> str:
    items = [{"name": name, "qty": qty, "price": price} for name, qty, price in lines]
    return json.dumps({"items": items, "total": sum(qty * price for _, qty, price in lines)})


def _order_text(lines: Sequence[tuple[str, int, int]]) -> str:
    return ", ".join(f"{qty} {name} at {price} dollars each" for name, qty, price in lines)


def _read_order(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text))
    except ValueError:
        return None


def _order(rng: random.Random, n: int) -> Item:
    examples = ([("cups", 2, 3)], [("pens", 4, 2), ("hats", 1, 9)], [("bags", 3, 5)])
    shots = "".join(f"Order: {_order_text(x)}\nJSON:\n{_order_json(x)}\n\n" for x in examples)
    lines = [(x, rng.randint(1, 6), rng.randint(2, 9)) for x in rng.sample(THINGS, n)]
    right = _order_json(lines)
    prompt = f"{shots}Order: {_order_text(lines)}\nJSON:\n"
    return Item(prompt, right, _read_order, Order(), 28 + 24 * n, _ORDER_SCHEMA)


# -- values out of a record ----------------------------------------------------------------------------

_CITIES = ("Oslo", "Bergen", "Ghent", "Turin", "Lyon", "Porto", "Graz", "Malmo", "Cork", "Basel")
_FAMILIES = (
    "Berg",
    "Holm",
    "Ricci",
    "Dubois",
    "Keller",
    "Novak",
    "Lund",
    "Costa",
    "Meyer",
    "Byrne",
)
_JOBS = ("nurse", "baker", "pilot", "teacher", "lawyer", "cook", "farmer", "painter", "clerk")
_RECORD_SHOTS = (
    (
        "Paul Weber, a tailor of 51, was born in Bonn and lives in Kiel. His boss is Ida Kranz.",
        "Where does Paul Weber live?",
        "Kiel",
    ),
    (
        "Rosa Lopez, a judge of 44, was born in Vigo and lives in Leon. Her boss is Juan Ortiz.",
        "Who is the boss of Rosa Lopez?",
        "Juan Ortiz",
    ),
    (
        "Emil Stein, a driver of 29, was born in Bern and lives in Chur. His boss is Otto Frei.",
        "How old is Emil Stein?",
        "29",
    ),
)


def _record(rng: random.Random, n: int) -> Item:
    people = [
        (f"{first} {last}", job, str(age), born, lives, f"{boss} {its}")
        for first, boss, last, its, job, age, born, lives in zip(
            rng.sample(NAMES, n), rng.sample(NAMES, n), rng.sample(_FAMILIES, n),
            rng.sample(_FAMILIES, n), rng.sample(_JOBS, n), rng.sample(range(20, 70), n),
            rng.sample(_CITIES, n), rng.sample(_CITIES, n), strict=True,
        )
    ]  # fmt: skip
    text = " ".join(
        f"{name}, a {job} of {age}, was born in {born} and lives in {lives}. "
        f"The boss of {name} is {boss}."
        for name, job, age, born, lives, boss in people
    )
    name, job, age, born, lives, boss = rng.choice(people)
    question, right = rng.choice((
        (f"Where does {name} live?", lives), (f"Where was {name} born?", born),
        (f"How old is {name}?", age), (f"What is {name} by profession?", job),
        (f"Who is the boss of {name}?", boss),
    ))  # fmt: skip
    shots = "".join(f"Text: {a}\nQuestion: {b}\nAnswer: {c}\n\n" for a, b, c in _RECORD_SHOTS)
    prompt = f"{shots}Text: {text}\nQuestion: {question}\nAnswer:"
    return Item(prompt, right, _first_line, Copied(text), max_tokens=10)


TASKS: Mapping[str, Callable[[random.Random, int], Item]] = {
    "problems": _problem, "dates": _dated, "letters": _letters, "orders": _order,
    "records": _record,
}  # fmt: skip
LEVELS: Mapping[str, Sequence[int]] = {  # the easiest first
    "problems": (5, 9, 15, 25, 50), "dates": (2, 4, 7, 12), "letters": (2, 3, 4, 5),
    "orders": (1, 2, 3), "records": (1, 2, 3, 4),
}  # fmt: skip


def item(task: str, seed: int, level: int) -> Item:
    """Return the item of a task that a seed gives."""
    return TASKS[task](random.Random(f"{task} {seed}"), level)
