"""Import and export: four other looms, JSON that keeps everything, Markdown, and one HTML file.

Journals of the page and of agents are read too, but not written.

Other looms fork at the ends of nodes only, so a node is written as the texts between its forks.
Nothing here recurses: a file may be nested as deep as a text has tokens.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from base64 import b64decode
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import NamedTuple

import msgspec
from msgspec import Raw

from ..agents.journal import begins_a_run
from ..errors import ConfigError
from ..serve.fields import SamplingFields
from . import page
from .agents import document_of
from .document import AnyRecord, Document, Made, Node, Number, Tokens, decoded
from .journal import replay

__all__ = ["Item", "encoding_of", "export", "items_of", "read"]

_MARKER = "llamabranch-loom"
_MOST_UNPACKED = 1 << 29
_DATA = re.compile(rb'<script type="application/json" id="loom-data">([A-Za-z0-9+/=\s]*)</script>')
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")  # JSON escapes all of them
_SURROGATE = re.compile("[\ud800-\udfff]")
_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_BRACKETS = re.compile(r"\s*(?:[\[{]\s*)?([\[{])\s*([^\s\[{]?)")
_KEY = re.compile(r'"(?:[^"\\]|\\.)*(?:"\s*(?::|$)|$)')
_MARKS = {
    BOM_UTF8: "utf-8-sig", BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32", BOM_UTF16_LE: "utf-16",
    BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_BINARY = {
    b"VersionedTapestryWeave__": "a weave of Tapestry, which only its own program can read",
    b"%PDF-": "a PDF", b"{\\rtf": "a document in RTF", b"GGUF": "a model",
    b"PK\x03\x04": "an archive (zip, docx, odt)",
    b"\x1f\x8b": "a compressed file", b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture",
}  # fmt: skip
_BESIDE = {"memoryTokens": "memory", "authorNoteTokens": "author's note"}
_TOKEN = re.compile(r'[\s,:]*([{}\[\]]|"(?:[^"\\]|\\.)*"|[^\s{}\[\],:"]+)')
_HEAD = b'{"op":"head",'  # of the file of a document
_JSON, _MARKDOWN = b"application/json", b"text/markdown; charset=utf-8"
_encode = msgspec.json.encode
Values = Mapping[str, object]


@dataclass
class Item:
    """A stretch of text between two forks. An added root has no text.

    Attributes:
        parts: texts of one or several tokens, each with its log-probability if known.
        parent: the index of its parent in the list; -1 = it is a root.
        id, time, is_finished: from a document's node, for other programs.
    """

    parts: list[tuple[str, Number]]
    parent: int = -1
    by: str = "import"
    bookmark: bool = False
    note: str = ""
    id: str = "root"
    time: int = 0
    is_finished: bool = False
    children: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(text for text, _ in self.parts)


class _Shape(NamedTuple):
    """How a loom writes a document.

    Attributes:
        fields: the loom's name of each field that `_fields` returns.
        around: returns the whole file from the document, its title, its items, and these as JSON.
        is_nested: nodes contain their children; else the file has a map of nodes.
        has_tokens: each token is a node.
        has_one_root: several roots are put under an empty one.
    """

    fields: dict[str, str]
    around: Callable[[Document, str, Sequence[Item], bytes], object]
    is_nested: bool = False
    has_tokens: bool = False
    has_one_root: bool = False


def items_of(
    document: Document, *, has_tokens: bool = False, has_one_root: bool = False
) -> list[Item]:
    """Return the texts that are shown and not deleted, parents first; see `_Shape` for the arguments.

    Log-probabilities are those of single tokens. Bookmarks and notes are on the last item of a node.
    """
    cuts: dict[Node, set[int]] = {}
    owners: dict[Node, Node | None] = {}  # the node in whose own tokens another one begins
    for node in document.shown():
        if node.deleted or not (node.parent is None or node.parent in cuts):
            continue
        owner = node.parent if node.made.at else None
        while owner is not None and owner.parent is not None and node.made.at <= owner.made.at:
            owner = owner.parent
        owners[node] = owner
        n = len(node.ids)
        cuts[node] = set(range(1, n)) | {n} if has_tokens else {n}
        if owner is not None:
            cuts[owner].add(node.made.at - owner.made.at)
    is_alone = sum(owner is None for owner in owners.values()) == 1
    found = [Item([], by="user")] if has_one_root and not is_alone else []
    top = len(found) - 1
    ending: dict[tuple[Node, int], int] = {}
    for node, owner in owners.items():
        made = node.made
        a, parent = 0, top if owner is None else ending[owner, made.at - owner.made.at]
        for b in sorted(cuts[node] - {0}) or [0]:
            text = document.bytes_of(node.ids[a:b]).decode("utf-8", "replace")
            lp = node.lp[a] if has_tokens and b > a else None
            if parent >= 0:
                found[parent].children.append(len(found))
            item = Item([(text, lp)], parent, made.by, id=f"{node.id}-{a}", time=made.t)
            if b == len(node.ids):
                item.bookmark, item.note = node.bookmark, node.note
                item.is_finished = node.reason == "stop"
            a, parent = b, len(found)
            ending[node, b] = parent
            found.append(item)
    return found


# -- writing ---------------------------------------------------------------------------------------


def export(
    document: Document,
    kind: str,
    node: Node | None,
    *,
    title: str = "loom",
    top: int = 10,
    models: object = None,
    answers: object = None,
) -> tuple[bytes, str, bytes]:
    """Return a document in a format: its bytes, a name for the file, and its type.

    Raises:
        ConfigError: the format is unknown, or it needs a node.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", title) or "loom"
    if kind in ("json", "html"):
        whole = _whole(document, title, top, models)
        data = _encode(whole if answers is None else {**whole, "answers": answers})
        if kind == "html":
            return page.html_file(data, title), f"{safe}.html", b"text/html; charset=utf-8"
        return data, f"{safe}.json", _JSON
    if kind == "markdown":
        if node is None:
            raise ConfigError("node is needed: Markdown contains the text of one path")
        return document.text(node, own=False).encode(), f"{safe}.md", _MARKDOWN
    if kind == "markdown-tree":
        return _bullets(items_of(document)).encode(), f"{safe}.md", _MARKDOWN
    shape = _SHAPES.get(kind)
    if shape is None:
        raise ConfigError(f"format must be one of {_NAMES}, not {kind!r:.40}")
    parts = items_of(document, has_tokens=shape.has_tokens, has_one_root=shape.has_one_root)
    nodes = _nested(parts, shape) if shape.is_nested else _encode(
        {part.id: _fields(parts, i, shape) for i, part in enumerate(parts)}
    )  # fmt: skip
    return _encode(shape.around(document, title, parts, nodes)), f"{safe}.{kind}.json", _JSON


