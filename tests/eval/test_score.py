"""`eval.score`: log-probabilities computed by hand, sharing changes nothing, refused input."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from llama_cpp import llama_cpp as C
from rounding import rounding

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import CacheFullError, ConfigError, TokenizeError
from llamabranch.eval import Score, encode_pair, score, suite, suite_items

SHOTS = "A king had three sons. The eldest was proud. The second was lazy. "
QUESTIONS = [
    (SHOTS + "The youngest", [" was kind", " was kind and good", " went away into the forest"]),
    (SHOTS + "The youngest", [" sang", " was kind"]),
    (SHOTS + "One day the old king", [" fell ill.", " died", " rode out"]),
    ("Once upon a time", [" there was", " there was a poor woodcutter", " fish"]),
    ("", ["Once", "The little girl was happy"]),
]


def by_hand(ctx: Context, context: str, continuation: str) -> tuple[list[float], bool]:
    """Return log p of each token from the raw rows, in 64 bits, and whether each is the largest."""
    before, after = encode_pair(ctx.model, context, continuation)
    with Branch.create(ctx) as branch:
        rows = branch.extend([*before, *after], logits="all")
    logprobs, greedy = [], True
    for row, token in zip(rows[len(before) - 1 :], after, strict=False):
        wide = row.astype(np.float64)
        logprobs.append(float(wide[token] - np.logaddexp.reduce(wide)))
        greedy &= bool(row[token] == row.max())
    return logprobs, greedy


def one_by_one(ctx: Context, questions: list[Any]) -> list[list[Score]]:
    return [
        [score(ctx, [(c, [continuation])])[0][0] for continuation in many] for c, many in questions
    ]


def count_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of tokens of each decode from now on."""
    seen: list[int] = []
    real = C.llama_decode

    def counted(ptr: object, batch: C.llama_batch) -> int:
        seen.append(batch.n_tokens)
        return int(real(ptr, batch))

    monkeypatch.setattr(C, "llama_decode", counted)
    return seen


def test_scores_are_those_of_raw_logits(ctx: Context) -> None:
    seen: dict[int, list[Score]] = {}
    all_scores = score(ctx, QUESTIONS, on_done=seen.__setitem__)
    assert [seen[i] for i in range(len(QUESTIONS))] == all_scores
    for (context, continuations), scores in zip(QUESTIONS, all_scores, strict=True):
        for continuation, got in zip(continuations, scores, strict=True):
            expected, greedy = by_hand(ctx, context, continuation)
            assert list(got.logprobs) == pytest.approx(expected, abs=1e-5)
            assert got.logprob == pytest.approx(sum(expected), abs=1e-4)
            assert got.is_greedy == greedy
            assert list(got.tokens) == encode_pair(ctx.model, context, continuation)[1]


@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 16])
def test_any_number_of_sequences_gives_the_same(target: lb.Model, n_seq_max: int) -> None:
    options = {"n_ctx": 256, "n_threads": 1, "batch_invariant": True}
    with lb.Context(target, n_seq_max=n_seq_max, **options) as ctx:  # type: ignore[arg-type]
        scores = score(ctx, QUESTIONS)
        ctx.audit()
        assert ctx.usage().cells_used == 0
    with lb.Context(target, n_seq_max=8, **options) as other:  # type: ignore[arg-type]
        assert scores == one_by_one(other, QUESTIONS)


@pytest.mark.parametrize("kind", ["shared cells", "own cells", "lfm2", "mamba"])
def test_random_trees_of_tokens_are_what_each_line_is_alone(kind: str, tmp_path: Path) -> None:
    """Prefixes of prefixes, equal lines, lines that continue each other. With F32 weights it rounds."""
    rng = random.Random(7)
    lines: list[list[int]] = [[5, 6, 7]]
    for _ in range(40):
        base = rng.choice(lines)
        kept = base[: rng.randint(1, len(base))]
        lines.append(kept + [rng.randint(2, 200) for _ in range(rng.randint(1, 30))])
    questions = []
    for line in lines:
        cut = rng.randint(1, len(line) - 1)
        questions.append((line[:cut], [line[cut:], [3], [3, 4]]))
    architecture = "llama" if kind.endswith("cells") else kind
    path = toys.write_toy(tmp_path / "toy.gguf", architecture, vocab="bytes", weights="f32")
    own = {"kv_unified": False, "n_ctx": 5 * 512} if kind == "own cells" else {"n_ctx": 512}
    with (
        lb.Model(path) as model,
        lb.Context(model, n_seq_max=5, n_threads=1, **own) as ctx,  # type: ignore[arg-type]
    ):
        together = score(ctx, questions)
        alone = one_by_one(ctx, questions)
        ctx.audit()
        assert ctx.usage().cells_used == 0 and ctx.n_seq_free == 5
        tolerance = rounding(ctx)
    for a, b in zip(together, alone, strict=True):
        for score_a, score_b in zip(a, b, strict=True):
            assert score_a.tokens == score_b.tokens
            assert score_a.logprobs == pytest.approx(score_b.logprobs, abs=tolerance)


