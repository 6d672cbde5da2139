"""Import and export: JSON that keeps everything, Markdown, one HTML file, and loomsidian's JSON.

Some formats can only be read: journals of the page, mikupad's sessions, and trees in
JSON. Other looms write a tree as nested nodes, or as nodes that name their parents.

These looms fork at the ends of nodes only, so a node is written as the texts between its forks.
Nothing here recurses, because a file may be nested as deeply as its text has tokens.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO

import msgspec
from msgspec import Raw

from ..errors import ConfigError
from ..serve.fields import SamplingFields
from . import page
from .document import AnyRecord, Document, Made, Node, Tokens, decoded
from .journal import replay

__all__ = ["Item", "encoding_of", "export", "items_of", "read"]

_MARKER = "llamabranch-loom"
_MOST_UNPACKED = 1 << 29
_DATA = re.compile(rb'<script type="application/json" id="loom-data">([A-Za-z0-9+/=\s]*)</script>')
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")  # JSON escapes these characters
_SURROGATE = re.compile("[\ud800-\udfff]")
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
_HEAD = b'{"op":"head",'  # how a document's file begins
_NAMES = ("json", "html", "markdown", "markdown-tree", "loomsidian")
_TEXTS = "it reads plain text, exported pages (html, json), loomsidian, mikupad and trees in JSON"
_JSON, _MARKDOWN = "application/json", "text/markdown"
_encode = msgspec.json.encode
Values = Mapping[str, object]


@dataclass
class Item:
    """A stretch of text between two forks.

    Attributes:
        parent: the index of its parent in the list; -1 = it is a root.
        id: a name for other programs.
    """

    text: str
    parent: int = -1
    by: str = "import"
    bookmark: bool = False
    note: str = ""
    id: str = ""
    children: list[int] = field(default_factory=list)


def items_of(document: Document) -> list[Item]:
    """Return the texts that are shown and not deleted, parents first.

    Bookmarks and notes are on the last item of a node.
    """
    cuts: dict[Node, set[int]] = {}
    owners: dict[Node, Node | None] = {}  # for each node the one in whose own tokens it begins
    for node in document.shown():
        if node.deleted or not (node.parent is None or node.parent in cuts):
            continue
        owner = node.parent if node.made.at else None
        while owner is not None and owner.parent is not None and node.made.at <= owner.made.at:
            owner = owner.parent
        owners[node] = owner
        cuts[node] = {len(node.ids)}
        if owner is not None:
            cuts[owner].add(node.made.at - owner.made.at)
    items: list[Item] = []
    ending: dict[tuple[Node, int], int] = {}
    for node, owner in owners.items():
        record = node.made
        a, parent = 0, -1 if owner is None else ending[owner, record.at - owner.made.at]
        for b in sorted(cuts[node] - {0}) or [0]:
            text = document.bytes_of(node.ids[a:b]).decode("utf-8", "replace")
            if parent >= 0:
                items[parent].children.append(len(items))
            item = Item(text, parent, record.by, id=f"{node.id}-{a}")
            if b == len(node.ids):
                item.bookmark, item.note = node.bookmark, node.note
            a, parent = b, len(items)
            ending[node, b] = parent
            items.append(item)
    return items


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
) -> tuple[bytes, str, str]:
    """Return a document in a format: its bytes, a name for the file, and its type.

    Raises:
        ConfigError: the format is unknown, or it needs a node.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", title) or "loom"
    if kind in ("json", "html"):
        whole = _whole(document, title, top, models)
        data = _encode(whole if answers is None else {**whole, "answers": answers})
        if kind == "html":
            return page.html_file(data, title), f"{safe}.html", "text/html"
        return data, f"{safe}.json", _JSON
    if kind == "markdown":
        if node is None:
            raise ConfigError("node is needed: Markdown contains the text of one path")
        return document.text(node, own=False).encode(), f"{safe}.md", _MARKDOWN
    if kind == "markdown-tree":
        return _bullets(items_of(document)).encode(), f"{safe}.md", _MARKDOWN
    if kind == "loomsidian":
        return _encode(_loomsidian(document)), f"{safe}.{kind}.json", _JSON
    raise ConfigError(f"format must be one of {', '.join(_NAMES)}, not {kind!r:.40}")


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


def _loomsidian(document: Document) -> Values:
    items = items_of(document)
    nodes = {
        item.id: {
            "text": item.text, "parentId": items[item.parent].id if item.parent >= 0 else None,
            "collapsed": False, "unread": False, "bookmarked": item.bookmark,
        }
        for item in items
    }  # fmt: skip
    here = [name for name in nodes if name.rpartition("-")[0] == document.current]
    current = next(iter([*here, *nodes]), None)
    return {
        "current": current, "hoisted": [], "searchTerm": "", "generating": None, "nodes": nodes,
    }  # fmt: skip


# -- reading ---------------------------------------------------------------------------------------


class _File(msgspec.Struct):
    records: list[AnyRecord]