def _whole(document: Document, title: str, top: int, models: object) -> Values:
    records = [*document.records()]
    for record in records:
        if isinstance(record, Tokens):
            record.top = [Raw(_encode(decoded(raw)[:top])) for raw in record.top]
    return {
        "format": _MARKER, "version": 1, "title": title, "models": models, "records": records,
    }  # fmt: skip


def _bullets(parts: Sequence[Item]) -> str:
    lines = []
    waiting = [(i, 0) for i, part in enumerate(parts) if part.parent < 0][::-1]
    while waiting:
        i, depth = waiting.pop()
        indent = "  " * depth
        lines.append(f"{indent}- " + parts[i].text.replace("\n", f"\n{indent}  "))
        waiting += [(child, depth + 1) for child in reversed(parts[i].children)]
    return "\n".join(lines) + "\n"


def _fields(parts: Sequence[Item], i: int, shape: _Shape) -> Values:
    """Return the fields of a node for another loom; nested nodes have no fields that are None."""
    part = parts[i]
    lp = (part.parts[0][1] if part.parts else None) or 0.0
    found: dict[str, object] = {
        "id": part.id, "text": part.text, "no": False,
        "parent": parts[part.parent].id if part.parent >= 0 else None,
        "children": [parts[child].id for child in part.children],
        "author": "model" if part.by in ("A", "B") else "user", "time": part.time,
        "bookmark": part.bookmark, "logprob": lp, "prob": math.exp(lp), "finished": part.is_finished,
    }  # fmt: skip
    fields = shape.fields.items()
    return {n: found[key] for n, key in fields if found[key] is not None or not shape.is_nested}


