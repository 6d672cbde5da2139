"""Tokens and trees as HTML, for notebooks and files; and the model of a drawn tree.

No scripts and no style sheets: a notebook may strip them. Text keeps the colour that the page has, and
colours behind it are translucent, so light and dark pages can both be read. All text is escaped, and
characters that cannot be seen, or would reorder the text around them, are written as their code.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["SOURCES", "Token", "TreeLine", "tokens_picture", "tree", "visible"]

MOST_TOKENS = 2000  # of one picture; the last ones are shown
_BOX = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6"
_DIM = "opacity:.65"
# Where a token came from: the colour behind it, and what that is called.
SOURCES = {
    "drafted": ("rgba(46,160,67,.38)", "drafted and accepted"),
    "forced": ("rgba(130,80,223,.34)", "forced by the grammar"),
    "bonus": ("rgba(0,150,199,.45)", "bonus"),
    "corrected": ("rgba(219,148,0,.48)", "corrected by the target"),
}


class Emitted(Protocol):
    """What is known of a token that was generated; numbers that are not known are NaN."""

    @property
    def text(self) -> str: ...
    @property
    def logprob(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Token:
    """A token with its text; ``logprob`` and ``entropy`` in nats."""

    text: str
    logprob: float = math.nan
    entropy: float = math.nan
    source: str = "plain"


@dataclass(frozen=True)
class TreeLine:
    """A line of a drawn tree, whether of branches or of a search, in a terminal, as text or as HTML.

    Attributes:
        tokens: its text, with the probabilities of the tokens.
        figures: what is written beside it.
        children: what continues it, in the order in which it is drawn.
        status: "finished" (a result ends here), "pruned" or "".
        n_hidden: how many branches were pruned along it that are not among ``children``.
    """

    tokens: Sequence[Token]
    figures: str = ""
    children: Sequence[TreeLine] = ()
    status: str = ""
    n_hidden: int = 0

    @property
    def text(self) -> str:
        """The text of its tokens."""
        return "".join(token.text for token in self.tokens)

    @property
    def probability(self) -> float:
        """That of the token it begins with; NaN if it is not known, as of a prompt."""
        logprob = self.tokens[0].logprob if self.tokens else math.nan
        return logprob if math.isnan(logprob) else math.exp(min(0.0, logprob))


def tokens_picture(tokens: Sequence[Emitted], *, prompt: str = "", caption: str = "") -> str:
    """Return a text whose tokens are coloured: by source where something was drafted, else by
    probability."""
    shown = tokens[-MOST_TOKENS:]
    if len(shown) < len(tokens):
        prompt = f"... ({len(tokens) - len(shown)} tokens before)"
    by_source = any(token.source in SOURCES for token in tokens)
    text = f'<span style="{_DIM}">{_text(prompt)}</span>' if prompt else ""
    text += "".join(_span(token, by_source) for token in shown)
    keys = list(SOURCES.values()) if by_source else _PROBABILITIES
    return f'<div>{_caption(caption)}<div style="{_BOX}">{text}</div>{_legend(keys)}</div>'


def tree(roots: Sequence[TreeLine], *, caption: str = "") -> str:
    """Return an indented tree whose tokens are coloured by their probability; pruned branches are dim.

    A percentage is the probability of the token that a line begins with.
    """
    body = "".join(map(_tree_line, roots)) or f'<div style="{_DIM}">no branches</div>'
    return f"<div>{_caption(caption)}{body}{_legend(_PROBABILITIES)}</div>"


def _tree_line(line: TreeLine) -> str:
    """Return a line and what is below it."""
    p, figures = line.probability, [line.figures] if line.figures else []
    if line.n_hidden:
        figures.append(f"{line.n_hidden} more pruned along it")
    start = "" if math.isnan(p) else f'<span style="{_DIM}">{100 * p:.0f} %</span> '
    text = "".join(_span(token, False) for token in line.tokens[-MOST_TOKENS:])
    told = f' <span style="{_DIM}">{_text(", ".join(figures))}</span>' if figures else ""
    style = f"{_BOX};{_DIM}" if line.status == "pruned" else _BOX
    below = "".join(map(_tree_line, line.children))
    if below:
        indent = "margin-left:.5em;padding-left:1em;border-left:1px solid rgba(128,128,128,.6)"
        below = f'<div style="{indent}">{below}</div>'
    return f'<div style="{style}">{start}{text}{told}{below}</div>'


def _span(token: Emitted, by_source: bool) -> str:
    """Return a token with its colour; what is known of it is told where the pointer is."""
    colour, told = "none", []
    if not math.isnan(token.logprob):
        p = math.exp(min(0.0, token.logprob))
        colour = colour if by_source else _fading(p)
        told.append(f"p = {p:.3g}")
    if not math.isnan(token.entropy):
        told.append(f"entropy {token.entropy:.2f} nats")
    if token.source in SOURCES:
        of_source, name = SOURCES[token.source]
        colour = of_source if by_source else colour
        told.append(name)
    style = f"background:{colour};border-radius:2px"
    return f'<span style="{style}" title="{", ".join(told)}">{_text(token.text)}</span>'


def _fading(p: float) -> str:
    return f"rgba(230,80,30,{0.6 * (1.0 - p):.2f})"


_PROBABILITIES = [(_fading(p), f"p = {p:g}") for p in (0.9, 0.5, 0.01)]


def _legend(keys: Iterable[tuple[str, str]]) -> str:
    marks = "".join(
        f'<span style="background:{colour};border-radius:2px;padding:0 .4em;margin-right:.6em">'
        f"{label}</span>"
        for colour, label in keys
    )
    return f'<div style="font-size:85%;{_BOX}">{marks}</div>'


def _caption(text: str) -> str:
    return f'<div style="{_DIM}">{_text(text)}</div>' if text else ""


def _text(text: str) -> str:
    """Return text for a page: escaped, with characters that cannot be seen as their code."""
    return html.escape(visible(text, "\n\t\u200c\u200d"), quote=True)


def visible(text: str, also: str = "") -> str:
    """Return text with characters that cannot be seen as their code, but for those in ``also``."""
    return "".join(c if c.isprintable() or c in also else f"\\u{ord(c):04x}" for c in text)
