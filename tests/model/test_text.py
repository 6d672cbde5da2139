"""Stop strings are found in a stream of text, however it is split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from drafts import FIXED
from hypothesis import given, settings
from hypothesis import strategies as st

import llamabranch as lb
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


def test_text_before_the_stop_string_is_shown() -> None:
    assert _run(["STOP"], ["one ST", "OP two"]) == ("one ", "STOP")


def test_text_without_a_stop_string_is_shown_whole() -> None:
    assert _run(["STOP"], ["one S", "T", "O two ST"]) == ("one STO two ST", None)


def test_nothing_is_held_back_without_stop_strings() -> None:
    watch = StopStrings([])
    assert watch.feed("abc") == "abc"
    assert watch.flush() == ""


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    watch = StopStrings(["\n\n", "END"])
    assert watch.feed("a\n") == "a"
    assert watch.feed("bE") == "\nb"
    assert watch.feed("N") == ""
    assert watch.feed("E") == "EN"
    assert watch.flush() == "E"


def test_stop_string_that_repeats_its_own_start_is_found() -> None:
    assert _run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_nothing_follows_a_stop_string() -> None:
    watch = StopStrings(["x"])
    assert watch.feed("axb") == "a"
    assert watch.feed("more") == ""
    assert watch.flush() == ""


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=6),
)
def test_emitted_text_does_not_depend_on_how_the_stream_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
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


def test_text_is_without_the_stop_string_and_tokens_include_it(
    ctx: lb.Context, draft_ctx: lb.Context
) -> None:
    prompt, params = "Once upon a time", lb.SamplingParams(temperature=0.8, seed=4)
    branch = lb.Branch.start(ctx, prompt, sampling=params)
    free = "".join(token.text for token in branch.generate(40))
    stop = free[len(free) // 2 :][:6]  # over several tokens
    found: dict[str, tuple[str, list[int], str | None]] = {}

    def note(name: str, text: str, tokens: Sequence[int], reason: str | None) -> None:
        found[name] = text, list(tokens), reason

    branch = lb.Branch.start(ctx, prompt, sampling=params)
    produced = list(branch.generate(40, [stop]))
    text = "".join(token.text for token in produced)
    note("branch", text, [token.token for token in produced], branch.finish_reason)
    assert branch.generated == found["branch"][1]
    assert branch.text.startswith(prompt + text + stop)
    for name, drafter in (("plain", None), ("drafted", lb.ModelDrafter(draft_ctx))):
        root = lb.Branch.start(ctx, prompt, sampling=params)
        made = (
            lb.Speculator(ctx, drafter, FIXED).generate(root, max_tokens=40, stop=[stop]).finish()
        )
        note(f"{name} speculator", made.text, made.tokens, made.finish_reason)
        assert root.generated == made.tokens
        assert root.text.startswith(prompt + made.text + stop)
        with lb.InferenceSession(
            ctx, prompt, sampling=params, max_tokens=40, stop=[stop]
        ) as session:
            while session.next_token(drafter) is not None:
                pass
            note(f"{name} session", session.text, session.tokens, session.finish_reason)
        request = lb.Request(prompt, max_tokens=40, sampling=params, stop=[stop])
        (result,) = lb.Engine(ctx, drafter, FIXED).generate([request])
        note(f"{name} engine", result.text, result.tokens, result.finish_reason)
        root.prune()
    assert set(map(repr, found.values())) == {repr(found["branch"])}, found
    assert text == free[: free.index(stop)]
    assert found["branch"][2] == "stop"
    assert ctx.detokenize(found["branch"][1]).startswith(text + stop)
