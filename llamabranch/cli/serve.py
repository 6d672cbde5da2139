"""``llamabranch serve``: an HTTP server with OpenAI's and Anthropic's API."""

from __future__ import annotations

import logging
import os
from typing import Annotated, Any

from llamabranch import AsyncEngine
from llamabranch.serve import ServeSettings, require_server

from . import options as opt
from .console import Console
from .drafters import open_pair, resolve
from .open import show_link
from .options import Given, option, with_options

_KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server reads it too


@with_options(
    "max_tokens",
    *opt.SAMPLING_OPTIONS,
    *("model", "draft", *opt.MODEL_OPTIONS[1:]),
    *opt.FOLDER_OPTIONS,
    *opt.OUTPUT_OPTIONS,
)
def serve(
    given: Given,
    console: Console,
    host: Annotated[
        str, option("--host", "The address to listen on.", opt.SERVER, metavar="HOST")
    ] = "127.0.0.1",
    port: Annotated[int, option("--port", "Its port; 0: any free one.", opt.SERVER, metavar="N")] = 8080,
    api_key: Annotated[
        list[str] | None,
        option("--api-key", f"A key of clients; also in {_KEY_VARIABLE}.", opt.SERVER, metavar="KEY"),
    ] = None,
    limits: Annotated[
        list[str] | None,
        option("--limit", "Another limit, such as max_queue=4.", opt.SERVER, metavar="NAME=VALUE"),
    ] = None,
    parallel: Annotated[
        int, option("-np --parallel", "Texts at a time; they share -c.", opt.SERVER, metavar="N", min=1, max=255)
    ] = 8,
    drop_line: Annotated[
        list[str] | None,
        option("--drop-line", "Leave out such system prompt lines.", opt.SERVER, metavar="REGEX"),
    ] = None,
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
        "api_keys": _parts(api_key or [os.environ.get(_KEY_VARIABLE, "")]),
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
        n_ctx = server.service.n_ctx if server.service is not None else 0
        texts = f"{parallel} texts of {n_ctx // parallel:,} tokens, or 1 of {n_ctx:,}"
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
