"""An engine that runs for a long time: prefix cache, chat, compaction, event loop, long queues.

python -m benchmarks.resident
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import llamabranch as lb
from llamabranch.bench.timing import Maker, Spread, Timing, Work
from llamabranch.context.compaction import rewrite_in_order
from llamabranch.engine import EngineStats
from llamabranch.run.job import Submission
from llamabranch.run.loop import Loop
from llamabranch.run.scheduler import Scheduler

from . import llama_tools
from .clocks import interleave
from .llama_python import LlamaPython
from .llama_server import LlamaServer
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, pm, series_json, table, title

GREEDY = lb.SamplingParams(temperature=0.0)
CACHED, WITHOUT, LLAMA = "Engine, prefix cache", "Engine", "llama_cpp.Llama"
SERVER = "llama-server"
PARTS = ("loads", "prefix_cache_us", "compaction_ms", "async", "admission_us")
ENGINE, ASYNC = "Engine", "AsyncEngine"

Load = list[list[int]]  # prompts that come one after another


def main() -> None:
    """Measure everything on one model."""
    described = parser("the resident engine", runs=5, prompts=1, tokens=32)
    described.add_argument("--only", nargs="+", choices=PARTS, help="default: all parts")
    args = described.parse_args()
    settings = Settings.of(args)
    n_ctx = 1024 if settings.quick else 8192
    with (
        lb.load(
            settings.target, n_ctx=n_ctx, n_seq_max=17, n_threads=settings.threads,
            prefix_cache=True,
        ) as cached,
        settings.context(settings.target, n_ctx=n_ctx, n_seq_max=17) as plain,
        lb.load(
            settings.target, n_ctx=n_ctx, n_seq_max=17, n_threads=settings.threads,
            prefix_cache=True, cache_ram=1 << 30,
        ) as saving,
    ):  # fmt: skip
        parts: dict[str, Callable[[], object]] = {
            "loads": lambda: _loads(settings, cached, plain),
            "prefix_cache_us": lambda: _hits(settings, cached, saving),
            "compaction_ms": lambda: _compaction(settings, plain),
            "async": lambda: _async(settings, plain),
            "admission_us": lambda: _admission(settings, plain),
        }
        results = {name: parts[name]() for name in args.only or PARTS}
        emit("resident", settings, {"target": cached.model}, results)


# -- loads -----------------------------------------------------------------------------------------


def _loads(settings: Settings, cached: lb.Context, plain: lb.Context) -> dict[str, object]:
    """Measure requests that share a long prefix, and a chat: evaluated tokens and times."""
    n_shared, n_requests, n_turns = (100, 4, 3) if settings.quick else (960, 64, 10)  # of 1,024
    words = cached.tokenize(" ".join(PROMPTS) * (1 + n_shared // 40))
    shared = words[:n_shared]
    requests = [[*shared, *words[i : i + 12]] for i in range(n_requests)]
    turns = [words[: 40 + 40 * (i + 1)] for i in range(n_turns)]
    results: dict[str, object] = {}
    rows = []
    for name, load in (("shared prefix", requests), ("chat", turns)):
        evaluated: dict[str, int] = {}
        first: dict[str, list[float]] = {}
        makers: dict[str, Maker] = {
            CACHED: _served(cached, load, settings.tokens, CACHED, evaluated, first),
            WITHOUT: _served(plain, load, settings.tokens, WITHOUT, evaluated, first),
        }
        peer = server = None
        if settings.peers:
            peer = LlamaPython(cached.model.path, n_ctx=cached.n_ctx, threads=settings.threads)
            makers[LLAMA] = _by_llama(peer, load, settings.tokens)
            program = llama_tools.build_server(settings.cache, settings.peers_bin)
            server = LlamaServer(
                program, cached.model.path, threads=settings.threads, n_ctx=cached.n_ctx
            )
            makers[SERVER] = _by_server(server, load, settings.tokens, evaluated, first)
        series = interleave(makers, n_runs=settings.runs, n_items=1)
        if peer is not None:
            peer.close()
        if server is not None:
            server.close()
        distinct = _n_distinct(load)
        results[name] = {
            "distinct_tokens": distinct,
            "evaluated_tokens": evaluated,
            "first_token_ms": {k: 1e3 * statistics.median(v) for k, v in first.items()},
            "compared": {k: series_json(s, series[WITHOUT]) for k, s in series.items()},
        }
        for who, one_series in series.items():
            ratio = one_series.ratio(series[WITHOUT])
            ms = number(1e3 * statistics.median(first[who]), 1) if who in first else "-"
            n_read = str(evaluated[who]) if who in evaluated else "-"
            rows.append((name, who, str(distinct), n_read, ms, pm(one_series.rate, 0), pm(ratio)))
    columns = (
        "load", "", "distinct tokens", "evaluated", "first token, ms", "tokens/s", f"over {WITHOUT}"
    )  # fmt: skip
    caption = f"Requests one after another, {title(cached.model)}, {settings.threads} threads"
    table(caption, columns, rows)
    return results


def _n_distinct(load: Load) -> int:
    """Return the least number of tokens that must be read: the size of a trie of the prompts."""
    return len({tuple(prompt[: i + 1]) for prompt in load for i in range(len(prompt))})


def _served(
    ctx: lb.Context,
    load: Load,
    n_tokens: int,
    name: str,
    evaluated: dict[str, int],
    first: dict[str, list[float]],
) -> Maker:
    def make(run: int) -> Work:
        def work(item: int) -> Timing:
            if ctx.prefix_cache is not None:
                ctx.prefix_cache.clear()
            engine = lb.Engine(ctx, sampling=GREEDY, max_tokens=n_tokens)
            start, n = perf_counter(), 0
            for prompt in load:
                (result,) = engine.generate([lb.Request(prompt)])
                n += len(result.tokens)
                first.setdefault(name, []).append(result.first_token_s or 0.0)
            evaluated[name] = engine.stats.prompt_tokens
            return Timing(n, perf_counter() - start)

        return work

    return make


def _by_llama(peer: LlamaPython, load: Load, n_tokens: int) -> Maker:
    def work(item: int) -> Timing:
        start, n = perf_counter(), 0
        for prompt in load:
            n += (
                1 + peer.generate(prompt, n_tokens, 0.0, 1).n_tokens
            )  # the first is not timed there
        return Timing(n, perf_counter() - start)

    return lambda run: work


def _by_server(
    server: LlamaServer,
    load: Load,
    n_tokens: int,
    evaluated: dict[str, int],
    first: dict[str, list[float]],
) -> Maker:
    def work(item: int) -> Timing:
        server.generate([3, 5, 7], 1)  # so that its slot has cached another text
        start, n, n_read = perf_counter(), 0, 0
        for prompt in load:
            answer = server.generate(prompt, n_tokens)
            n += answer.n_tokens
            n_read += answer.n_evaluated
            first.setdefault(SERVER, []).append(answer.first_s)
        evaluated[SERVER] = n_read
        return Timing(n, perf_counter() - start)

    return lambda run: work


# -- parts -----------------------------------------------------------------------------------------


def _hits(
    settings: Settings, cached: lb.Context, saving: lb.Context
) -> dict[str, dict[str, float]]:
    """Measure a hit and an eviction with growing numbers of cached texts.

    llama.cpp has at most 256 sequences, so a thousand texts need a second tier in host memory. There
    an eviction copies the K/V of the text.
    """
    sizes = [(1, cached), (10, cached), *([] if settings.quick else [(100, cached), (230, cached)])]
    sizes.append((20 if settings.quick else 1000, saving))
    medians: dict[str, dict[str, float]] = {}
    rows = []
    for n, ctx in sizes:
        prefixes = ctx.prefix_cache
        if prefixes is None:
            raise RuntimeError("the context has no prefix cache")
        prefixes.clear()
        texts = [[2 + i, *range(3, 26)] for i in range(n)]
        for tokens in texts:
            lb.Branch.start(ctx, tokens).prune()
        probe = [*texts[-1], 7]
        hits = []
        for _ in range(20):
            with lb.Branch.create(ctx) as branch:
                hits.append(_us(partial(branch.sequence.take_cached, probe)))
        evictions = [_us(partial(prefixes.evict, 1)) for _ in range(min(n, 20))]
        name = f"{n}, host memory too" if ctx is saving else str(n)
        medians[name] = {"hit": statistics.median(hits), "eviction": statistics.median(evictions)}
        rows.append((name, *(number(us, 1) for us in medians[name].values())))
        prefixes.clear()
    table("Prefix cache, microseconds", ("cached texts", "hit", "eviction"), rows)
    return medians


def _compaction(settings: Settings, ctx: lb.Context) -> dict[str, float]:
    """Measure a compaction by copying K/V and by decoding again."""
    n = 100 if settings.quick else 400
    branches = [lb.Branch.start(ctx, [2 + i, *range(3, n)]) for i in range(8)]
    medians = {}
    for name, by_state in (("copying K/V", True), ("decoding again", False)):

        def compact(by_state: bool = by_state) -> None:
            rewrite_in_order(ctx.decoder, ctx.sequences.holders(), by_state=by_state)

        with ctx.lock:
            medians[name] = statistics.median(_us(compact) / 1e3 for _ in range(5))
    for branch in branches:
        branch.prune()
    caption = f"Compaction of 8 branches x {n} tokens"
    table(caption, ("", "ms"), [(name, number(ms, 2)) for name, ms in medians.items()])
    return medians


def _us(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return 1e6 * (perf_counter() - start)


# -- the event loop --------------------------------------------------------------------------------


def _async(settings: Settings, ctx: lb.Context) -> dict[str, object]:
    """Measure the same requests with an ``Engine`` and with an ``AsyncEngine``."""
    streams = (1, 2) if settings.quick else (1, 8, 16)
    results: dict[str, object] = {}
    rows = []
    for n in streams:
        requests = [
            lb.Request(PROMPTS[i % len(PROMPTS)], id=str(i), max_tokens=settings.tokens * 4)
            for i in range(n)
        ]
        makers: dict[str, Maker] = {
            ENGINE: _each(_by_engine(ctx, requests)),
            ASYNC: _each(_by_async(ctx, requests)),
        }
        series = interleave(makers, n_runs=settings.runs, n_items=1)
        ratio: Spread = series[ASYNC].ratio(series[ENGINE])
        results[str(n)] = {
            "compared": {k: series_json(s, series[ENGINE]) for k, s in series.items()},
            "async_over_engine": ratio.as_dict(),
        }
        rows.append((str(n), *(pm(s.rate, 0) for s in series.values()), pm(ratio)))
    table("Tokens a second", ("streams", ENGINE, ASYNC, "ratio"), rows)
    return results


def _each(work: Work) -> Maker:
    return lambda run: work


def _by_engine(ctx: lb.Context, requests: Sequence[lb.Request]) -> Work:
    def work(item: int) -> Timing:
        engine = lb.Engine(ctx, sampling=GREEDY)
        start = perf_counter()
        n = sum(1 for event in engine.stream(requests) if event.emitted is not None)
        return Timing(n, perf_counter() - start)

    return work


def _by_async(ctx: lb.Context, requests: Sequence[lb.Request]) -> Work:
    async def read(engine: lb.AsyncEngine, request: lb.Request) -> int:
        return sum([1 async for e in engine.generate(request) if e.emitted is not None])

    async def main() -> Timing:
        async with lb.AsyncEngine(ctx, sampling=GREEDY) as engine:
            start = perf_counter()
            counts = await asyncio.gather(*(read(engine, request) for request in requests))
            return Timing(sum(counts), perf_counter() - start)

    return lambda item: asyncio.run(main())


# -- long queues -----------------------------------------------------------------------------------


def _admission(settings: Settings, ctx: lb.Context) -> dict[str, float]:
    """Measure a look at the queue while no sequence is free, and the admission of one request."""
    medians: dict[str, float] = {}
    for n in (10, 1000) if settings.quick else (10, 1000, 1_000_000):
        scheduler = Scheduler(ctx, None, EngineStats())
        request = lb.Request([5, 6, 7], max_tokens=2)
        first = Submission(request, "0", 0, Loop(ctx), GREEDY, 2, 0, [0])
        for i in range(n + ctx.n_seq_max):
            scheduler.add(_numbered(first, i))
        scheduler.admit()
        blocked = statistics.median(_us(scheduler.admit) for _ in range(50))
        admitted = []
        for _ in range(5):
            scheduler.finish(scheduler.active[0])
            admitted.append(_us(scheduler.admit))
        medians[f"{n} blocked"], medians[f"{n} admitted"] = blocked, statistics.median(admitted)
        scheduler.close()
    rows = [(name, number(us, 1)) for name, us in medians.items()]
    table("Admission, microseconds a step", ("waiting", "us"), rows)
    return medians


def _numbered(first: Submission, i: int) -> Submission:
    """Return a submission like ``first``, without tokenizing its prompt again."""
    copied = Submission.__new__(Submission)
    copied.__dict__.update(first.__dict__)
    copied.request = replace(first.request) if i < 1000 else first.request
    copied.name, copied.number, copied.samples = str(i), i, first.samples.copy()
    copied.jobs = {}
    return copied


if __name__ == "__main__":
    main()
