"""Speculative decoding: draft cheaply, verify in one decode, accept what the target would have generated.

drafters/       where drafts come from: models, heads, copying, grammars, chains of drafters
speculator.py   prompts and branches, continued with a drafter
session.py      the same, one token per call
auto.py         the drafter that is used where none is named

The loop, the rules and the draft length are in :mod:`llamabranch.generation`.
"""

from ..generation.config import SpeculativeConfig
from ..generation.drafter import Draft, Drafter, DraftLength, DraftState, NullDrafter
from ..generation.generation import Generation
from ..generation.rules import Acceptance, RandomSource, block_rule, token_rule
from ..generation.stats import SpeculativeStats
from ..generation.text import Text
from ..generation.verify import RoundTrace
from .drafters.chain import ChainDrafter
from .drafters.copying import PromptLookupDrafter, SuffixDrafter
from .drafters.function import FunctionDrafter
from .drafters.grammar import GrammarDrafter
from .drafters.head import EagleDrafter
from .drafters.model import ModelDrafter
from .drafters.mtp import MTPDrafter
from .session import InferenceSession
from .speculator import Speculator

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
    "Text",
    "block_rule",
    "token_rule",
]
