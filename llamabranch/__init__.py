"""A branch/fork runtime for llama.cpp: fork, score, rewind and continue texts of a GGUF model.

The public names are listed in ``__init__.pyi`` and imported when they are first used: NumPy and llama.cpp
take half a second. Modules such as ``llamabranch.errors`` are attributes too.
"""

from __future__ import annotations

from . import startup  # noqa: F401  (first: Ctrl-C while the rest is imported)
from .lazy import attach

__version__ = "0.5.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
