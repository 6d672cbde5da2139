"""Benchmarking: interleaved runs, the time of a decode, the best draft length for a model pair.

timing.py     timings, interleaved runs, medians, spread, ratios and their confidence intervals
machine.py    the machine that was measured on: processor, load, build
workloads.py  what is timed: generations, the time inside llama.cpp; v(n)
pair.py       which draft length is the fastest for a target with its drafter
"""
