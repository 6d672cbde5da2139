"""Small things of the page that were wrong once: rows, comparisons, copying, dialogs, letters, phones."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browsing import (
    asked,
    begin,
    chosen_token,
    exported,
    from_disk,
    idle,
    lens_of,
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
    from playwright.sync_api import Browser, Page, Route

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


def test_no_label_is_cut_inside_a_character(page: Page) -> None:
    family = imported(page, FAMILY * 12)
    marks = imported(page, "a\u0301\u0302" * 60)
    flags = imported(page, FLAG * 9)
    page.reload()
    idle(page)
    page.wait_for_timeout(300)  # rows fetch their tokens once they stay in view
    idle(page)
    shown = dict(rows(page))
    for node, unit in ((family, FAMILY), (marks, "a\u0301\u0302"), (flags, FLAG)):
        words = shown[node]
        assert words and words == unit * (len(words) // len(unit)), words


def test_a_find_in_an_exported_file_finds_every_place(
    chromium: Browser, page: Page, tmp_path: Path
) -> None:
    node = imported(page, "A wizard.* and a (wizard) met a Wizard")
    n = len(tokens(page))
    other = do(page, "type", node=node, at=n, text=" and a witch")["node"]["id"]
    idle(page)
    show(page, other)
    wanted = {"wizard": 3, "wizard.*": 1, "(wizard)": 1, "wizard and a wit": 1}
    with from_disk(chromium, exported(page, tmp_path)) as shown:
        for (words, count), opened in product(wanted.items(), (page, shown)):
            opened.locator("#find").fill(words)
            told(opened, "#found", f"^{count}$")
            press(opened, "Enter", at="#find")
            text = "".join(tokens(opened)[: chosen_token(opened) + 1]).lower()
            assert words in text[-len(words) - 3 :], words
        shown.locator("#find").fill("")
        told(shown, "#found", "^$")


def test_what_tokens_share_is_drawn_as_one(page: Page) -> None:
    text = f"We are {FAMILY} and {THUMB} e\u0301 {FLAG}."
    imported(page, text)
    shown = [word for word in tokens(page) if word]
    assert "".join(shown) == text
    for unit in (FAMILY, THUMB, "e\u0301", FLAG):
        assert any(unit in word for word in shown), unit


# -- what is inspected -----------------------------------------------------------------------------


def test_settings_are_told_after_a_reload(page: Page) -> None:
    root = imported(page, "The king, whose settings are kept, said")
    made = do(page, "continue", node=root, n=1, max_tokens=5, seed="4711", stop=["zz"],
              sampling={"temperature": 0.6})["nodes"][0]["id"]  # fmt: skip
    show(page, made)

    def origin() -> str:
        page.locator("#text").press("End")
        told(page, "#token", "4711")
        return page.locator("#token").inner_text()

    before = origin()
    page.reload()
    idle(page)
    for inspector in (before, origin()):
        assert "temperature 0.6" in inspector and "zz" in inspector


def test_what_was_picked_is_not_called_typed(page: Page) -> None:
    written(page)
    page.locator("#text").press("End")
    page.locator("[data-alternative]:not([aria-current])").first.click()
    idle(page)
    found = asked(page, f"/loom/tokens?node={chosen(page)}&path=1")
    src = "".join(part["src"] for part in found["parts"])
    at = src.rindex("k")
    page.locator(f"#text [data-token='{at}']").click()
    told(page, "#token", "picked")
    page.locator("#lenses input[value=source]").check(force=True)
    idle(page)
    assert page.locator(f"#text [data-token='{at}']").get_attribute("data-cue") == "k"
    assert page.locator("#legend button", has_text="picked").inner_text().endswith("1")
    page.locator("#lenses input[value=probability]").check(force=True)


def chosen(page: Page) -> str:
    return str(page.evaluate("import('/loom/app/store.js').then(({store}) => store.current)"))


def test_not_known_is_counted_as_the_other_bins_are(page: Page) -> None:
    n = len(written(page))
    counts = page.locator("#legend button:not([hidden]) small").all_text_contents()
    assert all(count.isdecimal() for count in counts)
    assert sum(map(int, counts)) == n
    assert page.locator("#legend .bx small").inner_text() == "1"  # the first token


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


def test_undo_and_redo_act_in_the_order_of_their_keys(page: Page) -> None:
    written(page)
    typed(page, " and so they slept")
    before = tokens(page)
    held: list[Route] = []
    page.route("**/loom/do", lambda route: held.append(route), times=1)
    for key in ("u", "U"):  # the second one before the server knows of the first
        page.locator("#text").press(key)
    while not held:
        page.wait_for_timeout(10)
    page.wait_for_timeout(200)
    held[0].continue_()
    told(page, "#status", "Redone")
    idle(page)
    assert tokens(page) == before


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


def test_half_a_character_is_no_error(page: Page) -> None:
    """A program that cuts an emoji in two leaves half of it in the clipboard."""
    cut = "An owl \\ud83d sat"
    put = """([selector, text]) => { const box = document.querySelector(selector);
        box.value = JSON.parse('"' + text + '"');
        box.dispatchEvent(new Event("input")); }"""
    page.evaluate(put, ["#begin", cut])
    page.locator("#start").click()
    page.locator("#empty").wait_for(state="hidden")
    idle(page)
    assert "".join(tokens(page)) == "An owl \ufffd sat"
    page.locator("#text").press("Enter")
    page.evaluate(put, [".typing textarea", " \\ude00 here"])
    page.locator(".preview .t").first.wait_for()
    press(page, "Escape")
    assert "".join(tokens(page)) == "An owl \ufffd sat \ufffd here"
    set_to = "page and \\ud83d"
    page.locator("#bar-said").click()
    page.evaluate(put, ["dialog [name=stop]", set_to])
    page.locator("dialog button[value=keep]").click()
    page.locator("dialog[open]").wait_for(state="detached")
    told(page, "#bar-said", "stop at “page and \ufffd”")
    do(page, "bar", set={"text": {}})


def test_a_find_leaves_out_what_is_gone(page: Page) -> None:
    word = "xylophonist"
    first = imported(page, f"One {word}")
    second = imported(page, f"A longer text with another {word} in it")
    page.locator("#text").press("/")
    page.keyboard.type(word)
    told(page, "#found", "2")
    press(page, "Enter")
    assert chosen(page) == first
    do(page, "delete", node=second)
    idle(page)
    press(page, "Enter", at="#find")
    assert chosen(page) == first
    assert page.locator("#found").inner_text() == "1 / 1"
    do(page, "delete", node=second, restore=True)
    idle(page)
    press(page, "Enter", at="#find")
    assert chosen(page) == second  # one goes on from where one was
    assert page.locator("#found").inner_text() == "2 / 2"


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


def test_errors_of_a_dialog_are_in_the_dialog(page: Page, tmp_path: Path) -> None:
    begin(page)
    page.locator("#text").press("E")
    binary = tmp_path / "picture.png"
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    page.locator("dialog input[type=file]").set_input_files(binary)
    told(page, "dialog .wrong", "mikupad")
    page.keyboard.press("Escape")


def test_the_footer_forgets_what_was_long_ago(page: Page) -> None:
    written(page)
    page.locator("#text").press("g")
    told(page, "#status", "prompt token")
    idle(page)
    press(page, "Home", at="#tree")
    assert status(page) == ""
    page.locator("#text").press("v")
    told(page, "#status", "entropy")
    page.locator("#text").press("g")
    told(page, "#status", "prompt token|Writing")
    idle(page)
    page.locator("#lenses input[value=probability]").check(force=True)


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


def test_a_reload_shows_what_is_being_written(page: Page) -> None:
    node = imported(page, "The king who never stopped to speak said")
    do(page, "continue", node=node, n=4, max_tokens=900)
    page.locator(".shoot").nth(3).wait_for()
    page.reload()
    page.wait_for_function(  # the list of nodes has 40 characters of each
        """() => { const all = [...document.querySelectorAll(".shoot")];
        return all.length === 4 && all.every(each => each.textContent.length > 60); }"""
    )
    assert asked(page, "/loom/doc")["jobs"]  # it is still written
    page.locator("#text").press("Escape")
    idle(page)


# -- letters ---------------------------------------------------------------------------------------


def is_mono(page: Page) -> bool:
    idle(page)
    font = page.evaluate("getComputedStyle(document.querySelector('#text')).fontFamily")
    assert ("monospace" in font) == page.evaluate("'mono' in document.documentElement.dataset")
    return "monospace" in font


def test_code_has_letters_of_one_width(page: Page) -> None:
    for text, expected in (
        (CODE, True), ("#include <stdio.h>\nint main() {\n", True), ("<ul>\n<li>a</li>\n</ul>\n", True),
        ("She said: wait; it is late.\nThen (she thought) again.\n", False), ("Once upon a time", False),
        ("O moon; O stars;\nO night of mine;\nand let the wind, for all we know,\n", False),
    ):  # fmt: skip
        imported(page, text)
        assert is_mono(page) == expected, text
    page.locator("[data-action=mono]").click()  # prose, but it is wished for
    assert is_mono(page)
    page.reload()
    assert is_mono(page)
    page.locator("[data-action=mono]").click()
    assert not is_mono(page)
    do(page, "settings", set={"mono": None})


# -- phones ----------------------------------------------------------------------------------------


PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True,
}  # fmt: skip


def test_what_is_asked_for_is_shown_whatever_the_pane(chromium: Browser, served: Opened) -> None:
    with visiting(chromium, served, **PHONE) as page:
        idle(page)
        node = imported(page, "The old king called his three sons and said")
        do(page, "set", node=node, bookmark=True)

        def leave(pane: str) -> None:
            page.locator("#panes label", has_text=pane).tap()
            idle(page)
            assert page.locator("#text-pane").is_hidden()

        for pane in ("Tree", "Token"):
            show(page, node)
            assert page.locator("#empty").is_hidden()
            leave(pane)
            menu(page, "begin another text")
            assert page.locator("#begin").is_visible(), pane
        show(page, node)
        leave("Tree")
        press(page, "Enter", at="#tree")
        assert page.locator(".typing textarea").is_visible()
        page.locator(".typing button", has_text="Discard").tap()
        leave("Tree")
        page.locator("#marks").tap()
        page.locator(f"dialog [data-bookmark={node}]").tap()
        idle(page)
        assert page.locator("#text").is_visible()
        assert page.locator("#panes :checked").get_attribute("value") == "text"


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


def test_the_card_of_drafts_shows_them_also_on_a_phone(chromium: Browser, tmp_path: Path) -> None:
    narrow: dict[str, Any] = {**PHONE, "viewport": {"width": 360, "height": 740}}
    # --draft auto may draft nothing
    with Opened(tmp_path) as running, visiting(chromium, running, **narrow) as page:
        idle(page)
        page.locator("[data-card=draft]").tap()
        page.locator("#live-body .round").nth(3).wait_for()
        idle(page)
        rounds = page.locator("#live-body .round").evaluate_all(
            "all => all.map(each => [each.title, each.getBoundingClientRect().right])"
        )
        assert any("drafted 4" in title for title, _ in rounds)
        assert max(right for _, right in rounds) <= 360
        assert page.evaluate("document.querySelector('#columns').clientHeight") > 100
        assert page.evaluate("innerWidth") == 360
        assert lens_of(page) == "source"
        shown = page.locator(".judged").evaluate_all("all => all.map(each => each.classList[1])")
        assert {"accepted", "rejected", "next"} <= set(shown)


def test_live_follows_the_job_that_runs(page: Page) -> None:
    written(page)
    page.locator("#fold").click()
    idle(page)
    before = page.locator(".round").count()
    assert before
    text = " ".join(f"a king and {i} daughters" for i in range(300))
    node = imported(page, text)
    page.locator("#text").press("g")
    page.locator("#live-body .job button").wait_for()
    told(page, "#live-body .job", "reading|writing")
    page.locator("#live-body .job button").click()
    state(page, "ready")
    idle(page)
    assert page.locator("#live-body .job").count() == 0
    assert asked(page, "/loom/doc")["jobs"] == []
    assert chosen(page) == node
    page.locator("#fold").click()
