"""The file, the session and imports, as the page shows them."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import asked, begin, browser, idle, menu, state, tokens, told, tree_file, visiting
from paging import Opened
from test_formats import CHUNKS, TOLD, mikupad

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LEAN = ("--threads", "1", "--n-ctx", "1024", "--draft", "none")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


def bring(page: Page, name: str, data: str) -> None:
    """Import a file."""
    menu(page, "export")
    file: Any = {"name": name, "mimeType": "application/json", "buffer": data.encode()}
    page.locator("dialog input[type=file]").set_input_files(file)


def scored(page: Page) -> None:
    """Wait until all tokens that are shown have a probability, but for the first."""
    page.wait_for_function(
        """() => { const all = [...document.querySelectorAll("#text [data-token]")].slice(1);
        return all.length > 5 && all.every((token) => Number(token.dataset.lp) < 0); }"""
    )


def test_imports_are_shown_whole_and_scored_where_they_are_shown(
    chromium: Browser, tmp_path: Path
) -> None:
    """A session of mikupad, then a document of another model; a bad file is told in the dialog."""
    with Opened(tmp_path, *LEAN) as served, visiting(chromium, served) as page:
        bring(page, "miku.json", json.dumps(mikupad(CHUNKS)))
        told(page, "#status", "3 nodes imported")
        scored(page)
        assert "".join(tokens(page)).replace("⏎", "").replace("\n", "") == "".join(TOLD).replace(
            "\n", ""
        )
        bring(page, "tree.json", tree_file(("One day a king", -1), (" went to the sea", 0)))
        told(page, "#status", "2 nodes imported")
        scored(page)
        assert "".join(tokens(page)) == "One day a king went to the sea"
        wrong = {
            "format": "llamabranch-loom",
            "records": [{"op": "node", "id": "a", "parentId": "b"}],
        }
        bring(page, "wrong.json", json.dumps(wrong))
        told(page, "dialog .wrong", "record 1: unknown field `parentId`; did you mean parent")
        page.wait_for_function(  # a browser tells nothing if the file that it has is chosen again
            "() => document.querySelector('dialog input[type=file]').value === ''"
        )


def test_the_header_counts_what_is_only_in_memory_and_the_line_exports_it(
    chromium: Browser, tmp_path: Path
) -> None:
    with Opened(tmp_path, *LEAN) as served, visiting(chromium, served) as page:
        begin(page)
        told(page, "#saved", "^saved$")
        size = (tmp_path / "tale.loom.jsonl").stat().st_size
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (size + 100, -1))
        page.locator("#text").press("g")
        told(page, "#saved", "^3 texts only in memory$")
        told(page, "#bar", "The file cannot be written: file too large")
        page.wait_for_function("() => document.querySelectorAll('.shoot').length === 6")
        page.locator("#bar button").click()
        with page.expect_download() as download:
            page.locator("dialog a", has_text="JSON").click()
        exported = json.loads(Path(download.value.path()).read_text("utf-8"))
        assert sum(record["op"] == "node" for record in exported["records"]) == 7
        page.keyboard.press("Escape")
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (-1, -1))
        told(page, "#saved", "^saved$")
        assert page.locator("#bar").is_hidden()


def test_an_old_tab_goes_on_once_the_browser_has_a_session(
    chromium: Browser, tmp_path: Path
) -> None:
    """The process is killed while it writes and starts again; typed text stays in its box."""
    with Opened(tmp_path, *LEAN) as first, visiting(chromium, first) as page:
        begin(page)
        page.locator("#text").press("Enter")
        page.locator(".typing textarea").fill("not sent yet")
        before = asked(page, "/loom/doc")["nodes"]["id"]
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        state(page, "connection-lost")
        with Opened(tmp_path, *LEAN, "--port", first.url.rpartition(":")[2]) as second:
            assert second.url == first.url
            state(page, "no-session")
            assert "here or in another tab" in page.locator("#bar").inner_text()
            other = page.context.new_page()
            other.goto(second.link)
            state(other, "ready")
            state(page, "ready")
            assert page.locator("#bar").is_hidden()
            assert page.locator(".typing textarea").input_value() == "not sent yet"
            page.locator(".typing textarea").press("Escape")
            page.wait_for_function("() => document.querySelector('.typing') === null")
            idle(page)
            assert asked(page, "/loom/doc")["nodes"]["id"] == [*before, f"n{len(before) + 1}"]
            other.close()


def test_a_damaged_file_offers_its_export(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "tale.loom.jsonl"
    with Opened(tmp_path, *LEAN) as served:
        served.do("type", "a", text="One day")
        served.do("type", "b", text="Another day")
        served.end(signal.SIGTERM)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:5], b"{\n", *lines[5:]]))
    with Opened(tmp_path, *LEAN) as served:
        context = chromium.new_context()
        page = context.new_page()
        page.goto(served.link)
        state(page, "read-only")
        told(page, "#bar", "The file is damaged at line 6. What came before is shown; export it")
        page.locator("#bar button").click()
        page.locator("dialog .formats").wait_for()
        context.close()
        assert "(Input data was truncated)" in served.end(signal.SIGTERM)[1]
