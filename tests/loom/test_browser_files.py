"""Exported files and hostile text in a browser, and a document of 10,000 nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import idle, lens_of, state, tokens, visiting, written
from paging import Opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "\u202eright to left\u202c",
    "\x1b[31mred\x1b[0m",
    "\x00nul",
    "]]> --> <!-- ${window.hacked = 1} {{7*7}}",
    "العربية हिन्दी 👩‍👩‍👧 \u2028 line",
]
PILE = "a" + "\u0301" * 10_000  # more than the model reads: it can only be imported


@pytest.fixture(scope="module")
def served(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with Opened(tmp_path_factory.mktemp("loom")) as running:
        yield running


def exported(page: Page, folder: Path) -> Path:
    """Export the document as one HTML file."""
    page.locator("#text").press("E")
    with page.expect_download() as download:
        page.locator("dialog a", has_text="HTML").click()
    page.keyboard.press("Escape")
    file = folder / "tale.html"
    download.value.save_as(file)
    return file


def imported(page: Page, text: str) -> int:
    """Import a file; return how many nodes it has."""
    answer = page.evaluate(
        "text => fetch('/loom/import', {method: 'POST', body: text}).then(answer => answer.json())",
        text,
    )
    return int(answer["count"])


def opened(chromium: Browser, file: Path) -> tuple[Page, list[str], list[str]]:
    """Open a file from disk; what it requests and what goes wrong is recorded."""
    page = chromium.new_context().new_page()
    requests: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.goto(file.as_uri())
    state(page, "read-only")
    idle(page)
    return page, requests, wrong


def test_exported_file_works_from_disk_without_a_request(
    chromium: Browser, served: Opened, tmp_path: Path
) -> None:
    with visiting(chromium, served) as page:
        state(page, "ready")
        text = "".join(written(page))
        n_rows = page.locator("[role=treeitem]:not([hidden])").count()
        file = exported(page, tmp_path)
        assert imported(page, file.read_text("utf-8")) >= 4
    page, requests, wrong = opened(chromium, file)
    assert "".join(tokens(page)) == text
    assert page.locator("[role=treeitem]:not([hidden])").count() == n_rows
    page.locator("#text [data-token]").last.hover()
    page.locator("[data-alternative]").first.wait_for()
    page.locator("#text").press("v")
    assert lens_of(page) == "entropy"
    page.locator("#text").press("g")
    page.wait_for_function("() => /no model/.test(document.querySelector('#status').textContent)")
    page.locator("#fold").click()
    page.locator("#live-body").wait_for()
    page.locator("#find").fill("fox")
    page.wait_for_function("() => /[1-9]/.test(document.querySelector('#found').textContent)")
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in requests if url.startswith("file:")]) == 1
    assert wrong == []
    page.context.close()


def test_imported_text_is_scored_when_it_is_first_seen(chromium: Browser, served: Opened) -> None:
    with visiting(chromium, served) as page:
        idle(page)
        branch = {"text": " and wanted a horse", "children": []}
        n = imported(page, json.dumps({"text": "A queen was bored", "children": [branch, branch]}))
        assert n == 3
        page.locator("[role=treeitem]", has_text="wanted a horse").first.click()
        idle(page)
        n_tokens = len(tokens(page))
        assert n_tokens > 8
        assert page.locator("#text [data-lp]").count() == n_tokens - 1


def test_hostile_text_runs_nothing_and_reorders_nothing(
    chromium: Browser, served: Opened, tmp_path: Path
) -> None:
    with visiting(chromium, served) as page:
        idle(page)
        for i, text in enumerate(HOSTILE):
            body = json.dumps({"op": "type", "cid": f"hostile {i}", "text": text})
            is_done = page.evaluate(
                "body => fetch('/loom/do', {method: 'POST', body}).then(answer => answer.ok)", body
            )
            assert is_done, text
        imported(page, json.dumps({"text": PILE, "children": []}))
        page.locator("[role=treeitem]", has_text="marks]").wait_for()
        check_hostile(page)
        file = exported(page, tmp_path)
    page, _, wrong = opened(chromium, file)
    check_hostile(page)
    assert wrong == []
    page.context.close()


def check_hostile(page: Page) -> None:
    tree, rows, shown = page.locator("#tree"), [""], []
    tree.press("Home")
    idle(page)
    while rows[-1] != (row := tree.get_attribute("aria-activedescendant") or ""):
        rows.append(row)
        page.locator("#text").press("Home")  # the view is at its end
        idle(page)
        shown.append(page.locator("#text").text_content() or "")
        tree.press("ArrowDown")
        idle(page)
    everything = page.locator("body").text_content() or ""
    assert not page.evaluate("'hacked' in window")
    assert page.locator("img, #text script").count() == 0
    for hidden in "\u202e\u202c\x1b\x00\u2028":
        assert hidden not in everything
        assert hidden not in "".join(shown)
    assert any("\\u202e" in text for text in shown)
    assert any("\\u001b[31m" in text for text in shown)
    assert any("<img src=x" in text for text in shown)
    assert all(text.count("\u0301") <= 8 and len(text) < 4000 for text in shown)
    assert any("a" + "\u0301" * 8 in text for text in shown)  # of the pile, what is drawn of it


def large(n_nodes: int = 10_000, n_tokens: int = 10) -> str:
    """Return a document of many nodes as loomsidian writes it."""
    nodes: dict[str, object] = {}
    for i in range(n_nodes):
        parent = (i - 1) // 3 if i % 5 else i - 1  # bushes along a path of 2,000 nodes
        text = "".join(f" word{j}" for j in range(n_tokens))
        nodes[f"m{i}"] = {"text": text, "parentId": f"m{parent}" if i else None}
    return json.dumps({"current": "m0", "nodes": nodes})


@pytest.mark.slow
def test_ten_thousand_nodes_in_few_elements(chromium: Browser, tmp_path: Path) -> None:
    with Opened(tmp_path) as served, visiting(chromium, served) as page:
        state(page, "ready")
        assert imported(page, large()) == 10_000
        page.reload()
        idle(page)
        page.locator("[role=treeitem]").nth(10).wait_for()
        for key in ["End", "Home", *["ArrowDown"] * 30]:
            page.locator("#tree").press(key)
            idle(page)
            count = page.evaluate("document.querySelectorAll('#tree *, #text *, #after *').length")
            assert count <= 500
        assert page.evaluate("fetch('/loom/doc').then(a => a.blob()).then(b => b.size)") < 1_000_000
