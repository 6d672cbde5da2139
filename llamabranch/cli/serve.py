"""``llamabranch serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from llamabranch import AsyncEngine, ConfigError, Model
from llamabranch import serve as server
from llamabranch.serve import ServeSettings

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .console import print_json
from .drafters import COPYING, has_model
from .jsonl import read_text
from .opening import open_pair
from .options import (
    SAMPLING,
    DraftedOptions,
    OutputOptions,
    SamplingOptions,
    SharedOptions,
    TemplateOptions,
    given_seed,
    limit,
)
from .prompts import trained_length

_MOST_CELLS = 8192  # of the cache, unless --n-ctx is given
_CELLS_PER_TEXT = 2048  # at least, where each has its own
_PARALLEL = 8
_KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server's, too


@dataclass(frozen=True)
class ServerOptions:
    """Where the server listens, whom it serves, and its limits."""

    panel: ClassVar[str] = "Server"

    host: str = option("127.0.0.1", "The address to listen on.")
    port: int = option(8080, "The port; 0 is any that is free.")
    api_key: list[str] | None = option(
        None, f"A key that clients must send; may be repeated.  [env: {_KEY_VARIABLE}]"
    )
    api_key_file: Path | None = option(None, "A file with one key a line.")
    allow_origin: list[str] | None = option(
        None,
        "An origin whose web pages may call the server; may be repeated.",
        "--allow-origin",
        "--cors-origins",
        metavar="ORIGIN|localhost|*",
    )
    allowed_host: list[str] | None = option(
        None, "A name by which the server may be called, besides localhost; may be repeated."
    )
    alias: str | None = option(
        None, "The model's name for clients; several with commas between.", "--alias", "-a"
    )
    max_queue: int = option(256, "Requests that may wait; more get 429.", min=0)
    max_body: str = option("8M", "The longest body, such as 500k.", metavar="BYTES")
    request_timeout: float = option(
        600.0,
        "Seconds after which a request is cancelled; 0 is never.",
        "--request-timeout",
        "--timeout",
        "-to",
        min=0,
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get once the server is to end.", min=0
    )
    metrics: bool = option(True, "Answer /metrics.", "--metrics/--no-metrics")
    slots: bool = option(True, "Answer /slots.", "--slots/--no-slots")
    max_branches: int = option(4096, "Nodes of branches at most.", min=0)
    branch_ttl: float = option(
        3600.0, "Seconds after which branches that nobody uses are deleted.", min=0
    )
    snapshot_dir: Path | None = option(
        None, "A folder where branches are kept while the server does not run."
    )
    log_requests: bool = option(False, "Print one line for each request.", "--log-requests")

    def settings(self) -> ServeSettings:
        """Return them as the library takes them.

        Raises:
            ConfigError: a value out of range, or a file that cannot be read.
        """
        return ServeSettings(
            host=self.host,
            port=self.port,
            api_keys=self._keys(),
            allow_origins=_parts(self.allow_origin),
            allowed_hosts=_parts(self.allowed_host),
            alias=self.alias,
            max_queue=self.max_queue,
            max_body=server.parse_bytes(self.max_body),
            request_timeout_s=self.request_timeout,
            shutdown_timeout_s=self.shutdown_timeout,
            max_branches=self.max_branches,
            branch_ttl_s=self.branch_ttl,
            snapshot_dir=self.snapshot_dir,
            metrics=self.metrics,
            slots=self.slots,
            log_requests=self.log_requests,
        )

    def _keys(self) -> tuple[str, ...]:
        keys = list(_parts(self.api_key))
        if self.api_key_file is not None:
            keys += filter(None, map(str.strip, read_text(self.api_key_file).splitlines()))
            if not keys:
                raise ConfigError(f"{self.api_key_file} holds no key")
        variable = os.environ.get(_KEY_VARIABLE)
        return tuple(keys) or _parts([variable] if variable else None)


@dataclass(frozen=True)
class DefaultOptions(SamplingOptions):
    """What holds for requests that do not say otherwise."""

    panel: ClassVar[str] = SAMPLING

    max_tokens: int | None = option(
        -1,
        "The limit of texts whose request has none; -1: the context.",
        "--max-tokens",
        "--predict",
        "--n-predict",
        "-n",
        callback=limit,
    )
    seed: int | None = option(
        None,
        "The seed of requests that have none; -1 is another one each.",
        "--seed",
        "-s",
        callback=given_seed,
    )


@dataclass(frozen=True)
class ServedOptions(SharedOptions):
    """The context of the server."""

    parallel: int = option(
        -1, "Texts at a time at most; -1: 8.", "--parallel", "-np", min=-1, max=255
    )

    def sized(self, trained: int | None, drafters: tuple[str, ...]) -> ServedOptions:
        """Return them with the number of texts, and the layout and size of their cache.

        As in llama-server, texts whose number is given have cells of their own; not where a model
        drafts, since drafts differ in length.

        Args:
            trained: the length that the model was trained for, if it is known.
            drafters: what drafts.

        Raises:
            ConfigError: no text at a time.
        """
        if self.parallel == 0:
            raise ConfigError("--parallel must be at least 1, or -1")
        parallel = _PARALLEL if self.parallel < 0 else self.parallel
        kv_unified, n_ctx = self.kv_unified, self.n_ctx
        if kv_unified is None and (self.parallel < 2 or has_model(drafters)):
            kv_unified = True
        if n_ctx is None:
            n_texts = 1 if kv_unified else parallel
            n_ctx = max(_MOST_CELLS, n_texts * _CELLS_PER_TEXT)
            n_ctx = min(n_ctx, n_texts * (trained or n_ctx))
        return replace(self, parallel=parallel, kv_unified=kv_unified, n_ctx=n_ctx)


@with_bundles
def serve(
    *,
    listening: ServerOptions,
    models: DraftedOptions,
    template: TemplateOptions,
    defaults: DefaultOptions,
    runtime: ServedOptions,
    output: OutputOptions,
) -> None:
    """Serve a model over HTTP: OpenAI's API, scores of given text, and branches.

    Sampling options are for what a request leaves out. The first Ctrl-C, or SIGTERM, lets running
    requests end in time; the second ends them.
    """
    with output.console() as console, ExitStack() as stack:
        config, chat_template = models.config(), template.template
        settings = replace(
            listening.settings(),
            max_tokens=defaults.max_tokens,
            seed=defaults.seed,
            sampling=defaults.params(),
        )
        target, drafters = models.resolve(console)
        if models.draft in (None, "auto") and all(name in COPYING for name in drafters):
            drafters = ("grammar", *drafters)  # what a schema forces is not copied from anywhere
        with Model(models.find(target), vocab_only=True) as model:
            sampling = defaults.without_eog(settings.sampling, model)
            runtime = runtime.sized(trained_length(model), drafters)
        settings = replace(settings, sampling=sampling, parallel=runtime.parallel)

        def open_engine() -> AsyncEngine:
            of_drafts = LoadOptions(n_seq_max=runtime.parallel, prefix_cache=True)
            of_target = LoadOptions(
                **of_drafts,
                cache_ram=runtime.cache_ram << 20,
                kv_unified="auto" if runtime.kv_unified is None else runtime.kv_unified,
                chat_template=chat_template,
            )
            names = target, drafters
            context, drafter = open_pair(runtime, names, console, stack, of_target, of_drafts)
            return AsyncEngine(
                context, drafter, config, sampling=sampling, max_tokens=None,
                max_waiting=settings.max_queue, parallel=runtime.parallel,
            )  # fmt: skip

        def ready(url: str, name: str) -> None:
            if output.as_json:
                print_json({"url": url, "model": name})
            else:
                console.line(f"serving {name} on {url}")

        server.serve(open_engine, settings, ready=ready, log=console.note)


def _parts(given: list[str] | None) -> tuple[str, ...]:
    parts = [part.strip() for text in given or () for part in text.split(",")]
    return tuple(filter(None, parts))
