"""Search over branches: beams, best of n, particles, compared with other programs and plain batches.

    python -m benchmarks.search [--hf-python PYTHON] [--only beam|best|smc]

``PYTHON`` is an interpreter that has torch, transformers and gguf. Without it there is no comparison with
Hugging Face, and the tables say so.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType

import llamabranch as lb
from llamabranch import search
from llamabranch.bench.timing import Maker, Series, Timing, Work

from .clocks import interleave
from .llama_python import LlamaPython
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title

BEAM, STORE, LLAMA = "beam_search", "BranchStore.step", "the same with Llama"
BEST, COMPLETIONS = "best_of_n", "create_completion, 8 times"
DTYPES = ("float32", "bfloat16")
WHOLE = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def main() -> None:
    """Measure everything on one model."""
    described = parser("search", runs=3, prompts=1, tokens=128)
    described.add_argument("--hf-python", help="interpreter with torch, transformers and gguf")
    described.add_argument("--only", nargs="+", choices=("beam", "best", "smc"))
    args = described.parse_args()
    settings = Settings.of(args)
    parts = args.only or ("beam", "best", "smc")
    widths, particles = ((2,), (2,)) if settings.quick else ((4, 8), (8, 32, 64))
    n_prompt = 24 if settings.quick else 500
    n_most = max(*widths, *particles, 8) + 1
    n_ctx = n_prompt + (settings.tokens + 32) * n_most
    results: dict[str, object] = {}
    with settings.context(settings.target, n_ctx=n_ctx, n_seq_max=n_most) as ctx:
        llama = None
        if settings.peers:
            llama = LlamaPython(ctx.model.path, n_ctx=1024, threads=settings.threads)
        if "beam" in parts:
            with _HuggingFace(args.hf_python, ctx.model.path, settings) as hf:
                results["beam"] = {str(n): _beams(settings, ctx, llama, hf, n) for n in widths}
                results["hugging_face"] = hf.versions or hf.reason
        if "best" in parts:
            results["best_of_n"] = _best_of_n(settings, ctx, llama, n_prompt)
        if "smc" in parts:
            results["smc"] = _smc(settings, ctx, particles)
        if llama is not None:
            llama.close()
        emit("search", settings, {"target": ctx.model}, results)


def _endless(ctx: lb.Context, sampling: lb.SamplingParams) -> lb.SamplingParams:
    """Return settings under which no text ends before its last token."""
    return sampling.replace(logit_bias=dict.fromkeys(ctx.model.eog_tokens, -math.inf))


# -- beams -----------------------------------------------------------------------------------------


class _HuggingFace:
    """A process of ``benchmarks/search_hf.py``; ``reason`` says why it does not run."""

    def __init__(self, python: str | None, model: Path, settings: Settings) -> None:
        self.versions: dict[str, str] = {}
        self.reason = ""
        self._process: subprocess.Popen[str] | None = None
        if python is None or not settings.peers:
            self.reason = "left out: no --hf-python"
            return
        program = Path(__file__).with_name("search_hf.py")
        self._process = subprocess.Popen(
            [python, str(program), str(model), str(settings.threads), *DTYPES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.versions = self._read()
        except ValueError:
            self.reason = (
                f"left out: {python} lacks torch, transformers or gguf, or they refuse the model"
            )
            self.close()

    def __enter__(self) -> _HuggingFace:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the program."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read(self) -> dict[str, str]:
        if self._process is None or self._process.stdout is None:
            raise ValueError("not running")
        reply: dict[str, str] = json.loads(self._process.stdout.readline())
        return reply

    def beam(self, dtype: str, prompt: Sequence[int], beams: int, tokens: int) -> float:
        """Return the seconds of ``generate`` with ``beams`` beams."""
        if self._process is None or self._process.stdin is None:
            raise ValueError("not running")
        asked = {"dtype": dtype, "prompt": list(prompt), "beams": beams, "tokens": tokens}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])


def _beams(
    settings: Settings, ctx: lb.Context, llama: LlamaPython | None, hf: _HuggingFace, beams: int
) -> dict[str, object]:
    """Compare searches with ``beams`` beams; all times include the prompt."""
    prompts = [ctx.tokenize(prompt) for prompt in PROMPTS[: settings.prompts]]
    sampling = _endless(ctx, lb.SamplingParams(temperature=0.0))
    n_tokens = settings.tokens
    cells: list[int] = []

    def ours(item: int) -> Timing:
        start = perf_counter()
        with lb.Branch.start(ctx, prompts[item], sampling=sampling) as branch:
            search.beam_search(branch, beams, n_tokens)
            return Timing(beams * n_tokens, perf_counter() - start)

    def store(item: int) -> Timing:
        start = perf_counter()
        with lb.Branch.start(ctx, prompts[item], sampling=sampling) as branch:
            children = branch.fork_many(beams)
            stepped = lb.BranchStore(ctx)
            for _ in range(n_tokens):
                stepped.step(children)
            return Timing(beams * n_tokens, perf_counter() - start)

    def peer(item: int) -> Timing:
        if llama is None:
            raise ValueError("no Llama")
        seconds = llama.beam(prompts[item], beams, n_tokens)
        return Timing(beams * n_tokens, seconds)

    def face(dtype: str) -> Work:
        def work(item: int) -> Timing:
            return Timing(beams * n_tokens, hf.beam(dtype, prompts[item], beams, n_tokens))

        return work

    works: dict[str, Work] = {BEAM: ours, STORE: store}
    if llama is not None:
        works[LLAMA] = peer
    if hf.versions:
        works |= {f"transformers, {dtype}": face(dtype) for dtype in DTYPES}
    compared = interleave(_makers(works), n_runs=settings.runs, n_items=len(prompts))

    def note(_: search.SearchStats) -> None:
        cells.append(ctx.usage().cells_used)

    with lb.Branch.start(ctx, prompts[0], sampling=sampling) as branch:
        search.beam_search(branch, beams, n_tokens, on_step=note)
    caption = (
        f"{beams} beams, {n_tokens} tokens, with the prompt of {len(prompts[0])}. {title(ctx.model)}: "
        f"{settings.threads} threads, medians of {settings.runs} runs (lowest to highest). At most "
        f"{max(cells)} cells; {beams} separate texts would take "
        f"{beams * (len(prompts[0]) + n_tokens)}"
    )
    if hf.reason:
        caption += f". transformers: {hf.reason}"
    _show(caption, compared, BEAM)
    return {
        "peak_cells": max(cells),
        "unshared_cells": beams * (len(prompts[0]) + n_tokens),
        **{name: series_json(series, compared[BEAM]) for name, series in compared.items()},
    }


# -- best of n -------------------------------------------------------------------------------------


def _best_of_n(
    settings: Settings, ctx: lb.Context, llama: LlamaPython | None, n_prompt: int
) -> dict[str, object]:
    """Compare eight samples of a long prompt with eight completions; both times include the prompt."""
    words = ctx.tokenize(" ".join(PROMPTS) * (1 + n_prompt // 400))
    prompt = words[:n_prompt]
    sampling = _endless(ctx, lb.SamplingParams(temperature=0.8, seed=1))
    n, n_tokens = 8, settings.tokens

    def ours(item: int) -> Timing:
        start = perf_counter()
        with lb.Branch.start(ctx, prompt, sampling=sampling) as branch:
            search.best_of_n(branch, n, n_tokens)
            return Timing(n * n_tokens, perf_counter() - start)

    def peer(item: int) -> Timing:
        if llama is None:
            raise ValueError("no Llama")
        return llama.complete_many(prompt, n, n_tokens, 0.8)

    works: dict[str, Work] = {BEST: ours}
    if llama is not None:
        works[COMPLETIONS] = peer
    compared = interleave(_makers(works), n_runs=settings.runs, n_items=1)
    _show(
        f"8 texts of {n_tokens} tokens after a prompt of {n_prompt}, with the prompt, T = 0.8",
        compared,
        BEST,
    )
    return {name: series_json(series, compared[BEST]) for name, series in compared.items()}


# -- particles -------------------------------------------------------------------------------------


def _smc(settings: Settings, ctx: lb.Context, particles: Sequence[int]) -> dict[str, object]:
    """Measure particles per second, and the share of the time outside llama_decode."""
    prompt = ctx.tokenize(PROMPTS[0])
    results: dict[str, object] = {}
    rows = []

    def smc(branch: lb.Branch, n: int) -> None:
        search.smc(branch, n, settings.tokens, force_end=False)

    def store(branches: Sequence[lb.Branch]) -> None:
        stepped = lb.BranchStore(ctx)
        for _ in range(settings.tokens):
            stepped.step(branches)

    for n in particles:
        rates, shares, stores = [], [], []
        for _ in range(settings.runs + 1):
            with lb.Branch.start(ctx, prompt, sampling=_endless(ctx, WHOLE)) as branch:
                n_decoded, seconds, inside = _timed(ctx, partial(smc, branch, n))
                rates.append(n_decoded / seconds)
                shares.append(1.0 - inside / seconds)
            with lb.Branch.start(ctx, prompt, sampling=_endless(ctx, WHOLE)) as branch:
                _, seconds, inside = _timed(ctx, partial(store, branch.fork_many(n)))
                stores.append(1.0 - inside / seconds)
        # The first is warm-up.
        rate, share, stored = (median(x[1:]) for x in (rates, shares, stores))
        rows.append((str(n), number(rate, 0), percent(share), percent(stored)))
        results[str(n)] = {"particles_a_second": rate, "share_outside": share, "store": stored}
    columns = ("particles", "tokens/s", "not in llama_decode", "BranchStore.step")
    table(
        f"smc without a potential, {settings.tokens} tokens, medians of {settings.runs}",
        columns,
        rows,
    )
    return results


def _timed(ctx: lb.Context, work: Callable[[], object]) -> tuple[int, float, float]:
    """Return the tokens decoded while ``work`` runs, its seconds, and the seconds inside llama_decode."""
    inside, tokens = 0.0, 0

    def watched(decode: Callable[[int], int], n: int) -> int:
        nonlocal inside, tokens
        start = perf_counter()
        code = decode(n)
        inside += perf_counter() - start
        tokens += n
        return code

    before = ctx.decoder.hook(watched)
    try:
        start = perf_counter()
        work()
        return tokens, perf_counter() - start, inside
    finally:
        ctx.decoder.hook(before)


def _makers(works: Mapping[str, Work]) -> dict[str, Maker]:
    def maker(work: Work) -> Maker:
        return lambda run: work

    return {name: maker(work) for name, work in works.items()}


def _show(caption: str, compared: Mapping[str, Series], ours: str) -> None:
    rows = [
        (name, pm(series.rate, 0), pm(compared[ours].ratio(series)) if name != ours else "-")
        for name, series in compared.items()
    ]
    table(caption, ("", "tokens/s", f"{ours} over it"), rows)


if __name__ == "__main__":
    main()
