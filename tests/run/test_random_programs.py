"""Random programs over all public objects; SOAK=20 runs twenty times as many, with other seeds."""

from __future__ import annotations

import faulthandler
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import toys
from random_programs import N_CELLS, N_SEQ, ROUNDING, TEMPLATE, Alone, Program

import llamabranch as lb

SOAK = int(os.environ.get("SOAK", "0"))
# The programs of each kind, and what its toy has; "bundled" and "default" are the bundled pair.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "bundled": (20, {}), "default": (16, {}), "llama": (84, {}), "gemma3": (52, {"window": 16}),
    "mamba": (26, {}), "rwkv7": (26, {}), "lfm2": (26, {}), "qwen35": (30, {"n_layer": 2}),
    "glm4moe": (20, {}),
}  # fmt: skip
MTP = "qwen35", "glm4moe"  # toys with MTP layers


class Kind:
    """A model, what may draft for it, and the contexts of both.

    Args:
        name: one of `KINDS`.
        folder: for the files.
        opened: closes what this opens.
    """

    def __init__(self, name: str, folder: Path, opened: ExitStack) -> None:
        self.draft: lb.Model | None = None
        self.head: lb.Model | None = None
        if name in ("bundled", "default"):
            path, draft, head = map(lb.hub.resolve, ("tale-target", "tale-draft", "tale-eagle"))
            self.draft, self.head = map(opened.enter_context, map(lb.Model, (draft, head)))
        else:
            vocabulary = toys.Vocabulary.with_control("<|bos|>", "<|im_end|>")
            path = folder / "toy.gguf"
            toys.write_toy(path, name, vocab=vocabulary, seed=3, **KINDS[name][1])
        self.has_mtp = name in MTP
        model = lb.Model(path, chat_template=TEMPLATE, load_mtp=self.has_mtp)
        self.model = opened.enter_context(model)
        is_exact = name != "default" and self.model.memory_type == "attention"
        self.options: dict[str, Any] = {"n_ctx": N_CELLS, "n_threads": 1}
        self.options["exact"] = is_exact and not self.has_mtp
        if name != "default":
            self.options["kv_type"] = "bf16"
        clean = opened.enter_context(self.context(n_seq_max=2, prefix_cache=False))
        self.alone = Alone(clean, 5 * ROUNDING if name == "default" else ROUNDING)

    def context(self, **options: Any) -> lb.Context:
        return lb.Context(self.model, **{**self.options, **options})

    @contextmanager
    def contexts(self, seed: int) -> Iterator[tuple[lb.Context, list[lb.Drafter]]]:
        """Open the context of a program, and what may draft for it."""
        more: dict[str, Any] = {"n_ctx": (256, N_CELLS)[seed % 2], "prefix_cache": seed % 3 < 2}
        more |= {"n_seq_max": N_SEQ, "n_batch": 48}
        if seed % 4 == 3 and self.options["exact"]:  # cells of their own
            more |= {"kv_unified": False, "n_ctx": 256 * N_SEQ}
        drafters: list[lb.Drafter] = []
        with self.context(**more) as ctx, ExitStack() as opened:
            if self.draft is not None:
                options = {**self.options, "n_seq_max": N_SEQ}
                drafting = opened.enter_context(lb.Context(self.draft, **options))
                drafters.append(lb.ModelDrafter(drafting))
            if self.head is not None:
                head = opened.enter_context(lb.Context(self.head, target=ctx))
                drafters.append(lb.EagleDrafter(head))
            if self.has_mtp:
                head = opened.enter_context(lb.Context(self.model, target=ctx))
                drafters.append(lb.MTPDrafter(head))
            yield ctx, drafters


@pytest.mark.filterwarnings(r"ignore:answer\(\) failed")  # of a vote: a function may raise
@pytest.mark.parametrize("name", KINDS)
def test_every_text_of_a_program_is_what_it_is_alone(name: str, tmp_path: Path) -> None:
    first, tally = random.randrange(2**32) if SOAK else 0, Counter[str]()
    with ExitStack() as opened:
        kind = Kind(name, tmp_path, opened)
        opened.callback(faulthandler.cancel_dump_traceback_later)
        for seed in range(first, first + KINDS[name][0] * max(1, SOAK)):
            # A deadlock ends here, and shows where.
            faulthandler.dump_traceback_later(600, exit=True)
            with kind.contexts(seed) as (ctx, drafters):
                try:
                    Program(ctx, kind.alone, seed, tally, drafters).run()
                except BaseException as error:
                    raise AssertionError(f"program {seed} of {name}") from error
    print(name, dict(tally))  # pytest -s shows it
    assert tally["comparisons"] > 100 and tally["used inside"] > 10, tally
    assert tally["cached"] > 100 and tally["evicted"] > 20, tally
