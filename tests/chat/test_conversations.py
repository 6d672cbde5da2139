"""`Chat`: answers are those of branches made by hand, and only new tokens are evaluated."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import toys
from conftest import DATA
from decodes import hooked
from drafts import Eager, counting
from rounding import rounding

import llamabranch as lb
from llamabranch import Branch, Chat, Context
from llamabranch.chat.conversation import Exchange, drawn
from llamabranch.model.text import n_common

# A template that shortens earlier answers when a new turn comes: only the last answer is complete.
CHANGING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index < loop.length - 1 %}{{ m.content[:4] }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}<assistant>"
)
TRIMMING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PLAIN: dict[str, Any] = {"seed": 1, "max_tokens": 5, "logit_bias": {1: -1e30}}
MEMORIES: dict[str, tuple[Callable[..., Path], bool]] = {
    "llama": (toys.write_llama, True),
    "gemma3, full window": (toys.write_gemma3, True),
    "gemma3": (toys.write_gemma3, False),
    "mamba": (toys.write_mamba, True),
    "lfm2": (toys.write_lfm2, True),
    "qwen35": (partial(toys.write_toy, architecture="qwen35"), True),
}


def by_hand(ctx: Context, answer: lb.chat.Answer, chat: Chat) -> list[int]:
    """Return the tokens of the same answer by a branch that reads the prompt."""
    params = chat.sampling.replace(seed=answer.exchange.seed)
    with Branch.start(ctx, answer.prompt, sampling=params) as branch:
        for _ in branch.generate(chat.options["max_tokens"], chat.options.get("stop", ())):
            pass
        return branch.generated_tokens


@contextmanager
def toy_contexts(
    name: str,
    folder: Path,
    n_seq_max: int,
    template: str = toys.CHAT_TEMPLATE,
    n_ctx: int = 2048,
    **more: Any,
) -> Iterator[tuple[Context, Context]]:
    """Open two contexts of a small model with this kind of memory; the first is audited at the end."""
    write, swa_full = MEMORIES[name]
    path = write(folder / "toy.gguf", vocab="bytes", **more)
    options = lb.ContextParams(
        n_ctx=n_ctx, n_seq_max=n_seq_max, n_threads=1, kv_type="f32", swa_full=swa_full
    )
    with (
        lb.Model(path, chat_template=template) as toy,
        Context(toy, options) as context, Context(toy, options) as other,
    ):  # fmt: skip
        yield context, other
        context.audit()


def n_distinct(texts: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens of all texts, counting shared beginnings once."""
    return len({tuple(text[: i + 1]) for text in texts for i in range(len(text))})


@pytest.fixture(scope="module")
def model() -> Iterator[lb.Model]:
    """The bundled target of 4,096 tokens, with a template."""
    path = DATA / "tale-target-q8_0.gguf"
    with lb.Model(path, chat_template=toys.CHAT_TEMPLATE) as opened:
        yield opened


@pytest.fixture
def ctx(model: lb.Model) -> Iterator[Context]:
    with Context(model, n_ctx=2048, n_seq_max=32, n_threads=1, exact=True) as context:
        yield context
        context.audit()


@contextmanager
def talking(
    model: lb.Model, n_ctx: int = 2048, n_seq_max: int = 8, drafter: Any = "auto", **settings: Any
) -> Iterator[Chat]:
    """Open a chat on a context of its own, which is audited at the end."""
    options = lb.ContextParams(n_ctx=n_ctx, n_seq_max=n_seq_max, n_threads=1, exact=True)
    with Context(model, options) as context, Chat(context, drafter=drafter, **settings) as chat:
        yield chat
        context.audit()


def n_evaluated(chat: Chat) -> int:
    return chat.stats.evaluated + chat.stats.generated


def ten_turns(chat: Chat) -> list[lb.chat.Answer]:
    """Hold a conversation of ten turns, one of them retried and one edited; return its answers."""
    answers = [chat.send(f"Tell me of the {who}.").finish() for who in ("king", "queen", "fox")]
    answers.append(chat.retry().finish())
    answers += [chat.send(f"Then came {who}.").finish() for who in ("a cat", "a dog", "a wolf")]
    answers.append(chat.edit(5, "Then came a bear.").finish())
    answers += [chat.send(f"And on day {day}?").finish() for day in range(1, 5)]
    stats = chat.stats
    n_read = stats.evaluated + stats.cached + stats.generated
    assert n_read == sum(len(answer.prompt) + len(answer.tokens) for answer in answers)
    return answers


