"""Decides which choices hold a sequence: admission, shared prefixes, parking and preemption.

The scheduler never decodes.
"""

from __future__ import annotations

import heapq
from contextlib import suppress

from ..context import Context
from ..context.prefix_cache import MIN_SHARED
from ..errors import CacheFullError, GrammarError, LlamaBranchError, SequencesExhaustedError
from ..generation.text import Text
from ..model.text import n_common
from .job import Caller, Choice, Job, Key, State, Told
from .records import records_of


class Scheduler:
    """Keeps the queue and the choices that hold a sequence.

    Choices are admitted in the order of their keys while a sequence is free and the cache has room for
    their prompt. If a prompt begins like another choice's prompt, or like a text in the prefix cache,
    the choice shares those cells instead of decoding the tokens again. If the first choice in the
    queue does not fit, the choices behind it wait too.

    A parked choice keeps its sequence until other choices need it. A choice that has lost its sequence
    decodes its tokens again before it continues.

    Args:
        ctx: the context that has the sequences.

    Attributes:
        records: what the requests have cost.
        active: the choices that read their prompt or generate.
        idle: the parked choices that still hold a sequence, least recently used first.
        is_crowded: a text was preempted for lack of room, and no step has decoded since. Until then no
            text is admitted, because the same texts would run out of room again in the next step.
        no_sequence: the error if no choice is active because the context's other users hold all
            sequences; otherwise None.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.records = records_of(ctx)
        self.active: list[Choice] = []
        self.idle: list[Choice] = []
        self.is_crowded = False
        self.no_sequence: SequencesExhaustedError | None = None
        self._queue: list[tuple[Key, Job | Choice]] = []  # a heap; keys are unique
        self._held: list[Choice] = []  # of callers that already run ``parallel`` texts
        self._known: dict[Job, None] = {}  # requests with unfinished texts

    # -- the queue -----------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Put the texts of a request into the queue; a second call does nothing."""
        if job not in self._known:
            self._known[job] = None
            request, prefixes = job.request, self._ctx.prefix_cache
            if prefixes is not None and request.session_id is not None:
                job.session = prefixes.sessions.of(
                    request.session_id, request.parent_session_id, request.ttl
                )
                job.session.requests.add(job)
            heapq.heappush(self._queue, (job.key, job))

    def __contains__(self, job: Job) -> bool:
        """Return whether a request has unfinished texts here."""
        return job in self._known

    def unfinished(self) -> list[Job]:
        """Return the unfinished requests in the order in which they were added."""
        return list(self._known)

    def head(self) -> Choice | None:
        """Return the next choice, which stays in the queue; None if nothing waits."""
        while self._queue:
            _, first = self._queue[0]
            if isinstance(first, Job):
                if not first.samples:  # it was cancelled, or all its texts have begun
                    heapq.heappop(self._queue)
                    continue
                choice = first.next_choice()
                while choice.shares_thought and first.samples:
                    choice.equals.append(first.next_choice())
                if not first.samples:
                    heapq.heappop(self._queue)
                else:
                    heapq.heapreplace(self._queue, (first.key, first))
                heapq.heappush(self._queue, (choice.key, choice))
                continue
            if first.state is not State.WAITING:
                heapq.heappop(self._queue)
            elif first.job.rests:
                heapq.heappop(self._queue)
                first.state = State.PARKED
            elif self._is_full(first.job.caller):
                heapq.heappop(self._queue)
                self._held.append(first)
            else:
                return first
        return None

    def requeue(self, choice: Choice) -> None:
        """Put a text that has begun back into the queue."""
        choice.state = State.WAITING
        heapq.heappush(self._queue, (choice.key, choice))

    def _is_full(self, caller: Caller) -> bool:
        """Return whether a caller already runs ``parallel`` texts."""
        most = caller.parallel
        return most is not None and most <= sum(c.job.caller is caller for c in self.active)

    def resume(self, job: Job) -> None:
        """Continue the parked texts of a request."""
        if job in self._known:
            for choice in job.choices.values():
                if choice.state is State.PARKED:
                    self.requeue(choice)

    def park(self, choice: Choice) -> None:
        """Do not continue an active text for now; it keeps its sequence while there is room."""
        choice.state = State.PARKED
        self.active.remove(choice)
        self.idle.append(choice)

    def choices_of(self, job: Job) -> list[Choice]:
        """Return the unfinished choices of a request; create those that do not exist yet."""
        while job.samples:
            job.next_choice()
        return list(job.choices.values())

    def finish(self, choice: Choice) -> None:
        """Remove a choice that has ended, and free its sequence and draft states."""
        job = choice.job
        job.choices.pop(choice.sample, None)
        if job.is_idle:
            self._known.pop(job, None)
            if job.session is not None:
                job.session.requests.discard(job)
        for choices in (self.active, self.idle):
            if choice in choices:
                choices.remove(choice)
        choice.state = State.ENDED
        choice.release()

    def rebuild(self) -> None:
        """Queue all unfinished texts again: a step was interrupted at an unknown point."""
        queue: list[tuple[Key, Job | Choice]] = []
        choices = [choice for job in self._known for choice in job.choices.values()]
        for choice in {*choices, *self.active, *self.idle}:
            # A user's drafter may fail; the error that interrupted the step is raised instead.
            with suppress(Exception):
                self._preempt(choice)
        self.active.clear()
        self.idle.clear()
        self._held.clear()
        for job in self._known:
            if job.samples and job.samples[0] in job.choices:
                job.samples.popleft()  # its choice had just been created
        self._known = {job: None for job in self._known if not job.is_idle}
        for choice in choices:
            choice.equals = []
            if choice.state is not State.PARKED:
                choice.state = State.WAITING
            if choice.state is State.WAITING:
                queue.append((choice.key, choice))
        queue += [(job.key, job) for job in self._known if job.samples]
        self._queue = queue
        heapq.heapify(self._queue)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits or runs."""
        return not self._known

    # -- sequences -----------------------------------------------------------------------------------

    def admit(self) -> list[Choice]:
        """Give sequences to waiting choices; return the refused ones, each with its ``error``.

        If others hold every sequence of the context, the choices stay queued. If no choice is active
        either, ``no_sequence`` is the error.
        """
        refused: list[Choice] = []
        previous, self.no_sequence = self.no_sequence, None
        for active in self.active[:]:
            if active.job.rests and (active.running or active.job.caller.failure is not None):
                self.park(active)
        while self._held:
            heapq.heappush(self._queue, (self._held[-1].key, self._held[-1]))
            self._held.pop()
        while (choice := self.head()) is not None:
            if (self.is_crowded and self.active) or not self._admit(choice, previous):
                break
            heapq.heappop(self._queue)
            if choice.error is not None:
                refused.append(choice)
        return refused

    def begin_answers(self, choice: Choice) -> list[Told]:
        """Let a text and all that share its thought begin their answers, each by itself.

        Return the events that report their thoughts.
        """
        equals, choice.equals = choice.equals, []
        events = [event for text in (choice, *equals) for event in text.answer()]
        for text in equals:
            heapq.heappush(self._queue, (text.key, text))
        return events

    def _activate(self, choice: Choice, text: Text, n_cached: int, shared: Choice | None) -> None:
        """Give a choice a sequence that holds its first ``n_cached`` tokens.

        ``shared`` is the choice with which it shares the cells of these tokens, if any.
        """
        choice.shared = (shared, n_cached if shared is not None else 0)
        stats = choice.job.caller.stats
        stats.cached += n_cached
        if shared is not None or choice.job.beginning is not None:
            stats.shared += n_cached
        choice.admit(text, n_cached)
        self.active.append(choice)
        self.records.begin(choice, min(n_cached, len(choice.job.prompt)))

    def _admit(self, choice: Choice, previous: SequencesExhaustedError | None) -> bool:
        """Give the first waiting choice a sequence or an error; return False if it must wait.

        ``previous`` is the value of ``no_sequence`` after the last ``admit``.
        """
        n_tokens, choice.error = choice.n_to_cache, None
        if n_tokens > self._ctx.n_ctx_seq:
            choice.error = CacheFullError.of_prompt(n_tokens, self._ctx.n_ctx_seq)
            return True
        if choice.sequence is not None:  # it was parked
            self.idle.remove(choice)
            self.active.append(choice)
            choice.state = State.RUNNING
            return True
        session, prefixes = choice.job.session, self._ctx.prefix_cache
        if session is not None and prefixes is not None:
            n_kept = prefixes.n_kept_above(session, choice.to_cache)
            if n_tokens + n_kept > self._ctx.n_ctx:
                choice.error = CacheFullError.beside_parent(n_tokens, n_kept, self._ctx.n_ctx)
                return True
        self.records.note_asker(choice)
        with self._ctx.lock:  # another thread may close the context, or decode
            self._ctx.decoder.check_open()
            source, n_cached = self._best_prefix(choice)
        if source is not None and source.is_reading and source.text.n_cached < n_cached:
            return False  # the prefix it will share is still being decoded
        if source in self.idle and not self._free_sequence(source):
            self._free_idle()  # only the source itself is left
            source, n_cached = None, 0
        if not self._make_room(max(1, n_tokens + 1 - n_cached), source, is_first=previous is None):
            self.no_sequence = None if self.active else previous
            return False
        try:
            text, n_cached = self._new_text(choice, source, n_cached)
        except SequencesExhaustedError as error:
            self.no_sequence = None if self.active else error
            return False
        except LlamaBranchError as error:  # its grammar or sampling settings are invalid
            choice.error = error
            return True
        self._activate(choice, text, n_cached, source)
        return True

    def _new_text(self, choice: Choice, source: Choice | None, n: int) -> tuple[Text, int]:
        """Return a text for a choice, and how many of the choice's tokens it already holds."""
        beginning = choice.job.beginning
        if beginning is not None:
            with self._ctx.lock:
                sampler = beginning.sampler.clone()
                text = Text(self._ctx, None, sampler, choice.seed, beginning)
                text.keep(n)
                text.hang(None)
                return text, n
        cacheable = [] if source is not None else _unscored(choice)
        text = Text(self._ctx, None, choice.new_sampler(), choice.seed, beginning=cacheable)
        if source is not None:
            text.share_prefix(source.text, n)
            return text, n
        try:
            n = text.take_cached(cacheable, choice.n_read)
        except GrammarError:  # the grammar forbids the text that the request continues
            text.release()
            raise
        return text, min(n, len(choice.prompt))

    def _best_prefix(self, choice: Choice) -> tuple[Choice | None, int]:
        """Return the choice that has the longest prefix in common with this one, and its length.

        The choice is None if the prefix cache has a longer prefix, and in a search, where all texts
        continue one branch.
        """
        if choice.job.beginning is not None:
            return None, len(choice.prompt)
        if choice.wants_rows:
            return None, 0
        memory = self._ctx.kv_cache
        # The choice decodes its last token itself, because it needs the logits after it, and also
        # the tokens generated before a preemption, because its grammar must accept them.
        tokens = choice.to_cache[:-1]
        wanted = tokens[: choice.n_read]
        best: tuple[Choice | None, int] = (None, 0)
        if len(wanted) < MIN_SHARED:
            return best
        for other in (*self.active, *self.idle):
            if other.sequence is None:
                continue
            cells = other.cells
            if other.job.rests:  # it will not read the rest of its prompt
                cells = cells[: other.sequence.n_cached]
            n = memory.usable(other.sequence.seq_id, n_common(cells, wanted))
            if n >= MIN_SHARED and n > best[1]:
                best = (other, n)
                if n == len(wanted):
                    break
        prefixes = self._ctx.prefix_cache
        n_kept = 0 if prefixes is None else prefixes.n_common(tokens)
        if n_kept == best[1] and memory.forks_copy:
            # Take the cached prefix: its cells may be evicted; a running choice's cells would be
            # copied.
            return None, 0
        return (None, 0) if n_kept > best[1] else best

    # -- room ----------------------------------------------------------------------------------------

    def _make_room(self, n: int, source: Choice | None, *, is_first: bool) -> bool:
        """Make room for ``n`` tokens of a new choice, and for the next tokens of the active choices.

        ``source`` is the choice whose first tokens it shares. ``is_first`` is False if the last
        attempt found no free sequence.
        """
        if not self._free_sequence(source) and (self.active or not is_first):
            return False
        n_needed = sum(other.n_uncached + 1 for other in self.active)
        while self.active and not self._ctx.kv_cache.has_room(n, n_needed):
            if not self._free_idle(source):
                return False
        return True

    def _free_sequence(self, source: Choice | None = None) -> bool:
        """If no sequence is free, free one of an idle choice except ``source``; return whether one is."""
        return self._ctx.n_seq_free > 0 or self._free_idle(source)

    def _free_idle(self, source: Choice | None = None) -> bool:
        """Free the sequence of an idle choice other than ``source``; return False without one."""
        oldest = next((choice for choice in self.idle if choice is not source), None)
        if oldest is None:
            return False
        self.idle.remove(oldest)
        self._preempt(oldest)
        return True

    def preempt(self) -> bool:
        """Free the sequence of an idle choice, or else of the newest active choice, which then waits.

        Return False if there is no idle choice, and at most one active choice, which must stay.
        """
        if not self.idle and len(self.active) <= 1:
            return False
        choices = self.idle[:1] or [max(self.active, key=lambda active: active.key)]
        choices[0].job.caller.stats.preemptions += 1
        self.is_crowded = True
        if not self._free_idle():
            self.active.remove(choices[0])
            self._preempt(choices[0])
            self.requeue(choices[0])
        return True

    def _preempt(self, choice: Choice) -> None:
        choice.num_preemptions += choice.sequence is not None
        choice.release()


def _unscored(choice: Choice) -> list[int]:
    """Return the first tokens of a choice that may come from the prefix cache."""
    tokens = choice.to_cache[:-1]
    if choice.wants_rows:  # the token before the first scored one has to be decoded
        tokens = tokens[: max(0, min(choice.request.logprobs_from, len(choice.prompt)) - 1)]
    return tokens
