"""The searches among the examples: particles, power sampling, rejection, against all texts of a toy."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from departure import departure
from enumeration import EOG, PLAIN, ended, every_text, toy_of_letters

from llamabranch import Branch, Context

EXAMPLES = Path(__file__).parents[2] / "examples"
RULE = 'root ::= "ab" | "b" "b"? | "aab" | "a"'


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    with toy_of_letters(tmp_path_factory, "ab") as context:
        yield context


@pytest.fixture
def root(little: Context) -> Iterator[Branch]:
    with Branch.start(little, "ab", sampling=PLAIN) as branch:
        yield branch


class Script:
    """A generator of random numbers: the choices of one run, and the probability of making them."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.widths: list[int] = []
        self.probability = 1.0

    def choice(self, n: int, p: Sequence[float]) -> int:
        at = len(self.widths)
        if at == len(self.choices):
            self.choices.append(0)
        self.widths.append(n)
        self.probability *= p[self.choices[at]]
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


def expectation(run: Any) -> tuple[dict[str, float], float]:
    """Return the mean weight of each text over all runs, and the variance of the sum of the weights."""
    texts: Counter[str] = Counter()
    total, second = 0.0, 0.0
    choices: list[int] | None = []
    while choices is not None:
        script = Script(choices)
        weights = run(script)
        for text, weight in weights.items():
            texts[text] += script.probability * weight
        total += script.probability
        second += script.probability * sum(weights.values()) ** 2
        choices = script.following()
    assert total == pytest.approx(1.0, abs=1e-12)
    return dict(texts), second - sum(texts.values()) ** 2


def by_text(root: Branch, weights: dict[tuple[int, ...], float]) -> dict[str, float]:
    """Sum the weights of tokens with the same text: BOS has none."""
    shares: dict[str, float] = {}
    for tokens, weight in weights.items():
        text = root.ctx.model.detokenize([t for t in tokens if t != EOG])
        shares[text] = shares.get(text, 0.0) + weight
    return shares


@pytest.mark.parametrize(("n", "most"), [(1, 2), (2, 1), (2, 2)])
def test_particles_weigh_what_a_grammar_forbids_without_bias(
    little: Context, root: Branch, n: int, most: int
) -> None:
    """Every run is enumerated: the mean of each weight is the probability of its text."""
    every = {t: p for t, p in ended(root, most, PLAIN).items() if 0 not in t}
    allowed = {"ab", "b", "bb", "a"}
    expected = {text: p for text, p in by_text(root, every).items() if text in allowed}
    particles = example("particles")["particles"]
    variances = []
    with Branch.start(little, "ab", sampling=PLAIN, grammar=RULE) as bound:
        for k in (1, n):
            found, variance = expectation(lambda rng, k=k: particles(bound, k, most, rng))
            assert {t: w for t, w in found.items() if w} == pytest.approx(expected, rel=1e-6)
            variances.append(variance)
    assert n == 1 or variances[1] < 0.9 * variances[0]  # particles draw independently
    assert little.n_seq_free == little.n_seq_max - 1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("power", [0.5, 2.0, 4.0])
def test_power_sampling_weighs_whole_texts(root: Branch, n: int, power: float) -> None:
    """With one particle the shares are 1. The weight before they are divided is what is compared."""
    module, most = example("power_sampling"), 2
    expected = by_text(
        root,
        {
            t: p**power
            for t, p in every_text(root, most, PLAIN).items()
            if len(t) == most or t[-1] == EOG
        },
    )

    def run(rng: Script) -> dict[str, float]:
        sums: list[float] = []

        def shares(groups: Any, at: float) -> Any:
            logs = np.array([at * g.logprob - g.drawn for g in groups])
            weights = np.exp(logs) * [g.n for g in groups]
            sums.append(float(weights.sum()) / n)
            return weights / weights.sum()

        # The weights of particles that are resampled begin again at 1.
        scale: list[float] = []

        def resampled(groups: Any, k: int, at: float, generator: Any) -> Any:
            kept = original(groups, k, at, generator)
            if kept is not groups:
                scale.append(sums[-1])
            return kept

        original = module["resampled"]
        names = original.__globals__
        names["shares"], module["power_sampling"].__globals__["resampled"] = shares, resampled
        try:
            found = module["power_sampling"](root, n, most, "\0", rng, power)
        finally:
            names["resampled"] = original
        weights: dict[str, float] = {}
        for text, _, share in found:
            weights[text] = weights.get(text, 0.0) + share * sums[-1] * float(np.prod(scale))
        return weights

    found, _ = expectation(run)
    assert found == pytest.approx(expected, rel=1e-6)


def has_one_b(text: str) -> bool:
    return text.count("b") == 1


def ends_with_b(text: str) -> bool:
    return text.endswith("b") and len(text) == 3


CASES = [(has_one_b, PLAIN), (ends_with_b, PLAIN), (has_one_b, PLAIN.replace(temperature=2.0))]


@pytest.mark.parametrize(("rule", "settings"), CASES)
def test_rejection_has_the_distribution_of_valid_texts(
    little: Context, rule: Any, settings: Any
) -> None:
    """1,500 samples: by chance it fails in 1 of 1,000 versions of the noise."""
    rejection = example("rejection")["Rejection"]
    with Branch.start(little, "ab", sampling=settings) as root:
        shares = by_text(root, ended(root, 3, settings))
        expected = {text: p for text, p in shares.items() if rule(text)}
        share = sum(expected.values())
        counts: Counter[Any] = Counter()
        for seed in range(30):
            texts, rng, masses = rejection(root, rule, 3), np.random.default_rng(seed), [1.0]
            while counts.total() < 50 * (seed + 1):
                text = texts.draw(rng)
                counts[(text,)] += text is not None
                masses.append(texts.mass)
            del counts[(None,)]
            assert masses == sorted(masses, reverse=True) and masses[-1] >= share - 1e-12
            assert texts.n_drawn < 50 / share + 60  # fewer than throwing away takes, in the end
        law: dict[Any, float] = {(text,): p / share for text, p in expected.items()}
    assert departure(counts, law) < 3.1