def test_answers_are_drafted_where_that_pays_and_stay_the_same(ctx: Context) -> None:
    texts = []
    drafts = lb.SpeculativeConfig(draft_k=4)
    for drafter in (None, Eager(), "auto"):
        with Chat(
            ctx, drafter=drafter, config=drafts, temperature=0, max_tokens=40, seed=1
        ) as chat:
            texts.append([chat.send("The fox, the fox, the fox.").finish().text for _ in range(2)])
            drafted = chat.engine.stats.speculative.num_draft_tokens
        assert (drafted > 0) == (drafter is not None)
    assert texts[0] == texts[1] == texts[2]


def test_undo_fork_and_switch_need_no_decode_and_retry_none_for_its_prompt(ctx: Context) -> None:
    with Chat(ctx, drafter=None, seed=1, max_tokens=8) as chat:
        first = chat.send("One day").finish()
        with counting(ctx) as counts:
            again = chat.retry()
            assert counts == []
            again.finish()
        assert sum(counts) == len(again.tokens)
        assert again.exchange.seed != first.exchange.seed
        with counting(ctx) as counts:
            assert chat.undo() == "One day"
            assert chat.messages == []
            chat.switch(1)
            assert chat.fork() == 3
        assert counts == []
        with counting(ctx) as counts:
            chat.undo()
            answer = chat.send("One day").finish()
        assert sum(counts) == len(answer.tokens)


