"""K/V type, flash attention and exactness as "auto" takes them: measured together, once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import toys
from costs import EVEN, forget, write_costs
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Context
from llamabranch.context import kv_type as measured
from llamabranch.native import AttentionShape, attention, attention_seconds

SETTINGS = [("f16", True), ("bf16", True), ("f16", False), ("bf16", False)]


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(path))
    forget()
    return path


def of_auto(model: lb.Model, **options: Any) -> tuple[str, bool]:
    with Context(model, n_ctx=256, n_threads=1, **options) as ctx:
        return ctx.kv_type, ctx.params.flash_attention is not False


def test_attention_of_every_type_and_shape_is_timed() -> None:
    for size, n_heads, n_kv_heads in ((8, 1, 1), (64, 3, 3), (80, 2, 1), (128, 8, 2)):
        shape = AttentionShape(size, n_heads, n_kv_heads)
        for n_rows in (1, 8, 64):
            seconds = attention_seconds(SETTINGS, shape, n_rows, 256, 0.0)
            assert len(seconds) == len(SETTINGS)
            assert all(0 < s < math.inf for s in seconds)
    assert attention_seconds([("q8_0", True)], AttentionShape(64, 3, 3), 1, 256, 0.0)[0] < math.inf


def test_a_setting_that_is_clearly_slower_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """This keeps the measurement short: with many rows one setting takes as long as all others."""
    seconds = [[1.0, 1.5, 2.0], [1.1, 1.2]]  # calls of the first turn, and of every other turn
    spans = iter(seconds[0] + 7 * seconds[1])
    ticks = (tick for span in spans for tick in (0.0, span))
    monkeypatch.setattr(attention, "_clock", lambda: next(ticks))
    shape = AttentionShape(64, 1, 1)
    times = attention_seconds(SETTINGS[:3], shape, 64, 256, math.inf)
    assert [s / times[0] for s in times] == pytest.approx([1.0, 1.2, 2.0])
    with pytest.raises(StopIteration):
        next(ticks)


def test_settings_are_measured_once(
    target: lb.Model, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured without a profile. A named type is kept, with flash attention."""
    first = of_auto(target)
    known = json.loads(profile.read_text())
    (attention,), (weights,) = (
        known[name].values() for name in (measured._ATTENTION, measured._WEIGHTS)
    )
    assert sorted(attention) == ["bf16, flash", "bf16, plain", "f16, flash", "f16, plain"]
    assert all(0 < seconds < 1 for costs in attention.values() for seconds in costs)
    assert len(weights["seconds"]) == 3
    forget()
    monkeypatch.setattr(measured, "attention_seconds", None)  # nobody measures again
    monkeypatch.setattr(measured, "decode_seconds", None)
    assert of_auto(target) == first
    forget()
    assert of_auto(target, kv_type="q8_0") == ("q8_0", True)
    assert of_auto(target, kv_type="f16") == ("f16", True)
    profile.unlink()
    monkeypatch.setenv("LLAMABRANCH_PROFILE", "0")
    assert of_auto(target, batch_invariant=False) == ("f16", True)
    assert of_auto(target) == ("bf16", True)  # exact, if times do not decide
    assert not profile.exists()


@pytest.mark.parametrize(
    ("fast", "taken"),
    [
        ({}, ("f16", True)),
        ({"f16, flash": [9e-6] * 3}, ("bf16", True)),
        ({"f16, flash": [9e-6] * 3, "bf16, flash": [9e-6] * 3}, ("f16", False)),
        ({"bf16, plain": [5e-7] * 3}, ("bf16", False)),
        # A prompt of 2,000 tokens weighs more than 300 that are generated, one text as much as eight.
        ({"f16, plain": [5e-7, 5e-7, 11e-7]}, ("f16", True)),
        ({"f16, plain": [14e-7, 1e-7, 9e-7]}, ("f16", False)),
        ({"f16, plain": [1e-7, 1e-7, 10.5e-7]}, ("f16", False)),
    ],
    ids=str,
)
def test_fastest_setting_of_a_session_is_taken(
    fast: Any, taken: tuple[str, bool], target: lb.Model, profile: Path, tmp_path: Path
) -> None:
    """If exactness is not asked for, or was tried and does not hold."""
    of_auto(target)
    path = toys.write_toy(tmp_path / "toy.gguf", weights="f32", n_embd=256, seed=5)
    with lb.Model(path) as other:
        of_auto(other)
        write_costs(profile, fast)
        assert of_auto(target, batch_invariant=False) == taken
        assert of_auto(other, batch_invariant=False) == taken
        with Context(other, n_ctx=256, n_threads=1) as ctx:
            if not ctx.capabilities.batch_invariant:
                assert (ctx.kv_type, ctx.params.flash_attention is not False) == taken
    assert of_auto(target, batch_invariant=False, flash_attention=True)[1]
    assert of_auto(target, batch_invariant=False, flash_attention=False) == ("f16", False)


