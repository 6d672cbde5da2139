"""The page's routes: the document, events, operations, import, export."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from ..arguments import path_text
from ..serve.app import Front
from ..serve.errors import HttpError
from ..serve.messages import EventStream, json_of, reply
from . import formats
from .document import Bar, Document, Node, short
from .loom import ASIDES, Do, Loom
from .operations import perform

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    Handler = Callable[[Loom, Request], Awaitable[Response]]

_MOST_UPLOAD = 64 << 20
_MOST_TEXT = 8 << 20  # characters of a text; a document of the page may have more
_MOST_NODES = 200_000
_MOST_FOUND = 200


def front_of(loom: Loom) -> Front:
    """Return the routes of the page, which a server puts in front of its API."""
    routes = {path: partial(handler, loom) for path, handler in _ROUTES.items()}
    return Front(loom.guard.check, {**routes, **loom.guard.routes}, loom.close)


async def _do(loom: Loom, call: Request) -> Response:
    body = await perform(loom, await json_of(call, Do))
    status = 507 if "error" in body else 200 if body.get("job") is None else 202
    return reply({**body, "event": loom.n_events}, status)  # the last event that came before it


async def _doc(loom: Loom, call: Request) -> Response:
    document = loom.document
    current = document.nodes.get(document.current or "")
    return reply({
        "boot": loom.boot, **loom.model(),
        "file": loom.file, "current": current.id if current and not current.hidden else None,
        **document.counts(), "nodes": document.listed(),
        "jobs": [job.as_dict() for job in loom.jobs.values()],
        "bars": document.bars,
    })  # fmt: skip


async def _tokens(loom: Loom, call: Request) -> Response:
    query, document = call.query_params, loom.document
    node = loom.node(query.get("node"))
    try:
        start = max(0, int(query.get("from", 0)))
        end = start + int(query["n"]) if "n" in query else node.end
    except ValueError:
        raise HttpError(400, "from and n must be integers", param="from") from None
    parts, top = node.stretches(start, end), query.get("top") == "1"
    owners = dict.fromkeys([owner for owner, _, _ in parts] + [node])
    rounds = [raw for owner in owners for raw in owner.rounds]
    columns = [loom.columns(*part, top=top) for part in parts]
    nodes = [document.node_fields(owner) for owner in owners]
    answer = {"nodes": nodes, "parts": columns}
    return reply(answer if top else {**answer, "rounds": rounds})


async def _next(loom: Loom, call: Request) -> Response:
    """Report what could follow the first ``at`` tokens of a text."""
    node, document = loom.node(call.query_params.get("node")), loom.document
    at = call.query_params.get("at", "")
    score = await loom.following(node, min(node.end, int(at)) if at.isdecimal() else node.end)
    alternatives = () if score is None else score.alternatives
    loom.learn(a.token for a in alternatives)
    top = [(a.token, short(a.logprob), document.pieces[a.token]) for a in alternatives]
    return reply({"top": top})


async def _example(loom: Loom, call: Request) -> Response:
    """Send the first screen's example, as `_tokens` sends a text: the sentence, then its endings."""
    example = await loom.example.document()
    nodes = example.shown()
    return reply({"parts": [example.columns(n, 0, len(n.ids), top=True) for n in nodes]})


async def _find(loom: Loom, call: Request) -> Response:
    document, q = loom.document, call.query_params.get("q", "")
    wanted = re.compile(re.escape(q), re.IGNORECASE)
    places = (
        place for node in document.shown() for place in _places(document, node, wanted, len(q))
    )
    found = [*islice(places, _MOST_FOUND)] if q else []
    return reply({"found": found, "more": len(found) == _MOST_FOUND})


def _places(
    document: Document, node: Node, wanted: re.Pattern[str], n_wanted: int
) -> Iterator[dict[str, object]]:
    """Yield the matches that end in a node's own text; they may begin in its parent's.

    ``at`` and ``last`` are the first and the last token of the match, as positions in the whole text.
    """
    # A match may begin in the text before the node. A character there has at most four tokens.
    start = max(0, node.at - 4 * n_wanted)
    ids = node.tokens(start=start)
    if not wanted.search(document.bytes_of(ids).decode("utf-8", "replace")):
        return  # nearly always; the texts of single tokens cost far more
    words = document.texts(ids)
    ends = [*accumulate(map(len, words))]
    for match in wanted.finditer("".join(words)):
        at, last = (start + bisect_right(ends, i) for i in (match.start(), match.end() - 1))
        if last >= node.at:  # else it is the parent's
            yield {"node": node.id, "at": at, "last": last}


async def _events(loom: Loom, call: Request) -> Response:
    await call.body()
    return EventStream(loom.stream())


async def _export(loom: Loom, call: Request) -> Response:
    query = call.query_params
    node = loom.node(query["node"]) if query.get("node") else None
    kind = query.get("format", "json")
    title = path_text(loom.journal.path.name).removesuffix(".loom.jsonl")
    data, name, mime = await asyncio.to_thread(
        formats.export, loom.document, kind, node, title=title, model=loom.model()["model"],
        answers=loom.answers(loom.document.shown()) if kind == "html" else None,
    )  # fmt: skip
    where = f'attachment; filename="{name}"'.encode("ascii", "replace").decode()
    return reply(data, headers={"content-disposition": where}, kind=mime)


async def _import(loom: Loom, call: Request) -> Response:
    loom.check_writable()
    model = loom.service.model
    call.state.max_body = _MOST_UPLOAD
    data = await call.body()
    content = await asyncio.to_thread(formats.read, data, _MOST_NODES, model.is_of)
    if content.head is None and sum(map(len, content.pieces.values())) > _MOST_TEXT:
        raise HttpError(413, f"the text is too long: at most {_MOST_TEXT >> 20} MB are imported")
    async with loom.acting:
        nodes = loom.make(await asyncio.to_thread(loom.copied, content))
    document = loom.document
    bar, theirs = (each.bars.get("text", {}) for each in (document, content))
    fields = {name: theirs[name] for name in ASIDES if theirs.get(name) and not bar.get(name)}
    if fields:
        loom.add(Bar(mode="text", fields=bar | fields))
        loom.emit("set", {"bars": document.bars})
    names = dict(zip((node.id for node in content.shown()), nodes, strict=True))
    shown = names.get(content.current or "", nodes[-1]).id  # as it was shown there
    roots = [document.node_fields(node) for node in nodes if node.parent is None]
    error = await loom.confirm()
    answer = {"nodes": roots, "count": len(nodes), "shown": shown, "bar": [*fields]}
    return reply({**answer, **error, "event": loom.n_events}, 507 if error else 200)


_ROUTES: dict[str, Handler] = {
    "POST /loom/do": _do,
    "GET /loom/doc": _doc,
    "GET /loom/tokens": _tokens,
    "GET /loom/next": _next,
    "GET /loom/example": _example,
    "GET /loom/find": _find,
    "GET /loom/events": _events,
    "GET /loom/export": _export,
    "POST /loom/import": _import,
}
