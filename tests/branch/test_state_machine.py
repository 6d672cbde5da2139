"""A short run of the state machine over Context and Branch; with SOAK=20 it is twenty times as long."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import seed
from hypothesis.stateful import run_state_machine_as_test
from reference_comparison import CLOSE
from state_machine import long_settings, machine, tiny, tiny_window

import llamabranch as lb

N_KINDS = 18  # the least number of different steps; the rules count 22
MOST_SEEDS = 8  # which steps are drawn depends on what the model computes, thus on the processor


# The longer runs repeat the shorter ones with more steps.
@pytest.mark.parametrize("longer", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("which", "n_runs"), [("toy", 40), ("plain", 30), ("window", 30), ("draft", 20)]
)
def test_context_and_branches_match_the_reference(
    which: str, n_runs: int, longer: int, tmp_path: Path
) -> None:
    """A toy, one whose context is not exact, one with a sliding window, the bundled draft."""
    n_runs *= longer
    paths = {
        "toy": lambda: tiny(tmp_path / "toy.gguf"),
        "plain": lambda: tiny(tmp_path / "toy.gguf", "f32"),
        "window": lambda: tiny_window(tmp_path / "toy.gguf"),
        "draft": lambda: lb.hub.resolve("tale-draft"),
    }
    exact = which in ("toy", "draft")
    with (
        lb.Model(paths[which]()) as model,
        lb.Context(model, n_ctx=256, n_seq_max=2, n_threads=1, exact=exact) as clean,
    ):
        # A missing token of the window may change the logits only a little.
        close = 0.05 if which == "window" else CLOSE
        kind = machine(model, clean, exact=exact, name=f"{which.title()}Machine", close=close)
        tally = kind.tally

        def has_seen_all() -> bool:
            return len(tally.steps) >= N_KINDS and (tally.n_compacted > 0) == exact

        gc.freeze()  # the library collects garbage whenever sequences run out
        try:
            run_state_machine_as_test(kind, settings=long_settings(n_runs, 50))
            for number in range(1, MOST_SEEDS):
                if not has_seen_all():
                    again = seed(number)(kind)
                    run_state_machine_as_test(again, settings=long_settings(n_runs, 50))
        finally:
            gc.unfreeze()
        assert tally.n_steps > 30 * n_runs
        assert min(tally.n_full, tally.n_exhausted) > n_runs / 4
        assert (tally.n_exact if exact else tally.n_close) > n_runs / 4
        assert has_seen_all()
