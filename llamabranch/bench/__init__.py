"""Benchmarking: how fast the settings of a model are, and the machine of a measurement.

machine.py  the machine of a measurement: processor, load, build
speed.py    how fast a context reads and generates after prompts of several lengths
"""