def _nested(parts: Sequence[Item], shape: _Shape) -> bytes:
    """Return the roots as JSON objects with ``children``, separated by commas."""
    out: list[bytes] = []
    roots = [i for i, part in enumerate(parts) if part.parent < 0]
    waiting: list[int | bytes] = [*reversed(roots)]
    while waiting:
        i = waiting.pop()
        if isinstance(i, bytes):
            out.append(i)
            continue
        if out and out[-1].endswith(b"}"):
            out.append(b",")
        out.append(_encode(_fields(parts, i, shape))[:-1] + b',"children":[')
        waiting += [b"]}", *reversed(parts[i].children)]
    return b"".join(out)


def _current(document: Document, parts: Sequence[Item]) -> str | None:
    here = [part.id for part in parts if part.id.rpartition("-")[0] == document.current]
    return next(iter([*here, *(part.id for part in parts)]), None)


def _chapters_of(parts: Sequence[Item]) -> dict[str, Values]:
    noted = {f"c{i}": part for i, part in enumerate(parts) if part.note}
    return {c: {"id": c, "root_id": part.id, "title": part.note} for c, part in noted.items()}


_SHAPES = {
    "logitloom": _Shape(
        {"id": "id", "text": "text", "logprob": "logprob", "prob": "prob", "branchFinished": "finished"},
        lambda document, title, parts, nodes: {
            "isLogitLoomTreeVersion": "logit-loom-tree-v1",
            "modelName": document.head.model if document.head else title,
            "modelSettings": {"kind": "base"}, "roots": Raw(b"[%b]" % nodes),
        },
        is_nested=True, has_tokens=True,
    ),
    "loomsidian": _Shape(
        {"text": "text", "parentId": "parent", "collapsed": "no", "unread": "no",
         "bookmarked": "bookmark"},
        lambda document, title, parts, nodes: {
            "current": _current(document, parts), "hoisted": [], "searchTerm": "",
            "generating": None, "nodes": Raw(nodes),
        },
    ),
    "socketteer": _Shape(
        {"id": "id", "text": "text", "bookmark": "bookmark", "parent_id": "parent"},
        lambda document, title, parts, nodes: {
            "root": Raw(nodes), "chapters": _chapters_of(parts), "selected_node_id": None,
        },
        is_nested=True, has_one_root=True,
    ),
    "socketteer-simple": _Shape(
        {"text": "text"}, lambda document, title, parts, nodes: Raw(nodes), is_nested=True,
        has_one_root=True,
    ),
    "exoloom": _Shape(
        {"content": "text", "authorType": "author", "parentId": "parent", "childrenIds": "children",
         "createdAt": "time", "bookmarked": "bookmark"},
        lambda document, title, parts, nodes: {
            "loomType": "Exoloom", "schemaVersion": 1, "lens": {},
            "tree": {"title": title, "rootNodeId": parts[0].id, "nodes": Raw(nodes)},
        },
        has_one_root=True,
    ),
}  # fmt: skip
_NAMES = ", ".join(("json", "html", "markdown", "markdown-tree", *_SHAPES))
_TEXTS = f"it reads plain text, exported pages (html, json), {', '.join(_SHAPES)} and mikupad"


# -- reading ---------------------------------------------------------------------------------------


class _File(msgspec.Struct):
    records: list[AnyRecord]


