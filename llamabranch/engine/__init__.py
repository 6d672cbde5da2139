"""Any number of requests, batched over the sequences of one context.

request.py    a request, its events and its result; the reader of requests; the engine's totals
request_json.py  a request from a JSON object, as in a line of a file
job.py        a request and its texts (jobs): their states, segments and output
scheduler.py  which jobs hold a sequence: admission, shared beginnings, parking, preemption
core.py       one step of all jobs: schedule them, decode, take the new tokens
completion.py  the plan of one call: from prompts to requests, and from results to the answer
context.py    the context that users have, with `complete` and `chat`
engine.py     the engine, which takes requests one at a time or a whole list of them
async_engine.py  the engine on a thread of its own
openai.py     results in OpenAI's format, also for the server
"""

from ..lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # lazy: `load` must not import asyncio
