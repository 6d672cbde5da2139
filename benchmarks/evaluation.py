"""Evaluation: multiple choice, perplexity, and the memory of a large vocabulary.

    python -m benchmarks.evaluation --target MODEL.gguf --threads 2 --text BOOK.txt

Multiple choice: items of about 100 tokens with four choices of about 10 tokens. They are scored with all
common prefixes shared, one choice at a time, and by ``llama-perplexity --multiple-choice`` with as many
sequences as fit into its batch.

Perplexity: the same text in chunks of 512 tokens, by ``eval.perplexity`` and by llama-perplexity, both
with f16 K/V. The values must agree.

Memory: the peak memory of a process that reads two chunks with a vocabulary of 262,144 tokens.

The sides take turns. llama-perplexity is timed between two lines of its log, so loading does not count.
"""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import llamabranch as lb
from llamabranch import eval as evaluation
from llamabranch.bench.timing import Spread

from .llama_tools import ToolError, build_perplexity
from .report import Settings, emit, number, parser, pm, table, title
from .wide import cached_wide

WINDOW = 512
N_VOCAB = 262_144
_CONTEXT_WORDS, _CHOICE_WORDS = 75, 7
_TRIES = 8
_TIME = re.compile(r"(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) ")

Item = tuple[str, list[str]]


def main() -> None:
    """Measure all three."""
    described = parser("evaluation", runs=3, prompts=1, tokens=50_000)
    described.add_argument(
        "--items", type=int, default=200, help="multiple-choice items; default: 200"
    )
    described.add_argument("--text", type=Path, help="a book; default: the shipped tasks' passages")
    described.add_argument(
        "--kv-type", default="auto", help="K/V type for multiple choice; default: auto"
    )
    args = described.parse_args()
    settings = Settings.of(args, tokens=2 * WINDOW)
    text = read_text(args.text)
    results: dict[str, object] = {}
    tool = None
    if settings.peers:
        try:
            tool = build_perplexity(settings.cache, settings.peers_bin)
        except ToolError as error:
            print(f"no llama-perplexity: {error}", file=sys.stderr)
    n_items = 4 if settings.quick else args.items
    with lb.Model(lb.hub.resolve(settings.target)) as model:
        title(model)
        items = make_items(text, n_items)
        results["multiple choice"] = _choices(settings, model, items, tool, args.kv_type)
        results["perplexity"] = _perplexity(settings, model, text, tool)
        results["memory"] = _memory(settings, tool)
        emit("evaluation", settings, {"target": model}, results)


def read_text(path: Path | None) -> str:
    if path is not None:
        return path.read_text("utf-8")
    names = ("last_word", "sentence_order", "true_ending")
    return "\n".join(
        str(item["context"]) for name in names for item in evaluation.suite_items(name)
    )


def make_items(text: str, n: int) -> list[Item]:
    """Return contexts with four choices, all of them from the text."""
    words, rng = text.split(), random.Random(1)
    last = len(words) - _CONTEXT_WORDS
    items = []
    for i in range(n):
        at = i * _CONTEXT_WORDS % last
        starts = [at + _CONTEXT_WORDS, *(rng.randrange(last) for _ in range(3))]
        choices = [" ".join(words[start : start + _CHOICE_WORDS]) for start in starts]
        items.append((" ".join(words[at : at + _CONTEXT_WORDS]), choices))
    return items


# -- multiple choice ---------------------------------------------------------------------------------


