"""Drafts by the compiled loop are the drafts of the steps in Python, whatever ends them.

The same text is drafted with the loop, with a step for each token (the core measures and draws), and with
NumPy alone: tokens, sources, entropies and the reason of the end are equal, and so is the memory after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Branch, Context, ModelDrafter, SamplingParams, SpeculativeConfig
from llamabranch.errors import DecodeInterruptedError
from llamabranch.generation.drafter import NO_DRAFT, DraftLength, DraftRequest, DraftState, Round
from llamabranch.generation.length import AutoLength, FixedLength
from llamabranch.native import core, draft_loop
from llamabranch.speculative import Draft

pytestmark = pytest.mark.skipif(
    not draft_loop.available, reason="the compiled core is missing or off"
)

TALE = "Once upon a time there was a king who had three daughters, and the youngest"
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=7),
    "greedy_bias": SamplingParams(temperature=0.0, seed=7, logit_bias={12: 3.0, 260: -math.inf}),
    "default": SamplingParams(seed=7),
    "warm": SamplingParams(temperature=1.4, top_k=0, top_p=1.0, min_p=0.0, seed=-5),
    "narrow": SamplingParams(temperature=0.6, top_k=5, top_p=0.9, seed=1 << 70),
    "min_p": SamplingParams(top_k=0, top_p=1.0, min_p=0.1, seed=3, logit_bias={12: -2.0}),
    "penalised": SamplingParams(repeat_penalty=1.3, seed=7),  # not for the loop
}


def learned(drafter: str) -> AutoLength:
    """An "auto" length that has learned from rounds with invented times."""
    length = AutoLength(SpeculativeConfig(max_draft_tokens=8, entropy_stop=4.5))
    length.consider(drafter)
    for i in range(12):
        length.learn([Round(NO_DRAFT)], 1, 1.05)
        entropies = [0.1 + 0.3 * ((i + j) % 9) for j in range(4)]
        draft = Draft([1] * 4, entropies=entropies, seconds=0.5, n_read=1, drafter=drafter)
        length.learn([Round(draft, (i * 3) % 5)], 5, 1.6)
    return length


def on_stairs(drafter: str) -> AutoLength:
    """One for a target whose decodes of 4, 8 and 12 tokens take less time than those of fewer."""
    length = AutoLength(SpeculativeConfig(max_draft_tokens=12))
    length.consider(drafter)
    for n in range(13, 0, -1):
        length.learn([Round(NO_DRAFT)], n, 1.0 + 0.4 * (n // 4) + 0.5 * (n % 4))
        draft = Draft([1] * 4, entropies=[1.0] * 4, seconds=0.4, drafter=drafter)
        length.learn([Round(draft, 2 + n % 3)], 5, 1.9)
    return length


LENGTHS: dict[str, Callable[[str], DraftLength]] = {
    "four": lambda drafter: FixedLength(4),
    "one": lambda drafter: FixedLength(1),
    "entropy": lambda drafter: FixedLength(9, entropy_stop=2.0),
    "auto": learned,
    "stairs": on_stairs,
    "new_auto": lambda drafter: AutoLength(SpeculativeConfig(max_draft_tokens=8)),
}


@contextmanager
def made_with(how: str) -> Iterator[None]:
    """Draft with the "loop", in "steps", or with "numpy"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_loop, "available", how == "loop")
        patch.setattr(core, "available", how != "numpy")
        yield


class Seen(NamedTuple):
    """All that can be seen of a draft, and of the memory after it."""

    tokens: list[int]
    sources: list[tuple[list[int], list[float]]]
    entropies: list[float]
    counts: tuple[int, int, str]
    cells: int

    @classmethod
    def of(cls, draft: Draft, ctx: Context) -> Seen:
        ctx.audit()
        return cls(
            draft.tokens,
            [(source.ids.tolist(), source.logprobs.tolist()) for source in draft.sources],
            [entropy for entropy in draft.entropies if not math.isnan(entropy)],
            (len(draft.entropies), draft.n_read, draft.stopped),
            ctx.usage().cells_used,
        )


def rounds(
    state: DraftState, ctx: Context, tokens: list[int], length: DraftLength, limit: int = 64
) -> list[Seen]:
    """Run rounds in which one more drafted token is accepted each time, and look at the drafts."""
    seen = []
    for n_accepted in range(5):
        draft = state.propose(tokens, length, min(limit, length.limit))
        seen.append(Seen.of(draft, ctx))
        tokens += draft.tokens[:n_accepted]
        state.observe(len(tokens))
        tokens.append(300 + n_accepted)
    return seen


