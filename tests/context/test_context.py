"""The raw calls of a context: what they do, what they refuse, and what they leave untouched."""

from __future__ import annotations

import gc
import inspect
import pickle
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import together
import toys
from drafts import counting

import llamabranch as lb
from llamabranch import Branch, Context, errors
from llamabranch.errors import (
    CacheFullError,
    ContextLengthWarning,
    DecodeError,
    LlamaBranchError,
    SequencesExhaustedError,
)

A = [5, 600, 7, 88, 9, 1000, 11, 12]
B = [700, 3, 40, 2000]


# -- decoding --------------------------------------------------------------------------------------


def test_logits_rows_are_those_of_the_tokens(ctx: Context, other_ctx: Context) -> None:
    """They are copies, and survive the decodes of branches."""
    ctx.decode(A, 0, logits="all")
    for _ in range(2):
        other_ctx.kv_cache_clear()
        for i, token in enumerate(A):
            other_ctx.decode([token], i)
            assert np.array_equal(ctx.logits(i), other_ctx.logits())
            row = ctx.logits(i - len(A))
            assert np.array_equal(row, other_ctx.logits(0))
            row += 1
        list(Branch.start(ctx, B, temperature=0.0).generate(5))


@pytest.mark.parametrize("n_batch", [8, 16, 512])
def test_sample_draws_what_a_branch_draws_whatever_the_batches(
    n_batch: int, target: lb.Model
) -> None:
    tokens = np.random.default_rng(0).integers(0, 4096, 40).tolist()
    params = lb.SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0)
    expected = []
    with Context(target, n_ctx=256, n_threads=1, exact=True) as ctx:
        for n in range(30, 41):
            with lb.Branch.start(ctx, tokens[:n], sampling=params.replace(seed=n)) as branch:
                expected.append(branch.produce().token)
    with Context(target, n_ctx=256, n_batch=n_batch, n_threads=1, exact=True) as ctx:
        ctx.decode(tokens[:20], 0, logits="none")
        ctx.decode(tokens[20:], 20, logits="all")
        before = (ctx.logits(), ctx.usage())
        drawn = [ctx.sample(params.replace(seed=n), n - 21) for n in range(30, 41)]
        assert drawn == expected
        for _ in range(2):
            assert ctx.sample(params.replace(seed=40)) == expected[-1]
        assert ctx.sample(lb.SamplingParams(temperature=0.0)) == int(ctx.logits().argmax())
        assert np.array_equal(ctx.logits(), before[0]) and ctx.usage() == before[1]
    assert len(set(expected)) > 5


def test_tokens_take_as_few_decodes_as_batch_and_rows_allow(toy: lb.Model) -> None:
    with Context(toy, n_ctx=256, n_batch=10, n_outputs_max=4, n_seq_max=4, n_threads=1) as ctx:
        for logits, sizes in (("none", [10, 10, 10, 6]), ("all", [4] * 9)):
            with counting(ctx) as counts:
                ctx.decode([5] * 36, 0, logits=logits)
            assert counts == sizes
            ctx.kv_cache_clear()


def test_entropy_and_surprisal_are_those_of_softmax(ctx: Context) -> None:
    ctx.decode(A, 0)
    logits = ctx.logits().astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    entropy = float(-(p * np.log(p)).sum())
    assert ctx.model_entropy() == pytest.approx(entropy, rel=1e-5)
    assert ctx.model_entropy("bits") == pytest.approx(entropy / np.log(2), rel=1e-5)
    assert ctx.model_surprisal(7) == pytest.approx(-np.log(p[7]), rel=1e-5)
    assert ctx.model_surprisal(7, "bits") == pytest.approx(-np.log2(p[7]), rel=1e-5)
    for n, bits in ((4096, 12), (4, 2)):  # masked tokens do not count
        row = np.full(4096, -np.inf, dtype=np.float32)
        row[:n] = 2.0
        assert ctx.model_entropy("bits", logits=row) == pytest.approx(bits)
        assert ctx.model_surprisal(1, "bits", logits=row) == pytest.approx(bits)
    assert ctx.model_surprisal(9, logits=row) == np.inf


