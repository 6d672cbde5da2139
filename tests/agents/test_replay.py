"""Journals: what is written, and runs that are made again from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from stages import Number, add, fails, gives, name, sleeps

import llamabranch as lb
from llamabranch import Agent, Context
from llamabranch.agents import Report, Step, replay
from llamabranch.errors import ConfigError, LlamaBranchWarning, ParseError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def by_path(steps: list[Step]) -> dict[str, list[Step]]:
    grouped: dict[str, list[Step]] = {}
    for step in steps:
        grouped.setdefault(step.path, []).append(step)
    return grouped


def all_steps(reports: Report | list[Report]) -> list[Step]:
    reports = reports if isinstance(reports, list) else [reports]
    return [s for r in reports for c in r.choices for s in c.steps]


RUNS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "calls": (["one: go", "two: go", "plain: go"], {"tools": [add, name], "n": 2}),
    "failures": (
        ["unknown: go", "told: go", "raises: go", "again: go"],
        {"tools": [add, name, fails]},
    ),
    "results": (["gives: go", "half: go"], {"tools": [gives]}),
    "limits": (["again: go"], {"tools": [name], "max_turns": 3}),
    "output": (["typed: go", "refused: go", "stubborn: go"], {"output": Number}),
    "forks": (["forks: go", "nested: go"], {"tools": [name], "forks": True}),
    "forced": (["plain: go"], {"tools": [name, add], "tool_choice": "required", "seed": 3}),
}


@pytest.mark.parametrize("case", RUNS)
def test_law_8_a_replay_gives_equal_steps(stage: Context, tmp_path: Path, case: str) -> None:
    tasks, options = RUNS[case]
    n = options.get("n", 1)
    path = tmp_path / "run.jsonl"
    options = {key: value for key, value in options.items() if key != "n"}
    agent = Agent(stage, "sys", journal=path, **options)
    reports = agent.run(tasks, n=n)
    written = [Step.from_dict(line) for line in lines(path)[1:]]
    assert by_path(written) == by_path(all_steps(reports))
    assert by_path([*replay(path, stage)]) == by_path(written)


def test_law_8_sub_agents_and_what_goes_on_after_a_report(stage: Context, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    helper = Agent(stage, "Help.", [add], name="helper", seed=9)
    agent = Agent(stage, "Ask.", [helper], journal=path, seed=4)
    first = agent.run("asks: go")
    agent.run("plain: more", after=first)
    assert [line.get("format") for line in lines(path)].count("llamabranch-agent") == 2
    runs = [[Step.from_dict(x) for x in lines(path) if x["run"] == run and "kind" in x]
            for run in dict.fromkeys(x["run"] for x in lines(path))]  # fmt: skip
    for number, steps in enumerate(runs):
        assert by_path([*replay(path, stage, run=number)]) == by_path(steps)
    assert by_path([*replay(path, stage)]) == by_path(runs[1])


def test_law_8_a_cut_journal_gives_the_steps_up_to_there(stage: Context, tmp_path: Path) -> None:
    path, cut = tmp_path / "run.jsonl", tmp_path / "cut.jsonl"
    Agent(stage, "sys", [add, name], journal=path).run(["one: go", "two: go"])
    data = path.read_bytes()
    whole = [Step.from_dict(line) for line in lines(path)[1:]]
    for size in range(data.index(b"\n") + 1, len(data), 97):
        cut.write_bytes(data[:size])
        # A last line that lacks only its end is whole.
        n = data[: size + 1].count(b"\n") - 1
        assert by_path([*replay(cut, stage)]) == by_path(whole[:n])


def test_a_journal_that_was_cut_goes_on_with_the_next_run(stage: Context, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    agent = Agent(stage, "sys", [add], journal=path)
    agent.run("one: go")
    path.write_bytes(path.read_bytes()[:-30])
    report = agent.run("plain: go")
    assert by_path([*replay(path, stage)]) == by_path(all_steps(report))


def test_time_and_cancelled_runs_can_be_made_again(stage: Context, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    bias = dict.fromkeys(stage.model.eog_tokens, -1e9)
    agent = Agent(stage, journal=path, max_seconds=0.3, max_tokens=100_000, logit_bias=bias)
    report = agent.run("plain: go")
    assert report.finish_reason == "time"
    told = [(s.kind, s.text) for s in report.steps]
    assert [(s.kind, s.text) for s in replay(path, stage)] == told
    agent = Agent(stage, "sys", [sleeps], journal=tmp_path / "cancelled.jsonl")
    steps = agent.stream("sleeps: go")
    while next(iter(steps)).kind != "call":
        pass
    cast(Any, steps).close()
    again = [s.kind for s in replay(tmp_path / "cancelled.jsonl", stage)]
    assert again == ["prompt", "text", "call", "end"]


def test_a_token_that_differs_is_an_error(scripted: lb.Model, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with lb.Context(scripted, n_ctx=4096, n_threads=1, batch_invariant=True) as ctx:
        Agent(ctx, "sys", [add], journal=path).run("one: go")
        records = lines(path)
        texts = [line for line in records if line.get("kind") == "text"]
        texts[1]["tokens"][-1] += 1
        path.write_text("".join(json.dumps(line) + "\n" for line in records))
        with pytest.raises(ParseError, match=r"turn 1 of path 0\.0 differs from its token 0 on"):
            list(replay(path, ctx))
        records[0]["exact"] = False  # as a Q4_K_M is
        path.write_text("".join(json.dumps(line) + "\n" for line in records))
        replayed = [*replay(path, ctx)]
        assert replayed[-1].kind == "differs" and "turn 1" in replayed[-1].text
        assert [s.kind for s in replayed[:-1]] == ["prompt", "text", "call", "result", "prompt"]


def test_journals_of_other_models_and_other_files_are_refused(
    stage: Context, toy: lb.Model, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    Agent(stage, "sys", [add], journal=path).run("one: go")
    with (
        lb.Context(toy, n_ctx=512, n_threads=1) as other,
        pytest.raises(ConfigError, match="another model"),
    ):
        list(replay(path, other))
    with pytest.raises(ConfigError, match="cannot read"):
        replay(tmp_path / "none.jsonl", stage)
    with pytest.raises(ConfigError, match="a path is text or path-like"):
        replay(cast(Any, 3), stage)
    for data in (b"", b"x\ny\nz\n", b"{}\n{}\n{}\n", b"[1]\n", b"\xff\xfe\n\n\n"):
        path.write_bytes(data)
        with pytest.raises(ParseError):
            replay(path, stage)


def test_a_damaged_line_or_head_is_an_error(stage: Context, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Agent(stage, "sys", [add], journal=path).run("one: go")
    records = path.read_bytes().splitlines(keepends=True)
    bad = records[2].replace(b'"tokens": [', b'"tokens": ["')
    for number, line in ((3, b'{"kind": \n'), (2, bad)):
        path.write_bytes(b"".join([*records[:number], line, *records[number + 1 :]]))
        with pytest.raises(ParseError, match=f"line {number + 1}"):
            replay(path, stage)
    heads: list[object] = [3, {}, None]
    for agent in heads:
        head = {**json.loads(records[0]), "agent": agent}
        path.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(records[1:]))
        with pytest.raises(ParseError, match="head"):
            replay(path, stage)


def test_a_place_that_cannot_be_written(stage: Context, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        Agent(stage, journal=tmp_path).run("plain: go")
    with pytest.raises(ConfigError, match="cannot write"):
        Agent(stage, journal=tmp_path / "no" / "run.jsonl").run("plain: go")


def test_a_full_disk_is_told_once_and_the_run_goes_on(stage: Context) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with pytest.warns(LlamaBranchWarning, match="the journal /dev/full ends here") as caught:
        report = Agent(stage, tools=[add], journal=full).run("one: go")
    assert report.text == "It is three." and len(caught) == 1


def test_settings_that_cannot_be_written_are_refused_when_the_agent_is_made(
    stage: Context, tmp_path: Path
) -> None:
    params = lb.SamplingParams(logits_processor=lambda tokens, logits: logits)
    Agent(stage, sampling=params)
    with pytest.raises(lb.errors.UnsupportedError):
        Agent(stage, sampling=params, journal=tmp_path / "run.jsonl")


def test_a_stream_has_the_texts_in_pieces_and_the_report_at_the_end(
    stage: Context, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    agent = Agent(stage, "sys", [add, name], seed=1, journal=path)
    steps = [*agent.stream("two: go")]
    assert [s.kind for s in steps][-1] == "end"
    report = steps[-1].report
    assert report is not None and report.text == "Both are here."
    assert "".join(s.text for s in steps if s.kind == "text" and s.turn == 0) == "Let me see."
    assert [s.kind for s in report.steps] == [line["kind"] for line in lines(path)[1:]]
    assert report.tokens == Agent(stage, "sys", [add, name], seed=1).run("two: go").tokens