def read(
    data: bytes, most: int, is_ours: Callable[[str], bool]
) -> tuple[str, Document | list[Item], int]:
    """Return a file's format, its content, and how many nodes whose parents are missing were left out.

    A file of the page for which ``is_ours(fingerprint)`` is true is read as a document, all others as
    items, parents first.

    Raises:
        ConfigError: the format is unknown, or there are more than ``most`` nodes.
    """
    found = _DATA.search(data)
    if found is not None:
        data = _unpacked(found[1])
    if begins_a_run(data):
        return "agent", _ours(document_of(data, most), most, is_ours), 0
    if data.startswith(_HEAD):
        document = Document()
        _, wrong = replay(document, data)
        if wrong is not None:
            raise ConfigError(f"this file of the page is damaged: {wrong}")
        return "journal", _ours(document, most, is_ours), 0
    text = _decoded(data)
    if not text.strip():
        raise ConfigError("the file is empty", hint=_TEXTS)
    if text.lstrip()[0] not in "{[":
        return "markdown", [_story(text)], 0
    try:
        value = _parsed(text)
    except ConfigError:
        if not _begins_story(text):
            raise
        return "markdown", [_story(text)], 0
    match value:
        case {"format": str(marker)} if marker == _MARKER:
            document = _own(text.encode("utf-8", "replace"))
            return "json", _ours(document, most, is_ours), 0
        case {"isLogitLoomTreeVersion": _, "roots": list(roots)}:
            return "logitloom", *_items(roots, most)
        case {"loomType": "Exoloom", "tree": {"nodes": dict() | list() as nodes}}:
            return "exoloom", *_flat(nodes, most)
        case {"nodes": dict() | list() as nodes}:
            return "loomsidian", *_flat(nodes, most)
        case {"root": dict() as root, "chapters": chapters}:
            return "socketteer", *_items([root], most, notes=_chapters(chapters))
        case {"root": dict() as root}:
            return "socketteer", *_items([root], most)
        case {"text": str()} as root:
            return "socketteer-simple", *_items([root], most)
        case dict() as saved if sessions := _sessions(saved):
            return "mikupad", *_items_of_sessions(sessions, most)
    raise ConfigError("the page cannot read this kind of JSON", hint=_TEXTS)


def _unpacked(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=BytesIO(b64decode(data))) as file:
            found = file.read(_MOST_UNPACKED + 1)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"the document in this HTML file is damaged: {error}") from None
    if len(found) > _MOST_UNPACKED:
        raise ConfigError("the document in this HTML file is too large")
    return found


def encoding_of(data: bytes) -> str:
    """Return the encoding of a text file, by its byte order mark or by its bytes.

    Without a mark it is UTF-16 if half of every second byte is 0, else UTF-8 if the bytes are valid.
    Anything else is read as Windows-1252, which contains Latin-1.

    Raises:
        ConfigError: this is not a text.
    """
    for begin, what in _BINARY.items():
        if data.startswith(begin):
            raise ConfigError(f"this is {what}, not a text", hint=_TEXTS)
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    is_zero = [
        sum(byte == 0 for byte in data[:4096][i::2]) * 4 > len(data[:4096]) // 2 for i in (0, 1)
    ]
    name = "utf-8"
    if is_zero[0] != is_zero[1]:
        return "utf-16-be" if is_zero[0] else "utf-16-le"
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        name = "cp1252"
    n_control = len(_CONTROL.findall(data))
    if b"\0" in data or n_control > len(data) // 200:
        raise ConfigError("this is a binary file, not a text", hint=_TEXTS)
    return name


def _decoded(data: bytes) -> str:
    """Return a file's text, with line ends as ``\\n``. It may contain single surrogates."""
    name = encoding_of(data)
    if name == "cp1252":  # five bytes are undefined there: read them as Latin-1
        text = "".join(bytes([b]).decode(name, "ignore") or chr(b) for b in range(256))
        text = data.decode("latin-1").translate(dict(enumerate(text)))
    else:
        try:
            text = data.decode(name, "surrogatepass")
        except UnicodeDecodeError as error:
            raise ConfigError(f"this text is damaged: {error}", hint=_TEXTS) from None
    return text.replace("\r\n", "\n")


