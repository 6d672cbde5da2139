"""Packs the tokens of any number of sequences into decodes, and gives each its rows of logits.

A batch takes *runs*: tokens that go to the end of a sequence, and which of their logits are wanted. They
are decoded in the order in which they were added, together if they fit into one decode, else in as few
decodes as possible; if one of these fails, none of the runs is in the cache. What comes back are the
wanted rows of each run. Tokens must be valid, and the caller holds the context's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from .decoder import Decoder
from .logits import LogitsRow

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
        """Add tokens that belong to several sequences, see ``Decoder.decode_tree``; then no others.

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
        decoder: Decoder,
        expiring: Iterable[LogitsRow] = (),
        *,
        states: npt.NDArray[np.float32] | None = None,
        read: Callable[[int, list[LogitsRow]], None] | None = None,
    ) -> list[list[LogitsRow]]:
        """Decode all runs; return the rows of each. All of them are in the cache then, or none.

        Args:
            decoder: of the context.
            expiring: rows that need not survive, because these replace them.
            states: what a head reads with each token, float32 (n, n_embd).
            read: called after each decode with the number of rows before it and its own, which are
                valid until it returns; no row is copied or returned then.

        Raises:
            CacheFullError, DecodeError: no sequence has changed. And what ``read`` raises.
        """
        cache, handle = decoder.cache, decoder.handle
        tokens, seqs, wants = self.tokens, self.seqs, self.wants
        pieces = list(self._pieces(handle.n_chunk, handle.n_outputs_max)) if tokens else []
        if len(pieces) > 1:
            expiring = ()  # a later decode may fail after an earlier one has overwritten the row
            decoder.make_room(len(tokens))
        starts = {seq_id: cache.next_position(seq_id) for seq_id in set(seqs)}
        rows: list[LogitsRow] = []
        n_read = 0
        try:
            for low, high in pieces:
                for row in rows:  # the next decode overwrites the buffer
                    row.detach()
                part = slice(low, high)
                if self.members:
                    where = self.positions[part], self.members[part]
                    new = decoder.decode_tree(tokens[part], *where, wants[part])
                else:
                    its = None if states is None else states[part]
                    new = decoder.decode(tokens[part], seqs[part], wants[part], expiring, its)
                if read is None:
                    rows += new
                else:
                    read(n_read, new)
                    n_read += len(new)
        except BaseException:
            for seq_id, start in starts.items():
                if cache.next_position(seq_id) > start:
                    cache.cut(seq_id, start)
            raise
        given = iter(rows)
        return [list(islice(given, n)) for n in self.n_rows]

    def _pieces(self, most: int, most_rows: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of each decode: at most ``most`` tokens, at most ``most_rows`` rows."""
        low = rows = 0
        for i, wants in enumerate(self.wants):
            if i - low == most or rows + wants > most_rows:
                yield low, i
                low, rows = i, 0
            rows += wants
        yield low, len(self.wants)


def decode_run(
    decoder: Decoder,
    tokens: Sequence[int],
    seq_id: int,
    logits: str,
    expiring: Iterable[LogitsRow] = (),
) -> list[LogitsRow]:
    """Decode any number of tokens of one sequence, all of them or none; return the rows wanted."""
    batch = Batch()
    batch.add(seq_id, tokens, logits)
    return batch.decode(decoder, expiring)[0]
