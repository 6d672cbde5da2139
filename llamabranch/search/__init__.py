"""Searches: several continuations of one branch, which share its cells and their decodes."""

from .beam import beam_search
from .best_of import best_of_n
from .result import Hypothesis, SearchResult, SearchStats
from .vote import vote

__all__ = ["Hypothesis", "SearchResult", "SearchStats", "beam_search", "best_of_n", "vote"]
