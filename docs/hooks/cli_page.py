"""Writes docs/reference/cli.md from the commands; with ``--print`` to standard output.

The options of a command are the lines of its --help. A line that an earlier command has is not repeated;
only the option is named. The text around them is in cli_page.txt, with a part for each command and a part
that begins the page.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from llamabranch.cli.app import COMMANDS, help_lines, load_command

HERE = Path(__file__).parent
PAGE = HERE.parent / "reference" / "cli.md"


def page() -> str:
    """Return the page."""
    parts = re.split(r"^== (\w+)\n", (HERE / "cli_page.txt").read_text("utf-8"), flags=re.M)
    prose = dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))
    sections, known = [prose["page"]], list[list[str]]()
    for name in COMMANDS:
        command: Any = load_command(name)
        first, examples, *more = (command.help or "").split("\n\n")
        lines = help_lines(cast(Any, command).params)
        new = [line for line in lines if line.split() not in known]
        # A heading stays if an option follows it.
        new = [a for a, b in pairwise([*new, ""]) if a.startswith(" ") or b.startswith(" ")]
        rest = [line.split() for line in lines if line.lstrip().startswith("-") and line not in new]
        known += [line.split() for line in new if line.startswith(" ")]
        sections += [f"## `llamabranch {name}`", first]
        sections += ["```console\n$ " + examples.replace("\n", "\n$ ") + "\n```"]
        sections += [" ".join(text.split()) for text in more]
        sections += [text for text in [prose.get(name)] if text]
        sections += ["```text\n" + "\n".join(new) + "\n```"] if new else []
        names = ", ".join(f"`{words[0].rstrip(',')}`" for words in rest)
        sections += [f"Options that are explained above: {names}."] if rest else []
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), "utf-8")
