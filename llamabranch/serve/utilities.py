"""The endpoints with facts about the server, and the tokenizer of lm-evaluation-harness."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from msgspec import Struct

from .errors import HttpError
from .messages import json_of, reply
from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


async def health(call: Request, service: Service) -> Response:
    """Report that the server is up."""
    return reply({"status": "ok"})


async def models(call: Request, service: Service) -> Response:
    """List the one model, or show it."""
    entry = {
        "id": service.name, "object": "model", "created": service.created,
        "owned_by": "llamabranch", "max_model_len": service.n_ctx,
        "type": "model", "display_name": service.name, "lifecycle": "active",  # Anthropic's
        "created_at": datetime.fromtimestamp(service.created, timezone.utc),
        "max_input_tokens": service.n_ctx, "max_tokens": service.n_ctx,
    }  # fmt: skip
    name = call.path_params.get("name")
    if name and name != service.name:
        raise HttpError(404, f"there is no model {name!r}, only {service.name}")
    ends = {"has_more": False, "first_id": service.name, "last_id": service.name}
    return reply(entry if name else {"object": "list", "data": [entry], **ends})


class TokenizeFields(Struct, kw_only=True):
    """The body of /tokenize."""

    prompt: str
    add_special_tokens: bool = True


async def tokenize(call: Request, service: Service) -> Response:
    """Turn a text into tokens, as lm-evaluation-harness asks for them."""
    fields = await json_of(call, TokenizeFields)
    tokens = await service.tokenize(fields.prompt, add_special=fields.add_special_tokens)
    return reply({"tokens": tokens})


async def tokenizer_info(call: Request, service: Service) -> Response:
    """Return the special tokens and the chat template."""
    model, words = service.model, service.vocabulary
    return reply({
        "tokenizer_class": model.vocab_type, "chat_template": model.chat_template,
        "bos_token": words.name(model.bos), "eos_token": words.name(model.eos),
    })  # fmt: skip