def in_thread(call: Callable[[], object]) -> BaseException | None:
    """Run a call in another thread to its end; return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_nothing_changes_a_chat_while_another_thread_answers(ctx: Context, tmp_path: Path) -> None:
    """Not while it reads the prompt and not while it generates. Reading its properties is allowed."""
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: chat.send("And?").finish(), "retry": lambda: chat.retry(),
        "edit": lambda: chat.edit(1, "No."), "undo": lambda: chat.undo(), "fork": lambda: chat.fork(),
        "switch": lambda: chat.switch(1), "set": lambda: chat.set(temperature=1.0),
        "save": lambda: chat.save(tmp_path / "chat"), "close": lambda: chat.close(),
        "system": lambda: setattr(chat, "system", "Be kind."),
    }  # fmt: skip
    refused: list[tuple[str, BaseException | None]] = []

    def around(decode: Callable[[int], int], n: int) -> int:
        if len(refused) < 2 * len(calls):
            refused.extend((name, in_thread(call)) for name, call in calls.items())
            assert in_thread(lambda: (chat.messages, chat.tree(), chat.stats, repr(chat))) is None
        return decode(n)

    chat = Chat(ctx, drafter=None, seed=1, max_tokens=6)
    with hooked(ctx, around):
        answer = chat.send("Who is the king?").finish()
    assert len(refused) == 2 * len(calls)
    for name, error in refused:
        assert isinstance(error, lb.errors.BranchStateError), name
        assert "in use by another thread" in str(error)
    assert len(answer.tokens) == 6
    assert [exchange.answer for exchange in chat.exchanges] == [answer.text]
    assert in_thread(calls["send"]) is None  # afterwards the other thread may have it
    assert len(chat.exchanges) == 2
    chat.close()


def test_a_message_ends_a_running_answer(ctx: Context) -> None:
    """Between two of its tokens, in any thread."""
    chat = Chat(ctx, drafter=None, seed=1, max_tokens=6)
    first = chat.send("Who is the king?")
    next(first)
    assert in_thread(lambda: chat.send("And the queen?").finish()) is None
    assert list(first) == []
    assert [exchange.n_tokens for exchange in chat.exchanges] == [1, 6]
    third = chat.send("And?")
    next(third)
    chat.send("Well?")
    assert list(third) == []
    chat.close()


def test_a_broken_off_answer_stays_and_an_empty_one_is_taken_back(ctx: Context) -> None:
    with Chat(ctx, seed=1, max_tokens=30) as chat:
        answer = chat.send("One day")
        next(answer), next(answer)
        assert chat.exchanges[-1].n_tokens == 2
        assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
        assert answer.text.split()[0] in chat.tree()
        answer.close()
        assert (len(answer.tokens), answer.finish_reason) == (2, None)
        assert chat.messages[-1] == {"role": "assistant", "content": answer.text}
        chat.send("Go on.").close()  # before its first token
        assert chat.send("Go on!").finish().tokens
        assert [exchange.user for exchange in chat.exchanges] == ["One day", "Go on!"]
        assert [*answer] == []


def where(chat: Chat) -> tuple[int, int, list[str]]:
    """Return the current branch, how many branches there are, and the messages of the current one."""
    n_branches = len(re.findall(r"branch \d", chat.tree()))
    return chat.current, n_branches, [exchange.user for exchange in chat.exchanges]


def fail(_: object) -> None:
    raise ValueError("the user's own")


BEGINNINGS: dict[str, Callable[[Chat], lb.chat.Answer]] = {
    "send": lambda chat: chat.send("And then?"),
    "retry": lambda chat: chat.retry(),
    "edit": lambda chat: chat.edit(1, "One night"),
}


@pytest.mark.parametrize("meddles", [False, True], ids=["", "meddles"])
@pytest.mark.parametrize("begin", BEGINNINGS)
def test_an_answer_that_ends_before_its_first_token_leaves_the_chat_as_it_was(
    begin: str, meddles: bool, ctx: Context
) -> None:
    """Closed, interrupted or failed; also if a function that it calls has tried to change the chat."""

    def meddle(progress: object) -> None:
        for change in (chat.fork, chat.undo, chat.close, lambda: chat.send("No."), again.close):
            with pytest.raises(lb.errors.BranchStateError, match="a call that has not returned"):
                change()
        fail(progress)

    with Chat(ctx, drafter=None, seed=1, max_tokens=4) as chat:
        chat.send("One day").finish()
        chat.send("What was it?")  # nobody reads its answer
        chat.fork()
        before = where(chat)
        assert before == (2, 2, ["One day", "What was it?"])
        for _ in range(2):
            again = BEGINNINGS[begin](chat)
            assert where(chat) != before
            again.close()
            assert where(chat) == before
            again = BEGINNINGS[begin](chat)
            ctx.interrupt()
            with pytest.raises(lb.errors.DecodeInterruptedError):
                list(again)
            assert where(chat) == before
            chat.set(on_prompt_progress=meddle if meddles else fail)
            again = BEGINNINGS[begin](chat)
            with pytest.raises(ValueError, match="the user's own"):
                list(again)
            chat.set(on_prompt_progress=None)
            assert (where(chat), [*again]) == (before, [])
            chat.send("Who?")
            chat.close()
            assert where(chat) == before
        number = BEGINNINGS[begin](chat).finish()
        assert where(chat)[0] == (2 if begin == "send" else 3)
        assert chat.exchanges[-1].answer == number.text


def test_an_answer_goes_on_after_a_function_that_it_calls_has_tried_to_change_the_chat(
    ctx: Context,
) -> None:
    def meddle(_: object) -> None:
        with pytest.raises(lb.errors.BranchStateError):
            chat.send("No.")

    with Chat(ctx, drafter=None, seed=1, max_tokens=4, on_prompt_progress=meddle) as chat:
        first = chat.send("Who is the king?")
        next(first)
        chat.set(on_prompt_progress=None)
        chat.send("And the queen?").finish()  # ends it
        assert [*first] == []
        assert [exchange.n_tokens for exchange in chat.exchanges] == [1, 4]


@pytest.mark.parametrize("name", MEMORIES)
def test_a_function_that_a_chat_calls_while_it_reads_cannot_change_it(
    name: str, tmp_path: Path
) -> None:
    """Memory that cannot be cut reads a prompt before there is an answer."""
    seen: list[object] = []

    def meddle(progress: object) -> None:
        seen.append(progress)
        with pytest.raises(lb.errors.BranchStateError):
            chat.retry()

    with (
        toy_contexts(name, tmp_path, 8, weights="f32") as (context, _),
        Chat(context, drafter=None, **PLAIN) as chat,
    ):
        chat.send("ab").finish()
        chat.set(on_prompt_progress=meddle)
        chat.edit(1, "And what was it that they all saw there?").finish()
        assert seen and where(chat)[:2] == (2, 2)


def test_a_message_whose_answer_nobody_reads_stays_without_one(ctx: Context) -> None:
    with Chat(ctx, drafter=None, seed=1, max_tokens=4) as chat:
        unread = chat.send("I live in Oslo.")
        last = chat.send("Where do I live?").finish()
        assert [message["role"] for message in chat.messages] == ["user", "user", "assistant"]
        assert "Oslo" in ctx.model.detokenize(last.prompt)
        assert (unread.text, [*unread]) == ("", [])
        assert n_evaluated(chat) == len(last.prompt) + len(last.tokens)
        chat.send("What is taken back?")
        assert chat.undo() == "What is taken back?"
        chat.send("What is answered?")
        assert chat.retry().text
        assert chat.messages[-2]["content"] == "What is answered?"
        assert len(chat.exchanges) == 3


def test_text_of_an_answer_that_nobody_iterates_over_is_all_of_it(ctx: Context) -> None:
    texts = []
    for read in (lambda answer: answer.text, lambda answer: "".join(t.text for t in answer)):
        with Chat(ctx, drafter=None, seed=1, max_tokens=8) as chat:
            answer = chat.send("One day")
            assert repr(answer).startswith("<Answer '', 0 tokens")
            texts.append(read(answer))
            assert answer.finish_reason is not None
            assert chat.messages[-1]["content"] == answer.text == texts[-1]
    assert texts[0] == texts[1] != ""
    with Chat(ctx, drafter=None, seed=1, max_tokens=8) as chat:
        answer = chat.send("One day")
        assert next(answer).text == answer.text
        assert len(answer.tokens) == 1


def test_settings_are_changed_for_the_next_answer(ctx: Context) -> None:
    with Chat(ctx, seed=1, max_tokens=6) as chat:
        chat.send("One day").finish()
        chat.set(temperature=0.0, max_tokens=3, seed=None)
        assert chat.sampling.seed is not None
        greedy = [chat.retry().finish() for _ in range(2)]
        assert greedy[0].tokens == greedy[1].tokens
        assert len(greedy[0].tokens) == 3
        chat.system = "Be brief."
        assert chat.messages[0] == {"role": "system", "content": "Be brief."}


def test_wrong_options_numbers_and_messages_change_nothing(ctx: Context, target: lb.Model) -> None:
    with Chat(ctx, seed=1, max_tokens=4) as chat:
        before = chat.sampling, chat.options
        with pytest.raises(lb.ConfigError, match="temprature"):
            chat.set(temprature=1, top_k=3)  # type: ignore[call-arg]
        assert (chat.sampling, chat.options) == before
        for act in (chat.retry, chat.undo, lambda: chat.edit(1, "x"), lambda: chat.switch(2)):
            with pytest.raises(lb.errors.UsageError, match="there is no") as caught:
                act()
            assert caught.value.hint
        with pytest.raises(lb.ConfigError, match="must be text"):
            chat.send(3)  # type: ignore[arg-type]
        with pytest.raises(lb.errors.CacheFullError, match="the prompt has"):
            chat.send("long " * 3000)
        assert chat.messages == []
    with pytest.raises(lb.ConfigError, match="ctx must be"):
        Chat("tale-target")  # type: ignore[arg-type]
    with Context(target, n_ctx=256, n_threads=1, exact=True) as context:
        with pytest.raises(lb.errors.UnsupportedError, match="no chat template") as refused:
            Chat(context)
        assert "chat_template=" in (refused.value.hint or "")


def test_a_conversation_of_any_length_is_drawn() -> None:
    last = Exchange(None, "")
    for _ in range(1200):  # more than Python recurses
        last = Exchange(last, "Hello")
    assert len(drawn({1: last}, 1).split("\n")) == 1201


# -- a full context --------------------------------------------------------------------------------


def test_conversation_beyond_the_context_loses_whole_turns_and_keeps_the_system_message(
    model: lb.Model, other_ctx: Context
) -> None:
    with talking(model, 256, seed=2, max_tokens=24, system="Be kind.") as chat:
        cuts = []
        for day in range(12):
            answer = chat.send(f"What did the king do on day {day}?").finish()
            seen = model.detokenize(answer.prompt, special=True)
            cuts.append(chat.n_cut)
            assert "Be kind." in seen
            assert [f"on day {n}?" in seen for n in range(day + 1)] == [
                n >= chat.n_cut for n in range(day + 1)
            ]
            assert by_hand(other_ctx, answer, chat) == answer.tokens
        assert cuts[0] == 0
        assert cuts == sorted(cuts)
        assert 3 < cuts[-1] < 12
        assert len(chat.exchanges) == 12
        n_cut = cuts[-1]
        for _ in range(2):  # a retry drops no further turns
            assert chat.n_cut == n_cut
            chat.retry().finish()
        chat.send("And then?").close()  # taken back, as it has no token
        assert chat.n_cut == n_cut


def test_what_is_taken_back_or_edited_sees_what_was_seen_there(model: lb.Model) -> None:
    bias = dict.fromkeys(model.eog_tokens, -1e30)
    with talking(model, 256, 8, None, seed=2, max_tokens=24, logit_bias=bias) as chat:
        answers = [chat.send(f"What did they do on day {day}?").finish() for day in range(7)]
        cuts = [answer.exchange.n_cut for answer in answers]
        assert cuts[3] < 3 < cuts[-1] == chat.n_cut
        with counting(chat.ctx) as counts:
            again = chat.retry()
        assert (again.prompt, counts) == (answers[-1].prompt, [])
        again.close()
        chat.edit(3, answers[2].exchange.user)
        assert chat.n_cut == cuts[2]
        chat.switch(1)
        for _ in range(4):
            chat.undo()
        assert chat.n_cut == cuts[2]
        assert chat.send(answers[3].exchange.user).finish().prompt == answers[3].prompt


def test_answer_ends_where_the_context_does(model: lb.Model) -> None:
    bias = dict.fromkeys(model.eog_tokens, -1e30)
    with talking(model, 256, 4, seed=2, logit_bias=bias) as chat:
        for _ in range(3):  # the others make room for each
            answer = (chat.retry() if chat.exchanges else chat.send("One day")).finish()
            assert answer.finish_reason == "capacity"
            assert len(answer.prompt) + len(answer.tokens) in (256, 257)


@pytest.mark.parametrize("n_seq_max", [32, 1, 2, 3])
def test_few_sequences_cost_evaluations_and_no_text(
    model: lb.Model, other_ctx: Context, n_seq_max: int
) -> None:
    """Answers are those of branches made by hand."""
    params = lb.SamplingParams(repeat_penalty=1.1, dry_multiplier=0.5, temperature=0.9)
    with talking(model, 1024, n_seq_max, sampling=params, seed=5, max_tokens=8) as chat:
        for answer in ten_turns(chat):
            assert by_hand(other_ctx, answer, chat) == answer.tokens


def test_others_get_sequences_that_a_chat_keeps_turns_in(
    model: lb.Model, other_ctx: Context
) -> None:
    with talking(model, seed=1, max_tokens=5) as chat:
        context = chat.ctx
        for i in range(6):
            chat.send(f"hi {i}").finish()
        n_used = context.n_seq_max - context.n_seq_free
        assert n_used == 0  # its turns are in the prefix cache
        assert len(context.complete(["One", "day"], n=2, max_tokens=3, seed=1)) == 2
        with Chat(context, seed=2, max_tokens=5) as second:
            for talk in (second, chat) * 3:
                answer = talk.send("and you?").finish()
                assert by_hand(other_ctx, answer, talk) == answer.tokens
        running = chat.send("Tell me more.")
        next(running)
        branches = [Branch.start(context, "One day") for _ in range(7)]
        with pytest.raises(lb.errors.SequencesExhaustedError):  # the answer stays
            Branch.start(context, "One day")
        assert by_hand(other_ctx, running.finish(), chat) == running.tokens
        for branch in branches:
            branch.prune()


@pytest.mark.parametrize("name", MEMORIES)
def test_chats_that_begin_alike_read_their_beginning_once(name: str, tmp_path: Path) -> None:
    """The last logits of a prompt are kept too, so that an equal one needs no decode at all."""
    document = "Once upon a time there was a king. " * 8
    opened = toy_contexts(name, tmp_path, 8, weights="f32")
    with opened as (context, _), contextlib.ExitStack() as stack:
        chats = [
            stack.enter_context(Chat(context, drafter=None, system=document, **PLAIN))
            for _ in range(3)
        ]
        with counting(context) as counts:
            answers = [chat.send("Who was it?").finish() for chat in chats]
        assert sum(counts) <= len(answers[0].prompt) + sum(len(each.tokens) for each in answers)
        assert answers[0].tokens == answers[1].tokens == answers[2].tokens
        chats[0].send("And then?").finish()
        with counting(context) as counts:
            again = chats[0].edit(1, "Who was it?").finish()
        assert again.prompt == answers[0].prompt and sum(counts) <= len(again.tokens)


def test_an_interrupted_answer_can_be_closed_at_its_last_event(tmp_path: Path) -> None:
    """The interrupt's exception comes after it; ``close`` does not raise it."""
    opened = toy_contexts("llama", tmp_path, 1, weights="f32")
    with opened as (context, _), Chat(context, drafter=None, **PLAIN) as chat:
        answer = chat.send("Who was the king of old?")
        next(event for event in answer if event.text)
        context.interrupt()
        assert next(event for event in answer if event.result is not None)
        answer.close()
        assert answer.exchange.is_answered and answer.finish_reason is None


