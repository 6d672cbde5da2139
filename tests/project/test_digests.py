"""Same seed, same text as version 0.1: the table of ``digests/cases.py`` beside what 0.1 made of it.

On the kind of machine that made the record every token must be the same. Elsewhere a text may part at a
near tie, and must be 0.1's again when a few logits are nudged by less than rounding may move them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from digests import record
from digests.cases import CASES, CHANGED, SAMPLING
from digests.library import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("digests")) as opened:
        yield opened


@pytest.fixture(scope="module")
def of_0_1() -> record.Record:
    return record.load()


@pytest.mark.parametrize("name", [name for name in CASES if name not in CHANGED])
def test_generates_what_version_0_1_generated(
    name: str, world: World, of_0_1: record.Record
) -> None:
    assert not record.compare(world, name, of_0_1)


def test_record_is_of_version_0_1_and_of_this_table(of_0_1: record.Record) -> None:
    assert of_0_1["version"] == "0.1.0"
    assert list(of_0_1["cases"]) == list(CASES)
    for digest, words in of_0_1["texts"].items():
        assert record.sha256(words["tokens"]) == digest
    models = {model for case in of_0_1["cases"].values() for model in case["models"]}
    assert models == set(of_0_1["machine"])


def test_every_sampling_setting_changes_the_text(of_0_1: record.Record) -> None:
    """A setting that did nothing here would be held by nothing."""
    digests = [of_0_1["cases"][f"sampling/{name}"]["texts"][0]["sha256"] for name in SAMPLING]
    same = [
        {a, b}
        for i, a in enumerate(SAMPLING)
        for j, b in enumerate(SAMPLING)
        if i < j and digests[i] == digests[j]
    ]
    assert same == [{"temperature 0", "top-k 1"}]


SENSITIVE = (
    "sampling/default",
    "branches/forks, warm",
    "speculative/model, token, warm",
    "session/in turn",
    "engine/mixed, model, 5",
    "memory/mamba/forks",
)


@pytest.mark.parametrize("as_elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("name", SENSITIVE)
def test_another_seed_is_noticed(
    name: str, as_elsewhere: bool, world: World, of_0_1: record.Record
) -> None:
    """Also where the judge allows for another machine's rounding."""
    world.seed_shift = 1
    try:
        assert record.compare(world, name, of_0_1, as_elsewhere=as_elsewhere)
    finally:
        world.seed_shift = 0


def test_another_number_is_noticed(world: World, of_0_1: record.Record) -> None:
    """A log-probability that is off by 0.001 is a change on the machine of the record only."""
    name = "sampling/default"
    case = of_0_1["cases"][name]
    (text,) = case["texts"]
    first = text["logprobs"][1]
    assert first is not None
    moved: record.TextRecord = {
        **text,
        "logprobs": [text["logprobs"][0], first + 0.001, *text["logprobs"][2:]],
    }
    altered: record.Record = {**of_0_1, "cases": {name: {**case, "texts": [moved]}}}
    foreign: record.Record = {**altered, "machine": dict.fromkeys(of_0_1["machine"], "another")}
    own: record.Record = {**altered, "machine": {m: world.key(m) for m in case["models"]}}
    assert record.compare(world, name, own)
    assert not record.compare(world, name, foreign)


def test_near_tie_is_explained_on_another_machine_only(
    world: World, of_0_1: record.Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that parts because a logit is off, as another machine's rounding might have it.

    Rounding is drawn large, so that some token of the text is a near tie on every machine.
    """
    monkeypatch.setattr(record, "NUDGE", 0.2)
    name, n_parted = "memory/llama/warm", 0
    (was,) = of_0_1["cases"][name]["texts"]
    for token in of_0_1["texts"][was["sha256"]]["tokens"]:
        world.nudge = {token: -0.15}
        try:
            parted = record.make(world, [name])
        finally:
            world.nudge = {}
        if parted["cases"][name]["texts"][0]["sha256"] != was["sha256"]:
            n_parted += 1
            assert record.compare(world, name, parted)
            if not record.compare(world, name, parted, as_elsewhere=True):
                return
    pytest.fail(f"of {n_parted} parted texts none was explained")
