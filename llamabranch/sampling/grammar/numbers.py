"""JSON numbers between bounds, as GBNF expressions.

Bounds are whole numbers. Numbers with a fraction have few digits after the point, so that no reader's
rounding carries one over a bound.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["LARGEST_BOUND", "bounded_integer", "bounded_number"]

LARGEST_BOUND = 10**14
_MOST_DIGITS = 15  # before the point; also of an integer without an upper bound
_FRACTION = 6  # digits after the point, at most


def bounded_integer(least: int | None, most: int | None) -> str | None:
    """Return an expression for the integers from ``least`` to ``most``; None if there are none."""
    ways: list[str] = []
    if most is None or most >= 0:
        ways += _naturals(max(least or 0, 0), most)
    if least is None or least < 0:
        limit = None if least is None else -least
        below = _naturals(1 if most is None or most >= 0 else -most, limit)
        ways += [f'"-" {way}' for way in below]
    return " | ".join(ways) or None


def bounded_number(
    low: int | None, high: int | None, *, above: bool = False, below: bool = False
) -> str | None:
    """Return an expression for the numbers from ``low`` to ``high``; None if there are none.

    Args:
        low, high: the bounds; None = no bound.
        above: ``low`` itself is excluded.
        below: ``high`` itself is excluded.
    """
    digits = max((len(str(abs(bound))) for bound in (low, high) if bound is not None), default=1)
    fraction = max(1, min(_FRACTION, _MOST_DIGITS - digits))
    ways: list[str] = []
    if high is None or high > 0 or (high == 0 and not below):
        ways += _magnitudes(
            max(low or 0, 0), high, above and low is not None and low >= 0, below, fraction
        )
    if low is None or low < 0:
        # -0 is left out: it equals 0.
        least = 0 if high is None or high >= 0 else -high
        excluded = least == 0 or below
        limit = None if low is None else -low
        ways += [f'"-" {way}' for way in _magnitudes(least, limit, excluded, above, fraction)]
    return " | ".join(ways) or None


def _magnitudes(
    low: int, high: int | None, above: bool, below: bool, fraction: int
) -> Iterator[str]:
    """Yield expressions for the numbers of no sign between two bounds."""
    inner = list(_naturals(low + above, None if high is None else high - 1))
    if inner:
        yield f'({" | ".join(inner)}) ("." [0-9]{{1,{fraction}}})?'
    if above and (high is None or low < high):
        zeros = f"{{0,{fraction - 1}}}"
        yield f'"{low}." "0"{zeros} [1-9]' if fraction > 1 else f'"{low}." [1-9]'
    if high is not None and not below and (high > low or (high == low and not above)):
        yield f'"{high}" ("." "0"{{1,{fraction}}})?'


def _naturals(least: int, most: int | None) -> Iterator[str]:
    """Yield expressions for the decimal digits of the numbers from ``least`` to ``most``."""
    first = len(str(least))
    last = _MOST_DIGITS if most is None else len(str(most))
    for n_digits in range(first, last + 1):
        low = max(least, 10 ** (n_digits - 1) if n_digits > 1 else 0)
        high = 10**n_digits - 1 if most is None else min(most, 10**n_digits - 1)
        if low <= high:
            yield f"({_between(str(low), str(high))})"


def _between(low: str, high: str) -> str:
    """Return an expression for the digits from ``low`` to ``high``, which have the same length."""
    if not low:
        return '""'
    rest = len(low) - 1
    if low[0] == high[0]:
        return f'"{low[0]}" ({_between(low[1:], high[1:])})' if rest else f'"{low[0]}"'
    start, end = int(low[0]), int(high[0])
    ways = []
    if rest and low[1:] != "0" * rest:
        ways.append(f'"{start}" ({_between(low[1:], "9" * rest)})')
        start += 1
    last = None
    if rest and high[1:] != "9" * rest:
        last = f'"{end}" ({_between("0" * rest, high[1:])})'
        end -= 1
    if start <= end:
        more = f" [0-9]{{{rest}}}" if rest else ""
        ways.append(f"[{start}-{end}]{more}")
    if last is not None:
        ways.append(last)
    return " | ".join(ways)
