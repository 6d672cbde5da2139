"""Documents as other programs have them: four looms, JSON that keeps all, Markdown, and one HTML file.

Other looms fork at the ends of nodes only, so a node is written as the stretches between its forks.
Nothing here recurses: a text of a thousand tokens may be nested a thousand deep.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO

import msgspec
from msgspec import Raw

from ..errors import ConfigError
from . import page
from .document import Document, Made, Node, Number, Piece, Pieces, Record, Round, Tokens

__all__ = ["FORMATS", "Item", "export", "read"]

_MARKER = "llamabranch-loom"
_MOST_UNPACKED = 1 << 29
_DATA = re.compile(rb'<script type="application/json" id="loom-data">([A-Za-z0-9+/=\s]*)</script>')
_TOKEN = re.compile(r'[\s,:]*([{}\[\]]|"(?:[^"\\]|\\.)*"|[^\s{}\[\],:"]+)')
_JSON, _PLAIN = b"application/json", b"text/markdown; charset=utf-8"
Values = Mapping[str, object]


@dataclass
class Item:
    """A node to be made: texts with log-probabilities where they are known, and its marks.

    ``parent`` is the number of an earlier one, -1 of none; ``at`` how many of its tokens count, -1 = all.
    """

    parts: list[tuple[str, Number]]
    parent: int = -1
    at: int = -1
    by: str = "import"
    bookmark: bool = False
    note: str = ""
    deleted: bool = False
    kind: str = "imported"
    seed: str | None = None
    sampling: dict[str, object] = field(default_factory=dict)
    reason: str = ""
    tokens: Tokens | None = None
    more: list[Record] = field(default_factory=list)


@dataclass
class _Segment:
    """A stretch of a node between two places where something forks."""

    node: Node
    a: int
    b: int
    parent: int
    text: str
    children: list[int] = field(default_factory=list)
    ends_node: bool = True


def _segments(document: Document) -> list[_Segment]:
    nodes = [node for node in document.shown() if not _is_deleted(node)]
    owners = {node: _owner(node) for node in nodes}
    cuts: dict[Node, set[int]] = {node: {len(node.ids)} for node in nodes}
    for node in nodes:
        owner = owners[node]
        if owner is not None:
            cuts[owner].add(node.made.at - owner.made.at)
    found: list[_Segment] = []
    ending: dict[tuple[Node, int], int] = {}
    for node in nodes:
        owner, a = owners[node], 0
        parent = -1 if owner is None else ending[owner, node.made.at - owner.made.at]
        for b in sorted(cuts[node] - {0}) or [0]:
            text = document.bytes_of(node.ids[a:b]).decode("utf-8", "replace")
            found.append(_Segment(node, a, b, parent, text, ends_node=b == len(node.ids)))
            if parent >= 0:
                found[parent].children.append(len(found) - 1)
            a, parent = b, len(found) - 1
            ending[node, b] = parent
    return found


def _is_deleted(node: Node | None) -> bool:
    while node is not None:
        if node.deleted:
            return True
        node = node.parent
    return False


def _owner(node: Node) -> Node | None:
    """Return the node in whose own tokens one begins."""
    owner = node.parent
    while owner is not None and owner.parent is not None and node.made.at <= owner.made.at:
        owner = owner.parent
    return owner


# -- writing ---------------------------------------------------------------------------------------


def export(
    document: Document,
    kind: str,
    node: Node | None,
    *,
    title: str = "loom",
    top: int = 10,
    models: object = None,
) -> tuple[bytes, str, bytes]:
    """Return a document in a format: its bytes, a name for the file, and its type.

    Raises:
        ConfigError: there is no such format, or it needs a node.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", title) or "loom"
    if kind in ("json", "html"):
        data = msgspec.json.encode(_whole(document, kind, title, top, models))
        if kind == "html":
            return page.html_file(data, title), f"{safe}.html", b"text/html; charset=utf-8"
        return data, f"{safe}.json", _JSON
    if kind == "markdown":
        if node is None:
            raise ConfigError("node is needed: Markdown has the text of one path")
        return document.text(node, own=False).encode(), f"{safe}.md", _PLAIN
    segments = _segments(document)
    if kind == "markdown-tree":
        return _bullets(segments).encode(), f"{safe}.md", _PLAIN
    writer = _WRITERS.get(kind)
    if writer is None:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, not {kind!r:.40}")
    return writer(document, segments, title).encode(), f"{safe}.{kind}.json", _JSON


