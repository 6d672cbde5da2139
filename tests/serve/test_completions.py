"""``/v1/completions``: texts, scores of prompts, streams, and refused requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from serving import Serving, bundled_engine, serving
from toys import write_toy

import llamabranch as lb
from llamabranch.request import fields

WARM: dict[str, Any] = {"temperature": 0.8, "seed": 42}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(alias="tale") as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Serving) -> Iterator[Any]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def ctx(target: lb.Model) -> Iterator[lb.Context]:
    """Another context, to compute the same in this process."""
    with lb.Context(target, n_ctx=1024, n_threads=1, exact=True) as context:
        yield context


def post(api: Any, status: int = 200, path: str = "/v1/completions", **body: Any) -> Any:
    answer = api.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def choices(api: Any, **body: Any) -> list[Any]:
    texts = post(api, **body)["choices"]
    assert isinstance(texts, list)
    return texts


def frames(api: Any, path: str = "/v1/completions", **body: Any) -> list[Any]:
    with api.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines]


def choices_of(parts: list[Any]) -> list[list[Any]]:
    """Return the choices of a stream's events, by text."""
    by_index: dict[int, list[Any]] = {}
    for part in parts:
        for choice in part["choices"]:
            by_index.setdefault(choice["index"], []).append(choice)
    return [by_index[index] for index in sorted(by_index)]


def test_text_is_the_librarys_own(api: Any, ctx: lb.Context) -> None:
    for prompt in ("Once upon a time", "The wolf"):
        params = lb.SamplingParams(temperature=0.8, seed=42)
        with lb.Branch.start(ctx, prompt, sampling=params) as branch:
            expected = "".join(token.text for token in branch.generate(20))
        (choice,) = choices(api, prompt=prompt, max_tokens=20, **WARM)
        assert choice["text"] == expected
        assert choice["finish_reason"] == "length"


def test_prompts_may_be_texts_or_tokens_one_or_many(api: Any, ctx: lb.Context) -> None:
    texts = ["Once upon a time", "The wolf"]
    ids = [ctx.model.prompt_tokens(text) for text in texts]
    alone = [choices(api, prompt=text, max_tokens=8, **WARM)[0]["text"] for text in texts]
    for prompt in (texts, ids, [ids[0], texts[1]]):
        answers = choices(api, prompt=prompt, max_tokens=8, **WARM)
        assert [choice["text"] for choice in answers] == alone
        assert [choice["index"] for choice in answers] == [0, 1]
    (answers,) = choices(api, prompt=ids[0], max_tokens=8, **WARM)
    assert answers["text"] == alone[0]
    mixed = [*ids[0], " there was a king"]
    assert choices(api, prompt=mixed, max_tokens=2, **WARM)[0]["text"]


