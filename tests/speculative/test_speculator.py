"""Speculators and sessions: forks, rewinds, prunes, room, statistics.

After random work the content of a branch is compared with a fresh prefill. `test_drafted_text` tests the
texts.
"""

from __future__ import annotations

import gc
import re
import time

import numpy as np
import pytest
from drafts import FIXED, GREEDY, PROMPTS, WARM, plain
from test_drafted_text import DRAFTERS, World, begin

import llamabranch as lb
from llamabranch import (
    Branch,
    Context,
    InferenceSession,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
)
from llamabranch.errors import ClosedError

# -- what is left in memory --------------------------------------------------------------------------


class Garden:
    """Branches with a speculator, and random work on them. Each text is compared with the plain text."""

    def __init__(
        self,
        ctx: Context,
        drafter: lb.Drafter | None,
        rng: np.random.Generator,
        grammar: str | None,
    ) -> None:
        self.rng = rng
        self.grammar = grammar
        self.ctx, self.drafter = ctx, drafter
        self.speculator = Speculator(ctx, drafter, FIXED)
        params = SamplingParams(temperature=0.9, seed=7, repeat_penalty=1.2, penalty_last_n=16)
        self.branches = [Branch.start(ctx, PROMPTS[0], sampling=params, grammar=grammar)]

    def speak(self, branch: Branch, n: int) -> None:
        with branch.fork() as twin:
            expected = [t.token for t in twin.generate(n)]
        assert self.speculator.generate(branch, max_tokens=n).finish().tokens == expected

    def work(self) -> Branch:
        """Do something at random; return a branch that may have changed."""
        branch = self.branches[self.rng.integers(len(self.branches))]
        n = int(self.rng.integers(1, 12))
        deeds = ["speak", "speak", "leave", "fork", "rewind", "prune", "promote", "tell", "reseed"]
        deed = "rewind" if branch.position > 120 else self.rng.choice(deeds)
        if deed == "speak":
            self.speak(branch, n)
        elif deed == "leave":  # the generation is abandoned in the middle of a block
            caller = str(self.rng.choice(["branch", "session"]))
            following, close = begin(caller, self.ctx, self.drafter, branch)
            new_tokens = [token.token for token in (following() for _ in range(n)) if token]
            close()
            close()
            with pytest.raises(ClosedError if caller == "session" else StopIteration):
                following()
            assert branch.tokens[-n:] == new_tokens
        elif deed == "fork" and len(self.branches) < 5:
            self.branches.append(branch.fork())
        elif deed == "reseed":
            branch.reseed(int(self.rng.integers(1000)))
        elif deed == "rewind":  # into the prompt, too: then the grammar governs the new text
            branch.rewind(max(3, branch.position - 3 * n))
        elif deed == "prune" and len(self.branches) > 1 and not branch.children:
            self.branches.remove(branch)
            branch.prune()
            branch = self.branches[0]
        elif deed == "promote" and branch.parent is not None:
            branch.promote()
            self.branches = [b for b in self.branches if b.state != "pruned"]
        elif deed == "tell" and self.grammar is None:  # the user adds words of his own
            branch.extend([int(t) for t in self.rng.integers(10, 4000, n)])
        return branch


