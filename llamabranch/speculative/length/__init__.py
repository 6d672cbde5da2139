"""How many tokens to draft.

base.py  the interface, and a fixed number
auto.py  as many as raise the throughput
"""
