"""A page in Debian's Chromium: browser, server, axe-core; skipped with a reason where one is absent."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

LINK = re.compile(r"http://127\.0\.0\.1:\d+/#\S+")
QUIET = [  # no requests of the browser's own
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-pings",
]
PATIENCE_MS = float(os.environ.get("PATIENCE_MS", 60_000))  # the machine may be busy


def chromium_path() -> str | None:
    """Return where Chromium is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Run Chromium; skip the test where it, or Playwright, is absent."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("needs playwright: pip install playwright")
    path = chromium_path()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    arguments = [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield running
        finally:
            running.close()


@dataclass
class Server:
    """``llamabranch open`` in a process of its own."""

    process: subprocess.Popen[str]
    link: str
    cookies: list[Any] = field(default_factory=list)  # of the first who came by the link
    requests: list[str] = field(default_factory=list)

    @property
    def base(self) -> str:
        """Its address without the token."""
        return self.link.partition("#")[0]


def _link(lines: IO[str] | None) -> str:
    for line in lines or ():
        found = LINK.search(line)
        if found:
            return found[0]
    raise AssertionError("the server ended before it told its link")


@contextmanager
def server(
    folder: Path, *arguments: str, port: int = 0, config: Path | None = None
) -> Iterator[Server]:
    """Run ``llamabranch open`` over a file in a folder; its settings are kept there too."""
    command = [sys.executable, "-m", "llamabranch.cli", "open", *arguments, "--no-browser"]
    command += ["--port", str(port), "--file", str(folder / "tale.loom.jsonl")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CONFIG_HOME": str(config or folder)}
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        yield Server(process, _link(process.stdout))
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
        log.close()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


@contextmanager
def visiting(browser: Browser, served: Server, **settings: object) -> Iterator[Page]:
    """Open the page in a context of its own; record what it requests and what goes wrong."""
    context: BrowserContext = browser.new_context(**settings)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: served.requests.append(request.url))
    if served.cookies:
        context.add_cookies(served.cookies)
        page.goto(served.base)
    else:
        with page.expect_response("**/loom/session"):  # then there is a cookie
            page.goto(served.link)
        page.wait_for_url(served.base)
        served.cookies += context.cookies()
    try:
        yield page
        assert wrong == []
        assert {urlsplit(url).hostname for url in served.requests} <= {
            "127.0.0.1",
            "localhost",
            None,
        }
    except BaseException:
        print(wrong, page.evaluate("() => ({...document.documentElement.dataset})"))
        raise
    finally:
        context.close()


def state(page: Page, *names: str) -> None:
    """Wait until the page is in one of these states."""
    page.wait_for_function(
        "names => names.includes(document.documentElement.dataset.state)", arg=list(names)
    )


def idle(page: Page) -> None:
    """Wait until no job runs, as the page knows, nothing is fetched, and everything is drawn."""
    page.wait_for_function(
        """() => { const {busy, state} = document.documentElement.dataset;
        return busy === undefined && ["ready", "read-only"].includes(state); }"""
    )


def begin(page: Page, text: str = "Once upon a time there was a little fox who") -> None:
    """Type a beginning into the empty page and have it continued three times."""
    page.locator("#begin").fill(text)
    page.locator("#begin").press("Control+Enter")
    page.locator(".shoot").nth(2).wait_for()
    idle(page)


def axe() -> str:
    """Return axe-core's source; skip the test where it is absent."""
    try:
        return files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    except ImportError:
        pytest.skip("needs axe-core: pip install axe-playwright-python")
