"""Requests, their events and results, and their forms in JSON.

request.py     a request: everything that can be asked, and what it means for a model
result.py      its events and its result; an engine's totals
record.py      its cost, and why tokens were read
difference.py  where two prompts part
turns.py       the thought, the content and the calls of an answer while it is generated
fields.py      the fields of requests in JSON: HTTP bodies, lines of a file
openai.py      results in OpenAI's format, also for the server
"""
