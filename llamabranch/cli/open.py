"""``llamabranch open``: a page in the browser to branch and see texts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import webbrowser
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llamabranch import AsyncEngine, ConfigError, hub
from llamabranch.serve import ServeSettings

from .console import Console
from .drafters import open_pair, resolve
from .options import DRAFT_OPTIONS, MODEL, PAGE, Given, argument, option, with_options

if TYPE_CHECKING:
    from llamabranch.serve.page import Page

_PARALLEL, _SEQUENCES = 8, 24  # texts at a time; sequences, also for forks
_SUFFIX = ".loom.jsonl"


@with_options(f"settings {DRAFT_OPTIONS} chat_template as_json verbose", draft="auto")
def open(
    given: Given,
    console: Console,
    named: str | None = argument("MODEL", "The same as -m.", MODEL),
    file: Path | None = option(PAGE, "--file FILE", f"NAME{_SUFFIX}; else one per model."),
    port: int = option(PAGE, "--port N", "Any free one if it is taken.", 8137, max=65_535),
    browser: bool = option(PAGE, "--browser/--no-browser", "Open a browser.", True),
    read_only: bool = option(PAGE, "--read-only", "Write nothing.", False),
) -> None:
    """Branch and see texts in the browser.

    llamabranch open smollm2-135m:Q8_0
    llamabranch open a.gguf --file tale.loom.jsonl --no-browser

    The page listens on 127.0.0.1 only. Its link works once; Enter prints another.
    """
    given = replace(given, model=named or given.model or hub.BUNDLED_TARGET)
    from llamabranch.loom import Loom, front_of
    from llamabranch.serve.server import Server

    names = resolve(given, console)
    document = _document(file, names[0])

    def open_engine() -> AsyncEngine:
        context, drafter = open_pair(
            given, names, console, n_texts=_PARALLEL, n_seq_max=_SEQUENCES, prefix_cache=True
        )
        config = given.config()
        return AsyncEngine(context, drafter, config, max_tokens=None, parallel=_PARALLEL)

    def ready(_url: str, name: str) -> None:
        loom.ready()
        console.note(f"{name} is loaded")

    settings = ServeSettings(port=port, shutdown_timeout_s=0.0, log_requests=False)
    try:
        server = Server(open_engine, settings, ready, console.note)
    except ConfigError:
        server = Server(open_engine, replace(settings, port=0), ready, console.note)
        console.note(f"port {port} is taken: using {server.port}")
    loom = Loom(
        document, server.port, lambda: server.service, read_only=read_only,
        draft="+".join(names[1]) or "none",
    )  # fmt: skip
    server.front = front_of(loom)
    console.on_opening = loom.opening
    path, loom.journal.complain = loom.journal.path, console.note
    link = show_link(loom.guard, server.url, console, url=server.url, file=str(path))
    if not console.silent:
        console.note(f"document: {path}; scripts send Authorization: Bearer {loom.guard.key}")
    if loom.journal.read_only is not None:
        cause = loom.journal.cause and f" ({loom.journal.cause})"
        console.note(f"{path.name} is read-only. {loom.journal.read_only}{cause}")
    if browser:
        threading.Thread(target=webbrowser.open, args=(link,), daemon=True).start()
    server.run()


def _document(file: Path | None, target: str) -> Path:
    """Return the document's file; the folder of the default file is created.

    Raises:
        ConfigError: the folder of a named file does not exist.
    """
    if file is not None:
        if not file.name:
            raise ConfigError("--file has no name of a file", hint=f"for example tale{_SUFFIX}")
        if not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent}")
        return file
    data = Path(os.environ.get("XDG_DATA_HOME") or "")
    if not data.is_absolute():  # the XDG specification says to ignore relative paths
        data = Path.home() / ".local/share"
    folder = data / "llamabranch"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{Path(target).stem.replace(':', '-')}{_SUFFIX}"


def show_link(page: Page, where: str, console: Console, **more: str) -> str:
    """Print the link of a page, and another one whenever Enter is pressed; return the first.

    Args:
        page: the page.
        where: its address.
        console: prints.
        more: further fields of the first line of ``--json``.
    """

    def show(**more: str) -> str:
        link = f"{where}/#{page.link()}"
        console.line(f"the page: {link}")
        console.answer({"link": link, **more})
        return link

    first = show(key=page.key, **more)

    def listen() -> None:
        with suppress(OSError, ValueError):
            for _ in sys.stdin:
                show()

    with suppress(AttributeError, ValueError):  # Windows, or a thread
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # then a read in the background fails
    if sys.stdin is not None:  # None means that it was closed when the process started
        threading.Thread(target=listen, daemon=True).start()
    return first
