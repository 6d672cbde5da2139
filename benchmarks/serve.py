"""The server compared with llama-server of the same source, each with ``-np 8`` and its other defaults.

    python -m benchmarks.serve --target MODEL.gguf --threads 2 [--only load chat] [--clients 1 8]
    python -m benchmarks.serve --target MODEL.gguf --threads 2 --only fanout --runs 1

load: 1, 4, 8 and 16 clients stream completions of fixed lengths. All clients run in one event loop and
  use plain sockets, the same ones for all sides.
chat: a chat of ten turns.
shared: 64 requests with the same system prompt.
json: JSON under a schema.
fanout: while a request with a prompt of 7,400 tokens runs, four requests that begin with this prompt join
  it (the case of llama.cpp's pull request 26204).

The sides are timed in turn, and ratios are taken within a run.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeVar

import llamabranch as lb

from .prompts import PEOPLE, PEOPLE_SCHEMA, PROMPTS, document
from .report import Settings, emit, parser, pm, table, title
from .servers import Answer, Served, ToolError, start_ours, start_theirs
from .timing import Spread

PARTS = ("load", "chat", "shared", "json", "fanout")
CLIENTS = (1, 4, 8, 16)
LENGTHS = (64, 128, 192, 256)  # tokens of a stream
OURS, THEIRS = "llamabranch serve", "llama-server"
SYSTEM = "You are a patient teller of tales who answers in one sentence. " * 12
TRUNK, TRUNK_TOKENS, BRANCHES, BRANCH_TOKENS = 7400, 200, 4, 32  # of the fan-out
_SLOTS = 8

T = TypeVar("T")
Ask = Callable[[Mapping[str, object]], Awaitable[Answer]]
Start = Callable[..., "Served"]
Part = Callable[[Settings, Ask, int], Coroutine[object, object, float]]


def main() -> None:
    """Measure all parts."""
    described = parser("the server", runs=5, tokens=256, target="smollm2-135m:Q8_0")
    described.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    described.add_argument("--clients", nargs="+", type=int, help="default: 1 4 8 16")
    args = described.parse_args()
    settings = Settings.of(args)
    results: dict[str, object] = {}
    with ExitStack() as stack, settings.context(settings.target) as probe:
        if probe.model.chat_template is None and {"chat", "shared", "json"} & set(args.only):
            raise SystemExit(f"{settings.target} has no chat template: use --only load fanout")
        starts: dict[str, Start] = {OURS: partial(start_ours, settings, probe.model.path)}
        if settings.peers:
            starts[THEIRS] = partial(start_theirs, settings, probe.model.path)
        sides: dict[str, Served] = {}
        for name, start in starts.items() if set(args.only) - {"fanout"} else ():
            try:
                sides[name] = start("-np", _SLOTS, "-c", _SLOTS * 1024)
                stack.callback(sides[name].close)
            except ToolError as error:
                print(f"without {name}: {error}", file=sys.stderr)
        caption = f"{title(probe.model)}, {settings.threads} threads, {_SLOTS} slots"
        clients = args.clients or CLIENTS[: 2 if settings.quick else None]
        parts: list[tuple[str, str, Part]] = [
            ("load", f"{n} clients, tokens", partial(_load, n=n)) for n in clients
        ]
        parts += [
            ("chat", "chat of ten turns, turns", _chat),
            ("shared", "64 requests with one system prompt, answers", _shared),
            ("json", "JSON under a schema, tokens", _json),
        ]
        for part, name, work in parts:
            if part in args.only:
                results[name] = _compare(settings, sides, name, work, caption)
        if "fanout" in args.only:
            caption = f"{title(probe.model)}, {settings.threads} threads"
            results["fanout"] = _fan_outs(settings, starts, probe, caption)
        emit("serve", settings, {"target": probe.model}, results)


def _body(i: int, tokens: int, **more: object) -> dict[str, object]:
    prompt = PROMPTS[i % len(PROMPTS)]
    return {
        "prompt": f"{i}. {prompt}", "max_tokens": tokens, "temperature": 0.8, "seed": i,
        "ignore_eos": True, "stream": True, **more,
    }  # fmt: skip


async def _load(settings: Settings, ask: Ask, run: int, n: int) -> float:
    """Let ``n`` clients stream two texts each; return tokens a second."""

    async def client(i: int) -> int:
        n_tokens = 0
        for k in range(2):
            tokens = LENGTHS[(i + k) % len(LENGTHS)] * settings.tokens // max(LENGTHS)
            answer = await ask(_body(100 * run + 2 * i + k, max(2, tokens)))
            n_tokens += answer.n_tokens
        return n_tokens

    start = perf_counter()
    return sum(await asyncio.gather(*map(client, range(n)))) / (perf_counter() - start)


def _over(rates: Mapping[str, Sequence[float]]) -> tuple[str, dict[str, Spread]]:
    """Return each side's speed over that of llama-server (without it, of the last side), run by run."""
    other = THEIRS if THEIRS in rates else list(rates)[-1]
    return f"over {other}", {
        name: Spread.of([a / b for a, b in zip(of_side, rates[other], strict=True)])
        for name, of_side in rates.items()
    }


