"""No thread waits for the lock of one context while it holds that of another.

Two threads may each generate on the context with which the other one drafts. With nested locks both could
wait for ever. So the locks note whether they are taken inside another one, which does not depend on the
timing of threads.
"""

from __future__ import annotations

import gc
import threading
import traceback
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_heads import open_pair

import llamabranch as lb
from llamabranch.native import handle

TALE = "Once upon a time there was a king"
WARM = lb.SamplingParams(temperature=0.8, seed=4)
FIXED = lb.SpeculativeConfig(draft_k=3)


class NotingLock:
    """A lock that notes where it is taken inside another one.

    Attributes:
        faults: the stack of each such place.
        n_made: the number of locks.
    """

    faults: ClassVar[list[str]] = []
    n_made: ClassVar[int] = 0
    _taken = threading.local()

    def __init__(self) -> None:
        self._lock = handle.forkable_lock()
        NotingLock.n_made += 1

    def acquire(self, blocking: bool = True) -> bool:
        taken = self._held()
        if blocking and any(other is not self for other in taken) and self not in taken:
            self.faults.append("".join(traceback.format_stack(limit=8)[:-1]))
        if not self._lock.acquire(blocking):
            return False
        taken.append(self)
        return True

    def release(self) -> None:
        self._held().remove(self)
        self._lock.release()

    def _held(self) -> list[NotingLock]:
        if not hasattr(self._taken, "locks"):
            self._taken.locks = []
        locks: list[NotingLock] = self._taken.locks
        return locks

    def _is_owned(self) -> bool:
        return self in self._held()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize("kind", ["model", "bundled", "gemma4"])
def test_locks_are_taken_one_after_the_other(
    kind: str, monkeypatch: pytest.MonkeyPatch, target: lb.Model, draft: lb.Model, tmp_path: Path
) -> None:
    monkeypatch.setattr("llamabranch.native.context.forkable_lock", NotingLock)
    NotingLock.faults.clear()
    drafter: lb.ModelDrafter | lb.EagleDrafter | lb.MTPDrafter
    if kind == "model":
        size: dict[str, Any] = {"n_ctx": 1024, "n_seq_max": 8, "n_threads": 1}
        ctx = lb.Context(target, **size)
        drafter = lb.ModelDrafter(lb.Context(draft, **size))
    else:
        ctx, drafter = open_pair(kind, tmp_path, target)
    n_made = NotingLock.n_made
    speculator = lb.Speculator(ctx, drafter, FIXED)
    for sampling in (WARM, WARM.replace(seed=None)):  # the rules "seeded" and "block"
        speculator.generate(TALE, max_tokens=10, sampling=sampling).finish()
    with lb.Branch.start(ctx, TALE, sampling=WARM) as branch:
        speculator.generate(branch, max_tokens=6).finish()
        with branch.fork() as fork:
            speculator.generate(fork, max_tokens=6).finish()
        branch.rewind(branch.position - 3)
        with lb.InferenceSession(ctx, branch, config=FIXED) as session:
            for _ in range(5):
                session.next_token(drafter)
                session.next_token()
        lb.search.best_of_n(branch, 3, 8)
    with lb.Engine(ctx, drafter, FIXED, sampling=WARM) as engine:
        engine.generate([lb.Request(TALE, n=2, max_tokens=8), lb.Request(TALE, max_tokens=9)])
    lb.Branch.start(ctx, TALE)  # is forgotten
    gc.collect()
    ctx.close()  # closes a head, too
    drafter.ctx.close()
    assert n_made
    assert not NotingLock.faults, NotingLock.faults[0]
