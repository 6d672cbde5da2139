"""A conversation as a tree of exchanges (a message and its answer); a branch is its last exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..model.tools import ToolCall, openai_call

__all__ = ["Branches", "Exchange", "drawn", "exchanges_of", "messages_of"]

_LONGEST = 60  # characters of a message and its answer in a drawing


@dataclass(eq=False)
class Exchange:
    """A message of the user and the answer to it.

    Attributes:
        parent: the exchange before it, None for the first.
        user: the message.
        answer: the text of the answer; only a part while it is generated, or if it was interrupted.
        seed: the seed of its draws.
        finish_reason: "stop", "tool_calls", "length" or "capacity" (the context was full); None:
            interrupted.
        n_tokens: tokens of the answer.
        n_cut: how many exchanges at the beginning of the conversation the model did not see.
        thought: the thought before the answer.
        calls: the calls of functions in the answer; ``answer`` is then the text without them.
        results: the results of the functions that the previous exchange called; then there is no message.
    """

    parent: Exchange | None
    user: str
    answer: str = ""
    seed: int = 0
    finish_reason: str | None = None
    n_tokens: int = 0
    n_cut: int = 0
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, or a part of one."""
        return self.n_tokens > 0 or self.finish_reason is not None

    @property
    def path(self) -> list[Exchange]:
        """All exchanges from the first to this one."""
        exchanges: list[Exchange] = []
        at: Exchange | None = self
        while at is not None:
            exchanges.append(at)
            at = at.parent
        return exchanges[::-1]


Branches = Mapping[int, Exchange | None]  # the last exchange of each branch, by its number


def messages_of(system: str | None, exchanges: Iterable[Exchange]) -> list[dict[str, object]]:
    """Return messages for a chat template."""
    messages: list[dict[str, object]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for exchange in exchanges:
        if exchange.results:
            called = [] if exchange.parent is None else exchange.parent.calls
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": result}
                for call, result in zip(called, exchange.results, strict=False)
            ]
        else:
            messages.append({"role": "user", "content": exchange.user})
        if exchange.is_answered:
            calls = [openai_call(call) for call in exchange.calls]
            more = {"reasoning_content": exchange.thought, "tool_calls": calls}
            answer: dict[str, object] = {"role": "assistant", "content": exchange.answer}
            messages.append({**answer, **{key: value for key, value in more.items() if value}})
    return messages


def exchanges_of(branches: Branches) -> list[Exchange]:
    """Return every exchange of the branches once, parents first."""
    heads = [head for head in branches.values() if head is not None]
    return list(dict.fromkeys(exchange for head in heads for exchange in head.path))


def drawn(branches: Branches, current: int) -> str:
    """Return a drawing of the tree of all branches."""
    children: dict[Exchange | None, list[Exchange]] = {}
    for exchange in exchanges_of(branches):
        children.setdefault(exchange.parent, []).append(exchange)
    rows: list[str] = []
    waiting: list[tuple[Exchange | None, str, str]] = [(None, "", "")]
    while waiting:
        at, branch, indent = waiting.pop()
        heads = [] if at is None else [f"{at.n_tokens} tokens"]
        for number, head in branches.items():
            if head is at:
                heads.append(f"branch {number}" + " (current)" * (number == current))
        text, half = "the beginning" if at is None else f"{at.user} > {at.answer}", _LONGEST // 2
        text = text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"
        rows.append(f"{branch}{text!r}  {', '.join(heads)}".rstrip())
        for i, child in enumerate(reversed(children.get(at, ()))):  # the first is drawn first
            ends = i == 0
            waiting.append(
                (child, indent + ("└─ " if ends else "├─ "), indent + ("   " if ends else "│  "))
            )
    return "\n".join(rows)