def plain_costs(target: lb.Model, factor: float) -> list[float]:
    """Return the cost of the weights if doubling the attention's time makes a context so much slower."""
    times = target.n_layer * target.handle.number("n_head_kv")
    attention = times * EVEN[0]
    return [attention * (2 - factor) / (factor - 1)] * 3


@pytest.mark.parametrize(("factor", "is_exact"), [(1.05, True), (1.2, False), (1.9, False)])
def test_exact_is_the_default_where_it_costs_at_most_a_tenth(
    factor: float, is_exact: bool, target: lb.Model, profile: Path
) -> None:
    of_auto(target)
    write_costs(profile, {"bf16, flash": [2e-6] * 3}, plain_costs(target, factor))
    with Context(target, n_ctx=256, n_threads=1) as ctx:
        can = ctx.capabilities
        assert can.batch_invariant == is_exact
        assert (ctx.kv_type, ctx.params.flash_attention) == ("bf16" if is_exact else "f16", "auto")
        assert can.exact_read_ratio == pytest.approx(factor)
        assert can.exact_write_ratio == pytest.approx(factor)
        assert f"{factor:.1f} x slower" in can.cost_of_exact
        if not is_exact:
            assert can.cost_of_exact in can.batch_invariant_reason
            assert "batch_invariant=True" in can.batch_invariant_reason
            assert (can.exact_rows, can.total_variation) == (0, None)
    with Context(target, n_ctx=256, n_threads=1, batch_invariant=True) as ctx:
        assert ctx.capabilities.batch_invariant and ctx.kv_type == "bf16"
        assert ctx.capabilities.exact_read_ratio == pytest.approx(factor)
    with Context(target, n_ctx=256, n_threads=1, kv_type="bf16") as ctx:  # named: it stays
        assert ctx.capabilities.batch_invariant and not ctx.capabilities.cost_of_exact


@pytest.mark.parametrize("dear", [0, 2], ids=["generating", "reading"])
def test_exact_is_given_up_where_either_costs_too_much(
    dear: int, target: lb.Model, profile: Path
) -> None:
    of_auto(target)
    cost = list(EVEN)
    cost[dear] = 9e-6
    write_costs(profile, {"bf16, flash": cost}, EVEN)
    with Context(target, n_ctx=256, n_threads=1) as ctx:
        assert not ctx.capabilities.batch_invariant
        assert "as fast" in ctx.capabilities.cost_of_exact
        result = ctx.complete("Once upon a time", max_tokens=4, seed=1)
        assert not result.exact
    with Context(target, n_ctx=256, n_threads=1, batch_invariant=True) as ctx:
        result = ctx.complete("Once upon a time", max_tokens=4, seed=1)
        assert result.exact


def test_plain_attention_reads_prompts_in_smaller_pieces(target: lb.Model, profile: Path) -> None:
    of_auto(target)
    write_costs(profile, {"f16, plain": [1e-7] * 3}, EVEN)
    with Context(target, n_threads=1) as ctx:
        assert (ctx.params.n_ubatch, ctx.n_batch) == (128, 512)
    with Context(target, n_threads=1, n_ubatch=256) as ctx:
        assert ctx.params.n_ubatch == 256
    with Context(target, n_threads=1, n_seq_max=150, kv_unified=False, n_ctx=150 * 256) as ctx:
        assert ctx.params.n_ubatch == 150
    with Context(target, n_threads=1, batch_invariant=True) as ctx:
        assert ctx.params.n_ubatch == 512


@pytest.mark.parametrize(
    ("options", "factor", "flash"),
    [
        ({}, 0.5, False),
        ({"prefix_cache": True}, 0.5, True),
        ({"prefix_cache": True}, 0.1, False),
        ({"prefix_cache": True, "n_seq_max": 1}, 0.5, False),
        ({"prefix_cache": True, "kv_unified": False}, 0.5, False),
        ({"prefix_cache": True, "flash_attention": False}, 0.5, False),
    ],
)
def test_cells_of_other_texts_count_without_flash_attention(
    options: dict[str, Any], factor: float, flash: bool, target: lb.Model, profile: Path
) -> None:
    """Plain attention computes them, too. Flash attention skips them."""
    of_auto(target)
    write_costs(profile, {"f16, plain": [factor * cost for cost in EVEN]})
    with Context(target, n_threads=1, batch_invariant=False, **options) as ctx:
        assert (ctx.params.flash_attention is not False) == flash


def test_measuring_leaves_the_threads_that_were_given(target: lb.Model, profile: Path) -> None:
    for options in ({"batch_invariant": True}, {}):
        forget()
        profile.unlink(missing_ok=True)
        with Context(target, n_ctx=256, n_threads=2, n_threads_batch=3, **options) as ctx:  # type: ignore[arg-type]
            pointer = ctx.decoder.handle.ptr
            assert (C.llama_n_threads(pointer), C.llama_n_threads_batch(pointer)) == (2, 3)
