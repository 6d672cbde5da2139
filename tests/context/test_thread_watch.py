"""Fewer threads while other programs use the cores, tested with set times and in real decodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

import llamabranch as lb
from llamabranch.context import threads
from llamabranch.context.threads import ThreadWatch
from llamabranch.native.library import available_cores

IDLE = {1: (1.0, 1.0), 2: (0.55, 1.0)}  # seconds of a decode, and the share of its cores it gets
BUSY = {1: (1.0, 1.0), 2: (3.4, 0.5)}


class Machine:
    """A simulated machine on which a decode takes a set time, with its clocks."""

    def __init__(self, numbers: Sequence[int] = (2, 1)) -> None:
        self.seconds = self.cpu_s = 0.0
        self.used: list[tuple[int, int]] = []
        self.watch = ThreadWatch(lambda *n: self.used.append(n), numbers, self.clock)

    def clock(self) -> tuple[float, float]:
        return self.seconds, self.cpu_s

    def decode(self, costs: dict[int, tuple[float, float]], n: int = 1, scale: float = 1.0) -> int:
        """Decode; return the number of threads."""
        n_threads = self.watch.n_threads[n > 1]

        def submit() -> int:
            seconds, share = costs[n_threads]
            self.seconds += scale * seconds
            self.cpu_s += scale * seconds * share * n_threads
            return 0

        assert self.watch.decode(n, submit) == 0
        return n_threads

    def decodes(self, many: int, costs: dict[int, tuple[float, float]], **more: Any) -> list[int]:
        return [self.decode(costs, **more) for _ in range(many)]


@pytest.mark.parametrize("scale", [0.001, 0.05, 1.0])
@pytest.mark.parametrize("n", [1, 64])
def test_fewer_threads_are_used_within_seconds_and_more_again_once_the_cores_are_idle(
    n: int, scale: float
) -> None:
    machine = Machine()
    assert set(machine.decodes(201, IDLE, n=n, scale=scale)) == {2}  # the first one does not count
    assert machine.used == []  # nothing was tried
    start = machine.seconds
    used = machine.decodes(100, BUSY, n=n, scale=scale)
    n_slow = used.index(1)
    # A lap of four, or of a second; short decodes are timed one in eight.
    assert n_slow <= (40 if scale < 0.02 else 4)
    assert used[n_slow:].count(2) <= 3  # it is tried again
    assert machine.used[0] == ((1, 2) if n == 1 else (2, 1))  # the other kind is as it was
    assert sum(BUSY[n][0] * scale for n in used[:n_slow]) < max(8.0, 0.2)
    assert machine.seconds > start
    assert set(machine.decodes(2000, IDLE, n=n, scale=scale)[-500:]) == {2}
    assert machine.decodes(100, BUSY, n=n, scale=scale).index(1) <= n_slow  # the next time, too


def test_cores_that_are_busy_from_the_beginning_are_noticed_at_once() -> None:
    assert 1 in Machine().decodes(4, BUSY)


def test_a_load_that_stays_costs_little() -> None:
    """More threads are tried less and less often, and a hopeless trial ends after one decode."""
    machine = Machine()
    machine.decodes(100, IDLE)
    used = machine.decodes(3000, BUSY)
    assert set(used[-200:]) == {1}
    n_tried = used[10:].count(2)
    assert n_tried <= 10
    took = sum(BUSY[n][0] for n in used)
    assert took < 1.02 * 3000 * BUSY[1][0]
    assert 3000 * BUSY[2][0] > 3 * took  # what it would have taken


def test_threads_that_wait_for_something_else_stay() -> None:
    """The weights come from the disk, so one thread is not faster."""
    disk = {1: (2.0, 0.4), 2: (1.9, 0.4)}
    machine = Machine()
    used = machine.decodes(4000, disk)
    assert used.count(1) < 80 and set(used[-50:]) == {2}
    gaps = [len(list(group)) for number, group in itertools.groupby(used) if number == 2]
    assert gaps[1:-1] == sorted(gaps[1:-1])  # ever less often


def test_half_of_the_cores_and_then_one() -> None:
    costs = {8: (8.0, 0.5), 4: (4.0, 0.6), 1: (1.0, 1.0)}
    used = Machine((8, 4, 1)).decodes(25, costs)
    assert [number for number, _ in itertools.groupby(used)] == [8, 4, 1]
    middle = {8: (8.0, 0.5), 4: (1.0, 0.95), 1: (2.0, 1.0)}
    used = Machine((8, 4, 1)).decodes(60, middle)
    assert set(used[13:17]) == {4}


def test_decodes_of_other_sizes_are_not_compared() -> None:
    """Drafts and prompts: a decode of 5 tokens does not count as a slow decode of 2."""
    machine = Machine()
    for size in (2, 5, 3, 64, 2, 7, 9) * 60:
        machine.decode(IDLE, n=size, scale=size)
    assert machine.used == []
    used = [machine.decode(BUSY, n=size, scale=size) for size in (2, 2, 2, 5) * 30]
    assert used[-1] == 1 and used[20:].count(2) < 10


def test_a_decode_that_fails_is_not_counted() -> None:
    machine = Machine()
    for _ in range(100):
        assert machine.watch.decode(1, lambda: 2) == 2
    assert machine.used == []


# -- real decodes ----------------------------------------------------------------------------------


def test_texts_do_not_notice_that_the_number_changes(
    target: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads are slow for twenty decodes, then fast for twenty."""
    prompt = [(7 * i + 3) % 200 + 5 for i in range(300)]

    def generated(watched: bool) -> tuple[list[int], bytes, int]:
        with lb.Context(target, n_ctx=512, n_threads=2, n_batch=64, exact=True) as ctx:
            numbers: list[tuple[int, int]] = []
            if watched:
                seconds = [0.0, 0.0]

                def use(single: int, several: int) -> None:
                    numbers.append((single, several))
                    ctx.decoder.handle.set_threads(single, several)

                looks = itertools.count()

                def clock() -> tuple[float, float]:
                    look = next(looks)
                    if look % 2:  # after a decode
                        n, costs = watch.n_threads[0], IDLE if look // 40 % 2 else BUSY
                        seconds[0] += costs[n][0]
                        seconds[1] += costs[n][0] * costs[n][1] * n
                    return seconds[0], seconds[1]

                monkeypatch.setattr(threads, "_PAUSE", 2)
                watch = ctx.decoder.watch = ThreadWatch(use, (2, 1), clock)
            with lb.Branch.start(ctx, prompt, temperature=0.8, seed=3) as branch:
                list(branch.generate(60))
                return branch.tokens, branch.logits.tobytes(), len(numbers)

    plain, watched = generated(watched=False), generated(watched=True)
    assert watched[2] > 2
    assert watched[:2] == plain[:2]


@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
def test_contexts_are_watched_where_the_number_may_change(
    target: lb.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch_of(**options: Any) -> ThreadWatch | None:
        with lb.Context(target, n_ctx=512, **options) as ctx:
            return ctx.decoder.watch

    assert watch_of(n_threads=2) is None is watch_of(n_threads_batch=2)
    for options in ({}, {"exact": True}, {"kv_type": "f32"}):
        watch = watch_of(**options)
        assert watch is not None and watch.n_threads == (available_cores(),) * 2
    monkeypatch.setattr("llamabranch.context.params.available_cores", lambda: 1)
    assert watch_of() is None
