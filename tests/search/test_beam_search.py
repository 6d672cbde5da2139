"""Beam search: Hugging Face's results, exhaustive search, greedy decoding, waves, counted decodes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_beams
import numpy as np
import pytest
import toys
from failing import check_every_failure

import llamabranch as lb
from llamabranch import Branch, Context, search
from llamabranch.context.logits import LogitsRow
from llamabranch.errors import (
    BranchStateError,
    CacheFullError,
    ConfigError,
    DecodeInterruptedError,
    SequencesExhaustedError,
)
from llamabranch.search.beams import Beams, best_tokens

STORY = "Once upon a time there was a poor woodcutter who lived with his wife and two children"
GOLDEN = json.loads(Path(golden_beams.__file__).with_suffix(".json").read_text("utf-8"))["cases"]


# -- Hugging Face ------------------------------------------------------------------------------------


def beams_over_tables(case: dict[str, Any]) -> list[tuple[list[int], float]]:
    """Run the selection of beam search over the table of a golden case."""
    eog, most, seed = case["eog"], case["max_tokens"], case["seed"]
    group = Beams(case["beams"], len(eog), most, case["length_penalty"], case["early_stopping"])
    ids = np.arange(golden_beams.N_VOCAB, dtype=np.int32)
    running: list[list[int]] = [[]]
    for n_tokens in range(most):
        rows = [
            golden_beams.logits(seed, n_tokens, (text or [golden_beams.PROMPT])[-1], eog)
            for text in running
        ]
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
    found = beams_over_tables(case)
    assert [text for text, _ in found] == case["texts"]
    assert [score for _, score in found] == pytest.approx(case["scores"], abs=2e-5)


def test_golden_cases_are_those_of_the_script() -> None:
    kept = [{name: case[name] for name in golden_beams.cases()[0]} for case in GOLDEN]
    assert kept == golden_beams.cases()


# -- exhaustive search -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model with 6 tokens: 0 BOS, 1 EOG, four letters."""
    path = tmp_path_factory.mktemp("six") / "six.gguf"
    vocabulary = toys.Vocabulary((toys.BOS, toys.EOS, *"abcd"))
    with lb.Model(toys.write_llama(path, vocab=vocabulary)) as model:
        yield model


def every_text(root: Branch, n: int) -> dict[tuple[int, ...], float]:
    """Return log p of every text of at most ``n`` tokens that ends at EOG or has ``n`` tokens."""
    found: dict[tuple[int, ...], float] = {}
    start = root.position

    def visit(branch: Branch, text: tuple[int, ...], logprob: float) -> None:
        row = branch.log_probs()
        for token in range(len(row)):
            longer, total = (*text, token), logprob + float(row[token])
            if len(longer) == n or branch.ctx.model.is_eog(token):
                found[longer] = total
            else:
                branch.commit(token)
                visit(branch, longer, total)
                branch.rewind(start + len(text))

    with root.fork() as branch:
        visit(branch, (), 0.0)
    return found


@pytest.mark.parametrize(
    ("penalty", "early"), [*itertools.product([0.0, 1.0, -0.5], [False, True, "never"])]
)
def test_wide_beam_is_exhaustive_search(six: lb.Model, penalty: float, early: bool | str) -> None:
    n = 4
    with (
        Context(six, n_ctx=2048, n_seq_max=250, n_threads=1, batch_invariant=True) as ctx,
        Branch.start(ctx, "abca") as root,
    ):
        texts = every_text(root, n)
        assert sum(map(math.exp, texts.values())) == pytest.approx(1.0)
        best = sorted(texts, key=lambda t: -texts[t] / len(t) ** penalty)
        found = search.beam_search(
            root, beams=216, max_tokens=n, n=20, length_penalty=penalty, early_stopping="never"
        )
        for hypothesis, text in zip(found.hypotheses, best, strict=False):
            assert hypothesis.score == pytest.approx(texts[text] / len(text) ** penalty, abs=1e-12)
        unended = [t[:-1] if t[-1] == 1 else t for t in best[:20]]
        assert [tuple(h.tokens) for h in found.hypotheses] == unended
        # Stopping early may miss the best text, but scores each text it finds truly.
        for hypothesis in search.beam_search(
            root, beams=216, max_tokens=n, n=20, length_penalty=penalty, early_stopping=early
        ).hypotheses:
            ended = len(hypothesis.tokens) < n and hypothesis.finish_reason == "stop"
            text = (*hypothesis.tokens, *([1] if ended else []))
            if text in texts:
                assert hypothesis.logprob == pytest.approx(texts[text], abs=1e-12)


# -- identities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 40])
def test_one_beam_is_greedy_decoding(ctx: Context, n: int) -> None:
    with Branch.start(ctx, STORY, temperature=0.0) as root:
        found = search.beam_search(root, beams=1, max_tokens=n)
        with root.fork() as greedy:
            assert found.best.tokens == [t.token for t in greedy.generate(n)]
            assert found.best.text == greedy.text[len(STORY) :]
            assert found.best.logprob == pytest.approx(greedy.log_likelihood(), abs=1e-3)
        assert found.best.score == pytest.approx(found.best.logprob / n)


