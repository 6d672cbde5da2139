"""Fork a local model's mind: a branch/fork runtime for llama.cpp."""

from . import startup  # noqa: F401  (first: the other imports take half a second)

# isort: split
from . import search
from .branch import Branch, BranchStore, Produced, Snapshot
from .context import Capabilities, Context, ContextParams, Usage
from .engine import (
    Engine,
    EngineStats,
    Event,
    Request,
    Result,
)
from .errors import (
    BranchStateError,
    CacheFullError,
    CapacityError,
    ClosedError,
    ConfigError,
    ContextLengthWarning,
    DecodeError,
    DecodeInterruptedError,
    GrammarError,
    LlamaBranchError,
    LlamaBranchWarning,
    ModelLoadError,
    PerformanceWarning,
    SequencesExhaustedError,
    SnapshotError,
    TokenizeError,
    UnsupportedError,
    UsageError,
    VocabularyMismatchError,
)
from .hub import CatalogueEntry, catalogue, resolve
from .load import load
from .model import Model, TextDecoder, VocabularyReport
from .native import set_log_level, system_info
from .sampling import Distribution, Sampler, SamplingParams
from .sampling.grammar import Grammar
from .speculative import (
    ChainDrafter,
    Divergence,
    Draft,
    Drafter,
    DraftState,
    Generation,
    InferenceSession,
    ModelDrafter,
    NullDrafter,
    PromptLookupDrafter,
    SpeculativeConfig,
    SpeculativeStats,
    Speculator,
    SuffixDrafter,
    first_divergence,
    theory,
)

__version__ = "0.2.0"

__all__ = [
    "Branch",
    "BranchStateError",
    "BranchStore",
    "CacheFullError",
    "Capabilities",
    "CapacityError",
    "CatalogueEntry",
    "ChainDrafter",
    "ClosedError",
    "ConfigError",
    "Context",
    "ContextLengthWarning",
    "ContextParams",
    "DecodeError",
    "DecodeInterruptedError",
    "Distribution",
    "Divergence",
    "Draft",
    "DraftState",
    "Drafter",
    "Engine",
    "EngineStats",
    "Event",
    "Generation",
    "Grammar",
    "GrammarError",
    "InferenceSession",
    "LlamaBranchError",
    "LlamaBranchWarning",
    "Model",
    "ModelDrafter",
    "ModelLoadError",
    "NullDrafter",
    "PerformanceWarning",
    "Produced",
    "PromptLookupDrafter",
    "Request",
    "Result",
    "Sampler",
    "SamplingParams",
    "SequencesExhaustedError",
    "Snapshot",
    "SnapshotError",
    "SpeculativeConfig",
    "SpeculativeStats",
    "Speculator",
    "SuffixDrafter",
    "TextDecoder",
    "TokenizeError",
    "UnsupportedError",
    "Usage",
    "UsageError",
    "VocabularyMismatchError",
    "VocabularyReport",
    "__version__",
    "catalogue",
    "first_divergence",
    "load",
    "resolve",
    "search",
    "set_log_level",
    "system_info",
    "theory",
]
