"""Benchmarks: one program a claim of the documents. ``docs/benchmarks.md`` says how to run them.

length.py       prompts of 64 to 6,000 tokens: reading, generating after them, forks, separate texts
tasks.py        drafts without a draft model on five tasks, against plain decoding and llama-lookup
structured.py   JSON under a schema, plain and drafted
serve.py        the server against llama-server
agents.py, agent_tasks.py    agents on one document; twenty tasks of two steps
answers.py, answer_tasks.py, paired.py    votes, power sampling and single samples at equal compute
readme.py       the results in the README; record_demo.py and record_page.py make its pictures
page.py         budgets of the page in a browser
rule_error.py   proof by enumeration that an acceptance rule is lossless
run.py          several of these, one after another
prompts.py, report.py, clocks.py    prompts; settings, tables, the JSON line; turns
wide.py         a model with a large vocabulary
llama_tools.py, llama_server.py, llama_python.py    llama.cpp's programs and the Llama class

The code that times (interleaved runs, medians, ratios within a run) is ``llamabranch.bench``, which the
command ``llamabranch bench`` uses too.
"""
