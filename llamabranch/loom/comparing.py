"""Compare two models: each token is reported once it is scored, and all scores are kept at the end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

from msgspec import structs

from ..context import Context, PromptProgress
from ..context.progress import OnPromptProgress
from ..errors import DecodeInterruptedError
from ..eval.pair import PairScore, read_pair, same_vocabulary, short, spans, totals, write_pair
from ..serve.errors import HttpError
from .document import Ended, Node
from .live import PageJob
from .loom import Do, Loom

__all__ = ["compare"]

_NO_MODEL = "there is no second model: llamabranch open MODEL --compare MODEL2"
_UNEQUAL = "The models have different tokenizers"


async def compare(loom: Loom, do: Do, node: Node, at: int) -> dict[str, object]:
    """Score a node with both models, or let one write a new node and the other score it."""
    partner = loom.partner_of()
    if partner is None:
        raise HttpError(409, _NO_MODEL, param="node")
    same = same_vocabulary(loom.service.model, partner.model)
    if do.op == "compare" and do.mode == "read":
        comparison = _Comparison(loom, partner, node, do)
        return loom.started(
            loom.start("compare", comparison.read if same else comparison.spans, node)
        )
    if not same:
        raise HttpError(409, f"{_UNEQUAL}: they cannot write one text together")
    writer = "B" if do.op == "continue" else do.writer
    record = loom.made(do, 0, "sampled", at, writer)
    await loom.request(Node(record, node), do.max_tokens)
    (new,) = loom.make([record], do.cid)
    comparison = _Comparison(loom, partner, new, do)
    return loom.started(loom.start("compare", comparison.write, node, [new]), [new])


class _Comparison:
    """The scores of a node's tokens under both models, from a position on."""

    def __init__(self, loom: Loom, partner: Context, node: Node, do: Do) -> None:
        self._loom = loom
        self._both = loom.service.ctx, partner
        self._node = node
        self._do = do
        self._params = loom.params(node.made)
        self._first_seed: int | None = None  # the first position where B draws another token
        self._partner: Node | None = None  # the node that B continues from there
        self._at = 0
        self._columns: dict[str, list[object]] = {}

    async def read(self, job: PageJob) -> None:
        """Score all tokens of the node with both models."""

        def report(at: int, places: list[PairScore]) -> bool:
            self._loom.call(self._take, at, places)
            return job.is_stopped

        tokens, first = self._node.tokens(), max(1, self._node.made.at)
        params = self._params if self._node.made.seed is not None else None
        if await self._is_read(job, tokens[:first]):
            watch = self._watch(job)
            await asyncio.to_thread(read_pair, self._both, tokens, first, params, report, watch)
            self._end(job)

    async def write(self, job: PageJob) -> None:
        """Let one model write and the other score; in mode "part" B then continues alone."""

        def report(place: PairScore) -> bool:
            self._loom.call(self._wrote, place)
            return job.is_stopped

        def parted(token: int) -> bool:
            self._loom.call(self._part, job, token)
            return job.is_stopped

        loom, most = self._loom, self._do.max_tokens
        if not await self._is_read(job, self._node.tokens()):
            return
        await asyncio.to_thread(
            write_pair, self._both, self._node.tokens(), self._params, most,
            int(self._node.made.by == "B"), report, parted if self._do.mode == "part" else None,
            self._watch(job),
        )  # fmt: skip
        self._end(job)
        for node in job.nodes:
            reason = "stopped" if job.is_stopped else "length" if len(node.ids) >= most else "stop"
            loom.add(Ended(id=node.id, reason=reason))
        if self._partner is not None:
            await loom.score(job, self._partner)

    async def spans(self, job: PageJob) -> None:
        """Score the text with both models, each with its own tokens."""
        scored_spans = await asyncio.to_thread(spans, self._both, self._node.tokens())
        why = (
            f"{_UNEQUAL}, so there is no KL divergence between them: bits per byte can be compared"
        )
        sums = totals(scored_spans)
        data = self._event(0, {"spans": scored_spans, "totals": sums, "why": why})
        self._loom.emit("compare", data)
        self._loom.keep(self._node, "compare", data)
        job.result = {"mode": "read", "n": len(scored_spans), **sums}

    async def _is_read(self, job: PageJob, tokens: Sequence[int]) -> bool:
        """Let A process the text that the new tokens follow; return False if Stop ended that."""
        await self._loom.read(job, tokens)
        return not job.is_stopped

    def _watch(self, job: PageJob) -> OnPromptProgress:
        """Return a callback for B's progress in the same text, so that Stop ends B's decode too."""
        partner = self._both[1]

        def watch(read: PromptProgress) -> None:
            job.reads = partner if read.n_read < read.n_total else None
            if job.reads is None:
                partner.resume()
            elif job.is_stopped:  # between two decodes
                raise DecodeInterruptedError("the job was stopped")

        return watch

    def _event(self, at: int, fields: Mapping[str, object]) -> dict[str, object]:
        return {"node": self._node.id, "at": at, "mode": self._do.mode, **fields}

    def _take(self, at: int, places: Sequence[PairScore]) -> None:
        """Take the scores of tokens, from a position on."""
        loom, node, first = self._loom, self._node, at - self._node.made.at
        for i, place in enumerate(places, first):
            if node.lp[i] is None:
                loom.take(node, [place.score], node.src[i], i)
        tops = [[(a.token, short(a.logprob)) for a in p.other.alternatives] for p in places]
        loom.learn([token for top in tops for token, _ in top])
        pieces = loom.document.pieces
        columns: dict[str, list[object]] = {
            "kl": [short(p.kl) for p in places], "klr": [short(p.klr) for p in places],
            "lpA": [short(p.score.logprob) for p in places], "same": [p.same for p in places],
            "lpB": [short(p.other.logprob) for p in places],
            "hB": [short(p.other.entropy) for p in places], "draw": [p.draw for p in places],
            "topB": [[(t, lp, pieces[t]) for t, lp in top] for top in tops],
        }  # fmt: skip
        if not self._columns:
            self._at = at
        for name, column in columns.items():
            self._columns.setdefault(name, []).extend(column)
        draws = ((at + i, p.draw) for i, p in enumerate(places) if p.draw not in (None, p.token))
        if self._first_seed is None:
            self._first_seed = next(draws, (None, None))[0]
        loom.emit("compare", self._event(at, columns))

    def _wrote(self, place: PairScore) -> None:
        """Take a new token with its scores."""
        self._loom.take(self._node, [place.score], "s")
        self._loom.send_tokens()
        self._take(self._node.end - 1, [place])

    def _part(self, job: PageJob, token: int) -> None:
        """Take a token that B writes alone."""
        loom, node_record, partner = self._loom, self._node.made, self._partner
        if self._first_seed is None:
            return
        if partner is None:
            new = structs.replace(
                node_record, id=loom.document.name(), parent=self._node.id, at=self._first_seed, by="B",
                a=node_record.a or node_record.r,
            )  # fmt: skip
            loom.add(new)
            self._partner = partner = loom.document.nodes[new.id]
            partner.job = job.id
            job.nodes.append(partner)
            loom.send_nodes(partner)
        start = len(partner.ids)
        for record in loom.plain(partner.id, [token], "s", at=start):
            loom.journal.add(record)
        loom.note(partner, start, start + 1)

    def _end(self, job: PageJob) -> None:
        """Report the means and the first differences, and keep all scores with the node."""
        columns, n = self._columns, len(self._columns.get("kl", ()))
        means = {
            name: short(
                math.fsum(float(x) for x in columns[name] if isinstance(x, (float, int))) / n
            )
            for name in ("kl", "klr", "same")
            if n
        }
        same = columns.get("same", [])
        partner = {"partner": self._partner.id} if self._partner else {}
        job.result = {
            "mode": self._do.mode, "n": n, "first_seed": self._first_seed, "partner": None, **partner,
            "first_greedy": self._at + same.index(False) if False in same else None, **means,
        }  # fmt: skip
        data = self._event(self._at, {**columns, **partner})
        if partner:
            self._loom.emit("compare", data)
        self._loom.keep(self._node, "compare", data)