def _whole(document: Document, kind: str, title: str, top: int, models: object) -> Values:
    nodes = []
    for node in document.shown():
        columns = document.columns([(node, 0, len(node.ids))], top=True)
        tops = columns["top"]
        columns["top"] = [each[:top] for each in tops] if isinstance(tops, list) else []
        del columns["at"]
        made = node.made
        nodes.append({
            **document.told(node), "text": document.text(node), "max_tokens": made.max_tokens,
            "grammar": made.grammar, "json_schema": made.json_schema, "bookmark": node.bookmark,
            "deleted": node.deleted, "tokens": columns, "compare": node.compared,
            "searches": node.searches,
            "rounds": [document.round(r, i + 1) for i, r in enumerate(node.rounds)],
        })  # fmt: skip
    head = msgspec.to_builtins(document.head) if document.head else {}
    return {
        "format": _MARKER, "version": 1, "title": title, "header": head, "models": models,
        "current": document.current, "export": kind, "nodes": nodes,
    }  # fmt: skip


def _bullets(segments: Sequence[_Segment]) -> str:
    lines, depths = [], list[int]()
    order = _walk(
        [i for i, s in enumerate(segments) if s.parent < 0], lambda i: segments[i].children
    )
    depths = [0] * len(segments)
    for i in order:
        segment = segments[i]
        parent = segment.parent
        if parent >= 0:
            depths[i] = depths[parent] + 1
        indent = "  " * depths[i]
        lines.append(f"{indent}- " + segment.text.replace("\n", f"\n{indent}  "))
    return "\n".join(lines) + "\n"


def _walk(roots: Iterable[int], children: Callable[[int], Sequence[int]]) -> list[int]:
    """Return all numbers below roots, parents first."""
    waiting, found = [*roots][::-1], []
    while waiting:
        i = waiting.pop()
        found.append(i)
        waiting += reversed(children(i))
    return found


def _nested(
    roots: Sequence[int], fields: Callable[[int], Values], below: Sequence[Sequence[int]]
) -> str:
    """Return nodes as JSON objects that hold their ``children``, with commas between."""
    out: list[str] = []
    waiting: list[int | str] = [*reversed(roots)]
    while waiting:
        i = waiting.pop()
        if isinstance(i, str):
            out.append(i)
            continue
        if out and out[-1].endswith("}"):
            out.append(",")
        out.append(json.dumps(fields(i), ensure_ascii=False)[:-1] + ', "children": [')
        waiting += ["]}", *reversed(below[i])]
    return "".join(out)


def _logitloom(document: Document, segments: Sequence[_Segment], title: str) -> str:
    fields: list[Values] = []
    below: list[list[int]] = []
    last: dict[int, int] = {}
    roots: list[int] = []
    for number, segment in enumerate(segments):
        node, before = segment.node, last.get(segment.parent, -1)
        for i in range(segment.a, segment.b):
            text = document.bytes_of([node.ids[i]]).decode("utf-8", "replace")
            lp = node.lp[i]
            ends = i == len(node.ids) - 1 and node.reason == "stop"
            (roots if before < 0 else below[before]).append(len(fields))
            before = len(fields)
            fields.append({
                "id": f"{node.id}-{i}", "text": text, "logprob": 0.0 if lp is None else lp,
                "prob": 1.0 if lp is None else math.exp(lp), "branchFinished": ends,
            })  # fmt: skip
            below.append([])
        last[number] = before
    head = {
        "isLogitLoomTreeVersion": "logit-loom-tree-v1",
        "modelName": document.head.model if document.head else title,
        "modelSettings": {"kind": "base"},
    }
    trees = _nested(roots, lambda i: fields[i], below)
    return json.dumps(head, ensure_ascii=False)[:-1] + f', "roots": [{trees}]}}'


def _loomsidian(document: Document, segments: Sequence[_Segment], title: str) -> str:
    names = [f"{s.node.id}-{s.a}" for s in segments]
    here = [n for n, s in zip(names, segments, strict=True) if s.node.id == document.current]
    nodes = {
        name: {
            "text": s.text, "parentId": names[s.parent] if s.parent >= 0 else None, "collapsed": False,
            "unread": False, "bookmarked": s.node.bookmark and s.ends_node,
        }
        for name, s in zip(names, segments, strict=True)
    }  # fmt: skip
    found: Values = {
        "current": next(iter([*here, *names]), None), "hoisted": [], "searchTerm": "",
        "generating": None, "nodes": nodes,
    }  # fmt: skip
    return json.dumps(found, ensure_ascii=False)


