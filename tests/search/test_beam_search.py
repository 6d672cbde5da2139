"""Beam search: Hugging Face's results, exhaustive search, greedy decoding, its cost.

``golden_beams.json`` has what transformers' ``generate`` finds (``num_beams`` texts, without sampling)
over tables of logits that come from a formula.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from enumeration import EOG, every_text, toy_of_letters

from llamabranch import Branch, Context, Model, search
from llamabranch.context.logits import LogitsRow
from llamabranch.errors import SequencesExhaustedError
from llamabranch.search.beams import Beams, best_tokens

STORY = "Once upon a time there was a poor woodcutter who lived with his wife and two children"
GOLDEN = json.loads(Path(__file__).with_name("golden_beams.json").read_text("utf-8"))["cases"]
N_VOCAB = 40
PROMPT = 3  # the only token of the prompt


# -- Hugging Face ------------------------------------------------------------------------------------


def table(seed: int, n_tokens: int, last: int, eog: list[int]) -> list[float]:
    """Return the logits after ``n_tokens`` generated tokens of which ``last`` is the last one."""
    row = []
    for token in range(N_VOCAB):
        x = (seed * 1_000_003 + n_tokens * 8191 + last * 131 + token + 1) * 2_654_435_761 % 2**32
        x = (x ^ (x >> 15)) * 2_246_822_519 % 2**32
        x = (x ^ (x >> 13)) * 3_266_489_917 % 2**32
        row.append((x >> 8) / 2**24 * 6 - 3 + (1.5 if token in eog else 0.0))
    return row


def beams_over_tables(case: dict[str, Any]) -> list[tuple[list[int], float]]:
    """Run the selection of beam search over the table of a golden case."""
    eog, most, seed = case["eog"], case["max_tokens"], case["seed"]
    group = Beams(case["beams"], len(eog), most, case["length_penalty"], case["early_stopping"])
    ids = np.arange(N_VOCAB, dtype=np.int32)
    running: list[list[int]] = [[]]
    for n_tokens in range(most):
        rows = [table(seed, n_tokens, (text or [PROMPT])[-1], eog) for text in running]
        offered = [
            best_tokens(ids, LogitsRow(np.array(row, dtype=np.float32)).log_probs(), group.n_kept)
            for row in rows
        ]
        chosen = group.choose(offered)
        texts = [[*running[c.beam], c.token] for c in chosen]
        stops = [c.token in eog or n_tokens + 1 == most for c in chosen]
        running = [texts[i] for i in group.advance(chosen, stops, texts)]
        if group.is_done:
            break
    return [(f.key, f.final) for f in group.finished if isinstance(f.key, list)]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["seed"]))
def test_beams_are_those_of_transformers(case: dict[str, Any]) -> None:
    beams = beams_over_tables(case)
    assert [text for text, _ in beams] == case["texts"]
    assert [score for _, score in beams] == pytest.approx(case["scores"], abs=2e-5)


# -- exhaustive search -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    with toy_of_letters(tmp_path_factory, "abcd", n_ctx=2048, n_seq_max=250) as context:
        yield context


def found(hypothesis: search.Hypothesis, texts: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    """Return the tokens with EOG, if a text ended with it."""
    tokens = tuple(hypothesis.tokens)
    return tokens if tokens in texts else (*tokens, EOG)


@pytest.mark.parametrize(
    ("penalty", "early"), [*itertools.product([0.0, 1.0, -0.5], [False, True, "never"])]
)
def test_wide_beam_is_exhaustive_search(six: Context, penalty: float, early: bool | str) -> None:
    n = 4
    with Branch.start(six, "abca") as root:
        every = every_text(root, n).items()
        texts = {t: math.log(p) for t, p in every if len(t) == n or t[-1] == EOG}
        assert sum(map(math.exp, texts.values())) == pytest.approx(1.0)
        options: dict[str, Any] = {"beams": 216, "max_tokens": n}
        result = search.beam_search(root, **options, length_penalty=penalty, early_stopping=early)
    best = sorted(texts, key=lambda t: -texts[t] / len(t) ** penalty)
    if early == "never":
        assert [found(h, texts) for h in result.hypotheses[:20]] == best[:20]
    # Stopping early may miss the best text, but the scores of the found texts are right.
    for hypothesis in result.hypotheses:
        text = found(hypothesis, texts)
        assert hypothesis.logprob == pytest.approx(texts[text], abs=1e-12)
        assert hypothesis.score == pytest.approx(texts[text] / len(text) ** penalty, abs=1e-12)


# -- identities --------------------------------------------------------------------------------------


def test_beams_of_a_grammar_follow_it_and_are_not_normalised_again(ctx: Context) -> None:
    rule = 'root ::= " yes" | " no" | " perhaps not"'
    with Branch.start(ctx, STORY, grammar=rule) as root, Branch.start(ctx, STORY) as free:
        result = search.beam_search(root, beams=4, max_tokens=12, length_penalty=0.0)
        assert {h.text for h in result.hypotheses} <= {" yes", " no", " perhaps not"}
        for hypothesis in result.hypotheses:
            with free.fork() as same:
                same.extend(hypothesis.tokens)
                eog = float(same.log_probs()[ctx.model.eos])
                expected = same.log_likelihood() + eog
            assert hypothesis.finish_reason == "stop"
            assert hypothesis.score == pytest.approx(expected, abs=1e-3)
            assert hypothesis.score == hypothesis.logprob


def test_logit_bias_counts_in_the_score_and_not_in_the_log_probability(ctx: Context) -> None:
    with Branch.start(ctx, STORY, logit_bias={17: 50.0}) as root:
        hypothesis = search.beam_search(root, beams=2, max_tokens=3, length_penalty=0.0).best
    assert hypothesis.tokens == [17, 17, 17]
    assert hypothesis.score == pytest.approx(hypothesis.logprob + 150.0)


# -- cost -----------------------------------------------------------------------------------


def test_each_token_costs_one_decode_of_all_beams(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as root:
        before = ctx.decoder.n_decodes
        stats = search.beam_search(root, beams=5, max_tokens=20, early_stopping="never").stats
        assert stats.target_forward_passes == ctx.decoder.n_decodes - before == 19
        assert stats.generated <= 19 * 5
        assert stats.elapsed_s > 0 and stats.tokens_per_second > 0


def test_each_beam_needs_a_sequence(target: Model) -> None:
    with (
        Context(target, n_ctx=256, n_seq_max=4, n_threads=1, exact=True) as narrow,
        Branch.start(narrow, STORY) as root,
    ):
        assert len(search.beam_search(root, beams=3, max_tokens=6).hypotheses) == 3
        with pytest.raises(SequencesExhaustedError, match="needs 4 sequences") as caught:
            search.beam_search(root, beams=4, max_tokens=6)
        assert caught.value.hint and narrow.n_seq_free == 3
