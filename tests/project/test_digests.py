"""Same seed, same text as version 0.1: the table of ``digests/cases.py`` beside what 0.1 makes of it.

What is promised is promised on one machine, to the token and without allowances: the texts of version 0.1
are made here, by version 0.1, unless this version agrees with the record, made on one machine.
"""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import closing

import pytest
from digests import older as of_zip
from digests import record
from digests.cases import CASES, SAMPLING
from digests.library import DATA, World
from digests.older import ARCHIVE, Older


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("digests")) as opened:
        yield opened


@pytest.fixture(scope="module")
def older(world: World) -> Iterator[Older]:
    with closing(Older(world.folder, DATA)) as process:
        yield process


@pytest.fixture(scope="module")
def of_0_1() -> record.Record:
    return record.load()


def _one_of_each() -> set[str]:
    """Return the first cases that between them have every part of a name once.

    A part is what a case's name is made of: a setting, a prompt, a drafter, a rule, a length; for each
    kind of memory also what is done with it.
    """
    seen: set[tuple[str, ...]] = set()
    found = set()
    for name in CASES:
        section, _, rest = name.partition("/")
        if section == "memory":
            memory, _, what = rest.partition("/")
            parts = {(memory, what.split(" ")[0]), *((section, part) for part in what.split(", "))}
        else:
            parts = {(section, part) for part in rest.split(", ")}
        if parts - seen:
            found.add(name)
        seen |= parts
    return found


ONE_OF_EACH = _one_of_each()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ONE_OF_EACH else pytest.mark.slow, id=n) for n in CASES],
)
def test_generates_what_version_0_1_generates(
    name: str, world: World, older: Older, of_0_1: record.Record
) -> None:
    assert not record.compare(world, name, older, of_0_1)


def test_record_is_of_version_0_1_and_of_this_table(of_0_1: record.Record) -> None:
    assert of_0_1["version"] == "0.1.0"
    assert list(of_0_1["cases"]) == list(CASES)
    for digest, words in of_0_1["texts"].items():
        assert record.sha256(words["tokens"]) == digest


def test_archive_holds_version_0_1_as_git_has_it() -> None:
    known = ["git", "cat-file", "-e", f"{of_zip.COMMIT}^{{commit}}"]
    try:
        subprocess.run(known, cwd=of_zip.ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history of git here")
    with zipfile.ZipFile(ARCHIVE) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == of_zip.archived()


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


@pytest.mark.parametrize("name", SENSITIVE)
def test_record_is_what_version_0_1_makes_where_it_was_made(
    name: str, world: World, older: Older, of_0_1: record.Record
) -> None:
    """The process runs what made the record; on another machine its texts may be others."""
    case, texts = record.make_older(world, older, name)
    recorded = of_0_1["cases"][name]
    digests = [text["sha256"] for text in case["texts"]]
    assert case["models"] == recorded["models"]
    assert set(digests) == set(texts)
    outcome = record.run(world, CASES[name])
    if not record.differences(outcome, recorded, of_0_1["texts"]):
        assert digests == [text["sha256"] for text in recorded["texts"]]


@pytest.mark.parametrize("name", SENSITIVE)
def test_another_seed_is_noticed(
    name: str, world: World, older: Older, of_0_1: record.Record
) -> None:
    world.seed_shift = 1
    try:
        assert record.compare(world, name, older, of_0_1)
    finally:
        world.seed_shift = 0


def test_another_number_is_noticed(world: World, older: Older) -> None:
    """A log-probability that is off by 0.00002 is a change, and so is another machine's text here."""
    name = "sampling/default"
    case, texts = record.make_older(world, older, name)
    (text,) = case["texts"]
    first = text["logprobs"][1]
    assert first is not None
    outcome = record.run(world, CASES[name])
    assert not record.differences(outcome, case, texts)
    for logprobs in ([text["logprobs"][0], first + 2e-5], text["logprobs"][:-1]):
        rest = text["logprobs"][2:] if len(logprobs) == 2 else []
        moved: record.TextRecord = {**text, "logprobs": [*logprobs, *rest]}
        assert record.differences(outcome, {**case, "texts": [moved]}, texts)


def test_record_of_another_machine_is_no_fault(
    world: World, older: Older, of_0_1: record.Record
) -> None:
    """Whatever it holds, version 0.1 is run here: the record has the texts of another case."""
    name, other = "sampling/temperature 0", of_0_1["cases"]["sampling/temperature 2"]
    altered: record.Record = {**of_0_1, "cases": {name: other}}
    assert not record.compare(world, name, older, altered)
