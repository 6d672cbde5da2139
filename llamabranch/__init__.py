"""Fork a local model's mind: a branch/fork runtime for llama.cpp."""

from .branch import Branch
from .capabilities import Capabilities
from .cells import Usage
from .context import Context
from .distribution import Distribution
from .errors import (
    BranchStateError,
    CacheFullError,
    CapacityError,
    ClosedError,
    ConfigError,
    DecodeError,
    GrammarError,
    LlamaBranchError,
    ModelLoadError,
    SequencesExhaustedError,
    SnapshotError,
    TokenizeError,
    UnsupportedError,
    UsageError,
    VocabularyMismatchError,
)
from .grammar import Grammar
from .hub import CatalogueEntry, catalogue, load, resolve
from .line import Produced
from .model import Model, TextDecoder, VocabularyReport
from .native import set_log_level
from .sampling import Sampler, SamplingParams
from .speculative import (
    Draft,
    Drafter,
    DraftLine,
    Emitted,
    Generation,
    ModelDrafter,
    NullDrafter,
    SpeculativeConfig,
    SpeculativeStats,
    Speculator,
)

__version__ = "0.1.0"

__all__ = [
    "Branch",
    "BranchStateError",
    "CacheFullError",
    "Capabilities",
    "CapacityError",
    "CatalogueEntry",
    "ClosedError",
    "ConfigError",
    "Context",
    "DecodeError",
    "Distribution",
    "Draft",
    "DraftLine",
    "Drafter",
    "Emitted",
    "Generation",
    "Grammar",
    "GrammarError",
    "LlamaBranchError",
    "Model",
    "ModelDrafter",
    "ModelLoadError",
    "NullDrafter",
    "Produced",
    "Sampler",
    "SamplingParams",
    "SequencesExhaustedError",
    "SnapshotError",
    "SpeculativeConfig",
    "SpeculativeStats",
    "Speculator",
    "TextDecoder",
    "TokenizeError",
    "UnsupportedError",
    "Usage",
    "UsageError",
    "VocabularyMismatchError",
    "VocabularyReport",
    "__version__",
    "catalogue",
    "load",
    "resolve",
    "set_log_level",
]
