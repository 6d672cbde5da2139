"""OpenAI's formats: the bodies of answers, and the tokens and log-probabilities in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time
from typing import TypedDict
from uuid import uuid4

from ..context import TokenScore
from ..generation.output import Produced
from ..model import Model, Turn
from ..model.tools import openai_call

_LOWEST = -9999.0  # stands for minus infinity, as in OpenAI's API


def head(prefix: str, kind: str, model: str) -> dict[str, object]:
    """Return the fields at the beginning of every answer."""
    return {
        "id": f"{prefix}-{uuid4().hex}",
        "object": kind,
        "created": int(time()),
        "model": model,
    }


class End(TypedDict):
    """How a text has ended.

    Attributes:
        finish_reason: OpenAI's reason, "stop", "length" or "tool_calls"; None before the end.
        stop_reason: vLLM's reason, the stop string or token; "capacity" if the cache was full.
    """

    finish_reason: str | None
    stop_reason: str | int | None


def end_reason(finish_reason: str, stop_reason: str | int | None) -> End:
    """Return how a text has ended, given the two reasons of its `Result`."""
    return {
        "finish_reason": finish_reason if finish_reason in ("stop", "tool_calls") else "length",
        "stop_reason": "capacity" if finish_reason == "capacity" else stop_reason,
    }


def called(end: End) -> End:
    """Return the end of a text that calls tools: "stop" becomes "tool_calls", "length" stays."""
    return {**end, "finish_reason": "tool_calls"} if end["finish_reason"] == "stop" else end


def completion_choice(
    index: int, text: str, end: End, logprobs: dict[str, object] | None
) -> dict[str, object]:
    """Return a text as one of a completion's ``choices``."""
    return {"index": index, "text": text, "logprobs": logprobs, **end}


def answer_message(turn: Turn) -> dict[str, object]:
    """Return a turn as a message of the assistant: content, thought and calls."""
    calls = [openai_call(call) for call in turn.calls]
    message: dict[str, object] = {"role": "assistant", "content": turn.content}
    if turn.thought:
        message["reasoning_content"] = turn.thought
    if calls:
        message |= {"content": turn.content or None, "tool_calls": calls}
    return message


def chat_choice(
    index: int, turn: Turn, end: End, logprobs: list[dict[str, object]] | None
) -> dict[str, object]:
    """Return a turn as one of a chat completion's ``choices``, with separate thought and calls."""
    found = None if logprobs is None else {"content": logprobs}
    end = called(end) if turn.calls else end
    return {"index": index, "message": answer_message(turn), "logprobs": found, **end}


def usage(
    n_prompt: int, n_completion: int, n_cached: int, n_thought: int | None = None
) -> dict[str, object]:
    """Return the counts of tokens.

    ``n_completion`` includes the ``n_thought`` tokens of thoughts.
    """
    found: dict[str, object] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
    if n_thought:
        found["completion_tokens_details"] = {"reasoning_tokens": n_thought}
    return found


def named_piece(model: Model, token: int) -> bytes:
    """Return the bytes of a token, or of its name if it is a control token."""
    if not model.has_text:
        return b""
    return model.piece(token) or model.detokenize([token], special=True).encode()


def named_pieces(model: Model, emitted: Iterable[Produced]) -> dict[int, bytes]:
    """Return the bytes of all tokens in ``emitted``, and of their alternatives."""
    tokens = {
        token for one in emitted for token in (one.token, *(a.token for a in one.alternatives))
    }
    return {token: named_piece(model, token) for token in tokens}


class Vocabulary:
    """The tokens of a model as text and bytes.

    Args:
        piece: a function that returns the bytes of a token, such as `named_piece` for a model.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._known: dict[int, tuple[bytes, str]] = {}

    def entry(self, token: int) -> tuple[bytes, str]:
        """Return the bytes and the text of a token, or of its name if it is a control token.

        In the text, U+FFFD replaces bytes that are not a whole character.
        """
        found = self._known.get(token)
        if found is None:
            piece = self._piece(token)
            found = self._known[token] = piece, piece.decode("utf-8", "replace")
        return found

    def joined(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, with the names of control tokens."""
        return b"".join(self.entry(token)[0] for token in tokens).decode("utf-8", "replace")

    def name(self, token: int | None) -> str | None:
        """Return the token's text, or None if there is no token."""
        return None if token is None else self.entry(token)[1]

    def _key(self, token: int) -> str:
        """Return a unique text for a token; parts of a character are written as OpenAI does."""
        raw, text = self.entry(token)
        is_text = raw == text.encode()
        return text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def completion_logprobs(
        self,
        scored: Iterable[tuple[int, Produced | TokenScore | None]],
        offsets: Iterable[int],
        n_top: int | None = None,
        *,
        more: bool = False,
    ) -> dict[str, object]:
        """Return OpenAI's ``logprobs`` of a completion.

        Args:
            scored: token ids, each with its log-probabilities; None for the first token of a
                prompt.
            offsets: where each token begins in the text.
            n_top: how many of the most probable tokens are reported; None = all that are known.
            more: include entropies and sources too.
        """
        found: dict[str, list[object]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        if more:
            found |= {"entropies": [], "sources": []}
        for (token, score), offset in zip(scored, offsets, strict=True):
            found["tokens"].append(self._key(token))
            found["text_offset"].append(offset)
            found["token_logprobs"].append(None if score is None else _finite(score.logprob))
            top = () if score is None else score.alternatives[:n_top]
            names = {self._key(other): _finite(p) for other, p in top}
            found["top_logprobs"].append(None if score is None else names)
            if more:
                found["entropies"].append(None if score is None else score.entropy)
                found["sources"].append(score.source if isinstance(score, Produced) else "prompt")
        return dict(found)

    def chat_logprobs(
        self, tokens: Iterable[Produced], *, more: bool = False
    ) -> list[dict[str, object]]:
        """Return OpenAI's ``logprobs.content`` of a message.

        With ``more``, include entropies and sources too.
        """
        return [
            self._item(each.token, each.logprob)
            | {"top_logprobs": self.top(each.alternatives)}
            | ({"entropy": each.entropy, "source": each.source} if more else {})
            for each in tokens
        ]

    def top(self, alternatives: Iterable[tuple[int, float]]) -> list[dict[str, object]]:
        """Return tokens with their log-probabilities."""
        return [self._item(token, logprob) for token, logprob in alternatives]

    def scored(self, score: TokenScore) -> dict[str, object]:
        """Return a token that was not generated, with its score."""
        more = {"rank": score.rank, "entropy": score.entropy, "top": self.top(score.alternatives)}
        return self._item(score.token, score.logprob) | more

    def _item(self, token: int, logprob: float) -> dict[str, object]:
        raw, text = self.entry(token)
        return {"id": token, "token": text, "bytes": list(raw), "logprob": _finite(logprob)}


def _finite(value: float) -> float:
    return value if value > _LOWEST else _LOWEST
