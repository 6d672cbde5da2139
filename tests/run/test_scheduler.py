"""Jobs and their scheduler: the table of states, parking, texts that begin with a branch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, Request
from llamabranch.engine import EngineStats
from llamabranch.run.core import EngineCore
from llamabranch.run.job import TRANSITIONS, Job, State, Submission
from llamabranch.run.loop import Loop

STORY = "The wolf ran and the wolf ran and the wolf"
WARM = lb.SamplingParams(temperature=0.8, seed=5)


class Jobs:
    """A scheduler with the texts of a branch."""

    def __init__(self, branch: Branch, parallel: int | None = None, max_tokens: int = 12) -> None:
        loop = Loop(branch.ctx, None, lb.SpeculativeConfig(rule="seeded"), batched=True)
        self.core = EngineCore(loop, EngineStats(), parallel)
        self.all = Submission(
            Request("", n=2),
            "",
            0,
            loop,
            branch.sampling,
            max_tokens,
            5,
            (),
            reports_tokens=False,
            beginning=loop.beginning(branch.sequence),
        )

    def run(self, *jobs: Job) -> None:
        """Run texts until they end."""
        for job in jobs:
            self.core.scheduler.add_job(job)
        while any(job.state is not State.ENDED for job in jobs):
            self.core.step()


def alone(root: Branch, job: Job, n: int = 12) -> list[int]:
    with root.fork() as branch:
        branch.reseed(job.seed)
        return branch.generate(n).finish().tokens


def test_only_what_the_table_allows_may_follow(ctx: Context) -> None:
    assert set(TRANSITIONS) == set(State) and not TRANSITIONS[State.ENDED]
    assert all(State.ENDED in TRANSITIONS[state] for state in set(State) - {State.ENDED})
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        job = Jobs(root).all.job(0)
    for before, after in product(State, State):
        job.state = before
        if after in TRANSITIONS[before]:
            job.become(after)
            assert job.state is after
        else:
            with pytest.raises(RuntimeError, match=f"cannot become {after.name}"):
                job.become(after)
            assert job.state is before


@pytest.mark.parametrize("parallel", [None, 1])
def test_texts_of_a_branch_are_those_of_their_seeds(ctx: Context, parallel: int | None) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        jobs = Jobs(root, parallel)
        texts = [jobs.all.job(i) for i in range(3)]
        jobs.run(*texts)
        assert [job.output.tokens for job in texts] == [alone(root, job) for job in texts]
        jobs.core.close()
        assert ctx.n_seq_free == ctx.n_seq_max - 1


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_a_paused_text_keeps_its_cells_until_others_need_them(
    target: lb.Model, n_seq_max: int
) -> None:
    """A text that takes its place begins like it, but has settings of its own."""
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "exact": True}
    with Context(target, n_seq_max=n_seq_max, **options) as ctx, lb.Engine(ctx) as engine:
        settings = [lb.SamplingParams(temperature=t, seed=2) for t in (0.0, 0.7, 1.0)]
        others = [Request(STORY, max_tokens=12, sampling=each) for each in settings]
        first = Request(STORY, max_tokens=12, sampling=WARM)
        alone = engine.generate([first])[0], *engine.generate(others)
        scheduler, name = engine.core.scheduler, engine.add_request(first)
        while (request := scheduler.find(name)) is None or len(request.jobs) < 1:
            engine.step()
        (job,) = request.jobs.values()
        while len(job.output.tokens) < 5:
            engine.step()
        scheduler.pause(name)
        names = [engine.add_request(other) for other in others]
        events = engine.step()
        assert job.state is State.PARKED
        while any(map(scheduler.find, names)):
            events += engine.step()
        assert [job.state, job.sequence, job.num_preemptions] == [State.PARKED, None, 1]
        scheduler.resume(name)
        while engine.has_unfinished():
            events += engine.step()
    results = {event.id: event.result for event in events if event.result is not None}
    assert [results[each].tokens for each in (name, *names)] == [each.tokens for each in alone]


def test_a_step_that_is_broken_off_loses_no_parked_text(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        jobs = Jobs(root)
        parked, running = jobs.all.job(0), jobs.all.job(1)
        jobs.core.scheduler.add_job(parked)
        while len(parked.output.tokens) < 5:
            jobs.core.step()
        jobs.core.scheduler.pause("")
        jobs.core.step()
        assert parked.state is State.PARKED
        jobs.core.scheduler.paused.clear()
        jobs.core.scheduler.add_job(running)
        jobs.core.step()
        with monkeypatch.context() as patch:
            patch.setattr(type(running.running), "take", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                jobs.core.step()
        assert (parked.state, running.state) == (State.PARKED, State.WAITING)
        assert ctx.n_seq_free == ctx.n_seq_max - 1
        while running.state is not State.ENDED:
            jobs.core.step()
        jobs.core.scheduler.resume("")
        jobs.core.drain()
        assert [j.output.tokens for j in (parked, running)] == [
            alone(root, job) for job in (parked, running)
        ]
        jobs.core.close()
