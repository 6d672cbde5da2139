"""Texts that are sampled together, segment by segment, with a drafter if there is one.

All texts share one decode a round, as in the engine. A text is a function of its seed and of where it
starts, so it does not matter in how many waves the texts are generated, nor whether they are drafted: the
acceptance rule is always "seeded".
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import takewhile

from ..arguments import whole
from ..branch import Branch, Produced
from ..errors import CacheFullError, CapacityError, ConfigError, DecodeInterruptedError
from ..generation.drafter import DraftLength, DraftState, FixedLength, propose
from ..generation.drafting import draft_length
from ..generation.generation import OutputBuffer
from ..generation.loop import Loop, RunningText
from ..sampling.noise import derive_seed
from ..speculative import Drafter, SpeculativeConfig, SpeculativeStats
from .node import SearchNode
from .result import Hypothesis
from .sequences import SearchSequences

__all__ = ["Boundary", "Continuation", "Continuations", "numbered", "slot_seed"]

_RULE = "seeded"


def slot_seed(seed: int, index: int) -> int:
    """Return the seed of draw or text number ``index`` of a search; that of the first is ``seed``."""
    return seed if index == 0 else derive_seed(seed, index)


class Boundary:
    """Where a segment of a text ends; by default only where the text does.

    Args:
        text: it ends after a token that completes this string.
        n_tokens: it ends after this number of tokens.
        entropy: it ends before a token whose distribution has more entropy than this, nats.
    """

    def __init__(
        self, text: str | None = None, n_tokens: int | None = None, entropy: float | None = None
    ) -> None:
        self._text = text
        self._n_tokens = n_tokens
        self._entropy = entropy

    @classmethod
    def of(cls, step: str | int) -> Boundary:
        """Return the end of a step: after a token that completes a string, or after N tokens.

        Raises:
            ConfigError: an empty string, or no number of at least 1.
        """
        if not isinstance(step, str):
            return cls(n_tokens=whole("step", step, 1))
        if not step:
            raise ConfigError("step must be a string that is not empty, or a number of tokens")
        return cls(text=step)

    def is_before(self, line: Continuation, following: Produced) -> bool:
        """Return whether the segment ends before the token ``following``."""
        return (
            self._entropy is not None and line.n_segment > 0 and following.entropy > self._entropy
        )

    def is_after(self, line: Continuation) -> bool:
        """Return whether the segment ends after its last token."""
        if self._n_tokens is not None and line.n_segment >= self._n_tokens:
            return True
        return self._text is not None and self._text in line.segment_text


class Continuation:
    """One text that is sampled from ``node`` on.

    Attributes:
        node: where its present segment starts; after it, where it ended.
        seed: of its draws.
        output: all its tokens since the first node, and whether it has ended.
        branch: the branch that generates it, None while it has none.
        running: its rounds, while it has a branch.
        equals: other texts that are equal so far, and share its branch.
    """

    def __init__(
        self, node: SearchNode, seed: int, max_tokens: int | None, stop: str | Sequence[str] = ()
    ) -> None:
        self.node = node
        self.seed = seed
        self.output = OutputBuffer(max_tokens, stop)
        self.branch: Branch | None = None
        self.running: RunningText | None = None
        self.equals: list[Continuation] = []
        self.tokens: list[int] = []  # of the segment, with an EOG token
        self.logprobs: list[float] = []
        self.segment_text = ""
        self.is_closing = False  # its segment has ended, its last token is not decoded yet

    def fork(self, seed: int) -> Continuation:
        """Return another continuation of the same text; between segments only."""
        clone = Continuation(self.node, seed, None)
        clone.output = deepcopy(self.output)
        return clone

    def follow(self, path: Sequence[SearchNode]) -> None:
        """Append given nodes of one token each; they end where the text does."""
        for node in path:
            if self.is_finished:
                break
            logprob = node.logprob - self.node.logprob
            self.output.add(Produced(node.tokens[0], node.text, False, logprob, math.nan))
            self.node = node

    @property
    def n_segment(self) -> int:
        """The number of tokens of the present segment."""
        return len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """True once the text has ended."""
        return self.output.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """The mean of log p of all tokens up to ``node``, nats; 0 without tokens."""
        n = sum(len(node.tokens) for node in self.node.path)
        return self.node.logprob / n if n else 0.0

    def add(self, one: Produced) -> None:
        """Append a token to the text and to the segment."""
        self.output.add(one)
        self.tokens.append(one.token)
        self.logprobs.append(one.logprob)
        self.segment_text += one.text

    def hypothesis(self, score: float) -> Hypothesis:
        """Return its text so far."""
        self.node.score = score
        reason = self.output.finish_reason or "cancelled"
        return Hypothesis(
            list(self.output.tokens), self.output.text, self.node.logprob, score, reason, self.node
        )


def numbered(
    node: SearchNode,
    numbers: Sequence[int],
    max_tokens: int | None,
    stop: Sequence[str],
    seed: int,
) -> list[Continuation]:
    """Return continuations of ``node``, one for each number, which decides its draws."""
    return [Continuation(node, slot_seed(seed, i), max_tokens, stop) for i in numbers]


class Continuations:
    """Runs continuations over the sequences of one search.

    Args:
        sequences: the sequences.
        drafter: proposes tokens; it changes no text. None = plain decoding.
    """

    def __init__(self, sequences: SearchSequences, drafter: Drafter | None = None) -> None:
        self._sequences = sequences
        if not sequences.ctx.kv_cache.can_draft:
            drafter = None
        length: DraftLength = FixedLength(0)
        if drafter is not None:
            length = draft_length(SpeculativeConfig(rule=_RULE), drafter, sequences.ctx)
        self._loop = Loop(sequences.ctx, length, drafter)
        self._root_state: DraftState | None = None
        self._shares = False  # texts that are equal so far are decoded once
        self._is_full = False  # until a text ends, no other is admitted
        self._active: list[Continuation] = []
        self._waiting: deque[Continuation] = deque()
        self.stats = SpeculativeStats()

    def close(self) -> None:
        """Free what the drafter holds. Idempotent."""
        for line in self._active:
            if line.running is not None:
                line.running.close()
                line.running = None
        if self._root_state is not None:
            self._root_state.close()
            self._root_state = None

    def __enter__(self) -> Continuations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        group: Sequence[Continuation],
        boundary: Boundary | None = None,
        *,
        keep: bool = False,
        after: Callable[[], bool] | None = None,
    ) -> None:
        """Continue each of ``group`` until its segment ends.

        Afterwards ``node`` is where each of them ended; the branches there are kept for the next segment
        as far as there are sequences, those of finished texts are not.

        Args:
            group: continuations that are not finished.
            boundary: where segments end; None = with the text.
            keep: keep the branches of the nodes where the segments start, too.
            after: called after each round; default: count a step of the search. A true result ends all
                texts as "cancelled".

        Raises:
            CapacityError, DecodeError: as in every search, close the `SearchSequences` then.
        """
        is_plain = self._loop.drafter is None
        stateless = self._sequences.branch.sequence.sampler.is_stateless
        root = self._sequences.root
        is_start = boundary is None and all(line.node is root for line in group)
        self._shares = is_start and (is_plain or stateless)
        boundary = boundary or Boundary()
        after = after or self._sequences.end_step
        self._is_full = False
        for line in group:
            line.tokens, line.logprobs, line.segment_text = [], [], ""
            line.is_closing = False
            if line.is_finished:  # max_tokens is 0
                continue
            self._waiting.append(line)
        while self._waiting or self._active:
            try:
                self._admit(boundary, keep)
                if not self._active:
                    continue
                self._round(boundary)
            except DecodeInterruptedError as error:
                self._sequences.was_cancelled(error)
            if self._sequences.is_cancelled or after():
                self._cancel()

    # -- rounds ------------------------------------------------------------------------------------

    def _round(self, boundary: Boundary) -> None:
        """Decode the last token and the draft of every text together."""
        stats, active = self._sequences.stats, list(self._active)
        step = self._loop.step(
            [
                (line.running, -1 if line.is_closing else line.output.draft_limit)
                for line in active
                if line.running is not None
            ]
        )
        stats.decodes += step.n_tokens > 0
        stats.tokens_decoded += step.n_tokens
        if step.no_room is not None:
            self._give_way(active[-1])
            return
        for line in active:
            error = None if line.running is None else line.running.error
            if isinstance(error, CapacityError):  # its part of the cache is full
                self._end_early(line, "capacity")
            elif error is not None:
                raise error
            elif line.is_closing:
                self._end(line)
            elif line.running is not None:
                self._add(line, line.running.emitted, boundary)

    def _add(self, line: Continuation, produced: Sequence[Produced], boundary: Boundary) -> None:
        """Add the tokens of a round to a text, up to the end of its segment."""
        if line.equals:
            self._part(line, boundary)
        for one in produced:
            if boundary.is_before(line, one):
                self._close_segment(line)
                return
            for each in (line, *line.equals):
                each.add(one)
            if line.is_finished:
                self._end(line)
                return
            if boundary.is_after(line):
                self._close_segment(line)
                return

    def _part(self, line: Continuation, boundary: Boundary) -> None:
        """Let those of equal texts go on by themselves that have drawn another token than ``line``."""
        if line.running is None or line.branch is None:
            return
        line.equals, apart = line.running.part(line.equals)
        for drawn, (leader, *rest) in apart:
            leader.equals = rest
            for one in drawn:
                for each in () if leader.is_finished else (leader, *rest):
                    each.add(one)
            branch = None
            if not leader.is_finished:
                end = self._sequences.branch.position + len(leader.output.tokens) - 1
                branch = self._sequences.part(line.branch, end)
                if branch is None:
                    self._waiting.appendleft(leader)
                    continue
            leader.branch = branch
            self._active.append(leader)
            if branch is None:
                self._end(leader)
            else:
                self._open(leader, branch, boundary)

    def _close_segment(self, line: Continuation) -> None:
        """Make the branch hold exactly the segment: drop drafted tokens, or decode the last one."""
        branch = line.branch
        if branch is None:
            return
        end = self._sequences.branch.position + len(line.output.tokens)
        if branch.position > end:
            branch.rewind(end)
        line.is_closing = branch.sequence.is_behind  # its last token shares the next decode
        if not line.is_closing:
            self._end(line)

    def _end(self, line: Continuation) -> None:
        """End the segment of a text: make its node, keep its branch if the text continues."""
        sequences = self._sequences
        self._release(line, keep=not line.is_finished)
        for each in (line, *line.equals):
            each.node = sequences.child(each.node, each.tokens, each.logprobs)
            if each.is_finished:
                each.node.status = "finished"
        branch, line.branch = line.branch, None
        line.equals = []
        self._active.remove(line)
        self._is_full = False
        if branch is not None:
            sequences.hold(line.node, branch)

    def _pass_on(self, line: Continuation) -> None:
        """Let the waiting text that begins most like an ended one take its branch over."""

        def common(other: Continuation) -> int:
            pairs = zip(line.tokens, other.tokens[:-1], strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        heir = max(
            (each for each in self._waiting if each.branch is None), key=common, default=None
        )
        branch, start = line.branch, self._sequences.branch.position
        if heir is None or branch is None:
            return
        end = min(start + common(heir), branch.position)
        end = branch.ctx.kv_cache.usable(branch.seq_id, end)
        if end > start:
            branch.rewind(end)
            self._sequences.stats.tokens_shared += end
            heir.branch, line.branch = branch, None
            self._waiting.remove(heir)
            self._waiting.appendleft(heir)

    def _end_early(self, line: Continuation, reason: str) -> None:
        """End a text where it is."""
        for each in (line, *line.equals):
            each.output.break_off(reason)
        self._end(line)

    def _release(self, line: Continuation, *, keep: bool) -> None:
        """Let a text run no more; without ``keep`` return its sequence."""
        if line.running is not None:
            line.running.close()
            line.running = None
        if self._shares and line.is_finished:
            self._pass_on(line)
        if line.branch is not None and not keep:
            self._sequences.discard(line.branch)
            line.branch = None

    def _cancel(self) -> None:
        """End all texts where they are."""
        waiting, self._waiting = self._waiting, deque()
        while self._active:
            self._end_early(self._active[0], "cancelled")
        for line in waiting:
            if line.tokens:  # it was preempted
                self._active.append(line)
                self._end_early(line, "cancelled")
            else:
                line.output.break_off("cancelled")

    # -- room --------------------------------------------------------------------------------------

    def _admit(self, boundary: Boundary, keep: bool) -> None:
        """Give branches to waiting texts, as long as there are sequences; decode what they lack."""
        sequences = self._sequences
        if self._is_full and self._active:
            return
        opened: list[tuple[Continuation, Branch, list[int]]] = []
        starts = Counter(line.node for line in self._waiting)
        first: dict[SearchNode, Continuation] = {}  # of those that have no tokens yet
        while self._waiting:
            line = self._waiting[0]
            starts[line.node] -= 1
            if self._shares and line.node in first and not line.output.tokens:
                first[line.node].equals.append(self._waiting.popleft())
                continue
            if len(self._active) + len(opened) >= sequences.capacity:
                break
            others = [node for node, n in starts.items() if n]
            taken = None
            if line.branch is not None:  # passed on
                n_held = line.branch.position - sequences.branch.position
                opened.append((self._waiting.popleft(), line.branch, line.tokens[n_held:-1]))
                continue
            if keep or starts[line.node]:
                taken = sequences.take(line.node, reuse=False, wanted=others)
            if taken is None:
                taken = sequences.take(line.node, reuse=True, wanted=others)
            if taken is None:
                break
            self._waiting.popleft()
            branch, lacking = taken
            if not line.output.tokens:
                first[line.node] = line
            opened.append((line, branch, lacking + line.tokens[:-1]))
        missing = {branch: tokens for _, branch, tokens in opened if tokens}
        try:
            if missing:
                sequences.append(missing)
        except (CacheFullError, DecodeInterruptedError) as error:
            for line, branch, _ in reversed(opened):
                sequences.discard(branch)
                line.branch = None
                self._waiting.appendleft(line)
            if isinstance(error, DecodeInterruptedError):
                raise
            self._give_way(None)
            return
        for line, branch, _ in opened:
            line.branch = branch
            self._active.append(line)
        for line, branch, _ in opened:
            self._open(line, branch, boundary)

    def _open(self, line: Continuation, branch: Branch, boundary: Boundary) -> None:
        branch.sequence.seed = line.seed
        root = self._draft_root()
        line.running = self._loop.open(
            branch.sequence, _RULE, self.stats, drafts=root is not None, like=root
        )
        line.running.other_seeds = [each.seed for each in line.equals]
        if line.tokens:  # it continues after its last token
            branch.sequence.append(line.tokens[-1], -line.logprobs[-1], None)
        else:
            self._add(line, [line.running.draw()], boundary)

    def _draft_root(self) -> DraftState | None:
        """Return the draft state that has read the prompt; None: nothing is drafted."""
        drafter, root = self._loop.drafter, self._sequences.branch.sequence
        if self._root_state is None and drafter is not None:
            with suppress(CapacityError):  # without room for it texts are decoded plainly
                self._root_state = state = drafter.start(root, _RULE)
                following = root.produce()
                if not following.is_stop:  # a draft follows a token that is not decoded yet
                    propose(state, [*root.tokens, following.token], FixedLength(1), 1)
                    state.observe(root.position)
        return self._root_state

    def _give_way(self, newest: Continuation | None) -> None:
        """Free cells: those of idle nodes, then those of the newest text, which then waits."""
        sequences = self._sequences
        heirs = [line for line in self._waiting if line.branch is not None]
        for line in heirs:
            self._release(line, keep=False)
        if heirs:
            return
        if sequences.n_held > len(self._active):
            sequences.retain(())
        elif newest is not None and len(self._active) > 1:
            self._release(newest, keep=False)
            self._active.remove(newest)
            self._waiting.appendleft(newest)
            self._is_full = True
        elif newest is not None:
            self._end_early(newest, "capacity")
        elif self._active:
            self._is_full = True
        elif sequences.capacity > 1:
            sequences.capacity = max(1, sequences.capacity // 2)
        else:
            line = self._waiting.popleft()
            self._active.append(line)
            self._end_early(line, "capacity")
