"""How tokens and their log-probabilities are written in answers."""

from __future__ import annotations

from collections.abc import Iterable

from ..branch import Produced
from ..context import TokenScore
from ..model import Model

__all__ = ["Vocabulary"]

_LOWEST = -9999.0  # stands for minus infinity, as with OpenAI


class Vocabulary:
    """The tokens of a model as text and bytes.

    Args:
        model: it.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[int, tuple[bytes, str]] = {}

    def entry(self, token: int) -> tuple[bytes, str]:
        """Return the bytes and the text of a token; of a control token those of its name.

        In a text, bytes that are no characters are U+FFFD.
        """
        found = self._known.get(token)
        if found is None:
            piece = self._model.piece(token)
            piece = piece or self._model.detokenize([token], special=True).encode()
            found = self._known[token] = piece, piece.decode("utf-8", "replace")
        return found

    def joined(self, tokens: Iterable[int], *, control: bool = False) -> str:
        """Return the text of tokens, each as it is; ``control``: with the names of control tokens."""
        raw = self._model.piece
        parts = (self.entry(token)[0] if control else raw(token) for token in tokens)
        return b"".join(parts).decode("utf-8", "replace")

    def name(self, token: int | None) -> str | None:
        """Return the text of a token, None of none."""
        return None if token is None else self.entry(token)[1]

    def _key(self, token: int, as_id: bool) -> str:
        """Return a text that no other token has; for parts of characters as OpenAI writes them."""
        raw, text = self.entry(token)
        if as_id:
            return f"token_id:{token}"
        is_text = raw == text.encode()
        return text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def completion_logprobs(
        self,
        rated: Iterable[tuple[int, Produced | TokenScore | None]],
        offset: int,
        n_top: int,
        *,
        as_ids: bool,
        more: bool,
    ) -> dict[str, object]:
        """Return OpenAI's ``logprobs`` of a completion.

        Args:
            rated: ids of tokens, with what is known of them; None for a prompt's first.
            offset: where the text of the first begins.
            n_top: how many of the most probable tokens are told.
            as_ids: write tokens as ``token_id:N``.
            more: tell entropies and sources too.
        """
        found: dict[str, list[object]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        if more:
            found |= {"entropies": [], "sources": []}
        for token, score in rated:
            found["tokens"].append(self._key(token, as_ids))
            found["text_offset"].append(offset)
            offset += len(self.entry(token)[1])
            found["token_logprobs"].append(None if score is None else _finite(score.logprob))
            top = () if score is None else score.alternatives[:n_top]
            names = {self._key(other, as_ids): _finite(p) for other, p in top}
            found["top_logprobs"].append(None if score is None else names)
            if more:
                found["entropies"].append(None if score is None else score.entropy)
                found["sources"].append(score.source if isinstance(score, Produced) else "prompt")
        return dict(found)

    def chat_logprobs(self, tokens: Iterable[Produced], *, more: bool) -> list[dict[str, object]]:
        """Return OpenAI's ``logprobs.content`` of a message; ``more``: entropies and sources too."""
        return [
            self._item(each.token, each.logprob)
            | {"top_logprobs": self.top(each.alternatives)}
            | ({"entropy": each.entropy, "source": each.source} if more else {})
            for each in tokens
        ]

    def top(self, alternatives: Iterable[tuple[int, float]]) -> list[dict[str, object]]:
        """Return tokens with their log-probabilities."""
        return [self._item(token, logprob) for token, logprob in alternatives]

    def rated(self, score: TokenScore) -> dict[str, object]:
        """Return a given token with its rating."""
        more = {"rank": score.rank, "entropy": score.entropy, "top": self.top(score.alternatives)}
        return self._item(score.token, score.logprob) | more

    def _item(self, token: int, logprob: float) -> dict[str, object]:
        raw, text = self.entry(token)
        return {"id": token, "token": text, "bytes": list(raw), "logprob": _finite(logprob)}

    def prompt_logprobs(self, scores: Iterable[TokenScore | None]) -> list[object]:
        """Return vLLM's ``prompt_logprobs``: tokens by their ids, with rank and text."""

        def ranked(token: int, logprob: float, rank: int) -> dict[str, object]:
            text = self.entry(token)[1]
            return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

        return [
            None
            if score is None
            else {
                str(token): ranked(token, p, rank)
                for rank, (token, p) in enumerate(score.alternatives, 1)
            }
            | {str(score.token): ranked(score.token, score.logprob, score.rank)}
            for score in scores
        ]


def _finite(value: float) -> float:
    return value if value > _LOWEST else _LOWEST