# -- K/V primitives --------------------------------------------------------------------------------


def test_removing_from_the_middle_leaves_a_gap_that_nothing_sees(
    ctx: Context, other_ctx: Context
) -> None:
    for context in (ctx, other_ctx):
        context.decode(A, 0)
        context.kv_cache_remove(0, 2, 4)
        context.kv_seq_copy(0, 1)
        assert context.kv_cache_size(0) == context.kv_cache_size(1) == len(A) - 2
        context.audit()
    ctx.decode(B, len(A))
    other_ctx.decode([B[0]], len(A))
    for i, token in enumerate(B[1:]):
        other_ctx.decode([token], len(A) + 1 + i)
    assert np.array_equal(ctx.logits(), other_ctx.logits())


# -- exactness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_type", "n_threads", "n_prompt"),
    # After 512 cells llama.cpp divides a token among threads where K and V are both f16.
    [("bf16", 1, 0), ("q8_0", 1, 0), ("q8_0/f16", 1, 0), ("q8_0/f16", 2, 600)],
)
def test_batches_of_any_size_give_the_same_logits_to_the_bit(
    kv_type: str, n_threads: int, n_prompt: int, target: lb.Model
) -> None:
    drawn = np.random.default_rng(1).integers(0, 4096, n_prompt + 260).tolist()
    prompt, tokens = drawn[:n_prompt], drawn[n_prompt:]
    options: dict[str, Any] = {"n_ctx": 1024, "n_outputs_max": 512, "exact": True}
    with Context(target, n_threads=n_threads, kv_type=kv_type, **options) as ctx:
        if prompt:
            ctx.decode(prompt, 0, logits="none")
        alone = []
        for i, token in enumerate(tokens):
            ctx.decode([token], n_prompt + i)
            alone.append(ctx.logits())
        for size in (2, 3, 7, 16, 33, 64, 129, 260):
            ctx.kv_cache_clear()
            for low in range(0, n_prompt, 2 * size):
                ctx.decode(prompt[low : low + 2 * size], low, logits="none")
            for low in range(0, len(tokens), size):
                chunk = tokens[low : low + size]
                ctx.decode(chunk, n_prompt + low, logits="all")
                for i in range(len(chunk)):
                    assert np.array_equal(ctx.logits(i), alone[low + i]), (size, low + i)


@pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning")
@pytest.mark.parametrize("n", [600, 1500])
@pytest.mark.parametrize("which", ["target", "draft"])
def test_long_contexts(which: str, n: int, request: pytest.FixtureRequest) -> None:
    """Branches next to others have the logits of their tokens one by one, alone, in a clean cache."""
    model, rng = request.getfixturevalue(which), np.random.default_rng(n)
    options: dict[str, Any] = {"n_ctx": 2048, "n_threads": 1, "exact": True}
    with (
        Context(model, n_seq_max=16, **options) as shared,
        Context(model, n_seq_max=2, **options) as clean,
    ):
        root = Branch.start(shared, rng.integers(2, 4000, n).tolist())
        children = root.fork_many(5)
        for _ in range(4):
            together.commit(shared, {c: int(rng.integers(2, 4000)) for c in children})
        children[0].extend(rng.integers(2, 4000, 12).tolist())
        start = 0
        for branch in (root, children[0], children[3]):
            clean.kv_cache_remove(0, n)
            for i, token in enumerate(branch.tokens[start:]):
                clean.decode([token], start + i)
            start = n
            assert np.array_equal(branch.logits, clean.logits())
        shared.audit()


# -- capacity ------------------------------------------------------------------------------------


