"""The compiled core draws the tokens that llama.cpp's samplers and NumPy draw."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from rows import KINDS, OFF, SETTINGS, row

import llamabranch as lb
from llamabranch import Distribution, SamplingParams
from llamabranch.context.logits import LogitsRow
from llamabranch.errors import ConfigError
from llamabranch.native import core
from llamabranch.native.sampler import softmax_agrees
from llamabranch.sampling import Sampler
from llamabranch.sampling.noise import DRAW

pytestmark = pytest.mark.skipif(not core.available, reason=f"compiled core: {core.description}")

Row = npt.NDArray[np.float32]


class Both:
    """One setting with and without the core, over any vocabulary; the chain needs only its size."""

    def __init__(self, model: lb.Model, n_vocab: int, params: SamplingParams) -> None:
        sized = SimpleNamespace(
            n_vocab=n_vocab, handle=model.handle, has_text=True, n_ctx_train=model.n_ctx_train
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "available", False)
            self.oracle = Sampler(cast(lb.Model, sized), params)
            assert self.oracle.row_sampler is None
        compiled = Sampler(cast(lb.Model, sized), params).row_sampler
        assert compiled is not None
        self.compiled = compiled

    def compare(self, x: Row, seed: int, position: int, purpose: int = DRAW) -> bool:
        """Assert that both draw the same; return True if the core decided."""
        try:
            with np.errstate(invalid="ignore"):  # a bias of -inf on a logit of inf
                expected: Distribution | None = self.oracle.distribution(x, position, seed)
        except ConfigError:
            expected = None
        logits = LogitsRow(x)
        token = self.compiled.sample(logits.address, seed, position, purpose, True)
        logits.note_step(self.compiled, seed, True)
        kept = self.compiled.candidates(logits.address)
        if expected is None:
            assert token == -1
            assert kept is None
            return False
        if token >= 0:
            assert token == expected.draw(seed, position, purpose)
            assert logits.logprob(token) == pytest.approx(
                LogitsRow(x.copy()).logprob(token), abs=1e-6
            )
        if kept is not None:
            ours = Distribution.from_logweights(*kept)
            # llama.cpp does not define the order of equal logits. Everything else is equal to the bit.
            assert np.array_equal(ours.logprobs, expected.logprobs)
            for a, b in ((ours, expected), (expected, ours)):
                assert np.array_equal(a.at(b.ids), b.probs)
        return token >= 0


LARGE = ("default", "temperature alone", "top-p alone", "min-p alone")
SIZES = [(n, name) for name in SETTINGS for n in (2, 3, 16, 17, 100, 1000, 4096, 33_000)]


@pytest.mark.parametrize(("n_vocab", "name"), [*SIZES, *((262_144, name) for name in LARGE)])
def test_same_tokens_over_hard_rows(target: lb.Model, n_vocab: int, name: str) -> None:
    both = Both(target, n_vocab, SamplingParams(**SETTINGS[name]))
    rng = np.random.default_rng(n_vocab)
    is_large = n_vocab > 100_000
    for kind in ("plain", "steep", "half masked", "quarters") if is_large else KINDS:
        for position in range(1 if is_large else 3):
            both.compare(row(rng, n_vocab, kind), int(rng.integers(1 << 62)), position)


def test_core_has_the_expf_of_llama_cpp() -> None:
    """With another row the core would leave top-p to llama.cpp's samplers."""
    assert softmax_agrees()


def test_sums_of_top_p_are_llama_cpps_at_every_cut(target: lb.Model) -> None:
    """A difference of one unit in the last place would move some of these cuts."""
    rng = np.random.default_rng(8)
    x = row(rng, 600, "plain")
    for p in np.linspace(0.01, 0.99999, 150):
        for k in (0, 300):
            params = SamplingParams(temperature=1.0, top_k=k, top_p=float(p), min_p=0.0)
            assert Both(target, 600, params).compare(x, 1, 1)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.0, **OFF}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0}, {"min_p": 0.0}],
    ids=str,
)
def test_core_decides_nearly_always_on_real_logits(
    target: lb.Model, settings: dict[str, float]
) -> None:
    """Fewer than one row in a hundred is left to llama.cpp's samplers."""
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    both = Both(target, target.n_vocab, params)
    n_rows = n_undecided = 0
    with lb.Context(target, n_ctx=512, n_threads=1, exact=True) as ctx:
        for seed in range(4):
            with lb.Branch.start(ctx, "Once upon a time", seed=seed, temperature=1.0) as branch:
                for _ in range(100):
                    n_undecided += not both.compare(branch.logits, seed, branch.position)
                    n_rows += 1
                    if branch.step().is_stop:
                        break
    assert n_rows >= 100
    assert n_undecided <= n_rows // 100


def test_row_that_is_not_in_one_piece_is_copied(target: lb.Model) -> None:
    sampler = Sampler(target, SamplingParams())
    wide = np.random.default_rng(3).standard_normal((target.n_vocab, 2)).astype(np.float32)
    make: Callable[[Row], Distribution] = sampler.distribution
    strided, whole = make(wide[:, 0]), make(wide[:, 0].copy())
    assert strided.ids.tolist() == whole.ids.tolist()
    assert LogitsRow(wide[:, 1]).entropy() == LogitsRow(wide[:, 1].copy()).entropy()
