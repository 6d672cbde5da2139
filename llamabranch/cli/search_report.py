"""What ``search`` and ``select`` print of a search: its cost, its tree, and a page with both."""

from __future__ import annotations

from llamabranch.pictures import page, table
from llamabranch.search import SearchNode, SearchResult, SearchStats, outline, tree_picture

from .console import Console
from .trees import LEGEND, drawn_tree

__all__ = ["print_tree", "search_page", "stats_text"]


_UNFOLDING = "[+3] unfolds three branches that were given up at this place."


def stats_text(stats: SearchStats) -> str:
    """Return the cost of a search as a line."""
    again = f" ({stats.tokens_redecoded} again)" if stats.tokens_redecoded else ""
    return (
        f"{stats.decodes} decodes of {stats.tokens_decoded} tokens{again}, "
        f"{stats.tokens_shared} tokens shared, at most {stats.peak_sequences} sequences, "
        f"{stats.elapsed_s:.2f} s"
    )


def search_page(result: SearchResult, prompt: str, name: str, best: int) -> str:
    """Return a page: the ``best`` results, what they have cost, and the tree."""
    rows = [("text", "score", "log p, nats", "tokens", "ended by")]
    rows += [
        (h.text, f"{h.score:.4f}", f"{h.logprob:.2f}", str(len(h.tokens)), h.finish_reason)
        for h in result.hypotheses[:best]
    ]
    return page(
        name,
        table(rows),
        table([(stats_text(result.stats),)]),
        "<hr>",
        tree_picture(result.tree, prompt=prompt, caption=f"{LEGEND} {_UNFOLDING}"),
    )


def print_tree(console: Console, root: SearchNode, prompt: str) -> None:
    """Draw the tree of a search below its prompt."""
    console.render(drawn_tree(outline(root, prompt=prompt)))
    console.line(f"{LEGEND} What is dim was given up.", "dim")
    console.line()
