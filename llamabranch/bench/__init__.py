"""Benchmarking: how fast a model runs with different settings, and the machine that was measured.

machine.py  the machine of a measurement: processor, load, build
speed.py    how fast a context reads and generates after prompts of several lengths
"""
