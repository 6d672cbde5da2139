"""Fork a local model's mind: a branch/fork runtime for llama.cpp.

The rooms are imported when one of their names is first used: NumPy and llama.cpp take half a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from . import startup  # noqa: F401  (first: Ctrl-C while the rest is imported)

if TYPE_CHECKING:
    from . import scale, search
    from .branch import Branch, BranchStore, Produced, Snapshot
    from .context import Capabilities, Context, ContextParams, TokenScore, Usage
    from .engine import (
        AsyncEngine,
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
        DownloadError,
        GrammarError,
        JobError,
        LlamaBranchError,
        LlamaBranchWarning,
        ModelLoadError,
        PerformanceWarning,
        QueueFullError,
        SequencesExhaustedError,
        SnapshotError,
        TokenizeError,
        UnsupportedError,
        UsageError,
        VocabularyMismatchError,
    )
    from .hub import CatalogueEntry, catalogue, fetch, resolve
    from .loading import load
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
    "AsyncEngine",
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
    "DownloadError",
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
    "JobError",
    "LlamaBranchError",
    "LlamaBranchWarning",
    "Model",
    "ModelDrafter",
    "ModelLoadError",
    "NullDrafter",
    "PerformanceWarning",
    "Produced",
    "PromptLookupDrafter",
    "QueueFullError",
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
    "TokenScore",
    "TokenizeError",
    "UnsupportedError",
    "Usage",
    "UsageError",
    "VocabularyMismatchError",
    "VocabularyReport",
    "__version__",
    "catalogue",
    "fetch",
    "first_divergence",
    "load",
    "resolve",
    "scale",
    "search",
    "set_log_level",
    "system_info",
    "theory",
]

_ROOMS = {
    "branch": (
        "Branch",
        "BranchStore",
        "Produced",
        "Snapshot",
    ),
    "context": (
        "Capabilities",
        "Context",
        "ContextParams",
        "TokenScore",
        "Usage",
    ),
    "engine": (
        "AsyncEngine",
        "Engine",
        "EngineStats",
        "Event",
        "Request",
        "Result",
    ),
    "errors": (
        "BranchStateError",
        "CacheFullError",
        "CapacityError",
        "ClosedError",
        "ConfigError",
        "ContextLengthWarning",
        "DecodeError",
        "DecodeInterruptedError",
        "DownloadError",
        "GrammarError",
        "JobError",
        "LlamaBranchError",
        "LlamaBranchWarning",
        "ModelLoadError",
        "PerformanceWarning",
        "QueueFullError",
        "SequencesExhaustedError",
        "SnapshotError",
        "TokenizeError",
        "UnsupportedError",
        "UsageError",
        "VocabularyMismatchError",
    ),
    "hub": (
        "CatalogueEntry",
        "catalogue",
        "fetch",
        "resolve",
    ),
    "loading": ("load",),
    "model": (
        "Model",
        "TextDecoder",
        "VocabularyReport",
    ),
    "native": (
        "set_log_level",
        "system_info",
    ),
    "sampling": (
        "Distribution",
        "Sampler",
        "SamplingParams",
    ),
    "sampling.grammar": ("Grammar",),
    "scale": (),
    "search": (),
    "speculative": (
        "ChainDrafter",
        "Divergence",
        "Draft",
        "Drafter",
        "DraftState",
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
        "theory",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name, or a room, when it is first used (PEP 562)."""
    if name in _ROOM_OF:
        value: object = getattr(import_module(f".{_ROOM_OF[name]}", __name__), name)
    elif name.partition(".")[0] in _ROOMS:
        value = import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
