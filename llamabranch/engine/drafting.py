"""The drafts of many streams, made together: one decode of the draft model a step for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from ..branch import Branch, BranchStore
from ..context import Context
from ..errors import CapacityError
from ..speculative.drafters.base import Draft, propose
from ..speculative.drafters.model import ModelLine
from ..speculative.round import Stream

__all__ = ["Proposal", "propose_together"]


@dataclass
class Proposal:
    """A stream that wants a draft of at most ``limit`` tokens after ``tokens``."""

    stream: Stream
    tokens: list[int]
    limit: int


def propose_together(proposals: Sequence[Proposal]) -> list[Draft]:
    """Return a draft for each proposal; those of one draft context share its decodes."""
    drafts: list[Draft] = [Draft(stopped="off")] * len(proposals)
    groups: dict[int, list[int]] = {}
    for i, proposal in enumerate(proposals):
        line = proposal.stream.line
        if type(line) is ModelLine and line.branch.ctx.capabilities.can_truncate:
            groups.setdefault(id(line.branch.ctx), []).append(i)
        else:
            limit = min(proposal.limit, proposal.stream.length.limit)
            drafts[i] = propose(line, proposal.tokens, proposal.stream.length, limit)
    for members in groups.values():
        made = _Together([proposals[i] for i in members]).run()
        for i, draft in zip(members, made, strict=True):
            drafts[i] = draft
    return drafts


class _Together:
    """The lines of one draft context, advanced in step."""

    def __init__(self, proposals: Sequence[Proposal]) -> None:
        self._proposals = list(proposals)
        self._lines = [self._line(p) for p in proposals]
        self._ctx: Context = self._lines[0].branch.ctx
        self._drafts = [Draft(drafter=self._ctx.model.name) for _ in proposals]

    @staticmethod
    def _line(proposal: Proposal) -> ModelLine:
        line = proposal.stream.line
        if not isinstance(line, ModelLine):
            raise TypeError("only model lines draft together")
        return line

    def run(self) -> list[Draft]:
        start = perf_counter()
        decodes = self._ctx.decoder.n_decodes
        live = []
        for i, proposal in enumerate(self._proposals):
            if proposal.stream.length.consider(self._drafts[i].drafter):
                live.append(i)
            else:
                self._drafts[i].stopped = "off"
        try:
            self._catch_up(live)
            store = BranchStore(self._ctx)
            while live:
                tokens = {}
                for i in list(live):
                    token = self._draw(i)
                    if token is None:
                        live.remove(i)
                    else:
                        tokens[self._lines[i].branch] = token
                store.commit(tokens)
        except CapacityError:  # no room to draft is no reason to stop
            for i in live:
                self._drafts[i].stopped = "capacity"
        self._share_costs(perf_counter() - start, self._ctx.decoder.n_decodes - decodes)
        return self._drafts

    def _catch_up(self, live: list[int]) -> None:
        store = BranchStore(self._ctx)
        unread: dict[Branch, list[int]] = {}
        for i in live:
            line, tokens = self._lines[i], self._proposals[i].tokens
            self._drafts[i].n_read = len(tokens) - line.branch.position
            unread[line.branch] = tokens[line.branch.position : line.n_prompt]
        store.prefill({branch: tokens for branch, tokens in unread.items() if tokens})
        store.append_unscored(
            {
                self._lines[i].branch: self._proposals[i].tokens[self._lines[i].branch.position :]
                for i in live
            }
        )

    def _draw(self, i: int) -> int | None:
        """Draw the next token of a draft; return it if the draft goes on after it."""
        draft, line, proposal = self._drafts[i], self._lines[i], self._proposals[i]
        limit = min(proposal.limit, proposal.stream.length.limit)
        token = line.draw(draft, proposal.stream.length, line.branch)
        return token if token is not None and len(draft.tokens) < limit else None

    def _share_costs(self, seconds: float, n_decodes: int) -> None:
        """Divide what it cost by the steps each draft took; decodes are counted with the first."""
        steps = sum(len(draft.entropies) for draft in self._drafts) or 1
        for draft in self._drafts:
            draft.seconds = seconds * len(draft.entropies) / steps
        self._drafts[0].n_decodes = n_decodes
