"""Thoughts: the answer follows the thought's tokens, whatever else runs, is drafted or is shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
from conftest import DATA, opened
from drafts import counting
from engine_runs import heard
from turn_shapes import SHAPES

import llamabranch as lb
from llamabranch import Context, Engine, Model, Request
from llamabranch.generation.output import Produced
from llamabranch.generation.thought import ThoughtBuffer
from llamabranch.model.thoughts import Thinking, plan_thinking

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
OPEN = TEMPLATE.replace("[assistant] {% if", "[assistant] <think>\n{% if")
ASKED = [{"role": "user", "content": "Once upon a time there was a bear."}]
# The bundled model writes this soon, so a thought ends by itself.
SHORT = Thinking(start="", end=" and", is_open=True, close=" and", tail="")
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
}


def thinking_model(template: str = TEMPLATE) -> Model:
    return Model(DATA / "tale-target-q8_0.gguf", chat_template=template)


@pytest.fixture(scope="module")
def thinker() -> Iterator[Model]:
    with thinking_model() as model:
        yield model


@pytest.fixture
def ctx(thinker: Model) -> Iterator[Context]:
    yield from opened(thinker, exact=True)


def after(ctx: Context, result: lb.Result, prompt: Sequence[int], **settings: Any) -> str:
    """Return the text that follows the thought of a result, generated alone."""
    tokens = [*prompt, *result.tokens[: result.n_thought_tokens]]
    return str(ctx.complete(tokens, seed=result.seed, drafter=None, **settings).text)


def is_number(result: lb.Result[Any]) -> bool:
    """Return whether a result is what ``NUMBER`` describes."""
    return isinstance(result.parsed["n"], int)


def opened_prompt(ctx: Context) -> list[int]:
    prompt = ctx.model.chat_tokens(ASKED, enable_thinking=True)
    return plan_thinking(ctx.model, prompt, True)[0]


def test_a_budget_ends_the_thought_and_the_answer_follows_its_tokens(ctx: Context) -> None:
    """A schema and stop strings count from the answer on; events and numbers have both parts."""
    asked: dict[str, Any] = {"thinking": 12, "max_tokens": 40, "seed": 5}
    result = ctx.chat(ASKED, top_logprobs=2, **asked)
    n = result.n_thought_tokens
    written = ctx.model.detokenize(result.tokens[:n])
    assert written.endswith("\n</think>\n\n")
    assert result.thought == written.removesuffix("\n</think>\n\n").strip() != ""
    assert len(ctx.model.tokenize(written, add_special=False)) >= 12
    assert (len(result.tokens), result.finish_reason) == (40, "length")
    assert result.text == after(ctx, result, opened_prompt(ctx), max_tokens=40 - n)

    assert result.logprobs is not None
    marks = [(token.token, token.is_thought) for token in result.logprobs]
    assert marks == [(token, i < n) for i, token in enumerate(result.tokens)]
    body: Any = result.to_openai()
    assert body["choices"][0]["message"]["reasoning_content"] == result.thought
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": n}
    assert len(body["choices"][0]["logprobs"]["content"]) == 40 - n
    (said,) = heard(ctx.chat(ASKED, **asked, stream=True)).values()
    assert (said.thought.strip(), said.text) == (result.thought, result.text)

    number = ctx.chat(ASKED, json_schema=NUMBER, show_schema=False, **asked)
    assert number.thought == result.thought
    assert is_number(number)
    word = result.thought.split()[1]
    stopped = ctx.chat(ASKED, stop=word, **asked)
    assert word in stopped.thought
    assert word not in stopped.text
    last = ctx.chat(ASKED, thinking_end=" Enough.", **asked)
    assert ctx.model.detokenize(last.tokens[: last.n_thought_tokens]).endswith(
        " Enough.\n</think>\n\n"
    )
    assert "Enough" not in last.thought
    cut = ctx.chat(ASKED, thinking=50, max_tokens=10, seed=5)
    assert (cut.text, cut.finish_reason) == ("", "length")
    assert (
        cut.thought == cut.message["reasoning_content"] == ctx.model.detokenize(cut.tokens).strip()
    )
    assert cut.n_thought_tokens == len(cut.tokens) == 10


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("drafter", [None, "auto"])
def test_texts_of_one_thought_answer_as_if_they_were_alone(
    ctx: Context, seed: int, drafter: Any
) -> None:
    options: dict[str, Any] = {"thinking": 10, "max_tokens": 30, "seed": seed}
    alone = ctx.chat(ASKED, **options, drafter=None)
    shared = ctx.chat(ASKED, **options, n=5, share="thought", drafter=drafter)
    assert {choice.thought for choice in shared.choices} == {alone.thought}
    assert shared.choices[0].tokens == alone.tokens
    prompt = opened_prompt(ctx)
    for choice in shared.choices:
        assert 0 <= choice.cached <= choice.num_prompt_tokens  # its thought is no prompt
        left = 30 - choice.n_thought_tokens
        assert choice.text == after(ctx, choice, prompt, max_tokens=left)
    assert len({choice.text for choice in shared.choices}) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"grammar": lb.Grammar.from_json_schema(NUMBER)},
        {"constraint": lambda text: True},
        {"min_tokens": 3},
        {"top_logprobs": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_shared_thought_with_answers_that_need_a_sequence_each(
    ctx: Context, options: dict[str, Any]
) -> None:
    prompt, thinking = plan_thinking(ctx.model, ctx.model.chat_tokens(ASKED), 10, shares=True)
    request = Request(prompt, n=4, thinking=thinking, max_tokens=40, **options)
    results = Engine(ctx, seed=2).generate([request])
    assert len(results) == 4
    assert len({result.thought for result in results}) == 1
    for result in results:
        assert result.error is None
        assert "grammar" not in options or is_number(result)
        assert len(result.tokens) - result.n_thought_tokens >= options.get("min_tokens", 0)


def test_a_shared_thought_is_decoded_once(ctx: Context) -> None:
    totals = []
    for share in (None, "thought"):
        if ctx.prefix_cache is not None:
            ctx.prefix_cache.clear()
        with counting(ctx) as counts:
            ctx.chat(ASKED, thinking=64, max_tokens=80, seed=1, n=4, share=share, drafter=None)
        totals.append(sum(counts))
    assert totals[1] < totals[0] / 2


def test_a_thought_that_ends_by_itself(ctx: Context) -> None:
    prompt = ctx.model.prompt_tokens("Once upon a time there was a bear.")
    plain = ctx.complete(prompt, max_tokens=60, seed=3, drafter=None)
    assert " and" in plain.text
    for drafter in (None, "auto"):
        engine = Engine(ctx, drafter)
        request = Request(prompt, thinking=SHORT, max_tokens=60, sampling=lb.SamplingParams(seed=3))
        (result,) = engine.generate([request])
        thought, _, answer = plain.text.partition(" and")
        assert result.thought == thought.strip()
        assert result.text == answer
        assert result.tokens == plain.tokens


def test_an_answer_that_does_not_think_is_what_it_was(ctx: Context) -> None:
    prompt = ctx.model.chat_tokens(ASKED)
    plain = ctx.complete(prompt, max_tokens=20, seed=4, drafter=None)
    result = ctx.chat(ASKED, max_tokens=20, seed=4, drafter=None)
    assert (result.thought, result.n_thought_tokens) == ("", 0)
    assert result.tokens == plain.tokens
    # Switched off, the template's empty thought is part of the prompt.
    off = ctx.chat(ASKED, thinking=False, max_tokens=20, seed=4)
    closed = ctx.model.chat_tokens(ASKED, enable_thinking=False)
    assert off.num_prompt_tokens == len(closed)
    assert off.text == ctx.complete(closed, max_tokens=20, seed=4, drafter=None).text


def test_a_prompt_that_ends_in_a_thought_is_closed_where_none_is_wanted() -> None:
    without_switch = OPEN.replace("enable_thinking is defined and not enable_thinking", "false")
    with thinking_model(without_switch) as model, lb.Context(model, n_ctx=512, n_threads=1) as ctx:
        form = model.turn_format
        assert form.starts_in_thought
        prompt, thinking = plan_thinking(model, model.chat_tokens(ASKED), False)
        assert thinking is None
        assert model.detokenize(prompt).rstrip().endswith("</think>")
        result = ctx.chat(ASKED, thinking=False, max_tokens=8, seed=1)
        assert result.thought == ""
        assert result.text


CLOSED = "\n</think>\n\n"


@pytest.mark.parametrize(
    ("budget", "script", "thought", "text"),
    [
        (3, "abc<think>defg", "abc", "defg"),
        (3, "abc <think>defg<think>h", "abc", "defg<think>h"),
        (3, "abc<think><think>d", "abc", "d"),
        (40, "ab</think> <think>cd</think>ef", "ab\n\ncd", "ef"),
        (3, "abc<thing>d", "abc", "<thing>d"),
        (3, "abc<thi", "abc", "<thi"),
        (None, "<think>\nI count: <b>1</b>, 2.</think>It is", "I count: <b>1</b>, 2.", "It is"),
        *((None, answer, "", answer) for answer in ("<thinker> is", "Hello", " <b>", "{")),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_thought_that_is_opened_again_is_no_answer(
    toy: Model, budget: int | None, script: str, thought: str, text: str, n: int
) -> None:
    """The model is made to write a script, one byte a token, whatever is forced between."""
    with Model(toy.path, chat_template=TEMPLATE) as model:
        prompt, thinking = plan_thinking(model, model.chat_tokens(ASKED), budget)
        eog = next(iter(model.eog_tokens))

        def draw(ids: Any, logits: Any) -> Any:
            written = model.detokenize(list(ids)[len(prompt) :])
            written = written.replace(CLOSED, "").replace("</think>\n\n", "</think>")
            following = model.tokenize(script[len(written) :], add_special=False)
            logits[:] = -1e9
            logits[[*following, eog][0]] = 0
            return logits

        request = Request(
            prompt, n=n, thinking=thinking, max_tokens=90,
            sampling=lb.SamplingParams(logits_processor=draw),
        )  # fmt: skip
        with Context(model, n_ctx=1024, n_threads=1) as ctx:
            texts = heard(Engine(ctx).stream([request]))
            assert len(texts) == n
            for said in texts.values():
                assert said.result is not None
                message = {"role": "assistant", "content": text, "reasoning_content": thought}
                assert {"reasoning_content": "", **said.result.message} == message
                assert (said.thought.strip(), said.text) == (thought, text)


@pytest.mark.parametrize("shape", [*SHAPES, "think", "think, open"])
def test_a_stream_has_each_token_once(shape: str) -> None:
    """Also where the template may think, and the model does not: the answer is then drawn again."""
    template = {"think": TEMPLATE, "think, open": OPEN, **SHAPES}[shape]
    with thinking_model(template) as model, Context(model, n_ctx=512, n_threads=1) as ctx:
        for n, seed, limit in ((1, 1, 12), (3, 2, 12), (1, 3, 1)):
            stream = ctx.chat(ASKED, n=n, max_tokens=limit, seed=seed, stream=True)
            assert len(heard(stream)) == n
            with lb.Chat(ctx, max_tokens=limit, seed=seed) as chat:
                answer = chat.send(ASKED[0]["content"])
                said = [event for event in answer if event.token >= 0]
                spoken = [event.token for event in said if not event.is_thought]
                assert spoken == answer.tokens[len(answer.tokens) - len(spoken) :]
                assert len(said) <= len(answer.tokens)
                assert "".join(event.text for event in said) == answer.text


def test_a_model_that_does_not_think_says_so(target: Model) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    with (
        Model(target.path, chat_template=template) as model,
        lb.Context(model, n_ctx=256, n_threads=1) as ctx,
    ):
        assert ctx.chat(ASKED, thinking=False, max_tokens=4).n_thought_tokens == 0
        with pytest.raises(lb.errors.UnsupportedError, match="does not think"):
            ctx.chat(ASKED, thinking=True)


# -- the buffer ------------------------------------------------------------------------------------


def buffered(
    model: Model, pieces: Sequence[str], thinking: Thinking, limit: int | None = None
) -> tuple[ThoughtBuffer, str]:
    """Return a buffer that has taken pieces, one token each, up to its end, and what it has shown."""
    buffer, shown = ThoughtBuffer(model, thinking, limit), ""
    for i, piece in enumerate(pieces):
        if buffer.finish_reason is None:
            produced = buffer.add(Produced(10 + i, piece, False, 0.0, 0.0))
            shown += "" if produced is None else produced.text
    return buffer, shown


TAGGED = Thinking("<think>", "</think>", is_open=False, close="\n</think>\n\n", tail="\n\n")
WRITTEN = "<think>\nI count: <b>1</b>, 2.\n</think>\n\nThe answer"


def test_however_a_text_is_cut_the_thought_is_the_same(target: Model) -> None:
    for size in range(1, 12):
        pieces = [WRITTEN[i : i + size] for i in range(0, len(WRITTEN), size)]
        buffer, shown = buffered(target, pieces, TAGGED)
        assert shown == "I count: <b>1</b>, 2."
        assert buffer.ended is not None
        assert buffer.ended.text == shown
        ends = [*accumulate(map(len, pieces))]
        kept = WRITTEN[: ends[buffer.ended.n_kept - 1]]
        whole = kept + target.detokenize(buffer.ended.forced)
        assert whole == WRITTEN[: WRITTEN.index("The answer")]


def test_a_character_is_not_cut_by_the_budget(toy: Model) -> None:
    tokens = toy.tokenize("ab\N{BEAR FACE}", add_special=False)
    thinking = Thinking("", "</t>", is_open=True, budget=4, close="</t>")
    buffer, decoder = ThoughtBuffer(toy, thinking, None), lb.model.TextDecoder(toy)
    for token in tokens[:4]:
        buffer.add(Produced(token, decoder.feed(token), False, 0.0, 0.0))
    assert buffer.finish_reason == "length"
    assert buffer.ended is not None
    assert (buffer.ended.text, buffer.ended.n_kept) == ("ab", 2)
    assert toy.detokenize(buffer.ended.forced) == "</t>"


def test_tags_that_are_control_tokens_have_no_text_in_the_thought(toy: Model) -> None:
    end = toy.detokenize([0], special=True)
    assert end
    thinking = Thinking("", end, is_open=True, close=end)
    buffer = ThoughtBuffer(toy, thinking, None)
    for token in (*toy.tokenize("ab", add_special=False), 0):
        buffer.add(Produced(token, toy.detokenize([token]), False, 0.0, 0.0))
    assert buffer.ended == ("ab", 3, [])
