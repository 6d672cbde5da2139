"""The texts of hypotheses: where stop strings end them, and how their tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence

from ..model import Model, StopStrings
from .node import SearchNode
from .result import Hypothesis

__all__ = ["completes_stop", "hypothesis"]


def completes_stop(node: SearchNode, stops: Sequence[str]) -> bool:
    """Return whether a stop string in the text from the root is complete since ``node``'s tokens.

    The texts of its ancestors must not contain a stop string.
    """
    if not stops or not node.text:
        return False
    longest = max(map(len, stops)) - 1
    before = ""
    at = node.parent
    while at is not None and at.parent is not None and len(before) < longest:  # not the prompt
        before = at.text + before
        at = at.parent
    text = before[-longest:] + node.text if longest else node.text
    return any(stop in text for stop in stops)


def hypothesis(
    model: Model, node: SearchNode, stops: Sequence[str], score: float, reason: str
) -> Hypothesis:
    """Return the text that ends at ``node``; its status becomes "finished"."""
    node.status = "finished"
    node.score = score
    tokens = node.path_tokens
    if tokens and model.is_eog(tokens[-1]):
        tokens.pop()
    stop_strings = StopStrings(stops)
    text = stop_strings.feed(node.path_text)
    if stop_strings.found is None:
        text += stop_strings.flush()
    return Hypothesis(tokens, text, node.logprob, score, reason, node)
