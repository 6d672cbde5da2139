"""Compaction: decode all sequences again, in order and without holes in the cache."""

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
    """Decode all sequences again, common prefixes once; False if the tokens of one are unknown.

    The context does not know the tokens of raw sequences, nor of those a verification is using.

    Raises:
        KeyboardInterrupt, DecodeInterruptedError: only after every sequence has its cells again.
    """
    owners = [holder for holder in holders if isinstance(holder, Replayable)]
    held = {owner.seq_id: cache.next_position(owner.seq_id) for owner in owners}
    if any(seq_id not in held for seq_id in cache.usage().sequences):
        return False
    if any(held[owner.seq_id] > owner.position for owner in owners):
        return False
    cache.clear()
    done: list[tuple[int, list[int]]] = []
    interruption: KeyboardInterrupt | DecodeInterruptedError | None = None
    for owner in sorted(owners, key=lambda owner: held[owner.seq_id]):
        tokens, source, n = owner.tokens[: held[owner.seq_id]], -1, 0
        for seq_id, other in done:
            same = n_common(other, tokens)
            if same > n:
                source, n = seq_id, same
        if n:
            cache.share(source, owner.seq_id, 0, n)
        while cache.next_position(owner.seq_id) < len(tokens):
            try:
                decoder.decode_run(tokens[n:], owner.seq_id, "none")
            except (KeyboardInterrupt, DecodeInterruptedError) as error:
                interruption = error
        done.append((owner.seq_id, tokens))
    if interruption is not None:
        raise interruption
    return True
