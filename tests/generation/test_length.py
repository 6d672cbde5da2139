"""The draft-length controller in a simulated world with its own clock, so that results are exact.

A simulated target takes t(n) seconds for n tokens, and a simulated drafter takes c seconds per step. Its
tokens are accepted with a probability that may depend on the entropy and may change over time. One stream
decodes alone, as with a Speculator, or many share each decode, as with an Engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import SpeculativeConfig
from llamabranch.errors import ConfigError
from llamabranch.generation.config import draft_length
from llamabranch.generation.drafter import (
    NO_DRAFT,
    DraftLength,
    FixedLength,
    Round,
)
from llamabranch.generation.length import WARM_UP_PLAIN, AutoLength
from llamabranch.speculative import Draft

PLAIN = Round(NO_DRAFT)
# Probability that a token is accepted, given the entropy at which it was drawn.
Chance = Callable[[float], float]


@dataclass
class World:
    """Runs rounds as a Speculator does, or as an Engine with many streams; sums tokens and seconds."""

    length: DraftLength
    chance: Chance
    c: float = 0.03  # seconds per drafted token; a plain target step takes one second
    slope: float = 0.2  # seconds that each further token adds to a target decode
    entropies: tuple[float, ...] = (0.3,)  # a draft's entropies are drawn from these
    drafter: str = "model"
    noise: float = 0.0  # random error of a round's time, and drift of the machine's speed
    speaks: float = 1.0  # how often the drafter has something to propose
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(2))
    n_streams: int = 1
    looks: int = 0  # 1 = a draft takes one step more than it has tokens (not of a fixed length)
    c_slope: float = 0.0  # seconds that each further stream adds to a draft step
    n_tokens: int = 0
    seconds: float = 0.0
    # Drafted tokens of each stream in each round; -1 = its drafter was not asked.
    drafted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams: list[DraftLength] = [self.length]  # a text by itself
        if self.n_streams > 1:
            self.streams = [self.length.stream() for _ in range(self.n_streams)]
        self.n_behind = [1] * self.n_streams

    def time(self, n: int) -> float:
        return 1.0 + self.slope * (n - 1)

    def round(self, limit: int = 1 << 30) -> None:
        rounds = [self._draft(i, limit) for i in range(self.n_streams)]
        n_decoded = self.n_streams + sum(len(r.draft.tokens) for r in rounds)
        n_steps = [len(d.entropies) + self.looks * bool(d.tokens) for d, *_ in rounds]
        draft_s = 0.0
        for step in range(max(n_steps)):
            draft_s += self.c + self.c_slope * (sum(n > step for n in n_steps) - 1)
        pace = 1.0
        if self.noise:
            pace += self.noise * math.sin(len(self.drafted) / self.n_streams / 150)
            pace *= 1.0 + self.noise * self.rng.uniform(-1.0, 1.0)
        for i, (draft, n_accepted, *_) in enumerate(rounds):
            draft.seconds = draft_s * n_steps[i] / max(1, sum(n_steps))
            is_asked = draft.stopped != "off"
            self.n_behind[i] = 1 if is_asked else self.n_behind[i] + 1
            self.n_tokens += 1 + n_accepted
            self.drafted.append(len(draft.tokens) if is_asked else -1)
        self.length.learn(rounds, n_decoded, pace * self.time(n_decoded))
        # Without drift, so that speeds can be compared.
        self.seconds += draft_s + self.time(n_decoded)

    def _draft(self, i: int, limit: int) -> Round:
        """Return the outcome of a stream's draft."""
        length, limit = self.streams[i], min(limit, self.length.limit)
        draft, n_accepted, is_right = Draft(drafter=self.drafter, stopped="off"), 0, True
        if length.plain_steps(self.n_behind[i]) == 0:
            draft.stopped = "length"
            if length.consider(self.drafter) and self.rng.random() < self.speaks:
                while len(draft.tokens) < limit:
                    entropy = self.entropies[int(self.rng.integers(len(self.entropies)))]
                    draft.entropies.append(entropy)
                    if not length.goes_on(len(draft.tokens), entropy):
                        break
                    draft.tokens.append(1)
                    is_right = is_right and self.rng.random() < self.chance(entropy)
                    n_accepted += is_right
        return Round(draft, n_accepted)

    def run(self, n: int) -> World:
        for _ in range(n):
            self.round()
        return self

    @property
    def speed(self) -> float:
        """The speed over plain decoding, which emits one token of each stream per decode."""
        return self.n_tokens / self.seconds * self.time(self.n_streams) / self.n_streams

    def recent(self, n: int = 50) -> float:
        """Return the mean length of the last ``n`` drafts."""
        drafts = [k for k in self.drafted if k > 0][-n:]
        return sum(drafts) / len(drafts)


