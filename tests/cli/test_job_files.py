"""Jobs of ``generate``: files of requests, results that are resumed, the cache that suits them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
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

TIMEOUT_S = 600  # for a machine that is busy with other things
PLAIN = ("-t", "1", "-m", "tale-target")  # seconds that a process may take
SEED_PROMPTS = (
    "What is random forest?", "Explain black holes", "Who is the father of python programming?",
    "What is the capital of France?",
)  # fmt: skip


def run(*arguments: object, stdin: str | None = None) -> Result:
    return commands.run("generate", *arguments, stdin=stdin)


def run_json(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
    return commands.answer("generate", *arguments, stdin=stdin)


def write(path: Path, requests: list[Any]) -> Path:
    """Write a file of requests."""
    path.write_text("\n".join(map(json.dumps, requests)), "utf-8")
    return path


class Job:
    """A job with a file of results."""

    def __init__(self, folder: Path, *begun: object) -> None:
        self.out = folder / "out.jsonl"
        self.begun = (*begun, "--output", self.out)

    def run(self, *more: object, code: int = 0) -> str:
        """Run the job; return its messages as one line."""
        result = run(*self.begun, *more)
        assert result.exit_code == code, result.output
        assert result.stdout == ""  # the results are in the file
        return " ".join(result.stderr.split())

    @property
    def lines(self) -> list[str]:
        return self.out.read_text("utf-8").splitlines(keepends=True)

    @property
    def records(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self.lines))

    @property
    def texts(self) -> dict[str, str]:
        """The texts by id and sample; each must appear once."""
        by_id = texts({"results": self.records})
        assert len(by_id) == len(self.lines)
        return by_id


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Makes a job whose file of results is in the test's folder."""
    return lambda *begun: Job(tmp_path, *begun)


# -- requests ------------------------------------------------------------------------------------------


def test_prompts_come_from_files_and_standard_input(tmp_path: Path) -> None:
    plain = tmp_path / "prompts.txt"
    plain.write_text("The king\n\nDie Königin\n", encoding="utf-8")
    common = ("--seed", 1, "--max-tokens", 8)
    expected = texts(run_json("--prompts", "The king", "Die Königin", *common))
    assert texts(run_json("--input", plain, *common)) == expected
    assert texts(run_json("--input", "-", *common, stdin="The king\nDie Königin\n")) == expected
    records = [
        {"prompt": "The king", "id": "one", "max_tokens": 3},
        {"prompt": [5, 6, 7], "seed": 9, "n": 2},
        {"prompt": "The king", "stop": " ", "sampling": {"temperature": 0.0}},
    ]
    objects = write(tmp_path / "prompts.jsonl", records)
    answer = run_json("--input", objects, *common)
    piped = run_json("--input", "-", *common, stdin=objects.read_text("utf-8"))
    assert texts(answer) == texts(piped)
    by_id = {f"{record['id']}.{record['sample']}": record for record in answer["results"]}
    assert set(by_id) == {"one.0", "1.0", "1.1", "2.0"}
    assert len(by_id["one.0"]["tokens"]) == 3
    assert (by_id["1.0"]["seed"], by_id["1.0"]["prompt"]) == (9, [5, 6, 7])
    assert by_id["2.0"]["finish_reason"] == "stop" and " " not in by_id["2.0"]["text"]


def test_settings_of_a_line_are_added_to_those_of_the_command() -> None:
    base = SamplingParams(temperature=0.3, top_k=7)
    data = ['{"prompt": "a", "seed": 3, "top_p": 0.5}', '{"prompt": "b"}', '"c"']
    first, second, third = read_requests(data, json_lines=True, sampling=base)
    assert first.sampling == base.replace(seed=3, top_p=0.5)
    assert second.sampling == third.sampling == base and third.prompt == "c"
    line = '{"prompt": "a", "sampling": {"logit_bias": {"5": -1.5}}, "stop": ["x", "y"]}'
    (biased,) = read_requests([line], json_lines=True)
    assert biased.sampling is not None and biased.sampling.logit_bias == {5: -1.5}
    assert biased.stop == ("x", "y")