def _whole_characters(text: str) -> str:
    """Return a text whose pairs of surrogates are characters, and whose single ones are U+FFFD."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _story(text: str) -> Item:
    return Item([(_whole_characters(text), None)])


def _begins_story(text: str) -> bool:
    """Return whether a text that begins with a bracket, and is not JSON, is meant as a text."""
    match = _BRACKETS.match(text)
    if match is None or not match[2] or match[2] in "{}[]":
        return False
    return not (match[1] == "{" and _KEY.match(text, match.start(2)))


def _parsed(text: str) -> object:
    """Return a JSON value, however deeply it is nested."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        pass
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        try:
            return json.loads(text)  # it accepts single surrogates: programs cut texts there
        except RecursionError:
            pass
        except ValueError:
            raise ConfigError(f"this is not JSON: {error}") from None
    top: list[object] = []
    open_: list[tuple[object, str | None]] = [
        (top, None)
    ]  # containers, each with the key of the next value
    try:
        for match in _TOKEN.finditer(text):
            token = match[1]
            if token in "}]":
                open_.pop()
                continue
            holder, key = open_[-1]
            value = {} if token == "{" else [] if token == "[" else json.loads(token)
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
    except (ValueError, IndexError):
        raise ConfigError(f"this is not JSON at {token[:40]!r}") from None
    if len(top) != 1 or len(open_) != 1:
        raise ConfigError("this is not JSON: a bracket is not closed")
    return top[0]


def _str(value: object) -> str:
    """Return a value if it is a string, else the empty string."""
    return value if isinstance(value, str) else ""


def _items(
    roots: Sequence[object],
    most: int,
    below: Callable[[Values], object] | None = None,
    notes: Mapping[str, str] | None = None,
) -> tuple[list[Item], int]:
    """Return items, parents first, and how many entries were not nodes. An empty root is left out.

    Args:
        roots: nodes without a parent.
        most: how many nodes there may be.
        below: returns a node's children. None = nodes have ``children``, and a node with a single child
            is joined with it: such programs make a node for each token.
        notes: notes by the ids of nodes.
    """
    items: list[Item] = []
    waiting = [(root, -1, False) for root in reversed(roots)]
    n_seen = n_lost = 0
    while waiting:
        node, parent, is_only = waiting.pop()
        n_seen += 1
        if n_seen > 50 * most or len(items) > most:
            raise _too_large(most)
        if not isinstance(node, dict):
            n_lost += 1
            continue
        text, lp = _str(node.get("text", node.get("content"))), node.get("logprob")
        if "prob" not in node or not isinstance(lp, float | int) or not math.isfinite(lp):
            lp = None
        part = text, None if lp is None else float(lp)
        mark = True in (node.get("bookmark"), node.get("bookmarked"))
        note = _whole_characters((notes or {}).get(str(node.get("id")), ""))
        at, before = len(items), items[parent] if is_only and parent >= 0 else None
        if before is not None and not before.note and not before.bookmark:
            _append(before.parts, part)
            before.note, before.bookmark, at = note, mark, parent
        elif text or parent >= 0:
            by = {"user": "user", "model": "A"}.get(str(node.get("authorType")), "import")
            items.append(Item([part], parent, by, mark, note))
        else:
            at = -1
        found = node.get("children") if below is None else below(node)
        children = found if isinstance(found, list) else []
        is_only = below is None and len(children) == 1
        waiting += [(child, at, is_only) for child in reversed(children)]
    for item in items:
        item.parts = [(_whole_characters(text), lp) for text, lp in item.parts]
    return items, n_lost


