"""Speculator over branches: forks, rewinds, prunes, room, statistics. Its texts: `test_drafted_text`.

What a branch holds after random work is compared with a fresh prefill.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from drafts import FIXED, GREEDY, PROMPTS, WARM, plain

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.context.logits import LogitsRow
from llamabranch.generation.drafter import FixedLength, Round
from llamabranch.generation.text import Text


def wrong(tokens: list[int], k: int) -> list[int]:
    """Propose tokens that are almost never right, an end now and then."""
    n, end = len(tokens), 1 if len(tokens) % 5 == 0 else 900
    return [(977 * n + i) % 4000 + 2 if i != 2 else end for i in range(k)]


def make(which: str, draft: Context, twin: Context) -> lb.Drafter:
    model = lb.ModelDrafter
    makers: dict[str, lb.Drafter] = {
        "none": lb.speculative.NullDrafter(),
        "model": model(draft),
        "same model": model(twin),
        "wrong": lb.FunctionDrafter(wrong),
        "suffix": lb.SuffixDrafter(8, 1, factor=4.0, offset=4.0, min_probability=0.0),
        "chain": lb.ChainDrafter(
            [lb.speculative.PromptLookupDrafter(), lb.SuffixDrafter(), model(draft)]
        ),
        "own settings": model(draft, SamplingParams(temperature=1.3, top_k=5, seed=9)),
    }
    return makers[which]


# -- what is left in memory --------------------------------------------------------------------------


class Garden:
    """Branches with a speculator, and random work on them."""

    def __init__(self, ctx: Context, drafter: lb.Drafter, k: int, rng: np.random.Generator) -> None:
        self.ctx = ctx
        self.rng = rng
        self.speculator = Speculator(ctx, drafter, SpeculativeConfig(draft_k=k))
        params = SamplingParams(temperature=0.9, seed=7, repeat_penalty=1.2, penalty_last_n=16)
        self.branches = [Branch.start(ctx, PROMPTS[0], sampling=params)]

    def pick(self) -> Branch:
        return self.branches[self.rng.integers(len(self.branches))]

    def work(self) -> Branch:
        """Do something at random; return a branch that may have changed."""
        branch, n = self.pick(), int(self.rng.integers(1, 12))
        deed = self.rng.choice(
            ["speak", "speak", "leave", "fork", "rewind", "prune", "promote", "tell"]
        )
        if branch.position > 120:
            deed = "rewind"
        if deed == "speak":
            self.speculator.generate(branch, max_tokens=n).finish()
        elif deed == "leave":  # the generation is abandoned in the middle of a block
            generation = self.speculator.generate(branch)
            said = [next(generation).token for _ in range(n)]
            generation.close()
            assert branch.tokens[-n:] == said
        elif deed == "fork" and len(self.branches) < 5:
            child = branch.fork()
            child.reseed(int(self.rng.integers(1000)))
            self.branches.append(child)
        elif deed == "rewind":
            branch.rewind(max(branch.n_prompt, branch.position - 3 * n))
        elif deed == "prune" and len(self.branches) > 1 and not branch.children:
            self.branches.remove(branch)
            branch.prune()
            branch = self.pick()
        elif deed == "promote" and branch.parent is not None:
            branch.promote()
            self.branches = [b for b in self.branches if b.state != "pruned"]
        elif deed == "tell":  # the user adds words of his own
            branch.extend([int(t) for t in self.rng.integers(10, 4000, n)])
        return branch


@pytest.mark.parametrize("which", ["model", "same model", "wrong", "chain"])
@pytest.mark.parametrize("seed", range(2))
def test_memory_is_that_of_a_fresh_prefill_after_any_work(
    which: str, seed: int, ctx: Context, draft_ctx: Context, other_ctx: Context, target: lb.Model
) -> None:
    rng = np.random.default_rng((seed, len(which)))
    with Context(target, n_ctx=512, n_threads=1) as clean:
        garden = Garden(ctx, make(which, draft_ctx, other_ctx), 4, rng)
        for _ in range(60):
            branch = garden.work()
            with Branch.start(clean, branch.tokens) as again:
                difference = np.abs(branch.logits - again.logits).max()
            assert difference == 0.0
            ctx.audit()
            draft_ctx.audit()
        for branch in garden.branches:
            with branch.fork() as twin:
                plainly = [t.token for t in twin.generate(12)]
            said = garden.speculator.generate(branch, max_tokens=12).finish()
            assert said.tokens == plainly
    for branch in garden.branches:
        garden.speculator.forget(branch)
        if branch.parent is None:
            branch.prune_subtree()
    del garden, branch, said, twin
    gc.collect()
    for context in (ctx, draft_ctx, other_ctx):
        assert context.usage().cells_used == 0
        assert context.n_seq_free == 8


def test_abandoned_generations_and_branches_leak_nothing(ctx: Context, draft_ctx: Context) -> None:
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED)
    for _ in range(20):  # more than there are sequences
        branch = Branch.start(ctx, PROMPTS[0], sampling=WARM)
        next(speculator.generate(branch))
        generation = speculator.generate(PROMPTS[1], sampling=WARM)
        for _ in range(3):
            next(generation)
    del branch, generation
    gc.collect()
    assert ctx.usage().cells_used == draft_ctx.usage().cells_used == 0


def test_closed_contexts_end_generations_with_a_clear_error(
    target: lb.Model, draft_ctx: Context
) -> None:
    ctx = Context(target, n_ctx=256, n_threads=1)
    branch = Branch.start(ctx, PROMPTS[0], sampling=WARM)
    generation = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED).generate(branch)
    next(generation)
    ctx.close()
    with pytest.raises(lb.errors.ClosedError):
        next(generation)
    generation.close()
    del generation, branch
    gc.collect()
    assert draft_ctx.usage().cells_used == 0


@pytest.mark.parametrize("rule", ["seeded", "token", "block"])
def test_state_after_rounds_is_that_of_a_text_that_was_read(
    rule: str, ctx: Context, draft_ctx: Context, other_ctx: Context, target: lb.Model
) -> None:
    """Rejected tokens leave no penalty, and nothing follows an end that was drafted and accepted."""
    assert target.eos is not None
    ended = 0
    for which, n_seeds, bias in (("model", 1, 0.0), ("wrong", 1, 0.0), ("same model", 6, 7.0)):
        config = SpeculativeConfig(draft_k=8, rule=rule)
        speculator = Speculator(ctx, make(which, draft_ctx, other_ctx), config)
        for seed in range(n_seeds):
            params = SamplingParams(
                temperature=0.9, seed=seed, logit_bias={target.eos: bias}, presence_penalty=2.0,
                penalty_last_n=-1,
            )  # fmt: skip
            with Branch.start(ctx, PROMPTS[0], sampling=params) as branch:
                for max_tokens in (14, 14, 40):
                    start = branch.position
                    generation = speculator.generate(branch, max_tokens=max_tokens)
                    said = [t.token for t in generation]
                    assert target.eos not in said
                    assert branch.tokens[start:] == said == generation.tokens
                    with Branch.start(ctx, branch.tokens, sampling=params) as again:
                        assert np.array_equal(branch.logits, again.logits)
                        found, expected = branch.distribution(), again.distribution()
                        assert np.array_equal(found.ids, expected.ids)
                        assert np.array_equal(found.logprobs, expected.logprobs)
                ended += generation.finish_reason == "stop"
                speculator.forget(branch)
        stats = speculator.stats
        assert stats.num_draft_tokens > stats.num_accepted_tokens or which == "same model"
    assert ended >= 3


# -- from branches: the drafter's side of forks, rewinds and prunes ------------------------------------

LONG = " ".join(PROMPTS) * 4


def test_second_generation_goes_on_where_the_first_ended(ctx: Context, draft_ctx: Context) -> None:
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED)
    with Branch.start(ctx, LONG, sampling=WARM) as branch:
        speculator.generate(branch, max_tokens=9).finish()
        before = draft_ctx.usage().cells_used
        decodes = draft_ctx.decoder.n_decodes
        generation = speculator.generate(branch, max_tokens=2).finish()
        assert generation.stats.num_drafts <= 1
        assert draft_ctx.decoder.n_decodes - decodes <= 1
        assert draft_ctx.usage().cells_used <= before + 6
        speculator.forget(branch)


@pytest.mark.parametrize("which", ["model", "chain", "suffix", "own settings"])
def test_user_may_rewind_and_reseed_between_generations(
    which: str, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    """Best of n by hand: rewind, reseed, go on. Each text is what a fresh branch would say."""
    speculator = Speculator(ctx, make(which, draft_ctx, other_ctx), FIXED)
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        for seed in (42, 1, 2, 1):
            branch.rewind(branch.n_prompt)
            branch.reseed(seed)
            generation = speculator.generate(branch, max_tokens=30).finish()
            expected = plain(other_ctx, PROMPTS[0], WARM.replace(seed=seed), 30)
            assert generation.tokens == [t.token for t in expected]
        speculator.forget(branch)


def test_settings_changed_between_generations_reach_the_draft(
    ctx: Context, other_ctx: Context
) -> None:
    """A line that is kept goes on with what its branch draws by now; so does that of a fork."""
    speculator = Speculator(ctx, lb.ModelDrafter(other_ctx), FIXED)
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        for seed in range(3):  # the draft learns of the new noise
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


def test_rewind_into_the_prompt_is_followed(ctx: Context, draft_ctx: Context) -> None:
    """What is said after a prompt that was cut short belongs to the grammar, not to the prompt."""
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED)
    grammar = 'root ::= ("yes " | "no " | "maybe "){60}'
    with Branch.start(ctx, PROMPTS[0], sampling=WARM, grammar=grammar) as branch:
        speculator.generate(branch, max_tokens=10).finish()
        branch.rewind(3)
        with branch.fork() as twin:
            expected = [t.token for t in twin.generate(20)]
        for _ in range(2):
            speculator.generate(branch, max_tokens=10).finish()
        assert branch.generated == expected
        speculator.forget(branch)


def test_pruned_branches_free_the_draft(ctx: Context, draft_ctx: Context) -> None:
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED)
    root = Branch.start(ctx, PROMPTS[0], sampling=WARM)
    children = root.fork_many(5)
    for child in children:
        speculator.generate(child, max_tokens=6).finish()
    assert draft_ctx.n_seq_free == 3
    for child in children:
        child.prune()
    speculator.generate(root, max_tokens=6).finish()
    assert draft_ctx.n_seq_free == 7
    root.prune()
    del root, children, child
    gc.collect()
    assert draft_ctx.n_seq_free == 8


def test_draft_with_too_few_sequences_serves_as_many_branches_as_it_can(
    ctx: Context, draft: lb.Model, other_ctx: Context
) -> None:
    with Context(draft, n_ctx=512, n_seq_max=2, n_threads=1) as small:
        speculator = Speculator(ctx, lb.ModelDrafter(small), FIXED)
        root = Branch.start(ctx, PROMPTS[0], sampling=WARM)
        branches = [root, *root.fork_many(5)]
        expected = []
        for branch in branches:
            with branch.fork() as twin:
                expected.append([t.token for t in twin.generate(24)])
        for _ in range(3):  # each time in turn: lines that waited longest make room
            for branch in branches:
                speculator.generate(branch, max_tokens=8).finish()
        assert [b.generated for b in branches] == expected
        assert speculator.stats.num_accepted_tokens > 0
        running = [speculator.generate(b, max_tokens=8) for b in branches]
        for _ in range(8):  # all at once: most have to do without
            for generation in running:
                next(generation)
        for branch, generation in zip(branches, running, strict=True):
            assert generation.finish().tokens == branch.generated[-8:]
        small.audit()
        root.prune_subtree()


@pytest.mark.parametrize("n_sequences", [1, 2])
def test_draft_without_room_drafts_again_when_there_is_some(
    n_sequences: int, ctx: Context, draft: lb.Model
) -> None:
    """Without a sequence, and without cells."""
    expected = [t.token for t in plain(ctx, LONG, WARM, 40)]
    with Context(draft, n_ctx=256, n_seq_max=n_sequences, n_threads=1) as small:
        rival = Branch.start(small, [5] * 100)
        speculator = Speculator(ctx, lb.ModelDrafter(small), FIXED)
        with Branch.start(ctx, LONG, sampling=WARM) as branch:
            first = speculator.generate(branch, max_tokens=20).finish()
            assert first.stats.num_drafts == 0
            assert (first.stats.stop_reasons.get("capacity", 0) > 0) == (n_sequences == 2)
            rival.prune()
            assert speculator.generate(branch, max_tokens=20).finish().stats.num_drafts > 0
            assert branch.generated == expected
            speculator.forget(branch)
        small.audit()


@pytest.mark.parametrize("drafts", [True, False])
def test_plain_steps_are_counted_and_the_reader_s_time_is_not(
    ctx: Context, draft_ctx: Context, drafts: bool
) -> None:
    """Steps nobody is asked in are counted together, also those of a generation that is closed."""
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
    assert rounds == stats.target_forward_passes == sum(stats.target_decodes_by_n.values())
    assert rounds + stats.num_accepted_tokens >= 29  # the first token needs no decode
    assert stats.plain_time_s > 0
    assert stats.stop_reasons["off"] >= (3 if drafts else 29)


def test_single_slow_step_is_counted_but_not_learned(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one pause of the machine would make plain decoding look slow, and any draft worth it."""
    learned: list[tuple[float, int]] = []

    class Spy(FixedLength):
        def learn(
            self, rounds: Sequence[Round], n_tokens: int, verify_s: float, n_rounds: int = 1
        ) -> None:
            learned.append((verify_s, n_rounds))

    decode_last, n_decodes = Text.decode_last, 0

    def slow(text: Text, *, draws_next: bool) -> LogitsRow:
        nonlocal n_decodes
        n_decodes += 1
        if n_decodes == 5:
            time.sleep(2.0)
        return decode_last(text, draws_next=draws_next)

    monkeypatch.setattr(Text, "decode_last", slow)
    speculator = Speculator(ctx)
    speculator.drafting.loop.length = Spy(0)
    stats = speculator.generate(PROMPTS[0], max_tokens=20, sampling=WARM).finish().stats
    ((verify_s, n_rounds),) = learned
    assert n_rounds == 19 and verify_s < 1.0
    assert stats.plain_time_s > 2.0


