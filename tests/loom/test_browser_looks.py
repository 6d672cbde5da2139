"""Who can read it: contrast, axe-core, forced colours, no motion, 200 percent, 400 pixels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from browsing import CONTRAST, begin, idle, state, violations, visiting
from paging import Opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LENSES = ("probability", "entropy", "rank", "source")


@pytest.fixture(scope="module")
def served(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    with Opened(tmp_path_factory.mktemp("loom")) as running:
        with visiting(chromium, running) as page:
            begin(page)
        yield running


@pytest.fixture(params=["light", "dark"])
def page(chromium: Browser, served: Opened, request: pytest.FixtureRequest) -> Iterator[Page]:
    with visiting(chromium, served, color_scheme=request.param) as opened:
        opened.locator("[role=treeitem]").nth(1).click()
        idle(opened)
        yield opened


def choose(page: Page, lens: str) -> None:
    page.locator(f"#lenses input[value={lens}]").check(force=True)
    idle(page)


def paint_every_bin(page: Page) -> None:
    """Give tokens of the text every bin there is."""
    page.evaluate(
        "() => document.querySelectorAll('#text [data-token]').forEach((each, i) => {"
        " each.className = `t b${i % 7}`; })"
    )


@pytest.mark.parametrize("lens", LENSES)
def test_text_on_every_bin_has_contrast(page: Page, lens: str) -> None:
    choose(page, lens)
    paint_every_bin(page)
    measured = page.evaluate(CONTRAST, ["#text .t"])
    assert {name.split()[1] for name, _, _ in measured} == {f"b{i}" for i in range(7)}
    assert min(ratio for _, ratio, _ in measured) >= 4.5
    if lens != "source":  # ordered: from pale to strong
        shade = {name.split()[1]: paper for name, _, paper in measured}
        ordered = [shade[f"b{i}"] for i in range(1, 7)]
        assert ordered in (sorted(ordered), sorted(ordered, reverse=True))
    legend = page.evaluate(
        CONTRAST, ["#legend button, #legend small, header *, #actions *, #status, .row .words"]
    )
    assert min(ratio for name, ratio, _ in legend) >= 4.5, legend


def test_every_lens_has_a_cue_besides_colour(page: Page) -> None:
    for lens in ("entropy", "rank", "source"):
        choose(page, lens)
        assert page.locator("#text [data-cue]").count() > 0, lens
    choose(page, "probability")
    paint_every_bin(page)
    lines = page.locator("#text .t").evaluate_all(
        "all => all.slice(0, 7).map(each => { const s = getComputedStyle(each);"
        " return `${s.textDecorationLine} ${s.textDecorationStyle} ${s.textDecorationThickness}`; })"
    )
    assert len(set(lines)) == 6  # the two most probable bins have none


def test_axe_finds_nothing(page: Page) -> None:
    assert violations(page) == []
    for key in ("?", "m"):
        page.locator("#text").press(key)
        assert violations(page) == [], key
        page.keyboard.press("Escape")
    page.locator("#text").press("Enter")
    assert violations(page) == []
    for button in (
        page.locator(".typing button", has_text="Discard"), page.locator("#fold"),
        page.locator("[data-action=menu]"),
        page.locator("dialog button", has_text="begin another text"),
    ):  # fmt: skip
        button.click()
        assert violations(page) == []


def test_a_page_without_a_session_asks_for_a_link(chromium: Browser, served: Opened) -> None:
    page = chromium.new_page()
    page.goto(served.url)
    state(page, "no-session")
    assert "open the new link" in page.locator("#bar").inner_text()
    assert violations(page) == []
    page.close()


def test_reduced_motion_moves_nothing_and_forced_colours_keep_the_cues(
    chromium: Browser, served: Opened
) -> None:
    with visiting(chromium, served, reduced_motion="reduce") as page:
        page.locator("#text").press("g")
        most = page.evaluate(
            """async () => {
            const root = document.documentElement.dataset;
            let most = 0;
            do {
              most = Math.max(most, document.getAnimations().length);
              await new Promise(requestAnimationFrame);
            } while ("busy" in root || root.state !== "ready");
            return most; }"""
        )
        assert most == 0
    with visiting(chromium, served, forced_colors="active") as page:
        page.locator("[role=treeitem]").nth(1).click()
        choose(page, "probability")
        paint_every_bin(page)
        line = "each => getComputedStyle(each).textDecorationStyle"
        assert page.locator("#text .t.b6").first.evaluate(line) == "wavy"
        choose(page, "source")
        assert page.locator("#text [data-cue]").count() > 0


def test_the_browser_keeps_the_theme(page: Page) -> None:
    scheme = "document.documentElement.style.colorScheme"
    before = page.evaluate(scheme)
    page.locator("#theme").click()
    chosen = page.evaluate(f"new Promise(requestAnimationFrame).then(() => {scheme})")
    page.reload()
    idle(page)
    assert page.evaluate(scheme) == chosen != before
