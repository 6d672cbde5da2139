"""The draft-length controller in a world with its own clock: times are numbers, decisions are known.

A simulated target takes t(n) seconds for n tokens, a simulated drafter c seconds a step, and its tokens
are accepted with a probability that may depend on the entropy and may change while the world turns. One
stream decodes alone, as with a Speculator, or many share each decode, as with an Engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import SpeculativeConfig
from llamabranch.errors import ConfigError
from llamabranch.generation.drafter import propose
from llamabranch.generation.length.acceptance import Acceptance, AcceptanceCounts
from llamabranch.generation.length.auto import AutoLength, draft_length
from llamabranch.generation.length.base import DraftLength, FixedLength, RoundReport
from llamabranch.generation.length.known import Known, KnownDrafter
from llamabranch.speculative import Draft

Chance = Callable[[float], float]  # of a token, given the entropy it was drawn at


@dataclass
class World:
    """Runs rounds as a Speculator does, or an Engine with many streams; adds up tokens and seconds."""

    length: AutoLength
    chance: Chance
    c: float = 0.03  # seconds a drafted token; a plain target step takes one
    slope: float = 0.2  # seconds of the target for each further token
    entropies: tuple[float, ...] = (0.3,)  # drawn from at random
    drafter: str = "model"
    noise: float = 0.0  # how far the time of a round may be off, and the machine's speed drift
    speaks: float = 1.0  # how often the drafter has something to propose
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(2))
    n_streams: int = 1
    looks: int = 0  # steps more than were shown: a fixed length ends a draft without one
    c_slope: float = 0.0  # seconds of a draft step for each further stream that takes it
    n_tokens: int = 0
    seconds: float = 0.0
    drafted: list[int] = field(
        default_factory=list
    )  # tokens of each stream's round, -1 = not asked

    def __post_init__(self) -> None:
        shared = self.n_streams > 1
        self.streams = [self.length]  # a Speculator with one stream, as it is used by itself
        if shared:
            self.streams = [self.length.stream(shares_decode=True) for _ in range(self.n_streams)]
        self.n_behind = [1] * self.n_streams

    def time(self, n: int) -> float:
        return 1.0 + self.slope * (n - 1)

    def round(self, limit: int = 1 << 30) -> None:
        n_streams = self.n_streams
        drafts = [self._draft(i, limit) for i in range(n_streams)]
        n_decoded = n_streams + sum(n for _, _, n, _ in drafts)
        draft_s = 0.0
        n_steps = [len(shown) + self.looks * bool(n) for _, shown, n, _ in drafts]
        for step in range(max(n_steps)):
            draft_s += self.c + self.c_slope * (sum(n > step for n in n_steps) - 1)
        pace = 1.0
        if self.noise:
            pace += self.noise * math.sin(len(self.drafted) / n_streams / 150)
            pace *= 1.0 + self.noise * self.rng.uniform(-1.0, 1.0)
        verify_s = pace * self.time(n_decoded)
        for i, (length, (asked, shown, n, accepted)) in enumerate(
            zip(self.streams, drafts, strict=True)
        ):
            own_s = draft_s * n_steps[i] / max(1, sum(n_steps))
            share_s = verify_s * (1 + n) / n_decoded
            length.learn(
                RoundReport(self.drafter, asked, shown, n, accepted, 1 + n, own_s, share_s)
            )
            self.n_behind[i] = 1 if asked else self.n_behind[i] + 1
            self.n_tokens += 1 + accepted
            self.drafted.append(n if asked else -1)
        if n_streams > 1:
            self.length.learn_decode(self.streams, n_decoded, verify_s)
        self.seconds += draft_s + self.time(n_decoded)  # at one pace, so that speeds compare

    def _draft(self, i: int, limit: int) -> tuple[bool, list[float], int, int]:
        """Return whether a stream's drafter was asked, the entropies, tokens drafted and accepted."""
        length, limit = self.streams[i], min(limit, self.length.limit)
        shown: list[float] = []
        n = accepted = 0
        is_right = True
        asked = length.plain_steps(self.n_behind[i]) == 0
        if asked and length.consider(self.drafter) and self.rng.random() < self.speaks:
            while n < limit:
                shown.append(self.entropies[int(self.rng.integers(len(self.entropies)))])
                if not length.goes_on(n, shown[-1]):
                    break
                n += 1
                is_right = is_right and self.rng.random() < self.chance(shown[-1])
                accepted += is_right
        return asked, shown, n, accepted

    def run(self, n: int) -> World:
        for _ in range(n):
            self.round()
        return self

    @property
    def speed(self) -> float:
        """Over plain decoding, which emits a token of each stream a decode."""
        return self.n_tokens / self.seconds * self.time(self.n_streams) / self.n_streams

    def recent(self, n: int = 50) -> float:
        """Return the mean length of the last ``n`` drafts."""
        drafts = [k for k in self.drafted if k > 0][-n:]
        return sum(drafts) / len(drafts)


