"""The drafter that is used where none is named."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from ..context import Context
from ..errors import LlamaBranchError
from ..generation.drafter import Drafter
from .drafters.chain import ChainDrafter
from .drafters.copying import SuffixDrafter
from .drafters.grammar import GrammarDrafter
from .drafters.mtp import MTPDrafter

__all__ = ["DrafterChoice", "auto_drafter"]

DrafterChoice = Drafter | Literal["auto"] | None


def auto_drafter(ctx: Context, *, structured: bool | None = None) -> Drafter:
    """Return a drafter of copied text, and of the model's MTP layers and what a grammar forces.

    ``structured``: whether a grammar constrains the texts; None = some of them. A context that reads the
    MTP layers is opened once and stays with ``ctx``.
    """
    head = None
    if ctx.model.n_mtp_layers:
        with ctx.lock, suppress(LlamaBranchError):  # such as memory that is in use
            head = ctx.attached.get("head") or Context(ctx.model, target=ctx)
            ctx.attached["head"] = head

    def copying(min_match: int) -> Drafter:
        values = SuffixDrafter(min_match=min_match, shared_tokens=0)
        return ChainDrafter([values, MTPDrafter(head)]) if isinstance(head, Context) else values

    if structured is False:
        return copying(2)
    return GrammarDrafter(copying(1), copying(2) if structured is None else None)
