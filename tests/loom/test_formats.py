"""Files of the page and of mikupad: what is written is read again, and what is bad is told."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from browsing import HOSTILE
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs
from paging import Paged

from llamabranch import ConfigError
from llamabranch.loom import formats
from llamabranch.loom.document import Change, Document, Head, Made, Pieces, Tokens, Turn

PIECES = st.text(max_size=6) | st.sampled_from([*HOSTILE, "a\u0301" * 50, '"},{"', "\\"])


def tokens(name: str, ids: list[int], lps: list[float | None]) -> Tokens:
    """Return a record of tokens without other numbers."""
    n = len(ids)
    none: list[Any] = [None] * n
    return Tokens(id=name, ids=ids, lp=lps, h=none, rk=none, src="t" * n, top=[Raw(b"[]")] * n)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Return a document of up to eight nodes that fork anywhere, with texts that nobody would write."""
    document = Document()
    document.apply(Head(r=1, model="toy", fingerprint="print"))
    words = draw(st.lists(PIECES.filter(bool), min_size=1, max_size=12))
    document.apply(Pieces(p=dict(enumerate(words))))
    for i in range(draw(st.integers(1, 8))):
        names = list(document.nodes)
        parent = draw(st.sampled_from([None, *names])) if names else None
        end = 0 if parent is None else document.nodes[parent].end
        at = draw(st.integers(1, end)) if end else 0
        if parent is not None and not end:
            parent = None
        by = draw(st.sampled_from("AB"))
        turns = [Turn("user", at, at, text=name) for name in draw(st.lists(PIECES, max_size=2))]
        document.apply(Made(id=f"n{i}", parent=parent, at=at, r=10 + i, by=by, turns=turns))
        ids = draw(st.lists(st.integers(0, len(words) - 1), min_size=1, max_size=6))
        lps = [draw(st.floats(-20, 0, width=32) | st.none()) for _ in ids]
        document.apply(tokens(f"n{i}", ids, lps))
        if draw(st.booleans()):
            document.apply(Change(id=f"n{i}", name="bookmark", value=True, r=100 + i))
    return document


class Told(NamedTuple):
    """A text of a document of no model; ``parent`` is the number of the one before it, -1 for a root."""

    text: str
    parent: int
    by: str
    bookmark: bool


def told(document: Document) -> list[Told]:
    """Return the texts of a document of no model."""
    assert document.head is None
    nodes = [*document.shown()]
    return [
        Told(document.text(n), nodes.index(n.parent) if n.parent else -1, n.made.by, n.bookmark)
        for n in nodes
    ]


def read(data: object, most: int = 99_999) -> list[Told]:
    """Read a file that is not of this model; what is not bytes is written as JSON."""
    file = data if isinstance(data, bytes) else json.dumps(data).encode()
    return told(formats.read(file, most, "".__eq__))


@given(documents())
def test_markdown_and_text_have_the_text_of_a_path(document: Document) -> None:
    for node in document.shown():
        for kind, suffix in (("markdown", ".md"), ("text", ".txt")):
            data, name, _ = formats.export(document, kind, node)
            assert data.decode() == document.text(node, own=False) and name.endswith(suffix)
            assert name.startswith(f"loom-{node.id}") and re.fullmatch(r"[\w.-]+", name, re.ASCII)


@given(documents())
def test_our_json_loses_nothing(document: Document) -> None:
    data, _, _ = formats.export(document, "json", None)
    found = formats.read(data, 1000, "print".__eq__)
    for node, same in zip(document.shown(), found.shown(), strict=True):
        for name in ("ids", "lp", "h", "rk", "src", "top", "bookmark", "note", "rounds"):
            assert getattr(node, name) == getattr(same, name), name
        assert structs.replace(node.made, r=0, a=0) == structs.replace(same.made, r=0, a=0)
    other = told(formats.read(data, 1000, "another model".__eq__))
    assert other == told(formats.texts_of(document))
    assert sum(item.bookmark for item in other) == sum(node.bookmark for node in document.shown())


def test_deep_trees_are_written_and_read() -> None:
    document = Document()
    document.apply(Pieces(p={0: "a", 1: "b"}))
    for i in range(3000):  # each node forks off the one before
        document.apply(Made(id=f"n{i}", parent=f"n{i - 1}" if i else None, at=i, r=i + 1))
        document.apply(tokens(f"n{i}", [0, 1], [None, None]))
    data, _, _ = formats.export(document, "json", None)
    assert sum(len(item.text) for item in read(data)) == 6000


def own(*records: dict[str, object]) -> dict[str, object]:
    """Return a file of the page."""
    return {"format": "llamabranch-loom", "records": [*records]}


