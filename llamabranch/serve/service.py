"""The state that all endpoints share: model, engine, settings, counters."""

from __future__ import annotations

import hashlib
from asyncio import to_thread
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from time import time

from ..arguments import path_text
from ..engine import AsyncEngine, Request, Result
from ..request.openai import Vocabulary, head, named_piece
from ..sampling import SamplingParams
from .errors import TOO_LONG, HttpError
from .settings import ServeSettings

__all__ = ["Service", "seconds"]

_LONG_TEXT = 4096  # characters; tokenizing a longer text would block the event loop


def seconds(result: Result) -> tuple[float, float]:
    """Return the seconds of a text's prompt, and those from its first token to its last."""
    first, last = result.first_token_s, result.last_token_s
    if first is None or last is None:
        return 0.0, 0.0
    return first - (result.queued_s or 0.0), last - first


class Service:
    """A loaded model that answers requests.

    Args:
        engine: runs the texts.
        settings: limits and defaults.

    Attributes:
        is_draining: whether new requests are refused.
        n_texts: the number of unfinished texts.
        n_ctx: the most tokens of a text, prompt included.
        is_exact: whether a text is independent, to the bit, of what else is computed.
        longest: the tokens of the longest text so far, prompt included.
        prompt_s, predicted_s: seconds for prompts and for texts, summed over all texts.
    """

    def __init__(self, engine: AsyncEngine, settings: ServeSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.ctx = engine.engine.target
        self.model = self.ctx.model
        self.n_ctx = self.ctx.n_ctx_seq
        self.is_exact = self.ctx.capabilities.batch_invariant
        self.vocabulary = Vocabulary(partial(named_piece, self.model))
        self.created = int(time())
        self.is_draining = False
        self.n_texts = self.longest = 0
        self.prompt_s = self.predicted_s = 0.0
        alias = path_text(settings.alias or self.model.name)
        self.names = sorted({name.strip() for name in alias.split(",") if name.strip()})
        short = hashlib.sha256(self.model.quick_key.encode()).hexdigest()[:8]
        self.fingerprint = f"b{version('llamabranch')}-{short}"

    def count(self, result: Result) -> None:
        """Count a text that has ended."""
        prompt_s, predicted_s = seconds(result)
        self.n_texts -= 1
        self.longest = max(self.longest, result.num_prompt_tokens + len(result.tokens))
        self.prompt_s += prompt_s
        self.predicted_s += predicted_s

    def head(self, prefix: str, kind: str) -> dict[str, object]:
        """Return the first fields of an answer."""
        fields = head(prefix, kind, self.names[0]) | {"system_fingerprint": self.fingerprint}
        return fields if self.is_exact else fields | {"batch_invariant": False}

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the tokens of a text, without BOS if ``add_special`` is False."""
        model = self.model
        plain = partial(model.tokenize, add_special=False)
        tokens = partial(model.prompt_tokens if add_special else plain, parse_special=parse_special)
        return tokens(text) if len(text) < _LONG_TEXT else await to_thread(tokens, text)

    def check_room(
        self, prompt: Sequence[int], max_tokens: int | None, param: str | None = None
    ) -> None:
        """Raise HttpError, about a field, unless the context has room for a prompt and a token more."""
        n, n_ctx = len(prompt), self.n_ctx
        if n + (max_tokens != 0) > n_ctx:
            text = (
                f"the prompt has {n} tokens, the context has room for {n_ctx}, the answer included"
            )
            raise HttpError(400, text, param=param, kind=TOO_LONG, n_prompt_tokens=n, n_ctx=n_ctx)

    def next_request(self, prompt: Sequence[int], top: int) -> Request:
        """Return a request for the next token of a prompt, never one that ends the text.

        Raises:
            HttpError: another token does not fit into the context.
        """
        self.check_room(prompt, 1)
        banned = dict.fromkeys(self.model.eog_tokens, float("-inf"))
        sampling = SamplingParams(temperature=0.0, seed=0, logit_bias=banned)
        return Request([*prompt], max_tokens=1, sampling=sampling, top_logprobs=top)
