"""How many threads a context computes with by default, and the warning when they collapse."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys

import llamabranch as lb
from llamabranch import Context
from llamabranch.context.threads import ThreadTuner, _best, _Timing, candidates
from llamabranch.native import available_cores
from llamabranch.profile import MAX_ENTRIES, profile_path, read_entry, write_entries

CORES = available_cores()
several_cores = pytest.mark.skipif(CORES < 2, reason="needs two cores")


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of this test's own; measuring is on."""
    path = tmp_path / "cache" / "profile.json"
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(path))
    return path


def write_entry(section: str, key: str, entry: dict[str, object]) -> None:
    write_entries([(section, key, entry)])


def kept(path: Path) -> dict[str, Any]:
    """Return the entries about threads."""
    sections = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return dict(sections.get("threads", {}))


def keep(model: lb.Model, **entry: object) -> None:
    """Write an entry for ``model``, as if it had been measured on this machine."""
    key = ThreadTuner(model, lb.ContextParams(n_threads=1))._key()
    assert key is not None
    write_entry("threads", key, entry)


def is_chosen(ctx: Context) -> bool:
    """Return whether the numbers are among those that are measured."""
    return {ctx.n_threads, ctx.n_threads_batch} <= set(candidates(CORES))


# -- logits ----------------------------------------------------------------------------------------


def _rows(model: lb.Model, n: int, n_batch: int | None, options: dict[str, Any]) -> Any:
    """Return rows of a prefill, of single tokens and of a small batch, with ``n`` threads."""
    tokens = [(7 * i + 3) % model.n_vocab for i in range(600)]
    numbers: dict[str, Any] = {"n_threads": n, "n_threads_batch": n_batch}
    with Context(model, n_ctx=1024, n_seq_max=2, **numbers, **options) as ctx:
        ctx.decode(tokens, 0)
        rows = [ctx.logits()]
        for position, token in enumerate(tokens[:4], start=600):
            ctx.decode([token], position)
            rows.append(ctx.logits())
        ctx.decode(tokens[:3], 604, logits="all")
        return np.array([*rows, *(ctx.logits(i) for i in range(3))])


