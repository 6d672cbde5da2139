"""Any number of prompts over the sequences of one context.

request.py    what is asked for, and what came of it
job.py        a request on its way: waiting, reading its prompt, running
scheduler.py  who runs: admission, shared prefixes, preemption
drafting.py   the drafts of many streams, made together
engine.py     the loop: schedule, draft, decode, settle
jsonl.py      requests and results as files, one line each
"""

from .engine import Engine
from .jsonl import read_requests, read_results, write_result
from .request import EngineStats, Event, Request, Result

__all__ = [
    "Engine",
    "EngineStats",
    "Event",
    "Request",
    "Result",
    "read_requests",
    "read_results",
    "write_result",
]
