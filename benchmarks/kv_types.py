"""K/V types: how long a prompt takes to read and a token to decode, and whether batches are exact.

On a processor that computes bf16 slowly (without AVX512-BF16) the exact type is not the fastest one. The
contexts take turns. Ratios are to f16 in the same run.

python -m benchmarks.kv_types --models model-q8_0.gguf other.gguf --lengths 512 2048
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from time import perf_counter

import numpy as np

import llamabranch as lb

from .report import Settings, emit, parser, table, title

_DECODED = 16  # tokens after the prompt that are timed
_ROWS = (2, 4, 8)  # sizes of the batches that are compared with single tokens


def main() -> None:
    """Measure every type with every model and length."""
    described = parser("types of the K/V cache", runs=3, prompts=1, tokens=_DECODED)
    described.add_argument("--models", nargs="+", help="names or files; default: --target")
    described.add_argument("--lengths", type=int, nargs="+", help="default: 512 2048")
    described.add_argument("--types", nargs="+", default=["f16", "bf16", "q8_0"])
    args = described.parse_args()
    settings = Settings.of(args)
    lengths = args.lengths or ([64] if settings.quick else [512, 2048])
    results: dict[str, object] = {}
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(lb.Model(lb.hub.resolve(name)))
            for name in args.models or [settings.target]
        }
        for name, model in models.items():
            for length in lengths:
                measured = {kv_type: _Times() for kv_type in args.types}
                for _ in range(settings.runs):
                    for kv_type, times in measured.items():
                        _measure(model, kv_type, length, settings.threads, times)
                results[f"{name}, {length} tokens"] = _report(model, length, measured)
        emit("kv_types", settings, models, results)


class _Times:
    """Seconds of a prompt, seconds of a token after it, and the largest difference in a batch."""

    def __init__(self) -> None:
        self.read: list[float] = []
        self.decode: list[float] = []
        self.difference = 0.0


def _measure(model: lb.Model, kv_type: str, length: int, threads: int, times: _Times) -> None:
    tokens = [(7919 * i + 13) % (model.n_vocab - 10) + 3 for i in range(length)]
    with lb.Context(
        model,
        n_ctx=length + 256,
        n_seq_max=2,
        kv_type=kv_type,
        batch_invariant=False,
        n_threads=threads,
        n_threads_batch=threads,
    ) as ctx:
        ctx.decode(tokens[:8], 0, logits="none")
        ctx.kv_cache_remove(0)
        start = perf_counter()
        ctx.decode(tokens, 0, logits="none")
        times.read.append(perf_counter() - start)
        alone = []
        start = perf_counter()
        for i, token in enumerate(tokens[:_DECODED]):
            ctx.decode([token], length + i)
            alone.append(ctx.logits())
        times.decode.append((perf_counter() - start) / _DECODED)
        for n in _ROWS:
            ctx.kv_cache_remove(0, length)
            ctx.decode(tokens[:n], length, logits="all")
            for i in range(n):
                difference = float(np.abs(ctx.logits(i) - alone[i]).max())
                times.difference = max(times.difference, difference)


def _report(model: lb.Model, length: int, measured: dict[str, _Times]) -> dict[str, object]:
    base = measured.get("f16")
    rows = []
    numbers: dict[str, object] = {}
    for kv_type, times in measured.items():
        read, decode = statistics.median(times.read), statistics.median(times.decode)
        ratios = ["-", "-"]
        if base is not None:
            ratios = [
                f"{read / statistics.median(base.read):.2f}",
                f"{decode / statistics.median(base.decode):.2f}",
            ]
        exact = "to the bit" if times.difference == 0 else f"off by {times.difference:.2g}"
        rows.append(
            [kv_type, f"{read:.2f} s", ratios[0], f"{1e3 * decode:.1f} ms", ratios[1], exact]
        )
        numbers[kv_type] = {
            "read_s": times.read,
            "decode_s": times.decode,
            "difference": times.difference,
        }
    caption = f"{title(model)}: a prompt of {length} tokens"
    columns = ["K/V", "read", "to f16", "a token after it", "to f16", "batches of 2, 4, 8"]
    table(caption, columns, rows)
    return numbers


if __name__ == "__main__":
    main()
