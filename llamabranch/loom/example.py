"""The example of the first screen: a sentence with its numbers, and three endings of it."""

from __future__ import annotations

import asyncio

from msgspec import Raw

from ..engine import Request
from ..model.text import n_common
from ..sampling.noise import derive_seed
from ..serve.generation import all_texts
from ..serve.service import Service
from .document import AnyRecord, Document, Ended, Made, Tokens
from .live import MOST_TOP, scored_tokens, source_of

_BEGINNING, _END = "There was once a king who lived in a", " kitchen."
_SEED, _N, _TOKENS = 7, 3, 12
_NAMES = [f"loom-example-{i}" for i in range(1 + _N)]  # of the requests


class Example:
    """Is written once, into a document of its own. It can be stopped, and is then written again."""

    def __init__(self) -> None:
        self._writing: asyncio.Task[Document] | None = None

    async def document(self, service: Service) -> Document:
        """Return the example: a node for the sentence, and one for each ending.

        Raises:
            HttpError, LlamaBranchError: it was stopped, or does not fit into the context.
        """
        writing = self._writing
        if writing is None or (writing.done() and (writing.cancelled() or writing.exception())):
            writing = self._writing = asyncio.ensure_future(_write(service))
        return await asyncio.shield(writing)

    def stop(self, service: Service) -> None:
        """Let the user's own text go first."""
        if self._writing is not None and not self._writing.done():
            for name in _NAMES:
                service.engine.abort(name)


async def _write(service: Service) -> Document:
    ids, beginning = [await service.tokenize(text) for text in (_BEGINNING + _END, _BEGINNING)]
    service.check_room(ids, _TOKENS)
    at, usual, document = n_common(ids, beginning), service.settings.sampling, Document()
    nodes = [Made(id="n0", kind="prompt")]
    requests = [Request(ids, id=_NAMES[0], max_tokens=0, prompt_logprobs=MOST_TOP)]
    for i in range(1, 1 + _N):
        seed = derive_seed(_SEED, i)
        sampling = usual.replace(seed=seed, logprobs=True)
        nodes.append(Made(
            id=f"n{i}", parent="n0", at=at, kind="sampled", by="A", seed=str(seed), max_tokens=_TOKENS,
        ))  # fmt: skip
        requests.append(Request(
            ids[:at], id=_NAMES[i], max_tokens=_TOKENS, sampling=sampling, top_logprobs=MOST_TOP,
        ))  # fmt: skip
    for node, text in zip(nodes, await all_texts(service, requests), strict=True):
        result = text.result
        records: list[AnyRecord] = [node]
        if node.parent is None:  # nothing comes before its first token
            scores = [score for score in result.prompt_logprobs or () if score is not None]
            records.append(Tokens(
                id=node.id, ids=ids[:1], lp=[None], h=[None], rk=[None], src="p", top=[Raw(b"[]")],
            ))  # fmt: skip
            records.append(scored_tokens(node.id, 1, scores, "p" * len(scores)))
        else:
            src = "".join(map(source_of, text.tokens))
            records.append(scored_tokens(node.id, 0, text.tokens, src))
            records.append(Ended(id=node.id, reason=result.finish_reason))
        named = [
            token for record in records if isinstance(record, Tokens) for token in record.named()
        ]
        for record in [*document.learn(service.model, named), *records]:
            document.apply(record)
    return document
