"""The endpoints with facts about the server, and those that tokenize."""

from __future__ import annotations

from html import escape

from msgspec import Struct

from ..arguments import path_text
from .completions import sampling_of
from .errors import HttpError
from .http_call import HttpCall
from .service import Service

__all__ = [
    "detokenize", "health", "index", "metrics", "models", "props", "slots", "tokenize", "tokenizer_info",
]  # fmt: skip


class TokenizeFields(Struct, kw_only=True):
    """The body of /tokenize: ``content`` and ``add_special`` are llama-server's, the rest vLLM's."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeFields(Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]


async def index(call: HttpCall, service: Service) -> None:
    """Show a browser which model runs here, and the addresses of the API."""
    host = dict(call.scope["headers"]).get(b"host", b"localhost").decode("latin-1")
    name, n, n_ctx = service.names[0], service.settings.parallel, service.n_ctx
    lines = [
        "llamabranch serve",
        "",
        f"model      {name}, {n_ctx} tokens of context, {n} texts at a time",
        f"base URL   {call.scope.get('scheme', 'http')}://{host}/v1   for clients of OpenAI's API",
        "chat       POST /v1/chat/completions",
        "text       POST /v1/completions, POST /completion",
        "branches   POST /v1/branches",
        "state      GET /health, /v1/models, /props, /slots, /metrics",
        "",
        "This is an API without a chat window; `llamabranch open` has a page to write in.",
    ]
    page = _PAGE.format(name=escape(name), text=escape("\n".join(lines)))
    await call.reply(page.encode(), kind=b"text/html; charset=utf-8")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{name} - llamabranch serve</title></head>
<body><pre>{text}</pre></body></html>
"""


async def health(call: HttpCall, service: Service) -> None:
    """Tell that the server answers."""
    await call.reply({"status": "ok"})


async def models(call: HttpCall, service: Service) -> None:
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
    name = call.scope["path_params"].get("name")
    if name and name not in service.names:
        raise HttpError(404, f"there is no model {name!r}, only {', '.join(service.names)}")
    await call.reply(entry if name else {"object": "list", "data": [entry]})


async def props(call: HttpCall, service: Service) -> None:
    """Tell the settings."""
    model, settings, words = service.model, service.settings, service.vocabulary
    params = {
        **sampling_of(settings.sampling),
        "seed": -1 if settings.seed is None else settings.seed,
        "n_predict": -1 if settings.max_tokens is None else settings.max_tokens,
    }
    await call.reply({
        "default_generation_settings": {"n_ctx": service.n_ctx, "params": params},
        "total_slots": settings.parallel, "model_alias": service.names[0],
        "model_path": path_text(model.path), "chat_template": model.chat_template or "",
        "bos_token": words.name(model.bos) or "", "eos_token": words.name(model.eos) or "",
        "build_info": service.fingerprint, "batch_invariant": service.is_exact,
        "max_branches": settings.max_branches, "branch_ttl_s": settings.branch_ttl_s,
    })  # fmt: skip


async def slots(call: HttpCall, service: Service) -> None:
    """Tell how many texts hold a sequence."""
    if not service.settings.slots:
        raise HttpError(501, "the server was started with --limit slots=false")
    n_running, n_ctx = service.ctx.n_seq_max - service.ctx.n_seq_free, service.n_ctx
    n = service.settings.parallel
    await call.reply([{"id": i, "n_ctx": n_ctx, "is_processing": i < n_running} for i in range(n)])


async def tokenize(call: HttpCall, service: Service) -> None:
    """Turn a text into tokens."""
    fields = await call.json(TokenizeFields)
    text = fields.prompt if fields.content is None else fields.content
    if text is None:
        raise HttpError(400, "give content or prompt", param="content")
    # vLLM adds BOS unless `add_special_tokens` is false, llama-server only if `add_special` is true.
    flags = (fields.add_special_tokens, fields.add_special, fields.content is None)
    add = next(flag for flag in flags if flag is not None)
    tokens = await service.tokenize(text, add_special=add, parse_special=fields.parse_special)
    words = service.vocabulary
    reply = {"tokens": tokens, "count": len(tokens), "max_model_len": service.n_ctx}
    if fields.with_pieces:
        reply["tokens"] = [{"id": t, "piece": _piece(words.entry(t)[0])} for t in tokens]
    await call.reply(reply)


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(call: HttpCall, service: Service) -> None:
    """Turn tokens into text: ``content`` is llama-server's name for it, ``prompt`` vLLM's."""
    fields = await call.json(DetokenizeFields)
    service.model.check_tokens(fields.tokens)
    text = service.vocabulary.joined(fields.tokens)
    await call.reply({"content": text, "prompt": text})


async def tokenizer_info(call: HttpCall, service: Service) -> None:
    """Tell the special tokens, as lm-evaluation-harness asks for them."""
    model, words = service.model, service.vocabulary
    await call.reply({
        "tokenizer_class": model.vocab_type, "chat_template": model.chat_template,
        "bos_token": words.name(model.bos), "eos_token": words.name(model.eos),
    })  # fmt: skip


async def metrics(call: HttpCall, service: Service) -> None:
    """Write llama-server's totals in Prometheus' format."""
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
    started = [(b"process-start-time-unix", str(service.created).encode())]
    await call.reply(text.encode(), headers=started, kind=b"text/plain; version=0.0.4")


def _rate(n: float, of: float) -> float:
    return n / of if of else 0.0
