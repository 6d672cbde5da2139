"""Branches over HTTP: a text continued in parts is one text, and nothing depends on the cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Serving, httpx, record_schema, serving

import llamabranch as lb
from llamabranch.serve import nodes
from llamabranch.serve.errors import HttpError

PROMPT = "Once upon a time there was a king who had a daughter"
SCHEMA = record_schema({"type": "integer"}, most=12)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


class Api:
    """Short names for the requests of these tests."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def _ask(self, method: str, path: str, status: int, **more: Any) -> Any:
        answer = self.client.request(method, f"/v1/branches{path}", **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        return self._ask("POST", path, status, json=body)

    def get(self, path: str, status: int = 200) -> Any:
        return self._ask("GET", path, status)

    def delete(self, path: str, status: int = 200) -> Any:
        return self._ask("DELETE", path, status)

    def root(self, **more: Any) -> Any:
        return self.post("", 201, **{"prompt": PROMPT, "seed": 5, **more})

    def child(self, node: Any, **more: Any) -> Any:
        (child,) = self.post(f"/{node['id']}/continue", **more)["children"]
        return child


@pytest.fixture
def api(server: Serving) -> Iterator[Api]:
    with server.client() as client:
        yield Api(client)


def test_node_tells_what_may_follow(api: Api, target: lb.Model) -> None:
    root = api.root(top_logprobs=3)
    with (
        lb.Context(target, n_ctx=256, n_threads=1, exact=True) as ctx,
        lb.Branch.start(ctx, PROMPT) as branch,
    ):
        expected = branch.entropy(), sorted(branch.log_probs(), reverse=True)[:3]
        assert root["position"] == branch.position
    assert root["parent"] is None
    assert root["next"]["entropy"] == pytest.approx(expected[0], rel=1e-6)
    assert [top["logprob"] for top in root["next"]["top"]] == pytest.approx(expected[1], rel=1e-6)
    shown = api.get(f"/{root['id']}?include=tokens,next")
    assert shown["text"] == PROMPT
    assert shown["next"] == root["next"]


@pytest.mark.parametrize("grammar", [{}, {"json_schema": SCHEMA}])
def test_text_in_parts_is_the_text_in_one(api: Api, server: Serving, grammar: Any) -> None:
    root = api.root(**grammar)
    whole = api.child(root, max_tokens=24)
    node, tokens = root, []
    for i, n in enumerate((5, 1, 3, 15)):
        if i % 2:
            evict(server)
        node = api.child(node, max_tokens=n)
        tokens += node["tokens"]
    assert tokens == whole["tokens"]
    assert node["finish_reason"] == whole["finish_reason"]
    again = api.get(f"/{whole['id']}?include=tokens")
    assert again["tokens"][root["position"] :] == tokens


def evict(server: Serving) -> None:
    prefixes = server.ctx.prefix_cache
    assert prefixes is not None
    with server.ctx.lock:
        prefixes.clear()


def test_children_are_texts_of_their_own_seeds(api: Api, server: Serving) -> None:
    root = api.root()
    first = api.post(f"/{root['id']}/continue", n=3, max_tokens=10, top_logprobs=2)["children"]
    evict(server)
    again = api.post(f"/{root['id']}/continue", n=3, max_tokens=10, top_logprobs=2)["children"]
    assert [c["text"] for c in first] == [c["text"] for c in again]
    for child in (*first, *again):
        for token in child["logprobs"]:
            del token["source"]  # whether tokens are drafted depends on measured times
    assert [c["logprobs"] for c in first] == [c["logprobs"] for c in again]
    assert len({c["text"] for c in first}) == 3
    assert api.child(root, max_tokens=10, seed=first[1]["seed"])["text"] == first[1]["text"]
    assert first[0]["seed"] == 5
    other = api.child(root, max_tokens=10, sampling={"temperature": 0})
    assert api.child(other, max_tokens=1)["seed"] == 5


def test_fork_takes_a_part_and_adds_to_it(api: Api, server: Serving) -> None:
    for grammar in ({"json_schema": SCHEMA}, {}):
        root = api.root(**grammar)
        child = api.child(root, max_tokens=8)
        at = root["position"] + 3
        fork = api.post(f"/{child['id']}/fork", 201, at=at)
        assert api.child(fork, max_tokens=5)["tokens"] == child["tokens"][3:]
    more = api.post(f"/{child['id']}/fork", 201, at=at, append={"text": " and a wolf"})
    tokens = api.get(f"/{more['id']}?include=tokens")["tokens"]
    model = server.ctx.model
    added = model.tokenize(" and a wolf", add_special=False)
    assert tokens == [*model.prompt_tokens(PROMPT), *child["tokens"][:3], *added]
    same = api.post(f"/{child['id']}/fork", 201, append={"tokens": [5]})
    assert same["position"] == child["position"] + 1
    deep = api.post(f"/{more['id']}/fork", 201, at=2)
    assert api.get(f"/{deep['id']}?include=tokens")["tokens"] == tokens[:2]
    wrong: list[Any] = [{"at": 0}, {"at": 10_000}, {"append": {}}, {"append": {"tokens": [-1]}}]
    for bad in wrong:
        api.post(f"/{child['id']}/fork", 400, **bad)


def test_score_is_that_of_the_library_and_reads_the_node_once(api: Api, target: lb.Model) -> None:
    root = api.root()
    texts = [" named Anna.", " and a son.", "x"]
    scores = api.post(f"/{root['id']}/score", continuations=[*texts, [5, 6]], top_logprobs=2)
    with (
        lb.Context(target, n_ctx=256, n_threads=1, exact=True) as ctx,
        lb.Branch.start(ctx, PROMPT) as branch,
    ):
        ids = [ctx.tokenize(text, add_special=False) for text in texts] + [[5, 6]]
        for score, tokens in zip(scores["scores"], ids, strict=True):
            rated = branch.score(tokens, 2)
            assert [t["logprob"] for t in score["tokens"]] == [r.logprob for r in rated]
            assert [t["rank"] for t in score["tokens"]] == [r.rank for r in rated]
            assert score["logprob"] == pytest.approx(sum(r.logprob for r in rated))
    assert api.get(f"/{root['id']}")["children"] == []
    wrong: list[Any] = [[], [""], [[]], [[-1]]]
    for bad in wrong:
        api.post(f"/{root['id']}/score", 400, continuations=bad)


def test_stream_ends_with_the_children(api: Api) -> None:
    root = api.root()
    body = {"n": 2, "max_tokens": 6, "stream": True}
    with api.client.stream("POST", f"/v1/branches/{root['id']}/continue", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    *chunks, end = [json.loads(line[6:]) for line in lines]
    for child in end["children"]:
        own_chunks = [chunk for chunk in chunks if chunk["index"] == child["index"]]
        assert "".join(chunk["text"] for chunk in own_chunks) == child["text"]
        assert api.get(f"/{child['id']}")["parent"] == root["id"]


def test_nodes_are_listed_and_deleted(api: Api) -> None:
    root = api.root(messages=[{"role": "user", "content": "Hello"}], prompt=None)
    child = api.child(root, max_tokens=2)
    leaf = api.child(child, max_tokens=2)
    ids = [node["id"] for node in api.get(f"?root={root['id']}")["data"]]
    assert ids == [root["id"], child["id"], leaf["id"]]
    assert set(ids) <= {node["id"] for node in api.get("")["data"]}
    api.delete(f"/{child['id']}", 409)
    assert api.get(f"/{leaf['id']}?include=tokens,foo", 400)["error"]["param"] == "include"
    error = api.post(f"/{leaf['id']}/continue", 400, n=500)["error"]
    assert (error["message"], error["param"]) == ("n must be 1 to 128", "n")
    assert api.delete(f"/{leaf['id']}")["count"] == 1
    assert api.get(f"/{child['id']}")["children"] == []
    assert api.delete(f"/{root['id']}?subtree=True")["count"] == 2
    for path in (f"/{root['id']}", f"/{child['id']}"):
        assert "deleted" in api.get(path, 404)["error"]["message"]
    api.get(f"/{root['id']}?include=all", 404)


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "a", "tokens": [1]}, {"tokens": []}, {"tokens": [99999]}, {"messages": []},
     {"prompt": "a", "grammar": "root ::= ("}, {"prompt": "a", "top_logprobs": 21},
     {"prompt": "a", "sampling": {"temperature": -1}}, {"prompt": "word " * 3000}],
)  # fmt: skip
def test_what_is_refused(api: Api, body: Any) -> None:
    n = len(api.get("")["data"])
    assert api.post("", 400, **body)["error"]["message"]
    assert len(api.get("")["data"]) == n


