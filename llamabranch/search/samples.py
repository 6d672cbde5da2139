"""Texts that are sampled together, segment by segment: jobs of one scheduler, and their nodes.

A text depends only on its seed and on the text before it. So it does not matter which texts share a
decode, which of them had to wait, or whether they are drafted. The acceptance rule is always "seeded".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial

from ..branch import Branch, Produced
from ..errors import CapacityError, DecodeInterruptedError
from ..generation.output import OutputBuffer, SegmentEnd
from ..generation.text import Text
from ..native.interrupts import HeldInterrupts
from ..request.request import EngineStats, Request
from ..run.core import EngineCore
from ..run.job import Job, State, Submission
from ..run.loop import Loop
from ..speculative import Drafter, SpeculativeConfig
from .node import SearchNode
from .result import Hypothesis
from .tree import OnStep, SearchTree

__all__ = ["Sample", "Samples"]


class Sample:
    """A text that is sampled, beginning at the root of the search.

    Attributes:
        job: the job that generates it.
        node: the node where its present segment starts; after the segment, the node where that ended.
        output: all its tokens since the root, and whether it has ended.
    """

    def __init__(self, job: Job, node: SearchNode) -> None:
        self.job = job
        self.node = node
        self.output: OutputBuffer = job.output
        self._n_noted = len(job.output.emitted)  # tokens that have a node

    @property
    def is_finished(self) -> bool:
        """True once the text has ended."""
        return self.output.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """The mean of log p of all tokens up to ``node``, nats; 0 without tokens."""
        n = sum(len(node.tokens) for node in self.node.path)
        return self.node.logprob / n if n else 0.0

    def follow(self, path: Sequence[SearchNode]) -> None:
        """Append nodes of one token each, until the text ends."""
        for node in path:
            if self.is_finished:
                break
            logprob = node.logprob - self.node.logprob
            self.output.add(Produced(node.tokens[0], node.text, False, logprob, math.nan))
            self.node = node
        self._n_noted = len(self.output.emitted)

    def note(self, tree: SearchTree) -> None:
        """Add a node for the tokens that have no node yet."""
        output = self.output
        new = output.emitted[self._n_noted :]
        if output.eog is not None:
            new.append(output.eog)
        self._n_noted = len(output.emitted)
        if new:
            tokens = [produced.token for produced in new]
            self.node = tree.child(self.node, tokens, [produced.logprob for produced in new])
            self.node.status = "finished" if self.is_finished else "open"

    def hypothesis(self, score: float) -> Hypothesis:
        """Return its text so far."""
        self.node.score = score
        reason = self.output.finish_reason or "cancelled"
        return Hypothesis(
            list(self.output.tokens), self.output.text, self.node.logprob, score, reason, self.node
        )


class Samples:
    """The texts of a search, all sampled from its branch.

    A context manager, which frees their sequences at its end.

    Args:
        branch, on_step: as for `SearchTree`.
        seed: the seed of text number 0; the seeds of other texts are derived from it.
        max_tokens, stop: the limits of each text.
        drafter: proposes tokens; it changes no text. None = plain decoding.
        parallel: the most texts that run at a time; None = as many as there are sequences.

    Attributes:
        tree: the tree of the search.
    """

    def __init__(
        self,
        branch: Branch,
        on_step: OnStep | None,
        seed: int,
        max_tokens: int | None,
        stop: Sequence[str],
        drafter: Drafter | None,
        *,
        parallel: int | None = None,
    ) -> None:
        self.tree = SearchTree(branch, on_step)
        ctx = branch.ctx
        loop = Loop(ctx, drafter, SpeculativeConfig(rule="seeded"), batched=True)
        params = branch.sampling.replace(seed=seed)
        self._stats = EngineStats()
        self._core = EngineCore(loop, self._stats, parallel)
        self._beginning = loop.beginning(branch.sequence)
        request = Request("", stop=stop, n=2)  # its texts may be equal
        self._submission = Submission(
            request,
            "",
            0,
            loop,
            params,
            max_tokens,
            seed,
            (),
            reports_tokens=False,
            beginning=self._beginning,
        )
        self._counted = (0, 0, 0, 0)

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all sequences. Idempotent."""
        self.tree.close()
        self._core.close()
        self._beginning.close()

    def start(self, number: int) -> Sample:
        """Return the text of this number; the number decides its draws."""
        return Sample(self._submission.job(number), self.tree.root)

    def fork(self, sample: Sample, number: int) -> Sample:
        """Return a copy of a text that is between two segments, with draws of its own."""
        return Sample(self._submission.job(number, forked_from=sample.job), sample.node)

    def end(self, sample: Sample, reason: str) -> None:
        """End a text where it is, and free its sequence."""
        if sample.job.state is not State.ENDED:
            self._core.end(sample.job, reason)

    def run(
        self,
        group: Collection[Sample],
        ends: SegmentEnd | None = None,
        after: Callable[[], bool] | None = None,
    ) -> None:
        """Continue each text until its segment ends; its ``node`` is then the end of the segment.

        Args:
            group: the texts.
            ends: where segments end; None = at the end of the text.
            after: called after each round; default: count a step of the search. A true result ends all
                texts as "cancelled".

        Raises:
            CapacityError, DecodeError: call ``close`` after these.
        """
        tree, after = self.tree, after or self.tree.end_step
        running = [sample for sample in group if not sample.is_finished]
        for sample in running:
            self._core.scheduler.continue_job(sample.job, ends)
        # Each step holds interrupts. Around all of them this costs little: only the outermost block
        # changes the handler, which takes as long as other work of a step.
        with HeldInterrupts() as held:
            while running and held.caught is None:
                try:
                    self._step()
                except DecodeInterruptedError as error:
                    held.let(partial(tree.was_cancelled, error))
                running = self._noted(running)
                if tree.is_cancelled or held.let(after):
                    for sample in running:
                        self.end(sample, "cancelled")
                    running = self._noted(running)

    def _noted(self, running: Sequence[Sample]) -> list[Sample]:
        """Return the texts whose segment has not ended, after adding the nodes of the others."""
        left = []
        for sample in running:
            if sample.job.state in (State.PARKED, State.ENDED):
                error = sample.job.error
                if error is not None and not isinstance(error, CapacityError):
                    raise error
                sample.note(self.tree)
            else:
                left.append(sample)
        return left

    def _step(self) -> None:
        """Run a step of the scheduler, and count its cost."""
        self._core.step()
        ours, stats = self._stats, self.tree.stats
        counted = (
            ours.target_forward_passes, self._core.n_decoded, ours.prompt_tokens,
            ours.shared_prompt_tokens,
        )  # fmt: skip
        decodes, tokens, again, shared = map(int.__sub__, counted, self._counted)
        self._counted = counted
        stats.decodes += decodes
        stats.tokens_decoded += tokens
        stats.tokens_redecoded += again
        stats.tokens_shared += shared
        stats.peak_sequences = max(stats.peak_sequences, self._core.scheduler.most_held)

    def given(self, sample: Sample, texts: Sequence[Sequence[int]]) -> list[list[SearchNode]]:
        """Score given texts after a text; return their nodes, as `SearchTree.add_given`."""
        scheduler = self._core.scheduler
        after = self._decoded(sample)
        scheduler.free_sequences(len(texts), sample.job)
        return self.tree.add_given(sample.node, after, texts, len(scheduler.idle))[0]

    def _decoded(self, sample: Sample) -> Text:
        """Return the state of a text that is between two segments; decode what is missing."""
        job = sample.job
        if sample.node is self.tree.root:
            return self.tree.branch.sequence
        if job.sequence is None:
            self._core.scheduler.continue_job(job, SegmentEnd(n_tokens=0))
            while job.state is not State.PARKED:
                self._step()
                if job.error is not None:
                    raise job.error
        return job.text
