"""Three agents on one document, two calls of 0.3 s each: tokens read and seconds.

    python -m benchmarks.agents --target MODEL.gguf --threads 2 [--peers-bin FOLDER] [--document 6000]

The same loop on every side: a question, a forced call, its result, an answer of at most --tokens
tokens; then a second question, call and answer. Sides: `lb.Agent` in this process; the same messages to
`llamabranch serve` and to ``llama-server -np 3`` over HTTP, three clients at a time; and re-prompting:
each turn as a whole prompt to a context that keeps no prefixes, one agent after the other.
Tokens read are the prompt tokens that a side has evaluated, by its own account. Distinct tokens are the
nodes of the trie of all of the agents' texts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, NamedTuple, cast

import llamabranch as lb
from llamabranch.context.prefix_cache import n_common
from llamabranch.model.functions import function_tool

from .llama_tools import ToolError
from .prompts import document
from .report import Settings, emit, number, parser, table, title
from .servers import Served, request, start_ours, start_theirs

SIDES = ("agent", "serve", "llama-server", "re-prompting")
QUESTIONS = ("Who pays?", "When does it end?", "What is the risk?")
SECOND = "And what follows from it?"
SYSTEM = "Answer from the document, in one sentence."
SECONDS = 0.3  # of each call


def find(word: Literal["pays", "ends", "risk", "notice"]) -> str:
    """Return the line of the document that holds a word."""
    time.sleep(SECONDS)
    return look(word)


WORD = {"type": "object", "properties": {"word": {"enum": ["pays", "ends", "risk", "notice"]}},
        "required": ["word"], "additionalProperties": False}  # fmt: skip
CALL = {"type": "object", "properties": {"name": {"const": "find"}, "arguments": WORD},
        "required": ["name", "arguments"], "additionalProperties": False}  # fmt: skip


def look(word: Literal["pays", "ends", "risk", "notice"]) -> str:
    """Return the line of the document that holds a word."""
    return f"Line 7: of what {word}, section 4 says more."


class Figures(NamedTuple):
    """What a side took: seconds, prompt tokens that were read, all of them, generated tokens."""

    seconds: float
    n_read: int
    n_prompt: int
    n_generated: int


def agent(ctx: lb.Context, text: str, n_tokens: int) -> tuple[Figures, int]:
    """Run three agents; return the figures, and the number of distinct tokens."""

    async def main() -> list[lb.agents.Report]:
        async with lb.AsyncEngine(ctx) as engine:
            one = lb.Agent(
                engine, [("system", SYSTEM), ("user", text)], [find], tool_choice="find",
                parallel_calls=False, max_turns=2, max_tokens=40 + n_tokens, temperature=0, seed=1,
            )  # fmt: skip
            first = await one.arun(list(QUESTIONS))
            more = await asyncio.gather(*(one.arun(SECOND, after=report) for report in first))
            return [*first, *more]

    begun = time.perf_counter()
    reports = asyncio.run(main())
    seconds = time.perf_counter() - begun
    stats = [report.stats for report in reports]
    n_read, n_generated = sum(s.evaluated for s in stats), sum(s.generated for s in stats)
    n_prompt = n_read + sum(s.cached for s in stats)
    distinct = nodes([report.tokens for report in reports])
    return Figures(seconds, n_read, n_prompt, n_generated), distinct


def nodes(texts: Sequence[Sequence[int]]) -> int:
    """Return how many nodes the trie of texts has."""
    seen, n = list[Sequence[int]](), 0
    for text in texts:
        n += len(text) - max((n_common(text, other) for other in seen), default=0)
        seen.append(text)
    return n


Ask = Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]


async def talk(question: str, text: str, n_tokens: int, ask: Ask) -> None:
    """Hold a conversation: ``ask`` takes the parameters of a chat and returns the answer's message.

    A call is JSON that a schema forces: llama-server does not force a call where, as here, the model's
    template has no tools of its own.
    """
    known = json.dumps(function_tool(find), ensure_ascii=False)
    messages: list[dict[str, object]] = [
        {"role": "system", "content": f"{SYSTEM}\n\nYou may call functions:\n{known}"},
        {"role": "user", "content": f"{text}\n\n{question}"},
    ]
    shared = {"messages": messages, "temperature": 0.0, "seed": 1}
    forced = {"type": "json_schema", "json_schema": {"name": "call", "schema": CALL}}
    for following in (SECOND, None):
        call = await ask({**shared, "response_format": forced, "max_tokens": 40})
        content = str(call.get("content"))
        try:
            word = json.loads(content)["arguments"]["word"]
        except (ValueError, KeyError, TypeError):
            raise ToolError(f"no call in {call!r:.300}") from None
        result = await asyncio.to_thread(find, word)
        messages.append({"role": "assistant", "content": content})
        messages.append({"role": "tool", "tool_call_id": "abcdefgh1", "content": result})
        answer = await ask({**shared, "max_tokens": n_tokens})
        messages.append({"role": "assistant", "content": answer.get("content") or ""})
        if following is not None:
            messages.append({"role": "user", "content": following})


async def over_http(side: Served, text: str, n_tokens: int) -> Figures:
    """Hold the three conversations with a server, at the same time."""
    read = prompts = generated = 0

    async def ask(body: Mapping[str, object]) -> Mapping[str, object]:
        nonlocal read, prompts, generated
        status, data = await request(side.port, "POST", "/v1/chat/completions", body)
        found = json.loads(data)
        if status != 200:
            raise ToolError(f"the server refuses: {data[:300]!r}")
        used = found["usage"]
        cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        read += used["prompt_tokens"] - cached
        prompts += used["prompt_tokens"]
        generated += used["completion_tokens"]
        message: dict[str, object] = found["choices"][0]["message"]
        return message

    begun = time.perf_counter()
    await asyncio.gather(*(talk(question, text, n_tokens, ask) for question in QUESTIONS))
    return Figures(time.perf_counter() - begun, read, prompts, generated)


async def reprompting(ctx: lb.Context, text: str, n_tokens: int) -> Figures:
    """Hold the conversations one after the other, each turn as a whole prompt."""
    n_prompt = n_generated = 0

    async def ask(body: Mapping[str, object]) -> Mapping[str, object]:
        nonlocal n_prompt, n_generated
        given = {**body}
        if given.pop("response_format", None):
            given["grammar"] = lb.Grammar.from_json_schema(json.dumps(CALL))
        result = ctx.chat(**given)  # type: ignore[call-overload]
        n_prompt += result.num_prompt_tokens
        n_generated += len(result.tokens)
        return cast("dict[str, object]", result.message)

    begun = time.perf_counter()
    for question in QUESTIONS:
        await talk(question, text, n_tokens, ask)
    return Figures(time.perf_counter() - begun, n_prompt, n_prompt, n_generated)


def main() -> None:
    """Measure all sides, one after the other."""
    described = parser("agents", runs=1, tokens=32)
    described.add_argument("--document", type=int, default=6000, help="tokens of the document")
    described.add_argument("--only", nargs="+", choices=SIDES, default=[*SIDES])
    args = described.parse_args()
    settings = Settings.of(args)
    n_document = 300 if settings.quick else args.document
    cells = n_document + 1500
    found: dict[str, list[Figures]] = {}
    distinct = 0
    with lb.Model(lb.hub.resolve(settings.target)) as model:
        text, path = document(model, n_document), Path(model.path)

        def note(name: str, figures: Figures) -> None:
            found.setdefault(name, []).append(figures)
            print(f"{name}: {figures.seconds:.1f} s", file=sys.stderr)

        for _ in range(settings.runs):
            if "agent" in args.only:
                with lb.Context(
                    model, n_ctx=cells + 1500, n_seq_max=8, n_threads=settings.threads
                ) as ctx:
                    figures, distinct = agent(ctx, text, settings.tokens)
                    note("agent", figures)
            for name, start, options in (
                ("serve", start_ours, ("-c", cells + 1500)),  # without -np they share one cache
                ("llama-server", start_theirs, ("-np", 3, "-c", 3 * cells)),
            ):
                if name not in args.only:
                    continue
                try:
                    with closing(start(settings, path, *options)) as side:
                        figures = asyncio.run(over_http(side, text, settings.tokens))
                        note(name, figures)
                except ToolError as error:
                    print(f"without {name}: {error}", file=sys.stderr)
            if "re-prompting" in args.only:
                with lb.Context(
                    model, n_ctx=cells, n_seq_max=2, prefix_cache=False, n_threads=settings.threads
                ) as ctx:
                    figures = asyncio.run(reprompting(ctx, text, settings.tokens))
                    note("re-prompting", figures)
        rows = [
            [name, number(one.seconds, 1), str(one.n_read), str(one.n_prompt), str(one.n_generated)]
            for name, all_of in found.items()
            for one in all_of
        ]
        table(
            f"{title(model)}, {settings.threads} threads, document of {n_document} tokens",
            ("side", "seconds", "prompt tokens read", "of", "generated"), rows,
        )  # fmt: skip
        if "agent" in found:
            one = found["agent"][-1]
            print(
                f"read + generated, over distinct: {(one.n_read + one.n_generated) / distinct:.4f}"
            )
        results = {
            name: [figures._asdict() for figures in all_of] for name, all_of in found.items()
        }
        emit("agents", settings, {"target": model}, {**results, "distinct": distinct})


if __name__ == "__main__":
    main()
