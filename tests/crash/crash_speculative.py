"""Misuse of speculative decoding, and what happens to one side when the other ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import toys
from crash_harness import World, case, refuses
from drafts import FIXED

from llamabranch import (
    ChainDrafter,
    Context,
    Engine,
    InferenceSession,
    Model,
    Request,
    SamplingParams,
    SuffixDrafter,
)
from llamabranch.errors import (
    CacheFullError,
    ConfigError,
    GrammarError,
    LlamaBranchError,
    TokenizeError,
)
from llamabranch.speculative import (
    ModelDrafter,
    SpeculativeConfig,
    Speculator,
)

# -- speculative decoding --------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, object]] = {
    "draft_k_huge": {"draft_k": 1 << 40},
    "draft_k_above_256": {"draft_k": 257},
    "max_draft_zero": {"max_draft_tokens": 0},
    "max_draft_huge": {"max_draft_tokens": 1 << 40},
    "entropy_stop_nan": {"entropy_stop": math.nan},
    "entropy_stop_negative": {"entropy_stop": -1.0},
}


@contextmanager
def _drafter(w: World, vocab: str = "bytes", **options: object) -> Iterator[ModelDrafter]:
    path = toys.write_llama(w.folder / "draft.gguf", vocab=vocab, n_layer=1)
    small = {"n_ctx": 256, "n_seq_max": 2, "n_batch": 16, "n_threads": 1}
    with (
        Model(path) as model,
        Context(model, **{**small, **options}) as ctx,  # type: ignore[arg-type]
    ):
        yield ModelDrafter(ctx)


REQUESTS: list[tuple[str, Any]] = [("n", 0), ("id", 3), ("stop", 5), ("stop", [5])]
SPOKEN = SamplingParams(temperature=1.0, seed=3)


def _plain(w: World, n: int) -> list[int]:
    with w.branch("ab", sampling=SPOKEN, seed=SPOKEN.seed) as branch:
        return [produced.token for produced in branch.generate(max_tokens=n)]


refuses(
    "speculative",
    ConfigError,
    **{name: lambda w, c=config: SpeculativeConfig(**c) for name, config in CONFIGS.items()},
    stop_not_text=lambda w: Speculator(w.ctx).generate("ab", stop=(5,)),  # type: ignore[arg-type]
    stop_empty=lambda w: Speculator(w.ctx).generate("ab", stop=""),
    settings_of_a_branch=lambda w: Speculator(w.ctx).generate(w.root, sampling=SPOKEN),
    session_with_an_empty_stop=lambda w: InferenceSession(w.ctx, "ab", stop=""),
    session_with_settings_of_a_branch=lambda w: InferenceSession(w.ctx, w.root, sampling=SPOKEN),
    suffix_of_nothing=lambda w: SuffixDrafter(min_match=0),
    chain_of_nothing=lambda w: ChainDrafter([]),
    **{
        f"wait_{x}": lambda w, x=x: Engine(w.ctx, wait_s=x) for x in (-1, math.nan, True, "2", None)
    },
    **{f"request_{x}": lambda w, x=x: Request("text", **dict([x])) for x in REQUESTS},
)
refuses(
    "speculative",
    TokenizeError,
    prompt_token=lambda w: Speculator(w.ctx).generate([258]).finish(),
    prompt_surrogate=lambda w: Speculator(w.ctx).generate("\udc80").finish(),
)
refuses(
    "speculative",
    CacheFullError,
    prompt_beyond_the_cache=lambda w: Speculator(w.ctx).generate([60] * 300).finish(),
)
refuses(
    "speculative",
    GrammarError,
    grammar_that_does_not_parse=lambda w: Speculator(w.ctx).generate("a", grammar="root ::= x"),
)


@case("speculative")
def drafts_longer_than_a_batch(w: World) -> None:
    expected = _plain(w, 60)
    for k in (0, 1, 31, 32, 33, 256):
        config = SpeculativeConfig(draft_k=k, max_draft_tokens=256)
        with _drafter(w) as drafter:
            generation = Speculator(w.ctx, drafter, config).generate(
                "ab", max_tokens=60, sampling=SPOKEN
            )
            assert generation.finish().tokens == expected
            generation.close()


@case("speculative")
def target_drafts_for_itself(w: World) -> None:
    with suppress(LlamaBranchError):
        generation = Speculator(w.ctx, ModelDrafter(w.ctx), FIXED).generate("ab", max_tokens=20)
        generation.finish().close()
