"""Thoughts before an answer: whether a prompt begins one, where it ends, and how to cut it short."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..arguments import instance, shown
from ..errors import ConfigError, UnsupportedError
from .turn_format import TurnFormat

if TYPE_CHECKING:
    from .model import Model

ThinkingChoice = bool | int | None

PROMPT_END = 128  # last tokens of a prompt, which show whether it ends inside a thought


@dataclass(frozen=True)
class Thinking:
    """How the answer to a prompt begins with a thought.

    Attributes:
        start: the tag that begins a thought; "" = thoughts begin without a tag.
        end: the tag that ends it.
        is_open: the prompt ends inside the thought. False = either a thought or the answer may follow.
        budget: the token limit of the thought; None = limited only by the text's ``max_tokens``.
        ending: text that is written before the tag if the budget ends the thought.
        close: the tag that is then written, with the white space around it.
        tail: the text between the tag and the answer if the model ends the thought itself: white space,
            and in some templates a header.
        head: how the answer begins if there is no thought.
        is_shared: all texts of the request continue the same thought.
        insists: if the model ends its turn inside the thought, the thought is closed and the model
            answers. False if functions may be called, because the thought may end with a call.
    """

    start: str
    end: str
    is_open: bool
    budget: int | None = None
    ending: str = ""
    close: str = ""
    tail: str = ""
    head: str = ""
    is_shared: bool = False
    insists: bool = True


def thinking_budget(thinking: ThinkingChoice) -> int | None:
    """Return the maximum number of tokens of a thought that ``thinking`` allows; None = no limit.

    Raises:
        ConfigError: it is neither True, False, None nor a number of tokens.
    """
    if thinking is None or isinstance(thinking, bool):
        return 0 if thinking is False else None
    if not isinstance(thinking, int) or thinking < 0:
        raise ConfigError(
            f"thinking must be True, False or a number of tokens, not {shown(thinking)}",
            hint="thinking=512 lets a thought have 512 tokens",
        )
    return thinking


def thinking_variables(form: TurnFormat, thinking: ThinkingChoice) -> dict[str, object]:
    """Return the template variables that switch thoughts on or off; {} = no variable is needed."""
    if thinking is None:
        return {}
    return form.thinking_variables(thinking_budget(thinking) != 0)


def closing(model: Model) -> list[int]:
    """Return the tokens that end a thought early, including any last words."""
    _, thinking = plan_thinking(model, [], True)
    return [] if thinking is None else _tokens(model, thinking.close)


def plan_thinking(
    model: Model,
    prompt: list[int],
    thinking: ThinkingChoice = None,
    *,
    begun: str = "",
    ending: str = "",
    shares: bool = False,
    has_calls: bool = False,
) -> tuple[list[int], Thinking | None]:
    """Return the prompt, with the text that opens or closes a thought, and how the answer begins.

    Args:
        model: the model whose template wrote the prompt.
        prompt: its token ids, as the template wrote them for this choice.
        thinking: None = what the template does; True = begin a thought; False = no thought; a number =
            a thought of at most so many tokens.
        begun: the beginning of the answer, if the prompt has one.
        ending: last words of a thought that has used up its tokens.
        shares: all texts of the request continue the same thought.
        has_calls: functions may be called, so the model itself writes the header of the answer.

    Raises:
        ConfigError: a bad value. UnsupportedError: ``thinking`` asks for a thought, but the template
            has none.
    """
    budget = thinking_budget(thinking)
    instance("thinking_end", ending, str)
    form = model.turn_format
    if form.thought_end is None:
        if thinking:
            raise UnsupportedError(
                f"{model.name} does not think: its chat template has no tags for thoughts",
                hint="leave thinking out, or ask for steps in the message",
            )
        return prompt, None
    start, end = form.thought_start or "", form.thought_end
    n_end = PROMPT_END + len(begun.encode())
    text = model.detokenize(prompt[-n_end:], special=True)
    is_open = form.is_in_thought(text)
    marks = [end, form.content_start.strip()] if begun else [end]
    is_over = not is_open and any(mark and mark in form.begun_turn(text) for mark in marks)
    opening = form.thought_open if end not in form.thought_open else start
    close, head = form.closing(has_calls=has_calls), "" if has_calls else form.content_start
    thought = Thinking(
        start=start.strip(),
        end=end.strip(),
        is_open=True,
        budget=budget,
        ending=ending,
        close=close,
        tail=close.partition(end)[2],
        head=head,
        is_shared=shares,
        insists=not has_calls,
    )
    if thinking is None:
        if is_over or (begun and not is_open) or not (is_open or start):
            return prompt, None
        return prompt, replace(thought, is_open=is_open)
    if budget == 0:
        if is_open:
            return prompt + _tokens(model, close.lstrip()), None
        if is_over or begun or form.thought_off is not None or not start:
            return prompt, None
        return prompt + _tokens(model, head or opening + close.lstrip()), None
    if begun and is_over:
        return prompt, None
    if begun and not is_open:
        raise ConfigError(
            "thinking cannot be combined with the beginning of an answer",
            hint="leave out the last message of the assistant",
        )
    if not is_open:
        prompt = prompt + _tokens(model, opening)
    return prompt, thought


def _tokens(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=True) if text else []


def answer_in(model: Model, text: str) -> str:
    """Return the text after the thought, or all of it if no thought ends in it."""
    if model.chat_template is None or (end := model.turn_format.thought_end) is None:
        return text
    thought, tag, answer = text.partition(end)
    return answer.lstrip() if tag else thought
