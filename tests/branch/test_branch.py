"""A branch: drawing, forking, rewinding, bias, ending, and what each of them leaves unchanged."""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from conftest import audit

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams
from llamabranch.context.params import ContextOptions
from llamabranch.errors import (
    BranchStateError,
    SnapshotError,
)
from llamabranch.sampling import SamplingSettings

STORY = "Once upon a time there was a king who had"
WARM = SamplingParams(temperature=1.0, seed=11)


def generate(branch: Branch, n: int = 20) -> list[int]:
    return [t.token for t in branch.generate(n)]


# -- drawing -------------------------------------------------------------------------------------


def test_produced_is_what_the_distribution_draws_with_logprob_and_entropy(ctx: Context) -> None:
    branch = Branch.start(ctx, STORY, sampling=WARM)
    for _ in range(10):
        choice, logits = branch.distribution(), branch.logits.astype(np.float64)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        produced, log_probs = branch.produce(), branch.log_probs()
        assert log_probs.shape == (ctx.model.n_vocab,) and log_probs.dtype == np.float64
        assert log_probs == pytest.approx(np.log(p), abs=1e-5)
        log_probs[:] = 0.0
        assert branch.log_probs()[0] < 0.0  # it was a copy
        assert branch.entropy() == produced.entropy
        assert branch.surprisal(produced.token) == -produced.logprob
        assert branch.entropy("bits") == pytest.approx(produced.entropy / math.log(2))
        assert branch.step() == produced
        assert produced.token == choice.draw(11, branch.position - 1)
        assert produced.logprob == pytest.approx(math.log(p[produced.token]), rel=1e-5)
        assert produced.entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)


def test_changing_settings_keeps_the_seed(ctx: Context) -> None:
    root = Branch.start(ctx, STORY, sampling=WARM)
    children = root.fork_many(3)
    children[0].reseed(99)
    restored = Branch.restore(ctx, children[1].snapshot())
    changes: list[Callable[[Branch], None]] = [
        lambda branch: branch.steer({}),
        lambda branch: branch.steer({5: -1.0}),
        lambda branch: branch.resample(branch.sampling),
        lambda branch: branch.resample(branch.sampling.replace(logit_bias={7: 0.0})),
        lambda branch: branch.resample(SamplingParams(temperature=1.0)),
    ]
    for source in (children[0], children[2], restored):
        for change in changes:
            with source.fork() as branch:
                change(branch)
                assert branch.seed == source.seed != WARM.seed


def test_sampling_has_the_seed_in_effect(ctx: Context, other_ctx: Context) -> None:
    root = Branch.start(ctx, STORY, sampling=WARM)
    child = root.fork_many(1)[0]
    assert (root.sampling, child.sampling) == (WARM, WARM.replace(seed=child.seed))
    again = Branch.start(other_ctx, STORY, sampling=child.sampling)
    assert generate(again) == generate(child)
    child.resample(WARM.replace(presence_penalty=1e4, penalty_last_n=-1))
    assert child.seed == WARM.seed  # a given seed is used
    assert child.produce().token not in child.tokens  # and the history is kept
    free = [Branch.start(ctx, STORY, temperature=1.0) for _ in range(4)]
    assert len({branch.seed for branch in free}) == 4  # each picks one
    assert len({tuple(generate(branch)) for branch in free}) == 4
    again.resample(free[0].sampling.replace(seed=free[0].seed))
    again.rewind(again.n_prompt)
    assert generate(again) == free[0].generated_tokens
    free[0].reseed(5)
    assert free[0].sampling.seed is None  # the settings have no seed


def test_token_drawn_ahead_is_dropped_where_seed_or_settings_change(ctx: Context) -> None:
    hot = WARM.replace(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0)
    with Branch.start(ctx, STORY, sampling=hot) as branch:
        changes: list[Callable[[], object]] = [
            lambda: branch.reseed(99),
            lambda: branch.resample(SamplingParams(temperature=0.0)),
            lambda: branch.steer({5: 100.0}),
        ]
        for change in changes:
            drawn = branch.produce()
            change()
            with Branch.start(ctx, branch.tokens, sampling=branch.sampling) as fresh:
                assert branch.produce() == fresh.produce() != drawn


