"""The page's requests: who may call, what is told, and the operations on a document."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from time import monotonic

import msgspec
from msgspec import Struct
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..context import Context
from ..engine import Request
from ..files import atomic_write, read_small
from ..sampling import SamplingParams
from ..sampling.noise import derive_seed
from ..serve import ServeSettings
from ..serve import nodes as branches
from ..serve.errors import HttpError
from ..serve.exchange import Exchange
from ..serve.fields import SamplingFields, TextFields
from ..serve.service import Service
from . import formats, page, pair
from .document import (
    Change,
    Compared,
    Current,
    Document,
    Ended,
    Head,
    Made,
    Node,
    Outline,
    Record,
    Redo,
    Tokens,
    Undo,
    decoded,
)  # fmt: skip
from .journal import Journal
from .live import MOST_TOP, Found, Job, Live, Watch, search

__all__ = ["Loom"]

_LINK_S = 300.0
_MOST_UPLOAD = 64 << 20
_MOST_NODES = 200_000
_MOST_ANSWERS = 1000
_MOST_TOLD = 500  # nodes of one action, each by an event
_READS = {"reread", "score", "settings", "stop"}  # may be done with a file that is not written


class Do(Struct, kw_only=True):
    """The body of POST /loom/do: an operation and its fields."""

    op: str
    cid: str
    node: str | None = None
    at: int | None = None
    text: str | None = None
    edit: bool = False
    parse_special: bool = False
    n: int | None = None
    max_tokens: int = 24
    seed: str | None = None
    sampling: SamplingFields | None = None
    stop: list[str] = []
    grammar: str | None = None
    json_schema: dict[str, object] | None = None
    model: str = "A"
    resume: bool = False
    token: int | None = None
    mode: str = "read"
    writer: str = "A"
    kind: str = "beam"
    options: dict[str, object] = {}
    job: str | None = None
    leaf: int | None = None
    leaves: list[int] = []
    branch: str | None = None
    bookmark: bool | None = None
    note: str | None = None
    current: bool = False
    restore: bool = False
    set: dict[str, object] = {}


Answer = tuple[int, dict[str, object]]
Work = Callable[[Job], Coroutine[object, object, None]]


class Guard:
    """Who may call: this machine's browser with a link of its own, or a script with the key.

    Args:
        port: the page's.

    Attributes:
        key: for ``Authorization: Bearer``.
    """

    def __init__(self, port: int) -> None:
        self.key = secrets.token_urlsafe(32)
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._name = f"lb-{port}"
        self._links: dict[str, float] = {}
        self._sessions: set[str] = set()

    def link(self) -> str:
        """Return a new token for a link: it works once, and for five minutes."""
        token = secrets.token_urlsafe(32)
        self._links[token] = monotonic() + _LINK_S
        return token

    def session(self, token: str) -> bytes:
        """Return the cookie for a token. Raises HttpError if it is used, old or wrong."""
        if self._links.pop(token, 0.0) < monotonic():
            raise HttpError(
                401, "this link was used, or is too old: Enter in the terminal prints another"
            )
        value = secrets.token_urlsafe(32)
        self._sessions.add(value)
        return f"{self._name}={value}; HttpOnly; SameSite=Strict; Path=/".encode()

    def check(self, scope: Scope, *, needs_session: bool) -> None:
        """Raise HttpError unless the request may be answered."""
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if host not in self._hosts:
            raise HttpError(
                403, f"unknown host {host[:100]!r}: the page is at 127.0.0.1 or localhost"
            )
        is_read = scope["method"] in ("GET", "HEAD")
        scheme, _, key = given.get(b"authorization", "").partition(" ")
        is_script = scheme.lower() == "bearer" and hmac.compare_digest(
            key.strip().encode("latin-1"), self.key.encode()
        )
        wanted = f"http://{host}"
        if origin != wanted and (origin is not None or not (is_read or is_script)):
            raise HttpError(403, "a request that changes something must come from the page itself")
        if given.get(b"sec-fetch-site", "same-origin") not in {"same-origin", *["none"] * is_read}:
            raise HttpError(403, "pages of other sites may not call")
        if needs_session and not is_script and not self._has_cookie(given.get(b"cookie", "")):
            raise HttpError(401, "no session: open the link that the terminal shows")

    def _has_cookie(self, text: str) -> bool:
        try:
            found = SimpleCookie(text).get(self._name)
        except CookieError:
            return False
        return found is not None and found.value in self._sessions


class Loom:
    """One document in the browser: its routes and operations.

    Args:
        path: of the document's file.
        port: where the server listens.
        service_of: returns the server's service, None while the model loads.
        partner_of: returns the context of the model to compare with; None = there is none.
        read_only: never write the file.
        settings_file: where the page's settings are kept.

    Raises:
        ConfigError: the file is none of the page's.
    """

    def __init__(
        self,
        path: Path,
        port: int,
        service_of: Callable[[], Service | None],
        partner_of: Callable[[], Context | None] = lambda: None,
        *,
        read_only: bool = False,
        draft: str = "none",
        settings_file: Path,
    ) -> None:
        self.guard = Guard(port)
        self.document = Document()
        self.journal = Journal(path, self.document, read_only=read_only)
        self._service_of = service_of
        self._partner_of = partner_of
        self._draft = draft
        self._settings_file = settings_file
        self._answers: OrderedDict[str, asyncio.Future[Answer]] = OrderedDict()
        self._live: Live | None = None

    @property
    def live(self) -> Live:
        """The events and jobs; there once the server runs."""
        if self._live is None:
            self._live = Live(self.document, self.journal)
        return self._live

    @property
    def service(self) -> Service:
        """The server's service. Raises HttpError while the model loads."""
        service = self._service_of()
        if service is None:
            raise HttpError(503, "the model is being loaded")
        return service

    def ready(self) -> None:
        """Tell the tabs that the model is there; a file of another model is not written."""
        model, ctx, head = self.service.model, self.service.ctx, self.document.head
        if head is None and self.journal.read_only is None:
            vocab = pair.vocabulary_hash(model)
            self.live.add(
                Head(
                    model=model.name,
                    fingerprint=model.fingerprint,
                    vocab=vocab,
                    kv_type=ctx.kv_type,
                )
            )
        elif head is not None and head.fingerprint != model.fingerprint:
            told = f"it is of the model {head.model}, this one is {model.name}"
            self.journal.read_only = self.journal.read_only or told
        self.live.emit("model", self._models())
        self.live.emit("set", {"file": self.live.file})

    def app(self, inner: ASGIApp, settings: ServeSettings) -> ASGIApp:
        """Return the application: the page's paths, and those of the API behind the same doors."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            call = Exchange(scope, receive, send, settings, page.HEADERS)

            async def guarded(message: Message) -> None:
                if message["type"] == "http.response.start":
                    names = {name for name, _ in page.HEADERS}
                    own = [pair for pair in message["headers"] if pair[0].lower() not in names]
                    message = {**message, "headers": [*own, *page.HEADERS]}
                await send(message)

            async def delegated() -> None:
                await inner(scope, receive, guarded)

            await call.run(self._answer(call, delegated))

        return app

    async def _answer(self, call: Exchange, inner: Callable[[], Awaitable[None]]) -> None:
        scope = call.scope
        path, method = scope["path"], scope["method"]
        found = page.static_file(path) if method == "GET" else None
        is_open = found is not None or path == "/loom/session"
        self.guard.check(scope, needs_session=not is_open)
        if found is not None:
            await call.reply(found[0], kind=found[1])
            return
        routes: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "POST /loom/session": self._session, "GET /loom/doc": self._doc,
            "GET /loom/tokens": self._tokens, "GET /loom/find": self._find, "POST /loom/do": self._do,
            "GET /loom/events": self._events, "GET /loom/export": self._export,
            "POST /loom/import": self._import,
        }  # fmt: skip
        handler = routes.get(f"{method} {path}")
        if handler is not None:
            await handler(call)
        elif path.startswith("/loom") or path == "/":
            raise HttpError(404, "there is nothing at this path, or it takes another method")
        else:
            await inner()

    async def close(self) -> None:
        """End the jobs and the file."""
        await self.live.close()

    # -- reading ---------------------------------------------------------------------------------------

    async def _session(self, call: Exchange) -> None:
        given = await call.json(dict[str, str])
        cookie = self.guard.session(given.get("token", ""))
        await call.reply(b"", 204, [(b"set-cookie", cookie)])

    def _models(self) -> dict[str, object]:
        service, partner = self._service_of(), self._partner_of()
        models: dict[str, object] = {"A": None, "B": None}
        if service is not None:
            models["A"] = _told_model(service.ctx) | {"draft": self._draft}
            if partner is not None:
                same = pair.same_vocabulary(service.model, partner.model)
                models["B"] = _told_model(partner) | {"same_vocabulary": same}
        state = "loading" if service is None else "ready"
        if service is not None and any(j.state == "running" for j in self.live.jobs.values()):
            state = "generating"
        loading = {"told": "loading the model", "share": None} if service is None else None
        return {"state": state, "models": models, "loading": loading, "failure": None}

    async def _doc(self, call: Exchange) -> None:
        document, live, wanted = self.document, self.live, call.query.get("branch")
        if wanted is not None:
            node, service = self._node(wanted), self.service
            sampling = self._params(node.made).replace(seed=int(node.made.seed or 0))
            tokens = array("i", node.tokens())
            branch = branches.Node(None, 0, tokens, len(tokens), sampling)
            with service.branches.room_for(1) as add:
                add(branch)
            await call.reply({"branch": branch.id})
            return
        shown = [*document.shown()]
        current = document.current
        await call.reply({
            "version": 1, "boot": live.boot, "rev": document.rev, **self._models(),
            "file": live.file, "current": current if current in {n.id for n in shown} else None,
            "settings": self.settings(), "undo": len(document.done), "redo": len(document.undone),
            "jobs": [job.as_dict() for job in live.jobs.values() if job.state == "running"],
            "nodes": document.listed(), "notes": {n.id: n.note for n in shown if n.note},
            "bookmarks": [n.id for n in shown if n.bookmark],
            "kl": {n.id: pair.mean_kl(n.compared[-1]) for n in shown if n.compared},
        })  # fmt: skip

    async def _tokens(self, call: Exchange) -> None:
        query, document = call.query, self.document
        node = self._node(query.get("node"))
        whole_path = query.get("path") == "1"
        low = 0 if whole_path else node.made.at
        try:
            start = max(low, int(query.get("from", low)))
            end = start + int(query["n"]) if "n" in query else node.end
        except ValueError:
            raise HttpError(400, "from and n are numbers", param="from") from None
        parts = node.stretches(start, end)
        owners = [*dict.fromkeys([owner for owner, _, _ in parts] + [node])]
        rounds = [document.round(r, i + 1) for o in owners for i, r in enumerate(o.rounds)]
        compared = [raw for owner in owners for raw in owner.compared]
        await call.reply({
            "node": document.told(node), **document.columns(parts, top=query.get("top") == "1"),
            "at": start, "owner": [(owner.id, owner.made.at + a) for owner, a, _ in parts],
            "rounds": [r for r in rounds if start <= _position(r) < end],
            "compare": compared[-1] if compared else None, "compared": compared,
            "searches": node.searches,
        })  # fmt: skip

    async def _find(self, call: Exchange) -> None:
        query, document = call.query, self.document
        wanted, limit = query.get("q", ""), int(query.get("limit", "200") or 200)
        fold = (lambda text: text) if query.get("case") == "1" else str.lower
        found: list[dict[str, object]] = []
        for node in document.shown() if wanted else ():
            pieces = [document.bytes_of([token]) for token in node.ids]
            text = b"".join(pieces).decode("utf-8", "replace")
            at = fold(text).find(fold(wanted))
            if at < 0:
                continue
            if len(found) == limit:
                break
            left, i = len(text[:at].encode()), 0
            while i < len(pieces) - 1 and left >= len(pieces[i]):
                left, i = left - len(pieces[i]), i + 1
            line = text[max(0, at - 30) : at + len(wanted) + 30]
            found.append({"node": node.id, "at": node.made.at + i, "text": line})
        await call.reply({"found": found, "more": len(found) == limit})

    async def _events(self, call: Exchange) -> None:
        headers = dict(call.scope["headers"])
        last = headers.get(b"last-event-id", b"").decode("latin-1")
        await self.live.stream(call, last or call.query.get("since", ""))

    async def _export(self, call: Exchange) -> None:
        query = call.query
        node = self._node(query["node"]) if query.get("node") else None
        kind = query.get("format", "json")
        title = self.journal.path.name.removesuffix(".loom.jsonl")
        top = int(query.get("top", "3" if kind == "html" else "10"))
        data, name, mime = await asyncio.to_thread(
            formats.export,
            self.document,
            kind,
            node,
            title=title,
            top=top,
            models=self._models()["models"],
        )
        where = f'attachment; filename="{name}"'.encode("ascii", "replace")
        await call.reply(data, headers=[(b"content-disposition", where)], kind=mime)

    async def _import(self, call: Exchange) -> None:
        self._check_writable()
        service = self.service
        data = await call.body(_MOST_UPLOAD)
        kind, items, told = await asyncio.to_thread(
            formats.read, data, _MOST_NODES, service.model.fingerprint
        )
        made = await asyncio.to_thread(self._records, service, items)
        nodes = self._make(made)
        self.live.confirm()
        roots = [n for n in nodes if n.parent is None]
        await call.reply({
            "rev": self.document.rev, "nodes": [self.document.told(n) for n in roots],
            "count": len(nodes), "format": kind, "told": told,
        })  # fmt: skip

    # -- parts -----------------------------------------------------------------------------------------

    def _node(self, name: str | None) -> Node:
        node = self.document.nodes.get(name or "")
        if node is None or node.hidden:
            raise HttpError(404, f"there is no node {str(name)[:40]!r}", param="node")
        return node

    def _check_writable(self) -> None:
        if self.journal.read_only is not None:
            told = f"the document is read-only: {self.journal.read_only}"
            raise HttpError(409, told, kind="read_only")

    def _check_idle(self) -> None:
        if any(job.state == "running" for job in self.live.jobs.values()):
            raise HttpError(409, "something is being generated: stop it first")

    def settings(self) -> dict[str, object]:
        """Return what the page has kept: keys, theme, and so on."""
        try:
            return msgspec.json.decode(read_small(self._settings_file), type=dict[str, object])
        except (OSError, msgspec.MsgspecError):
            return {}

    def _params(self, made: Made) -> SamplingParams:
        """Return a node's sampling settings."""
        fields = msgspec.convert(made.sampling, SamplingFields)
        seed = None if made.seed is None else int(made.seed)
        service = self.service
        return fields.sampling(service.model, service.settings).replace(seed=seed, logprobs=True)

    async def _request(self, node: Node, max_tokens: int | None, *, again: bool = False) -> Request:
        """Return the request that continues a node, or ``again`` generates what it has."""
        made, n_given = node.made, node.n_given
        fields = TextFields(grammar=made.grammar, json_schema=made.json_schema)
        grammar = await fields.text_grammar()
        tokens = node.tokens(made.at + n_given if again else None)
        self.service.check_room(tokens, max_tokens)
        return Request(
            tokens, continues=0 if again else len(node.ids) - n_given, grammar=grammar,
            sampling=self._params(made), max_tokens=max_tokens, stop=made.stop,
            top_logprobs=MOST_TOP,
        )  # fmt: skip

    def _make(self, records: Iterable[Record]) -> list[Node]:
        """Add nodes and their tokens as one action; return them."""
        live, document = self.live, self.document
        nodes: list[Node] = []
        first = 0
        for record in records:
            if isinstance(record, (Made, Change)):
                record.a = first
            live.journal.add(record)
            if isinstance(record, Made):
                first = first or record.r
                nodes.append(document.nodes[record.id])
        if len(nodes) > _MOST_TOLD:
            live.emit("reset", {})
        else:
            live.tell(*nodes)
        self._tell_undo()
        return nodes

    def _tell_undo(self) -> None:
        document = self.document
        counts = {"undo": len(document.done), "redo": len(document.undone)}
        self.live.emit("set", {"rev": document.rev, **counts})

    def _name(self, i: int = 0) -> str:
        return f"n{self.document.n_made + 1 + i}"

    def _columns(self, name: str, ids: Sequence[int], src: str, at: int = 0) -> list[Record]:
        """Return records of tokens without numbers, with their texts."""
        n = len(ids)
        pieces = self.document.learn(self.service.model, ids)
        none: list[float | None] = [None] * n
        empty = [msgspec.Raw(b"[]")] * n
        new = Tokens(
            id=name, at=at, ids=[*ids], lp=none, h=[*none], rk=[None] * n, src=src * n, top=empty
        )
        return [*([pieces] if pieces else ()), *([new] if n else ())]

    def _score(self, *nodes: Node) -> Job:
        async def work(job: Job) -> None:
            for node in nodes:
                if not job.is_stopped:
                    await self.live.score(self.service, node)

        return self.live.start("score", work, nodes[0])

    # -- operations ------------------------------------------------------------------------------------

    async def _do(self, call: Exchange) -> None:
        do = await call.json(Do)
        if not 1 <= len(do.cid) <= 64:
            raise HttpError(400, "cid must have 1 to 64 characters", param="cid")
        answer = self._answers.get(do.cid)
        if answer is None:
            answer = self._answers[do.cid] = asyncio.ensure_future(self._perform(do))
            if len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)
        try:
            status, body = await asyncio.shield(answer)
        except HttpError as error:
            if error.status != 507:  # it was refused, not done
                self._answers.pop(do.cid, None)
            raise
        await call.reply({"rev": self.document.rev, **body}, status)

    async def _perform(self, do: Do) -> Answer:
        operation = _OPERATIONS.get(do.op)
        if operation is None:
            raise HttpError(400, f"op must be one of {', '.join(_OPERATIONS)}", param="op")
        if do.op not in _READS and not do.current:
            self._check_writable()
        body = await operation(self, do)
        if do.op not in _READS:
            self.live.confirm()
        job = body.get("job")
        return (202 if job is not None else 200), body

    def _place(self, do: Do) -> tuple[Node | None, int]:
        """Return the node that an operation begins at, and how many of its tokens count."""
        node = None if do.node is None else self._node(do.node)
        end = node.end if node is not None else 0
        at = end if do.at is None else do.at
        if not (0 if node is None else 1) <= at <= end:
            raise HttpError(400, f"at must be 1 to {end}, not {at}", param="at")
        return node, at

    def _started(self, job: Job, nodes: Sequence[Node] = ()) -> dict[str, object]:
        return {"job": job.id, "nodes": [self.document.told(node) for node in nodes]}

    async def _type(self, do: Do) -> dict[str, object]:
        (node, at), text = self._place(do), do.text or ""
        service, document = self.service, self.document
        if do.edit and node is not None:
            new = text.encode()
            kept, at, texts = at, at, [new]
            for token in node.tokens()[kept:]:
                piece = document.bytes_of([token])
                if not texts[-1].startswith(piece):
                    break
                texts.append(texts[-1][len(piece) :])
            while len(texts) > 1 and 0x80 <= (texts[-1] or b" ")[0] < 0xC0:  # inside a character
                texts.pop()
            at += len(texts) - 1
            text = texts[-1].decode("utf-8", "replace")
            if not text and at == node.end:
                return {"node": document.told(node), "same": True}
        ids, seam = await self._tokenized(node, at, text, do.parse_special)
        if node is None and not ids:
            raise HttpError(400, "the text is empty", param="text")
        service.check_room([*(node.tokens(at) if node else ()), *ids], 0)
        name = self._name()
        made = Made(
            id=name, parent=do.node, at=at, kind="prompt" if node is None else "typed", seam=seam
        )
        src = "p" if node is None else "t"
        (new_node,) = self._make([made, *self._columns(name, ids, src)])
        self._score(new_node)
        return {"node": document.told(new_node), "same": False}

    async def _tokenized(
        self, node: Node | None, at: int, text: str, parse_special: bool = False
    ) -> tuple[list[int], bool]:
        """Return the tokens of a text behind a node's, and whether all at once would be others."""
        service = self.service
        if node is None:
            return await service.tokenize(text, parse_special=parse_special), False
        before = self.document.bytes_of(node.tokens(at)).decode("utf-8", "replace")

        async def tokens(of: str) -> list[int]:
            return await service.tokenize(of, add_special=False, parse_special=parse_special)

        ids = await tokens(text) if text else []
        whole, part = await tokens(before + text), await tokens(before) if before else []
        return ids, whole != part + ids

    async def _continue(self, do: Do) -> dict[str, object]:
        node, at = self._place(do)
        if node is None:
            raise HttpError(400, "continue needs a node", param="node")
        if do.resume:
            if node.reason != "interrupted":
                raise HttpError(
                    409, "only a text that was interrupted can be resumed", param="node"
                )
            most = node.made.max_tokens or do.max_tokens
            return self._begin(do, [node], most - (len(node.ids) - node.n_given))
        if do.model == "B":
            return await self._compare(msgspec.structs.replace(do, mode="alone", writer="B"))
        n = 3 if do.n is None else do.n
        if not 1 <= n <= self.service.settings.max_choices:
            raise HttpError(400, f"n must be 1 to {self.service.settings.max_choices}", param="n")
        made = [self._made(do, i, "sampled", at) for i in range(n)]
        await self._check(do, node, at, made[0])
        nodes = self._make(made)
        return self._begin(do, nodes, do.max_tokens)

    def _made(self, do: Do, i: int, kind: str, at: int, by: str = "A") -> Made:
        """Return the record of a node that is to be generated, with a seed of its own."""
        base = do.seed if do.seed is not None else str(secrets.randbits(31))
        if do.seed is None:
            do.seed = base
        try:
            seed = int(base)
        except ValueError:
            raise HttpError(400, "seed must be a whole number, as text", param="seed") from None
        given = msgspec.to_builtins(do.sampling or SamplingFields())
        sampling = {name: value for name, value in given.items() if value is not None}
        return Made(
            id=self._name(i), parent=do.node, at=at, kind=kind, by=by,
            seed=str(derive_seed(seed, i) if i else seed), sampling=sampling, stop=do.stop,
            max_tokens=do.max_tokens, grammar=do.grammar, json_schema=do.json_schema,
        )  # fmt: skip

    async def _check(self, do: Do, node: Node, at: int, made: Made) -> None:
        """Raise for settings that cannot be generated with, before there is a node."""
        if do.max_tokens < 0:
            raise HttpError(400, "max_tokens must be at least 0", param="max_tokens")
        probe = Node(made, node)
        await self._request(probe, do.max_tokens)

    def _begin(self, do: Do, nodes: list[Node], max_tokens: int) -> dict[str, object]:
        live, service = self.live, self.service

        async def work(job: Job) -> None:
            requests = [(node, await self._request(node, max(0, max_tokens))) for node in nodes]
            cached = await service.n_cached(nodes[0].tokens())
            left = nodes[0].end - cached
            if left > 64:
                job.told = f"{left} tokens to read again"
                live.emit("job", job.as_dict())
            await live.generate(service, job, requests)

        for node in nodes:
            node.ended = None
        return self._started(live.start(do.op, work, nodes[0].parent, nodes), nodes)

    async def _fork(self, do: Do) -> dict[str, object]:
        node, at = self._place(do)
        if node is None or do.token is None:
            raise HttpError(400, "fork needs a node and a token", param="token")
        self.service.model.check_tokens([do.token])
        made = self._made(do, 0, "taken", at)
        if do.max_tokens == 0:
            made.seed = None
        await self._check(do, node, at, made)
        records = self._columns(made.id, [do.token], "t")
        tokens = records[-1]
        owner = node.stretches(at, at + 1)
        if owner and isinstance(tokens, Tokens):  # what is known of the place
            where, i, _ = owner[0]
            top = [*zip(decoded(where.top[i]), range(1, 99), strict=False)]
            found = next(((p, k) for (t, p), k in top if t == do.token), None)
            if found is not None:
                tokens.lp, tokens.rk = [found[0]], [found[1]]
                tokens.h, tokens.top = [where.h[i]], [where.top[i]]
        nodes = self._make([made, *records])
        if nodes[0].lp[0] is None:
            self._score(nodes[0])
        if do.max_tokens == 0:
            return {"nodes": [self.document.told(nodes[0])]}
        return self._begin(do, nodes, do.max_tokens)

    async def _replay(self, do: Do) -> dict[str, object]:
        node, _ = self._place(do)
        if (
            node is None
            or node.made.seed is None
            or node.reason == "running"
            or node.made.by != "A"
        ):
            raise HttpError(409, "only a text that A has generated can be replayed", param="node")
        n = len(node.ids) - node.n_given
        is_cut = node.reason in ("stopped", "interrupted", "error")
        request = await self._request(node, n if is_cut else node.made.max_tokens, again=True)

        async def work(job: Job) -> None:
            await self.live.replay(self.service, job, node, request)

        return self._started(self.live.start("replay", work, node))

    async def _score_op(self, do: Do) -> dict[str, object]:
        node, at = self._place(do)
        if do.text is None:
            if node is None:
                raise HttpError(400, "score needs a node or a text", param="node")
            return self._started(self._score(node))
        service, document = self.service, self.document
        ids, seam = await self._tokenized(node, at, do.text, do.parse_special)
        tokens = [*(node.tokens(at) if node else ()), *ids]
        service.check_room(tokens, 0)
        made = Made(id="", parent=do.node, at=at)
        seen = Node(made, node)
        for record in self._columns("", ids, "t"):
            if isinstance(record, Tokens):
                document.put(seen, record)
            else:
                self.live.journal.add(record)
        if len(tokens) > 1 and ids:
            for one, position in await self.live.rate(service, tokens, max(1, at)):
                document.put(seen, self.live.rated(service, "", [one], "t", position - at))
        return {"tokens": document.columns([(seen, 0, len(ids))], top=True), "seam": seam}

    async def _search(self, do: Do) -> dict[str, object]:
        node, at = self._place(do)
        if node is None:
            raise HttpError(400, "a search needs a node", param="node")
        service, live = self.service, self.live
        tokens, sampling = node.tokens(at), self._params(self._made(do, 0, "search", at))
        service.check_room(tokens, 1)

        async def work(job: Job) -> None:
            job.watch = watch = Watch(live, job)
            found = await asyncio.to_thread(
                search, service.ctx, tokens, sampling, do.kind, do.options, watch
            )
            votes = {str(answer): n for answer, n in found.votes.items()}
            watch.look(found.stats, **({"votes": votes} if votes else {}))
            index = {id(each): i for i, each in enumerate(watch.nodes)}
            best = [(index[id(h.node)], h.text, h.score, h.finish_reason) for h in found.hypotheses]
            job.result = {"hypotheses": best, "votes": votes, "stats": found.stats.as_dict()}
            data = {
                "job": job.id,
                "kind": do.kind,
                "at": at,
                "lines": watch.outline(),
                **job.result,
            }
            if self.journal.read_only is None:
                live.add(Outline(id=node.id, data=msgspec.Raw(msgspec.json.encode(data))))

        job = live.start("search", work, node, kind=do.kind)
        job.at = at
        return self._started(job)

    async def _stop(self, do: Do) -> dict[str, object]:
        jobs = self.live.jobs
        if do.job is not None and do.job not in jobs:
            raise HttpError(404, f"there is no job {do.job[:40]!r}", param="job")
        chosen = [jobs[do.job]] if do.job is not None else [*jobs.values()]
        return {"stopped": self.live.stop(self._service_of(), chosen)}

    async def _adopt(self, do: Do) -> dict[str, object]:
        records: list[Record] = []
        if do.branch is not None:
            given = self.service.branches[do.branch]
            while given.parent is not None:
                given = given.parent
            names: dict[str, str] = {}
            for i, each in enumerate(given.subtree()):
                names[each.id] = self._name(i)
                parent = None if each.parent is None else names[each.parent.id]
                records.append(
                    Made(
                        id=names[each.id], parent=parent, at=each.start, kind="branch", by="script"
                    )
                )
                src = "p" if parent is None else "s"
                records += self._columns(names[each.id], each.own, src)
        else:
            job = self.live.jobs.get(do.job or "")
            if job is None or job.watch is None or job.node is None:
                raise HttpError(404, "there is no such search", param="job")
            leaves = do.leaves or [do.leaf if do.leaf is not None else -1]
            for i, leaf in enumerate(leaves):
                if not 0 < leaf < len(job.watch.nodes):
                    raise HttpError(400, f"the search has no text {leaf}", param="leaf")
                ids = job.watch.nodes[leaf].path_tokens
                if ids and self.service.model.is_eog(ids[-1]):
                    ids.pop()
                name = self._name(i)
                records.append(Made(id=name, parent=job.node, at=job.at, kind="search", by="A"))
                records += self._columns(name, ids, "s")
        nodes = self._make(records)
        self._score(*nodes)
        return {"nodes": [self.document.told(node) for node in nodes]}

    async def _set(self, do: Do) -> dict[str, object]:
        node, _ = self._place(msgspec.structs.replace(do, at=None))
        if node is None:
            raise HttpError(400, "set needs a node", param="node")
        changes = [("bookmark", do.bookmark), ("note", do.note)]
        records = [Change(id=node.id, name=n, value=v) for n, v in changes if v is not None]
        for record in records:
            record.a = records[0].r
            self.live.add(record)
        if do.current and self.journal.read_only is None:
            self.live.add(Current(id=node.id))
        elif do.current:
            self.document.current = node.id
        if records:
            self.live.tell(node)
            self._tell_undo()
        if do.current:
            self.live.emit("set", {"rev": self.document.rev, "current": node.id})
        return {}

    async def _delete(self, do: Do) -> dict[str, object]:
        node, _ = self._place(msgspec.structs.replace(do, at=None))
        if node is None:
            raise HttpError(400, "delete needs a node", param="node")
        self.live.add(Change(id=node.id, name="deleted", value=not do.restore))
        self.live.tell(node)
        self._tell_undo()
        return {}

    async def _undo(self, do: Do) -> dict[str, object]:
        back, document, live = do.op == "undo", self.document, self.live
        actions = document.done if back else document.undone
        if not actions:
            raise HttpError(409, f"there is nothing to {do.op}")
        action = actions[-1]
        touched = [*dict.fromkeys(node for node, *_ in action.changes)]
        jobs = [live.jobs[node.job] for node in touched if node.job in live.jobs]
        live.stop(self._service_of(), jobs)
        live.add((Undo if back else Redo)(of=action.r))
        hidden = [node.id for node in touched if node.hidden]
        live.tell(*(node for node in touched if not node.hidden))
        if hidden:
            live.emit("hide", {"rev": document.rev, "nodes": hidden})
        self._tell_undo()
        told = {"op": action.op, "nodes": [node.id for node in touched]}
        counts = {"undo": len(document.done), "redo": len(document.undone)}
        return {"undone" if back else "redone": told, **counts}

    async def _settings(self, do: Do) -> dict[str, object]:
        kept = {k: v for k, v in (self.settings() | do.set).items() if v is not None}
        try:
            self._settings_file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._settings_file) as file:
                file.write(msgspec.json.encode(kept))
        except OSError as error:
            told = f"the settings cannot be kept: {error.strerror or error}"
            raise HttpError(507, told, kind="disk_error") from None
        self.live.emit("set", {"rev": self.document.rev, "settings": kept})
        return {"settings": kept}

    async def _compare(self, do: Do) -> dict[str, object]:
        node, at = self._place(do)
        partner = self._partner_of()
        if node is None or partner is None:
            told = "there is no second model: llamabranch open MODEL --compare MODEL2"
            raise HttpError(409, told if partner is None else "compare needs a node", param="node")
        if do.mode not in ("read", "lockstep", "part") or do.writer not in ("A", "B"):
            raise HttpError(400, "mode is read, lockstep or part; writer A or B", param="mode")
        service = self.service
        same = pair.same_vocabulary(service.model, partner.model)
        if do.mode == "read":
            work = self._reading(node, partner) if same else self._spans(node, partner)
            return self._started(self.live.start("compare", work, node))
        if not same:
            raise HttpError(409, "the models have different tokenizers: they cannot share a step")
        made = self._made(do, 0, "sampled", at, do.writer)
        await self._check(do, node, at, made)
        (new,) = self._make([made])
        work = self._writing(new, partner, do)
        return self._started(self.live.start("compare", work, node, [new]), [new])

    def _reading(self, node: Node, partner: Context) -> Work:
        service, live = self.service, self.live

        async def work(job: Job) -> None:
            tokens, found = node.tokens(), Found(live, service, job, "read")
            params = self._params(node.made) if node.made.seed is not None else None
            first = max(1, node.made.at)

            def tell(at: int, places: list[pair.Place]) -> bool:
                live.call(found.take, node, at, places)
                return job.is_stopped

            both = service.ctx, partner
            await asyncio.to_thread(pair.read_pair, both, tokens, first, params, tell)
            found.end()

        return work

    def _writing(self, node: Node, partner: Context, do: Do) -> Work:
        service, live = self.service, self.live

        async def work(job: Job) -> None:
            found, params = Found(live, service, job, do.mode), self._params(node.made)
            tokens = node.tokens()

            def tell(place: pair.Place) -> bool:
                live.call(found.write, node, place)
                return job.is_stopped

            def parted(token: int) -> bool:
                live.call(self._part, found, node, token)
                return job.is_stopped

            both, writer = (service.ctx, partner), int(do.writer == "B")
            await asyncio.to_thread(
                pair.write_pair, both, tokens, params, do.max_tokens, writer, tell,
                parted if do.mode == "part" else None,
            )  # fmt: skip
            found.end()
            for each in job.nodes:
                full = len(each.ids) >= do.max_tokens
                reason = "stopped" if job.is_stopped else "length" if full else "stop"
                live.add(Ended(id=each.id, reason=reason))
            if found.partner is not None:
                await live.score(service, found.partner)

        return work

    def _part(self, found: Found, node: Node, token: int) -> None:
        """Take a token that B writes by itself."""
        live, first = self.live, found.first_seed
        if found.partner is None and first is not None:
            do = Do(op="compare", cid="-", node=node.id, seed=node.made.seed)
            made = self._made(do, 0, "sampled", first, "B")
            made.sampling, made.max_tokens = node.made.sampling, node.made.max_tokens
            made.a = node.made.a or node.made.r
            live.add(made)
            found.partner = self.document.nodes[made.id]
            found.partner.job = found.job.id
            found.job.nodes.append(found.partner)
            live.tell(found.partner)
        if found.partner is not None:
            other, start = found.partner, len(found.partner.ids)
            for record in self._columns(other.id, [token], "s", start):
                live.journal.add(record)
            live.note(other, start, start + 1)

    def _spans(self, node: Node, partner: Context) -> Work:
        service, live = self.service, self.live

        async def work(job: Job) -> None:
            both = service.ctx, partner
            found = await asyncio.to_thread(pair.spans, both, node.tokens())
            why = (
                "the models have different tokenizers, so their distributions are over different "
                "tokens: bits per byte can be compared, KL divergences cannot"
            )
            data = {
                "node": node.id, "at": 0, "mode": "read", "spans": found.spans,
                "totals": found.totals, "why": why,
            }  # fmt: skip
            live.emit("compare", data)
            job.result = {"mode": "read", "n": len(found.spans), **found.totals}
            live.add(Compared(id=node.id, data=msgspec.Raw(msgspec.json.encode(data))))

        return work

    async def _compact(self, do: Do) -> dict[str, object]:
        """Write the file again without what was undone, and read it."""
        self._check_idle()
        self.live.confirm()
        try:
            self.journal.rewrite(self.document.records())
        except OSError as error:
            told = f"the file cannot be written again: {error.strerror or error}"
            raise HttpError(507, told, kind="disk_error") from None
        self._reopen(self.journal.path)
        return {}

    def _reopen(self, path: Path) -> None:
        """Read a file in the place of the document."""
        self.live.add()
        self.journal.close()
        rev = self.document.rev
        self.document = self.live.document = Document()
        self.journal = self.live.journal = Journal(path, self.document)
        self.document.rev = max(rev, self.document.rev)
        self.live.emit("reset", {})

    async def _reread(self, do: Do) -> dict[str, object]:
        """Copy the document with this model's tokens, and open the copy."""
        service = self.service
        self._check_idle()
        data, _, _ = await asyncio.to_thread(formats.export, self.document, "json", None)
        _, items, _ = await asyncio.to_thread(formats.read, data, _MOST_NODES, "")
        stem = self.journal.path.name.removesuffix(".loom.jsonl")
        names = (f"{stem}.{i}.loom.jsonl" for i in range(2, 1000))
        path = next(p for p in map(self.journal.path.with_name, names) if not p.exists())
        self._reopen(path)
        self.ready()
        self._make(await asyncio.to_thread(self._records, service, items))
        self.live.confirm()
        self.live.emit("reset", {})
        return {"file": path.name}

    def _records(self, service: Service, items: Sequence[formats.Item]) -> list[Record]:
        """Return the records of imported texts: tokens where they are this model's, else tokenized."""
        model = service.model
        records: list[Record] = []
        ends: list[int] = []
        for i, item in enumerate(items):
            name = self._name(i)
            root = item.parent < 0
            at = 0 if root else ends[item.parent] if item.at < 0 else item.at
            parent = None if root else self._name(item.parent)
            made = Made(id=name, parent=parent, at=at, kind="imported", by=item.by)
            tokens = item.tokens
            if tokens is None:
                ids: list[int] = []
                lps: list[float | None] = []
                for text, lp in item.parts:
                    if root and not ids:
                        new = model.prompt_tokens(text, parse_special=False)
                    else:
                        new = model.tokenize(text, add_special=False, parse_special=False)
                    ids += new
                    lps += [lp if len(new) == 1 else None, *[None] * (len(new) - 1)][: len(new)]
                records += [made, *self._columns(name, ids, "p" if root else "t")]
                if ids and isinstance(records[-1], Tokens):
                    records[-1].lp = lps
            else:
                made.kind, made.seed, made.sampling = item.kind, item.seed, item.sampling
                model.check_tokens(tokens.ids)
                named = [*tokens.ids, *(t for raw in tokens.top for t, _ in decoded(raw))]
                pieces = self.document.learn(model, named)
                tokens.id = name
                ids = tokens.ids
                records += [made, *([pieces] if pieces else ()), *([tokens] if ids else ())]
                records += [Ended(id=name, reason=item.reason)] * bool(item.reason)
            ends.append(at + len(ids))
            marks = (("bookmark", item.bookmark), ("note", item.note), ("deleted", item.deleted))
            records += [Change(id=name, name=key, value=value) for key, value in marks if value]
        return records


def _told_model(ctx: Context) -> dict[str, object]:
    model = ctx.model
    return {
        "name": Path(model.path).stem, "n_vocab": model.n_vocab, "n_ctx": ctx.n_ctx_seq,
        "type": model.file_type, "size": model.size_bytes, "fingerprint": model.fingerprint,
        "kv_type": ctx.kv_type, "batch_invariant": ctx.capabilities.batch_invariant,
    }  # fmt: skip


def _position(told: dict[str, object]) -> int:
    return int(str(told["at"]))


_OPERATIONS: dict[str, Callable[[Loom, Do], Coroutine[object, object, dict[str, object]]]] = {
    "type": Loom._type, "continue": Loom._continue, "fork": Loom._fork, "replay": Loom._replay,
    "score": Loom._score_op, "compare": Loom._compare, "search": Loom._search, "stop": Loom._stop,
    "adopt": Loom._adopt, "set": Loom._set, "delete": Loom._delete, "undo": Loom._undo,
    "redo": Loom._undo, "settings": Loom._settings, "compact": Loom._compact,
    "reread": Loom._reread,
}  # fmt: skip
