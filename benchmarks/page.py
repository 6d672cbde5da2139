"""Budgets of the page: from a key or a click to what is painted, in Debian's Chromium.

    python -m benchmarks.page [--target MODEL] [--runs 30] [--only small reading large loss]

``small`` works in one text of the target: the actions of the page that have a budget. ``reading`` stops
a prompt of about 4,000 tokens while it is read, and counts the branches without a token that this leaves.
``large`` imports a generated document of 10,000 nodes and 100,000 tokens: first paint, scrolling,
finding, export. ``loss`` continues texts while a page watches and while none does. Medians and 95th
percentiles; a budget is printed beside them and never asserted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isnan, nan
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .report import Settings, emit, number, parser, table

PARTS = ("small", "reading", "large", "loss")
LINK = re.compile(r"http://127\.0\.0\.1:\d+/#\S+")
# Milliseconds, from the specification: medians, or 95th percentiles where it says so.
BUDGETS = {
    "choose a node": 50, "lens": 50, "top 10, cached": 50, "continue's first token": 120,
    "type a key": 50, "stop": 100, "find": 100, "export": 3000,
    "first paint": 1000, "frame while scrolling": 32, "stop reading": 200, "empty branches": 0,
}  # fmt: skip
# Functions of the page: each does something and returns the ms until a frame shows what it did.
MEASURE = """() => {
  const $ = (selector) => document.querySelector(selector);
  const count = (selector) => document.querySelectorAll(selector).length;
  const key = (id, key) => $(id).dispatchEvent(
    new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  const typed = (box, text) => { box.value = text; box.dispatchEvent(new Event("input")); };
  const node = () => $("#tree [aria-selected=true]")?.dataset.node;
  const painted = (holds) => new Promise((done) => {
    const begin = performance.now();
    const look = () => {
      if (holds()) done(performance.now() - begin);
      else if (performance.now() - begin > 5000) done(NaN);
      else frame();
    };
    const frame = () => requestAnimationFrame(() => setTimeout(look)); // behind what a frame draws
    frame();
  });
  window.key = key;
  window.measure = {
    choose: (i) => {
      const old = node();
      key("#tree", i % 2 ? "ArrowUp" : "ArrowDown");
      return painted(() => node() !== old);
    },
    lens: () => {
      const old = $("#legend").dataset.lens;
      key("#text", "v");
      return painted(() => $("#legend").dataset.lens !== old);
    },
    top: (i) => {
      const old = $("#token-pane").dataset.position;
      key("#text", i % 2 ? "ArrowRight" : "ArrowLeft");
      return painted(() => $("#token-pane").dataset.position !== old && count("[data-alternative]"));
    },
    proceed: () => {
      const newest = () => $("#shoots").lastChild?.segment.key;
      const old = newest();
      key("#text", "g");
      return painted(() => newest() !== old && $("#shoots").lastChild.querySelector(".t"));
    },
    stop: async () => {
      key("#text", "g");
      await new Promise((done) => setTimeout(done, 80));
      key("#text", "Escape");
      return painted(() => document.documentElement.dataset.state === "ready");
    },
    cancel: () => {
      key("#text", "Escape");
      return painted(() => document.documentElement.dataset.state === "ready");
    },
    type: (i) => {
      const box = $(".typing textarea");
      typed(box, box.value + "word ");
      return painted(() => true);
    },
    find: (i) => {
      $("#found").textContent = "";
      typed($("#find"), ["king", "fox", "sleep"][i % 3]);
      return painted(() => $("#found").textContent !== "");
    },
    scroll: async () => {
      const frames = [];
      for (let i = 0, last = performance.now(); i < 240; i++) {
        $("#tree").scrollTop += 300;
        await new Promise(requestAnimationFrame);
        frames.push(performance.now() - last);
        last = performance.now();
      }
      return frames;
    },
    exported: async () => {
      const begin = performance.now();
      await (await fetch("/loom/export?format=html")).blob();
      return performance.now() - begin;
    },
  };
}"""
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


READING = "() => document.documentElement.dataset.state === 'reading-again'"


def main() -> None:
    """Measure the parts that are asked for."""
    described = parser("the page in a browser", runs=30, target="smollm2-135m:Q8_0")
    described.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    args = described.parse_args()
    settings = Settings.of(args)
    parts = {"small": _small, "reading": _reading, "large": _large, "loss": _loss}
    results: dict[str, object] = {}
    for name in args.only:
        found = {key: _spread(values) for key, values in parts[name](settings).items()}
        results[name] = found
        rows = [
            [key, number(p50, 1), number(p95, 1), str(n), str(BUDGETS.get(key, "-"))]
            for key, (p50, p95, n) in found.items()
        ]
        table(f"{name}: {settings.target}", ["what", "p50", "p95", "times", "budget"], rows)
    with settings.context(settings.target) as ctx:
        emit("page", settings, {"target": ctx.model}, results)


def _spread(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the median and the 95th percentile of what was shown in time, and how often that was."""
    shown = [value for value in values if not isnan(value)] or [nan]
    return median(shown), quantiles(shown, n=20)[-1] if len(shown) > 1 else shown[0], len(shown)


@contextmanager
def _served(target: str, folder: Path, threads: int, draft: str) -> Iterator[str]:
    """Run the server; yield its link."""
    command = [sys.executable, "-m", "llamabranch.cli", "open", target, "--no-browser"]
    command += ["--draft", draft]
    command += ["-t", str(threads)] if threads else []
    process = subprocess.Popen(
        [*command, "--port", "0", "--file", str(folder / "page.loom.jsonl")],
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
def open_page(
    target: str, scale: float = 1.0, threads: int = 0, draft: str = "auto"
) -> Iterator[Any]:
    """Open the page, ready, in Chromium; 0 threads: as many as the server finds best."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    arguments = ["--disable-background-networking"]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(target, Path(folder), threads, draft) as link,
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


def _times(page: Any, n: int, name: str, before: str = "") -> list[float]:
    """Call a function of MEASURE n times, each when all is quiet; what it did not show is NaN."""
    found = []
    for i in range(n):
        ready(page)
        if before:
            page.evaluate(before)
            ready(page)
        found.append(page.evaluate(f"(i) => measure.{name}(i)", i))
    return [float("nan") if value is None else float(value) for value in found]


def _small(settings: Settings) -> dict[str, list[float]]:
    n = settings.runs
    with open_page(settings.target, threads=settings.threads) as page:
        begin(page, " ".join(["The moral of the story is that a king must never sleep."] * 7))
        page.evaluate(MEASURE)
        found = {"choose a node": _times(page, n, "choose"), "lens": _times(page, n, "lens")}
        page.evaluate("() => { key('#tree', 'Home'); key('#text', 'End') }")
        found["top 10, cached"] = _times(page, n, "top")
        home = "() => key('#tree', 'Home')"
        found["continue's first token"] = _times(page, n, "proceed", home)
        found["stop"] = _times(page, n, "stop", home)
        page.evaluate("() => key('#text', 'Enter')")
        found["type a key"] = _times(page, n, "type")
    return found


def _reading(settings: Settings) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"stop reading": [], "tokens of the prompt": []}
    with open_page(settings.target, threads=settings.threads) as page:
        page.evaluate(MEASURE)
        for i in range(max(1, settings.runs // 3)):
            if i:
                page.locator("[data-action=menu]").click()
                page.locator("dialog button", has_text="begin another").click()
                ready(page)
            words = [f"Chapter {i} of {n}: a king met {n} foxes in the wood." for n in range(230)]
            page.locator("#mode input[value=text]").check(force=True)
            page.locator("#begin").fill(" ".join(words))
            page.locator("#begin").press("Control+Enter")
            page.wait_for_function(READING)
            page.wait_for_timeout(300)  # in the middle of it
            found["stop reading"].append(float(page.evaluate("measure.cancel()")))
            ready(page)
        nodes = page.evaluate("fetch('/loom/doc').then(a => a.json())")["nodes"]
        found["tokens of the prompt"] = [float(n) for n in nodes["n"] if n]
        found["empty branches"] = [float(nodes["n"].count(0))]
    return found


def large_document(n_nodes: int = 10_000) -> str:
    """Return a document of ten tokens a node, as the page exports it with another model."""
    words = " the old king said that a fox must never sleep"
    records: list[dict[str, object]] = [{"op": "voc", "p": {0: words}}]
    depths: list[int] = []
    for i in range(n_nodes):
        parent = (i - 1) // 3 if i % 5 else i - 1  # bushes along a path of 2,000 nodes
        depths.append(depths[parent] + 1 if i else 0)
        above = f"n{parent}" if i else None
        none = {name: [None] for name in ("lp", "h", "rk")}
        records += [
            {"op": "node", "id": f"n{i}", "parent": above, "at": depths[i], "r": i + 1},
            {"op": "tok", "id": f"n{i}", "ids": [0], "src": "t", "top": [[]], **none},
        ]
    return json.dumps({"format": "llamabranch-loom", "records": records})


def _large(settings: Settings) -> dict[str, list[float]]:
    n = settings.runs
    with open_page(settings.target, threads=settings.threads) as page:
        page.evaluate("body => fetch('/loom/import', {method: 'POST', body})", large_document())
        found: dict[str, list[float]] = {"first paint": []}
        for _ in range(min(n, 5)):
            page.reload()
            page.locator("[role=treeitem]").nth(5).wait_for(timeout=60_000)
            found["first paint"].append(float(page.evaluate("performance.now()")))
        ready(page)
        page.evaluate(MEASURE)
        page.evaluate("() => key('#tree', 'Home')")
        found["find"] = _times(page, n, "find")
        found["frame while scrolling"] = list(map(float, page.evaluate("measure.scroll()")))
        found["export"] = _times(page, 1, "exported")
    return found


def _loss(settings: Settings) -> dict[str, list[float]]:
    """Return tokens a second while the page shows the texts, and with its tab on a bare file.

    One text grows where it is read; three are shown with what they begin with, and in the tree. Nothing
    is drafted: how much is drafted depends on times. Who is first changes from pair to pair.
    """
    found: dict[str, list[float]] = {}
    with open_page(settings.target, threads=settings.threads, draft="none") as page:
        base = page.url
        begin(page, "The moral of the story is that a king must")

        def rate(watched: bool, n: int) -> float:
            page.goto(base if watched else f"{base}loom/app/app.css")
            if watched:
                ready(page)
                page.evaluate("() => document.querySelector('[role=treeitem]').click()")
            return float(page.evaluate(RATE, n))

        for i in range(max(1, settings.runs // 3)):
            for n in (1, 3):
                rates = {
                    watched: rate(watched, n) for watched in ((True, False), (False, True))[i % 2]
                }
                for name, value in (
                    ("watched", rates[True]), ("unwatched", rates[False]),
                    ("watched / unwatched", rates[True] / rates[False]),
                ):  # fmt: skip
                    found.setdefault(f"{n} texts: {name}", []).append(value)
    return found


if __name__ == "__main__":
    main()
