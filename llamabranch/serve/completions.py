"""``/v1/completions``, with vLLM's and llama-server's extensions, and llama-server's ``/completion``."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from ..branch import Produced
from ..context import TokenScore
from ..engine.openai import completion_choice
from ..sampling import SamplingParams
from .errors import HttpError
from .exchange import Exchange
from .fields import Prompt, TextFields, Top, engine_requests, limit_of, prompt_tokens
from .generation import Update, Writer, answer, timings
from .service import Service

__all__ = ["CompletionFields", "completion", "completions", "sampling_of"]

_DEFAULT_TOKENS = 16


class CompletionFields(TextFields, kw_only=True):
    """The body of a request; the last two are for ``/completion``."""

    prompt: Prompt | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Top | None = None
    n_probs: Top | None = None
    prompt_logprobs: Top | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None

    @property
    def n_scored(self) -> int | None:
        """How many of the most probable tokens are reported; None: no log-probabilities are."""
        return self.n_probs if self.logprobs is None else self.logprobs

    async def tokens(self, service: Service, *, add_special: bool = True) -> list[list[int]]:
        """Return the token ids of the prompts."""
        if self.prompt is None:
            raise HttpError(400, "prompt is missing", param="prompt")
        add = add_special and self.add_special_tokens is not False
        parse = self.parse_special is not False
        return await prompt_tokens(service, self.prompt, add_special=add, parse_special=parse)


async def completions(call: Exchange, service: Service) -> None:
    """Answer a request of OpenAI's."""
    fields = await call.json(CompletionFields)
    logprobs, scored = fields.n_scored, fields.prompt_logprobs
    if fields.best_of not in (None, fields.n or 1):
        raise HttpError(400, "best_of is not supported, only n", param="best_of")
    if fields.stream and fields.echo and logprobs is not None:
        raise HttpError(400, "echo with logprobs cannot be streamed", param="stream")
    prompts, n_added = await fields.tokens(service), [0]
    if fields.echo:
        bare = await fields.tokens(service, add_special=False)
        n_added = [len(all_) - len(own) for all_, own in zip(prompts, bare, strict=True)]
    max_tokens = limit_of(fields.max_tokens, fields.n_predict, _DEFAULT_TOKENS)
    if max_tokens == 0 and not fields.echo:
        raise HttpError(400, "max_tokens may be 0 only with echo", param="max_tokens")
    if fields.echo and logprobs is not None:
        scored = max(logprobs, scored or 0)
    requests = await engine_requests(
        service, fields, prompts, n=fields.n, max_tokens=max_tokens, top_logprobs=logprobs,
        prompt_logprobs=scored,
    )  # fmt: skip
    writer = _Writer(service, fields, n_added)
    await answer(call, service, requests, writer, stream=bool(fields.stream))


