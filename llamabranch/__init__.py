"""Fork a local model's mind: a branch/fork runtime for llama.cpp."""

from . import startup  # noqa: F401  (first: the other imports take half a second)
from .branch import Branch
from .capabilities import Capabilities
from .cells import Usage
from .context import Context
from .distribution import Distribution
from .engine import (
    Engine,
    EngineStats,
    Event,
    Request,
    Result,
    read_requests,
    read_results,
    write_result,
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
from .grammar import Grammar
from .hub import CatalogueEntry, catalogue, load, resolve
from .line import Produced
from .model import Model, TextDecoder
from .native import set_log_level, system_info
from .sampler import Sampler
from .sampling import SamplingParams
from .snapshot import Snapshot
from .speculative import (
    ChainDrafter,
    Divergence,
    Draft,
    Drafter,
    DraftLine,
    Emitted,
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
from .store import BranchStore
from .vocabulary import VocabularyReport

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
    "DecodeError",
    "DecodeInterruptedError",
    "Distribution",
    "Divergence",
    "Draft",
    "DraftLine",
    "Drafter",
    "Emitted",
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
    "read_requests",
    "read_results",
    "resolve",
    "set_log_level",
    "system_info",
    "theory",
    "write_result",
]