def always(p: float) -> Chance:
    return lambda entropy: p


def best_speed(p: float, c: float, slope: float, limit: int = 16, n: int = 1) -> float:
    """Return the speed of the best fixed length for n streams, by the formula.

    A draft step takes c seconds for all of them together; a draft ends after one that draws nothing, by
    which "auto" decides.
    """
    return max(
        sum(p**i for i in range(k + 1))
        * (1 + slope * (n - 1))
        / ((k + (0 < k < limit)) * c + 1 + slope * (n * (k + 1) - 1))
        for k in range(limit + 1)
    )


# -- off and on --------------------------------------------------------------------------------------


def test_useless_drafter_is_switched_off_and_costs_little() -> None:
    world = World(AutoLength(16), always(0.0)).run(4000)
    assert not world.length.is_on
    assert world.speed > 0.97
    assert sum(k > 0 for k in world.drafted[1000:]) < 30


@pytest.mark.parametrize("seed", range(5))
def test_noisy_times_do_not_make_a_useless_drafter_pay(seed: int) -> None:
    """Drafting is free and never right; only by noise do two tokens take less time than one."""
    rng = np.random.default_rng(seed)
    world = World(AutoLength(16), always(0.0), c=0.0, slope=0.2, noise=0.3, rng=rng).run(4000)
    assert world.speed > 0.97


def test_pauses_between_trials_grow() -> None:
    world = World(AutoLength(16), always(0.0)).run(6000)
    asked = np.array([i for i, k in enumerate(world.drafted) if k >= 0])
    pauses = np.diff(asked[asked > 20])
    assert len(pauses) >= 4
    assert all(b >= a for a, b in pairwise(pauses))
    assert pauses[0] >= AutoLength.COOLDOWN
    assert pauses[-1] >= AutoLength.LONGEST_COOLDOWN


def test_drafter_that_gets_better_comes_back() -> None:
    world = World(AutoLength(16), always(0.0)).run(400)
    assert world.drafted[-1] == -1
    world.chance = always(0.95)
    world.run(6000)
    assert world.length.is_on
    before = world.n_tokens, world.seconds
    world.run(300)
    speed = (world.n_tokens - before[0]) / (world.seconds - before[1])
    assert speed > 1.5


def test_drafter_that_gets_worse_is_switched_off() -> None:
    world = World(AutoLength(16), always(0.9)).run(400)
    assert world.length.is_on
    assert world.speed > 1.3
    world.chance = always(0.0)
    world.run(1500)
    assert sum(k >= 0 for k in world.drafted[-500:]) < 50


def test_drafter_as_dear_as_the_target_is_switched_off() -> None:
    world = World(AutoLength(16), always(0.6), c=1.0).run(2000)
    assert not world.length.is_on
    assert world.speed > 0.96


def test_drafter_with_empty_drafts_is_tried_again_but_not_for_ever() -> None:
    world = World(AutoLength(16), always(0.9), speaks=0.0).run(500)
    assert not any(k > 0 for k in world.drafted)
    assert world.speed == pytest.approx(1.0)
    world.speaks = 1.0
    world.run(2500)
    assert world.length.is_on
    assert world.recent() > 1


def test_trial_waits_until_reading_what_was_missed_is_cheap() -> None:
    length = AutoLength(16)
    World(length, always(0.0)).run(60)
    assert not length.is_on
    while length.plain_steps(1):
        length.learn(RoundReport("", False, (), 0, 0, 1, 0.0, 1.0))
    assert length.plain_steps(1_000_000) > 0