NO_FLASH = {"kv_type": "f16", "flash_attention": False}
CASES: list[tuple[str, dict[str, Any], bool]] = [
    # Architecture, options, and whether only the number for batches differs.
    ("", {}, False), ("", {"kv_type": "q8_0"}, False), ("", NO_FLASH, False),
    ("", {"kv_type": "f16"}, True), ("", {"kv_type": "f32"}, True),
    ("llama", {}, False), ("gemma3", {}, False), ("mamba", {}, False), ("lfm2", {}, False),
    ("rwkv7", {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "options", "for_batches"), CASES)
def test_logits_are_equal_to_the_bit_with_one_thread_and_with_two(
    architecture: str, options: dict[str, Any], for_batches: bool, target: lb.Model, tmp_path: Path
) -> None:
    path = target.path
    if architecture:
        path = toys.write_toy(tmp_path / "toy.gguf", architecture, vocab="bytes")
    with lb.Model(path) as model:
        numbers = ((1, 1), (1, 2)) if for_batches else ((1, None), (2, None))
        single, double = (_rows(model, n, n_batch, options) for n, n_batch in numbers)
        assert np.array_equal(single, double)


@several_cores
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_number_is_not_measured_where_it_would_change_logits(
    kv_type: str, target: lb.Model, profile: Path
) -> None:
    # 512 cells of flash attention over f16 or f32: a part of the sum for each thread.
    keep(target, n_threads=1, n_threads_batch=1, step_ms={"1": 1.0}, batch_ms={"1": 1.0})
    with Context(target, n_ctx=512, kv_type=kv_type) as ctx:
        assert ctx.n_threads == CORES
    for options in ({"n_ctx": 256}, {"flash_attention": False}):
        with Context(target, **{"n_ctx": 512, **options}, kv_type=kv_type) as ctx:  # type: ignore[arg-type]
            assert ctx.n_threads == 1


# -- the choice ------------------------------------------------------------------------------------


def test_a_given_number_is_obeyed_and_nothing_is_measured(
    target: lb.Model, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for numbers in ((1, 1), (2, 2), (3, 3), (1, 2)):
        with Context(target, n_ctx=256, n_threads=numbers[0], n_threads_batch=numbers[1]) as ctx:
            assert (ctx.n_threads, ctx.n_threads_batch) == numbers
    with Context(target, n_ctx=256, n_threads=2) as ctx:
        assert ctx.n_threads_batch == 2
    assert not kept(profile)
    monkeypatch.setenv("LLAMABRANCH_PROFILE", "0")  # all cores, and no file
    assert profile_path() is None
    with Context(target, n_ctx=256) as ctx:
        assert ctx.n_threads == CORES == len(os.sched_getaffinity(0))


def test_measuring_leaves_a_context_as_if_nothing_had_been(
    target: lb.Model, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(**options: Any) -> tuple[Any, ...]:
        with Context(target, n_ctx=256, n_seq_max=3, **options) as ctx:
            assert is_chosen(ctx) or options
            ctx.audit()
            before = ctx.usage()
            ctx.decode([5, 6, 7], 0)
            result = (before, ctx.sample(lb.SamplingParams(temperature=1.0, seed=3)), ctx.usage())
            return (*result, ctx.logits().tobytes())

    assert drawn() == drawn(n_threads=1)


def test_measuring_takes_any_batch_and_kind_of_memory(tmp_path: Path, profile: Path) -> None:
    for architecture in ("llama", "gemma3", "mamba", "lfm2", "rwkv7"):
        path = toys.write_toy(tmp_path / f"{architecture}.gguf", architecture, vocab="small")
        with lb.Model(path) as model:
            for options in ({"n_batch": 1, "n_seq_max": 1}, {"n_batch": 3}, {"swa_full": False}):
                with Context(model, n_ctx=256, **{"n_seq_max": 2, **options}) as ctx:  # type: ignore[arg-type]
                    ctx.decode([2, 3, 4, 5], 0)
                    ctx.audit()


def test_where_no_decode_ends_in_time_busy_cores_are_left_to_others() -> None:
    def chosen(*numbers: int, idle: bool) -> int:
        return _best({n: _Timing(math.inf, idle or n == 1) for n in numbers})

    assert [candidates(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 3], [1, 4, 8]]
    assert [chosen(1, idle=idle) for idle in (True, False)] == [1, 1]
    assert [chosen(1, 2, idle=idle) for idle in (True, False)] == [2, 1]
    assert [chosen(1, 8, 16, idle=idle) for idle in (True, False)] == [16, 8]


# -- what is kept ----------------------------------------------------------------------------------


@several_cores
def test_kept_numbers_are_used(target: lb.Model, profile: Path) -> None:
    # Stored times so long that no decode is three times slower.
    forever = {"1": math.inf, str(CORES): math.inf}
    for single, many in ((1, 1), (1, CORES), (CORES, 1), (CORES, CORES)):
        times = {"step_ms": forever, "batch_ms": forever}
        keep(target, n_threads=single, n_threads_batch=many, **times)
        before = profile.read_bytes()
        with Context(target, n_ctx=256) as ctx:
            assert (ctx.n_threads, ctx.n_threads_batch) == (single, many)
            ctx.audit()
        assert profile.read_bytes() == before


ENTRIES: list[dict[str, object]] = [
    {}, {"n_threads": 0, "n_threads_batch": 1},
    {"n_threads": 10_000, "n_threads_batch": 1, "step_ms": {"10000": 1.0}, "batch_ms": {"1": 1.0}},
    {"n_threads": "1", "n_threads_batch": None}, {"n_threads": True, "n_threads_batch": True},
    {"n_threads": 1, "n_threads_batch": 1, "step_ms": [], "batch_ms": {"1": "fast"}},
    {"n_threads": 1, "n_threads_batch": 1, "batch_ms": {"1": -1}},
]  # fmt: skip
DAMAGED = [
    "", "{", "[]", "null", '{"version": "1"}', '{"version": 1, "threads": 3}', "\x00\xff",
    "[" * 10**5,
]  # fmt: skip


@pytest.mark.parametrize("wrong", [*ENTRIES, *DAMAGED], ids=lambda wrong: repr(wrong)[:20])
def test_what_is_invalid_is_measured_again_and_replaced(
    wrong: dict[str, object] | str, target: lb.Model, profile: Path
) -> None:
    """An entry, or the whole file."""
    profile.parent.mkdir()
    if isinstance(wrong, str):
        profile.write_text(wrong, encoding="latin-1")
    else:
        keep(target, **wrong)
    assert read_entry("threads", "key") is None
    with Context(target, n_ctx=256) as ctx:
        assert is_chosen(ctx)
    write_entry("threads", "key", {"n_threads": 1})
    assert read_entry("threads", "key") == {"n_threads": 1}


def test_other_sections_and_what_is_beside_the_file_are_left_alone(
    profile: Path, tmp_path: Path
) -> None:
    """A file of a later version stays, too."""
    profile.parent.mkdir()
    profile.symlink_to(tmp_path / "elsewhere.json")
    write_entry("costs", "pair", {"v": [1.0, 1.5]})
    write_entry("threads", "key", {"n_threads": 1})
    assert read_entry("costs", "pair") == {"v": [1.0, 1.5]}
    assert [path.name for path in profile.parent.iterdir()] == ["profile.json"]
    assert profile.is_symlink()  # a link to the file stays one
    later = '{"version": 2, "threads": {"key": {}}}'
    profile.write_text(later, encoding="utf-8")
    write_entry("threads", "key", {"n_threads": 1})
    assert read_entry("threads", "key") is None
    assert profile.read_text(encoding="utf-8") == later


def test_a_section_keeps_its_youngest_entries(profile: Path) -> None:
    for i in range(MAX_ENTRIES + 5):
        write_entry("threads", str(i), {"n_threads": i})
    assert len(kept(profile)) == MAX_ENTRIES
    assert read_entry("threads", "4") is None
    assert read_entry("threads", str(MAX_ENTRIES + 4)) == {"n_threads": MAX_ENTRIES + 4}


def test_a_place_that_cannot_be_written_is_no_error(
    target: lb.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("here a folder is expected", encoding="utf-8")
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(tmp_path / "file" / "profile.json"))
    write_entry("threads", "key", {})
    with Context(target, n_ctx=256) as ctx:
        assert is_chosen(ctx)


def test_default_place_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLAMABRANCH_PROFILE")
    if sys.platform == "win32":
        pytest.skip("XDG is not for Windows")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "llamabranch" / "profile.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path() == tmp_path / ".cache" / "llamabranch" / "profile.json"
