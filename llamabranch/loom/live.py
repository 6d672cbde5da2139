"""What happens while one looks: events for the tabs, and the jobs that make tokens.

Everything here belongs to the event loop. Threads (the engine's, those of searches and comparisons) hand
over what they have with `Live.call`. Tokens wait at most 25 ms for an event, and four times as long for
the file.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest
from secrets import token_hex
from time import perf_counter

import msgspec
from msgspec import Raw

from ..arguments import real, whole
from ..branch import Branch, Produced
from ..context import Context, TokenScore
from ..engine import Request, Result
from ..errors import ConfigError
from ..sampling import SamplingParams
from ..search import (
    Potential,
    SearchNode,
    SearchObserver,
    SearchResult,
    SearchStats,
    beam_search,
    best_of_n,
    smc,
    step_search,
    tree_search,
    vote,
)  # fmt: skip
from ..serve.errors import HttpError, http_error
from ..serve.exchange import Exchange
from ..serve.service import Service
from ..speculative import RoundTrace
from .document import Compared, Document, Ended, Node, Record, Round, Tokens, digest, short
from .journal import Journal
from .pair import Place

__all__ = ["MOST_TOP", "Found", "Job", "Live", "Watch", "search", "told_error"]

_EVENT_S, _WRITE_S, _SYNC_S, _BEAT_S = 0.025, 0.09, 1.0, 15.0
_MOST_EVENTS = 4096  # that a tab can have missed
_MOST_OUTLINE = 2000
MOST_TOP = 10
_SOURCES = {"plain": "s", "drafted": "d", "forced": "f", "bonus": "b", "corrected": "c"}
_WIDTHS = {"beam": 4, "best_of_n": 8, "smc": 4, "vote": 16, "steps": 4, "tree": 4}
_OPTIONS = {
    "answer", "avoid", "diversity_penalty", "groups", "iterations", "length_penalty", "max_tokens",
    "reward", "seed", "step", "stop", "temperature", "want", "width",
}  # fmt: skip
_encode = msgspec.json.encode

Options = dict[str, object]
Rated = Produced | TokenScore


@dataclass(eq=False)
class Job:
    """Something that runs: its nodes, and how it went."""

    id: str
    op: str
    node: str | None
    nodes: list[Node] = field(default_factory=list)
    kind: str | None = None
    state: str = "running"
    told: str | None = None
    result: dict[str, object] | None = None
    error: dict[str, object] | None = None
    at: int = 0  # where a search begins
    is_stopped: bool = False
    names: list[str] = field(default_factory=list)  # of the engine's requests
    watch: Watch | None = None

    def as_dict(self) -> dict[str, object]:
        """Return what the page gets."""
        nodes = [node.id for node in self.nodes]
        names = ("id", "op", "node", "kind", "state", "told", "result", "error")
        return {name: getattr(self, name) for name in names} | {"nodes": nodes}


class Live:
    """The events and the jobs of one document.

    Args:
        document, journal: the document and its file.
    """

    def __init__(self, document: Document, journal: Journal) -> None:
        self.document = document
        self.journal = journal
        self.boot = token_hex(4)
        self.jobs: dict[str, Job] = {}
        self._numbers = count(1)
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=_MOST_EVENTS)
        self._lost = 0  # the newest event that is not in the ring any more
        self._news: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: dict[Node, tuple[int, int]] = {}  # own tokens that no event has told
        self._unwritten: dict[Node, tuple[int, int]] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._written = self._synced = 0.0

    # -- events ----------------------------------------------------------------------------------------

    def emit(self, name: str, data: object) -> None:
        """Send an event to all tabs."""
        self.document.rev += 1
        rev = self.document.rev
        if len(self._ring) == _MOST_EVENTS:
            self._lost = self._ring[0][0]
        head = f"id: {self.boot}.{rev}\nevent: {name}\ndata: ".encode()
        self._ring.append((rev, head + _encode(data) + b"\n\n"))
        for each in self._news:
            each.set()

    def tell(self, *nodes: Node) -> None:
        """Send what nodes are now."""
        for node in nodes:
            self.emit("node", {"rev": self.document.rev, "node": self.document.told(node)})

    async def stream(self, call: Exchange, since: str) -> None:
        """Send all events after ``since``, and from now on those that come."""
        await call.body()
        call.exempt()
        boot, _, rev = since.partition(".")
        seen = int(rev) if rev.isdecimal() else -1
        news = asyncio.Event()
        self._news.add(news)
        try:
            await call.write(b": hello\n\n")
            if boot != self.boot or seen > self.document.rev:
                seen = -1
            while True:
                if seen < self._lost:
                    seen = self.document.rev
                    reset = f"id: {self.boot}.{seen}\nevent: reset\ndata: {{}}\n\n"
                    await call.write(reset.encode())
                parts = [frame for number, frame in self._ring if number > seen]
                seen = self.document.rev
                if parts:
                    await call.write(b"".join(parts))
                    continue
                news.clear()
                try:
                    await asyncio.wait_for(news.wait(), _BEAT_S)
                except asyncio.TimeoutError:
                    await call.write(b": beat\n\n")
        finally:
            self._news.discard(news)

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Call a function in the event loop; from any thread."""
        self._loop.call_soon_threadsafe(lambda: function(*args))

    # -- records ---------------------------------------------------------------------------------------

    def add(self, *records: Record) -> None:
        """Add records to the document and its file, behind the tokens before them."""
        self._write_tokens()
        for record in records:
            self.journal.add(record)

    def confirm(self) -> None:
        """Write and sync all records. Raises HttpError if the disk refuses: they are kept."""
        before = self.journal.error
        self.journal.write(sync=True)
        if self.journal.error is not None:
            self.emit("set", {"file": self.file})
            told = f"{self.journal.error}; the page keeps what is not saved, and tries again"
            raise HttpError(507, told, kind="disk_error")
        if before is not None:
            self.emit("set", {"file": self.file})

    @property
    def file(self) -> dict[str, object]:
        """What the page tells of the file."""
        journal = self.journal
        saved = journal.error is None and not self._unwritten
        return {
            "name": journal.path.name, "saved": saved, "read_only": journal.read_only,
            "error": journal.error,
        }  # fmt: skip

    def _write_tokens(self) -> None:
        waiting, self._unwritten = self._unwritten, {}
        for node, (a, b) in waiting.items():
            self.journal.add(node.record(a, b))
        self._written = perf_counter()

    def note(self, node: Node, a: int, b: int) -> None:
        """Note own tokens of a node that are new, or have new numbers."""
        for waiting in (self._unsent, self._unwritten):
            old = waiting.get(node, (a, b))
            waiting[node] = min(old[0], a), max(old[1], b)
        if self._timer is None:
            self._timer = self._loop.call_later(_EVENT_S, self._tick)

    def _tick(self) -> None:
        """Send tokens, write them every fourth time, and sync once a second."""
        self._timer = None
        self.send_tokens()
        now = perf_counter()
        if now - self._written >= _WRITE_S - _EVENT_S:
            self._write_tokens()
            is_late = now - self._synced >= _SYNC_S
            had = self.journal.error
            self.journal.write(sync=is_late)
            self._synced = now if is_late else self._synced
            if had != self.journal.error:
                self.emit("set", {"file": self.file})
        if self._unwritten or self.journal.error:
            self._timer = self._loop.call_later(_EVENT_S, self._tick)

    def send_tokens(self) -> None:
        """Send the tokens that no event has told yet."""
        waiting, self._unsent = self._unsent, {}
        for node, (a, b) in waiting.items():
            columns = self.document.columns([(node, a, b)], top=True)
            self.emit("tokens", {"node": node.id, **columns})

    # -- jobs ------------------------------------------------------------------------------------------

    def start(
        self,
        op: str,
        work: Callable[[Job], Coroutine[object, object, None]],
        node: Node | None = None,
        nodes: Sequence[Node] = (),
        kind: str | None = None,
    ) -> Job:
        """Begin a job: its tabs are told of it, and of its nodes once it has ended."""
        job = Job(f"j{next(self._numbers)}", op, node.id if node else None, [*nodes], kind)
        self.jobs[job.id] = job
        for each in nodes:
            each.job = job.id
        self.emit("job", job.as_dict())
        task = asyncio.ensure_future(self._run(job, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def _run(self, job: Job, work: Callable[[Job], Coroutine[object, object, None]]) -> None:
        try:
            await work(job)
            job.state = "stopped" if job.is_stopped else "done"
        except Exception as error:
            job.state, job.error = "failed", told_error(error)
            self.emit("error", {**job.error, "job": job.id})
        self.send_tokens()
        for node in job.nodes:
            node.job = None
            if node.made.seed is not None and node.ended is None:
                self.add(Ended(id=node.id, reason="error"))
        self.add()
        self.journal.write(sync=True)
        self.tell(*job.nodes)
        self.emit("job", job.as_dict())

    async def close(self) -> None:
        """End all jobs, and the file."""
        for task in [*self._tasks]:
            task.cancel()
        for job in self.jobs.values():
            job.is_stopped = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.add()
        self.journal.close()

    def stop(self, service: Service | None, jobs: Iterable[Job]) -> list[str]:
        """End jobs at their next step; return their names."""
        running = [job for job in jobs if job.state == "running"]
        for job in running:
            job.is_stopped = True
            if service is not None:
                for name in job.names:
                    service.engine.abort(name)
        return [job.id for job in running]

    # -- tokens ----------------------------------------------------------------------------------------

    def rated(
        self, service: Service, name: str, rated: Sequence[Rated], src: str, at: int
    ) -> Tokens:
        """Return a record of rated tokens; the texts of new ones are in the document then."""
        tops = [[(a.token, short(a.logprob)) for a in one.alternatives] for one in rated]
        named = [one.token for one in rated] + [token for top in tops for token, _ in top]
        self.learn(service, named)
        return Tokens(
            id=name, at=at, ids=[one.token for one in rated],
            lp=[short(one.logprob) for one in rated], h=[short(one.entropy) for one in rated],
            rk=[one.rank or None for one in rated], src=src, top=[Raw(_encode(top)) for top in tops],
        )  # fmt: skip

    def take(
        self, service: Service, node: Node, rated: Sequence[Rated], src: str, at: int | None = None
    ) -> None:
        """Put tokens into a node at its end, or their numbers from its own ``at`` on."""
        start = len(node.ids) if at is None else at
        self.document.apply(self.rated(service, node.id, rated, src, start))
        self.note(node, start, start + len(rated))

    def learn(self, service: Service, ids: Iterable[int]) -> None:
        """Keep the texts of tokens that are new."""
        pieces = self.document.learn(service.model, ids)
        if pieces is not None:
            self.journal.add(pieces)

    def on_round(self, service: Service, job: Job, node: Node, trace: RoundTrace) -> None:
        """Keep and tell a round of speculation."""
        following = trace.following
        if following is None:
            return
        lps = [short(x) for x in trace.logprobs]
        named = [*trace.draft, following.token]
        self.learn(service, named)
        record = Round(
            id=node.id, at=trace.position, draft=[*trace.draft], lp=lps, accepted=trace.n_accepted,
            rejected=trace.n_rejected, next=(following.token, short(following.logprob)),
            src=_SOURCES.get(following.source, "s"), drafter=trace.drafter,
            ms=(round(1e3 * trace.draft_s, 3), round(1e3 * trace.verify_s, 3)),
        )  # fmt: skip
        self.journal.add(record)
        self.emit("round", self.document.round(record, len(node.rounds)))

    async def generate(
        self, service: Service, job: Job, work: Sequence[tuple[Node, Request]]
    ) -> None:
        """Run requests to their ends, each for a node of its own."""
        nodes: dict[str, Node] = {}
        named = []
        for node, request in work:
            name = f"loom-{job.id}-{node.id}"

            def on_round(trace: RoundTrace, node: Node = node) -> None:
                self.call(self.on_round, service, job, node, trace)

            named.append(replace(request, id=name, on_round=on_round))
            nodes[name] = node
        job.names = [*nodes]
        begun, n_before = perf_counter(), {node: len(node.ids) for node in nodes.values()}
        async for name, tokens, result in self._steps(service, named):
            node = nodes[name]
            if tokens:
                self.take(service, node, tokens, "".join(_SOURCES[one.source] for one in tokens))
            if result is not None:
                self._end(job, node, result, perf_counter() - begun, n_before[node])

    async def _steps(
        self, service: Service, requests: Sequence[Request]
    ) -> AsyncGenerator[tuple[str, list[Produced], Result | None], None]:
        """Yield what comes of each request: its name, new tokens, and at its end the result."""
        left = len(requests)
        service.n_texts += left
        try:
            async with aclosing(service.engine.steps(*requests)) as steps:
                async for events in steps:
                    tokens: dict[str, list[Produced]] = {event.id: [] for event in events}
                    for event in events:
                        one = event.emitted
                        if one is not None and one.token >= 0 and not one.is_stop:
                            tokens[event.id].append(one)
                    results = {event.id: event.result for event in events if event.result}
                    for name, its in tokens.items():
                        left -= name in results
                        service.n_texts -= name in results
                        yield name, its, results.get(name)
        finally:
            service.n_texts -= left

    def _end(self, job: Job, node: Node, result: Result, seconds: float, n_before: int) -> None:
        reason = "stopped" if result.finish_reason == "cancelled" else result.finish_reason
        if result.error is not None and reason != "capacity":
            job.error = told_error(result.error)
            self.emit("error", {**job.error, "node": node.id, "job": job.id})
        first = node.n_given
        n_read = result.num_prompt_tokens - result.num_cached_tokens
        ended = Ended(
            id=node.id, reason=reason, read=max(0, n_read - max(1, first)),
            cached=result.num_cached_tokens, digest=digest(node.ids[first:], node.lp[first:]),
        )  # fmt: skip
        self.send_tokens()
        self.add(ended)
        n = len(node.ids) - n_before
        told = {name: getattr(ended, name) for name in ("reason", "read", "cached", "digest")}
        rate = round(n / seconds, 1) if seconds else None
        seed = {
            "node": node.id,
            "seed": node.made.seed,
            "ms": round(1e3 * seconds, 1),
            "rate": rate,
        }
        self.emit("end", told | seed)

    async def score(self, service: Service, node: Node) -> None:
        """Rate the tokens of a node's text that have no numbers yet."""
        parts = node.stretches()
        unknown = [
            owner.made.at + i
            for owner, a, b in parts
            for i in range(a, b)
            if owner.lp[i] is None and owner.made.at + i
        ]
        if not unknown:
            return
        end = unknown[-1] + 1
        for rated, position in await self.rate(service, node.tokens(end), unknown[0]):
            owner = next(o for o, a, b in parts if o.made.at + a <= position < o.made.at + b)
            at = position - owner.made.at
            if owner.lp[at] is None:
                self.take(service, owner, [rated], owner.src[at], at)

    async def rate(
        self, service: Service, tokens: Sequence[int], start: int
    ) -> list[tuple[TokenScore, int]]:
        """Return ratings of tokens from ``start`` on, each with its position."""
        request = Request(
            [*tokens], f"loom-{next(self._numbers)}", max_tokens=0, prompt_logprobs=MOST_TOP,
            logprobs_from=max(1, start),
        )  # fmt: skip
        async for _, _, result in self._steps(service, [request]):
            if result is not None:
                if result.error is not None:
                    raise http_error(result.error)
                rated = enumerate(result.prompt_logprobs or ())
                return [(one, i) for i, one in rated if one is not None]
        return []

    async def replay(self, service: Service, job: Job, node: Node, request: Request) -> None:
        """Generate a node's text again and tell the first difference."""
        first = node.n_given
        old = [*zip(node.ids[first:], node.lp[first:], strict=True)]
        new: list[tuple[int, float | None]] = []
        named = replace(request, id=f"loom-{job.id}")
        job.names = [f"loom-{job.id}"]
        async for _, tokens, _ in self._steps(service, [named]):
            new += [(one.token, short(one.logprob)) for one in tokens]
        pairs = zip_longest(old, new)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        n = len(old)
        message = f"same {n} tokens, same log-probabilities, bit for bit"
        if at is not None:
            what = "token" if [t for t, _ in old] != [t for t, _ in new] else "log-probability"
            message = f"the first different {what} is number {at + 1} of {n}"
            if not service.is_exact:
                message += ": this model's results depend on what else is computed"
        position = None if at is None else node.made.at + first + at
        job.result = {"same": at is None, "n": n, "first": position, "message": message}


class Watch(SearchObserver):
    """Looks at a search while it runs, in its thread, and tells what is new in its tree."""

    def __init__(self, live: Live, job: Job) -> None:
        self.nodes: list[SearchNode] = []
        self.live = live
        self.job = job
        self._index: dict[SearchNode, int] = {}
        self._seen: list[tuple[object, ...]] = []
        self._looked = 0.0

    def __call__(self, stats: SearchStats) -> bool | None:
        """Look at the tree, at most 20 times a second; end the search if its job was stopped."""
        if perf_counter() - self._looked >= 2 * _EVENT_S:
            self.look(stats)
        return self.job.is_stopped

    def look(self, stats: SearchStats, **more: object) -> None:
        """Tell what is new."""
        if self.root is None:
            return
        add, changed = [], []
        for node in self.root.walk():
            i = self._index.get(node)
            state = (short(node.score), node.n_visits, node.status)
            if i is None:
                self._index[node] = i = len(self.nodes)
                self.nodes.append(node)
                self._seen.append(state)
                add.append(self._told(i, node))
            elif self._seen[i] != state:
                self._seen[i] = state
                changed.append([i, *state])
        told: dict[str, object] = {
            "job": self.job.id, "step": stats.steps, "add": add, "set": changed,
            "stats": stats.as_dict(), "sizes": [*self.effective_sizes], **more,
        }  # fmt: skip
        self.live.call(self.live.emit, "search", told)
        self._looked = perf_counter()

    def outline(self) -> list[list[object]]:
        """Return the tree as it is told, as far as it is kept."""
        return [self._told(i, node) for i, node in enumerate(self.nodes[:_MOST_OUTLINE])]

    def _told(self, i: int, node: SearchNode) -> list[object]:
        parent = -1 if node.parent is None else self._index[node.parent]
        text = node.text if node.parent is not None else ""
        return [
            i, parent, text, len(node.tokens), short(node.logprob), short(node.score),
            node.n_visits, node.status, list(node.tokens),
        ]  # fmt: skip


def told_error(error: BaseException) -> dict[str, object]:
    """Return an error as the page gets it."""
    found = http_error(error)
    body = found.body["error"]
    return {"code": found.status, "message": body["message"], "hint": None}  # it is in the message


def search(
    ctx: Context, tokens: Sequence[int], sampling: SamplingParams, kind: str, given: Options,
    watch: Watch,
) -> SearchResult:  # fmt: skip
    """Search from a text, in a thread of its own; ``given`` are the page's options.

    Raises:
        ConfigError: an option is unknown or out of range. And what the search raises.
    """
    if kind not in _WIDTHS or given.keys() - _OPTIONS:
        wrong = f"{kind!r}" if kind not in _WIDTHS else f"option {min(given.keys() - _OPTIONS)!r}"
        told = f"kinds are {', '.join(_WIDTHS)}; options {', '.join(sorted(_OPTIONS))}"
        raise ConfigError(f"there is no search {wrong}", hint=told)
    n = whole("width", given.get("width", _WIDTHS[kind]), 1, 256)
    most = whole("max_tokens", given.get("max_tokens", 32), 1)
    rounds = whole("iterations", given.get("iterations", 8), 1)
    stop = _texts("stop", given)
    step = given.get("step", 8)
    step = step if isinstance(step, str) else whole("step", step, 1)
    if kind == "smc":
        sampling = sampling.replace(top_k=0, top_p=1.0, min_p=0.0)
    if given.get("seed") is not None:
        sampling = sampling.replace(seed=int(str(given["seed"])))
    if given.get("temperature") is not None:
        sampling = sampling.replace(temperature=real("temperature", given["temperature"]))
    with Branch.start(ctx, tokens, sampling=sampling) as branch:
        reward = _reward(branch, given.get("reward"))
        match kind:
            case "beam":
                return beam_search(
                    branch, n, most, n=n, groups=whole("groups", given.get("groups", 1), 1),
                    length_penalty=real("length_penalty", given.get("length_penalty", 1.0)),
                    diversity_penalty=real("diversity_penalty", given.get("diversity_penalty", 0.0)),
                    stop=stop, on_step=watch,
                )  # fmt: skip
            case "best_of_n":
                asked = reward if "reward" in given else None
                return best_of_n(branch, n, most, reward=asked, stop=stop, on_step=watch)
            case "smc":
                weigh = _Wanted(_texts("want", given), _texts("avoid", given))
                return smc(branch, n, most, potentials=[weigh], stop=stop, on_step=watch)
            case "vote":
                answer = _answer(str(given.get("answer", r"-?\d+(?:\.\d+)?")))
                return vote(branch, answer, n, most, stop=stop, on_step=watch)
            case "steps":
                return step_search(
                    branch, reward, n, beam_width=n, max_steps=rounds, step=step, max_tokens=most,
                    stop=stop, on_step=watch,
                )  # fmt: skip
        return tree_search(
            branch, reward, rounds, expand=n, step=step, max_tokens=most, stop=stop, on_step=watch
        )


def _texts(name: str, given: Options) -> list[str]:
    value = given.get(name, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"{name} must be a list of texts, not {value!r:.40}")
    return value


class _Wanted(Potential):
    """Texts that are wanted, each worth e^2, and texts that must not be there."""

    def __init__(self, want: Sequence[str], avoid: Sequence[str]) -> None:
        self._want = want
        self._avoid = avoid

    def prefix(self, text: str) -> float:
        """Return the log-weight of an unfinished text."""
        if any(each in text for each in self._avoid):
            return -math.inf
        return 2.0 * sum(each in text for each in self._want)

    complete = prefix


def _reward(branch: Branch, given: object) -> Callable[[str], float]:
    """Return what rates a text: by default e to its mean log-probability."""
    asked = given if isinstance(given, dict) else {}
    kind, text = asked.get("kind", "logprob"), str(asked.get("text", ""))
    if kind == "contains":
        return lambda found: float(text in found)
    if kind == "length":
        target = whole("target", asked.get("target", 200), 1)
        return lambda found: -abs(len(found) - target) / target
    if kind != "logprob":
        raise ConfigError(f"reward must be logprob, contains or length, not {kind!r:.40}")

    def rated(found: str) -> float:
        scores = branch.score(found) if found else []
        return math.exp(sum(s.logprob for s in scores) / len(scores)) if scores else 0.0

    return rated


def _answer(pattern: str) -> Callable[[str], str | None]:
    """Return what finds the last match of a pattern; of it the first group, if it has one."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"answer is no regular expression: {error}") from None

    def answer(text: str) -> str | None:
        found = [*compiled.finditer(text)]
        return found[-1][1 if found[-1].lastindex else 0] if found else None

    return answer


class Found:
    """What a comparison has found, told as it comes and kept at its end."""

    def __init__(self, live: Live, service: Service, job: Job, mode: str) -> None:
        self.job = job
        self.partner: Node | None = None  # what B writes by itself
        self._live = live
        self._service = service
        self._mode = mode
        self._node: Node | None = None
        self._at = 0
        self._columns: dict[str, list[object]] = {}

    def take(self, node: Node, at: int, places: Sequence[Place]) -> None:
        """Take what was found of a node's tokens from a position on."""
        live, first = self._live, at - node.made.at
        for i, place in enumerate(places, first):
            if node.lp[i] is None:
                live.take(self._service, node, [place.score], node.src[i], i)
        tops = [[(a.token, short(a.logprob)) for a in p.other.alternatives] for p in places]
        live.learn(self._service, [token for top in tops for token, _ in top])
        pieces = live.document.pieces
        columns: dict[str, list[object]] = {
            "kl": [short(p.kl) for p in places], "klr": [short(p.klr) for p in places],
            "lpA": [short(p.score.logprob) for p in places], "same": [p.same for p in places],
            "lpB": [short(p.other.logprob) for p in places],
            "hB": [short(p.other.entropy) for p in places], "draw": [p.draw for p in places],
            "topB": [[(t, lp, pieces[t]) for t, lp in top] for top in tops],
        }  # fmt: skip
        if self._node is None:
            self._node, self._at = node, at
        for name, column in columns.items():
            self._columns.setdefault(name, []).extend(column)
        live.emit("compare", {"node": node.id, "at": at, "mode": self._mode, **columns})

    def write(self, node: Node, place: Place) -> None:
        """Take a token that was written, and what was found of it."""
        self._live.take(self._service, node, [place.score], "s")
        self._live.send_tokens()
        self.take(node, node.end - 1, [place])

    def _first(self, column: str, differs: Callable[[int, object], bool]) -> int | None:
        found = enumerate(self._columns.get(column, []))
        return next((self._at + i for i, value in found if differs(i, value)), None)

    @property
    def first_seed(self) -> int | None:
        """Where B first draws another token."""
        ids, start = (self._node.ids, self._at - self._node.made.at) if self._node else ([], 0)
        return self._first("draw", lambda i, draw: draw not in (None, ids[start + i]))

    def end(self) -> None:
        """Keep it with its node."""
        node, columns = self._node, self._columns
        n = len(columns.get("kl", ()))
        means = {
            name: short(math.fsum(x for x in columns.get(name, ()) if isinstance(x, float)) / n)
            for name in ("kl", "klr", "same")
            if n
        }
        if n:
            means["same"] = short(sum(map(bool, columns["same"])) / n)
        self.job.result = {
            "mode": self._mode, "n": n, **means, "first_seed": self.first_seed,
            "first_greedy": self._first("same", lambda _, same: not same),
            "partner": self.partner.id if self.partner else None,
        }  # fmt: skip
        if node is not None and self._live.journal.read_only is None:
            partner = {"partner": self.partner.id} if self.partner else {}
            data = {"node": node.id, "at": self._at, "mode": self._mode, **columns, **partner}
            self._live.add(Compared(id=node.id, data=Raw(_encode(data))))
