"""Tasks: files that are read or refused, metrics by hand, the shipped ones, resumed runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from llamabranch import Context
from llamabranch.errors import ConfigError
from llamabranch.eval import Sample, Task, find_task, run_task, score, task_names

CHOICES: list[dict[str, object]] = [
    {"id": "sons", "context": "A king had three", "choices": [" sons", " zebra"], "answer": 0},
    {
        "id": "time",
        "context": "Once upon a",
        "choices": [" the", " time", " time ago"],
        "answer": 1,
    },
    {"id": "wrong", "context": "Once upon a", "choices": [" time", " fish"], "answer": 1},
]
TARGETS: list[dict[str, object]] = [
    {"context": "Once upon a", "target": " time"},
    {"context": "Once upon a", "target": " zebra"},
]


def write(path: Path, items: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
    return path


@pytest.mark.parametrize("name", ["last_word", "sentence_order", "true_ending"])
def test_shipped_tasks_are_well_formed(name: str) -> None:
    assert task_names() == ["last_word", "sentence_order", "true_ending"]
    task = find_task(name)
    assert len(task.items) >= 100
    for item in task.items:
        assert len(set(item.choices)) == len(item.choices)
        assert all(choice.startswith(" ") for choice in item.choices)
        assert not item.context.endswith(" ")
    if task.is_choice:
        answers = [item.answer for item in task.items]
        assert {len(item.choices) for item in task.items} == {4}
        # Each place is the right one for about a quarter: 4 standard deviations.
        for place in range(4):
            share = answers.count(place) / len(answers)
            assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(answers))


def test_metrics_are_those_of_the_scores(ctx: Context, tmp_path: Path) -> None:
    task = Task.read(write(tmp_path / "few.jsonl", CHOICES))
    assert task.name == "few" and task.is_choice
    found = run_task(ctx, task)
    right = normed = 0
    for item, sample in zip(task.items, found.samples, strict=True):
        logprobs = [each.logprob for each in score(ctx, [(item.context, item.choices)])[0]]
        assert list(sample.logprobs) == logprobs
        right += logprobs.index(max(logprobs)) == item.answer
        by_length = [p / len(c) for p, c in zip(logprobs, item.choices, strict=True)]
        normed += by_length.index(max(by_length)) == item.answer
    assert right == 2
    share = right / 3
    assert found.metrics["acc"][0] == pytest.approx(share)
    assert found.metrics["acc"][1] == pytest.approx(math.sqrt(share * (1 - share) / 2))
    assert found.metrics["acc_norm"][0] == pytest.approx(normed / 3)
    assert found.chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    low, high = found.interval
    assert low == pytest.approx(0.2077, abs=1e-3) and high == pytest.approx(0.9385, abs=1e-3)


def test_targets_are_right_where_the_model_would_write_them(ctx: Context, tmp_path: Path) -> None:
    found = run_task(ctx, Task.read(write(tmp_path / "words.jsonl", TARGETS)))
    assert [sample.is_right for sample in found.samples] == [True, False]
    losses = [-sample.logprobs[0] for sample in found.samples]
    assert found.metrics["perplexity"][0] == pytest.approx(math.exp(sum(losses) / 2))
    assert found.chance == 0.0


def test_samples_are_told_at_once_and_a_run_is_limited(ctx: Context, tmp_path: Path) -> None:
    task = Task.read(write(tmp_path / "few.jsonl", CHOICES))
    seen: list[Sample] = []
    whole = run_task(ctx, task, on_sample=seen.append)
    assert sorted(seen, key=lambda sample: task.items.index(sample.item)) == list(whole.samples)
    assert run_task(ctx, task, limit=2).samples == whole.samples[:2]

    def stop(sample: Sample) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_task(ctx, task, on_sample=stop)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no items"),
        ("\n\n", "no items"),
        ("x\n", "line 1 is no JSON"),
        ('{"context": "a", "target": " b"}\n[]\n', "line 2"),
        ('{"context": "a", "target": ""}\n', "line 1"),
        ('{"context": "a"}\n', "line 1"),
        ('{"context": "a", "choices": [" b"], "answer": 0}\n', "line 1"),
        ('{"context": "a", "choices": [" b", " c"], "answer": 2}\n', "line 1"),
        ('{"context": "a", "choices": [" b", " c"], "answer": true}\n', "line 1"),
        ('{"context": "a", "choices": [" b", 5], "answer": 0}\n', "line 1"),
        ('{"context": "a", "choices": [" b", " c"], "answer": 0, "target": "d"}\n', "line 1"),
        ('{"context": "a", "target": " b", "extra": 1}\n', "line 1"),
        (json.dumps(CHOICES[0]) + "\n" + json.dumps(TARGETS[0]) + "\n", "choices and items"),
        ('{"id": 1, "context": "a", "target": " b"}\n' * 2, "one id"),
    ],
)
def test_files_that_are_no_tasks_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message):
        Task.read(path)


def test_other_encodings_and_unknown_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"context": "Größe", "target": " b"}\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        Task.read(path)
    with pytest.raises(ConfigError, match="cannot read"):
        Task.read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no task 'arc'") as caught:
        find_task("arc", tmp_path)
    assert caught.value.hint is not None and "latin" in caught.value.hint
    path.write_bytes(
        b'\xef\xbb\xbf{"context": "a", "target": " b", "choices": null}\n'
    )  # a byte order mark is no text, null no column
    assert find_task("latin", tmp_path).items[0].choices == (" b",)


def test_a_choice_that_tokenizes_to_nothing_names_its_request(ctx: Context, tmp_path: Path) -> None:
    items = [CHOICES[0], {"context": "Once upon a", "choices": ["b", "c"], "answer": 0}]
    before = ctx.decoder.n_decodes
    joined = ctx.model.tokenize("Once upon ab")
    if len(joined) == len(ctx.model.tokenize("Once upon a")):  # "ab" is one token
        with pytest.raises(ConfigError, match="few, item 2: "):
            run_task(ctx, Task.read(write(tmp_path / "few.jsonl", items)))
        assert ctx.decoder.n_decodes == before
