"""The page as a reader uses it: the first half minute, by mouse and by keys; two tabs; states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import begin, idle, lens_of, state, tokens, visiting, written
from paging import Opened

if TYPE_CHECKING:
    from playwright.sync_api import APIResponse, Browser, Page, Route


@pytest.fixture(scope="module")
def served(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with Opened(tmp_path_factory.mktemp("loom"), "--draft-length", "4") as running:
        yield running


@pytest.fixture
def page(chromium: Browser, served: Opened) -> Iterator[Page]:
    with visiting(chromium, served) as opened:
        state(opened, "ready")
        new_text(opened)
        yield opened


def new_text(page: Page) -> None:
    """Leave what other tests wrote in the document; begin another text."""
    idle(page)
    if page.locator("#empty").is_hidden():
        page.locator("[data-action=menu]").click()
        page.locator("dialog button", has_text="begin another text").click()
        idle(page)


def chosen_node(page: Page) -> str | None:
    return page.locator("[role=treeitem][aria-selected=true]").get_attribute("data-node")


def stored(page: Page) -> Any:
    """Return what the server holds of the chosen path."""
    path = f"/loom/tokens?node={chosen_node(page)}&path=1"
    return page.evaluate("path => fetch(path).then(answer => answer.json())", path)


def test_first_half_minute(page: Page) -> None:
    begin(page)
    rows = page.locator("#tree [role=treeitem]:not([hidden])")
    assert rows.count() >= 4
    assert page.locator(".shoot").count() == 3
    assert page.locator(".shoot .t").count() >= 48
    page.locator(".shoot").first.click()
    idle(page)
    n_before = len(tokens(page))
    page.locator("#text [data-token]").nth(n_before - 5).hover()
    page.locator(f"#token-pane[data-position='{n_before - 5}']").wait_for()
    other = page.locator("[data-alternative]:not([aria-current])").first
    other.wait_for()
    word = other.get_attribute("data-alternative")
    other.click()
    idle(page)
    assert page.locator("#status").inner_text().startswith("0 prompt tokens read")
    page.locator("#text").focus()
    current = page.locator("[data-alternative][aria-current]")
    assert current.get_attribute("data-alternative") == word
    page.keyboard.press("v")
    assert lens_of(page) == "entropy"
    page.keyboard.press("r")
    page.wait_for_function(
        "() => /bit for bit/.test(document.querySelector('#status').textContent)"
    )


def test_tokens_have_their_numbers(page: Page) -> None:
    written(page)
    shown = page.locator("#text [data-token]")
    indices = [int(i) for i in shown.evaluate_all("all => all.map(each => each.dataset.token)")]
    assert indices == list(range(len(indices)))
    known = shown.evaluate_all(
        "all => all.filter(each => each.dataset.lp).map(each => Number(each.dataset.lp))"
    )
    missing = "all => all.filter(each => !each.dataset.lp).map(each => each.dataset.token)"
    assert shown.evaluate_all(missing) == ["0"]  # which nothing predicts
    assert all(lp <= 0 for lp in known)
    numbers = [lp for part in stored(page)["parts"] for lp in part["lp"] if lp is not None]
    assert known == pytest.approx(numbers, rel=1e-2, abs=1e-3)
    surprises = [i for i, lp in zip(indices[1:], known, strict=True) if lp < math.log(0.05)]
    for key, i in (("}", surprises[0]), ("{", surprises[-1])):  # behind the first comes the last
        page.locator("#text").press(key)
        idle(page)
        assert page.locator("#text [aria-selected=true]").get_attribute("data-token") == str(i)
    bins = shown.evaluate_all("all => all.map(each => each.classList[1])")
    page.locator(f"#legend .{bins[i]}").click()  # the next of its bin
    idle(page)
    there = next(j for j in [*range(i + 1, len(bins)), *range(i + 1)] if bins[j] == bins[i])
    assert page.locator("#text [aria-selected=true]").get_attribute("data-token") == str(there)


def test_bytes_that_are_no_text_can_be_told_apart(page: Page) -> None:
    pieces = [[226, 130], [32, 240], "a", {"c": "<s>"}, [226, 130, 172]]
    shown = "all => import('/loom/app/store.js').then(store => all.map(store.pieceText))"
    assert page.evaluate(shown, pieces) == [r"\xe2\x82", r" \xf0", "a", "<s>", "€"]


def test_session_with_the_keyboard_alone(page: Page) -> None:
    """From the empty page on: write, continue, move, fork, bookmark, note, undo, redo, find, help."""
    page.keyboard.type("The old king said")
    page.keyboard.press("Control+Enter")
    page.locator(".shoot").nth(2).wait_for()
    idle(page)
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.press("Shift+Tab")
    while page.evaluate("document.activeElement.id") != "tree":
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    idle(page)
    first = chosen_node(page)
    page.keyboard.press("j")
    idle(page)
    second = chosen_node(page)
    assert first != second
    while page.evaluate("document.activeElement.id") != "text":
        page.keyboard.press("Tab")
    idle(page)
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    idle(page)
    chosen = page.locator("#text [aria-selected=true]")
    assert chosen.get_attribute("data-token") == str(len(tokens(page)) - 2)
    active = page.locator("#text").get_attribute("aria-activedescendant")
    assert active == chosen.get_attribute("id")
    others = page.locator("[data-alternative]")
    others.nth(2).wait_for()
    page.keyboard.press("2" if others.nth(1).get_attribute("aria-current") is None else "3")
    idle(page)
    assert chosen_node(page) not in (first, second)
    page.keyboard.press("b")
    page.locator(".words[data-marks*='★']").first.wait_for()
    page.keyboard.press("m")
    page.keyboard.type("a turn")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".words[data-marks*='✎']").first.wait_for()
    page.keyboard.press("u")
    page.wait_for_function("() => !document.querySelector(\".words[data-marks*='✎']\")")
    page.keyboard.press("Control+Shift+Z")
    page.locator(".words[data-marks*='✎']").first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("old king")
    page.wait_for_function("() => /[1-9]/.test(document.querySelector('#found').textContent)")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("dialog table.keys tr").count() > 30
    page.keyboard.press("Escape")
    page.locator("#tree:focus").wait_for()  # where the dialog was opened


def test_typed_text_is_scored_and_edits_fork(page: Page) -> None:
    before = written(page)
    page.keyboard.press("End")
    page.locator("#text").press("Enter")
    page.locator(".typing textarea").fill(" Then the moon rose.")
    page.locator(".preview .t[data-lp]").first.wait_for()
    page.keyboard.press("Escape")
    idle(page)
    assert "".join(tokens(page)).endswith("Then the moon rose.")
    page.wait_for_function(
        "n => document.querySelectorAll('#text [data-lp]').length >= n", arg=len(before)
    )
    page.locator("#text [data-token]").nth(3).click()
    page.locator("#text").press("e")
    box = page.locator(".typing textarea")
    box.fill(box.input_value().replace("moon", "sun"))
    page.keyboard.press("Escape")
    idle(page)
    now = "".join(tokens(page))
    assert "sun rose" in now and "moon" not in now
    assert tokens(page)[: len(before)] == before
    page.locator("#tree").focus()
    page.keyboard.press("u")
    page.wait_for_function("() => !/sun rose/.test(document.querySelector('#rows').textContent)")


def test_a_fork_is_shown_before_its_answer(page: Page) -> None:
    written(page)
    page.locator("#text").press("End")
    page.locator("[data-alternative]").nth(2).wait_for()
    before = chosen_node(page)
    held: list[tuple[Route, APIResponse]] = []
    page.route("**/loom/do", lambda route: held.append((route, route.fetch())), times=1)
    page.locator("[data-alternative]:not([aria-current])").first.click()
    page.wait_for_function(
        "node => document.querySelector('#tree [aria-selected=true]').dataset.node !== node",
        arg=before,
    )
    fork = chosen_node(page)
    while not held:  # the event may come before the answer does
        page.wait_for_timeout(10)
    for route, answer in held:
        route.fulfill(response=answer)
    idle(page)
    assert chosen_node(page) == fork


def test_two_tabs_show_the_same(chromium: Browser, tmp_path: Path) -> None:
    with (
        Opened(tmp_path) as served,
        visiting(chromium, served) as page,
        visiting(chromium, served) as other,
    ):
        state(page, "ready")
        state(other, "ready")
        begin(page, "In the second tab one reads")
        other.locator(".words", has_text="In the second tab").first.wait_for()
        node = chosen_node(page)
        page.locator("#tree").focus()
        page.keyboard.press("b")
        other.locator(f"[data-node={node}] .words[data-marks*='★']").wait_for()


def test_searches_are_watched_and_adopted(page: Page) -> None:
    begin(page)
    for kind in ("beam", "best_of_n", "smc", "vote", "steps", "tree"):
        page.locator("#text").press("S")
        page.locator("dialog select[name=kind]").select_option(kind)
        page.locator("dialog input[name='options.max_tokens']").fill("8")
        page.locator("dialog button.main").click()
        page.locator("#live-body .totals", has_text=kind.replace("_", " ")).wait_for()
        page.locator("#live-body .outline li.finished").first.wait_for()
        idle(page)
        n = page.evaluate("fetch('/loom/doc').then(a => a.json()).then(d => d.nodes.id.length)")
        page.locator("#live-body .outline li.finished button").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_function(
            "n => fetch('/loom/doc').then(a => a.json()).then(d => d.nodes.id.length > n)", arg=n
        )
        page.locator("#live-body .totals button", has_text="Close").click()


def test_rounds_add_up_and_ghosts_are_not_in_the_text(page: Page) -> None:
    plain = "".join(written(page))
    page.locator("#fold").click()
    idle(page)
    titles = page.locator(".round").evaluate_all("all => all.map(each => each.title)")
    assert titles
    for title in titles:
        numbers = [int(word) for word in title.replace(",", "").split() if word.isdigit()]
        drafted, accepted, rejected, unreached = numbers
        assert drafted == accepted + rejected + unreached
    page.locator("#text").press("x")
    idle(page)
    found = stored(page)
    texts = [text for part in found["parts"] for text in part["text"]]
    assert "".join(text for text in texts if isinstance(text, str)) == plain
    judged = any(each["accepted"] < len(each["draft"]) for each in found["rounds"])
    assert (page.locator("#text .ghost").count() > 0) == judged
    page.locator("#text").press("x")


def test_two_models_are_compared(chromium: Browser, tmp_path: Path) -> None:
    compare = Opened(tmp_path, "--compare", "tale-draft")
    with compare as served, visiting(chromium, served) as page:
        idle(page)
        begin(page)
        page.locator(".shoot").first.click()
        page.locator("#text").press("d")
        page.locator("dialog button.main").click()
        idle(page)
        assert lens_of(page) == "divergence"
        assert tokens(page) == page.locator("#text-b [data-token]").all_text_contents()
        assert page.locator("#text [data-cue='⚑']").count() == 1  # the first of another top token
        assert "tokens compared: mean KL(A, B)" in page.locator("#status").inner_text()
        assert "Under B" in page.locator("#token").inner_text()
        page.keyboard.press("v")
        idle(page)
        told = page.locator("#text [data-cue]")
        cues = set(told.evaluate_all("all => all.map(each => each.dataset.cue)"))
        assert cues and cues <= {"+", "−"}


def test_a_lost_connection_keeps_what_is_typed(chromium: Browser, tmp_path: Path) -> None:
    with Opened(tmp_path) as first:
        port = first.url.rpartition(":")[2]
        with visiting(chromium, first) as page:
            state(page, "ready")
            begin(page)
            page.locator("#text").press("Enter")
            page.locator(".typing textarea").fill(" and nothing of this is lost")
            first.process.kill()
            first.process.wait()
            state(page, "connection-lost")
            assert page.locator(".typing textarea").input_value().endswith("is lost")
            with Opened(tmp_path, "--port", port) as second:
                page.goto(second.link)
                idle(page)
                assert page.locator("[role=treeitem]").count() > 0


def test_a_request_that_fails_is_made_again(page: Page) -> None:
    begin(page)
    failed: list[str] = []

    def fail_once(route: Route) -> None:
        if failed:
            route.fallback()
        else:
            failed.append(route.request.url)
            route.abort()

    page.route("**/loom/tokens*", fail_once)
    page.reload()
    idle(page)
    assert failed and tokens(page)


def test_remapped_keys_survive_another_port(chromium: Browser, tmp_path: Path) -> None:
    with Opened(tmp_path) as first, visiting(chromium, first) as page:
        state(page, "ready")
        begin(page)
        page.locator("#text").press("?")
        row = page.locator("table.keys tr", has_text="the next lens").locator("button")
        row.click()
        row.press("q")
        page.locator("table.keys button", has_text="q").first.wait_for()
        page.keyboard.press("Escape")
        page.locator("#text").press("v")
        assert lens_of(page) == "probability"
        page.locator("#text").press("q")
        assert lens_of(page) == "entropy"
    with Opened(tmp_path) as second, visiting(chromium, second) as page:
        idle(page)
        page.locator("#text").press("q")
        assert lens_of(page) == "entropy"
