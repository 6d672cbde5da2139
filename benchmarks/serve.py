"""1 to 16 clients of the server, and of llama-server of the same source, each with ``-np 8``.

    python -m benchmarks.serve --target MODEL.gguf --threads 2 [--peers FOLDER] [--clients 1 8]

The clients stream completions of fixed lengths. They run in one event loop and use plain sockets, the
same ones for all sides. The sides are timed in turn, and ratios are taken within a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import perf_counter

from .prompts import PROMPTS
from .report import Settings, emit, parser, pm, table, title
from .servers import OURS, THEIRS, Served, alone, start_ours, start_theirs
from .timing import Spread

CLIENTS = (1, 4, 8, 16)
LENGTHS = (64, 128, 192, 256)  # tokens of a stream
_SLOTS = 8


def main() -> None:
    """Measure each number of clients."""
    described = parser("the server", runs=5, tokens=256, target="smollm2-135m:Q8_0")
    described.add_argument("--clients", nargs="+", type=int, help="default: 1 4 8 16")
    args = described.parse_args()
    settings = Settings.of(args)
    with ExitStack() as stack, settings.context(settings.target) as probe:
        starts: dict[str, Callable[..., Served]] = {OURS: start_ours}
        if settings.peers:
            starts[THEIRS] = start_theirs
        sides: dict[str, Served] = {}
        for name, start in starts.items():
            options = "-np", _SLOTS, "-c", _SLOTS * 1024
            sides[name] = start(settings, probe.model.path, *options)
            stack.callback(sides[name].close)
        caption = f"{title(probe.model)}, {settings.threads} threads, {_SLOTS} slots"
        results = {
            f"{n} clients": _compare(settings, sides, n, caption)
            for n in args.clients or CLIENTS[: 2 if settings.quick else None]
        }
        emit("serve", settings, {"target": probe.model}, results)


async def _rate(settings: Settings, side: Served, run: int, n: int) -> float:
    """Let ``n`` clients stream two texts each; return tokens a second."""

    async def client(i: int) -> int:
        n_tokens = 0
        for k in (2 * i, 2 * i + 1):
            tokens = max(2, LENGTHS[(i + k) % len(LENGTHS)] * settings.tokens // max(LENGTHS))
            number = 100 * run + k
            await side.stream({
                "prompt": f"{number}. {PROMPTS[number % len(PROMPTS)]}", "max_tokens": tokens,
                "temperature": 0.8, "seed": number, "ignore_eos": True,
            })  # fmt: skip
            n_tokens += tokens
        return n_tokens

    start = perf_counter()
    return sum(await asyncio.gather(*map(client, range(n)))) / (perf_counter() - start)


def _compare(
    settings: Settings, sides: Mapping[str, Served], n: int, caption: str
) -> dict[str, object]:
    """Time ``n`` clients on each side. Ratios are those to the last side, run by run."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for run in range(settings.runs):
        for side, served in sides.items():
            with alone(side, sides):
                rates[side].append(asyncio.run(_rate(settings, served, run, n)))
    last = list(sides)[-1]
    rows, results = [], dict[str, object]()
    for side in sides:
        rate = Spread.of(rates[side])
        ratio = Spread.of([a / b for a, b in zip(rates[side], rates[last], strict=True)])
        rows.append((side, pm(rate, 2), pm(ratio)))
        results[side] = {"rate": rate.as_dict(), f"over {last}": ratio.as_dict()}
    table(f"{n} clients; {caption}", ("", "tokens a second", f"over {last}"), rows)
    return results


if __name__ == "__main__":
    main()