def always(p: float) -> Chance:
    return lambda entropy: p


def best_speed(p: float, c: float, slope: float, limit: int = 16, n: int = 1) -> float:
    """Return the speed of the best fixed length for n streams, by the formula.

    A draft step takes c seconds for all streams together. With "auto" a draft ends after one step that
    draws nothing.
    """
    return max(
        sum(p**i for i in range(k + 1))
        * (1 + slope * (n - 1))
        / ((k + (0 < k < limit)) * c + 1 + slope * (n * (k + 1) - 1))
        for k in range(limit + 1)
    )


def auto_length(
    limit: int = 16, drafter: lb.Drafter | None = None, entropy_stop: float | None = None
) -> AutoLength:
    return AutoLength(limit, entropy_stop, drafter)


def is_on(length: DraftLength) -> bool:
    return length.explain().startswith("drafting is on")


def cost(length: DraftLength) -> float:
    """Return c as it is reported: a draft step's time over a plain target step's."""
    return float(length.explain().split(" of a target's step")[0].split()[-1])


def added(length: DraftLength) -> float:
    """Return what a drafted token adds to a decode, over a plain target step, as it is reported."""
    return float(length.explain().split(" to verify")[0].split()[-1])


def drafted(name: str, n: int, entropy: float = 0.3, **fields: Any) -> Draft:
    """Return a draft of ``n`` tokens that took one more step."""
    return Draft(drafter=name, tokens=[1] * n, entropies=[entropy] * (n + 1), **fields)


