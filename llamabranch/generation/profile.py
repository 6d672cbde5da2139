"""What is kept between runs about a target and its drafters: costs and acceptance, for ``auto``.

Two sections of the machine's profile (:mod:`llamabranch.profile`). ``decode_times`` holds t(1) and v(n)
of a target, ``drafters`` the cost c and the acceptance of a drafter with that target; the keys name the
machine, the models by their fingerprints, the K/V type and the numbers of threads. They decide how long
drafts are and nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic, perf_counter, strftime

from ..context import Context
from ..context.runner import Batch
from ..errors import DecodeInterruptedError, LlamaBranchError
from ..native import forkable_lock
from ..profile import Entry, is_off, machine_key, read_entry, write_entries
from .config import SpeculativeConfig
from .drafter import Drafter
from .length.acceptance import AcceptanceCounts
from .length.auto import AutoLength, draft_length
from .length.base import DraftLength
from .length.known import Known, KnownDrafter

__all__ = ["PairProfile", "context_key", "keep_decode_times"]

_TIMES, _DRAFTERS = "decode_times", "drafters"

# Weights that a processor's caches hold are computed about as fast for one token as they are read, so
# verifying n tokens costs nearly n steps: drafting gains little, and learning while it runs costs little.
LEAST_BYTES = 32 << 20
_MOST_ROWS = 33  # of the decodes that are timed while nothing runs
_MOST_S = 0.25  # of a decode that is timed
_EACH = 4  # timed decodes of each size, unless the profile has as many: the fastest counts
_MOST_WEIGHT = 64.0  # decodes, or drafts, that all earlier runs together count as: so old ones fade
_MOST_SIZES = 48
_SAVE_EVERY_S = 5.0


class PairProfile:
    """What the machine's profile has about a target with its drafter, and what is added to it.

    Args:
        target, drafter: the pair.
        batched: whether several streams draft together, which changes what a draft step costs.
        n_rows: the most tokens that decodes will usually have.
    """

    def __init__(
        self, target: Context, drafter: Drafter, *, batched: bool, n_rows: int = _MOST_ROWS
    ) -> None:
        self._trial = _Trial(target)
        self._to_time: deque[int] = deque()  # sizes of decodes
        self._timed: dict[int, list[float]] = {}
        self._known = Known(estimates=drafter.estimates)
        self._saved_at = -math.inf
        self._n_saved = 0.0
        self._is_off = is_off()
        if self._is_off:
            return
        try:
            self._target_key = _target_key(target)
            pair = self._target_key + (", batched, " if batched else ", ")
            self._keys = {name: pair + key for name, key in drafter.profile_keys.items()}
        except OSError:  # the file of a model is gone
            self._is_off = True
            return
        times = _times(read_entry(_TIMES, self._target_key))
        if times is not None:  # c and v(n) are ratios: without t(1) they are of no use
            found = {name: _drafter(read_entry(_DRAFTERS, key)) for name, key in self._keys.items()}
            drafters = {name: each for name, each in found.items() if each is not None}
            self._known = replace(times, drafters=drafters, estimates=drafter.estimates)
        sizes = range(1, _most_rows(target, n_rows) + 1)
        if any(self._known.n_decodes.get(n, 0.0) < _EACH for n in sizes):
            self._to_time.extend([*sizes] * _EACH)

    @classmethod
    def open(
        cls, target: Context, drafter: Drafter, config: SpeculativeConfig, *, batched: bool = False
    ) -> tuple[DraftLength, PairProfile | None]:
        """Return the draft length that ``config`` sets, and for "auto" where its findings are kept."""
        if isinstance(config.draft_k, int):
            return draft_length(config), None
        n_rows = config.max_draft_tokens + (target.n_seq_max if batched else 1)
        profile = cls(target, drafter, batched=batched, n_rows=n_rows)
        length = draft_length(config, drafter.width, profile.known())
        if isinstance(length, AutoLength):
            length.curve.fills = target.capabilities.batch_invariant and target.kv_cache.can_pad
        return length, profile

    def known(self) -> Known:
        """Return what the profile has."""
        return self._known

    def measure(self, length: DraftLength) -> bool:
        """Time one decode, for moments in which nobody waits; False once enough are known.

        The sizes take turns, so that what else the machine does affects all; ``length`` gets them in the
        end.
        """
        if self._is_off or not isinstance(length, AutoLength) or not self._to_time:
            return False
        n = self._to_time[0]
        seconds = self._trial.seconds(n)
        if seconds is None:
            return True
        self._timed.setdefault(n, []).append(seconds)
        self._to_time.popleft()
        if seconds > _MOST_S and len(self._timed[n]) == 1:
            self._to_time = deque(size for size in self._to_time if size < n)
        if self._to_time:
            return True
        for n, its in self._timed.items():
            length.curve.measure(n, min(its), len(its))
        self.save(length, at_once=True)
        return False

    def end_measuring(self) -> None:
        """Stop a decode of ``measure``, if one is running, since somebody waits. From any thread."""
        self._trial.end()

    def save(self, length: DraftLength, *, at_once: bool = False) -> None:
        """Add what ``length`` has found to the profile; at most once in some seconds."""
        if self._is_off or (not at_once and monotonic() - self._saved_at < _SAVE_EVERY_S):
            return
        findings = length.findings() if isinstance(length, AutoLength) else None
        if findings is None or sum(findings.n_decodes.values()) == self._n_saved:
            return
        self._n_saved = sum(findings.n_decodes.values())
        entries = [(_TIMES, self._target_key, _times_entry(_merged(self._known, findings)))]
        for name, found in findings.drafters.items():
            if name in self._keys:
                entry = _drafter_entry(self._known.drafters.get(name), found)
                entries.append((_DRAFTERS, self._keys[name], entry))
        write_entries(entries)
        self._saved_at = monotonic()


def context_key(ctx: Context) -> str:
    """Return what identifies a context's model and the speed of its decodes.

    Raises:
        OSError: the model's file is gone.
    """
    place = "gpu" if ctx.model.on_gpu else f"{ctx.n_threads}+{ctx.n_threads_batch} threads"
    return f"{ctx.model.fingerprint[:32]} {ctx.kv_type} {place}"


def _target_key(ctx: Context) -> str:
    return f"{machine_key()}, {context_key(ctx)}"


def keep_decode_times(target: Context, seconds: Mapping[int, float]) -> None:
    """Store t(n) as measured by a benchmark, in place of what the profile has of these sizes."""
    if is_off() or 1 not in seconds:
        return
    try:
        key = _target_key(target)
    except OSError:
        return
    kept = _times(read_entry(_TIMES, key)) or Known()
    weights = {**kept.n_decodes, **dict.fromkeys(seconds, _MOST_WEIGHT)}
    known = Known({**_paced(kept, seconds[1]), **seconds}, n_decodes=weights)
    write_entries([(_TIMES, key, _times_entry(known))])


# -- measuring -----------------------------------------------------------------------------------------


def _most_rows(ctx: Context, n_rows: int) -> int:
    """Return the largest decode to time; 0 for weights or memory with which times are of no use."""
    if ctx.model.size_bytes < LEAST_BYTES or not ctx.kv_cache.can_draft:
        return 0
    return min(n_rows, _MOST_ROWS, ctx.n_outputs_max, ctx.n_ctx_seq)


class _Trial:
    """A decode that is timed while nobody waits; it holds its sequence."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._lock = forkable_lock()
        self._is_running = self._is_ended = False

    def end(self) -> None:
        """Stop the decode if it is running, and no other one. From any thread."""
        with self._lock:
            if self._is_running:
                self._is_ended = True
                self._ctx.interrupt()

    def seconds(self, n: int) -> float | None:
        """Return the seconds of a decode of ``n`` arbitrary tokens, with logits for all.

        It takes a free sequence and free cells, and returns them: nothing shows that it has taken place.
        None where there are none, where somebody uses the context, or if it was stopped.
        """
        ctx = self._ctx
        if not ctx.lock.acquire(blocking=False):
            return None
        try:
            if ctx.closed or ctx.kv_cache.hidden is not None or ctx.kv_cache.n_vacant < n:
                return None
            seq_id = ctx.sequences.lease_if_free(self)
            if seq_id is None:
                return None
            n_decodes = ctx.decoder.n_decodes
            try:
                return self._decode(seq_id, n)
            finally:
                ctx.decoder.n_decodes = n_decodes  # others count theirs by it
                ctx.sequences.give_back(seq_id)
        except LlamaBranchError:
            return None
        finally:
            ctx.lock.release()

    def _decode(self, seq_id: int, n: int) -> float:
        ctx, batch = self._ctx, Batch()
        batch.add(seq_id, [(7 * i + 3) % ctx.model.n_vocab for i in range(n)], "all")
        with self._lock:
            self._is_running, self._is_ended = True, False
        start = perf_counter()
        try:
            batch.decode(ctx.decoder)
        except DecodeInterruptedError:
            if not self._is_ended:
                ctx.interrupt()  # it was meant for somebody else's decode
            raise
        finally:
            with self._lock:
                self._is_running = False
                if self._is_ended:
                    ctx.resume()
        return perf_counter() - start


