"""Jobs of ``generate``: files of requests, results that are resumed, the cache that suits them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import texts
from self_signal import signalled_at_line
from toys import CHAT_TEMPLATE, write_toy
from typer.testing import Result

import llamabranch as lb
from llamabranch import ConfigError, Request, SamplingParams
from llamabranch.cli.job import JobLengths
from llamabranch.cli.jsonl import read_requests
from llamabranch.cli.results import ResultFile

COMMAND = [*commands.COMMAND, "generate"]
TIMEOUT_S = 600  # for a machine that is busy with other things
SEED_PROMPTS = (
    "What is random forest?",
    "Explain black holes",
    "Who is the father of python programming?",
    "What is the capital of France?",
)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return commands.run("generate", *arguments, stdin=stdin)


def run_json(*arguments: str, stdin: str | None = None) -> dict[str, Any]:
    return commands.answer("generate", *arguments, stdin=stdin)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_prompts_come_from_files_and_standard_input(tmp_path: Path) -> None:
    plain, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("The king\n\nDie Königin\n", encoding="utf-8")
    common = ["--seed", "1", "--max-tokens", "8"]
    expected = texts(run_json("--prompts", "The king", "Die Königin", *common))
    assert texts(run_json("--input", str(plain), *common)) == expected
    assert texts(run_json("--input", "-", *common, stdin="The king\nDie Königin\n")) == expected
    records = [
        {"prompt": "The king", "id": "one", "max_tokens": 3},
        {"prompt": [5, 6, 7], "seed": 9, "n": 2},
        {"prompt": "The king", "stop": " ", "sampling": {"temperature": 0.0}},
    ]
    objects.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    answer = run_json("--input", str(objects), *common)
    piped = run_json("--input", "-", *common, stdin=objects.read_text("utf-8"))
    assert texts(answer) == texts(piped)
    assert set(texts(answer)) == {"one.0", "1.0", "1.1", "2.0"}
    results = answer["results"]
    assert isinstance(results, list)
    by_id = {(record["id"], record["sample"]): record for record in results}
    assert len(by_id["one", 0]["tokens"]) == 3
    assert by_id["1", 0]["seed"] == 9
    assert by_id["1", 0]["prompt"] == [5, 6, 7]
    assert by_id["2", 0]["finish_reason"] == "stop"
    assert " " not in by_id["2", 0]["text"]


def test_settings_of_a_line_are_added_to_those_of_the_command() -> None:
    base = SamplingParams(temperature=0.3, top_k=7)
    data = ['{"prompt": "a", "seed": 3}', '{"prompt": "b"}', '"c"']
    first, second, third = read_requests(data, json_lines=True, sampling=base)
    assert first.sampling == base.replace(seed=3)
    assert second.sampling == third.sampling == base
    assert third.prompt == "c"
    (biased,) = read_requests(
        ['{"prompt": "a", "sampling": {"logit_bias": {"5": -1.5}}, "stop": ["x", "y"]}'],
        json_lines=True,
    )
    assert biased.sampling is not None
    assert biased.sampling.logit_bias == {5: -1.5}
    assert biased.stop == ("x", "y")


@pytest.mark.parametrize(
    "line",
    ["{", "5", "{}", '{"prompt": 5}', '{"prompt": "a", "temprature": 1}', '{"prompt": "a", "n": 0}',
     '{"prompt": "a", "sampling": {"heat": 1}}', '{"prompt": "a", "sampling": [1]}',
     '{"prompt": "a", "max_tokens": "many"}', '{"prompt": "a", "grammar": 5}',
     '{"prompt": "a", "grammar": ""}', '{"prompt": "a", "sampling": {"logit_bias": [1]}}',
     '{"prompt": "a", "sampling": {"logit_bias": {"x": 1}}}', '{"prompt": "a", "stop": [5]}',
     '{"prompt": "a", "stop": 5}', '{"prompt": "a", "id": "\\ud800"}',
     '{"prompt": "a", "n": 100000000}', '{"prompt": "a", "sampling": [["top_k", 3]]}',
     '{"prompt": ' + "[" * 100_000, '{"prompt": "a", "seed": "x"}',
     '{"prompt": [true]}', '{"prompt": [1.0]}', '{"prompt": [-1]}', '{"prompt": []}',
     '{"prompt": [4294967296]}', '{"prompt": "\\ud83d"}', '{"prompt": "a", "stop": "\\udc00"}',
     '{"messages": [{"role": "user", "content": "\\ud83d"}]}', '{"prompt": "a", "id": true}',
     '{"prompt": "a", "id": [1]}', '{"prompt": "a", "id": 1.5}', '{"prompt": "a", "id": {}}',
     '{"prompt": "a", "custom_id": false}', '{"prompt": "\udcff"}'],
    ids=lambda line: line[:60],
)  # fmt: skip
def test_invalid_request_is_named_by_its_line(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2: invalid request"):
        list(read_requests(['{"prompt": "a"}', line], json_lines=True))


def test_an_invalid_line_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n')
    result = run("--input", str(path), "--target", "no-such-model")
    assert result.exit_code == 2
    assert "line 3: invalid request: it is not UTF-8" in result.stderr


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "-"])
def test_byte_order_mark_is_no_part_of_the_first_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    text = "Once" if name.endswith(".txt") else '{"prompt": "Once"}'
    stdin = f"\ufeff{text}\n" if name == "-" else None
    path.write_text(f"\ufeff{text}\n", encoding="utf-8")
    given = name if stdin else str(path)
    (record,) = run_json("--input", given, "-n", "2", "--seed", "1", stdin=stdin)["results"]
    assert record["prompt"] == "Once"


def test_lines_take_the_names_of_openai_and_vllm() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    data = [
        {"messages": messages, "custom_id": "a", "stop": ".", "logprobs": 3},
        {"prompt": "x", "json_schema": {"type": "boolean"}, "logprobs": True, "top_logprobs": 2},
        {"prompt": "x", "logprobs": True},
        {"prompt": "x", "logprobs": False, "top_logprobs": 2},
    ]
    chat, schema, bare, off = read_requests(map(json.dumps, data), json_lines=True)
    assert (list(chat.prompt), chat.id, tuple(chat.stop)) == (messages, "a", (".",))
    assert [r.top_logprobs for r in (chat, schema, bare, off)] == [3, 2, 0, None]
    assert schema.grammar == lb.Grammar.from_json_schema({"type": "boolean"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"messages": "Hi"}, "messages"),
        ({"messages": [1, 2]}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "b"}, "exclude"),
        ({"prompt": "a", "id": "a", "custom_id": "b"}, "exclude"),
        ({"prompt": "a", "grammar": "root ::= [a]", "json_schema": {}}, "exclude"),
        ({"prompt": "a", "json_schema": 5}, "json_schema"),
        ({"prompt": "a", "json_schema": "no such file"}, "cannot read the schema"),
        ({"prompt": "a", "regex": "(a"}, "unclosed group"),
        ({"prompt": "a", "choice": "a"}, "choice must be a list"),
        ({"prompt": "a", "choice": ["a"], "regex": "a"}, "exclude"),
        ({"prompt": "a", "json_schema": {"not": {}}}, "not"),
        ({"prompt": "a", "logprobs": "many"}, "logprobs"),
        ({"prompt": "a", "logprobs": 2, "top_logprobs": 2}, "logprobs"),
    ],
)
def test_line_that_is_no_request_names_the_reason(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_requests([json.dumps(data)], json_lines=True))


def test_setting_outside_of_sampling_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        list(read_requests(['{"prompt": "a", "temperature": 0}'], json_lines=True))
    assert "sampling" in str(caught.value.hint)


def test_half_a_surrogate_pair_is_found_before_a_model_loads() -> None:
    stdin = '{"prompt": "The king"}\n{"prompt": "\\ud800", "id": "half"}\n'
    arguments = ("--input", "-", "-n", "4", "--json", "--target")
    result = run(*arguments, "no-such-model", stdin=stdin)
    assert result.exit_code == 2
    assert "line 2: invalid request: half of a surrogate pair" in result.stderr


def test_output_has_one_line_a_text(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = run("--prompts", *SEED_PROMPTS, "-n", "8", "--seed", "2", "--output", str(path))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""  # the results are in the file
    records = lines(path)
    assert {record["id"] for record in records} == {"0", "1", "2", "3"}
    for record in records:
        assert record["prompt"] == SEED_PROMPTS[int(str(record["id"]))]
        assert record["finish_reason"] in ("stop", "length")
        assert {"text", "tokens", "seed", "sample"} <= set(record)
        assert "stats" not in record
    again = run("--prompts", *SEED_PROMPTS, "--output", str(path))
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    assert lines(path) == records


def test_resumed_run_leaves_out_what_is_there(tmp_path: Path) -> None:
    path, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    common = ["--prompts", *SEED_PROMPTS, "-n", "8", "--seed", "2", "--samples", "2"]
    assert run(*common, "--output", str(whole)).exit_code == 0
    kept = whole.read_text("utf-8").splitlines(keepends=True)[:5]
    path.write_text("".join(kept) + '{"id": "3", "sample": 0, "prompt": "torn', encoding="utf-8")
    result = run(*common, "--output", str(path), "--resume")
    assert result.exit_code == 0, result.stderr
    assert "texts in the file already" in result.stderr
    assert path.read_text("utf-8").startswith("".join(kept))
    known = {(r["id"], r["sample"]): r["text"] for r in lines(whole)}
    assert len(lines(path)) == len(known) == 8
    assert {(r["id"], r["sample"]): r["text"] for r in lines(path)} == known
    done = path.read_bytes()
    assert run(*common, "--output", str(path), "--resume").exit_code == 0
    assert path.read_bytes() == done


def test_resuming_refuses_a_file_of_other_prompts(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert run("--prompts", "The king", "-n", "4", "--output", str(path)).exit_code == 0
    result = run("--prompts", "The queen", "-n", "4", "--output", str(path), "--resume")
    assert result.exit_code == 2
    assert "other prompts" in result.stderr
    path.write_text("no json\n", encoding="utf-8")
    result = run("--prompts", "The king", "--output", str(path), "--resume")
    assert result.exit_code == 2
    assert "line 1: invalid result" in result.stderr


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--seed", "3"], "--seed was 2, not 3"),
        (["--samples", "3"], "--samples was 1, not 3"),
        (["--temperature", "0.5"], "the sampling settings"),
        (["-n", "9"], "the sampling settings"),
        (["--stop", "the"], "the sampling settings"),
        (["-S", "rule=block"], "rule was seeded, not block"),
        (["--kv-type", "f16"], "--kv-type was auto, not f16"),
        (["-S", "batch_invariant=false"], "--kv-type was auto, not fast"),
        (["--target", "tale-draft", "--draft", "none"], "the model (--target) differs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_resuming_refuses_other_settings_and_says_which(
    changed: list[str], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    begun = ["--prompts", "The king", "-n", "4", "--seed", "2", "--output", str(path)]
    assert run(*begun).exit_code == 0
    with path.open("ab") as file:
        file.write(b'{"id": "to')
    before = path.read_bytes()  # refused, it keeps its torn line too
    result = run(*begun, "--resume", *changed)
    assert result.exit_code == 2, result.output
    assert named in " ".join(result.stderr.split())
    assert "resume with the settings it was started with" in " ".join(result.stderr.split())
    assert path.read_bytes() == before


def test_longer_file_is_resumed(tmp_path: Path) -> None:
    path, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    arguments = ("--input", str(path), "-n", "6", "--seed", "2")
    path.write_text("\n".join(SEED_PROMPTS[:2]))
    assert run(*arguments, "--output", str(out)).exit_code == 0
    begun = out.read_text("utf-8")
    path.write_text("\n".join(SEED_PROMPTS))
    assert run(*arguments, "--output", str(out), "--resume").exit_code == 0
    assert out.read_text("utf-8").startswith(begun)
    found = {f"{record['id']}.0": record["text"] for record in lines(out)}
    assert len(lines(out)) == 4
    assert found == texts(run_json(*arguments))
    before = out.read_bytes()
    for changed in (("x", *SEED_PROMPTS), SEED_PROMPTS[:2]):  # one inserted before, some removed
        path.write_text("\n".join(changed))
        result = run(*arguments, "--output", str(out), "--resume")
        assert result.exit_code == 2
        assert "results of other prompts" in result.stderr
    assert out.read_bytes() == before


def test_changed_settings_of_a_line_are_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    arguments = ("--input", str(path), "--seed", "2", "--output", str(out), "--resume")
    line: dict[str, object] = {"prompt": "Once", "max_tokens": 3}
    path.write_text(json.dumps(line))
    assert run(*arguments).exit_code == 0
    for more in (
        {"max_tokens": 4},
        {"stop": "a"},
        {"seed": 3},
        {"sampling": {"top_k": 3}},
        {"parse_special": False},
        {"grammar": 'root ::= "a"'},
    ):
        path.write_text(json.dumps({**line, **more}))
        assert run(*arguments).exit_code == 2
    path.write_text(json.dumps({**line, "priority": 2, "top_logprobs": 1}))
    assert run(*arguments).exit_code == 0


def test_file_of_version_0_2_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ("--prompts", *SEED_PROMPTS, "-n", "4", "--seed", "2", "--output", str(out))
    assert run(*arguments).exit_code == 0
    whole = lines(out)
    for record in whole:
        del record["job"]["request"]
        record["job"]["prompts"] = "0123456789abcdef"
    out.write_text("".join(json.dumps(record) + "\n" for record in whole[:2]))
    assert run(*arguments, "--resume").exit_code == 0
    assert {r["id"]: r["text"] for r in lines(out)} == {r["id"]: r["text"] for r in whole}


def test_failed_texts_are_run_again_on_resume(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    arguments = ("--input", str(path), "-n", "4", "--seed", "2", "--output", str(out))
    given = [{"prompt": "The king"}, {"prompt": [5, 99999999]}, {"prompt": "The wolf"}]
    path.write_text("\n".join(map(json.dumps, given)))
    assert run(*arguments).exit_code == 1
    kept = [line for line in out.read_text("utf-8").splitlines(True) if '"error"' not in line]
    assert len(kept) == 2
    out.write_text(out.read_text("utf-8") + '{"id": "to')
    assert run(*arguments, "--resume").exit_code == 1  # it fails again
    assert [record["id"] for record in lines(out) if "error" in record] == ["1"]
    path.write_text("\n".join(map(json.dumps, [given[0], {"prompt": [5, 6]}, given[2]])))
    assert run(*arguments, "--resume").exit_code == 0
    assert out.read_text("utf-8").startswith("".join(kept))
    assert sorted(record["id"] for record in lines(out)) == ["0", "1", "2"]
    assert list(tmp_path.iterdir()) in ([path, out], [out, path])


def test_job_without_a_seed_is_resumed_with_the_one_that_was_picked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun = ["--prompts", "The king", "The wolf", "--samples", "2", "-n", "6"]
    # Plain decoding: without a seed a draft would change what is drawn, though not its distribution.
    begun += ["--draft", "none", "--output", str(path)]
    assert run(*begun).exit_code == 0
    whole = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text(whole[0], encoding="utf-8")
    assert run(*begun, "--resume").exit_code == 0

    def texts_of(records: list[str]) -> dict[tuple[object, object], object]:
        return {(r["id"], r["sample"]): (r["seed"], r["text"]) for r in map(json.loads, records)}

    assert texts_of(path.read_text("utf-8").splitlines()) == texts_of(whole)


def test_what_changes_no_text_may_change_when_resuming(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun = ["--prompts", *SEED_PROMPTS, "-n", "6", "--seed", "2"]
    assert run(*begun, "--output", str(path)).exit_code == 0
    whole = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(whole[:2]), encoding="utf-8")
    again = [*begun, "--output", str(path), "--resume", "--draft", "lookup", "--parallel", "2"]
    assert run(*again).exit_code == 0
    assert {(r["id"], r["text"]) for r in lines(path)} == {
        (r["id"], r["text"]) for r in map(json.loads, whole)
    }


def test_resuming_leaves_a_file_alone_that_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    begun = ["--prompts", "The king", "-n", "4", "--output", str(path), "--resume"]
    old = json.dumps({"id": "0", "sample": 0, "prompt": "The king", "text": ""}) + "\n"
    for text, message in [
        ("Dear diary", "line 1: invalid result"),  # without an end of line: not a torn result
        (old.replace("}", ', "job": {}}') + "more", "line 2: invalid result"),
        (old, "does not record its settings"),
    ]:
        path.write_text(text, encoding="utf-8")
        result = run(*begun)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.stderr.split())
        assert path.read_text("utf-8") == text


def test_text_that_is_no_unicode_is_written_as_ascii_and_read_again(tmp_path: Path) -> None:
    with lb.load("tale-target", n_ctx=256, n_threads=1) as ctx:
        requests = [Request("\ud800", id="half"), Request("The king", id="1", max_tokens=2)]
        results = lb.Engine(ctx).generate(requests)
        job = dict.fromkeys(("sampling", "samples", "rule", "kv_type", "seed", "model"))
        for resume, kept in ((False, set()), (True, {("1", 0)})):
            with ResultFile(tmp_path / "out.jsonl", job, requests, resume=resume) as file:
                assert file.done == kept
                file.open(ctx.model, 3)
                for result, request in zip(results, requests, strict=True):
                    if (result.id, 0) not in file.done:
                        file.write(result, request)
    found = {record["id"]: record for record in lines(tmp_path / "out.jsonl")}
    assert found["half"]["prompt"] == "\ud800" and "Unicode" in found["half"]["error"]
    assert len(found) == len(lines(tmp_path / "out.jsonl")) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.symlink_to("/dev/full")
    result = run("--prompts", "The king", "The wolf", "-n", "4", "--output", str(path))
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith(f"error: cannot write {path}: No space left on device\nhint: ")
    assert "--resume" in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_full_disk_keeps_what_was_written_and_the_rest_is_resumed(tmp_path: Path) -> None:
    """The process may write so many bytes to a file; the next result tears, as on a full disk."""
    resource = pytest.importorskip("resource")
    path, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    begun = ["--prompts", *SEED_PROMPTS, "-n", "8", "--seed", "2"]
    assert run(*begun, "--output", str(whole)).exit_code == 0
    size = whole.stat().st_size

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    done = subprocess.run(
        [*COMMAND, *begun, "--output", str(path), "-t", "1", "-m", "tale-target"],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"error: cannot write {path}: ")
    assert "bug" not in done.stderr
    assert path.stat().st_size == size // 2
    assert run(*begun, "--output", str(path), "--resume").exit_code == 0
    assert {(r["id"], r["text"]) for r in lines(path)} == {
        (r["id"], r["text"]) for r in lines(whole)
    }
    assert len(lines(path)) == len(SEED_PROMPTS)


def test_full_disk_keeps_the_file_whose_failed_texts_are_run_again(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "The king"}\n{"prompt": [99999999]}\n')
    arguments = ("--input", str(path), "-n", "4", "--seed", "2", "--output", str(out))
    assert run(*arguments).exit_code == 1
    before = out.read_bytes()

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    done = subprocess.run(
        [*COMMAND, *arguments, "--resume", "-t", "1", "-m", "tale-target"],
        preexec_fn=limit, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"cannot write {out}" in done.stderr
    assert out.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_killed_run_goes_on_with_every_request_exactly_once(tmp_path: Path) -> None:
    prompts, path = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    asked = [f"{prompt} {i}" for i in range(8) for prompt in SEED_PROMPTS]
    prompts.write_text("\n".join(asked), encoding="utf-8")
    common = ["--input", str(prompts), "--parallel", "3", "--seed", "4", "-n", "40"]
    command = [*signalled_at_line("SIGKILL", 6, path), "generate", *common]
    process = subprocess.run(
        [*command, "--output", str(path), "-t", "1", "-m", "tale-target"],
        stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == -signal.SIGKILL
    n_done = path.read_bytes().count(b"\n")
    assert 6 <= n_done < len(asked), "it was over too soon to be killed"
    assert run(*common, "--output", str(path), "--resume").exit_code == 0
    records = lines(path)
    assert sorted(int(str(record["id"])) for record in records) == list(range(len(asked)))
    plain = texts(run_json(*common, "--draft", "none"))
    assert {f"{record['id']}.0": record["text"] for record in records} == plain


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupted_run_keeps_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    command = [*signalled_at_line("SIGINT", 1, path), "generate", "--prompts", *SEED_PROMPTS]
    process = subprocess.run(
        [*command, "--samples", "40", "--output", str(path), "-np", "2", "-t", "1", "-m", "tale-target"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    err = process.stderr
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "--resume" in err
    assert "tokens a second" in err
    assert 0 < len(lines(path)) < 160
    assert all(record["finish_reason"] in ("stop", "length") for record in lines(path))


# -- OpenAI's batch files ------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello"}]


def envelope(name: str, url: str = "/v1/chat/completions", **body: object) -> dict[str, object]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt", **body}}


def test_openai_batch_is_answered_in_its_shape(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given = [
        envelope(
            "chat", messages=HELLO, max_completion_tokens=4, n=2, logprobs=True, top_logprobs=2
        ),
        envelope("text", "/v1/completions", prompt="Once", max_tokens=5, seed=3, temperature=0),
        envelope("bad", "/v1/completions", prompt=[99999999], max_tokens=5),
        {
            "id": "ours",
            "prompt": "Once",
            "max_tokens": 5,
            "seed": 3,
            "sampling": {"temperature": 0},
        },
    ]
    path.write_text("\n".join(map(json.dumps, given)))
    write_toy(tmp_path / "chat.gguf", metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    arguments = ("--input", str(path), "--seed", "1", "--target", str(tmp_path / "chat.gguf"),
                 "--draft", "none", "--output", str(out), "--n-ctx", "1024")  # fmt: skip
    assert run(*arguments).exit_code == 1
    answers = {record.get("custom_id", record["id"]): record for record in lines(out)}
    assert set(answers) == {"chat", "text", "bad", "ours"}
    assert len(lines(out)) == 4
    body = answers["chat"]["response"]["body"]
    assert answers["chat"]["error"] is None
    assert body["object"] == "chat.completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in ("stop", "length")
        assert all(len(one["top_logprobs"]) == 2 for one in choice["logprobs"]["content"])
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    body = answers["text"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == answers["ours"]["text"]
    assert answers["bad"]["response"] is None
    assert "99999999" in answers["bad"]["error"]["message"]
    kept = [line for line in out.read_text("utf-8").splitlines(True) if '"bad"' not in line]
    out.write_text(kept[0])
    assert run(*arguments, "--resume").exit_code == 1
    again = {record.get("custom_id", record["id"]): record for record in lines(out)}
    for name in ("chat", "text"):
        assert (
            again[name]["response"]["body"]["choices"]
            == answers[name]["response"]["body"]["choices"]
        )
    assert len(lines(out)) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**envelope("a", messages=HELLO), "method": "GET"}, "method must be POST"),
        (envelope("a", "/v1/embeddings", input="x"), "url must be"),
        (envelope("a", prompt="x"), "needs messages"),
        (envelope("a", "/v1/completions", messages=HELLO), "needs prompt"),
        (envelope("a", "/v1/completions", prompt=["x", "y"]), "'x' is not a token id"),
        (envelope("a", messages=HELLO, tools=[{}]), "'tools' of a body is not supported"),
        (envelope("a", messages=HELLO, stream=True), "'stream'"),
        (envelope("a", messages=HELLO, response_format={"type": "x"}), "response_format"),
        (envelope("a", messages=HELLO, max_tokens=1, max_completion_tokens=2), "exclude"),
        ({**envelope("a", messages=HELLO), "custom_id": 5}, "custom_id must be text"),
        ({**envelope("a"), "body": []}, "body must be an object"),
        ({**envelope("a", messages=HELLO), "prompt": "x"}, "'prompt' beside body"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_envelope_that_cannot_be_served_names_the_reason(
    line: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_requests([json.dumps(line)], json_lines=True))


def test_body_of_an_envelope_is_a_request() -> None:
    line = envelope(
        "a", messages=HELLO, top_p=0.5, stop=["x"], presence_penalty=1, logit_bias={"5": -100},
        user="me", tools=None, response_format={
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}},
        },
    )  # fmt: skip
    (request,) = read_requests([json.dumps(line)], json_lines=True)
    assert request.id == "a"
    assert request.stop == ("x",)
    assert request.sampling == SamplingParams(top_p=0.5, presence_penalty=1, logit_bias={5: -100})
    assert request.grammar == lb.Grammar.from_json_schema({"type": "boolean"})


# -- the cache -----------------------------------------------------------------------------------------


def lengths(requests: list[Request], max_tokens: int | None = 100) -> JobLengths:
    named = [replace(r, id=str(i) if r.id is None else r.id) for i, r in enumerate(requests)]
    return JobLengths.of(named, max_tokens)


def test_ids_of_a_job_are_unique() -> None:
    with pytest.raises(ConfigError, match="two requests have the id 'a'"):
        lengths([Request("x", id="a"), Request("y"), Request("z", id="a")])
    with pytest.raises(ConfigError, match="2 ids are given to several requests: 'a', 'b'"):
        lengths([Request("x", id=name) for name in "abcaba"])


@pytest.mark.parametrize(
    ("requests", "max_tokens", "n_texts", "cells"),
    [
        ([Request("The fox")] * 8, 16, 8, None),  # short
        ([Request("The fox")] * 8, 400, 8, 512),  # long
        ([Request("The fox")] * 8, None, 8, None),  # as long as they like
        ([Request("The fox")], 400, 8, None),  # alone
        ([Request([5] * 2000 + [i, 6]) for i in range(8)], 200, 8, None),  # shared for the most part
        ([Request([5] * 6000 + [i]) for i in range(8)], 4000, 8, None),  # too much memory
    ],
)  # fmt: skip
def test_cells_are_divided_where_texts_are_long_and_share_little(
    requests: list[Request], max_tokens: int | None, n_texts: int, cells: int | None
) -> None:
    assert lengths(requests, max_tokens).cells_per_text(n_texts) == cells


def test_prompts_that_cannot_run_do_not_choose_the_layout() -> None:
    """The bundled target is made for 1,024 tokens."""
    usual = [Request(f"{i} foxes", id=str(i), max_tokens=400) for i in range(8)]
    too_long = [Request("fox " * 8000, id="x"), Request([5] * 5000, id="y")]
    for n_ctx in (None, 4096):
        expected = JobLengths.measured(usual, 100, "tale-target", n_ctx)
        job = JobLengths.measured([*usual, *too_long], 100, "tale-target", n_ctx)
        assert (job.n_texts, job.n_ctx) == (10, expected.n_ctx)
        assert job.cells_per_text(8) == expected.cells_per_text(8) == 512


def test_memory_that_cannot_be_divided_serves_long_texts_too(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes")
    prompts = [chr(ord("a") + i) for i in range(8)]
    found = run_json(
        "--prompts", *prompts, "-m", str(path), "--draft", "none", "-n", "300", "--ignore-eos",
    )  # fmt: skip
    assert [len(result["tokens"]) for result in found["results"]] == [300] * 8


@pytest.mark.parametrize("draft", ["none", "tale-draft"])
def test_layout_changes_no_text(draft: str) -> None:
    """Cells of their own are as many as the longest text needs, with a drafter too."""
    common = ["-p", "The fox", "The wolf " * 300, "-n", "12", "--seed", "3", "--draft", draft]
    found = [
        texts(run_json(*common, "-S", f"kv_unified={each}", "-np", "4"))
        for each in ("true", "false")
    ]
    assert found[0] == found[1]


def test_context_is_as_large_as_the_prompt_needs(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "long.gguf", vocab="bytes", n_ctx_train=8192)
    begun = ["-m", str(path), "--draft", "none", "-n", "4", "--json", "--prompts"]
    (record,) = json.loads(run(*begun, "x" * 5000).stdout)["results"]
    assert record["finish_reason"] in ("length", "stop")
    for more, message in [
        ((), "the prompt has 9,001 tokens, the model is made for 8,192"),
        (("--n-ctx", "4096"), "the prompt has 9,001 tokens, --n-ctx is 4,096"),
    ]:
        result = run(*begun, "x" * 9000, *more)
        assert result.exit_code == 1
        assert message in result.output + result.stderr