# -- off and on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "options", "share"),
    [
        (0.0, {}, 0.97),
        (0.6, {"c": 1.0}, 0.97),  # a step of the drafter takes as long as one of the target
        *((0.0, {"c": 0.0, "noise": 0.3, "rng": np.random.default_rng(i)}, 0.97) for i in range(5)),
        (0.0, {"n_streams": 8, "slope": 0.05, "noise": 0.3}, 0.97),
        (0.8, {"n_streams": 8, "slope": 0.9}, 0.97),
        (0.5, {"n_streams": 8, "slope": 0.5, "noise": 0.2}, 0.97),
        (0.0, {"entropies": (math.nan,), "c": 0.01}, 0.97),  # it reports only its tokens
        (0.0, {"drafter": "suffix", "c": 0.1}, 0.97),  # looking for a copy takes a tenth of a step
        (0.9, {"c": 0.1, "slope": 0.1}, 0.92),
        (0.8, {"c": 0.05, "slope": 0.2}, 0.92),
        (0.7, {"c": 0.02, "slope": 0.1}, 0.92),
        (0.95, {"c": 0.3, "slope": 0.05}, 0.9),
        (0.9, {"c": 0.1, "slope": 0.05, "n_streams": 4}, 0.92),
        (0.8, {"c": 0.05, "slope": 0.02, "n_streams": 8}, 0.92),
    ],
)
def test_speed_is_near_that_of_the_best_fixed_length(
    p: float, options: dict[str, Any], share: float
) -> None:
    """The formula knows everything and never probes. A drafter that does not pay is switched off.

    Neither noisy times nor many streams per decode keep it on.
    """
    n = options.get("n_streams", 1)
    drafter = lb.SuffixDrafter() if "drafter" in options else None
    world = World(auto_length(drafter=drafter), always(p), **options).run(4000 // n)
    best = best_speed(p, world.c, world.slope, n=n)
    assert world.speed > share * best
    assert is_on(world.length) == (best > 1)
    if best == 1:
        asked = world.drafted[1000 :: world.n_streams]
        assert sum(k > 0 for k in asked) < 0.02 * len(asked)


def test_drafter_that_changes_is_switched_off_and_comes_back() -> None:
    """A drafter with empty drafts is asked until it has one. A trial waits until missed text is read."""
    world = World(auto_length(), always(0.9), speaks=0.0).run(500)
    assert not any(k > 0 for k in world.drafted)
    assert world.speed == pytest.approx(1.0)
    world.speaks = 1.0
    world.run(500)
    assert is_on(world.length) and world.recent() > 1
    world.chance = always(0.0)
    world.run(1500)
    assert sum(k >= 0 for k in world.drafted[-500:]) < 50
    world.chance = always(0.95)
    world.run(6000)
    assert is_on(world.length)
    before = world.n_tokens, world.seconds
    world.run(300)
    assert (world.n_tokens - before[0]) / (world.seconds - before[1]) > 1.5


@pytest.mark.parametrize("slow", [10.0, 100.0])
@pytest.mark.parametrize("n_slow", [3, 4, 8])
@pytest.mark.parametrize("is_drafter", [False, True], ids=["all", "drafter"])
def test_slow_first_rounds_do_not_keep_a_drafter_off(
    slow: float, n_slow: int, is_drafter: bool
) -> None:
    """The weights of one model or of both are still loaded, or other programs use the cores."""

    class Slow(World):
        pace = 1.0 if is_drafter else slow

        def time(self, n: int) -> float:
            return self.pace * super().time(n)

    world = Slow(auto_length(), always(0.8), c=0.05 * slow)
    world.run(n_slow)
    world.pace, world.c, world.n_tokens, world.seconds = 1.0, 0.05, 0, 0.0
    assert world.run(2000).speed > 0.92 * best_speed(0.8, 0.05, 0.2)


def test_a_trial_waits_until_missed_text_costs_little() -> None:
    length = auto_length()
    World(length, always(0.0)).run(60)
    while length.plain_steps(1):
        length.learn([PLAIN], 1, 1.0)
    assert length.plain_steps(1_000_000) > 0


def test_reading_is_no_drafted_tokens_time() -> None:
    """The first draft also reads the prompt, for a hundred steps. Later ones do not."""
    length = auto_length()
    length.learn([PLAIN], 1, 1.0, 3)
    assert length.plain_steps(1000) == 0
    assert length.consider("model")
    length.learn([Round(drafted("model", 3, seconds=100.0, n_read=1000), 3)], 4, 1.6)
    world = World(length, always(0.8)).run(300)
    assert is_on(length)
    assert cost(length) == pytest.approx(world.c)
    assert sum(k > 0 for k in world.drafted) > 280


# -- how long ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "c", "slope"), [(0.4, 0.05, 0.02), (0.5, 0.1, 0.02), (0.5, 0.05, 0.05), (0.6, 0.1, 0.05)]
)
def test_first_hundred_tokens_are_near_the_best_fixed_length(
    p: float, c: float, slope: float
) -> None:
    """Targets whose drafts cost little and whose v(n) is nearly flat. Nothing is known at first."""

    def speed(make: Callable[[], DraftLength]) -> float:
        n_tokens, seconds = 0, 0.0
        for seed in range(40):
            rng, looks = np.random.default_rng(seed), int(make is not auto)
            world = World(make(), always(p), c=c, slope=slope, looks=looks, rng=rng)
            while world.n_tokens < 100:
                world.round(100 - world.n_tokens - 1)
            n_tokens += world.n_tokens
            seconds += world.seconds
        return n_tokens / seconds

    auto = auto_length
    assert speed(auto) > 0.9 * max(speed(partial(FixedLength, k)) for k in range(1, 6))