@pytest.mark.parametrize("how_long", LENGTHS)
@pytest.mark.parametrize("rule", ["seeded", "token"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_loop_drafts_what_steps_draft(
    settings: str, rule: str, how_long: str, ctx: Context, draft: lb.Model
) -> None:
    found: dict[str, list[Seen]] = {}
    for how in ("loop", "steps", "numpy"):
        with made_with(how), Context(draft, n_ctx=256, n_threads=1) as draft_ctx:
            drafter = ModelDrafter(draft_ctx)
            with Branch.start(ctx, TALE, sampling=SETTINGS[settings]) as branch:
                state = drafter.start(branch.sequence, rule)
                length = LENGTHS[how_long](drafter.name)
                found[how] = rounds(state, draft_ctx, [*branch.tokens, 299], length)
                state.close()
    assert found["loop"] == found["steps"]
    for one, other in zip(found["loop"], found["numpy"], strict=True):
        assert one._replace(sources=[], entropies=[]) == other._replace(sources=[], entropies=[])
        assert np.allclose(one.entropies, other.entropies, rtol=0, atol=1e-6)
        for (ids, logprobs), (its_ids, its_logprobs) in zip(
            one.sources, other.sources, strict=True
        ):
            assert ids == its_ids
            assert np.allclose(logprobs, its_logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("how_long", ["entropy", "auto", "new_auto"])
def test_what_the_loop_ends_has_ended(
    how_long: str, ctx: Context, draft_ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The length is not asked again about tokens that the loop has drawn or refused."""
    drafter = ModelDrafter(draft_ctx)
    length = LENGTHS[how_long](drafter.name)

    def goes_on(n_drafted: int, entropy: float) -> bool:
        raise AssertionError(f"asked after {n_drafted} tokens")

    monkeypatch.setattr(length, "goes_on", goes_on)
    with Branch.start(ctx, TALE, sampling=SETTINGS["default"]) as branch:
        state = drafter.start(branch.sequence, "seeded")
        seen = rounds(state, draft_ctx, [*branch.tokens, 299], length)
        state.close()
    assert {each.counts[2] for each in seen} & {"entropy", "goodput"}


def test_end_tokens_end_a_draft(small_toy: lb.Model) -> None:
    found: dict[str, list[Seen]] = {"loop": [], "steps": []}
    for how, seen in found.items():
        with (
            made_with(how),
            Context(small_toy, n_ctx=128, n_threads=1) as target,
            Context(small_toy, n_ctx=128, n_threads=1) as draft_ctx,
        ):
            for seed in range(6):
                warm = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
                with Branch.start(target, [0, 5, 6], sampling=warm) as branch:
                    state = ModelDrafter(draft_ctx).start(branch.sequence, "token")
                    tokens = [*branch.tokens, 4]
                    for i in range(8):
                        draft = state.propose(tokens, FixedLength(6), 6)
                        seen.append(Seen.of(draft, draft_ctx))
                        state.observe(len(tokens))
                        tokens.append(3 + (seed + i) % 9)
                    state.close()
    assert found["loop"] == found["steps"]
    ends = [len(seen.tokens) for seen in found["loop"] if seen.counts[2] == "end"]
    assert len(set(ends)) > 2


@pytest.mark.parametrize("n_free", range(1, 7))
def test_full_cache_ends_a_draft(n_free: int, ctx: Context, draft: lb.Model) -> None:
    found = {}
    for how in ("loop", "steps"):
        with (
            made_with(how),
            Context(draft, n_ctx=256, n_threads=1, batch_invariant=True) as draft_ctx,
            Branch.start(ctx, TALE, sampling=SETTINGS["default"]) as branch,
        ):
            state = ModelDrafter(draft_ctx).start(branch.sequence, "seeded")
            tokens = [*branch.tokens, 299]
            state.propose(tokens, FixedLength(2), 2)
            state.observe(len(tokens))
            rival = Branch.create(draft_ctx)
            usage = draft_ctx.usage()
            rival.prefill([7] * (usage.cells_free - n_free))
            tokens.append(300)
            seen = [Seen.of(state.propose(tokens, FixedLength(6), 6), draft_ctx)]
            rival.prune()
            state.observe(len(tokens))
            seen.append(Seen.of(state.propose([*tokens, 301], FixedLength(6), 6), draft_ctx))
            found[how] = seen
            state.close()
    assert found["loop"] == found["steps"]
    assert found["loop"][0].counts[2] == ("capacity" if n_free < 6 else "length")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.99])
def test_interrupted_loop_loses_nothing(share: float, ctx: Context, draft: lb.Model) -> None:
    """llama.cpp is stopped in the middle of some graph, in the first decode or a later one."""
    with (
        Context(draft, n_ctx=256, n_threads=1) as draft_ctx,
        Branch.start(ctx, TALE, sampling=SETTINGS["default"]) as branch,
    ):
        drafter = ModelDrafter(draft_ctx)
        state, tokens = drafter.start(branch.sequence, "seeded"), [*branch.tokens, 299]
        expected = state.propose(tokens, FixedLength(8), 8)
        state.close()
        state = drafter.start(branch.sequence, "seeded")
        state.propose(tokens[:-1], FixedLength(1), 1)
        state.observe(len(tokens) - 1)
        n_seen, n_most = 0, 1 << 40

        def is_asked_to_stop(_: object) -> bool:
            nonlocal n_seen
            n_seen += 1
            return n_seen > n_most

        ptr = draft_ctx.decoder.handle.ptr
        callback = C.ggml_abort_callback(is_asked_to_stop)
        C.llama_set_abort_callback(ptr, callback, None)
        state.propose(tokens, FixedLength(8), 8)
        state.observe(len(tokens) - 1)
        n_most, n_seen = int(share * n_seen), 0
        with pytest.raises(DecodeInterruptedError):
            state.propose(tokens, FixedLength(8), 8)
        n_most = 1 << 40
        draft_ctx.audit()
        state.observe(len(tokens) - 1)
        again = state.propose(tokens, FixedLength(8), 8)
        assert again.tokens == expected.tokens
        draft_ctx.audit()
        draft_ctx.interrupt()
        state.observe(len(tokens) - 1)
        with pytest.raises(DecodeInterruptedError):
            state.propose(tokens, FixedLength(8), 8)
        state.observe(len(tokens) - 1)
        assert state.propose(tokens, FixedLength(8), 8).tokens == expected.tokens
        state.close()
        draft_ctx.audit()


def test_rows_that_others_need_survive_a_loop(ctx: Context, draft_ctx: Context) -> None:
    with Branch.start(draft_ctx, "A fox", seed=3) as bystander, Branch.start(ctx, TALE) as branch:
        before = bystander.logits
        state = ModelDrafter(draft_ctx).start(branch.sequence, "seeded")
        state.propose([*branch.tokens, 299], FixedLength(5), 5)
        assert np.array_equal(bystander.logits, before)
        state.close()


PROMPTS = [TALE, "The fox", "In a dark wood there stood", "“Who is there?” cried", "She said"]


@pytest.mark.parametrize("rule", ["seeded", "block"])
@pytest.mark.parametrize("how_long", LENGTHS)
def test_streams_draft_together_what_they_draft_in_steps(
    how_long: str, rule: str, ctx: Context, draft: lb.Model
) -> None:
    params = [SETTINGS[name] for name in ("default", "greedy", "warm", "narrow", "min_p")]
    found = {}
    for how in ("loop", "steps"):
        with made_with(how), Context(draft, n_ctx=512, n_threads=1) as draft_ctx:
            drafter = ModelDrafter(draft_ctx)
            pairs = zip(PROMPTS, params, strict=True)
            branches = [Branch.start(ctx, text, sampling=p) for text, p in pairs]
            states = [drafter.start(branch.sequence, rule) for branch in branches]
            texts = [[*branch.tokens, 299] for branch in branches]
            length = LENGTHS[how_long](drafter.name)
            lengths = [length.stream() for _ in branches]
            seen: list[list[Seen]] = []
            for n_accepted in range(4):
                limits = [1 + (i + n_accepted) % 6 for i in range(len(texts))]
                requests = [
                    DraftRequest(state, text, own, min(limit, own.limit))
                    for state, text, own, limit in zip(states, texts, lengths, limits, strict=True)
                ]
                drafts = drafter.propose_many(requests)
                seen.append([Seen.of(draft, draft_ctx) for draft in drafts])
                for state, text, one in zip(states, texts, drafts, strict=True):
                    text += one.tokens[:n_accepted]
                    state.observe(len(text))
                    text.append(300 + n_accepted)
            found[how] = seen, [draft.n_decodes for draft in drafts]
            for state in states:
                state.close()
            for branch in branches:
                branch.prune()
    assert found["loop"] == found["steps"]


# Biased so far up, these logits are equal, and which of them top-k keeps is not the core's to say.
TIED = SamplingParams(top_k=3, seed=1, logit_bias=dict.fromkeys((20, 21, 22, 23, 24), 1e30))


def test_python_draws_where_the_core_cannot(ctx: Context, draft_ctx: Context) -> None:
    config = SpeculativeConfig(draft_k=5)
    mixed = [SETTINGS["default"], TIED, SETTINGS["greedy"], TIED]
    requests = [
        lb.Request(text, sampling=params) for text, params in zip(PROMPTS, mixed, strict=False)
    ]
    found = {}
    for how in ("loop", "steps"):
        with made_with(how):
            done = lb.Speculator(ctx, ModelDrafter(draft_ctx), config).generate(
                TALE, max_tokens=20, sampling=TIED
            )
            engine = lb.Engine(ctx, ModelDrafter(draft_ctx), config, max_tokens=20)
            results = engine.generate(requests)
            counts = [result.stats.num_draft_tokens for result in results]
            found[how] = done.finish().tokens, [result.tokens for result in results], counts
            draft_ctx.audit()
    assert found["loop"] == found["steps"]


def test_texts_and_counts_are_those_of_steps(ctx: Context, draft_ctx: Context) -> None:
    def texts() -> Sequence[object]:
        found: list[object] = []
        for rule in ("seeded", "token", "block"):
            config = SpeculativeConfig(draft_k=6, entropy_stop=3.0, rule=rule)
            speculator = lb.Speculator(ctx, ModelDrafter(draft_ctx), config)
            done = speculator.generate(TALE, max_tokens=40, sampling=SETTINGS["default"]).finish()
            stats = done.stats
            found.append((done.tokens, stats.num_draft_tokens, stats.num_accepted_tokens))
            found.append((stats.draft_forward_passes, stats.stop_reasons))
        return found

    expected = texts()
    for how in ("steps", "numpy"):
        with made_with(how):
            assert texts() == expected
