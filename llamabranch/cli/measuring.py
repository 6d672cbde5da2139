"""What the commands that score texts share: their context, a line of progress, results that are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import llamabranch as lb
from llamabranch import ConfigError, Context, LlamaBranchError

from ..files import atomic_write
from .console import Console, finite
from .files import check_new_file, read_text, write_error
from .options import ModelOptions, trained_length

if TYPE_CHECKING:
    from ..loading import LoadOptions

__all__ = ["Kept", "Progress", "interruptible", "open_for_chunks", "scoring_options", "window_of"]

DEFAULT_WINDOW = 512
_ROW_BYTES = 64 * 2**20  # of logits at a time
_SAVED_EVERY_S = 10.0


def window_of(name: str, models: ModelOptions) -> int:
    """Return the tokens of a chunk: ``--n-ctx`` as in llama-perplexity; 0 is the trained length."""
    if models.n_ctx is None:
        return DEFAULT_WINDOW
    if models.n_ctx:
        return models.n_ctx
    with lb.Model(lb.hub.resolve(name), vocab_only=True) as model:
        return trained_length(model) or DEFAULT_WINDOW


def scoring_options(name: str, models: ModelOptions, n_seq_max: int) -> LoadOptions:
    """Return options of a context whose rows of logits take a bounded memory, whatever the vocabulary."""
    with lb.Model(lb.hub.resolve(name), vocab_only=True) as model:
        rows = _ROW_BYTES // (4 * model.n_vocab)
    n_batch = models.set("load").get("n_batch") or 512
    n_seq_max = min(n_seq_max, n_batch)
    return {"n_seq_max": n_seq_max, "n_outputs_max": max(n_seq_max, min(n_batch, 256, rows))}


def open_for_chunks(
    name: str, models: ModelOptions, window: int, console: Console, stack: ExitStack
) -> Context:
    """Open a context for texts that are read in chunks, with llama-perplexity's K/V type, f16."""
    more = scoring_options(name, models, 1)
    n_batch = models.set("load").get("n_batch") or min(512, window)
    more["n_ctx"] = window
    more["n_batch"] = n_batch
    more["n_outputs_max"] = min(more["n_outputs_max"] or n_batch, n_batch)
    more["batch_invariant"] = False
    if models.kv_type is None:
        more["kv_type"] = "f16"
    return models.open(name, console, stack, **more)


@contextmanager
def interruptible(console: Console) -> Iterator[list[BaseException]]:
    """Catch a Ctrl-C or an error inside the block: what is done is printed, then it is raised again.

    Yields:
        a list that holds the exception afterwards.
    """
    caught: list[BaseException] = []
    try:
        yield caught
    except (KeyboardInterrupt, LlamaBranchError) as error:
        caught.append(error)
    finally:
        console.progress("")


class Progress:
    """A line of progress with the time that is left; nothing on a pipe."""

    def __init__(self, console: Console, what: str, n_total: int, n_before: int = 0) -> None:
        self._console = console
        self._what = what
        self._n_total = n_total
        self._n_before = n_before
        self._start_s = perf_counter()

    def show(self, n_done: int, text: str = "") -> None:
        """Show that ``n_done`` are done."""
        n = n_done - self._n_before
        left = ""
        if n > 0:
            seconds = (perf_counter() - self._start_s) / n * (self._n_total - n_done)
            minutes, rest = divmod(round(seconds), 60)
            hours, minutes = divmod(minutes, 60)
            left = (
                f", {hours}:{minutes:02}:{rest:02} left" if hours else f", {minutes}:{rest:02} left"
            )
        more = f", {text}" if text else ""
        self._console.progress(f"{n_done} of {self._n_total} {self._what}{more}{left}")


class Kept:
    """Results in a JSON file that is replaced as a whole while a command goes on.

    Args:
        path: the file, None for none.
        resume: it may be there, and ``data`` is what it holds.
        kind: what it is of; a file of another kind is refused.

    Raises:
        ConfigError: a file is there, and is not to be resumed; or it is of another kind.
    """

    def __init__(self, path: Path | None, resume: bool, kind: str) -> None:
        self.data: dict[str, object] = {}
        self.path = path
        self._kind = kind
        self._saved_s = perf_counter()
        if path is None:
            if resume:
                raise ConfigError("--resume needs --output, where the results are kept")
            return
        if not resume or not path.is_file():
            check_new_file(path, hint="name another file, or go on with --resume")
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} is not a regular file", hint="leave out --output")
            return
        try:
            found = json.loads(read_text(path))
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("kind") != kind:
            raise ConfigError(
                f"{path} has no results of this kind ({kind})", hint="name another file"
            )
        self.data = found

    def save(self, data: Callable[[], dict[str, object]], *, now: bool = False) -> None:
        """Write the file, unless that was done some seconds ago and is not wanted ``now``.

        Raises:
            OutputError: the disk is full.
        """
        if self.path is None or (not now and perf_counter() - self._saved_s < _SAVED_EVERY_S):
            return
        text = json.dumps(finite({"kind": self._kind, **data()}), ensure_ascii=False)
        try:
            with atomic_write(self.path) as file:
                file.write(f"{text}\n".encode())
        except OSError as error:
            raise write_error(self.path, error) from None
        self._saved_s = perf_counter()
