"""How much of a prompt has been read, in branches, chats, engines and events; what stops the reading."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from decodes import hooked
from toys import CHAT_TEMPLATE

import llamabranch as lb
from llamabranch import Branch, Chat, Context, Engine, Request
from llamabranch.context import PromptProgress
from llamabranch.errors import ConfigError

CHUNK = 32
PROMPT = [(7 * i + 3) % 200 + 5 for i in range(100)]
STEPS = [0, 32, 64, 96, 100]


@pytest.fixture
def ctx(target: lb.Model) -> Any:
    with Context(
        target, n_ctx=1024, n_batch=CHUNK, n_threads=1, prefix_cache=True, exact=True
    ) as ctx:
        yield ctx
        ctx.audit()


def check(seen: list[PromptProgress], steps: list[int], total: int) -> None:
    """Assert that these are the reports of a prompt whose first tokens were cached."""
    assert [p.n_read for p in seen] == steps
    assert {p.n_cached for p in seen} == {steps[0]}
    assert {p.n_total for p in seen} == {total}
    assert [p.seconds for p in seen] == sorted(p.seconds for p in seen)
    assert seen[0].seconds >= 0


# -- branches and chats ----------------------------------------------------------------------------


def test_branch_tells_after_each_chunk(ctx: Context) -> None:
    seen: list[PromptProgress] = []
    with Branch.start(ctx, PROMPT, on_prompt_progress=seen.append) as branch:
        check(seen, STEPS, 100)
        seen.clear()
        branch.append(PROMPT[:40], on_prompt_progress=seen.append)
        check(seen, [100, 132, 140], 140)
    seen.clear()
    more = [*PROMPT, *PROMPT[:10]]
    with Branch.start(ctx, more, on_prompt_progress=seen.append) as branch:  # what is cached
        check(seen, [100, 110], 110)
        assert branch.tokens == more
    with Branch.create(ctx) as branch:
        seen.clear()
        branch.prefill(PROMPT[::-1], on_prompt_progress=seen.append)
        check(seen, STEPS, 100)


def test_error_of_a_callback_leaves_the_branch_as_it_was(ctx: Context) -> None:
    def refuse(progress: PromptProgress) -> None:
        if progress.n_read > 150:
            raise ArithmeticError(progress.n_read)

    with Branch.start(ctx, PROMPT) as branch:
        before, logits = branch.tokens, branch.logits.tobytes()
        with pytest.raises(ArithmeticError, match="164"):
            branch.append(PROMPT, on_prompt_progress=refuse)
        assert branch.tokens == before and branch.logits.tobytes() == logits
        ctx.audit()
        with pytest.raises(ConfigError, match="on_prompt_progress must be a function"):
            branch.append(PROMPT, on_prompt_progress=3)  # type: ignore[arg-type]
    n_before = ctx.n_seq_free
    with pytest.raises(ArithmeticError):
        Branch.start(ctx, [*PROMPT[::-1], *PROMPT], on_prompt_progress=refuse)
    assert ctx.n_seq_free == n_before


def test_chat_tells_how_much_of_a_message_is_read(target: lb.Model) -> None:
    with (
        lb.Model(target.path, chat_template=CHAT_TEMPLATE) as model,
        Context(model, n_ctx=1024, n_batch=CHUNK, n_threads=1) as ctx,
        Chat(ctx, drafter=None, max_tokens=2, temperature=0.0) as chat,
    ):
        seen: list[PromptProgress] = []
        chat.set(on_prompt_progress=seen.append)
        assert [event.token >= 0 for event in chat.send("a king and a queen " * 10)][:2] == [
            True
        ] * 2
        assert seen[0].n_cached == 0 and len(seen) > 2
        assert seen[-1].n_read == seen[-1].n_total > 40
        seen.clear()
        list(chat.send("a wolf"))
        assert seen[0].n_read == seen[0].n_cached > 40  # only the new message is read
        assert seen[-1].n_read == seen[-1].n_total


# -- engines ---------------------------------------------------------------------------------------


def test_complete_tells_by_a_function_and_by_events(ctx: Context) -> None:
    seen: list[PromptProgress] = []
    plain = ctx.complete(PROMPT, max_tokens=4, temperature=0.0)
    ctx.kv_cache_clear()
    result = ctx.complete(PROMPT, max_tokens=4, temperature=0.0, on_prompt_progress=seen.append)
    check(seen, STEPS, 100)
    assert result.tokens == plain.tokens
    stream = ctx.complete(PROMPT[::-1], max_tokens=4, stream=True, prompt_progress=True)
    events = list(stream)
    reports = [event.progress for event in events if event.progress is not None]
    check(reports, STEPS, 100)
    assert all(event.progress for event in events[: len(reports)])  # before the first token
    assert all(event.text == "" and event.emitted is None for event in events[: len(reports)])
    assert len(events) == len(reports) + 4 + 1
    # Nothing is reported unless it is asked for.
    assert not any(e.progress for e in ctx.complete(PROMPT[1:], max_tokens=2, stream=True))
    with pytest.raises(ConfigError, match="on_prompt_progress must be a function"):
        Request("a", on_prompt_progress=3)  # type: ignore[arg-type]


def test_engine_tells_of_each_prompt_what_the_last_decode_has_read_of_it(ctx: Context) -> None:
    """Two prompts share decodes; the second waits, and then begins like the first."""
    engine = Engine(ctx, None, max_tokens=2)
    seen: list[tuple[str, PromptProgress]] = []

    def watch(name: str, prompt: list[int]) -> Request:
        def add(progress: PromptProgress) -> None:
            seen.append((name, progress))

        return Request(prompt, id=name, on_prompt_progress=add)

    engine.generate([watch("a", PROMPT), watch("b", [*PROMPT[:64], *PROMPT[:20]])])
    a, b = ([p for name, p in seen if name == prompt_id] for prompt_id in "ab")
    check(a, STEPS, 100)
    assert b[0].n_cached == 64 and b[-1].n_read == b[-1].n_total == 84


def test_preempted_text_tells_that_it_is_read_again(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_batch=CHUNK, n_seq_max=2, n_threads=1, exact=True) as ctx:
        engine, seen = Engine(ctx, None, max_tokens=150), list[PromptProgress]()
        ends = {"sampling": lb.SamplingParams(logit_bias=dict.fromkeys(target.eog_tokens, -1e9))}
        results = engine.generate([
            Request(PROMPT[:60], id="a", **ends),  # type: ignore[arg-type]
            Request(PROMPT[::-1][:60], id="b", on_prompt_progress=seen.append, **ends),  # type: ignore[arg-type]
        ])  # fmt: skip
        assert results[1].num_preemptions
        again = [now for before, now in pairwise(seen) if now.n_read <= before.n_read]
        assert len(again) == results[1].num_preemptions
        assert again[0].n_total > 60  # what it had generated, too


# -- what stops the reading ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3])
def test_abort_stops_the_decode_that_reads_and_no_other_text_notices(
    chunk: int, ctx: Context
) -> None:
    engine = Engine(ctx, None, max_tokens=6, sampling=lb.SamplingParams(temperature=0.0))
    n_seen = 0

    def around(decode: Callable[[int], int], n: int) -> int:
        nonlocal n_seen
        n_seen += 1
        if n_seen == chunk:
            engine.abort("x")
        return decode(n)

    other = Request(PROMPT[3:60], id="y")
    (alone,) = engine.generate([other])
    ctx.kv_cache_clear()
    seen: list[PromptProgress] = []
    long = Request(PROMPT[::-1], id="x", on_prompt_progress=seen.append)
    with hooked(ctx, around):
        x, y = engine.generate([long, other])
    assert (x.finish_reason, x.tokens, x.error) == ("cancelled", [], None)
    assert [progress.n_read for progress in seen] == STEPS[:chunk]  # that chunk itself is not read
    assert (y.finish_reason, y.tokens) == ("length", alone.tokens)
