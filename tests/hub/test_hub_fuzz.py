"""Any text as ``models.txt`` gives a valid catalogue or a ConfigError."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import llamabranch as lb
from llamabranch import hub

REAL = (Path(__file__).parents[2] / "models.txt").read_text(encoding="utf-8")
FIELDS = (
    "tale-target", "qwen3-4b", "target", "draft", "bundled", "Qwen/Qwen3-4B-GGUF", "model.gguf",
    "../model.gguf", "MIT", "2.50 GB", "7 MB", "1e9 GB", "-1 MB", "", " ", "#", "a b", "a/b", "|",
    "\0", "\u2028", "١ MB", "name\u00a0",
)  # fmt: skip
LINES = st.lists(st.sampled_from(FIELDS) | st.text(max_size=8), min_size=4, max_size=8).map(
    " | ".join
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """The real file with parts removed, repeated or moved, and with other characters."""
    text = REAL
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 40))
        piece = text[at : at + length]
        put = draw(
            st.sampled_from(["", piece * 2, "|", "\n", "\r", "\t", "\ufeff"]) | st.text(max_size=3)
        )
        if draw(st.booleans()):
            text = text[:at] + put + text[at + length :]
        else:
            other = draw(st.integers(0, len(text)))
            text = text[:other] + piece + text[other:]
    return text


def check(text: str) -> bool:
    """Parse ``text``; return False if it was rejected."""
    try:
        entries = hub.parse_catalogue(text, "some file")
    except lb.ConfigError as error:
        assert str(error).startswith("some file, line ")
        assert int(str(error).split("line ")[1].split(":")[0]) >= 1
        return False
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    for before, entry in zip([None, *entries], entries, strict=False):
        assert entry.role in ("target", "mtp", "draft", "head")
        if entry.role in ("draft", "head"):
            assert before is not None
            assert before.role == "target" or (
                entry.role == "head" and before.role in ("mtp", "draft")
            )
        assert entry.size_bytes >= 0
        assert entry.file.endswith(".gguf")
        assert "/" not in entry.file
        assert all((entry.name, entry.licence, entry.repository))
        assert (entry.download_command is None) == entry.bundled
        assert entry.path is None or entry.path.is_file()
    return True


@settings(derandomize=True, max_examples=400, deadline=None, database=None)
@given(text=st.text(max_size=200) | st.lists(LINES, max_size=5).map("\n".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    check(text)


@settings(derandomize=True, max_examples=600, deadline=None, database=None)
@given(text=mutated())
def test_mutated_real_file_is_read_or_refused(text: str) -> None:
    check(text)


def test_real_file_is_read() -> None:
    assert check(REAL)
    assert not check(REAL + "\nname | target\n")
