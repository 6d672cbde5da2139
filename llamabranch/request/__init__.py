"""Requests, their events and results, and their forms in JSON.

request.py    a request, its events and its result; reading many requests; the engine's totals
fields.py     the fields of requests in JSON: HTTP bodies, lines of a file
openai.py     results in OpenAI's format, also for the server
"""
