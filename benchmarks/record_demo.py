"""Record ``llamabranch demo`` as docs/demo.svg, the picture in the README.

    python -m benchmarks.record_demo

The figures are those of the machine that records it. The first line of the picture names the processor
and the model, which is smollm2-135m if that is on this machine.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console  # type: ignore[attr-defined]
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 80
PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
# Rich's frame without its web font: a picture must not load anything.
FRAME = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, monospace", "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
)


def main() -> None:
    """Run the demo and write the picture."""
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
    console = recorder(COLUMNS)
    console.print(Text("$ llamabranch demo", style="bold"))
    console.print(Text.from_ansi(shown.rstrip()))
    save(console, "llamabranch demo", PICTURE)


def recorder(columns: int) -> Console:
    """Return a console that keeps what is printed on it, in colours, for ``save``."""
    return Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)


def save(console: Console, title: str, path: Path) -> None:
    """Write what was printed on ``console`` as a picture."""
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=FRAME, unique_id=path.stem)
    path.write_text(svg, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
