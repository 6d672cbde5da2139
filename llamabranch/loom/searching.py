"""Searches from a node: their options, reports while they run, and what scores their texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Annotated, Literal

from msgspec import Meta, Struct

from ..branch import Branch
from ..context import Context
from ..eval.pair import short
from ..sampling import SamplingParams
from ..search import (
    Potential,
    SearchNode,
    SearchObserver,
    SearchResult,
    SearchStats,
    beam_search,
    best_of_n,
    smc,
    step_search,
    tree_search,
    vote,
)
from ..search.vote import last_match
from .document import Seed
from .live import Live, PageJob

__all__ = ["Kind", "SearchOptions", "Watch", "search"]

_LOOK_S = 0.05
_MOST_OUTLINE = 2000
_WIDTHS = {"beam": 4, "best_of_n": 8, "smc": 4, "vote": 16, "steps": 4, "tree": 4}
Kind = Literal["beam", "best_of_n", "smc", "vote", "steps", "tree"]
Count = Annotated[int, Meta(ge=1)]


class SearchOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a search, named as in `llamabranch.search`. Each kind uses some of them."""

    width: Annotated[int, Meta(ge=1, le=256)] | None = None
    max_tokens: Count = 32
    iterations: Count = 8
    step: Count | str = 8
    stop: list[str] = []
    want: list[str] = []
    avoid: list[str] = []
    answer: str = r"-?\d+(?:\.\d+)?"
    seed: Seed | None = None
    temperature: float | None = None

    def params(self, kind: Kind, sampling: SamplingParams) -> SamplingParams:
        """Return a node's sampling settings for a search. For SMC every token must be possible."""
        if kind == "smc":
            sampling = sampling.replace(top_k=0, top_p=1.0, min_p=0.0)
        if self.seed is not None:
            sampling = sampling.replace(seed=int(self.seed))
        if self.temperature is not None:
            sampling = sampling.replace(temperature=self.temperature)
        return sampling


class Watch(SearchObserver):
    """Observes a search in its thread, and reports what is new in its tree."""

    def __init__(self, live: Live, job: PageJob) -> None:
        self.live = live
        self.job = job
        self._index: dict[SearchNode, int] = {}
        self._seen: list[tuple[object, ...]] = []
        self._looked = 0.0

    def __call__(self, stats: SearchStats) -> bool | None:
        """Report the tree, at most 20 times a second. True, after a stop, ends the search."""
        if perf_counter() - self._looked >= _LOOK_S:
            self.look(stats)
        return self.job.is_stopped

    def look(self, stats: SearchStats, **more: object) -> None:
        """Report new nodes and those whose score, visits or status changed."""
        if self.root is None:
            return
        add, changed = [], []
        for node in self.root.walk():
            i = self._index.get(node)
            state = (short(node.score), node.n_visits, node.status)
            if i is None:
                self._index[node] = i = len(self.job.places)
                self.job.places.append(node)
                self._seen.append(state)
                add.append(self._line(i, node))
            elif self._seen[i] != state:
                self._seen[i] = state
                changed.append([i, *state])
        event: dict[str, object] = {
            "job": self.job.id, "step": stats.steps, "add": add, "set": changed,
            "stats": stats.as_dict(), "sizes": [*self.effective_sizes], **more,
        }  # fmt: skip
        self.live.call(self.live.emit, "search", event)
        self._looked = perf_counter()

    def end(self, found: SearchResult) -> dict[str, object]:
        """Report the rest; return what the document keeps: the results and the first 2,000 nodes."""
        votes = {str(answer): n for answer, n in found.votes.items()}
        self.look(found.stats, **({"votes": votes} if votes else {}))
        best = [
            (self._index[h.node], h.text, h.score, h.finish_reason)
            for h in found.hypotheses
            if h.node is not None
        ]
        self.job.result = {"hypotheses": best, "votes": votes, "stats": found.stats.as_dict()}
        lines = [self._line(i, node) for i, node in enumerate(self.job.places[:_MOST_OUTLINE])]
        head = {"job": self.job.id, "kind": self.job.kind, "at": self.job.at}
        return {**head, "lines": lines, **self.job.result}

    def _line(self, i: int, node: SearchNode) -> list[object]:
        parent = -1 if node.parent is None else self._index[node.parent]
        text = node.text if node.parent is not None else ""
        return [
            i, parent, text, len(node.tokens), short(node.logprob), short(node.score),
            node.n_visits, node.status, list(node.tokens),
        ]  # fmt: skip


def search(
    ctx: Context, tokens: Sequence[int], sampling: SamplingParams, kind: Kind, asked: SearchOptions,
    watch: Watch,
) -> SearchResult:  # fmt: skip
    """Search from a text, in a thread of its own.

    Raises:
        ConfigError: an option is out of range.
        LlamaBranchError: the search fails.
    """
    n, most, stop = asked.width or _WIDTHS[kind], asked.max_tokens, asked.stop
    with Branch.start(ctx, tokens, sampling=asked.params(kind, sampling)) as branch:

        def reward(text: str) -> float:
            """Return exp of the mean log-probability of a text."""
            scores = branch.score(text) if text else []
            return math.exp(sum(s.logprob for s in scores) / len(scores)) if scores else 0.0

        match kind:
            case "beam":
                return beam_search(branch, n, most, n=n, stop=stop, on_step=watch)
            case "best_of_n":
                return best_of_n(branch, n, most, stop=stop, on_step=watch)
            case "smc":
                weigh = [_Wanted(asked.want, asked.avoid)]
                return smc(branch, n, most, potentials=weigh, stop=stop, on_step=watch)
            case "vote":
                return vote(branch, last_match(asked.answer), n, most, stop=stop, on_step=watch)
            case "steps":
                return step_search(
                    branch, reward, n, beam_width=n, max_steps=asked.iterations, step=asked.step,
                    max_tokens=most, stop=stop, on_step=watch,
                )  # fmt: skip
        return tree_search(
            branch, reward, asked.iterations, expand=n, step=asked.step, max_tokens=most, stop=stop,
            on_step=watch,
        )  # fmt: skip


class _Wanted(Potential):
    """Multiplies the weight by e^2 for each wanted text; texts to avoid set it to 0."""

    def __init__(self, want: Sequence[str], avoid: Sequence[str]) -> None:
        self._want = want
        self._avoid = avoid

    def prefix(self, text: str) -> float:
        """Return the log-weight of an unfinished text."""
        if any(avoided in text for avoided in self._avoid):
            return -math.inf
        return 2.0 * sum(wanted in text for wanted in self._want)

    complete = prefix
