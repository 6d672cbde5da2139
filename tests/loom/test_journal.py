"""The file of a document: it survives its process, what happens to it is told, and one process writes."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import msgspec
import pytest
from paging import Opened, Paged, events_of
from serving import TARGET

from llamabranch import ConfigError
from llamabranch.cli import open as opening
from llamabranch.cli.options import template_source
from llamabranch.loom import formats
from llamabranch.loom.document import Document, Head, Made, Pieces, Tokens
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
        asked = {"node": root, "n": 1, "max_tokens": 400, "seed": "9"}
        heard: list[int] = []
        with process.api.stream("GET", "/loom/events") as events:
            node = process.do("continue", "c", **asked)["nodes"][0]["id"]
            n = 0
            for name, data in events_of(events):
                if name == "tokens" and data["node"] == node:
                    heard += data["ids"]
                    n += 1
                if n == n_events or (
                    name == "job" and data["nodes"] and data["state"] != "running"
                ):
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
    return doc["nodes"], [page.tokens(n, top=1) for n in doc["nodes"]["id"]]


def test_any_actions_are_undone_and_redone_after_a_restart_and_done_once(tmp_path: Path) -> None:
    chance, bodies = random.Random(5), list[dict[str, Any]]()
    with Paged(tmp_path) as page:
        for i in range(40):
            owners = {name: page.loom.document.nodes[name].stretches() for name in page.nodes()}
            names: list[Any] = [
                n for n, all_ in owners.items() if not any(o.deleted for o, *_ in all_)
            ]
            on = {"cid": f"action {i}", "node": chance.choice(names or [None])}
            ways: list[dict[str, Any]] = [{"op": "type", "text": START, **on}]
            if names:
                ways += [{"op": "continue", "n": 2, "max_tokens": 4, **on}, {"op": "undo", **on}]
                ways += [{"op": "set", "note": f"note {i}", **on}, {"op": "delete", **on}]
            bodies.append(chance.choice([*ways, *[{"op": "redo", **on}] * page.doc()["redo"]]))
            answer = page.do(**bodies[-1])
            there = page.nodes(), page.doc()["undo"]
            again = page.do(**bodies[-1])  # it comes twice
            assert again | {"event": 0} == answer | {"event": 0}
            assert (page.nodes(), page.doc()["undo"]) == there
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
    "of a newer version": (
        lambda lines: [lines[0].replace(b'{"op":"head",', b'{"op":"head","version":2,'), *lines[1:]],
        "A newer llamabranch has written it", 2,
    ),
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
    if kind == "of a newer version":
        with pytest.raises(ConfigError, match="newer llamabranch"):
            formats.read(data, 9, lambda _: True)
    if kind == "of another model":
        with Opened(tmp_path, *LEAN) as running:
            while running.api.get("/loom/doc").json()["file"]["read_only"] is None:
                sleep(0.1)
            assert f"{FILE} is read-only. It was written with" in running.end(signal.SIGTERM)[1]
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


def test_a_folder_or_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is not a file"):
            Journal(path, Document())
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]  # no lock either


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


def limit(process: Opened, n_bytes: int) -> None:
    """Let the process write files of at most so many bytes, as if its disk was full; -1 = any size."""
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (n_bytes, -1))


def test_what_is_called_saved_is_on_a_full_disk_and_the_rest_is_told(tmp_path: Path) -> None:
    """The page works on; there is space again, and then not any more until the process ends."""
    file = tmp_path / FILE
    with Opened(tmp_path, *LEAN) as process:
        root = process.do("type", "a", text=START)["node"]["id"]

        def told() -> dict[str, Any]:
            return dict(process.api.get("/loom/doc").json()["file"])

        def until(key: str, value: object) -> None:
            for _ in range(600):
                if told()[key] == value:
                    return
                sleep(0.1)
            raise AssertionError(told())

        until("saved", True)
        for i in range(2):
            limit(process, file.stat().st_size + 10)
            body: dict[str, Any] = {
                "op": "type",
                "cid": f"b{i}",
                "text": "of which only the memory knows",
            }
            answer = process.api.post("/loom/do", json=body)
            assert answer.status_code == 507 and answer.json()["node"]["n"] > 3
            assert "cannot be written: file too large" in answer.json()["error"]["message"]
            body = {"op": "continue", "cid": f"c{i}", "node": root, "n": 2, "max_tokens": 4}
            assert process.api.post("/loom/do", json=body).status_code == 507  # it works on
            until("unsaved", 3)
            assert told()["error"] == "file too large" and not told()["saved"]
            names = process.api.get("/loom/doc").json()["nodes"]["id"]
            for name in names:
                exported = process.api.get(f"/loom/export?format=text&node={name}")
                assert exported.status_code == 200 and exported.text
            assert {*read(file).nodes} == {*names[: 1 + 3 * i]}
            if i == 0:
                limit(process, -1)
                until("saved", True)
                assert told()["unsaved"] == 0 and told()["error"] is None
                assert [len(read(file).nodes[name].ids) > 2 for name in names] == [True] * 4
        errors = process.end(signal.SIGTERM)[1]
    assert errors.count("cannot write tale.loom.jsonl: file too large") == 2
    assert errors.count("tale.loom.jsonl is written again") == 1
    assert "3 texts were only in memory and are lost: file too large" in errors
    document = read(file)
    assert len(document.nodes) == 4 and document.text(document.nodes[root]) == START


def test_a_file_that_others_touch_is_made_again_or_left_alone(tmp_path: Path) -> None:
    """It is deleted, its folder is gone, another file or other bytes are there, it cannot be synced."""
    folder = tmp_path / "folder"
    folder.mkdir()
    file, document, said = folder / FILE, Document(), list[str]()
    journal = Journal(file, document)
    journal.complain = said.append

    def works(name: str) -> bool:
        journal.add(Made(id=name))
        journal.save()
        return journal.saved and len(read(file).nodes) == len(document.nodes)

    journal.add(Head())
    assert works("n1")
    file.unlink()
    assert works("n2") and not said
    shutil.rmtree(folder)
    assert not works("n3") and journal.error == "no such file or directory"
    folder.mkdir()
    assert works("n4") and said.pop() == f"{FILE} is written again"
    other = folder / "other"
    other.write_bytes(b"another\n")
    os.replace(other, file)
    assert not works("n5") and journal.error == "another program has changed it"
    assert file.read_bytes() == b"another\n" and journal.unsaved() == 5
    file.unlink()
    assert works("n6") and journal.unsaved() == 0
    with file.open("ab") as more:
        more.write(b"more\n")
    assert not works("n7") and file.read_bytes().endswith(b"more\n")
    os.truncate(file, file.stat().st_size - 5)
    assert works("n8")
    fsync = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        assert not works("n9") and journal.error == "input/output error" and journal.unsaved() == 1
    assert os.fsync is fsync and works("n10")
    journal.close()


def work(file: Path, seed: int) -> None:
    """Work in a document while the space for it changes; print the texts whenever all are saved."""
    chance, document = random.Random(seed), Document()
    journal = Journal(file, document)
    journal.add(Head())
    for _ in range(400):
        size = chance.choice([-1, chance.randrange(20_000)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
        for _ in range(chance.randrange(4)):
            nodes = [*document.nodes.values()]
            if not nodes or chance.random() < 0.2:
                parent = chance.choice([*nodes, None])
                at = chance.randint(0, parent.end) if parent else 0
                journal.add(Made(id=document.name(), parent=parent.id if parent else None, at=at))
                continue
            ids = [chance.randrange(500) for _ in range(chance.randrange(1, 9))]
            new = {t: f"<{t}>" for t in {*ids} - document.pieces.keys()}
            if new:
                journal.add(Pieces(p={**new}))
            node, none = chance.choice(nodes), list[Any]([None] * len(ids))
            at = chance.choice([len(node.ids)] * 2 + [max(0, len(node.ids) - len(ids))])
            if at == len(node.ids) or node.ids[at : at + len(ids)] == ids:
                top = [msgspec.Raw(b"[]")] * len(ids)
                src = "s" * len(ids)
                journal.add(
                    Tokens(
                        id=node.id, at=at, ids=ids, lp=none, h=[*none], rk=[*none], src=src, top=top
                    )
                )
        if chance.random() < 0.8:
            journal.save()
        if journal.saved:
            assert journal.unsaved() == 0
            print(
                json.dumps({node.id: document.text(node) for node in document.shown()}), flush=True
            )
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_whatever_the_space_and_whenever_it_is_killed_what_is_saved_is_there(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    for i in range(4):
        file = tmp_path / f"{i}.loom.jsonl"
        reader, writer = os.pipe()
        command = [sys.executable, __file__, str(file), str(100 * seed + i)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with (
            subprocess.Popen(command, stdout=writer, env=environment) as child,
            os.fdopen(reader) as lines,
        ):
            os.close(writer)
            told = [line for line, _ in zip(lines, range(chance.randrange(1, 200)), strict=False)]
            child.kill()
            told += [line for line in lines if line.endswith("\n")]
        document = read(file)
        for name, text in json.loads(told[-1]).items():
            assert document.text(document.nodes[name]).startswith(text)


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
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        template_source(str(tmp_path / "no.jinja"))
    assert template_source("chatml") == "chatml"


def test_a_port_in_use_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Paged(tmp_path) as page:
        taken = page.server.port
        with Opened(tmp_path / "other", TARGET, "--port", taken) as other:
            assert not other.url.endswith(f":{taken}")
            assert f"port {taken} is taken" in other.end(signal.SIGTERM)[1]


def test_tabs_that_act_at_once_get_nodes_of_their_own(tmp_path: Path) -> None:
    """Names are given while others type, continue, import and undo: no error but a refused undo."""
    with Paged(tmp_path) as page:
        root = page.type("Once upon a time")["id"]
        statuses = list[int]()

        def act(tab: int) -> None:
            for i in range(12):
                op = ("type", "continue", "fork", "undo", "redo", "set")[(i + tab) % 6]
                body: dict[str, object] = {"op": op, "cid": f"{tab} {i}", "node": root, "text": "a"}
                body |= {
                    "note": f"{tab} {i}",
                    "n": 2,
                    "max_tokens": 2,
                    "token": 1 if op == "fork" else None,
                }
                statuses.append(page.api.post("/loom/do", json=body).status_code)
                statuses.append(page.api.post("/loom/import", content=b"a king").status_code)

        with ThreadPoolExecutor() as pool:
            [*pool.map(act, range(4))]
        assert {*statuses} <= {200, 202, 409} and statuses.count(409) <= 16
        page.wait(lambda: not page.loom.jobs)
    assert len(read(tmp_path / FILE).nodes) >= 4 * 12


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
