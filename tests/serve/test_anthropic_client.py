"""``/v1/messages`` with Anthropic's own client: answers, streams, tools, thoughts, errors, sessions."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from serving import Serving, post, record_schema

import llamabranch as lb

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")

HELLO = [{"role": "user", "content": "Tell me about a king."}]
WARM: Any = {"temperature": 0.8, "seed": 42}
SCHEMA = record_schema({"enum": [7, 70]}, most=8)
TOOLS: list[dict[str, Any]] = [
    {"name": name, "description": "It.", "input_schema": SCHEMA} for name in ("marry", "crown")
]
THINKS = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)

SERVE: Any = {"api_keys": ("secret",), "alias": "king", "engine": {"chat_template": THINKS}}


@pytest.fixture(scope="module")
def claude(server: Serving) -> Any:
    """Anthropic's own client of the server."""
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as opened:
        yield opened


def body(**more: Any) -> dict[str, Any]:
    """Return the arguments of a call; it does not think unless told."""
    quiet = {"type": "disabled"}
    asked = {"model": "any", "messages": HELLO, "max_tokens": 16, "thinking": quiet}
    return {**asked, "extra_body": WARM, **more}


def ask(claude: Any, **more: Any) -> Any:
    return claude.messages.create(**body(**more))


def told(claude: Any, **more: Any) -> tuple[list[Any], Any]:
    """Return the events of a stream as they were sent, and the message that the client makes of them."""
    raw = list(claude.messages.create(**body(**more), stream=True))
    with claude.messages.stream(**body(**more)) as stream:
        return raw, stream.get_final_message()


def test_answer_is_the_librarys_own(claude: Any, server: Serving) -> None:
    message = ask(claude, system="You are a poet.")
    said = [{"role": "system", "content": "You are a poet."}, *HELLO]
    expected = server.ctx.chat(said, thinking=False, max_tokens=16, **WARM)
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected.turn.content)
    assert (message.role, message.type, message.model) == ("assistant", "message", "king")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = ask(claude, system="You are a poet.").usage
    n_prompt = expected.num_prompt_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == n_prompt
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (1, 0)
    assert usage.output_tokens == 16
    assert claude.messages.count_tokens(model="any", messages=HELLO).input_tokens > 0
    counted = claude.messages.count_tokens(
        model="any", messages=HELLO, system="You are a poet.", thinking={"type": "disabled"}
    )
    assert counted.input_tokens == n_prompt


def test_stream_joined_is_the_message(claude: Any) -> None:
    whole = ask(claude, messages=[{"role": "user", "content": "a song " * 60}])
    again = [{"role": "user", "content": "the song " * 60}]
    raw, message = told(claude, messages=again)
    kinds = [event.type for event in raw]
    n_deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *["content_block_delta"] * n_deltas,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    start, end = raw[0].message, raw[-2]
    assert (start.content, start.stop_reason, start.role) == ([], None, "assistant")
    counts = end.usage.input_tokens + end.usage.cache_read_input_tokens
    assert start.usage.input_tokens + start.usage.cache_read_input_tokens == counts
    assert end.delta.stop_reason == message.stop_reason == whole.stop_reason == "max_tokens"
    assert n_deltas > 3 and end.usage.output_tokens == 16
    assert message.content[0].text == ask(claude, messages=again).content[0].text


def test_pings_while_a_prompt_is_read(api: Any) -> None:
    more = {"messages": [{"role": "user", "content": "ping pong " * 90}], "max_tokens": 2}
    sent = {**body(**more), "stream": True}
    headers = {"x-api-key": "secret"}
    with api.stream("POST", "/v1/messages", json=sent, headers=headers) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[0] == "event: message_start"
    assert lines[2:4] == ["event: ping", 'data: {"type":"ping"}']
    assert lines[-2:] == ["event: message_stop", 'data: {"type":"message_stop"}']


