"""Benchmarking: how fast the settings are that exist for a model, and on which machine.

machine.py  the machine of a measurement: processor, load, build
speed.py    how fast a context reads and generates after prompts of several lengths; medians
"""
