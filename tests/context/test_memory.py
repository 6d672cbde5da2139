"""Memory does not grow with use; with SOAK=20 in the environment that is tested for longer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import loads
import pytest

import llamabranch as lb


@pytest.mark.parametrize(
    ("call", "rounds", "warm_up"),
    [(loads.fork_and_prune, 2000, 200), (loads.open_and_close, 150, 50)],
    ids=["fork and prune", "open and close"],
)
def test_rounds_leave_nothing_in_memory(
    call: Callable[[lb.Model, int], None], rounds: int, warm_up: int, draft: lb.Model
) -> None:
    """A leak of 525 bytes a fork, or of 7 KiB a context, fails it. A context holds over 1 MB."""
    assert loads.growth_bytes(draft, call, rounds=rounds, warm_up=warm_up) < loads.TOLERANCE_BYTES


def test_random_load_on_engines_generates_what_each_request_generates_alone() -> None:
    with ExitStack() as stack:
        load = loads.RandomLoad(stack, seed=5)
        for _ in range(12 * loads.SOAK):
            load.run_job()
        assert load.compared > 5
        assert load.texts > 40
