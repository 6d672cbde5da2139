"""The journal of an agent as a document of the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from stages import add, name

from llamabranch import Agent, Context
from llamabranch.errors import ConfigError
from llamabranch.loom import formats
from llamabranch.loom.document import Document


def journal(ctx: Context, path: Path) -> list[list[int]]:
    """Write one with a sub-agent, forks and samples; return the tokens of all paths."""
    helper = Agent(ctx, "Help.", [add], name="helper")
    agent = Agent(ctx, "sys", [add, name, helper], forks=True, journal=path, seed=5)
    reports = agent.run(["one: go", "two: go", "asks: go", "forks: go"], n=2)
    again = agent.run("and?", after=reports[0])
    every = [c for r in [*reports, again] for c in r.choices]
    return [s.report.tokens for r in every for s in r.steps if s.report is not None]


def test_a_journal_is_a_document_with_all_that_was_read_and_written(
    stage: Context, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    texts = journal(stage, path)
    kind, document, n_lost = formats.read(path.read_bytes(), 1000, stage.model.is_of)
    assert kind == "agent" and n_lost == 0 and isinstance(document, Document)
    ends = [node.tokens() for node in document.shown()]
    assert all(tokens in ends for tokens in texts)
    generated = [node for node in document.shown() if node.made.seed is not None]
    assert {(node.reason, node.made.by) for node in generated} == {("stop", "A")}
    assert {"add", "add, name", "helper", "fork"} <= {node.made.by for node in document.shown()}
    assert "5" in {node.made.seed for node in generated}
    text = document.text(generated[0], own=False)
    assert "one: go" in text and '"a": 1' in text
    exported, _, _ = formats.export(document, "json", None)  # the page keeps it as its own
    assert formats.read(exported, 1000, stage.model.is_of)[0] == "json"


def test_a_journal_of_another_model_is_texts(stage: Context, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal(stage, path)
    kind, items, _ = formats.read(path.read_bytes(), 1000, "".__eq__)
    assert kind == "agent" and isinstance(items, list)
    assert any("It is three." in item.text for item in items)


def test_a_cut_journal_is_read_and_a_damaged_one_refused(stage: Context, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal(stage, path)
    data = path.read_bytes()
    for size in range(data.index(b"\n") + 1, len(data), 211):
        assert formats.read(data[:size], 1000, stage.model.is_of)[0] == "agent"
    lines = data.splitlines(keepends=True)
    headless = b"".join([b'{"format": "llamabranch-agent"}\n', *lines[1:]])  # nobody's lines
    assert formats.read(headless, 1000, stage.model.is_of)[0] == "agent"
    for line in (b"[\n", lines[1].replace(b'"pieces": {', b'"pieces": {"x": 1, ')):
        with pytest.raises(ConfigError, match="damaged"):
            formats.read(b"".join([lines[0], line, *lines[2:]]), 1000, stage.model.is_of)
    with pytest.raises(ConfigError, match="at most 3"):
        formats.read(data, 3, stage.model.is_of)
