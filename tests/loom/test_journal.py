"""The file of a document: it survives its process, what happens to it is told, and one process writes."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paging import Opened, Paged, events_of
from serving import TARGET

from llamabranch import ConfigError
from llamabranch.cli import open as opening
from llamabranch.cli.options import template_source
from llamabranch.loom.document import Document, Head, Made, Tokens
from llamabranch.loom.journal import Journal

START = "Once upon a time there was a little"
FILE = "tale.loom.jsonl"
LEAN = ("--threads", "1", "--n-ctx", "1024", "--exact")


def read(file: Path) -> Document:
    document = Document()
    Journal(file, document, read_only=True)
    return document


_POINTS = [n if n in (1, 3, 8) else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 21)]


@pytest.mark.parametrize("n_events", _POINTS)
def test_a_killed_process_loses_no_action_and_goes_on_the_same(
    tmp_path: Path, n_events: int
) -> None:
    with Opened(tmp_path, *LEAN) as process:
        root = process.do("type", "a", text=START)["node"]["id"]
        process.do("set", "b", node=root, note="kept")
        doc = process.api.get("/loom/doc").json()
        since = f"{doc['boot']}.{doc['rev']}"
        asked = {"node": root, "n": 1, "max_tokens": 400, "seed": "9"}
        node = process.do("continue", "c", **asked)["nodes"][0]["id"]
        heard: list[int] = []
        with process.api.stream("GET", f"/loom/events?since={since}") as events:
            n = 0
            for name, data in events_of(events):
                if name == "tokens" and data["node"] == node:
                    heard += data["ids"]
                    n += 1
                if n == n_events or name == "end":
                    break
            process.process.send_signal(signal.SIGKILL)
            process.process.wait()
    document = read(tmp_path / FILE)
    assert document.nodes[root].note == "kept"
    kept = document.nodes[node].ids
    n = min(len(kept), len(heard))
    assert kept[:n] == heard[:n]
    with Paged(tmp_path) as page:
        assert page.text(root) == START
        told = page.tokens(node)
        assert told["ids"] == kept and told["node"]["reason"] in ("interrupted", "length")
        if told["node"]["reason"] == "interrupted":
            page.done("continue", node=node, resume=True)
        whole, other = page.tokens(node), page.tokens(page.grow(**asked)["id"])
        assert all(whole[name] == other[name] for name in ("ids", "lp", "h"))


def held(page: Paged) -> Any:
    """Return all nodes of a document with their tokens, and the notes."""
    doc = page.doc()
    return doc["nodes"], doc["notes"], [page.tokens(n, top=1) for n in doc["nodes"]["id"]]


def test_any_actions_are_undone_and_redone_after_a_restart_and_done_once(tmp_path: Path) -> None:
    chance, bodies = random.Random(5), list[dict[str, Any]]()
    with Paged(tmp_path) as page:
        for i in range(40):
            names: list[Any] = page.nodes()
            on = {"cid": f"action {i}", "node": chance.choice(names or [None])}
            ways: list[dict[str, Any]] = [{"op": "type", "text": START, **on}]
            if names:
                ways += [{"op": "continue", "n": 2, "max_tokens": 4, **on}, {"op": "undo", **on}]
                ways += [{"op": "set", "note": f"note {i}", **on}, {"op": "delete", **on}]
            bodies.append(chance.choice([*ways, *[{"op": "redo", **on}] * page.doc()["redo"]]))
            answer = page.do(**bodies[-1])
            assert page.do(**bodies[-1]) == answer  # it comes twice
            if "job" in answer:
                page.finish(answer["job"])
        before, n = held(page), page.doc()["undo"]
        assert [page.do("undo")["undo"] for _ in range(n)] == [*reversed(range(n))]
        assert page.nodes() == [] and n > 9
        page.do("undo", 409)
    with Paged(tmp_path) as page:
        assert page.nodes() == []
        for _ in range(n):
            page.do("redo")
        assert held(page) == before
        for body in bodies:  # each was done before
            page.do(**body)
        assert held(page) == before and page.doc()["undo"] == n
        page.type("and new ones go on")
        assert len(page.nodes()) == len(before[0]["id"]) + 1
        page.do("redo", 409)
    # Every cut of the file opens; a torn line is cut off.
    data, n_nodes = (tmp_path / FILE).read_bytes(), []
    for size in range(data.index(b"\n") + 1, len(data) + 1, max(1, len(data) // 60)):
        file = tmp_path / "cut.loom.jsonl"
        file.write_bytes(data[:size])
        document = Document()
        journal = Journal(file, document)
        assert journal.read_only is None
        journal.close()
        assert file.read_bytes() == data[: data.rindex(b"\n", 0, size) + 1]
        n_nodes.append(len(document.nodes))
    assert n_nodes == sorted(n_nodes)


OLD = [
    b'{"op":"keep","r":900,"id":"n2","name":"%s","data":{}}\n' % name
    for name in (b"compare", b"searches")
]
DAMAGED = "The file is damaged at line 5. What came before is shown; export it to go on."
# What a file became: its lines, why it is only read, and how many nodes it still has.
FILES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str, int]] = {
    "of 0.4, with comparisons and searches": (lambda lines: lines + OLD, "", 2),
    "damaged": (lambda lines: [*lines[:4], b"not a record\n", *lines[4:]], DAMAGED, 1),
    "of another model": (
        lambda lines: [re.sub(rb'"fingerprint":"[^"]*"', b'"fingerprint":"other"', lines[0]), *lines[1:]],
        "import it into another document", 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_changed_file_is_read_as_far_as_it_can_and_left_alone(tmp_path: Path, kind: str) -> None:
    change, told, n = FILES[kind]
    with Paged(tmp_path) as page:
        page.grow(page.type(START)["id"], max_tokens=6)
        names = page.nodes()[:n]
        texts = [page.text(name) for name in names]
        numbers = [page.tokens(name, top=1) for name in names]
    file = tmp_path / FILE
    data = b"".join(change(file.read_bytes().splitlines(keepends=True)))
    file.write_bytes(data)
    with Paged(tmp_path) as page:
        assert told in refusal(page) if told else page.loom.journal.read_only is None
        assert page.nodes() == names and [page.text(name) for name in names] == texts
        assert n == 1 or [page.tokens(name, top=1) for name in names] == numbers
    assert file.read_bytes() == data
    if kind == "of another model":
        (tmp_path / "other").mkdir()
        with Paged(tmp_path / "other") as page:  # its texts; they were not drawn here
            assert page.api.post("/loom/import", content=data).status_code == 200
            assert [page.text(name) for name in page.nodes()] == texts
            assert page.tokens(page.nodes()[-1])["node"]["seed"] is None


def refusal(page: Paged) -> str:
    """Return why the document is read only; typing is refused."""
    assert page.do("type", 409, text="more")["error"]["type"] == "read_only"
    return str(page.doc()["file"]["read_only"])


@pytest.mark.parametrize(
    "data",
    [b"hello\n", b"{}\n", b"[" * 1_000_000, b'{"op":"node","id":"n1"}\n', b"\x00\xff" * 100],
    ids=range(5),
)  # fmt: skip
def test_other_files_are_refused_and_left_alone(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "other.loom.jsonl"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="not written by the page"):
        Journal(file, Document())
    assert file.read_bytes() == data


def test_one_process_writes_and_others_read(tmp_path: Path) -> None:
    with Opened(tmp_path, *LEAN) as first:
        root = first.do("type", "a", text=START)["node"]["id"]
        with Paged(tmp_path) as second:
            assert "Another process" in refusal(second)
            assert second.nodes() == [root]
        first.do("type", "b", text="more")
    with Paged(tmp_path) as third:  # it ended: the next one may
        third.type("again")
        assert len(third.nodes()) == 3
    with Paged(tmp_path, read_only=True) as page:
        assert "--read-only" in refusal(page)
        assert len(page.nodes()) == 3


class Full:
    """A file on a disk that is full until it is not."""

    def __init__(self, file: Any) -> None:
        self.file, self.is_full = file, True

    def write(self, data: bytes) -> int:
        if self.is_full:
            self.file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    with Paged(tmp_path) as page:
        page.type(START)
        journal: Any = page.loom.journal
        journal._file = disk = Full(journal._file)
        told = page.do("type", 507, text="not saved")["error"]
        assert told["type"] == "disk_error" and "No space" in told["message"]
        assert "No space" in page.doc()["file"]["error"]
        assert len(page.nodes()) == 2
        disk.is_full = False
        page.type("saved")
        assert page.doc()["file"]["error"] is None
    assert len(read(tmp_path / FILE).nodes) == 3


def test_files_are_for_their_user_only(tmp_path: Path) -> None:
    Journal(tmp_path / FILE, Document()).close()
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    assert {file.name for file in tmp_path.iterdir()} == {FILE, f".{FILE}.lock"}


def test_a_folder_that_is_relative_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    file = tmp_path / ".local" / "share" / "llamabranch" / "a.loom.jsonl"
    assert opening._document(None, "a.gguf") == file


def test_records_that_fit_nothing_change_nothing() -> None:
    document = Document()
    document.apply(Head(r=1))
    document.apply(Made(r=2, id="n1"))
    none: list[Any] = []
    for record in (
        Made(r=3, id="n1"), Made(r=3, id="n2", parent="n9"), Made(r=3, id="n2", parent="n1", at=7),
        Tokens(r=3, id="n1", at=4, ids=none, lp=none, h=none, rk=none, src="", top=none),
        Tokens(r=3, id="n1", ids=[1], lp=none, h=none, rk=none, src="", top=none),
    ):  # fmt: skip
        with pytest.raises((LookupError, ValueError)):
            document.apply(record)
    assert [*document.nodes] == ["n1"] and document.nodes["n1"].ids == []
    assert len(document.done) == 1


def test_a_chat_template_is_given_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "turns.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    )
    with Opened(tmp_path, *LEAN, "--chat-template", file) as process:
        node = process.do("chat", "a", text="Hello")["node"]
        assert node["text"].strip() == "[user] Hello\n[assistant]"
    with pytest.raises(ConfigError, match=r"cannot read .*no.jinja: No such file"):
        template_source(str(tmp_path / "no.jinja"))
    assert template_source("chatml") == "chatml"


def test_a_port_in_use_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Paged(tmp_path) as page:
        taken = page.server.port
        with Opened(tmp_path / "other", TARGET, "--port", taken) as other:
            assert not other.url.endswith(f":{taken}")
            assert f"port {taken} is taken" in other.end(signal.SIGTERM)[1]
