"""What version 0.1 made of the table, and how this version differs: ``python -m tests.digests.record``.

    --write FILE   write a record of what version 0.1 makes of the cases on this machine
    --only TEXT    take the cases whose name contains it
    --seed-shift N add N to every seed of this version: everything must differ
    --times        print how long each case takes

Without ``--write`` it compares and exits with 1 where something has changed.

What is promised is promised on one machine: there a later version makes the same tokens, and the same
log-probabilities and entropies. So version 0.1 itself is run beside this one (older.py), and no rounding
is allowed for. v0_1.json saves that where this machine rounds as the one that made it did
(``machine_key``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypedDict

from .cases import CASES, Case, Outcome, changed_texts
from .library import DATA, Said, World
from .older import VERSION, Older

__all__ = [
    "RECORD",
    "Record",
    "compare",
    "differences",
    "is_recorded_here",
    "load",
    "make_older",
    "run",
]

RECORD = Path(__file__).with_name("v0_1.json")
N_FIRST = 4  # numbers kept of each text beside their sum
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
    machine: dict[str, str]  # model: key
    texts: dict[str, Words]  # by SHA-256
    cases: dict[str, CaseRecord]


def load(path: Path = RECORD) -> Record:
    """Return a record that was written."""
    record: Record = json.loads(path.read_text("utf-8"))
    return record


# -- making a record -------------------------------------------------------------------------------


def sha256(tokens: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)  # JSON has no NaN


def _summary(values: Sequence[float]) -> list[float | None]:
    if not values:
        return []
    return [_number(math.fsum(values)), *map(_number, values[:N_FIRST])]


def record_text(said: Said) -> TextRecord:
    return {
        "sha256": sha256(said.tokens),
        "n": len(said.tokens),
        "finish": said.finish,
        "logprobs": _summary(said.logprobs),
        "entropies": _summary(said.entropies),
        "alternatives": _summary(said.alternatives),
    }


def run(world: World, case: Case) -> tuple[Outcome, list[str]]:
    """Run a case; return what came of it and the models it used."""
    try:
        outcome = case(world)
        return outcome, sorted(world.used)
    finally:
        world.end_case()


def make_older(world: World, older: Older, name: str) -> tuple[CaseRecord, dict[str, Words]]:
    """Return what version 0.1 makes of a case on this machine, with the model files of ``world``."""
    for model in load()["cases"][name]["models"]:
        world.file(model)
    return older.make(name)


def make(world: World, older: Older, names: Sequence[str]) -> Record:
    """Return the record of these cases, made by version 0.1."""
    record: Record = {"version": VERSION, "machine": {}, "texts": {}, "cases": {}}
    for name in names:
        record["cases"][name], texts = make_older(world, older, name)
        record["texts"] |= texts
        record["machine"] |= {model: world.key(model) for model in record["cases"][name]["models"]}
    return record


def dump(record: Record) -> str:
    """Return the record as JSON with a line for each case and text."""

    def block(table: dict[str, object]) -> str:
        lines = (
            f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in table.items()
        )
        return "{\n" + ",\n".join(lines) + "\n }"

    parts = [
        f' "version": {json.dumps(record["version"])}',
        *(f' "{part}": {block(dict(record[part]))}' for part in ("machine", "cases", "texts")),
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


# -- comparing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The first token that is another: of which text, where, what was recorded and what came now."""

    text: int
    place: int
    recorded: int | None
    now: int | None


def first_difference(
    outcome: Outcome, recorded: CaseRecord, words: dict[str, Words]
) -> Difference | None:
    for i, (said, was) in enumerate(zip(outcome.texts, recorded["texts"], strict=True)):
        if sha256(said.tokens) == was["sha256"]:
            continue
        tokens = words[was["sha256"]]["tokens"]
        both = range(min(len(tokens), len(said.tokens)))
        place = next((j for j in both if tokens[j] != said.tokens[j]), len(both))
        ids = (known[place] if place < len(known) else None for known in (tokens, said.tokens))
        return Difference(i, place, *ids)
    return None


def _off(now: Sequence[float | None], was: Sequence[float | None], tolerance: float) -> bool:
    if len(now) != len(was):
        return True
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > tolerance)
        for a, b in zip(now, was, strict=True)
    )