def _choices(
    settings: Settings, model: lb.Model, items: Sequence[Item], tool: Path | None, kv_type: str
) -> dict[str, object]:
    requests = [(context, [" " + choice for choice in choices]) for context, choices in items]
    rates: dict[str, list[float]] = {"shared": [], "unshared": [], "llama-perplexity": []}
    path = settings.cache / "choices.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(choice_file(items))
    right: dict[str, float] = {}
    with _context(settings, model, n_ctx=2048, n_seq_max=64, kv_type=kv_type) as ctx:
        for _ in range(settings.runs):
            start = perf_counter()
            shared = evaluation.score(ctx, requests)
            rates["shared"].append(len(items) / (perf_counter() - start))
            start = perf_counter()
            alone = [
                [evaluation.score(ctx, [(context, [choice])])[0][0] for choice in choices]
                for context, choices in requests
            ]
            rates["unshared"].append(len(items) / (perf_counter() - start))
            if ctx.capabilities.batch_invariant and shared != alone:
                raise SystemExit("shared scores are not the unshared ones")
            right["shared"] = sum(best_choice(scores) == 0 for scores in shared) / len(items)
            if tool is not None:
                seconds, log = _run(
                    tool, "-m", model_path(settings), "-bf", path, "--multiple-choice",
                    "--multiple-choice-tasks", 0, "-t", settings.threads, "-c", 16, "-np", 128,
                    "-b", 2048, begin="calculating TruthfulQA", end="Final result",
                )  # fmt: skip
                rates["llama-perplexity"].append(len(items) / seconds)
                match = re.search(r"Final result: ([\d.]+)", log)
                right["llama-perplexity"] = float(match[1]) / 100 if match else float("nan")
        exact, kv_type = ctx.capabilities.batch_invariant, ctx.kv_type
    spreads = {name: Spread.of(values) for name, values in rates.items()}
    base = spreads["shared"].median
    table(
        f"Multiple choice: {len(items)} items of four choices, K/V {kv_type} (llama-perplexity: f16)",
        ("", "items a second", "shared is x times as fast", "right"),
        [
            (
                name,
                pm(spread),
                number(base / spread.median),
                number(right.get(name, float("nan")), 3),
            )
            for name, spread in spreads.items()
            if rates[name]
        ],
    )
    described = {name: spread.as_dict() for name, spread in spreads.items() if rates[name]}
    return {**described, "right": right, "batch_invariant": exact, "kv_type": kv_type}


def best_choice(scores: Sequence[evaluation.Score]) -> int:
    """Return the choice with the largest mean log-probability per token, as llama-perplexity does."""
    means = [score.logprob / len(score.tokens) for score in scores]
    return max(range(len(means)), key=means.__getitem__)


