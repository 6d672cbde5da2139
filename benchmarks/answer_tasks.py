"""Four tasks for small models. ``item(task, seed, level)`` makes their problems.

An item is a prompt with examples, and a function that reads the answer from a text. The ``constraint``
depends on the prompt, but never on the right answer. The answer that ``read`` returns is
compared with the right one. The level says how hard a task is. `benchmarks.answers` chooses it with items
of other seeds.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LEVELS", "TASKS", "Item", "Order", "item"]


class Order:
    """The constraint of an order in JSON: the total is the sum of the order's lines."""

    _TOTAL = re.compile(r'"total":\s*(\d*)')

    def prefix(self, text: str) -> bool:
        """Return whether the sum begins with the digits of the total so far."""
        match = self._TOTAL.search(text)
        if match is None:
            return True
        total = str(_total(text[: match.start()]))
        digits = match[1]
        is_over = match.end() < len(text)
        return digits == total if is_over else total.startswith(digits)

    def complete(self, text: str) -> bool:
        """Return whether the total is there and right."""
        return _read_order(text) is not None and self.prefix(text) and '"total"' in text


def _total(text: str) -> int:
    numbers = re.findall(r'"qty":\s*(\d+),\s*"price":\s*(\d+)', text)
    return sum(int(qty) * int(price) for qty, price in numbers)


@dataclass(frozen=True)
class Copied:
    """The constraint of an answer that is copied from a text in whole words."""

    source: str

    def prefix(self, text: str) -> bool:
        """Return whether the source contains this text, beginning at a word."""
        text = text.lstrip(" ")
        return not text or re.search(rf"\b{re.escape(text)}", self.source) is not None

    def complete(self, text: str) -> bool:
        """Return whether the source contains this text as whole words."""
        text = text.strip()
        return bool(text) and re.search(rf"\b{re.escape(text)}(?!\w)", self.source) is not None


@dataclass(frozen=True)
class Item:
    """A problem.

    Attributes:
        prompt: the examples and the question.
        answer: the right answer.
        read: returns the answer in a text, None if the text has no answer.
        constraint: says which texts are valid.
        max_tokens: the most tokens of a text; "\\n" ends it, too.
        schema: the JSON schema of a text; None = the text is not JSON.
    """

    prompt: str
    answer: str
    read: Callable[[str], str | None]
    constraint: Order | Copied | None = None
    max_tokens: int = 16
    schema: Mapping[str, object] | None = None

    def is_right(self, text: str) -> bool:
        """Return whether a text has the right answer."""
        return self.judge(self.read(text))

    def judge(self, answer: object) -> bool:
        """Return whether an answer is the right one."""
        return str(answer) == self.answer


NAMES = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Jack", "Nina", "Max", "Kate", "Dan", "Eva")
THINGS = ("apples", "pens", "books", "coins", "eggs", "cards", "shells", "stamps", "nuts", "balls")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def _asked(shots: Sequence[tuple[str, str]], question: str) -> str:
    examples = "".join(f"Question: {example}\nAnswer: {worked}\n\n" for example, worked in shots)
    return f"{examples}Question: {question}\nAnswer:"


def _number(text: str) -> str | None:
    """Return the number after the equals sign."""
    match = re.search(r"=\s*(\d+)", text)
    return match[1] if match else None


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
_DATE_SHOTS = {
    "day": (
        ("Which day is 2 days after Tuesday?", "Wednesday, Thursday = Thursday"),
        ("Which day is 1 day after Sunday?", "Monday = Monday"),
        ("Which day is 3 days after Friday?", "Saturday, Sunday, Monday = Monday"),
    ),
    "unit": (
        ("How many days are 2 weeks and 3 days?", "14 + 3 = 17"),
        ("How many minutes are 1 hour and 5 minutes?", "60 + 5 = 65"),
        ("How many eggs are 3 dozens and 2 eggs?", "36 + 2 = 38"),
    ),
    "hour": (
        ("It is 4 o'clock. Which hour is it 3 hours later?", "4 + 3 = 7"),
        ("It is 11 o'clock. Which hour is it 2 hours later?", "11 + 2 = 1"),
        ("It is 8 o'clock. Which hour is it 1 hour later?", "8 + 1 = 9"),
    ),
}


