"""lm-evaluation-harness over HTTP: the log-probabilities that it gets are those of `Branch.score`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, post

import llamabranch as lb

ROOT = Path(__file__).parents[2]
ITEMS = ROOT / "examples/lm_eval/facts.jsonl"


SERVE: dict[str, Any] = {}


def pairs() -> list[tuple[str, str]]:
    """Return the texts of the task: a question, and one of its answers."""
    items = [json.loads(line) for line in ITEMS.read_text("utf-8").splitlines()]
    return [
        (f"Question: {item['question']}\nAnswer:", f" {choice}")
        for item in items
        for choice in item["choices"]
    ]


def scored(ctx: lb.Context, context: str, continuation: str) -> tuple[float, bool]:
    """Return the log-probability of a continuation, and whether each token is the most probable."""
    start, whole = (
        ctx.tokenize(text, add_special=False) for text in (context, context + continuation)
    )
    with lb.Branch.start(ctx, start) as branch:
        scores = branch.score(whole[len(start) :])
    return sum(score.logprob for score in scores), all(score.rank == 1 for score in scores)


def test_what_the_harness_sends_gets_the_log_probabilities_of_the_library(
    api: Any, beside: lb.Context
) -> None:
    def encoded(text: str) -> list[int]:
        tokens = post(api, 200, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        assert isinstance(tokens, list)
        return tokens

    for context, continuation in pairs():
        n, whole = len(encoded(context)), encoded(context + continuation)
        body: dict[str, Any] = {
            "model": "any", "prompt": [whole], "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True,
        }  # fmt: skip
        (choice,) = post(api, **body)["choices"]
        places = choice["logprobs"]
        logprobs, tops = (places[name][n:-1] for name in ("token_logprobs", "top_logprobs"))
        is_greedy = all(p == max(top.values()) for p, top in zip(logprobs, tops, strict=True))
        total, is_best = scored(beside, context, continuation)
        assert sum(logprobs) == pytest.approx(total, abs=1e-5) and is_greedy == is_best


def test_the_tokenizer_of_the_harness_is_that_of_the_model(server: Serving, api: Any) -> None:
    model, text = server.ctx.model, "A king <|im_end|> f\u00fcr \u5abd"
    info = api.get("/tokenizer_info").json()
    for name, token in (("bos_token", model.bos), ("eos_token", model.eos)):
        shown = None if token is None else model.detokenize([token], special=True)
        assert info[name] == shown
    for body, expected in (
        ({"prompt": text}, model.prompt_tokens(text)),
        ({"prompt": text, "add_special_tokens": False},
         model.tokenize(text, add_special=False, parse_special=True)),
        ({"prompt": "word " * 3000}, model.prompt_tokens("word " * 3000)),
    ):  # fmt: skip
        assert post(api, 200, "/tokenize", **body)["tokens"] == expected


def test_the_recipe_runs_in_the_harness_itself(
    server: Serving, beside: lb.Context, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    page = (ROOT / "docs/serve.md").read_text("utf-8")
    (typed,) = re.findall(r"^\$ (lm_eval run (?:.*\\\n)*.*)$", page, re.MULTILINE)
    typed = typed.replace("\\\n", " ").replace("http://127.0.0.1:8080", server.url)
    command = [sys.executable, "-m", *shlex.split(typed), "--log_samples"]
    command += ["--output_path", str(tmp_path)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, **offline, "HF_DATASETS_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "|facts|" in done.stdout
    (samples,) = tmp_path.rglob("samples_facts_*.jsonl")
    received = {}
    for line in samples.read_text("utf-8").splitlines():
        sample = json.loads(line)
        for sent, answers in zip(sample["arguments"].values(), sample["resps"], strict=True):
            ((logprob, is_greedy),) = answers
            received[sent["arg_0"], sent["arg_1"]] = float(logprob), str(is_greedy) == "True"
    assert list(received) == pairs()
    for (context, continuation), (logprob, is_greedy) in received.items():
        total, is_best = scored(beside, context, continuation)
        assert logprob == pytest.approx(total, abs=1e-5) and is_greedy == is_best
