"""How many tokens to draft.

base.py          the interface, and a fixed number
auto.py          as many as raise the throughput
acceptance.py    how often tokens are accepted, by entropy
curve.py         t(n), and how many rows to decode n tokens with
known.py         what is known before a run, and what a run has found out
"""