def _socketteer(
    document: Document, segments: Sequence[_Segment], title: str, *, simple: bool = False
) -> str:
    roots = [i for i, s in enumerate(segments) if s.parent < 0]
    below = [s.children for s in segments]

    def name(i: int) -> str:
        return f"{segments[i].node.id}-{segments[i].a}"

    def fields(i: int) -> Values:
        s = segments[i]
        if simple:
            return {"text": s.text}
        found = {"id": name(i), "text": s.text, "bookmark": s.node.bookmark and s.ends_node}
        return found | ({"parent_id": name(s.parent)} if s.parent >= 0 else {})

    trees = _nested(roots, fields, below)
    if len(roots) != 1:  # it has one root
        trees = json.dumps({"text": ""} if simple else {"id": "root", "text": ""})[:-1] + (
            f', "children": [{trees}]}}'
        )
    if simple:
        return trees
    noted = [i for i, s in enumerate(segments) if s.node.note and s.ends_node]
    chapters = {
        f"c{i}": {"id": f"c{i}", "root_id": name(i), "title": segments[i].node.note} for i in noted
    }
    more = json.dumps({"chapters": chapters, "selected_node_id": None}, ensure_ascii=False)
    return f'{{"root": {trees}, {more[1:]}'


def _exoloom(document: Document, segments: Sequence[_Segment], title: str) -> str:
    names = [f"{s.node.id}-{s.a}" for s in segments]
    roots = [name for name, s in zip(names, segments, strict=True) if s.parent < 0]
    nodes: dict[str, Values] = {}
    if len(roots) != 1:
        nodes["root"] = {
            "content": "", "authorType": "user", "parentId": None, "childrenIds": roots, "createdAt": 0,
        }  # fmt: skip
    for name, s in zip(names, segments, strict=True):
        above = names[s.parent] if s.parent >= 0 else "root" if len(roots) != 1 else None
        nodes[name] = {
            "content": s.text, "authorType": "model" if s.node.made.by in ("A", "B") else "user",
            "parentId": above, "childrenIds": [names[i] for i in s.children],
            "createdAt": s.node.made.t, "bookmarked": s.node.bookmark and s.ends_node,
        }  # fmt: skip
    root = roots[0] if len(roots) == 1 else "root"
    tree = {"title": title, "rootNodeId": root, "nodes": nodes}
    found = {"loomType": "Exoloom", "schemaVersion": 1, "tree": tree, "lens": {}}
    return json.dumps(found, ensure_ascii=False)


_WRITERS: dict[str, Callable[[Document, Sequence[_Segment], str], str]] = {
    "logitloom": _logitloom,
    "loomsidian": _loomsidian,
    "socketteer": _socketteer,
    "socketteer-simple": lambda d, s, title: _socketteer(d, s, title, simple=True),
    "exoloom": _exoloom,
}
FORMATS = ("json", "html", "markdown", "markdown-tree", *_WRITERS)


# -- reading ---------------------------------------------------------------------------------------


def read(data: bytes, most: int, fingerprint: str) -> tuple[str, list[Item], list[str]]:
    """Return what a file is, its nodes, parents first, and what could not be taken.

    Tokens and their numbers are taken from a file of the page that is of the model with ``fingerprint``.

    Raises:
        ConfigError: it is of none of the formats, or has more than ``most`` nodes.
    """
    found = _DATA.search(data)
    if found is not None:
        data = _unpacked(found[1])
    start = data.lstrip()[:1]
    if start not in (b"{", b"["):
        return "markdown", [Item([(data.decode("utf-8", "replace"), None)])], []
    value = _parsed(data)
    if not isinstance(value, dict):
        raise ConfigError("this JSON is a list: no loom writes that")
    told: list[str] = []
    if value.get("format") == _MARKER:
        kind, items = "json", _own(value, fingerprint)
    elif "isLogitLoomTreeVersion" in value:
        kind, items = "logitloom", _tree(value.get("roots"), told, most)
    elif value.get("loomType") == "Exoloom":
        tree = value.get("tree")
        kind = "exoloom"
        items = _flat(tree.get("nodes") if isinstance(tree, dict) else None, told)
    elif isinstance(value.get("nodes"), (dict, list)):
        kind, items = "loomsidian", _flat(value["nodes"], told)
    elif isinstance(value.get("root"), dict):
        kind, items = "socketteer", _tree([value["root"]], told, most, _chapters(value))
    elif isinstance(value.get("text"), str):
        kind, items = "socketteer-simple", _tree([value], told, most)
    else:
        raise ConfigError(
            "this JSON is of no loom that is known", hint="formats: " + ", ".join(FORMATS)
        )
    if len(items) > most:
        raise ConfigError(f"the file has {len(items):,} nodes, at most {most:,} can be taken")
    return kind, items, told