def test_unsure_steps_end_a_draft_and_sure_ones_do_not() -> None:
    """If the entropy predicts which tokens are accepted, drafts end before the others."""
    world = World(
        auto_length(), lambda h: 0.97 if h < 1 else 0.05, entropies=(0.2, 0.2, 0.2, 2.2)
    ).run(2000)
    length = world.length
    assert is_on(length)
    assert length.goes_on(0, 0.2)
    assert not length.goes_on(0, 2.2)
    assert length.reason == "goodput"
    blind = World(auto_length(), always(0.75 * 0.97 + 0.25 * 0.05)).run(2000)
    assert world.speed > blind.speed


def test_limit_and_then_entropy_stop_come_before_everything() -> None:
    for limit in (1, 2, 5):
        world = World(auto_length(limit), always(0.99), c=0.001, slope=0.0).run(300)
        assert max(world.drafted) == limit
        assert not world.length.goes_on(limit, 0.0)
        assert world.length.reason == "length"
    length = auto_length(entropy_stop=1.0)
    World(length, always(0.95), entropies=(0.2, 1.5), slope=0.01).run(200)
    assert length.plain_steps(1) == 0 and length.consider("model")
    assert length.goes_on(0, 0.9)
    assert not length.goes_on(0, 1.5)
    assert length.reason == "entropy"


@pytest.mark.parametrize(("seconds", "pays"), [(3.6, True), (4.3, False)])
def test_drafts_in_a_batch_are_charged_what_they_add_to_its_decode(
    seconds: float, pays: bool
) -> None:
    """Without a unified cache a drafted token takes a decode of its own: 4.3 s, not 3.6."""
    length = auto_length()
    length.consider("m")
    for i in range(20):
        length.learn([PLAIN], 1, 1.0)
        length.learn([PLAIN] * 8, 8, 2.4)
        length.learn([Round(drafted("m", 1, seconds=0.02), i % 2), *[PLAIN] * 6], 8, seconds)
        length.learn([PLAIN] * 7, 7, 3.4)
    assert is_on(length) == pays


def test_streams_that_draft_in_turns_do_not_disturb_each_other() -> None:
    """The remaining confidence of a draft belongs to its stream, and so does the reason why it ended."""
    world = World(auto_length(), lambda h: math.exp(-h), entropies=(0.3, 4.0)).run(300)
    alone = world.length.stream()
    assert alone.consider("model")
    n_alone = next(n for n in range(17) if not alone.goes_on(n, 0.3))
    first, second = world.length.stream(), world.length.stream()
    assert first.consider("model") and second.consider("model")
    n = 0
    while first.goes_on(n, 0.3):
        second.goes_on(n, 4.0)
        n += 1
    assert n == n_alone > 0
    assert not second.goes_on(second.limit, 0.0)
    assert (first.reason, second.reason) == ("goodput", "length")


# -- copies --------------------------------------------------------------------------------------------


def copies(length: AutoLength, n: int, surprisal: float = 0.1) -> int:
    """Return how many of ``n`` copied tokens are drafted; 0 if none is asked for."""
    if length.plain_steps(1) or not length.consider("suffix"):
        return 0
    return next((i for i in range(n) if not length.goes_on(i, surprisal)), n)


def copying() -> AutoLength:
    """Return a controller that knows how long a target's plain step takes."""
    length = auto_length(drafter=lb.SuffixDrafter())
    length.learn([PLAIN], 1, 1.0, 3)
    return length


def take(length: AutoLength, n: int, n_accepted: int, *, slope: float = 0.1) -> None:
    """Report that so many of ``n`` copied tokens were accepted; each adds ``slope`` to the decode."""
    done = Round(drafted("suffix", n, 0.1), n_accepted)
    length.learn([done], 1 + n, 1.0 + slope * n)


