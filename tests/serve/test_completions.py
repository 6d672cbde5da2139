"""``/v1/completions``: texts, scores of prompts, streams, and refused requests."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from serving import frames, post, serving
from toys import write_toy

import llamabranch as lb

ORIGIN = "https://lmg-anon.github.io"  # mikupad's
SERVE: dict[str, Any] = {"alias": "tale", "allow_origins": [ORIGIN]}
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 42}


def choices(api: Any, **body: Any) -> list[Any]:
    texts = post(api, **body)["choices"]
    assert isinstance(texts, list)
    return texts


def choices_of(parts: list[Any]) -> list[list[Any]]:
    """Return the choices of a stream's events, by text."""
    by_index: dict[int, list[Any]] = {}
    for part in parts:
        for choice in part["choices"]:
            by_index.setdefault(choice["index"], []).append(choice)
    return [by_index[index] for index in sorted(by_index)]


def test_text_is_the_librarys_own_for_texts_and_tokens_one_or_many(
    api: Any, beside: lb.Context
) -> None:
    texts, alone = ["Once upon a time", "The wolf"], []
    ids = [beside.model.prompt_tokens(text) for text in texts]
    for text in texts:
        params = lb.SamplingParams(temperature=0.8, seed=42)
        with lb.Branch.start(beside, text, sampling=params) as branch:
            alone.append("".join(token.text for token in branch.generate(20)))
    prompts: list[Any] = [(texts, 2), (ids, 2), ([ids[0], texts[1]], 2), (texts[0], 1), (ids[0], 1)]
    for prompt, n in prompts:
        answers = choices(api, prompt=prompt, max_tokens=20, **WARM)
        assert [choice["text"] for choice in answers] == alone[:n]
        assert [choice["index"] for choice in answers] == [*range(n)]
        assert {choice["finish_reason"] for choice in answers} == {"length"}
    mixed = [*ids[0], " there was a king"]
    assert choices(api, prompt=mixed, max_tokens=2, **WARM)[0]["text"]


