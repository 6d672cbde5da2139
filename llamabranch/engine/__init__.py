"""Any number of requests, batched over the sequences of one context.

request.py    a request, its events and its result; requests as they are read; the engine's totals
request_json.py  a request from a JSON object, as in a line of a file
job.py        a request, and its texts, which are jobs: their states, segments, what they put out
scheduler.py  which jobs hold a sequence: admission, shared beginnings, parking, preemption
engine.py     requests at any time, or all of a job; the core: schedule, run, take
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
