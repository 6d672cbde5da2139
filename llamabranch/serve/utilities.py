"""The endpoints that tell about the server, and those that tokenize."""

from __future__ import annotations

from dataclasses import asdict
from time import time

import msgspec
from msgspec import Struct

from .chat import TemplateFields, conversation
from .errors import HttpError
from .exchange import Exchange
from .native import sampling_of
from .service import Service
from .tools import Tools

__all__ = [
    "apply_template",
    "detokenize",
    "health",
    "metrics",
    "models",
    "props",
    "slots",
    "tokenize",
    "tokenizer_info",
]


class TokenizeFields(Struct, kw_only=True):
    """The body of /tokenize: ``content`` is llama-server's, ``prompt`` vLLM's."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    return_token_strs: bool = False


class DetokenizeFields(Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]


_decode_tokenize = msgspec.json.Decoder(TokenizeFields).decode
_decode_detokenize = msgspec.json.Decoder(DetokenizeFields).decode
_decode_template = msgspec.json.Decoder(TemplateFields).decode


async def health(call: Exchange, service: Service) -> None:
    """Tell that the server answers."""
    await call.reply({"status": "ok"})


async def models(call: Exchange, service: Service) -> None:
    """List the one model."""
    model = service.model
    meta = {
        "vocab_type": model.vocab_type,
        "n_vocab": model.n_vocab,
        "n_ctx_train": model.n_ctx_train,
        "n_ctx": service.n_ctx,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.size_bytes,
    }
    one = {
        "id": service.names[0],
        "aliases": service.names,
        "object": "model",
        "created": service.created,
        "owned_by": "llamabranch",
        "max_model_len": service.n_ctx,
        "meta": meta,
    }
    wanted = call.scope.get("path_params", {}).get("name")
    if wanted is not None and wanted not in service.names:
        raise HttpError(404, f"there is no model {wanted!r}, only {', '.join(service.names)}")
    await call.reply({"object": "list", "data": [one]} if wanted is None else one)


async def props(call: Exchange, service: Service) -> None:
    """Tell the settings."""
    model, settings = service.model, service.settings
    params = {
        **sampling_of(service, asdict(settings.sampling)),
        "seed": -1 if settings.seed is None else settings.seed,
        "n_predict": -1 if settings.max_tokens is None else settings.max_tokens,
    }

    def name(token: int | None) -> str:
        return "" if token is None else service.vocabulary.text(token)

    await call.reply({
        "default_generation_settings": {"n_ctx": service.n_ctx, "params": params},
        "total_slots": settings.parallel,
        "model_alias": service.names[0],
        "model_path": str(model.path),
        "chat_template": model.chat_template or "",
        "bos_token": name(model.bos),
        "eos_token": name(model.eos),
        "build_info": service.fingerprint,
        "batch_invariant": service.is_exact,
        "max_branches": settings.max_branches,
        "branch_ttl_s": settings.branch_ttl_s,
    })  # fmt: skip


async def slots(call: Exchange, service: Service) -> None:
    """Tell how many texts run."""
    if not service.settings.slots:
        raise HttpError(501, "the server was started with --no-slots")
    n, running = service.settings.parallel, service.n_texts
    await call.reply(
        [{"id": i, "n_ctx": service.n_ctx, "is_processing": i < running} for i in range(n)]
    )


async def tokenize(call: Exchange, service: Service) -> None:
    """Turn a text into tokens."""
    fields = await call.json(_decode_tokenize)
    text = fields.prompt if fields.content is None else fields.content
    if text is None:
        raise HttpError(400, "give content or prompt", param="content")
    # vLLM adds BOS unless told not to, llama-server only if told to.
    add = fields.content is None if fields.add_special is None else fields.add_special
    add = add if fields.add_special_tokens is None else fields.add_special_tokens
    tokens = await service.tokenize(text, add_special=add, parse_special=fields.parse_special)
    tokens = [] if not text and not add else tokens
    words = service.vocabulary
    found: dict[str, object] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.n_ctx,
    }
    if fields.with_pieces:
        found["tokens"] = [{"id": token, "piece": _piece(words.raw(token))} for token in tokens]
    if fields.return_token_strs:
        found["token_strs"] = [words.text(token) for token in tokens]
    await call.reply(found)


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(call: Exchange, service: Service) -> None:
    """Turn tokens into text; ``content`` is llama-server's name for it, ``prompt`` vLLM's."""
    fields = await call.json(_decode_detokenize)
    text = service.model.detokenize(fields.tokens)
    await call.reply({"content": text, "prompt": text})


async def tokenizer_info(call: Exchange, service: Service) -> None:
    """Tell the special tokens, as lm-evaluation-harness asks for them."""
    model = service.model

    def name(token: int | None) -> str | None:
        return None if token is None else service.vocabulary.text(token)

    await call.reply({
        "tokenizer_class": model.vocab_type,
        "bos_token": name(model.bos),
        "eos_token": name(model.eos),
        "bos_token_id": model.bos,
        "eos_token_id": model.eos,
        "eog_token_ids": sorted(model.eog_tokens),
        "n_vocab": model.n_vocab,
        "model_max_length": service.n_ctx,
        "chat_template": model.chat_template,
    })  # fmt: skip


async def apply_template(call: Exchange, service: Service) -> None:
    """Write a conversation as a prompt."""
    fields = await call.json(_decode_template)
    tools = Tools(fields.tools or (), fields.tool_choice)
    tokens = await service.in_thread(lambda: conversation(service, fields, tools))
    text = service.model.detokenize(tokens, special=True)
    await call.reply({"prompt": text, "tokens": tokens})


async def metrics(call: Exchange, service: Service) -> None:
    """Write the totals in Prometheus' format, by llama-server's names and our own."""
    if not service.settings.metrics:
        raise HttpError(501, "the server was started with --no-metrics")
    c, stats = service.counters, service.engine.stats
    n_parallel, n_texts = service.settings.parallel, service.n_texts
    decodes = stats.target_forward_passes
    prompt_rate = c.prompt_tokens / c.prompt_s if c.prompt_s else 0.0
    rate = c.predicted_tokens / c.predicted_s if c.predicted_s else 0.0
    spec = c.speculative
    rows: list[tuple[str, str, str, float]] = [
        ("llamacpp:prompt_tokens_total", "counter", "Prompt tokens evaluated.", c.prompt_tokens),
        ("llamacpp:prompt_tokens_cached_total", "counter", "Prompt tokens that were in the cache.",
         c.cached_tokens),
        ("llamacpp:prompt_seconds_total", "counter", "Seconds of prompts.", c.prompt_s),
        ("llamacpp:tokens_predicted_total", "counter", "Tokens generated.", c.predicted_tokens),
        ("llamacpp:tokens_predicted_seconds_total", "counter", "Seconds of generation.",
         c.predicted_s),
        ("llamacpp:n_decode_total", "counter", "Decodes of the model.", decodes),
        ("llamacpp:n_tokens_max", "counter", "Tokens of the longest text.", c.most_tokens),
        ("llamacpp:spec_decode_num_drafts_total", "counter", "Drafts.", spec.num_drafts),
        ("llamacpp:spec_decode_num_draft_tokens_total", "counter", "Drafted tokens.",
         spec.num_draft_tokens),
        ("llamacpp:spec_decode_num_accepted_tokens_total", "counter", "Accepted drafted tokens.",
         spec.num_accepted_tokens),
        ("llamacpp:prompt_tokens_seconds", "gauge", "Prompt tokens a second.", prompt_rate),
        ("llamacpp:predicted_tokens_seconds", "gauge", "Tokens a second of one text.", rate),
        ("llamacpp:requests_processing", "gauge", "Texts that run.", min(n_texts, n_parallel)),
        ("llamacpp:requests_deferred", "gauge", "Texts that wait.", max(0, n_texts - n_parallel)),
        ("llamacpp:n_busy_slots_per_decode", "gauge", "Tokens generated by a decode.",
         stats.generated_tokens / decodes if decodes else 0.0),
        ("llamabranch:texts_total", "counter", "Texts that have ended.", c.texts),
        ("llamabranch:cancelled_total", "counter", "Requests whose client went away.", c.cancelled),
        ("llamabranch:shared_prompt_tokens_total", "counter",
         "Prompt tokens shared with a running text.", stats.shared_prompt_tokens),
        ("llamabranch:preemptions_total", "counter", "Texts that had to make room and were read again.",
         stats.preemptions),
        ("llamabranch:branches", "gauge", "Nodes of branches.", len(service.branches)),
    ]  # fmt: skip
    lines = [
        f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {value}"
        for name, kind, text, value in rows
    ]
    lines.append(
        "# HELP llamabranch:requests_total Answers by status.\n# TYPE llamabranch:requests_total counter"
    )
    lines += [
        f'llamabranch:requests_total{{status="{status}"}} {n}'
        for status, n in sorted(c.requests.items())
    ]
    started = str(int(time() - 0) and service.created).encode()
    await call.reply(
        ("\n".join(lines) + "\n").encode(),
        headers=[(b"process-start-time-unix", started)],
        kind=b"text/plain; version=0.0.4",
    )