def _append(parts: list[tuple[str, Number]], part: tuple[str, Number]) -> None:
    """Append a text. If a surrogate pair is split between it and the text before, join the two."""
    if parts and _HALVES.match(parts[-1][0][-1:] + part[0][:1]):
        part = parts.pop()[0] + part[0], None
    parts.append(part)


def _flat(nodes: Values | Sequence[object], most: int) -> tuple[list[Item], int]:
    """Return the items of nodes that name their parents, and how many have a missing parent."""
    if not isinstance(nodes, dict):
        nodes = {str(node.get("id")): node for node in nodes if isinstance(node, dict)}
    children: dict[str | None, list[Values]] = {}
    for name, node in nodes.items():
        if isinstance(node, dict):
            node["id"], parent = name, node.get("parentId")
            children.setdefault(None if parent is None else str(parent), []).append(node)
    roots = children.pop(None, [])
    items, _ = _items(roots, most, lambda node: children.pop(str(node["id"]), []))
    return items, sum(map(len, children.values()))


def _sessions(saved: Values) -> list[Values]:
    """Return mikupad's sessions that have a prompt: a session's file has one, a database many."""
    stores = [store for store in saved.values() if isinstance(store, list)]
    entries = [entry.get("value") for store in stores for entry in store if isinstance(entry, dict)]
    found: list[Values] = []
    for session in (saved, *entries):
        if not isinstance(session, dict) or "prompt" not in session:
            continue
        # In a session's file each value is a string that contains JSON.
        read = {name: _unquoted(session.get(name)) for name in ("prompt", *_BESIDE)}
        chunks = read["prompt"]
        if isinstance(chunks, list) and all(isinstance(c, dict) and "content" in c for c in chunks):
            found.append(read)
    return found


def _unquoted(value: object) -> object:
    if not isinstance(value, str):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    return value


def _items_of_sessions(sessions: Sequence[Values], most: int) -> tuple[list[Item], int]:
    """Return each session as a path that alternates between typed and generated nodes.

    mikupad's memory and author's note become the note of the first node.
    """
    items: list[Item] = []
    for session in sessions:
        chunks, parent = session["prompt"], -1
        beside = [(what, session[name]) for name, what in _BESIDE.items()]
        texts = [(what, _str(b.get("text"))) for what, b in beside if isinstance(b, dict)]
        note = "\n".join(f"{what}: {_whole_characters(text)}" for what, text in texts if text)
        for chunk in chunks if isinstance(chunks, list) else ():
            text, by = _str(chunk.get("content")), "import"
            if chunk.get("type") == "user":
                by = "user"
            if parent < 0 or items[-1].by != by:
                items.append(Item([], parent, by, note=note if parent < 0 else ""))
                parent = len(items) - 1
                if len(items) > most:
                    raise _too_large(most)
            _append(items[-1].parts, (text, None))
    for item in items:
        item.parts = [(_whole_characters(item.text), None)]
    return items, 0


def _too_large(most: int) -> ConfigError:
    return ConfigError(f"the file is too large: at most {most:,} nodes are read")


def _chapters(given: object) -> dict[str, str]:
    chapters = given.values() if isinstance(given, dict) else ()
    return {str(c.get("root_id")): _str(c.get("title")) for c in chapters if isinstance(c, dict)}


def _ours(document: Document, most: int, is_ours: Callable[[str], bool]) -> Document | list[Item]:
    """Return a document of this model as it is, and one of another model as texts."""
    if len(document.nodes) > most:
        raise _too_large(most)
    is_same = document.head is not None and is_ours(document.head.fingerprint)
    return document if is_same else items_of(document)


def _own(data: bytes) -> Document:
    """Return the document in the page's own JSON."""
    document = Document()
    try:
        for record in msgspec.json.decode(data, type=_File).records:
            if isinstance(record, Made):
                msgspec.convert(record.sampling, SamplingFields)
            document.apply(record)
    except (msgspec.MsgspecError, LookupError, ValueError, RecursionError) as error:
        raise ConfigError(f"this file of the page is damaged: {error}") from None
    return document
