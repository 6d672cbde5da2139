"""Same seed, same text as version 0.1: the table of ``digests/cases.py`` beside what 0.1 makes of it.

The promise holds on one machine, to the token and without tolerance. So the texts of version 0.1 are made
here, by version 0.1, unless this version already agrees with the record, which was made on another
machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import combinations

import pytest
from digests import record
from digests.cases import CASES, SAMPLING
from digests.library import DATA, World
from digests.older import Older

Worlds = tuple[World, Older, record.Record]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """This version, version 0.1 in a process of its own, and the record that it made."""
    with (
        World(tmp_path_factory.mktemp("digests")) as opened,
        closing(Older(opened.folder, DATA)) as process,
    ):
        yield opened, process, record.load()


def _one_of_each() -> set[str]:
    """Return the first cases that together have every part of a name once.

    The name of a case consists of parts: a setting, a prompt, a drafter, a rule, a length. For each kind
    of memory there is also an action.
    """
    seen: set[tuple[str, ...]] = set()
    names = set()
    for name in CASES:
        section, _, rest = name.partition("/")
        parts = {(section, part) for part in rest.rpartition("/")[2].split(", ")}
        if section == "memory":
            memory, _, variant = rest.partition("/")
            parts.add((memory, variant.split(" ")[0]))
        if parts - seen:
            names.add(name)
        seen |= parts
    return names


ONE_OF_EACH = _one_of_each()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ONE_OF_EACH else pytest.mark.slow, id=n) for n in CASES],
)
def test_generates_what_version_0_1_generates(name: str, worlds: Worlds) -> None:
    world, older, of_0_1 = worlds
    assert not record.compare(world, name, older, of_0_1)


def test_record_is_of_version_0_1_and_every_setting_changes_its_text() -> None:
    """A setting that has no effect in these cases would not be tested."""
    of_0_1 = record.load()
    assert of_0_1["version"] == "0.1.0"
    assert list(of_0_1["cases"]) == list(CASES)
    for digest, words in of_0_1["texts"].items():
        assert record.sha256(words["tokens"]) == digest
    texts = {n: of_0_1["cases"][f"sampling/{n}"]["texts"][0]["sha256"] for n in SAMPLING}
    same = [{a, b} for a, b in combinations(SAMPLING, 2) if texts[a] == texts[b]]
    assert same == [{"temperature 0", "top-k 1"}]


@pytest.mark.parametrize(
    "name",
    ["sampling/default", "branches/forks, warm", "speculative/model, token, warm",
     "session/in turn", "engine/mixed, model, 5", "memory/mamba/forks"],
)  # fmt: skip
def test_record_is_what_version_0_1_makes_and_another_seed_is_noticed(
    name: str, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process runs the version that made the record. On another machine its texts may differ."""
    world, older, of_0_1 = worlds
    case, texts = record.make_older(world, older, name)
    recorded = of_0_1["cases"][name]
    digests = [text["sha256"] for text in case["texts"]]
    assert case["models"] == recorded["models"]
    assert set(digests) == set(texts)
    outcome = record.run(world, CASES[name])
    if not record.differences(outcome, recorded, of_0_1["texts"]):
        assert digests == [text["sha256"] for text in recorded["texts"]]
    monkeypatch.setattr(world, "seed_shift", 1)
    assert record.compare(world, name, older, of_0_1)


def test_another_number_is_noticed_and_another_machines_record_not_asked(worlds: Worlds) -> None:
    """A log-probability that is off by 0.00002 is a change, and so is another machine's text here."""
    world, older, of_0_1 = worlds
    name = "sampling/default"
    case, texts = record.make_older(world, older, name)
    (text,) = case["texts"]
    total, first, *rest = text["logprobs"]
    assert first is not None
    outcome = record.run(world, CASES[name])
    assert not record.differences(outcome, case, texts)
    for logprobs in ([total, first + 2e-5, *rest], text["logprobs"][:-1]):
        moved: record.TextRecord = {**text, "logprobs": logprobs}
        assert record.differences(outcome, {**case, "texts": [moved]}, texts)
    # If the record does not agree (here it has the texts of another case), version 0.1 is run.
    altered = {name: of_0_1["cases"]["sampling/temperature 2"]}
    assert not record.compare(world, name, older, {**of_0_1, "cases": altered})
