"""Which part of a long text is in the context while it is continued or scored."""

from __future__ import annotations

from collections.abc import Sequence

from .document import Document, Node, Window

_NOTE_AT, _NOTE_STEP = 100, 64  # the author's note stands about so many tokens before the end
_SENTENCE_ENDS = (b".", b"!", b"?", b'"', b"\xe2\x80\x9d")


def prompt_of(
    window: Window | None,
    node: Node,
    end: int,
    memory: Sequence[int] = (),
    note: Sequence[int] = (),
) -> list[int]:
    """Return the tokens that the model gets to continue the first ``end`` tokens of a text."""
    if window is None:
        return node.tokens(end)
    cut = max(window.start, window.note_at)
    before = [*node.tokens(window.head), *memory, *node.tokens(cut, window.start)]
    return [*before, *note, *node.tokens(end, cut)]


def window_of(
    document: Document,
    node: Node,
    end: int,
    room: int,
    *,
    memory: int = 0,
    note: int = 0,
    fixed: int | None = None,
    bos: int | None = None,
) -> Window | None:
    """Return what is in the context while the first ``end`` tokens of a text are continued.

    The beginning moves in steps of a quarter of the room, so that what follows it is read once for
    many continuations. It moves on to the next line or sentence if one begins near. A chat keeps its
    system message, and its oldest exchanges leave first.

    Args:
        document, node, end: the text.
        room: the most tokens of the prompt.
        memory, note: how many tokens the memory and the author's note have.
        fixed: the tokens from here on are not separated: a grammar runs over them.
        bos: the model's BOS token.

    Returns:
        None = the whole text, and nothing else. A window may still have more tokens than ``room``.
    """
    fixed = end if fixed is None else fixed
    head = head_of(document, node, bos)
    start, left = head, room - memory - note - head
    if end - head > left:
        step = max(1, left // 4)
        place = -(-(end - left) // step) * step
        asked = [turn.at for turn in document.turns(node, end) if turn.role == "user"]
        if asked:
            start = next((at for at in asked if at >= place), asked[-1])
        else:
            start = near(document, node, place, min(step // 8, max(0, fixed - place)))
    elif not memory and not note:
        return None
    last = max(start, (fixed - _NOTE_AT) // _NOTE_STEP * _NOTE_STEP)
    note_at = near(document, node, last, min(_NOTE_STEP, fixed - last)) if last > start else start
    return Window(start, memory, note, head, note_at if note else 0)


def scoring_window(
    document: Document, node: Node, first: int, n_ctx: int, bos: int | None
) -> tuple[Window | None, int]:
    """Return what is in the context to score a token of a text, and where that context ends.

    At least half a context is before the token, or all of the text.
    """
    head = head_of(document, node, bos)
    head = head if 2 * head < n_ctx else 0
    step = (n_ctx - head) // 2
    n = max(0, (first - head) // step - 1)
    start = head + n * step
    if not n:
        return None, n_ctx
    return Window(near(document, node, start, step // 8), head=head), start + 2 * step


def head_of(document: Document, node: Node, bos: int | None) -> int:
    """Return how many tokens at a text's beginning stay: BOS, or what is before a chat's messages."""
    turns = document.turns(node)
    if turns and turns[0].role == "system" and len(turns) > 1:
        return turns[1].at
    later = next((turn for turn in turns[1:] if turn.role == "user"), None)
    if turns and later is not None:  # a template may write a system message of its own
        opening = node.tokens(later.begin, later.at)
        first = turns[0].begin
        if node.tokens(first, max(0, first - len(opening))) == opening:
            return first - len(opening)
    return int(node.tokens(1) == [bos])


def near(document: Document, node: Node, place: int, most: int) -> int:
    """Return where a line, else a sentence, begins from ``place`` on, within ``most`` tokens."""
    before = [document.bytes_of([t]) for t in node.tokens(place + most, max(0, place - 1))]
    for ends in (b"\n",), _SENTENCE_ENDS:
        for i, word in enumerate(before):
            if word.rstrip(b" ").endswith(ends):
                return place + i
    whole = (i for i, word in enumerate(before[1:]) if not b"\x80" <= word[:1] < b"\xc0")
    return place + next(whole, 0)
