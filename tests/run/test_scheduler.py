"""Jobs and their scheduler: the table of states, segments, parking, texts that begin with a branch."""

from __future__ import annotations

import math
from itertools import product

import pytest

import llamabranch as lb
from llamabranch import Branch, Context, Request
from llamabranch.engine import EngineStats
from llamabranch.errors import ConfigError
from llamabranch.generation.output import Produced, SegmentEnd
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

    def run(self, *jobs: Job, ends: SegmentEnd | None = None) -> None:
        """Run texts until their segments end."""
        for job in jobs:
            self.core.scheduler.continue_job(job, ends)
        while any(job.state not in (State.PARKED, State.ENDED) for job in jobs):
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


def test_a_segment_ends_after_tokens_after_a_string_and_before_doubt() -> None:
    def made(text: str, entropy: float = 0.0) -> Produced:
        return Produced(1, text, False, -1.0, entropy)

    segment = [made("a."), made("\nb")]
    assert SegmentEnd(n_tokens=2).is_after(segment) and not SegmentEnd(n_tokens=3).is_after(segment)
    assert SegmentEnd(text=".\n").is_after(segment) and not SegmentEnd(text="c").is_after(segment)
    doubt = SegmentEnd(entropy=1.0)
    assert doubt.is_before(made("c", 1.5), segment) and not doubt.is_before(made("c", 0.5), segment)
    assert not doubt.is_before(made("c", 1.5), [])  # a segment has at least one token
    assert not doubt.is_after(segment)
    for bad in ("", 0, math.inf):
        with pytest.raises(ConfigError):
            SegmentEnd.of(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("parallel", [None, 1])
def test_segments_join_to_the_text_of_the_seed(ctx: Context, parallel: int | None) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        jobs = Jobs(root, parallel)
        texts = [jobs.all.job(i) for i in range(3)]
        for n in (4, 8, 12):
            jobs.run(*texts, ends=SegmentEnd(n_tokens=4))
            assert [len(job.output.tokens) for job in texts] == [n] * 3
        assert {job.state for job in texts} == {State.ENDED}
        assert [job.output.tokens for job in texts] == [alone(root, job) for job in texts]
        jobs.core.close()
        assert ctx.n_seq_free == ctx.n_seq_max - 1


def test_a_parked_text_keeps_its_cells_until_others_need_them(target: lb.Model) -> None:
    with (
        Context(target, n_ctx=256, n_seq_max=3, n_threads=1, exact=True) as ctx,
        Branch.start(ctx, STORY, sampling=WARM) as root,
    ):
        jobs = Jobs(root)
        first, *others = (jobs.all.job(i) for i in range(4))
        jobs.run(first, ends=SegmentEnd(n_tokens=5))
        assert first.state is State.PARKED and first.sequence is not None
        assert first.sequence.position == root.position + 5 == first.sequence.n_cached
        before = jobs.core.n_decoded
        jobs.run(first, ends=SegmentEnd(n_tokens=3))
        assert jobs.core.n_decoded - before == 3  # nothing was read again
        jobs.run(*others)
        assert [first.state, first.sequence, first.num_preemptions] == [State.PARKED, None, 1]
        jobs.run(first)
        assert first.output.tokens == alone(root, first)
        assert [job.output.tokens for job in others] == [alone(root, job) for job in others]
        jobs.core.close()
        assert ctx.n_seq_free == 2


def test_copies_of_a_parked_text_share_its_cells(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        jobs = Jobs(root)
        first = jobs.all.job(0)
        jobs.run(first, ends=SegmentEnd(n_tokens=6))
        before = jobs.core.n_decoded
        copies = [jobs.all.job(i, forked_from=first) for i in (1, 2)]
        jobs.run(first, *copies, ends=SegmentEnd(n_tokens=2))
        assert jobs.core.n_decoded - before == 6  # two tokens of each
        for copy in copies:
            with root.fork() as branch:
                branch.extend(first.output.tokens[:6])
                branch.reseed(copy.seed)
                assert copy.output.tokens[6:] == branch.generate(2).finish().tokens
        jobs.core.close()


def test_a_segment_of_no_tokens_only_decodes(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        jobs = Jobs(root)
        job = jobs.all.job(0)
        for token in alone(root, job, 3):
            job.output.add(Produced(token, "", False, -1.0, 0.0))
        jobs.run(job, ends=SegmentEnd(n_tokens=0))
        assert job.state is State.PARKED and len(job.output.tokens) == 3
        assert job.text.n_cached == root.position + 3 == len(job.text.tokens)
        jobs.run(job)
        assert job.output.tokens == alone(root, job)
        jobs.core.close()


def test_a_step_that_is_broken_off_loses_no_parked_text(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        jobs = Jobs(root)
        parked, running = jobs.all.job(0), jobs.all.job(1)
        jobs.run(parked, ends=SegmentEnd(n_tokens=5))
        jobs.core.scheduler.continue_job(running, None)
        jobs.core.step()
        with monkeypatch.context() as patch:
            patch.setattr(type(running.running), "take", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                jobs.core.step()
        assert (parked.state, running.state) == (State.PARKED, State.WAITING)
        assert ctx.n_seq_free == ctx.n_seq_max - 1
        while running.state is not State.ENDED:
            jobs.core.step()
        jobs.run(parked)
        assert [j.output.tokens for j in (parked, running)] == [
            alone(root, job) for job in (parked, running)
        ]
        jobs.core.close()
