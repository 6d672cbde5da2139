"""Speculative decoding: draft cheaply, verify in one decode, keep what the target would have said.

config.py     what may be set
drafters.py   who proposes tokens, behind one small protocol
length.py     how many to propose: fixed, or as many as pay
rules.py      which proposals stand: pure functions over distributions
round.py      one round: draft, verify, settle, for any branch
session.py    a whole generation out of rounds
stats.py      what happened, under vLLM's names
"""

from .config import SpeculativeConfig
from .drafters import Draft, Drafter, DraftLine, ModelDrafter, NullDrafter
from .session import Emitted, Generation, Speculator
from .stats import SpeculativeStats

__all__ = [
    "Draft",
    "DraftLine",
    "Drafter",
    "Emitted",
    "Generation",
    "ModelDrafter",
    "NullDrafter",
    "SpeculativeConfig",
    "SpeculativeStats",
    "Speculator",
]
