"""Every kind of memory, every drafter, every rule: with a seed the text is that of plain decoding.

Toys with random weights; their EOG token is forbidden, so that texts run past the sliding window (32).
Memory that cannot drop a tail verifies on a fork and decodes the accepted tokens again. Where logits
depend slightly on the batch (all but llama), numbers are compared up to rounding; the texts are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import toys
from divergence import first_divergence
from drafts import FIXED, take_turns
from rounding import rounding
from test_drafted_text import CALLERS, Case, Said, plain

import llamabranch as lb
from llamabranch import Branch, Context, ModelDrafter, SamplingParams, SpeculativeConfig, Speculator

FREE = {1: -math.inf}  # the toys' EOG token
GREEDY = SamplingParams(temperature=0.0, logit_bias=FREE)
WARM = SamplingParams(temperature=0.9, seed=7, logit_bias=FREE)
LOOKING_BACK = WARM.replace(repeat_penalty=1.3, penalty_last_n=12, dry_multiplier=0.7)
N = 90
PROMPT = "abcdefgabcdefg"
CASES = {
    "greedy": Case(PROMPT, GREEDY, N),
    "seeded": Case(PROMPT, WARM, N),
    "penalties": Case(PROMPT, LOOKING_BACK, N),
    "end": Case(PROMPT, WARM.replace(seed=3, logit_bias={1: 4.0}), N),  # in the middle of a draft
}
ROUNDING = 0.05  # nats, along a text of recurrent states; a wrong state moves several


@dataclass(frozen=True)
class Kind:
    """A memory to test, and what it can do."""

    write: Callable[..., Path]
    can_truncate: bool
    recurrent: bool
    swa_full: bool = True
    kv_unified: bool = True


KINDS = {
    "llama": Kind(toys.write_llama, True, False),
    "llama, own cells": Kind(toys.write_llama, True, False, kv_unified=False),
    "gemma3, full window": Kind(toys.write_gemma3, True, False),
    "gemma3": Kind(toys.write_gemma3, False, False, swa_full=False),
    "mamba": Kind(toys.write_mamba, False, True),
    "rwkv7": Kind(toys.write_rwkv7, False, True),
    "lfm2": Kind(toys.write_lfm2, False, True),
}
DRAFTERS = ("none", "llama", "same kind", "same model", "lookup", "suffix", "chain")


@dataclass
class World:
    """A target of one kind, with drafts for it."""

    kind: Kind
    ctx: Context
    drafts: dict[str, Context]
    plain: dict[str, Said]
    rounding: float  # how far apart right logits may be; wrong states move them by several

    def check_same(self, case: Case, said: Said, wanted: Said, *, may_round: bool) -> None:
        """Fail unless the texts are the same, and their numbers but for rounding.

        Args:
            may_round: with a sliding window, whose attention is in f16, a near-tie may fall otherwise:
                the cells of texts in company are in another order.
        """
        if self.ctx.capabilities.sliding_window and may_round and said.tokens != wanted.tokens:
            prompt = self.ctx.tokenize(PROMPT)
            found = first_divergence(
                self.ctx, prompt, wanted.tokens, said.tokens, case.sampling, case.sampling.seed or 0
            )
            assert found is not None
            assert found.gap <= self.rounding
            return
        assert (said.tokens, said.text, said.how) == (wanted.tokens, wanted.text, wanted.how)
        # Logits that are r apart move a log-probability by up to 2 r.
        assert np.allclose(said.numbers, wanted.numbers, rtol=0.0, atol=2 * self.rounding)

    def drafter(self, which: str) -> lb.Drafter:
        lookup = lb.speculative.PromptLookupDrafter(min_ngram=1)
        models = {name: ModelDrafter(ctx) for name, ctx in self.drafts.items()}
        others: dict[str, lb.Drafter] = {
            "none": lb.speculative.NullDrafter(),
            "lookup": lookup,
            "suffix": lb.SuffixDrafter(8, 1, factor=2.0, offset=2.0, min_probability=0.0),
            "chain": lb.ChainDrafter([lb.speculative.PromptLookupDrafter(), models["same kind"]]),
        }
        return others[which] if which in others else models[which]


@pytest.fixture(scope="module", params=KINDS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    kind = KINDS[request.param]
    folder = tmp_path_factory.mktemp("memory")
    files = {
        "target": kind.write(folder / "target.gguf", seed=2),
        "llama": toys.write_llama(folder / "llama.gguf", seed=2, drift=0.3),
        "same kind": kind.write(folder / "draft.gguf", seed=2, drift=0.3),
    }
    files["same model"] = files["target"]
    opened = {
        name: Context(
            lb.Model(path), n_ctx=512 if kind.kv_unified else 8 * 256, n_seq_max=8, n_threads=1,
            swa_full=kind.swa_full if name != "llama" else True,
            kv_unified=kind.kv_unified if name == "target" else True,
        )
        for name, path in files.items()
    }  # fmt: skip
    ctx = opened.pop("target")
    plainly = {name: plain(ctx, case) for name, case in CASES.items()}
    yield World(kind, ctx, opened, plainly, max(ROUNDING, rounding(ctx)))
    for context in (ctx, *opened.values()):
        context.audit()
        assert context.usage().cells_used == 0
        context.close()
        context.model.close()


def test_memory_is_known_for_what_it_is(world: World) -> None:
    capabilities = world.ctx.capabilities
    assert capabilities.can_truncate == world.kind.can_truncate
    assert capabilities.recurrent == world.kind.recurrent
    assert (capabilities.sliding_window > 0) == (world.kind.write is toys.write_gemma3)


@pytest.mark.parametrize(
    ("which", "caller"),
    [(d, c) for d in DRAFTERS for c in CALLERS if c != "branch"],
)
@pytest.mark.parametrize("draft_k", [5, "auto"])
def test_text_is_that_of_plain_decoding(
    draft_k: int | str, which: str, caller: str, world: World
) -> None:
    """By its prompt, in a session, and in an engine, in the company of the others."""
    config = SpeculativeConfig(draft_k=draft_k)
    found, stats = CALLERS[caller](world.ctx, world.drafter(which), config, [*CASES.values()])
    for case, said, wanted in zip(CASES.values(), found, world.plain.values(), strict=True):
        world.check_same(case, said, wanted, may_round=caller == "engine")
    world.ctx.audit()
    assert world.ctx.usage().cells_used == 0
    if which == "none" or (caller == "engine" and not world.kind.can_truncate):
        assert stats.num_drafts == 0
    elif draft_k == 5 and which != "lookup":
        assert stats.num_accepted_tokens > 0
        assert stats.num_accepted_tokens < stats.num_draft_tokens or which == "same model"
    if which == "same model" and draft_k == 5 and world.ctx.capabilities.batch_invariant:
        assert stats.draft_acceptance_rate in (0.0, 1.0)


@pytest.mark.parametrize("rule", ["token", "block", "seeded"])
@pytest.mark.parametrize("which", ["llama", "same kind", "lookup"])
def test_state_after_speculation_is_that_of_a_fresh_prefill(
    which: str, rule: str, world: World
) -> None:
    """Also after an abandoned block, a rewind past the window, and a fork."""
    config = SpeculativeConfig(draft_k=4, rule=rule)
    speculator = Speculator(world.ctx, world.drafter(which), config)
    branch = Branch.start(world.ctx, PROMPT, sampling=WARM)

    def check(one: Branch) -> None:
        with Branch.start(world.ctx, one.tokens, sampling=WARM) as again:
            assert np.abs(one.logits - again.logits).max() <= world.rounding
        world.ctx.audit()

    greedy = speculator.generate(PROMPT, max_tokens=N, sampling=GREEDY).finish()
    assert greedy.tokens == world.plain["greedy"].tokens  # under every rule
    speculator.generate(branch, max_tokens=50).finish()
    check(branch)
    generation = speculator.generate(branch)
    for _ in range(7):
        next(generation)
    generation.close()
    check(branch)
    branch.rewind(branch.position - 45)
    check(branch)
    child = branch.fork()
    speculator.generate(child, max_tokens=20).finish()
    check(child)
    check(branch)
    speculator.generate(branch, max_tokens=20).finish()
    check(branch)
    check(child)
    if rule == "seeded":
        assert child.generated == branch.generated  # a fork draws like its parent
    for one in (child, branch):
        speculator.forget(one)
        one.prune()


def test_context_without_a_spare_sequence_goes_on_plainly(world: World) -> None:
    """Memory that cannot truncate needs a fork to verify on; without one it decodes without drafts."""
    model, kind = world.ctx.model, world.kind
    with Context(model, n_ctx=512, n_seq_max=1, n_threads=1, swa_full=kind.swa_full) as ctx:
        speculator = Speculator(ctx, world.drafter("llama"), FIXED)
        generation = speculator.generate(PROMPT, max_tokens=40, sampling=WARM).finish()
        assert generation.tokens == world.plain["seeded"].tokens[:40]
        assert (generation.stats.num_drafts > 0) == kind.can_truncate
        ctx.audit()


def test_branches_take_turns(world: World) -> None:
    """Generations of four branches interleave over one draft; each generates what it generates alone."""
    speculator = Speculator(world.ctx, world.drafter("same kind"), SpeculativeConfig(draft_k=3))
    root = Branch.start(world.ctx, PROMPT, sampling=WARM)
    children = take_turns(speculator, root, 25)
    world.ctx.audit()
    for child in children:
        speculator.forget(child)
    root.prune_subtree()