def _compare_numbers(outcome: Outcome, recorded: CaseRecord) -> list[str]:
    changes = []
    for i, (said, was) in enumerate(zip(outcome.texts, recorded["texts"], strict=True)):
        now = record_text(said)
        if now["finish"] != was["finish"]:
            changes.append(f"text {i} ended by {now['finish']!r}, was {was['finish']!r}")
        for kind in ("logprobs", "entropies", "alternatives"):
            ours, theirs = now[kind], was[kind]
            # The first is a sum: it may be off by as much for every token.
            sums = _off(ours[:1], theirs[:1], SAME * max(1, was["n"]))
            if sums or _off(ours[1:], theirs[1:], SAME):
                changes.append(f"text {i}, {kind}: {ours}, were {theirs}")
    if sorted(outcome.numbers) != sorted(recorded["numbers"]):
        return [*changes, "other numbers are reported"]
    for key, value in outcome.numbers.items():
        was_number = recorded["numbers"][key]
        scale = max(1.0, abs(was_number or 0.0))
        if _off([_number(value)], [was_number], SAME * scale):
            changes.append(f"{key}: {value}, was {was_number}")
    return changes


def is_recorded_here(world: World, name: str, record: Record) -> bool:
    """Return whether the models of a case round here as where the record was made."""
    models = record["cases"][name]["models"]
    return all(world.key(model) == record["machine"].get(model) for model in models)


def compare(world: World, name: str, older: Older, record: Record) -> list[str]:
    """Return how a case differs from version 0.1, in words; nothing if it does not.

    Where the record is another machine's, or does not agree, version 0.1 is run.
    """
    outcome, _ = run(world, CASES[name])
    if is_recorded_here(world, name, record) and not differences(
        *_unchanged(name, outcome, record["cases"][name]), record["texts"]
    ):
        return []
    case, words = make_older(world, older, name)
    return differences(*_unchanged(name, outcome, case), words)


def _unchanged(name: str, outcome: Outcome, case: CaseRecord) -> tuple[Outcome, CaseRecord]:
    """Leave out the texts that have changed on purpose, and numbers that come of them."""
    which = changed_texts(name)
    if which is None or len(outcome.texts) != len(case["texts"]):
        return outcome, case
    ours, theirs = list(outcome.texts), list(case["texts"])
    del ours[which], theirs[which]
    if not ours and not name.startswith("context/raw"):  # its numbers come of no text
        return Outcome([]), {**case, "texts": [], "numbers": {}}
    return Outcome(ours, outcome.numbers), {**case, "texts": theirs}


def differences(outcome: Outcome, recorded: CaseRecord, words: dict[str, Words]) -> list[str]:
    """Return how an outcome differs from the record of a case, in words."""
    if len(outcome.texts) != len(recorded["texts"]):
        return [f"{len(outcome.texts)} texts, were {len(recorded['texts'])}"]
    difference = first_difference(outcome, recorded, words)
    if difference is not None:
        return [_tell(difference, outcome, recorded, words)]
    return _compare_numbers(outcome, recorded)


def _tell(
    difference: Difference, outcome: Outcome, recorded: CaseRecord, words: dict[str, Words]
) -> str:
    was = words[recorded["texts"][difference.text]["sha256"]]["text"]
    return (
        f"text {difference.text} has token {difference.now} at {difference.place}, "
        f"was {difference.recorded}: {outcome.texts[difference.text].text!r}, was {was!r}"
    )


# -- the program -----------------------------------------------------------------------------------


def main() -> int:
    """Write a record of version 0.1, or compare with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed-shift", type=int, default=0)
    parser.add_argument("--times", action="store_true")
    asked = parser.parse_args()
    names = [name for name in CASES if asked.only in name]
    with (
        tempfile.TemporaryDirectory() as folder,
        World(Path(folder)) as world,
        closing(Older(Path(folder), DATA)) as older,
    ):
        if asked.write is not None:
            asked.write.write_text(dump(make(world, older, names)), "utf-8")
            return 0
        world.seed_shift = asked.seed_shift
        record, n_changed = load(), 0
        for name in names:
            start = perf_counter()
            changes = compare(world, name, older, record)
            if asked.times:
                print(f"{perf_counter() - start:7.3f} {name}")
            n_changed += bool(changes)
            for change in changes:
                print(f"{name}: {change}")
    print(f"{len(names)} cases, {n_changed} changed since version {VERSION}")
    return int(n_changed > 0)


if __name__ == "__main__":
    sys.exit(main())
