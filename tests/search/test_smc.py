"""smc: every run enumerated, so that expectation and variance are exact; identities, accounts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from enumeration import EOG, PLAIN, OneB, ended, every_text, toy_of_letters
from test_every_search import Short

from llamabranch import Branch, Context, Distribution, search
from llamabranch.errors import UsageError
from llamabranch.sampling.constraint import ConstraintCalls
from llamabranch.search import particles as module
from llamabranch.search.frontier import Frontier
from llamabranch.search.particles import Following
from llamabranch.search.resampling import SCHEMES, ancestors

STORY = "Once upon a time there was"


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    with toy_of_letters(tmp_path_factory, "ab") as context:
        yield context


@pytest.fixture
def root(little: Context) -> Iterator[Branch]:
    with Branch.start(little, "ab", sampling=PLAIN) as branch:
        yield branch


class Script:
    """The random choices of one run, and the probability of making them."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.widths: list[int] = []
        self.probability = 1.0

    def pick(self, probabilities: Sequence[float]) -> int:
        at = len(self.widths)
        if at == len(self.choices):
            self.choices.append(0)
        self.widths.append(len(probabilities))
        self.probability *= probabilities[self.choices[at]]
        return self.choices[at]

    def following(self) -> list[int] | None:
        """Return the choices of the next run, None after the last."""
        choices = self.choices[: len(self.widths)]
        while choices and choices[-1] + 1 == self.widths[len(choices) - 1]:
            choices.pop()
        if not choices:
            return None
        choices[-1] += 1
        return choices

    # As the draws of a run:

    def token(self, source: Distribution | Following, step: int, slot: int) -> int:
        proposal = source if isinstance(source, Distribution) else source.target
        return int(proposal.ids[self.pick(proposal.probs.tolist())])

    def order(self, source: Distribution, step: int, slot: int) -> Iterator[int]:
        probs = source.probs.tolist()
        left = list(range(len(probs)))
        while left:
            total = sum(probs[i] for i in left)
            yield left.pop(self.pick([probs[i] / total for i in left]))

    def uniform(self, step: int, index: int) -> float:
        raise AssertionError("the test replaces resampling's uniform numbers")


