"""Benchmarks. ``docs/benchmarks.md`` says what they measure and how to run them.

prompts.py      the prompts
report.py       settings, tables, the JSON line: hardware, versions, models
drafters.py     an adversarial drafter, whose tokens are always wrong
llama_tools.py  llama.cpp's own programs: build, run, parse
llama_python.py the Llama class of llama-cpp-python
padded.py       padded models: the output of a small model at the cost of a larger one
wide.py         a model with a large vocabulary and almost no layers
readme.py       the four results in the README, with arithmetic.txt; record_page.py makes its picture
search_hf.py    beam search of transformers, in an interpreter of its own
step.py         the cost of a step: part by part, by folder, as a context grows
decode.py, speculative.py, peers.py, fork.py, batch.py, sampling.py, search.py, resident.py, chat.py,
layouts.py, edges.py, kv_types.py, length.py, structured.py, serve.py, page.py, run.py
                the other programs

The code that times (interleaved runs, medians, ratios within a run) is ``llamabranch.bench``, which the
command ``llamabranch bench`` uses too.
"""
