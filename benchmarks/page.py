"""What a page that watches costs, in Debian's Chromium: tokens a second with it and without.

    python -m benchmarks.page [--target MODEL] [--runs 10]

`open_page` also serves `benchmarks.pictures`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .report import Settings, emit, parser, pm, table
from .timing import Spread

LINK = re.compile(r"http://127\.0\.0\.1:\d+/#\S+")
# Tokens a second of n texts, 576 tokens at most, from the request until the server says that they ended.
RATE = """async (n) => {
  const ask = async (path, init) => (await fetch(path, init)).json();
  const node = (await ask("/loom/doc")).nodes.id[0];
  const body = {cid: crypto.randomUUID(), op: "continue", node, n, max_tokens: 576 / n, seed: "1"};
  const begin = performance.now();
  const {job, nodes} = await ask("/loom/do", {method: "POST", body: JSON.stringify(body)});
  const tree = document.querySelector("#tree");
  const shown = () => tree.querySelector("[aria-selected=true]")?.dataset.node === nodes[0].id;
  while (n === 1 && tree && !shown()) { // the text grows where it is read
    tree.dispatchEvent(new KeyboardEvent("keydown", {key: "End", bubbles: true}));
    await new Promise(requestAnimationFrame);
  }
  for (;;) {
    const {jobs, nodes: all} = await ask("/loom/doc");
    const spent = performance.now() - begin;
    if (!jobs.some((each) => each.id === job && each.state === "running")) {
      const counts = nodes.map(({id}) => all.n[all.id.indexOf(id)]); // a text may end early
      return counts.reduce((sum, count) => sum + 1000 * count, 0) / spent;
    }
    await new Promise((done) => setTimeout(done, 50));
  }
}"""


def main() -> None:
    """Measure one text and three texts."""
    settings = Settings.of(
        parser("the page in a browser", runs=10, target="smollm2-135m:Q8_0").parse_args()
    )
    rates = {name: Spread.of(values) for name, values in _rates(settings).items()}
    rows = [(name, pm(spread)) for name, spread in rates.items()]
    table(f"Tokens a second: {settings.target}", ("", "median (lowest to highest)"), rows)
    results = {name: spread.as_dict() for name, spread in rates.items()}
    with settings.context(settings.target) as ctx:
        emit("page", settings, {"target": ctx.model}, results)


@contextmanager
def _served(target: str, folder: Path, *options: str) -> Iterator[str]:
    """Run the server; yield its link."""
    command = [sys.executable, "-m", "llamabranch.cli", "open", target, "--no-browser"]
    process = subprocess.Popen(
        [*command, *options, "--port", "0", "--file", str(folder / "page.loom.jsonl")],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        found = next(filter(None, map(LINK.search, process.stdout or ())), None)
        if found is None:
            raise SystemExit("the server does not start")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


@contextmanager
def open_page(target: str, *options: str, scale: float = 1.0) -> Iterator[Any]:
    """Open the page, ready, in Chromium, with options of ``llamabranch open``."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    arguments = ["--disable-background-networking"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(target, Path(folder), *options) as link,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=scale)
        page.goto(link)
        ready(page)
        yield page
        browser.close()


def ready(page: Any) -> None:
    """Wait until nothing is generated, fetched or still to be drawn."""
    page.wait_for_function(
        """() => { const {state, busy} = document.documentElement.dataset;
        return state === "ready" && busy === undefined; }""",
        timeout=120_000,
    )


def begin(page: Any, text: str) -> None:
    """Type a beginning of a text into the empty page and have it continued three times."""
    page.locator("#mode input[value=text]").check(force=True)  # not a conversation
    page.locator("#begin").fill(text)
    page.locator("#begin").press("Control+Enter")
    page.locator(".shoot").nth(2).wait_for()
    ready(page)


def _rates(settings: Settings) -> dict[str, list[float]]:
    """Return tokens a second while the page shows the texts, and with its tab on a bare file.

    One text grows where it is read; three are shown with what they begin with, and in the tree. Nothing
    is drafted: how much is drafted depends on times. Who is first changes from pair to pair.
    """
    rates: dict[str, list[float]] = {}
    threads = ("-t", str(settings.threads)) if settings.threads else ()
    with open_page(settings.target, "--draft", "none", *threads) as page:
        base = page.url
        begin(page, "The moral of the story is that a king must")

        def rate(watched: bool, n: int) -> float:
            page.goto(base if watched else f"{base}app/app.css")
            if watched:
                ready(page)
                page.evaluate("() => document.querySelector('[role=treeitem]').click()")
            return float(page.evaluate(RATE, n))

        for i in range(settings.runs):
            for n in (1, 3):
                pair = {
                    watched: rate(watched, n) for watched in ((True, False), (False, True))[i % 2]
                }
                for name, value in (
                    ("watched", pair[True]), ("unwatched", pair[False]),
                    ("watched / unwatched", pair[True] / pair[False]),
                ):  # fmt: skip
                    rates.setdefault(f"{n} texts: {name}", []).append(value)
    return rates


if __name__ == "__main__":
    main()
