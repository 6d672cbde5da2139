"""Which part of a text that is longer than the context a request gets: a window that rolls in steps."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ..model import Model

_NOTE_AT, _NOTE_STEP = 100, 64  # a note stands about so many tokens before the end of the text
_SENTENCE_ENDS = (b".", b"!", b"?", b'"', b"\xe2\x80\x9d")


class Window(Struct, rename={"start": "from"}):
    """The context of a text: a part of it, text that stays at the top, a note near the end.

    Attributes:
        start: the text's tokens from here on; "from" in JSON.
        memory, note: how many tokens stay at the top, and how many the note has.
        head: so many tokens of the text's beginning are in the context too, before the memory.
        note_at: the note stands before this token of the text.
    """

    start: int
    memory: int = 0
    note: int = 0
    head: int = 0
    note_at: int = 0


def prompt_of(
    window: Window | None, ids: list[int], memory: Sequence[int] = (), note: Sequence[int] = ()
) -> list[int]:
    """Return the tokens that the model gets to continue a text."""
    if window is None:
        return ids
    cut = max(window.start, window.note_at)
    return [*ids[: window.head], *memory, *ids[window.start : cut], *note, *ids[cut:]]


def window_of(
    model: Model,
    ids: Sequence[int],
    room: int,
    *,
    memory: int = 0,
    note: int = 0,
    head: int = 0,
    fixed: int | None = None,
    places: Sequence[int] = (),
) -> Window | None:
    """Return the context in which a text is continued.

    The part of the text begins at a multiple of a quarter of the room, so that many continuations share
    it and it is read once. It begins at the next line or sentence if there is one near.

    Args:
        model, ids: the text.
        room: how many tokens the prompt may have.
        memory, note, head: see `Window`.
        fixed: the note stands before this token.
        places: the part begins at one of these tokens, such as the messages of a chat.

    Returns:
        None = the whole text, and nothing else. A window may still have more tokens than ``room``.
    """
    fixed, start, left = len(ids) if fixed is None else fixed, head, room - memory - note - head
    if len(ids) - head > left:
        step = max(1, left // 4)
        place = -(-(len(ids) - left) // step) * step
        if places:
            start = next((at for at in places if at >= place), places[-1])
        else:
            start = _near(model, ids, place, step // 8)
    elif not memory and not note:
        return None
    last = max(start, (fixed - _NOTE_AT) // _NOTE_STEP * _NOTE_STEP)
    note_at = _near(model, ids[:fixed], last, _NOTE_STEP) if last > start else start
    return Window(start, memory, note, head, note_at if note else 0)


def scoring_window(
    model: Model, ids: Sequence[int], first: int, room: int, head: int
) -> tuple[Window, int]:
    """Return the context in which a token is scored, and the first token that has no room in it.

    At least half a context is before the token, or all of the text.
    """
    head = head if 2 * head < room else 0
    step = (room - head) // 2
    n = max(0, (first - head) // step - 1)
    if not n:
        return Window(0), room
    start = head + n * step
    return Window(_near(model, ids, start, step // 8), head=head), start + 2 * step


def _near(model: Model, ids: Sequence[int], place: int, most: int) -> int:
    """Return where a line, else a sentence, begins from ``place`` on, within ``most`` tokens."""
    before = [*map(model.piece, ids[place - 1 : place + most])]
    for ends in (b"\n",), _SENTENCE_ENDS:
        for i, word in enumerate(before):
            if word.rstrip(b" ").endswith(ends):
                return place + i
    whole = (i for i, word in enumerate(before[1:]) if not b"\x80" <= word[:1] < b"\xc0")
    return place + next(whole, 0)