# -- generating ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n_silent", [0, 4])
@pytest.mark.parametrize(
    ("character", "n_bytes"), [("🙂", 1), ("🙂", 2), ("🙂", 3), ("世", 2), ("ö", 1)]
)
def test_half_a_character_is_kept_and_appears_whole_whatever_is_done(
    character: str, n_bytes: int, n_silent: int, toy: lb.Model
) -> None:
    """After a rewind into it, in a fork, and in a restored branch."""
    byte = {toy.piece(t): t for t in range(toy.n_vocab)}
    assert toy.bos is not None
    data = character.encode()
    with Context(toy, n_ctx=256, n_threads=1, exact=True) as ctx:
        branch = Branch.start(ctx, "x", temperature=0.0)
        for value in data[:n_bytes]:
            branch.commit(byte[bytes([value])])
            for _ in range(n_silent):
                branch.commit(toy.bos)  # a control token has no text
        position = branch.position
        branch.extend([byte[bytes([value])] for value in data[n_bytes:]])
        branch.rewind(position)
        snapshot = branch.snapshot()
        assert snapshot.pending == data[:n_bytes]
        for same in (branch.fork(), Branch.restore(ctx, snapshot), branch):
            assert same.text == branch.text
            texts = []
            for value in data[n_bytes:]:
                same.steer({byte[bytes([value])]: 1e6})
                texts.append(same.step().text)
            assert "".join(texts) == character
        audit(ctx)


def test_generation_ends_at_an_end_token_that_is_not_yielded(ctx: Context) -> None:
    end = ctx.model.eos
    assert end is not None
    branch = Branch.start(ctx, STORY, temperature=0.0)
    produced = list(branch.generate(5))
    tokens = [t.token for t in produced]
    assert (branch.finish_reason, branch.state) == ("length", "finished")
    assert branch.text == STORY + "".join(t.text for t in produced)
    assert branch.text == ctx.detokenize(branch.tokens)
    branch.steer({end: 1e6})
    assert branch.produce().is_stop and branch.step().is_stop
    assert (branch.finish_reason, branch.generated_tokens) == ("stop", tokens)
    assert list(branch.generate(5)) == []
    assert (branch.is_stop, branch.finish_reason, branch.state) == (True, "stop", "finished")
    assert branch.generated_tokens == tokens
    branch.steer({})
    assert len(generate(branch, 3)) == 3
    assert not branch.is_stop


GENERATIONS: dict[str, Callable[[Branch], object]] = {
    "generate": lambda branch: branch.generate(4),
    "generate_text": lambda branch: branch.generate_text(4),
    "Speculator": lambda branch: lb.Speculator(branch.ctx, lb.SuffixDrafter()).generate(branch),
    "InferenceSession": lambda branch: lb.InferenceSession(branch.ctx, branch),
}


