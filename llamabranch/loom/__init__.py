"""The page: texts as a tree in the browser, made, seen and compared over the server's process.

document.py  nodes, and the records that make and change them; undo
journal.py   the file: records only ever appended, one process that writes
live.py      events for the tabs; generating, scoring, rounds and searches as they happen
pair.py      two models on one text: KL divergence, lockstep, spans of unequal tokenizers, the report
formats.py   other looms' files, JSON, Markdown
page.py      the page's own files, its policy, the exported HTML
api.py       the routes, who may call them, and the operations
"""

from .api import Loom

__all__ = ["Loom"]