def test_stream_joined_is_the_answer_in_one_piece(api: Any, ctx: lb.Context) -> None:
    prompts = ["Once upon a time", "The wolf"]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 12, "logprobs": 2, **WARM}
    whole = post(api, **body)
    parts = frames(api, **body, stream_options={"include_usage": True})
    end = parts.pop()
    assert end["choices"] == []
    assert end["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 48
    n_prompt = sum(len(ctx.model.prompt_tokens(text)) for text in prompts)
    assert end["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == n_prompt
    assert len({part["id"] for part in parts}) == 1
    for choice, changes in zip(whole["choices"], choices_of(parts), strict=True):
        assert "".join(c["text"] for c in changes) == choice["text"]
        assert [c["finish_reason"] for c in changes][-1] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [v for c in changes for v in c["logprobs"][name]] == values


def test_given_text_is_scored(api: Any, ctx: lb.Context) -> None:
    text = "Once upon a time there was a king."
    tokens = ctx.model.prompt_tokens(text)
    with lb.Branch.start(ctx, tokens[:1]) as branch:
        scores = branch.score(tokens[1:], 3)
    (choice,) = choices(api, prompt=text, max_tokens=0, echo=True, logprobs=3)
    logprobs = choice["logprobs"]
    assert choice["text"] == text
    assert logprobs["token_logprobs"] == [None, *(score.logprob for score in scores)]
    assert "".join(logprobs["tokens"]) == text
    tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"][1:]]
    assert tops == [[p for _, p in score.alternatives] for score in scores]
    (more,) = choices(
        api, prompt=text, max_tokens=3, echo=True, logprobs=0, token_details=True, **WARM
    )
    assert len(more["logprobs"]["tokens"]) == len(tokens) + 3
    assert more["text"].startswith(text)
    assert more["logprobs"]["sources"] == ["prompt"] * len(tokens) + ["plain"] * 3
    offsets, rest = more["logprobs"]["text_offset"], more["text"]
    for token, start in zip(more["logprobs"]["tokens"], offsets, strict=True):
        assert rest[start:].startswith(token)
    (vllm,) = choices(api, prompt=text, max_tokens=1, prompt_logprobs=1, **WARM)
    assert vllm["prompt_logprobs"][0] is None
    for token, score, known in zip(tokens[1:], scores, vllm["prompt_logprobs"][1:], strict=True):
        assert known[str(token)]["logprob"] == score.logprob
        assert known[str(token)]["rank"] == score.rank


def test_offsets_are_places_in_the_text(api: Any, ctx: lb.Context) -> None:
    """The same holds for characters of several tokens, for stop strings and for streams."""
    body: dict[str, Any] = {
        "prompt": "x", "max_tokens": 40, "logprobs": 0, "stop": "b y", "return_token_ids": True,
        "grammar": 'root ::= "a \U0001f600 b x \U0001f600 b y"', **WARM,
    }  # fmt: skip
    (whole,) = choices(api, **body)
    assert whole["text"] == "a \U0001f600 b x \U0001f600 "
    ids, decoder = whole["token_ids"], ctx.model.text_decoder()
    ends = [0]
    for token in ids:
        ends.append(ends[-1] + len(decoder.feed(token)))
    assert len(set(ends)) < len(ends)  # there are parts of characters
    assert whole["logprobs"]["text_offset"] == ends[:-1]
    parts = [choice["logprobs"] for part in frames(api, **body) for choice in part["choices"]]
    assert [at for part in parts for at in part["text_offset"]] == ends[:-1]
    result = ctx.complete(
        "x", grammar=body["grammar"], stop="b y", max_tokens=40, top_logprobs=1, **WARM
    )
    shown: Any = result.to_openai()
    assert result.tokens == ids
    assert shown["choices"][0]["logprobs"]["text_offset"] == ends[:-1]


def test_echo_gives_the_prompt_back(tmp_path: Path) -> None:
    """Names of control tokens are returned too, but not the name of a BOS that the tokenizer added."""
    path = write_toy(tmp_path / "toy.gguf", vocab="bytes")
    open_engine = partial(bundled_engine, model=path, chat_template=None)
    with Serving(open_engine) as server, server.client() as api:
        model = server.ctx.model
        assert model.bos is not None and model.eos is not None
        bos, eos = (model.detokenize([t], special=True) for t in (model.bos, model.eos))
        texts = ["a king", f"{bos}a king", f"a{eos} \U0001f600{bos}", ""]
        body: dict[str, Any] = {"max_tokens": 2, "echo": True, "seed": 1, "ignore_eos": True}
        echoed = choices(api, prompt=texts, **body, logprobs=0)
        plain = choices(api, prompt=texts, **{**body, "echo": False})
        streamed = choices_of(frames(api, prompt=texts, **body))
        for text, choice, own, changes in zip(texts, echoed, plain, streamed, strict=True):
            assert choice["text"] == text + own["text"] == "".join(part["text"] for part in changes)
            logprobs, ids = choice["logprobs"], model.prompt_tokens(text, parse_special=True)
            is_added = not text.startswith(bos)
            assert logprobs["text_offset"][: is_added + 1] == [0] * (is_added + 1)
            names = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
            assert all(
                choice["text"][at:].startswith(name)
                for name, at in [*names][is_added : len(ids)]
                if not name.startswith("bytes:")
            )
        with_bos = [model.bos, *model.tokenize("a", add_special=False)]
        assert choices(api, prompt=with_bos, **body)[0]["text"].startswith(f"{bos}a")
        strange: dict[str, Any] = {"prompt": f"a{eos}b", "parse_special": False}
        ids = model.prompt_tokens(f"a{eos}b", parse_special=False)
        assert len(ids) > len(model.prompt_tokens(f"a{eos}b"))
        (letters,) = choices(api, **strange, **body, return_token_ids=True)
        assert letters["prompt_token_ids"] == ids and letters["text"].startswith(f"a{eos}b")


def test_texts_end_where_asked(api: Any, ctx: lb.Context) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 20, **WARM}
    (whole,) = choices(api, **body, return_token_ids=True)
    assert whole["prompt_token_ids"] == ctx.model.prompt_tokens("Once upon a time")
    word = whole["text"][5:11]
    (choice,) = choices(api, **body, stop=[word, ""])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    assert choice["text"] == whole["text"][: whole["text"].index(word)]
    end = whole["token_ids"][4]
    (choice,) = choices(api, **body, stop_tokens=[end], return_token_ids=True)
    assert choice["token_ids"] == whole["token_ids"][: whole["token_ids"].index(end) + 1]
    assert choice["stop_reason"] == end
    (choice,) = choices(api, **body, min_tokens=12, stop=" ", return_token_ids=True)
    assert 12 < len(choice["token_ids"]) <= 20 and choice["stop_reason"] == " "
    banned = {str(token): -100 for token in whole["token_ids"]}
    (choice,) = choices(api, **body, logit_bias=banned, return_token_ids=True)
    assert not set(choice["token_ids"]) & set(whole["token_ids"])


def test_text_follows_what_is_asked_for(api: Any) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
              "required": ["age"], "additionalProperties": False}  # fmt: skip
    named = {"name": "a", "schema": schema}
    forms: list[dict[str, Any]] = [
        {"json_schema": schema},
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"response_format": {"type": "json_object", "schema": schema}},
    ]
    texts = {choices(api, prompt="x", max_tokens=40, **WARM, **form)[0]["text"] for form in forms}
    (text,) = texts
    assert 1 <= json.loads(text)["age"] <= 99
    for form, allowed in (
        ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"choices": ["red", "blue"]}, {"red", "blue"}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
    ):
        (choice,) = choices(api, prompt="x", max_tokens=9, **WARM, **form)
        assert choice["text"] in allowed
        assert choice["finish_reason"] == "stop"