@pytest.mark.parametrize("name", MEMORIES)
def test_message_that_is_interrupted_leaves_what_was_read_before_it(
    name: str, tmp_path: Path
) -> None:
    """Even if it was read into the only sequence, which the last turn had before."""
    opened = toy_contexts(name, tmp_path, 1, weights="f32")
    with opened as (context, _), Chat(context, drafter=None, **PLAIN) as chat:
        first = chat.send("Who was the king of old?").finish()
        context.interrupt()
        with pytest.raises(lb.errors.DecodeInterruptedError):
            chat.send("And then?").finish()
        assert [exchange.user for exchange in chat.exchanges] == ["Who was the king of old?"]
        with counting(context) as counts:
            again = chat.retry().finish()
        assert again.prompt == first.prompt and sum(counts) <= 1 + len(again.tokens)


def test_a_chat_keeps_its_turns_whatever_the_context_was_opened_with(model: lb.Model) -> None:
    options: list[dict[str, Any]] = [
        {"prefix_cache": False}, {"prefix_cache": True}, {"kv_unified": False},
    ]  # fmt: skip
    for more in options:
        with Context(model, n_ctx=2048, n_seq_max=4, n_threads=1, **more) as context:
            before = context.prefix_cache
            with Chat(context, drafter=None, seed=1, max_tokens=5) as chat:
                assert before in (None, context.prefix_cache)
                first = chat.send("One day").finish()
                with counting(context) as counts:
                    second = chat.send("And then?")
                assert sum(counts) <= len(second.prompt) - len(first.prompt) - 4, more
            context.audit()


