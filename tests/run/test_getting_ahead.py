"""Every step gets ahead: no engine steps for ever, whatever the memory, and no text is read wrongly.

Scores of a text in a clean context are the judge. A token that is read at a wrong position moves them by
far more than rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import toys
from decodes import hooked

import llamabranch as lb
from llamabranch import Context, Engine, Model, Request, SamplingParams
from llamabranch.errors import DecodeError, DecodeInterruptedError
from llamabranch.model.thoughts import Thinking, plan_thinking
from llamabranch.run.core import core_of
from llamabranch.run.job import Choice

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {}),
    "window": ("gemma3", {}),
    "window, cells used again": ("gemma3", {"swa_full": False}),
    "recurrent": ("mamba", {}),
    "recurrent, no checkpoints": ("mamba", {"checkpoint_ram": 0}),
    "recurrent, rwkv": ("rwkv7", {}),
    "hybrid": ("lfm2", {}),
    "hybrid, nothing undone": ("lfm2", {"n_rs_seq": 0}),
    "hybrid, nothing kept": ("lfm2", {"n_rs_seq": 0, "checkpoint_ram": 0}),
    "hybrid, qwen": ("qwen35", {}),
    "hybrid, qwen, nothing undone": ("qwen35", {"n_rs_seq": 0}),
    "hybrid, nemotron": ("nemotron_h", {}),
}
SHORT = [{"role": "user", "content": "Hi"}]
LONG = [{"role": "user", "content": "Hello, I would like to hear a long story about a king."}]
WARM = SamplingParams(temperature=0.8, seed=3, logit_bias={1: -math.inf})
MOST_STEPS = 400
SIZES = {"n_ctx": 512, "n_seq_max": 4, "n_batch": 32, "n_threads": 1}


@pytest.fixture(scope="module", params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Model, dict[str, Any]]]:
    architecture, options = KINDS[request.param]
    path = tmp_path_factory.mktemp("toy") / "toy.gguf"
    toys.write_toy(path, architecture, vocab="bytes", seed=3)
    with Model(path, chat_template=TEMPLATE) as model:
        exact = {"kv_type": "bf16", "exact": model.memory_type == "attention"}
        yield model, {**SIZES, **exact, **options}


@pytest.fixture
def ctx(opened: tuple[Model, dict[str, Any]]) -> Iterator[Context]:
    model, options = opened
    with Context(model, **options) as context:
        yield context
        context.audit()


def run(
    engine: Engine, *requests: Request, at: dict[int, Callable[[], object]] | None = None
) -> Any:
    """Return the results of requests by id; ``at`` has functions that are called before a step."""
    for request in requests:
        engine.add_request(request)
    results: dict[tuple[str, int], lb.Result] = {}
    for n in range(MOST_STEPS):
        if not engine.has_unfinished():
            return results
        (at or {}).get(n, int)()
        for event in engine.step():
            if event.result is not None:
                results[event.id, event.sample] = event.result
    raise AssertionError("the engine does not come to an end")


def check(opened: tuple[Model, dict[str, Any]], prompt: list[int], *results: lb.Result) -> None:
    """Compare the tokens' log-probabilities with those of the same text in a clean context."""
    model, options = opened
    with Context(model, **options) as clean:
        for result in results:
            assert result.error is None and result.tokens
            whole = [*prompt, *result.tokens]
            scored = clean.complete(whole, max_tokens=0, prompt_logprobs=0).prompt_logprobs
            assert scored is not None
            expected = [math.nan if s is None else s.logprob for s in scored[len(prompt) :]]
            seen = [produced.logprob for produced in result.emitted]
            drawn = [i for i, produced in enumerate(result.emitted) if produced.source != "forced"]
            np.testing.assert_allclose(
                np.array(seen)[drawn], np.array(expected)[drawn], atol=0.02, err_msg=str(result)
            )


