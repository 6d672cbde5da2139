"""Search over branches: many continuations of one prompt, compared while they share its cells."""

from .beam import beam_search
from .best_of import best_of_n, vote
from .result import Hypothesis, SearchNode, SearchResult, SearchStats
from .selection import Selection, select

__all__ = [
    "Hypothesis",
    "SearchNode",
    "SearchResult",
    "SearchStats",
    "Selection",
    "beam_search",
    "best_of_n",
    "select",
    "vote",
]
