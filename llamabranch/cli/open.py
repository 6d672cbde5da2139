"""``llamabranch open``: a page in the browser to branch, see and compare texts."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from llamabranch import AsyncEngine, ConfigError, Context, hub
from llamabranch.serve import ServeSettings

from ..loading import LoadOptions
from .bundles import option, with_bundles
from .console import Console
from .files import load_function
from .options import DraftFlags, OutputFlags

if TYPE_CHECKING:
    from llamabranch.loom import Loom
    from llamabranch.serve.server import Server

_BUNDLED = "tale-target"
_PARALLEL, _SEQUENCES = 8, 24  # texts at a time; sequences, also for forks
_MOST_CELLS = 8192
_MOST_PORTS = 20
_SUFFIX = ".loom.jsonl"


@dataclass(frozen=True)
class PageFlags:
    """The document, and where the page listens."""

    panel: ClassVar[str] = "Page"

    compare: str | None = option(None, "A second model.", metavar="MODEL2")
    file: Path | None = option(
        None, f"NAME{_SUFFIX}; created if missing.  [default: one per model]"
    )
    constraint: str | None = option(
        None,
        "A Python function that the page's bar offers as a rule. It gets the text so far and returns "
        "False if no valid text starts with it.",
        metavar="FILE.py:NAME",
    )
    port: int = option(8137, "The port, or the next free one.", max=65_535)
    browser: bool = option(True, "Open a browser.", "--browser/--no-browser")
    read_only: bool = option(False, "Write nothing.", "--read-only")

    def path(self, target: str) -> Path:
        """Return the document's file; the folder of the default file is created.

        Raises:
            ConfigError: the folder of a named file does not exist.
        """
        if self.file is not None:
            if not self.file.parent.is_dir():
                raise ConfigError(f"there is no folder {self.file.parent}")
            return self.file
        folder = _folder("XDG_DATA_HOME", ".local/share")
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{Path(target).stem.replace(':', '-')}{_SUFFIX}"


@with_bundles
def open(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Default: the bundled tale model.")
    ] = None,
    *,
    page: PageFlags,
    models: DraftFlags,
    output: OutputFlags,
) -> None:
    """Branch, see and compare texts in the browser.

    The page listens on 127.0.0.1 only, and its link works once; press Enter for another one.
    """
    with output.console() as console:
        from llamabranch.loom import Loom, front_of
        from llamabranch.serve.server import Server

        constraint = page.constraint and (page.constraint, load_function(page.constraint))
        models = replace(models, target=model or models.target or _BUNDLED)
        target, drafters = models.resolve(console)
        if page.compare is not None:
            hub.resolve(page.compare)
        partner: list[Context] = []
        of_drafts = LoadOptions(n_seq_max=_SEQUENCES, prefix_cache=True)
        if models.n_ctx is None:
            models = replace(models, n_ctx=_MOST_CELLS)

        def open_engine() -> AsyncEngine:
            names = target, drafters
            context, drafter = models.open_pair(names, console, of_drafts, of_drafts)
            if page.compare is not None:
                same = LoadOptions(
                    n_seq_max=4,
                    prefix_cache=True,
                    kv_type=context.kv_type,
                    flash_attention=context.params.flash_attention,
                )
                partner.append(models.open(page.compare, console, **same))
            return AsyncEngine(
                context, drafter, models.config(), max_tokens=None, parallel=_PARALLEL
            )

        def ready(_url: str, name: str) -> None:
            loom.ready()
            console.note(f"{name} is loaded")

        def listen(settings: ServeSettings) -> Server:
            return Server(open_engine, settings, ready, console.note)

        server = _listening(page.port, listen, console)
        loom = Loom(
            page.path(target), server.port, lambda: server.service,
            lambda: partner[0] if partner else None, read_only=page.read_only,
            draft="+".join(drafters) or "none",
            settings_file=_folder("XDG_CONFIG_HOME", ".config") / "page.json",
            constraint=constraint or None,
        )  # fmt: skip
        server.front = front_of(loom)
        console.on_opening = loom.opening
        _show_link(loom, server.url, console, browser=page.browser)
        server.run()


def _folder(variable: str, usual: str) -> Path:
    folder = Path(os.environ.get(variable) or "")
    if not folder.is_absolute():  # the XDG specification says to ignore relative paths
        folder = Path.home() / usual
    return folder / "llamabranch"


def _listening(port: int, make: Callable[[ServeSettings], Server], console: Console) -> Server:
    """Return a server on the port, or on the next one that is free."""
    for number in range(port, min(port + _MOST_PORTS, 65_536)):
        try:
            server = make(ServeSettings(port=number, shutdown_timeout_s=0.0))
        except ConfigError:
            continue
        if port and number != port:
            console.note(f"port {port} is taken: using {number}")
        return server
    return make(ServeSettings(port=0, shutdown_timeout_s=0.0))


def _show_link(loom: Loom, url: str, console: Console, *, browser: bool) -> None:
    """Print the link, and another one whenever Enter is pressed."""

    def link() -> str:
        return f"{url}/#{loom.guard.link()}"

    def show(found: dict[str, object]) -> None:
        console.line(f"the page: {found['link']}")
        console.answer(found)

    first, path, key = link(), loom.journal.path, loom.guard.key
    show({"link": first, "url": url, "key": key, "file": str(path)})
    if not console.silent:
        console.note(f"document: {path}; scripts send Authorization: Bearer {key}")
    if loom.journal.read_only is not None:
        console.note(f"{path.name} is read-only: {loom.journal.read_only}")

    def listen() -> None:
        with suppress(OSError, ValueError):
            for _ in sys.stdin:
                show({"link": link()})

    if _reads_terminal():
        threading.Thread(target=listen, daemon=True).start()
    if browser:
        threading.Thread(target=webbrowser.open, args=(first,), daemon=True).start()


def _reads_terminal() -> bool:
    """Return whether standard input may be read; in the background this would stop the program."""
    with suppress(OSError, ValueError):
        if sys.platform != "win32" and sys.stdin.isatty():
            return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return True