HELLO = [{"role": "user", "content": "Hello"}]


def envelope(name: str, url: str = "/v1/chat/completions", **body: object) -> dict[str, object]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt", **body}}


CHAT = envelope("a", messages=HELLO)
# A line, as text or as an object, and a part of the reason why it is refused.
REFUSED: tuple[tuple[object, str], ...] = (
    ("{", "truncated"), ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
    ('{"prompt": "\\ud83d"}', "surrogate"), ('{"prompt": "a", "stop": "\\udc00"}', "surrogate"),
    ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', "surrogate"),
    ('{"prompt": "\\ud83d\\ude00 \\\\ud83d"', "truncated"),
    ('{"prompt": "\udcff"}', "it is not UTF-8"), (5, "a request must be an object"),
    ({}, "needs prompt or messages"), ({"prompt": 5}, "got `int`"),
    ({"prompt": []}, "needs prompt"), ({"prompt": [True]}, "bool"), ({"prompt": [1.5]}, "float"),
    ({"prompt": [-1]}, ">= 0"), ({"prompt": [4294967296]}, "< 2147483648|<= 2147483647"),
    ({"messages": "Hi"}, "messages"), ({"messages": [1, 2]}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "role"), ({"messages": HELLO, "prompt": "b"}, "exclude"),
    *(({"prompt": "a", **more}, reason) for more, reason in (
        ({"temprature": 1}, "unknown field `temprature`"), ({"n": 0}, "n must be"),
        ({"n": 10**8}, "n must be"), ({"max_tokens": "many"}, "max_tokens"),
        ({"sampling": {"heat": 1}}, "heat"), ({"sampling": [1]}, "sampling"),
        ({"sampling": {"logit_bias": [1]}}, "logit_bias"), ({"temperature": "x"}, "temperature"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "'x'"), ({"seed": "x"}, "seed"),
        ({"stop": [5]}, "stop"), ({"stop": 5}, "stop"), ({"id": True}, "id"), ({"id": [1]}, "id"),
        ({"id": 1.5}, "id"), ({"custom_id": False}, "custom_id"),
        ({"id": "a", "custom_id": "b"}, "exclude"), ({"grammar": 5}, "grammar"),
        ({"grammar": ""}, "grammar"), ({"grammar": "root ::= [a]", "json_schema": {}}, "exclude"),
        ({"json_schema": 5}, "json_schema"), ({"json_schema": {"not": {}}}, "not"),
        ({"json_schema": "no such file"}, "cannot read no such file"),
        ({"json_schema": "[" * 9999}, r"^.{,200}$"), ({"regex": "(a"}, "unclosed group"),
        ({"choice": "a"}, "choice"), ({"choice": ["a"], "regex": "a"}, "exclude"),
        ({"logprobs": "many"}, "logprobs"), ({"logprobs": 2, "top_logprobs": 2}, "logprobs"),
    )),
    # of OpenAI's batch files
    ({**CHAT, "method": "GET"}, "method"), ({**CHAT, "custom_id": 5}, "custom_id"),
    ({**CHAT, "body": []}, "body"), ({**CHAT, "prompt": "x"}, "unknown field `prompt`"),
    (envelope("a", "/v1/embeddings", input="x"), "/v1/embeddings"),
    (envelope("a", "/v1/" * 999, input="x"), r"^.{,400}$"),
    (envelope("a", prompt="x"), "needs messages"), (envelope("a", tools=[{}]), "tools"),
    (envelope("a", "/v1/completions", messages=HELLO), "needs prompt"),
    (envelope("a", "/v1/completions", prompt=["x", "y"]), "prompt"),
    (envelope("a", messages=HELLO, stream=True), "stream"),
    (envelope("a", messages=HELLO, response_format={"type": "x"}), "response_format"),
    (envelope("a", messages=HELLO, response_format={"type": "json_schema"}), "needs a json_schema"),
)  # fmt: skip


