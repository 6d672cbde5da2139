"""What is kept between runs about a target and its drafters: costs and acceptance, for ``auto``.

Two sections of the machine's profile (see ``context/machine_profile.py``). ``decode_times`` holds t(1)
and v(n) of a target, ``drafters`` the cost c and the acceptance of a drafter with that target; the keys
name the machine, the models by their fingerprints, the K/V type and the numbers of threads. They decide
how long drafts are and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, perf_counter, strftime

from ..context import Context
from ..context.decode_times import context_key, measure_decode_times
from ..context.machine_profile import Entry, is_off, machine_key, read_entry, write_entries
from .config import SpeculativeConfig
from .drafters.base import Drafter
from .length.acceptance import AcceptanceCounts
from .length.auto import AutoLength, draft_length
from .length.base import DraftLength
from .length.known import DrafterFindings, Known, KnownDrafter

__all__ = ["PairProfile", "keep_decode_times"]

_TIMES, _DRAFTERS = "decode_times", "drafters"

# Tokens of the decodes that are measured if nothing is kept: no draft, drafts of 4, 8, 2, 1 and 16.
_SIZES = (1, 5, 9, 3, 2, 17)
_WEIGHT_OF_QUICK = 4.0  # decodes that this quick measurement counts as
_MOST_WEIGHT = 64.0  # decodes, or drafts, that all earlier runs together count as: so old ones fade
_MOST_SIZES = 48
_SAVE_EVERY_S = 5.0


@dataclass(frozen=True)
class _Times:
    """t(1) in seconds; v(n) by n, each with the number of decodes that it counts as."""

    one_s: float
    v: dict[int, tuple[float, float]]
    source: str

    @classmethod
    def of_seconds(
        cls, seconds: Mapping[int, float], weights: Mapping[int, float], source: str
    ) -> _Times:
        one_s = seconds[1]
        return cls(one_s, {n: (s / one_s, weights.get(n, 0.0)) for n, s in seconds.items()}, source)

    @classmethod
    def of_entry(cls, entry: Entry | None) -> _Times | None:
        """Return the content of a stored entry; None if it is not valid."""
        if entry is None:
            return None
        one_ms, v, decodes = _number(entry.get("t1_ms")), entry.get("v"), entry.get("decodes")
        if not (one_ms > 0 and isinstance(v, dict) and isinstance(decodes, dict)):
            return None
        found = {}
        for size, value in v.items():
            ratio, weight = _number(value), _number(decodes.get(size))
            if not (size.isdecimal() and len(size) < 8 and ratio > 0 and weight > 0):
                return None
            found[int(size)] = ratio, min(_MOST_WEIGHT, weight)
        if 1 not in found or min(found) < 1:
            return None
        return cls(one_ms / 1000, found, _source(entry))

    def merged(self, newer: _Times) -> _Times:
        """Return both, weighted; t(1) is the newer one's."""
        v = dict(self.v)
        for n, (ratio, weight) in newer.v.items():
            old, old_weight = v.get(n, (0.0, 0.0))
            total = old_weight + weight
            if total > 0:
                v[n] = (old_weight * old + weight * ratio) / total, min(_MOST_WEIGHT, total)
        return _Times(newer.one_s, v, newer.source)

    def as_entry(self) -> Entry:
        heaviest = sorted(self.v, key=lambda n: (n != 1, -self.v[n][1]))[:_MOST_SIZES]
        sizes = sorted(heaviest)
        return {
            "t1_ms": round(1000 * self.one_s, 5),
            "v": {str(n): round(self.v[n][0], 4) for n in sizes},
            "decodes": {str(n): max(1, round(self.v[n][1])) for n in sizes},
            "measured": strftime("%Y-%m-%d"),
        }

    def seconds(self) -> dict[int, float]:
        return {n: self.one_s * ratio for n, (ratio, _) in self.v.items()}


