"""Small things of the page that were wrong once: tokens, imports, undo, copying."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browsing import (
    asked,
    idle,
    menu,
    press,
    take,
    tokens,
    told,
    tree_file,
    typed,
    visiting,
    written,
)
from paging import Opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FAMILY, FLAG, THUMB = "👩‍👩‍👧", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "👍🏽"
ROW = "#rows > :not([hidden])"


def arguments(_: Path) -> list[object]:
    """Return those of the page."""
    return ["--draft-length", "4"]


def do(page: Page, op: str, **fields: object) -> Any:
    cid = page.evaluate("crypto.randomUUID()")
    return asked(page, "/loom/do", json.dumps({"op": op, "cid": cid, **fields}))


def imported(page: Page, text: str) -> str:
    """Import a text and show it; return its node."""
    node = str(asked(page, "/loom/import", text)["nodes"][0]["id"])
    show(page, node)
    return node


def show(page: Page, node: str) -> None:
    """Show a text, wherever its row is."""
    page.wait_for_function(
        """node => import("/loom/app/store.js").then(({store, select}) => {
        if (store.nodes.has(node)) select(node);
        return store.current === node; })""",
        arg=node,
    )
    idle(page)


def rows(page: Page) -> list[tuple[str, str]]:
    """Return the nodes and the words of the rows of the tree."""
    each = f"{ROW} >> css=.words"
    names = page.locator(ROW).evaluate_all("all => all.map(each => each.dataset.node)")
    return [*zip(names, page.locator(each).all_text_contents(), strict=True)]


def status(page: Page) -> str:
    return page.locator("#status").inner_text()


# -- what is inspected -----------------------------------------------------------------------------


def chosen(page: Page) -> str:
    return str(page.evaluate("import('/loom/app/store.js').then(({store}) => store.current)"))


def test_what_is_imported_is_shown_until_it_is_undone(page: Page) -> None:
    written(page)
    tree = tree_file(("A king", -1), (" slept", 0))
    for name, data, text in (
        ("tale.txt", "\ufeffA café by the sea", "A café by the sea"),
        ("loom.json", tree, "A king"),
    ):
        before = chosen(page), tokens(page)
        page.locator("#text").press("E")
        file: Any = {"name": name, "mimeType": "text/plain", "buffer": data.encode()}
        page.locator("dialog input[type=file]").set_input_files(file)
        page.locator("dialog[open]").wait_for(state="detached")
        told(page, "#status", "imported")
        idle(page)
        assert "".join(tokens(page)).startswith(text)
        press(page, "u", at="#text")
        assert (chosen(page), tokens(page)) == before
        press(page, "U", at="#text")
        assert "".join(tokens(page)).startswith(text)


def test_undo_shows_what_was_shown_and_redo_what_is_done_again(page: Page) -> None:
    written(page)
    for way in ("delete", "delete and reload", "continue", "take", "type"):
        if way == "continue":
            press(page, "u", "g", at="#text")
            page.locator(".shoot").first.click()
            idle(page)
            page.locator("#text [data-token]").nth(4).click()
        before = chosen(page), tokens(page)
        if way == "continue":
            press(page, "g", at="#text")
            assert page.locator(".shoot").count() >= 3  # what could follow here is shown
        elif way == "take":
            take(page, 6)
        elif way == "type":
            typed(page, " and so they slept")
        else:
            press(page, "Delete", at="#text")
        after = chosen(page), tokens(page)
        assert after != before, way
        if way == "delete and reload":
            page.reload()
            idle(page)
        press(page, "u", at="#text")
        assert (chosen(page), tokens(page)) == before, way
        press(page, "U", at="#text")
        told(page, "#status", "Redone")
        assert (chosen(page), tokens(page)) == after, way
        if way == "continue":
            page.locator(".shoot").nth(2).click()
            idle(page)
        elif way == "delete":
            press(page, "u", at="#text")
    press(page, "u", at="#text")
    press(page, "b", at="#text")  # another action on the same branch moves nothing
    page.locator("#text").press("Home")
    shown = tokens(page)
    press(page, "u", at="#text")
    assert tokens(page) == shown


def test_a_deleted_text_is_shown_no_more(page: Page) -> None:
    node = imported(page, "A text that stands alone")
    n = int(page.locator("#marks").inner_text().removeprefix("★ "))

    def marked(count: int) -> None:
        told(page, "#marks", f"★ {count}$")

    do(page, "set", node=node, bookmark=True)
    marked(n + 1)
    press(page, "Delete", at="#text")
    assert page.locator("#empty").is_visible()
    marked(n)
    page.reload()
    idle(page)
    assert chosen(page) != node
    show(page, node)
    press(page, "u", at="#text")
    assert "".join(tokens(page)) == "A text that stands alone"
    marked(n + 1)
    # Where a branch is deleted, so is what begins in it.
    child = do(page, "type", node=node, text=" and its end")["node"]["id"]
    do(page, "set", node=child, bookmark=True)
    marked(n + 2)
    do(page, "delete", node=node)
    marked(n)


# -- copying ---------------------------------------------------------------------------------------


def copied(page: Page) -> str:
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_the_text_is_copied_and_nothing_else(chromium: Browser, served: Opened) -> None:
    rights = ["clipboard-read", "clipboard-write"]
    with visiting(chromium, served, permissions=rights) as page:
        idle(page)
        text = "A first line.\nA \u202esecond one, café " + " and so on" * 900  # most is not drawn
        imported(page, text)
        page.locator("#tree").focus()
        page.keyboard.press("Control+a")
        page.keyboard.press("Control+c")
        assert copied(page) == text
        page.keyboard.press("c")
        told(page, "#status", "Copied")
        assert copied(page) == text
        page.evaluate("navigator.clipboard.writeText('')")
        menu(page, "copy the text")
        page.wait_for_function("navigator.clipboard.readText().then(text => text.length > 0)")
        assert copied(page) == text
        press(page, "Home", at="#text")
        first = page.locator("#text [data-token='1']")
        page.evaluate(
            "() => getSelection().setBaseAndExtent(document.querySelector('#t1').firstChild, 1,"
            " document.querySelector('#t4').firstChild, 1)"
        )
        page.keyboard.press("Control+c")
        assert copied(page) in text and copied(page).startswith(first.inner_text()[1:])
        assert len(copied(page)) < 40
        menus = "() => getSelection().selectAllChildren(document.body) || String(getSelection())"
        assert "Menu" not in page.evaluate(menus)
