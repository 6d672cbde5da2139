"""The state that all endpoints share: model, engine, settings."""

from __future__ import annotations

from asyncio import get_running_loop, to_thread
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from time import time

from ..arguments import path_text
from ..engine import AsyncEngine, Request
from ..pictures import visible
from ..request.openai import Vocabulary, head, named_piece
from ..request.record import Record
from ..run.job import Job
from ..sampling import SamplingParams
from ..sampling.grammar import LinePattern
from .errors import HttpError
from .settings import ServeSettings

_DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}  # llama.cpp passes these to templates
_MOST_SEARCHED = 100_000  # characters of a system prompt, a few microseconds each
TOO_LONG = "prompt is too long"  # when agents see these words, they shorten their conversation
_LONG_TEXT = 4096  # characters; tokenizing a longer text would block the event loop


class Service:
    """A loaded model that answers requests.

    Args:
        engine: runs the texts.
        settings: limits and defaults.
        log: is called with a line for each request.

    Attributes:
        n_texts: the number of unfinished texts.
        n_ctx: the maximum number of tokens of a text, prompt included.
        is_exact: whether a text does not depend, to the bit, on what else is computed.
    """

    def __init__(
        self, engine: AsyncEngine, settings: ServeSettings, log: Callable[[str], None]
    ) -> None:
        self.engine = engine
        self.log = log
        self.settings = settings
        self.ctx = engine.engine.target
        self.model = self.ctx.model
        self.n_ctx = self.ctx.n_ctx_seq
        self.is_exact = self.ctx.capabilities.exact
        self.vocabulary = Vocabulary(partial(named_piece, self.model))
        self.created = int(time())
        self.n_texts = 0
        self._dropped = [*map(LinePattern, settings.drop_lines)]
        self.name = path_text(settings.alias or self.model.name)

    def head(self, prefix: str, kind: str) -> dict[str, object]:
        """Return the first fields of an answer."""
        fields = head(prefix, kind, self.name)
        return fields if self.is_exact else fields | {"exact": False}

    def log_ends(self, jobs: Iterable[Job]) -> None:
        """Log the cost of each of these requests, and why, as soon as all its texts have ended."""
        loop = get_running_loop()

        def tell(record: Record) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.log, visible(record.line()))

        for job in jobs if self.settings.log_requests else ():
            job.on_record = tell

    def dates(self) -> dict[str, object]:
        """Return today's date for a chat template that uses it."""
        template, today = self.model.chat_template or "", date.today()
        return {name: today.strftime(form) for name, form in _DATES.items() if name in template}

    def without_lines(
        self, messages: Sequence[Mapping[str, object]]
    ) -> tuple[list[Mapping[str, object]], list[str]]:
        """Return messages without the lines that ``drop_lines`` names, and these lines."""
        kept, dropped = list[Mapping[str, object]](), list[str]()
        for message in messages:
            content = message["content"]
            if self._dropped and message["role"] in ("system", "developer") and content:
                lines = str(content)[:_MOST_SEARCHED].splitlines(keepends=True)
                left = list[str]()
                for line in lines:
                    is_out = any(each.matches(line.rstrip("\r\n")) for each in self._dropped)
                    (dropped if is_out else left).append(line)
                text = "".join([*left, str(content)[_MOST_SEARCHED:]])
                message = {**message, "content": text}
            kept.append(message)
        return kept, [line.strip() for line in dropped]

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
        """Raise HttpError about a field unless the context has room for a prompt and one more token."""
        n, n_ctx = len(prompt), self.n_ctx
        if n + (max_tokens != 0) > n_ctx:
            text = f"{TOO_LONG}: it has {n} tokens, the context has room for {n_ctx}, the answer included"
            raise HttpError(400, text, param=param)

    def next_request(self, prompt: Sequence[int], top: int) -> Request:
        """Return a request for the next token of a prompt, never one that ends the text.

        Raises:
            HttpError: another token does not fit into the context.
        """
        self.check_room(prompt, 1)
        banned = dict.fromkeys(self.model.eog_tokens, float("-inf"))
        sampling = SamplingParams(temperature=0.0, seed=0, logit_bias=banned)
        return Request([*prompt], max_tokens=1, sampling=sampling, top_logprobs=top)
