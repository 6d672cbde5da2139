"""What is shown on standard error while a model is got: what begins, then the bar of a download."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .download import DownloadPlan

__all__ = ["announce", "note", "progress_bar"]


def announce(plan: DownloadPlan) -> None:
    """Print what is about to be downloaded, how large it is and where it goes."""
    parts = f" in {len(plan.files)} parts" if len(plan.files) > 1 else ""
    rest = ", the rest of an interrupted download" if plan.partial_bytes else ""
    name = f"{plan.spec.repository}/{plan.files[0].path}"
    note(f"downloading {name}{parts}: {_size(plan.missing_bytes)}{rest}, to {plan.cache}")


def note(text: str) -> None:
    """Print a line on standard error, if there is one."""
    with contextlib.suppress(OSError, AttributeError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(plan: DownloadPlan) -> Iterator[Callable[[int, int], None] | None]:
    """Show the progress with speed and remaining time; nothing if standard error is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(plan.files[0].path.rpartition("/")[2], total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
