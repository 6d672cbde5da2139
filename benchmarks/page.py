"""Budgets of the page: from a key or a click to what is painted, in Debian's Chromium over a server of its own.

    python -m benchmarks.page [--target MODEL] [--runs 30] [--only small large loss]

``small`` works in one text of the target: every action of the page with a budget. ``large`` imports a
generated document of 10,000 nodes and 100,000 tokens: first paint, moves, scrolling, finding, memory, export.
``loss`` continues texts with and without a page that watches. Medians and 95th percentiles; a budget is told
beside them and never asserted.
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
from pathlib import Path
from statistics import median, quantiles
from typing import Any


from .report import Settings, emit, number, parser, table

PARTS = ("small", "large", "loss")
LINK = re.compile(r"http://127\.0\.0\.1:\d+/#\S+")
# Milliseconds, from the specification: the median, or "p95" where it is one.
BUDGETS = {
    "choose a node": 50, "lens": 50, "top 10, cached": 50, "take an alternative": 90, "continue": 120,
    "type a key": 50, "typed text scored": 600, "stop": 100, "search": 200, "find": 100, "export": 3000,
    "first paint": 1000, "frame while scrolling": 32,
}  # fmt: skip
# Run in the page: ms from an event to the frame that shows a condition.
MEASURE = """() => {
  window.painted = (holds) => new Promise((done) => {
    const begin = performance.now();
    const look = () => holds() ? setTimeout(() => done(performance.now() - begin)) : requestAnimationFrame(look);
    look();
  });
  window.key = (id, key) => document.getElementById(id).dispatchEvent(
    new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
}"""


def main() -> None:
    """Measure the parts that are asked for."""
    described = parser("the page in a browser", runs=30, tokens=24)
    described.set_defaults(target="smollm2-135m:Q8_0")
    described.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="default: all parts"
    )
    args = described.parse_args()
    settings = Settings.of(args)
    results: dict[str, object] = {}
    parts = {"small": _small, "large": _large, "loss": _loss}
    for name in args.only:
        found = parts[name](settings)
        results[name] = {key: _spread(values) for key, values in found.items()}
        rows = [
            [key, number(_spread(values)["p50"], 1), number(_spread(values)["p95"], 1),
             str(BUDGETS.get(key, "-")), str(len(values))]
            for key, values in found.items()
        ]  # fmt: skip
        table(f"{name}: {settings.target}", ["what", "p50", "p95", "budget", "n"], rows)
    with settings.context(settings.target) as ctx:
        emit("page", settings, {"target": ctx.model}, results)


def _spread(values: Sequence[float]) -> dict[str, float]:
    p95 = quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
    return {"p50": median(values), "p95": p95}


@contextmanager
def _served(target: str, folder: Path) -> Iterator[str]:
    """Run the server; yield its link."""
    command = [
        sys.executable,
        "-m",
        "llamabranch.cli",
        "open",
        target,
        "--no-browser",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, "--file", str(folder / "page.loom.jsonl")],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CONFIG_HOME": str(folder)},
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
def open_page(target: str, scale: float = 1.0) -> Iterator[Any]:
    """Open the page, ready, in Chromium."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    arguments = [
        "--disable-background-networking",
        "--enable-precise-memory-info",
        "--js-flags=--expose-gc",
    ]
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        _served(target, Path(folder)) as link,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, device_scale_factor=scale)
        page.goto(link)
        ready(page)
        yield page
        browser.close()


def ready(page: Any) -> None:
    page.wait_for_function(
        "() => document.documentElement.dataset.state === 'ready'", timeout=120_000
    )
    page.evaluate(MEASURE)


def _times(page: Any, n: int, script: str, before: str = "") -> list[float]:
    """Run a script of the page n times, each when all is quiet; it returns milliseconds."""
    found = []
    for i in range(n):
        ready(page)
        page.wait_for_timeout(60)
        if before:
            page.evaluate(before, i)
        found.append(float(page.evaluate(script, i)))
    return found


def _small(settings: Settings) -> dict[str, list[float]]:
    n = settings.runs
    with open_page(settings.target) as page:
        page.locator("#begin").fill("The moral of the story is that a king must")
        page.locator("#begin").press("Control+Enter")
        page.locator(".shoot").nth(2).wait_for()
        ready(page)
        page.locator(".shoot").first.click()
        ready(page)
        chosen = "document.querySelector('#tree [aria-selected=true]')?.dataset.node"
        found = {
            "choose a node": _times(
                page,
                n,
                f"""i => {{ const old = {chosen};
                key("tree", i % 2 ? "ArrowUp" : "ArrowDown"); return painted(() => {chosen} !== old) }}""",
            ),
            "lens": _times(
                page,
                n,
                """() => { const old = document.querySelector("#legend").dataset.lens;
                key("text", "v"); return painted(() => document.querySelector("#legend").dataset.lens !== old) }""",
            ),
        }
        page.locator(".shoot, #text [data-token]").first.wait_for()
        page.evaluate("() => key('tree', 'End')")
        found["top 10, cached"] = _times(
            page,
            n,
            """i => { const pane = document.querySelector("#token-pane");
            const old = pane.dataset.position; key("text", i % 2 ? "ArrowRight" : "ArrowLeft");
            return painted(() => pane.dataset.position !== old) }""",
        )
        found["take an alternative"] = _times(
            page,
            n,
            """i => { const old = {chosen};
            key("text", String(1 + (i % 9))); const begin = performance.now();
            return Promise.race([painted(() => {chosen} !== old &&
              document.querySelector("#text .cursor")?.nextSibling), new Promise((d) => setTimeout(d, 2000, NaN))]) }""".replace(
                "{chosen}", chosen
            ),
            "() => { key('tree', 'End'); key('text', 'End'); for (let i = 0; i < 9; i++) key('text', 'ArrowLeft') }",
        )
        found["take an alternative"] = [x for x in found["take an alternative"] if x == x] or [
            float("nan")
        ]
        found["continue"] = _times(
            page,
            n,
            """() => { const old = document.querySelectorAll(".shoot .t").length;
            key("text", "g"); return painted(() => document.querySelectorAll(".shoot .t").length > old) }""",
            "() => { key('tree', 'Home'); }",
        )
        found["stop"] = _times(
            page,
            n,
            """() => new Promise((done) => { key("text", "g"); setTimeout(() => {
            key("text", "Escape"); painted(() => document.documentElement.dataset.state === "ready").then(done)
            }, 150) })""",
            "() => { key('tree', 'Home'); }",
        )
        page.evaluate("() => key('text', 'Enter')")
        box = "document.querySelector('.typing textarea')"
        found["type a key"] = _times(
            page,
            n,
            f"""i => {{ {box}.value += " word"; const begin = performance.now();
            {box}.dispatchEvent(new Event("input")); return painted(() => true) }}""",
        )
        found["typed text scored"] = [
            x - 200
            for x in _times(
                page,
                min(n, 10),
                f"""i => {{
            const old = document.querySelector(".preview").textContent; {box}.value += " and" + i;
            {box}.dispatchEvent(new Event("input"));
            return painted(() => document.querySelector(".preview").textContent !== old) }}""",
            )
        ]
    return found


