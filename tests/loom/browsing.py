"""A page in Debian's Chromium: browser, server, axe-core; skipped with a reason where one is absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from paging import Opened
    from playwright.sync_api import Browser, BrowserContext, Page

QUIET = [  # no requests of the browser's own
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-domain-reliability", "--disable-sync", "--metrics-recording-only", "--no-first-run",
    "--no-pings",
]  # fmt: skip
# Colours as Chromium paints them, so that oklch() and color-mix() are read as numbers; layers that are
# translucent are painted one over the other, from the page's own up.
CONTRAST = """([selector]) => {
  const pen = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d",
    {willReadFrequently: true});
  const painted = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll(selector)].filter((each) => each.offsetParent).map((element) => {
    const under = [];
    for (let up = element; up; up = up.parentElement) under.unshift(getComputedStyle(up).backgroundColor);
    const [ink, paper] = [[...under, getComputedStyle(element).color], under].map(painted).map(light);
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    return [element.className, ratio, paper];
  });
}"""
HOSTILE = [
    "</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>",
    "\u202eright to left\u202c", "\x1b[31mred\x1b[0m", "\x00nul",
    "]]> --> <!-- ${window.hacked = 1} {{7*7}}", "العربية हिन्दी 👩‍👩‍👧 \u2028 line",
]  # fmt: skip
PATIENCE_MS = float(os.environ.get("PATIENCE_MS", 60_000))  # the machine may be busy


@contextmanager
def browser() -> Iterator[Browser]:
    """Run Chromium; skip the test where it, or Playwright, is absent."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    arguments = [*QUIET, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def visiting(browser: Browser, served: Opened, **settings: object) -> Iterator[Page]:
    """Open the page in a context of its own, ready; record what it requests and what goes wrong."""
    context: BrowserContext = browser.new_context(**settings)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"{error}\n{error.stack}"))
    page.on("request", lambda request: served.requests.append(request.url))
    if served.cookies:
        context.add_cookies(served.cookies)
        page.goto(served.url)
    else:
        with page.expect_response("**/session"):  # then there is a cookie
            page.goto(served.link)
        page.wait_for_url(f"{served.url}/")
        served.cookies += context.cookies()
    state(page, "ready")
    try:
        yield page
        assert wrong == [], wrong
        hosts = {urlsplit(url).hostname for url in served.requests}
        assert hosts <= {"127.0.0.1", "localhost", None}
    except BaseException:
        print(wrong, page.evaluate("() => ({...document.documentElement.dataset})"))
        raise
    finally:
        context.close()


@contextmanager
def afresh(browser: Browser, served: Opened, **settings: object) -> Iterator[Page]:
    """Open the page before another text begins than those that other tests wrote."""
    with visiting(browser, served, **settings) as page:
        idle(page)
        anew(page)
        yield page


def anew(page: Page) -> None:
    """Go to the first screen, unless it is shown."""
    if page.locator("#empty").is_hidden():
        menu(page, "begin another text")


def menu(page: Page, item: str) -> None:
    """Choose an item of the menu."""
    page.locator("[data-action=menu]").click()
    page.locator("dialog button", has_text=item).click()
    idle(page)


def state(page: Page, name: str) -> None:
    """Wait until the page is in this state."""
    page.wait_for_function("name => document.documentElement.dataset.state === name", arg=name)


def idle(page: Page) -> None:
    """Wait until no job runs, as the page knows, nothing is fetched, and everything is drawn."""
    page.wait_for_function(
        """() => { const {busy, state} = document.documentElement.dataset;
        return busy === undefined && ["ready", "read-only"].includes(state); }"""
    )


def press(page: Page, *keys: str, at: str = "") -> None:
    """Press keys one after another, each once the page is idle, where the focus is or in an element."""
    for key in keys:
        (page.locator(at) if at else page.keyboard).press(key)
        idle(page)


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