@pytest.mark.parametrize("second", GENERATIONS)
@pytest.mark.parametrize("first", ["generate", "Speculator", "InferenceSession"])
def test_a_branch_has_one_generation_at_a_time(first: str, second: str, ctx: Context) -> None:
    branch = Branch.start(ctx, "Once upon a time", temperature=0.0)
    plain = branch.fork().generate_text(8)
    prepared = branch.generate(4)  # a generation that has not begun does not block others
    running: Any = GENERATIONS[first](branch)
    name = "next_token" if first == "InferenceSession" else "__next__"
    advance: Callable[[], lb.Produced] = getattr(running, name)
    texts = [advance().text, advance().text]
    for begin in (GENERATIONS[second], lambda _: prepared):
        with pytest.raises(BranchStateError, match="is running") as refused:
            next(begin(branch))  # type: ignore[call-overload]
        assert "close()" in str(refused.value.hint)
    with ThreadPoolExecutor(1) as pool, pytest.raises(BranchStateError):
        pool.submit(branch.generate_text, 20).result()
    texts += [advance().text, advance().text]
    running.close()
    texts.append(branch.generate_text(4))
    assert "".join(texts) == plain
    for child in branch.children:
        child.prune()
    branch.prune()


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("generate", "repeat_penalty"),
        ("Speculator", "dry_multiplier"),
        ("Chat", "repeat_penalty"),
    ],
)
def test_a_forgotten_generation_with_penalties_ends_in_silence(
    kind: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    settings = SamplingParams(seed=1).replace(**{setting: 1.2})  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with lb.load(n_threads=1, chat_template="chatml") as ctx:
        if kind == "Chat":
            objects: list[object] = [lb.Chat(ctx, sampling=settings).send("A king")]
        else:
            branch = Branch.start(ctx, "Once upon a time", sampling=settings)
            objects = [branch, GENERATIONS[kind](branch)]
            del branch
        for _ in range(3):
            next(objects[-1])  # type: ignore[call-overload]
        objects.append(objects)  # a cycle: its parts are collected in any order
        del objects
        gc.collect()
        assert unraisable == []
        assert ctx.usage().cells_used == 0


def test_start_names_the_settings_and_repr_shows_last_words(ctx: Context) -> None:
    """For editors and type checkers."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SamplingSettings.__annotations__) == names
    with Branch.start(ctx, STORY, temperature=0.8, seed=1) as branch:
        assert branch.sampling == SamplingParams(temperature=0.8, seed=1)
        branch.generate(20).finish()
        shown = repr(branch)
        words = re.findall(r"'(?:\.\.\.)?(.*)'", shown)[0]
        assert 12 <= len(words) <= 24 and branch.text.endswith(words)
        assert f"perplexity {branch.perplexity():.2f}" in shown
        assert len(shown) <= 80
        branch.sequence.append_unscored([5], None)
        assert "perplexity" not in repr(branch)
    assert "pruned" in repr(branch)


def test_one_stop_string_needs_no_list(ctx: Context) -> None:
    with Branch.start(ctx, STORY, temperature=0.8, seed=1) as branch, branch.fork() as other:
        with branch.fork() as first:
            stop = first.generate_text(20)[-3:]
        texts = [t.text for t in branch.generate(20, stop=stop)]
        assert texts == [t.text for t in other.generate(20, stop=[stop])]
        assert branch.finish_reason == "stop" and stop not in "".join(texts)


# -- moving ----------------------------------------------------------------------------------------


def test_perplexity_counts_what_was_generated(ctx: Context) -> None:
    """A branch that has generated nothing has no perplexity, and likelihood 1."""
    root = Branch.start(ctx, STORY, sampling=WARM)
    first = [t.logprob for t in root.generate(4)]
    child = root.fork()
    assert child.perplexity() == root.perplexity()
    with pytest.raises(BranchStateError, match="since the fork") as refused:
        child.perplexity("fork")
    assert refused.value.hint
    for nothing in (child.log_likelihood("fork"), Branch.create(ctx).log_likelihood()):
        assert (nothing, math.copysign(1.0, nothing)) == (0.0, 1.0)
    child.reseed(3)
    second = [t.logprob for t in child.generate(5)]
    for measure, of in (
        (Branch.perplexity, lambda logprobs: math.exp(-np.mean(logprobs))),
        (Branch.log_likelihood, sum),
    ):
        assert measure(root) == pytest.approx(of(first))
        assert measure(child) == pytest.approx(of(first + second))
        assert measure(child, "prompt") == measure(child)
        assert measure(child, "fork") == pytest.approx(of(second))
        assert measure(root, "fork") == measure(root)
    assert child.log_likelihood(base="bits") == pytest.approx(child.log_likelihood() / math.log(2))
    child.rewind(child.position - 2)
    assert child.perplexity("fork") == pytest.approx(math.exp(-np.mean(second[:3])))
    child.sequence.decode_unscored([5, 6])
    for measure in (Branch.perplexity, Branch.log_likelihood):
        with pytest.raises(BranchStateError, match="2 of 9 tokens have no surprisal"):
            measure(child)


def test_text_appended_without_a_prompt_is_scored_from_its_second_token(ctx: Context) -> None:
    tokens = ctx.tokenize(STORY)
    whole, first, rest = Branch.create(ctx), Branch.create(ctx), Branch.start(ctx, tokens[:1])
    whole.extend(tokens)
    rest.extend(tokens[1:])
    assert whole.perplexity() == rest.perplexity()
    assert whole.log_likelihood() == rest.log_likelihood()
    first.extend(tokens[:1])
    assert first.log_likelihood() == 0.0
    with pytest.raises(BranchStateError):
        first.perplexity()


def test_impossible_text_has_infinite_perplexity(ctx: Context) -> None:
    branch = Branch.start(ctx, STORY, sampling=WARM)
    generate(branch, 2)
    saved = branch.snapshot()
    for first, second in ((1e308, 1e308), (math.inf, 1.0)):
        with Branch.restore(ctx, replace(saved, surprisals=np.array([first, second]))) as never:
            assert (never.perplexity(), never.log_likelihood()) == (math.inf, -math.inf)
    with pytest.raises(SnapshotError, match="surprisal of -inf"):
        Branch.restore(ctx, replace(saved, surprisals=np.array([-math.inf, 1.0])))


# -- trees ---------------------------------------------------------------------------------------


def test_eight_forks_fit_a_default_context(target: lb.Model, tmp_path: Path) -> None:
    toys.write_toy(tmp_path / "mamba.gguf", "mamba")
    with lb.Model(tmp_path / "mamba.gguf") as mamba:
        for model, options, n in (
            (target, ContextOptions(n_threads=1), 16),
            (target, ContextOptions(n_threads=1, n_batch=12), 12),
            (target, ContextOptions(n_threads=1, kv_unified=False, n_ctx=1024), 9),
            (mamba, ContextOptions(n_threads=1), 9),
        ):
            with Context(model, **options) as ctx:
                assert ctx.n_seq_max == n
                assert len(Branch.start(ctx, [1, 2, 3]).fork_many(8)) == 8


def test_with_block_prunes_the_tree(ctx: Context) -> None:
    with pytest.raises(KeyError), Branch.start(ctx, STORY) as root:
        child = root.fork().fork()
        raise KeyError("user's own")
    assert (root.state, child.state) == ("pruned", "pruned")
    assert ctx.usage().cells_used == 0
