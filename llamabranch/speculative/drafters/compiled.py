"""The compiled loop, shared by model drafters and heads: begin a draft, take it over, divide the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...native import draft_loop
from ...native.draft_loop import DraftStream
from ...sampling import Distribution, Sampler
from ...sampling.noise import DRAFT, DRAW
from ..length.base import DraftLength
from .base import Draft

__all__ = ["LoopStream", "Taken", "share_costs", "take_drawn"]


class LoopStream:
    """One state's part of the compiled loop, whose memory is kept between drafts.

    Args:
        n_vocab: the size of the drafting context's vocabulary.
        rule: the acceptance rule; under "seeded" no distributions are kept.
    """

    def __init__(self, n_vocab: int, rule: str) -> None:
        self._n_vocab = n_vocab
        self._is_seeded = rule == "seeded"
        self._stream: DraftStream | None = None

    def begin(
        self,
        sampler: Sampler,
        *,
        seed: int,
        noise: int,
        seq_id: int,
        n_drafted: int,
        length: DraftLength,
        limit: int,
    ) -> DraftStream | None:
        """Return what the compiled loop needs to go on with a draft; None: it cannot.

        Args:
            sampler: draws; it has accepted the text and the draft.
            seed, noise: of the draws under the seeded rule, and under the others.
            seq_id: the sequence that is continued.
            n_drafted: tokens of the draft so far.
            length: when to stop.
            limit: the most tokens of the draft.
        """
        compiled = sampler.row_sampler if draft_loop.available else None
        if compiled is None:
            return None
        rule = length.stop_rule(n_drafted) if length.reads_entropy else None
        if n_drafted >= (limit if rule is None else min(limit, rule.most_tokens)):
            return None
        stream = self._stream
        if stream is None or stream.limit < limit:
            stream = DraftStream(limit, self._n_vocab, keeps_sources=not self._is_seeded)
            self._stream = stream
        stream.begin(
            compiled,
            seed=seed if self._is_seeded else noise,
            purpose=DRAW if self._is_seeded else DRAFT,
            seq_id=seq_id,
            n_drafted=n_drafted,
            limit=limit,
            rule=rule,
        )
        return stream


class Taken(NamedTuple):
    """How a draft continues after the compiled loop.

    Attributes:
        ends_at: after so many tokens the length ends it; None = it does not.
        is_decided: the length has been asked about the next token, and goes on.
        is_done: it has its last token.
    """

    ends_at: int | None
    is_decided: bool
    is_done: bool


def take_drawn(draft: Draft, stream: DraftStream, length: DraftLength, limit: int) -> Taken:
    """Add what the compiled loop has drawn; the length's own decisions are final.

    Where the length ends the draft, the caller cuts it.
    """
    drawn, n_before = stream.tokens, len(draft.tokens)
    is_decided = False
    draft.tokens += drawn
    draft.sources += [Distribution.from_logweights(*found) for found in stream.sources]
    if not length.reads_entropy:
        draft.entropies += [math.nan] * len(drawn)
    else:
        for n, entropy in enumerate(stream.entropies, n_before):
            draft.entropies.append(entropy)
            if not length.goes_on(n, entropy):
                return Taken(n, False, True)
        if stream.state == draft_loop.STOPPED:  # but Python goes on: it draws that token
            draft.entropies.pop()
            is_decided = True
    if stream.state == draft_loop.EOG:
        draft.stopped = "end"
        return Taken(None, is_decided, True)
    return Taken(None, is_decided, len(draft.tokens) >= limit)


def share_costs(drafts: Sequence[Draft], seconds: float, n_decodes: int) -> None:
    """Divide the time by the steps of each draft; the first draft gets all decodes."""
    steps = sum(len(draft.entropies) for draft in drafts) or 1
    for draft in drafts:
        draft.seconds = seconds * len(draft.entropies) / steps
    drafts[0].n_decodes = n_decodes
