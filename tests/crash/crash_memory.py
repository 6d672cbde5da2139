"""Misuse of decoding, of sequences, and of the options of a context."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import together
import toys
from crash_harness import World, case, must_raise, refuses

from llamabranch import (
    Branch,
    Context,
    Engine,
    Model,
    ModelDrafter,
    Request,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
    SuffixDrafter,
)
from llamabranch.errors import (
    BranchStateError,
    ConfigError,
    TokenizeError,
    UnsupportedError,
)

# -- decoding and memory ---------------------------------------------------------------------------

BAD_SEQUENCES: dict[str, Any] = {
    "minus_one": -1, "n_seq_max": 4, "255": 255, "256": 256, "huge": 1 << 40, "true": True,
    "fraction": 1.0, "text": "0", "none": None,
}  # fmt: skip
OF_SEQUENCES: dict[str, Callable[[Context, Any], object]] = {
    "decode_sequence": lambda ctx, s: ctx.decode([5], 0, s),
    "copy_from": lambda ctx, s: ctx.kv_seq_copy(s, 0),
    "copy_to": lambda ctx, s: ctx.kv_seq_copy(0, s),
    "remove": lambda ctx, s: ctx.kv_cache_remove(s),
    "keep": lambda ctx, s: ctx.kv_seq_keep(s),
    "size": lambda ctx, s: ctx.kv_cache_size(s),
}
BAD_SECONDS: list[Any] = [0, -1, math.nan, "1", True, None]


def _after(w: World, logits: str = "last") -> Context:
    """The context after three tokens of a raw sequence."""
    w.ctx.kv_cache_remove(0)
    w.ctx.decode([60, 61, 62], 0, logits=logits)
    return w.ctx


refuses(
    "decode",
    TokenizeError,
    token_n_vocab=lambda w: w.ctx.decode([1, w.model.n_vocab], 0),
)
refuses(
    "decode",
    ConfigError,
    no_tokens=lambda w: w.ctx.decode([], 0),
    position_minus_one=lambda w: w.ctx.decode([5], -1),
    position_gap=lambda w: w.ctx.decode([5], 3),
    position_beyond_context=lambda w: w.ctx.decode([5], 256),
    position_huge=lambda w: w.ctx.decode([5], 1 << 40),
    position_text=lambda w: w.ctx.decode([5], "0"),  # type: ignore[arg-type]
    unknown_logits=lambda w: w.ctx.decode([5], 0, logits="some"),
    logits_of_wrong_shape=lambda w: w.ctx.model_entropy(logits=np.zeros(3, np.float32)),
    unknown_base=lambda w: w.ctx.model_entropy("hats", logits=np.zeros(258, np.float32)),
    base_of_a_surprisal=lambda w: w.ctx.model_surprisal(
        3, "BITS", logits=np.zeros(258, np.float32)
    ),
    remove_backwards=lambda w: w.ctx.kv_cache_remove(0, 5, 2),
    remove_negative_end=lambda w: w.ctx.kv_cache_remove(0, 0, -2),
    **{
        f"{name}_{k}": lambda w, s=s, call=call: call(w.ctx, s)
        for name, call in OF_SEQUENCES.items()
        for k, s in BAD_SEQUENCES.items()
    },
    **{f"time_limit_{s}": lambda w, s=s: w.ctx.time_limit(s).__enter__() for s in BAD_SECONDS},
)
refuses(
    "decode",
    BranchStateError,
    decode_into_a_branch=lambda w: w.ctx.decode([5], 10, w.root.seq_id),
    remove_a_branch=lambda w: w.ctx.kv_cache_remove(w.root.seq_id),
    copy_onto_a_branch=lambda w: w.ctx.kv_seq_copy(0, w.root.seq_id),
    copy_from_a_branch=lambda w: w.ctx.kv_seq_copy(w.root.seq_id, 0),
    keep_a_branch=lambda w: w.ctx.kv_seq_keep(w.root.seq_id),
    clear_under_a_branch=lambda w: w.ctx.kv_cache_clear(),
)


ROWS = {"one": 1, "two": 2, "minus_two": -2, "many": 31, "huge": 1 << 40}
PENALTY = SamplingParams(repeat_penalty=1.1)
refuses(
    "decode",
    ConfigError,
    logits_before_a_decode=lambda w: w.context().logits(),
    sample_before_a_decode=lambda w: w.context().sample(),
    surprisal_before_a_decode=lambda w: w.context().model_surprisal(5),
    logits_of_none=("no logits row", lambda w: _after(w, "none").logits()),
    sample_of_none=lambda w: _after(w, "none").sample(),
    entropy_of_none=lambda w: _after(w, "none").model_entropy(),
    sample_without_a_seed=(
        "needs a seed",
        lambda w: _after(w).sample(SamplingParams(temperature=0.8)),
    ),
    **{f"logits_{k}": lambda w, row=row: _after(w).logits(row) for k, row in ROWS.items()},
    **{
        f"sample_{k}": lambda w, row=row: _after(w).sample(SamplingParams(), row)
        for k, row in ROWS.items()
    },
)
refuses("decode", UnsupportedError, history=("Branch", lambda w: _after(w).sample(PENALTY)))


# -- opening contexts ------------------------------------------------------------------------------

OPTIONS: list[tuple[str, dict[str, object]]] = [
    ("", {"n_ctx": 0}), ("", {"n_ctx": 1.5}), ("", {"n_ctx": -5}), ("", {"n_ctx": "many"}),
    ("", {"n_ctx": 1 << 31}), ("", {"n_ctx": (1 << 31) - 256}),
    ("", {"n_seq_max": 0}), ("", {"n_seq_max": -1}), ("", {"n_seq_max": 33}),
    ("", {"n_seq_max": 257, "n_batch": 256, "n_ctx": 512}),
    ("n_seq_max", {"n_seq_max": 300, "kv_unified": False}),
    ("n_ubatch", {"n_seq_max": 8, "kv_unified": False, "n_ubatch": 4}),
    ("kv_unified must be 'auto', True or False", {"kv_unified": "no"}),
    ("at most 240 with a prefix cache",
     {"n_seq_max": 241, "prefix_cache": True, "n_batch": 256, "n_ctx": 512}),
    ("checkpoint_ram", {"checkpoint_ram": -1}), ("checkpoint_ram", {"checkpoint_ram": None}),
    ("checkpoint_ram", {"checkpoint_ram": "1G"}), ("checkpoint_ram", {"checkpoint_ram": 1 << 63}),
    ("", {"n_batch": 0}), ("", {"n_batch": -1}), ("", {"n_ubatch": 0}),
    ("", {"n_outputs_max": 2}), ("", {"n_outputs_max": 4096}),
    ("", {"n_threads": 0}), ("", {"n_threads": 10**6}), ("", {"n_threads_batch": -1}),
    ("", {"kv_type": "type_999"}), ("", {"kv_type": 999}),
    ("", {"kv_type": "q8_0", "flash_attention": False}), ("", {"flash_attention": "maybe"}),
    ("cannot be exact: the K/V type is f16", {"exact": True, "kv_type": "f16"}),
    ("cannot be exact: the K/V type is f32", {"exact": True, "kv_type": "f32"}),
    ("cannot be exact: flash attention is off", {"exact": True, "flash_attention": False}),
    ("", {"exact": "maybe"}),
    ("", {"rope_scaling": "bogus"}), ("", {"rope_freq_base": -1.0}),
    ("", {"rope_freq_base": math.nan}), ("", {"rope_freq_scale": math.inf}),
    ("", {"rope_freq_scale": -2.0}), ("", {"yarn_orig_ctx": -1}),
]  # fmt: skip
refuses(
    "options",
    (ConfigError, UnsupportedError),
    **{str(options): (said, lambda w, o=options: w.context(**o)) for said, options in OPTIONS},
)
for _architecture, _said, _options in (
    ("mamba", "kv_unified", {"kv_unified": False}),
    ("gemma3", "kv_unified", {"kv_unified": False}),
    ("gemma3", "sliding window", {"exact": True, "kv_type": "bf16"}),
    ("mamba", "recurrent memory", {"exact": True}),
    ("lfm2", "hybrid memory", {"exact": True}),
):

    def _other_memory(w: World, a: str = _architecture, o: dict[str, Any] = _options) -> None:
        with Model(toys.write_toy(w.folder / "other.gguf", a, vocab="bytes")) as model:
            Context(model, n_ctx=512, n_seq_max=3, n_threads=1, **o)

    refuses("options", UnsupportedError, **{f"{_architecture}_{_said}": (_said, _other_memory)})


@case("options")
def kv_type_that_does_not_fit_the_heads(w: World) -> None:
    path = toys.write_llama(w.folder / "narrow.gguf", n_embd=32, n_head=2)  # heads of 16
    with Model(path) as model:
        for kv_type in ("q8_0", "q4_0"):
            message = must_raise(
                ConfigError, lambda k=kv_type: Context(model, n_ctx=256, kv_type=k)
            )
            assert f"{kv_type} with block size 32" in message and "=16" in message
            assert "enabling" not in message  # what llama.cpp logged before
        with Context(model, n_ctx=256, n_threads=1) as ctx:
            ctx.decode([3], 0)


def _few_rows(w: World, n_seq_max: int, n_outputs_max: int) -> None:
    """Everything that asks for rows works if a decode may have few. llama.cpp aborts at one more."""
    for kv_type in ("auto", "q8_0", "f16"):
        is_exact = kv_type != "f16"
        opening = partial(w.context, n_outputs_max=n_outputs_max, kv_type=kv_type, exact=is_exact)
        with opening(n_seq_max=n_seq_max) as ctx, opening(n_seq_max=n_seq_max) as draft_ctx:
            assert ctx.capabilities.exact == is_exact
            ctx.decode(list(range(60, 80)), 0, logits="all")
            assert len([ctx.logits(row) for row in range(20)]) == 20
            ctx.kv_cache_clear()
            config, sampling = SpeculativeConfig(draft_k=6), SamplingParams(seed=1)
            Speculator(ctx, ModelDrafter(draft_ctx), config).generate(
                [60, 61], max_tokens=12, sampling=sampling
            ).finish()
            engine = Engine(ctx, ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=6), seed=1)
            for result in engine.generate([Request("ab", max_tokens=12, n=6)]):
                assert result.error is None
            branches = [Branch.create(ctx) for _ in range(n_seq_max)]
            together.prefill(ctx, {branch: [60 + i] * 20 for i, branch in enumerate(branches)})
            together.step(ctx, branches)
            branches[0].extend([60] * 20)
            ctx.audit()


for _n_seq_max, _n_outputs_max in ((s, n) for s in (1, 2, 3) for n in range(s, 10)):
    case("options", f"{_n_seq_max}_sequences_{_n_outputs_max}_rows")(
        partial(_few_rows, n_seq_max=_n_seq_max, n_outputs_max=_n_outputs_max)
    )


def _rollback(w: World, architecture: str, options: dict[str, Any]) -> None:
    """Drafts of one text and of several, with few tokens at once, few sequences and many states."""
    path = toys.write_toy(w.folder / f"{architecture}.gguf", architecture, vocab="bytes")
    with Model(path) as model:
        n_batch = min(options.get("n_ubatch", 512), options.get("n_batch", 512))
        if options.get("n_rs_seq", 0) > n_batch - 2:
            must_raise(ConfigError, lambda: Context(model, n_ctx=512, n_threads=1, **options))
            return
        with Context(model, n_ctx=512, n_threads=1, **options) as ctx:
            engine = Engine(ctx, SuffixDrafter(), SpeculativeConfig(draft_k=64))
            prompt = [3, 4, 5, 6] * 8
            n_texts = 1 if n_batch < 4 else 4
            requests = [
                Request(prompt[i:], max_tokens=24, sampling=SamplingParams(seed=i))
                for i in range(n_texts)
            ]
            engine.generate(requests)
            ctx.audit()


_OPTIONS: list[dict[str, Any]] = [
    {"n_batch": n_batch, "n_seq_max": n_seq_max, **more}
    for n_batch in (2, 5, 6, 10, 11)
    for n_seq_max in (1, 4)
    for more in ({}, {"n_rs_seq": 4}, {"n_rs_seq": 64}, {"n_ubatch": 6})
    if n_seq_max <= n_batch
]
for _architecture in ("lfm2", "qwen35", "nemotron_h"):
    for _number, _options in enumerate(_OPTIONS):
        case("options", f"rollback_{_architecture}_{_number}")(
            partial(_rollback, architecture=_architecture, options=_options)
        )


@case("options")
def as_many_sequences_as_there_can_be(w: World) -> None:
    with w.context(n_seq_max=256, n_batch=256, n_ctx=512) as ctx:
        for seq_id in range(256):
            ctx.decode([60], 0, seq_id)
        ctx.audit()


@case("options")
def one_of_everything(w: World) -> None:
    with w.context(n_ctx=1, n_seq_max=1, n_batch=1) as ctx:
        ctx.decode([60, 61, 62], 0)