# -- memories and templates ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", [toys.CHAT_TEMPLATE, CHANGING, TRIMMING], ids=["chatml", "changing", "trimming"]
)
@pytest.mark.parametrize("name", MEMORIES)
def test_every_memory_and_template_gives_what_a_branch_by_hand_gives(
    name: str, template: str, tmp_path: Path
) -> None:
    with toy_contexts(name, tmp_path, 12, template, weights="f32") as (context, other):
        with Chat(context, temperature=0, **PLAIN) as chat:
            answers = [chat.send(text).finish() for text in ("ab", "cd")]
            answers.append(chat.retry().finish())
            answers.append(chat.edit(1, "ax").finish())
            chat.switch(1)
            answers.append(chat.send("ef").finish())
            cached = chat.stats.cached
            for answer in answers:
                assert by_hand(other, answer, chat) == answer.tokens
        assert cached > sum(len(answer.prompt) for answer in answers) / 4


@pytest.mark.parametrize("template", [toys.CHAT_TEMPLATE, CHANGING], ids=["fixed", "changing"])
@pytest.mark.parametrize("name", MEMORIES)
def test_ten_turns_with_a_retry_and_an_edit_evaluate_little_more_than_their_distinct_tokens(
    name: str, template: str, tmp_path: Path
) -> None:
    """With fewer sequences than turns, the last answer equals that of a context of its own."""
    with toy_contexts(name, tmp_path, 4, template, n_ctx=4096) as (context, other):
        is_exact = context.kv_cache.can_draft and template != CHANGING
        drafter: Any = None if is_exact else "auto"
        options = {**PLAIN, "max_tokens": 40}
        with Chat(context, drafter=drafter, system="Be kind.", **options) as chat:
            with counting(context) as counts:
                answers = ten_turns(chat)
                answers += [chat.send(f"And after the storm {i}?").finish() for i in range(4)]
            assert (len(chat.exchanges), chat.tree().count("branch ")) == (13, 3)
            tokens = answers[-1].prompt + answers[-1].tokens
            with Branch.start(context, tokens) as branch, Branch.start(other, tokens) as again:
                np.testing.assert_allclose(branch.logits, again.logits, atol=rounding(other))
            assert abs(n_evaluated(chat) - sum(counts)) <= len(answers)
        texts = [answer.prompt + answer.tokens for answer in answers]
        assert sum(counts) <= 1.2 * n_distinct(texts)
        if is_exact:
            # A second answer may begin like the first; its tokens are drawn from new logits. The last
            # token of an answer is read with the next prompt, if there is one.
            n_alike = n_common(answers[2].tokens, answers[3].tokens)
            assert 0 <= n_distinct(texts) + n_alike - sum(counts) <= len(answers)


