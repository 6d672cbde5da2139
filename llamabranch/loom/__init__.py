"""The page: write and inspect texts as a tree, in a browser, with the model of a running server.

document.py    nodes, and the records that make and change them; undo
journal.py     the file: records are only appended, by one process
live.py        events for the tabs; jobs that generate and score
turns.py       conversations, written by the model's chat template
formats.py     mikupad's files, JSON, Markdown
page.py        the page's own files, the exported HTML
loom.py        a document and its model, and the steps that operations share
operations.py  what `POST /loom/do` does
api.py         the routes
"""

from ..serve import require_server

require_server("page", "the page")

from .api import front_of  # noqa: E402
from .loom import Loom  # noqa: E402

__all__ = ["Loom", "front_of"]
