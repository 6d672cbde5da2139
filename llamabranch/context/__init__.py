"""One K/V cache that many sequences share: tokens in, logits out."""

from .cell_table import Usage
from .context import Context
from .logits import TokenScore
from .opening import Capabilities
from .params import ContextParams
from .progress import PromptProgress

__all__ = [
    "Capabilities",
    "Context",
    "ContextParams",
    "PromptProgress",
    "TokenScore",
    "Usage",
]