@pytest.mark.parametrize("asked", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("n", [1, 4])
def test_an_answer_without_a_thought(
    opened: tuple[Model, dict[str, Any]], ctx: Context, asked: Any, n: int
) -> None:
    prompt = ctx.model.chat_tokens(asked)
    results = run(Engine(ctx), Request(asked, max_tokens=12, sampling=WARM, n=n, top_logprobs=1))
    assert len(results) == n
    check(opened, prompt, *results.values())


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (1, {}),
        (8, {"ending": " so"}),
        (8, {"n": 4}),
        (8, {"n": 4, "shares": True}),
        (8, {"n": 2, "grammar": lb.Grammar.from_regex("[a-z ]{60}")}),
        (None, {"n": 2}),
    ],
    ids=["1", "last words", "several", "shared", "grammar", "no budget"],
)
def test_an_answer_after_a_thought(
    opened: tuple[Model, dict[str, Any]], ctx: Context, budget: int | None, options: dict[str, Any]
) -> None:
    options = {"ending": "", "shares": False, **options}
    ending, shares = options.pop("ending"), options.pop("shares")
    choice = True if budget is None else budget
    prompt, thinking = plan_thinking(
        ctx.model, ctx.model.chat_tokens(LONG, enable_thinking=True), choice,
        ending=ending, shares=shares,
    )  # fmt: skip
    request = Request(
        prompt, thinking=thinking, max_tokens=40, sampling=WARM, top_logprobs=1, **options
    )
    results = run(Engine(ctx), request)
    assert len(results) == options.get("n", 1)
    check(opened, prompt, *results.values())


def test_a_thought_without_tokens_is_closed_at_once(
    opened: tuple[Model, dict[str, Any]], ctx: Context
) -> None:
    prompt = ctx.model.chat_tokens(LONG, enable_thinking=True)
    thinking = Thinking("<think>", "</think>", is_open=True, budget=0, close="\n</think>\n\n")
    request = Request(prompt, thinking=thinking, max_tokens=30, sampling=WARM, top_logprobs=1)
    (result,) = run(Engine(ctx), request).values()
    assert result.thought == "" and result.n_thought_tokens > 0
    check(opened, prompt, result)


def test_texts_that_lose_their_cells(opened: tuple[Model, dict[str, Any]], ctx: Context) -> None:
    """Texts that are preempted or parked, and then continue with their thought or their answer."""
    prompt, thinking = plan_thinking(
        ctx.model, ctx.model.chat_tokens(LONG, enable_thinking=True), 6
    )
    requests = [
        Request(
            prompt, id=str(i), thinking=thinking, max_tokens=40, top_logprobs=1,
            sampling=WARM.replace(seed=i),
        )
        for i in range(3)
    ]  # fmt: skip
    engine = Engine(ctx)

    def preempt() -> object:
        return core_of(ctx).scheduler.preempt()

    at: dict[int, Callable[[], object]] = dict.fromkeys(range(3, 30, 3), preempt)
    at[7], at[14] = lambda: engine.client.pause("0"), lambda: engine.client.resume("0")
    results = run(engine, *requests, at=at)
    check(opened, prompt, *results.values())


def test_a_prompt_whose_decode_was_stopped_is_read_again(
    opened: tuple[Model, dict[str, Any]], ctx: Context
) -> None:
    """Memory that cannot be cut then holds fewer tokens than the text had read."""
    prompt = ctx.model.chat_tokens(LONG)
    engine, decoder = Engine(ctx), ctx.decoder
    stopped: list[int] = []

    def around(decode: Callable[[int], int], n: int) -> int:
        code = decode(n)
        if decoder.n_decodes == start + 1 and not stopped:
            stopped.append(code)
            return -3  # as if it had failed after it had changed the memory
        return code

    engine.add_request(Request(prompt, max_tokens=6, sampling=WARM, top_logprobs=1))
    start = decoder.n_decodes
    with hooked(ctx, around):
        engine.step()
        with pytest.raises(DecodeError):
            engine.step()
    (result,) = run(engine).values()
    check(opened, prompt, result)


# -- steps without progress --------------------------------------------------------------------------


def test_texts_that_get_nowhere_end_with_an_error(
    toy: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known to cause it now, so one text is told that it has nothing to read."""
    with Context(toy, n_ctx=256, n_seq_max=2, n_threads=1, exact=True) as ctx:
        requests = [Request("Stuck" * 9, id="stuck"), Request("A king", id="other", max_tokens=9)]
        unread = Choice.unread
        monkeypatch.setattr(
            Choice, "unread", lambda text: [] if text.name == "stuck" else unread(text)
        )
        engine = Engine(ctx)
        with pytest.raises(DecodeError, match="make no progress"):
            run(engine, *requests)
        engine.close()
        assert ctx.usage().cells_used == 0


def test_a_time_limit_ends_a_call_that_decodes_nothing(toy: Model) -> None:
    """A call waits for a sequence, which a branch holds."""
    with (
        Context(toy, n_ctx=256, n_seq_max=1, n_threads=1, exact=True) as ctx,
        lb.Branch.start(ctx, "A king"),
    ):
        engine = Engine(ctx, wait_s=math.inf)
        with pytest.raises(DecodeInterruptedError), ctx.time_limit(0.1):
            engine.generate(["The wolf"])
