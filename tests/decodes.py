"""Wrappers of decodes that record what they do, and act before or after the real call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from llama_cpp import llama_cpp as C

from llamabranch import Context

Act = Callable[[int], object]


class Decodes:
    """The numbers of tokens of all decodes and llama.cpp's codes.

    ``before`` and ``after`` are called with the number of the decode, from 0.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.codes: list[int] = []
        self.before: Act = lambda number: None
        self.after: Act = lambda number: None
        self._real = C.llama_decode
        monkeypatch.setattr(C, "llama_decode", self._decode)

    def _decode(self, ctx: object, batch: C.llama_batch) -> int:
        number = len(self.sizes)
        self.sizes.append(batch.n_tokens)
        self.before(number)
        self.codes.append(int(self._real(ctx, batch)))
        self.after(number)
        return self.codes[-1]

    def on_call(self, number: int, act: Callable[[], object]) -> None:
        """Act before the decode of this number, counted from now on, and before no other."""
        wanted = len(self.sizes) + number
        self.before = lambda call: act() if call == wanted else None


@contextmanager
def hooked(ctx: Context, call: Callable[[Callable[[int], int], int], int]) -> Iterator[None]:
    """Let ``call(decode, n)`` make each decode of a context, of ``n`` tokens, and return its code."""
    handle = ctx.decoder.handle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "decode", partial(call, handle.decode))
        patch.setattr(handle, "_stepper", None)  # the compiled core would decode by itself
        yield
