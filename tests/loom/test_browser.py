"""The page as a reader uses it: mouse, keys, undo, copying; two tabs; exported files; hostile text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import (
    HOSTILE,
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
    violations,
    visiting,
    written,
)
from paging import Opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Page

ROWS = "[role=treeitem]:not([hidden])"
NOTED = ".words[data-marks*='✎']"


def arguments(_: Path) -> list[object]:
    """Return those of the page."""
    return ["--draft-length", "4"]


def chosen_node(page: Page) -> str | None:
    return page.locator("[role=treeitem][aria-selected=true]").get_attribute("data-node")


def focus(page: Page, name: str, key: str) -> None:
    """Press a key until an element has the focus."""
    page.keyboard.press(key)
    while page.evaluate("document.activeElement.id") != name:
        page.keyboard.press(key)
    idle(page)


def test_first_half_minute(page: Page) -> None:
    begin(page)
    assert page.locator(f"#tree {ROWS}").count() >= 4
    assert page.locator(".shoot").count() == 3
    assert page.locator(".shoot .t").count() >= 48
    page.locator(".shoot").first.click()
    idle(page)
    word = take(page, len(tokens(page)) - 5)
    assert page.locator("#status").inner_text().startswith("0 prompt tokens read")
    page.locator("#text").focus()
    current = page.locator("[data-alternative][aria-current]")
    assert current.get_attribute("data-alternative") == word
    page.keyboard.press("v")
    assert lens_of(page) == "probability"


def test_bytes_that_are_no_text_can_be_told_apart(page: Page) -> None:
    pieces = [[226, 130], [32, 240], "a", {"c": "<s>"}, [226, 130, 172]]
    shown = "all => import('/app/store.js').then(store => all.map(store.pieceText))"
    assert page.evaluate(shown, pieces) == [r"\xe2\x82", r" \xf0", "a", "<s>", "€"]


def test_session_with_the_keyboard_alone(page: Page) -> None:
    """From the empty page on: write, continue, move, fork, bookmark, note, undo, redo, find, help."""
    page.keyboard.type("The old king said")
    page.keyboard.press("Control+Enter")
    page.locator(".shoot").nth(2).wait_for()
    idle(page)
    assert page.evaluate("document.activeElement.id") == "text"
    focus(page, "tree", "Shift+Tab")
    press(page, "ArrowRight")
    first = chosen_node(page)
    press(page, "j")
    second = chosen_node(page)
    assert first != second
    focus(page, "text", "Tab")
    press(page, "End", "ArrowLeft")
    assert chosen_token(page) == len(tokens(page)) - 2
    active = page.locator("#text").get_attribute("aria-activedescendant")
    assert active == page.locator("#text [aria-selected=true]").get_attribute("id")
    others = page.locator("[data-alternative]")
    others.nth(2).wait_for()
    press(page, "2" if others.nth(1).get_attribute("aria-current") is None else "3")
    assert chosen_node(page) not in (first, second)
    page.keyboard.press("b")
    page.locator(".words[data-marks*='★']").first.wait_for()
    page.keyboard.press("m")
    page.keyboard.type("a turn")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(NOTED).first.wait_for()
    page.locator("dialog").wait_for(state="hidden")  # the note's event may come before its answer
    press(page, "u")
    page.wait_for_function("noted => !document.querySelector(noted)", arg=NOTED)
    press(page, "Control+Shift+Z")
    page.locator(NOTED).first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("old king")
    told(page, "#found", "[1-9]")
    for key in ("Enter", "Escape", "?"):
        page.keyboard.press(key)
    assert page.locator("dialog .keys dd").count() > 30
    page.keyboard.press("Escape")
    page.locator("#tree:focus").wait_for()  # where the dialog was opened


def do(page: Page, op: str, **fields: object) -> Any:
    cid = page.evaluate("crypto.randomUUID()")
    return asked(page, "/loom/do", json.dumps({"op": op, "cid": cid, **fields}))


def show(page: Page, node: str) -> None:
    """Show a text, wherever its row is."""
    page.wait_for_function(
        """node => import("/app/store.js").then(({store, select}) => {
        if (store.nodes.has(node)) select(node);
        return store.current === node; })""",
        arg=node,
    )
    idle(page)


def shown(page: Page, text: str) -> str:
    """Import a text and show it; return its node."""
    node = str(asked(page, "/loom/import", text)["nodes"][0]["id"])
    show(page, node)
    return node


def chosen(page: Page) -> str:
    return str(page.evaluate("import('/app/store.js').then(({store}) => store.current)"))


def test_a_picked_alternative_follows_the_bar(page: Page) -> None:
    shown(page, "Once upon a time there was a little fox who lived")
    bars: list[Any] = [
        {"n": 2, "max_tokens": 5},
        {"max_tokens": 9, "choice": [" north", " south"]},
    ]
    for bar in bars:
        do(page, "bar", mode="text", bar={**bar, "sampling": {"temperature": 0.5}})
        told(page, "#bar-said", f"{bar['max_tokens']} tokens")
        picked = take(page, 5)
        made = asked(page, f"/loom/tokens?node={chosen(page)}&from=6")
        text = "".join(made["parts"][-1]["text"])
        assert (made["nodes"][-1]["sampling"]["temperature"], picked != text) == (0.5, True)
        assert text in bar["choice"] if "choice" in bar else made["nodes"][-1]["n"] == 6
        press(page, "u", at="#text")
    do(page, "bar", mode="text", bar={})


def test_what_differs_between_batches_only_is_not_shown(page: Page) -> None:
    numbers = [0.0399, 0.0375, 0.4712, 0.0996, 0.0042, 8e-6, 0.9991, 0.99991, 1]
    script = "all => import('/app/dom.js').then(dom => all.map(dom.percent))"
    said = ["4 %", "4 %", "47 %", "10 %", "0.4 %", "< 0.001 %", "> 99 %", "100 %", "100 %"]
    assert page.evaluate(script, numbers) == said


def painted(page: Page) -> list[bool]:
    """Tell which tokens of the text have a colour, hatching or a cue."""
    return list(page.locator("#text [data-token]").evaluate_all(
        "all => all.map(each => /\\bb[x\\d]/.test(each.className) || 'cue' in each.dataset)"
    ))  # fmt: skip


def test_a_text_opens_plain_and_numbers_paint_the_words_of_the_model(page: Page) -> None:
    begin(page)
    assert lens_of(page) == "plain"
    assert page.locator("#after :is(.b1, .b2, .b3, .b4, .bx, [data-cue])").count() == 0
    assert not page.locator("#legend").is_visible() and not any(painted(page))
    page.locator(".shoot").first.click()
    idle(page)
    n = len(tokens(page))
    assert not any(painted(page))
    page.locator("#text [data-token]").nth(4).hover()
    page.locator("#token-pane[data-position='4'] [data-alternative]").nth(9).wait_for()
    own = page.evaluate(
        "import('/app/store.js').then(({store}) => store.nodes.get(store.current).at)"
    )
    press(page, "v", at="#text")
    page.reload()  # the browser keeps the lens
    idle(page)
    assert lens_of(page) == "probability"
    assert painted(page) == [False] * own + [True] * (n - own)
    counts = page.locator("#legend small").all_inner_texts()
    assert sum(int(count or 0) for count in counts) == n - own
    words = page.locator("#legend button", has_text="all words")
    words.click()
    idle(page)
    assert all(painted(page)) and words.get_attribute("aria-pressed") == "true"
    assert violations(page) == []
    words.click()
    press(page, "v", "v", "v", at="#text")
    assert lens_of(page) == "source" and all(painted(page)) and not words.is_visible()
    shown(page, "A text that the model has no part in")
    press(page, "V", "V", "V", at="#text")
    assert lens_of(page) == "probability" and all(painted(page)) and not words.is_visible()


def test_endings_are_whole_and_the_word_that_tells_them_apart_is_marked(page: Page) -> None:
    node = shown(page, "The old king")
    long = " woke" + " and sang of a day by the sea" * 8
    ends = [" slept all night.", " slept all day.", long]
    made = [do(page, "type", node=node, text=text)["node"]["id"] for text in ends]
    idle(page)
    show(page, made[0])  # so that there are numbers
    show(page, node)
    shoots = page.locator(".shoot")
    page.wait_for_function("() => document.querySelectorAll('.turning[data-share]').length === 3")
    assert shoots.evaluate_all("all => all.map(each => each.textContent)") == [
        text.strip() for text in ends
    ]
    turning = [shoots.nth(i).locator(".turning").all_inner_texts() for i in range(3)]
    assert ["".join(words).strip() for words in turning] == ["night", "day", "woke"]
    for i, name in enumerate(made):
        lps = [
            lp for part in asked(page, f"/loom/tokens?node={name}")["parts"] for lp in part["lp"]
        ]
        said = "lp => import('/app/dom.js').then(dom => dom.percent(Math.exp(lp)))"
        percent = page.evaluate(said, lps[(5, 5, 3)[i]])
        assert shoots.nth(i).locator("[data-share]").get_attribute("data-share") == percent
    shoots.nth(2).click()
    idle(page)
    assert chosen(page) == made[2]


def test_two_branches_side_by_side(page: Page) -> None:
    node = shown(page, "The old king")
    ends = [" slept all night.", " slept all day.", " woke"]
    made = [do(page, "type", node=node, text=text)["node"]["id"] for text in ends]
    idle(page)
    show(page, made[0])
    press(page, "d", at="#text")
    sides = page.locator("#pair > [role=group]")
    columns = page.locator("#pair .column")

    def texts() -> list[str]:
        page.wait_for_function("() => document.querySelectorAll('#pair .column .t').length > 1")
        found: list[str] = columns.evaluate_all("all => all.map(each => each.textContent)")
        return found

    def shared() -> str:
        return "".join(page.locator("#text > :not(#pair) .t").all_inner_texts())

    assert (shared(), texts()) == ("The old king slept all", [" night.", " day."])
    press(page, "Delete", at="#text")  # then the text goes on as the other one: nothing to compare
    page.locator("#pair").wait_for(state="detached")
    assert page.locator("#beside").is_hidden() and page.locator(".shoot").count() == 2
    press(page, "u", at="#text")
    show(page, made[0])
    press(page, "d", at="#text")
    do(page, "delete", node=made[1])  # as another tab does
    page.locator("#pair").wait_for(state="detached")
    do(page, "undo")
    press(page, "d", at="#text")
    assert (shared(), texts()) == ("The old king slept all", [" night.", " day."])
    for i, word in enumerate(("night", "day")):
        line = sides.nth(i).locator(".parting").inner_text()
        columns.nth(i).locator("[data-token]").first.hover()  # the inspector has the same number
        told(page, "#token h2", word)
        told(page, "#token .numbers", "probability" + line.removeprefix(f"{word} "))
    figures = sides.nth(1).locator(".figures").inner_text()
    assert re.fullmatch(r"2 tokens, on average .* % a token, all together .*", figures)
    assert violations(page) == []
    for width, is_below in ((1280, False), (390, True)):
        page.set_viewport_size({"width": width, "height": 844})
        idle(page)
        places: list[Any] = [sides.nth(i).bounding_box() for i in range(2)]
        assert (places[1]["y"] > places[0]["y"]) == is_below
        assert page.locator("#tree-pane").is_hidden() == is_below  # one pane at a time
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.set_viewport_size({"width": 1280, "height": 720})
    # The tree changes the first branch, the list the other one.
    page.locator("#beside select").select_option(made[2])
    idle(page)
    assert (shared(), texts()) == ("The old king", [" slept all night.", " woke"])
    show(page, made[1])
    assert (shared(), texts()) == ("The old king", [" slept all day.", " woke"])
    columns.nth(1).locator("[data-token]").first.hover()
    page.locator("[data-alternative]:not([aria-current])").first.click()
    idle(page)
    assert chosen(page) not in made and texts()[1] == " woke"  # it forks where the mouse was
    copied = page.evaluate("""() => {
        getSelection().selectAllChildren(document.querySelector("#other .column"));
        const event = new ClipboardEvent("copy", {clipboardData: new DataTransfer()});
        document.dispatchEvent(event);
        return event.clipboardData.getData("text/plain"); }""")
    assert copied == " woke"
    press(page, "Escape", at="#text")
    assert page.locator("#pair").count() == 0 and page.locator("#beside").is_hidden()
    press(page, "d", at="#text")
    columns.nth(1).locator("[data-token]").last.click()
    idle(page)
    assert page.locator("#pair").count() == 0 and chosen_token(page) == len(tokens(page)) - 1


def test_the_inspector_says_what_a_grammar_left_and_what_else_acted(page: Page) -> None:
    node = shown(page, "Her name was")
    settings = {"choice": ["~"], "max_tokens": 7, "memory": "A tale of the sea.", "stop": ["!"]}
    made = do(page, "continue", node=node, n=1, **settings)["nodes"][0]["id"]
    show(page, made)
    last = page.locator("#text [data-token]").last
    assert last.inner_text() == "~"
    last.hover()
    told(page, "#token .rule", r"^The list of texts left 1 choice; the model wanted .+ \d+ %\.$")
    wanted = page.locator("#token .rule b").inner_text()
    assert wanted == page.locator("[data-alternative] .word").first.inner_text()
    told(page, "#token .facts", "limit: 7 tokens.*stop at “!”.*one of 1 texts.*A tale of the sea")
    details = page.locator("#token details")
    details.locator("summary").click()
    told(page, "#token details", r"exactp \d[-.\de]+, ln p -\d.*texts~")
    page.locator("#text [data-token]").first.hover()
    page.locator("#token-pane[data-position='0']").wait_for()
    assert details.evaluate("each => each.open") and page.locator("#token .rule").count() == 0
    page.locator("#lenses input[value=source]").check(force=True)
    idle(page)
    assert last.get_attribute("data-cue") == "f"
    assert page.locator("#legend .b3 small").inner_text() == "1"


def test_drafts_are_told_in_plain_words_and_in_full_on_demand(page: Page) -> None:
    written(page)
    told(page, "#live-line", r"^drafted ahead: \d+ of \d+ tokens fitted")
    page.evaluate("""() => import("/app/store.js").then(async ({store}) => {
        store.doc.model.draft = "suffix";
        (await import("/app/dom.js")).redraw(["live"]); })""")
    told(page, "#live-line", r"^copied ahead: \d+ of \d+ tokens fitted")
    assert page.locator("#live-body").is_hidden()
    page.locator("#fold").click()
    told(
        page, "#live-body", r"tokens copied ahead: \d+ fitted, \d+ did not, \d+ were not looked at"
    )
    assert page.locator(".round .judged").count() > 3
    assert violations(page) == []


def test_watching_draws_four_frames_a_second_if_the_model_needs_all_cores(page: Page) -> None:
    gaps, at_once = page.evaluate("""async () => {
        const {pace, paints, redraw} = await import("/app/dom.js");
        const {store} = await import("/app/store.js");
        const frame = () => new Promise(requestAnimationFrame), times = [];
        store.doc.model.leaves_cores = false;
        redraw(["state"]);
        await frame(), await frame();
        paints("probe", () => times.push(performance.now()));
        while (times.length < 5) { // as tokens come
            redraw(["probe"], true);
            await frame();
        }
        const gaps = times.slice(1).map((time, i) => time - times[i]), n = times.length;
        redraw(["probe"]); // as after a key
        await frame(), await frame();
        return [gaps, times.length - n]; }""")
    assert min(gaps) > 245 and at_once == 1, gaps


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


def test_an_answer_waits_for_the_events_before_it(page: Page) -> None:
    page.add_init_script("""{ const listen = EventSource.prototype.addEventListener;
        EventSource.prototype.addEventListener = function (name, hear) {
          listen.call(this, name, (event) => setTimeout(() => hear(event), 300)); }; }""")
    page.reload()
    idle(page)
    node = shown(page, "A text")
    press(page, "E", at="#text")
    data = tree_file(("A king", -1), (" slept", 0)).encode()
    file: Any = {"name": "loom.json", "mimeType": "text/plain", "buffer": data}
    page.locator("dialog input[type=file]").set_input_files(file)
    told(page, "#status", "imported")
    idle(page)
    assert chosen(page) != node
    press(page, "u", at="#text")
    assert (chosen(page), "".join(tokens(page))) == (node, "A text")
    press(page, "Enter", at="#text")
    page.locator(".typing textarea").fill(" of a king")
    press(page, "Escape")
    assert "".join(tokens(page)) == "A text of a king"


def test_undo_shows_what_was_shown_and_redo_what_is_done_again(page: Page) -> None:
    written(page)
    box = page.locator(".typing textarea")
    for way in ("delete", "delete and reload", "continue", "take", "type", "edit"):
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
        elif way == "edit":
            page.locator("#text").press("e")
            box.fill(box.input_value().replace("they slept", "she woke"))
            press(page, "Escape")
            assert "".join(tokens(page)) == "".join(before[1]).replace("they slept", "she woke")
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
    node = shown(page, "A text that stands alone")
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


def copied(page: Page, do: Callable[[], None]) -> str:
    """What an action copies. The browser writes the clipboard when it gets to it."""
    page.evaluate("navigator.clipboard.writeText('')")
    do()
    page.wait_for_function("() => navigator.clipboard.readText().then(text => text.length > 0)")
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_the_text_is_copied_and_nothing_else(chromium: Browser, served: Opened) -> None:
    rights = ["clipboard-read", "clipboard-write"]
    with visiting(chromium, served, permissions=rights) as page:
        idle(page)
        text = "A first line.\nA \u202esecond one, café " + " and so on" * 900  # most is not drawn
        shown(page, text)
        page.locator("#tree").focus()
        page.keyboard.press("Control+a")
        assert copied(page, lambda: page.keyboard.press("Control+c")) == text
        assert copied(page, lambda: page.keyboard.press("c")) == text
        told(page, "#status", "Copied")
        assert copied(page, lambda: menu(page, "copy the text")) == text
        press(page, "Home", at="#text")
        first = page.locator("#text [data-token='1']")
        page.evaluate(
            "() => getSelection().setBaseAndExtent(document.querySelector('#t1').firstChild, 1,"
            " document.querySelector('#t4').firstChild, 1)"
        )
        part = copied(page, lambda: page.keyboard.press("Control+c"))
        assert part in text and part.startswith(first.inner_text()[1:]) and len(part) < 40
        menus = "() => getSelection().selectAllChildren(document.body) || String(getSelection())"
        assert "Menu" not in page.evaluate(menus)


# -- pages of their own ----------------------------------------------------------------------------


def test_two_tabs_show_the_same_and_what_is_typed_outlives_the_server(
    chromium: Browser, tmp_path: Path
) -> None:
    with Opened(tmp_path) as first, visiting(chromium, first) as page:
        with visiting(chromium, first) as other:
            begin(page, "In the second tab one reads")
            other.locator(".words", has_text="In the second tab").first.wait_for()
            page.locator("#tree").focus()
            page.keyboard.press("b")
            row = f"[data-node={chosen_node(page)}]"
            other.locator(f"{row} .words[data-marks*='★']").wait_for()
        page.locator("#text").press("Enter")
        page.locator(".typing textarea").fill(" and nothing of this is lost")
        first.process.kill()
        first.process.wait()
        state(page, "connection-lost")
        assert page.locator(".typing textarea").input_value().endswith("is lost")
        with Opened(tmp_path, "--port", first.url.rpartition(":")[2]) as second:
            page.goto(second.link)
            idle(page)
            assert page.locator("[role=treeitem]").count() > 0


def test_what_the_model_no_longer_sees_is_dimmed(chromium: Browser, tmp_path: Path) -> None:
    small = ("--n-ctx", "256", "--draft", "none", "--threads", "1")
    with Opened(tmp_path, *small) as served, visiting(chromium, served) as page:
        text = "The king went to the sea and sang a song. " * 60
        node = shown(page, text)
        assert page.locator(".gone, [data-below]").count() == 0
        bar = {"n": 1, "max_tokens": 5, "memory": "A tale of the sea and of a king."}
        do(page, "bar", mode="text", bar=bar)
        press(page, "g", at="#text")
        made = chosen(page)
        window = asked(page, f"/loom/tokens?node={made}")["nodes"][-1]["window"]
        assert made != node and window["from"] > window["head"]
        line = page.locator("[data-below]").get_attribute("data-below") or ""
        assert line.startswith("The model no longer sees what is above")
        assert line.endswith(f"(memory: {window['memory']} tokens stay)")
        told(page, "#lens-line", r"^The model sees what is below the line: \d+ tokens")
        press(page, "Home", at="#text")
        whole = asked(page, f"/loom/tokens?node={made}&n={window['from']}")["parts"]
        words = [str(word) for part in whole for word in part["text"]]
        dim = "".join(page.locator(".gone").all_text_contents())
        assert dim == "".join(words[window["head"] :]) and 100 < len(dim) < len(text)
        press(page, "v", at="#text")
        assert violations(page) == []
        press(page, "u", at="#text")
        assert page.locator(".gone, #lens-line[data-more]").count() == 0


# -- exported files and hostile text ---------------------------------------------------------------

PILE = "a" + "\u0301" * 10_000  # more than the model reads: it can only be imported


def imported(page: Page, text: str) -> int:
    """Import a file; return how many nodes it has."""
    return int(asked(page, "/loom/import", text)["count"])


def test_exported_file_works_from_disk_without_a_request(
    chromium: Browser, page: Page, tmp_path: Path
) -> None:
    text = "".join(written(page))
    n_rows = page.locator(ROWS).count()
    for is_marked in (True, False):
        do(page, "set", node=chosen(page), bookmark=is_marked)
    file = exported(page, tmp_path)
    with from_disk(chromium, file) as page:
        assert "".join(tokens(page)) == text
        assert page.locator("[aria-selected=true] .words[data-marks*='★']").count() == 0
        assert page.locator(ROWS).count() == n_rows
        page.locator("#text").press("End")  # the last token may be a line end, which has no width
        page.locator("[data-alternative]").first.wait_for()
        page.locator("#text").press("v")
        assert lens_of(page) == "probability"
        page.locator("#text").press("g")
        told(page, "#status", "no model")
        page.locator("#fold").click()
        page.locator("#live-body").wait_for()
        page.locator("#find").fill("fox")
        told(page, "#found", "[1-9]")
        page.locator("#text").press("d")
        page.locator("#pair .figures").nth(1).wait_for()


def test_imported_text_is_scored_and_hostile_text_runs_and_reorders_nothing(
    chromium: Browser, tmp_path: Path
) -> None:
    with Opened(tmp_path) as served, visiting(chromium, served) as page:
        branch = (" and wanted a horse", 0)
        assert imported(page, tree_file(("A queen was bored", -1), branch, branch)) == 3
        page.locator("[role=treeitem]", has_text="wanted a horse").first.click()
        idle(page)
        n_tokens = len(tokens(page))
        assert n_tokens > 8
        assert page.locator("#text [data-lp]").count() == n_tokens - 1
        for text in HOSTILE:
            assert "node" in do(page, "type", text=text), text
        imported(page, PILE)
        page.locator("[role=treeitem]", has_text="marks]").wait_for()
        check_hostile(page)
        file = exported(page, tmp_path)
    with from_disk(chromium, file) as page:
        check_hostile(page)


def check_hostile(page: Page) -> None:
    tree, rows, shown = page.locator("#tree"), [""], []
    press(page, "Home", at="#tree")
    while rows[-1] != (row := tree.get_attribute("aria-activedescendant") or ""):
        rows.append(row)
        press(page, "Home", at="#text")  # the view is at its end
        shown.append(page.locator("#text").text_content() or "")
        press(page, "ArrowDown", at="#tree")
    everything = "".join([page.locator("body").text_content() or "", *shown])
    assert not page.evaluate("'hacked' in window")
    assert page.locator("img, #text script").count() == 0
    assert not set("\u202e\u202c\x1b\x00\u2028") & {*everything}
    for part in ("\\u202e", "\\u001b[31m", "<img src=x", "a" + "\u0301" * 8):
        assert any(part in text for text in shown)
    # Of the pile only the beginning is drawn.
    assert all(text.count("\u0301") <= 8 and len(text) < 4000 for text in shown)


def large(n_nodes: int = 10_000, n_tokens: int = 10) -> str:
    """Return a document of many nodes."""
    text = "".join(f" word{j}" for j in range(n_tokens))
    # Bushes along a path of 2,000 nodes. The first one has no parent.
    return tree_file(*((text, (i - 1) // 3 if i % 5 else i - 1) for i in range(n_nodes)))


@pytest.mark.slow
def test_ten_thousand_nodes_in_few_elements(chromium: Browser, tmp_path: Path) -> None:
    with Opened(tmp_path) as served, visiting(chromium, served) as page:
        assert imported(page, large()) == 10_000
        page.reload()
        idle(page)
        page.locator("[role=treeitem]").nth(10).wait_for()
        for key in ["End", "Home", *["ArrowDown"] * 30]:
            press(page, key, at="#tree")
            count = page.evaluate("document.querySelectorAll('#tree *, #text *, #after *').length")
            assert count <= 500
        assert page.evaluate("fetch('/loom/doc').then(a => a.blob()).then(b => b.size)") < 1_000_000
