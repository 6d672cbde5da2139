"""``/v1/completions``: OpenAI's, with vLLM's and llama-server's extensions; given text is scored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import aclosing

import msgspec

from ..context import TokenScore
from ..engine import Request
from .errors import HttpError
from .exchange import Exchange
from .fields import TextFields, limit_of
from .generation import (
    Choice,
    Update,
    all_choices,
    begun,
    detail,
    finish_reason,
    stop_reason,
    total_timings,
    updates,
    usage,
)
from .prompts import infill, prompt_tokens
from .requests import requests_of
from .service import Service
from .vocabulary import Detail

__all__ = ["CompletionFields", "completions"]

_DEFAULT_TOKENS = 16
_MOST_LOGPROBS = 20


class CompletionFields(TextFields, kw_only=True):
    """The body of a request."""

    prompt: object = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    n_probs: int | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    branch_id: str | None = None


_decode = msgspec.json.Decoder(CompletionFields).decode


async def completions(call: Exchange, service: Service) -> None:
    """Answer a request."""
    fields = await call.json(_decode)
    n, best_of = _numbers(fields, service)
    logprobs = fields.n_probs if fields.logprobs is None else fields.logprobs
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", fields.prompt_logprobs)):
        if value is not None and not 0 <= value <= _MOST_LOGPROBS:
            raise HttpError(400, f"{name} must be 0 to {_MOST_LOGPROBS}, not {value}", param=name)
    branch = None if fields.branch_id is None else service.branches[fields.branch_id]
    prompts = await prompt_tokens(
        service,
        "" if fields.prompt is None and branch is not None else fields.prompt,
        add_special=fields.add_special_tokens is not False and branch is None,
    )
    if branch is not None:
        prompts = [[*branch.tokens, *prompt] for prompt in prompts]
    if fields.suffix:
        prompts = [await infill(service, prompt, fields.suffix) for prompt in prompts]
    max_tokens = limit_of(_DEFAULT_TOKENS if fields.max_tokens is None else fields.max_tokens)
    if fields.max_tokens is None and fields.n_predict is not None:
        max_tokens = limit_of(fields.n_predict, "n_predict")
    if max_tokens == 0 and not fields.echo:
        raise HttpError(400, "max_tokens may be 0 only with echo", param="max_tokens")
    rated = fields.prompt_logprobs
    if fields.echo and logprobs is not None:
        rated = max(logprobs, rated or 0)
    requests = await requests_of(
        service, fields, prompts, n=best_of, max_tokens=max_tokens, top_logprobs=logprobs,
        prompt_logprobs=rated, rates=best_of > n,
    )  # fmt: skip
    answer = _Answer(service, fields, logprobs, n, best_of)
    call.note = f"{len(prompts)} prompts"
    if fields.stream:
        await _stream(call, answer, requests)
        return
    choices = await all_choices(service, requests)
    kept = answer.best(choices)
    body = {
        **answer.head,
        "choices": [
            answer.part(each.whole, index, with_prompt=True) for index, each in enumerate(kept)
        ],
        "usage": usage(choices),
        "timings": total_timings(kept),
    }
    await call.reply(body)


def _numbers(fields: CompletionFields, service: Service) -> tuple[int, int]:
    n = 1 if fields.n is None else fields.n
    best_of = n if fields.best_of is None else fields.best_of
    if n < 1 or best_of < n:
        raise HttpError(400, "n must be at least 1, and best_of at least n", param="n")
    if best_of > n and fields.stream:
        raise HttpError(400, "best_of above n cannot be streamed", param="best_of")
    if fields.echo and fields.stream and fields.logprobs is not None:
        raise HttpError(
            400, "the log-probabilities of an echoed prompt cannot be streamed", param="echo"
        )
    return n, best_of


async def _stream(call: Exchange, answer: _Answer, requests: Sequence[Request]) -> None:
    ended: list[Choice] = []
    seen: set[int] = set()
    async with aclosing(await begun(updates(answer.service, requests))) as steps:
        await call.start_stream()
        async for step in steps:
            events = []
            for update in step:
                choice, is_first = update.choice, update.choice.index not in seen
                seen.add(choice.index)
                event = {
                    **answer.head,
                    "choices": [answer.part(update, choice.index, with_prompt=is_first)],
                }
                if update.result is not None:
                    ended.append(choice)
                    if answer.fields.timings_per_token:
                        event["timings"] = total_timings([choice])
                events.append(event)
            await call.event(*events)
        if answer.includes_usage:
            end = {"choices": [], "usage": usage(ended), "timings": total_timings(ended)}
            await call.event({**answer.head, **end})
        await call.end_stream()


class _Answer:
    """Writes texts as OpenAI's choices."""

    def __init__(
        self,
        service: Service,
        fields: CompletionFields,
        logprobs: int | None,
        n: int,
        best_of: int,
    ) -> None:
        self.service = service
        self.fields = fields
        self.head = service.head("cmpl", "text_completion")
        self._logprobs = logprobs
        self._n = n
        self._best_of = best_of
        options = fields.stream_options
        self.includes_usage = options is not None and bool(options.include_usage)

    def best(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return the best ``n`` of the ``best_of`` texts of each prompt, best first."""
        if self._best_of == self._n:
            return list(choices)
        groups = [choices[i : i + self._best_of] for i in range(0, len(choices), self._best_of)]
        return [
            each
            for group in groups
            for each in sorted(group, key=lambda choice: -choice.mean_logprob)[: self._n]
        ]

    def part(self, update: Update, index: int, *, with_prompt: bool) -> dict[str, object]:
        """Return the JSON of a part of a text, or of all of it.

        ``with_prompt``: with what is told of the prompt, if the request asks for it.
        """
        fields, vocabulary, model = self.fields, self.service.vocabulary, self.service.model
        result = update.result
        ids = [token for token in update.choice.request.prompt if isinstance(token, int)]
        echo = model.detokenize(ids) if fields.echo else ""
        found: dict[str, object] = {
            "index": index,
            "text": (echo if with_prompt else "") + update.text,
            "logprobs": None,
            "finish_reason": finish_reason(result),
            "stop_reason": stop_reason(result),
        }
        scores = None if result is None else result.prompt_logprobs
        if self._logprobs is not None:
            details = [detail(token) for token in update.tokens]
            offset = len(echo) + update.offset
            if fields.echo and scores is not None and not fields.stream:
                details = [*self._prompt_details(ids, scores), *details]
                offset = 0
            found["logprobs"] = vocabulary.completion_logprobs(
                details,
                offset,
                as_ids=bool(fields.return_tokens_as_token_ids),
                more=bool(fields.token_details),
            )
        if fields.return_token_ids:
            found["token_ids"] = [token.token for token in update.tokens]
            if with_prompt:
                found["prompt_token_ids"] = ids
        if fields.prompt_logprobs is not None and scores is not None:
            found["prompt_logprobs"] = vocabulary.prompt_logprobs(scores)
        return found

    def _prompt_details(
        self, ids: Sequence[int], scores: Sequence[TokenScore | None]
    ) -> Iterable[Detail]:
        most = self._logprobs or 0
        for token, score in zip(ids, scores, strict=True):
            if score is None:
                yield Detail(token, None, 0.0, "prompt", ())
            else:
                alternatives = score.alternatives[:most]
                yield Detail(token, score.logprob, score.entropy, "prompt", alternatives)