class SharedNoise(Script):
    """What happens if the seed depends only on the step: all slots draw with the same noise."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__(choices)
        self._known: dict[int, int] = {}

    def token(self, source: Distribution | Following, step: int, slot: int) -> int:
        if slot == 0:
            self._known[step] = super().token(source, step, slot)
        return self._known[step]


def enumerated(script: Script) -> Callable[..., list[int]]:
    """Return ``ancestors`` with uniform numbers that take one value of each piece between thresholds."""

    def choose(scheme: str, weights: npt.NDArray[np.float64], _: object) -> list[int]:
        n = len(weights)
        known: dict[int, float] = {}

        def uniform(i: int) -> float:
            if i not in known:
                sums = np.cumsum(weights)
                if scheme == "systematic":
                    cuts = {float(n * c - j) for c in sums for j in range(n)}
                elif scheme == "stratified":
                    cuts = {float(n * c - i) for c in sums}
                elif scheme == "multinomial":
                    cuts = set(map(float, sums))
                else:
                    rest = weights * n - np.floor(weights * n + 1e-12)
                    cuts = set(map(float, np.cumsum(rest / rest.sum())))
                ends = sorted({0.0, 1.0, *(c for c in cuts if 1e-14 < c < 1 - 1e-14)})
                pieces = list(itertools.pairwise(ends))
                low, high = pieces[script.pick([b - a for a, b in pieces])]
                known[i] = (low + high) / 2
            return known[i]

        return ancestors(scheme, weights, uniform)

    return choose


def moments(
    root: Branch, n: int, max_tokens: int, kind: type[Script] = Script, **options: Any
) -> tuple[float, float, dict[str, float]]:
    """Return E[Z], Var[Z] and E[Z x share of each text], over all runs of the filter."""
    first = second = total = 0.0
    texts: dict[str, float] = {}
    choices: list[int] | None = []
    while choices is not None:
        script = kind(choices)
        with pytest.MonkeyPatch.context() as patch, Frontier(root) as lines:
            patch.setattr(module, "ancestors", enumerated(script))
            result = module.run_particles(lines, n, max_tokens, script, module.Filter(**options))
        assert result.log_evidence is not None
        z, p = math.exp(result.log_evidence), script.probability
        total, first, second = total + p, first + p * z, second + p * z * z
        for h in result.hypotheses:
            texts[h.text] = texts.get(h.text, 0.0) + p * z * math.exp(h.score)
        choices = script.following()
    assert total == pytest.approx(1.0, abs=1e-12)
    return first, second - first * first, texts


def by_text(root: Branch, weights: dict[tuple[int, ...], float]) -> dict[str, float]:
    """Sum the weights of tokens with the same text: BOS has none."""
    shares: dict[str, float] = {}
    for tokens, weight in weights.items():
        if weight > 0.0:
            text = root.ctx.model.detokenize([t for t in tokens if t != EOG])
            shares[text] = shares.get(text, 0.0) + weight
    return shares


def exact(
    root: Branch, max_tokens: int, weight: Callable[[str], float], power: float = 1.0
) -> dict[str, float]:
    """Return probability ** power x weight of every text of at most ``max_tokens`` that ends with EOG."""
    texts = by_text(root, {t: p**power for t, p in ended(root, max_tokens, PLAIN).items()})
    return {text: p * weight(text) for text, p in texts.items() if weight(text) > 0.0}


class LikesB(search.Potential):
    """Texts with many b; a prefix counts a little less than the whole."""

    def prefix(self, text: str) -> float:
        return 0.7 * text.count("b")

    def complete(self, text: str) -> float:
        return 1.1 * text.count("b") - 0.2 * text.count("a")


def likes_b(text: str) -> float:
    return math.exp(LikesB().complete(text))


def one_b() -> ConstraintCalls:
    return ConstraintCalls(OneB())


def flat(text: str, target: Distribution) -> Distribution:
    return Distribution.from_probs(np.full(len(target), 1.0), target.ids)


def cold(text: str, target: Distribution) -> Distribution:
    return Distribution.from_probs(target.probs**2, target.ids)


def critic(text: str) -> float:
    return 2.0 if text.startswith("a") else -1.0


def check(
    root: Branch, n: int, max_tokens: int, expected: dict[str, float], **options: Any
) -> None:
    """Assert that E[Z] and E[Z x share of each text] are exactly these."""
    mean, _, texts = moments(root, n, max_tokens, **options)
    assert mean == pytest.approx(sum(expected.values()), abs=1e-12)
    assert texts == pytest.approx(expected, abs=1e-12)


CASES = [("systematic", 0.0), ("systematic", 0.9), *((scheme, 1.0) for scheme in SCHEMES)]


@pytest.mark.parametrize(
    "options",
    [
        *({"resampling": scheme, "threshold": threshold} for scheme, threshold in CASES),
        {"threshold": 1.0, "proposal": flat},
        {"threshold": 1.0, "critic": critic},
    ],
    ids=lambda options: "-".join(getattr(v, "__name__", str(v)) for v in options.values()),
)
def test_evidence_and_weighted_texts_are_unbiased(root: Branch, options: dict[str, Any]) -> None:
    """A proposal and a critic change no expectation."""
    expected = exact(root, 2, likes_b)
    check(root, 2, 2, expected, potentials=[LikesB()], **options)


RULE = 'root ::= "ab" | "b" "b"? | "aab" | "a"'


@pytest.fixture
def bound(little: Context) -> Iterator[Branch]:
    with Branch.start(little, "ab", sampling=PLAIN, grammar=RULE) as branch:
        yield branch


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("constraint", [None, one_b], ids=["free", "one b"])
def test_a_grammar_is_weighted_by_the_mass_it_keeps(
    root: Branch, bound: Branch, constraint: Any, power: float
) -> None:
    """Particles with more than two tokens die. The grammar forbids BOS, which has no text."""
    every = {t: p**power for t, p in ended(root, 2, PLAIN).items() if 0 not in t}
    allowed = {"ab", "b"} if constraint else {"ab", "b", "bb", "a"}
    expected = {text: p for text, p in by_text(root, every).items() if text in allowed}
    for ramp in (0, 1):
        check(
            bound, 1 + (constraint is None), 2, expected, power=power, ramp=ramp,
            threshold=1.0, constraint=constraint and constraint(),
        )  # fmt: skip


# Particles, tokens and the threshold of resampling.
SIZES = [(1, 2, 0.0), (2, 1, 1.0), (2, 2, 1.0)]
Size = tuple[int, int, float]


@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.parametrize("max_rejects", [1, 2, 3, 64])
@pytest.mark.parametrize("proposal", [None, cold], ids=["model", "cold"])
def test_weights_under_a_constraint_are_exact(
    root: Branch, size: Size, max_rejects: int, proposal: Any
) -> None:
    n, max_tokens, threshold = size
    expected = exact(root, max_tokens, lambda text: float(OneB().complete(text)))
    check(
        root, n, max_tokens, expected, constraint=one_b(), max_rejects=max_rejects,
        threshold=threshold, proposal=proposal,
    )  # fmt: skip


def test_a_constraint_beside_a_potential_and_cut_texts(root: Branch) -> None:
    both = exact(root, 2, lambda text: OneB().complete(text) * likes_b(text))
    check(root, 1, 2, both, constraint=one_b(), potentials=[LikesB()])
    cut = {t: p for t, p in every_text(root, 2, PLAIN).items() if len(t) == 2 or t[-1] == EOG}
    assert sum(cut.values()) == pytest.approx(1.0)
    mean, _, _ = moments(root, 2, 2, force_end=False, threshold=1.0)
    assert mean == pytest.approx(1.0, abs=1e-12)
    expected = {text: p for text, p in by_text(root, cut).items() if OneB().complete(text)}
    check(root, 1, 2, expected, constraint=one_b(), force_end=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("power", "ramp"), [(2.0, 0), (0.5, 0), (3.0, 1), (3.0, 2), (2.0, 9)])
def test_a_power_of_whole_texts_is_exact(root: Branch, size: Size, power: float, ramp: int) -> None:
    n, max_tokens, threshold = size
    expected = exact(root, max_tokens, lambda text: 1.0, power)
    check(root, n, max_tokens, expected, threshold=threshold, power=power, ramp=ramp)


def test_options_that_change_nothing_change_no_particle_and_others_do(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        free = search.smc(root, 4, 10)
        for options in ({"power": 1.0, "ramp": 3}, {"constraint": lambda text: True}):
            same = search.smc(root, 4, 10, **options)
            assert [h.tokens for h in same.hypotheses] == [h.tokens for h in free.hypotheses]
            assert same.log_evidence == pytest.approx(free.log_evidence, abs=1e-12)
        sharp = search.smc(root, 8, 10, power=4.0, force_end=False)
        assert max(h.logprob for h in sharp.hypotheses) > max(h.logprob for h in free.hypotheses)
        free = search.smc(root, 8, 12, stop=["."], force_end=False)
        result = search.smc(
            root, 8, 12, stop=["."], force_end=False, constraint=lambda text: "e" not in text
        )
        assert result.hypotheses and all("e" not in h.text for h in result.hypotheses)
        assert result.log_evidence is not None and result.log_evidence < 0.0
        assert any("e" in h.text for h in free.hypotheses)
        none = search.smc(root, 4, 6, constraint=lambda text: len(text) < 4 and text != "")
        assert not none.hypotheses and none.log_evidence == -math.inf


def test_slots_draw_independently_and_sharing_noise_doubles_the_variance(root: Branch) -> None:
    """Unbiasedness does not show shared noise; the variance does."""
    options: dict[str, Any] = {"potentials": [LikesB()], "threshold": 0.0}
    mean, variance_1, _ = moments(root, 1, 2, **options)
    same, variance_2, _ = moments(root, 2, 2, **options)
    trap, shared, _ = moments(root, 2, 2, SharedNoise, **options)
    assert (same, trap) == pytest.approx((mean, mean), abs=1e-12)
    assert (variance_2, shared) == pytest.approx((variance_1 / 2, variance_1), abs=1e-12)


def test_no_two_draws_of_a_run_share_their_noise() -> None:
    seen = []

    class Recorder(Distribution):
        def draw(self, seed: int, position: int, purpose: int = 0) -> int:
            seen.append((seed, position))
            return 0

    draws = module.SeededDraws(7, 11, 5)
    proposal = Recorder(np.array([0], dtype=np.int32), np.zeros(1))
    for step, slot in itertools.product(range(9), range(5)):
        draws.token(proposal, step, slot)
    assert len(set(seen)) == 45
    alone = module.SeededDraws(7, 11, 1)
    seen.clear()
    alone.token(proposal, 4, 0)
    assert seen == [(7, 15)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_slot_is_taken_as_often_as_its_weight_says(scheme: str) -> None:
    weights = np.array([0.0, 0.45, 0.05, 0.3, 0.2])
    counts, script = np.zeros(5), Script([])
    choices: list[int] | None = []
    while choices is not None:
        script = Script(choices)
        chosen = enumerated(script)(scheme, weights, None)
        assert len(chosen) == 5
        assert chosen == sorted(chosen)
        counts += script.probability * np.bincount(chosen, minlength=5)
        if scheme == "systematic":
            copies = np.bincount(chosen, minlength=5)
            assert (np.abs(copies - 5 * weights) < 1).all()
        choices = script.following()
    assert counts == pytest.approx(5 * weights, abs=1e-9)


# -- on a real model ---------------------------------------------------------------------------------


def test_shares_sum_to_one_and_equal_texts_are_merged(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN, grammar='root ::= " a" | " no"') as root:
        result = search.smc(root, 8, 4)
    assert len({h.text for h in result.hypotheses}) == len(result.hypotheses) <= 2
    assert sum(math.exp(h.score) for h in result.hypotheses) == pytest.approx(1.0)
    assert result.log_evidence is not None
    assert result.log_evidence < 0


def test_effective_sizes_tell_how_unequal_the_weights_are(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        equal = search.smc(root, 6, 8, force_end=False)
        unequal = search.smc(root, 6, 8, potentials=[Short()], threshold=0.0)
        resampled = search.smc(root, 6, 8, potentials=[Short()], threshold=1.0)
    assert equal.effective_sizes == pytest.approx([6.0] * len(equal.effective_sizes))
    assert len(unequal.hypotheses) == 6  # so that each share is that of one particle
    shares = [math.exp(hypothesis.score) for hypothesis in unequal.hypotheses]
    assert unequal.effective_sizes[-1] == pytest.approx(1 / sum(share**2 for share in shares))
    assert 1.0 <= unequal.effective_sizes[-1] < 6.0
    assert resampled.effective_sizes[0] == unequal.effective_sizes[0]
    assert min(resampled.effective_sizes) > min(unequal.effective_sizes)


@pytest.mark.parametrize("grammar", [None, 'root ::= "x"{40}'], ids=["potential", "grammar"])
def test_nothing_possible_is_no_hypothesis(ctx: Context, grammar: str | None) -> None:
    """The estimate of the evidence is 0, and there is nothing to choose from."""

    class Never(search.Potential):
        def prefix(self, text: str) -> float:
            return -math.inf if text else 0.0

    with Branch.start(ctx, STORY, sampling=PLAIN, grammar=grammar) as root:
        result = search.smc(root, 4, 5, potentials=[] if grammar else [Never()])
    assert result.hypotheses == [] and result.text == ""
    assert result.log_evidence == -math.inf
    assert result.effective_sizes[-1] == 0.0
    with pytest.raises(UsageError, match="no text"):
        _ = result.best
