"""Packs the tokens of any number of sequences into decodes, and gives each its rows of logits.

A batch takes *runs*: tokens that go to the end of a sequence, and which of their logits are wanted. They
are decoded in the order in which they were added, together if they fit into one decode, else in as few
decodes as possible; if one of these fails, none of the runs is in the cache. What comes back are the
wanted rows of each run. Tokens must be valid, and the caller holds the context's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from .logits import LogitsRow
from .runner import Runner

__all__ = ["Batch", "decode_run"]


class Batch:
    """Runs of tokens that are decoded together.

    Attributes:
        tokens, seqs, wants: for each token its id, its sequence, and whether its logits are wanted.
        positions, members: of a batch of shared runs for each token its position and its sequences.
        n_rows: for each run how many rows it gets.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.seqs: list[int] = []
        self.wants: list[bool] = []
        self.positions: list[int] = []
        self.members: list[Sequence[int]] = []
        self.n_rows: list[int] = []

    def add(self, seq_id: int, tokens: Sequence[int], logits: str | int = "last") -> None:
        """Add tokens that follow what ``seq_id`` holds, earlier runs of this batch included.

        Args:
            seq_id: the sequence.
            tokens: ids, at least one.
            logits: the rows wanted: "all", "last" or "none", or those from a token of this number on.
        """
        n = len(tokens)
        if isinstance(logits, str):
            logits = 0 if logits == "all" else n - (logits == "last")
        n_rows = max(0, n - logits)
        self.tokens += tokens
        self.seqs += [seq_id] * n
        self.wants += [False] * (n - n_rows) + [True] * n_rows
        self.n_rows.append(n_rows)

    def add_shared(
        self, members: Sequence[int], position: int, tokens: Sequence[int], first_row: int
    ) -> None:
        """Add tokens that belong to several sequences, see ``Runner.decode_tree``; then no others.

        Args:
            members: the sequences.
            position: of the first token, the same in all of them.
            tokens: ids, at least one.
            first_row: the number of the first token whose logits are wanted.
        """
        self.add(members[0], tokens, first_row)
        self.positions += range(position, position + len(tokens))
        self.members += [members] * len(tokens)

    def decode(
        self,
        runner: Runner,
        expiring: Iterable[LogitsRow] = (),
        *,
        states: npt.NDArray[np.float32] | None = None,
        read: Callable[[int, list[LogitsRow]], None] | None = None,
    ) -> list[list[LogitsRow]]:
        """Decode all runs; return the rows of each. All of them are in the cache then, or none.

        Args:
            runner: of the context.
            expiring: rows that need not survive, because these replace them.
            states: what a head reads with each token, float32 (n, n_embd).
            read: called after each decode with the number of rows before it and its own, which are
                valid until it returns; no row is copied or returned then.

        Raises:
            CacheFullError, DecodeError: no sequence has changed. And what ``read`` raises.
        """
        rows: list[LogitsRow] = []
        if self.members:
            rows = runner.decode_tree(self.tokens, self.positions, self.members, self.wants, read)
        elif self.tokens:
            expiring = list(expiring)
            rows = runner.decode(self.tokens, self.seqs, self.wants, expiring, states, read)
        given = iter(rows)
        return [list(islice(given, n)) for n in self.n_rows]


def decode_run(
    runner: Runner,
    tokens: Sequence[int],
    seq_id: int,
    logits: str,
    expiring: Iterable[LogitsRow] = (),
) -> list[LogitsRow]:
    """Decode any number of tokens of one sequence, all of them or none; return the rows wanted."""
    batch = Batch()
    batch.add(seq_id, tokens, logits)
    return batch.decode(runner, expiring)[0]
