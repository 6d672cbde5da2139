"""Long prompts: reading them, and generating after them, beside llama.cpp in its best setting.

    python -m benchmarks.length [--models smollm2-135m:Q8_0] [--lengths 500 2000]

Four figures for each model and length T, in tokens a second: a prompt of T tokens read; one text
generated after it; eight forks of it generated together; eight separate texts of T / 8 tokens generated
together, so that the cache holds T in all. For each figure the contestants take turns, in an order that
is turned around each time; ratios are taken within a turn.

- *default*, *plain*, *exact*: a context on its defaults, with ``flash_attention=False``, and exact
- *bare ...*: a loop of ``llama_decode`` that keeps nothing, for each K/V type, with flash attention and
  without. The best of them, for each figure, is what others are compared with.

With one thread the time is that of the processor, which other programs hardly change. A model and a
length take one to five minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch.context.params import ContextOptions

from .report import Settings, emit, parser, pm, table, title
from .servers import has_amx
from .timing import PAUSE_S, Spread

READ, ONE, FORKS, SEPARATE = "read", "one text", "eight forks", "eight texts"
FIGURES = (READ, ONE, FORKS, SEPARATE)
MODELS = ("smollm2-135m:Q8_0", "smollm2-135m:BF16")
_N = 8
_ROOM = 256  # cells beyond the prompt
_BATCH = 512
_TURNS = 3  # of each way to generate, after each prompt


class Bare(NamedTuple):
    """A setting of the bare loop."""

    kv_type: str
    flash: bool

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"bare {self.kv_type}, {'flash' if self.flash else 'plain'}"


BARE = tuple(Bare(kv_type, flash) for kv_type in ("f16", "bf16") for flash in (True, False))
_KV = {"f16": 1, "bf16": 30}  # ggml_type

_OPTIONS: dict[str, ContextOptions] = {
    "default": {}, "plain": {"flash_attention": False}, "exact": {"exact": True},
}  # fmt: skip

Rates = dict[str, list[float]]  # tokens a second of each figure, for each turn
Clock = Callable[[], float]
Contestant: TypeAlias = "_Ours | _BareLoop"


def main() -> None:
    """Measure every model and length."""
    described = parser("long prompts", runs=3, tokens=24)
    add = described.add_argument
    add("--models", nargs="+", help=f"names or files; default: {' '.join(MODELS)}")
    add("--lengths", type=int, nargs="+", help="default: 500 2000 6000")
    args = described.parse_args()
    settings = Settings.of(args)
    lengths = args.lengths or ([64] if settings.quick else [500, 2000, 6000])
    names = args.models or ([settings.target] if settings.quick else MODELS)
    reports: dict[str, object] = {}
    with ExitStack() as stack:
        models = {name: stack.enter_context(lb.Model(lb.hub.resolve(name))) for name in names}
        for model in models.values():
            for length in lengths:
                with ExitStack() as opened:
                    contestants = _contestants(model, length, settings, opened)
                    runs = _interleaved(contestants, model, length, settings)
                label = f"{title(model)}, {length} tokens"
                reports[label] = _report(label, runs)
        emit("length", settings, models, reports)


def _contestants(
    model: lb.Model, length: int, settings: Settings, stack: ExitStack
) -> dict[str, Contestant]:
    contestants: dict[str, Contestant] = {}
    n_ctx, clock = length + _ROOM, perf_counter if settings.threads > 1 else process_time
    for name, options in _OPTIONS.items():
        options = {**options, "n_ctx": n_ctx, "n_seq_max": _N + 1, "n_threads": settings.threads}
        try:
            ctx = stack.enter_context(lb.Context(model, **options))
        except lb.errors.UnsupportedError as error:
            print(f"{model.name}, {name}: {error}")
        else:
            contestants[name] = _Ours(ctx, clock)
    of_model = C.llama_model_default_params()
    of_model.use_extra_bufts = not has_amx()
    weights = C.llama_model_load_from_file(str(model.path).encode(), of_model)
    stack.callback(C.llama_model_free, weights)
    for setting in BARE:
        loop = _BareLoop(weights, setting, n_ctx, settings.threads, clock)
        stack.callback(loop.close)
        contestants[setting.name] = loop
    return contestants


def _interleaved(
    contestants: dict[str, Contestant],
    model: lb.Model,
    length: int,
    settings: Settings,
) -> dict[str, Rates]:
    runs: dict[str, Rates] = {name: {figure: [] for figure in FIGURES} for name in contestants}
    order = list(contestants)

    def turn(figure: str, measure: Callable[[Contestant], float]) -> None:
        for name in order:
            sleep(PAUSE_S)
            runs[name][figure].append(measure(contestants[name]))
        order.reverse()

    def read(contestant: Contestant, tokens: Sequence[int]) -> float:
        return contestant.read(tokens)

    n = settings.tokens
    for each in contestants.values():  # warm
        each.read(_tokens(model, 40, 0))
    for run in range(settings.runs):
        # The beginning differs, so that no program has a part of it in its cache.
        tokens = _tokens(model, length, run + 1)
        turn(READ, partial(read, tokens=tokens))
        for _ in range(_TURNS):
            turn(ONE, lambda each: each.one(n))
        for _ in range(_TURNS):
            turn(FORKS, lambda each: each.forks(max(2, n // 2)))
    size = length // _N
    texts = [_tokens(model, size, 1000 + i) for i in range(_N)]
    for each in contestants.values():
        each.begin(texts)
    for _ in range(settings.runs * _TURNS):
        turn(SEPARATE, lambda each: each.separate(max(2, n // 2)))
    return runs


def _tokens(model: lb.Model, n: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).integers(model.n_vocab // 20, model.n_vocab * 9 // 10, n)
    return [int(token) for token in drawn]


# -- llamabranch -----------------------------------------------------------------------------------


class _Ours:
    """A context with one prompt or eight texts. Each method but ``begin`` returns tokens a second.

    ``read`` and ``begin`` replace what the cache held; ``one`` and ``forks`` continue the prompt, and
    ``separate`` continues the eight texts together.
    """

    def __init__(self, ctx: lb.Context, clock: Clock) -> None:
        self._clock = clock
        banned = dict.fromkeys(ctx.model.eog_tokens, -1e9)
        self._ctx = ctx
        self._sampling = lb.SamplingParams(temperature=0.0, logit_bias=banned, logprobs=False)
        self._texts: list[lb.Branch] = []

    def read(self, tokens: Sequence[int]) -> float:
        self.begin([])
        start = self._clock()
        self._texts = [lb.Branch.start(self._ctx, list(tokens), sampling=self._sampling)]
        return len(tokens) / (self._clock() - start)

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        for text in self._texts:
            text.prune()
        start = lb.Branch.start
        self._texts = [start(self._ctx, list(text), sampling=self._sampling) for text in texts]

    def one(self, n: int) -> float:
        with self._texts[0].fork() as branch:
            branch.step()
            start = self._clock()
            for _ in range(n):
                branch.step()
            return n / (self._clock() - start)

    def forks(self, n: int) -> float:
        return self._together(1, _N, n)

    def separate(self, n: int) -> float:
        return self._together(_N, 1, n)

    def _together(self, n_prompts: int, each: int, n: int) -> float:
        """Return tokens a second, from when every text of an engine has begun."""
        prompts = [text.tokens for text in self._texts[:n_prompts]]
        for text in self._texts:
            text.prune()
        with lb.Engine(self._ctx, None, sampling=self._sampling) as engine:
            for prompt in prompts:
                engine.add_request(lb.Request(prompt, n=each, max_tokens=n + 1))
            begun: set[tuple[str, int]] = set()
            while len(begun) < n_prompts * each:
                begun |= {(e.id, e.sample) for e in engine.step() if e.emitted is not None}
            start, n_tokens = self._clock(), 0
            while engine.has_unfinished():
                n_tokens += sum(event.emitted is not None for event in engine.step())
            rate = n_tokens / (self._clock() - start)
        self.begin(prompts)
        return rate


# -- others ----------------------------------------------------------------------------------------


class _BareLoop:
    """``llama_decode`` and the greatest logit, and nothing else; the same methods."""

    def __init__(self, weights: Any, setting: Bare, n_ctx: int, threads: int, clock: Clock) -> None:
        self._clock = clock
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, _BATCH, _BATCH
        params.n_seq_max, params.kv_unified = _N + 1, True
        params.type_k = params.type_v = _KV[setting.kv_type]
        params.flash_attn_type = int(setting.flash)
        params.n_threads = params.n_threads_batch = threads
        self._ctx = C.llama_init_from_model(weights, params)
        self._memory = C.llama_get_memory(self._ctx)
        self._batch = C.llama_batch_init(_BATCH, 0, 1)
        self._n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(weights))
        self._at, self._firsts = 0, [0]  # position of the next token, and what it is in each text

    def close(self) -> None:
        """Free it."""
        C.llama_batch_free(self._batch)
        C.llama_free(self._ctx)

    def _decode(self, rows: Sequence[tuple[int, int, int]], n_wanted: int) -> list[int]:
        """Decode (token, position, sequence); return the most probable tokens after the last ones."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = i >= len(rows) - n_wanted
        if C.llama_decode(self._ctx, batch):
            raise RuntimeError("llama_decode failed")
        return [
            int(np.argmax(np.ctypeslib.as_array(self._row(i), shape=(self._n_vocab,))))
            for i in range(len(rows) - n_wanted, len(rows))
        ]

    def _row(self, i: int) -> Any:
        return C.llama_get_logits_ith(self._ctx, i)

    def _read(self, tokens: Sequence[int], seq: int) -> int:
        found = [0]
        for low in range(0, len(tokens), _BATCH):
            part = tokens[low : low + _BATCH]
            is_last = low + len(part) == len(tokens)
            rows = [(token, low + i, seq) for i, token in enumerate(part)]
            found = self._decode(rows, int(is_last)) or found
        C.llama_synchronize(self._ctx)
        return found[0]

    def _generate(self, tokens: list[int], seqs: Sequence[int], n: int) -> float:
        start = 0.0
        for i in range(n + 1):  # the first is not timed: the graph has another shape
            if i == 1:
                start = self._clock()
            rows = [(tokens[k], self._at + i, seq) for k, seq in enumerate(seqs)]
            tokens = self._decode(rows, len(rows))
        return n * len(seqs) / (self._clock() - start)

    def read(self, tokens: Sequence[int]) -> float:
        C.llama_memory_clear(self._memory, False)
        start = self._clock()
        self._firsts, self._at = [self._read(tokens, 0)], len(tokens)
        return len(tokens) / (self._clock() - start)

    def begin(self, texts: Sequence[Sequence[int]]) -> None:
        C.llama_memory_clear(self._memory, False)
        self._firsts = [self._read(text, seq) for seq, text in enumerate(texts, start=1)]
        self._at = len(texts[0])

    def one(self, n: int) -> float:
        return self._forks(1, n)

    def forks(self, n: int) -> float:
        return self._forks(_N, n)

    def _forks(self, n_forks: int, n: int) -> float:
        seqs = range(1, n_forks + 1)
        for seq in seqs:
            C.llama_memory_seq_cp(self._memory, 0, seq, -1, -1)
        rate = self._generate(self._firsts * n_forks, seqs, n)
        for seq in seqs:
            C.llama_memory_seq_rm(self._memory, seq, -1, -1)
        return rate

    def separate(self, n: int) -> float:
        seqs = range(1, _N + 1)
        rate = self._generate(self._firsts, seqs, n)
        for seq in seqs:
            C.llama_memory_seq_rm(self._memory, seq, self._at, -1)
        return rate


