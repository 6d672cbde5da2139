"""Speculative decoding: draft cheaply, verify in one decode, accept what the target would have generated.

config.py       the settings
rules.py        which drafted tokens are accepted: pure functions over distributions and random numbers
drafters/       where drafts come from: the interface, models, copying, chains of drafters
length/         how many tokens to draft: the interface, a fixed number, or what raises the throughput
profile.py      what "auto" keeps between runs about a target and its drafters
round.py        what one stream of tokens knows about its rounds: draft, pending token, acceptance
joint.py        one step of any number of streams: draft, decode once for all, accept
draft_cache.py  the draft states that are kept between generations, and their forks and rewinds
speculator.py   a whole generation, round by round
session.py      the same, one token per call
stats.py        counts and times, under vLLM's names
"""

from .config import SpeculativeConfig
from .drafters.base import Draft, Drafter, DraftState, NullDrafter
from .drafters.chain import ChainDrafter
from .drafters.copying import PromptLookupDrafter, SuffixDrafter
from .drafters.eagle import EagleDrafter
from .drafters.function import FunctionDrafter
from .drafters.grammar import GrammarDrafter
from .drafters.model import ModelDrafter
from .drafters.mtp import MTPDrafter
from .length.base import DraftLength
from .round import RoundTrace
from .rules import Acceptance, RandomSource, block_rule, token_rule
from .session import InferenceSession
from .speculator import Generation, Speculator
from .stats import SpeculativeStats

__all__ = [
    "Acceptance",
    "ChainDrafter",
    "Draft",
    "DraftLength",
    "DraftState",
    "Drafter",
    "EagleDrafter",
    "FunctionDrafter",
    "Generation",
    "GrammarDrafter",
    "InferenceSession",
    "MTPDrafter",
    "ModelDrafter",
    "NullDrafter",
    "PromptLookupDrafter",
    "RandomSource",
    "RoundTrace",
    "SpeculativeConfig",
    "SpeculativeStats",
    "Speculator",
    "SuffixDrafter",
    "block_rule",
    "token_rule",
]