NODE: dict[str, object] = {"op": "node", "id": "a", "r": 1}
VOC: dict[str, object] = {"op": "voc", "p": {"1": "One"}}
TOK: dict[str, object] = {
    "op": "tok", "id": "a", "ids": [1], "src": "t", "top": [[]], "lp": [None], "h": [None], "rk": [None],
}  # fmt: skip
# What an error says, and the files that it is raised for.
OTHER = "not a document of this page nor of mikupad"
BAD: dict[str, list[object]] = {
    OTHER: [
        [], {}, {"nodes": 3}, {"text": 3}, {"root": []}, {"prompt": "a story"}, {"prompt": 3},
        {"prompt": "{"}, {"text": "One", "children": []},
        {"nodes": {"a": {"text": "One", "parentId": None}}}, [{"text": "One"}],
        b"{", b'{"a": ' * 500_000, b"[" * 500_000 + b"]" * 500_000, b'{"nodes": {"a": {"text": "on',
        b'[{"text": "a"', b'{"root": {"text": "a"}', b'{"a": 1,}', b'{"text', b"[[{", b"{}x",
        b'{\n  "text": "One" "children": []}', b"{" * 10 + b"\xff",
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", b"GGUF\x03\x00\x00\x00", b"PK\x03\x04\x14\x00\x06\x00",
        b"\x1f\x8b\x08\x00\x00", b"SQLite format 3\x00", b"\xff\xd8\xff\xe0\x00\x10JFIF",
        bytes(range(256)), b"\x00" * 64, b"plain \x00 text", b"\x7fELF\x02\x01\x01\x00",
        "two bytes a letter".encode("utf-16"), "caf\xe9".encode("latin-1"),
        b"VersionedTapestryWeave__" + bytes(200),
    ],
    "^the file: the field `records` is missing$": [{"format": "llamabranch-loom"}],
    "^the file: `records` is a text, not a list$": [{"format": "llamabranch-loom", "records": "a"}],
    "^the file has no text$": [own(), own(VOC)],
    "^record 1: this is a whole number, not an object$": [{"format": "llamabranch-loom", "records": [3]}],
    "^record 1: there is no node 'b' before it$": [own({**NODE, "parent": "b"})],
    "^record 1: unknown field `parentId`; did you mean parent\\?$": [own({**NODE, "parentId": "b"})],
    "^record 2: two nodes are called `a`$": [own(NODE, NODE)],
    "^record 1: `a` cannot begin at 2: it has no parent$": [own({**NODE, "at": 2})],
    "^record 2: `ids` is a text, not a list$": [own(NODE, {**TOK, "ids": "One"})],
    "^record 2: `ids\\[0\\]` is a text, not a whole number$": [own(NODE, {**TOK, "ids": ["One"]})],
    "^record 2: the field `src` is missing$": [own(NODE, {k: v for k, v in TOK.items() if k != "src"})],
    "^record 2: the tokens of `a` do not fit$": [own(NODE, {**TOK, "ids": [1, 1]})],
    "^record 1: `id` is a list, not a text$": [own({**NODE, "id": ["a"]})],
    "^record 1: 'nod' is not supported - at `\\$.op`$": [own({**NODE, "op": "nod"})],
    "^node `a`: the file has no text for token 1$": [own(NODE, TOK)],
    "^node `a`: `top`: this is a text, not a list$": [own(NODE, VOC, {**TOK, "top": ["b"]})],
    "damaged": [b'<script type="application/json" id="loom-data">AAAA</script>'],
    "^part 1 of this session's prompt has no text$": [
        {"prompt": '[{"text": 1}]'}, {"prompt": [{"content": ["One"]}]}, {"prompt": ["One"]}
    ],
    "^this session has no text$": [{"prompt": []}, {"prompt": [{"content": ""}]}],
    "empty": [b"", b" \n", b"\xef\xbb\xbf"],
    "at most 20 nodes": [own(*({**NODE, "id": f"n{i}"} for i in range(50)))],
}  # fmt: skip
BAD_FILES = [(told, data) for told, files in BAD.items() for data in files]


