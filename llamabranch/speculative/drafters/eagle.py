"""Drafting with an EAGLE-3 head (Li et al. 2025, 2503.01840).

At position P the pair is (token P + 1, state P): see :mod:`.head`.
"""

from __future__ import annotations

from ...arguments import instance
from ...context import Context
from ...errors import ConfigError
from ...sampling import SamplingParams
from .head import HeadDrafter

__all__ = ["EagleDrafter"]


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-3 head, which reads the hidden states of three layers of the target.

    Args:
        ctx: a context of the head: ``Context(Model("head.gguf"), target=ctx)``. Each state holds one
            of its sequences.
        sampling: the settings of its draws; None = the request's.

    Raises:
        ConfigError: not a context of a head.
    """

    ahead = 1

    def __init__(self, ctx: Context, sampling: SamplingParams | None = None) -> None:
        instance("ctx", ctx, Context, 'EagleDrafter(Context(Model("head.gguf"), target=ctx))')
        if ctx.target is None or not ctx.model.target_layers:
            raise ConfigError(
                f"{ctx.model.name} is not open as an EAGLE-3 head",
                hint='EagleDrafter(Context(Model("head.gguf"), target=ctx))',
            )
        super().__init__(ctx, sampling)

    @property
    def name(self) -> str:
        """The head's name."""
        return self.ctx.model.name
