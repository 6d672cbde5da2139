"""The page: texts as a tree in the browser, made, seen and compared over the server's process.

document.py    nodes, and the records that make and change them; undo
journal.py     the file: records only ever appended, one process that writes
live.py        events for the tabs; jobs: generating, scoring, replaying as they happen
searching.py   searches and what is reported of them
pair.py        two models on one text: KL divergence, lockstep, spans of unequal tokenizers
comparing.py   the same for the page, as it is found
report.py      the report of `llamabranch compare`
formats.py     other looms' files, JSON, Markdown
page.py        the page's own files, its policy, who may call, the exported HTML
loom.py        a document over a server's process, and what operations are made of
operations.py  what the page can be asked to do
api.py         the routes
"""

from ..errors import UnsupportedError

try:
    from .api import front_of
    from .loom import Loom
except ImportError as error:
    raise UnsupportedError(
        f"the page needs a package that is not installed: {error.name}",
        hint="pip install 'llamabranch[page]'",
    ) from error

__all__ = ["Loom", "front_of"]
