"""Numbers of JSON schemas: which of them llguidance represents exactly, and how to write the others.

llguidance stores numbers as 64-bit floats, and integers between bounds in 64 bits. Beyond 2^53 a float
cannot represent every integer, at -2^63 llguidance overflows its stack, and decimals of more than 15
digits may get another last digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from math import isfinite, prod

from ...errors import GrammarError

__all__ = [
    "LARGEST", "Digits", "check_multiples", "exact_text", "integers", "integers_between", "is_exact",
    "is_number", "multiple", "rounded", "within", "without_ends",
]  # fmt: skip

LARGEST = 1 << 53  # below it floats hold every integer
_MOST_DIGITS = 15  # a float keeps decimals of up to this many digits
_LEAST_EXPONENT = -20
_MOST_MULTIPLE = 100_000  # remainders, each a state of the grammar; this many take 1.5 s and 50 MB
_MOST_COMBINED = (1 << 32) - 1
_MOST_PLACES = 9
_PLACES = Context(prec=400, Emax=999_999, Emin=-999_999)
_ROUNDING = {"minimum": ROUND_CEILING, "maximum": ROUND_FLOOR}


class Digits(float):
    """A number of a JSON text with a fraction or an exponent, and the digits that it was written with."""

    text: str

    def __new__(cls, text: str) -> Digits:
        self = super().__new__(cls, text)
        self.text = text
        if not isfinite(self):
            raise GrammarError(f"the number {text:.40} is larger than JSON readers can hold")
        return self

    def __reduce__(self) -> tuple[type[Digits], tuple[str]]:
        return Digits, (self.text,)


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def exact_text(value: object) -> str:
    """Return a number as JSON, with the digits that it was written with."""
    return value.text if isinstance(value, Digits) else repr(value)


def _decimal(value: object) -> Decimal:
    return _PLACES.create_decimal(exact_text(value))


def is_exact(value: object) -> bool:
    """Return whether llguidance would generate this number, or an equal one."""
    if isinstance(value, int):
        return abs(value) < LARGEST
    number = _decimal(value).normalize(_PLACES)
    if not number:
        return True
    exponent = number.as_tuple().exponent
    is_short = max(len(number.as_tuple().digits), number.adjusted() + 1) <= _MOST_DIGITS
    return is_short and abs(number) < LARGEST and int(exponent) >= _LEAST_EXPONENT


def _bounds(part: Mapping[str, object]) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """Return the lower and the upper bound of a schema's numbers, and whether each is excluded."""
    bounds: list[tuple[Decimal | None, bool]] = []
    for side, sign in (("inimum", 1), ("aximum", -1)):
        limits = [
            (sign * _decimal(part[name]), name.startswith("e"))
            for name in (f"m{side}", f"exclusiveM{side}")
            if is_number(part.get(name))
        ]
        tightest, excluded = max(limits, default=(None, False))
        bounds.append((None if tightest is None else sign * tightest, excluded))
    (least, above), (most, below) = bounds
    return least, most, above, below


def integers(part: Mapping[str, object]) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer within a schema's bounds; None without a bound."""
    least, most, above, below = _bounds(part)
    first: int | None = None
    last: int | None = None
    if least is not None:
        first = int(least.to_integral_value(ROUND_CEILING, _PLACES))
        first += above and first == least
    if most is not None:
        last = int(most.to_integral_value(ROUND_FLOOR, _PLACES))
        last -= below and last == most
    return first, last


def within(value: object, part: Mapping[str, object]) -> bool:
    """Return whether a number is within a schema's bounds."""
    least, most, above, below = _bounds(part)
    number = _decimal(value)
    return not (
        (least is not None and (number < least or (above and number == least)))
        or (most is not None and (number > most or (below and number == most)))
    )


def without_ends(part: Mapping[str, object]) -> dict[str, float]:
    """Return the bound that replaces an excluded integer, by its name; {} if none has to be replaced.

    If the other bound is less than 1 away, llguidance takes the integer itself: 0 for
    ``{"exclusiveMinimum": 0, "maximum": 0.5}``. The new bound is the nearest number that it represents.
    """
    least, most, above, below = _bounds(part)
    if least is None or most is None or not 0 < most - least < 1:
        return {}
    for name, bound, is_excluded, sign in (
        ("minimum", least, above, 1),
        ("maximum", most, below, -1),
    ):
        if is_excluded and bound == bound.to_integral_value():
            places = _MOST_DIGITS - len(str(abs(int(bound)))) if bound else -_LEAST_EXPONENT
            return {name: float(_PLACES.add(bound, sign * Decimal(1).scaleb(-places)))}
    return {}


