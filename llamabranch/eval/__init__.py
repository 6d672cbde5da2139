"""How well models predict a text, in llama-perplexity's numbers.

perplexity.py   the perplexity of a text in chunks
divergence.py   two models on one text: KL divergence
"""

from .divergence import KLDivergence, KLStatistics, divergence
from .perplexity import Perplexity, Uncertain, perplexity

__all__ = [
    "KLDivergence",
    "KLStatistics",
    "Perplexity",
    "Uncertain",
    "divergence",
    "perplexity",
]
