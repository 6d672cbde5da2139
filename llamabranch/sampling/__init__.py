"""From logits to the next token: settings, grammar, distribution, draw."""

from __future__ import annotations

from ..lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # settings need no NumPy