def take(page: Page, i: int) -> str | None:
    """Point at a token and take its first other alternative; return that."""
    page.locator("#text [data-token]").nth(i).hover()
    page.locator(f"#token-pane[data-position='{i}']").wait_for()
    other = page.locator("[data-alternative]:not([aria-current])").first
    other.wait_for()
    word = other.get_attribute("data-alternative")
    other.click()
    idle(page)
    return word


def typed(page: Page, text: str) -> None:
    """Type what follows the cursor."""
    page.locator("#text").press("Enter")
    page.locator(".typing textarea").fill(text)
    press(page, "Escape")


def chosen_token(page: Page) -> int:
    """Return which token the cursor is at."""
    return int(page.locator("#text [aria-selected=true]").get_attribute("data-token") or -1)


def tokens(page: Page) -> list[str]:
    """Return the texts of the tokens that are shown."""
    return page.locator("#text [data-token]").all_text_contents()


def told(page: Page, selector: str, pattern: str) -> None:
    """Wait until there is such an element and it says something like this."""
    page.wait_for_function(
        """([selector, pattern]) => [...document.querySelectorAll(selector)].some(
            ({textContent}) => RegExp(pattern).test(textContent))""",
        arg=[selector, pattern],
    )


def asked(page: Page, path: str, body: str | None = None) -> Any:
    """Return the server's answer to the page, as JSON, once the page knows what it changed."""
    script = """async ([path, body]) => {
        const {caughtUp} = await import("/app/net.js");
        const reply = await fetch(path, body === null ? {} : {method: "POST", body});
        const answer = await reply.json();
        return answer.event ? caughtUp(answer) : answer; }"""
    return page.evaluate(script, [path, body])


def lens_of(page: Page) -> object:
    """Return the lens of the page."""
    return page.evaluate("document.documentElement.dataset.lens")


def exported(page: Page, folder: Path) -> Path:
    """Export the document as one HTML file."""
    page.locator("#text").press("E")
    with page.expect_download() as download:
        page.locator("dialog a", has_text="HTML").click()
    page.keyboard.press("Escape")
    file = folder / "tale.html"
    download.value.save_as(file)
    return file


def violations(page: Page) -> list[str]:
    """Return what axe-core finds, once the page is idle; skip the test where axe-core is absent."""
    pytest.importorskip("axe_playwright_python", reason="pip install axe-playwright-python")
    if page.evaluate("!('axe' in window)"):
        folder = files("axe_playwright_python")
        page.evaluate(folder.joinpath("axe.min.js").read_text("utf-8"))
    page.wait_for_function("() => document.documentElement.dataset.busy === undefined")
    found = page.evaluate(
        "() => axe.run(document, {resultTypes: ['violations']}).then(result => result.violations.map("
        " each => `${each.id}: ${each.nodes.map(node => node.html).slice(0, 3)}`))"
    )
    return list(found)


@contextmanager
def from_disk(browser: Browser, file: Path) -> Iterator[Page]:
    """Open an exported file; it requests nothing but itself, and nothing goes wrong."""
    context = browser.new_context()
    page = context.new_page()
    requests: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.goto(file.as_uri())
    state(page, "read-only")
    idle(page)
    yield page
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [file.as_uri()]
    assert wrong == []
    context.close()


def tree_file(*nodes: tuple[str, int]) -> str:
    """Return a document of another model, as the page exports it: texts, each with its parent's index."""
    texts = [text for text, _ in nodes]
    ends: list[int] = []
    records: list[dict[str, object]] = [{"op": "voc", "p": dict(enumerate(texts))}]
    for i, (_, parent) in enumerate(nodes):
        at = ends[parent] if parent >= 0 else 0
        ends.append(at + 1)
        above = f"n{parent}" if parent >= 0 else None
        none = {name: [None] for name in ("lp", "h", "rk")}
        records += [
            {"op": "node", "id": f"n{i}", "parent": above, "at": at, "r": i + 1},
            {"op": "tok", "id": f"n{i}", "ids": [i], "src": "t", "top": [[]], **none},
        ]
    return json.dumps({"format": "llamabranch-loom", "records": records})