# -- saving ----------------------------------------------------------------------------------------


def test_chat_that_is_loaded_goes_on_with_the_same_text(
    ctx: Context, other_ctx: Context, tmp_path: Path
) -> None:
    with Chat(ctx, seed=5, max_tokens=10, system="Be kind.") as chat:
        chat.send("One day").finish()
        chat.retry().finish()
        chat.save(tmp_path / "saved")
        chat.send("not to be kept").finish()
        chat.undo()
        chat.save(tmp_path / "saved")
        saved_tree = chat.tree()
        expected = [chat.send("And then?").finish().text]
        chat.switch(1)
        expected.append(chat.send("And then?").finish().text)
    with Context(ctx.model, n_ctx=1024, n_threads=1, exact=True) as fresh:
        again = Chat.load(fresh, tmp_path / "saved")
        assert again.tree() == saved_tree
        answers = [again.send("And then?").finish()]
        again.switch(1)
        answers.append(again.send("And then?").finish())
        assert [answer.text for answer in answers] == expected
        fresh.audit()


def saved(ctx: Context, file: Path) -> Any:
    """Save a chat with one answer; return what its file says."""
    with Chat(ctx, seed=5, max_tokens=3) as chat:
        chat.send("Tell me of a king.").finish()
        chat.save(file)
    return json.loads(file.read_text())