def test_seeds_repeat_texts_and_no_seed_does_not(api: Any) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5}
    once, again, other = (choices(api, **body, seed=seed)[0]["text"] for seed in (7, 7, 8))
    assert once == again != other
    assert len({choices(api, **body)[0]["text"] for _ in range(3)}) == 3


BAD = {"type": "hiccup"}
# The parameter that an error names, a part of its message, and the bodies that are refused for it.
REFUSED: list[tuple[str | None, str, list[dict[str, Any]]]] = [
    ("prompt", "", [{"prompt": 5}, {"prompt": []}, {"prompt": [5, [6]]}, {"prompt": None}]),
    ("prompt", "context", [{"prompt": "word " * 3000}]),
    ("prompt[0]", "", [{"prompt": [[]]}, {"prompt": [True]}]),
    (
        None,
        "vocabulary",
        [{"prompt": [99999]}, {"stop_tokens": [-1]}, {"logit_bias": {"-5": 1}}],
    ),
    ("penalty_last_n", "", [{"penalty_last_n": -7}]),
    ("max_tokens", "", [{"max_tokens": "many"}, {"max_tokens": -7}]),
    ("stream_options.include_usage", "", [{"stream_options": {"include_usage": 5}}]),
    ("n", "", [{"n": 0}, {"n": 129}, {"prompt": ["x", "y"], "n": 65}]),
    ("best_of", "", [{"n": 3, "best_of": 2}]),
    ("stream", "", [{"echo": True, "logprobs": 1, "stream": True}]),
    ("logprobs", "", [{"logprobs": 21}]),
    ("temperature", "", [{"temperature": -1}]),
    ("guided_regex", "use regex", [{"guided_regex": "a*"}]),
    ("min_tokens", "", [{"min_tokens": -1}, {"min_tokens": 2, "grammar": 'root ::= "a"'}]),
    ("stop[0]", "", [{"stop": [5]}]),
    ("grammar", "", [{"grammar": "root ::= ("}, {"grammar": 'root ::= "a"', "json_schema": {}}]),
    ("json_schema", "", [{"json_schema": BAD}]),
    ("response_format", "", [{"response_format": {"type": "json_schema", "schema": BAD}}]),
    ("response_format", "", [{"response_format": {"type": "json_schema"}}]),
    ("response_format", "", [{"response_format": {"type": "sound"}}]),
    ("structured_outputs", "json_schema", [{"structured_outputs": {"regex": "a"}}]),
    ("regex", "", [{"regex": "("}]),
]