def _unpacked(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=BytesIO(b64decode(data))) as file:
            found = file.read(_MOST_UNPACKED + 1)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"the document in this HTML file is damaged: {error}") from None
    if len(found) > _MOST_UNPACKED:
        raise ConfigError("the document in this HTML file is too large")
    return found


def _parsed(data: bytes) -> object:
    """Return a JSON value; one that is nested deeply, too."""
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is no JSON: {error}") from None
    text = data.decode("utf-8", "replace")
    top: list[object] = []
    open_: list[tuple[object, str | None]] = [(top, None)]  # containers, and the key that waits
    for match in _TOKEN.finditer(text):
        token = match[1]
        holder, key = open_[-1]
        if token in "}]":
            if len(open_) < 2:
                raise ConfigError("this is no JSON: it closes what it has not opened")
            open_.pop()
            continue
        if token in "{[":
            value: object = {} if token == "{" else []
        else:
            try:
                value = json.loads(token)
            except ValueError:
                raise ConfigError(f"this is no JSON: {token[:40]!r}") from None
        if isinstance(holder, dict) and key is None:
            open_[-1] = holder, str(value)
            continue
        if isinstance(holder, dict):
            holder[key] = value
            open_[-1] = holder, None
        elif isinstance(holder, list):
            holder.append(value)
        if token in "{[":
            open_.append((value, None))
    if len(top) != 1 or len(open_) != 1:
        raise ConfigError("this is no JSON: it is not closed")
    return top[0]


def _str(value: object) -> str:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _number(value: object) -> Number:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _tree(
    roots: object, told: list[str], most: int, notes: Mapping[str, str] | None = None
) -> list[Item]:
    """Return nested nodes; those that go on in one way only are one, and an empty root is none."""
    items: list[Item] = []
    waiting = [(each, -1) for each in reversed(roots if isinstance(roots, list) else [])]
    n = 0
    while waiting:
        node, parent = waiting.pop()
        if not isinstance(node, dict):
            told.append("something that is no node was left out")
            continue
        n += 1
        if n > 50 * most:
            raise ConfigError(f"the file has more than {50 * most:,} tokens")
        text, below = _str(node.get("text")), node.get("children")
        below = below if isinstance(below, list) else []
        part = text, _number(node.get("logprob")) if "prob" in node else None
        note = (notes or {}).get(str(node.get("id")), "")
        is_marked = node.get("bookmark") is True
        siblings = node.get("_single") is True
        if siblings and parent >= 0 and not items[parent].note and not items[parent].bookmark:
            items[parent].parts.append(part)
            at = parent
        elif text or parent >= 0:
            items.append(Item([part], parent))
            at = len(items) - 1
        else:
            at = -1
        if at >= 0:
            items[at].note = note or items[at].note
            items[at].bookmark = is_marked or items[at].bookmark
        if len(below) == 1 and isinstance(below[0], dict):
            below[0]["_single"] = True
        waiting += [(each, at) for each in reversed(below)]
    return items


def _flat(nodes: object, told: list[str]) -> list[Item]:
    """Return the nodes of a map, or of a list, that name their parents."""
    pairs: list[tuple[str, object]] = []
    if isinstance(nodes, dict):
        pairs = [(str(name), node) for name, node in nodes.items()]
    elif isinstance(nodes, list):
        pairs = [(str(n.get("id")) if isinstance(n, dict) else "", n) for n in nodes]
    known = {name: node for name, node in pairs if isinstance(node, dict)}
    below: dict[str | None, list[str]] = {}
    for name, node in known.items():
        parent = node.get("parentId")
        below.setdefault(None if parent is None else str(parent), []).append(name)
    items: list[Item] = []
    n_seen = 0
    waiting = [(name, -1) for name in reversed(below.pop(None, []))]
    while waiting:
        name, parent = waiting.pop()
        node = known[name]
        n_seen += 1
        text = _str(node.get("text", node.get("content")))
        at = -1
        if text or parent >= 0:
            by = {"user": "user", "model": "A"}.get(str(node.get("authorType")), "import")
            mark = node.get("bookmarked") is True
            items.append(Item([(text, None)], parent, by=by, bookmark=mark))
            at = len(items) - 1
        waiting += [(child, at) for child in reversed(below.pop(name, []))]
    if len(pairs) > n_seen:
        told.append(f"{len(pairs) - n_seen} nodes without a way to a root were left out")
    return items