def _compare(
    settings: Settings,
    sides: Mapping[str, Served],
    name: str,
    work: Part,
    caption: str,
) -> dict[str, object]:
    """Time the same work on each side. The figures are rates: higher is better."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for run in range(settings.runs):
        for side, served in sides.items():
            rates[side].append(_alone(side, sides, work(settings, served.ask, run)))
    rows, results = [], {}
    over, ratios = _over(rates)
    for side, ratio in ratios.items():
        rate = Spread.of(rates[side])
        rows.append((side, pm(rate, 2), pm(ratio)))
        results[side] = {"rate": rate.as_dict(), over: ratio.as_dict()}
    table(f"{name} a second; {caption}", ("", "a second", over), rows)
    return dict(results)


def _alone(name: str, sides: Mapping[str, Served], work: Coroutine[object, object, T]) -> T:
    """Run the work of a side while the others are stopped: an idle server also uses the processor."""
    others = [side for other, side in sides.items() if other != name]
    for side in others:
        side.send_signal(signal.SIGSTOP)
    try:
        return asyncio.run(work)
    finally:
        for side in others:
            side.send_signal(signal.SIGCONT)


async def _chat(settings: Settings, ask: Ask, run: int) -> float:
    """Hold a chat; return turns a second."""
    messages = [{"role": "system", "content": f"{run}. {SYSTEM}"}]
    turns = 2 if settings.quick else 10
    start = perf_counter()
    for turn in range(turns):
        messages.append({"role": "user", "content": PROMPTS[turn]})
        answer = await ask({
            "messages": messages, "max_tokens": min(32, settings.tokens), "temperature": 0.0,
            "seed": 1, "ignore_eos": True,
        })  # fmt: skip
        messages.append({"role": "assistant", "content": answer.text})
    return turns / (perf_counter() - start)


async def _shared(settings: Settings, ask: Ask, run: int) -> float:
    """Ask 64 questions, 16 at a time, after one system prompt; return answers a second."""
    n = 8 if settings.quick else 64
    gate = asyncio.Semaphore(16)

    async def ask_one(i: int) -> None:
        async with gate:
            messages = [
                {"role": "system", "content": f"{run}. {SYSTEM}"},
                {"role": "user", "content": f"{i}. {PROMPTS[i % len(PROMPTS)]}"},
            ]
            await ask({
                "messages": messages, "max_tokens": min(16, settings.tokens), "seed": i,
                "temperature": 0.8, "ignore_eos": True,
            })  # fmt: skip

    start = perf_counter()
    await asyncio.gather(*map(ask_one, range(n)))
    return n / (perf_counter() - start)


async def _json(settings: Settings, ask: Ask, run: int) -> float:
    """Extract JSON from five texts, one after another; return tokens a second."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PEOPLE_SCHEMA}}
    n_tokens, start = 0, perf_counter()
    for text in PEOPLE[: 1 if settings.quick else None]:
        answer = await ask({
            "messages": [{"role": "user", "content": f"{run}. {text}\nGive it as JSON."}],
            "response_format": schema, "max_tokens": 160, "temperature": 0.0, "seed": 1,
        })  # fmt: skip
        n_tokens += answer.n_tokens
    return n_tokens / (perf_counter() - start)