@pytest.mark.parametrize(
    ("which", "grammar"),
    [
        ("model", None),
        ("same model", 'root ::= ("yes " | "no " | "maybe "){99}'),
        ("function", None),
        ("suffix", None),
        ("chain", 'root ::= ("yes " | "no " | "maybe "){99}'),
        ("own settings", None),
        ("grammar", 'root ::= ("a longer phrase. " | "another one. "){99}'),
    ],
)
def test_memory_is_that_of_a_fresh_prefill_after_any_work(
    which: str, grammar: str | None, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    world = World(ctx, draft_ctx, other_ctx, draft_ctx)
    rng = np.random.default_rng(len(which))
    with Context(ctx.model, n_ctx=512, n_threads=1, exact=True) as clean:
        garden = Garden(ctx, DRAFTERS[which](world), rng, grammar)
        for _ in range(60):
            branch = garden.work()
            with Branch.start(clean, branch.tokens) as again:
                assert np.array_equal(branch.logits, again.logits)
            ctx.audit()
            draft_ctx.audit()
        for branch in garden.branches:
            garden.speak(branch, 12)
            garden.speculator.forget(branch)
        for branch in garden.branches:
            if branch.parent is None:
                branch.prune_subtree()
    del garden, branch
    gc.collect()
    world.check()


# -- from branches: the drafter's side of forks, rewinds and prunes ------------------------------------

LONG = " ".join(PROMPTS) * 4


def test_settings_changed_between_generations_reach_the_draft(
    ctx: Context, other_ctx: Context
) -> None:
    """A kept draft state continues with what its branch draws now, and so does that of a fork."""
    speculator = Speculator(ctx, lb.ModelDrafter(other_ctx), FIXED)
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        for seed in range(3):  # the draft uses the new noise
            branch.reseed(seed)
            stats = speculator.generate(branch, max_tokens=20).finish().stats
            assert stats.draft_acceptance_rate == 1.0
        assert other_ctx.n_seq_free == 7
        for params in (
            WARM,
            WARM.replace(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0),
            GREEDY,
            WARM,
        ):
            branch.resample(params)
            generation = speculator.generate(branch, max_tokens=20).finish()
            assert generation.stats.conditional_rates_per_pos[0] == 1.0
            with branch.fork() as child:
                usual = child.produce().token
                child.steer({usual: -50.0})
                stats = speculator.generate(child, max_tokens=20).finish().stats
                assert usual not in child.tokens[branch.position : branch.position + 1]
                assert stats.conditional_rates_per_pos[0] == 1.0
        speculator.forget(branch)


@pytest.mark.parametrize("n_sequences", [1, 2])
def test_draft_without_room_drafts_again_when_there_is_some(
    n_sequences: int, ctx: Context, draft: lb.Model
) -> None:
    """Without a free sequence, and without free cells."""
    expected = [t.token for t in plain(ctx, LONG, WARM, 40)]
    with Context(draft, n_ctx=256, n_seq_max=n_sequences, n_threads=1, exact=True) as small:
        rival = Branch.start(small, [5] * 100)
        speculator = Speculator(ctx, lb.ModelDrafter(small), FIXED)
        with Branch.start(ctx, LONG, sampling=WARM) as branch:
            first = speculator.generate(branch, max_tokens=20).finish()
            assert first.stats.num_drafts == 0
            assert (first.stats.stop_reasons.get("capacity", 0) > 0) == (n_sequences == 2)
            rival.prune()
            assert speculator.generate(branch, max_tokens=20).finish().stats.num_drafts > 0
            assert branch.generated_tokens == expected
            speculator.forget(branch)
        small.audit()


@pytest.mark.parametrize("drafts", [True, False])
def test_plain_steps_are_counted_and_the_reader_s_time_is_not(
    ctx: Context, draft_ctx: Context, drafts: bool
) -> None:
    """Steps without a draft are counted together, also those of a closed generation."""
    drafter = lb.ModelDrafter(draft_ctx) if drafts else None
    speculator = Speculator(ctx, drafter, SpeculativeConfig(draft_k="auto"))
    read_s = 0.0
    start = time.perf_counter()
    generation = speculator.generate(PROMPTS[0], max_tokens=60, sampling=WARM)
    for n, _ in enumerate(generation, start=1):
        began = time.perf_counter()
        time.sleep(0.01)
        read_s += time.perf_counter() - began
        if n == 30:
            break
    generation.close()
    assert 0.0 < generation.elapsed_s <= time.perf_counter() - start - read_s
    stats = generation.stats
    rounds = stats.num_drafts + stats.num_plain_steps
    assert rounds == stats.num_rounds == sum(stats.target_decodes_by_n.values())
    assert rounds + stats.num_accepted_tokens >= 29  # the first token needs no decode
    assert stats.plain_time_s > 0
    assert stats.stop_reasons["off"] >= (3 if drafts else 29)


def test_statistics_add_up_and_are_explained(ctx: Context, draft_ctx: Context) -> None:
    """They agree with the sources that the tokens have."""
    assert "plain decoding" in Speculator(ctx).explain()
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3))
    parts = []
    for prompt in PROMPTS:
        generation = speculator.generate(prompt, max_tokens=60, sampling=WARM)
        sources, stats = [t.source for t in generation], generation.stats
        assert set(sources) <= {"plain", "drafted", "bonus", "corrected"}
        assert sources.count("drafted") <= stats.num_accepted_tokens <= stats.num_draft_tokens
        assert stats.num_accepted_tokens - sources.count("drafted") <= 3  # a last block cut short
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
        parts.append(stats.as_dict())
    total = speculator.stats.as_dict()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens",
                 "num_rounds", "draft_forward_passes"):  # fmt: skip
        counts = [part[name] for part in parts]
        assert total[name] == sum(c for c in counts if isinstance(c, int))
    stats = speculator.stats
    assert stats.draft_acceptance_rate == stats.num_accepted_tokens / stats.num_draft_tokens
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts
    assert len(stats.num_accepted_tokens_per_pos) == 3
    low, high = stats.alpha_interval
    assert 0 <= low <= stats.alpha_hat <= high <= 1
    assert sum(stats.stop_reasons.values()) == stats.num_rounds
    words = speculator.explain()
    rate = rf"\d drafts?: accept rate \d+ % \({stats.num_accepted_tokens} of {stats.num_draft_tokens}\), "
    for part in (speculator.drafter.name, rate, "always 3 tokens"):
        assert re.search(part, words)