def test_quota_and_time_to_live() -> None:
    with serving(max_branches=3, branch_ttl_s=1e-9) as server, server.client() as client:
        api = Api(client)
        roots = [api.root() for _ in range(5)]  # older ones have expired
        assert "1e-09 s" in api.get(f"/{roots[0]['id']}", 404)["error"]["message"]
    with serving(max_branches=3) as server, server.client() as client:
        api = Api(client)
        root = api.root()
        error = api.post(f"/{root['id']}/continue", 429, n=3, max_tokens=1)["error"]
        assert error["type"] == "branch_quota_exceeded"
        assert (error["branches"], error["max_branches"], error["ttl_s"]) == (1, 3, 3600.0)
        api.post(f"/{root['id']}/continue", n=2, max_tokens=1)


def test_quota_holds_for_requests_at_one_time() -> None:
    async def all_at_once(url: str, path: str) -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            body = {"max_tokens": 30, "sampling": {"ignore_eos": True}}
            asked = [client.post(path, json=body) for _ in range(6)]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    with serving(max_branches=3) as server, server.client() as client:
        api = Api(client)
        path = f"/v1/branches/{api.root()['id']}/continue"
        assert sorted(asyncio.run(all_at_once(server.url, path))) == [200] * 2 + [429] * 4
        assert len(api.get("")["data"]) == 3


