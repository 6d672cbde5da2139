"""Any number of prompts over the sequences of one context.

request.py    what is asked for, and what came of it
job.py        a request on its way: waiting, reading its prompt, running
scheduler.py  who runs: admission, shared prefixes, preemption
engine.py     the loop: schedule, draft, decode, settle
"""

from .engine import Engine
from .request import EngineStats, Event, Request, Result

__all__ = [
    "Engine",
    "EngineStats",
    "Event",
    "Request",
    "Result",
]
