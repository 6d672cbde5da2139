"""Requests, their events and results, and their forms in JSON.

request.py    a request, its events and its result; reading many requests; the engine's totals
from_json.py  a request from a JSON object, as in a line of a file
openai.py     results in OpenAI's format, also for the server
"""