# -- the report ------------------------------------------------------------------------------------


def _report(label: str, runs: Mapping[str, Rates]) -> dict[str, Any]:
    """Show the rates, and those of the contexts over the best bare loop of each figure."""
    rates = {
        name: {figure: Spread.of(figures[figure]) for figure in FIGURES}
        for name, figures in runs.items()
    }
    bare = [name for name in runs if name.startswith("bare")]
    best = {figure: max(bare, key=lambda name: rates[name][figure].median) for figure in FIGURES}
    ratios = {
        name: {
            figure: Spread.of([
                ours / theirs
                for ours, theirs in zip(runs[name][figure], runs[best[figure]][figure], strict=True)
            ])
            for figure in FIGURES
        }
        for name in runs
        if name in _OPTIONS
    }  # fmt: skip
    results: dict[str, Any] = {"best_bare": best, "runs": runs}
    for key, caption, spreads, digits in (
        ("tokens_per_second", "Tokens a second", rates, 1),
        ("ratios", "Over the best bare loop, within a turn", ratios, 2),
    ):
        table(
            f"{caption}, {label}",
            ("", *FIGURES),
            [
                (name, *(pm(figures[figure], digits) for figure in FIGURES))
                for name, figures in spreads.items()
            ],
        )
        results[key] = {
            name: {figure: spread.as_dict() for figure, spread in figures.items()}
            for name, figures in spreads.items()
        }
    return results


if __name__ == "__main__":
    main()
