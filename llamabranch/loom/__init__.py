"""The page: texts as a tree in the browser, made, seen and compared over the server's process.

document.py    nodes, and the records that make and change them; undo
journal.py     the file: records only ever appended, one process that writes
live.py        events for the tabs; jobs: generating, scoring, replaying as they happen
searching.py   searches and what is reported of them
turns.py       conversations by the model's template
comparing.py   two models on one text, for the page as it is found
formats.py     other looms' files, JSON, Markdown
page.py        the page's own files, its policy, who may call, the exported HTML
loom.py        a document over a server's process, and what operations are made of
operations.py  what the page can be asked to do
api.py         the routes
"""

from ..serve import require_server

require_server("page", "the page")

from .api import front_of  # noqa: E402
from .loom import Loom  # noqa: E402

__all__ = ["Loom", "front_of"]
