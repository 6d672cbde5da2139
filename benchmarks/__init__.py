"""Benchmarks: one program a claim of the documents. ``docs/benchmarks.md`` says how to run them.

length.py        prompts of 64 to 6,000 tokens: reading, generating after them, forks, separate texts
drafts.py        drafts without a draft model, in texts and JSON
agents.py        a day of an agent, replayed to the server and to llama-server
agent_tasks.py   twenty tasks of two steps for agents
serve.py         1 to 16 clients of the server and of llama-server
answers.py, answer_tasks.py    votes, power sampling and single samples at equal compute
page.py          what a page that watches costs
pictures.py      the pictures of the documents
rule_error.py    proof by enumeration that an acceptance rule is lossless
report.py        the harness: settings, tables, the JSON line
timing.py        runs in turns, and their statistics: medians, ratios within a run
prompts.py       prompts and a schema
servers.py       servers in processes of their own
"""
