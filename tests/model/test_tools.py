"""Tools of a request, functions as tools, and earlier messages in the form that a template needs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal

import gguf
import pytest
import toys
from pydantic import BaseModel

import llamabranch as lb
from llamabranch.errors import ConfigError, GrammarError, UnsupportedError
from llamabranch.model.functions import function_tool
from llamabranch.model.history import written_history
from llamabranch.model.tools import Tools, conversation
from llamabranch.model.turn_format import TurnFormat
from llamabranch.sampling.grammar import turn_grammar

HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def calling(call: str, after: str = "") -> str:
    """Return a template with a text for each call, and one after all calls of a message."""
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    return f"{HEAD}{{{{ m.role }}}}\n{{{{ m.content or '' }}}}{calls}{after}{TAIL}"


ITERATES = calling(
    "<do>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<k>{{ k }}</k>"
    "<v>{{ v }}</v>{% endfor %}</do>"
)
CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
TOJSON = calling(f"<do>{CALL}}}</do>")
NINE = calling(
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    f'[DO]{CALL}, "id": "{{{{ c.id }}}}"}}',
    after='{% if m.role == "tool" %}[{{ m.tool_call_id }}]{% endif %}',
)
NO_ROLES = (  # it has no system role, no tool role and no calls
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM_ONLY = (  # drops developers
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}}  # fmt: skip


def called(
    arguments: object, call_id: str = "call_0123456789abcdef01234567"
) -> list[dict[str, Any]]:
    """Return a conversation with a call and its result, as OpenAI's client sends it."""
    call = {"id": call_id, "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hm?"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "It is <do>x</do>."},
    ]  # fmt: skip


TEXT = TOJSON.replace("c.function.arguments | tojson", "'' + c.function.arguments")
QUOTED: dict[str, object] = {"text": 'a "b"'}


@pytest.mark.parametrize("template", [ITERATES, TOJSON, NINE], ids=["iterates", "tojson", "nine"])
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"text": "a \\"b\\""}', QUOTED), (QUOTED, QUOTED), ("", {}), (None, {}), ("{}", {}),
        ("{broken", "{broken"), ("[1]", "[1]"), (5, "5"),  # broken ones stay text
    ],
)  # fmt: skip
def test_arguments_of_a_history_are_never_encoded_twice(
    template: str, arguments: object, written: object
) -> None:
    (_, answer, result) = written_history(called(arguments), TurnFormat.of(template))
    call: Any = answer["tool_calls"]
    if template == ITERATES and isinstance(written, str):  # it needs an object
        written = {"arguments": written}
    assert call[0]["function"]["arguments"] == written
    assert result["tool_call_id"] == call[0]["id"] and result["name"] == "find"
    assert (len(call[0]["id"]) == 9) == (template == NINE)


def test_a_template_that_wants_text_gets_text_and_a_call_without_a_function_is_refused() -> None:
    form = TurnFormat.of(TEXT)
    assert form.arguments_as_text
    user, answer, _ = written_history(called({"text": "é"}), form)
    call: Any = answer["tool_calls"]
    assert call[0]["function"]["arguments"] == '{"text": "é"}'
    with pytest.raises(ConfigError, match="a function with a name") as caught:
        written_history([user, {**answer, "tool_calls": [{}]}], form)
    assert "messages[1]" in str(caught.value) and "tool_calls[0]" in str(caught.value)


