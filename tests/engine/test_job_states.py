"""A text in the engine goes from state to state by one table; every other change is refused."""

from __future__ import annotations

from itertools import product

import pytest

import llamabranch as lb
from llamabranch.engine.job import EngineSettings, Job, JobState, JobStateError, Submission
from llamabranch.generation.drafter import FixedLength, NullState
from llamabranch.generation.drafting import Drafting
from llamabranch.generation.loop import RunningText

WAYS = {  # how a text gets into a state
    JobState.WAITING: [],
    JobState.READING: ["admit"],
    JobState.RUNNING: ["admit", "begin"],
    JobState.ENDED: ["end"],
}
NEXT = {
    (JobState.WAITING, "admit"): JobState.READING,
    (JobState.WAITING, "end"): JobState.ENDED,
    (JobState.READING, "begin"): JobState.RUNNING,
    (JobState.READING, "preempt"): JobState.WAITING,
    (JobState.READING, "end"): JobState.ENDED,
    (JobState.RUNNING, "preempt"): JobState.WAITING,
    (JobState.RUNNING, "end"): JobState.ENDED,
}


def settings_of(ctx: lb.Context) -> EngineSettings:
    drafting = Drafting(ctx, None, batched=True)
    return EngineSettings(ctx, drafting, lb.SamplingParams(), 8, 0.0, None, 1, repeats=True)


def act(job: Job, name: str, ctx: lb.Context) -> None:
    if name == "admit":
        job.admit(lb.Branch.create(ctx), 0)
    elif name == "begin":
        length, stats = FixedLength(0), lb.SpeculativeStats()
        branch = job.branch or lb.Branch.create(ctx)
        job.begin(RunningText(branch.sequence, NullState(), length, "seeded", stats))
    else:
        getattr(job, name)()


@pytest.mark.parametrize(
    ("state", "name"), list(product(JobState, ["admit", "begin", "preempt", "end"]))
)
def test_only_what_the_table_has_is_possible(ctx: lb.Context, state: JobState, name: str) -> None:
    submission = Submission(lb.Request("The king"), "a", 0, settings_of(ctx), 1, [0])
    job = submission.next_job()
    for step in WAYS[state]:
        act(job, step, ctx)
    assert job.state is state
    branch, num_preemptions = job.branch, job.num_preemptions
    expected = NEXT.get((state, name))
    if expected is None:
        with pytest.raises(JobStateError, match=f"'a' sample 0, {state.value}"):
            act(job, name, ctx)
        assert (job.state, job.branch, job.num_preemptions) == (state, branch, num_preemptions)
    else:
        act(job, name, ctx)
        assert job.state is expected
        holds = expected in (JobState.READING, JobState.RUNNING)
        assert (job.branch is not None, job.num_preemptions) == (holds, name == "preempt")
    if job.branch is not None:
        job.end()


def test_without_a_sequence_nothing_is_read(ctx: lb.Context) -> None:
    submission = Submission(lb.Request("The king"), "a", 0, settings_of(ctx), 1, [0])
    job = submission.next_job()
    with pytest.raises(JobStateError, match="holds no sequence"):
        job.unread()
