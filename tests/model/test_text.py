"""Stop strings are found in a stream of text, however it is split."""

from __future__ import annotations

import random

import pytest

from llamabranch.errors import ConfigError
from llamabranch.model import StopStrings


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watch = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += watch.feed(piece)
        if watch.found is not None:
            return shown, watch.found
    return shown + watch.flush(), None


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    watch = StopStrings(["\n\n", "END"])
    assert watch.feed("a\n") == "a"
    assert watch.feed("bE") == "\nb"
    assert watch.feed("N") == ""
    assert watch.feed("E") == "EN"
    assert watch.flush() == "E"


@pytest.mark.parametrize("seed", range(300))
def test_emitted_text_does_not_depend_on_how_the_stream_is_split(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("abc", k=rng.randrange(13)))
    stops = ["".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randrange(4))]
    cuts = [rng.randrange(13) for _ in range(rng.randrange(7))]
    ends = [*sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    # The first string to be complete ends the text; of two that end together, the longer one.
    ended = [(end, -len(s), s) for s in stops for end in range(len(text) + 1)
             if text[:end].endswith(s)]  # fmt: skip
    expected: tuple[str, str | None] = (text, None)
    if ended:
        end, minus_length, stop = min(ended)
        expected = (text[: end + minus_length], stop)
    assert _run(stops, pieces) == expected


@pytest.mark.parametrize("bad", ["", 5, b"STOP", [""], ["a", ""], [b"a"], [1]])
def test_bad_stop_strings_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError):
        StopStrings(bad)  # type: ignore[arg-type]