@pytest.mark.parametrize(("param", "message", "bodies"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(
    api: Any, param: str | None, message: str, bodies: list[dict[str, Any]]
) -> None:
    for body, more in product(bodies, ({}, {"stream": True})):
        error = post(api, 400, **{"prompt": "x", **body, **more})["error"]
        assert message in error["message"]
        assert (error["code"], error["param"]) == (400, param)
        assert error["type"] == "invalid_request_error"


def test_what_is_refused_in_conversations(api: Any) -> None:
    path = "/v1/chat/completions"
    error = post(api, 400, path, messages=[{"role": "user", "content": "word " * 3000}])["error"]
    assert (error["param"], error["type"]) == ("messages", "invalid_request_error")
    assert "the context has room for 1024" in error["message"]
    for name, value in (("messages", []), ("tool_choice", "foo"), ("modalities", ["audio"])):
        body = {"messages": [{"role": "user"}], name: value}
        assert post(api, 400, path, **body)["error"]["param"] == name
    assert post(api, 400, path)["error"]["param"] == "messages"


def test_fields_that_ask_for_nothing_are_not_refused(api: Any) -> None:
    """The fields that llama-server's clients send in every request are not refused, either."""
    names = fields._REFUSED
    habits = {"samplers": ["top_k", "temperature"], "lora": [], "t_max_predict_ms": 0}
    habits |= {"n": 2, "best_of": 2, "modalities": ["text"]}
    for path in ("/v1/completions", "/v1/chat/completions"):
        asked: dict[str, Any] = {"max_tokens": 1, "prompt": "x"}
        if "chat" in path:
            asked["messages"] = [{"role": "user", "content": "x"}]
        nothings: list[Any] = [None, False, "", [], {}]
        for nothing in nothings:
            post(api, 200, path, **dict.fromkeys(names, nothing), **habits, **asked)
        for name in names:
            assert post(api, 400, path, **{name: ["x"]}, **asked)["error"]["param"] == name


def test_end_of_the_cache_is_a_length(api: Any, ctx: lb.Context) -> None:
    prompt = (ctx.model.prompt_tokens("Once upon a time ") * 300)[:1024]
    assert "has room for 1024" in post(api, 400, prompt=prompt)["error"]["message"]
    assert choices(api, prompt=prompt, max_tokens=0)[0]["text"] == ""
    (choice,) = choices(api, prompt=prompt[:1000], max_tokens=500, ignore_eos=True, **WARM)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "capacity")
