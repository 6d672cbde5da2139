"""Numeric arguments, checked and converted to plain Python numbers where they enter the package.

NumPy integers and floats are accepted, and so is everything else that Python can use as an index or a
real number, except bool. The rest of the package sees only int and float. A value that does not fit is
a ConfigError that names the argument.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from numbers import Real
from operator import index
from pathlib import Path
from typing import TypeVar

from .errors import ConfigError, LlamaBranchError

T = TypeVar("T")
_LARGEST = int(sys.float_info.max)


def plain_int(value: object) -> int | None:
    """Return an integer of any type as int; None for everything else, including bool and text."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        return None  # NumPy's booleans too, without importing NumPy
    try:
        return int(index(value))  # type: ignore[arg-type]
    except TypeError:
        return None


def shown(value: object) -> str:
    """Return ``value`` as text for a message; Python does not format integers above 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)
    except Exception:  # raised by a method of the object
        return f"an object of type {type(value).__name__}"


def whole(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as int; it must be an integer from ``low`` to ``high``."""
    integer = plain_int(value)
    if integer is None:
        raise ConfigError(f"{name} must be an integer, not {value!r}")
    if (low is not None and integer < low) or (high is not None and integer > high):
        if low is None:
            bounds = f"at most {high}"
        else:
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be {bounds}, not {shown(integer)}")
    return integer


def path_text(path: str | Path) -> str:
    """Return a path as text that can be encoded; bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


def figure(value: float, digits: int = 3) -> str:
    """Return a number with that many digits, but never drop digits before the point."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def token_key(name: str, key: object) -> int:
    """Return a key of a JSON object, which is usually text, as a token id."""
    if not re.fullmatch(r"-?[0-9]{1,300}", text := str(key)):
        raise ConfigError(f"a key of {name} must be a token id, not {key!r:.60}")
    return int(text)


def byte_count(name: str, value: object) -> int:
    """Return a number of bytes, at least 0: a whole number, or text such as "8GiB" or "500MB"."""
    if not isinstance(value, str):
        return whole(name, value, 0, 2**62)
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?)(i?B)?", value, re.IGNORECASE)
    if found is None:
        raise ConfigError(
            f"{name} is a number of bytes, or a size such as 8GiB, not {shown(value)}"
        )
    number, unit, ending = found.groups()
    base = 1000 if unit and (ending or "").lower() == "b" else 1024
    return int(float(number) * base ** " KMGT".index(unit.upper() or " "))


def real(name: str, value: object) -> float:
    """Return ``value`` as int or float; it may be infinite or NaN.

    A number that is too large for a float becomes infinite.
    """
    if type(value) is float:
        return value
    integer = plain_int(value)
    if integer is not None:
        return integer if abs(integer) <= _LARGEST else math.copysign(math.inf, integer > 0 or -1)
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:  # a fraction of huge integers
            return math.copysign(math.inf, value > Fraction(0) or -1)
    raise ConfigError(f"{name} must be a number, not {value!r}")


def finite(name: str, value: object) -> float:
    """Return ``value`` as int or float, which must be neither infinite nor NaN."""
    number = real(name, value)
    if not math.isfinite(number):
        raise ConfigError(f"{name} must be finite, not {number}")
    return number


def instance(name: str, value: object, kind: type[T], hint: str | None = None) -> T:
    """Return ``value``, which must be one of ``kind``."""
    if isinstance(value, kind):
        return value
    raise ConfigError(f"{name} must be a {kind.__name__}, not {value!r:.60}", hint=hint)


def items(name: str, value: Iterable[T]) -> list[T]:
    """Return ``value`` as a list; text and mappings are refused."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list, not {value!r:.60}")
    return list(value)


def bounded(name: str, value: object, low: float, high: float) -> float:
    """Return ``value`` as int or float; it must be a number from ``low`` to ``high``."""
    number = real(name, value)
    if not low <= number <= high:
        raise ConfigError(f"{name} must be from {low:.15g} to {high:.15g}, not {number}")
    return number


def nearest(text: str, names: Collection[str], label: str) -> str:
    """Return a hint: the name that ``text`` is similar to, or all names."""
    close = difflib.get_close_matches(text, names, n=1)
    return f"did you mean {close[0]}?" if close else f"{label}: {', '.join(names)}"


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Put ``place`` in front of the message of an error raised in this block, unless it is empty."""
    try:
        yield
    except LlamaBranchError as error:
        if place:
            error.message = f"{place}: {error.message}"
            error.args = (error.message,)
        raise


def choice(name: str, value: object, choices: Collection[str]) -> None:
    """Check that ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"unknown {name} {shown(value):.60}", hint=f"{name}: {', '.join(choices)}"
        )


def flag(name: str, value: object) -> None:
    """Check that ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {shown(value)}")


def function(name: str, value: object) -> None:
    """Check that ``value`` can be called."""
    if not callable(value):
        raise ConfigError(f"{name} must be a function, not {value!r:.60}")