def choice_file(items: Sequence[Item]) -> bytes:
    """Return the items as ``llama-perplexity --multiple-choice`` reads them, the right choice first."""

    def as_bytes(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<I", len(data)) + data

    tasks = []
    for context, choices in items:
        answers = struct.pack("<I", len(choices)) + b"".join(map(as_bytes, choices))
        labels = struct.pack(f"<{len(choices)}i", 1, *[0] * (len(choices) - 1))
        tasks.append(as_bytes(context) + answers + labels + struct.pack("<I", 0))
    at, positions = 4 + 4 * len(tasks), []
    for task in tasks:
        positions.append(at)
        at += len(task)
    return struct.pack(f"<{1 + len(tasks)}I", len(tasks), *positions) + b"".join(tasks)


# -- perplexity ----------------------------------------------------------------------------------------


def _perplexity(
    settings: Settings, model: lb.Model, text: str, tool: Path | None
) -> dict[str, object]:
    tokens = model.tokenize(text)
    n_chunks = min(settings.tokens, len(tokens)) // WINDOW
    if n_chunks < 2:
        return {}
    rates: dict[str, list[float]] = {"llamabranch": [], "llama-perplexity": []}
    values: dict[str, float] = {}
    path = settings.cache / "perplexity.txt"
    path.write_text(text, "utf-8")
    with _context(settings, model, n_ctx=WINDOW, n_seq_max=1, kv_type="f16") as ctx:
        for _ in range(settings.runs):
            start = perf_counter()
            result = evaluation.perplexity(ctx, text, WINDOW, chunks=n_chunks)
            rates["llamabranch"].append(n_chunks * WINDOW / (perf_counter() - start))
            values["llamabranch"] = result.value
            if tool is not None:
                seconds, log = _run(
                    tool, "-m", model_path(settings), "-f", path, "--chunks", n_chunks,
                    "-t", settings.threads, begin="calculating perplexity", end="Final estimate",
                )  # fmt: skip
                rates["llama-perplexity"].append(n_chunks * WINDOW / seconds)
                match = re.search(r"PPL = ([\d.]+)", log)
                values["llama-perplexity"] = float(match[1]) if match else float("nan")
    spreads = {name: Spread.of(values) for name, values in rates.items() if values}
    base = spreads["llamabranch"].median
    table(
        f"Perplexity: {n_chunks} chunks of {WINDOW} tokens, K/V f16",
        ("", "tokens a second", "llamabranch is x times as fast", "perplexity"),
        [
            (name, pm(spread, 1), number(base / spread.median), number(values[name], 4))
            for name, spread in spreads.items()
        ],
    )
    return {**{name: s.as_dict() for name, s in spreads.items()}, "values": values}


# -- memory --------------------------------------------------------------------------------------------

_READ = """
import sys
import llamabranch as lb
from llamabranch import eval as evaluation
rows = int(sys.argv[2])
with lb.load(sys.argv[1], n_ctx=512, n_seq_max=1, kv_type="f16", n_outputs_max=rows) as ctx:
    evaluation.perplexity(ctx, [7 + i % 1000 for i in range(1024)])
"""


def _memory(settings: Settings, tool: Path | None) -> dict[str, object]:
    """Compare the peak memory of processes that read two chunks with a large vocabulary."""
    n_vocab = 4096 if settings.quick else N_VOCAB
    model = cached_wide(settings.cache, n_vocab)
    text = settings.cache / "letters.txt"
    text.write_text("abcdefgh" * 200, "utf-8")
    commands: dict[str, list[str]] = {
        f"llamabranch, {rows} rows": [sys.executable, "-c", _READ, str(model), str(rows)]
        for rows in (64, 256)
    }
    if tool is not None:
        for batch in (512, 2048):
            commands[f"llama-perplexity -b {batch}"] = [
                str(tool), "-m", str(model), "-f", str(text), "-b", str(batch),
                "-t", str(settings.threads),
            ]  # fmt: skip
    peaks = {name: _peak_bytes(command) for name, command in commands.items()}
    table(
        f"Peak memory with {n_vocab:,} tokens, model file {model.stat().st_size / 2**20:,.0f} MiB",
        ("", "MiB"),
        [(name, number(peak / 2**20, 0)) for name, peak in peaks.items()],
    )
    return dict(peaks)


def _peak_bytes(command: Sequence[str]) -> int:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} failed with {process.returncode}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# -- both ----------------------------------------------------------------------------------------------


def _context(
    settings: Settings, model: lb.Model, *, n_ctx: int, n_seq_max: int, kv_type: str = "auto"
) -> lb.Context:
    return lb.Context(
        model, n_ctx=n_ctx, n_seq_max=n_seq_max, kv_type=kv_type,
        n_threads=settings.threads, n_threads_batch=settings.threads,
    )  # fmt: skip


def model_path(settings: Settings) -> Path:
    """Return the file of the target."""
    return lb.hub.resolve(settings.target)


def _run(tool: Path, *arguments: object, begin: str, end: str) -> tuple[float, str]:
    """Run the program; return the seconds between two lines of its log, and the log.

    On a busy machine the last lines of its log can be missing. Then it is run again.
    """
    command = [str(tool), *map(str, arguments)]
    for _ in range(_TRIES):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        log = done.stdout + done.stderr
        times = {}
        for mark in (
            begin,
            end,
        ):  # lines may lack their line break: the last time counts
            matches = _TIME.findall(log.partition(mark)[0]) if mark in log else []
            if matches:
                minutes, seconds, ms, us = map(int, matches[-1])
                times[mark] = 60 * minutes + seconds + ms / 1e3 + us / 1e6
        if done.returncode:
            break
        if len(times) == 2:
            return times[end] - times[begin], log
    raise SystemExit(f"{' '.join(command)} failed: {log.strip()[-800:]}")


if __name__ == "__main__":
    main()
