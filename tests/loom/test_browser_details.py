"""Small things of the page that were wrong once: rows, comparisons, copying, dialogs, letters, phones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browsing import (
    asked,
    exported,
    from_disk,
    idle,
    menu,
    press,
    state,
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
CODE = "def area(width, height):\n    # of a rectangle\n    return width * height\n"


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


# -- the tree --------------------------------------------------------------------------------------


def test_a_row_shows_no_text_beyond_its_fork(chromium: Browser, page: Page, tmp_path: Path) -> None:
    words = ["One", " two", " three", " four", " five", " six", " seven", " eight"]
    node = imported(page, "".join(words))
    n = len(tokens(page))
    for at in (n - 4, n - 2):
        do(page, "type", node=node, at=at, text=" or else")
    idle(page)
    page.locator(ROW, has_text="or else").nth(1).wait_for()

    def check(shown: Page) -> None:
        def found() -> list[str]:
            told = rows(shown)
            begin = next(i for i, (_, text) in enumerate(told) if text.startswith("One two"))
            mine = [text.replace("·", " ").strip() for name, text in told[begin:]]
            return [text for text in mine if text and "or else" not in text]

        shown.wait_for_function(
            "() => ![...document.querySelectorAll('.words')].some(e => e.textContent === '…')"
        )
        assert " ".join("".join(found()[:3]).split()) == "".join("".join(words).split(" ")) or (
            " ".join(found()[:3]) == "".join(words)
        )

    check(page)
    page.reload()
    idle(page)
    page.locator(f"{ROW}[data-node={node}]").first.click()
    idle(page)
    check(page)
    with from_disk(chromium, exported(page, tmp_path)) as other:
        check(other)


def test_what_tokens_share_is_drawn_as_one(page: Page) -> None:
    text = f"We are {FAMILY} and {THUMB} e\u0301 {FLAG}."
    imported(page, text)
    shown = [word for word in tokens(page) if word]
    assert "".join(shown) == text
    for unit in (FAMILY, THUMB, "e\u0301", FLAG):
        assert any(unit in word for word in shown), unit


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


# -- what the page says ----------------------------------------------------------------------------


def test_what_was_stopped_is_not_read_again_by_itself(page: Page) -> None:
    asked_for: list[str] = []
    page.on("request", lambda request: asked_for.append(request.post_data or ""))
    page.locator("#begin").fill(" ".join(f"a queen and {i} sons" for i in range(150)))
    page.locator("#begin").press("Control+Enter")
    page.locator("#empty").wait_for(state="hidden")
    page.locator("#text").press("Escape")
    state(page, "ready")
    idle(page)  # also a while after it was drawn
    ops = [json.loads(body).get("op") for body in asked_for if body.startswith("{")]
    assert "stop" in ops
    assert "score" not in ops


# -- letters ---------------------------------------------------------------------------------------


def is_mono(page: Page) -> bool:
    idle(page)
    font = page.evaluate("getComputedStyle(document.querySelector('#text')).fontFamily")
    assert ("monospace" in font) == page.evaluate("'mono' in document.documentElement.dataset")
    return "monospace" in font


# -- phones ----------------------------------------------------------------------------------------


PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True,
}  # fmt: skip


def test_fingers_reach_everything(chromium: Browser, served: Opened) -> None:
    with visiting(chromium, served, **PHONE) as page:
        idle(page)
        written_here = imported(page, "The old king called his three sons and said")
        page.locator("#panes label", has_text="Text").tap()
        sizes = """all => all.filter(each => each.offsetParent).map(each => {
            const {width, height} = each.getBoundingClientRect();
            return [each.textContent.trim(), width, height]; })"""
        for pane in ("Tree", "Text"):
            page.locator("#panes label", has_text=pane).tap()
            idle(page)
            targets = page.locator("button, label > span, [role=treeitem]").evaluate_all(sizes)
            assert len(targets) > 12
            assert [each for each in targets if min(each[1:]) < 44] == []
        room = """() => [document.querySelector("#columns").clientHeight / innerHeight,
            document.documentElement.scrollHeight - innerHeight]"""
        high, beyond = page.evaluate(room)
        assert high > 0.35 and beyond <= 0  # one reads the text
        page.locator("#text [data-token]").nth(4).tap()
        other = page.locator("[data-alternative]:not([aria-current])").first
        other.wait_for()  # one tap shows them
        idle(page)
        assert other.bounding_box() is not None and page.locator("#text .cursor").is_visible()
        assert min(page.locator("[data-alternative]").evaluate_all(sizes)[0][1:]) >= 44
        stop = """() => { const stop = document.querySelector("#actions [data-action=stop]");
            stop.hidden = false; // as while something is written
            const isSeen = stop.offsetParent !== null && stop.getBoundingClientRect().height >= 44;
            stop.hidden = true;
            return isSeen; }"""
        assert page.evaluate(stop)
        other.tap()
        idle(page)
        assert chosen(page) != written_here
        assert page.locator("#untap").is_visible()
        page.locator("#untap").tap()
        idle(page)
        assert page.locator("#token-pane").is_hidden()
        menu(page, "begin another text")
        assert [
            each
            for each in page.locator("button, summary").evaluate_all(sizes)
            if min(each[1:]) < 44
        ] == []
        assert page.evaluate("innerWidth") == 390  # it is not zoomed out for what is too wide


# -- drafts ----------------------------------------------------------------------------------------
