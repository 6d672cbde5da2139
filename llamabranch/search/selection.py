"""``select``: choose among texts by their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from ..arguments import choice, items
from ..branch import Branch
from ..branch.scorer import Wanted
from ..errors import ConfigError
from .checks import check_start
from .node import SearchNode
from .result import SearchStats
from .tree import SearchTree

__all__ = ["METHODS", "Selection", "select"]

METHODS = ("mean", "greedy", "contrast", "sum", "bytes")


@dataclass(frozen=True)
class Selection:
    """The outcome of ``select``.

    Attributes:
        choice: the best choice.
        index: its index.
        scores: the scores of all choices, in their order; the best choice has the highest one.
        logprobs: for each choice, log p of each of its tokens, nats.
        tokens: for each choice, its token ids.
        stats: the cost.
        tree: the choices as a tree; common beginnings share nodes.
    """

    choice: str
    index: int
    scores: list[float]
    logprobs: list[list[float]]
    tokens: list[list[int]]
    stats: SearchStats
    tree: SearchNode = field(repr=False)

    def as_dict(self) -> dict[str, object]:
        """Return JSON types, without the tree."""
        return {
            "choice": self.choice,
            "index": self.index,
            "scores": self.scores,
            "logprobs": self.logprobs,
            "tokens": self.tokens,
            "stats": self.stats.as_dict(),
        }


def select(branch: Branch, choices: Sequence[str], *, method: str = "mean") -> Selection:
    """Return which of ``choices`` the model prefers as the continuation of ``branch``.

    All choices are decoded together, as a tree in which common beginnings are decoded once; the last
    token of a choice is not decoded at all. The log-probabilities are the model's own; sampling settings
    and grammar of the branch are ignored. Each choice is tokenized by itself, so begin it with a space
    if the text needs one.

    Args:
        branch: a branch that has read the prompt; it does not change.
        choices: texts, not empty; equal ones share their score.
        method: how a choice is scored from log p of its tokens.
            "mean": their mean, SGLang's ``token_length_normalized``.
            "greedy": goes token by token and drops a choice when another choice's token is more probable.
            After its end a shorter choice competes with its mean. The score is the number of tokens that
            a choice survived. "contrast": the mean of log p minus log p without the prompt (which is 0
            for the first token), SGLang's ``unconditional_likelihood_normalized``. It decodes the choices
            once more. "sum": their sum, the log-probability of the choice. "bytes": their sum per byte of
            text.

    Raises:
        ConfigError: there are no choices, one is empty, or the method is unknown. TokenizeError,
            BranchStateError,
        CapacityError, DecodeError: the search frees its sequences.
    """
    check_start(branch, None)
    choice("method", method, METHODS)
    choices = items("choices", choices)
    if not choices or any(not isinstance(text, str) or not text for text in choices):
        raise ConfigError("choices must be texts that are not empty, at least one")
    start = perf_counter()
    tokens = [branch.ctx.model.tokenize(text, add_special=False) for text in choices]
    if not all(tokens):
        raise ConfigError("a choice has no tokens")
    with SearchTree(branch) as tree:
        paths, logprobs = tree.add_given(tree.root, branch.sequence, tokens)
        if method == "contrast":
            alone = tree.logprobs([Wanted(None, text, 1) for text in tokens])
            scores = [
                math.fsum(np.subtract(conditional, [0.0, *unconditional])) / len(conditional)
                for conditional, unconditional in zip(logprobs, alone, strict=True)
            ]
        else:
            scores = _scores(method, choices, logprobs)
    index = int(np.argmax(scores))  # among equals, the first
    for i, path in enumerate(paths):
        path[-1].status = "finished" if i == index else path[-1].status
        path[-1].score = scores[i]
    for path in paths:
        if path[-1].status != "finished":
            path[-1].status = "pruned"
    tree.root.prune_open()
    tree.stats.elapsed_s = perf_counter() - start
    return Selection(choices[index], index, scores, logprobs, tokens, tree.stats, tree.root)


def _scores(
    method: str, choices: Sequence[str], logprobs: Sequence[Sequence[float]]
) -> list[float]:
    if method == "greedy":
        return _greedy(logprobs)
    sums = [math.fsum(values) for values in logprobs]
    if method == "sum":
        return sums
    if method == "bytes":
        sizes = [len(choice.encode("utf-8", "replace")) for choice in choices]
    else:
        sizes = [len(values) for values in logprobs]
    return [total / size for total, size in zip(sums, sizes, strict=True)]


def _greedy(logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each choice, the number of tokens for which it was among the best."""
    longest = max(map(len, logprobs))
    padded = [[*row, *[math.fsum(row) / len(row)] * (longest - len(row))] for row in logprobs]
    left = set(range(len(padded)))
    survived = [0.0] * len(padded)
    for step in range(longest):
        best = max(padded[i][step] for i in left)
        left = {i for i in left if padded[i][step] == best}
        for i in left:
            survived[i] += 1
        if len(left) == 1:
            break
    return survived
