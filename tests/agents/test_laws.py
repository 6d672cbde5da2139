"""Laws that hold for every run: transcripts, logits, prompts, tokens read, cancelling, grammars.

A table of what a call may do wrong, and what the model then reads, is in `test_agent.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import toys
from msgspec.structs import astuple, replace
from stages import Number, add, assert_left_alone, fails, hangs, name, sleeps
from turn_shapes import CHANGING, SHAPES

import llamabranch as lb
from llamabranch import Agent, AsyncEngine, Context
from llamabranch.agents import Report
from llamabranch.model.tools import ToolCall, openai_call

CHAT = (
    "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% for c in m.tool_calls or [] %}"
    "{% set f = c.function %}"
    '<call>{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}</call>'
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}### assistant\n{% endif %}"
)
TASKS = [f"Tell of the {animal}." for animal in ("wolf", "fox", "king", "hen", "sea")]
_random = random.Random(7)


def pick(color: Literal["red", "green", "blue"], n: Literal[1, 2, 3]) -> str:
    """Pick a colour; takes its time."""
    time.sleep(_random.random() / 50)
    return f"{color} {n}: once upon a time"


async def roll(sides: Literal["4", "6", "20"]) -> int:
    """Roll a die; takes its time."""
    await asyncio.sleep(_random.random() / 50)
    return len(sides) * 3


@pytest.fixture(scope="module")
def teller() -> Iterator[lb.Model]:
    """The bundled target with a template. Its answers depend on everything that it has read."""
    with lb.Model(lb.hub.resolve(lb.hub.BUNDLED_TARGET), chat_template=CHAT) as model:
        yield model


def tell(
    target: Context | AsyncEngine, tasks: Sequence[str] = TASKS, **options: Any
) -> list[Report]:
    agent = Agent(
        target, "You tell tales.", [pick, roll], tool_choice="required", parallel_tool_calls=False,
        max_turns=3, max_tokens=120, temperature=0.9, seed=11, **options,
    )  # fmt: skip
    return agent.run(list(tasks))


def transcript(report: Report) -> list[Any]:
    return [report.tokens, report.text, report.calls, report.finish_reason, report.limit]


@pytest.fixture(scope="module")
def alone(teller: lb.Model) -> list[Report]:
    """Each task by itself, one after the other, without drafts, in a context with room for all."""
    with lb.Context(teller, n_ctx=8192, n_seq_max=8, n_threads=1, exact=True) as ctx:
        engine = AsyncEngine(ctx, None, parallel=1)
        reports = tell(engine)
        asyncio.run(engine.close())
        assert [len(r.calls) > 0 for r in reports] == [True] * len(TASKS)
        assert len({r.text for r in reports}) == len(TASKS)
        return reports


CASES = {
    "together": ({}, {}),
    "two sequences": ({"n_seq_max": 2}, {}),
    "drafted": ({}, {"drafter": lb.SuffixDrafter()}),
    "a small cache": ({"n_ctx": 650}, {}),
    "no prefixes": ({"prefix_cache": False}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_law_1_a_transcript_does_not_depend_on_what_else_runs(
    teller: lb.Model, alone: list[Report], case: str
) -> None:
    of_context, of_engine = cast("tuple[dict[str, Any], dict[str, Any]]", CASES[case])
    options = {"n_ctx": 8192, "n_seq_max": 8, **of_context}
    with lb.Context(teller, n_threads=1, exact=True, **options) as ctx:
        engine = AsyncEngine(ctx, **of_engine)
        reports = tell(engine)
        asyncio.run(engine.close())
        if case == "a small cache":  # otherwise this test would show nothing
            assert sum(r.reread for r in reports) > 0
        if ctx.prefix_cache is not None:
            assert_left_alone(ctx)
    assert [transcript(r) for r in reports] == [transcript(r) for r in alone]


def test_law_2_a_reports_tokens_are_its_branch(teller: lb.Model) -> None:
    with lb.Context(teller, n_ctx=8192, n_seq_max=8, n_threads=1, exact=True) as ctx:
        (report,) = tell(ctx, TASKS[:1])
        with lb.Branch.start(ctx, report.tokens) as branch:
            after = branch.logits.copy()
    with (
        lb.Context(teller, n_ctx=8192, n_seq_max=8, n_threads=1, exact=True) as fresh,
        lb.Branch.start(fresh, report.tokens) as branch,
    ):
        assert np.array_equal(after, branch.logits)


# -- prompts ---------------------------------------------------------------------------------------


def find(text: str, n: int = 3) -> str:
    """Find a text."""
    return text


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over all bytes that ends turns with the template's token."""
    vocabulary = toys.Vocabulary.with_control("<|bos|>", "<|endoftext|>", "<eot>")
    path = tmp_path_factory.mktemp("shapes") / "shapes.gguf"
    return toys.write_toy(path, vocab=vocabulary, metadata={"tokenizer.ggml.eot_token_id": 2})


