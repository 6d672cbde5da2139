"""Writes docs/cli.md from the commands; with ``--print`` to standard output.

The tables are made from the options themselves. The text around them is in cli_page.txt, with a part for
each command and a part that begins the page.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from llamabranch.cli.app import COMMANDS, MOVED, load_command

HERE = Path(__file__).parent
PAGE = HERE.parent / "cli.md"
Option = tuple[str, str]  # the names of an option, and its help


def options_of(command: Any) -> dict[str, list[Option]]:
    """Return the rows of a command's options by their headings in --help."""
    rows: dict[str, list[Option]] = {}
    for param in command.params:
        if param.name == "help" or param.hidden or param.param_type_name == "argument":
            continue
        short = [name for name in param.opts if not name.startswith("--")]
        names = ", ".join(f"`{name}`" for name in (param.opts[0], *short[:1]))
        text = re.sub(r"\s+", " ", param.help or "").replace("|", "\\|")
        if not isinstance(param.default, (bool, tuple, list)) and param.default is not None:
            text += f" Default: `{param.default}`."
        rows.setdefault(param.rich_help_panel, []).append((names, text))
    return rows


def table(rows: list[Option]) -> str:
    """Return options as a table."""
    lines = (f"|{names}|{text}|" for names, text in rows)
    return "\n".join(("|option||", "|---|---|", *lines))


def page() -> str:
    """Return the page."""
    parts = re.split(r"^== (\w+)\n", (HERE / "cli_page.txt").read_text("utf-8"), flags=re.M)
    prose = dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))
    commands = {name: options_of(load_command(name)) for name in COMMANDS}
    counts: Counter[tuple[str, Option]] = Counter()
    for by_panel in commands.values():
        counts.update((panel, row) for panel, rows in by_panel.items() for row in rows)
    shared: dict[str, list[Option]] = {}
    for (panel, row), n in counts.items():
        if n > 1:
            shared.setdefault(panel, []).append(row)
    sections = [prose["page"]]
    for name, line in COMMANDS.items():
        own, also = [], []
        for panel, rows in commands[name].items():
            common = [row for row in rows if row in shared.get(panel, [])]
            own += [row for row in rows if row not in common]
            if common == shared.get(panel):
                also.append(f"[{panel.lower()}](#{panel.lower()})")
            else:
                also += [row[0].split(", ")[-1] for row in common]
        sections += [f"## `llamabranch {name}`", line, *filter(None, [prose.get(name)])]
        sections += [table(own)] if own else []
        sections += [f"Also: {', '.join(also)}."] if also else []
    sections += ["## Options of several commands", prose["shared"]]
    for panel, rows in shared.items():
        sections += [f"### {panel}", table(rows)]
    moved = ", ".join(f"`{name}`: `{meant}`" for name, meant in MOVED.items())
    sections += [f"Other names, and the commands that they mean: {moved}."]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), "utf-8")