def test_what_a_template_does_not_write_becomes_text() -> None:
    form = TurnFormat.of(NO_ROLES)
    after = [*called('{"text": "x"}'), {"role": "user", "content": "And?"}]
    messages = written_history(after, form)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["content"] == '{"name": "find", "arguments": {"text": "x"}}'
    assert messages[2]["content"] == "Result of find:\nIt is <do>x</do>.\n\nAnd?"
    refusing = (
        "{% for m in messages %}"
        "{% if loop.index > 1 and m.role == 'user' and loop.previtem.role == 'tool' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<do>{{ c.function | tojson }}</do>{% endfor %}{% endfor %}"
    )
    for source, n in ((TOJSON, 4), (refusing, 3)):  # after the result, or a part of it
        messages = written_history(after, TurnFormat.of(source))
        assert [m["role"] for m in messages][2:] == ["tool", "user"][: n - 2]
        assert str(messages[-1]["content"]).endswith("And?")
    two = [*called("{}"), called("{}")[2]]
    assert [m["role"] for m in written_history(two, form)] == ["user", "assistant", "user"]
    developer: list[dict[str, object]] = [{"role": "developer", "content": "Be brief."}]
    assert written_history(developer, TurnFormat.of(SYSTEM_ONLY))[0]["role"] == "system"
    assert written_history(developer, TurnFormat.of(TOJSON))[0]["role"] == "developer"


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Tell the weather
    of a city.

    Args:
        city: its name,
            in English.
        days: how many.
    """
    return city + str(days) + unit


@pytest.mark.parametrize("with_pydantic", [True, False])
def test_functions_are_tools(with_pydantic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_pydantic:
        pytest.importorskip("pydantic")
    else:
        monkeypatch.setitem(sys.modules, "pydantic", None)
    function: Any = function_tool(weather)["function"]
    assert (
        function["name"] == "weather" and function["description"] == "Tell the weather of a city."
    )
    properties = function["parameters"]["properties"]
    assert properties["city"] == {"type": "string", "description": "its name, in English."}
    assert properties["days"]["type"] == "integer" and properties["days"]["default"] == 1
    assert properties["unit"]["enum"] == ["C", "F"]
    assert function["parameters"]["required"] == ["city"]
    assert Tools([weather, TOOL]).names == {"weather", "find"}

    def bare(x) -> None:  # type: ignore[no-untyped-def]
        """No annotation."""

    def many(*x: int) -> None:
        """It cannot be called by name."""

    for wrong in (bare, many, lambda: 1):
        with pytest.raises(ConfigError):
            function_tool(wrong)


def test_histories_reach_templates_in_their_form(toy: lb.Model) -> None:
    text = lb.Model(toy.path, chat_template=ITERATES).apply_chat_template(called('{"text": "x"}'))
    assert "<do>find<k>text</k><v>x</v></do>" in text and "It is <do>x</do>." in text
    model = lb.Model(toy.path, chat_template="chatml")
    assert model.apply_chat_template(called('{"text": "x"}')).count("find") == 2
    ignored = {"name": "b", "reasoning_content": "c", "refusal": None}
    message = {"role": "user", "content": "a", **ignored}
    assert model.apply_chat_template([message]) == model.apply_chat_template([("user", "a")])


def test_the_templates_own_reason_is_shown(toy: lb.Model) -> None:
    model = lb.Model(toy.path, chat_template=ITERATES + "{{ 1 / 0 if messages | length > 2 }}")
    with pytest.raises(UnsupportedError, match="division by zero"):
        model.apply_chat_template(called('{"text": "x"}'))


def test_tags_of_calls_in_a_result_stay_text(tmp_path: Path) -> None:
    """Even if the tags are user-defined tokens, which llama.cpp parses in any text."""
    vocabulary = toys.Vocabulary.with_control("<s>", "</s>", "<do>", "</do>", "<b>")
    token_types = vocabulary.metadata()["tokenizer.ggml.token_type"]
    assert isinstance(token_types, list)
    types = [*token_types[:2], *[int(gguf.TokenType.USER_DEFINED)] * 3, *token_types[5:]]
    path = toys.write_toy(
        tmp_path / "toy.gguf", vocab=vocabulary, metadata={"tokenizer.ggml.token_type": types}
    )
    with lb.Model(path, chat_template=TOJSON) as model:
        tokens = model.chat_tokens(called('{"text": "a <do> b </do>"}'))
        assert [token for token in tokens if token in (2, 3)] == [2, 3]  # the template's own
        assert "It is <do>x</do>." in model.detokenize(tokens, special=True)
        # A form of no template: as the model was trained.
        assert 4 in model.chat_tokens([("user", "a <b> c")])


def test_tools_are_described_without_a_system_role(toy: lb.Model) -> None:
    model = lb.Model(toy.path, chat_template=NO_ROLES)
    talk = conversation(model, [("user", "Hm?")], Tools([TOOL], "auto", model.turn_format))
    text = talk.text(model)
    assert '"find"' in text and text.index('"find"') < text.index("Hm?")
    assert text.count("<|im_start|>user") == 1


def test_a_tools_schema_fault_names_the_tool(toy: lb.Model) -> None:
    model = lb.Model(toy.path, chat_template=TOJSON)
    wrong = {"type": "function", "function": {"name": "broken", "strict": True, "parameters": {
        "type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)"}}}}}  # fmt: skip
    for choice in ("auto", "required"):
        with pytest.raises(GrammarError, match="broken"):
            turn_grammar(model, Tools([TOOL, wrong], choice, model.turn_format))


def test_detection_is_remembered(toy: lb.Model) -> None:
    model = lb.Model(toy.path, chat_template=TOJSON)
    assert model.turn_format is model.turn_format and not model.turn_format.is_general
    assert TurnFormat.of(TOJSON) is TurnFormat.of(TOJSON)
    assert lb.Model(toy.path, chat_template="chatml").turn_format.is_general


class Undocumented(BaseModel):
    a: int


class Base:
    """A base class."""

    def told(self, a: int) -> None:
        """Tell."""


class Derived(Base):
    a: int

    def __init__(self, a: int) -> None: ...

    def told(self, a: int) -> None: ...


@dataclasses.dataclass
class Generated:
    a: int


@dataclasses.dataclass
class Written:
    """It is written."""

    a: int


@pytest.mark.parametrize(
    ("function", "about"),
    [
        (Undocumented, ""), (Derived, ""), (Derived(1).told, ""), (Generated, ""),
        (Written, "It is written."), (Base().told, "Tell."),
    ],
    ids=range(6),
)  # fmt: skip
def test_only_its_own_docstring_describes_a_tool(function: Any, about: str) -> None:
    described: Any = function_tool(function)["function"]
    assert described["description"] == about
