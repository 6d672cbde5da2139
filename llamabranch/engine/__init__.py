"""Any number of requests, batched over the sequences of one context.

request.py    a request, its events and its result; the engine's totals
job.py        one text of a request and its state: waiting, prefilling, generating
scheduler.py  which jobs hold a sequence: admission, prefix sharing, preemption
batch.py      the tokens of one decode, and which job each of them belongs to
engine.py     the loop: schedule, draft, decode, accept
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
