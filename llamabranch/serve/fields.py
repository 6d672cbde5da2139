"""The fields of all HTTP requests for texts, and their prompts and calls.

Unknown fields are ignored; so are OpenAI's fields that do not change a text (``user``, ``store``, ...).
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
from msgspec import Meta, Struct

from ..engine.completion import Call
from ..errors import CacheFullError
from ..model import Message, chat_messages
from ..request.fields import TextFields
from ..request.request import TextOptions
from ..run.job import Job
from .errors import HttpError
from .service import TOO_LONG, Service

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

Top = Annotated[int, Meta(ge=0, le=20)]  # how many of the most probable tokens are reported

_Parts = Annotated[list[int | str], Meta(min_length=1)]
Prompt = str | Annotated[list[int | str | _Parts], Meta(min_length=1)]


class StreamOptions(Struct, kw_only=True):
    """OpenAI's."""

    include_usage: bool | None = None


class HttpFields(TextFields, kw_only=True):
    """The fields of all HTTP requests for texts."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    token_details: bool | None = None
    ephemeral: bool | None = None
    metadata: dict[str, object] | None = None

    async def options(
        self,
        call: HttpRequest,
        service: Service,
        max_tokens: int | None,
        top_logprobs: int | None,
    ) -> TextOptions:
        """Return the options of ``Context.complete`` with these limits.

        Raises:
            LlamaBranchError: a value is out of range, or the grammar is invalid.
        """
        base = service.settings.sampling.replace(logprobs=top_logprobs is not None)
        fields = self.arguments(base, service.model)
        options = {"max_tokens": max_tokens, "top_logprobs": top_logprobs}
        grammar = await to_thread(self.text_grammar)
        session = self.session(call.headers)
        return cast(TextOptions, {**fields, **options, **session, "grammar": grammar})

    def session(self, headers: Mapping[str, str]) -> dict[str, object]:
        """Return the options that say to which session a request belongs.

        The fields of the body take precedence over the headers ``X-Session-Id`` (in opencode
        ``X-Session-Affinity``) and ``X-Parent-Session-Id``, and these over what Claude Code sends:
        headers with the ids of the session and of its agents, or ``metadata.user_id``, which contains
        the session.
        """
        user_id = (self.metadata or {}).get("user_id")
        main = headers.get("x-claude-code-session-id") or _session_in(user_id)
        agent = headers.get("x-claude-code-agent-id")
        above = (headers.get("x-claude-code-parent-agent-id") or main) if agent else None
        sent = headers.get("x-session-id") or headers.get("x-session-affinity")
        own = self.session_id or sent or agent or main
        parent = self.parent_session_id or headers.get("x-parent-session-id") or above
        options: dict[str, object] = {"session_id": own, "parent_session_id": parent}
        return options | ({"ttl": 0.0} if self.ephemeral else {})


class _UserId(Struct):
    """The JSON that Claude Code sends as ``user_id``."""

    session_id: str | None = None


def _session_in(user_id: object) -> str | None:
    """Return the session that an agent's ``user_id`` names: in JSON, or at the end of a text."""
    if not isinstance(user_id, str):
        return None
    try:
        return msgspec.json.decode(user_id, type=_UserId).session_id
    except (msgspec.DecodeError, RecursionError):
        return user_id.partition("_session_")[2] or None


def call_of(
    service: Service, prompts: object, options: Mapping[str, object], *, chats: bool
) -> tuple[Call, list[str]]:
    """Return the call for prompts or a conversation, and the lines that it leaves out."""
    dropped = list[str]()
    if chats:
        prompts, dropped = service.without_lines(chat_messages(cast("list[Message]", prompts)))
    return Call(service.ctx, prompts, None, options, chats=chats), dropped


async def prepared(
    service: Service,
    prompts: object,
    options: Mapping[str, object],
    *,
    param: str,
    reports_tokens: bool | None,
) -> list[Job]:
    """Return the engine's requests for an HTTP request, one for each prompt.

    Args:
        service: the model, and its limits.
        prompts: lists of token ids; for "messages" a conversation.
        options: the options of ``Context.complete`` or ``Context.chat``.
        param: the field that has the prompts.
        reports_tokens: whether there are events for tokens.

    Raises:
        HttpError, LlamaBranchError: something is invalid or too large.
    """
    engine, chats = service.engine.engine, param == "messages"

    def prepare() -> list[Job]:
        call, dropped = call_of(service, prompts, options, chats=chats)
        n, most = call.requests[0].n, service.settings.max_choices
        if len(call.requests) * n > most:
            message = f"{len(call.requests)} prompts with {n} texts each; 1 to {most} are allowed"
            one = f"n must be 1 to {most}"
            raise HttpError(400, message if len(call.requests) > 1 else one, param="n")
        reports = bool(reports_tokens)
        jobs = call.prepare(lambda _, request: engine.prepare(request, reports_tokens=reports))
        for job in jobs:
            job.dropped = dropped
        return jobs

    try:
        jobs = await to_thread(prepare)
    except CacheFullError as error:
        raise HttpError(400, f"{TOO_LONG}: {error.message} (-c)", param=param) from None
    for job in jobs:
        service.check_room(job.prompt, job.max_tokens, param)
    return jobs


async def prompt_tokens(
    service: Service, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True
) -> list[list[int]]:
    """Return the token ids of a request's prompts.

    A prompt is a text, token ids, or a list of these, also mixed. Token ids are used as they are.

    Raises:
        HttpError, TokenizeError: a list is inside a list of token ids, or the vocabulary cannot write a
            text.
    """
    is_single = not isinstance(prompt, list) or any(isinstance(part, int) for part in prompt)
    prompts = []
    for item in [prompt] if is_single or not isinstance(prompt, list) else prompt:
        tokens: list[int] = []
        for i, part in enumerate(item if isinstance(item, list) else [item]):
            if isinstance(part, list):
                raise HttpError(400, "prompt mixes token ids and lists of them", param="prompt")
            if isinstance(part, int):
                tokens.append(part)
                continue
            add = add_special and i == 0
            tokens += await service.tokenize(part, add_special=add, parse_special=parse_special)
        prompts.append(tokens)
    return prompts
