"""Make the pictures of the documents: docs/demo.svg, docs/page.png and docs/draft.png.

    python -m benchmarks.pictures [demo] [page] [draft]

The demo's figures are those of the machine that records it. Its first line names the processor and the
model, which is smollm2-135m if that is on this machine.
"""

from __future__ import annotations

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
PROMPT = "The best thing about the sea is"
MOST_BYTES = 300_000
# Rich's frame without its web font: a picture must not load anything.
FRAME = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
)


def main() -> None:
    """Make the named pictures, or all."""
    names = sys.argv[1:] or ["demo", "page", "draft"]
    if "demo" in names:
        _demo(DOCS / "demo.svg")
    if "page" in names:
        with open_page("smollm2-135m:Q8_0", scale=1.5) as page:
            _fork(page)
    if "draft" in names:
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


def _fork(page: Any) -> None:
    """Continue a prompt and fork at a token."""
    begin(page, PROMPT)
    page.locator(".shoot").nth(1).click()
    ready(page)
    page.locator("#text").press("End")
    for _ in range(6):
        page.locator("#text").press("ArrowLeft")
    page.locator("[data-alternative]:not([aria-current])").first.click()
    _take(page, "page.png")


def _draft(page: Any) -> None:
    """Watch drafts: a small model drafts, the bundled model judges."""
    begin(page, "The old king called his three sons and said")
    page.locator("#lenses label", has_text="Source").click()
    page.locator("#fold").click()
    page.locator(".round").nth(4).wait_for()
    ready(page)
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