# -- entries -------------------------------------------------------------------------------------------


def _paced(known: Known, one_s: float) -> dict[int, float]:
    """Return the times as if t(1) were ``one_s``."""
    return {n: one_s * seconds / known.target_s[1] for n, seconds in known.target_s.items()}


def _merged(old: Known, new: Known) -> Known:
    """Return the times of both, v(n) weighted; t(1) is the newer one's."""
    found = _paced(old, new.target_s[1])
    weights = dict(old.n_decodes)
    for n, seconds in new.target_s.items():
        before, weight = weights.get(n, 0.0), new.n_decodes.get(n, 0.0)
        total = before + weight
        if total > 0:
            found[n] = (before * found.get(n, 0.0) + weight * seconds) / total
            weights[n] = min(_MOST_WEIGHT, total)
    return Known(found, n_decodes=weights)


def _times_entry(times: Known) -> Entry:
    one_s, weights = times.target_s[1], times.n_decodes
    heaviest = sorted(times.target_s, key=lambda n: (n != 1, -weights.get(n, 0.0)))[:_MOST_SIZES]
    sizes = sorted(heaviest)
    return {
        "t1_ms": round(1000 * one_s, 5),
        "v": {str(n): round(times.target_s[n] / one_s, 4) for n in sizes},
        "decodes": {str(n): max(1, round(weights.get(n, 0.0))) for n in sizes},
        "measured": strftime("%Y-%m-%d"),
    }