def read(
    data: bytes, most: int, is_ours: Callable[[str], bool]
) -> tuple[str, Document | list[Item], int]:
    """Return a file's format, its content, and how many nodes were left out for lack of a parent.

    A file of the page for which ``is_ours(fingerprint)`` is true is read as a document, all others as
    items, parents first.

    Raises:
        ConfigError: the format is unknown, or there are more than ``most`` nodes.
    """
    match = _DATA.search(data)
    if match is not None:
        data = _unpacked(match[1])
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
        case {"nodes": dict() | list() as nodes} | {"tree": {"nodes": dict() | list() as nodes}}:
            return "loomsidian", *_flat(nodes, most)
        case {"roots": list(roots)}:
            return "tree", *_items(roots, most)
        case {"root": dict() as root} | ({"text": str()} as root):
            return "tree", *_items([root], most)
        case dict() as saved if sessions := _sessions(saved):
            return "mikupad", *_items_of_sessions(sessions, most)
    raise ConfigError("the page cannot read this kind of JSON", hint=_TEXTS)


def _unpacked(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=BytesIO(b64decode(data))) as file:
            unpacked = file.read(_MOST_UNPACKED + 1)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"the document in this HTML file is damaged: {error}") from None
    if len(unpacked) > _MOST_UNPACKED:
        raise ConfigError("the document in this HTML file is too large")
    return unpacked


def encoding_of(data: bytes) -> str:
    """Return the encoding of a text file, by its byte order mark or by its bytes.

    Without a mark it is UTF-16 if half of every second byte is 0, else UTF-8 if the bytes are valid.
    Anything else is read as Windows-1252, which contains Latin-1.

    Raises:
        ConfigError: this is not a text.
    """
    for begin, kind in _BINARY.items():
        if data.startswith(begin):
            raise ConfigError(f"this is {kind}, not a text", hint=_TEXTS)
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
    """Return the text with each surrogate pair as its character and each single surrogate as U+FFFD."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _story(text: str) -> Item:
    return Item(_whole_characters(text))


def _begins_story(text: str) -> bool:
    """Return whether a text that begins with a bracket is prose, and not damaged JSON."""
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
            return json.loads(
                text
            )  # it accepts single surrogates, which other programs write if they cut a pair
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
    roots: Sequence[object], most: int, below: Callable[[Values], object] | None = None
) -> tuple[list[Item], int]:
    """Return items, parents first, and how many entries were not nodes. An empty root is left out.

    Args:
        roots: nodes without a parent.
        most: how many nodes there may be.
        below: returns a node's children. None = nodes have ``children``, and a node with a single child
            is joined with it: such programs make a node for each token.
    """
    items: list[Item] = []
    texts: list[list[str]] = []  # of each item
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
        text = _str(node.get("text", node.get("content")))
        mark = True in (node.get("bookmark"), node.get("bookmarked"))
        at, before = len(items), items[parent] if is_only and parent >= 0 else None
        if before is not None and not before.bookmark:
            texts[parent].append(text)
            before.bookmark, at = mark, parent
        elif text or parent >= 0:
            items.append(Item("", parent, bookmark=mark))
            texts.append([text])
        else:
            at = -1
        raw_children = node.get("children") if below is None else below(node)
        children = raw_children if isinstance(raw_children, list) else []
        is_only = below is None and len(children) == 1
        waiting += [(child, at, is_only) for child in reversed(children)]
    return _joined(items, texts), n_lost


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
    sessions: list[Values] = []
    for session in (saved, *entries):
        if not isinstance(session, dict) or "prompt" not in session:
            continue
        # In a session's file each value is a string that contains JSON.
        read = {name: _unquoted(session.get(name)) for name in ("prompt", *_BESIDE)}
        chunks = read["prompt"]
        if isinstance(chunks, list) and all(isinstance(c, dict) and "content" in c for c in chunks):
            sessions.append(read)
    return sessions


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
    texts: list[list[str]] = []
    for session in sessions:
        chunks, parent = session["prompt"], -1
        beside = [(label, session[name]) for name, label in _BESIDE.items()]
        notes = [(label, _str(b.get("text"))) for label, b in beside if isinstance(b, dict)]
        note = "\n".join(f"{label}: {_whole_characters(text)}" for label, text in notes if text)
        for chunk in chunks if isinstance(chunks, list) else ():
            by = "user" if chunk.get("type") == "user" else "import"
            if parent < 0 or items[-1].by != by:
                items.append(Item("", parent, by, note=note if parent < 0 else ""))
                texts.append([])
                parent = len(items) - 1
                if len(items) > most:
                    raise _too_large(most)
            texts[-1].append(_str(chunk.get("content")))
    return _joined(items, texts), 0


def _joined(items: list[Item], texts: Sequence[Sequence[str]]) -> list[Item]:
    """Give each item its text. A surrogate pair may be split between two parts of it."""
    for item, parts in zip(items, texts, strict=True):
        item.text = _whole_characters("".join(parts))
    return items


def _too_large(most: int) -> ConfigError:
    return ConfigError(f"the file is too large: at most {most:,} nodes are read")


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