@pytest.mark.parametrize("kind", ["own cells", "lfm2"])
def test_memory_that_is_copied_decodes_a_context_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = "llama" if kind == "own cells" else kind
    path = toys.write_toy(tmp_path / "toy.gguf", architecture, vocab="bytes", weights="f32")
    context, answers = list(range(10, 50)), [[7, 8, 9, 10], [7, 11, 12], [20]]
    with (
        lb.Model(path) as model,
        lb.Context(
            model, n_ctx=512, n_seq_max=4, n_threads=1, kv_unified=kind != "own cells"
        ) as ctx,
    ):
        seen = count_decoded(monkeypatch)
        score(ctx, [(context, answers)])
        assert sum(seen) == len([*context, 7]) + 2 + 1


def test_common_beginnings_are_decoded_once(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = ctx.model.tokenize(SHOTS * 4)
    seen = count_decoded(monkeypatch)
    score(ctx, [([*tokens, i], [[7, 8, 9, 10], [11, 12, 13]]) for i in range(20, 30)])
    unshared = 10 * 2 * (len(tokens) + 3)
    assert sum(seen) == len(tokens) + 10 * (1 + 3 + 2) < unshared / 10


def test_spaces_belong_to_the_continuation(target: lb.Model) -> None:
    assert encode_pair(target, "Once upon  ", "a time") == encode_pair(
        target, "Once upon", "  a time"
    )
    before, after = encode_pair(target, "Once upon", " a time")
    assert before + after == target.prompt_tokens("Once upon a time")


@pytest.mark.parametrize(
    "requests",
    [
        "text", [("a", "b")], [("a",)], ["ab"], [("a", [""])], [("a", []), ("a", ["b", ""])],
        [([1, 2], ["b"])], [("a", [[1]])], [([1, 2], [[]])],
    ],
)  # fmt: skip
def test_bad_requests_are_refused_and_nothing_is_decoded(requests: object, ctx: Context) -> None:
    before = ctx.decoder.n_decodes
    with pytest.raises(ConfigError):
        score(ctx, requests)  # type: ignore[arg-type]
    assert ctx.decoder.n_decodes == before


def test_a_long_context_and_a_bad_id_are_refused(ctx: Context) -> None:
    before = ctx.decoder.n_decodes
    with pytest.raises(
        CacheFullError, match="request 1 has 1026 tokens, the context has room for 1025"
    ):
        score(ctx, [("a", [" b"]), ([3] * 1024, [[4, 5]])])
    with pytest.raises(TokenizeError):
        score(ctx, [([3], [[10**6]])])
    assert ctx.decoder.n_decodes == before
    assert score(ctx, []) == []


def test_the_last_token_needs_no_room(target: lb.Model) -> None:
    requests = [([3] * 250, [[4] * 7, [5] * 6]), ([6], [[7] * 256])]
    values = []
    for n_ctx in (256, 512):
        with lb.Context(target, n_ctx=n_ctx, n_seq_max=2, n_threads=1, batch_invariant=True) as ctx:
            values.append(score(ctx, requests))
    assert values[0] == values[1]


def test_branches_that_are_there_stay(ctx: Context) -> None:
    with Branch.start(ctx, "Once upon a time") as branch:
        before = branch.logits
        scores = score(ctx, QUESTIONS)
        assert np.array_equal(branch.logits, before)
    assert scores == score(ctx, QUESTIONS)


def test_an_interruption_returns_all_sequences(ctx: Context) -> None:
    def stop(_: int, __: list[Score]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(ctx, QUESTIONS, on_done=stop)
    assert ctx.n_seq_free == ctx.n_seq_max and ctx.usage().cells_used == 0


# -- the tasks that are shipped, for lm-evaluation-harness ----------------------------------------------


@pytest.mark.parametrize("name", ["last_word", "sentence_order", "true_ending"])
def test_shipped_tasks_are_well_formed(name: str) -> None:
    assert [task["task"] for task in suite()] == ["last_word", "sentence_order", "true_ending"]
    items: list[Any] = suite_items(name)
    assert len(items) >= 100 and len({item["id"] for item in items}) == len(items)
    for item in items:
        texts = item.get("choices") or [item["target"]]
        assert len(texts) == len(set(texts)) == (1 if name == "last_word" else 4)
        assert all(text.startswith(" ") for text in texts)
        assert not item["context"].endswith(" ")
    if name != "last_word":
        # Each place is right for about a quarter of the items, up to 4 standard deviations.
        answers = [item["answer"] for item in items]
        for place in range(4):
            share = answers.count(place) / len(answers)
            assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(answers)) ** 0.5
    with pytest.raises(ConfigError, match="no task 'arc'") as caught:
        suite_items("arc")
    assert name in (caught.value.hint or "")
