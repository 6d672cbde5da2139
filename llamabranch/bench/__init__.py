"""Benchmarking: interleaved runs, and the best draft length for a model pair.

timing.py   timings, interleaved runs, medians, spread, ratios and their confidence intervals
machine.py  the machine of a measurement: processor, load, build
pair.py     finds the fastest draft length for a target with its drafter
"""