def _dated(rng: random.Random, most: int) -> Item:
    kind = rng.choice(("day", "unit", "hour"))
    offset = rng.randint(1, most)
    if kind == "day":
        day = rng.randrange(7)
        question = f"Which day is {_many(offset, 'day')} after {DAYS[day]}?"
        right = DAYS[(day + offset) % 7]
    elif kind == "unit":
        large, small, size = rng.choice(_UNITS)
        rest = rng.randint(2, 9)
        question = f"How many {small} are {_many(offset, large[:-1])} and {rest} {small}?"
        right = str(offset * size + rest)
    else:
        hour = rng.randint(1, 12)
        question = f"It is {hour} o'clock. Which hour is it {_many(offset, 'hour')} later?"
        right = str((hour + offset - 1) % 12 + 1)
    return Item(_asked(_DATE_SHOTS[kind], question), right, _after_equals, max_tokens=24)


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n > 1)}"


def _after_equals(text: str) -> str | None:
    match = re.search(r"=\s*(\w+)\s*\.?\s*$", text)
    return match[1] if match else None


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


def _order(rng: random.Random, most: int) -> Item:
    known = [("cups", 2, 3), ("hats", 1, 4), ("bags", 3, 2), ("toys", 2, 5)]
    n = 2 if most > 9 else 1
    examples = [known[i : i + n] for i in range(0, len(known), n)]
    shots = "".join(f"Order: {_order_text(x)}\nJSON:\n{_order_json(x)}\n\n" for x in examples)
    lines = [(x, rng.randint(1, min(most, 6)), rng.randint(1, most)) for x in rng.sample(THINGS, n)]
    right = _order_json(lines)
    prompt = f"{shots}Order: {_order_text(lines)}\nJSON:\n"
    return Item(prompt, right, _read_order, Order(), 28 + 24 * n, _ORDER_SCHEMA)


# -- values out of a record ----------------------------------------------------------------------------

_CITIES = ("Oslo", "Bergen", "Ghent", "Turin", "Lyon", "Porto", "Graz", "Malmo", "Cork", "Basel")
_FAMILIES = (
    "Berg", "Holm", "Ricci", "Dubois", "Keller", "Novak", "Lund", "Costa", "Meyer", "Byrne",
)  # fmt: skip
_BONDS = ("boss", "teacher", "doctor")
_JOBS = ("nurse", "baker", "pilot", "teacher", "lawyer", "cook", "farmer", "painter", "clerk")


def _record(rng: random.Random, n: int) -> Item:
    examples = [_one_record(random.Random(f"example {i}"), n) for i in range(3)]
    shots = "".join(f"Text: {a}\nQuestion: {b}\nAnswer: {c}\n\n" for a, b, c in examples)
    text, question, right = _one_record(rng, n)
    prompt = f"{shots}Text: {text}\nQuestion: {question}\nAnswer:"
    return Item(prompt, right, _first_line, Copied(text), max_tokens=10)


def _one_record(rng: random.Random, n: int) -> tuple[str, str, str]:
    """Return a text about a person, a question and the answer. ``n``: how many other facts it has."""
    first, *others = rng.sample(NAMES, 4)
    last, *families = rng.sample(_FAMILIES, 4)
    people = [f"{a} {b}" for a, b in zip(others, families, strict=True)]
    name, job, age = f"{first} {last}", rng.choice(_JOBS), str(rng.randint(20, 69))
    cities = rng.sample(_CITIES, 4)
    facts = [f"was born in {cities[0]}", f"studied in {cities[1]}", f"worked in {cities[2]}"][:n]
    lived = ", ".join(facts)
    bonds = [
        f"The {who} of {name} is {person}." for who, person in zip(_BONDS, people, strict=True)
    ]
    text = f"{name}, a {job} of {age}, {lived} and lives in {cities[3]}. {' '.join(bonds[:n])}"
    question, right = rng.choice((
        (f"Where does {name} live?", cities[3]), (f"Where was {name} born?", cities[0]),
        (f"How old is {name}?", age), (f"What is {name} by profession?", job),
        (f"Who is the {_BONDS[0]} of {name}?", people[0]),
    ))  # fmt: skip
    return text, question, right


TASKS: Mapping[str, Callable[[random.Random, int], Item]] = {
    "problems": _problem, "dates": _dated, "orders": _order, "records": _record,
}  # fmt: skip
LEVELS: Mapping[str, Sequence[int]] = {  # the easiest first
    "problems": (5, 9, 15, 25, 50), "dates": (1, 2, 4, 7), "orders": (2, 3, 5, 9, 10),
    "records": (1, 2, 3),
}  # fmt: skip


def item(task: str, seed: int, level: int) -> Item:
    """Return the item of a task for this seed and level."""
    return TASKS[task](random.Random(f"{task} {seed}"), level)
