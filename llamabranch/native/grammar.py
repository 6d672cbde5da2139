"""GBNF grammars, and the JSON-schema converter of llama-cpp-python."""

from __future__ import annotations

import contextlib
import io

import numpy as np
from llama_cpp import llama_cpp as C
from llama_cpp.llama_grammar import json_schema_to_gbnf as _convert

from ..errors import GrammarError
from .model import ModelHandle
from .sampler import CandidateBuffer, SamplerHandle
from .system import forget_log_lines, last_log_lines


def json_schema_to_gbnf(schema: str) -> str:
    """Return the GBNF grammar for a JSON schema given as JSON text.

    Raises:
        GrammarError: the converter does not take it.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the converter prints its warnings
            return str(_convert(schema))
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise GrammarError(f"this JSON schema has no grammar: {error}") from error


class GrammarHandle(SamplerHandle):
    """A grammar with its state: where in the grammar the text stands.

    The caller has checked the text for what crashes the parser (nesting, repetitions).
    """

    def __init__(self, model: ModelHandle, gbnf: str, root: str = "root") -> None:
        forget_log_lines()
        ptr = C.llama_sampler_init_grammar(model.vocab, gbnf.encode(), root.encode())
        if not ptr:
            reason = "; ".join(last_log_lines()) or "no reason given"
            raise GrammarError(f"the grammar does not parse: {reason}")
        super().__init__(ptr, model)

    def allows(self, token: int, probe: CandidateBuffer) -> bool:
        """Return True if ``token`` may come next; accepting another one would end the process."""
        probe.fill(np.zeros(1, dtype=np.float32), np.array([token], dtype=np.int32))
        self.apply(probe)
        _, logits = probe.read()
        return len(logits) == 1 and bool(logits[0] > -np.inf)
