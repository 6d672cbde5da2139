"""The compiled core applies the acceptance rules exactly as the rules over distributions do."""

from __future__ import annotations

import numpy as np
import pytest

from llamabranch.generation.rules import RULES
from llamabranch.generation.rules import apply_rule as accept_by_numpy
from llamabranch.native import acceptance, core
from llamabranch.sampling import Distribution

pytestmark = pytest.mark.skipif(not acceptance.available, reason="the compiled core is not built")


class _Case:
    """Random rows of a target, and a draft drawn from random sources."""

    def __init__(self, rng: np.random.Generator) -> None:
        n_vocab, n = int(rng.integers(2, 300)), int(rng.integers(1, 6))
        spread = rng.choice([0.5, 2.0, 6.0])
        self.rows = (spread * rng.normal(size=(n + 1, n_vocab))).astype(np.float32)
        self.sampler = core.RowSampler(
            n_vocab,
            temperature=float(rng.choice([0.0, 0.3, 0.8, 1.0, 2.0])),
            top_k=int(rng.choice([0, min(5, n_vocab - 1), min(40, n_vocab - 1)])),
            top_p=float(rng.choice([1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.05])),
            bias={},
        )
        self.sources = [self._source(rng, row) for row in self.rows[:-1]]
        self.drafted = [q.draw(int(rng.integers(1 << 40)), i) for i, q in enumerate(self.sources)]
        self.seed, self.position = int(rng.integers(1 << 62)), int(rng.integers(1 << 20))

    def _source(self, rng: np.random.Generator, row: np.ndarray) -> Distribution:
        kind = rng.integers(4)
        if kind == 0:
            return Distribution.from_probs(rng.random(len(row)))
        if kind == 1:
            return Distribution.point(int(rng.integers(len(row))))
        noise = rng.choice([0.0, 0.1, 1.0]) * rng.normal(size=len(row))
        near = row + noise.astype(np.float32)
        found = self.sampler.candidates(near.ctypes.data)
        return Distribution.point(0) if found is None else Distribution.from_logweights(*found)

    def target(self, i: int) -> Distribution:
        found = self.sampler.candidates(self.rows[i].ctypes.data)
        assert found is not None
        return Distribution.from_logweights(*found)

    def accept(self, rule: str, sources: list[Distribution]) -> acceptance.Verdict | None:
        return acceptance.accept_rows(
            self.sampler,
            self.rows.ctypes.data,
            self.drafted,
            [(source.ids, source.logweights) for source in sources],
            rule,
            seed=self.seed,
            position=self.position,
            measured=True,
        )


@pytest.mark.parametrize("known", [True, False], ids=["known-sources", "no-sources"])
@pytest.mark.parametrize("rule", RULES)
def test_core_decides_as_numpy(rule: str, known: bool) -> None:
    rng = np.random.default_rng([RULES.index(rule), known])
    n_decided = n_accepted = 0
    for _ in range(600):
        case = _Case(rng)
        found = case.accept(rule, case.sources if known else [])
        if found is None:
            continue
        sources = case.sources if known else [Distribution.point(x) for x in case.drafted]
        expected = accept_by_numpy(
            rule, case.drafted, sources, case.target, seed=case.seed, position=case.position
        )
        assert (found.n_accepted, found.token) == expected
        measured = core.measure(case.rows.ctypes.data, found.n_accepted + 1, case.rows.shape[1])
        assert found.measures == measured
        n_decided += 1
        n_accepted += found.n_accepted
    assert n_decided > 500
    assert n_accepted > 100


@pytest.mark.parametrize("rule", RULES)
def test_row_with_nan_is_left_to_python(rule: str) -> None:
    case = _Case(np.random.default_rng(3))
    case.rows[0, 1] = np.nan
    assert case.accept(rule, case.sources) is None


@pytest.mark.parametrize("rule", ["token", "block"])
def test_token_that_its_source_cannot_yield_is_left_to_python(rule: str) -> None:
    case = _Case(np.random.default_rng(4))
    case.sources[0] = Distribution.point((case.drafted[0] + 1) % case.rows.shape[1])
    assert case.accept(rule, case.sources) is None


def test_draft_from_the_target_itself_is_left_to_python() -> None:
    """Every ratio is 1, so rounding would decide whether the block rule's weight is clipped."""
    rng = np.random.default_rng(9)
    case = next(case for case in iter(lambda: _Case(rng), None) if len(case.target(0)) > 1)
    case.sources = [case.target(i) for i in range(len(case.drafted))]
    case.drafted = [source.argmax() for source in case.sources]
    assert case.accept("block", case.sources) is None
