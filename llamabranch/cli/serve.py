"""``llamabranch serve``: an HTTP server with OpenAI's and Anthropic's API."""

from __future__ import annotations

import logging
import os
from typing import Any

from llamabranch import AsyncEngine
from llamabranch.serve import ServeSettings, require_server

from . import options as opt
from .console import Console
from .drafters import open_pair, resolve
from .open import show_link
from .options import SERVER, Given, option, with_options

_KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server reads it too


@with_options(
    f"max_tokens {opt.SAMPLING_OPTIONS} model draft {opt.MEMORY_OPTIONS} {opt.FOLDER_OPTIONS} "
    "as_json verbose"
)
def serve(
    given: Given,
    console: Console,
    host: str = option(SERVER, "--host HOST", "The address to listen on.", "127.0.0.1"),
    port: int = option(SERVER, "--port N", "Its port; 0: any free one.", 8080),
    api_key: list[str] | None = option(
        SERVER, "--api-key KEY", f"Clients need it; or {_KEY_VARIABLE}."
    ),
    limits: list[str] | None = option(
        SERVER, "--limit NAME=VALUE", "A limit, such as max_queue=4."
    ),
    parallel: int = option(
        SERVER, "-np --parallel N", "Texts at a time; they share -c.", 8, min=1, max=255
    ),
    drop_line: list[str] | None = option(
        SERVER, "--drop-line REGEX", "Leave out such system prompt lines."
    ),
) -> None:
    """Serve a model over HTTP, with OpenAI's and Anthropic's API.

    llamabranch serve -m model.gguf -c 32768
    llamabranch serve -hf Qwen/Qwen3-4B-GGUF --port 9000 --limit alias=qwen

    Sampling options are the defaults of requests. After the first Ctrl-C running
    requests have some time to end; the second one ends them at once.
    """
    require_server()  # before a model is loaded
    from llamabranch.serve.server import Server

    logging.basicConfig(format="%(message)s")  # to standard error
    config = given.config()
    names = resolve(given, console, has_grammar=True)
    params = given.params(given.seed)
    own: dict[str, Any] = {
        "host": host, "port": port, "parallel": parallel, "max_tokens": given.max_tokens,
        "sampling": params, "drop_lines": tuple(drop_line or ()),
        "api_keys": _parts(api_key or [os.environ.get(_KEY_VARIABLE, "")]) or ("",) * bool(api_key),
    }  # fmt: skip
    more: dict[str, Any] = {
        name: _parts([value])
        if name in ("allow_origins", "allowed_hosts")
        else opt.setting_value(value)
        for name, value in opt.named_values(
            "--limit", limits, {*ServeSettings.__annotations__} - {*own}
        )
    }
    serving = ServeSettings(**own, **more)

    def open_engine() -> AsyncEngine:
        context, drafter = open_pair(
            given, names, console, n_texts=parallel, n_seq_max=parallel, prefix_cache=True
        )
        return AsyncEngine(
            context, drafter, config, sampling=params, max_tokens=None,
            max_waiting=serving.max_queue, parallel=parallel,
        )  # fmt: skip

    def ready(url: str, name: str) -> None:
        if (service := server.service) is None:  # it is set before this is called
            return
        many, one = service.ctx.n_ctx // parallel, service.n_ctx
        texts = f"{parallel} texts of {many:,} tokens, or 1 of {one:,}"
        key = "KEY" if serving.api_keys else "none"
        console.write(
            f"{name} on {url}: {texts}\n"
            f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}\n"
            f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key}\n"
        )
        show_link(server.page, server.page_url, console, url=url, model=name)

    server = Server(open_engine, serving, ready, console.note)
    server.run()


def _parts(given: list[str]) -> tuple[str, ...]:
    parts = [part.strip() for text in given for part in text.split(",")]
    return tuple(filter(None, parts))
