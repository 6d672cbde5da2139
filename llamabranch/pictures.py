"""Tokens, distributions and trees as HTML, for notebooks and files; and the model of a drawn tree.

No scripts and no style sheets: a notebook may strip them. Text keeps the colour that the page has, and
colours behind it are translucent, so light and dark pages can both be read. All text is escaped, and
characters that cannot be seen, or would reorder the text around them, are written as their code.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Token",
    "TreeLine",
    "bars",
    "coloured",
    "tokens_picture",
    "tree",
]

MOST_TOKENS = 2000  # of one picture; the last ones are shown
_HIGH_ENTROPY = 5.0  # nats: the full colour

_BOX = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.6"
_DIM = "opacity:.65"
_SOURCES = {
    "drafted": ("rgba(46,160,67,.38)", "drafted and accepted"),
    "forced": ("rgba(130,80,223,.34)", "forced by the grammar"),
    "bonus": ("rgba(0,150,199,.45)", "bonus"),
    "corrected": ("rgba(219,148,0,.48)", "corrected by the target"),
}
_WAYS = ("source", "probability", "entropy")


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

    def walk(self) -> Iterator[TreeLine]:
        """Yield this line and all lines below it, parents first."""
        waiting = [self]
        while waiting:
            line = waiting.pop()
            yield line
            waiting += reversed(line.children)


def tokens_picture(tokens: Sequence[Emitted], *, prompt: str = "", caption: str = "") -> str:
    """Return a text whose tokens are coloured, and the same text coloured in other ways to unfold.

    By source where something was drafted, else by probability; in the other ways as far as the numbers
    are known.
    """
    ways = [way for way in _WAYS if any(_is_known(token, way) for token in tokens)]
    parts = [_caption(caption)] if caption else []
    parts.append(coloured(tokens, ways[0] if ways else "", prompt=prompt))
    for way in ways[1:]:
        parts.append(
            f'<details><summary style="{_DIM}">by {way}</summary>'
            f"{coloured(tokens, way, prompt=prompt)}</details>"
        )
    return f"<div>{''.join(parts)}</div>"


def coloured(tokens: Sequence[Emitted], by: str, *, prompt: str = "") -> str:
    """Return a text whose tokens have the colour of their "source", "probability" or "entropy"."""
    shown = tokens[-MOST_TOKENS:]
    if len(shown) < len(tokens):
        prompt = f"... ({len(tokens) - len(shown)} tokens before)"
    spans = [f'<span style="{_DIM}">{_text(prompt)}</span>'] if prompt else []
    for token in shown:
        colour = _colour(token, by)
        style = f' style="background:{colour};border-radius:2px"' if colour else ""
        title = _title(token)
        told = f' title="{title}"' if title else ""
        spans.append(f"<span{style}{told}>{_text(token.text)}</span>")
    return f'<div style="{_BOX}">{"".join(spans)}</div>{_legend(by)}'


def bars(rows: Iterable[tuple[str, float]], *, caption: str = "") -> str:
    """Return probabilities as bars: (label, probability) from top to bottom."""
    lines = []
    for label, p in rows:
        width = 100 * min(1.0, max(0.0, p))
        lines.append(
            '<tr><td style="text-align:right;padding:0 .6em;white-space:pre;border:0">'
            f"{_text(label)}</td>"
            '<td style="text-align:right;padding:0 .6em;border:0">'
            f"{100 * p:.1f} %</td>"
            '<td style="width:20em;text-align:left;padding:0;border:0">'
            '<div style="background:rgba(64,110,230,.6);border-radius:2px;height:.9em;'
            f'width:{width:.2f}%;min-width:1px"></div></td></tr>'
        )
    return (
        f"<div>{_caption(caption) if caption else ''}"
        '<table style="font-family:monospace;border-collapse:collapse;border:0;background:none">'
        f"{''.join(lines)}</table></div>"
    )


def tree(roots: Sequence[TreeLine], *, caption: str = "") -> str:
    """Return an indented tree; tokens are coloured by their probability, pruned branches unfold.

    A percentage is the probability of the token that a line begins with.
    """
    body = "".join(map(_tree_line, roots)) or f'<div style="{_DIM}">no branches</div>'
    return f"<div>{_caption(caption) if caption else ''}{body}{_legend('probability')}</div>"


def _tree_line(line: TreeLine) -> str:
    """Return a line and what is below it; what alone continues it follows in the same paragraph."""
    p = line.probability
    parts = [f'<span style="{_DIM}">{100 * p:.0f} %</span> '] if not math.isnan(p) else []
    while True:
        parts += [
            f'<span style="background:{_colour(token, "probability") or "none"};border-radius:2px"'
            f' title="{_title(token)}">{_text(token.text)}</span>'
            for token in line.tokens[-MOST_TOKENS:]
        ]
        pruned = [child for child in line.children if child.status == "pruned"]
        going_on = [child for child in line.children if child.status != "pruned"]
        if pruned or line.n_hidden:
            parts.append(_unfolding(pruned, line.n_hidden))
        if len(going_on) != 1 or math.isnan(p) or line.status == "finished":
            break
        (line,) = going_on
    if line.figures:
        parts.append(f' <span style="{_DIM}">{_text(line.figures)}</span>')
    below = "".join(map(_tree_line, going_on))
    if below:
        below = (
            '<div style="margin-left:.5em;padding-left:1em;border-left:1px solid rgba(128,128,128,.6)">'
            f"{below}</div>"
        )
    return f'<div style="{_BOX}">{"".join(parts)}</div>{below}'


def _unfolding(pruned: Sequence[TreeLine], n_hidden: int) -> str:
    """Return the branches that were pruned at a place, to unfold there."""
    listed = "".join(map(_tree_line, pruned))
    more = f"<div>and {n_hidden} more</div>" if n_hidden else ""
    return (
        f'<details style="display:inline-block;vertical-align:top;{_DIM}"><summary style="display:inline;'
        f'cursor:pointer;font-size:85%" title="{len(pruned) + n_hidden} pruned"> '
        f"[+{len(pruned) + n_hidden}]</summary>"
        f'<div style="margin-left:2em">{listed}{more}</div></details>'
    )


def _is_known(token: Emitted, way: str) -> bool:
    if way == "source":
        return token.source in _SOURCES
    return not math.isnan(token.logprob if way == "probability" else token.entropy)


def _colour(token: Emitted, by: str) -> str:
    if by == "source":
        return _SOURCES.get(token.source, ("", ""))[0]
    if by == "probability" and not math.isnan(token.logprob):
        return _fading("230,80,30", 1.0 - math.exp(min(0.0, token.logprob)))
    if by == "entropy" and not math.isnan(token.entropy):
        return _fading("64,110,230", min(1.0, token.entropy / _HIGH_ENTROPY))
    return ""


def _fading(rgb: str, amount: float) -> str:
    return f"rgba({rgb},{0.6 * amount:.2f})" if amount >= 0.01 else ""


def _title(token: Emitted) -> str:
    told = []
    if not math.isnan(token.logprob):
        told.append(f"p = {math.exp(min(0.0, token.logprob)):.3g}")
    if not math.isnan(token.entropy):
        told.append(f"entropy {token.entropy:.2f} nats")
    if token.source in _SOURCES:
        told.append(_SOURCES[token.source][1])
    return _text(", ".join(told))


def _legend(by: str) -> str:
    if by == "source":
        keys = list(_SOURCES.values())
    elif by == "probability":
        keys = [(_fading("230,80,30", 1.0 - p), f"p = {p:g}") for p in (0.9, 0.5, 0.01)]
    elif by == "entropy":
        keys = [(_fading("64,110,230", h / _HIGH_ENTROPY), f"{h:g} nats") for h in (0.5, 2.0, 5.0)]
    else:
        return ""
    marks = "".join(
        f'<span style="background:{colour};border-radius:2px;padding:0 .4em;margin-right:.6em">'
        f"{label}</span>"
        for colour, label in keys
    )
    return f'<div style="font-size:85%;{_BOX}">{marks}</div>'


def _caption(text: str) -> str:
    return f'<div style="{_DIM}">{_text(text)}</div>'


def _text(text: str) -> str:
    """Return text for a page: escaped, with characters that cannot be seen as their code."""
    return html.escape("".join(map(_visible, text)), quote=True)


def _visible(character: str) -> str:
    if character.isprintable() or character in "\n\t\u200c\u200d":
        return character
    return f"\\u{ord(character):04x}"
