"""What a job will take: a model on paper, and a simulation of the same job to check it.

A worker's time for a row is that of its prompt, as far as no other row has had it read, and of its
output at the throughput of the worker's batch:

    T_row = S / (g r_p) + (P - S) / r_p + D / r_d + o_row

with P prompt tokens of which S begin like those of g rows in a run of one worker, D output tokens, the
rates r_p and r_d of prefill and decoding, and o_row, what Ray Data costs for a row. A block of b rows
takes T_block = b T_row + o_block. A worker that dies with a mean time of M between two deaths loses
half of the blocks it has in hand, and the time to start again; the block that loses least in all takes
about sqrt(2 o_block M) (Young, 1974). The job ends with the worker that has the most blocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter

import numpy as np

from ..arguments import real, whole
from ..context import Context
from ..engine import Engine, Request
from ..errors import ConfigError
from ..sampling import SamplingParams

__all__ = ["JobNumbers", "JobPlan", "WorkerProfile", "measure", "plan", "simulate"]

_BLOCKS_IN_HAND = 2  # of a worker: it works on both at once
_LEAST_BLOCKS = 8  # for each worker, so that few of them wait at the end
_MOST_ROWS = 65536  # of a block
_INT_BYTES, _TEXT_BYTES = (
    8,
    78,
)  # of an id in Ray's filter of a resumed job; text as reported in ray#60200


@dataclass(frozen=True)
class WorkerProfile:
    """What one worker can do.

    Args:
        decode_per_s: tokens generated per second by all streams together.
        prefill_per_s: prompt tokens read per second.
        load_s: seconds from the start of a process to its first decode.
        streams: texts at a time.
        row_s: seconds that Ray Data adds to each row; block_s: to each block, its commit included.
        start_s: seconds of a job before its workers start, and after the last block.
    """

    decode_per_s: float
    prefill_per_s: float
    load_s: float = 5.0
    streams: int = 8
    row_s: float = 0.0002
    block_s: float = 0.1
    start_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("decode_per_s", "prefill_per_s"):
            _positive(self, name)
        for name in ("load_s", "row_s", "block_s", "start_s"):
            _positive(self, name, zero=True)
        object.__setattr__(self, "streams", whole("streams", self.streams, 1))

    def as_dict(self) -> dict[str, object]:
        """Return all of it as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class JobNumbers:
    """The numbers of a job.

    Args:
        rows: how many prompts.
        prompt_tokens: of a prompt, on average.
        output_tokens: of a text, on average.
        shared_tokens: tokens at its beginning that a prompt has in common with others.
        rows_per_prefix: how many rows have such a beginning in common; they lie together once the rows
            are sorted.
        workers: how many.
        price: of one worker for one hour; None = unknown.
        mtbf_h: mean hours between two deaths of one worker; infinite = never.
        block_rows: rows of a block; None = chosen.
        text_ids: ids are text, not int64.
        output_spread: standard deviation of the output's length over its mean, for the simulation.
    """

    rows: int
    prompt_tokens: float
    output_tokens: float
    shared_tokens: float = 0.0
    rows_per_prefix: float = 1.0
    workers: int = 1
    price: float | None = None
    mtbf_h: float = math.inf
    block_rows: int | None = None
    text_ids: bool = False
    output_spread: float = 0.5

    def __post_init__(self) -> None:
        for name in ("rows", "workers"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        if self.block_rows is not None:
            object.__setattr__(self, "block_rows", whole("block_rows", self.block_rows, 1))
        for name in ("prompt_tokens", "output_tokens", "shared_tokens", "output_spread"):
            _positive(self, name, zero=True)
        for name in ("rows_per_prefix", "mtbf_h"):
            _positive(self, name, infinite=name == "mtbf_h")
        if self.price is not None:
            _positive(self, "price", zero=True)
        if self.shared_tokens > self.prompt_tokens:
            raise ConfigError("shared_tokens must not exceed prompt_tokens")
        if self.rows_per_prefix < 1:
            raise ConfigError("rows_per_prefix must be at least 1")


@dataclass(frozen=True)
class JobPlan:
    """What a job will take.

    Attributes:
        seconds: from the start to the last commit.
        row_s: of one worker for a row.
        block_rows, block_s: of a block.
        n_blocks: how many there are; each is a data file and a file of ids.
        efficiency: the share of the workers' time that makes tokens.
        lost_s: workers' seconds that deaths cost; deaths: how many there will be.
        tokens_per_s: output tokens per second of all workers.
        cost, cost_per_million: in the currency of the price, and for a million output tokens.
        id_bytes: of the ids that a resumed job holds in memory when nearly all rows are done.
    """

    seconds: float
    row_s: float
    block_rows: int
    block_s: float
    n_blocks: int
    efficiency: float
    lost_s: float
    deaths: float
    tokens_per_s: float
    cost: float | None
    cost_per_million: float | None
    id_bytes: int

    def as_dict(self) -> dict[str, object]:
        """Return all of it as JSON types."""
        return asdict(self)


def plan(profile: WorkerProfile, job: JobNumbers) -> JobPlan:
    """Return what a job will take, by the model of this module.

    Raises:
        ConfigError: workers die faster than they can finish a block.
    """
    row_s = _row_s(profile, job)
    block_rows = job.block_rows or _best_block(profile, job, row_s)
    block_s = block_rows * row_s + profile.block_s
    n_blocks = math.ceil(job.rows / block_rows)
    useful_s = job.rows * row_s
    work_s = useful_s + n_blocks * profile.block_s
    mtbf_s = job.mtbf_h * 3600
    # A death costs half of what the worker has in hand, and a start. Repeated work can be lost again.
    death_s = _BLOCKS_IN_HAND * block_s / 2 + profile.load_s
    if death_s >= mtbf_s:
        raise ConfigError(
            f"a worker that dies every {job.mtbf_h:g} hours loses more than it does with blocks of "
            f"{block_s:.0f} s",
            hint="use smaller blocks",
        )
    total_s = work_s / (1 - death_s / mtbf_s)
    # The worker with the most blocks ends last; the others wait for it.
    rounds, others = divmod(n_blocks - 1, job.workers)
    rest = job.rows - (n_blocks - 1) * block_rows  # rows of the last block
    longest_s = rounds * block_s + (block_s if others else rest * row_s + profile.block_s)
    idle_s = max(0.0, longest_s - work_s / job.workers)
    seconds = profile.start_s + profile.load_s + total_s / job.workers + idle_s
    output = job.rows * job.output_tokens
    cost = None if job.price is None else job.price * job.workers * seconds / 3600
    return JobPlan(
        seconds=seconds,
        row_s=row_s,
        block_rows=block_rows,
        block_s=block_s,
        n_blocks=n_blocks,
        efficiency=useful_s / (job.workers * seconds),
        lost_s=total_s - work_s,
        deaths=total_s / mtbf_s,
        tokens_per_s=output / seconds,
        cost=cost,
        cost_per_million=None if cost is None or not output else 1e6 * cost / output,
        # One array, and its copy while it is sorted.
        id_bytes=2 * job.rows * (_TEXT_BYTES if job.text_ids else _INT_BYTES),
    )


def simulate(profile: WorkerProfile, job: JobNumbers, *, seed: int = 0) -> float:
    """Return the seconds of a job that is played through, block by block.

    Output lengths vary from row to row, workers die at random moments, their blocks go to the others
    at once, and a worker that has died comes back after ``load_s``.

    Args:
        profile, job: as for `plan`.
        seed: of the lengths and the deaths.
    """
    block_rows = plan(profile, job).block_rows
    rng = np.random.default_rng(seed)
    shared_s = job.shared_tokens / profile.prefill_per_s
    own_s = (job.prompt_tokens - job.shared_tokens) / profile.prefill_per_s + profile.row_s
    n_blocks = math.ceil(job.rows / block_rows)
    left: list[float] = []
    for number in range(n_blocks):
        n = min(block_rows, job.rows - number * block_rows)
        tokens = _lengths(rng, job, n)
        prefixes = math.ceil(n / job.rows_per_prefix)
        left.append(n * own_s + prefixes * shared_s + float(tokens.sum()) / profile.decode_per_s)
    left.reverse()  # taken from the end
    workers = [(profile.start_s + profile.load_s, i) for i in range(job.workers)]
    heapq.heapify(workers)
    mean_s, end = job.mtbf_h * 3600, 0.0
    deaths = [
        float(rng.exponential(mean_s)) if math.isfinite(mean_s) else math.inf for _ in workers
    ]
    deaths = [profile.start_s + profile.load_s + one for one in deaths]
    while left:
        now, worker = heapq.heappop(workers)
        # The blocks in hand share the worker: they end one after the other in the same time.
        mine = [left.pop() for _ in range(min(_BLOCKS_IN_HAND, _fair(len(left), job.workers)))]
        share, finished = now, 0
        for block in mine:
            share += block + profile.block_s
            if share > deaths[worker]:
                break
            finished += 1
            end = max(end, share)
        if finished < len(mine):
            left += mine[finished:]
            now = deaths[worker] + profile.load_s
            deaths[worker] = now + float(rng.exponential(mean_s))
        else:
            now = share
        heapq.heappush(workers, (now, worker))
    return end


def _fair(n_left: int, n_workers: int) -> int:
    """Return how many blocks a worker takes: near the end only one."""
    return max(1, math.ceil(n_left / n_workers))


def _lengths(rng: np.random.Generator, job: JobNumbers, n: int) -> np.ndarray:
    if not (job.output_spread and job.output_tokens):
        return np.full(n, job.output_tokens)
    shape = 1 / job.output_spread**2
    return rng.gamma(shape, job.output_tokens / shape, n)


def measure(
    context: Context,
    load_s: float,
    *,
    prompt_tokens: int = 256,
    output_tokens: int = 32,
    rounds: int = 2,
) -> WorkerProfile:
    """Measure what one worker of this machine can do, with up to ``context.n_seq_max`` texts at a time.

    Takes a few hundred decodes. The best number of texts is chosen from 1, 2, 4, ... A prefix cache is
    filled first, as that of a worker is most of the time: attention then reads more cells.

    Args:
        context: with a model, opened like a worker's.
        load_s: the seconds it took to open.
        prompt_tokens: of the prompt that is read.
        output_tokens: tokens of each text that is generated.
        rounds: how often each is measured; the fastest counts.
    """
    sampling = SamplingParams(seed=1, logprobs=False)
    n_vocab = context.n_vocab
    least = context.n_ctx // context.n_seq_max
    prompt_tokens = max(1, min(prompt_tokens, least // 2))
    output_tokens = max(1, min(output_tokens, least // 2))
    endless = sampling.replace(logit_bias=dict.fromkeys(context.model.eog_tokens, -math.inf))

    rng = np.random.default_rng(1)

    def seconds(n: int, n_prompt: int, n_output: int, n_rounds: int = rounds) -> float:
        best = math.inf
        for _ in range(n_rounds):
            prompts = rng.integers(0, n_vocab, (n, n_prompt)).tolist()
            requests = [Request(p, max_tokens=n_output, sampling=endless) for p in prompts]
            begin = perf_counter()
            Engine(context, seed=1).generate(requests)
            best = min(best, perf_counter() - begin)
        return best

    seconds(1, 8, 2)  # loads the weights from disk into memory
    if context.prefix_cache is not None:
        seconds(math.ceil(context.n_ctx / prompt_tokens), prompt_tokens, 1, 1)
    first_s = seconds(1, prompt_tokens, 1)
    prefill = prompt_tokens / max(first_s, 1e-9)
    rates: dict[int, float] = {}
    for n in _doubling(context.n_seq_max):
        spent = seconds(n, 8, output_tokens + 1) - seconds(n, 8, 1)
        rates[n] = n * output_tokens / max(spent, 1e-9)
    streams = max(rates, key=lambda n: rates[n])
    return WorkerProfile(rates[streams], prefill, load_s=load_s, streams=streams)


def _doubling(most: int) -> Iterator[int]:
    n = 1
    while n < most:
        yield n
        n *= 2
    yield most


def _row_s(profile: WorkerProfile, job: JobNumbers) -> float:
    shared = job.shared_tokens / job.rows_per_prefix
    own = job.prompt_tokens - job.shared_tokens
    decode_s = job.output_tokens / profile.decode_per_s
    return (shared + own) / profile.prefill_per_s + decode_s + profile.row_s


def _best_block(profile: WorkerProfile, job: JobNumbers, row_s: float) -> int:
    """Return the rows of the block that loses least to commits, deaths and the end of the job."""
    mtbf_s = job.mtbf_h * 3600
    seconds = math.inf if mtbf_s == math.inf else math.sqrt(2 * profile.block_s * mtbf_s)
    most = math.ceil(job.rows / (_LEAST_BLOCKS * job.workers))
    rows = _MOST_ROWS if seconds == math.inf else seconds / row_s
    return int(max(1, min(rows, most, _MOST_ROWS)))


def _positive(
    holder: WorkerProfile | JobNumbers, name: str, *, zero: bool = False, infinite: bool = False
) -> None:
    value = real(name, getattr(holder, name))
    if not (value > 0 or (zero and value == 0)) or (value == math.inf and not infinite):
        raise ConfigError(f"{name} must be {'at least' if zero else 'more than'} 0, not {value}")
    object.__setattr__(holder, name, value)