def test_stream_joined_is_the_answer_in_one_piece(api: Any, beside: lb.Context) -> None:
    prompts = ["Once upon a time", "The wolf"]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "max_tokens": 12, "logprobs": 2, **WARM}
    whole = post(api, **body)
    parts = frames(api, **body, stream_options={"include_usage": True})
    end = parts.pop()
    assert end["choices"] == []
    assert end["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 48
    n_prompt = sum(len(beside.model.prompt_tokens(text)) for text in prompts)
    assert end["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == n_prompt
    assert len({part["id"] for part in parts}) == 1
    for choice, changes in zip(whole["choices"], choices_of(parts), strict=True):
        assert "".join(c["text"] for c in changes) == choice["text"]
        assert [c["finish_reason"] for c in changes][-1] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            assert [v for c in changes for v in c["logprobs"][name]] == values


def test_given_text_is_scored(api: Any, beside: lb.Context) -> None:
    text = "Once upon a time there was a king."
    tokens = beside.model.prompt_tokens(text)
    with lb.Branch.start(beside, tokens[:1]) as branch:
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


def test_offsets_are_places_in_the_text(api: Any, beside: lb.Context) -> None:
    """The same holds for characters of several tokens, for stop strings and for streams."""
    body: dict[str, Any] = {
        "prompt": "x", "max_tokens": 40, "logprobs": 0, "stop": "b y",
        "grammar": 'root ::= "a \U0001f600 b x \U0001f600 b y"', **WARM,
    }  # fmt: skip
    (whole,) = choices(api, **body)
    assert whole["text"] == "a \U0001f600 b x \U0001f600 "
    result = beside.complete(
        "x", grammar=body["grammar"], stop="b y", max_tokens=40, top_logprobs=1, **WARM
    )
    ends, decoder = [0], beside.model.text_decoder()
    for token in result.tokens:
        ends.append(ends[-1] + len(decoder.feed(token)))
    assert len(set(ends)) < len(ends)  # there are parts of characters
    assert whole["logprobs"]["text_offset"] == ends[:-1]
    parts = [choice["logprobs"] for part in frames(api, **body) for choice in part["choices"]]
    assert [at for part in parts for at in part["text_offset"]] == ends[:-1]
    shown: Any = result.to_openai()
    for name in ("tokens", "text_offset"):
        assert shown["choices"][0]["logprobs"][name] == whole["logprobs"][name]


def test_echo_gives_the_prompt_back(tmp_path: Path) -> None:
    """Names of control tokens are returned too, but not the name of a BOS that the tokenizer added."""
    path = write_toy(tmp_path / "toy.gguf", vocab="bytes")
    with serving({"model": path, "chat_template": None}) as server, server.client() as api:
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
        (letters,) = choices(api, **strange, **body, logprobs=0)
        assert letters["text"].startswith(f"a{eos}b")
        assert len(letters["logprobs"]["tokens"]) == len(ids) + 2


def test_texts_end_where_asked(api: Any, beside: lb.Context) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 20, "logprobs": 0, **WARM}
    (whole,) = choices(api, **body)
    result = beside.complete(beside.model.prompt_tokens("Once upon a time"), max_tokens=20, **WARM)
    ids, tokens = result.tokens, whole["logprobs"]["tokens"]
    assert whole["text"] == result.text and len(ids) == len(tokens)
    word = whole["text"][5:11]
    (choice,) = choices(api, **body, stop=[word, ""])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    assert choice["text"] == whole["text"][: whole["text"].index(word)]
    (choice,) = choices(api, **body, stop_tokens=[ids[4]])
    assert choice["logprobs"]["tokens"] == tokens[: ids.index(ids[4]) + 1]
    assert choice["stop_reason"] == ids[4]
    (choice,) = choices(api, **body, min_tokens=12, stop=" ")
    assert 12 < len(choice["logprobs"]["tokens"]) <= 20 and choice["stop_reason"] == " "
    (choice,) = choices(api, **body, logit_bias={str(token): -100 for token in ids})
    assert not set(choice["logprobs"]["tokens"]) & set(tokens)


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


def said(content: Any) -> dict[str, Any]:
    """Return a conversation that begins with this."""
    return {"messages": [{"role": "user", "content": content}]}


BAD, HI, PICTURE = {"type": "hiccup"}, said("x"), {"type": "image_url", "image_url": {}}
SING = {"name": "sing"}
FUNCTION = {"type": "function", "function": {"name": "marry", "parameters": {"type": "object"}}}
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
    ("min_tokens", "", [{"min_tokens": -1}, {"min_tokens": 2, "grammar": 'root ::= "a"'}]),
    ("stop[0]", "", [{"stop": [5]}]),
    ("grammar", "", [{"grammar": "root ::= ("}, {"grammar": 'root ::= "a"', "json_schema": {}}]),
    ("json_schema", "", [{"json_schema": BAD}]),
    ("response_format", "", [{"response_format": {"type": "json_schema", "schema": BAD}}]),
    ("response_format", "", [{"response_format": {"type": "json_schema"}}]),
    ("response_format", "", [{"response_format": {"type": "sound"}}]),
    ("regex", "", [{"regex": "("}]),
    ("messages", "the context has room for 1024", [said("word " * 3000)]),
    ("messages", "", [said(5), said([PICTURE])]),
    ("messages", "", [{"messages": []}, {"messages": [{}]}, {"messages": [{"role": 5}]}]),
    ("tool_choice", "", [{**HI, "tool_choice": "foo"}, {**HI, "tool_choice": "required"}]),
    ("tool_choice", "", [{**HI, "tools": [FUNCTION], "tool_choice": {**FUNCTION, "function": SING}}]),
    ("tools", "", [{**HI, "tools": [{"type": "function"}]}]),
    ("modalities", "", [{**HI, "modalities": ["audio"]}]),
    ("top_logprobs", "", [{**HI, "top_logprobs": 2}]),
    ("add_generation_prompt", "", [
        {**HI, "add_generation_prompt": True, "continue_final_message": True},
    ]),
    ("chat_template_kwargs", "", [{**HI, "chat_template_kwargs": {"messages": []}}]),
]  # fmt: skip


