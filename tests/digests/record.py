"""Run the table, write what came of it, compare: ``python -m tests.digests.record``.

    --write FILE   write the record (of version 0.1, made with 0.1 first on PYTHONPATH)
    --only TEXT    run the cases whose name contains it
    --seed-shift N add N to every seed: everything must differ

Without ``--write`` it compares with ``v0_1.json`` and exits with 1 where something has changed.

Token ids are compared by their SHA-256, one by one where that differs; log-probabilities and entropies
as numbers. Where this machine rounds as the one that made the record did (``machine_key`` of the models
of the case), everything must be equal. Where it does not, or where a case's logits depend on what else is
in a decode (not ``is_exact``), a near tie may fall the other way: a case passes if nudging a few logits
by at most ``NUDGE`` makes it say the recorded texts to the token. A change of seed, setting or rule is
not explained so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypedDict

from .cases import CASES, Case, Outcome
from .library import VERSION, Said, World

__all__ = ["RECORD", "Record", "compare", "is_exact", "load", "run"]

RECORD = Path(__file__).with_name("v0_1.json")
N_FIRST = 4  # numbers kept of each text beside their sum
SAME, ROUNDING = 1e-4, 0.05  # how far numbers may be off: on the same machine, and elsewhere
NUDGE, N_NUDGES = 0.02, 8  # logits


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


def is_exact(name: str) -> bool:
    """Return whether a case's logits do not depend on what else is in a decode."""
    inexact = ("f16 cache", "f32 cache", "memory/")
    return not any(part in name for part in inexact) or name.startswith("memory/llama/")


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


def make(world: World, names: Sequence[str]) -> Record:
    """Return the record of these cases."""
    record: Record = {"version": VERSION, "machine": {}, "texts": {}, "cases": {}}
    for name in names:
        outcome, models = run(world, CASES[name])
        record["cases"][name] = {
            "models": models,
            "texts": [record_text(said) for said in outcome.texts],
            "numbers": {key: _number(value) for key, value in outcome.numbers.items()},
        }
        for model in models:
            record["machine"][model] = world.key(model)
        for said in outcome.texts:
            words: Words = {"tokens": said.tokens, "text": said.text}
            # A text is that of its tokens, up to what a stop string cut off.
            record["texts"].setdefault(f"{sha256(said.tokens)}", words)
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


def _compare_numbers(outcome: Outcome, recorded: CaseRecord, tolerance: float) -> list[str]:
    changes = []
    for i, (said, was) in enumerate(zip(outcome.texts, recorded["texts"], strict=True)):
        now = record_text(said)
        if now["finish"] != was["finish"]:
            changes.append(f"text {i} ended by {now['finish']!r}, was {was['finish']!r}")
        for kind in ("logprobs", "entropies", "alternatives"):
            ours, theirs = now[kind], was[kind]
            # The first is a sum: it may be off by as much for every token.
            sums = _off(ours[:1], theirs[:1], tolerance * max(1, was["n"]))
            if sums or _off(ours[1:], theirs[1:], tolerance):
                changes.append(f"text {i}, {kind}: {ours}, were {theirs}")
    if sorted(outcome.numbers) != sorted(recorded["numbers"]):
        return [*changes, "other numbers are reported"]
    for key, value in outcome.numbers.items():
        was_number = recorded["numbers"][key]
        scale = max(1.0, abs(was_number or 0.0))
        if _off([_number(value)], [was_number], tolerance * scale):
            changes.append(f"{key}: {value}, was {was_number}")
    return changes


def compare(world: World, name: str, record: Record, *, as_elsewhere: bool = False) -> list[str]:
    """Return how a case differs from the record, in words; nothing if it does not.

    ``as_elsewhere`` judges as on a machine that rounds otherwise.
    """
    recorded, words = record["cases"][name], record["texts"]
    outcome, models = run(world, CASES[name])
    same = all(world.key(model) == record["machine"].get(model) for model in models)
    strict = same and not as_elsewhere
    if len(outcome.texts) != len(recorded["texts"]):
        return [f"{len(outcome.texts)} texts, were {len(recorded['texts'])}"]
    difference = first_difference(outcome, recorded, words)
    if difference is not None:
        told = _tell(difference, outcome, recorded, words)
        if strict and is_exact(name):
            return [told]
        explained = _nudged(world, name, recorded, words, difference)
        if explained is None:
            return [told, f"no nudge of at most {NUDGE} explains it as rounding"]
        outcome = explained
    return _compare_numbers(outcome, recorded, SAME if strict and is_exact(name) else ROUNDING)


def _tell(
    difference: Difference, outcome: Outcome, recorded: CaseRecord, words: dict[str, Words]
) -> str:
    was = words[recorded["texts"][difference.text]["sha256"]]["text"]
    return (
        f"text {difference.text} has token {difference.now} at {difference.place}, "
        f"was {difference.recorded}: {outcome.texts[difference.text].text!r}, was {was!r}"
    )


def _nudged(
    world: World, name: str, recorded: CaseRecord, words: dict[str, Words], difference: Difference
) -> Outcome | None:
    """Return what the case says with a few logits nudged, if it is then what was recorded."""
    nudge: dict[int, float] = {}
    last: Difference | None = difference
    try:
        for _ in range(N_NUDGES):
            if last is None or last in (None,):
                break
            for token, by in ((last.recorded, NUDGE / 2), (last.now, -NUDGE / 2)):
                if token is not None:
                    nudge[token] = nudge.get(token, 0.0) + by
            if max(map(abs, nudge.values()), default=NUDGE) > NUDGE:
                return None
            world.nudge = nudge
            outcome, _models = run(world, CASES[name])
            last = first_difference(outcome, recorded, words)
            if last is None:
                return outcome
    finally:
        world.nudge = {}
    return None


# -- the program -----------------------------------------------------------------------------------


def main() -> int:
    """Write a record, or compare with the one of version 0.1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed-shift", type=int, default=0)
    parser.add_argument("--times", action="store_true")
    asked = parser.parse_args()
    names = [name for name in CASES if asked.only in name]
    with tempfile.TemporaryDirectory() as folder, World(Path(folder)) as world:
        world.seed_shift = asked.seed_shift
        if asked.write is not None:
            asked.write.write_text(dump(make(world, names)), "utf-8")
            return 0
        record, n_changed = load(), 0
        for name in names:
            start = perf_counter()
            changes = compare(world, name, record)
            if asked.times:
                print(f"{perf_counter() - start:7.3f} {name}")
            n_changed += bool(changes)
            for change in changes:
                print(f"{name}: {change}")
    print(f"{len(names)} cases, {n_changed} changed since version {record['version']}")
    return int(n_changed > 0)


if __name__ == "__main__":
    sys.exit(main())
