"""Benchmarking: interleaved runs, and the fastest settings for a model.

timing.py   timings, interleaved runs, medians, spread, ratios and their confidence intervals
machine.py  the machine of a measurement: processor, load, build
speed.py    how fast a context reads and generates after prompts of several lengths
"""
