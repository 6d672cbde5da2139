"""Evaluation: how probable a model finds given texts, measured so that the numbers can be compared.

trie.py         token sequences as a tree: what they have in common is decoded once
scoring.py      continuations after contexts
chunks.py       a text in chunks, and their logits one by one
perplexity.py   llama-perplexity's number, and the strided one
logits_file.py  llama.cpp's files of log-probabilities
divergence.py   a model against saved log-probabilities
"""

from .divergence import KLDivergence, Uncertain, divergence, save_logits
from .logits_file import LogitsFile
from .perplexity import Perplexity, perplexity, strided_perplexity
from .scoring import Score, encode_pair, score

__all__ = [
    "KLDivergence",
    "LogitsFile",
    "Perplexity",
    "Score",
    "Uncertain",
    "divergence",
    "encode_pair",
    "perplexity",
    "save_logits",
    "score",
    "strided_perplexity",
]
