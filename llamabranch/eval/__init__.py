"""Evaluation: how probable texts are under a model, measured so that the numbers can be compared.

scoring.py      continuations after contexts
harness.py      a model for lm-evaluation-harness
shipped.py      three tasks for it that come with the package; suite/ has their files
perplexity.py   a text in chunks: llama-perplexity's number
logits_file.py  llama.cpp's files of log-probabilities
divergence.py   a model against saved log-probabilities
pair.py         two models on one text: KL divergence, lockstep, spans of different tokenizers
comparison.py   the report of `llamabranch eval --against MODEL`

lm-evaluation-harness is imported when ``LlamaBranchLM`` is first used.
"""

from typing import TYPE_CHECKING

from .divergence import KLDivergence, KLStatistics, Uncertain, divergence
from .logits_file import LogitsFile
from .perplexity import Perplexity, perplexity
from .scoring import Score, encode_pair, score
from .shipped import suite, suite_items

if TYPE_CHECKING:
    from .harness import LlamaBranchLM

__all__ = [
    "KLDivergence",
    "KLStatistics",
    "LlamaBranchLM",
    "LogitsFile",
    "Perplexity",
    "Score",
    "Uncertain",
    "divergence",
    "encode_pair",
    "perplexity",
    "score",
    "suite",
    "suite_items",
]


def __getattr__(name: str) -> object:
    if name == "LlamaBranchLM":
        from .harness import LlamaBranchLM

        return LlamaBranchLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