def test_full_cache_with_raw_sequences_loses_the_order_and_continues(target: lb.Model) -> None:
    """The context does not know the tokens of raw sequences, so it cannot be compacted."""
    with Context(target, n_ctx=256, n_seq_max=8, n_threads=1, exact=True) as ctx:
        ctx.decode([5] * 80, 0, 0)
        branch = Branch.start(ctx, [6] * 80)
        ctx.kv_cache_remove(0, 20)
        usage = ctx.usage()
        assert (usage.cells_reserved, usage.in_order) == (60, True)
        branch.extend([7] * 150)
        usage = ctx.usage()
        assert (usage.cells_used, usage.cells_reserved, usage.in_order) == (250, 0, False)
        ctx.audit()
        with pytest.raises(CacheFullError):
            branch.extend([8] * 7)
        assert branch.position == 230
        branch.prune()
        ctx.kv_cache_clear()
        assert ctx.usage().in_order


def test_exhausted_sequences_name_their_holders(ctx: Context) -> None:
    ctx.decode(A, 0, seq_id=0)
    branches = [Branch.start(ctx, B, temperature=0.0) for _ in range(7)]
    with pytest.raises(SequencesExhaustedError, match="all 8 sequences") as caught:
        branches[0].fork()
    assert "n_seq_max" in str(caught.value.hint)
    assert "[0] by raw calls" in str(caught.value)
    assert repr(branches[3]) in str(caught.value)
    branches[3].prune()
    assert np.array_equal(branches[0].fork().logits, branches[0].logits)


def test_forgotten_branches_come_back_while_another_thread_collects_garbage(ctx: Context) -> None:
    """``gc.collect`` does nothing while another thread is in the middle of a collection."""
    begun, end = threading.Event(), threading.Event()

    class Slow:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            begun.set()
            end.wait()

    gc.disable()  # or it may be collected here
    try:
        Slow()
        collecting = threading.Thread(target=gc.collect)
        collecting.start()
        begun.wait()
    finally:
        gc.enable()
    for _ in range(ctx.n_seq_max):
        branch = Branch.start(ctx, A)
        branch.cycle = branch  # type: ignore[attr-defined]  # only the collector ends it
    del branch
    threading.Timer(0.05, end.set).start()
    assert Branch.start(ctx, A).position > 0
    collecting.join()


# -- life ----------------------------------------------------------------------------------------


def test_forgotten_context_is_freed_while_its_model_lives(target: lb.Model) -> None:
    handles = len(target.handle._children)
    for _ in range(5):
        ctx = Context(target, n_ctx=256, n_threads=1, exact=True)
        Branch.start(ctx, A)
    del ctx
    gc.collect()
    assert len(target.handle._children) <= handles


# -- errors --------------------------------------------------------------------------------------


KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, LlamaBranchError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_survive_pickling(kind: type[LlamaBranchError]) -> None:
    error = kind("what happened", hint="what to do")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.hint, again.args) == (str(error), error.hint, error.args)
    notes = ["hint: what to do\n"] if sys.version_info >= (3, 11) else []
    for e in (error, again):
        assert traceback.format_exception_only(type(e), e)[1:] == notes


def test_decode_errors_keep_their_codes_and_plain_python_catches_errors() -> None:
    again = pickle.loads(pickle.dumps(DecodeError("no", code=-3, memory_changed=True)))
    assert (again.code, again.memory_changed) == (-3, True)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.BranchStateError, RuntimeError)
    for kind in (errors.CacheFullError, SequencesExhaustedError):
        assert issubclass(kind, errors.CapacityError)


