"""How a job runs, what it has done so far, and what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import pyarrow.fs

__all__ = ["JobOptions", "JobReport", "Progress"]


class JobOptions(TypedDict, total=False):
    """How a job runs; none of this changes a text."""

    workers: int | tuple[int, int]
    cpus: float
    gpus: float
    streams: int
    draft: str | None
    address: str | None
    resume: bool
    sort: bool
    block_rows: int
    local_bytes: int
    format: str
    id_column: str
    keep: Sequence[str]
    price: float | None
    stall_s: float
    filesystem: pyarrow.fs.FileSystem | None
    on_progress: Callable[[Progress], None] | None


@dataclass(frozen=True)
class Progress:
    """What a job has done so far.

    Rows of blocks that were run again count again, so ``rows`` may be ahead of what is written.

    Args:
        rows: rows with a result, those of earlier runs included; n_rows: in all.
        errors: rows without a text, of this run.
        generated_tokens, prompt_tokens: of this run.
        evaluated_tokens: prompt tokens that were not in a cache.
        deaths: worker processes that have died.
        workers: how many have a model.
        seconds: since the workers were asked for.
        cost: so far, if a price is given.
    """

    rows: int
    n_rows: int
    errors: int
    generated_tokens: int
    prompt_tokens: int
    evaluated_tokens: int
    deaths: int
    workers: int
    seconds: float
    cost: float | None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens, or scored ones, per second of this run."""
        tokens = self.generated_tokens or self.prompt_tokens
        return tokens / self.seconds if self.seconds else math.nan


@dataclass(frozen=True)
class JobReport:
    """A job that has ended: every row of its input is in its output, once.

    Args:
        output: the folder of the results.
        n_rows: rows of the output.
        n_errors: of these, rows without a text; their column ``error`` tells why.
        n_resumed: rows that an earlier run had written.
        batch_invariant: whether all workers' contexts were batch-invariant: then the same job gives
            the same bytes again.
        last: what this run has done.
        seed: from which the rows' seeds are derived.
    """

    output: str
    n_rows: int
    n_errors: int
    n_resumed: int
    batch_invariant: bool
    last: Progress
    seed: int

    def as_dict(self) -> dict[str, object]:
        """Return all of it as JSON types."""
        return asdict(self)