@pytest.mark.parametrize(("line", "reason"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_invalid_request_is_named_by_its_line(line: object, reason: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(ConfigError, match="line 2: invalid request: ") as caught:
        read_requests(['{"prompt": "a"}', text], json_lines=True)
    assert re.search(reason, str(caught.value))


def test_an_invalid_line_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n')
    result = run("--input", path, "--target", "no-such-model")
    assert result.exit_code == 2 and "line 3: invalid request: it is not UTF-8" in result.stderr


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "-"])
def test_byte_order_mark_is_no_part_of_the_first_line(name: str, tmp_path: Path) -> None:
    text = "Once" if name.endswith(".txt") else '{"prompt": "Once"}'
    stdin = f"\ufeff{text}\n" if name == "-" else None
    (tmp_path / name).write_text(f"\ufeff{text}\n", encoding="utf-8")
    source = name if stdin else tmp_path / name
    (record,) = run_json("--input", source, "-n", "2", "--seed", "1", stdin=stdin)["results"]
    assert record["prompt"] == "Once"


def test_lines_take_the_names_of_openai_and_vllm() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    data = [
        {"messages": messages, "custom_id": "a", "stop": ".", "logprobs": 3},
        {"prompt": "x", "json_schema": {"type": "boolean"}, "logprobs": True, "top_logprobs": 2},
        {"prompt": "x", "logprobs": True},
        {"prompt": "x", "logprobs": False, "top_logprobs": 2},
        {"prompt": "x", "choice": ["a", "b"]},
    ]
    chat, schema, bare, off, choice = read_requests(map(json.dumps, data), json_lines=True)
    assert (list(chat.prompt), chat.id, tuple(chat.stop)) == (messages, "a", (".",))
    assert [r.top_logprobs for r in (chat, schema, bare, off)] == [3, 2, 0, None]
    assert schema.grammar == lb.Grammar.from_json_schema({"type": "boolean"})
    assert choice.grammar == lb.Grammar.from_choices(["a", "b"])


# -- results that are resumed --------------------------------------------------------------------------


def test_resumed_run_leaves_out_what_is_there(job: Callable[..., Job]) -> None:
    begun = job("--prompts", *SEED_PROMPTS, "-n", 8, "--seed", 2, "--samples", 2)
    begun.run()
    known, kept, records = begun.texts, "".join(begun.lines[:5]), begun.records
    assert len(known) == 8
    for record in records:
        assert record["prompt"] == SEED_PROMPTS[int(record["id"])]
        assert record["finish_reason"] in ("stop", "length")
        assert {"text", "tokens", "seed", "sample"} <= set(record) and "stats" not in record
    assert "--resume" in begun.run(code=2)
    assert begun.records == records
    # Options that change no text may differ.
    for more in ((), ("--draft", "lookup", "--parallel", 2)):
        begun.out.write_text(kept + '{"id": "3", "sample": 0, "prompt": "torn', encoding="utf-8")
        assert "texts in the file already" in begun.run("--resume", *more)
        assert "".join(begun.lines[:5]) == kept and begun.texts == known
        done = begun.out.read_bytes()
        begun.run("--resume", *more)
        assert begun.out.read_bytes() == done


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
        (["--exact"], "--kv-type was auto, not exact"),
        (["--target", "tale-draft", "--draft", "none"], "the model (--target) differs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_resuming_refuses_other_settings_and_says_which(
    changed: list[str], named: str, job: Callable[..., Job]
) -> None:
    begun = job("--prompts", "The king", "-n", 4, "--seed", 2)
    begun.run()
    with begun.out.open("ab") as file:
        file.write(b'{"id": "to')
    before = begun.out.read_bytes()  # a refused file keeps its torn line, too
    message = begun.run("--resume", *changed, code=2)
    assert named in message and "resume with the prompts and settings" in message
    assert begun.out.read_bytes() == before


def test_longer_file_is_resumed_and_another_one_refused(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    path = tmp_path / "in.txt"
    begun = job("--input", path, "-n", 6, "--seed", 2)
    path.write_text("\n".join(SEED_PROMPTS[:2]))
    begun.run()
    first = begun.lines
    path.write_text("\n".join(SEED_PROMPTS))
    begun.run("--resume")
    assert begun.lines[:2] == first
    assert begun.texts == texts(run_json(*begun.begun[:-2]))
    before = begun.out.read_bytes()
    for changed in (("x", *SEED_PROMPTS), SEED_PROMPTS[:2]):  # one inserted before, some removed
        path.write_text("\n".join(changed))
        assert "results of other prompts" in begun.run("--resume", code=2)
    assert begun.out.read_bytes() == before


def test_changed_settings_of_a_line_are_refused(job: Callable[..., Job], tmp_path: Path) -> None:
    path, line = tmp_path / "in.jsonl", {"prompt": "Once", "max_tokens": 3}
    begun = job("--input", path, "--seed", 2, "--resume")
    write(path, [line])
    begun.run()
    changes: list[dict[str, object]] = [
        {"max_tokens": 4}, {"stop": "a"}, {"seed": 3}, {"sampling": {"top_k": 3}},
        {"parse_special": False}, {"grammar": 'root ::= "a"'},
    ]  # fmt: skip
    for more in changes:
        write(path, [{**line, **more}])
        begun.run(code=2)
    write(path, [{**line, "priority": 2, "top_logprobs": 1}])
    begun.run()


def test_file_of_version_0_2_is_resumed(job: Callable[..., Job]) -> None:
    begun = job("--prompts", *SEED_PROMPTS, "-n", 4, "--seed", 2)
    begun.run()
    whole, records = begun.texts, begun.records
    for record in records:
        del record["job"]["request"]
        record["job"]["prompts"] = "0123456789abcdef"
    begun.out.write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    begun.run("--resume")
    assert begun.texts == whole


def test_failed_texts_are_run_again_on_resume(job: Callable[..., Job], tmp_path: Path) -> None:
    requests: list[Any] = [
        {"prompt": "The king"},
        {"prompt": [5, 99999999]},
        {"prompt": "The wolf"},
    ]
    path = write(tmp_path / "in.jsonl", requests)
    begun = job("--input", path, "-n", 4, "--seed", 2)
    begun.run(code=1)
    kept = [line for line in begun.lines if '"error"' not in line]
    assert len(kept) == 2
    begun.out.write_text("".join(begun.lines) + '{"id": "to')
    begun.run("--resume", code=1)  # it fails again
    assert [record["id"] for record in begun.records if "error" in record] == ["1"]
    write(path, [requests[0], {"prompt": [5, 6]}, requests[2]])
    begun.run("--resume")
    assert begun.lines[:2] == kept and set(begun.texts) == {"0.0", "1.0", "2.0"}
    assert sorted(tmp_path.iterdir()) == [path, begun.out]


def test_job_without_a_seed_is_resumed_with_the_one_that_was_picked(
    job: Callable[..., Job],
) -> None:
    # Plain decoding: without a seed a draft would change what is drawn, though not its distribution.
    begun = job("--prompts", "The king", "The wolf", "--samples", 2, "-n", 6, "--draft", "none")
    begun.run()
    whole, seeds = begun.texts, {record["seed"] for record in begun.records}
    begun.out.write_text(begun.lines[0], encoding="utf-8")
    begun.run("--resume")
    assert begun.texts == whole and {record["seed"] for record in begun.records} == seeds


def test_resuming_leaves_a_file_alone_that_is_not_its_own(job: Callable[..., Job]) -> None:
    begun = job("--prompts", "The king", "-n", 4, "--resume")
    old = json.dumps({"id": "0", "sample": 0, "prompt": "The king", "text": ""}) + "\n"
    for text, message in [
        ("no json\n", "line 1: invalid result"),
        ("Dear diary", "line 1: invalid result"),  # without an end of line: not a torn result
        (old.replace("}", ', "job": {}}') + "more", "line 2: invalid result"),
        (old, "line 1: invalid result"),
        (
            '{"job": {}, "sample": 0}\n',
            "line 1: invalid result: Object missing required field `id`",
        ),
        ('{"id": "0", "job": {}, "sample": [0]}\n', "line 1: invalid result: Expected `int`"),
    ]:
        begun.out.write_text(text, encoding="utf-8")
        assert message in begun.run(code=2)
        assert begun.out.read_text("utf-8") == text


def test_text_that_is_no_unicode_is_written_as_ascii_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with lb.load("tale-target", n_ctx=256, n_threads=1) as ctx:
        requests = [Request("\ud800", id="half"), Request("The king", id="1", max_tokens=2)]
        results = lb.Engine(ctx).generate(requests)
        settings = dict.fromkeys(("sampling", "samples", "rule", "kv_type", "seed", "model"))
        for resume, kept in ((False, set()), (True, {("1", 0)})):
            with ResultFile(path, settings, requests, resume=resume) as file:
                assert file.done == kept
                file.open(ctx.model, 3)
                for result, request in zip(results, requests, strict=True):
                    if (result.id, 0) not in file.done:
                        file.write(result, request)
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    (half,) = [record for record in records if record["id"] == "half"]
    assert half["prompt"] == "\ud800" and "Unicode" in half["error"] and len(records) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_an_error_that_says_how_to_go_on(job: Callable[..., Job]) -> None:
    begun = job("--prompts", "The king", "The wolf", "-n", 4)
    begun.out.symlink_to("/dev/full")
    result = run(*begun.begun)
    first, hint = result.stderr.splitlines()
    assert result.exit_code == 1
    assert first == f"error: cannot write {begun.out}: No space left on device"
    assert hint.startswith("hint: ") and "--resume" in hint


def _on_a_full_disk(n_bytes: int, *begun: object) -> subprocess.CompletedProcess[str]:
    """Run a job in a process that may write so many bytes to a file; the next write is cut off."""
    resource = pytest.importorskip("resource")

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))

    command = [*commands.COMMAND, "generate", *map(str, begun), *PLAIN]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)