@pytest.mark.parametrize(("message", "data"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files_are_told(message: str, data: object) -> None:
    with pytest.raises(ConfigError) as raised:
        read(data, 20)
    assert re.search(message, raised.value.message), raised.value.message
    assert raised.value.hint or message not in (OTHER, "empty")


def changed(data: st.DataObject, value: Any) -> None:
    """Do something wrong to a file of the page: a field, a value, the order of its records."""
    draw, records = data.draw, value["records"]
    i = draw(st.integers(0, len(records) - 1))
    kind = draw(st.sampled_from(["rename", "retype", "leave out", "double", "swap", "drop"]))
    name = draw(st.sampled_from(sorted(records[i])))
    other = draw(st.sampled_from([3, 1.5, "text", [], {}, None, True, ["text"], {"a": 1}]))
    match kind:
        case "rename":
            records[i][draw(st.sampled_from([f"{name}Id", f"{name}s", name[:-1], "x"]))] = records[
                i
            ].pop(name)
        case "retype" if type(other) is not type(records[i][name]):
            records[i][name] = other
        case "leave out":
            del records[i][name]
        case "double":
            records.insert(i, records[i])
        case "swap" if i:
            records[i - 1], records[i] = records[i], records[i - 1]
        case "drop" if records[i]["op"] in ("node", "voc"):
            del records[i]


@given(st.data(), documents())
def test_a_damaged_file_is_imported_whole_or_refused_with_its_place(
    data: st.DataObject, document: Document
) -> None:
    value = json.loads(formats.export(document, "json", None)[0])
    changed(data, value)
    fingerprint = data.draw(st.sampled_from(["print", "other"]))
    try:
        content = formats.read(json.dumps(value).encode(), 1000, fingerprint.__eq__)
    except ConfigError as error:
        assert "Expected" not in str(error) and "Object" not in str(error), error
        return
    if content.head is not None:
        for node in document.shown():
            same = content.nodes[node.id]
            assert same.ids == node.ids and same.made.parent == node.made.parent
            assert same.made.at == node.made.at or same.made.parent is not None
    else:
        assert len(told(content)) == len(told(formats.texts_of(document)))


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["prompt", "content", "type", "value", "text", "records", "id", "format"]),
        inner, max_size=5),
    max_leaves=24,
))  # fmt: skip
def test_no_json_breaks_the_reader(value: object) -> None:
    try:
        items = read(value)
    except ConfigError:
        return
    for i, item in enumerate(items):
        assert -1 <= item.parent < i
        item.text.encode()


def test_files_and_exports_are_imported_as_one_action(tmp_path: Path) -> None:
    """A document's file too: who kept one imports it into another, also if its process died in a line."""
    with Paged(tmp_path) as page:
        root = page.type("Once upon a time")
        made = page.grow(root["id"], 2, max_tokens=8, seed="4")
        page.do("set", node=made[0]["id"], note="mine")
        page.type(" a king", root["id"])
        page.do("undo")
        n, own = len(page.nodes()), page.loom.journal.path.read_bytes()
        exported = [page.get("/loom/export", format=kind).content for kind in ("html", "json")]
        for data in (*exported, own, own + b'{"op":"node","id"'):
            answer = page.api.post("/loom/import", content=data)
            assert answer.status_code == 200, answer.text
            page.do("undo")
            assert len(page.nodes()) == n
            page.do("redo")
            nodes = [*page.loom.document.shown()]
            assert answer.json()["count"] == len(nodes) - n
            assert answer.json()["shown"] in {node.id for node in nodes[n:]}
            for a, b in zip(nodes[:n], nodes[n:], strict=True):
                assert a.id != b.id and a.made.seed == b.made.seed
                for name in ("ids", "lp", "h", "rk", "src", "reason", "note", "end"):
                    assert getattr(a, name) == getattr(b, name), name
                assert a.top == b.top or data is exported[0]  # a page has three of them
            page.do("undo")
        lines = own.splitlines(keepends=True)
        damaged = b"".join([*lines[:2], b"{\n", *lines[2:]])
        answer = page.api.post("/loom/import", content=damaged)
        assert answer.status_code == 400 and "line 3: " in answer.text
        for data, status in (
            (b"{" * 100, 400),
            (b"caf\xe9", 400),
            (b"a king " * (2 << 20), 413),
            (b" " * (65 << 20), 413),
        ):
            assert page.api.post("/loom/import", content=data).status_code == status
        with pytest.raises(ConfigError, match="at most 1 nodes"):
            read(own, 1)
        texts = {page.text(node["id"]) for node in made}
        (start, *ends) = (item.text for item in read(own))  # of another model: its texts
        assert {start + end for end in ends} == texts


# -- files of other programs, as they come ---------------------------------------------------------

STORY = "Es war „schön“: ein König, naïve cœur.\nEnde"


def text_of(data: bytes) -> str:
    """Return the text of a file that is read as one text."""
    (item,) = read(data)
    return item.text


@pytest.mark.parametrize("text", [
    STORY,
    "[Chapter 1]\nIt rained.", "[1] A note.", "{The lights go out.}\nWho is there?", "[[Home]] is far.",
    '["Hello," she said.]', "{{char}} looks up.", "[He sighs", '{"Stop!" he cried.}', "[... and then",
])  # fmt: skip
def test_a_story_is_read_and_may_begin_with_a_bracket(text: str) -> None:
    for story, encoding in product((text, f"\n  {text}"), ("utf-8", "utf-8-sig")):
        assert text_of(story.encode(encoding)) == story
        assert text_of(story.replace("\n", "\r\n").encode(encoding)) == story


