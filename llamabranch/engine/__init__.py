"""Any number of requests, batched over the sequences of one context.

context.py       the context that users have, with `complete` and `chat`
completion.py    one call of `complete` or `chat`: its requests, and its answer
engine.py        the engine, which takes requests one at a time or a whole list of them
stream.py        the events of requests that are read as they are needed
async_engine.py  the engine on a thread of its own

Requests and results are in :mod:`llamabranch.request`; :mod:`llamabranch.run` generates.
"""

from ..lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # lazy: `load` must not import asyncio