def _times(entry: Entry | None) -> Known | None:
    """Return the times of a stored entry; None if it is not valid."""
    if entry is None:
        return None
    one_s, v, decodes = _number(entry.get("t1_ms")) / 1000, entry.get("v"), entry.get("decodes")
    if not (one_s > 0 and isinstance(v, dict) and isinstance(decodes, dict)):
        return None
    seconds, weights = {}, {}
    for size, value in v.items():
        ratio, weight = _number(value), _number(decodes.get(size))
        if not (size.isdecimal() and len(size) < 8 and ratio > 0 and weight > 0):
            return None
        seconds[int(size)], weights[int(size)] = one_s * ratio, min(_MOST_WEIGHT, weight)
    if 1 not in seconds or min(seconds) < 1:
        return None
    return Known(seconds, _source(entry), n_decodes=weights)


def _drafter_entry(old: KnownDrafter | None, found: KnownDrafter) -> Entry:
    total = (0.0 if old is None else old.n_drafts) + found.n_drafts
    return {
        "drafts": round(min(_MOST_WEIGHT, total)),
        # These include what was known before.
        "c": round(found.cost, 5),
        "tested": [round(n, 3) for n in found.counts.tested],
        "accepted": [min(round(a, 3), round(n, 3)) for a, n in found.counts.pairs],
        "drawn": [round(n, 3) for n in found.counts.drawn],
        "measured": strftime("%Y-%m-%d"),
    }


def _drafter(entry: Entry | None) -> KnownDrafter | None:
    """Return the drafter of a stored entry; None if it is not valid."""
    if entry is None:
        return None
    cost, drafts = _number(entry.get("c")), _number(entry.get("drafts"))
    lists = [entry.get(name) for name in ("tested", "accepted", "drawn")]
    if not (cost > 0 and drafts > 0):
        return None
    counts = [tuple(map(_number, given)) for given in lists if isinstance(given, list)]
    try:
        return KnownDrafter(
            AcceptanceCounts(*counts), cost, _source(entry), min(_MOST_WEIGHT, drafts)
        )
    except (TypeError, ValueError):
        return None


def _source(entry: Entry) -> str:
    date = entry.get("measured")
    return f"the profile of {date}" if isinstance(date, str) else "the profile"


def _number(value: object) -> float:
    """Return a number as it is read from JSON; nan for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        return math.nan
    return float(value)
