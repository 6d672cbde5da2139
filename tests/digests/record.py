"""The results of version 0.1 for all cases, and how this version differs from them.

The promise holds on one machine: there a later version makes the same tokens, with the same
log-probabilities and entropies. So version 0.1 itself runs beside this one (older.py), and there is no
tolerance for rounding. v0_1.json was made on one machine; if this version agrees with it, version 0.1
need not run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from .cases import CASES, Case, Outcome, changed_texts
from .library import World
from .older import Older

RECORD = Path(__file__).with_name("v0_1.json")
N_FIRST = 4  # how many numbers of each text are kept beside their sum
# How far log-probabilities and entropies may be off: the compiled core's are right to 1e-6, and a record
# has six digits. Logits are equal to the bit.
SAME = 5e-6


class TextRecord(TypedDict):
    sha256: str
    n: int
    finish: str | None
    logprobs: list[float | None]  # their sum, then the first
    entropies: list[float | None]
    alternatives: list[float | None]


class CaseRecord(TypedDict):
    models: list[str]
    texts: list[TextRecord]
    numbers: dict[str, float | None]


class Words(TypedDict):
    tokens: list[int]
    text: str


class Record(TypedDict):
    version: str
    machine: dict[str, str]  # by model a digest of logits there
    texts: dict[str, Words]  # by SHA-256
    cases: dict[str, CaseRecord]


def load() -> Record:
    """Return the record that was written."""
    record: Record = json.loads(RECORD.read_text("utf-8"))
    return record


def sha256(tokens: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)  # JSON has no NaN


def _summary(values: Sequence[float]) -> list[float | None]:
    if not values:
        return []
    return [_number(math.fsum(values)), *map(_number, values[:N_FIRST])]


def run(world: World, case: Case) -> Outcome:
    """Run a case; return its outcome."""
    try:
        return case(world)
    finally:
        world.end_case()


def make_older(world: World, older: Older, name: str) -> tuple[CaseRecord, dict[str, Words]]:
    """Return the record of version 0.1 for a case on this machine, with the model files of ``world``."""
    for model in load()["cases"][name]["models"]:
        world.file(model)
    return older.make(name)


# -- comparing -------------------------------------------------------------------------------------


def compare(world: World, name: str, older: Older, record: Record) -> list[str]:
    """Return how a case differs from version 0.1, in words; nothing if it does not.

    Where the record does not agree, which may be that of another machine, version 0.1 is run.
    """
    outcome = run(world, CASES[name])
    if not differences(*_unchanged(name, outcome, record["cases"][name]), record["texts"]):
        return []
    case, words = make_older(world, older, name)
    return differences(*_unchanged(name, outcome, case), words)


def _unchanged(name: str, outcome: Outcome, case: CaseRecord) -> tuple[Outcome, CaseRecord]:
    """Leave out the texts that have changed on purpose; no number depends on them."""
    which = changed_texts(name)
    if which is None or len(outcome.texts) != len(case["texts"]):
        return outcome, case
    ours, theirs = list(outcome.texts), list(case["texts"])
    del ours[which], theirs[which]
    return Outcome(ours, outcome.numbers), {**case, "texts": theirs}


def differences(outcome: Outcome, recorded: CaseRecord, words: dict[str, Words]) -> list[str]:
    """Return how an outcome differs from the record of a case, in words: tokens, or else numbers."""
    if len(outcome.texts) != len(recorded["texts"]):
        return [f"{len(outcome.texts)} texts, were {len(recorded['texts'])}"]
    for i, (said, was) in enumerate(zip(outcome.texts, recorded["texts"], strict=True)):
        if sha256(said.tokens) != was["sha256"]:
            known = words[was["sha256"]]
            both = range(min(len(known["tokens"]), len(said.tokens)))
            place = next((j for j in both if known["tokens"][j] != said.tokens[j]), len(both))
            return [f"text {i} differs from token {place} on: {said.text!r}, was {known['text']!r}"]
    return _compare_numbers(outcome, recorded)


def _compare_numbers(outcome: Outcome, recorded: CaseRecord) -> list[str]:
    changes = []
    for i, (said, was) in enumerate(zip(outcome.texts, recorded["texts"], strict=True)):
        if said.finish != was["finish"]:
            changes.append(f"text {i} ended by {said.finish!r}, was {was['finish']!r}")
        for kind, ours, theirs in (
            ("logprobs", _summary(said.logprobs), was["logprobs"]),
            ("entropies", _summary(said.entropies), was["entropies"]),
            ("alternatives", _summary(said.alternatives), was["alternatives"]),
        ):
            # The first is a sum, so its tolerance grows with the number of tokens.
            sums = _off(ours[:1], theirs[:1], SAME * max(1, was["n"]))
            if sums or _off(ours[1:], theirs[1:], SAME):
                changes.append(f"text {i}, {kind}: {ours}, were {theirs}")
    if sorted(outcome.numbers) != sorted(recorded["numbers"]):
        return [*changes, "other numbers are reported"]
    for key, value in outcome.numbers.items():
        was_number = recorded["numbers"][key]
        if _off([_number(value)], [was_number], SAME * max(1.0, abs(was_number or 0.0))):
            changes.append(f"{key}: {value}, was {was_number}")
    return changes


def _off(now: Sequence[float | None], was: Sequence[float | None], tolerance: float) -> bool:
    if len(now) != len(was):
        return True
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > tolerance)
        for a, b in zip(now, was, strict=True)
    )
