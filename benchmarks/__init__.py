"""Measurements: what they mean and how to run them stands in ``docs/benchmarks.md``.

prompts.py      what is continued
timing.py       samples, interleaved runs, medians, spread, ratios
report.py       settings, tables, the JSON line: hardware, versions, models
workloads.py    one timed generation, plain or speculative
drafters.py     drafters that are never right
costs.py        what a decode costs, and how much of it is ours
llama_tools.py  llama.cpp's own programs: build, run, parse
llama_python.py the Llama class of llama-cpp-python
ballast.py      the same function at the cost of a larger model
decode.py, speculative.py, peers.py, fork.py, batch.py, run.py    the programs
"""
