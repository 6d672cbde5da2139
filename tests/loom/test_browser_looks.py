"""What one sees: rows, matches of a search; who can read it: contrast, axe-core, no motion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from browsing import (
    CONTRAST,
    asked,
    begin,
    idle,
    menu,
    press,
    state,
    tokens,
    told,
    violations,
    visiting,
)
from paging import Opened

if TYPE_CHECKING:
    from pathlib import Path

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


WORDS = "There was once a king who lived in a kitchen."


def opens(page: Page, selector: str) -> str:
    """Click a part of the example; return the text that is shown once the model has gone on."""
    page.locator(f"#example {selector}").click()
    page.locator("#empty").wait_for(state="hidden")
    idle(page)
    page.wait_for_function("() => document.activeElement.id === 'text'")
    return "".join(tokens(page))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_shows_a_text_that_one_can_click(
    chromium: Browser, tmp_path: Path, scheme: Any
) -> None:
    with (
        Opened(tmp_path) as served,
        visiting(chromium, served, color_scheme=scheme) as page,
    ):
        page.locator("#example .sentence").wait_for()
        idle(page)
        assert page.evaluate("document.activeElement.id") == "begin"
        assert page.locator("#example .sentence").inner_text() == WORDS
        painted = page.locator("#example .sentence .t[class*=' b']")
        assert painted.count() > 5
        assert page.locator(".ending").count() == 3
        said = page.locator("body").inner_text().lower()
        for word in ("token", "template", "replay", "exact", "temperature", "probability"):
            assert word not in said
        assert violations(page) == []
        measured = page.evaluate(CONTRAST, ["#example .t, #example h3, #example h4, .note"])
        assert min(ratio for _, ratio, _ in measured) >= 4.5
        page.locator("#example [data-word='4']").focus()
        told(page, "#others h4", "Instead of “king”")
        assert asked(page, "/loom/doc")["nodes"]["id"] == []
        for part, begins, is_whole in (
            ("[data-word='4']", "There was once a king", True),
            (".ending >> nth=1", WORDS.removesuffix(" kitchen."), False),
            ("#others button:not([aria-current]) >> nth=0", "There was once a", False),
        ):
            text = opens(page, part)
            assert text.startswith(begins) and (text == begins) is is_whole
            assert len(asked(page, "/loom/doc")["nodes"]["id"]) > 4  # the example, and new texts
            press(page, "u", "u", at="#text")
            page.locator("#example .sentence").wait_for()


def test_exact_replay_says_what_it_needs(chromium: Browser, tmp_path: Path) -> None:
    small: Any = {"viewport": {"width": 390, "height": 844}}
    with Opened(tmp_path) as served, visiting(chromium, served, **small) as page:
        assert page.locator("#exact").is_hidden()  # nothing is written yet
        begin(page)
        boxes = [each.bounding_box() for each in page.locator("header .tools > :visible").all()]
        assert len({box["y"] + box["height"] / 2 for box in boxes if box}) == 1
        assert max(box["x"] + box["width"] for box in boxes if box) <= 390
        page.locator("#exact").click()
        assert "-S exact=true" in page.locator("dialog").inner_text()
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.locator("#text [data-token]").nth(3).click()
        page.locator("[data-alternative]").first.wait_for()
        menu(page, "begin another text")
        page.locator("#start").click(trial=True)  # nothing covers it
    with Opened(tmp_path, "-S", "exact=true") as served, visiting(chromium, served) as page:
        idle(page)
        assert page.locator("#exact").is_hidden()


def written(page: Page, *texts: str) -> list[str]:
    """Write a text and texts that follow it; show the first, and return the names of all."""
    nodes: list[str] = []
    for text in texts:
        body = {"op": "type", "cid": page.evaluate("crypto.randomUUID()"), "text": text}
        body |= {"node": nodes[0]} if nodes else {}
        nodes.append(asked(page, "/loom/do", json.dumps(body))["node"]["id"])
    script = """node => import("/app/store.js").then(({store, select}) => {
        if (store.nodes.has(node)) select(node);
        return store.current === node; })"""
    page.wait_for_function(script, arg=nodes[0])
    idle(page)
    return nodes


def test_rows_begin_where_siblings_differ(chromium: Browser, served: Opened) -> None:
    with visiting(chromium, served) as page:
        ends = " and he slept very well", " and he slept very badly", " in a castle"
        nodes = written(page, "There was a king", *ends)
        rows = [page.locator(f"[data-node={node}] .words") for node in nodes]
        for row, words in zip(rows[1:], ("… well", "… badly", "in a castle"), strict=True):
            assert row.inner_text() == words
        few = rows[1].evaluate("row => row.parentElement.offsetHeight")
        nodes += written(page, *(f"Tale number {i}" for i in range(30)))
        rows[1].scroll_into_view_if_needed()
        assert rows[1].evaluate("row => row.parentElement.offsetHeight") < few


def found(page: Page, which: str = ".found") -> list[str]:
    """Return the marked tokens, matches that follow each other as one text."""
    script = """all => all.map((each, i) =>
        (each.previousSibling === all[i - 1] ? "+" : "/") + each.textContent).join("")"""
    marked = str(page.locator(f"#text {which}").evaluate_all(script))
    return marked.replace("+", "").split("/")[1:]


def test_a_search_marks_every_token_of_every_match(chromium: Browser, served: Opened) -> None:
    with visiting(chromium, served) as page:
        written(page, "The old king said: an old king am I, and no old queen.")
        page.locator("#find").fill("old king")
        told(page, "#found", "^2$")
        page.wait_for_function("() => document.querySelectorAll('#text .found').length > 3")
        assert [text.strip() for text in found(page)] == ["old king"] * 2
        assert found(page, ".now") == []
        page.locator("#find").press("Enter")
        told(page, "#found", "^1 / 2$")
        idle(page)
        assert len(found(page, ".now")) == 1
        first = page.locator("#text .now").first.get_attribute("data-token")
        page.locator("#find").press("Enter")
        idle(page)
        assert page.locator("#text .now").first.get_attribute("data-token") != first
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            measured = page.evaluate(CONTRAST, ["#text .found"])
            assert min(ratio for _, ratio, _ in measured) >= 4.5
        page.locator("#find").fill("")
        page.locator("#text .found").first.wait_for(state="detached")


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
