"""Function calls by a model that has tools in its template: 50 questions need a call, 20 need none.

    python -m benchmarks.calls MODEL [--json FILE]

Each question is one turn at temperature 0 with six functions and ``tool_choice="auto"``. A call is right
if it is the only one, names the function that the question asks for, and has arguments that its schema
allows. Some arguments follow from the question. These are compared too, and counted separately. The
questions were written before the first run and have not changed since.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import llamabranch as lb

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
}  # fmt: skip


def _tool(name: str, description: str, required: list[str], **properties: object) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _of(kind: str, description: str) -> dict[str, str]:
    return {"type": kind, "description": description}


TOOLS = [
    _tool(
        "get_weather", "Get the weather forecast of a city.", ["city"],
        city=_of("string", "The name of the city."),
        days=_of("integer", "How many days ahead; today is 0."),
    ),
    _tool(
        "convert_currency", "Convert an amount of money at today's rate.",
        ["amount", "source", "target"],
        amount=_of("number", "The amount of money."),
        source=_of("string", "ISO code of the currency it is in, such as USD."),
        target=_of("string", "ISO code of the currency it should be in."),
    ),
    _tool(
        "send_message", "Send a text message to a person in the address book.", ["to", "text"],
        to=_of("string", "The name of the person."),
        text=_of("string", "What the message says."),
    ),
    _tool(
        "find_route", "Find the way between two places.", ["start", "end"],
        start=_of("string", "Where the way begins."),
        end=_of("string", "Where it ends."),
        mode={"enum": ["car", "train", "bicycle", "walk"], "description": "How to travel."},
    ),
    _tool(
        "set_timer", "Set a timer that rings after some minutes.", ["minutes"],
        minutes=_of("integer", "How many minutes."),
        label=_of("string", "What the timer is for."),
    ),
    _tool(
        "search_library", "Search the catalogue of the town library for books.", ["query"],
        query=_of("string", "Words of a title, or the name of an author."),
        only_available=_of("boolean", "Whether to leave out books that are lent."),
    ),
]  # fmt: skip
_PARAMETERS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS
}

Expected = tuple[str, str, dict[str, object]]
CALLS: list[Expected] = [
    ("What is the weather like in Oslo today?", "get_weather", {"city": "Oslo"}),
    ("Do I need an umbrella in Lisbon tomorrow?", "get_weather", {"city": "Lisbon"}),
    ("Will it snow in Tromsø in three days?", "get_weather", {"city": "Tromsø", "days": 3}),
    ("How warm is it in Nairobi right now?", "get_weather", {"city": "Nairobi"}),
    ("Give me the forecast for New York in 5 days.", "get_weather", {"city": "New York", "days": 5}),
    ("I am flying to Tokyo today. Is it raining there?", "get_weather", {"city": "Tokyo"}),
    ("Is it windy in Wellington?", "get_weather", {"city": "Wellington"}),
    ("Tell me the weather in São Paulo two days from now.", "get_weather",
     {"city": "São Paulo", "days": 2}),
    ("Should I wear a coat in Reykjavik today?", "get_weather", {"city": "Reykjavik"}),
    ("How much is 100 US dollars in euros?", "convert_currency",
     {"amount": 100, "source": "USD", "target": "EUR"}),
    ("Convert 2500 Japanese yen to British pounds.", "convert_currency",
     {"amount": 2500, "source": "JPY", "target": "GBP"}),
    ("What are 19.99 euros in Swiss francs?", "convert_currency",
     {"amount": 19.99, "source": "EUR", "target": "CHF"}),
    ("I have 50 GBP. How many USD is that?", "convert_currency",
     {"amount": 50, "source": "GBP", "target": "USD"}),
    ("Please change 1,000 Swedish kronor into Norwegian kroner.", "convert_currency",
     {"amount": 1000, "source": "SEK", "target": "NOK"}),
    ("A hotel costs 8000 Indian rupees. What is that in US dollars?", "convert_currency",
     {"amount": 8000, "source": "INR", "target": "USD"}),
    ("How many Canadian dollars do I get for 75 euros?", "convert_currency",
     {"amount": 75, "source": "EUR", "target": "CAD"}),
    ("Turn 0.5 euros into Polish zloty.", "convert_currency",
     {"amount": 0.5, "source": "EUR", "target": "PLN"}),
    ("What is 300 AUD worth in NZD?", "convert_currency",
     {"amount": 300, "source": "AUD", "target": "NZD"}),
    ("Tell Anna that I will be ten minutes late.", "send_message", {"to": "Anna"}),
    ("Send a message to Bob: The meeting is at noon.", "send_message", {"to": "Bob"}),
    ("Text my wife Clara \"I love you\".", "send_message", {"to": "Clara", "text": "I love you"}),
    ("Write to Mr. Tanaka that the parcel has arrived.", "send_message", {}),
    ("Let David know the door code is 4711.", "send_message", {"to": "David"}),
    ("Ask Elena by message whether she can water the plants.", "send_message", {"to": "Elena"}),
    ("Message Frank and say happy birthday.", "send_message", {"to": "Frank"}),
    ("Send Grace the text \"See you at 8:30, bring the red folder\".", "send_message",
     {"to": "Grace", "text": "See you at 8:30, bring the red folder"}),
    ("How do I get from Hamburg to Berlin by train?", "find_route",
     {"start": "Hamburg", "end": "Berlin", "mode": "train"}),
    ("Find me a bicycle route from Utrecht to Amsterdam.", "find_route",
     {"start": "Utrecht", "end": "Amsterdam", "mode": "bicycle"}),
    ("What is the way from the main station to the town hall on foot?", "find_route", {"mode": "walk"}),
    ("I want to drive from Chicago to Detroit. Which way should I take?", "find_route",
     {"start": "Chicago", "end": "Detroit", "mode": "car"}),
    ("Show me the route from Madrid to Valencia.", "find_route", {"start": "Madrid", "end": "Valencia"}),
    ("Which train connection is there between Kyoto and Osaka?", "find_route",
     {"start": "Kyoto", "end": "Osaka", "mode": "train"}),
    ("Navigate from 12 Baker Street to Heathrow Airport by car.", "find_route", {"mode": "car"}),
    ("How can I walk from the Louvre to Notre-Dame?", "find_route", {"mode": "walk"}),
    ("Set a timer for 10 minutes.", "set_timer", {"minutes": 10}),
    ("Wake me up in half an hour.", "set_timer", {"minutes": 30}),
    ("Remind me in 8 minutes that the eggs are done.", "set_timer", {"minutes": 8}),
    ("Start a timer of 45 minutes for the laundry.", "set_timer", {"minutes": 45}),
    ("I put a pizza in the oven. Ring in 12 minutes, please.", "set_timer", {"minutes": 12}),
    ("Set a timer of one hour called \"homework\".", "set_timer", {"minutes": 60, "label": "homework"}),
    ("Time three minutes for my tea.", "set_timer", {"minutes": 3}),
    ("Ring in 90 minutes.", "set_timer", {"minutes": 90}),
    ("Does the town library have \"Moby-Dick\"?", "search_library", {}),
    ("Find books by Ursula K. Le Guin in the library.", "search_library", {}),
    ("Search the library for books about beekeeping.", "search_library", {}),
    ("Which novels by Jane Austen can I borrow?", "search_library", {}),
    ("Look up \"The Name of the Rose\" in the library's catalogue.", "search_library", {}),
    ("Is there a Python book in the library that is not lent out?", "search_library", {}),
    ("Look for Astrid Lindgren's books at the library, only those that are available.", "search_library",
     {"only_available": True}),
    ("Check the catalogue for a book called \"100 Soups\".", "search_library", {}),
]  # fmt: skip
NONE = [
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "What is 17 times 23?",
    "Explain in one sentence what a hash table is.",
    "Translate \"good morning\" into Spanish.",
    "Who wrote Hamlet?",
    "Hello! How are you?",
    "Name three primary colours.",
    "What does the word \"serendipity\" mean?",
    "Write a Python function that reverses a string.",
    "Thank you, that was all.",
    "How many legs does a spider have?",
    "Give me a synonym of \"happy\".",
    "What is the difference between a list and a tuple in Python?",
    "Why is the sky blue?",
    "Tell me a joke about a cat.",
    "Which planet is the largest?",
    "Correct this sentence: \"She go to school every day.\"",
    "Is 91 a prime number?",
    "What is the chemical symbol of gold?",
]  # fmt: skip


class Answer(NamedTuple):
    """The answer of a model.

    Attributes:
        question: the user's message.
        expected: the function that it asks for; None = it needs no call.
        text: the whole text that the model wrote.
        calls: names and arguments.
        is_right: there is one valid call, of the expected function, or no call if none is expected.
        is_exact: the answer is right, and the arguments are those that the question names.
        seconds: the time of the turn.
    """

    question: str
    expected: str | None
    text: str
    calls: list[tuple[str, object]]
    is_right: bool
    is_exact: bool
    seconds: float


def is_valid(name: str, arguments: object) -> bool:
    """Return whether the function exists and its schema allows the arguments."""
    schema = _PARAMETERS.get(name)
    if schema is None or not isinstance(arguments, Mapping):
        return False
    properties = schema["properties"]
    if not set(schema["required"]) <= set(arguments) <= set(properties):
        return False
    for key, value in arguments.items():
        values, kind = properties[key].get("enum"), properties[key].get("type")
        if values is not None and value not in values:
            return False
        is_bool = isinstance(value, bool) and kind != "boolean"
        if kind is not None and (is_bool or not isinstance(value, _TYPES[kind])):
            return False
    return True


def asked(
    ctx: lb.Context, question: str, expected: str | None, arguments: Mapping[str, object]
) -> Answer:
    """Return the answer to one question."""
    start = perf_counter()
    result = ctx.chat([("user", question)], tools=TOOLS, temperature=0, max_tokens=200)
    seconds = perf_counter() - start
    calls = [(call.name, call.arguments) for call in result.tool_calls]
    is_right = not calls
    is_exact = is_right
    if expected is not None:
        is_right = len(calls) == 1 and calls[0][0] == expected and is_valid(*calls[0])
        call_arguments: Any = calls[0][1] if is_right else {}
        is_exact = is_right and all(
            call_arguments.get(key) == value for key, value in arguments.items()
        )
    return Answer(question, expected, result.text, calls, is_right, is_exact, seconds)


def main() -> None:
    """Ask all questions and print how many answers are right."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", help="a GGUF file of an instruct model with tools in its template")
    parser.add_argument("--json", type=Path, help="write all answers to this file")
    args = parser.parse_args()
    answers: list[Answer] = []
    with lb.load(args.model, n_ctx=4096) as ctx:
        print(ctx.model.turn_format.describe(), flush=True)
        questions = [*CALLS, *((question, None, {}) for question in NONE)]
        for question, expected, arguments in questions:
            answer = asked(ctx, question, expected, arguments)
            answers.append(answer)
            state = "right" if answer.is_exact else "valid" if answer.is_right else "WRONG"
            print(f"{state} {question} -> {answer.calls or answer.text!r}", flush=True)
    with_call = [answer for answer in answers if answer.expected]
    without = [answer for answer in answers if not answer.expected]
    print(
        f"valid calls of the right function: {sum(a.is_right for a in with_call)} of {len(with_call)}, "
        f"{sum(a.is_exact for a in with_call)} with the arguments that the question names\n"
        f"no call where none is needed: {sum(a.is_right for a in without)} of {len(without)}\n"
        f"{sum(a.seconds for a in answers):.0f} s"
    )
    if args.json:
        args.json.write_text(
            json.dumps([a._asdict() for a in answers], ensure_ascii=False, indent=1)
        )


if __name__ == "__main__":
    main()
