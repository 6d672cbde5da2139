"""How long a job on a cluster will take: the formula of docs/scale.md with a worker's measured rates.

python -m benchmarks.plan_job 1000000 --prompt 400 --output 150 --workers 64 --price 0.085 --mtbf 12
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np

import llamabranch as lb
from llamabranch import ConfigError, Context, Engine, Request, SamplingParams

__all__ = ["JobNumbers", "JobPlan", "measure"]

ROW_S, BLOCK_S, START_S = 0.0002, 0.1, 10.0  # what Ray Data adds to a row, a block and a job
_MOST_ROWS = 65536  # of a block; each worker should have eight blocks, so that few wait at the end


@dataclass(frozen=True)
class JobPlan:
    """The plan of a job.

    Attributes:
        seconds: of the whole job.
        row_s: seconds of a row.
        block_s: seconds of a block.
        block_rows: rows of a block.
        n_blocks: the number of blocks.
        deaths: how many times a worker will die.
        efficiency: the share of the workers' time that computes rows, once each.
        tokens_per_s: tokens generated per second by all workers.
        cost: in the unit of the price; None without a price.
    """

    seconds: float
    row_s: float
    block_s: float
    block_rows: int
    n_blocks: int
    deaths: float
    efficiency: float
    tokens_per_s: float
    cost: float | None


@dataclass(frozen=True)
class JobNumbers:
    """The numbers of a job.

    Args:
        rows, workers: the number of prompts, and of worker processes.
        prompt_tokens, output_tokens: the mean length of a prompt, and of an output.
        decode_per_s, prefill_per_s: tokens a worker generates, and reads, per second: see `measure`.
        shared_tokens: the length of the prefix that ``rows_per_prefix`` prompts share.
        mtbf_h: mean hours between two deaths of one worker; infinite = never.
        load_s: seconds from the start of a worker to its first decode.
        block_rows: rows of a block; None = the number that loses the least time.
        price: the price of one worker for one hour.
    """

    rows: int
    prompt_tokens: float
    output_tokens: float
    decode_per_s: float
    prefill_per_s: float
    shared_tokens: float = 0.0
    rows_per_prefix: float = 1.0
    workers: int = 1
    mtbf_h: float = math.inf
    load_s: float = 5.0
    block_rows: int | None = None
    price: float | None = None

    def plan(self) -> JobPlan:
        """Return the plan of the job.

        Raises:
            ConfigError: workers die faster than they can finish a block.
        """
        read = self.prompt_tokens - self.shared_tokens * (1 - 1 / self.rows_per_prefix)
        row_s = read / self.prefill_per_s + self.output_tokens / self.decode_per_s + ROW_S
        mtbf_s = self.mtbf_h * 3600
        most = min(math.ceil(self.rows / (8 * self.workers)), _MOST_ROWS)
        best = min(math.sqrt(2 * BLOCK_S * mtbf_s) / row_s, most)  # Young, 1974
        b = self.block_rows or max(1, int(best))
        block_s, n_blocks = b * row_s + BLOCK_S, math.ceil(self.rows / b)
        work_s = self.rows * row_s + n_blocks * BLOCK_S
        death_s = block_s + self.load_s  # half of the two blocks in hand, and a start
        if death_s >= mtbf_s:
            why = f"a worker that dies every {self.mtbf_h:g} hours finishes no block of {block_s:.0f} s"
            raise ConfigError(why, hint="use smaller blocks")
        total_s = work_s / (1 - death_s / mtbf_s)  # repeated work can be lost again
        # The worker with the most blocks ends last; the others wait for it.
        rounds, others = divmod(n_blocks - 1, self.workers)
        last_s = block_s if others else (self.rows - (n_blocks - 1) * b) * row_s + BLOCK_S
        idle_s = max(0.0, rounds * block_s + last_s - work_s / self.workers)
        seconds = START_S + self.load_s + total_s / self.workers + idle_s
        useful = self.rows * row_s / (self.workers * seconds)
        rate = self.rows * self.output_tokens / seconds
        cost = None if self.price is None else self.price * self.workers * seconds / 3600
        return JobPlan(seconds, row_s, block_s, b, n_blocks, total_s / mtbf_s, useful, rate, cost)


def measure(context: Context) -> tuple[float, float, int]:
    """Return the tokens generated and read per second, and the best number of texts at a time.

    The numbers 1, 2, 4, ... are tried. A prefix cache is filled first. A worker's cache is full most of
    the time, and then attention reads more cells.
    """
    endless = dict.fromkeys(context.model.eog_tokens, -math.inf)
    sampling = SamplingParams(seed=1, logprobs=False, logit_bias=endless)
    longest = max(1, context.n_ctx // context.n_seq_max // 2)
    n_read, n_written = min(256, longest), min(32, longest)
    rng = np.random.default_rng(1)

    def seconds(n: int, n_prompt: int, n_output: int, rounds: int = 2) -> float:
        best = math.inf
        for _ in range(rounds):
            prompts = rng.integers(0, context.n_vocab, (n, n_prompt)).tolist()
            requests = [Request(p, max_tokens=n_output, sampling=sampling) for p in prompts]
            begin = perf_counter()
            Engine(context, seed=1).generate(requests)
            best = min(best, perf_counter() - begin)
        return max(best, 1e-9)

    filling = math.ceil(context.n_ctx / n_read) if context.prefix_cache is not None else 1
    seconds(filling, n_read, 1, 1)  # reads the weights from disk, too
    rates = {}
    for n in {*(2**i for i in range(context.n_seq_max.bit_length())), context.n_seq_max}:
        rates[n] = n * n_written / max(seconds(n, 8, n_written + 1) - seconds(n, 8, 1), 1e-9)
    streams = max(rates, key=lambda n: rates[n])
    return rates[streams], n_read / seconds(1, n_read, 1), streams


def main() -> None:
    """Measure a worker on this machine, and print how long the job will take."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("rows", type=int)
    parser.add_argument("--model", default="tale-target")
    parser.add_argument("--prompt", type=float, default=100.0, help="tokens of a prompt")
    parser.add_argument("--output", type=float, default=100.0, help="tokens of a text")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--mtbf", type=float, default=math.inf, help="hours between two deaths")
    parser.add_argument("--price", type=float, default=0.0, help="price of a worker for an hour")
    args = parser.parse_args()
    with lb.load(args.model, prefix_cache=True) as context:
        decode, prefill, streams = measure(context)
    job = JobNumbers(
        args.rows, args.prompt, args.output, decode, prefill,
        workers=args.workers, mtbf_h=args.mtbf, price=args.price,
    )  # fmt: skip
    plan = job.plan()
    print(f"{decode:.0f} tokens/s written, {streams} texts at a time; {prefill:.0f} read")
    print(f"{plan.seconds / 3600:.2f} h, blocks of {plan.block_rows} rows, cost {plan.cost:.2f}")


if __name__ == "__main__":
    main()
