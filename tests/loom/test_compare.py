"""Two models on one text: llama-perplexity's numbers, and what can be said of other tokenizers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from paging import DRAFT, TARGET, Paged
from typer.testing import CliRunner

import llamabranch as lb
from llamabranch import eval as evaluation
from llamabranch.cli import app
from llamabranch.eval import comparison, pair
from llamabranch.eval.comparison import Comparison, compare_models

WINDOW = 64


@contextmanager
def opened(path: Path, n_ctx: int = WINDOW) -> Iterator[lb.Context]:
    options: Any = {"kv_type": "f16", "batch_invariant": False, "n_threads": 1}
    with lb.load(path, n_ctx=n_ctx, n_seq_max=1, **options) as ctx:
        yield ctx


@pytest.fixture(scope="module")
def text() -> str:
    items = evaluation.suite_items("true_ending")[:24]
    return "\n".join(str(item["context"]) for item in items)


def compare(a: Path, b: Path, text: str, **more: Any) -> Comparison:
    with opened(a) as first, opened(b) as second:
        return compare_models(first, second, text, WINDOW, 4, **more)


def test_numbers_are_nearly_those_of_a_file_of_logits(text: str, tmp_path: Path) -> None:
    file = tmp_path / "base.kld"
    with opened(TARGET) as base:
        evaluation.perplexity(base, text, WINDOW, chunks=4, save_to=file)
    with opened(DRAFT) as ctx:
        wanted = evaluation.divergence(ctx, file)
    divergence = compare(TARGET, DRAFT, text).divergence
    assert divergence is not None
    mean = wanted.statistics.mean.value
    assert abs(divergence.statistics.mean.value - mean) <= 2e-5 + 0.005 * mean


@pytest.mark.smollm2
def test_chunks_are_read_whole_as_for_a_file_of_logits(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of these models depend on how many tokens are read at once."""
    monkeypatch.setattr(comparison, "_until_they_part", lambda *_: 0)
    file, window = tmp_path / "base.kld", 512
    first, second = map(lb.hub.resolve, ("smollm2-135m", "smollm2-135m:Q8_0"))
    with opened(first, window) as a, opened(second, window) as b:
        evaluation.perplexity(a, text, window, chunks=1, save_to=file)
        wanted = evaluation.divergence(b, file).statistics.mean.value
        divergence = compare_models(a, b, text, window, 1).divergence
    assert divergence is not None
    assert divergence.statistics.mean.value == pytest.approx(wanted, rel=0.01)


