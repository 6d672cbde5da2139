"""The K/V type that "auto" takes where batches are not exact: the faster one, measured once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import toys

import llamabranch as lb
from llamabranch import Context
from llamabranch.context import kv_type as measured
from llamabranch.native import attention_seconds

SECTION = "K/V type"


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(path))
    forget()
    return path


def forget() -> None:
    """What this process knows; a new one reads the profile."""
    measured._seconds.cache_clear()


def of_auto(model: lb.Model) -> str:
    with Context(model, n_ctx=256, n_threads=1, batch_invariant=False) as ctx:
        return ctx.kv_type


def test_attention_of_every_type_and_shape_is_timed() -> None:
    for kv_type in ("f16", "bf16"):
        for size, n_heads in ((8, 1), (64, 3), (80, 2), (128, 8)):
            for n_rows in (1, 8, 64):
                seconds = attention_seconds(kv_type, size, n_heads, n_rows, 256, 1)
                assert 0 < seconds < math.inf


def test_faster_type_is_measured_once(
    target: lb.Model, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing without a profile or flash attention."""
    first = of_auto(target)
    (seconds,) = json.loads(profile.read_text())[SECTION].values()
    assert first == ("bf16" if seconds["bf16"] < 0.9 * seconds["f16"] else "f16")
    forget()
    monkeypatch.setattr(measured, "attention_seconds", None)  # nobody measures again
    assert of_auto(target) == first
    profile.unlink()
    forget()
    with Context(target, n_ctx=256, n_threads=1, flash_attention=False) as ctx:
        assert ctx.kv_type == "f16"
    monkeypatch.setenv("LLAMABRANCH_PROFILE", "0")
    assert of_auto(target) == "f16"
    assert not profile.exists()


@pytest.mark.parametrize(("bf16", "taken"), [(0.5, "bf16"), (0.95, "f16"), (2.0, "f16")])
def test_type_follows_the_measurement(
    bf16: float, taken: str, target: lb.Model, profile: Path, tmp_path: Path
) -> None:
    """Also where exactness was tried first, with bf16, and does not hold."""
    of_auto(target)
    weights = toys.write_toy(tmp_path / "toy.gguf", weights="f32", n_embd=256, seed=5)
    with lb.Model(weights) as other:
        of_auto(other)
        known = json.loads(profile.read_text())
        for seconds in known[SECTION].values():
            seconds["bf16"] = bf16 * seconds["f16"]
        profile.write_text(json.dumps(known))
        forget()
        assert of_auto(target) == of_auto(other) == taken
        with Context(other, n_ctx=256, n_threads=1) as ctx:
            exact = ctx.capabilities.batch_invariant
            assert ctx.kv_type == ("bf16" if exact else taken)
