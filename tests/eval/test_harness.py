"""`LlamaBranchLM` in lm-evaluation-harness: its windows, its tasks, its generation settings; offline."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import llamabranch as lb
from llamabranch.errors import ConfigError
from llamabranch.eval import score, suite, suite_items

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")

from llamabranch.eval import LlamaBranchLM

TEXT = "Once upon a time there was a king who had three sons, and the youngest was kind. " * 4


class Instance:
    """What the harness passes: a request's arguments."""

    def __init__(self, *args: object) -> None:
        self.args = args


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def lm(target: lb.Model) -> Iterator[LlamaBranchLM]:
    with lb.Context(target, n_ctx=1024, n_seq_max=16, n_threads=1, batch_invariant=True) as ctx:
        yield LlamaBranchLM(ctx, max_length=64)
        ctx.audit()
        assert ctx.usage().cells_used == 0


def evaluate(lm: object, tasks: list[object], **options: object) -> dict[str, dict[str, float]]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    report = simple_evaluate(
        model=lm, tasks=tasks, bootstrap_iters=2, log_samples=False, verbosity="ERROR",
        task_manager=TaskManager(include_defaults=False), **options,
    )  # fmt: skip
    assert report is not None
    results: dict[str, dict[str, float]] = report["results"]
    return results


