"""A conversation as a tree of exchanges (a message and its answer); a branch is its last exchange.

The root is an exchange without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..model import Turn
from ..model.tools import ToolCall
from ..model.tree import TextNode
from ..request.openai import answer_message

_LONGEST = 60  # characters of a message and its answer in a drawing


@dataclass(eq=False)
class Exchange(TextNode):
    """A message of the user and the answer to it.

    Attributes:
        parent: the exchange before it.
        user: the message.
        answer: the text of the answer; only a part while it is generated, or if it was interrupted.
        seed: the seed of its draws.
        finish_reason: "stop", "tool_calls", "length" or "capacity" (the context was full); None:
            interrupted.
        n_tokens: tokens of the answer.
        n_cut: how many exchanges at the beginning of the conversation the model did not see.
        thought: the thought before the answer.
        calls: the calls of functions in the answer; ``answer`` is then the text without them.
        results: the results of the functions that the previous exchange called. Such an exchange has no
            message.
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
    def messages(self) -> list[dict[str, object]]:
        """Its messages for a chat template."""
        messages: list[dict[str, object]] = [{"role": "user", "content": self.user}]
        if self.results and self.parent is not None:
            messages = [
                {"role": "tool", "tool_call_id": call.id, "content": result}
                for call, result in zip(self.parent.calls, self.results, strict=False)
            ]
        if self.is_answered:
            answer = answer_message(Turn(self.thought, self.answer, self.calls))
            messages.append({**answer, "content": self.answer})
        return messages


Branches = Mapping[int, Exchange]  # the last exchange of each branch, by its number


def messages_of(system: str | None, exchanges: Iterable[Exchange]) -> list[dict[str, object]]:
    """Return messages for a chat template."""
    first: list[dict[str, object]] = [{"role": "system", "content": system}]
    return [
        *(first if system is not None else ()),
        *(message for exchange in exchanges for message in exchange.messages),
    ]


def exchanges_of(branches: Branches) -> list[Exchange]:
    """Return every exchange of the branches once, the root first, each before those after it."""
    known = {exchange: None for head in branches.values() for exchange in head.path}
    return [exchange for exchange in next(iter(known)).subtree() if exchange in known]


def drawn(branches: Branches, current: int) -> str:
    """Return a drawing of the tree of all branches."""
    exchanges, rows = exchanges_of(branches), list[str]()
    last = {exchange.parent: exchange for exchange in exchanges}  # of those with the same parent
    for exchange in exchanges:
        text, half = f"{exchange.user} > {exchange.answer}", _LONGEST // 2
        notes = [f"{exchange.n_tokens} tokens"]
        if exchange.parent is None:
            text, notes = "the beginning", []
        for number, head in branches.items():
            if head is exchange:
                notes.append(f"branch {number}" + " (current)" * (number == current))
        text = text if len(text) <= _LONGEST else f"{text[:half]}...{text[-half:]}"
        indent = ["   " if last[up.parent] is up else "│  " for up in exchange.path[1:]]
        if indent:
            indent[-1] = "└─ " if last[exchange.parent] is exchange else "├─ "
        rows.append(f"{''.join(indent)}{text!r}  {', '.join(notes)}".rstrip())
    return "\n".join(rows)
