"""Speculative decoding says what plain decoding says: the same tokens, texts and numbers.

In a batch-invariant context the logits of a verified token are those of a token decoded alone, to the
bit, and both loops draw with the noise of (seed, position). So texts are compared with ==.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from drafts import FIXED

import llamabranch as lb
from llamabranch import Branch, Context, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.errors import CacheFullError, ConfigError, GrammarError
from llamabranch.generation.drafter import DraftLength
from llamabranch.speculative import Draft

PROMPTS = [
    "Once upon a time there was a king who had three daughters, and the youngest",
    "In a village at the edge of a great forest there lived a poor miller",
    "“Who is there?” cried the old woman,",
    "The wolf knocked at the door and said, “",
    "It was a dark and stormy night;",
    "The fisherman drew up his net, and in it",
    "Far out in the ocean, where the water is as blue as the prettiest cornflower,",
    "When the prince had ridden for three days",
    "There was once a soldier who",
    "“My dear Mr. Bennet,” said his lady to him one day,",
    "The sun had set, and the stars",
    "Then the fairy touched the pumpkin with her wand, and",
    "Little Red-Cap said good-bye and",
    "The giant laughed so loud that",
    "She opened the golden box, and out of it came",
    "“I will give you whatever you ask,” said the dwarf, “but",
    "On a cold winter's morning the two children",
    "The castle stood upon a rock above the sea, and",
    "A",
    "1, 2, 3, 4,",
]
N_TOKENS = 200
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)

Said = list[tuple[int, str, float, float]]


def plain(ctx: Context, prompt: str | Sequence[int], params: SamplingParams, n: int) -> Said:
    with Branch.start(ctx, prompt, sampling=params) as branch:
        return [(t.token, t.text, t.logprob, t.entropy) for t in branch.generate(n)]


def speculated(generation: lb.Generation) -> Said:
    return [(t.token, t.text, t.logprob, t.entropy) for t in generation]


# -- a drafter with bad intentions -------------------------------------------------------------------


@dataclass
class AdversarialDrafter(lb.Drafter):
    """Drafts the truth and then a lie, only lies, ends, or nothing, in turn, and counts its lines."""

    truth: Sequence[int] = ()
    name: str = "hostile"
    open_lines: int = 0
    told: list[int] = field(default_factory=list)

    def check(self, target: lb.Model) -> None:
        """Claim to fit."""

    def start(self, target: lb.speculative.Text, rule: str) -> HostileLine:
        self.open_lines += 1
        return HostileLine(self, target.position, target.ctx.n_vocab, target.ctx.model.eos or 0)


@dataclass
class HostileLine:
    drafter: AdversarialDrafter
    start: int
    n_vocab: int
    end: int
    n_rounds: int = 0
    known: int = 0

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        assert len(tokens) >= self.known  # what stood still stands
        self.n_rounds += 1
        at = len(tokens) - self.start
        truth = list(self.drafter.truth[at : at + self.n_rounds % 6])
        lies = [(31 * self.n_rounds + 7 * i) % self.n_vocab for i in range(5)]
        kind = self.n_rounds % 7
        if kind == 0:
            proposal = []
        elif kind == 1:
            proposal = lies
        elif kind == 2:
            proposal = [self.end] * 4
        elif kind == 3:
            proposal = [*truth, self.end, *lies]
        elif kind == 4:
            proposal = [*truth, *reversed(lies)]
        elif kind == 5:
            proposal = [tokens[-1]] * 6
        else:
            proposal = [*truth, *lies]
        proposal = proposal[:limit]
        return Draft(tokens=proposal, entropies=[1.0] * len(proposal), seconds=1e-4, n_decodes=1)

    def observe(self, n_tokens: int) -> None:
        assert n_tokens >= self.known
        self.known = n_tokens
        self.drafter.told.append(n_tokens)

    def fork(self, target: lb.speculative.Text) -> HostileLine:
        self.drafter.open_lines += 1
        return HostileLine(self.drafter, self.start, self.n_vocab, self.end)

    def close(self) -> None:
        self.drafter.open_lines -= 1


class EndingDrafter(AdversarialDrafter):
    """Always proposes the same."""

    def start(self, target: lb.speculative.Text, rule: str) -> HostileLine:
        self.open_lines += 1
        return EndingLine(self, target.position, target.ctx.n_vocab, 0)


class EndingLine(HostileLine):
    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        return Draft(tokens=list(self.drafter.truth)[:limit])


# -- the texts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def main_ctx(target: lb.Model) -> Context:
    return Context(target, n_ctx=1024, n_seq_max=4, n_threads=1, batch_invariant=True)


@pytest.fixture(scope="module")
def plain_texts(main_ctx: Context) -> dict[tuple[str, str], Said]:
    return {
        (name, prompt): plain(main_ctx, prompt, params, N_TOKENS)
        for name, params in (("greedy", GREEDY), ("warm", WARM))
        for prompt in PROMPTS
    }


@cache
def _params(name: str) -> SamplingParams:
    return {"greedy": GREEDY, "warm": WARM}[name]


@pytest.mark.parametrize("heat", ["greedy", "warm"])
@pytest.mark.parametrize("who", ["nobody", "draft", "target", "hostile", "auto"])
def test_text_is_that_of_plain_decoding(
    who: str,
    heat: str,
    main_ctx: Context,
    draft_ctx: Context,
    target: lb.Model,
    plain_texts: dict[tuple[str, str], Said],
) -> None:
    """20 prompts x 200 tokens; logprob and entropy are compared to the bit as well."""
    config = SpeculativeConfig(draft_k="auto" if who == "auto" else 5)
    total = lb.SpeculativeStats()
    with Context(target, n_ctx=512, n_seq_max=2, n_threads=1) as twin:
        for prompt in PROMPTS:
            expected = plain_texts[heat, prompt]
            hostile = AdversarialDrafter([token for token, *_ in expected])
            drafter: lb.Drafter | None = {
                "nobody": None,
                "draft": lb.ModelDrafter(draft_ctx),
                "auto": lb.ModelDrafter(draft_ctx),
                "target": lb.ModelDrafter(twin),
                "hostile": hostile,
            }[who]
            generation = Speculator(main_ctx, drafter, config).generate(
                prompt, max_tokens=N_TOKENS, sampling=_params(heat)
            )
            assert speculated(generation) == expected
            assert generation.tokens == [token for token, *_ in expected]
            assert generation.text == "".join(text for _, text, *_ in expected)
            assert generation.stats.num_emitted_tokens == len(expected)
            assert hostile.open_lines == 0
            total.add(generation.stats)
    main_ctx.audit()
    assert main_ctx.usage().cells_used == 0
    assert draft_ctx.usage().cells_used == 0
    if who == "nobody":
        assert total.num_drafts == 0
    elif who == "target":
        assert total.draft_acceptance_rate == 1.0
        assert total.num_accepted_tokens > 0.8 * total.num_emitted_tokens
    elif who != "auto":  # which may find that nothing pays
        assert 0 < total.num_accepted_tokens < total.num_draft_tokens
        assert total.target_forward_passes < total.num_emitted_tokens


@pytest.mark.parametrize("k", [0, 1, 2, 16, 64])
def test_length_of_the_draft_does_not_matter(
    k: int, main_ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    speculator = Speculator(main_ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=k))
    generation = speculator.generate(PROMPTS[0], max_tokens=N_TOKENS, sampling=WARM)
    assert speculated(generation) == plain_texts["warm", PROMPTS[0]]


@pytest.mark.parametrize("limit", [0.0, 0.5, 2.0])
def test_entropy_that_ends_drafts_does_not_change_the_text(
    limit: float, main_ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    config = SpeculativeConfig(draft_k=6, entropy_stop=limit)
    speculator = Speculator(main_ctx, lb.ModelDrafter(draft_ctx), config)
    generation = speculator.generate(PROMPTS[1], max_tokens=N_TOKENS, sampling=WARM)
    assert speculated(generation) == plain_texts["warm", PROMPTS[1]]


def test_drafter_with_its_own_settings_does_not_change_the_text(
    main_ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    drafter = lb.ModelDrafter(draft_ctx, SamplingParams(temperature=1.5, seed=1))
    generation = Speculator(main_ctx, drafter, FIXED).generate(
        PROMPTS[2], max_tokens=N_TOKENS, sampling=WARM
    )
    assert speculated(generation) == plain_texts["warm", PROMPTS[2]]


def test_draft_whose_cache_is_full_does_not_change_the_text(
    main_ctx: Context, draft: lb.Model, plain_texts: dict[tuple[str, str], Said]
) -> None:
    with Context(draft, n_ctx=256, n_seq_max=2, n_threads=1) as small:
        small.decode([5] * 170, 0)
        generation = Speculator(main_ctx, lb.ModelDrafter(small), FIXED).generate(
            PROMPTS[3], max_tokens=N_TOKENS, sampling=WARM
        )
        assert speculated(generation) == plain_texts["warm", PROMPTS[3]]
        assert generation.stats.num_plain_steps > 50
        small.audit()


def test_drafter_of_another_vocabulary_does_not_change_the_text(
    main_ctx: Context, toy: lb.Model, plain_texts: dict[tuple[str, str], Said]
) -> None:
    with Context(toy, n_ctx=1024, n_seq_max=2, n_threads=1) as stranger:
        generation = Speculator(main_ctx, lb.ModelDrafter(stranger), FIXED).generate(
            PROMPTS[4], max_tokens=40, sampling=WARM
        )
        assert speculated(generation) == plain_texts["warm", PROMPTS[4]][:40]
        assert generation.stats.num_drafts > 0


@pytest.mark.parametrize("n_ends", [1, 2, 4])
def test_draft_that_goes_on_after_the_end_emits_nothing_more(
    n_ends: int, main_ctx: Context, target: lb.Model
) -> None:
    """Once a second drafted end was accepted, and the first one said as a token of the text."""
    assert target.eos is not None
    drafter = EndingDrafter([target.eos] * n_ends + [5, 6, 7])
    with Branch.start(main_ctx, PROMPTS[0], sampling=GREEDY) as branch:
        generation = Speculator(main_ctx, drafter, FIXED).generate(branch, max_tokens=20)
        next(generation)
        position = branch.position
        branch.steer({target.eos: 1e6})
        assert list(generation) == []
        assert generation.finish_reason == "stop"
        assert generation.stats.num_accepted_tokens == 1
        assert branch.position == position  # the token that had been said is the last


# -- settings that look back -------------------------------------------------------------------------

LOOKING_BACK = [
    {"repeat_penalty": 1.3, "penalty_last_n": 20},
    {"frequency_penalty": 0.7, "presence_penalty": 0.5, "penalty_last_n": -1},
    {"dry_multiplier": 0.9, "dry_allowed_length": 1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"repeat_penalty": 1.1, "dry_multiplier": 0.5, "top_p": 0.7, "typical_p": 0.9},
]


@pytest.mark.parametrize("settings", LOOKING_BACK, ids=str)
@pytest.mark.parametrize("who", ["draft", "hostile"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rejected_tokens_leave_no_penalty(
    settings: dict[str, float], who: str, temperature: float, main_ctx: Context, draft_ctx: Context
) -> None:
    params = SamplingParams(seed=7).replace(temperature=temperature, **settings)
    expected = plain(main_ctx, PROMPTS[5], params, 80)
    drafter: lb.Drafter = AdversarialDrafter([token for token, *_ in expected])
    if who == "draft":
        drafter = lb.ModelDrafter(draft_ctx)
    generation = Speculator(main_ctx, drafter, SpeculativeConfig(draft_k=5)).generate(
        PROMPTS[5], max_tokens=80, sampling=params
    )
    assert speculated(generation) == expected


@pytest.mark.parametrize("who", ["draft", "target", "hostile"])
@pytest.mark.parametrize("seed", range(3))
def test_grammar_holds_across_blocks(
    who: str, seed: int, main_ctx: Context, draft_ctx: Context, target: lb.Model
) -> None:
    grammar = r"""
        root ::= sentence{3,6} end
        sentence ::= "The " ("king" | "witch" | "frog") " " ("slept" | "wept") more? ". "
        more ::= " and " ("sang" | "danced")
        end ::= "The end."
    """
    params = SamplingParams(temperature=1.0, seed=seed)
    branch = Branch.start(main_ctx, PROMPTS[0], sampling=params, grammar=grammar)
    expected = [(t.token, t.text, t.logprob, t.entropy) for t in branch.generate(200)]
    assert branch.is_stop
    assert branch.text.endswith("The end.")
    branch.prune()
    with Context(target, n_ctx=512, n_seq_max=2, n_threads=1) as twin:
        drafters: dict[str, lb.Drafter] = {
            "draft": lb.ModelDrafter(draft_ctx),
            "target": lb.ModelDrafter(twin),
            "hostile": AdversarialDrafter([token for token, *_ in expected]),
        }
        speculator = Speculator(main_ctx, drafters[who], SpeculativeConfig(draft_k=5))
        generation = speculator.generate(
            PROMPTS[0], max_tokens=200, sampling=params, grammar=grammar
        )
        assert speculated(generation) == expected
        assert generation.finish_reason == "stop"
        if who == "target":
            assert generation.stats.draft_acceptance_rate == 1.0


# -- endings ---------------------------------------------------------------------------------------


def _drafters(draft_ctx: Context, truth: Said) -> list[lb.Drafter | None]:
    tokens = [token for token, *_ in truth]
    return [None, lb.ModelDrafter(draft_ctx), AdversarialDrafter(tokens), AdversarialDrafter()]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 7, 23])
def test_limit_is_kept_exactly(
    n: int, ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    expected = plain_texts["warm", PROMPTS[0]][:n]
    for drafter in _drafters(draft_ctx, plain_texts["warm", PROMPTS[0]]):
        branch = Branch.start(ctx, PROMPTS[0], sampling=WARM)
        before = branch.tokens
        generation = Speculator(ctx, drafter, FIXED).generate(branch, max_tokens=n)
        assert speculated(generation) == expected
        assert generation.finish_reason == "length"
        assert branch.tokens == before + [token for token, *_ in expected]
        branch.prune()
        ctx.audit()


@pytest.mark.parametrize("bias", [6.0, 9.0, 12.0])
def test_end_tokens_end_the_text_where_plain_decoding_ends_it(
    bias: float, main_ctx: Context, draft_ctx: Context, target: lb.Model
) -> None:
    assert target.eos is not None
    ended = 0
    for seed in range(4):
        params = SamplingParams(temperature=0.9, seed=seed, logit_bias={target.eos: bias})
        branch = Branch.start(main_ctx, PROMPTS[seed], sampling=params)
        expected = [(t.token, t.text, t.logprob, t.entropy) for t in branch.generate(60)]
        reason = branch.finish_reason
        ended += reason == "stop"
        branch.prune()
        for drafter in _drafters(draft_ctx, expected):
            branch = Branch.start(main_ctx, PROMPTS[seed], sampling=params)
            start = branch.position
            generation = Speculator(main_ctx, drafter, FIXED).generate(branch, max_tokens=60)
            assert speculated(generation) == expected
            assert generation.finish_reason == reason
            assert branch.tokens[start:] == [token for token, *_ in expected]
            branch.prune()
    assert ended


def test_stop_strings_end_the_text_where_plain_decoding_ends_it(
    main_ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    free = plain_texts["warm", PROMPTS[0]]
    text = "".join(t for _, t, *_ in free)
    for at in (3, 20, 50, 101, 102, 103, 104):
        stop = [text[at : at + 6], "never said"]
        branch = Branch.start(main_ctx, PROMPTS[0], sampling=WARM)
        start = branch.position
        expected = [(t.token, t.text, t.logprob, t.entropy) for t in branch.generate(200, stop)]
        kept = branch.tokens[start:]
        branch.prune()
        for drafter in _drafters(draft_ctx, free):
            branch = Branch.start(main_ctx, PROMPTS[0], sampling=WARM)
            generation = Speculator(main_ctx, drafter, FIXED).generate(
                branch, max_tokens=200, stop=stop
            )
            assert speculated(generation) == expected
            assert generation.text == text[: text.index(stop[0])]
            assert generation.finish_reason == "stop"
            assert branch.tokens[start:] == kept
            branch.prune()


def test_stop_string_that_an_end_token_cuts_short_holds_nothing_back(
    main_ctx: Context, draft_ctx: Context, target: lb.Model
) -> None:
    """The text's last letters could have begun a stop string; then the text ended."""
    assert target.eos is not None
    stop = [chr(c) + "\x00never" for c in range(32, 127)]
    params = SamplingParams(temperature=0.9, seed=1, logit_bias={target.eos: 9.0})
    for drafter in _drafters(draft_ctx, []):
        free = Speculator(main_ctx, drafter, FIXED).generate(PROMPTS[0], sampling=params).finish()
        held = Speculator(main_ctx, drafter, FIXED).generate(PROMPTS[0], sampling=params, stop=stop)
        shown = "".join(t.text for t in held)
        assert held.finish_reason == "stop"
        assert shown == held.text == free.text


