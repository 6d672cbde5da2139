"""Other programs' files: what is written is read again, nothing recurses, what is bad is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, structs
from paging import Paged

from llamabranch import ConfigError
from llamabranch.loom import formats
from llamabranch.loom.document import Change, Document, Head, Made, Pieces, Tokens

HOSTILE = (
    "</script><img src=x onerror=alert(1)>", "\u202eright to left", "\x1b[31m", "\x00", "a\u0301" * 50,
    "\ud800", '"},{"', "\\", "\u2028",
)  # fmt: skip
PIECES = st.text(max_size=6) | st.sampled_from([text for text in HOSTILE if text != "\ud800"])


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
        document.apply(Made(id=f"n{i}", parent=parent, at=at, r=10 + i, by=by))
        ids = draw(st.lists(st.integers(0, len(words) - 1), min_size=1, max_size=6))
        lps = [draw(st.floats(-20, 0, width=32) | st.none()) for _ in ids]
        document.apply(tokens(f"n{i}", ids, lps))
        if draw(st.booleans()):
            document.apply(Change(id=f"n{i}", name="bookmark", value=True, r=100 + i))
    return document


def shape(pairs: list[tuple[str, int]]) -> list[tuple[str, list[Any]]]:
    """Return texts with their parents as a tree in which nothing goes on in one way only."""
    below: dict[int, list[int]] = {}
    for i, (_, parent) in enumerate(pairs):
        below.setdefault(parent, []).append(i)

    def node(i: int) -> tuple[str, list[Any]]:
        text, children = pairs[i][0], below.get(i, [])
        made = [node(child) for child in children]
        if len(made) == 1:
            return text + made[0][0], made[0][1]
        return text, sorted(made)

    return sorted(node(i) for i in below.get(-1, []))


def of_document(document: Document) -> list[tuple[str, list[Any]]]:
    return of_items(formats.items_of(document))


def of_items(items: Document | list[formats.Item]) -> list[tuple[str, list[Any]]]:
    assert isinstance(items, list)
    return shape([(item.text, item.parent) for item in items])


def read(data: object, most: int = 99_999) -> tuple[str, list[formats.Item], int]:
    """Read a file that is not of this model; what is not bytes is written as JSON."""
    file = data if isinstance(data, bytes) else json.dumps(data).encode()
    kind, items, n_lost = formats.read(file, most, "".__eq__)
    assert isinstance(items, list)
    return kind, items, n_lost


@given(documents())
def test_a_tree_comes_back_from_loomsidian(document: Document) -> None:
    shown = [*document.shown()]
    data, _, _ = formats.export(document, "loomsidian", None)
    found, items, n_lost = read(data)
    assert found == "loomsidian" and n_lost == 0
    assert of_items(items) == of_document(document)
    assert sum(item.bookmark for item in items) == sum(node.bookmark for node in shown)
    for node in shown:
        data, _, _ = formats.export(document, "markdown", node)
        assert data.decode() == document.text(node, own=False)
    tree, _, _ = formats.export(document, "markdown-tree", None)
    assert tree.decode().startswith("- ")


@given(documents())
def test_our_json_loses_nothing(document: Document) -> None:
    data, _, _ = formats.export(document, "json", None)
    kind, found, n_lost = formats.read(data, 1000, "print".__eq__)
    assert kind == "json" and n_lost == 0 and isinstance(found, Document)
    for node, same in zip(document.shown(), found.shown(), strict=True):
        for name in ("ids", "lp", "h", "rk", "src", "top", "bookmark", "note", "rounds"):
            assert getattr(node, name) == getattr(same, name), name
        assert structs.replace(node.made, r=0, a=0) == structs.replace(same.made, r=0, a=0)
    _, other, _ = formats.read(data, 1000, "another model".__eq__)
    assert of_items(other) == of_document(document)


def nested(depth: int) -> str:
    return '{"text": "a", "children": [' * depth + "]}" * depth


@pytest.mark.parametrize("depth", [3, 3000, 60_000])
def test_deep_trees_are_read(depth: int) -> None:
    kind, items, _ = read(nested(depth).encode())
    assert (kind, [item.text for item in items]) == ("tree", ["a" * depth])


def test_deep_trees_are_written() -> None:
    document = Document()
    document.apply(Pieces(p={0: "a", 1: "b"}))
    for i in range(3000):  # each node forks off the one before
        document.apply(Made(id=f"n{i}", parent=f"n{i - 1}" if i else None, at=i, r=i + 1))
        document.apply(tokens(f"n{i}", [0, 1], [None, None]))
    data, _, _ = formats.export(document, "loomsidian", None)
    assert sum(len(item.text) for item in read(data)[1]) == 6000


# What an error says, and the files that it is raised for.
BAD: dict[str, list[object]] = {
    ".": [
        [], {}, {"nodes": 3}, {"text": 3}, {"root": []}, {"format": "llamabranch-loom"},
        {"format": "llamabranch-loom", "records": [{"op": "node", "id": "a", "parent": "b"}]},
        b"{" * 10 + b"\xff", b'<script type="application/json" id="loom-data">AAAA</script>',
        {"prompt": "a story"}, {"prompt": '[{"text": 1}]'}, {"prompt": 3}, {"prompt": "{"},
    ],
    "JSON": [
        b"{", b'{"a": ' * 500_000, b"[" * 500_000 + b"]" * 500_000, b'{"nodes": {"a": {"text": "on',
        b'[{"text": "a"', b'{"root": {"text": "a"}', b'{"a": 1,}', b'{"text', b"[[{", b"{}x",
        b'{\n  "text": "One" "children": []}',
    ],
    "text": [  # binary files
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", b"GGUF\x03\x00\x00\x00", b"PK\x03\x04\x14\x00\x06\x00",
        b"%PDF-1.7\n1 0 obj <</Type /Catalog>> endobj", b"\x1f\x8b\x08\x00\x00", b"SQLite format 3\x00",
        b"\xff\xd8\xff\xe0\x00\x10JFIF", bytes(range(256)), b"\x00" * 64, b"plain \x00 text",
        b"{\\rtf1 a}", b"\x7fELF\x02\x01\x01\x00", b"\xff\xfea\x00b",
    ],
    "empty": [b"", b" \n", b"\xef\xbb\xbf", b"\xff\xfe"],
    "Tapestry": [b"VersionedTapestryWeave__" + bytes(200)],
    "at most 20 nodes": [{"nodes": {str(i): {"text": "a", "parentId": None} for i in range(50)}}],
}  # fmt: skip
BAD_FILES = [(told, data) for told, files in BAD.items() for data in files]


@pytest.mark.parametrize(("message", "data"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files_are_told(message: str, data: object) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        read(data, 20)
    assert told.value.hint or message not in ("text", "empty")


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["nodes", "root", "roots", "text", "children", "parentId", "tree",
                         "id", "format"]),
        inner, max_size=5),
    max_leaves=24,
))  # fmt: skip
def test_no_json_breaks_the_reader(value: object) -> None:
    try:
        _, items, _ = read(value)
    except ConfigError:
        return
    for i, item in enumerate(items):
        assert -1 <= item.parent < i
        item.text.encode()


LOOMSIDIAN = {"nodes": [
    {"id": "y", "text": " two", "parentId": "x", "bookmarked": True},
    {"id": "x", "text": "One", "parentId": None},
    {"id": "z", "text": "lost", "parentId": "nobody"},
]}  # fmt: skip
FORK = [{"text": " two", "prob": 0.2, "children": []}, {"text": " three", "children": []}]
NESTED = {"id": "a", "text": "One", "logprob": -0.5, "children": FORK}
FLAT = {"r": {"content": "One", "parentId": None}, "s": {"content": " two", "parentId": "r"},
        "t": {"content": " three", "parentId": "r"}}  # fmt: skip


def test_trees_of_other_programs_are_read() -> None:
    kind, items, n_lost = read(LOOMSIDIAN)
    assert (kind, n_lost) == ("loomsidian", 1)
    assert [(item.text, item.bookmark) for item in items] == [("One", False), (" two", True)]
    for file, kind in (
        (NESTED, "tree"), ({"roots": [NESTED], "modelName": "m"}, "tree"),
        ({"root": {"text": "", "children": [NESTED]}, "chapters": {}}, "tree"),
        ({"nodes": FLAT}, "loomsidian"), ({"tree": {"nodes": FLAT}, "lens": {}}, "loomsidian"),
    ):  # fmt: skip
        found, items, n_lost = read(file)
        assert (found, n_lost) == (kind, 0)
        texts = [(item.text, item.parent) for item in items]
        assert texts == [("One", -1), (" two", 0), (" three", 0)]
    assert read({"root": {"text": "One", "children": [3]}})[2] == 1


def test_imports_over_http_make_one_action(tmp_path: Path) -> None:
    with Paged(tmp_path) as page:
        root = page.type("Once upon a time")
        page.grow(root["id"], 2, max_tokens=8, seed="4")
        texts, n = {page.text(each) for each in page.nodes()}, len(page.nodes())
        for kind in ("loomsidian", "json"):
            data = page.get("/loom/export", format=kind).content
            answer = page.api.post("/loom/import", content=data)
            assert answer.status_code == 200, answer.text
            new = page.nodes()[n:]
            assert answer.json()["format"] == kind and answer.json()["count"] == len(new)
            assert {page.text(each) for each in new} == texts, kind
            page.do("undo")
            assert len(page.nodes()) == n
        page.do("redo")
        fresh = page.get("/loom/export", format="json").content
        _, found, _ = formats.read(fresh, 99, page.loom.service.model.is_of)
        assert isinstance(found, Document)
        nodes = [*found.shown()]
        for a, b in zip(nodes[:n], nodes[n:], strict=True):
            assert a.id != b.id and a.made.seed == b.made.seed and a.reason == b.reason
            for name in ("ids", "lp", "h", "rk", "src", "top"):
                assert getattr(a, name) == getattr(b, name), name
        html = page.get("/loom/export", format="html").content
        for data, warns in ((html, 0), (html + b"<!-- caf\xe9 -->", 0), (b"caf\xe9", 1)):
            warnings = page.api.post("/loom/import", content=data).json()["warnings"]
            assert len(warnings) == warns and all("Windows-1252" in each for each in warnings)
        for data, status in ((b"{" * 100, 400), (b" " * (65 << 20), 413)):
            assert page.api.post("/loom/import", content=data).status_code == status


# -- files of other programs, as they come ---------------------------------------------------------

STORY = "Es war „schön“: ein König, naïve cœur.\nEnde"
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252")


def text_of(data: bytes) -> str:
    """Return the text of a file that is read as one text."""
    kind, (item,), _ = read(data)
    assert kind == "markdown"
    return item.text


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_texts_are_read_in_the_encoding_they_have(encoding: str) -> None:
    assert text_of(STORY.encode(encoding)) == STORY
    assert text_of(STORY.replace("\n", "\r\n").encode(encoding)) == STORY
    tree = json.dumps({"text": STORY, "children": []}, ensure_ascii=False)
    kind, (item,), _ = read(tree.encode(encoding))
    assert (kind, item.text) == ("tree", STORY)


def test_latin_1_with_bytes_that_windows_has_not() -> None:
    assert text_of(b"caf\xe9 \x81 na\xefve") == "café \x81 naïve"
    assert formats.encoding_of("café".encode()) == "utf-8"
    assert formats.encoding_of(b"caf\xe9") == "cp1252"
    assert formats.encoding_of(b'[{"text": "\x7f"}]') == "utf-8"  # short, and no binary file


@pytest.mark.parametrize("text", [
    "[Chapter 1]\nIt rained.", "[1] A note.", "{The lights go out.}\nWho is there?", "[[Home]] is far.",
    '["Hello," she said.]', "{{char}} looks up.", "[He sighs", '{"Stop!" he cried.}', "[... and then",
])  # fmt: skip
def test_a_story_may_begin_with_a_bracket(text: str) -> None:
    assert text_of(text.encode()) == text
    assert text_of(f"\n  {text}".encode("utf-16")) == f"\n  {text}"


def test_half_surrogates_are_joined_or_replaced() -> None:
    def texts(*parts: str) -> list[str]:
        node: dict[str, object] = {"text": parts[-1], "children": []}
        for part in reversed(parts[:-1]):
            node = {"text": part, "children": [node]}
        found = []
        for escaped in (True, False):
            data = json.dumps(node, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
            found.append([item.text for item in read(data)[1]])
        assert found[0] == found[1]
        return found[0]

    assert texts("a \ud83d\ude00 b") == ["a 😀 b"]
    assert texts("a \ud83d b") == ["a \ufffd b"]
    assert texts("a \ud83d", "\ude00 b") == ["a 😀 b"]  # one character that two nodes share
    assert texts("a \ud83d", "b", "\ude00") == ["a \ufffdb\ufffd"]
    assert text_of(b"half \xed\xa0\xbd of it") == "half \ufffd of it"
    assert text_of(b"\xed\xa0\xbd\xed\xb8\x80 whole") == "😀 whole"


def mikupad(chunks: list[dict[str, object]], **more: object) -> dict[str, str]:
    """Return a session as mikupad exports it: an object whose values are JSON texts."""
    session = {"name": "MikuPad #1", "prompt": chunks, "seed": -1, "temperature": 0.7, **more}
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
    beside = {"prefix": "[", "text": "A fox.", "suffix": "]"}
    other = {"prompt": [{"type": "user", "content": "Two"}], "name": "b"}
    files = [
        (mikupad(CHUNKS, memoryTokens=beside), [TOLD]),  # one session
        ({"prompt": CHUNKS, "memoryTokens": beside}, [TOLD]),  # the same from its server
        ({"Sessions": [{"key": 0, "value": {"prompt": CHUNKS, "memoryTokens": beside}},
                       {"key": 1, "value": other}, {"key": "nextSessionId", "value": 2}],
          "Templates": [{"key": "a", "value": {"name": "x"}}]}, [TOLD, ["Two"]]),  # all of them
    ]  # fmt: skip
    for file, texts in files:
        kind, items, n_lost = read(file)
        assert (kind, n_lost) == ("mikupad", 0)
        assert [item.text for item in items] == [text for told in texts for text in told]
        assert [item.parent for item in items][:3] == [-1, 0, 1]
        assert [item.by for item in items][:3] == ["user", "import", "user"]
        assert items[0].note == "memory: A fox."
    with pytest.raises(ConfigError, match="at most 2 nodes"):
        read(mikupad(CHUNKS), 2)


def test_the_file_of_a_document_is_imported(tmp_path: Path) -> None:
    """Who kept ``tale.loom.jsonl`` and has another document open imports the one into the other."""
    for name in "ab":
        (tmp_path / name).mkdir()
    with Paged(tmp_path / "a") as page:
        root = page.type("Once upon a time")
        made = page.grow(root["id"], max_tokens=6, seed="4")
        page.type(" a king", root["id"])
        page.do("undo")
        text, numbers = page.text(made["id"]), page.tokens(made["id"])["lp"]
        page.do("set", node=made["id"], note="mine")
        file = page.loom.journal.path
    data = file.read_bytes()
    with Paged(tmp_path / "b") as page:
        for cut in (data, data + b'{"op":"node","id"'):  # its process may have died in a line
            answer = page.api.post("/loom/import", content=cut)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["format"], answer.json()["count"]) == ("journal", 2)
            new = page.nodes()[-1]
            assert page.text(new) == text and page.doc()["notes"][new] == "mine"
            assert page.tokens(new)["lp"] == numbers
        lines = data.splitlines(keepends=True)
        damaged = b"".join([*lines[:2], b"{\n", *lines[2:]])
        told = page.api.post("/loom/import", content=damaged)
        assert told.status_code == 400 and "line 3 is damaged" in told.text
    with pytest.raises(ConfigError, match="at most 1 nodes"):
        read(data, 1)
    kind, items, _ = read(data)  # of another model: its texts
    assert (kind, "".join(item.text for item in items)) == ("journal", text)
