"""Random programs over all public objects; SOAK=20 runs twenty times as many, with other seeds."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import toys
from random_programs import N_CELLS, N_SEQ, Alone, Program

import llamabranch as lb

SOAK = int(os.environ.get("SOAK", "0"))
KINDS: dict[str, dict[str, Any]] = {
    "bundled": {}, "llama": {}, "gemma3": {"window": 16}, "mamba": {}, "rwkv7": {}, "lfm2": {},
    "qwen35": {"n_layer": 2},
}  # fmt: skip
N_PROGRAMS = {"bundled": 12}  # of the others 8


def options(model: lb.Model) -> Any:
    """Return the options of a context that is exact if its memory can be."""
    exact = model.memory_type == "attention"
    return {"n_ctx": N_CELLS, "n_threads": 1, "kv_type": "bf16", "exact": exact}


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_of_a_program_is_what_it_is_alone(kind: str, tmp_path: Path) -> None:
    path = Path(lb.hub.resolve("tale-target"))
    if kind != "bundled":
        vocabulary = toys.Vocabulary.with_control("<|bos|>", "<|im_end|>", "<|im_start|>")
        path = toys.write_toy(
            tmp_path / "toy.gguf", kind, vocab=vocabulary, seed=3,
            metadata={"tokenizer.chat_template": toys.CHAT_TEMPLATE}, **KINDS[kind],
        )  # fmt: skip
    first, tally = random.randrange(2**32) if SOAK else 0, Counter[str]()
    with (
        lb.Model(path) as model,
        lb.Context(model, n_seq_max=2, **options(model)) as clean,
    ):
        alone = Alone(clean)
        for seed in range(first, first + N_PROGRAMS.get(kind, 8) * max(1, SOAK)):
            more: dict[str, Any] = {"n_ctx": (256, N_CELLS)[seed % 2], "prefix_cache": seed % 3 < 2}
            more |= {"n_seq_max": N_SEQ, "n_batch": 48}
            if seed % 4 == 3 and alone.ctx.capabilities.exact:  # cells of their own
                more |= {"kv_unified": False, "n_ctx": 256 * N_SEQ}
            with lb.Context(model, **{**options(model), **more}) as ctx:
                try:
                    Program(ctx, alone, seed, tally).run()
                except BaseException as error:
                    raise AssertionError(f"program {seed} of {kind}") from error
    print(kind, dict(tally))  # pytest -s shows it
    assert tally["comparisons"] > 100 and tally["used inside"] > 10, tally
    assert tally["cached"] > 100 and tally["evicted"] > 20, tally
