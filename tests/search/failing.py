"""Makes the k-th decode of a search fail, for every k, and checks that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llama_cpp import llama_cpp as C

from llamabranch import Branch, DecodeInterruptedError


def check_every_failure(
    branch: Branch, search: Callable[[], object], monkeypatch: pytest.MonkeyPatch, every: int = 1
) -> int:
    """Interrupt each ``every``-th decode of ``search`` in turn; return how many decodes it needs.

    The interruption is llama.cpp's own: the decode is asked to abort once it has been called.
    """
    ctx = branch.ctx
    real, n = C.llama_decode, 0
    fail_at = -1

    def decode(ptr: object, batch: C.llama_batch) -> int:
        nonlocal n
        if n == fail_at:
            ctx.interrupt()
        n += 1
        return int(real(ptr, batch))

    monkeypatch.setattr(C, "llama_decode", decode)
    before = branch.tokens, branch.logits.tolist(), branch.produce(), branch.children
    free, cells = ctx.n_seq_free, ctx.usage().cells_used
    expected = repr(search())
    n_decodes = n
    for chosen in range(0, n_decodes, every):
        fail_at, n = chosen, 0
        try:
            search()
        except DecodeInterruptedError:
            pass
        else:  # with a drafter the number of decodes may differ from run to run
            assert n <= fail_at
        assert ctx.n_seq_free == free
        assert ctx.usage().cells_used == cells
        assert (branch.tokens, branch.logits.tolist(), branch.produce(), branch.children) == before
        ctx.audit()
    fail_at, n = -1, 0
    assert repr(search()) == expected
    return n_decodes