def test_statistics_add_up_and_are_explained(ctx: Context, draft_ctx: Context) -> None:
    assert "plain decoding" in Speculator(ctx).explain()
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3))
    parts = [
        speculator.generate(p, max_tokens=30, sampling=WARM).finish().stats.as_dict()
        for p in PROMPTS
    ]
    total = speculator.stats.as_dict()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens",
                 "target_forward_passes", "draft_forward_passes"):  # fmt: skip
        counts = [part[name] for part in parts]
        assert total[name] == sum(c for c in counts if isinstance(c, int))
    stats = speculator.stats
    assert stats.draft_acceptance_rate == stats.num_accepted_tokens / stats.num_draft_tokens
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_tokens / stats.num_drafts
    assert len(stats.num_accepted_tokens_per_pos) == 3
    low, high = stats.alpha_interval
    assert 0 <= low <= stats.alpha_hat <= high <= 1
    assert sum(stats.stop_reasons.values()) == stats.target_forward_passes
    words = speculator.explain()
    for part in (speculator.drafter.name, r"\d drafts?: ", "always 3 tokens", "drafts ended by"):
        assert re.search(part, words)


def test_reading_a_prompt_is_no_draft_steps_time(ctx: Context, draft_ctx: Context) -> None:
    """The first draft's time is the prompt's: c was that of all drafting over the drafted tokens."""
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=1))
    stats = speculator.generate(PROMPTS[0] * 8, max_tokens=20, sampling=WARM).finish().stats
    assert stats.num_draft_steps == stats.num_drafts - 1 > 5
    assert 0 < stats.draft_step_time_s < stats.draft_time_s
    unsure = SpeculativeConfig(draft_k=4, entropy_stop=1.0)
    stopped = Speculator(ctx, lb.ModelDrafter(draft_ctx), unsure)
    stats = stopped.generate(PROMPTS[0], max_tokens=40, sampling=WARM).finish().stats
    assert stats.num_draft_steps > stats.num_draft_tokens  # looking at a step is one, too
    copied = Speculator(ctx, lb.SuffixDrafter(), SpeculativeConfig(draft_k=3))
    repeated = copied.generate("one two three one two three one two", max_tokens=20, sampling=WARM)
    stats = repeated.finish().stats
    assert stats.num_draft_steps >= stats.num_draft_tokens > 0


