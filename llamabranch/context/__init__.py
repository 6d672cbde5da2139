"""One K/V cache that many sequences share: tokens in, logits out."""

from .capabilities import Capabilities
from .cell_ledger import Usage
from .context import Context

__all__ = [
    "Capabilities",
    "Context",
    "Usage",
]
