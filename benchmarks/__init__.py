"""Measurements: what they mean and how to run them stands in ``docs/benchmarks.md``.

prompts.py      what is continued
report.py       settings, tables, the JSON line: hardware, versions, models
drafters.py     drafters that are never right
costs.py        a plain step taken apart
llama_tools.py  llama.cpp's own programs: build, run, parse
llama_python.py the Llama class of llama-cpp-python
ballast.py      the same function at the cost of a larger model
wide.py         a model with a large vocabulary and next to nothing else
decode.py, speculative.py, peers.py, fork.py, batch.py, growth.py, hotpath.py, sampling.py, run.py
                the programs

How it is timed (turn by turn, medians, ratios within a run) is ``llamabranch.measurement``, which
``llamabranch bench`` uses too.
"""
