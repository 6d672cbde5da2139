"""Thoughts and calls, found in templates of every shape, read and written in their form."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from turn_shapes import SHAPES, template

from llamabranch.errors import ConfigError
from llamabranch.model import ToolCall, Turn, TurnFormat, TurnReader
from llamabranch.model.call_form import Cursor
from llamabranch.model.templates import ChatTemplate

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"}, "n": {"type": "number"}, "yes": {"type": "boolean"},
    "many": {"type": "array", "items": {}}, "deep": {"type": "object"}, "maybe": {"type": "null"},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": PROPERTIES}}}
    for name in ("find", "find_all", "a.b-c")
] + [{"type": "function", "function": {"name": "ping"}}]  # fmt: skip
FORMATS = {name: TurnFormat.of(source) for name, source in SHAPES.items()}

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=20)
_TRICKY = st.sampled_from([
    '{"a": 1}', "[1, 2]", "123", "true", "null", "", "</p>", "</do>", "a <do> b", "it's", 'say "x"',
    "\\n",
    "line\nline", "  spaces ", "<mull>", "```json\n{}\n```", "k=v, w", "日本語 🗼", "</v>x<k>",
])  # fmt: skip
_PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6).map(float)
_JSON = st.recursive(
    _PLAIN | _TEXT | _TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
_VALUES = {
    "text": _TEXT | _TRICKY, "n": st.integers(-999, 999) | st.floats(-1e6, 1e6).map(float),
    "yes": st.booleans(), "many": st.lists(_JSON, max_size=3),
    "deep": st.dictionaries(st.sampled_from(["x", "y y", "z'"]), _JSON), "maybe": st.none(),
}  # fmt: skip
_ARGUMENTS = st.fixed_dictionaries({}, optional=_VALUES)
_CALL = st.builds(
    lambda name, arguments: ToolCall(name, arguments if name != "ping" else {}),
    st.sampled_from(["find", "find_all", "a.b-c", "ping"]), _ARGUMENTS,
)  # fmt: skip


def meant(calls: Sequence[ToolCall]) -> list[tuple[str, object]]:
    """Return calls without their ids."""
    return [(call.name, call.arguments) for call in calls]


def streamed(form: TurnFormat, text: str, size: int, *, eager: bool) -> Turn:
    """Return a turn that came in pieces, by its events."""
    reader = TurnReader(form, TOOLS, eager=eager)
    events = [e for i in range(0, len(text), size) for e in reader.feed(text[i : i + size])]
    events += reader.finish()
    texts, calls = {"thought": "", "content": ""}, dict[int, list[str]]()
    for event in events:
        if event.call is None:
            texts[event.kind] += event.text
        elif event.kind == "name":
            assert event.call == len(calls)
            calls[event.call] = [event.text, "", event.id]
        elif event.kind == "cut":
            assert eager
            del calls[event.call]
        else:
            calls[event.call][1] += event.text
    read = [ToolCall(name, json.loads(text), own) for name, text, own in calls.values()]
    assert reader.turn == Turn(texts["thought"], texts["content"], read)
    return reader.turn


@pytest.mark.parametrize("shape", SHAPES)
@example([ToolCall("find", {"text": "x"}), ToolCall("ping", {})], "Let me look.", "Hm.", 3)
@given(
    st.lists(_CALL, min_size=1, max_size=3), st.sampled_from(["", "Let me look."]),
    st.sampled_from(["", "Hm."]), st.integers(1, 9),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_calls_are_read_as_they_are_written(
    shape: str, calls: list[ToolCall], content: str, thought: str, size: int
) -> None:
    """In pieces too, after a thought and a text, with any values; a reader tells where they are."""
    form = FORMATS[shape]
    assert not form.is_general, form.reason
    if shape == "tags named like values" and any("" in c.arguments for c in calls):  # type: ignore[operator]
        return
    wrote = form.write(calls)
    if shape == "channels":
        parts = [thought and f"<|on|>musing<|say|>{thought}<|over|>"]
        parts += [content and "<|go|>bot" * bool(thought) + f"<|on|>final<|say|>{content}<|over|>"]
        parts += ["<|go|>bot" * any(parts) + wrote]
    else:
        parts = [thought and f"<mull>\n{thought}\n</mull>", content]
        parts += ["\n" * (shape == "bare JSON") + wrote]
    text = "".join(parts)
    turn = form.read(text, TOOLS)
    assert (turn.thought, turn.content, meant(turn.calls)) == (thought, content, meant(calls))
    assert form.read(text + form.turn_end, TOOLS) == turn
    for eager in (False, True):
        assert streamed(form, text, size, eager=eager) == turn
    reader = TurnReader(form, TOOLS, in_thought=False)
    for i in range(0, len(text), size):
        reader.feed(text[i : i + size])
    reader.finish()
    thoughts = [text[span.start : span.end] for span in reader.spans if span.kind == "thought"]
    assert "".join(thoughts).strip() == parts[0]
    called = [span for span in reader.spans if span.kind == "call"]
    assert meant([call for span in called for call in span.calls]) == meant(calls)
    in_spans = "".join(text[span.start : span.end] for span in called)
    assert "".join(in_spans.split()) == "".join(wrote.split())
    ends = [place for span in reader.spans for place in (span.start, span.end)]
    assert ends == sorted(ends) and len({*ends}) >= len(reader.spans) + 1
    assert not reader.is_in_thought


def test_a_thought_that_lasts_is_told_as_far_as_it_is_read() -> None:
    reader, pieces = TurnReader(FORMATS["tags around JSON"], in_thought=False), []
    for piece in ("<mull>\nI think of <do>", "gs</mu", "ll>\n\nDogs."):
        reader.feed(piece)
        pieces.append(reader.is_in_thought)
    assert pieces == [True, True, False]
    ((kind, start, end, calls),) = reader.spans
    assert (kind, start, end, calls) == ("thought", 0, len("<mull>\nI think of <do>gs</mull>"), ())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_template_itself_writes_the_same(shape: str) -> None:
    form = FORMATS[shape]
    own = [ToolCall("find", {"text": "a 'b' \"c\"\nd", "n": 5}, "abcdefgh1")]
    own += [ToolCall("ping", {}, "abcdefgh2")]
    if shape == "the id is the name":
        own = [c._replace(id=f"functions.{c.name}:{i}") for i, c in enumerate(own)]
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in own
    ]
    answer: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": calls}
    messages: list[dict[str, object]] = [{"role": "user", "content": "Hm?"}, answer]
    template = ChatTemplate(SHAPES[shape], {})
    text = template.render(messages, add_generation_prompt=False, variables={})
    assert form.write(own) in text
    turn = text[text.index("Hm?") + len("Hm?<eot>\n") :]
    assert meant(form.read(turn, TOOLS).calls) == meant(own)


@pytest.mark.parametrize("shape", SHAPES)
@given(st.lists(_CALL, min_size=1, max_size=2), st.data(), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_what_is_cut_or_damaged_is_never_a_wrong_call(
    shape: str, calls: list[ToolCall], data: st.DataObject, size: int
) -> None:
    form = FORMATS[shape]
    text = form.write(calls)
    cut = text[: data.draw(st.integers(0, len(text)))]
    turn = form.read(cut, TOOLS)
    assert meant(turn.calls) == meant(calls)[: len(turn.calls)]
    assert streamed(form, cut, size, eager=False) == turn
    assert streamed(form, cut, size, eager=True)[:2] == turn[:2]
    others = [{"type": "function", "function": {"name": "other"}}]
    assert form.read(text, others).calls == []


THOUGHTS = {
    "reasoning_content": (SHAPES["tags around JSON"], "<mull>", "</mull>", False),
    "channels": (SHAPES["channels"], "<|on|>musing<|say|>", "<|over|>", False),
    "a prompt that begins one": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</mull>')[-1] }}<eot>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><mull>\n{% endif %}", "<mull>", "</mull>", True,
    ),
    "a switch": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eot>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not "
        "enable_thinking %}<mull>\n\n</mull>\n{% endif %}{% endif %}", "<mull>", "</mull>", False,
    ),
    "blocks": (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for b in m.content %}{% if b.type == 'thinking' %}[MULL]{{ b.thinking }}[/MULL]{% else %}"
        "{{ b.text }}{% endif %}{% endfor %}{% endif %}<eot>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}", "[MULL]", "[/MULL]", False,
    ),
    "none": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eot>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}", None, None, False,
    ),
    "words before the answer": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<bot>\n{% if m.reasoning_content %}"
        "{{ m.reasoning_content }}\n[ANSWER]\n{% endif %}{{ m.content }}<eot>{% else %}<user>"
        "{{ m.content }}<eot>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot>\nSteps:\n{% endif %}", "Steps:", "[ANSWER]", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", THOUGHTS)
def test_thoughts_are_found(kind: str) -> None:
    source, start, end, inside = THOUGHTS[kind]
    form = TurnFormat.of(source)
    marks = form.thought_start, form.thought_end, form.starts_in_thought
    assert marks == (start, end, inside)
    words = "does not think" if end is None else f"thinks between {start}"
    assert form.describe().startswith(words)
    if end is None:
        assert form.read("<mull>a</mull>b").thought == ""
        return
    if kind == "channels":
        text = f"{start}Hm, {end[1:]}.{end}<|go|>bot<|on|>final<|say|>Yes.<|over|>"
    else:
        text = f"{'' if inside else start}\nHm, {end[1:]}.\n{end}\n\nYes."
    for size in (1, 2, 3, 50):
        assert streamed(form, text, size, eager=False) == Turn(f"Hm, {end[1:]}.", "Yes.", [])
    assert start is not None
    assert form.read(start + "\nHm", in_thought=False) == Turn("Hm", "", [])
    assert form.is_in_thought(f"<x>{form.header}{start}\nHm") and not form.is_in_thought("Hm")


def test_thoughts_that_are_switched_off_have_a_text() -> None:
    form = TurnFormat.of(THOUGHTS["a switch"][0])
    assert form.thought_off == "<mull>\n\n</mull>\n"
    assert form.thinking_variables(False) == {"enable_thinking": False}
    assert TurnFormat.of(THOUGHTS["none"][0]).thinking_variables(True) == {}


CALL = '{"name": "find", "arguments": {"text": "x"}}'
LOOSE = {
    "a fence": f"```json\n{CALL}\n```",
    "a fence without a word": f"```\n{CALL}\n```",
    "doubled braces": '{{"name": "find", "arguments": {"text": "x"}}}',
    "doubled, one missing": '{{"name": "find", "arguments": {"text": "x"}}',
    "bare": CALL,
    "parameters": CALL.replace("arguments", "parameters"),
    "tags": f"<tool_call>\n{CALL}\n</tool_call>",
    "an unclosed tag": f"<tool_call>\n{CALL}",
    "Python": "[find(text='x')]",
    "Python, with JSON": '[find(text="x")]',
    "arguments in a string": json.dumps({"name": "find", "arguments": '{"text": "x"}'}),
}


@pytest.mark.parametrize("shape", ["tags around JSON", "tags for values", "bare JSON"])
@pytest.mark.parametrize("kind", LOOSE)
def test_calls_in_another_form_than_the_templates_are_read_too(shape: str, kind: str) -> None:
    form = FORMATS[shape]
    for before in ("", "I look.\n\n"):
        for size in (1, 4, 99):
            turn = streamed(form, before + LOOSE[kind], size, eager=False)
            assert meant(turn.calls) == [("find", {"text": "x"})], turn
            assert turn.content == before.strip()
    inline = f"It says {CALL} here."
    assert form.read(inline, TOOLS) == Turn("", inline, [])


QUOTED = template(
    "{{ f.name }}({% for k, v in a.items() %}{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}"
    "{% endif %}{% if not loop.last %}, {% endif %}{% endfor %})",
    start="<|py|>[", end="]<|/py|>", between=", ",
)  # fmt: skip
WORDS = "Write Do: and a list of functions with their arguments, as few as will do. " * 4
DESCRIBED_LATE = (  # describes calls to the model after a turn that has some, in another role
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}<turn><bot>Do:\n[\n"
    '{% for c in m.tool_calls %}{"tool": "{{ c.function.name }}", "with": '
    "{{ c.function.arguments | tojson }}}{% if not loop.last %},\n{% endif %}{% endfor %}\n]\n"
    "{% elif m.role == 'assistant' %}<turn><bot>{{ m.content }}<eot>{% else %}"
    "<turn><{{ m.role }}>{{ m.content }}<eot>{% endif %}{% endfor %}"
    "{% if messages[-1].tool_calls %}<turn><sys>" + WORDS + "<eot>{% endif %}"
    "{% if add_generation_prompt %}<turn><bot>{% endif %}"
)
CHANNEL = '<|on|>tool to=fn.find <|as|>json<|say|>{"text": "x"}<|over|>'
FOUND: tuple[str, object] = ("find", {"text": "x"})
TOLD = "<|on|>musing<|say|>Hm.<|over|><|go|>bot<|on|>tool<|say|>I look.<|over|><|go|>bot"
JSON = "tags around JSON"
PING: tuple[str, object] = ("ping", {})
LATE = f'Do:\n[\n{{"tool": "find", "with": {{"text": "x"}}}}\n]\n<turn><sys>{WORDS}<eot>'
# A template, the text of a turn, and what it says: thought, content, calls.
SAID: list[tuple[str, str, str, str, Any]] = [
    ("channels", TOLD + CHANNEL, "Hm.", "I look.", [FOUND]),
    ("channels", CHANNEL.replace(" <|as|>json", " json"), "", "", [FOUND]),
    (DESCRIBED_LATE, LATE, "", "", [FOUND]),
    (
        QUOTED, "<|py|>[find(text='f(a='b')', n=2), find_all(text='it's ('x')')]<|/py|>", "", "",
        [("find", {"text": "f(a='b')", "n": 2}), ("find_all", {"text": "it's ('x')"})],
    ),
    (
        JSON, "I see.\n[find(n=-1.5, yes=True), ping()]", "", "I see.",
        [("find", {"n": -1.5, "yes": True}), PING],
    ),
    *(  # an escape that means nothing is kept
        (JSON, f"[find(text='{text}'), ping()]", "", "", [("find", {"text": text}), PING])
        for text in ("C:\\users", "C:\\xy", "a\\U12")
    ),
    *(  # other Python is content
        (JSON, text, "", text, [])
        for text in (
            "[seek(text='x')]", "[find]", "[find(text='x']", "[1, 2]", "[find(x)]", "[", "[x](y)",
        )
    ),
    *(
        (JSON, f'<do>\n{{"name": "ping", "arguments": {nothing}}}\n</do>', "", "", [PING])
        for nothing in ("null", '""', "{}")
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "text", "thought", "content", "calls"), SAID, ids=range(len(SAID))
)
def test_what_models_write_beside_the_templates_form_is_read(
    source: str, text: str, thought: str, content: str, calls: list[object]
) -> None:
    """A function named before its channel, quotes inside quotes, the next role, Python, no arguments."""
    form = FORMATS[source] if source in FORMATS else TurnFormat.of(source)
    for size in (1, 4, 99, 999):
        for eager in (False, True):
            turn = streamed(form, text, size, eager=eager)
            assert (turn.thought, turn.content, meant(turn.calls)) == (thought, content, calls)


def test_a_channel_of_no_known_function_is_no_call() -> None:
    for wrong in ("find_me", "fin", "fn", ""):
        text = CHANNEL.replace("to=fn.find ", f"to=fn.{wrong} ")
        assert FORMATS["channels"].read(text, TOOLS).calls == []


TEXTS = [
    "A king.", "", " ", "\n", "<do", "<do>", "<do> x", "{", "{}", '{"no": "call"}', "```json\n{}\n```",
    "```python\nprint()\n```", '{"name": 5}', '{"name": "find", "arguments": 3}', "<tool_call>", "a < b",
    '<do>{"name": "unknown", "arguments": {}}</do>', "<do><do>", "I <do> see\n\n", "[1, 2]", "{ not JSON",
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_each_piece_of_a_long_call_takes_as_many_steps(
    monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    n_steps, literal = 0, Cursor.literal

    def counted(cursor: Cursor, text: str) -> None:
        nonlocal n_steps
        n_steps += 1
        literal(cursor, text)

    monkeypatch.setattr(Cursor, "literal", counted)
    value = 'it\'s "one" </p> of </v> many, x=\n' * 200
    text = FORMATS[shape].write([ToolCall("find", {"text": value})])
    for eager in (False, True):
        reader, steps = TurnReader(FORMATS[shape], TOOLS, eager=eager), []
        for i in range(0, len(text), 8):
            before = n_steps
            reader.feed(text[i : i + 8])
            steps.append(n_steps - before)
        reader.finish()
        assert meant(reader.turn.calls) == [("find", {"text": value})]
        early, late = steps[100:300], steps[-300:-100]
        assert len(steps) > 800 and sum(late) <= 1.2 * sum(early)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_without_calls_is_content(shape: str, text: str) -> None:
    if shape == "channels":
        pytest.skip("its content has tags")
    for size in (1, 3, 99):
        assert streamed(FORMATS[shape], text, size, eager=False) == Turn("", text, [])


def test_content_is_held_back_only_where_a_tag_may_begin() -> None:
    reader = TurnReader(FORMATS["tags around JSON"], TOOLS)
    pieces = ("I", " see", " <", "x", " <d", "og> ")
    assert ["".join(e.text for e in reader.feed(p)) for p in pieces] == [
        "I", " see", "", " <x", "", " <dog>"]  # fmt: skip


def test_arguments_come_while_they_are_written() -> None:
    reader = TurnReader(FORMATS["name, then JSON"], TOOLS, eager=True)
    shown = [(e.kind, e.text) for piece in ('<do=find>{"te', 'xt": "a', 'b"}</d', "o>")
             for e in reader.feed(piece)]  # fmt: skip
    assert shown == [
        ("name", "find"), ("arguments", '{"te'), ("arguments", 'xt": "a'), ("arguments", 'b"}'),
    ]  # fmt: skip
    reader = TurnReader(FORMATS["tags for values"], TOOLS, eager=True)
    begun = reader.feed("<do>\n<f=find>\n<p=text>\na\n</p>\n<p=n>\n")
    assert [e.text for e in begun] == ["find"]  # its arguments come when it is complete
    ended = reader.finish()
    assert ended[0].kind == "cut" and reader.turn.calls == []
    assert reader.turn.content == "<do>\n<f=find>\n<p=text>\na\n</p>\n<p=n>\n"


def test_ids_are_the_same_again_and_of_a_form_that_templates_take() -> None:
    form = FORMATS["tags around JSON"]
    text = form.write([ToolCall("ping", {}), ToolCall("ping", {})])
    first, again = form.read(text, TOOLS), form.read(text, TOOLS)
    assert first == again and first.calls[0].id != first.calls[1].id
    assert all(len(call.id) == 9 and call.id.isalnum() for call in first.calls)
    with_id = FORMATS["name, id, JSON"].read("[DO]ping[ID]Ab3456789[WITH]{}", TOOLS)
    assert with_id.calls[0].id == "Ab3456789"


def test_values_without_a_schema_are_json_where_they_are() -> None:
    form = FORMATS["tags for values"]
    text = form.write([ToolCall("any", {"a": 5, "b": "x", "c": [1], "d": True, "e": "5"})])
    values = {"a": 5, "b": "x", "c": [1], "d": True, "e": 5}
    assert meant(form.read(text).calls) == [("any", values)]
    typed = [{"name": "any", "parameters": {"properties": {"e": {"type": "string"}}}}]
    assert form.read(text, typed).calls[0].arguments["e"] == "5"  # type: ignore[index]


BAD = {
    "raises": "{{ raise_exception('no') }}",
    "fails": "{{ 1 / 0 }}",
    "is no Jinja": "{% if %}",
    "is endless": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "does not end": "{% for i in range(9**5) %}{% for j in range(9**5) %}{{ j }}{% endfor %}{% endfor %}",
    "fills the memory": "{{ 'x' * 10**11 }}",
    "contradicts itself": template(
        "{% if c.id[-1] == '1' %}<do>{{ f.name }}</do>{% else %}{ {{ f.name }} }{% endif %}"
    ),
    "is empty": "",
    "ignores all": "Hello",
    "closes what it never opens": "{% for m in messages %}<u>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot></mull>{% endif %}",
    "writes calls in prose": template("I call {{ f.name }} now!"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_templates_have_the_general_form_and_a_reason(kind: str) -> None:
    form = TurnFormat.of(BAD[kind])
    assert form.is_general and form.reason and form.reason in form.describe()
    assert form.thought_end is None or kind in ("writes calls in prose", "contradicts itself")
    calls = [ToolCall("find", {"text": "x"}), ToolCall("ping", {})]
    assert meant(form.read(form.write(calls), TOOLS).calls) == meant(calls)


def test_what_is_no_template_or_no_tool_is_refused() -> None:
    for wrong in (5, None, b"x"):
        with pytest.raises(ConfigError, match="template"):
            TurnFormat.of(wrong)  # type: ignore[arg-type]
    tools: list[Any] = [{}, {"function": {}}, {"name": ""}, 5]
    for tool in tools:
        with pytest.raises(ConfigError, match="function with a name"):
            TurnFormat().read("x", [tool])


def test_words() -> None:
    words = FORMATS["tags around JSON"].describe()
    assert words == (
        "thinks between <mull> and </mull>, when the model chooses to; "
        "calls: <do> + JSON; several at once: yes"
    )
    assert "bare JSON" in TurnFormat().describe()


def test_nested_json_does_not_end_the_process() -> None:
    deep = '<do>\n{"name": "find", "arguments": {"deep": ' + "[" * 100_000
    start = time.perf_counter()
    assert FORMATS["tags around JSON"].read(deep, TOOLS).calls == []
    assert time.perf_counter() - start < 60
