"""``llamabranch serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llamabranch import AsyncEngine, ConfigError, Context, Model
from llamabranch import serve as server
from llamabranch.serve import ServeSettings

from .bundles import with_bundles
from .console import print_json
from .drafters import MTP, make_drafter, note_translation
from .jsonl import read_text
from .options import (
    SAMPLING,
    CacheRam,
    DraftOptions,
    ModelOptions,
    OutputOptions,
    Parallel,
    RuntimeOptions,
    SamplingOptions,
    TemplateOptions,
    UnifiedCache,
    limit,
    seed_given,
)
from .prompts import trained_length

_SERVER = "Server"
_MOST_CELLS = 8192  # of the cache, unless --n-ctx is given
_KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server's, too


@with_bundles
def serve(
    *,
    host: Annotated[
        str, typer.Option(help="The address to listen on.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port; 0 is any that is free.", rich_help_panel=_SERVER)
    ] = 8080,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A key that clients must send; may be repeated.  [env: {_KEY_VARIABLE}]",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with one key a line.", rich_help_panel=_SERVER)
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            "--cors-origins",
            metavar="ORIGIN|localhost|*",
            help="An origin whose web pages may call the server; may be repeated.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which the server may be called, besides localhost; may be repeated.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    alias: Annotated[
        str | None,
        typer.Option(
            "--alias",
            "-a",
            help="The model's name for clients; several with commas between.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(min=0, help="Requests that may wait; more get 429.", rich_help_panel=_SERVER),
    ] = 256,
    max_body: Annotated[
        str,
        typer.Option(
            metavar="BYTES", help="The longest body, such as 500k.", rich_help_panel=_SERVER
        ),
    ] = "8M",
    request_timeout: Annotated[
        float,
        typer.Option(
            "--request-timeout",
            "--timeout",
            "-to",
            min=0,
            help="Seconds after which a request is cancelled; 0 is never.",
            rich_help_panel=_SERVER,
        ),
    ] = 600.0,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that running requests get once the server is to end.",
            rich_help_panel=_SERVER,
        ),
    ] = 30.0,
    metrics: Annotated[
        bool,
        typer.Option("--metrics/--no-metrics", help="Answer /metrics.", rich_help_panel=_SERVER),
    ] = True,
    slots: Annotated[
        bool, typer.Option("--slots/--no-slots", help="Answer /slots.", rich_help_panel=_SERVER)
    ] = True,
    max_branches: Annotated[
        int,
        typer.Option(min=0, help="Nodes of branches at most.", rich_help_panel=_SERVER),
    ] = 4096,
    branch_ttl: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds after which branches that nobody uses are deleted.",
            rich_help_panel=_SERVER,
        ),
    ] = 3600.0,
    snapshot_dir: Annotated[
        Path | None,
        typer.Option(
            help="A folder where branches are kept while the server does not run.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    log_requests: Annotated[
        bool,
        typer.Option(
            "--log-requests", help="Print one line for each request.", rich_help_panel=_SERVER
        ),
    ] = False,
    models: ModelOptions,
    drafting: DraftOptions,
    template: TemplateOptions,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--predict",
            "--n-predict",
            "-n",
            callback=limit,
            help="The limit of texts whose request has none; -1: the context.",
            rich_help_panel=SAMPLING,
        ),
    ] = -1,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            "-s",
            callback=seed_given,
            help="The seed of requests that have none; -1 is another one each.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    sampling: SamplingOptions,
    cache_ram: CacheRam = 0,
    parallel: Parallel = 8,
    kv_unified: UnifiedCache = None,
    runtime: RuntimeOptions,
    output: OutputOptions,
) -> None:
    """Serve a model over HTTP: OpenAI's API, scores of given text, and branches.

    Sampling options are for what a request leaves out. The first Ctrl-C, or SIGTERM, lets running requests
    end in time; the second ends them.
    """
    with output.console() as console, ExitStack() as stack:
        config, params = drafting.config(), sampling.params()
        settings = ServeSettings(
            host=host,
            port=port,
            api_keys=_keys(api_key, api_key_file),
            allow_origins=tuple(_listed(allow_origin)),
            allowed_hosts=tuple(_listed(allowed_host)),
            alias=alias,
            parallel=parallel,
            max_queue=max_queue,
            max_body=server.parse_bytes(max_body),
            request_timeout_s=request_timeout,
            shutdown_timeout_s=shutdown_timeout,
            max_branches=max_branches,
            branch_ttl_s=branch_ttl,
            snapshot_dir=snapshot_dir,
            metrics=metrics,
            slots=slots,
            log_requests=log_requests,
            max_tokens=max_tokens,
            seed=seed,
            sampling=params,
        )
        target_name, drafters = models.resolve(console)
        path, chat_template = models.find(target_name), template.template
        with Model(path, vocab_only=True) as model:
            settings = replace(settings, sampling=sampling.without_eog(params, model))
            trained = trained_length(model)
        if runtime.n_ctx is None:
            runtime = replace(runtime, n_ctx=min(trained or _MOST_CELLS, _MOST_CELLS))

        def open_engine() -> AsyncEngine:
            context = runtime.open(
                target_name,
                console,
                stack,
                n_seq_max=parallel,
                prefix_cache=True,
                cache_ram=cache_ram << 20,
                kv_unified=kv_unified is not False,
                load_mtp=MTP in drafters,
                chat_template=chat_template,
            )

            def open_draft(name: str) -> Context:
                return runtime.open_draft(
                    name, context, console, stack, n_seq_max=parallel, prefix_cache=True
                )

            drafter = make_drafter(drafters, open_draft, width=1)
            note_translation(drafter, context.model, console)
            return AsyncEngine(
                context, drafter if drafters else None, config, sampling=settings.sampling,
                max_tokens=None, max_waiting=max_queue, parallel=parallel,
            )  # fmt: skip

        def ready(url: str, name: str) -> None:
            if output.as_json:
                print_json({"url": url, "model": name})
            else:
                console.line(f"serving {name} on {url}")

        server.serve(open_engine, settings, ready=ready, log=console.note)


def _listed(given: list[str] | None) -> list[str]:
    return [part.strip() for text in given or () for part in text.split(",") if part.strip()]


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    keys = _listed(given)
    if file is not None:
        keys += [line.strip() for line in read_text(file).splitlines() if line.strip()]
        if not keys:
            raise ConfigError(f"{file} holds no key")
    variable = os.environ.get(_KEY_VARIABLE)
    return tuple(keys or _listed([variable] if variable else None))
