"""Records of the requests of a context: which tokens were read, and why.

The prompts of the last requests are a tree: an entry has the tokens that its parent does not have. So a
long conversation takes as much memory as its last prompt.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from time import perf_counter, time

from msgspec.structs import replace

from ..context import Context
from ..context.prefix_cache import MIN_SHARED, CachedPrefix
from ..model.text import n_common
from ..model.tree import TextNode
from ..request.difference import PromptText, around, repeated, words
from ..request.record import Cause, Record
from ..request.result import Result
from .job import Choice, Job

_MOST = 500  # records that are kept
_LEAST_AGAIN = 32  # tokens; shorter runs that two prompts share mean nothing
_OFTEN = 3  # misses with the same cause before a hint is given
_STEP = 4096  # tokens; suggested context sizes are multiples of it
_WORDS = re.compile(r"\D*(?:(?<!\w)(?=.)|(?=\W))", re.DOTALL)  # never includes the last character


@dataclass(eq=False)
class Eviction:
    """The end of a text was evicted.

    Attributes:
        time: when, in seconds since 1970.
        n_left: how many tokens of the text were kept.
        reason: which session or request needed its cells, and how many.
        n_evicted: how many cells had been evicted in total before.
    """

    time: float
    n_left: int
    reason: str
    n_evicted: int


class Entry(TextNode):
    """A prompt with its generated text: the first ``at`` tokens are its parent's.

    Attributes:
        record: its request; None for the root.
        tokens: the tokens from ``at`` on.
        answer: the text that was generated.
        n_thought: how many tokens of the answer were a thought.
        eviction: the last eviction of its end.
    """

    def __init__(
        self, parent: Entry | None, at: int, tokens: list[int], record: Record | None
    ) -> None:
        super().__init__(parent)
        self.at = at
        self.tokens = tokens
        self.record = record
        self.answer = ""
        self.n_thought = 0
        self.eviction: Eviction | None = None

    def all_tokens(self) -> list[int]:
        """Return its tokens from the beginning."""
        parts, end = list[list[int]](), None
        for entry in self.ancestors():
            parts.append(entry.tokens if end is None else entry.tokens[: end - entry.at])
            end = entry.at
        return [token for part in reversed(parts) for token in part]


class Compared:
    """A prompt and the earlier text that it is compared with.

    Args:
        choice: has the prompt.
        entry, record: the earlier text, and its request.

    Attributes:
        old: the tokens of the earlier text.
        at: how many tokens they share at the beginning.
    """

    def __init__(self, choice: Choice, entry: Entry, record: Record) -> None:
        self.choice, self.entry, self.record = choice, entry, record
        self.old = entry.all_tokens()
        self.at = n_common(self.old, choice.job.prompt)

    @property
    def is_in_answer(self) -> bool:
        """Whether they part in the earlier answer, with which a prompt's last tokens may be joined."""
        return self.at > self.record.num_prompt_tokens - MIN_SHARED

    @cached_property
    def text(self) -> PromptText:
        """The text of the prompt."""
        job, request = self.choice.job, self.choice.request
        return PromptText(
            job.model, request.prompt, job.prompt, has_tools=request.tools is not None
        )