def test_copies_that_are_accepted_are_soon_drafted_as_long_as_they_go() -> None:
    """This is true even after three wrong ones, when only few tokens are drafted."""
    for n_wrong in (0, 3):
        length = copying()
        for _ in range(n_wrong):
            take(length, copies(length, 16), 0)
        lengths = []
        for _ in range(3 + n_wrong):
            lengths.append(copies(length, 16))
            take(length, lengths[-1], lengths[-1])
        assert lengths[0] < 12 and copies(length, 16) == 16


def test_a_copying_drafter_is_always_asked_and_tried_again_where_its_copies_were_wrong() -> None:
    """After wrong copies nothing is drafted. Copies of another probability still are."""
    length = copying()
    n_rounds = 0
    while n := copies(length, 16):
        take(length, n, 0)
        n_rounds += 1
    assert n_rounds > 1  # a single one that is wrong does not end drafting
    assert copies(length, 16, 0.01) > 0
    while not copies(length, 16):
        assert length.plain_steps(1) == 0 and length.consider("suffix")
        take(length, 0, 0)
        n_rounds += 1
    assert n_rounds < 40


def test_no_copied_draft_is_far_longer_than_those_that_have_a_time() -> None:
    length = auto_length(32, drafter=lb.SuffixDrafter())
    length.learn([PLAIN], 1, 1.0, 3)
    lengths = []
    for _ in range(4):
        lengths.append(copies(length, 32, 0.01))
        take(length, lengths[-1], lengths[-1], slope=0.01)
    assert lengths[:3] == [2, 5, 11] and 16 < lengths[3] <= 23


# -- what is learned ---------------------------------------------------------------------------------


def test_times_are_measured_and_one_slow_round_moves_little() -> None:
    length = auto_length()
    length.learn([PLAIN], 1, 1.0, 3)
    length.consider("model")
    for n in (2, 4):
        length.learn([Round(drafted("model", n), n)], 1 + n, 1.0 + 0.2 * n)
    assert added(length) == 0.2
    length.learn([PLAIN], 1, 50.0)
    length.learn([Round(drafted("model", 4), 4)], 5, 50.0)
    assert 0.1 < added(length) < 0.5
    for _ in range(30):
        length.learn([PLAIN], 1, 1.0)
        length.learn([Round(drafted("model", 4), 4)], 5, 1.8)
    assert added(length) == pytest.approx(0.2, rel=0.1)
    for _ in range(60):  # the machine is three times slower, and only single tokens are decoded
        length.learn([PLAIN], 1, 3.0)
    assert added(length) > 0.15


def test_decode_that_also_read_prompts_is_not_learned() -> None:
    world = World(auto_length(), always(0.8), n_streams=4).run(50)
    line = world.length.explain().split(";")[0]
    rounds = [Round(drafted("model", 1, seconds=0.03), 1) for _ in range(4)]
    world.length.learn(rounds, 8, math.nan)
    assert world.length.explain().startswith(line)
    assert is_on(world.length)


def test_drafters_of_a_chain_are_judged_by_themselves() -> None:
    """Copies are free and right; the draft model is expensive and wrong. Each is judged by itself."""
    length = auto_length(8)
    copied = World(length, always(0.98), c=0.001, drafter="suffix")
    copied.run(100)
    model = World(length, always(0.0), c=0.5, drafter="model")
    for _ in range(60):
        copied.round()
        model.round()
    assert not length.consider("model")  # it alone is switched off
    assert is_on(length) and cost(length) > 0.3
    assert length.consider("suffix") and length.goes_on(0, 0.3)
    assert cost(length) < 0.01


# -- drafters that fill only their tokens ------------------------------------------------------------


def bare(truth: Sequence[int] = (), start: int = 0, name: str = "bare") -> lb.FunctionDrafter:
    """Return a drafter of five tokens that reports nothing else about them.

    ``truth`` is what the target says from ``start`` on. It is copied; without it all drafted tokens are
    wrong.
    """

    def guess(tokens: list[int], k: int) -> list[int]:
        at = len(tokens) - start
        return list(truth[at : at + min(5, k)]) if truth else [2 + len(tokens) % 50] * min(5, k)

    return lb.FunctionDrafter(guess, name)


