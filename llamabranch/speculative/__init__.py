"""Speculative decoding: draft cheaply, verify in one decode, accept what the target would have generated.

speculator.py   prompts and branches, continued with a drafter: a generation, or one token per call
model.py        draft models, and code that heads use too: reading new text, drawing tokens
head.py         EAGLE-3 heads and MTP layers, which read hidden states of the target
copying.py      the drafter that copies the tokens that followed the same tokens earlier
combined.py     drafters made of other drafters or of a function; the default drafter, "auto"

The rules and the draft length are in :mod:`llamabranch.generation`, the loop in :mod:`llamabranch.run`.
"""

from ..branch.generation import Generation
from ..generation.config import SpeculativeConfig
from ..generation.drafter import (
    Draft,
    Drafter,
    DraftLength,
    DraftState,
    NullDrafter,
    SpeculativeStats,
)
from ..generation.text import Text
from ..generation.verify import Acceptance, RandomSource, RoundTrace, block_rule, token_rule
from .combined import ChainDrafter, FunctionDrafter, GrammarDrafter
from .copying import SuffixDrafter
from .head import EagleDrafter, MTPDrafter
from .model import ModelDrafter
from .speculator import InferenceSession, Speculator

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
