"""JSON schemas in a few words, and where a conversation shows them."""

from __future__ import annotations

import enum
from datetime import date, datetime, time
from typing import Any, Literal

import pytest
import toys
from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime

import llamabranch as lb
from llamabranch.engine.completion import Call
from llamabranch.model.functions import type_schemas
from llamabranch.model.shape import asking, shape_of

Values = dict[str, Any]


class Kind(enum.Enum):
    FAIR = "fair"
    SHOW = "show"


class Node(BaseModel):
    value: int
    inner: list[Node] = []


class Day(BaseModel):
    """A day."""

    name: str = Field(description="what it is called")
    day: date
    at: datetime | None = None
    kind: Kind
    pair: tuple[int, str]
    rest: dict[str, float] = {}
    node: Node
    some: Literal["a", 3]


SHOWN = """{
  "name": string (what it is called),
  "day": date YYYY-MM-DD,
  "at": date and time YYYY-MM-DDThh:mm:ss | null (optional),
  "kind": "fair" | "show",
  "pair": [integer, string],
  "rest": {
    any name: number
  } (optional),
  "node": {
    "value": integer,
    "inner": [{... Node}, ...] (optional)
  },
  "some": "a" | 3
}"""


def test_names_types_formats_values_and_descriptions_are_shown() -> None:
    assert shape_of(Day.model_json_schema(schema_generator=type_schemas())) == SHOWN


def deep(n: int) -> Values:
    schema: Values = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"x": schema, "y": {"description": "d" * 300}}}
    return schema


def wide(n: int) -> Values:
    names = {f"property {i}": {"type": "string", "description": "d" * 90} for i in range(n)}
    return {"type": "object", "properties": names}


def doubling(n: int, width: int) -> Values:
    """A schema that is small, and huge when its references are written out."""
    names = [f"n{i}" for i in range(n)]
    inner = {
        name: {
            "type": "object",
            "properties": {f"p{i}": {"$ref": f"#/$defs/n{at + 1}"} for i in range(width)},
        }
        for at, name in enumerate(names)
    }
    return {"$defs": inner, "$ref": "#/$defs/n0"}


@pytest.mark.parametrize(
    "schema",
    [
        deep(100), wide(60), wide(9000), doubling(30, 50), {"$ref": "#"}, {"enum": ["x" * 9000]},
        {"enum": [*range(9000)]}, True, {"properties": 3, "type": ["object", "x"]}, {"type": {}},
        {"allOf": [3, {"$ref": "#/nowhere"}]}, {"const": "\ud800"}, {"anyOf": [], "items": []},
    ],
    ids=range(13),
)  # fmt: skip
def test_any_schema_is_shown_in_a_bounded_length(schema: object) -> None:
    text = asking(schema)
    assert len(text) < 4100 and text.encode()


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Second."},
]
SCHEMA = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}


@pytest.fixture
def chatting(target: lb.Model) -> Any:
    with lb.load(target.path, n_ctx=1024, n_threads=1, chat_template=toys.CHAT_TEMPLATE) as ctx:
        yield ctx


def prompt_of(ctx: lb.Context, messages: Any, **options: Any) -> str:
    (request,) = Call(ctx, messages, None, options, chats=True).requests
    assert request.prompt == [*map(dict, messages)]
    return ctx.detokenize(request.plan(ctx.model).tokens, special=True)


def test_chat_shows_the_schema_at_the_end_of_the_users_last_message(chatting: lb.Context) -> None:
    plain = prompt_of(chatting, HISTORY)
    shown = prompt_of(chatting, HISTORY, json_schema=SCHEMA)
    before, after = plain.split("Second.")
    assert shown == f"{before}Second.\n\n{asking(SCHEMA)}{after}"  # all before it is shared
    assert prompt_of(chatting, HISTORY, json_schema=SCHEMA, show_schema=False) == plain
    assert prompt_of(chatting, HISTORY, regex="[0-9]+") == plain
    begun = [*HISTORY, {"role": "assistant", "content": "{"}]
    assert prompt_of(chatting, begun, json_schema=SCHEMA).count("date YYYY-MM-DD") == 1
    alone = HISTORY[:1]
    assert prompt_of(chatting, alone, json_schema=SCHEMA) == prompt_of(chatting, alone)
    with pytest.raises(lb.ConfigError, match="show_schema"):
        chatting.chat(HISTORY, json_schema=SCHEMA, show_schema="no")  # type: ignore[call-overload]


def test_result_keeps_the_users_messages(chatting: lb.Context) -> None:
    result = chatting.chat(HISTORY, json_schema=SCHEMA, max_tokens=2)
    assert result.prompt == HISTORY and HISTORY[-1]["content"] == "Second."


def takes(model: lb.Model, grammar: lb.Grammar, text: str) -> bool:
    state = grammar.start(model)
    for token in model.tokenize(text, add_special=False):
        if not state.allows(token):
            return False
        state.accept(token)
    return True


ZONES = ["", "Z", "+02:00"]


@pytest.mark.parametrize(
    ("kind", "text", "zones"),
    [
        (datetime, "2026-03-03T10:30:00", ZONES),
        (NaiveDatetime, "2026-03-03T10:30:00", [""]),
        (AwareDatetime, "2026-03-03T10:30:00", ["Z", "+02:00"]),
        (time, "10:30:00", ZONES),
    ],
)
@pytest.mark.parametrize("place", ["schema", "tool"])
def test_an_offset_is_as_the_python_type_takes_it(
    toy: lb.Model, kind: Any, text: str, zones: list[str], place: str
) -> None:
    grammar = lb.Grammar.from_json_schema(list[kind])
    if place == "tool":

        def tool(x: Any) -> None:
            """Take a time."""

        tool.__annotations__["x"] = list[kind]
        described: Any = lb.model.functions.function_tool(tool)["function"]
        grammar = lb.Grammar.from_json_schema(described["parameters"]["properties"]["x"])
    for zone in ZONES:
        value = f'["{text}{zone}"]'
        assert takes(toy, grammar, value) == (zone in zones), zone
        if zone in zones and place == "schema":
            assert grammar.parse(value)


class Visit(BaseModel):
    at: datetime
    times: list[time] = []
    left: NaiveDatetime | None


@pytest.mark.parametrize(("zone", "is_taken"), [("", True), ("Z", False)])
def test_formats_of_pythons_types_are_taken_inside_a_model(
    toy: lb.Model, zone: str, is_taken: bool
) -> None:
    grammar = lb.Grammar.from_json_schema(Visit)
    day = "2026-03-03T10:30:00"
    text = f'{{"at": "{day}", "times": ["10:30:00"], "left": "{day}{zone}"}}'
    assert takes(toy, grammar, text) == is_taken
    if is_taken:
        assert grammar.parse(text) == Visit.model_validate_json(text)