class PairProfile:
    """What the machine's profile has about a target with its drafter, and what is added to it.

    Args:
        target, drafter: the pair.
        batched: whether several streams draft together, which changes what a draft step costs.
    """

    def __init__(self, target: Context, drafter: Drafter, *, batched: bool) -> None:
        self._target_key = self._pair_key = ""
        self._names: Mapping[str, str] = {}
        self._times: _Times | None = None
        self._costs: dict[str, tuple[float, float]] = {}  # c by drafter, and its weight in drafts
        self._saved_at = -math.inf
        self._n_saved = 0
        self._is_off = is_off()
        if self._is_off:
            return
        try:
            self._target_key = f"{machine_key()}, {context_key(target)}"
            self._pair_key = self._target_key + (", batched, " if batched else ", ")
            self._names = drafter.profile_keys
        except OSError:  # the file of a model is gone
            self._is_off = True
            return
        self._times = _Times.of_entry(read_entry(_TIMES, self._target_key))
        if self._times is None:
            start = perf_counter()
            seconds = measure_decode_times(target, _SIZES)
            if 1 in seconds:
                weights = dict.fromkeys(seconds, _WEIGHT_OF_QUICK)
                took = f"a quick measurement of {perf_counter() - start:.1f} s"
                self._times = _Times.of_seconds(seconds, weights, took)

    @classmethod
    def open(
        cls, target: Context, drafter: Drafter, config: SpeculativeConfig, *, batched: bool = False
    ) -> tuple[DraftLength, PairProfile | None]:
        """Return the draft length that ``config`` sets, and for "auto" where its findings are kept.

        If the profile has no times of the target, they are measured, see ``decode_times.py``.
        """
        if isinstance(config.draft_k, int):
            return draft_length(config), None
        profile = cls(target, drafter, batched=batched)
        return draft_length(config, drafter.width, profile.known()), profile

    def known(self) -> Known:
        """Return what the profile has, or what was measured instead."""
        if self._times is None:  # c and v(n) are ratios: without t(1) they are of no use
            return Known()
        drafters = {}
        for name, key in self._names.items():
            found = _drafter(read_entry(_DRAFTERS, self._pair_key + key))
            if found is not None:
                drafters[name], weight = found
                self._costs[name] = drafters[name].cost, weight
        return Known(self._times.seconds(), self._times.source, drafters)

    def save(self, length: DraftLength) -> None:
        """Add what ``length`` has found to the profile; at most once in some seconds."""
        if self._is_off or monotonic() - self._saved_at < _SAVE_EVERY_S:
            return
        findings = length.findings() if isinstance(length, AutoLength) else None
        if findings is None or sum(findings.n_decodes.values()) == self._n_saved:
            return
        self._n_saved = sum(findings.n_decodes.values())
        times = _Times.of_seconds(findings.target_s, findings.n_decodes, "")
        if self._times is not None:
            times = self._times.merged(times)
        entries = [(_TIMES, self._target_key, times.as_entry())]
        for name, drafter in findings.drafters.items():
            if name in self._names:
                key = self._pair_key + self._names[name]
                entries.append((_DRAFTERS, key, self._drafter_entry(name, drafter)))
        write_entries(entries)
        self._saved_at = monotonic()

    def _drafter_entry(self, name: str, found: DrafterFindings) -> Entry:
        cost, weight = self._costs.get(name, (0.0, 0.0))
        total = weight + found.n_drafts
        return {
            "c": round((weight * cost + found.n_drafts * found.cost) / total, 5),
            "drafts": round(min(_MOST_WEIGHT, total)),
            # These include what was known before.
            "tested": [round(n, 3) for n in found.counts.tested],
            "accepted": [min(round(a, 3), round(n, 3)) for a, n in found.counts.pairs],
            "drawn": [round(n, 3) for n in found.counts.drawn],
            "measured": strftime("%Y-%m-%d"),
        }


def keep_decode_times(target: Context, seconds: Mapping[int, float]) -> None:
    """Store t(n) as measured by a benchmark, in place of what the profile has of these sizes."""
    if is_off() or 1 not in seconds:
        return
    try:
        key = f"{machine_key()}, {context_key(target)}"
    except OSError:
        return
    measured = _Times.of_seconds(seconds, dict.fromkeys(seconds, _MOST_WEIGHT), "")
    kept = _Times.of_entry(read_entry(_TIMES, key))
    if kept is not None:
        measured = _Times(measured.one_s, {**kept.v, **measured.v}, "")
    write_entries([(_TIMES, key, measured.as_entry())])


def _drafter(entry: Entry | None) -> tuple[KnownDrafter, float] | None:
    """Return a drafter as a stored entry has it, and its weight in drafts; None if it is not valid."""
    if entry is None:
        return None
    cost, drafts = _number(entry.get("c")), _number(entry.get("drafts"))
    lists = [entry.get(name) for name in ("tested", "accepted", "drawn")]
    if not (cost > 0 and drafts > 0):
        return None
    counts = [tuple(map(_number, given)) for given in lists if isinstance(given, list)]
    try:
        known = KnownDrafter(AcceptanceCounts(*counts), cost, _source(entry))
    except (TypeError, ValueError):
        return None
    return known, min(_MOST_WEIGHT, drafts)


def _source(entry: Entry) -> str:
    date = entry.get("measured")
    return f"the profile of {date}" if isinstance(date, str) else "the profile"


def _number(value: object) -> float:
    """Return a number as it is read from JSON; nan for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        return math.nan
    return float(value)