def test_another_chat_is_never_written_over(ctx: Context, tmp_path: Path) -> None:
    file = tmp_path / "mine"
    with Chat(ctx, seed=5, max_tokens=3) as chat, Chat(ctx, seed=6, max_tokens=3) as other:
        chat.send("One day").finish()
        chat.save(file)
        before = file.read_bytes()
        other.send("One night").finish()
        with pytest.raises(lb.errors.SnapshotError, match="mine has another chat") as refused:
            other.save(file)
        assert refused.value.hint
        assert file.read_bytes() == before
        with Chat.load(ctx, file) as again:
            again.send("And then?").finish()
            again.save(file)
            again.save(tmp_path / "copy")
        chat.save(tmp_path / "copy")  # the same chat, continued elsewhere
        file.write_text("something else")
        for taken in (file, tmp_path):
            with pytest.raises(lb.errors.SnapshotError, match="no chat that can be"):
                chat.save(taken)
        assert file.read_text() == "something else"


def test_chat_of_another_model_is_refused_by_its_name(
    ctx: Context, model: lb.Model, tmp_path: Path
) -> None:
    about = saved(ctx, tmp_path / "saved")
    assert lb.chat.saved_model(tmp_path / "saved") == model.path
    toy = toys.write_llama(tmp_path / "other.gguf", vocab="bytes")
    with (
        lb.Model(toy, chat_template=toys.CHAT_TEMPLATE) as wrong,
        Context(wrong, n_ctx=256, n_threads=1) as context,
    ):
        names = f"{model.path.name}, not {toy.name}"
        with pytest.raises(lb.errors.SnapshotError, match=names) as refused:
            Chat.load(context, tmp_path / "saved")
        assert str(model.path) in (refused.value.hint or "")
    about["model"]["path"] = str(tmp_path / "gone.gguf")
    (tmp_path / "saved").write_text(json.dumps(about))
    with pytest.raises(lb.errors.SnapshotError, match="the chat's model is missing"):
        lb.chat.saved_model(tmp_path / "saved")
    Chat.load(ctx, tmp_path / "saved").close()  # the model was only moved


