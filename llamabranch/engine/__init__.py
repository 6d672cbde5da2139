"""Any number of requests, batched over the sequences of one context.

request.py    a request, its events and its result; requests as they are read; the engine's totals
request_json.py  a request from a JSON object, as in a line of a file
job.py        a request, and its texts, which are jobs: their states, segments, what they put out
scheduler.py  which jobs hold a sequence: admission, shared beginnings, parking, preemption
core.py       a step of all jobs: schedule, run, take
completion.py  the plan of one call: from prompts to requests, and from results to the answer
context.py    the context that users have, with `complete` and `chat`
engine.py     requests at any time, or all of a job
async_engine.py  the engine on a thread of its own
openai.py     OpenAI's shapes, for results and for the server
"""

from ..lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)  # `load` needs no event loop