def test_full_disk_keeps_what_was_written_and_the_rest_is_resumed(job: Callable[..., Job]) -> None:
    begun = job("--prompts", *SEED_PROMPTS, "-n", 8, "--seed", 2)
    begun.run()
    whole, half = begun.texts, begun.out.stat().st_size // 2
    begun.out.unlink()
    done = _on_a_full_disk(half, *begun.begun)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"error: cannot write {begun.out}: ") and "bug" not in done.stderr
    assert begun.out.stat().st_size == half
    begun.run("--resume")
    assert begun.texts == whole


def test_full_disk_keeps_the_file_whose_failed_texts_are_run_again(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", [{"prompt": "The king"}, {"prompt": [99999999]}])
    begun = job("--input", path, "-n", 4, "--seed", 2)
    begun.run(code=1)
    before = begun.out.read_bytes()
    done = _on_a_full_disk(64, *begun.begun, "--resume")
    assert done.returncode == 2, done.stderr
    assert f"cannot write {begun.out}" in done.stderr
    assert begun.out.read_bytes() == before and len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_killed_run_goes_on_with_every_request_exactly_once(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    asked = [f"{prompt} {i}" for i in range(8) for prompt in SEED_PROMPTS]
    prompts.write_text("\n".join(asked), encoding="utf-8")
    begun = job("--input", prompts, "--parallel", 3, "--seed", 4, "-n", 40)
    command = [*signalled_at_line("SIGKILL", 6, begun.out), "generate", *map(str, begun.begun)]
    process = subprocess.run(
        [*command, *PLAIN], stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False
    )
    assert process.returncode == -signal.SIGKILL
    n_done = begun.out.read_bytes().count(b"\n")
    assert 6 <= n_done < len(asked), "it was over too soon to be killed"
    begun.run("--resume")
    assert len(begun.lines) == len(asked)
    assert begun.texts == texts(run_json(*begun.begun[:-2], "--draft", "none"))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_interrupted_run_keeps_what_is_done(job: Callable[..., Job]) -> None:
    begun = job("--prompts", *SEED_PROMPTS, "--samples", 40, "-np", 2)
    command = [*signalled_at_line("SIGINT", 1, begun.out), "generate", *map(str, begun.begun)]
    process = subprocess.run(
        [*command, *PLAIN], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    err = process.stderr
    assert process.returncode == 130, err
    assert "Traceback" not in err and "--resume" in err and "tokens per s" in err
    assert 0 < len(begun.lines) < 160
    assert {record["finish_reason"] for record in begun.records} <= {"stop", "length"}


# -- OpenAI's batch files ------------------------------------------------------------------------------


def test_openai_batch_is_answered_in_its_shape(job: Callable[..., Job], tmp_path: Path) -> None:
    ours = {"prompt": "Once", "max_tokens": 5, "seed": 3, "sampling": {"temperature": 0}}
    detail: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2}
    requests = [
        envelope("chat", messages=HELLO, max_completion_tokens=4, **detail),
        envelope("text", "/v1/completions", prompt="Once", max_tokens=5, seed=3, temperature=0),
        envelope("bad", "/v1/completions", prompt=[99999999], max_tokens=5),
        {"id": "ours", **ours},
    ]
    path = write(tmp_path / "in.jsonl", requests)
    model = write_toy(tmp_path / "chat.gguf", metadata={"tokenizer.chat_template": CHAT_TEMPLATE})
    begun = job("--input", path, "--seed", 1, "-m", model, "--draft", "none", "-c", 1024)

    def answers() -> dict[str, Any]:
        by_id = {record.get("custom_id", record["id"]): record for record in begun.records}
        assert set(by_id) == {"chat", "text", "bad", "ours"} and len(begun.lines) == 4
        return by_id

    begun.run(code=1)
    first = answers()
    body = first["chat"]["response"]["body"]
    assert first["chat"]["error"] is None and body["object"] == "chat.completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in ("stop", "length")
        assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    body = first["text"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == first["ours"]["text"]
    assert first["bad"]["response"] is None
    assert "99999999" in first["bad"]["error"]["message"]
    begun.out.write_text(next(line for line in begun.lines if '"bad"' not in line))
    begun.run("--resume", code=1)
    for name in ("chat", "text"):
        again, before = (by_id[name]["response"]["body"]["choices"] for by_id in (answers(), first))
        assert again == before


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
    with pytest.raises(ConfigError, match="several requests have the id 'a'"):
        lengths([Request("x", id="a"), Request("y"), Request("z", id="a")])


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
    """The bundled target is trained for 1,024 tokens."""
    usual = [Request(f"{i} foxes", id=str(i), max_tokens=400) for i in range(8)]
    too_long = [Request("fox " * 8000, id="x"), Request([5] * 5000, id="y")]
    for n_ctx in (None, 4096):
        expected = JobLengths.measured(usual, 100, "tale-target", n_ctx)
        job = JobLengths.measured([*usual, *too_long], 100, "tale-target", n_ctx)
        assert (job.n_texts, job.n_ctx) == (10, expected.n_ctx)
        assert job.cells_per_text(8) == expected.cells_per_text(8) == 512


def test_memory_that_cannot_be_divided_serves_long_texts_too(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes")
    report = run_json("-m", path, "-d", "none", "-n", 300, "--ignore-eos", "-p", *"abcdefgh")
    assert [len(result["tokens"]) for result in report["results"]] == [300] * 8


@pytest.mark.parametrize("draft", ["none", "tale-draft"])
def test_layout_changes_no_text(draft: str) -> None:
    """With separate cells each sequence has enough for the longest text, with a drafter too."""
    common = ("-p", "The fox", "The wolf " * 300, "-n", 12, "--seed", 3, "--draft", draft)
    unified, divided = (
        run_json(*common, "-np", 4, "-S", f"kv_unified={x}") for x in ("true", "false")
    )
    assert texts(unified) == texts(divided)


def test_context_is_as_large_as_the_prompt_needs(tmp_path: Path) -> None:
    path = write_toy(tmp_path / "long.gguf", vocab="bytes", n_ctx_train=8192)
    begun = ("-m", path, "--draft", "none", "-n", 4, "--prompts")
    (record,) = run_json(*begun, "x" * 5000)["results"]
    assert record["finish_reason"] in ("length", "stop")
    for more, limit in ((), "the model is made for 8,192"), (("-c", 4096), "--n-ctx is 4,096"):
        result = run(*begun, "x" * 9000, *more)
        assert result.exit_code == 1
        assert f"the prompt has 9,001 tokens, {limit}" in " ".join(result.stderr.split())