def test_ends(claude: Any) -> None:
    whole = ask(claude).content[0].text
    stop = whole.split()[2]
    message = ask(claude, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == whole.partition(stop)[0]
    raw, _ = told(claude, stop_sequences=[stop])
    assert (raw[-2].delta.stop_reason, raw[-2].delta.stop_sequence) == ("stop_sequence", stop)
    ended = ask(claude, extra_body={"choices": ["The end."]})
    assert (ended.stop_reason, ended.content[0].text) == ("end_turn", "The end.")
    assert ask(claude, max_tokens=0).content == []


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "crown"}])
def test_forced_calls_follow_their_schema(claude: Any, choice: Any) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 80}
    message = ask(claude, **asked)
    (call,) = message.content
    assert (message.stop_reason, call.type) == ("tool_use", "tool_use")
    assert call.name in (["marry", "crown"] if choice["type"] == "any" else ["crown"])
    assert set(call.input) == {"name", "age"} and call.input["age"] in (7, 70)
    raw, streamed = told(claude, **asked)
    assert [each.to_dict() for each in streamed.content] == [call.to_dict()]
    deltas = [event for event in raw if event.type == "content_block_delta"]
    assert len(deltas) > 3  # they come as they are written
    assert {event.delta.type for event in deltas} == {"input_json_delta"}
    assert raw[-2].delta.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    said = [*HELLO, message.to_dict(), {"role": "user", "content": [result]}]
    answer = ask(claude, messages=said, tools=TOOLS, tool_choice={"type": "none"})
    assert answer.content[0].type == "text"
    one = {**choice, "disable_parallel_tool_use": True}
    assert ask(claude, **{**asked, "tool_choice": one}).stop_reason == "tool_use"


def test_thoughts_are_blocks(claude: Any, server: Serving) -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 8}, "max_tokens": 40}
    message = ask(claude, **asked)
    expected = server.ctx.chat(HELLO, thinking=8, max_tokens=40, **WARM)
    thought, text = message.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert thought.thinking == expected.thought != "" and thought.signature
    assert text.text == expected.turn.content
    raw, streamed = told(claude, **asked)
    assert streamed.content[0].thinking.strip() == thought.thinking
    assert streamed.content[0].signature == thought.signature
    assert streamed.content[1].text == text.text
    deltas = [event.delta.type for event in raw if event.type == "content_block_delta"]
    n_thought, n_text = deltas.count("thinking_delta"), deltas.count("text_delta")
    assert deltas == [*["thinking_delta"] * n_thought, "signature_delta", *["text_delta"] * n_text]
    said = [*HELLO, message.to_dict(), {"role": "user", "content": "And then?"}]
    given = {"role": "assistant", "content": text.text, "reasoning_content": thought.thinking}
    whole = server.ctx.chat([HELLO[0], given, said[2]], thinking=False, max_tokens=4, **WARM)
    usage = ask(claude, messages=said, max_tokens=4).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == whole.num_prompt_tokens


def test_last_answer_is_continued(claude: Any, server: Serving) -> None:
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "The king was"}]}]
    said = [*HELLO, {"role": "assistant", "content": "The king was"}]
    expected = server.ctx.chat(said, thinking=False, max_tokens=8, **WARM)
    assert ask(claude, messages=begun, max_tokens=8).content[0].text == expected.turn.content


def test_structured_answers(claude: Any) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    config = {"output_config": {"format": form, "effort": "max"}}
    for more in (config, {"extra_body": {**WARM, "output_format": form}}):
        message = ask(claude, **more, max_tokens=64)
        assert message.content[0].text.startswith('{"name": ')


def test_the_clients_own_loop_over_tools(claude: Any) -> None:
    """It asks for a conversation that the server keeps, and goes on without when that is refused."""
    called = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def crown(age: Literal[7, 70]) -> str:
        """Crown a king."""
        called.append(age)
        return "done"

    choice = {"type": "tool", "name": "crown"}
    asked = {**body(max_tokens=60), "tools": [crown], "tool_choice": choice, "max_iterations": 3}
    answers = list(claude.beta.messages.tool_runner(**asked))
    assert [answer.stop_reason for answer in answers] == ["tool_use"] * 3
    assert len(called) >= 2
    assert answers[1].usage.cache_read_input_tokens > answers[0].usage.input_tokens / 2


