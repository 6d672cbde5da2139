"""Speculative decoding: draft cheaply, verify in one decode, keep what the target would have said.

config.py      what may be set
rules.py       which proposals stand: pure functions over distributions and chance
drafters.py    who proposes tokens: the protocol
models.py      models that do: token by token, or as a tree
translation.py models of another vocabulary, through the text
ngrams.py      indexes of what was said before
lookup.py      drafters that copy from them, and chains of drafters
length/        how many to propose: the protocol, a fixed number, or as many as raise the throughput
round.py       one round: plan, verify, settle, for any branch
lines.py       the drafter's side of forks, rewinds and prunes
transcript.py  what has been said, and whether that was all
speculator.py  a whole generation out of rounds
session.py     the same, asked for token by token
stats.py       what happened, under vLLM's names
divergence.py  where two texts part that should be the same
theory.py      what it can gain, from acceptance and costs
"""

from .config import SpeculativeConfig
from .divergence import Divergence, first_divergence
from .drafters.base import Draft, Drafter, DraftState, NullDrafter
from .drafters.chain import ChainDrafter
from .drafters.copying import PromptLookupDrafter, SuffixDrafter
from .drafters.model import ModelDrafter
from .session import InferenceSession
from .speculator import Generation, Speculator
from .stats import SpeculativeStats

__all__ = [
    "ChainDrafter",
    "Divergence",
    "Draft",
    "DraftState",
    "Drafter",
    "Generation",
    "InferenceSession",
    "ModelDrafter",
    "NullDrafter",
    "PromptLookupDrafter",
    "SpeculativeConfig",
    "SpeculativeStats",
    "Speculator",
    "SuffixDrafter",
    "first_divergence",
]
