"""Chats in the page's document: turns by the template, replies, edits, thoughts, calls, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toys
from paging import CHAT, CONTROL, Paged, chat_model
from serving import TARGET
from turn_shapes import SHAPES

import llamabranch as lb
from llamabranch.model import ToolCall

SYSTEM = "You tell tales."
ASKED = "Who lived in the old house?"
THOUGHT = "<think>\nold houses\n</think>\n\n"
CALL = '<tool_call>\n{"name": "find", "arguments": {"where": "house"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paged]:
    folder = tmp_path_factory.mktemp("chat")
    with Paged(folder, model=chat_model(folder)) as running:
        yield running


@pytest.fixture(scope="module")
def model(page: Paged) -> lb.Model:
    return page.loom.service.model


def chat(page: Paged, **fields: Any) -> Any:
    """Begin a conversation, or add to one; return the node once it is scored."""
    return page.done("chat", **fields)["node"]


def answered(page: Paged, node: Any, text: str) -> Any:
    """Write an answer as the model would: its control tokens are parsed."""
    turn = len(turns(page, node["id"])) - 1
    return chat(page, node=node["id"], turn=turn, text=text)


def turns(page: Paged, node: str) -> list[tuple[str, str]]:
    """Return the turns of a text, with what they say as it is shown."""
    document = page.loom.document
    held = document.nodes[node]
    ids = held.tokens()
    return [
        (turn.role, document.written(ids[turn.begin : turn.end])) for turn in document.turns(held)
    ]


def test_a_beginning_is_what_the_template_writes_and_says_no_control_token(
    page: Paged, model: lb.Model
) -> None:
    text = "I write <|im_end|> and <|im_start|>system"
    node = chat(page, system=SYSTEM, text=text)
    ids = page.tokens(node["id"], whole=True)["ids"]
    assert ids == model.chat_tokens([("system", SYSTEM), ("user", text)])
    assert turns(page, node["id"]) == [("system", SYSTEM), ("user", text), ("assistant", "")]
    (end,) = model.tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert ids.count(end) == 2
    assert {*page.doc()["model"]["chat"]["roles"]} >= {"user", "system"}


def test_an_answer_ends_at_its_token_and_a_reply_continues_it(page: Paged, model: lb.Model) -> None:
    node = chat(page, text=ASKED)
    free = page.grow(node["id"], max_tokens=8, seed="3")
    ids = page.tokens(free["id"], whole=True)["ids"]
    # The end of a turn is drawn where it is likely enough, and is no part of the text.
    (end,) = model.tokenize("<|im_end|>", add_special=False, parse_special=True)
    ended = page.grow(free["id"], max_tokens=4, sampling={"logit_bias": {str(end): 100}})
    told = page.tokens(ended["id"], whole=True)
    assert (told["node"]["reason"], told["node"]["n"]) == ("stop", 0)
    reply = chat(page, node=free["id"], text="And then?")
    whole = page.tokens(reply["id"], whole=True)["ids"]
    assert whole[: len(ids)] == ids and reply["at"] == len(ids)
    said = turns(page, reply["id"])
    assert [role for role, _ in said] == ["user", "assistant", "user", "assistant"]
    assert said[2] == ("user", "And then?")
    answer = page.loom.document.written(ids[node["n"] :])
    assert said[1][1] == answer
    messages = [("user", ASKED), ("assistant", answer), ("user", "And then?")]
    assert model.detokenize(whole, special=True) == model.apply_chat_template(messages)


def test_turns_are_edited_as_branches(page: Paged) -> None:
    first = page.grow(chat(page, system=SYSTEM, text=ASKED)["id"], max_tokens=6, seed="1")
    last = page.grow(chat(page, node=first["id"], text="And then?")["id"], max_tokens=6, seed="2")
    before = turns(page, last["id"])
    asked = chat(page, node=last["id"], turn=1, text="Who lived in the new house?")
    assert turns(page, asked["id"]) == [
        ("system", SYSTEM), ("user", "Who lived in the new house?"), ("assistant", ""),
    ]  # fmt: skip
    n_same = page.tokens(last["id"], whole=True)["ids"][: asked["at"]]
    assert n_same == page.tokens(asked["id"], whole=True)["ids"][: asked["at"]] and asked["at"] > 8
    told = chat(page, node=last["id"], turn=0, text="You are a king.")  # and the same is asked
    assert turns(page, told["id"])[:2] == [("system", "You are a king."), ("user", ASKED)]
    answer = chat(page, node=last["id"], turn=2, text="A queen")
    assert turns(page, answer["id"]) == [*before[:2], ("assistant", "A queen")]
    assert turns(page, last["id"]) == before  # the old branch stays
    same = page.do("chat", 200, node=last["id"], turn=2, text=before[2][1])
    assert same["same"] and same["node"]["id"] == last["id"]
    held = page.loom.document.nodes[last["id"]]
    roles = [turn.role for turn in page.loom.document.turns(held, same["at"])]
    assert roles == ["system", "user", "assistant"]


def test_a_branch_inside_a_message_continues_that_message(page: Paged) -> None:
    """However long the message was that it leaves."""
    first = page.grow(chat(page, text="Who lived in the house?")["id"], max_tokens=6, seed="1")
    reply = chat(page, node=first["id"], text="And then?")
    words = page.tokens(reply["id"], whole=True)["text"]
    at = len(words) - words[::-1].index("And")
    new = page.type(" what did the king of the house say to all of them?", reply["id"], at=at)
    before = turns(page, reply["id"])
    asked = ("user", "And what did the king of the house say to all of them?")
    assert before[2] == ("user", "And then?") and turns(page, new["id"]) == [*before[:2], asked]


def test_thoughts_and_calls_are_apart_and_the_template_leaves_earlier_thoughts_out(
    page: Paged, model: lb.Model
) -> None:
    begun = chat(page, text=ASKED, tools=TOOLS)
    text = f"{THOUGHT}I look.{CALL}"
    wrote = answered(page, begun, text)
    assert turns(page, wrote["id"])[-1] == ("assistant", text)
    (think,) = model.tokenize("<think>", add_special=False, parse_special=True)
    assert think in page.tokens(wrote["id"], whole=True)["ids"]
    result = chat(page, node=wrote["id"], role="tool", text="a fox")
    said = turns(page, result["id"])
    assert said[-2:] == [("tool", "a fox"), ("assistant", "")]
    assert said[-3] == ("assistant", text)  # after the last question the thought stays
    asked = chat(page, node=result["id"], text="Why?")
    said = turns(page, asked["id"])
    roles = [role for role, _ in said]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    whole = model.detokenize(page.tokens(asked["id"], whole=True)["ids"], special=True)
    assert "old houses" not in whole and '"where": "house"' in whole


def parts(page: Paged, node: str) -> list[tuple[str, str, list[Any]]]:
    """Return the parts of a node's last answer as the page gets them: kind, text, calls."""
    stretches = page.get("/loom/tokens", node=node).json()["parts"]
    ids = [token for each in stretches for token in each["ids"]]
    (found,) = [each["answers"] for each in stretches if each["node"] == node]
    return [
        (kind, page.loom.document.written(ids[start:end]), calls)
        for kind, start, end, calls in found[-1][1]
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_page_gets_the_thoughts_and_calls_of_every_form(shape: str, tmp_path: Path) -> None:
    names = {*re.findall(r"<[/|\w=]*>|\[/?[A-Z]+\]", SHAPES[shape])} - {"<eot>"}
    model = toys.write_chat(TARGET, tmp_path / "chat.gguf", SHAPES[shape], *sorted(names)[:3])
    with Paged(tmp_path, model=model) as page:
        form = page.loom.service.model.turn_format
        text = form.write([ToolCall("find", {"text": "an old house"})])
        thought, said = "<mull>\nold houses\n</mull>\n\n", "I look at it, 日本.\n"
        if shape == "channels":
            thought = "<|on|>musing<|say|>old houses<|over|>"
            said, text = "", f"<|go|>bot{text}"
        node = answered(page, chat(page, text=ASKED, tools=TOOLS), thought + said + text)
        found = parts(page, node["id"])
        assert [kind for kind, *_ in found] == ["thought", "call"]
        assert "".join(found[0][1].split()) == "".join(thought.split())
        assert found[1][1].strip() in text and "an old house" in found[1][1]
        assert found[1][2] == [["find", {"text": "an old house"}]]


def test_parts_of_an_answer_are_those_of_its_own_branch(page: Paged) -> None:
    wrote = answered(page, chat(page, text=ASKED, tools=TOOLS), f"{THOUGHT}I look.{CALL}")
    thought, called = parts(page, wrote["id"])
    assert thought == ("thought", THOUGHT, [])
    assert called == ("call", CALL, [["find", {"where": "house"}]])
    at = page.get("/loom/tokens", node=wrote["id"]).json()["parts"][-1]["answers"][0][1][1][1] + 5
    cut = page.type(" and no call", wrote["id"], at=at)
    assert [kind for kind, *_ in parts(page, cut["id"])] == ["thought"]
    open_again = page.type(" still", wrote["id"], at=wrote["at"] + 4)
    ((kind, text, _),) = parts(page, open_again["id"])
    assert kind == "thinking" and text.startswith("<think>") and text.endswith(" still")
    plain = page.type("Once upon a time")
    stretches = page.get("/loom/tokens", node=plain["id"]).json()["parts"]
    assert all("answers" not in each for each in stretches)


def test_what_an_answer_must_follow_counts_from_its_thought_on(page: Paged) -> None:
    begun = chat(page, text=ASKED)
    schema = {"enum": ["north", "south"]}
    fields: dict[str, Any] = {"json_schema": schema, "max_tokens": 40, "seed": "5"}
    open_thought = answered(page, begun, "<think>\nI think of")
    (think,) = page.loom.service.model.tokenize("</think>", add_special=False, parse_special=True)
    biased = {"logit_bias": {str(think): 12}}
    for node in (open_thought, begun):
        new = page.grow(node["id"], sampling=biased, **fields)
        written = page.loom.document.nodes[new["id"]]
        answer = turns(page, new["id"])[-1][1].rpartition("</think>")[2].strip()
        assert answer in ('"north"', '"south"')
        ((thought, text, _),) = parts(page, new["id"]) or [("thought", "", [])]
        assert thought == "thought" and "north" not in text
        assert written.made.json_schema == schema
    # What was cut goes on: in its thought, or in its answer.
    answer = page.grow(open_thought["id"], sampling=biased, **fields)
    assert parts(page, answer["id"])
    cut = page.grow(answer["id"], at=answer["at"] + answer["n"] - 1, **fields)
    end = turns(page, cut["id"])[-1][1].rpartition("</think>")[2].strip()
    assert end


def test_a_text_goes_on_as_it_was_cut_and_files_keep_the_turns(page: Paged) -> None:
    node = page.grow(chat(page, text=ASKED)["id"], max_tokens=8, seed="4")
    cut = page.type(" and a fox", node["id"], at=node["at"] + 3)
    assert [role for role, _ in turns(page, cut["id"])] == ["user", "assistant"]
    assert turns(page, cut["id"])[1][1].endswith(" and a fox")
    reply = chat(page, node=node["id"], at=node["at"] + 3, text="Why?")
    assert turns(page, reply["id"])[2] == ("user", "Why?")
    nodes = page.doc()["nodes"]
    told = nodes["turns"][nodes["id"].index(reply["id"])]
    assert [role for role, *_ in told] == ["assistant", "user", "assistant"]
    page.api.post("/loom/import", content=page.get("/loom/export", format="json").content)
    assert page.doc()["nodes"]["turns"].count(told) >= 2  # the imported one too


def test_what_is_no_chat_is_refused(page: Paged) -> None:
    text = page.type("Once upon a time")
    page.do("chat", 409, node=text["id"], text="Hello")
    node = chat(page, text=ASKED)
    page.do("chat", 400, node=node["id"], turn=7, text="Hello")
    page.do("chat", 400, node=node["id"], role="assistant", text="Hello")
    page.do("chat", 400, text="  ")
    for fields in ({}, {"turn": 0}):  # a reply, an edit
        refused = page.do("chat", 400, node=node["id"], text=" \n", **fields)["error"]
        assert refused["message"] == "the message is empty"
    page.do("chat", 400, node=node["id"], text="Hello", role="nobody")
    before = page.nodes()
    page.do("chat", 400, text=ASKED, tools=[{"function": {}}])
    assert page.nodes() == before


def test_typed_text_parses_control_tokens_as_the_command_line_does(
    page: Paged, model: lb.Model
) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n"
    node = page.type(text)
    assert page.tokens(node["id"], whole=True)["ids"] == model.prompt_tokens(text)
    edited = page.type(text[len("<|im_start|>") :] + "!", node["id"], at=1, edit=True)
    assert (edited["at"], edited["n"]) == (node["n"], 1)  # nothing before it is new
    more = page.type("<|im_start|>", node["id"])
    assert more["n"] == 1


# Its variable switches thoughts off in the opening of the answer, as Qwen3's does.
SWITCHED = (
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n</think>\n\n' }}{%- endif %}{%- endif %}"
)

PLAIN = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def test_a_chat_thinks_or_does_not_as_the_bar_says(page: Paged, tmp_path: Path) -> None:
    def written(page: Paged, node: Any) -> str:
        return turns_of(page, node)[-1]

    def turns_of(page: Paged, node: Any) -> list[str]:
        held = page.loom.document.nodes[node["id"]]
        ids, found = held.tokens(), page.loom.document.turns(held)
        return [page.loom.document.written(ids[turn.at : turn.end]) for turn in found]

    begun = chat(page, text=ASKED)
    opening, off = "<|im_start|>assistant\n", "<think>\n</think>\n\n"
    fields: dict[str, Any] = {"max_tokens": 12, "seed": "3"}
    grown = page.grow(begun["id"], thinking=False, **fields)
    assert written(page, grown).startswith(f"{opening}{off}")
    assert page.tokens(grown["id"])["node"]["thinking"] is False
    thought = page.grow(begun["id"], thinking=True, **fields)
    assert written(page, thought).startswith(f"{opening}<think>")
    short = page.grow(begun["id"], thinking=3, **{**fields, "max_tokens": 30})
    text = written(page, short)
    assert "</think>" in text and len(parts(page, short["id"])) == 1
    (end,) = page.loom.service.model.tokenize("</think>", add_special=False, parse_special=True)
    told = page.tokens(short["id"])
    assert 3 < told["ids"].index(end) < 10
    # Inside an open thought: it is closed, or goes on. In the answer there is nothing to change.
    cut = thought["at"] + thought["n"] - 2
    closed = page.grow(thought["id"], at=cut, thinking=False, **fields)
    assert written(page, closed).count("</think>") == 1
    assert "</think>" not in written(
        page, page.grow(thought["id"], at=cut, thinking=True, **fields)
    )
    # What a thought does is no part of what must follow a schema.
    schema = {"enum": ["north", "south"]}
    free = page.grow(begun["id"], thinking=False, json_schema=schema, max_tokens=9)
    assert written(page, free).removeprefix(opening + off) in ('"north"', '"south"')
    page.do("continue", 400, node=begun["id"], memory="He is old.")

    template = CHAT[: CHAT.index("{%- if add_generation_prompt")] + SWITCHED
    model = toys.write_chat(TARGET, tmp_path / "switched.gguf", template, *CONTROL)
    with Paged(tmp_path, model=model) as switched:
        sent = chat(switched, text=ASKED, thinking=False)  # the message is sent with the choice
        assert written(switched, sent) == opening + off
        same = switched.grow(sent["id"], thinking=False, **fields)
        assert same["at"] == sent["n"] and written(switched, same).count("<think>") == 1
        back = switched.grow(sent["id"], **fields)  # as the template does
        assert back["at"] < sent["n"] and off not in written(switched, back)
        asked = chat(switched, text=ASKED)
        later = switched.grow(asked["id"], thinking=False, **fields)
        assert written(switched, later).startswith(opening + off)
        assert turns_of(switched, later)[:-1] == turns_of(switched, asked)[:-1]
        switched.do("bar", mode="chat", bar={"thinking": 64})
        assert switched.doc()["bars"]["chat"] == {"thinking": 64}
        switched.do("bar", 400, mode="text", bar={"thinking": False})
    plain = toys.write_chat(TARGET, tmp_path / "plain.gguf", PLAIN, *CONTROL[:2])
    (tmp_path / "plain").mkdir()
    with Paged(tmp_path / "plain", model=plain) as cannot:
        sent = chat(cannot, text=ASKED)
        for thinking in (True, 20):
            error = cannot.do("continue", 400, node=sent["id"], thinking=thinking)["error"]
            assert "does not think" in error["message"]
            cannot.do("bar", 400, mode="chat", bar={"thinking": thinking})
        assert cannot.grow(sent["id"], thinking=False, max_tokens=3)


@pytest.mark.parametrize("spaces", [False, True])
def test_a_tools_result_keeps_the_call_as_the_model_wrote_it(page: Paged, spaces: bool) -> None:
    call = CALL.replace('": ', '" :  ').replace("\n", "") if spaces else CALL
    begun = chat(page, text=ASKED, tools=TOOLS)
    wrote = answered(page, begun, f"I look.{call}")
    ids = page.tokens(wrote["id"], whole=True)["ids"]
    result = chat(page, node=wrote["id"], role="tool", text="a fox")
    assert result["at"] == len(ids)
    said = turns(page, result["id"])
    assert said[-3:] == [("assistant", f"I look.{call}"), ("tool", "a fox"), ("assistant", "")]
    text = page.loom.document.written(page.tokens(result["id"], whole=True)["ids"])
    assert text.endswith(
        f"{call}<|im_end|>\n<|im_start|>tool\na fox<|im_end|>\n<|im_start|>assistant\n"
    )
    # The answer to it may be opened again, and nothing before it changes.
    off = page.grow(result["id"], thinking=False, max_tokens=3)
    assert off["at"] == result["at"] + result["n"]
    # Nor does it change when another call, its result and a question follow.
    again = answered(page, result, f"Again.{call}")
    more = chat(page, node=again["id"], role="tool", text="a hen")
    last = answered(page, more, "A fox and a hen.")
    ids = page.tokens(last["id"], whole=True)["ids"]
    asked = chat(page, node=last["id"], text="Why?")
    assert asked["at"] == len(ids)
    said = turns(page, asked["id"])
    assert [text for role, text in said if role == "assistant"] == [
        f"I look.{call}", f"Again.{call}", "A fox and a hen.", "",
    ]  # fmt: skip
    assert said[-2] == ("user", "Why?")


def test_a_schema_runs_over_the_whole_answer(page: Paged) -> None:
    begun = chat(page, text=ASKED)
    schema = {"enum": ["north wind", "south wind"]}
    fields: dict[str, Any] = {
        "json_schema": schema,
        "max_tokens": 20,
        "seed": "5",
        "thinking": False,
    }
    made = page.grow(begun["id"], **fields)
    told = page.tokens(made["id"], top=1)
    start = next(i for i, n in enumerate(told["al"]) if n)
    text = "".join(map(str, told["text"][start:]))
    assert text in ('"north wind"', '"south wind"')
    cut = page.grow(made["id"], at=made["at"] + start + 3, **fields)
    assert turns(page, cut["id"])[-1][1].rpartition("\n")[2] in ('"north wind"', '"south wind"')
    wrong = page.tokens(begun["id"])["ids"][0]
    for op in ("fork", "continue"):
        node = made if op == "fork" else answered(page, begun, "I think")
        before = page.nodes()
        at = {"at": made["at"] + start + 1, "token": wrong} if op == "fork" else {}
        refused = page.do(op, 400, node=node["id"], **at, **fields)["error"]["message"]
        assert refused.startswith("the schema does not allow `")
        assert refused.endswith("here" if op == "fork" else "in what is written so far")
        assert page.nodes() == before


def test_a_long_chat_keeps_its_system_message_and_loses_its_oldest_exchanges(
    tmp_path: Path,
) -> None:
    with Paged(tmp_path, model=chat_model(tmp_path), n_ctx=256) as page:
        node = chat(page, system=SYSTEM, text=ASKED)
        for i in range(9):
            made = page.grow(node["id"], max_tokens=24, seed=str(i))
            node = chat(
                page, node=made["id"], text=f"And what did the {i} kings do then, my friend?"
            )
        last = page.grow(node["id"], max_tokens=24, seed="3")
        window = page.tokens(last["id"])["node"]["window"]
        held = page.loom.document.nodes[last["id"]]
        roles = page.loom.document.turns(held)
        assert window["from"] in [turn.at for turn in roles if turn.role == "user"][1:]
        assert window["head"] == roles[1].at and (window["memory"], window["note"]) == (0, 0)
        assert window["head"] + last["at"] - window["from"] <= 256 - 24
        ids = page.tokens(last["id"], whole=True)["ids"]
        prompt = [*ids[: window["head"]], *ids[window["from"] : last["at"]]]
        body = {"prompt": prompt, "max_tokens": 24, "seed": 3, "logprobs": 1}
        (choice,) = page.api.post("/v1/completions", json=body).json()["choices"]
        assert choice["logprobs"]["tokens"] == page.tokens(last["id"])["text"]
        page.do("continue", 400, node=chat(page, node=last["id"], text="old " * 300)["id"])