@pytest.mark.parametrize("n", range(1, 14))
def test_abandoned_generation_leaves_exactly_what_was_yielded(
    n: int, ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    free = plain_texts["warm", PROMPTS[0]]
    tokens = [token for token, *_ in free]
    for drafter in _drafters(draft_ctx, free):
        branch = Branch.start(ctx, PROMPTS[0], sampling=WARM)
        start = branch.position
        generation = Speculator(ctx, drafter, SpeculativeConfig(draft_k=5)).generate(branch)
        for _ in range(n):
            next(generation)
        generation.close()
        generation.close()
        assert generation.tokens == tokens[:n]
        assert branch.tokens[start:] == tokens[:n]
        assert list(generation) == []
        again = Branch.start(ctx, [*branch.tokens], sampling=WARM)
        assert np.array_equal(branch.logits, again.logits)
        assert branch.produce().token == tokens[n]
        assert [t.token for t in branch.generate(10)] == tokens[n : n + 10]
        again.prune()
        branch.prune()
        ctx.audit()
    gc.collect()  # on Python 3.10 a closed generation is in a cycle with its drafter
    assert draft_ctx.usage().cells_used == 0


def test_continued_branch_keeps_its_perplexity(
    ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    branch = Branch.start(ctx, PROMPTS[0], sampling=WARM)
    Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED).generate(branch, max_tokens=50).finish()
    logprobs = [logprob for _, _, logprob, _ in plain_texts["warm", PROMPTS[0]][:50]]
    assert branch.perplexity() == pytest.approx(math.exp(-np.mean(logprobs)))


def test_generations_may_interleave(
    ctx: Context, draft_ctx: Context, plain_texts: dict[tuple[str, str], Said]
) -> None:
    speculator = Speculator(ctx, lb.ModelDrafter(draft_ctx), FIXED)
    generations = [
        speculator.generate(prompt, max_tokens=40, sampling=WARM) for prompt in PROMPTS[:4]
    ]
    running = list(generations)
    while running:
        for generation in list(running):
            if next(generation, None) is None:
                running.remove(generation)
    for prompt, generation in zip(PROMPTS, generations, strict=False):
        assert generation.tokens == [t for t, *_ in plain_texts["warm", prompt][:40]]
    assert speculator.stats.num_emitted_tokens == 160


def test_full_cache_ends_both_loops_at_the_same_token(target: lb.Model, draft_ctx: Context) -> None:
    with Context(target, n_ctx=256, n_seq_max=2, n_threads=1) as ctx:
        tokens: list[list[int]] = []
        for drafter in (None, lb.ModelDrafter(draft_ctx), AdversarialDrafter()):
            branch = Branch.start(ctx, [5] * 240, sampling=WARM)
            generation = Speculator(ctx, drafter, FIXED).generate(branch, max_tokens=None)
            with pytest.raises(CacheFullError):
                generation.finish()
            assert generation.finish_reason == "capacity"
            tokens.append(generation.tokens)
            branch.prune()
            ctx.audit()
        assert tokens[0] == tokens[1] == tokens[2]
        assert len(tokens[0]) >= 16


def test_sources_tell_where_tokens_came_from(main_ctx: Context, draft_ctx: Context) -> None:
    speculator = Speculator(main_ctx, lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3))
    generation = speculator.generate(PROMPTS[0], max_tokens=150, sampling=WARM)
    sources = [t.source for t in generation]
    stats = generation.stats
    assert set(sources) <= {"plain", "drafted", "bonus", "corrected"}
    assert sources.count("drafted") <= stats.num_accepted_tokens <= stats.num_draft_tokens
    assert stats.num_accepted_tokens - sources.count("drafted") <= 3  # a last block cut short
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert stats.num_drafts + stats.num_plain_steps == stats.target_forward_passes


# -- misuse --------------------------------------------------------------------------------------


def test_speculator_checks_its_arguments_at_once(ctx: Context) -> None:
    speculator = Speculator(ctx)
    with pytest.raises(ConfigError):
        speculator.generate("a", max_tokens=-1)
    with pytest.raises(ConfigError):
        speculator.generate("a", stop="")
    with pytest.raises(GrammarError):
        speculator.generate("a", grammar="root ::= (")
    with Branch.start(ctx, "a") as branch, pytest.raises(ConfigError, match="its own"):
        speculator.generate(branch, sampling=GREEDY)
    assert ctx.usage().cells_used == 0


@pytest.mark.parametrize(
    "settings",
    [{"draft_k": -1}, {"draft_k": 257}, {"draft_k": "many"}, {"draft_k": True}, {"draft_k": 1.5},
     {"max_draft_tokens": 0}, {"max_draft_tokens": 1000}, {"entropy_stop": -1.0},
     {"entropy_stop": math.nan}],
    ids=str,
)  # fmt: skip
def test_bad_speculative_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SpeculativeConfig(**settings)
