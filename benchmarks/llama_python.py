"""The ``Llama`` class of llama-cpp-python, timed."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Protocol, cast
from unittest import mock

import numpy as np

from llamabranch.bench.timing import Timing

from .llama_tools import has_amx

__all__ = ["LlamaPython", "llama_cpp_version"]


def llama_cpp_version() -> str:
    """Return the version that llama.cpp reports."""
    import llama_cpp

    return str(llama_cpp.llama_cpp.llama_version().decode())


class _LlamaContext(Protocol):
    def get_logits(self) -> ctypes.Array[ctypes.c_float]: ...


class _Llama(Protocol):
    n_tokens: int
    _ctx: _LlamaContext

    def n_vocab(self) -> int: ...

    def tokenize(self, text: bytes, add_bos: bool = ..., special: bool = ...) -> list[int]: ...

    def generate(self, tokens: Sequence[int], *, temp: float) -> Iterator[int]: ...

    def create_completion(
        self, prompt: list[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
    ) -> Mapping[str, Mapping[str, int]]: ...

    def eval(self, tokens: Sequence[int]) -> None: ...

    def reset(self) -> None: ...

    def set_seed(self, seed: int) -> None: ...

    def token_eos(self) -> int: ...

    def close(self) -> None: ...


class LlamaPython:
    """A ``Llama`` with its defaults, except for threads, context size and log.

    Args:
        lookup: tokens that its prompt lookup proposes; 0 = plain decoding.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, n_ctx: int, threads: int, lookup: int = 0
    ) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        as_shipped = llama_cpp.llama_cpp.llama_model_default_params

        def defaults() -> object:
            params = as_shipped()
            params.use_extra_bufts = (
                not has_amx()
            )  # as this library does; Llama has no option for it
            return params

        with mock.patch("llama_cpp.llama_cpp.llama_model_default_params", defaults):
            llama = llama_cpp.Llama(
                os.fspath(path),
                n_ctx=n_ctx,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1,
                draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
                verbose=False,
            )
        self._llama = cast(_Llama, llama)

    def close(self) -> None:
        """Free it."""
        self._llama.close()

    def generate(self, prompt: Sequence[int], n: int, temperature: float, seed: int) -> Timing:
        """Time ``Llama.generate``: ids only. The first token, with the prompt, is not timed."""
        self._llama.set_seed(seed)
        end = self._llama.token_eos()
        generated = self._llama.generate(list(prompt), temp=temperature)
        tokens = [next(generated)]
        start = perf_counter()
        tokens += itertools.takewhile(lambda token: token != end, itertools.islice(generated, n))
        seconds = perf_counter() - start
        return Timing(len(tokens) - 1, seconds, tuple(tokens[:n]))

    def complete(self, prompt: Sequence[int], n: int, temperature: float, seed: int) -> Timing:
        """Time ``Llama.create_completion``. Its prompt cache is warm, so n tokens take n decodes."""
        ids = list(prompt)
        # Two tokens, so that the timed call must decode the last prompt token, as this library does.
        for warm_up, most in ((True, 2), (False, n)):
            start = perf_counter()
            answer = self._llama.create_completion(
                ids, max_tokens=most, temperature=temperature, top_k=40, seed=seed
            )
            seconds = perf_counter() - start
            if not warm_up:
                return Timing(answer["usage"]["completion_tokens"], seconds)
        raise AssertionError

    def complete_many(
        self, prompt: Sequence[int], n: int, tokens: int, temperature: float
    ) -> Timing:
        """Time ``n`` completions of a prompt that is not cached when the first one begins."""
        ids = list(prompt)
        self._llama.reset()
        n_generated = 0
        start = perf_counter()
        for seed in range(n):
            answer = self._llama.create_completion(
                ids, max_tokens=tokens, temperature=temperature, top_k=40, seed=seed
            )
            n_generated += answer["usage"]["completion_tokens"]
        return Timing(n_generated, perf_counter() - start)

    def beam(self, prompt: Sequence[int], beams: int, tokens: int) -> float:
        """Return the seconds of a beam search in which no text ends, one text after the other.

        The class has one sequence. The tokens that a beam shares with the one before it are not decoded
        again.
        """
        llama = self._llama
        llama.reset()
        start = perf_counter()
        llama.eval(prompt)
        cached: list[int] = []  # after the prompt
        running: list[tuple[float, list[int]]] = [(0.0, [])]
        for step in range(tokens):
            candidates: list[tuple[float, list[int]]] = []
            for score, text in running:
                if step:
                    n = 0
                    while n < min(len(cached), len(text) - 1) and cached[n] == text[n]:
                        n += 1
                    llama.n_tokens = len(prompt) + n
                    llama.eval(text[n:])
                    cached = text
                logits = llama._ctx.get_logits()  # its ``scores`` are filled only with logits_all
                row = np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),)).astype(float)
                row -= row.max()
                row -= np.log(np.exp(row).sum())
                for token in np.argpartition(row, -2 * beams)[-2 * beams :]:
                    candidates.append((score + float(row[token]), [*text, int(token)]))
            candidates.sort(key=lambda pair: -pair[0])
            running = candidates[:beams]
        return perf_counter() - start
