"""What all endpoints share: the model, the engine, the settings, the counters."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import time
from typing import TypeVar

from ..context import Context
from ..engine import AsyncEngine, Event, Request
from ..engine.openai import Vocabulary, head, named_piece
from .counters import Counters
from .errors import HttpError
from .nodes import Branches
from .settings import ServeSettings

__all__ = ["Service"]

T = TypeVar("T")

_LONG_TEXT = 4096  # characters: tokenizing more would hold up the event loop


class Service:
    """A loaded model that answers requests.

    Args:
        engine: runs the texts.
        settings: limits and defaults.

    Attributes:
        is_draining: no request is accepted any more.
        n_texts: texts that are unfinished.
    """

    def __init__(self, engine: AsyncEngine, settings: ServeSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.ctx: Context = engine.engine.target
        self.model = self.ctx.model
        self.vocabulary = Vocabulary(partial(named_piece, self.model))
        self.counters = Counters()
        self.created = int(time())
        self.is_draining = False
        self.n_texts = 0
        self.branches = Branches(
            settings.max_branches,
            settings.branch_ttl_s,
            settings.snapshot_dir,
            self.model.fingerprint,
        )
        given = settings.alias or Path(self.model.path).stem
        self.names = sorted({name.strip() for name in given.split(",") if name.strip()})
        print_of = hashlib.sha256(self.model.fingerprint.encode()).hexdigest()[:8]
        self.fingerprint = f"b{version('llamabranch')}-{print_of}"

    @property
    def n_ctx(self) -> int:
        """The most tokens of a text, prompt included."""
        return self.ctx.n_ctx_seq

    @property
    def is_exact(self) -> bool:
        """Whether a text does not depend on what else is computed, to the bit."""
        return self.ctx.capabilities.batch_invariant

    def head(self, prefix: str, kind: str) -> dict[str, object]:
        """Return the fields with which answers begin."""
        found = head(prefix, kind, self.names[0]) | {"system_fingerprint": self.fingerprint}
        return found if self.is_exact else found | {"batch_invariant": False}

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, each as it is; control tokens have none."""
        return b"".join(map(self.model.piece, tokens)).decode("utf-8", "replace")

    def n_cached(self, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens have their K/V in the prefix cache. It may take a while."""
        prefixes = self.ctx.prefix_cache
        if prefixes is None:
            return 0
        with self.ctx.lock:
            return prefixes.n_common(tokens)

    # -- prompts ---------------------------------------------------------------------------------------

    async def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the tokens of a text, without BOS where ``add_special`` is False."""

        def tokens() -> list[int]:
            if add_special:
                return self.model.prompt_tokens(text, parse_special=parse_special)
            return self.model.tokenize(text, add_special=False, parse_special=parse_special)

        return tokens() if len(text) < _LONG_TEXT else await self.in_thread(tokens)

    @staticmethod
    async def in_thread(function: Callable[[], T]) -> T:
        """Return what a function returns that may take a while."""
        return await asyncio.to_thread(function)

    def check_room(self, prompt: Sequence[int], max_tokens: int | None) -> None:
        """Raise unless the context has room for a prompt and a token after it.

        Raises:
            HttpError: it has not.
        """
        if len(prompt) + (max_tokens != 0) > self.n_ctx:
            raise HttpError.too_long(len(prompt), self.n_ctx)

    # -- texts -----------------------------------------------------------------------------------------

    async def steps(self, request: Request) -> AsyncGenerator[list[Event], None]:
        """Yield the events of a request, those of a step at a time; the engine frees what is not read."""
        left = request.n
        self.n_texts += left
        try:
            async with aclosing(self.engine.steps(request)) as steps:
                async for events in steps:
                    for event in events:
                        if event.result is not None:
                            left -= 1
                            self.n_texts -= 1
                            self.counters.add(event.result)
                    yield events
        finally:
            self.n_texts -= left
