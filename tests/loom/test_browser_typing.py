"""Keys, and texts that are typed in the page: boxes in place, drafts that outlive a reload."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browsing import afresh, asked, begin, chosen_token, idle, press, tokens, told, violations

if TYPE_CHECKING:
    from paging import Opened
    from playwright.sync_api import Browser, Page

LINES = "".join(f"The {i}th king had a daughter.\n" for i in range(40))


def arguments(_: Path) -> list[object]:
    """Return those of the page."""
    return ["--draft", "none"]


def shown(page: Page, text: str) -> str:
    """Import a text and show it; return its node."""
    node = str(asked(page, "/loom/import", text)["nodes"][0]["id"])
    page.wait_for_function(
        """node => import("/app/store.js").then(({store, select}) => {
        if (store.nodes.has(node)) select(node);
        return store.current === node; })""",
        arg=node,
    )
    idle(page)
    return node


def below(page: Page) -> float:
    """Return how many pixels of the text are below the view."""
    script = "({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight"
    return float(page.locator(".scroller").evaluate(script))


# -- keys ------------------------------------------------------------------------------------------


def test_keys_act_wherever_nothing_is_typed(page: Page) -> None:
    begin(page)
    page.locator(".shoot").first.click()
    idle(page)
    page.reload()
    idle(page)
    assert page.evaluate("document.activeElement === document.body")
    lens = page.locator("html").get_attribute("data-lens")
    press(page, "v")
    assert page.locator("html").get_attribute("data-lens") != lens
    page.locator("#theme").click()  # the button has the focus, and presses itself only
    theme = "document.documentElement.style.colorScheme"
    before = page.evaluate(theme)
    press(page, "Enter")
    assert page.evaluate(theme) != before and page.locator(".typing").count() == 0
    press(page, "End")  # that is the button's own
    assert page.locator("#text [aria-selected=true]").count() == 0
    press(page, "g")
    assert page.locator(".shoot").count() == 3
    page.locator("#find").press("g")
    assert page.locator("#find").input_value() == "g"
    # Arrows act in the tree or the text, whichever was used last.
    page.locator("[role=treeitem]").first.click()
    page.locator("#theme").focus()
    page.evaluate("document.activeElement.blur()")
    row = page.locator("[role=treeitem][aria-selected=true]")
    first = row.get_attribute("data-node")
    press(page, "End")
    assert row.get_attribute("data-node") != first
    # Esc ends what is under way: the box, then the token.
    press(page, "Home", at="#text")
    press(page, "Enter")
    page.locator(".typing textarea").fill(" slept")
    page.locator(".typing button", has_text="Discard").focus()
    press(page, "Escape")
    assert tokens(page)[-1] == " slept" and page.locator(".typing").count() == 0
    press(page, "End")
    assert chosen_token(page) == len(tokens(page)) - 1
    press(page, "Escape")
    assert page.locator("#text [aria-selected=true]").count() == 0


def test_the_help_fits_one_screen_and_switches_keys_off(page: Page) -> None:
    begin(page)
    page.set_viewport_size({"width": 1280, "height": 800})
    lens = "document.documentElement.dataset.lens"
    before = page.evaluate(lens)
    press(page, "?")
    dialog = page.locator("#dialog")
    assert dialog.evaluate("each => each.scrollHeight <= each.clientHeight")
    assert violations(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert dialog.locator(".first kbd").first.is_visible()
    assert dialog.locator(".first").evaluate("each => each.getBoundingClientRect().top > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    dialog.locator("input[type=checkbox]").uncheck()
    press(page, "Escape", "v", "g")
    page.reload()
    idle(page)
    press(page, "v", "?")
    assert page.evaluate(lens) == before and dialog.is_hidden()
    page.locator("[data-action=help]").click()
    dialog.locator("input[type=checkbox]").check()
    press(page, "Escape", "v")
    assert page.evaluate(lens) != before


# -- following what is written ---------------------------------------------------------------------


def test_the_view_follows_what_is_written_until_one_scrolls_up(page: Page) -> None:
    shown(page, LINES + "And so the old king said")
    assert below(page) < 2
    press(page, "g")
    assert page.locator(".shoot").count() == 3
    assert below(page) < 2
    assert page.locator("#to-end").is_hidden()
    page.locator(".scroller").evaluate("each => void (each.scrollTop = 200)")
    page.locator("#to-end").wait_for()
    press(page, "g")
    assert page.locator(".shoot").count() == 6
    assert page.locator(".scroller").evaluate("each => each.scrollTop") == 200
    assert violations(page) == []
    page.locator("#to-end").click()
    page.locator("#to-end").wait_for(state="hidden")
    assert below(page) < 2
    # A continuation that begins where one looks is followed, too.
    page.locator(".scroller").evaluate("each => void (each.scrollTop = 0)")
    page.locator("#text [data-token='20']").click()
    press(page, "g")
    assert below(page) < 2


# -- edits in the place of the text ----------------------------------------------------------------

PARAGRAPH = "The old king had three sons who wanted to see the world before the winter came. " * 3
WORDS_9600 = "\n".join([PARAGRAPH.strip()] * 200)
BOX = ".typing textarea"


def at_word(page: Page, text: str, word: str) -> tuple[float, float]:
    """Return where a word of the text is on the screen: the middle of its third character."""
    found = page.wait_for_function(
        """([text, word]) => {
        const walker = document.createTreeWalker(document.getElementById("text"), 4);
        const nodes = [];
        while (walker.nextNode()) nodes.push(walker.currentNode);
        let place = text.indexOf(word) + 2;
        for (const node of nodes) {
          if (place < node.length) {
            const range = new Range();
            range.setStart(node, place);
            range.setEnd(node, place + 1);
            const {left, right, top, bottom} = range.getBoundingClientRect();
            return [left, right, top, bottom];
          }
          place -= node.length;
        }}""",
        arg=[text, word],
    )
    left, right, top, bottom = found.json_value()
    return left + 0.1 * (right - left), (top + bottom) / 2


def caret(page: Page) -> tuple[str, str]:
    """Return the text of the box before and after its caret."""
    before, after = page.locator(BOX).evaluate(
        "each => [each.value.slice(0, each.selectionStart), each.value.slice(each.selectionEnd)]"
    )
    return before, after


def scrolled(page: Page) -> float:
    """Return how far the text is scrolled."""
    return float(page.locator(".scroller").evaluate("each => each.scrollTop"))


def test_a_line_is_edited_in_its_place_with_the_caret_at_the_click(page: Page) -> None:
    lines = [PARAGRAPH.strip()] * 9
    lines[4] = lines[4].replace("three sons", "fourteen sons", 1)
    text = "\n".join(lines)
    shown(page, text)
    page.locator(".scroller").evaluate("each => void (each.scrollTop = 400)")
    idle(page)
    x, y = at_word(page, text, "fourteen")
    was = scrolled(page)
    box = page.locator(BOX)
    page.mouse.dblclick(x, y)
    box.wait_for()
    assert scrolled(page) == was
    before, after = caret(page)
    assert before.endswith("had fo") and after.startswith("urteen sons")
    assert before + after == "\n".join(lines[4:])
    # The text is where it was, in the same lines.
    place: Any = box.bounding_box()
    line = page.locator("#text").evaluate("each => parseFloat(getComputedStyle(each).lineHeight)")
    assert place["y"] <= y < place["y"] + line
    assert place["height"] == box.evaluate("each => each.scrollHeight")
    style = "each => ['fontFamily', 'fontSize', 'lineHeight'].map(n => getComputedStyle(each)[n])"
    assert box.evaluate(style) == page.locator("#text").evaluate(style)
    width = "each => each.getBoundingClientRect().width"
    assert box.evaluate(width) == page.locator("#text").evaluate(width)
    assert violations(page) == []
    page.keyboard.type("rtunate and fo")
    press(page, "Escape")
    changed = text.replace("fourteen", "fortunate and fourteen")
    assert (
        page.locator("#text").inner_text().replace("↵", "").split("\n")[4:6]
        == (changed.split("\n")[4:6])
    )
    assert scrolled(page) == was
    # Discarding leaves all as it was, too.
    page.mouse.dblclick(x, y)
    box.fill("nothing")
    page.locator(".typing button", has_text="Discard").click()
    idle(page)
    assert scrolled(page) == was and box.count() == 0
    assert page.locator("#text").inner_text().split("\n")[4:6] == changed.split("\n")[4:6]


def test_a_text_of_nine_thousand_words_is_edited_quickly(page: Page) -> None:
    shown(page, WORDS_9600)
    took = page.evaluate(
        """async () => {
        const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        document.querySelector(".scroller").scrollTop = 0;
        document.querySelector("#text").focus();
        await frame();
        const times = [];
        for (const key of ["Home", "e"]) {
          const begin = performance.now();
          document.querySelector("#text").dispatchEvent(
            new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
          do await frame(); while (key === "e" && !document.querySelector(".typing textarea"));
          times.push(performance.now() - begin);
        }
        const box = document.querySelector(".typing textarea");
        for (const word of ["One", " day"]) {
          const begin = performance.now();
          document.execCommand("insertText", false, word);
          await frame();
          times.push(performance.now() - begin);
        }
        return [times, box.value.length]; }"""
    )
    times, n = took
    print("ms to go to the first token, to open the box, and to type:", times)
    assert n == len(WORDS_9600) + len("One day")
    assert page.locator(BOX).evaluate("each => each.clientHeight") > 10_000


# -- drafts ----------------------------------------------------------------------------------------


def test_what_is_typed_is_back_after_a_reload_until_it_is_discarded(page: Page) -> None:
    box, saved = page.locator(BOX), page.locator("#saved")
    node = shown(page, LINES + "And so the old king said")
    press(page, "Enter", at="#text")
    page.keyboard.type(" that nothing is lost")
    press(page, *["ArrowLeft"] * 4)
    assert "a text you are typing is kept in this tab" in (saved.get_attribute("title") or "")
    page.reload()
    idle(page)
    box.wait_for()
    assert caret(page) == (" that nothing is ", "lost")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    # Who goes to another place finds the text again at this one.
    other = shown(page, "Another text")
    assert box.count() == 0
    page.locator("#saved").click()
    box.wait_for()
    assert caret(page) == (" that nothing is ", "lost")
    page.locator(".typing button", has_text="Discard").click()
    page.reload()
    idle(page)
    assert box.count() == 0
    title = saved.get_attribute("title") or ""
    assert "typing" not in title and "tale.loom.jsonl" in title
    saved.click()
    told(page, "#status", r"texts with [\d,]+ tokens are in tale\.loom\.jsonl\.")
    # An edit that was kept is no draft.
    press(page, "e", at="#text")
    box.fill("And so the queen said")
    press(page, "Escape")
    page.reload()
    idle(page)
    assert box.count() == 0 and "queen" in page.locator("#text").inner_text()
    assert node != other


def test_the_first_screen_and_a_note_are_drafts_too(page: Page) -> None:
    page.locator("#begin").fill("A tale that nobody has")
    page.reload()
    idle(page)
    assert page.locator("#begin").input_value() == "A tale that nobody has"
    assert page.locator("#begin").is_visible()
    page.locator("#begin").press("Control+Enter")
    page.locator(".shoot").nth(2).wait_for()
    idle(page)
    press(page, "m", at="#text")
    page.keyboard.type("to be told")
    page.reload()
    idle(page)
    note = page.locator("dialog textarea")
    note.wait_for()
    assert note.input_value() == "to be told"
    page.locator("dialog button", has_text="Cancel").click()
    page.reload()
    idle(page)
    assert page.locator("dialog").is_hidden() and page.locator("#begin").is_hidden()


def test_a_draft_whose_place_is_gone_is_on_the_first_screen(page: Page) -> None:
    node = shown(page, "A text that will be deleted")
    press(page, "Enter", at="#text")
    page.keyboard.type(" and what is typed after it")
    cid = page.evaluate("crypto.randomUUID()")
    asked(page, "/loom/do", json.dumps({"op": "delete", "cid": cid, "node": node}))
    page.reload()
    idle(page)
    assert page.locator("#begin").input_value() == " and what is typed after it"
    assert page.locator("#begin").is_visible()
    told(page, "#status", "is gone")


def test_an_error_is_told_at_the_box_and_the_text_stays(page: Page) -> None:
    shown(page, "A short text")
    press(page, "e", at="#text")
    page.locator(BOX).fill("Another short text")
    refused = {"error": {"message": "there is no room for this"}}
    page.route("**/loom/do", lambda route: route.fulfill(status=409, json=refused))
    press(page, "Escape")
    told(page, ".typing .wrong", "there is no room")
    assert page.locator(BOX).input_value() == "Another short text"
    assert page.locator(BOX).is_editable() and violations(page) == []
    page.unroute("**/loom/do")
    press(page, "Escape")
    assert page.locator("#text").inner_text().endswith("Another short text")


def test_what_is_typed_while_the_document_is_on_its_way_stays(page: Page) -> None:
    shown(page, "A short text")
    held: list[Any] = []
    late = re.compile("/loom/doc")
    page.route(late, lambda route: held.append((route, route.fetch())), times=1)
    fetch = "() => import('/app/net.js').then(({fetchDoc}) => void (fetchDoc(), fetchDoc()))"
    with page.expect_request(late):
        page.evaluate(fetch)
    page.locator("#text").press("Enter")
    page.locator(BOX).fill(" and its end")
    with page.expect_response("**/loom/do"):
        page.keyboard.press("Escape")
    ((route, older),) = held
    route.fulfill(response=older)
    idle(page)
    assert page.locator("#text").inner_text() == "A short text and its end"


def test_pasting_three_megabytes_is_refused_at_the_box(chromium: Browser, served: Opened) -> None:
    rights = ["clipboard-read", "clipboard-write"]
    with afresh(chromium, served, permissions=rights) as page:
        page.evaluate("navigator.clipboard.writeText('A long tale. '.repeat(250_000))")
        page.locator("#begin").fill("Once")
        page.locator("#begin").press("Control+v")
        told(page, "#begin-wrong", "takes 100,000 characters")
        assert page.locator("#begin").input_value() == "Once"
        shown(page, "A short text")
        press(page, "Enter", at="#text")
        page.locator(BOX).press("Control+v")
        told(page, ".typing .wrong", "would have 3,250,000 characters")


def test_line_ends_that_a_box_does_not_have_stay(page: Page) -> None:
    session = {"prompt": [{"type": "ai", "content": "A fox\r\nand a dog\r\nwent out."}]}
    node = shown(page, json.dumps(session))
    count = "import('/app/store.js').then(({store}) => store.nodes.size)"
    n = page.evaluate(count)
    page.locator("#text [data-token]", has_text="dog").dblclick()
    page.locator(BOX).wait_for()
    press(page, "Escape", at=BOX)  # nothing has changed
    assert page.evaluate(count) == n
    page.locator("#text [data-token]", has_text="dog").dblclick()
    page.locator(BOX).fill(page.locator(BOX).input_value().replace("dog", "cat"))
    press(page, "Escape", at=BOX)
    nodes = asked(page, "/loom/doc")["nodes"]["id"]
    assert len(nodes) == n + 1 and nodes[-1] != node
    text = page.evaluate("import('/app/text.js').then(({shownPath}) => shownPath().text.join(''))")
    assert text.endswith("A fox\r\nand a cat\r\nwent out.")


def test_two_tabs_have_drafts_of_their_own(page: Page) -> None:
    node = shown(page, "A text in two tabs")
    other = page.context.new_page()
    other.goto(page.url)
    idle(other)
    for tab, text in ((page, " of the first"), (other, " of the second")):
        tab.wait_for_function(
            """node => import("/app/store.js").then(({store, select}) => {
            if (store.nodes.has(node)) select(node);
            return store.current === node; })""",
            arg=node,
        )
        press(tab, "Enter", at="#text")
        tab.keyboard.type(text)
    for tab, text in ((page, " of the first"), (other, " of the second")):
        tab.reload()
        idle(tab)
        assert tab.locator(BOX).input_value() == text
    other.close()


# -- both directions -------------------------------------------------------------------------------


def test_text_from_right_to_left_stands_right_and_the_caret_is_at_the_click(page: Page) -> None:
    text = "The king said:\nهذا الملك كان في البيت مع ابنه\nand he went home."
    shown(page, text)
    x, y = at_word(page, text, "البيت")
    column: Any = page.locator("#text").bounding_box()
    right = page.evaluate(
        """() => { const range = new Range();
        range.selectNodeContents(document.getElementById("text"));
        return Math.max(...[...range.getClientRects()].map(each => each.right)); }"""
    )
    assert abs(right - (column["x"] + column["width"])) < 2  # the line stands at the right
    page.mouse.dblclick(x, y)
    page.locator(BOX).wait_for()
    before, after = caret(page)
    line = text.split("\n")[1]
    assert abs(len(before) - (line.index("البيت") + 2)) <= 1, before
    assert before + after == "\n".join(text.split("\n")[1:])
    assert page.locator(BOX).get_attribute("dir") == "auto"
    press(page, "Escape")
    assert page.locator("[role=treeitem] .words").first.get_attribute("dir") == "auto"