# -- seeds given later -------------------------------------------------------------------------------


def test_seed_that_is_given_later_gives_the_text_of_plain_decoding(
    ctx: Context, draft_ctx: Context, tmp_path: Path
) -> None:
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=4))

    def check(branch: Branch) -> None:
        with branch.fork() as twin:
            expected = [t.token for t in twin.generate(40)]
        assert speculator.generate(branch, max_tokens=40).finish().tokens == expected
        speculator.forget(branch)

    with Branch.start(ctx, PROMPTS[0], temperature=0.8) as branch:
        check(branch)
        branch.reseed(5)
        for child in branch.fork_many(2):
            check(child)
            child.prune()
        branch.save(tmp_path / "seeded.branch")
        with Branch.load(ctx, tmp_path / "seeded.branch") as loaded:
            check(loaded)
        branch.resample(SamplingParams(temperature=0.9, seed=6))
        branch.resample(SamplingParams(temperature=0.8))  # the seed stays
        check(branch)
        branch.reseed()  # picked here, as the first one was
        with Branch.restore(ctx, branch.snapshot()) as restored:
            check(restored)
        check(branch)


# -- a full cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["none", "model", "wrong"])
@pytest.mark.parametrize("max_tokens", [15, 16, 17, 18, None])
def test_branch_holds_what_was_emitted_when_the_cache_is_full(
    max_tokens: int | None, which: str, target: lb.Model, draft_ctx: Context, other_ctx: Context
) -> None:
    """16 cells are left; the 17th token is said without one, by a prompt and on a branch alike."""
    prompt, full = [5] * 200, max_tokens is None or max_tokens > 17
    with Context(target, n_ctx=256, n_seq_max=3, n_threads=1, batch_invariant=True) as ctx:
        others = Branch.start(ctx, [7] * 40)
        speculator = Speculator(ctx, make(which, draft_ctx, other_ctx), FIXED)

        def finish(generation: lb.Generation) -> list[int]:
            if full:
                with pytest.raises(lb.errors.CacheFullError):
                    generation.finish()
            else:
                generation.finish()
            assert generation.finish_reason == ("capacity" if full else "length")
            assert len(generation.tokens) == min(max_tokens or 17, 17)
            return generation.tokens

        said = finish(speculator.generate(prompt, max_tokens=max_tokens, sampling=WARM))
        branch = Branch.start(ctx, prompt, sampling=WARM)
        assert finish(speculator.generate(branch, max_tokens=max_tokens)) == said
        assert branch.generated == said
        ctx.audit()
        twin = branch.fork()
        if len(said) == 17:
            with pytest.raises(lb.errors.CacheFullError):
                _ = branch.logits
            assert branch.tokens == twin.tokens == prompt + said
        others.prune()
        with Branch.start(other_ctx, branch.tokens) as again:
            for one in (branch, twin):  # there is room: both go on as if nothing had been
                assert np.array_equal(one.logits, again.logits)
        assert twin.step() == branch.step()
        assert not np.isnan(branch.perplexity())
        twin.prune()
        branch.prune()
        speculator.forget(branch)
        ctx.audit()
        assert ctx.usage().cells_used == draft_ctx.usage().cells_used == 0