def rounded(value: object, side: str) -> int | float:
    """Return a bound that llguidance represents exactly and that is at least as strict as ``value``.

    Args:
        value: the bound.
        side: "minimum" or "maximum".

    Raises:
        GrammarError: there is no such number.
    """
    limit = LARGEST if side == "maximum" else -LARGEST
    number = _decimal(value)
    is_beyond = number >= LARGEST if side == "minimum" else number <= -LARGEST
    if is_beyond:
        raise GrammarError(f"{side} {exact_text(value):.40} is out of bounds: above 2^53 in size")
    if abs(number) >= LARGEST:
        return limit
    places = Context(_MOST_DIGITS, _ROUNDING[side], Emax=999_999, Emin=-999_999)
    bound = places.plus(number).quantize(
        Decimal(1).scaleb(_LEAST_EXPONENT), _ROUNDING[side], _PLACES
    )
    return int(bound) if bound == bound.to_integral_value() else float(bound)


def multiple(value: object) -> tuple[int, int]:
    """Return a ``multipleOf`` as (c, e): it is c / 10^e.

    Raises:
        GrammarError: it is not positive, or c has more than 100,000 remainders.
    """
    number = _decimal(value).normalize(_PLACES)
    if number <= 0:
        raise GrammarError(f"multipleOf must be above 0, not {exact_text(value):.40}")
    places = max(0, -int(number.as_tuple().exponent))
    coefficient = number.scaleb(places, _PLACES)
    n_remainders = int("".join(map(str, number.as_tuple().digits)))  # without trailing zeros
    if places > _MOST_PLACES or coefficient > _MOST_COMBINED or n_remainders > _MOST_MULTIPLE:
        raise GrammarError(
            f"multipleOf {exact_text(value):.40} has too many digits",
            hint=f"at most {_MOST_MULTIPLE:,} units, for example 99991 or 0.01",
        )
    return int(coefficient), places


def check_multiples(multiples: Iterable[tuple[int, int]]) -> None:
    """Check that llguidance can compute the least common multiple of several multiples.

    Raises:
        GrammarError: it would overflow.
    """
    distinct = set(multiples)
    places = max((p for _, p in distinct), default=0)
    scaled = sorted(c * 10 ** (places - p) for c, p in distinct)
    if scaled and prod(scaled) * scaled[-1] > _MOST_COMBINED:
        raise GrammarError("the numbers of multipleOf have too many digits to be combined")


# -- integers of any size as a regular expression --------------------------------------------------


def integers_between(least: int | None, most: int | None) -> str:
    """Return a regular expression for the integers from ``least`` to ``most``; None = no bound.

    Raises:
        GrammarError: there is no integer between them.
    """
    if least is not None and most is not None and least > most:
        raise GrammarError(f"no integer is at least {least} and at most {most}")
    parts = []
    if least is None or least < 0:
        parts.append("-" + _naturals(max(1, -most) if most is not None else 1,
                                     None if least is None else -least))  # fmt: skip
    if most is None or most >= 0:
        parts.append(_naturals(max(0, least) if least is not None else 0, most))
    return f"({'|'.join(parts)})"


def _naturals(least: int, most: int | None) -> str:
    """Return a regular expression for natural numbers without leading zeros."""
    parts = []
    n_digits = len(str(least))
    while most is None or n_digits <= len(str(most)):
        first = max(least, 10 ** (n_digits - 1) if n_digits > 1 else 0)
        if most is None and n_digits > len(str(least)):
            parts.append(f"[1-9][0-9]{{{n_digits - 1},}}")
            break
        last = 10**n_digits - 1 if most is None else min(most, 10**n_digits - 1)
        parts += _same_length(str(first), str(last))
        n_digits += 1
    return f"({'|'.join(parts)})"


def _same_length(first: str, last: str) -> Iterator[str]:
    """Yield regular expressions for the numbers from ``first`` to ``last``, which has as many digits."""
    n = len(first)
    i = next((k for k in range(n) if first[k] != last[k]), n)
    if i == n:
        yield first
        return
    if not first[i + 1 :].strip("0") and not last[i + 1 :].strip("9"):
        yield f"{first[:i]}[{first[i]}-{last[i]}]{_any(n - i - 1)}"
        return
    for k in range(i + 1, n):  # above ``first``, with one more digit in common
        if first[k] < "9":
            yield f"{first[:k]}[{int(first[k]) + 1}-9]{_any(n - k - 1)}"
    yield first
    if int(last[i]) - int(first[i]) > 1:
        yield f"{first[:i]}[{int(first[i]) + 1}-{int(last[i]) - 1}]{_any(n - i - 1)}"
    for k in range(i + 1, n):
        if last[k] > "0":
            yield f"{last[:k]}[0-{int(last[k]) - 1}]{_any(n - k - 1)}"
    yield last


def _any(n: int) -> str:
    return f"[0-9]{{{n}}}" if n else ""