def test_unlucky_stretch_does_not_switch_a_good_drafter_off() -> None:
    """It has to lose the time of a few rounds: chance alone rarely takes that from one that gains."""
    worlds = [
        World(AutoLength(16), always(0.7), rng=np.random.default_rng(seed)).run(1000)
        for seed in range(10)
    ]
    not_asked = sum(k < 0 for world in worlds for k in world.drafted)
    assert not_asked < 0.03 * 10 * 1000  # the steps that measure t(1) are half of that


def test_reading_a_long_prompt_does_not_make_a_drafter_look_dear() -> None:
    """The first draft also reads the prompt, here for a hundred steps' time; later ones do not."""
    length = AutoLength(16)
    for _ in range(3):
        length.learn(RoundReport("", False, (), 0, 0, 1, 0.0, 1.0))
    assert length.plain_steps(1000) == 0
    assert length.consider("model")
    length.learn(RoundReport("model", True, (0.3,) * 4, 3, 3, 4, 100.0, 1.6, n_read=1000))
    world = World(length, always(0.8))
    world.run(300)
    assert length.is_on
    assert length.step_cost() == pytest.approx(world.c)
    assert sum(k > 0 for k in world.drafted) > 280


def test_the_step_that_ends_a_draft_and_reading_are_no_drafted_tokens_time() -> None:
    """One token is drawn, at the second step the draft ends: two steps, each a target step's time."""
    length = AutoLength(16)
    World(length, always(0.0), speaks=0.0).run(5)
    assert length.consider("model")
    for n_read, draft_s in ((1, 2.0), (2, 2.0), (5, 6.0), (1, 2.0), (8, 9.0)):
        length.learn(RoundReport("model", True, (0.3, 2.0), 1, 1, 2, draft_s, 1.2, n_read=n_read))
    assert length.step_cost() == pytest.approx(1.0)


def test_plain_steps_are_learned_together_as_one_by_one() -> None:
    one, many = AutoLength(16), AutoLength(16)
    for length in (one, many):
        World(length, always(0.0)).run(60)
        assert not length.is_on
    for _ in range(400):
        one.learn(RoundReport("", False, (), 0, 0, 1, 0.0, 1.5, 0.5))
    for _ in range(50):
        many.learn(RoundReport.plain(8, 1.5, 0.5))
    assert one.plain_steps(1) == many.plain_steps(1) == 0  # both have waited long enough
    assert one.verify_cost(2) == pytest.approx(many.verify_cost(2))


# -- how long ----------------------------------------------------------------------------------------


def test_surer_drafts_are_longer() -> None:
    lengths = [World(AutoLength(16), always(p)).run(600).recent() for p in (0.6, 0.8, 0.95)]
    assert lengths[0] < lengths[1] < lengths[2]


def test_dearer_drafts_are_shorter() -> None:
    lengths = [World(AutoLength(16), always(0.9), c=c).run(600).recent() for c in (0.01, 0.3)]
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize(
    ("p", "c", "slope", "share"),
    [(0.9, 0.1, 0.1, 0.92), (0.8, 0.05, 0.2, 0.92), (0.7, 0.02, 0.1, 0.92), (0.95, 0.3, 0.05, 0.9)],
)
def test_speed_is_near_that_of_the_best_fixed_length(
    p: float, c: float, slope: float, share: float
) -> None:
    """4000 rounds; 8 or 10 % below the formula, which knows everything and never probes."""
    world = World(AutoLength(16), always(p), c=c, slope=slope).run(4000)
    assert world.speed > share * best_speed(p, c, slope)


def test_unsure_steps_end_a_draft_and_sure_ones_do_not() -> None:
    """Where the entropy tells what stands, drafts end before the tokens that will not."""
    world = World(
        AutoLength(16), lambda h: 0.97 if h < 1 else 0.05, entropies=(0.2, 0.2, 0.2, 2.2)
    ).run(2000)
    length = world.length
    assert length.is_on
    assert length.goes_on(0, 0.2)
    assert not length.goes_on(0, 2.2)
    assert length.reason == "goodput"
    blind = World(AutoLength(16), always(0.75 * 0.97 + 0.25 * 0.05)).run(2000)
    assert world.speed > blind.speed