def _chapters(value: Values) -> dict[str, str]:
    given = value.get("chapters")
    chapters = given.values() if isinstance(given, dict) else ()
    return {str(c.get("root_id")): _str(c.get("title")) for c in chapters if isinstance(c, dict)}


def _own(value: Values, fingerprint: str) -> list[Item]:
    """Return the nodes of the page's own JSON, with all that is known of them, if it is of the model."""
    try:
        saved = msgspec.convert(value, _Saved)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"this file of the page is damaged: {error}") from None
    items: list[Item] = []
    numbers: dict[str, int] = {}
    ends: dict[str | None, int] = {None: 0}
    for node in saved.nodes:
        if not 0 <= node.at <= ends.get(node.parent, -1) or node.id in numbers:
            raise ConfigError(f"this file of the page is damaged: {node.id} cannot begin")
        ends[node.id] = node.at + len(node.tokens.ids)
        parent = -1 if node.parent is None else numbers[node.parent]
        columns = node.tokens
        n = len(columns.ids)
        if any(len(c) != n for c in (columns.lp, columns.h, columns.rk, columns.src, columns.text)):
            raise ConfigError(f"this file of the page is damaged: the tokens of {node.id}")
        tops = [*columns.top, *([[]] * n)][:n]
        tokens = Tokens(
            id="", ids=columns.ids, lp=columns.lp, h=columns.h, rk=columns.rk, src=columns.src,
            top=[Raw(msgspec.json.encode([(t, lp) for t, lp, _ in top])) for top in tops],
        )  # fmt: skip
        more: list[Record] = [
            Round(
                id="", at=r.at, draft=[t for t, _, _ in r.draft],
                lp=[lp for _, _, lp in r.draft][: r.accepted + r.rejected], accepted=r.accepted,
                rejected=r.rejected, next=(r.next[0], r.next[2]), src=r.src, drafter=r.drafter, ms=r.ms,
            )
            for r in node.rounds
        ]  # fmt: skip
        numbers[node.id] = len(items)
        items.append(Item(
            [(_str(node.text), None)], parent, node.at, node.by, node.bookmark, node.note or "",
            node.deleted, node.kind, node.seed, node.sampling,
            "" if node.reason in (None, "running", "interrupted") else str(node.reason), tokens, more,
        ))  # fmt: skip
    return items if saved.header.get("fingerprint") == fingerprint else _retold(saved, items)


def _retold(saved: _Saved, items: Sequence[Item]) -> list[Item]:
    """Return nodes of another model as texts alone, cut where something forks."""
    document = Document()
    for i, (node, item) in enumerate(zip(saved.nodes, items, strict=True)):
        document.apply(Pieces(p=dict(zip(node.tokens.ids, node.tokens.text, strict=True))))
        parent = str(item.parent) if item.parent >= 0 else None
        document.apply(Made(id=str(i), parent=parent, at=max(0, item.at), r=i + 1))
        if item.tokens is not None:
            item.tokens.id = str(i)
            document.apply(item.tokens)
    return [
        Item(
            [(s.text, None)], s.parent, by=items[int(s.node.id)].by, note=items[int(s.node.id)].note
        )
        for s in _segments(document)
    ]


class _Columns(msgspec.Struct):
    ids: list[int]
    text: list[Piece]
    lp: list[Number]
    h: list[Number]
    rk: list[int | None]
    src: str
    top: list[list[tuple[int, Number, object]]] = []


class _SavedRound(msgspec.Struct):
    at: int
    draft: list[tuple[int, object, Number]]
    accepted: int
    rejected: int
    next: tuple[int, object, Number]
    src: str
    drafter: str
    ms: tuple[float, float]


class _SavedNode(msgspec.Struct):
    id: str
    parent: str | None
    at: int
    tokens: _Columns
    text: str = ""
    kind: str = "imported"
    by: str = "import"
    reason: str | None = None
    seed: str | None = None
    sampling: dict[str, object] = {}
    note: str | None = None
    bookmark: bool = False
    deleted: bool = False
    rounds: list[_SavedRound] = []


class _Saved(msgspec.Struct):
    nodes: list[_SavedNode]
    header: dict[str, object] = {}
