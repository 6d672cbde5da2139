"""Conversations as prompts: messages, Jinja templates in a sandbox, llama.cpp's templates as fallback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toys

import llamabranch as lb
from llamabranch import ConfigError
from llamabranch.errors import UnsupportedError
from llamabranch.model import templates

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
RENDERED = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\n"
)
# llama.cpp recognises it by its markers, but Jinja cannot run it.
BROKEN_CHATML = "{% unknown %}<|im_start|>"
Open = Callable[..., lb.Model]


@pytest.fixture
def open_model(tmp_path: Path) -> Iterator[Open]:
    models: list[lb.Model] = []

    def open_it(template: str, **more: Any) -> lb.Model:
        metadata = {"tokenizer.chat_template": template, **more}
        path = toys.write_toy(tmp_path / f"{len(models)}.gguf", vocab="bytes", metadata=metadata)
        models.append(lb.Model(path))
        return models[-1]

    yield open_it
    for model in models:
        model.close()


def render(model: lb.Model, **variables: object) -> str:
    return model.apply_chat_template(MESSAGES, **variables)  # type: ignore[arg-type]


# -- rendering -------------------------------------------------------------------------------------


def test_messages_are_written_by_the_template(open_model: Open) -> None:
    model = open_model(toys.CHAT_TEMPLATE)
    assert render(model) == RENDERED
    assert render(model, add_generation_prompt=False) == RENDERED[: RENDERED.rindex("<|im_start|>")]
    pairs = [("system", "Be kind."), ("user", "Hello")]
    assert model.apply_chat_template(pairs) == RENDERED
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    in_parts: list[dict[str, object]] = [{**MESSAGES[0]}, {"role": "user", "content": parts}]
    assert model.apply_chat_template(in_parts) == RENDERED


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}", None),
        ("{{ messages[1].content | trim | upper }}", "HELLO"),
        ('{{ {"b": "<é>"} | tojson }}', '{"b": "<é>"}'),
        ('{{ {"b": 1, "a": [2]} | tojson(indent=1) }}', '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
         "user"),
        ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}", "a2"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
         "{{ ns.n }}", "2"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}",
         "Hello"),
        ("{% if tools is defined and tools %}{{ tools[0].name }}{% else %}none{% endif %}", "none"),
        ("a\n    {% if true %}\nb\n    {% endif %}\nc", "a\nb\nc"),  # lines of blocks vanish
        ("{{ 'x' * 3 }}{{ 6 * 7 }}", "xxx42"),
        ("{{ strftime_now('%Y').isdigit() }}", "True"),
    ],
)  # fmt: skip
def test_templates_have_what_hugging_face_gives_them(
    template: str, text: str | None, open_model: Open
) -> None:
    model = open_model(template)
    if text is None:
        text = "|".join(model.detokenize([t or 0], special=True) for t in (model.bos, model.eos))
    assert render(model) == text


def test_template_refuses_messages_with_its_reason(open_model: Open) -> None:
    """The template gets variables and tools, too."""
    model = open_model("{{ enable_thinking }} {{ tools[0].name }}")
    assert render(model, tools=[{"name": "search"}], enable_thinking=False) == "False search"
    model = open_model("{{ raise_exception('roles must alternate') }}<|im_start|>")
    with pytest.raises(ConfigError, match="roles must alternate"):
        render(model)


FORBIDDEN = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ lipsum.__globals__['os'].system('true') }}",
    "{{ messages[0].missing.deeper }}",
    "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% unclosed",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("template", FORBIDDEN)
def test_what_a_template_must_not_or_cannot_do_is_a_typed_error(
    template: str, open_model: Open
) -> None:
    with pytest.raises(UnsupportedError, match="chat template"):
        render(open_model(template))


def test_built_in_template_replaces_one_that_jinja_cannot_run(open_model: Open) -> None:
    model = open_model(BROKEN_CHATML)
    assert render(model) == RENDERED
    with pytest.raises(UnsupportedError):  # the built-in template would leave tools out
        render(model, tools=[{"name": "search"}])
    named = [{"role": "user", "content": "a", "name": "b"}]
    assert model.apply_chat_template(named) == model.apply_chat_template([("user", "a")])
    with pytest.raises(UnsupportedError, match="not valid Jinja"):  # its own reason
        model.apply_chat_template([{"role": "user", "content": "a", "documents": ["b"]}])
    with pytest.raises(UnsupportedError, match="not valid Jinja"):
        model.apply_chat_template([("user", "a\0b")])


def test_without_an_interpreter_to_start_the_built_in_template_is_used(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, unknown = open_model(toys.CHAT_TEMPLATE), open_model("{{ messages[0].role }}")
    monkeypatch.setattr(templates, "_worker", None)
    monkeypatch.setattr(sys, "executable", "")
    assert render(known) == RENDERED
    with pytest.raises(UnsupportedError) as caught:
        render(unknown)
    assert "interpreter" in str(caught.value)


def test_a_role_is_a_common_one_or_a_word_of_the_template(open_model: Open) -> None:
    model = open_model("{% if messages[0].role == 'observation' %}seen{% endif %}{# users #}")
    assert model.apply_chat_template([("observation", "a")]) == "seen"
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert model.chat_tokens([(role, "a")]) is not None
    for render in (model.apply_chat_template, model.chat_tokens):
        for role, hint in (("asistant", "assistant"), ("users|>", "user"), ("", "roles: system")):
            with pytest.raises(ConfigError, match=r"messages\[1\]: unknown role") as caught:
                render([("user", "a"), (role, "b")])
            assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("template", ["foo", "ChatML", "llama-3", "chat.jinja", "", "no braces"])
@pytest.mark.parametrize("open_it", [lb.Model, lb.load], ids=["Model", "load"])
def test_what_is_no_template_and_no_name_of_one_is_refused(
    open_it: Callable[..., object], template: str, target: lb.Model
) -> None:
    with pytest.raises(ConfigError, match=f"unknown chat template '{template}'") as refused:
        open_it(target.path, chat_template=template)
    assert "chatml" in (refused.value.hint or "") and "llama3" in (refused.value.hint or "")


# -- as prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_conversation_begins_with_bos_once_where_the_model_has_one(
    add_bos: bool, writes_bos: bool, open_model: Open
) -> None:
    template = ("{{ bos_token }}" if writes_bos else "") + toys.CHAT_TEMPLATE
    model = open_model(template, **{"tokenizer.ggml.add_bos_token": add_bos})
    tokens = model.prompt_tokens(MESSAGES)
    assert model.bos is not None
    assert tokens.count(model.bos) == int(add_bos or writes_bos)
    text = model.tokenize(RENDERED, add_special=False, parse_special=True)
    assert tokens[-len(text) :] == text
