"""The example of the first screen: a sentence with its numbers, and three endings by the model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..model.text import n_common
from ..sampling.noise import derive_seed
from ..serve.errors import HttpError
from .document import Document, Made
from .live import PageJob

if TYPE_CHECKING:
    from .loom import Loom

_BEGINNING, _END = "There was once a king who lived in a", " kitchen."
_SEED, _N, _TOKENS = 7, 3, 12


class Example:
    """Is written once, into a document of its own. It can be stopped, and is then written again."""

    def __init__(self, loom: Loom) -> None:
        self._loom = loom
        self._job = PageJob("example", "example", None)
        self._writing: asyncio.Task[Document] | None = None

    async def document(self) -> Document:
        """Return the example: a node for the sentence, then one for each ending.

        Raises:
            HttpError, LlamaBranchError: it was stopped, or does not fit into the context.
        """
        writing = self._writing
        if writing is None or (writing.done() and (writing.cancelled() or writing.exception())):
            self._job = PageJob("example", "example", None)
            writing = self._writing = asyncio.ensure_future(self._write(self._job))
        return await asyncio.shield(writing)

    def stop(self) -> None:
        """Let the user's own text go first."""
        if self._writing is not None and not self._writing.done():
            self._loom.stop([self._job])

    async def _write(self, job: PageJob) -> Document:
        service_of = self._loom.service_of
        loom = type(self._loom)(Path(os.devnull), 0, service_of, read_only=True)
        ids, start = [await loom.service.tokenize(text) for text in (_BEGINNING + _END, _BEGINNING)]
        records = [Made(id="n1", kind="prompt"), *loom.plain("n1", ids, "p" * len(ids))]
        for i in range(1, 1 + _N):
            records.append(Made(
                id=f"n{1 + i}", parent="n1", at=n_common(ids, start), kind="sampled", by="A",
                seed=str(derive_seed(_SEED, i)), max_tokens=_TOKENS,
            ))  # fmt: skip
        sentence, *endings = loom.make(records)
        await loom.score(job, sentence)
        await loom.generate(job, [(node, await loom.request(node, _TOKENS)) for node in endings])
        if job.is_stopped or job.error is not None:
            raise HttpError(503, "the example was stopped")
        return loom.document
