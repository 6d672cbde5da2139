"""Import and export: JSON that keeps everything, texts, one HTML file; mikupad's sessions are read.

Nothing here recurses, because a tree may be as deep as its text has tokens.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import groupby

import msgspec
from msgspec import Raw

from ..arguments import nearest
from ..errors import ConfigError
from ..serve.messages import in_words
from . import page
from .document import (
    AnyRecord,
    Bar,
    Change,
    Document,
    Head,
    Made,
    Node,
    Pieces,
    Tokens,
    decoded,
    unread,
)

_MARKER = "llamabranch-loom"
_MOST_UNPACKED = 1 << 29
_DATA = re.compile(rb'<script type="application/json" id="loom-data">([A-Za-z0-9+/=\s]*)</script>')
_BEGINS_JSON = re.compile(r'\s*[\[{][\[{\s]*(?:"\w*(?:"\s*(?::|$)|$)|[\]}]|$)')
_HEAD = b'{"op":"head",'  # how a document's file begins
_TEXT_FILES = {"markdown": ("md", "text/markdown"), "text": ("txt", "text/plain")}
_NAMED = 24  # characters of a text in the name of its file
_HTML_TOP = 3  # alternatives of a token in an HTML file
_OTHER = "this is not a document of this page nor of mikupad"
_TEXTS = (
    "it reads exported pages (html, json), NAME.loom.jsonl, mikupad's sessions and text in UTF-8"
)
_OLD_FIELDS = ("vocab", "kv_type", "seam", "constraint", "digest")  # of earlier versions
# The bar's fields, and mikupad's.
_NOTES = {"memory": "memoryTokens", "authors_note": "authorNoteTokens"}
_encode = msgspec.json.encode


def _put(texts: Document, text: str, parent: str | None, by: str = "import") -> str:
    """Add a node with one token, which is the text, and return its name."""
    name, token = texts.name(), len(texts.pieces)
    at = 0 if parent is None else texts.nodes[parent].end
    texts.apply(Pieces(p={token: text}))
    texts.apply(Made(id=name, parent=parent, at=at, kind="imported", by=by))
    texts.apply(unread(name, [token], "t"))
    return name


def texts_of(document: Document) -> Document:
    """Return the texts that are shown and not deleted, cut where they fork: a document of no model.

    Bookmarks and notes are on the last part of a node.
    """
    cuts: dict[Node, set[int]] = {}
    owners: dict[Node, Node | None] = {}  # for each node, the node whose own tokens it continues
    for node in document.shown():
        if node.deleted or not (node.parent is None or node.parent in cuts):
            continue
        owners[node], cuts[node] = None, {len(node.ids)}
        for above, _, end in node.stretches(node.at - 1, node.at) if node.at else ():
            owners[node] = above
            cuts[above].add(end)
    texts = Document()
    names: dict[tuple[Node, int], str] = {}  # of the parts, by where they end
    for node, owner in owners.items():
        a, name = 0, None if owner is None else names[owner, node.at - owner.at]
        for b in sorted(cuts[node] - {0}) or [0]:
            text = document.bytes_of(node.ids[a:b]).decode("utf-8", "replace")
            a, name = b, _put(texts, text, name, node.made.by)
            names[node, b] = name
        if node.bookmark:
            texts.apply(Change(id=names[node, a], name="bookmark"))
        if node.note:
            texts.apply(Change(id=names[node, a], name="note", value=node.note))
    return texts


# -- writing ---------------------------------------------------------------------------------------


def export(
    document: Document,
    kind: str,
    node: Node | None,
    *,
    title: str = "loom",
    model: object = None,
    answers: object = None,
) -> tuple[bytes, str, str]:
    """Return a document in a format: its bytes, a name for the file, and its type.

    Raises:
        ConfigError: the format is unknown, or it needs a node.
    """
    safe = _safe(title) or "loom"
    if kind in ("json", "html"):
        records = [*document.records()]
        whole = {"format": _MARKER, "title": title, "model": model, "records": records}
        if kind == "json":
            return _encode(whole), f"{safe}.json", "application/json"
        for record in records:
            if isinstance(record, Tokens):
                record.top = [Raw(_encode(decoded(raw)[:_HTML_TOP])) for raw in record.top]
        data = _encode({**whole, "answers": answers})
        return page.html_file(data, title), f"{safe}.html", "text/html"
    if kind not in _TEXT_FILES:
        names = ", ".join(("json", "html", *_TEXT_FILES))
        raise ConfigError(f"format must be one of {names}, not {kind!r:.40}")
    if node is None:
        raise ConfigError("node is needed: this format contains the text of one path")
    suffix, mime = _TEXT_FILES[kind]
    words = _safe(document.text(node).strip()[:_NAMED])  # two paths of a document get two names
    name = "-".join(filter(None, [safe, node.id, words]))
    return document.text(node, own=False).encode(), f"{name}.{suffix}", mime


def _safe(name: str) -> str:
    """Return a part of a file's name without spaces, signs and letters other than ASCII's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_.")


# -- reading ---------------------------------------------------------------------------------------


class _File(msgspec.Struct):
    records: list[Raw]


