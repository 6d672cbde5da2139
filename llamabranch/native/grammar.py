"""GBNF grammars as llama.cpp samplers."""

from __future__ import annotations

import numpy as np
from llama_cpp import llama_cpp as C

from ..errors import GrammarError
from .model import ModelHandle
from .sampler import CandidateBuffer, SamplerHandle
from .system import forget_log_lines, last_log_lines


class GrammarHandle(SamplerHandle):
    """A grammar with its state: where in the grammar the text stands.

    The caller has checked the text: the parser prints what it refuses to standard error, past the log.
    """

    def __init__(self, model: ModelHandle, gbnf: str, root: str = "root") -> None:
        forget_log_lines()
        ptr = C.llama_sampler_init_grammar(model.vocab, gbnf.encode(), root.encode())
        if not ptr:
            reason = "; ".join(last_log_lines()) or "llama.cpp printed the reason to standard error"
            raise GrammarError(f"llama.cpp does not take the grammar: {reason}")
        super().__init__(ptr, model)

    def allows(self, token: int, probe: CandidateBuffer) -> bool:
        """Return True if ``token`` may come next; accepting another one would end the process."""
        probe.fill(np.zeros(1, dtype=np.float32), np.array([token], dtype=np.int32))
        self.apply(probe)
        _, logits = probe.read()
        return len(logits) == 1 and bool(logits[0] > -np.inf)
