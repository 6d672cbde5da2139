"""Writes docs/reference/cli.md from the commands; with ``--print`` to standard output.

The options of a command are the lines of its --help. The text around them is in cli_page.txt, with a part
for each command and a part that begins the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, cast

from llamabranch.cli.app import COMMANDS, help_lines, load_command

HERE = Path(__file__).parent
PAGE = HERE.parent / "reference" / "cli.md"


def page() -> str:
    """Return the page."""
    parts = re.split(r"^== (\w+)\n", (HERE / "cli_page.txt").read_text("utf-8"), flags=re.M)
    prose = dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))
    sections = [prose["page"]]
    for name in COMMANDS:
        command: Any = load_command(name)
        first, examples, *more = (command.help or "").split("\n\n")
        options = "\n".join(help_lines(cast(Any, command).params)).rstrip()
        sections += [f"## `llamabranch {name}`", first]
        sections += ["```console\n$ " + examples.replace("\n", "\n$ ") + "\n```"]
        sections += [" ".join(text.split()) for text in more]
        sections += [text for text in [prose.get(name)] if text]
        sections += [f"```text\n{options}\n```"]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), "utf-8")
