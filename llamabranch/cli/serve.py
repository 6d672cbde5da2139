"""``llamabranch serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from llamabranch import AsyncEngine, ConfigError
from llamabranch import serve as server
from llamabranch.serve import ServeSettings, require_server

from . import options as opt
from .drafters import SUFFIX
from .files import read_text, text_lines
from .options import DEFAULTS, Given, option, setting_value, vocabulary

SERVER = "Server"
_PARALLEL = 8
_KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server reads it too


def serve(
    call: typer.Context,
    host: Annotated[
        str, option("--host", "The address to listen on.", SERVER, metavar="HOST")
    ] = "127.0.0.1",
    port: Annotated[int, option("--port", "0: any free one.", SERVER, metavar="N")] = 8080,
    api_key: Annotated[
        list[str] | None,
        option("--api-key", f"A key of clients, also {_KEY_VARIABLE}.", SERVER, metavar="KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None, option("--api-key-file", "One key a line.", SERVER, metavar="FILE")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option("--allow-origin --cors-origins", "Its pages may call.", SERVER, metavar="ORIGIN"),
    ] = None,
    limits: Annotated[
        list[str] | None,
        option("--limit", "A field of ServeSettings.", SERVER, metavar="NAME=VALUE"),
    ] = None,
    parallel: Annotated[
        int, option("-np --parallel", "Texts at a time; -1: 8.", SERVER, metavar="N", max=255)
    ] = -1,
    max_tokens: opt.Length = -1,
    temperature: opt.Temperature = DEFAULTS.temperature,
    top_k: opt.TopK = DEFAULTS.top_k,
    top_p: opt.TopP = DEFAULTS.top_p,
    min_p: opt.MinP = DEFAULTS.min_p,
    seed: opt.Seed = None,
    settings: opt.Settings = None,
    model: opt.ModelName = None,
    draft: opt.Draft = None,
    draft_max: opt.DraftMax = None,
    n_ctx: opt.ContextSize = None,
    threads: opt.Threads = None,
    gpu_layers: opt.GpuLayers = None,
    kv_types: opt.CacheType = None,
    flash_attn: opt.FlashAttention = "auto",
    as_json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """Serve a model over HTTP: OpenAI's API and scores of texts.

    llamabranch serve -m a.gguf -np 8
    llamabranch serve -hf Qwen/Qwen3-4B-GGUF --port 9000 --limit alias=qwen

    Sampling options are the defaults of requests. After the first Ctrl-C running
    requests have some time to end; the second one ends them at once.
    """
    given = Given.of(call)
    with given.console() as console:
        require_server()  # before a model is loaded
        logging.basicConfig(format="%(message)s")  # to standard error
        if parallel == 0:
            raise ConfigError("--parallel must be at least 1, or -1")
        n_texts = _PARALLEL if parallel < 0 else parallel
        config, limited = given.config(), _limits(limits)
        target, drafters = given.resolve(console)
        if draft in (None, "auto") and all(name == SUFFIX for name in drafters):
            drafters = ("grammar", *drafters)  # text that a schema forces cannot be copied
        with vocabulary(target) as opened:
            params = given.without_eog(given.params(), opened)
        serving = ServeSettings(
            host=host, port=port, api_keys=_keys(api_key, api_key_file),
            allow_origins=_parts(allow_origin), max_tokens=max_tokens, seed=seed, sampling=params,
            parallel=n_texts, **limited,
        )  # fmt: skip

        def open_engine() -> AsyncEngine:
            context, drafter = given.open_pair(
                (target, drafters), console, n_texts=n_texts, n_seq_max=n_texts, prefix_cache=True
            )
            return AsyncEngine(
                context, drafter, config, sampling=params, max_tokens=None,
                max_waiting=serving.max_queue, parallel=n_texts,
            )  # fmt: skip

        def ready(url: str, name: str) -> None:
            console.line(f"serving {name} on {url}")
            console.answer({"url": url, "model": name})

        server.serve(open_engine, serving, ready=ready, log=console.note)


def _limits(given: list[str] | None) -> dict[str, Any]:
    """Return the values of ``--limit``; ConfigError for a name that `ServeSettings` does not have."""
    own = {
        "host",
        "port",
        "api_keys",
        "allow_origins",
        "max_tokens",
        "seed",
        "sampling",
        "parallel",
    }
    names = sorted({f.name for f in fields(ServeSettings)} - own)
    limits: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if name not in names or not equals:
            raise ConfigError(f"no limit {text!r}", hint=f"NAME=VALUE of: {', '.join(names)}")
        limits[name] = _parts([value]) if name == "allowed_hosts" else setting_value(value)
    return limits


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    keys = list(_parts(given))
    if file is not None:
        keys += filter(None, map(str.strip, text_lines(read_text(file))))
        if not keys:
            raise ConfigError(f"{file} holds no key")
    variable = os.environ.get(_KEY_VARIABLE)
    return tuple(keys) or _parts([variable] if variable else None)


def _parts(given: list[str] | None) -> tuple[str, ...]:
    parts = [part.strip() for text in given or () for part in text.split(",")]
    return tuple(filter(None, parts))
