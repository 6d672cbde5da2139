"""Compaction: all sequences are decoded again, in order and without holes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from ..errors import DecodeInterruptedError
from .cell_ledger import n_common
from .decoder import Decoder
from .kv_cache import KVCache

__all__ = ["Replayable", "rewrite_in_order"]


@runtime_checkable
class Replayable(Protocol):
    """A holder that knows which tokens its sequence holds."""

    @property
    def seq_id(self) -> int:
        """The leased sequence."""

    @property
    def position(self) -> int:
        """How many tokens it holds."""

    @property
    def tokens(self) -> list[int]:
        """Their ids."""


def rewrite_in_order(cache: KVCache, decoder: Decoder, holders: Iterable[object]) -> bool:
    """Decode everything again, common prefixes once; False if something there cannot be.

    Raw sequences, and those of a verification under way, are known to their owners only.

    Raises:
        KeyboardInterrupt, DecodeInterruptedError: after all is done; nobody is left without cells.
    """
    lines = [holder for holder in holders if isinstance(holder, Replayable)]
    held = {line.seq_id: cache.next_position(line.seq_id) for line in lines}
    if any(seq_id not in held for seq_id in cache.usage().sequences):
        return False
    if any(held[line.seq_id] > line.position for line in lines):
        return False
    cache.clear()
    done: list[tuple[int, list[int]]] = []
    interruption: KeyboardInterrupt | DecodeInterruptedError | None = None
    for line in sorted(lines, key=lambda line: held[line.seq_id]):
        tokens, source, n = line.tokens[: held[line.seq_id]], -1, 0
        for seq_id, other in done:
            same = n_common(other, tokens)
            if same > n:
                source, n = seq_id, same
        if n:
            cache.share(source, line.seq_id, 0, n)
        while cache.next_position(line.seq_id) < len(tokens):
            try:
                decoder.decode_run(tokens[n:], line.seq_id, "none")
            except (KeyboardInterrupt, DecodeInterruptedError) as error:
                interruption = error
        done.append((line.seq_id, tokens))
    if interruption is not None:
        raise interruption
    return True