def test_entropies_that_failed_early_are_tried_again() -> None:
    """A run of failures at one entropy must not keep drafts short for ever."""
    lengths = []
    for seed in range(5):
        length = AutoLength(16)
        rng = np.random.default_rng(seed)
        world = World(length, always(0.9), entropies=(0.3, 3.5), rng=rng).run(3)
        for _ in range(10):
            length.learn(RoundReport("model", True, (3.5,), 1, 0, 2, world.c, world.time(2)))
            length.learn(
                RoundReport("model", True, (0.3,) * 4, 4, 4, 5, 4 * world.c, world.time(5))
            )
        assert not length.goes_on(0, 3.5)
        assert length.goes_on(0, 0.3)
        assert length.is_on
        world.run(500)
        assert length.goes_on(0, 3.5)
        lengths.append(world.recent())
    assert sum(lengths) / len(lengths) > 5


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_draft_is_never_longer_than_the_limit(limit: int) -> None:
    world = World(AutoLength(limit), always(0.99), c=0.001, slope=0.0).run(300)
    assert max(world.drafted) == limit
    assert not world.length.goes_on(limit, 0.0)
    assert world.length.reason == "length"


def test_entropy_stop_comes_before_everything_but_the_limit() -> None:
    world = World(AutoLength(16, entropy_stop=1.0), always(0.95), entropies=(0.2, 1.5), slope=0.01)
    asked: list[tuple[int, float, bool]] = []
    inner = world.length.goes_on

    def goes_on(n_drafted: int, entropy: float) -> bool:
        asked.append((n_drafted, entropy, inner(n_drafted, entropy)))
        return asked[-1][2]

    world.length.goes_on = goes_on  # type: ignore[method-assign]
    world.run(200)
    assert not any(on for _, entropy, on in asked if entropy > 1.0)
    assert any(on for _, entropy, on in asked if entropy < 1.0)
    assert not inner(0, 1.5)
    assert world.length.reason == "entropy"


def test_wider_drafts_are_charged_for_their_nodes() -> None:
    """A tree of width 4 makes the target verify four tokens a level."""
    narrow, wide = AutoLength(16, width=1), AutoLength(16, width=4)
    for length in (narrow, wide):
        for n in (1, 2, 4, 8, 16, 32, 64):
            length.learn(RoundReport("", False, (), 0, 0, n, 0.0, 1.0 + 0.1 * (n - 1)))
        length.consider("m")
        for _ in range(100):
            length.learn(RoundReport("m", True, (0.3,) * 4, 4, 3, 5, 0.2, 1.4))
    assert narrow.best()[0] > wide.best()[0]
    assert narrow.best()[1] > wide.best()[1]


# -- many streams in one decode ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "p", "c", "slope"), [(4, 0.8, 0.1, 0.1), (8, 0.9, 0.3, 0.05), (16, 0.7, 0.1, 0.02)]
)
def test_speed_of_many_streams_is_near_that_of_the_best_fixed_length(
    n: int, p: float, c: float, slope: float
) -> None:
    """600 rounds; 8 % below the formula, as with one stream."""
    world = World(AutoLength(16), always(p), c=c, slope=slope, n_streams=n).run(600)
    assert world.speed > 0.92 * best_speed(p, c, slope, n=n)


