"""Chats in the page, the sampling bar, where an action acts, and the first screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from browsing import (
    asked,
    idle,
    menu,
    press,
    take,
    tokens,
    told,
    typed,
    violations,
    visiting,
)
from paging import Opened, chat_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

QUESTION = "Who lived in the old house?"
MARKS = ["<|im_start|>", "<|im_end|>"]
ANSWER = (
    "<think>\nI think of foxes.\n</think>\n\nA fox lived there.<tool_call>\n"
    '{"name": "find", "arguments": {"where": "house"}}\n</tool_call>'
)


def arguments(folder: Path) -> list[object]:
    """Return those of the page: a model with a chat template."""
    return [chat_model(folder)]


def set_bar(page: Page, opener: str = "#bar-said", **values: str) -> None:
    """Set fields of the bar and keep it."""
    page.locator(opener).click()
    for name, value in values.items():
        field = page.locator(f"dialog [name={name}]")
        if name in ("kind", "thinking"):
            field.select_option(value)
        else:
            field.fill(value)
    page.locator("dialog button[value=keep]").click()
    page.locator("dialog[open]").wait_for(state="detached")
    idle(page)


def talk(page: Page, text: str = QUESTION) -> None:
    """Begin a chat with a system message, of one short answer, and wait for it."""
    set_bar(page, "#bar-begin", n="1", max_tokens="6")
    page.locator("#told > summary").click()
    page.locator("#system").fill("You tell tales.")
    page.locator("#begin").fill(text)
    page.locator("#begin").press("Control+Enter")
    page.locator("#empty").wait_for(state="hidden")
    idle(page)


def turns(page: Page) -> list[tuple[str, str]]:
    """Return the turns that are shown: who says what, without thoughts and calls."""
    found = page.locator("#text .turn.first").evaluate_all("""all => all.map(first => {
        const {turn, title} = first.dataset;
        const said = [...document.querySelectorAll(`#text .turn.said[data-turn="${turn}"]`)];
        return [title, said.map(each => each.textContent).join("")]; })""")
    return [(role, text) for role, text in found]


def edit(page: Page, turn: str, text: str, key: str) -> str:
    """Edit a turn and press a key; return what it said."""
    page.locator(f"#text .turn.{turn}").last.hover()
    page.locator("#turn-tools button", has_text="Edit").click()
    before = page.locator(".typing textarea").input_value()
    page.locator(".typing textarea").fill(text)
    press(page, key, at=".typing textarea")
    return before


def say(page: Page, text: str) -> None:
    """Send a reply, once its box is open."""
    page.locator(".typing textarea").fill(text)
    page.locator(".typing textarea").press("Control+Enter")
    page.locator("#text .turn.said", has_text=text).wait_for()
    idle(page)


def newest(page: Page, n: int = 1) -> list[tuple[str, int]]:
    """Return the names of the last nodes, and where they begin."""
    nodes = asked(page, "/loom/doc")["nodes"]
    return list(zip(nodes["id"], nodes["at"], strict=True))[-n:]


# -- chats -----------------------------------------------------------------------------------------


def test_a_chat_begins_is_replied_to_edited_and_answered_again(page: Page) -> None:
    """Where the model has a template; its turns are cards."""
    assert page.locator("#mode input:checked").get_attribute("value") == "chat"
    talk(page)
    before = turns(page)
    (system, user, answer) = before
    assert (system, user) == (("system", "You tell tales."), ("user", QUESTION))
    assert answer[0] == "assistant" and answer[1]
    assert page.locator("#text .turn.markup .t.control").all_text_contents()[:2] == MARKS
    row = page.locator("#tree [role=treeitem] .words").first
    assert row.inner_text().startswith("Who lived")
    assert row.get_attribute("data-role") == "You"
    page.locator("#reply").click()
    say(page, "And <|im_end|> then?")
    written_first = tokens(page)
    for key in ("End", "R"):  # nothing, then another answer
        press(page, key, at="#text")
        assert turns(page)[:4] == [*before, ("user", "And <|im_end|> then?")]
        assert len(turns(page)) == 5 and turns(page)[4][1]
    assert newest(page)[0][1] < len(written_first)
    press(page, "u", at="#text")
    assert tokens(page) == written_first
    set_bar(page, n="2")
    press(page, "R", at="#text")
    assert turns(page)[4] == ("assistant", "")
    assert page.locator(".shoot").count() >= 3  # and the first answer
    roles = page.locator("#rows > :not([hidden]) .words")
    said = [row.get_attribute("data-role") for row in roles.all()]
    assert said == ["You", *["Model"] * (len(said) - 1)]
    press(page, "u", at="#text")
    assert tokens(page) == written_first
    set_bar(page, n="1")
    assert (
        edit(page, "by-user >> nth=0", "Who lived in the new house?", "Control+Enter") == QUESTION
    )
    page.locator("#text .turn.said", has_text="new house").wait_for()
    idle(page)
    rows = page.locator("#rows > :not([hidden]) .words").all_inner_texts()
    for start in ("Who lived in the", "old house?", "new house?"):  # the question forks inside
        assert [row for row in rows if row.startswith(start)], rows
    assert [row for row in rows if "<|im_start" in row or "assistant" in row] == []
    assert [role for role, _ in turns(page)] == ["system", "user", "assistant"]
    assert turns(page)[2][1]
    assert violations(page) == []


def test_thoughts_fold_and_calls_are_cards(page: Page) -> None:
    talk(page)
    edit(page, "by-assistant", "<think>\nI think of", "Escape")
    thought = page.locator("#text .turn.thought")
    assert (thought.get_attribute("data-title") or "").startswith("Thought, cut at ")
    edit(page, "by-assistant", ANSWER, "Escape")
    assert "folded" in (thought.get_attribute("class") or "")
    assert thought.locator("[data-token]").count() == 0
    assert (thought.get_attribute("data-title") or "").startswith("Thought, ")
    call = page.locator("#text .turn.call")
    assert call.get_attribute("data-title") == 'Calls find(where: "house")'
    assert call.locator(".t.control").first.inner_text() == "<tool_call>"
    assert turns(page)[2] == ("assistant", "A fox lived there.")
    thought.click(position={"x": 30, "y": 8})
    thought.locator("[data-token]").first.wait_for()
    assert "I think of foxes." in thought.inner_text()
    page.locator("#text").press("t")
    page.locator("#text .turn.thought.folded").wait_for()
    # The cursor opens the thought that it comes to.
    i = page.locator("#text [data-token]").evaluate_all(
        "all => Number(all.find(each => each.closest('.by-assistant.markup')).dataset.token)"
    )
    page.locator(f"#text [data-token='{i}']").click()
    while page.locator("#text .turn.thought.folded").count():
        press(page, "ArrowRight", at="#text")
    assert page.locator("#text .turn.thought [aria-selected=true]").count() == 1
    # The template leaves out earlier thoughts: the reply forks there, and the call is still one.
    press(page, "End", "Enter", at="#text")
    say(page, "Why?")
    assert page.locator("#text .turn.thought").count() == 0
    assert page.locator("#text .turn.call").count() == 1
    assert turns(page)[2:4] == [("assistant", "A fox lived there."), ("user", "Why?")]


def test_an_answer_is_continued_from_the_cursor(page: Page) -> None:
    talk(page)
    before = turns(page)
    words = tokens(page)
    last = len(words) - 1

    def go_to(i: int) -> None:  # with keys: a line end has no width
        press(page, "End", *["ArrowLeft"] * (len(tokens(page)) - 1 - i), at="#text")

    go_to(last - 3)
    told(page, "#go", "Continue after")
    press(page, "g", at="#text")
    now = turns(page)
    assert now[:2] == before[:2] and now[2][0] == "assistant"
    assert tokens(page)[: last - 2] == words[: last - 2]
    assert newest(page)[0][1] == last - 2
    go_to(last - 3)
    typed(page, " and a queen")
    assert turns(page)[2][1].endswith(" and a queen") and len(turns(page)) == 3


def test_tools_that_are_no_list_are_told_below_them(page: Page) -> None:
    page.locator("#told summary").click()
    for tools, said in (('{"type": "function"}', "a JSON list is wanted"), ("[", "tools: ")):
        page.locator("#tools").fill(tools)
        page.locator("#begin").fill(QUESTION)
        page.locator("#begin").press("Control+Enter")
        told(page, "#begin-wrong", said)
        assert page.locator("#begin").input_value() == QUESTION
    assert violations(page) == []


def test_a_word_picked_in_a_message_continues_the_message(page: Page) -> None:
    talk(page)
    (_, (_, said), _) = turns(page)
    page.locator("#find").fill("im_start")  # the name of a control token is no text
    told(page, "#found", "^0$")
    idle(page)
    assert page.locator("#text .found").count() == 0
    page.locator("#find").fill("")
    first = page.locator("#text .turn.by-user.said [data-token]").first
    place = int(first.get_attribute("data-token") or 0) + 1
    take(page, place)
    page.wait_for_function("() => document.querySelectorAll('#text [data-turn=\"1\"].said').length")
    (_, (role, text), *later) = turns(page)
    assert role == "user" and later == [] and text != said
    assert text == "".join(tokens(page)[place - 1 :])  # all of it, however long the old one was
    row = page.locator("#tree [role=treeitem][aria-selected=true] .words")
    assert row.get_attribute("data-role") == "You"


# -- the bar ---------------------------------------------------------------------------------------


def test_what_is_typed_into_the_bar_is_back_until_it_is_kept_or_cancelled(page: Page) -> None:
    memory = "The fox is called Ann.\nShe lives in the wood."
    menu(page, "begin another text or chat")
    page.locator("#mode label", has_text="Text").click()
    page.locator("#bar-begin").click()
    page.locator("dialog [name=memory]").fill(memory)
    page.locator("dialog [name=kind]").select_option("regex")
    page.locator("dialog [name=follow]").fill("[a-z]+")
    page.locator("dialog [name=follow]").press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    page.locator("#bar-begin").click()
    assert page.locator("dialog [name=memory]").input_value() == memory
    told(page, "dialog .wrong", "did not keep it")
    page.locator("dialog [name=temperature]").fill("0.3")
    page.reload()  # the chat is shown again
    idle(page)
    assert page.locator("dialog[open]").count() == 0
    menu(page, "begin another text or chat")
    page.locator("#mode label", has_text="Text").click()
    page.locator("#bar-begin").click()
    assert page.locator("dialog [name=memory]").input_value() == memory
    assert page.locator("dialog [name=follow]").input_value() == "[a-z]+"
    assert page.locator("dialog [name=temperature]").input_value() == "0.3"
    page.locator("dialog button", has_text="Cancel").click()
    page.locator("#bar-begin").click()
    assert page.locator("dialog [name=memory]").input_value() == ""
    assert page.locator("dialog .wrong").inner_text() == ""
    page.keyboard.press("Escape")


def test_the_bar_is_kept_in_the_document_and_used(chromium: Browser, tmp_path: Path) -> None:
    with Opened(tmp_path) as running, visiting(chromium, running) as page:
        idle(page)
        first = page.locator("#bar-begin").get_attribute("title") or ""
        sampling = "top-p 0.95, top-k 40, min-p 0.05"
        assert f"3 texts, limit: 24 tokens, temperature 0.8, {sampling}" in first
        stop = "xyz\n\\nThe end"
        set_bar(page, "#bar-begin", n="2", max_tokens="5", temperature="0.5", stop=stop)
        page.locator("#begin").fill("Once upon a time")
        page.locator("#begin").press("Control+Enter")
        page.locator(".shoot").nth(1).wait_for()
        idle(page)
        said = page.locator("#bar-said").inner_text()
        assert (
            f"2 texts, limit: 5 tokens, temperature 0.5, {sampling}, stop at “xyz” or “⏎The" in said
        )
        assert page.locator(".shoot").count() == 2
        made = asked(page, f"/loom/tokens?node={newest(page)[0][0]}")["nodes"][-1]
        assert (made["n"], made["sampling"]["temperature"], made["stop"]) == (
            5,
            0.5,
            ["xyz", "\nThe end"],
        )
        # What is wrong is told at the field by the browser, or in the dialog by the server.
        page.locator("#text").press("G")
        for name, bad in (
            ("n", "2.5"), ("n", "0"), ("n", "999"), ("max_tokens", "-3"), ("temperature", "1e"),
            ("seed", "lucky"), ("seed", "9" * 30),
        ):  # fmt: skip
            field = page.locator(f"dialog [name={name}]")
            was = field.input_value()
            field.fill("")
            field.press_sequentially(bad)
            page.locator("dialog button[value=keep]").click()
            assert page.locator("dialog :invalid:focus").get_attribute("name") == name
            field.fill("")
            field.fill(was)
        for name, bad, told_of in (
            ("temperature", "-1", "must be"),
            ("regex", "[a-z]+ (", "^regex: the grammar is refused: unclosed group$"),
            ("json_schema", '{"type": "integer"', "not JSON"), ("json_schema", '{"type": 7}', "schema"),
            ("json_schema", "[1]", "not a JSON object"),
        ):  # fmt: skip
            if name == "temperature":
                page.locator("dialog [name=temperature]").fill(bad)
            else:
                page.locator("dialog [name=temperature]").fill("0.5")
                page.locator("dialog [name=kind]").select_option(name)
                page.locator("dialog [name=follow]").fill(bad)
            page.locator("dialog button[value=keep]").click()
            told(page, "dialog .wrong", told_of)
        page.locator("dialog [name=follow]").fill('{"enum": ["north", "south"]}')
        page.locator("dialog button[value=go]").click()
        idle(page)
        assert "a JSON schema" in page.locator("#bar-said").inner_text()
        node = newest(page)[0][0]
        text = asked(page, f"/loom/tokens?node={node}")["parts"][-1]["text"]
        assert '"north"'.startswith("".join(text)) or '"south"'.startswith("".join(text))
    with Opened(tmp_path) as running, visiting(chromium, running) as page:
        idle(page)
        assert "2 texts, limit: 5 tokens, temperature 0.5" in page.locator("#bar-said").inner_text()
        page.locator("#bar-said").click()
        assert page.locator("dialog [name=n]").input_value() == "2"
        assert page.locator("dialog [name=stop]").input_value() == stop
        kept = json.loads(page.locator("dialog [name=follow]").input_value())
        assert kept == {"enum": ["north", "south"]}
        assert page.locator("dialog [name=kind]").input_value() == "json_schema"
        page.keyboard.press("Escape")
        set_bar(
            page, temperature="0", kind="free", seed="5"
        )  # top-p, top-k and min-p do nothing then
        said = page.locator("#bar-said").inner_text()
        assert "2 texts, limit: 5 tokens, temperature 0, seed 5, stop at" in said


def test_the_bar_sets_memory_and_a_note_of_texts(chromium: Browser, tmp_path: Path) -> None:
    with Opened(tmp_path) as running, visiting(chromium, running) as page:
        idle(page)
        page.locator("#bar-begin").click()
        assert page.locator("dialog [name=thinking]").count() == 0  # it is for chats
        page.keyboard.press("Escape")
        more = {"memory": "Anna bakes bread.", "authors_note": "[A merry tale.]"}
        set_bar(page, "#bar-begin", n="1", max_tokens="4", **more)
        page.locator("#begin").fill("Once upon a time")
        page.locator("#begin").press("Control+Enter")
        page.locator("#empty").wait_for(state="hidden")
        idle(page)
        assert page.locator("#bar-said").inner_text().count("memory, author’s note") == 1
        made = asked(page, f"/loom/tokens?node={newest(page)[0][0]}")["nodes"][-1]
        assert {name: made[name] for name in more} == more
        assert made["window"]["memory"] > 0 and made["window"]["note"] > 0


def test_the_bar_sets_how_answers_think(chromium: Browser, tmp_path: Path) -> None:
    with Opened(tmp_path, *arguments(tmp_path)) as running, visiting(chromium, running) as page:
        idle(page)
        assert "thinking" not in page.locator("#bar-begin").inner_text()
        page.locator("#bar-begin").click()
        assert page.locator("dialog [name=memory]").count() == 0  # it is for texts
        page.keyboard.press("Escape")
        for values, said, kept in (
            ({"thinking": "on", "budget": "3"}, "thinking for 3 tokens at most", 3),
            ({"thinking": "on", "budget": "0"}, "no thinking", 0),
            ({"thinking": "on", "budget": ""}, "thinking", True),
            ({"thinking": "off"}, "no thinking", False),
        ):
            set_bar(page, "#bar-begin", n="1", max_tokens="6", **values)
            assert page.locator("#bar-begin").inner_text().count(f", {said}") == 1
            assert asked(page, "/loom/doc")["bars"]["chat"]["thinking"] == kept
        page.locator("#begin").fill(QUESTION)
        page.locator("#begin").press("Control+Enter")
        page.locator("#empty").wait_for(state="hidden")
        idle(page)
        made = asked(page, f"/loom/tokens?node={newest(page)[0][0]}")["nodes"][-1]
        assert made["thinking"] is False