def test_asynchronous_calls_and_one_that_is_left(server: Serving) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(
            base_url=server.url, api_key="secret", max_retries=0
        ) as client:
            one, other = await asyncio.gather(
                client.messages.create(**body()), client.messages.create(**body())
            )
            assert one.content == other.content
            endless = body(max_tokens=10_000, extra_body={**WARM, "ignore_eos": True})
            async with client.messages.stream(**endless) as stream:
                async for event in stream:
                    if event.type == "text":
                        break
            task = asyncio.ensure_future(client.messages.create(**endless))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.messages.create(**body())).content == one.content

    asyncio.run(run())


def test_models(claude: Any, server: Serving) -> None:
    (model,) = claude.models.list()
    assert (model.id, model.type, model.display_name) == ("king", "model", "king")
    assert model.max_input_tokens == server.ctx.n_ctx_seq and model.created_at.tzinfo is not None
    assert claude.models.retrieve("king") == model
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("another")


def test_a_call_that_is_cut_is_no_whole_block(claude: Any) -> None:
    asked = {"tools": TOOLS, "tool_choice": {"type": "any"}}
    n_tokens = ask(claude, **asked, max_tokens=80).usage.output_tokens
    for n in range(1, n_tokens, 3):
        raw, message = told(claude, **asked, max_tokens=n)
        assert message.stop_reason == ask(claude, **asked, max_tokens=n).stop_reason == "max_tokens"
        open_block, n_blocks = None, 0
        for event in raw:
            if event.type == "content_block_start":
                assert open_block is None and event.index == n_blocks
                open_block, n_blocks = event.index, n_blocks + 1
            elif event.type == "content_block_delta":
                assert event.index == open_block
            elif event.type == "content_block_stop":
                assert event.index == open_block
                open_block = None
        assert open_block is None


@pytest.mark.filterwarnings("ignore::llamabranch.errors.GrammarWarning")
def test_a_tool_whose_schema_is_not_supported_leaves_the_others_usable(claude: Any) -> None:
    broken = {"name": "fly", "input_schema": {"type": "object", "patternProperties": 5}}
    for name in ("crown", "fly"):
        asked = {"tools": [*TOOLS, broken], "tool_choice": {"type": "tool", "name": name}}
        message = ask(claude, **asked, max_tokens=80)
        if name == "crown":  # the arguments of the other one can be of any length
            assert message.content[0].input["age"] in (7, 70)
    counted = claude.messages.count_tokens(model="any", messages=HELLO, tools=[*TOOLS, broken])
    assert counted.input_tokens > 100


def test_a_prompt_that_is_too_long_can_be_counted(claude: Any) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    assert claude.messages.count_tokens(model="any", messages=long).input_tokens > 3000


