"""Searches: several continuations of one branch that share its cells and are decoded together."""

from .beam import beam_search
from .best_of import best_of_n
from .result import Hypothesis, SearchResult
from .vote import vote

__all__ = ["Hypothesis", "SearchResult", "beam_search", "best_of_n", "vote"]
