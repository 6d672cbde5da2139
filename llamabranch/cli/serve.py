"""``llamabranch serve``: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from llamabranch import AsyncEngine, ConfigError
from llamabranch import serve as server
from llamabranch.serve import ServeSettings, require_server

from ..arguments import nearest
from ..loading import LoadOptions
from .bundles import option, with_bundles
from .drafters import COPYING, has_model
from .files import read_text, text_lines
from .options import (
    LENGTH,
    MODEL,
    DraftFlags,
    OutputFlags,
    SamplingFlags,
    limit,
    read_template,
    setting_value,
    template_option,
    trained_length,
    vocabulary,
)

_MOST_CELLS = 8192  # cells of a cache that the texts share, unless --n-ctx is given
_CELLS_PER_TEXT = 2048  # the fewest cells of a text if each has its own
_PARALLEL = 8
_KEY_VARIABLE = "LLAMA_API_KEY"  # llama-server reads it too
_LIMITS = (
    "max_queue", "max_body", "max_choices", "send_timeout_s", "shutdown_timeout_s", "metrics",
)  # fmt: skip


@dataclass(frozen=True)
class ServerFlags:
    """Where the server listens, who may use it, and its limits."""

    panel: ClassVar[str] = "Server"
    first: ClassVar[str] = "host port api_key log_requests"

    host: str = option("127.0.0.1", "The address to listen on.")
    port: int = option(8080, "The port; 0 takes any free one.")
    api_key: list[str] | None = option(
        None, f"A key that clients must send; may be repeated.  [env: {_KEY_VARIABLE}]"
    )
    api_key_file: Path | None = option(None, "A file with one key per line.")
    allow_origin: list[str] | None = option(
        None,
        "An origin whose web pages may call the server; may be repeated.",
        "--allow-origin --cors-origins",
        metavar="ORIGIN|localhost|*",
    )
    allowed_host: list[str] | None = option(
        None, "A host name, besides localhost, that requests may use; may be repeated."
    )
    alias: str | None = option(
        None, "The model's name for clients; separate several with commas.", "--alias -a"
    )
    request_timeout: float = option(
        600.0,
        "Seconds after which a request is cancelled; 0 means never.",
        "--timeout --request-timeout -to",
        min=0,
    )
    log_requests: bool = option(False, "Print one line for each request.", "--log-requests")
    limits: list[str] | None = option(
        None,
        "Another limit or setting of llamabranch.serve.ServeSettings: "
        f"{', '.join(_LIMITS)}; may be repeated.",
        "--limit",
        metavar="NAME=VALUE",
    )

    def settings(self) -> ServeSettings:
        """Return the settings for the library.

        Raises:
            ConfigError: a value out of range, or a file that cannot be read.
        """
        settings = {name: getattr(self, name) for name in ("host", "port", "alias", "log_requests")}
        for text in self.limits or ():
            name, equals, value = text.partition("=")
            if name not in _LIMITS or not equals:
                raise ConfigError(f"no limit {text!r}", hint=nearest(name, _LIMITS, "limits"))
            settings[name] = setting_value(value)
        return ServeSettings(
            api_keys=self._keys(), allow_origins=_parts(self.allow_origin),
            allowed_hosts=_parts(self.allowed_host), request_timeout_s=self.request_timeout, **settings,
        )  # fmt: skip

    def _keys(self) -> tuple[str, ...]:
        keys = list(_parts(self.api_key))
        if self.api_key_file is not None:
            keys += filter(None, map(str.strip, text_lines(read_text(self.api_key_file))))
            if not keys:
                raise ConfigError(f"{self.api_key_file} holds no key")
        variable = os.environ.get(_KEY_VARIABLE)
        return tuple(keys) or _parts([variable] if variable else None)


@dataclass(frozen=True)
class ServedModels(DraftFlags):
    """The model, and the context of the server."""

    panel: ClassVar[str] = MODEL
    first: ClassVar[str] = "parallel"

    parallel: int = option(
        -1, "Most texts at a time; -1 means 8.", "--parallel -np", min=-1, max=255
    )
    max_tokens: int | None = option(
        -1,
        "The limit for requests that set none; -1: until the context is full.",
        LENGTH,
        callback=limit,
        rich_help_panel="Server",
    )
    chat_template: str | None = template_option(rich_help_panel="Server")

    def sized(self, trained: int | None, drafters: tuple[str, ...]) -> LoadOptions:
        """Return the number of texts, and the layout and size of their cache.

        As in llama-server, the cache can be divided among the texts if ``--parallel`` is set. With
        a draft model it is unified, because drafts differ in length. ``trained`` is the length that
        the model was trained for.
        """
        if self.parallel == 0:
            raise ConfigError("--parallel must be at least 1, or -1")
        parallel = _PARALLEL if self.parallel < 0 else self.parallel
        kv_unified = self.set("load").get("kv_unified")
        if kv_unified is None:
            kv_unified = True if self.parallel < 2 or has_model(drafters) else "auto"
        n_texts = 1 if kv_unified is True else parallel
        n_ctx = max(_MOST_CELLS, n_texts * _CELLS_PER_TEXT)
        n_ctx = self.n_ctx if self.n_ctx is not None else min(n_ctx, n_texts * (trained or n_ctx))
        more = LoadOptions(n_seq_max=parallel, n_ctx=n_ctx, prefix_cache=True)
        return {**more, "kv_unified": kv_unified}


@with_bundles
def serve(
    *,
    listening: ServerFlags,
    sampling: SamplingFlags,
    models: ServedModels,
    output: OutputFlags,
) -> None:
    """Serve a model over HTTP: OpenAI's API.

    Sampling options are the defaults for requests that leave them out. After the first Ctrl-C or SIGTERM
    running requests have some time to end; the second one ends them at once.
    """
    with output.console() as console:
        require_server()  # before a model is loaded
        config, template = models.config(), read_template(models.chat_template)
        settings = replace(
            listening.settings(),
            max_tokens=models.max_tokens,
            seed=sampling.seed,
            sampling=sampling.params(models),
        )
        target, drafters = models.resolve(console)
        if models.draft in (None, "auto") and all(name in COPYING for name in drafters):
            drafters = ("grammar", *drafters)  # text that a schema forces cannot be copied
        with vocabulary(target) as model:
            params = sampling.without_eog(settings.sampling, model)
            of_target = models.sized(trained_length(model), drafters)
        parallel = of_target["n_seq_max"] or _PARALLEL
        settings = replace(settings, sampling=params, parallel=parallel)

        def open_engine() -> AsyncEngine:
            of_drafts = LoadOptions(**of_target)
            del of_drafts["kv_unified"]
            more: LoadOptions = {**of_target, "chat_template": template}
            names = target, drafters
            context, drafter = models.open_pair(names, console, more, of_drafts)
            return AsyncEngine(
                context, drafter, config, sampling=params, max_tokens=None,
                max_waiting=settings.max_queue, parallel=parallel,
            )  # fmt: skip

        def ready(url: str, name: str) -> None:
            console.line(f"serving {name} on {url}")
            console.answer({"url": url, "model": name})

        server.serve(open_engine, settings, ready=ready, log=console.note)


def _parts(given: list[str] | None) -> tuple[str, ...]:
    parts = [part.strip() for text in given or () for part in text.split(",")]
    return tuple(filter(None, parts))
