"""The page's protocol over HTTP: operations, events, undo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from decodes import hooked
from paging import Paged, drafted
from serving import TARGET

import llamabranch as lb
from llamabranch.loom import live

START = "Once upon a time there was a little"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paged]:
    with Paged(tmp_path_factory.mktemp("page"), drafter=drafted) as running:
        yield running


@pytest.fixture
def root(page: Paged) -> Any:
    return page.type(START)


def columns(told: Any) -> list[tuple[object, ...]]:
    return [*zip(*(told[name] for name in ("ids", "lp", "h", "rk", "src")), strict=True)]


def test_typed_text_has_the_numbers_of_the_api(page: Paged, root: Any) -> None:
    # The first token has none, but a tab that has no tokens yet takes none behind it.
    assert page.of("tokens", node=root["id"])[0]["at"] == 0
    node = page.type(" king who lived", root["id"])
    told = page.tokens(node["id"], top=1)
    assert told["src"] == "t" * len(told["ids"]) and len(told["ids"]) > 2
    prompt = [*page.tokens(root["id"])["ids"], *told["ids"]]
    body = {
        "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 10, "token_details": True,
    }  # fmt: skip
    (choice,) = page.api.post("/v1/completions", json=body).json()["choices"]
    start = len(prompt) - len(told["ids"])
    logprobs = {name: values[start:] for name, values in choice["logprobs"].items()}
    for told_as, name in (("lp", "token_logprobs"), ("h", "entropies")):
        assert np.array_equal(np.float32(told[told_as]), np.float32(logprobs[name]))
    for top, alternatives in zip(logprobs["top_logprobs"], told["top"], strict=True):
        known = sorted(map(np.float32, top.values()), reverse=True)
        assert known == [np.float32(lp) for _, lp, _ in alternatives]
    with lb.load(TARGET, n_ctx=256, n_threads=1, exact=True) as ctx:
        scores = lb.Branch.start(ctx, prompt[:start]).score(prompt[start:])
    assert told["rk"] == [score.rank for score in scores]


def test_the_example_is_no_part_of_the_document_until_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Paged(tmp_path) as page:
        monkeypatch.setattr("llamabranch.loom.loom._TOKENS", 10_000)  # until it is stopped
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(page.api.get, "/loom/example")
            while page.server.service is None or not page.server.service.n_texts:
                assert not asked.done()
            root = page.type(START)  # goes first
            assert asked.result().status_code == 503
        monkeypatch.undo()
        sentence, *endings = page.get("/loom/example").json()["parts"]
        assert page.nodes() == [root["id"]]
        assert len(endings) == 3 and {end["at"] for end in endings} == {len(sentence["ids"]) - 2}
        assert page.get("/loom/example").json()["parts"] == [sentence, *endings]
        nodes = page.do("example")["nodes"]
        for node, part in zip(nodes, (sentence, *endings), strict=True):
            assert columns(page.tokens(node["id"])) == columns(part)
        assert [node["reason"] for node in nodes] == [None, *["length"] * 3]
        page.do("undo")
        assert page.nodes() == [root["id"]]
        again = page.do("example")["nodes"]
        assert not {node["id"] for node in nodes} & {node["id"] for node in again}
        assert page.nodes() == [node["id"] for node in (root, *again)]


def test_continuations_are_those_of_the_engine_and_of_the_events(page: Paged, root: Any) -> None:
    made = page.grow(root["id"], 2, max_tokens=12, seed="77")
    first, second = (page.tokens(node["id"], top=1) for node in made)
    body = {
        "prompt": page.tokens(root["id"])["ids"], "max_tokens": 12, "seed": 77, "token_details": True,
        "logprobs": 1,
    }  # fmt: skip
    (choice,) = page.api.post("/v1/completions", json=body).json()["choices"]
    assert first["text"] == choice["logprobs"]["tokens"] != second["text"]
    assert np.array_equal(np.float32(first["lp"]), np.float32(choice["logprobs"]["token_logprobs"]))
    letters = {"plain": "s", "drafted": "d", "forced": "f", "bonus": "b", "corrected": "c"}
    assert first["src"] == "".join(letters[source] for source in choice["logprobs"]["sources"])
    assert len({*first["src"]}) > 1
    for i, rank in enumerate(first["rk"]):
        if rank <= 10:
            assert first["top"][i][rank - 1][:2] == [first["ids"][i], first["lp"][i]]
    for node, told in zip(made, (first, second), strict=True):
        assert None not in (*told["lp"], *told["h"]) and min(told["rk"]) >= 1
        heard: list[Any] = []
        for event in page.of("tokens", node=node["id"]):
            assert event["at"] == node["at"] + len(heard)
            heard += columns(event)
        assert heard == columns(told)
        facts = [event["node"] for event in page.of("node")]
        reasons = [each["reason"] for each in facts if each["id"] == node["id"]]
        assert "running" in reasons and reasons[-1] == "length"


def test_jobs_tell_how_much_of_a_long_text_is_read(page: Paged) -> None:
    text = " ".join(f"a king and {i} daughters" for i in range(80))
    n = len(page.loom.service.model.prompt_tokens(text))
    typed = page.done("type", text=text)
    told = [each["message"] for each in page.of("job", id=typed["job"]) if each["message"]]
    assert {each.partition(" of ")[2] for each in told} == {f"{n:,} tokens"} and len(told) > 1
    assert page.finish(typed["job"])["message"] is None


def test_rounds_add_up_and_ghosts_are_not_text(page: Paged, root: Any) -> None:
    node = page.grow(root["id"], max_tokens=48, seed="5")["id"]
    told = page.tokens(node)
    rounds = told["rounds"]
    assert rounds and rounds == page.of("round", node=node)
    assert max(len(each["draft"]) for each in rounds) == 4
    place = {told["at"] + i: token for i, token in enumerate(told["ids"])}
    for each in rounds:
        n, rejected, unreached = each["accepted"], each["rejected"], each["unreached"]
        assert len(each["draft"]) == n + rejected + unreached
        assert min(n, rejected, unreached) >= 0
        drafted_ids = [token for token, _, _ in each["draft"]]
        for i, token in enumerate(drafted_ids[:n]):
            assert place.get(each["at"] + i, token) == token
        if rejected:
            assert place.get(each["at"] + n) != drafted_ids[n]
        judged = [lp is not None for _, _, lp in each["draft"]]
        assert judged == [True] * (n + rejected) + [False] * unreached
    assert told["src"].count("d") <= sum(each["accepted"] for each in rounds)


def test_an_alternative_reads_no_prompt_token(page: Paged, root: Any) -> None:
    first = page.grow(root["id"], max_tokens=12, seed="11")
    told = page.tokens(first["id"], top=1)
    at = 4
    lps = {t: lp for t, lp, _ in told["top"][at]}
    token = next(t for t in lps if t != told["ids"][at])
    place = told["at"] + at
    answer = page.done("fork", node=first["id"], at=place, token=token, max_tokens=8, cid="taken")
    (made,) = page.of("node", cid="taken")  # what a tab shows before it has the answer
    assert made["node"]["id"] == answer["nodes"][0]["id"]
    fork = page.tokens(answer["nodes"][0]["id"])
    assert fork["src"][0] == "k" and fork["ids"][0] == token and len(fork["ids"]) > 1
    assert fork["lp"][0] == lps[token]
    assert fork["node"]["read"] == 0
    paths = [page.tokens(node["id"], whole=True)["ids"][:place] for node in (first, fork["node"])]
    assert paths[0] == paths[1]


def test_what_could_follow_is_what_the_model_finds(page: Paged, root: Any) -> None:
    first = page.grow(root["id"], max_tokens=4, seed="17")
    told = page.tokens(first["id"], top=1)
    for i in range(4):
        found = page.get("/loom/next", node=first["id"], at=told["at"] + i).json()
        assert found["top"] == told["top"][i]
    end = page.get("/loom/next", node=first["id"]).json()
    answer = page.done("fork", node=first["id"], token=end["top"][1][0], max_tokens=1)
    page.done("score", node=answer["nodes"][0]["id"])
    new = page.tokens(answer["nodes"][0]["id"])
    assert new["ids"][0] == end["top"][1][0] and new["rk"][0] == 2


def test_edits_keep_what_is_before_the_first_change(page: Paged, root: Any) -> None:
    node = page.type(" king and a queen", root["id"])
    text = " king and a fox"
    answer = page.do("type", node=node["id"], at=root["n"], text=text, edit=True)
    edited = answer["node"]
    assert not answer["same"] and edited["at"] > root["n"]
    assert page.text(edited["id"]) == START + text
    assert page.text(node["id"]) == START + " king and a queen"
    same = page.do("type", node=node["id"], at=root["n"], text=" king and a queen", edit=True)
    assert same["same"] and same["node"]["id"] == node["id"]
    edit = {"node": node["id"], "at": 0, "text": "", "edit": True}
    assert page.do("type", 400, **edit)["error"]["message"] == "the text is empty"
    # Inside a character whole ones are kept.
    node = page.type("The price is 5 \N{EURO SIGN} and")["id"]
    text = page.text(node)
    skipped = page.loom.document.bytes_of(page.tokens(node)["ids"][:1]).decode()
    new = text[len(skipped) :].replace("\N{EURO SIGN}", "\N{POUND SIGN}")
    edited = page.do("type", node=node, at=1, text=new, edit=True)["node"]
    assert page.text(edited["id"]) == text.replace("\N{EURO SIGN}", "\N{POUND SIGN}")


def test_nothing_grows_from_a_deleted_branch(page: Paged) -> None:
    """What is typed in one tab stays in its box if another tab has deleted the branch."""
    root = page.type("There was a queen")
    child = page.type(" who had a fox", root["id"])
    page.do("delete", node=child["id"])
    for op in ("type", "continue", "fork"):
        refused = page.do(op, 409, node=child["id"], text=" and a dog", token=5)
        assert refused["error"]["message"] == "this branch was deleted; undo brings it back"
    assert page.type(" who had a dog", child["id"], at=child["at"])["parent"] == child["id"]
    page.do("undo")
    page.do("undo")
    page.type(" and a dog", child["id"])


def test_a_find_finds_every_place(tmp_path: Path) -> None:
    """Also the second one of a node, one that a fork cuts, and one behind odd characters."""
    with Paged(tmp_path) as page:

        def places(q: str) -> list[tuple[str, str]]:
            """Return the nodes and the texts of the tokens of the matches."""
            found = []
            for each in page.get("/loom/find", q=q).json()["found"]:
                words = page.tokens(each["node"], whole=True)["text"]
                assert all(isinstance(word, str) for word in words[each["at"] : each["last"] + 1])
                found.append((each["node"], "".join(words[each["at"] : each["last"] + 1]).strip()))
            return found

        root = page.type("A fox and a fox met a Fox")["id"]
        assert places("fox") == [(root, "fox"), (root, "fox"), (root, "Fox")]
        n = page.doc()["nodes"]["n"][0]
        child = page.type(" in the wood", root)["id"]
        other = page.type(" and a wolf", root, at=n)["id"]
        assert places("Fox in the") == [(child, "Fox in the")]
        assert places("fox and a wolf") == [(other, "Fox and a wolf")]
        assert places("a fox.*") == []  # it is a text, not a pattern
        odd = page.type("İİİİ 👩‍👩‍👧 İstanbul lies by the sea")["id"]
        assert places("by the sea") == [(odd, "by the sea")]
        far = page.type(" 👩‍👩‍👧 by the lake", odd, at=3)["id"]
        assert places("the lake") == [(far, "the lake")]


def unread(page: Paged, beginning: str) -> str:
    """Import a text that no model has read; return its node."""
    text = " ".join([beginning, *(f"a king and {i} sons" for i in range(70))])
    return str(page.api.post("/loom/import", content=text).json()["nodes"][0]["id"])


@contextmanager
def decoding(ctx: Any, act: Callable[[], bool]) -> Iterator[None]:
    """Do something at each decode of a context until that is done; nothing may be decoded then."""
    late: list[int] = []
    is_done = False

    def around(decode: Any, size: int) -> int:
        nonlocal is_done
        if is_done:
            late.append(size)
        is_done = is_done or act()
        return int(decode(size))

    with hooked(ctx, around):
        yield
    assert is_done and not late


WAYS: dict[str, dict[str, Any]] = {
    "type": {"text": " ".join(f"a queen and {i} sons" for i in range(80))},
    "continue": {"n": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "way"), [("type", "stop"), ("continue", "stop"), ("continue", "undo")]
)
def test_stop_and_undo_end_the_reading_and_leave_no_branch(page: Paged, op: str, way: str) -> None:
    node = unread(page, f"To {op} and {way}")
    before, n_done = page.nodes(), page.doc()["undo"]
    with decoding(page.loom.service.ctx, lambda: page.do(way).get("stopped") != []):
        answer = page.do(op, node=node, **WAYS[op])
        job = page.finish(answer["job"])
    assert (job["state"], job["error"], job["message"]) == ("stopped", None, None)
    if op == "type":  # the text is kept, and nothing of it is scored
        assert set(page.tokens(answer["node"]["id"])["lp"]) == {None}
        return
    assert any(each["message"] for each in page.of("job", id=answer["job"]))  # reading 0 of ...
    if way == "undo":
        page.do("redo", 409)
    page.do("undo")  # the import: there is nothing of what was stopped
    assert node not in page.nodes()
    page.do("redo")
    assert page.nodes() == before and page.doc()["undo"] == n_done
    for made in answer["nodes"]:
        assert page.api.get("/loom/tokens", params={"node": made["id"]}).status_code == 404


@pytest.mark.parametrize("op", ["undo", "stop", "delete"])
def test_a_generation_is_undone_stopped_or_deleted(page: Paged, root: Any, op: str) -> None:
    answer = page.do("continue", node=root["id"], n=1, max_tokens=800)
    node, job = answer["nodes"][0]["id"], answer["job"]
    page.wait(lambda: bool(page.of("tokens", node=node)))
    page.do(op, node=node)
    assert page.finish(job)["state"] == "stopped"
    assert (node in page.nodes()) == (op != "undo")
    if op != "undo":  # what is there is kept
        told = page.tokens(node)
        assert told["node"]["reason"] == "stopped" and 0 < len(told["ids"]) < 800


def test_settings_are_kept_in_the_document_and_refused_where_they_cannot_be(tmp_path: Path) -> None:
    with Paged(tmp_path) as page:
        assert page.doc()["bars"] == {}
        bar = {"n": 2, "max_tokens": 7, "sampling": {"temperature": 0.5}, "regex": "[a-z ]+"}
        told = page.do("bar", mode="text", bar=bar)["bars"]["text"]
        assert told["n"] == 2 and told["sampling"] == {"temperature": 0.5}
        page.wait(lambda: bool(page.of("set", bars={"text": told})))
        undo = page.doc()["undo"]
        page.do("bar", 400, mode="text", bar={"max_tokens": 0})
        page.do("bar", 400, mode="poem", bar={})
        root = page.type(START)
        wrong: list[dict[str, Any]] = [
            {"n": 0}, {"n": 10_000}, {"max_tokens": -1}, {"sampling": {"temperature": -1}},
            {"regex": "("}, {"grammar": "root ::= ("}, {"json_schema": {"type": 7}},
            {"regex": "a", "choice": ["b"]},
            {"sampling": {"mirostat": 2}}, {"n": "many"}, {"seed": "x"}, {"sampling": {"top_p": 7}},
            {"grammar": "root ::= nothing"}, {"json_schema": {"type": "nonsense"}}, {"stop": 3},
            {"stop": [""]},
        ]  # fmt: skip
        for fields in wrong:
            page.do("bar", 400, mode="text", bar=fields)
        wrong += [{"at": -1}, {"at": 0}, {"at": 999}]
        for fields in wrong:
            page.do("continue", 400, node=root["id"], **fields)
        assert page.nodes() == [root["id"]]
        assert page.doc()["bars"] == {"text": told} and page.doc()["undo"] == undo + 1  # the root
        page.do("bar", mode="chat", bar={"n": 1})
        made = page.grow(root["id"], 2, **{k: v for k, v in told.items() if k != "n"}, seed="4")
        for node in made:
            text = page.text(node["id"]).removeprefix(page.text(root["id"]))
            assert set(text) <= set("abcdefghijklmnopqrstuvwxyz "), text
        choice = page.grow(root["id"], choice=[" fox", " king"], max_tokens=9)
        assert page.text(choice["id"]).endswith((" fox", " king"))
        page.do("undo")
        assert page.doc()["bars"] == {"text": told, "chat": {"n": 1}}
    with Paged(tmp_path) as page:
        assert page.doc()["bars"] == {"text": told, "chat": {"n": 1}}


def test_a_grammar_tells_how_many_tokens_it_allowed(page: Paged, root: Any) -> None:
    name = {"name": {"enum": ["Anna", "Annabel"]}}
    schema = {"type": "object", "properties": name, "required": ["name"]}
    made = page.grow(root["id"], json_schema=schema, max_tokens=30, seed="3")
    told = page.tokens(made["id"], top=1)
    assert told["node"]["reason"] == "stop" and min(told["al"]) == 1 < max(told["al"])
    for allowed, src in zip(told["al"], told["src"], strict=True):
        assert (src == "f") == (allowed == 1)
    heard = [n for event in page.of("tokens", node=made["id"]) for n in event["al"]]
    assert heard == told["al"]
    assert told["top"][0][0][0] != told["ids"][0]  # the model wanted no object here
    assert {*page.tokens(page.grow(root["id"])["id"])["al"]} == {None}


NAME = {"name": {"enum": ["Anna", "Bert"]}}
ANNA = {"type": "object", "properties": NAME, "required": ["name"]}


def test_a_pick_follows_the_bar_and_belongs_to_the_text_under_its_grammar(page: Paged) -> None:
    root = page.type("Her name:")
    bar: dict[str, Any] = {"json_schema": ANNA, "max_tokens": 30, "seed": "3"}
    made = page.grow(root["id"], **bar)
    told = page.tokens(made["id"], top=1)
    place = max(range(len(told["al"])), key=lambda i: told["al"][i])  # where there was a choice
    before = page.nodes()
    # What the model wanted there, and the schema does not allow.
    wanted = next(t for t, _, _ in told["top"][0] if t != told["ids"][0])
    refused = page.do("fork", 400, node=made["id"], at=made["at"], token=wanted, **bar)
    message = refused["error"]["message"]
    assert message.startswith("the schema does not allow `") and message.endswith("` here")
    line = page.loom.service.model.tokenize("\n", add_special=False)[-1]
    refused = page.do("fork", 400, node=made["id"], at=made["at"], token=line, **bar)
    assert refused["error"]["message"] == "the schema does not allow `\\n` here"
    assert page.nodes() == before
    # Another name, inside the stretch: the rest of the object is written.
    service = page.loom.service
    names = [service.model.tokenize(name, add_special=False)[0] for name in ("Bert", "Anna")]
    token = next(token for token in names if token != told["ids"][place])
    fork = page.done("fork", node=made["id"], at=made["at"] + place, token=token, **bar)["nodes"][0]
    text = page.text(fork["id"]).removeprefix("Her name:")
    assert text in ('{"name": "Bert"}', '{"name": "Anna"}') and fork["json_schema"] == ANNA
    assert page.tokens(fork["id"])["al"][0] == told["al"][place]
    # Continue from the middle: the same object goes on. After its end a new one begins.
    text = page.text(page.grow(made["id"], at=made["at"] + place, **bar)["id"])
    assert text.removeprefix("Her name:") in ('{"name": "Bert"}', '{"name": "Anna"}')
    again = page.text(page.grow(made["id"], **bar)["id"])
    assert again.count("{") == 2 and again.endswith("}")
    # Limit, temperature and where to stop.
    free = page.done(
        "fork", node=root["id"], token=wanted, max_tokens=5, sampling={"temperature": 0}
    )
    (node,) = free["nodes"]
    told = page.tokens(node["id"])
    assert len(told["ids"]) == 6 and {*told["rk"][1:]} == {1}
    stop = told["text"][3]
    short = page.done(
        "fork",
        node=root["id"],
        token=wanted,
        max_tokens=5,
        sampling={"temperature": 0},
        stop=[stop],
    )["nodes"][0]
    assert page.tokens(short["id"])["node"]["reason"] == "stop"


def test_a_wrong_field_is_named_first(page: Paged, root: Any) -> None:
    for fields, message in (
        ({"tools": {}}, "`tools` is an object, not a list"),
        ({"tools": ["find"]}, "`tools[0]` is a text, not an object"),
        ({"n": 0}, "`n`: must be int >= 1"),
    ):
        refused = page.do("chat", 400, node=root["id"], **fields)["error"]
        assert refused["message"] == message and refused["param"].startswith(next(iter(fields)))


def test_an_edit_keeps_the_sources_of_what_follows_it(page: Paged, root: Any) -> None:
    made = page.grow(root["id"], max_tokens=24, seed="9")
    told = page.tokens(made["id"])
    whole = page.text(made["id"]).removeprefix(START)
    at = len("".join(told["text"][:8]))
    text = f"{whole[:at]} fox and{whole[at:]}"
    edited = page.done("type", node=made["id"], at=root["n"], edit=True, text=text)
    new = page.tokens(edited["node"]["id"])
    assert new["text"][-16:] == told["text"][-16:] and new["src"][-15:] == told["src"][-15:]
    assert new["src"][0] == "t" and "t" not in new["src"][-15:]
    assert None not in new["lp"]  # they were scored again


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paged]:
    """A page whose context has 256 tokens."""
    with Paged(tmp_path_factory.mktemp("small"), n_ctx=256, drafter=drafted) as running:
        yield running


def test_a_text_longer_than_the_context_is_scored_and_continued(small: Paged) -> None:
    page, n_ctx = small, 256
    told = " ".join(f"A king had {i} sons and they lived in the wood." for i in range(120))
    root = page.type(told)
    assert root["n"] > 4 * n_ctx
    tokens = page.tokens(root["id"], top=1)
    assert None not in tokens["lp"][1:] and None not in tokens["rk"][1:]
    # At the beginning of the text they are those of the whole text.
    start = page.type(told[:300])
    n = start["n"] - 3
    assert page.tokens(start["id"])["lp"][:n] == tokens["lp"][:n]
    nodes = [page.grow(root["id"], max_tokens=40, seed="5")]
    for _ in range(3):
        nodes.append(page.grow(nodes[-1]["id"], max_tokens=40, seed="5"))
    for node in nodes:
        made = page.tokens(node["id"])["node"]
        assert made["n"] == 40 and made["reason"] == "length"
        assert n_ctx // 2 < node["at"] - made["window"]["from"] <= n_ctx - 40
    starts = [page.tokens(node["id"])["node"]["window"]["from"] for node in nodes]
    assert sorted(starts) == starts and len({*starts}) < len(starts)
    assert any(page.tokens(node["id"])["node"]["read"] < 3 for node in nodes[1:])  # nothing twice
    # Rounds are told at the positions of the text.
    told = page.tokens(nodes[0]["id"])
    place = {told["at"] + i: token for i, token in enumerate(told["ids"])}
    assert told["rounds"]
    for each in told["rounds"]:
        for i, (token, *_) in enumerate(each["draft"][: each["accepted"]]):
            assert place.get(each["at"] + i, token) == token
        assert told["at"] <= each["at"] <= told["at"] + 40
    # The window begins with a sentence, and says what the model got.
    ids = page.tokens(nodes[0]["id"], whole=True)["ids"]
    assert page.loom.document.bytes_of([ids[starts[0] - 1]]).strip() == b"."
    first = ids[: nodes[0]["at"]]
    body = {
        "prompt": first[starts[0] :], "max_tokens": 40, "seed": 5, "logprobs": 1,
    }  # fmt: skip
    (choice,) = page.api.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == page.tokens(nodes[0]["id"])["text"]
    assert len(page.get("/loom/next", node=nodes[-1]["id"]).json()["top"]) == 10


def test_memory_and_note_are_in_the_context_and_not_in_the_text(small: Paged) -> None:
    page, n_ctx = small, 256
    root = page.type("The king went out.\n" * 60)
    bar: dict[str, Any] = {
        "memory": "The king is called Fritz.",
        "authors_note": "It rains.",
        "max_tokens": 16,
    }
    node = page.grow(root["id"], **bar, seed="6")
    told = page.tokens(node["id"])["node"]
    assert (told["memory"], told["authors_note"]) == (bar["memory"], bar["authors_note"])
    window, model = told["window"], page.loom.service.model
    memory, note = (
        model.tokenize(f"{bar[name]}\n", add_special=False) for name in ("memory", "authors_note")
    )
    assert (window["memory"], window["note"]) == (len(memory), len(note))
    ids = page.tokens(node["id"], whole=True)["ids"][: node["at"]]
    at = window["note_at"]
    assert 80 < len(ids) - at < 200 and page.loom.document.bytes_of([ids[at - 1]]) == b"\n"
    prompt = [*memory, *ids[window["from"] : at], *note, *ids[at:]]
    assert len(prompt) <= n_ctx - 16
    body = {"prompt": prompt, "max_tokens": 16, "seed": 6, "logprobs": 1}
    (choice,) = page.api.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == page.tokens(node["id"])["text"]
    assert page.text(node["id"]).startswith("The king went out.\nThe king")
    short = page.grow(page.type("A fox")["id"], **bar)
    assert page.tokens(short["id"])["node"]["window"]["from"] == 0
    none = page.grow(page.type("A fox")["id"], memory="", authors_note=" ")
    assert page.tokens(none["id"])["node"]["window"] is None
    for name in ("memory", "authors_note"):
        refused = page.do("continue", 400, node=root["id"], **{name: "far too long " * 99})["error"]
        assert refused["param"] == name and "of the context" in refused["message"]
    both = {"memory": "a king " * 40, "authors_note": "a queen " * 40}  # each one has room
    message = page.do("continue", 400, node=root["id"], **both)["error"]["message"]
    assert message.startswith("the memory and the author's note have ")
    page.do("continue", 400, node=root["id"], thinking=True)


def test_an_end_tells_what_was_read_meanwhile_and_how_fast_the_model_wrote(page: Paged) -> None:
    text = " ".join(f"a queen and {i} sons went out" for i in range(90))
    typed = page.do("type", text=text)
    node = page.grow(typed["node"]["id"], max_tokens=12)
    page.finish(typed["job"])
    end = page.tokens(node["id"])["node"]
    assert typed["node"]["n"] - 2 <= end["read"] <= 2 * typed["node"]["n"]
    assert end["cached"] <= 2  # what was read for it meanwhile was not in the cache before
    again = page.grow(typed["node"]["id"], max_tokens=12)
    then = page.tokens(again["id"])["node"]
    assert then["read"] == 0 and end["rate"] > then["rate"] / 20  # reading is no part of it


def test_a_watching_tab_gets_four_frames_a_second_while_all_cores_compute(
    page: Paged, root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "leaves_cores", lambda _: False)
    heard: list[tuple[str, int]] = []  # events, and the number of the frame with which they came
    frames: list[float] = []
    emit, send = page.loom.emit, page.loom.send_tokens

    def sending() -> None:
        frames.append(perf_counter())
        send()
        frames.append(perf_counter())

    def listen(name: str, data: Any) -> None:
        is_end = name == "node" and data["node"]["reason"] == "length"
        heard.append(("end" if is_end else name, len(frames)))
        emit(name, data)

    monkeypatch.setattr(page.loom, "emit", listen)
    monkeypatch.setattr(page.loom, "send_tokens", sending)
    page.grow(root["id"], 2, max_tokens=150, seed="8")
    n = [name for name, _ in heard].index("end")  # before it, all that waits is sent
    first = min([name for name, _ in heard].index(name) for name in ("round", "tokens"))
    told = [number for _, number in heard[first:n]]
    assert len(told) > 2 * len({*told}) > 4
    assert all(number % 2 for number in told)
    begins = [frames[number - 1] for number in sorted({*told})]
    assert all(b - a > 0.2 for a, b in pairwise(begins[:-1]))
