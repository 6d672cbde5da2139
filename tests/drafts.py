"""Fixed draft lengths for tests that need drafts: "auto" drafts only where that pays."""

from llamabranch import SpeculativeConfig

__all__ = ["FIXED"]

FIXED = SpeculativeConfig(draft_k=4)