def node(
    tokens: list[int], parent: nodes.BranchNode | None = None, at: int = 0
) -> nodes.BranchNode:
    return nodes.BranchNode(tokens, len(tokens), lb.SamplingParams(), None, parent, at)


def test_room_that_was_not_used_is_given_back() -> None:
    kept = nodes.Branches(3, 100.0)
    for _ in range(2):
        with kept.room_for(2):
            with pytest.raises(HttpError, match="3 may exist"), kept.room_for(2):
                pass
            kept.add(node([1]))
        kept.delete(kept.all()[0], subtree=False)
    with kept.room_for(3):
        pass


def test_use_of_a_node_keeps_those_it_comes_from() -> None:
    kept = nodes.Branches(10, 100.0)
    root, other = node([1]), node([1])
    child = node([1], root)
    for n in (root, other, child):
        kept.add(n)
        n.used -= 1000
    kept[child.id]
    assert kept.all() == [root, child]
    with pytest.raises(HttpError, match="deleted"):
        kept[other.id]


def test_child_of_a_node_that_was_deleted_meanwhile_has_its_tokens() -> None:
    kept, root = nodes.Branches(10, 100.0), node([1, 2, 3])
    middle = node([1, 2, 4, 5], root, 2)
    for n in (root, middle):
        kept.add(n)
    child = node([1, 2, 4, 6], middle, 3)
    kept.delete(root, subtree=True)
    kept.add(child)
    assert (child.parent, child.fork_position, child.tokens) == (None, 0, [1, 2, 4, 6])
    assert kept.all() == [child]