def test_beams_of_a_grammar_follow_it_and_are_not_normalised_again(ctx: Context) -> None:
    rule = 'root ::= " yes" | " no" | " perhaps not"'
    with Branch.start(ctx, STORY, grammar=rule) as root, Branch.start(ctx, STORY) as free:
        found = search.beam_search(root, beams=4, max_tokens=12, n=4, length_penalty=0.0)
        assert {h.text for h in found.hypotheses} <= {" yes", " no", " perhaps not"}
        for hypothesis in found.hypotheses:
            with free.fork() as same:
                same.extend(hypothesis.tokens)
                eog = float(same.log_probs()[ctx.model.eos])
                expected = same.log_likelihood() + eog
            assert hypothesis.finish_reason == "stop"
            assert hypothesis.score == pytest.approx(expected, abs=1e-3)
            assert hypothesis.score == hypothesis.logprob


def test_logit_bias_counts_in_the_score_and_not_in_the_log_probability(ctx: Context) -> None:
    with Branch.start(ctx, STORY, logit_bias={17: 50.0}) as root:
        found = search.beam_search(root, beams=2, max_tokens=3, length_penalty=0.0).best
    assert found.tokens == [17, 17, 17]
    assert found.score == pytest.approx(found.logprob + 150.0)


def test_stop_string_ends_a_beam(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as root:
        found = search.beam_search(root, beams=3, max_tokens=40, n=3, stop=[".", ","])
        for hypothesis in found.hypotheses:
            assert hypothesis.finish_reason == "stop"
            assert "." not in hypothesis.text
            assert "," not in hypothesis.text
            assert ctx.detokenize(hypothesis.tokens)[len(hypothesis.text)] in ".,"


def test_groups_without_penalty_are_copies_and_with_one_they_differ(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as root:
        alone = search.beam_search(root, beams=2, max_tokens=12, n=2)
        same = search.beam_search(root, beams=6, groups=3, max_tokens=12, n=6)
        assert sorted(h.tokens for h in same.hypotheses) == sorted(
            h.tokens for h in alone.hypotheses * 3
        )
        other = search.beam_search(
            root, beams=6, groups=3, max_tokens=12, n=6, diversity_penalty=2.0
        )
        assert len({tuple(h.tokens) for h in other.hypotheses}) > 2
        assert alone.best.tokens in [h.tokens for h in other.hypotheses]  # the first group is free
        assert len({h.tokens[0] for h in other.hypotheses}) > 1


# -- cost, waves, accounts ---------------------------------------------------------------------------


def test_each_token_costs_one_decode_of_all_beams(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as root:
        before = ctx.decoder.n_decodes
        stats = search.beam_search(root, beams=5, max_tokens=20, early_stopping="never").stats
        assert stats.decodes == ctx.decoder.n_decodes - before == 19
        assert stats.tokens_decoded <= 19 * 5
        assert stats.tokens_redecoded == 0
        assert stats.peak_sequences == 5
        assert stats.steps == 20


@pytest.mark.parametrize("n_seq_max", [2, 3, 4, 6])
def test_fewer_sequences_than_beams_give_the_same_result(
    target: lb.Model, ctx: Context, n_seq_max: int
) -> None:
    options: dict[str, Any] = {"beams": 6, "max_tokens": 16, "n": 6}
    with Branch.start(ctx, STORY) as root:
        expected = search.beam_search(root, **options)
    with (
        Context(target, n_ctx=512, n_seq_max=n_seq_max, n_threads=1, batch_invariant=True) as small,
        Branch.start(small, STORY) as root,
    ):
        found = search.beam_search(root, **options)
        assert found.hypotheses == expected.hypotheses
        assert found.stats.peak_sequences == n_seq_max - 1
        assert found.stats.tokens_redecoded > 0
        small.audit()


def test_fewer_cells_than_beams_need_give_the_same_result(target: lb.Model, ctx: Context) -> None:
    options: dict[str, Any] = {"beams": 6, "max_tokens": 24, "n": 6}
    with Branch.start(ctx, STORY) as root:
        expected = search.beam_search(root, **options)
    with (
        Context(
            target, n_ctx=256, n_seq_max=8, n_batch=128, n_threads=1, batch_invariant=True
        ) as small,
        Branch.start(small, [9] * 170) as other,
        Branch.start(small, STORY) as root,
    ):
        assert search.beam_search(root, **options).hypotheses == expected.hypotheses
        other.prune()
        with (
            Branch.start(small, [9] * (small.usage().cells_free - 3)),
            pytest.raises(CacheFullError),
        ):
            search.beam_search(root, **options)
        assert small.n_seq_free == 7
        small.audit()


def test_a_failed_decode_leaves_nothing_behind(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(ctx, STORY) as root:
        assert (
            check_every_failure(
                root,
                lambda: search.beam_search(root, beams=3, max_tokens=8, n=3).hypotheses,
                monkeypatch,
            )
            == 7
        )


def test_ended_early_it_returns_the_best_so_far(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as root:
        found = search.beam_search(
            root, beams=3, max_tokens=50, n=3, on_step=lambda stats: stats.steps == 5
        )
        assert [h.finish_reason for h in found.hypotheses] == ["cancelled"] * 3
        assert [len(h.tokens) for h in found.hypotheses] == [5] * 3
        asked = iter([False, False, True])

        def on_step(stats: search.SearchStats) -> bool:
            if stats.steps == 2:
                ctx.interrupt()
            return next(asked)

        assert (
            len(search.beam_search(root, beams=3, max_tokens=9, on_step=on_step).best.tokens) == 2
        )
        with pytest.raises(DecodeInterruptedError):
            search.beam_search(root, beams=3, max_tokens=9, on_step=lambda _: ctx.interrupt())
        assert ctx.n_seq_free == 7


def test_ctrl_c_returns_every_sequence(ctx: Context) -> None:
    def on_step(stats: search.SearchStats) -> bool:
        if stats.steps == 4:
            raise KeyboardInterrupt
        return False

    with Branch.start(ctx, STORY, temperature=0.9, seed=1) as root:
        before = root.tokens, root.logits.tolist(), root.produce()
        for run in (search.beam_search, search.best_of_n):
            with pytest.raises(KeyboardInterrupt):
                run(root, 4, 9, on_step=on_step)
            assert ctx.n_seq_free == 7
            assert ctx.usage().cells_used == root.position
            assert (root.tokens, root.logits.tolist(), root.produce()) == before


def test_tree_holds_every_hypothesis_and_marks_what_was_given_up(ctx: Context) -> None:
    with Branch.start(ctx, STORY) as root:
        found = search.beam_search(root, beams=3, max_tokens=6, n=2)
    finished = [node for node in found.tree.walk() if node.status == "finished"]
    assert {id(node) for node in finished} == {id(h.node) for h in found.hypotheses}
    for hypothesis in found.hypotheses:
        assert hypothesis.node.path_tokens == hypothesis.tokens
        assert hypothesis.node.path_text == hypothesis.text
        assert [node.status for node in hypothesis.node.path[:-1]] == ["open"] * 5
        assert hypothesis.node.logprob == pytest.approx(
            sum(n.logprob - n.parent.logprob for n in hypothesis.node.path if n.parent)
        )
    assert any(node.status == "pruned" for node in found.tree.walk())
    record = json.loads(json.dumps(found.as_dict(tree=True)))
    assert len(record["tree"]["children"]) == len(found.tree.children)


def test_recurrent_memory_searches_too(tmp_path: Path) -> None:
    with (
        lb.Model(toys.write_lfm2(tmp_path / "lfm2.gguf")) as model,
        Context(model, n_ctx=256, n_seq_max=6, n_threads=1) as many,
        Context(model, n_ctx=256, n_seq_max=3, n_threads=1) as few,
    ):
        found = [
            search.beam_search(Branch.start(ctx, [3, 4, 5]), beams=4, max_tokens=6, n=4)
            for ctx in (many, few)
        ]
        assert [h.tokens for h in found[0].hypotheses] == [h.tokens for h in found[1].hypotheses]
        many.audit()
        few.audit()


# -- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"beams": 0},
        {"beams": 2.5},
        {"max_tokens": 0},
        {"n": 5},
        {"n": 0},
        {"groups": 3},
        {"groups": 0},
        {"length_penalty": math.nan},
        {"length_penalty": "long"},
        {"early_stopping": "soon"},
        {"diversity_penalty": 1.0},
        {"groups": 2, "diversity_penalty": -1.0},
        {"stop": 3},
        {"stop": [""]},
        {"on_step": 3},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(ctx: Context, wrong: dict[str, Any]) -> None:
    with Branch.start(ctx, STORY) as root:
        with pytest.raises(ConfigError):
            search.beam_search(root, **{"beams": 4, **wrong})
        assert ctx.n_seq_free == 7


def test_what_is_no_readable_branch_is_refused(ctx: Context, target: lb.Model) -> None:
    with pytest.raises(ConfigError, match="Branch"):
        search.beam_search("Once upon a time")  # type: ignore[arg-type]
    with Branch.create(ctx) as empty, pytest.raises(BranchStateError):
        search.beam_search(empty)
    pruned = Branch.start(ctx, STORY)
    pruned.prune()
    with pytest.raises(BranchStateError):
        search.beam_search(pruned)
    with (
        Context(target, n_ctx=256, n_seq_max=1, n_threads=1) as one,
        Branch.start(one, STORY) as only,
        pytest.raises(SequencesExhaustedError) as caught,
    ):
        search.beam_search(only)
    assert caught.value.hint
