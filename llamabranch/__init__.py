"""Fork a local model's mind: a branch/fork runtime for llama.cpp.

The public names are listed in ``__init__.pyi`` and imported when they are first used: NumPy and llama.cpp
take half a second. Modules such as ``llamabranch.errors`` are attributes too.
"""

from __future__ import annotations

from . import startup  # noqa: F401  (first: Ctrl-C while the rest is imported)
from .lazy import attach

__version__ = "0.4.0"

# Names that earlier versions had here, by where they are now, as the AttributeError says.
_FORMER = {
    "context": "Capabilities Usage",
    "cli.jsonl": "read_requests",
    "engine": "EngineStats",
    "errors": "BranchStateError CacheFullError ClosedError ContextLengthWarning DecodeError "
    "DownloadError ExactnessWarning GrammarError JobError LlamaBranchWarning ModelLoadError ParseError "
    "PerformanceWarning QueueFullError SequencesExhaustedError SnapshotError TokenizeError "
    "UnsupportedError UsageError VocabularyMismatchError",
    "hub": "CatalogueEntry catalogue resolve",
    "model.text": "TextDecoder",
    "model": "VocabularyReport",
    "sampling": "Sampler",
    "speculative": "Draft NullDrafter PromptLookupDrafter",
}
_MOVED = {name: f"{place}.{name}" for place, names in _FORMER.items() for name in names.split()}
_MOVED |= {"DraftLine": "speculative.DraftState", "Emitted": "Produced"}

__getattr__, __dir__, __all__ = attach(__name__, __file__, _MOVED)
