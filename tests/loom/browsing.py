"""A page in Debian's Chromium: browser, server, axe-core; skipped with a reason where one is absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from paging import Opened
    from playwright.sync_api import Browser, BrowserContext, Page

QUIET = [  # no requests of the browser's own
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-domain-reliability", "--disable-sync", "--metrics-recording-only", "--no-first-run",
    "--no-pings",
]  # fmt: skip
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


@contextmanager
def visiting(browser: Browser, served: Opened, **settings: object) -> Iterator[Page]:
    """Open the page in a context of its own; record what it requests and what goes wrong."""
    context: BrowserContext = browser.new_context(**settings)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: served.requests.append(request.url))
    if served.cookies:
        context.add_cookies(served.cookies)
        page.goto(served.url)
    else:
        with page.expect_response("**/loom/session"):  # then there is a cookie
            page.goto(served.link)
        page.wait_for_url(f"{served.url}/")
        served.cookies += context.cookies()
    try:
        yield page
        assert wrong == []
        hosts = {urlsplit(url).hostname for url in served.requests}
        assert hosts <= {"127.0.0.1", "localhost", None}
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


def written(page: Page) -> list[str]:
    """Begin, go to the first continuation, and return the texts of the tokens that are shown."""
    begin(page)
    page.locator(".shoot").first.click()
    idle(page)
    return tokens(page)


def tokens(page: Page) -> list[str]:
    """Return the texts of the tokens that are shown."""
    return page.locator("#text [data-token]").all_text_contents()


def lens_of(page: Page) -> object:
    """Return the lens of the page."""
    return page.evaluate("document.documentElement.dataset.lens")


def axe() -> str:
    """Return axe-core's source; skip the test where it is absent."""
    try:
        return files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    except ImportError:
        pytest.skip("needs axe-core: pip install axe-playwright-python")
