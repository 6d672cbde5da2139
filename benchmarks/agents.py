"""Three agents on one document, two calls of 0.3 s each: tokens read and seconds.

    python -m benchmarks.agents --target MODEL.gguf --threads 2 [--peers FOLDER] [--document 6000]

The same loop on every side: a question, a forced call, its result, an answer of at most --tokens
tokens; then a second question, call and answer. Sides: `lb.Agent` in this process; the same messages to
`llamabranch serve` and to ``llama-server -np 3`` over HTTP, three clients at a time.
Tokens read are the prompt tokens that a side has evaluated, by its own account.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import llamabranch as lb
from llamabranch.model.functions import function_tool

from .prompts import document
from .report import Settings, emit, number, parser, table, title
from .servers import Served, ToolError, request, start_ours, start_theirs

SIDES = ("agent", "serve", "llama-server")
QUESTIONS = ("Who pays?", "When does it end?", "What is the risk?")
SECOND = "And what follows from it?"
SYSTEM = "Answer from the document, in one sentence."
SECONDS = 0.3  # of each call


def find(word: Literal["pays", "ends", "risk", "notice"]) -> str:
    """Return the line of the document that holds a word."""
    time.sleep(SECONDS)
    return f"Line 7: of what {word}, section 4 says more."


WORD = {"type": "object", "properties": {"word": {"enum": ["pays", "ends", "risk", "notice"]}},
        "required": ["word"], "additionalProperties": False}  # fmt: skip
CALL = {"type": "object", "properties": {"name": {"const": "find"}, "arguments": WORD},
        "required": ["name", "arguments"], "additionalProperties": False}  # fmt: skip


class Figures(NamedTuple):
    """What a side took: seconds, prompt tokens that were read, all of them, generated tokens."""

    seconds: float
    n_read: int
    n_prompt: int
    n_generated: int


def agent(ctx: lb.Context, text: str, n_tokens: int) -> Figures:
    """Run three agents."""

    async def main() -> list[lb.agents.Report]:
        async with lb.AsyncEngine(ctx) as engine:
            one = lb.Agent(
                engine, [("system", SYSTEM), ("user", text)], [find], tool_choice="find",
                parallel_tool_calls=False, max_turns=2, max_tokens=40 + n_tokens, temperature=0, seed=1,
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
    return Figures(seconds, n_read, n_prompt, n_generated)


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
        answer = json.loads(data)
        if status != 200:
            raise ToolError(f"the server refuses: {data[:300]!r}")
        used = answer["usage"]
        cached = (used.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        read += used["prompt_tokens"] - cached
        prompts += used["prompt_tokens"]
        generated += used["completion_tokens"]
        message: dict[str, object] = answer["choices"][0]["message"]
        return message

    begun = time.perf_counter()
    await asyncio.gather(*(talk(question, text, n_tokens, ask) for question in QUESTIONS))
    return Figures(time.perf_counter() - begun, read, prompts, generated)


def main() -> None:
    """Measure all sides, one after the other."""
    described = parser("agents", runs=1, tokens=32, target="smollm2-135m:Q8_0")
    described.add_argument("--document", type=int, default=6000, help="tokens of the document")
    described.add_argument("--only", nargs="+", choices=SIDES, default=[*SIDES])
    args = described.parse_args()
    settings = Settings.of(args)
    n_document = 300 if settings.quick else args.document
    cells = n_document + 1500
    figures: dict[str, list[Figures]] = {}
    with lb.Model(lb.hub.resolve(settings.target)) as model:
        text, path = document(model, n_document), Path(model.path)

        def in_process() -> Figures:
            n_ctx, n_threads = cells + 1500, settings.threads
            with lb.Context(model, n_ctx=n_ctx, n_seq_max=8, n_threads=n_threads) as ctx:
                return agent(ctx, text, settings.tokens)

        def served(start: Callable[..., Served], *options: object) -> Figures:
            with closing(start(settings, path, *options)) as side:
                return asyncio.run(over_http(side, text, settings.tokens))

        sides: dict[str, Callable[[], Figures]] = {
            "agent": in_process,
            "serve": partial(served, start_ours, "-c", cells + 1500),  # all share one cache
            "llama-server": partial(served, start_theirs, "-np", 3, "-c", 3 * cells),
        }
        for _ in range(settings.runs):
            for name in args.only:
                try:
                    figures.setdefault(name, []).append(sides[name]())
                    print(f"{name}: {figures[name][-1].seconds:.1f} s", file=sys.stderr)
                except ToolError as error:
                    print(f"without {name}: {error}", file=sys.stderr)
        rows = [
            [name, number(one.seconds, 1), str(one.n_read), str(one.n_prompt), str(one.n_generated)]
            for name, runs in figures.items()
            for one in runs
        ]
        table(
            f"{title(model)}, {settings.threads} threads, document of {n_document} tokens",
            ("side", "seconds", "prompt tokens read", "of", "generated"), rows,
        )  # fmt: skip
        results = {name: [one._asdict() for one in runs] for name, runs in figures.items()}
        emit("agents", settings, {"target": model}, results)


if __name__ == "__main__":
    main()
