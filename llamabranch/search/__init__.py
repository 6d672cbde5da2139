"""Search over branches: many continuations of one prompt, compared while they share its cells."""

from .beam import beam_search
from .best_of import best_of_n
from .constraints import Constraint, check_constraint, lines, words
from .mcts import TreeSearch, tree_search
from .node import SearchNode
from .outline import TreeLine, outline
from .particles import Potential, smc
from .rejection import rejection
from .result import Hypothesis, SearchResult, SearchStats
from .selection import Selection, select
from .steps import step_search
from .tree import SearchObserver
from .vote import vote

__all__ = [
    "Constraint",
    "Hypothesis",
    "Potential",
    "SearchNode",
    "SearchObserver",
    "SearchResult",
    "SearchStats",
    "Selection",
    "TreeLine",
    "TreeSearch",
    "beam_search",
    "best_of_n",
    "check_constraint",
    "lines",
    "outline",
    "rejection",
    "select",
    "smc",
    "step_search",
    "tree_search",
    "vote",
    "words",
]
