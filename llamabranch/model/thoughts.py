"""Thoughts before an answer: whether a prompt leads to one, where it ends, and how it is ended early."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..arguments import instance, shown
from ..errors import ConfigError, UnsupportedError
from .turn_format import TurnFormat

if TYPE_CHECKING:
    from .model import Model

__all__ = [
    "Thinking", "ThinkingChoice", "answer_in", "closing", "plan_thinking", "thinking_budget",
    "thinking_variables",
]  # fmt: skip

ThinkingChoice = bool | int | None

_TAIL = 128  # tokens at the end of a prompt that tell whether it ends inside a thought


@dataclass(frozen=True)
class Thinking:
    """How the answer to a prompt begins with a thought.

    Attributes:
        start: the tag that begins a thought; "" = thoughts begin without a tag.
        end: the tag that ends it.
        is_open: the prompt ends inside the thought; False = a thought may follow, or the answer.
        budget: the most tokens of the thought; None = no limit but that of the text.
        ending: text that is written before the tag where the budget ends a thought.
        close: the tag with its white space, for that place.
        tail: what follows the tag of the model's own before the answer begins: white space, and in some
            templates a header.
        head: what the answer begins with where there is no thought.
        is_shared: all texts of the request go on from one thought.
        insists: where the model ends its turn inside the thought, that is closed, and an answer read.
            Not where functions may be called: the thought may end with a call.
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
    """Return the most tokens of a thought that ``thinking`` allows; None = as many as it likes.

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
    """Return the variables that tell a template whether a thought is wanted; {} = it is not told."""
    if thinking is None:
        return {}
    return form.thinking_variables(thinking_budget(thinking) != 0)


def closing(model: Model) -> list[int]:
    """Return the tokens that end a thought early; before them may be the thought's last words."""
    _, found = plan_thinking(model, [], True)
    return [] if found is None else _tokens(model, found.close)


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
    """Return the prompt, with what opens or closes a thought, and how the answer begins.

    Args:
        model: whose template wrote the prompt.
        prompt: its token ids, as the template wrote them for this choice.
        thinking: None = as the template does; True = a thought is begun; False = none; a number: the
            most tokens of the thought.
        begun: the beginning of the answer, where the prompt has one.
        ending: what is written at the end of a thought that has used up its tokens.
        shares: all texts go on from one thought.
        has_calls: functions may be called: a header before the answer is left to the model.

    Raises:
        ConfigError: a bad value. UnsupportedError: a thought is asked for, and the template has none.
    """
    budget = thinking_budget(thinking)
    instance("thinking_end", ending, str)
    form = model.turn_format
    parts = form.parts
    if form.thought_end is None:
        if thinking:
            raise UnsupportedError(
                f"{model.name} does not think: its chat template has no tags of a thought",
                hint="leave thinking out, or ask for steps in the message",
            )
        return prompt, None
    start, end = form.thought_start or "", form.thought_end
    text = model.detokenize(prompt[-_TAIL:], special=True)
    is_open = form.is_in_thought(text)
    is_over = not is_open and end in form.begun_turn(text)
    opening = parts.thought_open if end not in parts.thought_open else start
    close = parts.thought_close if end in parts.thought_close else end
    space = close[close.rfind(end) + len(end) :]
    # What follows the tag may belong to the header; with calls, a header is left to the model.
    follows_tag = parts.header.startswith(end) and not has_calls
    header_rest = parts.header[len(end) :] if follows_tag else ""
    head = "" if has_calls else parts.content_start
    found = Thinking(
        start=start.strip(),
        end=end.strip(),
        is_open=True,
        budget=budget,
        ending=ending,
        close=close + header_rest + head,
        tail=space + header_rest + head,
        head=head,
        is_shared=shares,
        insists=not has_calls,
    )
    if thinking is None:
        if is_over or (begun and not is_open) or not (is_open or start):
            return prompt, None
        return prompt, replace(found, is_open=is_open)
    if budget == 0:
        if is_open:
            return prompt + _tokens(model, close.lstrip() + header_rest + head), None
        if is_over or begun or form.thought_off is not None or not start:
            return prompt, None
        closed = head or opening + close.lstrip() + header_rest
        return prompt + _tokens(model, closed), None
    if begun and not is_open:
        raise ConfigError(
            "thinking cannot be combined with an answer that is begun",
            hint="leave out the last message of the assistant",
        )
    if not is_open:
        prompt = prompt + _tokens(model, opening)
    return prompt, found


def _tokens(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=True) if text else []


def answer_in(model: Model, text: str) -> str:
    """Return what follows the thought in a text; all of it where no thought has ended in it."""
    if model.chat_template is None or (end := model.turn_format.thought_end) is None:
        return text
    thought, tag, answer = text.partition(end)
    return answer.lstrip() if tag else thought
