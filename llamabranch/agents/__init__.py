"""Agents: a loop of turns over the engine; functions, forks and other agents as tools.

agent.py     an agent's settings, and the four ways to run it
run.py       one run: its paths, their turns, calls, results and limits
tools.py     a function, an agent or the fork as a tool: its schema, its arguments, its result
turns.py     the prompts and the grammars of an agent's turns
report.py    steps and reports
threads.py   runs functions and event loops in threads of their own
"""

from .agent import Agent
from .report import Report, Step

__all__ = ["Agent", "Report", "Step"]
