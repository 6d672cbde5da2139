"""Curves as PNG files. Needs matplotlib, which comes with the extra ``plot``."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from llamabranch import ConfigError
from llamabranch.bench.timing import Spread
from llamabranch.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Curve", "save_plot"]

# Marks of points, and dashes of computed lines, tell curves apart without colours.
_MARKERS = "os^DvP*Xp<"
_DASHES = ("--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """Points joined by a line: with bars from lowest to highest if measured, dashed if computed."""

    label: str
    x: Sequence[float]
    y: Sequence[float | Spread]
    computed: bool = False
    colour: int | None = None  # give the same number to curves that belong together


def save_plot(
    path: Path | IO[bytes],
    title: str,
    axes: tuple[str, str],
    curves: Sequence[Curve],
    *,
    log: bool = False,
    level: float | None = None,
) -> None:
    """Draw ``curves`` into a PNG file.

    Args:
        path: its path, or an open file.
        axes: the labels of x and y.
        log: make both axes logarithmic, x with base 2; otherwise y starts at 0.
        level: the height of a horizontal line.

    Raises:
        UnsupportedError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    require("plot", "a plot", "matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns while it fills its caches
    figure = Figure(figsize=(8, 5), layout="constrained")
    plot = figure.add_subplot()
    for number, curve in enumerate(curves):
        _draw(plot, curve, number, len(curves) - 1 - number)
    if level is not None:
        plot.axhline(level, color="grey", linewidth=0.8)
    if log:
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.xaxis.set_major_formatter("{x:,.0f}")
    else:
        plot.set_ylim(bottom=0)
        if all(x == int(x) for curve in curves for x in curve.x):
            plot.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    plot.set_title(title, fontsize=10)
    plot.set_xlabel(axes[0])
    plot.set_ylabel(axes[1])
    plot.grid(alpha=0.3)
    if curves:
        plot.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def _draw(plot: Axes, curve: Curve, number: int, n_later: int) -> None:
    colour = f"C{(number if curve.colour is None else curve.colour) % 10}"
    points = [y if isinstance(y, Spread) else Spread(y, y, y) for y in curve.y]
    known = [(x, y) for x, y in zip(curve.x, points, strict=True) if not math.isnan(y.median)]
    xs, ys = [x for x, _ in known], [y.median for _, y in known]
    if curve.computed:
        plot.plot(xs, ys, _DASHES[number % len(_DASHES)], color=colour, label=curve.label)
        return
    plot.errorbar(
        xs,
        ys,
        yerr=[[y.median - y.low for _, y in known], [y.high - y.median for _, y in known]],
        fmt=_MARKERS[number % len(_MARKERS)] + "-",
        # Each curve is thinner than those drawn before it, so equal curves stay visible.
        markersize=5.0 + 0.9 * n_later,
        linewidth=1.3 + 0.4 * n_later,
        capsize=3,
        color=colour,
        label=curve.label,
    )
