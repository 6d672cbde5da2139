"""The cost of decodes of n tokens, and what it decides: draft lengths, and how many texts run at a time.

    python -m benchmarks.edges --target MODEL.gguf [--only curve plain opening tasks engine]

curve: v(n) for every n up to 33.
plain: the speed of ``Branch.generate`` over that of a bare loop of ``llama_decode`` with the same tokens.
opening: how much longer a context takes to open when its exactness has to be measured.
tasks: chat prompts at temperature 0 without a draft model. Copied drafts, of fixed lengths and "auto",
  are compared with plain decoding. Each generation has a new context, so "auto" begins as in a new
  program.
engine: 8 and 16 requests. An engine with its defaults, and one with a single cache, are compared with
  ``llama-server -np 8`` and with a bare loop of eight rows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import llamabranch as lb
from llamabranch.bench.timing import Spread

from . import llama_tools
from .clocks import verify_times
from .llama_tools import LlamaTools, ToolError, build_server
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, pm, table, title
from .serve import Served

PARTS = ("curve", "plain", "opening", "tasks", "engine")
FIXED = (3, 4, 7, 8, 11, 15)
REQUESTS = (8, 16)
DEFAULTS, ONE_CACHE, SERVER = "Engine(model, parallel=8)", "one cache", "llama-server -np 8"
BARE = "llama-batched-bench"
_PORT = 8917
_FUNCTION = '''def summarize(orders, discount, tax):
    """Return the sum of the orders, by customer and in all."""
    total = 0.0
    count = 0
    by_customer = {}
    for order in orders:
        price = order["price"] * order["quantity"]
        if order["is_member"]:
            price = price * (1.0 - discount)
        if price < 0:
            raise ValueError("negative price")
        total = total + price
        count = count + 1
        name = order["customer"]
        if name not in by_customer:
            by_customer[name] = 0.0
        by_customer[name] = by_customer[name] + price
    total = total * (1.0 + tax)
    average = total / count if count else 0.0
    print("total:", total)
    print("average:", average)
    for name in sorted(by_customer):
        print(name, by_customer[name])
    return total, average, by_customer
'''
_FRUIT = "apple pear plum cherry peach melon grape lemon orange banana fig date mango kiwi lime"
TASKS = {
    "edit": "Rewrite this function with the variable `total` renamed to `amount`. Answer with the code "
    f"only.\n\n```python\n{_FUNCTION}```",
    "list": "Write each word of this list in a table with two columns, number and word:\n"
    + "\n".join(f"{i}. {word}" for i, word in enumerate(_FRUIT.split(), 1)),
    "extract": "Extract name, age and city of each person as a JSON list: Anna is 31 and lives in Oslo. "
    "Ben is 42 and lives in Rome. Carla is 27 and lives in Paris. Dan is 55 and lives in Berlin.",
    "quote": "Summarize this text in three sentences, with quotes from it: The committee met on Monday "
    "to discuss the new bridge. Engineers said that the old bridge could not carry heavy trucks any "
    "longer, and that the repair would cost more than a new one. The mayor asked whether the new bridge "
    "could be built beside the old one. The engineers agreed, but said that it would take two years.",
    "free": "Write a short story about a fox who learns to swim.",
}


def main() -> None:
    """Measure the chosen parts."""
    described = parser("edges of batches", runs=5, prompts=1, tokens=256)
    described.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    described.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    args = described.parse_args()
    settings = Settings.of(args, tokens=8)
    with lb.Model(lb.hub.resolve(settings.target)) as model:
        caption = f"{title(model)}, {settings.threads} threads"
        results: dict[str, object] = {}
        for name, part in zip(PARTS, (_curve, _plain, _opening, _tasks, _engine), strict=True):
            if name in args.only:
                results[name] = part(settings, model, caption, args)
        emit("edges", settings, {"target": model}, results)


def _open(
    settings: Settings, model: lb.Model, n_seq_max: int = 1, *, kv_unified: bool = True
) -> lb.Context:
    n_ctx = 1024 + n_seq_max * (settings.tokens + 64)
    return lb.Context(
        model,
        n_ctx=n_ctx,
        n_seq_max=n_seq_max,
        n_threads=settings.threads,
        kv_unified=kv_unified,
    )


def _curve(
    settings: Settings, model: lb.Model, caption: str, args: argparse.Namespace
) -> dict[str, object]:
    sizes = range(1, 10 if settings.quick else 34)
    with _open(settings, model) as ctx:
        times = verify_times(ctx, sizes, n_prefix=128, repeats=2 * settings.runs)
    spreads = {n: Spread.of([1e3 * seconds for seconds in samples]) for n, samples in times.items()}
    single_ms = spreads[1].median
    rows = [
        (str(n), pm(spread), number(spread.median / single_ms)) for n, spread in spreads.items()
    ]
    table(f"One decode of n tokens, {caption}", ("n", "ms", "v(n)"), rows)
    return {str(n): spread.as_dict() for n, spread in spreads.items()}


def _plain(
    settings: Settings, model: lb.Model, caption: str, args: argparse.Namespace
) -> dict[str, object]:
    ratios: dict[float, list[float]] = {0.0: [], 0.8: []}
    for _ in range(settings.runs):
        for temperature, samples in ratios.items():
            with _open(settings, model) as ctx:
                no_end = dict.fromkeys(model.eog_tokens, float("-inf"))
                sampling = lb.SamplingParams(
                    temperature=temperature, seed=1, logit_bias=no_end, logprobs=False
                )
                with lb.Branch.start(ctx, PROMPTS[0], sampling=sampling) as branch:
                    n, start = branch.position, perf_counter()
                    tokens = [token.token for token in branch.generate(settings.tokens)]
                    ours = perf_counter() - start
            with _open(settings, model) as ctx:
                prompt = model.tokenize(PROMPTS[0])
                samples.append(_bare_s(ctx, prompt[:n], tokens) / ours)
    spreads = {
        f"T = {temperature:g}": Spread.of(samples) for temperature, samples in ratios.items()
    }
    rows = [(name, pm(spread)) for name, spread in spreads.items()]
    table(f"Plain over a bare decode loop, {caption}", ("", "speed"), rows)
    return {name: spread.as_dict() for name, spread in spreads.items()}


def _bare_s(ctx: lb.Context, prompt: list[int], tokens: list[int]) -> float:
    """Return the seconds that ``llama_decode`` takes for ``tokens``, one by one after a prompt."""
    ctx.decode(prompt, 0)
    handle, start = ctx.decoder.handle, perf_counter()
    for position, token in enumerate(tokens, len(prompt)):
        handle.tokens[0], handle.positions[0], handle.seqs[0] = token, position, 0
        handle.wants_logits[0] = 1
        if handle.decode(1):
            raise SystemExit("llama_decode failed")
    return perf_counter() - start


def _opening(
    settings: Settings, model: lb.Model, caption: str, args: argparse.Namespace
) -> dict[str, object]:
    kept = os.environ["LLAMABRANCH_PROFILE"]
    os.environ["LLAMABRANCH_PROFILE"] = "0"
    try:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(settings.runs):
            for measures, samples in seconds.items():
                with lb.Model(model.path) as fresh:  # measurements are stored with the model
                    lb.Context(fresh, n_ctx=64, n_threads=1, batch_invariant=False).close()
                    start = perf_counter()
                    exact: bool | str = "auto" if measures else False
                    lb.Context(
                        fresh, n_ctx=1024, n_threads=settings.threads, batch_invariant=exact
                    ).close()
                    samples.append(perf_counter() - start)
    finally:
        os.environ["LLAMABRANCH_PROFILE"] = kept
    added = Spread.of([b - a for a, b in zip(*seconds.values(), strict=True)])
    table(f"Opening a context, {caption}", ("", "s"), [("measuring exactness adds", pm(added))])
    return {"exactness_s": added.as_dict()}


def _tasks(
    settings: Settings, model: lb.Model, caption: str, args: argparse.Namespace
) -> dict[str, object]:
    lengths: tuple[int | str, ...] = (*(FIXED[:1] if settings.quick else FIXED), "auto")
    results: dict[str, object] = {}
    rows = []
    for task in args.tasks:
        prompt = model.prompt_tokens([{"role": "user", "content": TASKS[task]}])
        speeds: dict[int | str, list[float]] = {k: [] for k in lengths}
        for _ in range(settings.runs):
            plain_s, text = _generate(settings, model, prompt, None)
            for k, samples in speeds.items():
                seconds, drafted = _generate(settings, model, prompt, k)
                samples.append(plain_s / seconds * len(drafted) / len(text))
        spreads = {str(k): Spread.of(samples) for k, samples in speeds.items()}
        best = max(FIXED[: len(lengths) - 1], key=lambda k: spreads[str(k)].median)
        auto, fixed = spreads["auto"], spreads[str(best)]
        share = auto.median / max(1.0, fixed.median)
        first = number(speeds["auto"][0])
        rows.append((task, pm(auto), first, f"{best}: {pm(fixed)}", number(share)))
        results[task] = {k: spread.as_dict() for k, spread in spreads.items()}
    columns = (
        "",
        "auto over plain",
        "auto, first run",
        "best fixed length",
        "auto over the better of fixed and plain",
    )
    table(f"Tasks, at most {settings.tokens} tokens, {caption}", columns, rows)
    return results


def _generate(
    settings: Settings, model: lb.Model, prompt: list[int], k: int | str | None
) -> tuple[float, list[int]]:
    with _open(settings, model) as ctx:
        drafter = None if k is None else lb.SuffixDrafter(shared_tokens=0)
        config = lb.SpeculativeConfig() if k is None else lb.SpeculativeConfig(draft_k=k)
        greedy = lb.SamplingParams(temperature=0.0)
        generation = lb.Speculator(ctx, drafter, config).generate(
            prompt, max_tokens=settings.tokens, sampling=greedy
        )
        generation.finish()
        return generation.elapsed_s, generation.tokens


def _engine(
    settings: Settings, model: lb.Model, caption: str, args: argparse.Namespace
) -> dict[str, object]:
    rates: dict[tuple[int, str], list[float]] = {}
    with ExitStack() as stack:
        server = _server(settings, model) if settings.peers else None
        if server is not None:
            stack.callback(server.close)
        for run in range(settings.runs):
            for n in REQUESTS:
                if server is not None:
                    samples = rates.setdefault((n, SERVER), [])
                    samples.append(asyncio.run(_of_server(server, n, settings.tokens, run)))
                with lb.Engine(model, parallel=8, max_tokens=settings.tokens) as engine:
                    rates.setdefault((n, DEFAULTS), []).append(_of_engine(engine, n, run))
                with _open(settings, model, 8) as ctx:
                    engine = lb.Engine(ctx, max_tokens=settings.tokens)
                    rates.setdefault((n, ONE_CACHE), []).append(_of_engine(engine, n, run))
            for kv_type in ("f16", "bf16") if settings.peers else ():
                samples = rates.setdefault((8, f"{BARE}, {kv_type}"), [])
                samples.append(_of_bare(settings, model, kv_type))
    rows, results = [], {}
    for (n, name), samples in rates.items():
        theirs = rates.get((n, SERVER), samples)
        ratio = Spread.of([ours / other for ours, other in zip(samples, theirs, strict=True)])
        rows.append((f"{n} requests, {name}", pm(Spread.of(samples), 1), pm(ratio)))
        results[f"{n}, {name}"] = {"rate": Spread.of(samples).as_dict(), "over": ratio.as_dict()}
    columns = ("", "tokens/s", "over llama-server")
    table(f"Texts of {settings.tokens} tokens, prompts included, {caption}", columns, rows)
    return dict(results)


def _of_bare(settings: Settings, model: lb.Model, kv_type: str) -> float:
    """Return the tokens per second of a bare loop over eight rows, each in its own part of the cache."""
    bin_ = settings.peers_bin or llama_tools.build(settings.cache)
    tools = LlamaTools(bin_, threads=settings.threads, n_ctx=settings.n_ctx)
    n_prompt = round(sum(len(model.tokenize(_prompt(i, 0))) for i in range(8)) / 8)
    timings = tools.batched(
        Path(model.path), [8], n_prompt=n_prompt, n=settings.tokens, unified=False,
        kv_type=kv_type, with_prompts=True,
    )  # fmt: skip
    return timings[8].rate


def _server(settings: Settings, model: lb.Model) -> Served | None:
    n_ctx = 8 * (settings.tokens + 192)
    try:
        program = build_server(settings.cache, settings.peers_bin)
        command = [
            program, "-m", Path(model.path), "--port", _PORT, "-t", settings.threads,
            "-tb", settings.threads, "-np", 8, "-c", n_ctx, "--no-ui", "-cram", 0, "--slots",
        ]  # fmt: skip
        return Served(command, _PORT)
    except ToolError as error:
        print(f"without llama-server: {error}", file=sys.stderr)
        return None


def _prompt(i: int, run: int) -> str:
    return f"{100 * run + i}. {PROMPTS[i % len(PROMPTS)]}"


async def _of_server(server: Served, n: int, tokens: int, run: int) -> float:
    bodies = [
        {"prompt": _prompt(i, run), "max_tokens": tokens, "temperature": 0.8, "seed": i,
         "ignore_eos": True, "stream": True}
        for i in range(n)
    ]  # fmt: skip
    start = perf_counter()
    await asyncio.gather(*map(server.ask, bodies))
    return n * tokens / (perf_counter() - start)


def _of_engine(engine: lb.Engine, n: int, run: int) -> float:
    no_end = dict.fromkeys(engine.target.model.eog_tokens, float("-inf"))
    requests = [
        lb.Request(
            _prompt(i, run),
            sampling=lb.SamplingParams(temperature=0.8, seed=i, logit_bias=no_end, logprobs=False),
        )
        for i in range(n)
    ]
    start = perf_counter()
    results = engine.generate(requests)
    seconds = perf_counter() - start
    return sum(len(result.tokens) for result in results) / seconds


if __name__ == "__main__":
    main()