class Records:
    """The records of a context, oldest first, and the tree of their prompts.

    Only the thread that runs a step changes them.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._root = Entry(None, 0, [], None)
        self._entries: deque[Entry] = deque(maxlen=_MOST)
        self._n = 0
        self._asker: Choice | None = None

    def all(self) -> list[Record]:
        """Return the records. Callable from any thread."""
        return [entry.record for entry in self._entries.copy() if entry.record is not None]

    # -- what happens --------------------------------------------------------------------------------

    def note_asker(self, choice: Choice | None) -> None:
        """Note which text needs the cells that are evicted from now on; None = no request's text."""
        self._asker, prefixes = choice, self._ctx.prefix_cache
        if prefixes is not None:
            prefixes.asker = None if choice is None else choice.job.session
            prefixes.note_evicted = self._note_evicted

    def _note_evicted(self, text: CachedPrefix, n_left: int) -> None:
        prefixes, asker = self._ctx.prefix_cache, self._asker
        n, entry = self._find(text.tokens)
        if prefixes is None or n <= n_left:
            return
        reason = "a branch needed room"
        if asker is not None:
            session, n_cells = asker.request.session_id, asker.n_to_cache
            reason = f"request {asker.name}" if session is None else f"session {session}"
            reason += f" needed room for {n_cells:,} tokens"
        eviction = Eviction(time(), n_left, reason, prefixes.n_evicted)
        for each in entry.ancestors():
            each.eviction = eviction
            if each.at <= n_left:
                return

    def begin(self, choice: Choice, n_cached: int) -> None:
        """Record that a request is admitted with the first ``n_cached`` tokens of its prompt cached."""
        job = choice.job
        if job.record is not None or job.beginning is not None:
            return
        request, tokens = choice.request, job.prompt
        record = Record(
            self._n, time(), job.door, job.name, request.session_id or "",
            request.parent_session_id or "", len(tokens), n_cached, len(tokens) - n_cached,
            queued_s=perf_counter() - job.arrival, dropped=job.dropped,
        )  # fmt: skip
        n_known, entry = self._find(tokens)
        self._explain(choice, record, entry, n_known)
        self._entries.append(Entry(entry, n_known, tokens[n_known:], record))
        job.record, self._n = record, self._n + 1

    def end(self, choice: Choice, result: Result) -> None:
        """Record that a text of a request has ended."""
        record = choice.job.record
        if record is None:
            return
        is_first, job = not choice.job.finish_reason, choice.job
        # 1. Add its tokens, and the part of the prompt that it has read.
        record.generated += result.generated
        n_read = record.num_prompt_tokens - record.cached - result.unread
        record.evaluated = max(0 if is_first else record.evaluated, n_read)
        # 2. The times are from the first token of all texts to the last one.
        first, last = result.first_token_s, result.last_token_s
        begun = record.queued_s + record.read_s
        if is_first and first is None:
            record.read_s = perf_counter() - job.arrival - record.queued_s
        elif first is not None and last is not None:
            if not is_first:
                first, last = min(first, begun), max(last, begun + record.write_s)
            record.read_s, record.write_s = first - record.queued_s, last - first
        # 3. Later prompts are compared with the text that ended first.
        entry = next((e for e in reversed(self._entries) if e.record is record), None)
        sequence = choice.sequence
        if is_first and entry is not None and sequence is not None:
            entry.tokens = sequence.tokens[entry.at : sequence.n_cached]
            entry.answer, entry.n_thought = result.text, result.n_thought_tokens
        if is_first or result.sample == 0:
            job.finish_reason = result.finish_reason
        if len(job.choices) == 1 and not job.samples:
            self._close(record, job)

    @staticmethod
    def _close(record: Record, job: Job) -> None:
        """Complete the record of a request whose texts have ended."""
        left, s_per_token = record.evaluated, record.read_s / max(1, record.evaluated)
        causes = list[Cause]()
        for cause in record.causes:
            n, told = min(left, cause.n_tokens), cause.told
            if n < cause.n_tokens:
                told = f"{told}, but only {n:,} of them were read"
            if cause.is_again:
                told = f"{told}, {s_per_token * n:.1f} s"
            if n > 0:
                causes.append(replace(cause, n_tokens=n, told=told))
            left -= n
        record.causes, record.finish_reason = causes, job.finish_reason
        if job.on_record is not None:
            job.on_record(record)

    # -- why -----------------------------------------------------------------------------------------

    def _find(self, tokens: Sequence[int]) -> tuple[int, Entry]:
        """Return how many tokens a known text begins with, and the first text that has them."""
        n, found, entry = 0, self._root, self._root
        while True:
            for child in entry.children:
                if child.at <= n and child.tokens[:1] == tokens[child.at : child.at + 1]:
                    common = child.at + n_common(child.tokens, tokens[child.at :])
                    if common > n:
                        n, found = common, child
            if found is entry:
                return n, found
            entry = found

    def _compared(
        self, choice: Choice, record: Record, entry: Entry, n_known: int
    ) -> Compared | None:
        """Return the text that a prompt is compared with, or None.

        It is the last text of its session, or else of the parent session, unless the prompt shares a
        longer beginning with another text.
        """
        for name in filter(None, (record.session, record.parent)):
            for each in reversed(self._entries):
                if each.record is not None and each.record.session == name:
                    compared = Compared(choice, each, each.record)
                    if compared.at >= n_known:
                        return compared
                    break
        if n_known < MIN_SHARED:
            if not self._entries or record.session:
                return None
            entry = self._entries[-1]
        return None if entry.record is None else Compared(choice, entry, entry.record)

    def _explain(self, choice: Choice, record: Record, entry: Entry, n_known: int) -> None:
        """Find out why tokens of a prompt are read."""
        n, n_cached = record.num_prompt_tokens, record.cached
        n_known = min(n_known, n - 1)  # the last token is always read
        start = max(n_cached, n_known)
        causes = record.causes
        if n_known - n_cached >= MIN_SHARED:
            causes.append(self._lost(choice, entry, n_cached, n_known))
        else:
            start = n_cached
        compared = self._compared(choice, record, entry, n_known)
        n_new = n - start
        if compared is not None:
            cause = self._differs(compared, start)
            if cause is not None or compared.at >= MIN_SHARED:
                record.follows = compared.record.number
            if cause is not None:
                causes.append(cause)
                n_new -= cause.n_tokens
                record.hint = self._hint(cause, compared)
        if n_new > 0:
            is_first = start < MIN_SHARED and not causes
            told = f"{n_new:,} new token{'s' * (n_new > 1)} after token {start:,}"
            if start == n - 1:
                told = "the last token, which is always read"
            elif is_first:
                told = f"{n_new:,} tokens; no earlier prompt begins like this"
            elif compared is not None:
                told += self._parted(compared)
            causes.append(Cause("first" if is_first else "new", n_new, told, start))

    def _lost(self, choice: Choice, entry: Entry, n_cached: int, n_known: int) -> Cause:
        """Return why tokens from ``n_cached`` to ``n_known`` are no longer in the cache."""
        n, memory = n_known - n_cached, self._ctx.kv_cache
        number = None if entry.record is None else entry.record.number
        if choice.wants_rows:
            told = f"{n:,} tokens read again, because their log-probabilities are asked for"
            return Cause("scored", n, told, n_cached, number)
        lost = [e.eviction for e in entry.ancestors() if e.eviction is not None]
        eviction = max((e for e in lost if e.n_left < n_known), key=lambda e: e.time, default=None)
        if eviction is None and not memory.can_draft:
            told = (
                f"{n:,} tokens read again: the memory of this model cannot return to token {n_known:,}, "
                f"only to token {n_cached:,}"
            )
            return Cause("memory", n, told, n_cached, number)
        if eviction is None:
            told = f"{n:,} tokens read again: their cells were freed"
            return Cause("evicted", n, told, n_cached, number)
        prefixes = self._ctx.prefix_cache
        n_more = n if prefixes is None else max(n, prefixes.n_evicted - eviction.n_evicted)
        enough = -(-(self._ctx.n_ctx + n_more) // _STEP) * _STEP
        told = (
            f"{n:,} tokens read again: they were evicted at "
            f"{datetime.fromtimestamp(eviction.time):%H:%M:%S} because {eviction.reason}; "
            f"-c {enough} would have been enough"
        )
        return Cause("evicted", n, told, n_cached, number)

    def _differs(self, compared: Compared, start: int) -> Cause | None:
        """Return how a prompt differs from an earlier text, if that is why tokens are read."""
        choice, record, old, at = compared.choice, compared.record, compared.old, compared.at
        tokens, model = choice.job.prompt, choice.job.model
        if at >= min(len(old), len(tokens)) or not model.has_text:
            return None
        number, prompt, text = record.number, choice.request.prompt, compared.text
        old_text = PromptText(model, prompt, old)
        window = {"before": around(old_text, at, len(old)), "after": around(text, at, len(tokens))}
        if compared.is_in_answer:
            message, raw, rest = text.answer_at(at), old_text.raw(at), text.raw(at)
            if rest.startswith(raw):
                n = text.position(len(text.raw(0)) - len(rest) + len(raw) - 1) + 1 - max(at, start)
                told = (
                    f"{n:,} tokens read again from token {at:,}: the text of the last answer is split "
                    "into other tokens than it was generated in"
                )
                return (
                    Cause("retokenized", n, told, at, number, **window) if n >= MIN_SHARED else None
                )
            if message is not None:
                n = text.end_of(message) - max(at, start)
                sent = str(dict(prompt[message]).get("content") or "")  # type: ignore[arg-type]
                what = "the client has changed the last answer"
                if sent.strip() == compared.entry.answer.strip():
                    what = "the template writes the last answer differently"
                    if compared.entry.n_thought:
                        what = "the template leaves out earlier thoughts"
                told = f"{what}: {n:,} tokens from token {at:,} on"
                return (
                    Cause("rewritten", n, told, at, number, **window) if n >= MIN_SHARED else None
                )
        runs = repeated(old[at:], tokens[at:])
        n = sum(min(run.n, max(0, at + run.start + run.n - start)) for run in runs)
        sessions = {choice.request.session_id, choice.request.parent_session_id} - {None}
        # Other clients may have the same words in their prompts.
        least = 0 if record.session in sessions else (len(tokens) - start) / 2
        if n < max(_LEAST_AGAIN, least):
            return None
        place = text.place(at)
        was, is_now = words(window["before"], window["after"])
        change = f"`{was}` became `{is_now}`"
        if was == is_now and not was.endswith("…"):
            change = "white space changed"
        elif runs[0].start == 0:
            is_moved = any(run.old_start < runs[0].old_start for run in runs)
            change = f"`{was}` was {'moved' if is_moved else 'left out'}"
        elif runs[0].old_start == 0:
            change = f"`{is_now}` was added"
        told = (
            f"read again from token {at:,} of {len(tokens):,}: {change}, {place.name}; {n:,} tokens"
        )
        return Cause("changed", n, told, at, number, place.name, **window)

    def _parted(self, compared: Compared) -> str:
        """Return where a prompt differs from the last one of its session, unless it continues it."""
        job, request, record = compared.choice.job, compared.choice.request, compared.record
        is_same = request.session_id is not None and record.session == request.session_id
        if not is_same or compared.is_in_answer or compared.at == len(job.prompt):
            return ""  # or one prompt is the beginning of the other
        if not job.model.has_text:
            return ""
        place = compared.text.place(compared.at)
        return f", where it parts from request {record.number}: {place.name}"

    def _hint(self, cause: Cause, compared: Compared) -> str:
        """Return a hint about a line that has changed often, or ""."""
        if cause.kind != "changed" or "system prompt" not in cause.place:
            return ""
        choice, text = compared.choice, compared.text
        place, rest = text.place(cause.start), text.raw(cause.start).decode("utf-8", "replace")
        session = choice.request.session_id or ""
        records = [record for record in self.all() if record.session == session]
        before = [other for record in records for other in record.causes]
        n = 1 + sum(other.place == cause.place and other.is_again for other in before)
        # Take whole words without digits, because the next request may have other digits, even
        # where these two agree.
        whole = _WORDS.match(f"{place.line[:40]}{rest[:1]}")
        beginning = whole[0].rstrip() if whole else ""
        if n < _OFTEN or len(beginning) < 4:
            return ""
        beginning = re.sub(r"[][\\^$.|?*+(){}]", r"\\\g<0>", beginning).replace("'", ".")
        return f"--drop-line '^{beginning}' leaves this line out"


def records_of(ctx: Context) -> Records:
    """Return the records of a context."""
    if not isinstance(ctx.records, Records):
        ctx.records = Records(ctx)
    return ctx.records