@pytest.mark.parametrize("shape", [*SHAPES, *CHANGING])
def test_law_3_the_next_prompt_is_the_whole_conversation(shaped: Path, shape: str) -> None:
    """The text around the model's own tokens is what the template writes, or everything is rendered."""
    with (
        lb.Model(shaped, chat_template=(SHAPES | CHANGING)[shape]) as model,
        lb.Context(model, n_ctx=4096, n_seq_max=8, n_threads=1) as ctx,
    ):
        turns = Agent(ctx, "Be brief. " * 300, [find]).turns

        def text(tokens: Sequence[int]) -> str:
            return model.detokenize(list(tokens), special=True)

        messages: list[dict[str, object]] = [
            {"role": "system", "content": "Be brief. " * 300}, {"role": "user", "content": "Find it."},
        ]  # fmt: skip
        prompt, kept = turns.prompt(messages), []
        for number in range(4):
            # The model writes in its own way, which no template would write.
            own = [*prompt, *model.tokenize(f"In my own way {number}.", add_special=False)]
            call = ToolCall("find", {"text": "a b", "n": number}, f"abcdefgh{number}")
            answer: dict[str, object] = {"role": "assistant", "content": None}
            result: dict[str, object] = {
                "role": "tool", "tool_call_id": call.id, "name": "find", "content": "<eot>",
            }  # fmt: skip
            answer["tool_calls"], is_turn = [openai_call(call)], number < 3
            if not is_turn:
                answer = {"role": "assistant", "content": "Done."}
                result = {"role": "user", "content": "And now?"}
            before = text(turns.prompt(messages, answers=False)).removesuffix("<|endoftext|>")
            messages.append(answer)
            prompt = turns.following(own, messages, [result], is_turn=is_turn)
            messages.append(result)
            whole = turns.prompt(messages)
            kept.append(prompt[: len(own)] == own)
            if kept[-1]:
                assert prompt[len(own)] == 2
                assert text(whole).endswith(text(prompt[len(own) :]))
                assert text(whole).startswith(before)
                assert str(result["content"]) in text(prompt[len(own) + 1 :])
            else:
                assert prompt == whole
        assert kept == KEPT.get(shape, [True] * 4)


# The turns (of three turns and a question) whose own tokens stay, for templates where not all stay.
KEPT = {
    "an empty thought in a last answer": [True, True, True, False],
    "channels": [False] * 4,  # its end of a turn is no EOG token of this model
    "white space after a last result": [True, False, False, False],
    "a system message before a last question": [False, True, True, True],
}


def nodes_of_trie(texts: Sequence[Sequence[int]]) -> int:
    ordered, n = sorted(map(list, texts)), 0
    for before, text in zip([[], *ordered], ordered, strict=False):
        same = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), None)
        n += len(text) - (min(len(before), len(text)) if same is None else same)
    return n


def test_law_4_what_is_read_and_generated_is_what_differs(stage: Context) -> None:
    helper = Agent(stage, "Help.", [add], name="helper")
    agent = Agent(stage, "word " * 100, [add, name, helper], forks=True)
    tasks = ["one: go", "two: go", "plain: go", "again: go", "asks: go", "forks: go"]
    reports = agent.run(tasks)
    inner = [s.report for r in reports for s in r.steps if s.report is not None]
    texts = [r.tokens for r in inner]
    done = sum(r.evaluated + r.generated for r in reports)  # inner ones are in these
    assert stage.prefix_cache is not None and stage.prefix_cache.n_evicted == 0
    assert sum(r.reread for r in reports) == 0
    nodes = nodes_of_trie(texts)
    assert nodes <= done <= 1.01 * nodes


# -- cancelling ------------------------------------------------------------------------------------


