"""Decide K/V type and flash attention by the cost of attention; tell what exactness costs.

Which setting is faster depends on the processor, on the build, on the size of the model's heads, and on
whether prompts are read or tokens generated. With a few hundred cells all settings take the same time;
with 2,048 attention takes half of the time or more. So attention is timed with 2,048 cells, alone and on
one thread. The rest of the model is timed in an empty context. Both together tell what share of the
speed exactness costs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ..model import Model
from ..native import AttentionShape, ContextHandle, attention_seconds, system_info
from ..profile import is_off, machine_key, read_entry, write_entries
from .timing import decode_seconds

__all__ = ["EXACT", "MOST_EXTRA", "Costs", "Setting", "fastest", "measured_costs"]

_CELLS = 2048
_ROWS = (1, 8, 64)  # rows of a decode that generates one text, eight texts, or reads a prompt
_MOST_S = 0.06  # for each; all of them take 0.1 to 0.4 s
_MOST_HEADS = 4  # at most this many of the heads that share a K/V head are timed
# The session by which settings are compared: tokens of a prompt that it reads, and tokens that it
# generates, half of them in one text and half in eight texts at once.
_READ, _GENERATED = 2000, 300
# Exactness is the default if reading and generating take at most this many times as long with it.
MOST_EXTRA = 1.1
_TEXTS = 4  # texts of equal length that are assumed to share a cache with prefixes
_WORTH = 0.97  # a setting must take less than this share of the time of one that comes before it

_ATTENTION = "attention"
_WEIGHTS = "weights"
# Models of up to _READS parameters are timed with a part of a prompt too, which takes 0.2 s on one core.
# For larger models a token of a prompt is assumed to take as long as a token of eight texts; attention
# is a small share of their time anyway.
_READS, _SMALL_PROMPT = 3e8, 32
_LARGE = 4e9  # models with more parameters are not timed


class Setting(NamedTuple):
    """How attention is computed."""

    kv_type: str
    flash: bool

    def __str__(self) -> str:
        return f"{self.kv_type}, {'flash' if self.flash else 'plain'}"


class Costs(NamedTuple):
    """Seconds of a token: generated alone, as one of eight, and read in a prompt."""

    one: float
    eight: float
    read: float

    @property
    def generated(self) -> float:
        """The mean time of a generated token of the session."""
        return (self.one + self.eight) / 2

    @property
    def session(self) -> float:
        """The time of the session."""
        return _READ * self.read + _GENERATED * self.generated

    def plus(self, other: Costs, times: float = 1.0) -> Costs:
        """Return the sum of these costs and ``times`` the other costs."""
        return Costs(*(a + times * b for a, b in zip(self, other, strict=True)))


EXACT = Setting("bf16", True)  # logits do not depend on the batch, if the weights allow that
# If two settings take the same time, the earlier one is used.
_ALL = (Setting("f16", True), EXACT, Setting("f16", False), Setting("bf16", False))


def fastest(model: Model, flash: bool | str, *, has_others: bool = False) -> Setting | None:
    """Return the setting in which a session takes the least time.

    None if nothing is measured: with layers on a GPU, or with ``LLAMABRANCH_PROFILE=0``.

    Args:
        model: the model of the context.
        flash: whether flash attention is used. "auto" = either, if the memory is plain attention.
        has_others: other texts are in the cache too. Flash attention skips their cells; without it a
            token is computed against all of them.
    """
    shape = _shape(model)
    if shape is None:
        return None
    if flash == "auto" and model.memory_type != "attention":
        flash = True
    possible = [setting for setting in _ALL if flash in ("auto", setting.flash)]
    costs = _attention(_key(), shape)
    times = _TEXTS if has_others else 1
    seconds = {
        setting: costs[setting].session * (1 if setting.flash else times) for setting in possible
    }
    best, *others = possible
    for setting in others:
        if seconds[setting] < _WORTH * seconds[best]:
            best = setting
    return best


def measured_costs(
    model: Model, handle: ContextHandle, settings: Sequence[Setting], threads: tuple[int, int]
) -> list[Costs] | None:
    """Return what a token costs at 2,048 cells in each setting, stored or measured on one thread.

    Args:
        model: the model; its layers and weights are measured.
        handle: an empty context of it; it is empty afterwards.
        settings: the settings to compare.
        threads: the numbers of threads of the context, for one token and for many.
    """
    shape = _shape(model)
    if shape is None:
        return None
    weights = _weights(model, handle, threads)
    if weights is None:
        return None
    attention = _attention(_key(), shape)
    times = model.n_layer * shape.n_kv_heads
    costs = [weights.plus(attention[setting], times) for setting in settings]
    return costs if all(c.session < math.inf for c in costs) else None


def _shape(model: Model) -> AttentionShape | None:
    n_heads, n_shared = model.handle.number("n_head"), model.handle.number("n_head_kv")
    if is_off() or model.on_gpu or not 0 < n_shared <= n_heads:
        return None
    size = model.handle.number("n_embd") // n_heads
    sizes = [
        int(known) if (known := model.metadata.get(name, "")).isdigit() else size
        for name in (f"{model.architecture}.attention.{kind}_length" for kind in ("key", "value"))
    ]
    if sizes[0] != sizes[1] or sizes[0] < 1:
        return None
    return AttentionShape(sizes[0], n_heads // n_shared, n_shared)


def _key() -> str:
    return f"{machine_key()}, {system_info()}"


@cache
def _attention(key: str, shape: AttentionShape) -> dict[Setting, Costs]:
    """Return the time of attention for a token and one K/V head in every setting, stored or measured."""
    group = min(shape.n_heads, _MOST_HEADS)
    key += f", {group} heads of {shape.head_size}, one K/V head of {shape.n_kv_heads}"
    entry = read_entry(_ATTENTION, key) or {}
    stored = {setting: _stored(entry.get(str(setting))) for setting in _ALL}
    known = {setting: costs for setting, costs in stored.items() if costs is not None}
    if len(known) < len(_ALL):
        part = shape._replace(n_heads=group)
        columns = [
            [seconds / n for seconds in attention_seconds(_ALL, part, n, _CELLS, _MOST_S)]
            for n in _ROWS
        ]
        known = dict(zip(_ALL, map(Costs, *columns), strict=True))
        if all(costs.session < math.inf for costs in known.values()):
            write_entries(
                [(_ATTENTION, key, {str(setting): [*known[setting]] for setting in _ALL})]
            )
    scale = shape.n_heads / group
    return {setting: Costs(*(scale * seconds for seconds in known[setting])) for setting in _ALL}


_found: weakref.WeakKeyDictionary[Model, dict[str, Costs]] = weakref.WeakKeyDictionary()


def _weights(model: Model, handle: ContextHandle, threads: tuple[int, int]) -> Costs | None:
    """Return the time of a token without attention to other tokens, stored or measured."""
    try:
        kind = "repacked, " if model.extra_buffers else ""
        key = f"{_key()}, {kind}{model.quick_key[:32]}"
    except OSError:  # the file is gone
        return None
    known = _found.setdefault(model, {})
    costs = known.get(key) or _stored((read_entry(_WEIGHTS, key) or {}).get("seconds"))
    if costs is None:
        if model.handle.number("n_params") > _LARGE:
            return None
        n = min(_ROWS[1], handle.n_batch)
        reads = model.handle.number("n_params") <= _READS and handle.n_batch >= _SMALL_PROMPT
        rows = [1, 1, 1, n, *[_SMALL_PROMPT] * reads]  # the first loads the weights from disk
        seconds = decode_seconds(handle, rows, threads)
        if seconds is None:
            return None
        costs = Costs(min(seconds[1:3]), seconds[3] / n, seconds[-1] / rows[-1])
        write_entries([(_WEIGHTS, key, {"seconds": [*costs]})])
    known[key] = costs
    return costs


def _stored(numbers: object) -> Costs | None:
    """Return the three numbers of an entry; None if it holds anything else."""
    if not isinstance(numbers, list) or len(numbers) != len(_ROWS):
        return None
    if not all(isinstance(number, (int, float)) and 0 < number < math.inf for number in numbers):
        return None
    return Costs(*map(float, numbers))
