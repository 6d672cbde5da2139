"""Make the pictures of the documents: docs/demo.svg, page.png, endings.png and draft.png.

    python -m benchmarks.pictures [demo] [page] [endings] [draft] [--target MODEL]

The demo's figures are those of the machine that records it. Its first line names the processor and the
model, which is smollm2-135m if that is on this machine.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import CONSOLE_SVG_FORMAT, Console  # type: ignore[attr-defined]
from rich.terminal_theme import MONOKAI
from rich.text import Text

from .page import begin, open_page, ready

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = 80
QUESTION = 'How often does the letter r occur in "strawberry"?'
PARAGRAPH = (
    "The lighthouse keeper had not spoken to anyone for eleven days. On the twelfth, a boat came "
    "out of the fog without a sail, without oars, and without a sound. He took his lamp, went down "
    "to the water, and saw"
)
MOST_BYTES = 300_000
# Rich's frame without its web font: a picture must not load anything.
FRAME = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
)


def main() -> None:
    """Make the named pictures, or all."""
    described = argparse.ArgumentParser(description="the pictures of the documents")
    described.add_argument("names", nargs="*", default=["demo", "page", "endings", "draft"])
    described.add_argument("--target", default="qwen2.5-coder-1.5b", help="of page and endings")
    given = described.parse_args()
    if "demo" in given.names:
        _demo(DOCS / "demo.svg")
    if "page" in given.names:
        with open_page(given.target, "--draft", "none", scale=1.5) as page:
            _pick(page)
    if "endings" in given.names:
        with open_page(given.target, "--draft", "none", scale=1.5) as page:
            _endings(page)
    if "draft" in given.names:
        with open_page("tale-target", "--draft-length", "4") as page:
            _draft(page)


def _demo(path: Path) -> None:
    """Run ``llamabranch demo`` and draw what it prints."""
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
    }
    shown = subprocess.run(
        [sys.executable, "-m", "llamabranch.cli", "demo"],
        env=environment, stdout=subprocess.PIPE, check=True, text=True,
    ).stdout  # fmt: skip
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ llamabranch demo", style="bold"))
    console.print(Text.from_ansi(shown.rstrip()))
    title = "llamabranch demo"
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=FRAME, unique_id=path.stem)
    path.write_text(svg, encoding="utf-8")
    print(path)


def _bar(page: Any, **values: str) -> None:
    """Set fields of the bar on the first screen."""
    page.locator("#bar-begin").click()
    for name, value in values.items():
        page.locator(f"dialog [name={name}]").fill(value)
    page.locator("dialog button[value=keep]").click()


def _pick(page: Any) -> None:
    """Ask for a number, and let the model continue another number than its own."""
    page.emulate_media(color_scheme="dark")
    _bar(page, temperature="0", max_tokens="60")
    page.locator("#begin").fill(QUESTION)
    page.locator("#begin").press("Control+Enter")
    page.locator("#empty").wait_for(state="hidden")
    ready(page)
    page.locator("#text [data-token]", has_text=re.compile(r"^ ?3$")).first.click()
    page.locator("[data-alternative] .word", has_text=re.compile(r"^·?2$")).click()
    ready(page)
    page.locator("#text [data-token]", has_text=re.compile(r"^ ?2$")).first.click()
    _take(page, "page.png")


def _endings(page: Any) -> None:
    """Show three endings of one paragraph."""
    page.locator("#mode input[value=text]").check(force=True)  # not a conversation
    _bar(page, seed="3", max_tokens="36")
    begin(page, PARAGRAPH)
    _take(page, "endings.png")


def _draft(page: Any) -> None:
    """Let a small model draft, and show how the bundled model judges it."""
    _bar(page, n="1", max_tokens="48")
    page.locator("#begin").fill("The old king called his three sons and said")
    page.locator("#begin").press("Control+Enter")
    page.locator("#empty").wait_for(state="hidden")
    ready(page)
    page.locator("#lenses input[value=source]").check(force=True)
    page.locator("#fold").click()
    page.locator("#text").press("x")  # shows rejected tokens, too
    _take(page, "draft.png")


def _take(page: Any, name: str) -> None:
    ready(page)
    page.wait_for_timeout(500)
    path = DOCS / name
    page.screenshot(path=path)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise SystemExit(f"{name} has {size:,} bytes; the limit is {MOST_BYTES:,}")
    print(f"{name}: {size:,} bytes")


if __name__ == "__main__":
    main()