def test_pairs_and_windows_are_those_of_the_harness(lm: LlamaBranchLM) -> None:
    from lm_eval.api.model import TemplateLM

    # The functions used below are the harness's own.
    assert type(lm)._encode_pair is TemplateLM._encode_pair
    pairs = [("Once upon ", "a time"), ("", "The king"), (TEXT, " was old"), ("A", " king")]
    scored = lm.loglikelihood([Instance(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, scored, strict=True):
        if context:
            before, after = lm._encode_pair(context, continuation)
        else:
            before, after = [lm.prefix_token_id], lm.tok_encode(continuation, False)
        whole = (before + after)[-(lm.max_length + 1) :]
        (expected,) = score(lm.ctx, [(whole[: -len(after)], [after])])[0]
        assert (logprob, is_greedy) == (expected.logprob, expected.is_greedy)


def test_rolling_windows_are_those_of_the_harness(lm: LlamaBranchLM) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    texts = [TEXT, "Once", TEXT[:100], ""]
    totals = lm.loglikelihood_rolling([Instance(text) for text in texts], disable_tqdm=True)
    for text, total in zip(texts, totals, strict=True):
        tokens = lm.tok_encode(text, add_special_tokens=False)
        rolling = get_rolling_token_windows(tokens, lm.prefix_token_id, lm.max_length, 1)
        windows = [make_disjoint_window(window) for window in rolling]
        expected = [score(lm.ctx, [(a, [b])])[0][0].logprob for a, b in windows]
        assert total == pytest.approx(math.fsum(expected), abs=1e-9)
        assert sum(len(b) for _, b in windows) == len(tokens)


def test_texts_longer_than_the_context_lose_their_beginnings(target: lb.Model) -> None:
    values = []
    for n_ctx, max_length in ((256, None), (512, 256)):
        with lb.Context(target, n_ctx=n_ctx, n_seq_max=2, n_threads=1, batch_invariant=True) as ctx:
            lm = LlamaBranchLM(ctx, max_length=max_length)
            rolling = lm.loglikelihood_rolling([Instance("word and " * 300)], disable_tqdm=True)
            after = lm.loglikelihood([Instance("abc " * 400, " abc")], disable_tqdm=True)
            values.append((rolling, after))
    assert values[0] == values[1]


def test_generation_is_greedy_up_to_its_stop_string(lm: LlamaBranchLM) -> None:
    with lb.Branch.start(lm.ctx, "Once upon a time", temperature=0) as branch:
        text = "".join(token.text for token in branch.generate(24))
    stop = text.split()[5]
    asked = [
        ("Once upon a time", {"until": [], "max_gen_toks": 24}),
        ("Once upon a time", {"until": [stop], "max_new_tokens": 24}),
        ("Once upon a time", {"until": stop, "max_tokens": 24, "do_sample": False}),
        (TEXT, {"until": ["."], "max_completion_tokens": 8, "temperature": 0.0}),
        ("A", {"until": ["x"], "do_sample": True, "temperature": 0.9, "top_p": 0.9}),
    ]
    lm.max_gen_toks = 16
    generated = lm.generate_until([Instance(*arguments) for arguments in asked], disable_tqdm=True)
    assert generated[0] == text
    assert generated[1] == generated[2] == text.split(stop)[0]
    assert "." not in generated[3]
    assert generated == lm.generate_until(
        [Instance(*arguments) for arguments in asked], disable_tqdm=True
    )


def test_thinking_is_cut_before_stop_strings_count(target: lb.Model) -> None:
    with lb.Context(target, n_ctx=256, n_threads=1) as ctx:
        plain = LlamaBranchLM(ctx, max_gen_toks=24)
        (text,) = plain.generate_until([Instance("Once upon a time", {})], disable_tqdm=True)
        end = text.split()[6]
        thinking = LlamaBranchLM(ctx, max_gen_toks=24, think_end_token=end)
        asked = Instance("Once upon a time", {"until": [text.split()[2]]})
        (answer,) = thinking.generate_until([asked], disable_tqdm=True)
        assert answer == text.split(end)[-1].lstrip().split(text.split()[2])[0]


def test_settings_without_a_counterpart_and_impossible_lengths_are_refused(
    lm: LlamaBranchLM, target: lb.Model
) -> None:
    for settings in ({"num_beams": 4}, {"max_gen_toks": 64}, {"typical_mass": 0.1}):
        with pytest.raises(ConfigError):
            lm.generate_until([Instance("A", settings)], disable_tqdm=True)
    lm.generate_until([Instance("A", {"num_beams": 1, "max_gen_toks": 2})], disable_tqdm=True)
    with pytest.raises(ConfigError):
        lm.loglikelihood([Instance("A", " king" * 100)], disable_tqdm=True)
    with pytest.raises(ConfigError):
        LlamaBranchLM(lm.ctx, max_length=4096)
    with pytest.raises(ConfigError):
        LlamaBranchLM(lm.ctx, n_ctx=64)


def test_the_shipped_tasks_run_and_give_what_the_scores_say(target: lb.Model) -> None:
    tasks = {str(task["task"]): task for task in suite()}
    with lb.Context(target, n_ctx=2048, n_seq_max=16, n_threads=1, batch_invariant=True) as ctx:
        results = evaluate(LlamaBranchLM(ctx), list(tasks.values()), limit=6)
        for name in tasks:
            items: list[Any] = suite_items(name)[:6]
            right, normed, losses = [], [], []
            for item in items:
                choices = item.get("choices") or [item["target"]]
                scores = score(ctx, [(item["context"], choices)])[0]
                if "target" in item:
                    right.append(scores[0].is_greedy)
                    losses.append(-scores[0].logprob)
                    continue
                logprobs = [s.logprob for s in scores]
                right.append(logprobs.index(max(logprobs)) == item["answer"])
                by_length = [p / len(c) for p, c in zip(logprobs, choices, strict=True)]
                normed.append(by_length.index(max(by_length)) == item["answer"])
            assert results[name]["acc,none"] == pytest.approx(fmean(right), abs=1e-9)
            if losses:
                perplexity = math.exp(fmean(losses))
                assert results[name]["perplexity,none"] == pytest.approx(perplexity, rel=1e-9)
            else:
                assert results[name]["acc_norm,none"] == pytest.approx(fmean(normed), abs=1e-9)


def test_a_conversation_is_the_models_template(tmp_path: Path) -> None:
    import toys

    metadata = {"tokenizer.chat_template": toys.CHAT_TEMPLATE}
    path = toys.write_toy(tmp_path / "chat.gguf", vocab="bytes", metadata=metadata)
    with lb.load(path, n_ctx=256, n_threads=1) as ctx:
        lm = LlamaBranchLM(ctx)
        history = [{"role": "user", "content": "Hello"}]
        assert lm.apply_chat_template(history) == ctx.model.apply_chat_template(history)
        opened = [*history, {"role": "assistant", "content": "The answer is"}]
        text = lm.apply_chat_template(opened, add_generation_prompt=False)
        assert text.endswith("The answer is")
        assert lm.chat_template(True) == toys.CHAT_TEMPLATE and lm.chat_template(False) is None
        assert lm.tokenizer_name and lm.get_model_info()["model_sha"] == ctx.model.fingerprint
