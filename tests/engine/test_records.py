"""Records: what a request read, and the reason; every miss made on purpose is named, no hit is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import toys
from conftest import DATA, audit
from engine_runs import heard

from llamabranch import Context, Engine, Model, Request
from llamabranch.errors import ConfigError
from llamabranch.request.difference import repeated, words
from llamabranch.request.record import Kind, Record

# The tools, if there are any, and no earlier thoughts.
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
LINES = [
    f"{who} went to the {place} and saw a {thing} under the tree."
    for who, place, thing in zip(
        ("The king", "A wolf", "The old woman", "Her son", "The miller", "A bear", "The fox"),
        ("forest", "river", "castle", "mill", "market", "garden", "well"),
        ("bird", "ring", "sword", "child", "loaf", "crown", "golden apple"),
        strict=True,
    )
]
SYSTEM = "\n".join(["You tell tales.", "version=1", *LINES])
TASKS = [f"Tell of {line[:-1].lower()}." for line in LINES]
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def teller() -> Iterator[Model]:
    with Model(DATA / "tale-target-q8_0.gguf", chat_template=TEMPLATE) as model:
        yield model


@pytest.fixture
def ctx(teller: Model) -> Iterator[Context]:
    with Context(teller, n_ctx=8192, n_seq_max=4, n_threads=1) as ctx:
        yield ctx
        audit(ctx)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def began(number: int) -> Messages:
    """A conversation that no other number has, from its first line on."""
    rng, lines = random.Random(number), SYSTEM.split("\n")
    mixed = [" ".join(rng.sample(line.split(), len(line.split()))) for line in lines[2:]]
    return [said("system", "\n".join([*lines[:2], *mixed])), said("user", TASKS[number])]


def turn(ctx: Context, messages: Messages, **options: Any) -> Record:
    """Answer, append an answer and the next question; return the record."""
    result = ctx.chat(messages, **{"max_tokens": 0, "seed": 1, **options})
    i = len(messages) % len(LINES)
    messages += [said("assistant", result.text or LINES[i]), said("user", TASKS[i])]
    record: Record = ctx.requests[-1]
    assert record.finish_reason == result.finish_reason
    assert (record.num_prompt_tokens, record.cached) == (result.num_prompt_tokens, result.cached)
    assert (record.evaluated, record.generated) == (result.evaluated, result.generated)
    assert sum(cause.n_tokens for cause in record.causes) == record.evaluated
    assert all(cause.kind in get_args(Kind) and cause.told for cause in record.causes)
    return record


def caused(record: Record, kind: str) -> str:
    """Return the reason of this kind in words. There is no other one for reading again."""
    (cause,) = [cause for cause in record.causes if cause.is_again]
    assert (cause.kind, record.reread) == (kind, cause.n_tokens)
    assert cause.told in record.line()
    return cause.told


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("session", [None, "main"])
def test_each_change_of_a_prompt_is_named(ctx: Context, number: int, session: str | None) -> None:
    """Five kinds of changes, each in five conversations, with and without a session."""
    messages, options = began(number), {"session_id": session}
    assert [c.kind for c in turn(ctx, messages, **options).causes] == ["first"]
    assert turn(ctx, messages, **options).reread == 0

    messages[0]["content"] = messages[0]["content"].replace("version=1", "version=2")
    told = caused(turn(ctx, messages, **options), "changed")
    assert "`version=1` became `version=2`, in the system prompt, line 2" in told
    messages[0]["content"] = messages[0]["content"].replace(
        "version=2\n", "version=2\nNew: line.\n"
    )
    told = caused(turn(ctx, messages, **options), "changed")
    assert "`New:` was added, in the system prompt, line 3" in told
    lines = messages[0]["content"].split("\n")
    messages[0]["content"] = "\n".join([*lines[:4], *lines[5:]])
    told = caused(turn(ctx, messages, **options), "changed")
    assert "was left out, in the system prompt, line 5" in told
    messages[1]["content"] = "Please! " + messages[1]["content"]
    told = caused(turn(ctx, messages, **options), "changed")
    assert "`Please!` was added, in message 2 (user), line 1" in told
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    told = caused(turn(ctx, messages, tools=[tool], **options), "changed")
    assert "in the tools" in told


@pytest.mark.parametrize("number", range(5))
def test_an_answer_that_comes_back_differently_is_named(ctx: Context, number: int) -> None:
    """The template leaves out its thought, its tokens are others, or the client changed it."""
    messages = began(number)
    turn(ctx, messages, thinking=12, max_tokens=30, session_id="a")
    told = caused(turn(ctx, messages, thinking=False, session_id="a"), "rewritten")
    assert "the template leaves out earlier thoughts" in told

    messages = began(number)
    messages[0]["content"] += "\nAnother."
    result = ctx.chat(messages, regex="[a-z]{120}", seed=number, temperature=1.5)
    longer = [*messages, said("assistant", result.text), said("user", "And then?")]
    assert "split into other tokens" in caused(turn(ctx, longer), "retokenized")

    messages = began(number)
    messages[0]["content"] += "\nA third one."
    ctx.chat(messages, regex="[a-z]{60}", seed=number, session_id="c")
    changed = [*messages, said("assistant", " ".join(LINES[:2])), said("user", "And then?")]
    told = caused(turn(ctx, changed, session_id="c"), "rewritten")
    assert "the client has changed the last answer" in told


@pytest.mark.parametrize("number", range(5))
def test_an_eviction_is_named_with_whom_it_was_for(teller: Model, number: int) -> None:
    with Context(teller, n_ctx=256, n_seq_max=2, prefix_cache=True) as ctx:
        messages = began(number)
        n = turn(ctx, messages, session_id="main").num_prompt_tokens
        others = [said("user", " ".join(LINES[::-1] * 2))]
        turn(ctx, others, session_id="other")
        record = turn(ctx, messages, session_id="main")
        told = caused(record, "evicted")
        assert "because session other needed room for " in told and "-c " in told
        with Context(teller, n_ctx=int(told.split("-c ")[1].split()[0]), n_seq_max=8) as enough:
            again = began(number)
            turn(enough, again, session_id="main")
            turn(enough, [said("user", " ".join(LINES[::-1] * 2))], session_id="other")
            # The last token, a space, is joined with the next word.
            assert turn(enough, again, session_id="main").cached >= n - 1
        audit(ctx)


def test_no_hit_has_a_cause(ctx: Context) -> None:
    """Forty turns of five conversations and of sub-agents: nothing is read again, and nothing is told."""
    for number in range(5):
        messages = began(number)
        assert turn(ctx, messages).reread == 0
        for i in range(4):
            record = turn(ctx, messages, session_id=None if i % 2 else f"main {number}")
            assert ([c.kind for c in record.causes], record.hint) == (["new"], "")
            assert record.cached > 0 == record.reread
        for i in range(4):  # sub-agents begin like it
            child = [*messages[:-1], said("user", f"Task {i}: {TASKS[-1 - i]}")]
            names = {"session_id": f"{number}.{i}", "parent_session_id": f"main {number}"}
            record = turn(ctx, child, **names)
            assert [c.kind for c in record.causes] == ["new"]
            assert record.follows is not None


def test_clients_that_say_the_same_in_other_prompts_are_no_cause(ctx: Context) -> None:
    """Only most of a prompt, or the same session, tells that something was changed."""
    shared = " ".join(LINES[:3])
    for i, session in enumerate((None, "a", None, "b")):
        content = f"{TASKS[i]} {' '.join(LINES[3 + i : 4 + i] * 5)} {shared}"
        assert turn(ctx, [said("user", content)], session_id=session).reread == 0


def test_memory_that_cannot_go_back_and_scores_are_named(ctx: Context, tmp_path: Path) -> None:
    result = ctx.complete(SYSTEM, max_tokens=2)
    ctx.complete(SYSTEM, max_tokens=0, prompt_logprobs=0)
    assert [c.kind for c in ctx.requests[-1].causes] == ["scored", "new"]
    assert ctx.requests[-1].evaluated == result.num_prompt_tokens
    path = toys.write_toy(tmp_path / "mamba.gguf", "mamba", vocab="bytes")
    with Model(path) as model, Context(model, n_ctx=512, prefix_cache=True) as hybrid:
        tokens = [5 + i % 90 for i in range(100)]
        for prompt in (tokens, [*tokens[:50], 7, 8, 9]):
            hybrid.complete(prompt, max_tokens=2)
        record = hybrid.requests[-1]
        assert record.causes[0].kind == "memory" and record.causes[0].n_tokens == 50 - record.cached


def test_a_line_that_changes_again_and_again_gets_a_hint(ctx: Context) -> None:
    messages = began(0)
    hints = []
    for number in range(5):
        messages[0]["content"] = messages[0]["content"].replace("version=", "version=1", 1)
        hints.append(turn(ctx, messages).hint)
        assert number < 3 or "--drop-line '^version='" in hints[-1]
    assert hints[:3] == ["", "", ""]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("The time is 2026-11-29T23:4{0}:0{0}", "--drop-line '^The time is' leaves this line out"),
        ("header: cch=ab{0}; v=1", "--drop-line '^header: cch=' leaves this line out"),
        ("4{0} is the number", ""),
    ],
)
def test_the_expression_of_a_hint_has_nothing_that_may_change(
    ctx: Context, line: str, hint: str
) -> None:
    messages = began(0)
    system = messages[0]["content"]
    for number in range(5):
        messages[0]["content"] = f"{line.format(number)}\n{system}"
        record = turn(ctx, messages, session_id="a")
    assert record.hint == hint


def test_what_moved_was_not_left_out(ctx: Context) -> None:
    lines = [*LINES[:3], *LINES[3:6]]
    turn(ctx, [said("system", "\n".join(["Tell.", *lines]))], session_id="a")
    moved = [said("system", "\n".join(["Tell.", *lines[3:], *lines[:3]]))]
    told = caused(turn(ctx, moved, session_id="a"), "changed")
    assert "was moved, in the system prompt, line 2" in told


def test_white_space_that_changed_is_no_word_that_was_added(ctx: Context) -> None:
    for changed in ("You  tell tales.", "You\ttell tales.", "You tell tales."):
        messages = began(0)
        turn(ctx, messages, session_id="a")
        messages = began(0)
        messages[0]["content"] = messages[0]["content"].replace("You tell tales.", changed)
        record = turn(ctx, messages, session_id="a")
        assert record.reread == 0 or ": white space changed, in the system" in record.line()
    assert record.reread == 0


def test_tools_are_named_where_a_prompt_parts_from_another(ctx: Context) -> None:
    def tool(name: str, about: str) -> dict[str, Any]:
        function = {"name": name, "description": about, "parameters": {"type": "object"}}
        return {"type": "function", "function": function}

    for asked in (TASKS[0], "hi"):  # a short message may stand in the tools too
        for name in ("look", "hear"):
            tools = [tool("hi", f"{asked} to me"), tool(name, LINES[0])]
            record = turn(ctx, [said("user", asked)], tools=tools, session_id=asked)
        assert ": in the tools, before message 1" in record.causes[-1].told


def test_a_request_follows_no_other_that_begins_differently(ctx: Context) -> None:
    turn(ctx, began(0))
    assert turn(ctx, [said("user", "Hello")]).follows is None


def test_records_come_from_every_kind_of_call(ctx: Context) -> None:
    """The last 500 are kept; a cancelled request has read what it has read."""
    ctx.complete([TASKS[0], TASKS[1]], max_tokens=2, n=2)
    one, two = ctx.requests
    assert (one.id, two.id, one.generated, one.door) == ("0", "1", 4, "python")
    with Engine(ctx, drafter=None) as engine:
        heard(engine.stream([Request(SYSTEM, id="a", max_tokens=2, session_id="s")]))
    job = ctx.submit(Request(SYSTEM, max_tokens=2))
    assert job.results[0].cached == ctx.requests[-1].cached > 0
    assert [record.session for record in ctx.requests[2:]] == ["s", ""]
    for _ in range(500):
        ctx.complete([5, 6, 7], max_tokens=0)
    assert len(ctx.requests) == 500 and ctx.requests[0].number == 4
    for bad in ("", "x" * 10_000, "a\nb", "\0"):
        with pytest.raises(ConfigError, match="session_id must be 1 to 200 printable characters"):
            ctx.complete("x", session_id=bad)
    with pytest.raises(ConfigError, match="printable characters, not 10,000"):
        ctx.complete("x", session_id="x" * 10_000)


def test_repeated_runs_are_found() -> None:
    old = list(range(200))
    assert repeated(old, [*range(500, 510), *range(50, 150), 7, *range(160, 200)]) == [
        (10, 50, 100), (111, 160, 40)
    ]  # fmt: skip
    assert repeated(old, list(range(300, 400))) == repeated([], old) == repeated(old, []) == []
    assert words("a b cch=1 x", "a b cch=2 y") == ("cch=1", "cch=2")
    assert words("a", "a b") == ("a", "a")


def test_a_prompt_may_be_the_beginning_of_an_earlier_one(ctx: Context) -> None:
    """It parts from it nowhere; a few of its tokens are read again."""
    tokens = list(range(20, 60))
    ctx.complete(tokens, max_tokens=0, session_id="a")
    assert ctx.prefix_cache is not None
    with ctx.lock:
        ctx.prefix_cache.evict(31)
    ctx.complete(tokens[:14], max_tokens=0, session_id="a")
    record = ctx.requests[-1]
    assert 1 < record.evaluated == sum(cause.n_tokens for cause in record.causes)
    assert not any("parts from" in cause.told for cause in record.causes)


def leave(ctx: Context, how: str) -> None:
    """Begin a request of many decodes, and end it while its prompt is read."""
    prompt = list(range(5, 250)) * 6

    def told(progress: Any) -> None:
        if progress.n_read > 100:
            if how == "cancelled":
                job.cancel()
            else:
                raise KeyboardInterrupt if how == "interrupted" else ValueError("mine")

    if how == "cancelled":
        job = ctx.submit(Request(prompt, n=2, on_prompt_progress=told))
        for result in job.results:
            assert result.finish_reason == "cancelled" and result.generated == 0
        assert [result.evaluated for result in job.results] == [512, 0]
    elif how == "left":
        for event in ctx.complete(prompt, stream=True, prompt_progress=True, n=2):
            if event.progress is not None and event.progress.n_read > 100:
                break
    else:
        with pytest.raises(KeyboardInterrupt if how == "interrupted" else ValueError):
            ctx.complete(prompt, on_prompt_progress=told)


@pytest.mark.parametrize("how", ["cancelled", "left", "interrupted", "raised"])
def test_what_was_not_read_does_not_count(ctx: Context, how: str) -> None:
    """Before, the record counted the whole prompt, and had no end if nobody took the result."""
    leave(ctx, how)
    record = ctx.requests[-1]
    assert (record.num_prompt_tokens, record.cached, record.evaluated) == (1470, 0, 512)
    assert [cause.n_tokens for cause in record.causes] == [512]
    assert record.causes[0].told.endswith(", but only 512 of them were read")
    assert record.finish_reason == "cancelled" and record.line().endswith("  cancelled")
    assert record.read_s > 0 == record.write_s


def test_a_stream_that_is_left_has_a_record_of_what_it_wrote(ctx: Context) -> None:
    for n, _ in enumerate(ctx.complete(TASKS[0], stream=True, max_tokens=50, n=2), 1):
        if n == 9:
            break
    record = ctx.requests[-1]
    assert record.finish_reason == "cancelled" and record.generated >= n


def test_the_times_of_a_record_are_those_of_all_its_texts(ctx: Context) -> None:
    """Before, its texts were counted together, but only the time of the first one that ended."""
    options: dict[str, Any] = {"n": 3, "seed": 4, "max_tokens": 30, "stop": "."}
    results = ctx.complete("The king had a", **options).choices
    record = ctx.requests[-1]
    assert len({result.generated for result in results}) > 1
    assert record.generated == sum(result.generated for result in results)
    first = min(result.first_token_s or 0 for result in results)
    last = max(result.last_token_s or 0 for result in results)
    assert record.write_s == pytest.approx(last - first)
    assert record.tokens_per_second == pytest.approx((record.generated - 1) / (last - first))
    assert record.finish_reason == results[0].finish_reason
    ctx.complete("Another tale", max_tokens=0)
    assert ctx.requests[-1].read_s > 0  # no token ends the time in which a prompt is read


def test_one_token_is_a_token(ctx: Context) -> None:
    ctx.complete([5], max_tokens=0)
    assert ": 1 token = 0 cached + 1 read in " in ctx.requests[-1].line()