class _Offsets:
    """Where the tokens of a growing text begin in it; a character of several comes with the last.

    Args:
        start: where the first begins.
    """

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = start

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Return where the next tokens begin: ``pieces`` are their bytes in the text."""
        found = []
        for piece in pieces:
            found.append(self._end)
            self._end += len(self._decoder.decode(piece))
        return found


class _Writer(Writer[CompletionFields]):
    """Writes texts as OpenAI's choices.

    Args:
        service, fields: the model, and the request.
        n_added: how many first tokens of each prompt are not the client's: an echo leaves out the names
            of control tokens among them.
    """

    def __init__(self, service: Service, fields: CompletionFields, n_added: Sequence[int]) -> None:
        super().__init__(service, fields, "cmpl", "text_completion")
        self._n_added = n_added
        self._offsets: dict[int, _Offsets] = {}  # of each text

    def part(self, update: Update) -> dict[str, object]:
        """Return what has come of a text, or all of it, with the prompt where that is asked for."""
        fields, index, prompt = self.fields, update.index, update.prompt
        echoed = self._echoed(update) if update.is_first and fields.echo else []
        echo = b"".join(echoed).decode("utf-8", "replace")
        if update.is_first:
            self._offsets[index] = _Offsets(len(echo))
        found = completion_choice(index, echo + update.text, update.end, None)
        scores = None if update.ended is None else update.ended.prompt_logprobs
        if fields.n_scored is not None:
            scored: list[tuple[int, Produced | TokenScore | None]] = [
                (token.token, token) for token in update.tokens
            ]
            piece = self.service.model.piece
            offsets = self._offsets[index].of(piece(token.token) for token in update.tokens)
            if fields.echo and scores is not None:
                scored = [*zip(prompt, scores, strict=True), *scored]
                offsets = [*_Offsets().of(echoed), *offsets]
            found["logprobs"] = self.words.completion_logprobs(
                scored, offsets, fields.n_scored, as_ids=bool(fields.return_tokens_as_token_ids),
                more=bool(fields.token_details),
            )  # fmt: skip
        if fields.return_token_ids:
            found["token_ids"] = [token.token for token in update.tokens]
            if update.is_first:
                found["prompt_token_ids"] = prompt
        if fields.prompt_logprobs is not None and scores is not None:
            found["prompt_logprobs"] = self.words.prompt_logprobs(scores)
        return found

    def _echoed(self, update: Update) -> list[bytes]:
        """Return the bytes of a prompt's tokens in the text."""
        n, ids = self._n_added[update.index // (self.fields.n or 1)], update.prompt
        own = [self.words.entry(token)[0] for token in ids[n:]]
        return [*map(self.service.model.piece, ids[:n]), *own]


# -- llama-server's own ----------------------------------------------------------------------------


async def completion(call: Exchange, service: Service) -> None:
    """Answer a request of llama-server's: an object, or a list of them for several prompts."""
    fields = await call.json(CompletionFields)
    prompts = await fields.tokens(service)
    limit = limit_of(fields.n_predict, fields.max_tokens, service.settings.max_tokens)
    requests = await engine_requests(
        service, fields, prompts, n=fields.n, max_tokens=limit, top_logprobs=fields.n_probs or None
    )
    writer = _NativeWriter(service, fields, limit)
    await answer(call, service, requests, writer, stream=bool(fields.stream))


class _NativeWriter(Writer[CompletionFields]):
    """Writes texts as llama-server does."""

    def __init__(self, service: Service, fields: CompletionFields, limit: int | None) -> None:
        super().__init__(service, fields, "cmpl", "text_completion")
        self._limit = -1 if limit is None else limit

    def body(self, texts: Sequence[Update]) -> object:
        """Return one text, or all of several."""
        found = [self._end(text) for text in texts]
        if self.fields.response_fields:
            found = [dict(_selected(each, self.fields.response_fields)) for each in found]
        return found[0] if len(found) == 1 else found

    def events(self, update: Update) -> list[dict[str, object]]:
        """Return an event for each token, and one for the end."""
        tokens, rest = update.tokens, update.text
        found = [self.part(replace(update, text=one.text, tokens=[one])) for one in tokens]
        if update.ended is not None:
            rest = rest.removeprefix("".join(one.text for one in tokens))  # held back until the end
            found.append(self._end(replace(update, text=rest, tokens=[])))
        return found

    def last_events(self, texts: Sequence[Update]) -> list[dict[str, object]]:
        """Return nothing more."""
        return []

    def part(self, update: Update) -> dict[str, object]:
        """Return what has come of a text."""
        found: dict[str, object] = {
            "index": update.index,
            "content": update.text,
            "tokens": [token.token for token in update.tokens],
            "stop": False,
            "id_slot": -1,
        }
        if self.fields.n_probs:
            found["completion_probabilities"] = self.words.chat_logprobs(update.tokens)
        return found

    def _end(self, update: Update) -> dict[str, object]:
        result, params = update.result, update.request.sampling
        found = self.part(update)
        if not self.fields.return_tokens:
            found["tokens"] = []
        word = result.stop_reason if isinstance(result.stop_reason, str) else ""
        ended = "limit" if update.end["finish_reason"] == "length" else "word" if word else "eos"
        settings = sampling_of(params or self.service.settings.sampling)
        own = {"seed": result.seed, "n_predict": self._limit, "max_tokens": self._limit}
        return {
            **found,
            "stop": True,
            "model": self.service.names[0],
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": result.num_prompt_tokens,
            "tokens_cached": result.num_cached_tokens,
            "generation_settings": {**settings, **own, "stop": self.fields.stops},
            "prompt": self.words.joined(update.prompt),
            "has_new_line": "\n" in result.text,
            "truncated": False,
            "stop_type": ended,
            "stopping_word": word,
            "timings": timings(result),
        }


def sampling_of(params: SamplingParams) -> dict[str, object]:
    """Return sampling settings by llama-server's names."""
    found = asdict(params)
    found["repeat_last_n"] = found.pop("penalty_last_n")
    bias = params.logit_bias.items()
    found["logit_bias"] = [{"id": token, "bias": max(added, -1e9)} for token, added in bias]
    return found


def _selected(body: dict[str, object], wanted: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield the fields of ``wanted``, where ``a/b`` is a field of a field."""
    for path in wanted:
        value: object = body
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            yield path, value
