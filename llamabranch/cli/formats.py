"""Numbers and intervals as text, the same in all tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich import filesize

if TYPE_CHECKING:
    from llamabranch.bench.timing import Interval, Spread

ROUNDING = (
    "Logits are rounded by how many tokens are decoded at once, so a text that is drafted or "
    "batched can differ."
)


def base_name(name: str) -> str:
    """Return the name of the file, if a model is named by a path; other names as they are."""
    path = Path(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or path.is_file()
    return path.name if is_path else name


def shortened(text: str, longest: int = 60) -> str:
    """Return a text as one line of ``longest`` characters at most."""
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def number(value: float, digits: int, unit: str = "") -> str:
    """Format a number, or a dash for one that does not exist (nan)."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}{unit}"


def decimal_size(n_bytes: float) -> str:
    """Format a number of bytes in decimal units."""
    return filesize.decimal(round(n_bytes), precision=2)


def interval_text(found: Interval | Spread, digits: int = 2) -> str:
    """Format the ends of an interval, or a dash where there are too few values for one."""
    if math.isnan(found.low):
        return "-"
    return f"{found.low:.{digits}f} to {found.high:.{digits}f}"


def spread_text(spread: Spread, digits: int) -> str:
    """Format a median with the lowest and the highest value, or a dash without values."""
    if math.isnan(spread.median):
        return "-"
    return f"{spread.median:.{digits}f} ({interval_text(spread, digits)})"