def test_fork_that_reads_on_is_drafted_for(ctx: Context, draft_ctx: Context) -> None:
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED)
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        speculator.generate(branch, max_tokens=12).finish()
        with branch.fork() as child:
            child.append(PROMPTS[1])
            with child.fork() as other:
                expected = [t.token for t in other.generate(12)]
            found = speculator.generate(child, max_tokens=12).finish()
            assert found.tokens == expected
            assert found.stats.num_draft_tokens > 0


# -- what is reported --------------------------------------------------------------------------------


def test_tokens_report_what_plain_decoding_does(ctx: Context, draft_ctx: Context) -> None:
    """Alternatives too, equal to the bit, whatever the source."""
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        expected = list(branch.generate(60, top_logprobs=3))
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED)
    found = speculator.generate(PROMPTS[0], max_tokens=60, sampling=WARM, top_logprobs=3)
    assert [one._replace(source="plain") for one in found] == expected


def test_sources_tell_where_tokens_came_from(ctx: Context, draft_ctx: Context) -> None:
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3))
    generation = speculator.generate(PROMPTS[0], max_tokens=150, sampling=WARM)
    sources = [t.source for t in generation]
    stats = generation.stats
    assert set(sources) <= {"plain", "drafted", "bonus", "corrected"}
    assert sources.count("drafted") <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_tokens - sources.count("drafted") <= 3  # a last block cut short
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_drafts + stats.num_plain_steps == stats.target_forward_passes


SENTENCE = r"""
    root ::= "The " ("king" | "witch" | "frog") " " ("slept" | "wept") " and " last "."
    last ::= "sang" | "danced"
"""


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("which", ["model", "same model", "wrong"])
def test_rejection_rules_reach_the_end_of_a_grammar_too(
    which: str, rule: str, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    drafter = make(which, draft_ctx, other_ctx)
    speculator = Speculator(ctx, drafter, SpeculativeConfig(draft_k=16, rule=rule))
    for seed in range(6):
        no_end = dict.fromkeys(ctx.model.eog_tokens, -np.inf)
        params = SamplingParams(temperature=1.0, seed=seed, logit_bias=no_end)
        text = ""
        with pytest.raises(lb.errors.GrammarError, match="no token"):
            for one in speculator.generate(PROMPTS[0], sampling=params, grammar=SENTENCE):
                text += one.text
        assert re.fullmatch(r"The (king|witch|frog) (slept|wept) and (sang|danced)\.", text), text