# -- requests that join a running one ------------------------------------------------------------------


class _FanOut(NamedTuple):
    """The result of a fan-out.

    Attributes:
        joined_s: seconds from joining to the last token of the requests that join.
        n_read: prompt tokens that were read.
    """

    joined_s: float
    n_read: int


def _fan_outs(
    settings: Settings, starts: Mapping[str, Start], ctx: lb.Context, caption: str
) -> dict[str, object]:
    """Time the fan-out on each side. The server has just started, so nothing is cached."""
    n_trunk = TRUNK // (10 if settings.quick else 1)
    trunk = ctx.tokenize(document(ctx.model, n_trunk))[:n_trunk]
    cells = 8192  # as many as the model was trained for
    n_cells = {OURS: cells, THEIRS: (BRANCHES + 1) * cells}  # llama-server gives each slot a part
    sides = {
        name: partial(start, "-np", BRANCHES + 1, "-c", n_cells[name])
        for name, start in starts.items()
    }
    fan_outs: dict[str, list[_FanOut]] = {name: [] for name in sides}
    for _ in range(settings.runs):
        for name, open_server in sides.items():
            with closing(open_server()) as server:
                fan_outs[name].append(asyncio.run(_fan_out(server, trunk, ctx)))
            print(f"{name}: {fan_outs[name][-1].joined_s:.1f} s", file=sys.stderr, flush=True)
    over, ratios = _over(
        {name: [1 / x.joined_s for x in of_side] for name, of_side in fan_outs.items()}
    )
    rows, results = [], {}
    for name, of_side in fan_outs.items():
        joined, n_read = Spread.of([x.joined_s for x in of_side]), [x.n_read for x in of_side]
        rows.append((name, pm(joined, 1), pm(ratios[name]), f"{max(n_read):,}"))
        results[name] = {
            "joined_s": joined.as_dict(), over: ratios[name].as_dict(), "prompt_tokens_read": n_read,
        }  # fmt: skip
    table(
        f"{BRANCHES} requests of {BRANCH_TOKENS} tokens that join one of {len(trunk):,} + {TRUNK_TOKENS}"
        f" tokens and begin with its prompt; {caption}",
        ("", "those that join end after, s", over, "prompt tokens read"), rows,
    )  # fmt: skip
    return dict(results)


async def _fan_out(side: Served, trunk: Sequence[int], ctx: lb.Context) -> _FanOut:
    """Begin a request; at its first token, other requests that begin with its prompt join it."""
    begun, usage = asyncio.Event(), {"stream_options": {"include_usage": True}}

    async def branch(i: int) -> Answer:
        tail = ctx.tokenize(f"\n\n{PROMPTS[i]}", add_special=False)
        return await side.ask(_body(i, BRANCH_TOKENS, prompt=[*trunk, *tail], **usage))

    await side.ask(_body(99, 8))  # threads, caches
    first = _body(BRANCHES, TRUNK_TOKENS, prompt=trunk, **usage)
    running = asyncio.ensure_future(side.ask(first, begun))
    await begun.wait()
    joined = perf_counter()
    answers = await asyncio.gather(*map(branch, range(BRANCHES)))
    joined_s = perf_counter() - joined
    answers.append(await running)
    return _FanOut(joined_s, sum(answer.n_read for answer in answers))


if __name__ == "__main__":
    main()