def large_document(n_nodes: int = 10_000) -> str:
    """Return a document of ten tokens a node in the plain JSON that import reads."""
    words = "".join(f" {word}" for word in "the old king said that a fox must never sleep".split())
    nodes = [
        {
            "id": f"m{i}",
            "parent": None if i == 0 else f"m{(i - 1) // 3 if i % 5 else i - 1}",
            "text": words,
        }
        for i in range(n_nodes)
    ]
    return json.dumps({"format": "llamabranch-loom", "version": 1, "nodes": nodes})


def _large(settings: Settings) -> dict[str, list[float]]:
    n = settings.runs
    with open_page(settings.target) as page:
        page.evaluate(
            "text => fetch('/loom/import', {method: 'POST', body: text})", large_document()
        )
        found: dict[str, list[float]] = {"first paint": []}
        for _ in range(min(n, 5)):
            page.reload()
            page.locator("[role=treeitem]").nth(5).wait_for(timeout=60_000)
            found["first paint"].append(float(page.evaluate("performance.now()")))
        ready(page)
        chosen = "document.querySelector('#tree [aria-selected=true]')?.dataset.node"
        found["choose a node"] = _times(
            page,
            n,
            f"""i => {{ const old = {chosen};
            key("tree", "ArrowDown"); return painted(() => {chosen} !== old) }}""",
        )
        found["find"] = _times(
            page,
            n,
            """i => { const box = document.querySelector("#find");
            const out = document.querySelector("#found"); out.textContent = ""; box.value = ["king", "fox", "sleep"][i % 3];
            box.dispatchEvent(new Event("input")); return painted(() => out.textContent !== "") }""",
        )
        found["frame while scrolling"] = list(
            map(
                float,
                page.evaluate("""async () => {
            const tree = document.querySelector("#tree"), times = []; let last = performance.now();
            for (let i = 0; i < 240; i++) { tree.scrollTop += 300; await new Promise(requestAnimationFrame);
              times.push(performance.now() - last); last = performance.now(); } return times }"""),
            )
        )
        found["export"] = _times(
            page,
            1,
            """async () => { const begin = performance.now();
            await (await fetch("/loom/export?format=html")).blob(); return performance.now() - begin }""",
        )
        found["elements"] = [
            float(page.evaluate("document.querySelectorAll('#tree *, #text *, #after *').length"))
        ]
        found["heap, MB"] = [
            float(page.evaluate("(gc(), performance.memory.usedJSHeapSize / 1e6)"))
        ]
        found["doc, MB"] = [
            float(page.evaluate("fetch('/loom/doc').then(a => a.blob()).then(b => b.size / 1e6)"))
        ]
    return found


def _loss(settings: Settings) -> dict[str, list[float]]:
    """Tokens a second of three continuations while the page watches, and while its tab is closed."""
    found: dict[str, list[float]] = {"tokens/s, watched": [], "tokens/s, unwatched": []}
    run = """() => new Promise(async (done) => {
        const doc = await (await fetch("/loom/doc")).json(), begin = performance.now();
        const body = JSON.stringify({cid: crypto.randomUUID(), op: "continue", node: doc.nodes.id[0], n: 3, max_tokens: 64,
          seed: "1"});
        const answer = await (await fetch("/loom/do", {method: "POST", body})).json();
        const ids = new Set(answer.nodes.map((each) => each.id));
        for (;;) { await new Promise((d) => setTimeout(d, 20)); const now = await (await fetch("/loom/doc")).json();
          if (!now.jobs.some((job) => job.id === answer.job && job.state === "running")) break; }
        done(192000 / (performance.now() - begin)) })"""
    with open_page(settings.target) as page:
        page.locator("#begin").fill("The moral of the story is that a king must")
        page.locator("#begin").press("Control+Enter")
        page.locator(".shoot").nth(2).wait_for()
        ready(page)
        bare = page.context.new_page()
        base = page.url
        for _ in range(max(1, settings.runs // 3)):
            page.goto(base)
            ready(page)
            found["tokens/s, watched"].append(float(page.evaluate(run)))
            page.goto("about:blank")
            bare.goto(base + "loom/app/app.css")
            found["tokens/s, unwatched"].append(float(bare.evaluate(run)))
    return found


if __name__ == "__main__":
    main()