@pytest.mark.parametrize(
    ("level", "shown"),
    [("none", [False, False]), ("error", [True, False]), ("info", [True, True])],
)
def test_log_level_shows_that_level_and_what_is_worse(
    level: str, shown: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lb.Model(toys.write_toy(tmp_path / "narrow.gguf", n_embd=32)) as model:
        lb.set_log_level(level)
        try:
            with pytest.raises(errors.ConfigError):
                lb.Context(model, n_ctx=256, kv_type="q8_0")
        finally:
            lb.set_log_level("none")
    log = capsys.readouterr().err
    assert [words in log for words in ("does not divide", "enabling flash_attn")] == shown


# -- the length the model was trained for ----------------------------------------------------------

TRAINED = 1024  # the bundled pair


@pytest.fixture
def short_toy(tmp_path: Path) -> Iterator[lb.Model]:
    """A model that was trained for 300 tokens."""
    with lb.Model(toys.write_llama(tmp_path / "short.gguf", n_ctx_train=300)) as model:
        yield model


def test_default_context_is_not_longer_than_the_model_was_trained_for(
    target: lb.Model, toy: lb.Model, short_toy: lb.Model
) -> None:
    for model, n_ctx in ((target, TRAINED), (toy, 2048), (short_toy, 512)):
        with Context(model, n_threads=1) as ctx:
            assert ctx.n_ctx == n_ctx  # 300 tokens need 512 cells: llama.cpp has multiples of 256
    with Context(target, n_threads=1, n_ctx=None, n_seq_max=None, exact=True) as ctx:
        assert (ctx.n_ctx, ctx.n_seq_max) == (TRAINED, 16)


def test_a_text_that_gets_too_long_warns_once_with_rope_scaling_as_the_hint(
    target: lb.Model,
) -> None:
    message = r"a text gets .* 1024 tokens .*rope_scaling='yarn', rope_freq_scale=0.5"
    for n_seq_max in (None, 1):
        with Context(target, n_ctx=2048, n_seq_max=n_seq_max, n_threads=1) as ctx:
            with pytest.warns(ContextLengthWarning, match=message) as caught:
                ctx.decode([5] * (TRAINED + 3), 0)
            assert [warning.filename for warning in caught] == [__file__]
            ctx.decode([5], TRAINED + 3)  # warned already


def test_eight_users_of_2000_tokens_get_no_warning(target: lb.Model) -> None:
    """Warnings are errors in these tests. The trained length is one text's, n_ctx is all texts'."""
    with lb.load(n_ctx=16 * TRAINED, n_threads=1) as ctx:
        assert len(ctx.complete([[5] * 1000 + [i] for i in range(8)], max_tokens=2)) == 8


def test_many_sequences_may_share_more_cells_until_one_gets_too_long(short_toy: lb.Model) -> None:
    with Context(short_toy, n_ctx=1024, n_seq_max=3, n_batch=64, n_threads=1) as ctx:
        branch = Branch.create(ctx)
        branch.prefill([2] * 299)
        ctx.decode([2] * 300, 0)
        branch.commit(3)
        before = branch.logits
        with pytest.raises(ContextLengthWarning, match="a text gets longer than the 300 tokens"):
            branch.commit(4)  # warnings are errors in these tests; nothing has happened
        assert len(branch.tokens) == 300
        assert np.array_equal(branch.logits, before)
        branch.commit(4)  # it has warned
        ctx.decode([2] * 10, 300)
        ctx.audit()
    with (
        Context(short_toy, n_ctx=1024, n_seq_max=3, n_threads=1) as ctx,
        pytest.warns(ContextLengthWarning),  # where many tokens are decoded together, too
    ):
        ctx.decode([2] * 301, 0)


def test_rope_settings_of_ones_own_stretch_the_length(short_toy: lb.Model) -> None:
    own: list[dict[str, Any]] = [{"rope_freq_base": 50_000.0}]
    own += [{"rope_scaling": way, "rope_freq_scale": 0.5} for way in ("yarn", "linear")]
    for options in own:
        with Context(short_toy, n_threads=1, **options) as ctx:
            assert ctx.n_ctx == 2048
            ctx.decode([2] * 301, 0)
    with Context(short_toy, n_threads=1) as ctx:  # YaRN changes llama.cpp's own number
        assert ctx.n_ctx == 512


def test_recurrent_memory_has_no_trained_length(tmp_path: Path) -> None:
    path = toys.write_mamba(tmp_path / "mamba.gguf", n_ctx_train=300)
    with lb.Model(path) as model, Context(model, n_ctx=512, n_threads=1) as ctx:
        ctx.decode([2] * 301, 0)
