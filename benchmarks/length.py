"""Long prompts: reading them, and generating after them, beside llama.cpp in its best setting.

Four figures for each model and length T, in tokens a second: a prompt of T tokens read; one text
generated after it; eight forks of it generated together; eight separate texts of T / 8 tokens generated
together, so that the cache holds T in all. The contestants take turns; ratios are taken within a run.

- *default*, *exact*: a context on its defaults, and with ``batch_invariant=True``
- *bare ...*: a loop of ``llama_decode`` that keeps nothing, for each K/V type, with flash attention and
  without, in pieces of 512 and of 128 tokens. The best of them, for each figure, is what others are
  compared with.
- *llama-server*, *Llama*: on their defaults but for threads and context size; one text

python -m benchmarks.length --models smollm2-135m:Q8_0 smollm2-135m:BF16 --lengths 500 2000
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch.bench.timing import Spread

from . import llama_tools
from .llama_python import LlamaPython
from .llama_server import LlamaServer
from .report import Settings, emit, parser, pm, table, title

DEFAULT, EXACT, SERVER, LLAMA = "default", "exact", "llama-server", "Llama"
READ, ONE, FORKS, SEPARATE = "read", "one text", "eight forks", "eight texts"
FIGURES = (READ, ONE, FORKS, SEPARATE)
MODELS = ("smollm2-135m:Q8_0", "smollm2-135m:BF16")
_N = 8
_ROOM = 256  # cells beyond the prompt
_BATCH = 512


class Bare(NamedTuple):
    """A setting of the bare loop."""

    kv_type: str
    flash: bool
    n_ubatch: int

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"bare {self.kv_type}, {'flash' if self.flash else 'plain'}, {self.n_ubatch}"


BARE = (
    Bare("f16", True, 512), Bare("f16", False, 512), Bare("f16", False, 128), Bare("bf16", False, 128),
)  # fmt: skip
_KV = {"f16": 1, "bf16": 30}  # ggml_type

Rates = dict[str, float]  # tokens a second of each figure
Contestant = Callable[[Sequence[int], int], Rates]


def main() -> None:
    """Measure every model and length."""
    described = parser("long prompts", runs=3, prompts=1, tokens=24)
    described.add_argument(
        "--models", nargs="+", help=f"names or files; default: {' '.join(MODELS)}"
    )
    described.add_argument("--model", action="append", help="another one; may be repeated")
    described.add_argument("--lengths", type=int, nargs="+", help="default: 500 2000 6000")
    described.add_argument(
        "--bare", type=int, nargs="+", help="numbers of bare settings; default: all"
    )
    described.add_argument("--no-exact", action="store_true", help="leave the exact context out")
    args = described.parse_args()
    settings = Settings.of(args)
    lengths = args.lengths or ([64] if settings.quick else [500, 2000, 6000])
    names = list(args.models or ([settings.target] if settings.quick else MODELS))
    names += args.model or []
    bare = [BARE[i] for i in args.bare] if args.bare else BARE
    found: dict[str, object] = {}
    with ExitStack() as stack:
        models = {name: stack.enter_context(lb.Model(lb.hub.resolve(name))) for name in names}
        for name, model in models.items():
            for length in lengths:
                with ExitStack() as opened:
                    contestants = _contestants(
                        model, length, settings, bare, not args.no_exact, opened
                    )
                    runs = _interleaved(contestants, model, length, settings)
                found[f"{name}, {length} tokens"] = _report(model, length, runs)
        emit("length", settings, models, found)


def _contestants(
    model: lb.Model,
    length: int,
    settings: Settings,
    bare: Sequence[Bare],
    with_exact: bool,
    stack: ExitStack,
) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {
        DEFAULT: _ours(stack.enter_context(_context(model, length, settings, "auto")))
    }
    if with_exact:
        try:
            found[EXACT] = _ours(stack.enter_context(_context(model, length, settings, True)))
        except lb.errors.UnsupportedError:
            print(f"{model.name} cannot be exact here")
    for setting in bare:
        loop = _BareLoop(model.path, setting, length + _ROOM, settings.threads)
        stack.callback(loop.close)
        found[setting.name] = loop.run
    llama = LlamaPython(model.path, n_ctx=length + _ROOM, threads=settings.threads)
    stack.callback(llama.close)
    found[LLAMA] = lambda tokens, n: _of_llama(llama, tokens, n)
    if settings.peers:
        program = llama_tools.build_server(settings.cache, settings.peers_bin)
        server = LlamaServer(
            program, model.path, threads=settings.threads, n_ctx=length + _ROOM, kv_type="f16"
        )
        stack.callback(server.close)
        found[SERVER] = lambda tokens, n: _of_server(server, tokens, n)
    return found


def _interleaved(
    contestants: dict[str, Contestant], model: lb.Model, length: int, settings: Settings
) -> dict[str, list[Rates]]:
    runs: dict[str, list[Rates]] = {name: [] for name in contestants}
    order = list(contestants)
    for name in order:  # warm
        contestants[name](_tokens(model, 40, 0), 2)
    for run in range(settings.runs):
        # The beginning differs, so that no program has a part of it in its cache.
        tokens = _tokens(model, length, run + 1)
        for name in order:
            runs[name].append(contestants[name](tokens, settings.tokens))
        order.reverse()
    return runs


def _tokens(model: lb.Model, n: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).integers(model.n_vocab // 20, model.n_vocab * 9 // 10, n)
    return [int(token) for token in drawn]


# -- llamabranch -----------------------------------------------------------------------------------


def _context(
    model: lb.Model, length: int, settings: Settings, batch_invariant: bool | str
) -> lb.Context:
    return lb.Context(
        model,
        n_ctx=length + _ROOM,
        n_seq_max=_N + 1,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        batch_invariant=batch_invariant,
    )


def _ours(ctx: lb.Context) -> Contestant:
    banned = dict.fromkeys(ctx.model.eog_tokens, -1e9)
    greedy = lb.SamplingParams(temperature=0.0, logit_bias=banned, logprobs=False)

    def step(branches: list[lb.Branch], n: int) -> float:
        store = lb.BranchStore(ctx)
        store.step(branches)
        start = perf_counter()
        for _ in range(n):
            store.step(branches)
        return n * len(branches) / (perf_counter() - start)

    def run(tokens: Sequence[int], n: int) -> Rates:
        start = perf_counter()
        with lb.Branch.start(ctx, list(tokens), sampling=greedy) as root:
            found = {READ: len(tokens) / (perf_counter() - start)}
            branch = root.fork()
            branch.step()
            start = perf_counter()
            for _ in range(n):
                branch.step()
            found[ONE] = n / (perf_counter() - start)
            branch.prune()
            forks = root.fork_many(_N)
            found[FORKS] = step(forks, max(2, n // 2))
            for fork in forks:
                fork.prune()
        size = len(tokens) // _N
        texts = [
            lb.Branch.start(ctx, list(tokens[i * size : (i + 1) * size]), sampling=greedy)
            for i in range(_N)
        ]
        found[SEPARATE] = step(texts, max(2, n // 2))
        for text in texts:
            text.prune()
        return found

    return run


# -- others ----------------------------------------------------------------------------------------


class _BareLoop:
    """``llama_decode`` and the greatest logit, and nothing else."""

    def __init__(self, path: object, setting: Bare, n_ctx: int, threads: int) -> None:
        of_model = C.llama_model_default_params()
        of_model.use_extra_bufts = not llama_tools.has_amx()
        self._model = C.llama_model_load_from_file(str(path).encode(), of_model)
        params = C.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, _BATCH, setting.n_ubatch
        params.n_seq_max, params.kv_unified = _N + 1, True
        params.type_k = params.type_v = _KV[setting.kv_type]
        params.flash_attn_type = int(setting.flash)
        params.n_threads = params.n_threads_batch = threads
        self._ctx = C.llama_init_from_model(self._model, params)
        self._memory = C.llama_get_memory(self._ctx)
        self._batch = C.llama_batch_init(_BATCH, 0, 1)
        self._n_vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(self._model))

    def close(self) -> None:
        """Free it."""
        C.llama_batch_free(self._batch)
        C.llama_free(self._ctx)
        C.llama_model_free(self._model)

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

    def _row(self, i: int) -> object:
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

    def _generate(self, tokens: list[int], at: int, seqs: Sequence[int], n: int) -> float:
        start = 0.0
        for i in range(n + 1):  # the first is not timed: the graph has another shape
            if i == 1:
                start = perf_counter()
            rows = [(tokens[k], at + i, seq) for k, seq in enumerate(seqs)]
            tokens = self._decode(rows, len(rows))
        return n * len(seqs) / (perf_counter() - start)

    def run(self, tokens: Sequence[int], n: int) -> Rates:
        """Measure all figures."""
        C.llama_memory_clear(self._memory, False)
        start = perf_counter()
        first = self._read(tokens, 0)
        found = {READ: len(tokens) / (perf_counter() - start)}
        others = range(1, _N + 1)
        C.llama_memory_seq_cp(self._memory, 0, 1, -1, -1)
        found[ONE] = self._generate([first], len(tokens), [1], n)
        C.llama_memory_seq_rm(self._memory, 1, -1, -1)
        for seq in others:
            C.llama_memory_seq_cp(self._memory, 0, seq, -1, -1)
        found[FORKS] = self._generate([first] * _N, len(tokens), others, max(2, n // 2))
        C.llama_memory_clear(self._memory, False)
        size = len(tokens) // _N
        firsts = [
            self._read(tokens[i * size : (i + 1) * size], seq) for i, seq in enumerate(others)
        ]
        found[SEPARATE] = self._generate(firsts, size, others, max(2, n // 2))
        return found


def _of_llama(llama: LlamaPython, tokens: Sequence[int], n: int) -> Rates:
    start = perf_counter()
    llama.generate(tokens, 0, 0.0, 1)
    read = len(tokens) / (perf_counter() - start)
    return {READ: read, ONE: llama.generate(tokens, n, 0.0, 1).rate}


def _of_server(server: LlamaServer, tokens: Sequence[int], n: int) -> Rates:
    endless = {"ignore_eos": True}
    answer = server.generate(tokens, n + 1, **endless)
    return {READ: answer.n_evaluated / answer.first_s, ONE: answer.n_tokens / answer.generating_s}


# -- the report ------------------------------------------------------------------------------------


def _report(model: lb.Model, length: int, runs: dict[str, list[Rates]]) -> dict[str, object]:
    bare = [name for name in runs if name.startswith("bare")]
    best = {
        figure: max(bare, key=lambda name: Spread.of([run[figure] for run in runs[name]]).median)
        for figure in FIGURES
    }
    ratios: dict[str, dict[str, Spread]] = {}
    for ours in (DEFAULT, EXACT):
        if ours not in runs:
            continue
        bases = {f"{figure}, best bare": best[figure] for figure in FIGURES}
        compared = {
            label: _ratio(runs[ours], runs[base], label.partition(",")[0])
            for label, base in bases.items()
        }
        for other in (SERVER, LLAMA):
            if other in runs:
                for figure in (READ, ONE):
                    compared[f"{figure}, {other}"] = _ratio(runs[ours], runs[other], figure)
        ratios[ours] = compared
    rates = {
        name: {figure: Spread.of([run.get(figure, math.nan) for run in each]) for figure in FIGURES}
        for name, each in runs.items()
    }
    table(
        f"Tokens a second, {title(model)}, a prompt of {length} tokens",
        ("", *FIGURES),
        [(name, *(pm(each[figure], 1) for figure in FIGURES)) for name, each in rates.items()],
    )
    labels = list(ratios[DEFAULT])
    table(
        "Ratios within a run",
        ("", *labels),
        [(name, *(pm(each[label]) for label in labels)) for name, each in ratios.items()],
    )
    return {
        "tokens_per_s": {
            name: {figure: spread.as_dict() for figure, spread in each.items()}
            for name, each in rates.items()
        },
        "best_bare": best,
        "ratios": {
            name: {label: spread.as_dict() for label, spread in each.items()}
            for name, each in ratios.items()
        },
        "runs": runs,
    }


def _ratio(ours: list[Rates], theirs: list[Rates], figure: str) -> Spread:
    return Spread.of(
        [mine[figure] / other[figure] for mine, other in zip(ours, theirs, strict=True)]
    )


if __name__ == "__main__":
    main()