def test_law_5_a_run_that_is_cancelled_at_any_step_leaves_nothing(stage: Context) -> None:
    async def main() -> int:
        async with AsyncEngine(stage) as engine:
            helper = Agent(engine, "Help.", [add], name="helper")
            agent = Agent(engine, "sys", [add, name, helper, sleeps], forks=True)
            tasks = ["two: go", "asks: go", "forks: go", "sleeps: go"]
            n_steps = 0
            for last in range(40):
                steps = agent.astream(tasks)
                for _ in range(last):
                    step = await asyncio.wait_for(anext(steps), 20)
                    n_steps += 1
                    if step.name == "sleeps":
                        break
                await steps.aclose()
                assert asyncio.all_tasks() == {asyncio.current_task()}
                if n_steps and step.name == "sleeps" and last > 25:
                    break
            for delay in range(12):
                running = asyncio.ensure_future(agent.arun(tasks))
                for _ in range(1 << delay):
                    await asyncio.sleep(0)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                assert asyncio.all_tasks() == {asyncio.current_task()}
        return n_steps

    assert asyncio.run(main()) > 50
    assert_left_alone(stage)


def test_law_5_a_stream_that_is_closed_leaves_nothing(stage: Context) -> None:
    agent = Agent(stage, "sys", [add, hangs, sleeps])
    for task in ("one", "sleeps", "hangs"):
        steps = iter(agent.stream(f"{task}: go"))
        assert next(steps).kind == "prompt"
        while next(steps).kind != "call":
            pass
        cast(Any, steps).close()
        assert_left_alone(stage)


# -- the same run again ------------------------------------------------------------------------------

RUNS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "calls": (["one: go", "two: go", "plain: go"], {"tools": [add, name], "n": 2}),
    "failures": (["unknown: go", "told: go", "raises: go", "again: go"], {"tools": [add, name, fails]}),
    "limits": (["again: go"], {"tools": [name], "max_turns": 3}),
    "output": (["typed: go", "refused: go", "stubborn: go"], {"output": Number}),
    "forks": (["forks: go", "nested: go"], {"tools": [name], "forks": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_law_8_a_seed_and_equal_results_give_equal_steps(stage: Context, case: str) -> None:
    tasks, options = RUNS[case]
    agent = Agent(stage, "sys", seed=3, **{k: v for k, v in options.items() if k != "n"})
    first, second = (agent.run(tasks, n=options.get("n", 1)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.choices, other.choices, strict=True):
            assert {s.path for s in a.steps} == {s.path for s in b.steps}
            for path in {s.path for s in a.steps}:
                mine, again = (
                    [
                        (
                            astuple(replace(s, seconds=0.0, report=None)),
                            s.report and s.report.tokens,
                        )
                        for s in c.steps
                        if s.path == path
                    ]
                    for c in (a, b)
                )
                assert mine == again


# -- grammars --------------------------------------------------------------------------------------


def test_law_7_what_a_turn_holds_is_valid_at_any_temperature(teller: lb.Model) -> None:
    with lb.Context(teller, n_ctx=8192, n_seq_max=8, n_threads=1, exact=True) as ctx:
        agent = Agent(
            ctx, "You tell tales.", [pick, roll], tool_choice="required", parallel_tool_calls=False
        )
        turns, tools = agent.turns, agent.tools
        prompt = turns.prompt([{"role": "user", "content": "Tell."}])
        opened = [*prompt, *ctx.model.tokenize('It was <call>{"name": "', add_special=False)]
        n_begun = len(opened) - len(prompt)
        n_calls = 0
        for tokens, grammar in ((prompt, turns.forced), (prompt, turns.free), (opened, turns.free)):
            continues = n_begun if tokens is opened else 0
            request = lb.Request(
                tokens, n=24, max_tokens=90, grammar=grammar, continues=continues,
                sampling=lb.SamplingParams(temperature=2.0, seed=3),
            )  # fmt: skip
            with lb.Engine(ctx) as engine:
                results = engine.generate([request])
            begun = ctx.detokenize(tokens[len(tokens) - continues :]) if continues else ""
            for result in results:
                text = begun + result.text
                calls = turns.first.read(text).calls
                n_calls += len(calls)
                for call in calls:
                    tools[call.name].check(call.arguments)
                if result.finish_reason == "stop" and grammar is not turns.free:
                    assert calls
                if result.finish_reason == "stop" and continues:
                    assert calls, text
        assert n_calls > 24


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        '[{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        '```json\n[ {"name" : "add", "arguments": {}}]\n```',
        '```jsonobj\n{ "name": "add",\n "arguments" {"a": 1',
        'Now: {"name" : "add" , "arguments" : {"a": 1, "b": 2}}',
    ],
)
def test_law_7_json_that_looks_like_a_call_is_no_last_answer(text: str, stage: Context) -> None:
    turns = Agent(stage, tools=[add]).turns
    assert turns.first.read(text).calls or turns.looks_like_call(text)
    for fine in ("[1, 2]", "It is [3](a link).", "```python\n1\n```", '{"name": "Ida"}'):
        assert not turns.first.read(fine).calls and not turns.looks_like_call(fine)
