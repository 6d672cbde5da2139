"""The endpoints with facts about the server, and the tokenizer of lm-evaluation-harness."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from msgspec import Struct

from .errors import HttpError
from .messages import json_of, reply
from .service import Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["health", "index", "metrics", "models", "tokenize", "tokenizer_info"]


async def index(call: Request, service: Service) -> Response:
    """Show a browser which model runs here, and the addresses of the API."""
    host = call.headers.get("host", "localhost")
    name, n, n_ctx = service.names[0], service.settings.parallel, service.n_ctx
    lines = [
        "llamabranch serve",
        "",
        f"model      {name}, {n_ctx} tokens of context, {n} texts at a time",
        f"base URL   {call.url.scheme}://{host}/v1   for clients of OpenAI's API",
        "chat       POST /v1/chat/completions",
        "text       POST /v1/completions",
        "state      GET /health, /v1/models, /metrics",
        "",
        "This is an API without a chat window; `llamabranch open` has a page to write in.",
    ]
    page = _PAGE.format(name=escape(name), text=escape("\n".join(lines)))
    return reply(page.encode(), kind="text/html; charset=utf-8")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name} - llamabranch serve</title></head>
<body><pre>{text}</pre></body></html>
"""


async def health(call: Request, service: Service) -> Response:
    """Tell that the server answers."""
    return reply({"status": "ok"})


async def models(call: Request, service: Service) -> Response:
    """List the one model, or show it."""
    model = service.model
    entry = {
        "id": service.names[0], "aliases": service.names, "object": "model",
        "created": service.created, "owned_by": "llamabranch", "max_model_len": service.n_ctx,
        "meta": {
            "vocab_type": model.vocab_type, "n_vocab": model.n_vocab, "n_ctx": service.n_ctx,
            "n_ctx_train": model.n_ctx_train, "n_embd": model.n_embd, "n_params": model.n_params,
            "size": model.size_bytes,
        },
    }  # fmt: skip
    name = call.path_params.get("name")
    if name and name not in service.names:
        raise HttpError(404, f"there is no model {name!r}, only {', '.join(service.names)}")
    return reply(entry if name else {"object": "list", "data": [entry]})


class TokenizeFields(Struct, kw_only=True):
    """The body of /tokenize."""

    prompt: str
    add_special_tokens: bool = True


async def tokenize(call: Request, service: Service) -> Response:
    """Turn a text into tokens, as lm-evaluation-harness asks for them."""
    fields = await json_of(call, TokenizeFields)
    tokens = await service.tokenize(fields.prompt, add_special=fields.add_special_tokens)
    return reply({"tokens": tokens, "count": len(tokens), "max_model_len": service.n_ctx})


async def tokenizer_info(call: Request, service: Service) -> Response:
    """Tell the special tokens and the chat template."""
    model, words = service.model, service.vocabulary
    return reply({
        "tokenizer_class": model.vocab_type, "chat_template": model.chat_template,
        "bos_token": words.name(model.bos), "eos_token": words.name(model.eos),
    })  # fmt: skip


async def metrics(call: Request, service: Service) -> Response:
    """Write totals in Prometheus' format, by llama-server's names."""
    if not service.settings.metrics:
        raise HttpError(501, "the server was started with --limit metrics=false")
    stats, n_running = service.engine.stats, service.n_texts
    n_parallel, n_decodes = service.settings.parallel, stats.target_forward_passes
    n_prompt, n_predicted, spec = stats.prompt_tokens, stats.generated_tokens, stats.speculative
    values: dict[str, float] = {
        "prompt_tokens_total": n_prompt,
        "prompt_tokens_cached_total": stats.cached_prompt_tokens + stats.shared_prompt_tokens,
        "prompt_seconds_total": service.prompt_s,
        "tokens_predicted_total": n_predicted,
        "tokens_predicted_seconds_total": service.predicted_s,
        "n_decode_total": n_decodes,
        "n_tokens_max": service.longest,
        "spec_decode_num_drafts_total": spec.num_drafts,
        "spec_decode_num_draft_tokens_total": spec.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": spec.num_accepted_tokens,
        "prompt_tokens_seconds": _rate(n_prompt, service.prompt_s),
        "predicted_tokens_seconds": _rate(n_predicted, service.predicted_s),
        "requests_processing": min(n_running, n_parallel),
        "requests_deferred": max(0, n_running - n_parallel),
        "n_busy_slots_per_decode": _rate(n_predicted, n_decodes),
    }
    text = ""
    for name, value in values.items():
        kind = "counter" if name.endswith(("_total", "_max")) else "gauge"
        text += f"# HELP llamacpp:{name} llama-server's {name}\n"
        text += f"# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
    started = {"process-start-time-unix": str(service.created)}
    return reply(text.encode(), headers=started, kind="text/plain; version=0.0.4")


def _rate(n: float, of: float) -> float:
    return n / of if of else 0.0