@pytest.mark.parametrize("honest", [True, False])
def test_bare_drafter_under_auto_is_measured_and_the_text_is_plain(
    ctx: lb.Context, honest: bool
) -> None:
    """Version 0.1 drafted 157 tokens, had 14 accepted, and was "still measuring"."""
    settings = lb.SamplingParams(temperature=0.8, seed=3)
    prompt = ctx.tokenize("Once upon a time")
    plain = lb.Speculator(ctx).generate(prompt, max_tokens=60, sampling=settings).finish().tokens
    drafter = bare(plain, len(prompt)) if honest else bare()
    config = SpeculativeConfig(draft_k="auto")
    speculator = lb.Speculator(ctx, drafter, config)
    drafted = speculator.generate(prompt, max_tokens=60, sampling=settings).finish()
    assert drafted.tokens == plain
    assert drafted.stats.num_draft_tokens > 0
    assert drafted.stats.draft_time_s > 0
    explanation = speculator.explain()
    assert "still measuring" not in explanation
    chance = float(explanation.split("% are accepted")[0].split()[-1])
    assert (chance > 50) == honest
    if not honest:  # never more at once than a warm-up tries
        assert drafted.stats.num_draft_tokens <= 3 * drafted.stats.num_drafts


def test_the_next_generation_begins_with_what_was_learned(target: lb.Model) -> None:
    """It is kept in memory for each context and drafter. Another context begins without it."""
    settings = lb.SamplingParams(temperature=0.8, seed=3)

    def begin(ctx: lb.Context, name: str) -> lb.Speculator:
        return lb.Speculator(ctx, bare(name=name))

    with lb.Context(target, n_ctx=256, n_threads=1, exact=True) as ctx:
        first = begin(ctx, "one")
        assert first.length.plain_steps(1) == WARM_UP_PLAIN
        first.generate("Once upon a time", max_tokens=40, sampling=settings).finish()
        assert first.stats.num_draft_tokens > 0
        for name in ("one", "another"):
            later = begin(ctx, name)
            assert later.length.plain_steps(1) == 0  # no plain steps to begin with
            later.length.consider(name)
            explanation = later.explain()
            assert ("tested)" in explanation) == (name == "one")
    with lb.Context(target, n_ctx=256, n_threads=1, exact=True) as ctx:
        assert begin(ctx, "one").length.plain_steps(1) == WARM_UP_PLAIN


# -- words -------------------------------------------------------------------------------------------


def test_explanation_says_what_and_why() -> None:
    assert "no plain step and no draft yet" in auto_length().explain()
    plain = World(auto_length(), always(0.9), speaks=0.0).run(10).length.explain()
    assert "still measuring: no draft yet" in plain
    on, off = (World(auto_length(), always(p)).run(300).length for p in (0.9, 0.0))
    assert is_on(on) and cost(on) == cost(off) == 0.03
    assert 85 < float(on.explain().split("% are accepted")[0].split()[-1]) < 95
    off_line = off.explain().split("\n")[0]
    assert off_line.startswith("drafting is off: ") and "% are accepted (0 of " in off_line
    assert off_line.endswith("x") and float(off_line.split()[-2]) < 1


def test_configuration_chooses_the_controller() -> None:
    auto = draft_length(SpeculativeConfig(draft_k="auto", max_draft_tokens=7))
    fixed = draft_length(SpeculativeConfig(draft_k=3, entropy_stop=1.0))
    assert isinstance(auto, AutoLength) and auto.limit == 7
    assert isinstance(fixed, FixedLength) and fixed.limit == 3
    assert fixed.goes_on(2, 0.9)
    for n, entropy, reason in ((3, 0.9, "length"), (0, 1.1, "entropy")):
        assert not fixed.goes_on(n, entropy) and fixed.reason == reason
    assert "always 3" in fixed.explain() and "1 nats" in fixed.explain()
    assert "no drafts" in FixedLength(0).explain()
    assert FixedLength(0).plain_steps(1) > 0
    with pytest.raises(ConfigError):
        SpeculativeConfig(rule="magic")
