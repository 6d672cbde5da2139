"""Events for the tabs, and the jobs that generate and score tokens.

Everything here runs in the event loop. The engine's thread hands over
results with `Live.call`. Tokens are sent within 50 ms, or 0.25 s if the model needs all cores, and are
in the file 0.25 s later.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from secrets import token_hex
from time import perf_counter

import msgspec
from msgspec import Raw

from ..branch import Produced
from ..context import Context, PromptProgress, TokenScore
from ..engine import Request, Result
from ..model.model import token_piece
from ..native.library import available_cores
from ..serve.errors import HttpError, http_error
from ..serve.generation import Update, all_texts, updates
from ..serve.service import Service
from ..speculative import RoundTrace
from .document import AnyRecord, Change, Document, Ended, Kept, Node, Pieces, Tokens, short
from .journal import Journal
from .turns import answers, head_of
from .window import prompt_of, scoring_window

_EVENT_S, _BUSY_EVENT_S, _SAVE_S, _RETRY_S, _BEAT_S = 0.05, 0.25, 0.25, 1.0, 15.0
_MOST_EVENTS = 4096  # events that wait for a slow tab
_FEW = 64  # up to this many tokens are processed without showing progress
_MOST_AGAIN = 4096  # tokens that a tab gets again when some of them have new numbers
_HELD = 8  # an incomplete tag or character has at most this many tokens
MOST_TOP = 10
_SOURCES = {"plain": "s", "drafted": "d", "forced": "f", "bonus": "b", "corrected": "c"}
_encode = msgspec.json.encode

Scored = Produced | TokenScore
Work = Callable[["PageJob"], Coroutine[object, object, None]]


def _source(token: Produced) -> str:
    """Return the letter of a generated token's source; a grammar's only choice was forced."""
    return "f" if token.n_allowed == 1 else _SOURCES[token.source]


def leaves_cores(ctx: Context) -> bool:
    """Return whether decoding leaves cores to other programs."""
    return available_cores() > ctx.n_threads


@dataclass(eq=False)
class PageJob:
    """Something that runs: its nodes, its state, its error."""

    id: str
    op: str
    node: str | None
    nodes: list[Node] = field(default_factory=list)
    state: str = "running"
    message: str | None = None
    error: str | None = None
    is_stopped: bool = False
    names: list[str] = field(default_factory=list)  # ids of its requests to the engine
    n_read: int = 0  # tokens that it has read to score them

    def as_dict(self) -> dict[str, object]:
        """Return the job as the page gets it."""
        nodes = [node.id for node in self.nodes]
        names = ("id", "op", "node", "state", "message", "error")
        return {name: getattr(self, name) for name in names} | {"nodes": nodes}


class _Thought:
    """The tokens of a thought, before an answer that must follow a grammar or a constraint.

    The last tokens of the thought may still be drawn again, so they wait until it ends.
    """

    def __init__(self) -> None:
        self._waiting: list[Produced] = []
        self._n = 0  # how many were returned

    def new(self, update: Update) -> list[Produced]:
        """Return the tokens that will not change after this update."""
        self._waiting += update.thoughts
        sure, self._waiting = self._waiting[:-_HELD], self._waiting[-_HELD:]
        ended = update.ended_thought
        if update.ended is not None and self._waiting:  # it ended inside the thought
            ended = [*update.ended.emitted[: update.ended.n_thought_tokens]]
        if ended:
            sure, self._waiting = ended[self._n :], []
        self._n += len(sure)
        return sure


class Live:
    """The events and the jobs of one document.

    Args:
        path: its file.
        service_of: returns the server's service, or None while the model loads.
        read_only: never write the file.

    Raises:
        ConfigError: the file was not written by the page.
    """

    def __init__(
        self, path: Path, service_of: Callable[[], Service | None], *, read_only: bool = False
    ) -> None:
        self.document = Document()
        self.journal = Journal(path, self.document, read_only=read_only)
        self.service_of = service_of
        self.acting = asyncio.Lock()  # held by what makes nodes: their names are free until then
        self.boot = token_hex(4)
        self.jobs: dict[str, PageJob] = {}  # those that run
        self._numbers = count(1)
        self.n_events = 0
        self._tabs: dict[asyncio.Event, list[bytes]] = {}  # events that wait to be sent to each tab
        self._tasks: set[asyncio.Task[None]] = set()
        # Own tokens that are neither sent nor in the journal.
        self._unsent: dict[Node, tuple[int, int]] = {}
        self._later: dict[object, tuple[str, object]] = {}  # other events that wait, by their key
        self._loop: asyncio.AbstractEventLoop | None = None  # the server's, once a tab listens
        self._timer: asyncio.TimerHandle | None = None
        self._saver: asyncio.Task[None] | None = None
        self._sent = 0.0
        self._told: dict[str, object] = {}  # the state of the file

    @property
    def service(self) -> Service:
        """The server's service. Raises HttpError while the model loads."""
        service = self.service_of()
        if service is None:
            raise HttpError(503, "the model is still loading")
        return service

    # -- events ----------------------------------------------------------------------------------------

    def emit(self, name: str, data: object) -> None:
        """Send an event to all tabs."""
        self.n_events += 1
        frame = self._frame(name, data)
        for news, waiting in self._tabs.items():
            if len(waiting) == _MOST_EVENTS:
                waiting[:] = [self._frame("reset", {})]
            waiting.append(frame)
            news.set()

    def _frame(self, name: str, data: object) -> bytes:
        return f"event: {name}\nid: {self.n_events}\ndata: ".encode() + _encode(data) + b"\n\n"

    def send_nodes(self, *nodes: Node, cid: str = "") -> None:
        """Send the current state of nodes; ``cid`` is the id of the request that made them."""
        for node in nodes:
            self.emit("node", {"node": self.document.node_fields(node), "cid": cid})

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield events as they come. The first one makes the tab fetch the document."""
        self._loop = asyncio.get_running_loop()
        news, waiting = asyncio.Event(), [self._frame("reset", {})]
        self._tabs[news] = waiting
        try:
            while True:
                frames, waiting[:] = b"".join(waiting), []
                yield frames or b": beat\n\n"
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(news.wait(), _BEAT_S)
                news.clear()
        finally:
            del self._tabs[news]

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in the event loop. Any thread may call this."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: function(*args))

    def send_undo(self) -> None:
        """Send how many actions can be undone and redone."""
        self.emit("set", self.document.counts())

    # -- records ---------------------------------------------------------------------------------------

    def add(self, *records: AnyRecord) -> None:
        """Add records to the document and its file, after the tokens that came before."""
        self.send_tokens()
        self.keep(*records)

    def keep(self, *records: AnyRecord) -> None:
        """Add records to the document; they are on the disk within about 0.25 s, if it has space."""
        for record in records:
            if isinstance(record, Tokens):
                self.learn(record.named())
            self.journal.add(record)
        if self._saver is None and self.journal.waits:
            self.tell_file()
            self._saver = asyncio.ensure_future(self._save())

    async def _save(self) -> None:
        """Save records until none waits."""
        while self.journal.waits:
            await asyncio.sleep(_RETRY_S if self.journal.error else _SAVE_S)
            await asyncio.to_thread(self.journal.save)
            self.tell_file()
        self._saver = None

    async def confirm(self) -> dict[str, object]:
        """Save all records; return {}, or an error if that fails. The records are kept."""
        await asyncio.to_thread(self.journal.save)
        self.tell_file()
        if self.journal.error is None:
            return {}
        name, n = self.journal.path.name, self.journal.unsaved()
        told = (
            f"{name} cannot be written: {self.journal.error}. Texts that are only in memory: {n}."
        )
        return HttpError(507, f"{told} The page tries again.", kind="disk_error").body_for("")

    def tell_file(self) -> None:
        """Tell the tabs the state of the file if it has changed."""
        if self._told != (file := self.file):
            self._told = file
            self._emit_later("file", "set", {"file": file})

    @property
    def file(self) -> dict[str, object]:
        """The file's name and state, for the page's header."""
        journal = self.journal
        return {
            "name": journal.path.name, "saved": journal.saved and not (self._unsent or self.writing),
            "read_only": journal.read_only, "error": journal.error,
            "unsaved": journal.unsaved(self._unsent),
        }  # fmt: skip

    def columns(self, node: Node, a: int, b: int, *, top: bool = True) -> dict[str, object]:
        """Return own tokens of a node from ``a`` to ``b``, and where its thoughts and calls are."""
        columns, parts = self.document.columns(node, a, b, top=top), self.answers([node])
        return columns | {"answers": parts[node.id]} if parts else columns

    def answers(self, nodes: Iterable[Node]) -> dict[str, object]:
        """Return the thoughts and calls in the answers of nodes, by their names."""
        service = self.service_of()
        if service is None:
            return {}
        parts_by_node = {node.id: answers(self.document, service.model, node) for node in nodes}
        return {name: parts for name, parts in parts_by_node.items() if parts}

    def note(self, node: Node, a: int, b: int) -> None:
        """Mark own tokens of a node as new, or as having new numbers."""
        old = self._unsent.get(node, (a, b))
        self._unsent[node] = min(old[0], a), max(old[1], b)
        self._wake()

    def _emit_later(self, key: object, name: str, data: object) -> None:
        """Send an event when tokens may be sent; one with the same key that still waits is dropped."""
        self._later[key] = name, data
        self._wake()

    def _wake(self) -> None:
        if self._timer is None:  # the first tokens after a pause are sent at once
            wait = max(0.0, self._sent + self._event_s - perf_counter())
            self._timer = asyncio.get_running_loop().call_later(wait, self._tick)

    @property
    def _event_s(self) -> float:
        """Seconds between two events. Drawing takes time from a model that needs all cores."""
        service = self.service_of()
        return _EVENT_S if service is None or leaves_cores(service.ctx) else _BUSY_EVENT_S

    def _tick(self) -> None:
        self._timer, self._sent = None, perf_counter()
        self.send_tokens()

    def send_tokens(self) -> None:
        """Send all news that was not sent yet, and add the tokens to the file."""
        later, self._later = self._later, {}
        for name, data in later.values():
            self.emit(name, data)
        waiting, self._unsent = self._unsent, {}
        for node, (a, b) in waiting.items():
            self.emit("tokens", self.columns(node, a, b))
            self.keep(node.record(a, b))

    # -- jobs ------------------------------------------------------------------------------------------

    def start(
        self, op: str, work: Work, node: Node | None = None, nodes: Sequence[Node] = ()
    ) -> PageJob:
        """Start a job. Tabs get its state, and its nodes now and when it ends."""
        job = PageJob(f"j{next(self._numbers)}", op, node.id if node else None, [*nodes])
        self.jobs[job.id] = job
        self._loop = asyncio.get_running_loop()
        for job_node in nodes:
            job_node.job = job.id
        self.send_nodes(*nodes)
        self.emit("job", job.as_dict())
        task = asyncio.ensure_future(self._run(job, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def _run(self, job: PageJob, work: Work) -> None:
        try:
            await work(job)
            job.state = "stopped" if job.is_stopped else "done"
        except Exception as error:
            job.state = "stopped" if job.is_stopped else "failed"
            if not job.is_stopped:  # stopping a job raises an error in it
                job.error = str(http_error(error))
        job.message = None
        self._later.pop(job.id, None)
        for node in job.nodes:
            node.job = None
            if node.made.seed is not None and node.ended is None:
                self.add(Ended(id=node.id, reason="stopped" if job.is_stopped else "error"))
        # A node that was stopped before its first token is dropped.
        cut = job.nodes if job.state != "done" else ()
        empty = [node for node in cut if not node.ids and not node.children]
        self.add(*(Change(id=node.id, name="hidden") for node in empty))
        self.send_nodes(*job.nodes)
        if empty:
            self.send_undo()
        self.emit("job", job.as_dict())
        del self.jobs[job.id]
        await self.confirm()

    async def close(self) -> None:
        """End all jobs and close the file."""
        for task in [*self._tasks]:
            task.cancel()
        for job in self.jobs.values():
            job.is_stopped = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.send_tokens()
        if self._saver is not None:
            self._saver.cancel()
        self.journal.close()

    @property
    def writing(self) -> bool:
        """Whether a text is being generated."""
        return any(job.nodes for job in self.jobs.values())

    def stop(self, jobs: Iterable[PageJob]) -> None:
        """Stop jobs at their next step."""
        for job in jobs:
            job.is_stopped = True
            for name in job.names:
                self.service.engine.abort(name)

    # -- tokens ----------------------------------------------------------------------------------------

    def take(self, node: Node, scored: Sequence[Scored], src: str, at: int | None = None) -> None:
        """Append tokens to a node, or set the numbers of its own tokens from number ``at`` on."""
        start = len(node.ids) if at is None else at
        tops = [[(a.token, short(a.logprob)) for a in score.alternatives] for score in scored]
        self.learn([score.token for score in scored] + [token for top in tops for token, _ in top])
        al = [(isinstance(score, Produced) and score.n_allowed) or None for score in scored]
        self.document.apply(Tokens(
            id=node.id, at=start, ids=[score.token for score in scored],
            lp=[short(score.logprob) for score in scored], h=[short(score.entropy) for score in scored],
            rk=[score.rank or None for score in scored], src=src, top=[Raw(_encode(top)) for top in tops],
            al=al if any(al) else [],
        ))  # fmt: skip
        self.note(node, start, start + len(scored))

    def learn(self, ids: Iterable[int]) -> None:
        """Add the texts of new tokens to the document."""
        new = set(ids) - self.document.pieces.keys()
        if new:
            self.keep(Pieces(p={token: token_piece(self.service.model, token) for token in new}))

    def _on_reading(self, job: PageJob, n_cached: int, n_read: int, n: int) -> None:
        """Report how much of a text a job has processed."""
        message = None
        if n - n_cached > _FEW and n_read < n:
            message = f"reading {n_read:,} of {n:,} tokens"
        if job.state == "running" and message != job.message:
            job.message = message
            self._emit_later(job.id, "job", job.as_dict())

    def _watched(self, job: PageJob, request: Request, skipped: int = 0, n: int = 0) -> Request:
        """Return a job's request that reports how much of a text of ``n`` tokens is processed.

        The prompt begins after the first ``skipped`` tokens of the text; without ``n`` it is the text.
        """

        def report(read: PromptProgress) -> None:
            n_cached, n_read = read.n_cached + skipped, read.n_read + skipped
            self.call(self._on_reading, job, n_cached, n_read, n or read.n_total)

        return request.replace(on_prompt_progress=report)

    def _on_round(self, node: Node, trace: RoundTrace, at: int) -> None:
        """Keep a round of speculation, drafted from the position ``at`` on, and send it."""
        following, draft, pieces = trace.following, trace.draft, self.document.pieces
        if following is None:
            return
        self.learn([*draft, following.token])
        lps = [*map(short, trace.logprobs), *[None] * len(draft)]
        fields = {
            "node": node.id, "at": at, "round": len(node.rounds) + 1,
            "draft": [(t, pieces[t], lp) for t, lp in zip(draft, lps, strict=False)],
            "accepted": trace.n_accepted, "rejected": trace.n_rejected,
            "unreached": len(draft) - trace.n_accepted - trace.n_rejected,
            "next": (following.token, pieces[following.token], short(following.logprob)),
            "src": _SOURCES.get(following.source, "s"),
            "ms": (round(1e3 * trace.draft_s, 3), round(1e3 * trace.verify_s, 3)),
        }  # fmt: skip
        self.keep(Kept(id=node.id, name="rounds", data=Raw(_encode(fields))))
        self._emit_later((node.id, len(node.rounds)), "round", fields)

    async def generate(self, job: PageJob, work: Sequence[tuple[Node, Request]]) -> None:
        """Run requests until they end. Each one fills a node."""
        if job.is_stopped:
            return
        nodes = {f"loom-{job.id}-{node.id}": node for node, _ in work}
        job.names = [*nodes]

        def watched(node: Node, shift: int) -> Callable[[RoundTrace], None]:
            return lambda trace: self.call(self._on_round, node, trace, shift + trace.position)

        named = [
            self._watched(job, request.replace(
                id=name, on_round=watched(node, node.end - len(request.prompt))
            )) for name, (node, request) in zip(nodes, work, strict=True)
        ]  # fmt: skip
        above = {each.id for node in nodes.values() for each in node.ancestors()}
        scoring = [each for each in self.jobs.values() if each.op == "score" and each.node in above]
        n_told = {each: each.n_read for each in scoring}
        thoughts = {node: _Thought() for node in nodes.values()}
        async with aclosing(updates(self.service, named)) as steps:
            async for changed in steps:
                for update in changed:
                    node = nodes[update.job.name]
                    tokens = thoughts[node].new(update) + update.tokens
                    if tokens:
                        self.take(node, tokens, "".join(map(_source, tokens)))
                    if update.ended is not None:
                        # What a job that scores this text has read meanwhile was read for it too.
                        n_meanwhile = sum(each.n_read - n_told[each] for each in scoring)
                        n_told = {each: each.n_read for each in scoring}
                        self._end(job, node, update.ended, n_meanwhile)

    def _end(self, job: PageJob, node: Node, result: Result, n_meanwhile: int) -> None:
        reason = "stopped" if result.finish_reason == "cancelled" else result.finish_reason
        if result.error is not None and reason != "capacity":
            job.error = str(http_error(result.error))
        read = max(0, result.evaluated - 1) + n_meanwhile  # the last token is always read again
        cached = max(0, result.cached - n_meanwhile)
        first, last = result.first_token_s, result.last_token_s
        seconds = last - first if first is not None and last is not None else 0.0
        rate = round((result.generated - 1) / seconds, 1) if seconds else None
        self.add(Ended(id=node.id, reason=reason, read=read, cached=cached, rate=rate))
        self.send_nodes(node)

    async def score(self, job: PageJob, node: Node) -> None:
        """Score the tokens of a node's text that have no log-probability yet.

        A text longer than the context is scored in parts. Every token of it gets its number from a
        context that has at least the half of its tokens before it, and no memory: about what a
        continuation there would see.
        """
        places = [
            owner.at + i
            for owner, a, b in node.stretches()
            for i in range(a, b)
            if owner.lp[i] is None and owner.at + i
        ]
        ids, n_done, job.names = node.tokens(), 0, [f"loom-{job.id}"]
        model, n_ctx, is_long = self.service.model, self.service.n_ctx, False
        head = head_of(self.document.turns(node), ids, model)
        while n_done < len(places) and not job.is_stopped:
            window, end = scoring_window(model, ids, places[n_done], n_ctx, head)
            part, shift = places[n_done : bisect_left(places, end)], window.start - window.head
            request = Request(
                prompt_of(window, ids[: part[-1] + 1]), max_tokens=0, id=job.names[0],
                prompt_logprobs=MOST_TOP, logprobs_from=part[0] - shift,
            )  # fmt: skip
            watched = self._watched(job, request, shift, places[-1] + 1)
            (text,) = await all_texts(self.service, [watched])
            job.n_read += text.result.evaluated
            scores = text.result.prompt_logprobs or []
            for owner, a, b in node.stretches(part[0], part[-1] + 1):
                new = [i for i in range(a, b) if owner.lp[i] is None and owner.at + i]
                is_run = new and new[-1] - new[0] == len(new) - 1
                for run in [new] if is_run else [[i] for i in new]:
                    found = [s for i in run if (s := scores[owner.at + i - shift])]
                    self.take(owner, found, "".join(owner.src[run[0] : run[-1] + 1]), run[0])
                if new and len(owner.ids) <= _MOST_AGAIN:
                    self.note(owner, 0, new[-1])  # a tab ignores tokens after a gap
                is_long = is_long or bool(new and len(owner.ids) > _MOST_AGAIN)
            n_done += len(part)
        if is_long:  # the tabs fetch its tokens
            self.add()
            self.emit("reset", {})
