"""How tokens are written in answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..context import TokenScore
from ..model import Model

__all__ = ["Detail", "Vocabulary", "finite"]

_LOWEST = -9999.0  # for a log-probability of minus infinity, as OpenAI writes it


class Detail(NamedTuple):
    """A token with what is told about it."""

    token: int
    logprob: float | None
    entropy: float
    source: str
    alternatives: Sequence[tuple[int, float]]


def finite(value: float) -> float:
    """Return a log-probability as JSON can hold it."""
    return value if value > _LOWEST else _LOWEST


class Vocabulary:
    """The tokens of a model as text and bytes.

    Args:
        model: it.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[int, tuple[bytes, str]] = {}

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token; of a control token those of its name."""
        return self._entry(token)[0]

    def text(self, token: int) -> str:
        """Return the text of a token; bytes that are no characters become U+FFFD."""
        return self._entry(token)[1]

    def _entry(self, token: int) -> tuple[bytes, str]:
        found = self._known.get(token)
        if found is None:
            piece = self._model.piece(token)
            if not piece:
                piece = self._model.detokenize([token], special=True).encode()
            found = self._known[token] = piece, piece.decode("utf-8", "replace")
        return found

    def key(self, token: int, *, as_id: bool = False) -> str:
        """Return a name of a token that is a text of its own.

        Parts of characters are written as ``bytes:\\xe2\\x80``, as OpenAI does: they would all be U+FFFD.
        """
        if as_id:
            return f"token_id:{token}"
        raw = self.raw(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    # -- log-probabilities -----------------------------------------------------------------------------

    def completion_logprobs(
        self, details: Iterable[Detail], offset: int, *, as_ids: bool, more: bool
    ) -> dict[str, object]:
        """Return OpenAI's ``logprobs`` of a completion; the text of the first token is at ``offset``."""
        tokens: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        found = list(details)
        for each in found:
            tokens.append(self.key(each.token, as_id=as_ids))
            offsets.append(offset)
            offset += len(self.text(each.token))
            logprobs.append(None if each.logprob is None else finite(each.logprob))
            top = {self.key(token, as_id=as_ids): finite(p) for token, p in each.alternatives}
            tops.append(None if each.logprob is None else top)
        answer: dict[str, object] = {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        if more:
            answer["entropies"] = [each.entropy for each in found]
            answer["sources"] = [each.source for each in found]
        return answer

    def chat_logprobs(self, details: Iterable[Detail], *, more: bool) -> list[dict[str, object]]:
        """Return OpenAI's ``logprobs.content`` of a message."""
        found = []
        for each in details:
            item = self._item(each.token, each.logprob or 0.0)
            item["top_logprobs"] = [self._item(token, p) for token, p in each.alternatives]
            if more:
                item |= {"entropy": each.entropy, "source": each.source}
            found.append(item)
        return found

    def _item(self, token: int, logprob: float) -> dict[str, object]:
        raw, text = self._entry(token)
        return {"id": token, "token": text, "bytes": list(raw), "logprob": finite(logprob)}

    def prompt_logprobs(self, scores: Iterable[TokenScore | None]) -> list[object]:
        """Return vLLM's ``prompt_logprobs``: of each token by its id, with its rank and text."""
        found: list[object] = []
        for score in scores:
            if score is None:
                found.append(None)
                continue
            ranked = {
                str(token): self._ranked(token, p, rank)
                for rank, (token, p) in enumerate(score.alternatives, 1)
            }
            ranked[str(score.token)] = self._ranked(score.token, score.logprob, score.rank)
            found.append(ranked)
        return found

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self.text(token)}