def test_more_streams_draft_less() -> None:
    """What one stream's draft adds to the decode is the same, and a plain token becomes cheaper."""
    lengths = [
        World(AutoLength(16), always(0.85), slope=0.1, n_streams=n).run(1200 // n).recent()
        for n in (1, 4, 12)
    ]
    assert lengths[0] > lengths[1] > lengths[2]


@pytest.mark.parametrize(
    ("p", "slope", "noise"), [(0.0, 0.05, 0.3), (0.8, 0.9, 0.0), (0.5, 0.5, 0.2)]
)
def test_drafts_that_do_not_pay_in_a_shared_decode_are_switched_off(
    p: float, slope: float, noise: float
) -> None:
    """Eight streams: either nothing is accepted, or a token costs nearly as much as in a decode alone."""
    world = World(AutoLength(16), always(p), slope=slope, noise=noise, n_streams=8).run(1000)
    assert not world.length.is_on
    assert world.speed > 0.97


def test_trial_of_many_streams_lengthens_the_cooldown_once() -> None:
    """All eight try in the same round; the first that reports decides for all."""
    world = World(AutoLength(16), always(0.0), n_streams=8).run(1200)
    rounds = np.array(world.drafted).reshape(-1, 8)
    asked = np.flatnonzero((rounds >= 0).any(axis=1))
    pauses = np.diff(asked[asked > 30])
    assert len(pauses) >= 3
    assert all(1.5 * a < b < 2.5 * a for a, b in pairwise(pauses[:3]))


def test_single_slow_decode_does_not_switch_many_streams_off() -> None:
    """Each stream reports the same slow decode: together they count it once."""
    world = World(AutoLength(16), always(0.8), slope=0.05, n_streams=8).run(100)
    assert world.length.is_on
    world.slope *= 3
    world.round()
    world.slope /= 3
    world.run(20)
    assert world.length.is_on
    assert all(n > 0 for n in world.drafted[-8:])


def test_streams_that_draft_in_turns_do_not_disturb_each_other() -> None:
    """How sure a draft still is belongs to its stream, as does why it ended."""
    world = World(AutoLength(16), always(0.8), entropies=(0.3, 4.0)).run(300)
    alone = world.length.stream()
    assert alone.consider("model")
    n_alone = next(n for n in range(17) if not alone.goes_on(n, 0.3))
    one, other = world.length.stream(), world.length.stream()
    assert one.consider("model") and other.consider("model")
    n = 0
    while one.goes_on(n, 0.3):
        other.goes_on(n, 4.0)
        n += 1
    assert n == n_alone > 0
    assert not other.goes_on(other.limit, 0.0)
    assert (one.reason, other.reason) == ("goodput", "length")


def test_decode_that_also_read_prompts_is_not_learned() -> None:
    world = World(AutoLength(16), always(0.8), n_streams=4).run(50)
    costs = [world.length.verify_cost(n) for n in (4, 8, 20)]
    for stream in world.streams:
        stream.learn(RoundReport("model", True, (0.3,), 1, 1, 2, 0.03, 100.0))
    world.length.learn_decode(world.streams, 8, math.nan)
    for stream in world.streams:
        stream.learn(RoundReport.plain(1, 0.5, 0.0))
    world.length.learn_decode(
        world.streams, 4, world.time(4)
    )  # the reports above are not used here
    assert [world.length.verify_cost(n) for n in (4, 8, 20)] == pytest.approx(costs)
    assert world.length.is_on


# -- costs and profiles ------------------------------------------------------------------------------


def test_costs_are_measured_interpolated_and_extrapolated() -> None:
    length = AutoLength(16)
    assert math.isnan(length.step_cost())
    assert math.isnan(length.verify_cost(3))
    for n, seconds in ((1, 1.0), (3, 1.4), (5, 2.0)):
        length.learn(RoundReport("", False, (), 0, 0, n, 0.0, seconds))
    assert [length.verify_cost(n) for n in (1, 2, 3, 4, 5, 7)] == pytest.approx(
        [1.0, 1.2, 1.4, 1.7, 2.0, 2.6]
    )


def test_single_slow_round_moves_little() -> None:
    length = AutoLength(16)
    for seconds in (1.0, 1.0, 50.0):
        length.learn(RoundReport("", False, (), 0, 0, 1, 0.0, seconds))
    length.learn(RoundReport("", False, (), 0, 0, 2, 0.0, 1.2))
    assert length.verify_cost(2) == pytest.approx(1.2 / 1.1)


def test_drafters_of_a_chain_have_profiles_of_their_own() -> None:
    """Copies are free and right, the model dear and wrong: each is treated by what it has shown."""
    length = AutoLength(8)
    copies = World(length, always(0.98), c=0.001, drafter="lookup")
    copies.run(100)
    model = World(length, always(0.0), c=0.5, drafter="model")
    for _ in range(60):
        copies.round()
        if length.is_on:
            model.round()
    assert length.consider("lookup")
    assert length.goes_on(0, 0.3)
    sure = length.best()
    cost = length.step_cost()
    assert not length.consider("model")  # it alone is switched off
    assert length.best()[1] < sure[1]
    assert length.step_cost() > 10 * cost


# -- what is known before a run ----------------------------------------------------------------------

PADDED = [(0.4, 0.05, 0.02), (0.5, 0.1, 0.02), (0.5, 0.05, 0.05), (0.6, 0.1, 0.05)]  # p, c, slope


def first_tokens(make: Callable[[], DraftLength], n: int, n_texts: int, **options: Any) -> float:
    """Return the speed over plain decoding of texts of ``n`` tokens, each with a new controller."""
    n_tokens, seconds = 0, 0.0
    for seed in range(n_texts):
        rng = np.random.default_rng(seed)
        world = World(make(), rng=rng, **options)  # type: ignore[arg-type]
        while world.n_tokens < n:
            world.round(n - world.n_tokens - 1)
        n_tokens += world.n_tokens
        seconds += world.seconds
    return n_tokens / seconds


def earlier_run(**options: Any) -> Known:
    """Return what a controller finds out in 400 tokens of a world."""
    length = AutoLength(16)
    world = World(length, rng=np.random.default_rng(99), **options)
    while world.n_tokens < 400:
        world.round()
    findings = length.findings()
    assert findings is not None
    drafters = {
        name: KnownDrafter(found.counts, found.cost, "an earlier run")
        for name, found in findings.drafters.items()
    }
    return Known(findings.target_s, "an earlier run", drafters)


def claim(chance: float, c: float, slope: float) -> Known:
    """Return what a long run in such a world would have found out."""
    n = AcceptanceCounts.SIZE
    counts = AcceptanceCounts((64.0,) * n, (64.0 * chance,) * n, (20.0,) * n)
    seconds = {i: 1.0 + slope * (i - 1) for i in (1, 2, 3, 5, 9, 17)}
    return Known(seconds, "a claim", {"model": KnownDrafter(counts, c, "a claim")})


@pytest.mark.parametrize(("p", "c", "slope"), PADDED)
def test_first_hundred_tokens_are_near_the_best_fixed_length(
    p: float, c: float, slope: float
) -> None:
    """Targets of which drafting is a small part, and whose v(n) is nearly flat."""
    options: dict[str, Any] = {"chance": always(p), "c": c, "slope": slope}
    fixed = [partial(FixedLength, k) for k in range(1, 6)]
    best = max(first_tokens(each, 100, 40, looks=1, **options) for each in fixed)
    known = earlier_run(**options)
    share = 0.92 if (p, c) == (0.5, 0.1) else 0.97  # a look, which is billed, costs most there
    assert first_tokens(lambda: AutoLength(16, known=known), 100, 40, **options) > share * best
    assert first_tokens(lambda: AutoLength(16), 100, 40, **options) > 0.9 * best


@pytest.mark.parametrize("chance", [0.5, 0.9, 0.98])
@pytest.mark.parametrize(("c", "slope"), [(0.05, 0.02), (0.1, 0.05)])
def test_profile_that_promises_what_is_not_so_costs_little(
    chance: float, c: float, slope: float
) -> None:
    """Nothing is accepted."""
    options: dict[str, Any] = {"chance": always(0.0), "c": c, "slope": slope}
    known = claim(chance, c, slope)
    assert first_tokens(lambda: AutoLength(16, known=known), 100, 10, **options) > 0.97
    cheap = claim(chance, c / 10, slope / 20)
    assert first_tokens(lambda: AutoLength(16, known=cheap), 300, 10, **options) > 0.97


@pytest.mark.parametrize(("p", "c", "slope"), [*PADDED, (0.9, 0.05, 0.02), (0.9, 0.03, 0.2)])
def test_profile_that_promises_nothing_is_not_believed_for_long(
    p: float, c: float, slope: float
) -> None:
    options: dict[str, Any] = {"chance": always(p), "c": c, "slope": slope}
    known = claim(0.0, c, slope)
    fresh = first_tokens(lambda: AutoLength(16), 300, 10, **options)
    assert first_tokens(lambda: AutoLength(16, known=known), 300, 10, **options) > 0.9 * fresh


def test_known_times_follow_the_speed_of_the_machine() -> None:
    """It is three times slower than it was: v(n) and c are as known, after a single decode."""
    length = AutoLength(16, known=claim(0.7, 0.1, 0.05))
    assert length.plain_steps(1) == 0 and length.consider("model")
    assert length.step_cost() == pytest.approx(0.1)
    length.learn(RoundReport("model", True, (0.3,) * 3, 3, 2, 4, 0.9, 3 * 1.15))
    assert length.verify_cost(17) == pytest.approx(1.8, rel=0.3)
    for _ in range(20):
        length.learn(RoundReport("model", True, (0.3,) * 3, 3, 2, 4, 0.9, 3 * 1.15))
    assert length.verify_cost(17) == pytest.approx(1.8, rel=0.05)
    assert length.step_cost() == pytest.approx(0.1, rel=0.05)


def test_known_acceptance_is_used_until_it_is_improbable() -> None:
    found = Acceptance()
    counts = claim(0.8, 0.1, 0.1).drafters["model"].counts
    found.start_from(counts)
    assert found.mean == pytest.approx(0.8)
    for accepted in (4, 3, 4, 2, 4):
        found.learn((0.3,) * 4, 4, accepted)
    was_kept = found.is_kept
    for _ in range(12):
        found.learn((0.3,) * 4, 4, 0)
    assert (was_kept, found.is_kept) == (True, False)
    fresh = Acceptance()
    for accepted in (4, 3, 4, 2, 4, *([0] * 12)):
        fresh.learn((0.3,) * 4, 4, accepted)
    assert found.counts().tested == pytest.approx(fresh.counts().tested)
    assert found.counts().accepted == pytest.approx(fresh.counts().accepted)
    assert found.counts().drawn == pytest.approx(fresh.counts().drawn)


def test_findings_need_a_plain_step() -> None:
    length = AutoLength(16)
    assert length.findings() is None
    length.learn(RoundReport("model", True, (0.3,), 1, 1, 2, 0.1, 1.1))
    assert length.findings() is None
    length.learn(RoundReport.plain(2, 1.0, 0.0))
    findings = length.findings()
    assert findings is not None
    assert findings.n_decodes == {1: 2, 2: 1}
    assert findings.target_s[2] / findings.target_s[1] == pytest.approx(1.1)
    assert findings.drafters["model"].cost == pytest.approx(0.1)


# -- drafters that fill only their tokens ------------------------------------------------------------


@dataclass
class BareLine:
    """Proposes ``draft`` after any text, and asks nobody how long it should be.

    ``truth``, where given, is what the target says: it is copied, else its tokens are lies.
    """

    n: int = 5
    truth: Sequence[int] = ()
    start: int = 0

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        at = len(tokens) - self.start
        if self.truth:
            return Draft(tokens=list(self.truth[at : at + min(self.n, limit)]))
        return Draft(tokens=[2 + len(tokens) % 50] * min(self.n, limit))

    def observe(self, n_tokens: int) -> None:
        return None

    def fork(self, target: lb.speculative.Text) -> BareLine:
        return self

    def close(self) -> None:
        return None


@dataclass
class BareDrafter(lb.Drafter):
    truth: Sequence[int] = ()
    name: str = "bare"

    def check(self, target: lb.Model) -> None:
        """Fit anything."""

    def start(self, target: lb.speculative.Text, rule: str) -> BareLine:
        return BareLine(truth=self.truth, start=target.position)


def _run_bare(p: float, n_rounds: int) -> tuple[AutoLength, list[int], float]:
    """Return the controller, the drafts' lengths and the speed over plain decoding."""
    length, line = AutoLength(16), BareLine(n=6)
    rng = np.random.default_rng(3)
    n_tokens, seconds, drafted = 0, 0.0, []
    for _ in range(n_rounds):
        draft = Draft(stopped="off")
        if length.plain_steps(1) == 0:
            draft = propose(line, [0], length, 16)
        n = draft.n_steps
        accepted = 0
        while accepted < n and rng.random() < p:
            accepted += 1
        spent = 1.0 + 0.2 * n
        length.learn(
            RoundReport(
                "", draft.stopped != "off", draft.entropies, n, accepted, 1 + n, 0.01 * n, spent
            )
        )
        n_tokens += 1 + accepted
        seconds += spent + 0.01 * n
        drafted.append(n)
    return length, drafted, n_tokens / seconds


def test_drafter_that_fills_only_tokens_is_switched_off_where_it_does_not_pay() -> None:
    length, drafted, speed = _run_bare(0.0, 3000)
    assert not length.is_on
    assert max(drafted) <= AutoLength.WARM_UP_K
    assert sum(n > 0 for n in drafted[1000:]) < 30
    assert speed > 0.97
    assert "drafting is off" in length.explain()
    assert float(length.explain().split("% are accepted")[0].split()[-1]) < 10


def test_drafter_that_fills_only_tokens_is_used_where_it_pays() -> None:
    length, drafted, speed = _run_bare(0.9, 1000)
    assert length.is_on
    assert sum(drafted[-100:]) > 4 * 100
    assert speed > 1.5
    assert float(length.explain().split("% are accepted")[0].split()[-1]) >= 80


def test_bare_draft_is_cut_by_length_alone_and_never_changed_in_place() -> None:
    class Short(FixedLength):
        reads_entropy = True

    length = Short(2)
    length.reads_entropy = True
    kept = Draft(tokens=[5, 6, 7, 8], parents=[-1, -1, 0, 2])

    class Keeper(BareLine):
        def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
            return kept

    cut = propose(Keeper(), [0], length, 16)
    assert (cut.tokens, cut.parents, cut.stopped) == ([5, 6, 7], [-1, -1, 0], "length")
    assert cut.seconds > 0
    assert len(cut.entropies) == 3 and all(map(math.isnan, cut.entropies))
    assert (kept.tokens, kept.entropies, kept.seconds) == ([5, 6, 7, 8], [], 0.0)


@pytest.mark.parametrize("honest", [True, False])
def test_bare_drafter_under_auto_is_measured_and_the_text_is_plain(
    ctx: lb.Context, honest: bool
) -> None:
    """In 0.1 it drafted 157 tokens, 14 of which stood, and was "still measuring"."""
    settings = lb.SamplingParams(temperature=0.8, seed=3)
    prompt = ctx.tokenize("Once upon a time")
    plain = lb.Speculator(ctx).generate(prompt, max_tokens=60, sampling=settings).finish().tokens
    # Generation draws the first token before it asks anybody.
    drafter = BareDrafter(truth=plain if honest else ())
    config = SpeculativeConfig(draft_k="auto")
    speculator = lb.Speculator(ctx, drafter, config)
    drafted = speculator.generate(prompt, max_tokens=60, sampling=settings).finish()
    assert drafted.tokens == plain
    assert drafted.stats.num_draft_tokens > 0
    assert drafted.stats.draft_time_s > 0
    said = speculator.explain()
    assert "still measuring" not in said
    chance = float(said.split("% are accepted")[0].split()[-1])
    assert (chance > 50) == honest
    if not honest:  # never more at once than a warm-up tries
        assert drafted.stats.num_draft_tokens <= 3 * drafted.stats.num_drafts


def test_bare_drafter_of_an_engine_is_measured_too(ctx: lb.Context) -> None:
    engine = lb.Engine(ctx, BareDrafter(), SpeculativeConfig(draft_k="auto"))
    settings = lb.SamplingParams(temperature=0.8, seed=3)
    engine.generate([lb.Request("Once upon a time", max_tokens=40, sampling=settings)])
    said = engine.explain()
    assert "unknown" not in said
    assert float(said.split("% are accepted")[0].split()[-1]) < 50


# -- words -------------------------------------------------------------------------------------------


def test_explanation_says_what_and_why() -> None:
    assert "no plain step and no draft yet" in AutoLength(16).explain()
    plain = World(AutoLength(16), always(0.9), speaks=0.0).run(10).length.explain()
    assert "still measuring: no draft yet" in plain
    on = World(AutoLength(16), always(0.9)).run(300).length.explain()
    why, details = on.split("\n")
    assert why.startswith("drafting is on: a drafted token costs 0.03 of a target's step, about ")
    assert "tokens a draft" in why
    assert 85 < float(why.split("% are accepted")[0].split()[-1]) < 95
    assert "2 tokens v = 1.20" in details or "v = 1." in details
    off = World(AutoLength(16), always(0.0)).run(300).length.explain().split("\n")[0]
    assert off.startswith("drafting is off: a drafted token costs 0.03 of a target's step, about ")
    assert "% are accepted (0 of " in off
    assert off.endswith("x") and float(off.split("at best ")[1].split()[0]) < 1


def test_configuration_chooses_the_controller() -> None:
    auto = draft_length(SpeculativeConfig(draft_k="auto", max_draft_tokens=7))
    assert isinstance(auto, AutoLength)
    assert auto.limit == 7
    fixed = draft_length(SpeculativeConfig(draft_k=3, entropy_stop=1.0))
    assert isinstance(fixed, FixedLength)
    assert fixed.limit == 3
    assert fixed.goes_on(2, 0.9)
    assert not fixed.goes_on(3, 0.9)
    assert fixed.reason == "length"
    assert not fixed.goes_on(0, 1.1)
    assert fixed.reason == "entropy"
    assert "always 3" in fixed.explain()
    assert "1 nats" in fixed.explain()
    assert "no drafts" in FixedLength(0).explain()
    assert FixedLength(0).plain_steps(1) > 0
    with pytest.raises(ConfigError):
        SpeculativeConfig(rule="magic")
