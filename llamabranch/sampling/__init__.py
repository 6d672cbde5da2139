"""From logits to the next token: settings, grammar, distribution, draw."""

from .distribution import Distribution
from .grammar import Grammar
from .params import SamplingParams
from .sampler import Sampler

__all__ = [
    "Distribution",
    "Grammar",
    "Sampler",
    "SamplingParams",
]