# -- errors ----------------------------------------------------------------------------------------

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PAGES = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
SHOWN = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
USE = {"type": "tool_use", "id": "a", "name": "marry", "input": {}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
STRICT = {**TOOLS[0], "strict": True, "input_schema": {"type": "object", "patternProperties": 5}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"extra_body": {"compaction": {"type": "x"}}}, "compaction is not supported"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers is not supported"),
        ({"extra_body": {"thread": {"type": "create"}}}, "thread is not supported"),
        (user(IMAGE), r"'image' is not supported - at `\$.messages\[0\].content\[0\].type"),
        (user(PAGES), "'document' is not supported"),
        (user(SHOWN), r"'image' is not supported - at `\$.messages\[0\].content\[0\].content\[0\]"),
        (user(USE), r"messages\[0\]: a message of the user cannot have a tool_use block"),
        (user({"type": "server_tool_use"}), "'server_tool_use' is not supported"),
        ({"messages": []}, "`messages`: must be array"),
        ({"messages": [{"role": "poet", "content": "x"}]}, "'poet' is not supported"),
        ({"tools": [*TOOLS, SEARCH]}, r"tools\[2\]: web_search .*web_search_20250305"),
        ({"tools": [TOOLS[1], STRICT]}, "the parameters of marry"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice.*fly"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"extra_body": {"session_id": "a\nb"}}, "session_id must be 1 to 200 printable"),
        ({"extra_headers": {"X-Session-Id": "s" * 10_000}}, "session_id must be 1 to 200"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "prompt is too long"),
    ],
)
def test_bad_requests_get_anthropics_error(claude: Any, more: Any, message: str) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match=message) as caught:
            ask(claude, stream=stream, **more)
        assert caught.value.body["type"] == "error"
        assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_errors_of_other_kinds(claude: Any, server: Serving, api: Any) -> None:
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(claude.with_options(api_key="wrong"))
    assert caught.value.body["error"]["type"] == "authentication_error"
    bearer = claude.with_options(api_key=None, auth_token="secret")
    assert ask(bearer).content
    both = {"authorization": "Bearer other", "x-api-key": "secret"}  # one of the two is right
    assert api.get("/v1/models", headers=both).status_code == 200
    lacks = post(api, 401, "/v1/messages", messages=HELLO)
    assert lacks["type"] == "error"
    api.headers["x-api-key"] = "secret"
    assert "max_tokens" in post(api, 400, "/v1/messages", messages=HELLO)["error"]["message"]
    for path in ("/v1/messages/batches", "/v1/messages/count_tokens/x"):
        error = post(api, 404, path)["error"]
        assert error["type"] == "not_found_error" and f"POST {path}" in error["message"]


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {}, (None, None)),
        ({"session_id": "a", "parent_session_id": "b"}, {"x-session-id": "c"}, ("a", "b")),
        ({}, {"x-session-id": "c", "x-parent-session-id": "d"}, ("c", "d")),
        ({}, {"x-session-affinity": "c", "x-claude-code-session-id": "s"}, ("c", None)),
        ({"metadata": {"user_id": "user_1_account__session_a-b"}}, {}, ("a-b", None)),
        ({"metadata": {"user_id": '{"device_id": "1", "session_id": "a-b"}'}}, {}, ("a-b", None)),
        ({"metadata": {"user_id": "[" * 100_000}}, {}, (None, None)),
        ({"metadata": {"user_id": "ann"}}, {}, (None, None)),
        ({"metadata": {"user_id": 5}}, {"x-claude-code-session-id": "s"}, ("s", None)),
        ({}, {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "t"}, ("t", "s")),
        (
            {},
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "t",
                "x-claude-code-parent-agent-id": "u",
            },
            ("t", "u"),
        ),
    ],
)
def test_sessions(fields: Any, headers: dict[str, str], expected: Any) -> None:
    from llamabranch.serve.completions import ChatFields

    options: Any = ChatFields(messages=[], **fields).session(headers)
    assert (options["session_id"], options["parent_session_id"]) == expected
    request = lb.Request("x", **options)
    assert (request.session_id, request.parent_session_id) == expected


def test_both_doors_make_the_same_request(claude: Any, server: Serving, api: Any) -> None:
    """With the same text, out of the same cache; the records tell the door and the session."""
    asked = body(system="You are a poet. " * 3)
    headers = {"x-session-id": "main"}
    message = claude.messages.create(**asked, extra_headers=headers)
    said = [{"role": "system", "content": asked["system"]}, *HELLO]
    other = {"messages": said, "max_tokens": 16, "thinking": False, **WARM}
    more = {"session_id": "child", "parent_session_id": "main", "ephemeral": True}
    api.headers["x-api-key"] = "secret"
    answer = post(api, 200, "/v1/chat/completions", **other, **more)
    assert answer["choices"][0]["message"]["content"] == message.content[0].text
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    first, second = server.ctx.requests[-2:]
    assert (first.door, first.session, first.parent) == ("messages", "main", "")
    assert (second.door, second.session, second.parent) == ("chat", "child", "main")


def test_short_lived_sessions_end_at_once() -> None:
    from llamabranch.serve.completions import ChatFields

    assert ChatFields(messages=[], ephemeral=True).session({})["ttl"] == 0