@pytest.mark.parametrize(("param", "message", "bodies"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(
    api: Any, param: str | None, message: str, bodies: list[dict[str, Any]]
) -> None:
    for body, more in product(bodies, ({}, {"stream": True})):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        error = post(api, 400, path, **{"prompt": "x", **body, **more})["error"]
        assert message in error["message"]
        assert (error["code"], error["param"]) == (400, param)
        assert error["type"] == "invalid_request_error"


def test_messages_are_needed(api: Any) -> None:
    assert post(api, 400, "/v1/chat/completions")["error"]["param"] == "messages"


def test_end_of_the_cache_is_a_length(api: Any, beside: lb.Context) -> None:
    prompt = (beside.model.prompt_tokens("Once upon a time ") * 300)[:1024]
    for tokens in (prompt, [*prompt, *prompt]):  # the words that agents look for
        message = post(api, 400, prompt=tokens)["error"]["message"]
        assert message.startswith("prompt is too long: ") and "has room for 1024" in message
    assert choices(api, prompt=prompt, max_tokens=0)[0]["text"] == ""
    (choice,) = choices(api, prompt=prompt[:1000], max_tokens=500, ignore_eos=True, **WARM)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "capacity")


# -- other looms -----------------------------------------------------------------------------------

PROMPT = "Once upon a time there was a little"


def test_looms_send_what_is_taken_and_read_what_is_there(api: Any) -> None:
    """mikupad, Tapestry Loom, logitloom, loomsidian: the requests that each of them builds."""
    mikupad: dict[str, Any] = {
        "model": "", "prompt": PROMPT, "seed": 5, "temperature": 0.7, "repeat_penalty": 1.1,
        "repeat_last_n": 256, "penalize_nl": False, "ignore_eos": False, "presence_penalty": 0,
        "frequency_penalty": 0, "top_p": 0.95, "top_k": 40, "typical_p": 1, "min_p": 0.05,
        "max_tokens": 12, "logprobs": 10, "stream": True,
    }  # fmt: skip
    answer = api.post("/v1/completions", json=mikupad, headers={"Origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    for (choice,) in (part["choices"] for part in frames(api, **mikupad)):
        assert not choice.get("text") or isinstance(choice["logprobs"]["top_logprobs"][0], dict)
    tapestry = {
        "model": "tale",
        "prompt": PROMPT,
        "temperature": 1,
        "logprobs": 20,
        "stream": False,
    }
    (choice,) = choices(api, **tapestry, max_tokens=10)
    (echoed,) = choices(api, **tapestry, max_tokens=1, echo=True)
    for one in (choice, echoed):
        places = one["logprobs"]
        assert len(places["tokens"]) == len(places["top_logprobs"]) == len(places["token_logprobs"])
    assert all(len(top) >= 20 for top in echoed["logprobs"]["top_logprobs"][1:])
    logitloom = {"prompt": PROMPT, "logprobs": 5, "max_tokens": 6, "temperature": 0.0}
    (choice,) = choices(api, model="tale", **logitloom)
    places = choice["logprobs"]
    assert len(places["tokens"]) == 6 and choice["finish_reason"] == "length"
    for token, top in zip(places["tokens"], places["top_logprobs"], strict=True):
        assert max(top, key=top.__getitem__) == token  # it follows the most probable token
    loomsidian = {"max_tokens": 12, "n": 3, "temperature": 1, "top_p": 1, "frequency_penalty": 0.1}
    made = choices(api, prompt=PROMPT, model="tale", **loomsidian)
    assert len({choice["text"] for choice in made}) == len(made) == 3