def read(data: bytes, most: int, is_ours: Callable[[str], bool]) -> Document:
    """Return the content of a file.

    A file of the page for which ``is_ours(fingerprint)`` is true is read as it is. All others become
    documents of no model, without a head: each node has one token, which is a whole text.

    Raises:
        ConfigError: it is not a file of the page or of mikupad, or has more than ``most`` nodes.
    """
    match = _DATA.search(data)
    if match is not None:
        data = _unpacked(match[1])
    if data.startswith(_HEAD):
        *lines, _ = data.split(b"\n")  # a last line that was cut off is left out
        return _ours(_document(lines, "line"), most, is_ours)
    try:
        text = data.decode("utf-8-sig", "surrogatepass").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise ConfigError(_OTHER, hint=_TEXTS) from None
    if not text.strip():
        raise ConfigError("the file is empty", hint=_TEXTS)
    if "\0" in text:
        raise ConfigError(_OTHER, hint=_TEXTS)
    if text.lstrip()[0] not in "{[":
        return _of_session([{"content": text}], most)
    try:
        value = json.loads(text)  # it accepts half characters, which mikupad writes
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and not _BEGINS_JSON.match(text):  # a story
            return _of_session([{"content": text}], most)
        raise ConfigError(f"{_OTHER}: {error}", hint=_TEXTS) from None
    match value:
        case {"format": str(marker)} if marker == _MARKER:
            try:
                records = msgspec.json.decode(text.encode("utf-8", "replace"), type=_File).records
            except msgspec.MsgspecError as error:
                raise _refused("the file", error) from None
            return _ours(_document(records, "record"), most, is_ours)
        case {"prompt": prompt} if isinstance(chunks := _unquoted(prompt), list):
            session = _of_session(chunks, most)
            notes = {name: _note(value.get(key)) for name, key in _NOTES.items()}
            session.apply(Bar(mode="text", fields={**notes}))
            return session
    raise ConfigError(_OTHER, hint=_TEXTS)


def _unpacked(data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=BytesIO(b64decode(data))) as file:
            unpacked = file.read(_MOST_UNPACKED + 1)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"the document in this HTML file is damaged: {error}") from None
    if len(unpacked) > _MOST_UNPACKED:
        raise ConfigError("the document in this HTML file is too large")
    return unpacked


def _whole_characters(text: str) -> str:
    """Return the text with each surrogate pair as its character and each single surrogate as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _unquoted(value: object) -> object:
    """Return a value of mikupad's session. In its file each value is a string that contains JSON."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _note(value: object) -> str:
    """Return the text of mikupad's memory or author's note, which a session writes in three parts."""
    match _unquoted(value):
        case str(text):
            return _whole_characters(text).strip()
        case {"text": str(text), **more} if text:
            parts = (more.get("prefix", ""), text, more.get("suffix", ""))
            whole = "".join(part for part in parts if isinstance(part, str))
            return _whole_characters(whole.replace("\\n", "\n")).strip()
    return ""


def _of_session(chunks: Sequence[Mapping[str, str]], most: int) -> Document:
    """Return a session as a path that alternates between typed and generated nodes."""
    for number, chunk in enumerate(chunks, 1):
        if not (isinstance(chunk, dict) and isinstance(chunk.get("content"), str)):
            raise ConfigError(f"part {number} of this session's prompt has no text")
    if not any(chunk["content"] for chunk in chunks):
        raise ConfigError("this session has no text")
    texts, name, half = Document(), None, ""
    for is_typed, parts in groupby(chunks, lambda chunk: chunk.get("type") == "user"):
        text = half + "".join(part["content"] for part in parts)
        half = text[-1:] if "\ud800" <= text[-1:] < "\udc00" else ""  # parts may share a character
        text = text.removesuffix(half)
        name = _put(texts, _whole_characters(text), name, "user" if is_typed else "import")
        if len(texts.nodes) > most:
            raise _too_large(most)
    if half:
        _put(texts, "\ufffd", name, "import")
    return texts


def _too_large(most: int) -> ConfigError:
    return ConfigError(f"the file is too large: at most {most:,} nodes are read")


def _ours(document: Document, most: int, is_ours: Callable[[str], bool]) -> Document:
    """Return a document of this model as it is, and one of another model as texts."""
    if len(document.nodes) > most:
        raise _too_large(most)
    is_same = document.head is not None and is_ours(document.head.fingerprint)
    return document if is_same else texts_of(document)


def _document(records: Iterable[Raw | bytes], name: str) -> Document:
    """Return the document that the records of a file make.

    Raises:
        ConfigError: one is not valid, has an unknown field or does not fit; it begins with ``name`` and
            the number of the record.
    """
    document = Document()
    for number, raw in enumerate(records, 1):
        try:
            fields = msgspec.json.decode(raw, type=dict[str, Raw])
            record = msgspec.json.decode(raw, type=AnyRecord)
            known = record.__struct_fields__
            for field in fields.keys() - {"op", *known, *_OLD_FIELDS}:
                raise ValueError(f"unknown field `{field}`; {nearest(field, known, 'fields')}")
            if isinstance(record, Head) and record.version > Head().version:
                raise ValueError("a newer llamabranch has written this file")
            document.apply(record)
        except (msgspec.MsgspecError, LookupError, ValueError, RecursionError) as error:
            raise _refused(f"{name} {number}", error) from None
    _check(document)
    return document


def _check(document: Document) -> None:
    """Raise ConfigError unless a document has texts, and all its tokens have theirs."""
    if not any(document.shown()):
        raise ConfigError("the file has no text")
    for node in document.nodes.values():
        try:
            tops = {token for raw in node.top for token, _ in decoded(raw)}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _refused(f"node `{node.id}`: `top`", error) from None
        for token in {*node.ids, *tops} - document.pieces.keys():
            raise ConfigError(f"node `{node.id}`: the file has no text for token {token}")


def _refused(place: str, error: Exception) -> ConfigError:
    match error:
        case msgspec.ValidationError():
            why = in_words(error)
        case KeyError():
            why = f"there is no node {error} before it"
        case _:
            why = str(error)
    return ConfigError(f"{place}: {why}", hint="nothing was imported")