def test_reading_a_prompt_is_no_draft_steps_time(ctx: Context, draft_ctx: Context) -> None:
    """The first draft also reads the prompt, so its time must not count in c."""
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=1))
    stats = speculator.generate(PROMPTS[0] * 8, max_tokens=20, sampling=WARM).finish().stats
    assert stats.num_draft_steps == stats.num_drafts - 1 > 5
    assert 0 < stats.draft_step_time_s < stats.draft_time_s
    unsure = SpeculativeConfig(draft_k=4, entropy_stop=1.0)
    stopped = Speculator(ctx, lb.ModelDrafter(draft_ctx), unsure)
    stats = stopped.generate(PROMPTS[0], max_tokens=40, sampling=WARM).finish().stats
    assert stats.num_draft_steps > stats.num_draft_tokens  # looking at a step counts as a step, too
    copied = Speculator(ctx, lb.SuffixDrafter(), SpeculativeConfig(draft_k=3))
    repeated = copied.generate("one two three one two three one two", max_tokens=20, sampling=WARM)
    stats = repeated.finish().stats
    assert stats.num_draft_steps >= stats.num_draft_tokens > 0


# -- sessions ----------------------------------------------------------------------------------------


def test_tokens_of_a_session_tell_where_they_came_from(ctx: Context, other_ctx: Context) -> None:
    twin, config = lb.ModelDrafter(other_ctx), SpeculativeConfig(draft_k=3)
    with InferenceSession(ctx, PROMPTS[0], sampling=WARM, config=config) as session:
        tokens = [session.next_token(None if i == 3 else twin) for i in range(13)]
    # The fourth token was already drawn when it was requested without a drafter: it is not drawn again.
    sources = ["plain", *(["drafted"] * 3 + ["bonus"]) * 3]
    assert [token and token.source for token in tokens] == sources


def test_session_outlives_its_draft_context_and_a_drafter_that_is_refused(
    ctx: Context, draft: lb.Model, toy: lb.Model, other_ctx: Context
) -> None:
    expected = [t.token for t in plain(other_ctx, PROMPTS[0], WARM, 30)]
    with InferenceSession(ctx, PROMPTS[0], sampling=WARM, max_tokens=30, config=FIXED) as session:
        with (
            Context(draft, n_ctx=256, n_threads=1, exact=True) as small,
            Context(toy, n_threads=1, exact=True) as strange,
        ):
            drafter = lb.ModelDrafter(small)
            produced = [session.next_token(drafter) for _ in range(10)]
            with pytest.raises(lb.errors.VocabularyMismatchError):
                session.next_token(lb.ModelDrafter(strange))
        produced += [session.next_token() for _ in range(20)]
        assert [token.token for token in produced if token] == expected
        assert session.next_token() is None


def test_session_takes_a_branch_of_its_context_whose_added_text_stays(
    ctx: Context, other_ctx: Context
) -> None:
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        with pytest.raises(lb.ConfigError, match="another context"):
            InferenceSession(other_ctx, branch, config=FIXED)
        session = InferenceSession(ctx, branch)
        assert session.next_token() is not None
        branch.append(", she said")
        tokens = branch.tokens
        session.close()
        assert branch.tokens == tokens
