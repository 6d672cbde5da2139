"""Compaction: write all sequences again, in order and without holes in the cache.

If a copy out of the cache and back keeps every bit, the K/V is copied, which is fast. Otherwise the
tokens are decoded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from ..errors import DecodeInterruptedError, SnapshotError
from ..native.context import release_threads
from ..native.interrupts import call_in_thread
from .memory import Memory
from .prefix_cache import CachedPrefix, PrefixCache, longest_prefix
from .runner import Runner, decode_run

# How to write a text: share the cells of its first tokens with another sequence, then write the rest.
_Step = tuple[CachedPrefix, int, int]  # the text, that sequence, how many tokens are shared


@runtime_checkable
class Replayable(Protocol):
    """An object that owns a sequence and has the token ids in it.

    Attributes:
        seq_id: its sequence.
        position: how many tokens it holds.
        tokens: their ids.
    """

    seq_id: int
    position: int
    tokens: list[int]


def rewrite_in_order(
    runner: Runner, holders: Iterable[object], prefixes: PrefixCache | None
) -> bool:
    """Write all sequences again, common prefixes once; return False if that is impossible.

    It is impossible with raw sequences, or while drafts are verified, because the context does not know
    those tokens. Memory that does not keep its cells in order does not need it. The caller holds the
    lock.

    Args:
        runner: decodes the tokens if their K/V cannot be copied; its memory has the cells.
        holders: the owners of the sequences.
        prefixes: the prefix cache. It loses its texts if tokens are decoded again.

    Raises:
        KeyboardInterrupt, DecodeInterruptedError: only after every sequence has its cells again.
    """
    memory = runner.memory
    if not memory.order.is_kept:
        return False
    owners = [holder for holder in holders if isinstance(holder, Replayable)]
    ends = {owner.seq_id: memory.next_position(owner.seq_id) for owner in owners}
    if any(seq_id not in ends for seq_id in memory.usage().sequences):
        return False
    if any(ends[owner.seq_id] > owner.position for owner in owners):
        return False
    texts = [CachedPrefix(owner.tokens[: ends[owner.seq_id]], owner.seq_id) for owner in owners]
    if memory.can_move:
        cached = [] if prefixes is None else prefixes.texts()
        if _copy(memory, _plan([*texts, *cached]), cached):
            return True
    if prefixes is not None:
        prefixes.clear()
    release_threads()  # the other thread gets its own team
    call_in_thread(lambda: _decode_again(runner, _plan(texts)))
    return True


def _plan(texts: Iterable[CachedPrefix]) -> list[_Step]:
    """Return the order in which to write the texts; a prefix comes before texts that continue it."""
    written: list[CachedPrefix] = []
    plan = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        n, source = longest_prefix(written, text.tokens)
        plan.append((text, -1 if source is None else source.seq_id, n))
        if n < len(text.tokens):
            written.append(text)
    return plan


def _copy(memory: Memory, plan: list[_Step], cached: list[CachedPrefix]) -> bool:
    """Copy the K/V of all sequences out of the cache and back; False if llama.cpp refuses.

    It runs in its own thread, so that Ctrl-C waits until it is complete.
    """

    def move() -> bool:
        try:
            pieces = {
                text: memory.piece(text.seq_id, n) for text, _, n in plan if n < len(text.tokens)
            }
            hidden = memory.hidden
            rows = {} if hidden is None else {t.seq_id: hidden.of(t.seq_id) for t, _, _ in plan}
            memory.clear()
            for text in cached:
                memory.keep(text.seq_id)
            for text, source, n in plan:
                if n:
                    memory.fork(source, text.seq_id, n)
                if text in pieces:
                    memory.place(text.seq_id, pieces.pop(text), n, len(text.tokens) - n)
            if hidden is not None:
                for seq_id, states in rows.items():
                    hidden.set_all(seq_id, states)
            return True
        except (SnapshotError, MemoryError):
            return False

    return call_in_thread(move)


def _decode_again(runner: Runner, plan: list[_Step]) -> None:
    """Clear the cache, and decode the tokens of all sequences.

    It runs in its own thread, as ``_copy`` does, so that a pending Ctrl-C does not stop its decodes.
    """
    memory = runner.memory
    memory.clear()
    interruption: KeyboardInterrupt | DecodeInterruptedError | None = None
    for text, source, n in plan:
        if n:
            memory.fork(source, text.seq_id, n)
        while (start := memory.next_position(text.seq_id)) < len(text.tokens):
            try:
                decode_run(runner, text.tokens[start:], text.seq_id, "none")
            except (KeyboardInterrupt, DecodeInterruptedError) as error:
                interruption = error
    if interruption is not None:
        raise interruption
