"""A conversation as a tree: exchanges of a message and its answer, and the lines that lead to them.

Nothing here knows of tokens: which of them are evaluated already is a matter of `turns`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..branch import Branch
from ..pictures import Token, TreeLine

__all__ = ["Exchange", "Line", "exchanges_of", "messages_of", "tree_of"]


@dataclass(eq=False)
class Exchange:
    """A message of the user and the answer to it.

    Attributes:
        parent: the exchange before it, None for the first.
        user: the message.
        answer: the text of the answer; a part of it while it is generated, or if it was broken off.
        seed: the seed of its draws.
        finish_reason: "stop", "length", or "capacity" where the context was full; None: broken off.
        n_tokens: tokens of the answer.
        n_cut: how many of the first exchanges before it the model did not see.
        thought: what the model thought before the answer.
        calls: the calls of functions in the answer, as OpenAI's messages hold them; ``answer`` is then
            the text beside them.
        results: what the functions have returned that the exchange before it called; then there is no
            message of the user.
        branch: the prompt's tokens and the answer's; pruned once its sequence was needed.
    """

    parent: Exchange | None
    user: str
    answer: str = ""
    seed: int = 0
    finish_reason: str | None = None
    n_tokens: int = 0
    n_cut: int = 0
    thought: str = ""
    calls: list[dict[str, object]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    branch: Branch | None = None

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, or a part of one."""
        return self.n_tokens > 0 or self.finish_reason is not None

    @property
    def path(self) -> list[Exchange]:
        """All exchanges from the first one to this."""
        found: list[Exchange] = []
        at: Exchange | None = self
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]


@dataclass
class Line:
    """A line of the conversation: where it has got to, and how it is shown to the model.

    Attributes:
        number: by which it is chosen.
        head: its last exchange, None before the first.
        system: the system message, if there is one.
    """

    number: int
    head: Exchange | None = None
    system: str | None = None

    @property
    def path(self) -> list[Exchange]:
        """Its exchanges, the first one first."""
        return [] if self.head is None else self.head.path


def messages_of(
    system: str | None, exchanges: Iterable[Exchange], *more: Exchange
) -> list[dict[str, object]]:
    """Return messages as a chat template takes them; ``more``: without their answers."""
    found: list[dict[str, object]] = []
    if system is not None:
        found.append({"role": "system", "content": system})
    for exchange in exchanges:
        found += _asked(exchange)
        if exchange.is_answered:
            answer: dict[str, object] = {"role": "assistant", "content": exchange.answer}
            if exchange.thought:
                answer["reasoning_content"] = exchange.thought
            if exchange.calls:
                answer["tool_calls"] = exchange.calls
            found.append(answer)
    return found + [message for exchange in more for message in _asked(exchange)]


def _asked(exchange: Exchange) -> list[dict[str, object]]:
    """Return the message of an exchange, or the results of functions."""
    if not exchange.results:
        return [{"role": "user", "content": exchange.user}]
    calls = [] if exchange.parent is None else exchange.parent.calls
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, exchange.results, strict=False)
    ]


def exchanges_of(lines: Iterable[Line]) -> list[Exchange]:
    """Return every exchange of the lines once, parents first."""
    return list(dict.fromkeys(exchange for line in lines for exchange in line.path))


def tree_of(lines: Iterable[Line], current: int) -> TreeLine:
    """Return the tree of all lines, to draw."""
    lines = list(lines)
    children: dict[Exchange | None, list[Exchange]] = {}
    for exchange in exchanges_of(lines):
        children.setdefault(exchange.parent, []).append(exchange)

    def node(exchange: Exchange | None) -> TreeLine:
        heads = [
            f"branch {line.number}" + (" (current)" if line.number == current else "")
            for line in lines
            if line.head is exchange
        ]
        text = "the beginning"
        if exchange is not None:
            heads.insert(0, f"{exchange.n_tokens} tokens")
            text = f"{exchange.user} > {exchange.answer}"
        below = tuple(node(child) for child in children.get(exchange, ()))
        return TreeLine([Token(text)], ", ".join(heads), below)

    return node(None)
