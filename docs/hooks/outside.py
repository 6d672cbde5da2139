"""Pages of the site whose sources are outside ``docs/``, and links to files that are not pages.

The documents link to each other by their paths in the repository, so that links also work for a reader
of the sources. In the site the files listed here become pages; a link to any other file that exists
becomes plain text; a link to nothing is left as it is, so that the strict build fails on it.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

# Maps a file of the repository to the page that it becomes.
PAGES = {
    "MODEL_CARD.md": "model-card.md",
    "training/README.md": "training.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples": "examples.md",
}
SOURCES = {page: source for source, page in PAGES.items()}

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs/`` to the files of the site."""
    for source, page in PAGES.items():
        path = ROOT / source
        if path.is_dir():
            files.append(File.generated(config, page, content=_examples(path)))
        elif path.exists():
            files.append(File.generated(config, page, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at their pages."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def replace(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        uri = PAGES.get(target) or target.removeprefix("docs/")
        if target in PAGES or target.startswith("docs/"):
            return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here))}{anchor})"
        return text if (ROOT / target).exists() else match[0]

    return LINK.sub(replace, markdown)


def _examples(folder: Path) -> str:
    """Return a page with every program of a folder: its docstring, and the whole of its code."""
    parts = ["# Examples", "Short, complete programs. The tests run each of them."]
    for path in sorted(folder.glob("*.py")):
        code = path.read_text(encoding="utf-8")
        summary = ast.get_docstring(ast.parse(code)) or ""
        parts += [f"## {path.name}", summary, f"```python\n{code.rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"