def test_damaged_chat_is_refused(ctx: Context, tmp_path: Path) -> None:
    about = saved(ctx, tmp_path / "saved")
    (first,) = about["exchanges"]
    damaged: list[dict[str, object]] = [
        {"model": 3}, {"model": {"path": "/"}}, {"id": 3},
        {"version": 1}, {"current": 9}, {"exchanges": [{}]}, {"branches": 3}, {"sampling": {"x": 1}},
        {"parents": [0]}, {"parents": [-1]}, {"parents": []},
        {"branches": {"1": 1}},
        {"exchanges": [{**first, "parent": 0}]}, {"exchanges": [{**first, "results": [3]}]},
        {"exchanges": [{**first, "calls": [["a", {}, 3]]}]},
        {"exchanges": [{**first, "calls": ["weather"]}]},
    ]  # fmt: skip
    for change in damaged:
        (tmp_path / "damaged").write_text(json.dumps({**about, **change}))
        with pytest.raises(lb.errors.SnapshotError):
            Chat.load(ctx, tmp_path / "damaged")
    with pytest.raises(lb.errors.SnapshotError):
        Chat.load(ctx, tmp_path / "nowhere")
    assert ctx.usage().cells_used == 0


# -- thoughts and calls ----------------------------------------------------------------------------

THINKING = (
    "{% for m in messages %}[{{ m.role }}] "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_a_chat_thinks_as_a_call_does_and_keeps_its_thoughts(tmp_path: Path) -> None:
    with (
        lb.Model(DATA / "tale-target-q8_0.gguf", chat_template=THINKING) as thinker,
        talking(thinker, seed=3, max_tokens=30, thinking=10) as chat,
    ):
        first = chat.send("Tell me of a bear.")
        pieces = [(event.text, event.thought) for event in first]
        assert "".join(thought for _, thought in pieces).strip() == first.thought
        assert "".join(text for text, _ in pieces) == first.text
        asked: list[dict[str, object]] = [{"role": "user", "content": "Tell me of a bear."}]
        alone = chat.ctx.chat(asked, thinking=10, max_tokens=30, seed=3, drafter=None)
        assert (first.thought, first.text, first.tokens) == (
            alone.thought, alone.text, alone.tokens
        )  # fmt: skip
        second = chat.send("And then?").finish()
        messages: list[dict[str, object]]
        messages = [*asked, alone.message, {"role": "user", "content": "And then?"}]
        again = chat.ctx.chat(messages, thinking=10, max_tokens=30, seed=3, drafter=None)
        assert (second.thought, second.text) == (again.thought, again.text)
        retried = chat.retry().finish()
        assert retried.thought != second.thought
        chat.save(tmp_path / "saved")
        with Chat.load(chat.ctx, tmp_path / "saved") as loaded:
            assert loaded.messages == chat.messages
            assert loaded.messages[1]["reasoning_content"] == first.thought
        broken_off = chat.retry()
        for _ in range(4):
            next(broken_off)
        broken_off.close()
        assert broken_off.finish_reason is None
        assert chat.exchanges[-1].thought
        assert chat.exchanges[-1].answer == ""
        chat.set(thinking=False)
        chat.undo()
        assert chat.send("And then?").finish().thought == ""


def weather(city: Literal["Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"It snows in {city}."


@pytest.mark.smollm2
def test_a_chat_calls_functions_and_reads_their_results() -> None:
    with (
        lb.load("smollm2-135m", n_ctx=2048, n_threads=1, n_seq_max=8) as context,
        Chat(context, tools=[weather], seed=1, temperature=0, max_tokens=60) as chat,
    ):
        forced: Any = {"type": "function", "function": {"name": "weather"}}
        chat.set(tool_choice=forced)
        answer = chat.send("What is the weather in Oslo?").finish()
        (call,) = answer.tool_calls
        assert call.name == "weather"
        arguments: Any = call.arguments
        assert arguments == {"city": "Oslo"}  # no model can write another call
        with pytest.raises(lb.errors.UsageError, match="calls 1 functions"):
            chat.results("a", "b")
        chat.set(tool_choice="auto", max_tokens=1)  # too few for a call
        reply = chat.results(weather(**arguments)).finish()
        assert reply.finish_reason in ("stop", "length")
        kinds = [message["role"] for message in chat.messages]
        assert kinds == ["user", "assistant", "tool", "assistant"]
        assert chat.messages[2]["tool_call_id"] == call.id
        with pytest.raises(lb.errors.UsageError, match="calls 0 functions"):
            chat.results("a")
