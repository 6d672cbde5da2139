"""Keys, and texts that are typed in the page: boxes in place, drafts that outlive a reload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from browsing import asked, begin, chosen_token, idle, press, tokens, violations

if TYPE_CHECKING:
    from playwright.sync_api import Page

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
