"""The page of a server's requests, in a browser: bars, reasons, differences, who can read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import time
from typing import TYPE_CHECKING, Any

import pytest
from browsing import CONTRAST, HOSTILE, PATIENCE_MS, state, told, violations
from serving import Serving, httpx, post, serving
from viewing import everywhere, made_up

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from llamabranch.request.record import Record


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture
def day(server: Serving, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The server tells made-up records."""
    records = made_up(time() - 1800)
    monkeypatch.setattr(type(server.ctx), "requests", property(lambda _: records))
    return records


@contextmanager
def viewing(chromium: Browser, server: Serving, **settings: Any) -> Iterator[Page]:
    """Open the page by its link; nothing may go wrong in it."""
    context = chromium.new_context(**settings)
    context.set_default_timeout(PATIENCE_MS)
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(f"{error}\n{error.stack}"))
    page.goto(f"{server.server.page_url}/#{server.server.page.link()}")
    state(page, "ready")
    assert "#" not in page.url
    yield page
    assert wrong == []
    context.close()


def row(page: Page, number: int) -> Any:
    return page.locator(f"[data-number='{number}'] > button")


def test_requests_of_a_real_server_appear_by_themselves(chromium: Browser, server: Serving) -> None:
    with viewing(chromium, server) as page, server.client() as api:
        assert page.locator("#point").inner_text() == f"ANTHROPIC_BASE_URL={server.server.page_url}"
        post(api, prompt="Once upon a time there was a little fox", max_tokens=3, session_id="tale")
        row(page, 0).wait_for()
        assert page.locator("#empty").is_hidden()
        post(api, prompt="Once upon a time there was a little fox who", max_tokens=3,
             session_id="other", parent_session_id="tale")  # fmt: skip
        row(page, 1).wait_for()
        told(page, "[data-number='1']", r" = \d+ cached \+ \d+ read")
        nested = page.locator(".branch .branch h2 b")
        assert nested.all_inner_texts() == ["other"]
        told(page, "#totals", r"\d+ prompt tokens, \d+ of them read, \d+ read again")


def test_the_tree_the_bars_and_their_reasons(
    chromium: Browser, server: Serving, day: list[Record]
) -> None:
    with viewing(chromium, server) as page:
        assert page.locator(".request").count() == len(day)
        tops = page.locator("#tree > .branch > h2 b").all_inner_texts()
        assert tops == ["main", "review", "python, no session", "single requests"]
        inner = page.locator("#tree > .branch:first-child .branch > h2 b").all_inner_texts()
        assert inner == ["explore", "write the tests"]
        record = day[5]
        shown = row(page, 5).inner_text()
        numbers = record.num_prompt_tokens, record.cached, record.evaluated
        assert "{:,} = {:,} cached + {:,} read".format(*numbers) in shown
        assert "changed read again from token 58" in shown
        heads = page.locator("#columns span").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect().x)"
        )
        parts = page.locator("[data-number='5'] > button > :not(.why)")
        assert heads[:4] == pytest.approx(
            parts.evaluate_all("all => all.map(e => e.getBoundingClientRect().x)"), abs=1
        )
        assert "--drop-line" in shown
        widths = page.evaluate(
            "() => Object.fromEntries([...document.querySelectorAll(`[data-number='5'] .bar i`)]"
            ".map(part => [part.className, part.getBoundingClientRect().width]))"
        )
        scale = widths["again"] / record.reread
        assert widths["new"] == pytest.approx((record.evaluated - record.reread) * scale, abs=1)
        whole = page.locator("[data-number='12'] .bar .cached").bounding_box()
        assert whole is not None
        assert whole["width"] == pytest.approx(day[12].cached * scale, abs=1)
        told(page, f"[data-number='{day[-1].number}']", "running")


def test_a_request_opens_with_keys_and_shows_what_differs(
    chromium: Browser, server: Serving, day: list[Record]
) -> None:
    with viewing(chromium, server) as page:
        row(page, 0).focus()
        for _ in range(5):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        detail = page.locator("[data-number='5'] .detail")
        assert detail.locator("mark").all_inner_texts() == ["65abc", "fa690"]
        assert "in the system prompt, line 1" in detail.inner_text()
        assert row(page, 5).get_attribute("aria-expanded") == "true"
        day[-1].finish_reason = "stop"  # what is opened and has the focus stays so
        told(page, "#status", f"Request {day[-1].number}")
        assert detail.is_visible()
        assert row(page, 5).evaluate("each => each === document.activeElement")
        detail.locator(".go").first.click()
        assert row(page, 4).evaluate("each => each === document.activeElement")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Escape")
        assert detail.count() == 0
        page.keyboard.press("End")
        assert page.locator(".request > button").last.evaluate("b => b === document.activeElement")


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_requests_is_text(
    chromium: Browser, server: Serving, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    records = [*everywhere(text)]
    monkeypatch.setattr(type(server.ctx), "requests", property(lambda _: records))
    with viewing(chromium, server) as page:
        row(page, 0).click()
        assert page.evaluate("() => window.hacked") is None
        shown = page.locator("body").inner_text()
        assert not {"\x1b", "\x00", "\u202e"} & {*shown}
        assert page.locator("body img, body script").count() == 0


def test_states_without_a_session_and_without_a_server(
    chromium: Browser, server: Serving, day: list[Record]
) -> None:
    page = chromium.new_page()
    page.goto(server.server.page_url)
    state(page, "no-session")
    assert "Press Enter in the terminal" in page.locator("#bar").inner_text()
    assert page.locator(".request").count() == 0
    page.goto(f"{server.server.page_url}/#{server.server.page.link()}")  # in the same tab
    state(page, "ready")
    page.close()
    with viewing(chromium, server) as page:
        page.route("**/requests*", lambda route: route.abort())
        state(page, "connection-lost")
        assert page.locator(".request").count() == len(day)
        page.unroute("**/requests*")
        state(page, "ready")


def test_a_page_of_another_origin_gets_nothing(chromium: Browser, server: Serving) -> None:
    with serving() as other, viewing(chromium, other) as page:
        fetched = """url => fetch(url, {credentials: "include"}).then(a => a.text(), e => "" + e)"""
        assert "TypeError" in page.evaluate(fetched, f"{server.server.page_url}/requests")
    headers = {"origin": other.server.page_url, "authorization": f"Bearer {server.server.page.key}"}
    assert httpx.get(f"{server.server.page_url}/requests", headers=headers).status_code == 403


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_read_it(
    chromium: Browser, server: Serving, day: list[Record], scheme: Any
) -> None:
    for width in (1320, 390):
        size: Any = {"width": width, "height": 844}
        with viewing(chromium, server, color_scheme=scheme, viewport=size) as page:
            row(page, 5).click()
            assert violations(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            texts = ".numbers, .seconds, .why, .why b, time, h2 small, .detail *, #columns"
            texts += ", #totals b, #causes"
            measured = page.evaluate(CONTRAST, [texts])
            assert min(ratio for _, ratio, _ in measured) >= 4.5, measured