def test_half_surrogates_are_joined_or_replaced() -> None:
    def texts(*parts: str) -> list[str]:
        chunks = [{"type": "user", "content": part} for part in parts]
        found = []
        for escaped in (True, False):
            data = json.dumps({"prompt": chunks}, ensure_ascii=escaped)
            found.append([item.text for item in read(data.encode("utf-8", "surrogatepass"))])
        assert found[0] == found[1]
        return found[0]

    assert texts("a \ud83d\ude00 b") == ["a 😀 b"]
    assert texts("a \ud83d b") == ["a \ufffd b"]
    assert texts("a \ud83d", "\ude00 b") == ["a 😀 b"]  # one character that two nodes share
    assert texts("a \ud83d", "b", "\ude00") == ["a \ufffdb\ufffd"]
    assert text_of(b"half \xed\xa0\xbd of it") == "half \ufffd of it"
    assert text_of(b"\xed\xa0\xbd\xed\xb8\x80 whole") == "😀 whole"


def mikupad(chunks: list[dict[str, object]]) -> dict[str, str]:
    """Return a session as mikupad exports it: an object whose values are JSON texts."""
    session = {"name": "MikuPad #1", "prompt": chunks, "seed": -1, "temperature": 0.7}
    return {name: json.dumps(value) for name, value in session.items()}


def chunk(text: str, prob: float) -> dict[str, object]:
    """Return a token that mikupad has generated."""
    probs = [{"tok_str": text, "prob": prob}, {"tok_str": " other", "prob": 0.1}]
    shown = [{"content": text, "probs": probs}]
    return {"content": text, "prob": prob, "completion_probabilities": shown}


CHUNKS: list[dict[str, object]] = [
    {"type": "user", "content": "[INST] Write."}, {"type": "user", "content": " Now. [/INST]"},
    chunk(" Once", 0.5), chunk(" \ud83d", 0.4), chunk("\ude00", 0.3),
    {"type": "user", "content": "\nEnd"},
]  # fmt: skip
TOLD = ["[INST] Write. Now. [/INST]", " Once 😀", "\nEnd"]


def test_sessions_of_mikupad_are_read() -> None:
    for file in (mikupad(CHUNKS), {"prompt": CHUNKS}):  # the latter from its server
        items = read(file)
        assert [item.text for item in items] == TOLD
        assert [item.parent for item in items] == [-1, 0, 1]
        assert [item.by for item in items] == ["user", "import", "user"]
    parts = [
        {"type": "user", "content": "a \ud83e"},
        {"type": "ai", "content": "\udd8a fox \ud83e"},
    ]
    texts = [item.text for item in read({"prompt": parts})]
    assert texts == ["a ", "\N{FOX FACE} fox ", "\ufffd"]  # two parts share a character
    session = json.dumps({"prompt": CHUNKS, "memoryTokens": "A queen."}).encode()
    assert formats.read(session, 9, "".__eq__).bars["text"]["memory"] == "A queen."
    with pytest.raises(ConfigError, match="at most 2 nodes"):
        read(mikupad(CHUNKS), 2)


def test_a_session_of_mikupad_is_shown_whole_with_its_memory_and_note(tmp_path: Path) -> None:
    """The memory and the note go to the settings of texts, unless those have some."""
    notes = {
        "memoryTokens": {"prefix": "[", "text": "Anna is a queen.", "suffix": "]\\n", "tokens": 7},
        "authorNoteTokens": {"prefix": "", "text": "Be short.", "suffix": ""},
        "worldInfo": {"entries": []},
    }
    session = mikupad(CHUNKS) | {name: json.dumps(value) for name, value in notes.items()}
    empty = mikupad(CHUNKS) | {"memoryTokens": '{"prefix": "[", "text": "", "suffix": "]"}'}
    with Paged(tmp_path) as page:

        def bring(value: object) -> Any:
            return page.api.post("/loom/import", content=json.dumps(value)).json()

        assert bring(empty)["bar"] == []
        answer = bring(session)
        assert answer["bar"] == ["memory", "authors_note"] and answer["count"] == 3
        assert page.text(answer["shown"]) == "".join(TOLD)
        bar = {"memory": "[Anna is a queen.]", "authors_note": "Be short."}
        assert page.doc()["bars"]["text"] == bar
        session["memoryTokens"] = '{"text": "Another one."}'
        assert bring(session)["bar"] == [] and page.doc()["bars"]["text"] == bar