def test_a_model_is_at_zero_from_itself(text: str) -> None:
    compared = compare(TARGET, TARGET, text)
    assert compared.divergence is not None and compared.reverse == 0.0
    assert {(token.kl, token.klr) for token in compared.tokens} == {(0.0, 0.0)}
    assert compared.divergence.statistics.same_top.value == 1.0
    assert len(set(compared.forks)) == 1 and compared.advice == "both give the same distributions"


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_greedy_texts_are_compared_at_eight_places_none_of_them_twice(
    chunks: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    inner = comparison._until_they_part

    def noted(pair: Any, prompt: Any, n: int) -> int:
        prompts.append(list(prompt))
        return inner(pair, prompt, n)

    monkeypatch.setattr(comparison, "_until_they_part", noted)
    seen: list[int] = []
    with opened(TARGET) as a, opened(DRAFT) as b:
        compared = compare_models(
            a, b, text, WINDOW, chunks, progress=lambda done: seen.append(len(done.forks))
        )
    assert len(compared.forks) == compared.n_forks == len(set(map(tuple, prompts))) == 8
    assert seen == [0] * compared.n_chunks + list(range(8))  # it tells of each place, too
    for prompt, n in zip(prompts, compared.forks, strict=True):
        texts = []
        for path in (TARGET, DRAFT):
            with opened(path) as ctx, lb.Branch.start(ctx, prompt, temperature=0) as branch:
                texts.append([token.token for token in branch.generate(WINDOW // 2)])
        same = [x == y for x, y in zip(*texts, strict=True)]
        assert n == (same.index(False) if False in same else len(same))


def test_advice_does_not_call_texts_alike_that_part_at_once(text: str) -> None:
    compared = compare(TARGET, TARGET, text)
    assert compared.divergence is not None
    for row in compared.divergence.rows:
        row[:, 2] += 0.001
    assert compared.advice == "the difference is hard to notice"
    compared.forks = [0] * 8
    assert compared.advice.startswith("the probabilities are close, but greedy texts part early")


def keeping(places: list[pair.PairScore]) -> Callable[[int, list[pair.PairScore]], bool]:
    def keep(_: int, scores: list[pair.PairScore]) -> bool:
        places.extend(scores)
        return False

    return keep


def test_divergences_are_sums_over_the_vocabulary() -> None:
    with opened(TARGET) as a, opened(DRAFT) as b:
        tokens = a.model.prompt_tokens("Once upon a time there was a fox")
        places: list[pair.PairScore] = []
        pair.read_pair((a, b), tokens, 1, None, keeping(places))
        for i, place in enumerate(places, 1):
            logs = []
            for ctx in (a, b):
                with lb.Branch.start(ctx, tokens[:i]) as branch:
                    logs.append(branch.log_probs())
            p, q = logs
            sums = [float(np.sum(np.exp(x) * (x - y))) for x, y in ((p, q), (q, p))]
            assert [place.kl, place.klr] == pytest.approx(sums, rel=1e-4, abs=1e-7)
            assert place.score.logprob == pytest.approx(float(p[tokens[i]]), abs=1e-4)
            assert place.same == (p.argmax() == q.argmax())


def test_ids_of_one_model_only_are_left_out(tmp_path: Path) -> None:
    small = toys.write_llama(tmp_path / "small.gguf", vocab=300, weights="f32")
    large = toys.write_llama(tmp_path / "large.gguf", vocab=340, weights="f32")
    with opened(small) as a, opened(large) as b:
        assert pair.same_vocabulary(a.model, b.model)
        tokens = a.model.tokenize("abcdefgh")
        places: list[pair.PairScore] = []
        pair.read_pair((a, b), tokens, 1, None, keeping(places))
        assert all(math.isfinite(place.kl) and place.kl >= 0 for place in places)


def of_bytes(folder: Path) -> Path:
    """Write a model with another tokenizer."""
    metadata = {"context_length": 2048}
    return toys.write_llama(folder / "b.gguf", vocab="bytes", weights="f32", metadata=metadata)


def test_other_tokenizers_are_compared_by_bits(tmp_path: Path, text: str) -> None:
    toy = of_bytes(tmp_path)
    with opened(TARGET, 512) as a, opened(toy, 512) as b:
        assert not pair.same_vocabulary(a.model, b.model)
        tokens = a.model.prompt_tokens("Once upon a time: \N{EURO SIGN} 5 \N{GRINNING FACE} there")
        spans = pair.spans((a, b), tokens)
        data = b"".join(map(a.model.piece, tokens))
        covered = b"".join(data[span.at : span.end] for span in spans)
        assert covered == data
        ids = b.model.prompt_tokens(data.decode())
        with lb.Branch.start(b, ids[:1]) as branch:
            nats = [score.logprob for score in branch.score(ids[1:])]
        known = [span for span in spans if None not in span.bits]
        assert len(spans) - len(known) <= 2  # what nothing is before
        start = known[0].at - (len(data) - len(nats))
        bits = -sum(nats[max(0, start) :]) / math.log(2)
        assert sum(span.bits[1] or 0 for span in known) == pytest.approx(bits, rel=1e-4)
        totals = pair.totals(spans)
        assert totals["bpbB"] == pytest.approx(totals["bitsB"] / totals["bytes"])  # type: ignore[operator]
    report = compare(TARGET, toy, text)
    assert report.divergence is None and report.tokens == []
    assert 0 < (report.totals["bpbA"] or 0) < (report.totals["bpbB"] or 0)
    assert "kl" not in json.dumps(report.as_dict()).lower()


def test_the_page_tells_why_other_tokenizers_have_no_divergence(tmp_path: Path) -> None:
    with Paged(tmp_path, partner=of_bytes(tmp_path)) as page:
        assert page.doc()["models"]["B"]["same_vocabulary"] is False
        root = page.type("Once upon a time there was")
        page.done("compare", node=root["id"], mode="read")
        compared = page.tokens(root["id"])["compare"][-1]
        assert "kl" not in compared and "tokenizers" in compared["why"]
        assert compared["totals"]["bpbB"] > 0
        page.do("compare", 409, node=root["id"], mode="lockstep")


# -- the command -----------------------------------------------------------------------------------


BOTH = ("--against", TARGET, "-m", DRAFT)


def run(*arguments: object) -> Any:
    options = ["-t", "1", "-c", str(WINDOW), "--chunks", "2"]
    return CliRunner().invoke(app, ["eval", *map(str, arguments), *options])


@pytest.fixture
def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text, "utf-8")
    return path


def test_the_command_prints_and_writes_a_report(file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "report.json"
    done = run(*BOTH, "-f", file, "--output", kept)
    assert done.exit_code == 0, done.output
    for part in ("perplexity of the base", "KL(B, A)", "quarter 1", "until they part"):
        assert part in done.output
    written = kept.read_text("utf-8")
    assert run(*BOTH, "-f", file, "--output", kept).exit_code == 2  # it is there already
    assert kept.read_text("utf-8") == written
    report = json.loads(run(*BOTH, "-f", file, "--json").stdout)
    assert json.loads(written) == {"kind": "compare", **report}
    assert report["mean"]["value"] > 0 and len(report["worst"]) == 10 and len(report["forks"]) == 8


@pytest.mark.parametrize(
    ("limits", "code"),
    [(["--fail-kl", "0"], 1), (["--fail-kl", "99"], 0), (["--fail-top", "1"], 1),
     (["--fail-top", "0"], 0), (["-m", TARGET, "--fail-kl", "1"], 2)],
)  # fmt: skip
def test_limits_decide_the_exit_code(file: Path, limits: list[object], code: int) -> None:
    assert run(*BOTH, "-f", file, *limits).exit_code == code


HOSTILE = "\x1b[31m red \u202e reversed </script><img src=x onerror=alert(1)> \x00 end. "


def test_tokens_cannot_act_in_the_report(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(HOSTILE * 30, "utf-8")
    done = run(*BOTH, "-f", file)
    assert done.exit_code == 0, done.output
    for character in ("\x1b", "\u202e", "\x00"):
        assert character not in done.output
