"""Any number of requests, batched over the sequences of one context.

request.py    a request, its events and its result; requests as they are read; the engine's totals
job.py        a request in the engine, and its texts: waiting, reading, running, ended
scheduler.py  which jobs hold a sequence: admission, prefix sharing, preemption
engine.py     requests at any time, or all of a job; the loop: schedule, run, postprocess
async_engine.py  the engine on a thread of its own
completion.py  one call from prompts to texts: `Context.complete` and `chat`
openai.py     OpenAI's shapes, for results and for the server
"""

from .async_engine import AsyncEngine
from .engine import Engine
from .request import EngineStats, Event, Request, Result

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineStats",
    "Event",
    "Request",
    "Result",
]
