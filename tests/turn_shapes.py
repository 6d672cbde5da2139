"""Chat templates for all forms of function calls, written for these tests."""

# ruff: noqa: E501  (a template is read more easily in its own lines)

from __future__ import annotations


def template(
    call: str, *, between: str = "", start: str = "", end: str = "", args: str = ""
) -> str:
    """Return a template that writes calls: ``call`` for each, in ``start`` and ``end``."""
    return (
        "{% if tools %}<sys>{{ tools | tojson }}</sys>{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<bot>"
        "{% if m.reasoning_content %}<mull>\n{{ m.reasoning_content }}\n</mull>\n\n{% endif %}"
        "{{ m.content or '' }}{% if m.tool_calls %}" + start + "{% for c in m.tool_calls %}"
        "{% set f = c.function %}{% set a = f.arguments %}" + call +
        "{% if not loop.last %}{{ " + repr(between) + " }}{% endif %}{% endfor %}" + end + "{% endif %}<eot>\n"
        "{% else %}<{{ m.role }}>{{ m.content }}<eot>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    )  # fmt: skip


EACH = "{% for k, v in a.items() %}"
RAW = "{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}"
SHAPES = {
    "tags around JSON": template(
        '<do>\n{"name": "{{ f.name }}", "arguments": {{ a | tojson }}}\n</do>', between="\n"
    ),
    "one tag around several": template(
        '\n{"tool": "{{ f.name }}", "with": {{ a | tojson }}}', start="<dos>", end="\n</dos>"
    ),
    "JSON in a list": template(
        '{"name": "{{ f.name }}", "arguments": {{ a | tojson }}, "id": "{{ c.id }}"}',
        start="[DO][", end="]", between=", ",
    ),
    "a function inside": template(
        '<do>{"type": "function", "function": {"name": "{{ f.name }}", "args": {{ a | tojson }}}}</do>'
    ),
    "the name is the key": template(
        '{"{{ f.name }}": {{ a | tojson }}}', start="<|do|>[", end="]<|done|>", between=", "
    ),
    "arguments are a text": template(
        '<do>{"name": "{{ f.name }}", "arguments": {{ (a | tojson) | tojson }}}</do>'
    ),
    "bare JSON": template('{"name": "{{ f.name }}", "parameters": {{ a | tojson }}}', between="\n"),
    "name, then JSON": template("<do={{ f.name }}>{{ a | tojson }}</do>"),
    "name, id, JSON": template("[DO]{{ f.name }}[ID]{{ c.id }}[WITH]{{ a | tojson }}"),
    "a counted id": template(
        "<|call|>fn.{{ f.name }}:{{ loop.index0 }}<|with|>{{ a | tojson }}<|end|>",
        start="<|calls|>", end="<|ends|>",
    ),
    "the id is the name": template("<|call|>{{ c.id }}<|with|>{{ a | tojson }}<|end|>"),
    "a fence": template("<|do|>function<|sep|>{{ f.name }}\n```json\n{{ a | tojson }}\n```<|end|>"),
    "tags for values": template(
        "<do>\n<f={{ f.name }}>\n" + EACH + "<p={{ k }}>\n" + RAW + "{{ '\\n' }}</p>\n{% endfor %}</f>\n</do>",
        between="\n",
    ),
    "tags for names": template(
        "<do>{{ f.name }}" + EACH + "<k>{{ k }}</k><v>" + RAW + "</v>{% endfor %}</do>"
    ),
    "tags that tell types": template(
        '\n<|invoke name="{{ f.name }}">\n' + EACH + '<|p name="{{ k }}" text="{{ '
        "'yes' if v is string else 'no' }}\">" + RAW + "</|p>\n{% endfor %}</|invoke>",
        start="\n\n<|calls>", end="\n</|calls>",
    ),
    "tags named like values": template(
        '<invoke name="{{ f.name }}">' + EACH + "<{{ k }}>" + RAW + "</{{ k }}>{% endfor %}</invoke>"
    ),
    "Python": template(
        "{{ f.name }}(" + EACH + "{{ k }}={% if v is string %}{{ v | tojson }}{% elif v is sameas true %}"
        "True{% elif v is sameas false %}False{% elif v is none %}None{% else %}{{ v | tojson }}{% endif %}"
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        start="<|py|>[", end="]<|/py|>", between=", ",
    ),
    "quotes of its own": template(
        "<|do>call:{{ f.name }}{{ '{' }}" + EACH + "{{ k }}:{% if v is string %}<|'|>{{ v }}<|'|>{% else %}"
        "{{ v | tojson }}{% endif %}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}<do|>"
    ),
    "channels": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}<|go|>bot<|on|>musing<|say|>{{ m.reasoning_content }}<|over|>{% endif %}"
        "{% if m.content %}<|go|>bot<|on|>final<|say|>{{ m.content }}<|over|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|go|>bot to=fn.{{ c.function.name }}<|on|>tool<|say|>"
        "{{ c.function.arguments | tojson }}<|over|>{% endfor %}"
        "{% else %}<|go|>{{ m.role }}<|say|>{{ m.content }}<|over|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|go|>bot{% endif %}"
    ),
}  # fmt: skip

_TAGS = SHAPES["tags around JSON"]
# Templates that write a part of a conversation differently when more follows.
CHANGING = {
    "an empty thought in a last answer": _TAGS.replace(
        "{{ m.content or '' }}{% if m.tool_calls",
        "{% if loop.last %}<mull>\n\n</mull>\n\n{% endif %}{{ m.content or '' }}{% if m.tool_calls",
    ),
    "an end of the whole text": _TAGS
    + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
    "white space after a last result": _TAGS.replace(
        "{{ m.content }}<eot>",
        "{{ m.content }}{% if m.role == 'tool' and not loop.last %}{{ '\\n' }}{% endif %}<eot>",
    ),
    "a system message before a last question": _TAGS.replace(
        "{% else %}<{{ m.role }}>",
        "{% elif m.role == 'system' %}{% else %}<{{ m.role }}>"
        "{% if loop.last and m.role == 'user' %}{{ messages[0].content }}\n\n{% endif %}",
    ),
    "one call in a turn": _TAGS.replace(
        "{% if m.tool_calls %}",
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}",
    ),
}


def opening_thoughts(shape: str) -> str:
    """Return a template that opens a thought at the end of its prompt."""
    prompt = "{% if add_generation_prompt %}<bot>"
    if prompt in shape:
        return shape.replace(prompt, prompt + "<mull>\n")
    prompt = "{% if add_generation_prompt %}<|go|>bot"
    return shape.replace(prompt, prompt + "<|on|>musing<|say|>")
