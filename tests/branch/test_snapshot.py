"""Saved branches continue as if never saved; untrusted or damaged files are refused."""

from __future__ import annotations

import gc
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import toys
from programs import run_code
from rounding import rounding

import llamabranch as lb
from llamabranch.branch import Snapshot
from llamabranch.context.kv_file import HEADER
from llamabranch.errors import SnapshotError
from llamabranch.native.context import ContextHandle
from llamabranch.native.state_layout import StateLayout

PROMPT = "Once upon a time there was a little dog who"
NUMBERS = 'root ::= "[" [0-9]+ ("," [0-9]+)* "]"'
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 7},
    "penalties": {
        "temperature": 0.8, "seed": 7, "repeat_penalty": 1.3, "frequency_penalty": 0.2,
        "penalty_last_n": 32, "dry_multiplier": 0.8,
    },
    "steered": {"temperature": 1.0, "seed": 3, "logit_bias": {5: -np.inf, 300: 2.5}},
    "xtc": {"temperature": 0.8, "seed": 7, "xtc_probability": 0.5, "top_p": 1.0, "min_p": 0.0},
    "grammar": {"temperature": 1.0, "seed": 11, "grammar": NUMBERS},
}  # fmt: skip


def _started(ctx: lb.Context, n: int = 25, **settings: Any) -> lb.Branch:
    branch = lb.Branch.start(ctx, PROMPT, **settings)
    for _ in range(n):
        if branch.step().is_stop:
            break
    return branch


def _line(branch: lb.Branch, n: int = 25) -> list[lb.Produced]:
    return list(branch.generate(max_tokens=n))


@pytest.fixture
def small_ctx(small_toy: lb.Model) -> Iterator[lb.Context]:
    with lb.Context(
        small_toy, n_ctx=256, n_seq_max=4, n_batch=32, n_threads=1, exact=True
    ) as context:
        yield context
        gc.collect()
        context.audit()
        assert context.sequences.holders() == []


# -- the same text to the bit ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_loaded_branch_goes_on_to_the_bit(
    name: str, ctx: lb.Context, target: lb.Model, tmp_path: Path
) -> None:
    """Loading decodes nothing and restores everything."""
    n = 4 if name == "grammar" else 25  # the grammar is in the middle of a list
    branch, path = _started(ctx, n, **SETTINGS[name]), tmp_path / "x.branch"
    if name == "steered":
        branch.steer({17: 1.5})
        branch.reseed(1 << 62)
        list(branch.generate(max_tokens=3))
    produced = branch.produce()
    branch.save(path)
    assert f"{branch.position} tokens" in repr(Snapshot.read(path))
    with lb.Context(target, n_ctx=512, n_seq_max=3, n_threads=1, exact=True) as other:
        neighbour = lb.Branch.start(other, "The sun", seed=5)
        before = other.decoder.n_decodes
        loaded = lb.Branch.load(other, path)
        assert loaded.produce() == produced
        assert other.decoder.n_decodes == before
        assert loaded.seq_id != branch.seq_id
        for attribute in (
            "tokens", "text", "generated_tokens", "n_prompt", "position", "seed", "sampling", "grammar",
            "state", "finish_reason", "is_stop",
        ):  # fmt: skip
            assert getattr(loaded, attribute) == getattr(branch, attribute), attribute
        assert (loaded.parent, loaded.children) == (None, [])
        assert loaded.perplexity() == branch.perplexity()
        for left, right in zip(_line(branch), _line(loaded), strict=True):
            assert left == right  # with logprob and entropy
            neighbour.step()
        np.testing.assert_array_equal(branch.logits, loaded.logits)
        other.audit()


PROGRAM = """
    import sys, llamabranch as lb
    with lb.load(sys.argv[1], n_ctx=512, n_threads=1, exact=True) as ctx:
        b = lb.Branch.load(ctx, sys.argv[2])
        tokens = [t.token for t in b.generate(max_tokens=30)]
        print(tokens, b.logits.tobytes().hex(), b.perplexity().hex())
"""


def test_another_process_goes_on_to_the_bit(ctx: lb.Context, tmp_path: Path) -> None:
    branch = _started(ctx, **SETTINGS["penalties"])
    branch.save(tmp_path / "x.branch")
    output = run_code(PROGRAM, ctx.model.path, tmp_path / "x.branch").strip()
    tokens = [t.token for t in branch.generate(max_tokens=30)]
    assert output == f"{tokens} {branch.logits.tobytes().hex()} {branch.perplexity().hex()}"


def test_a_text_that_a_constraint_ended_is_kept(
    ctx: lb.Context, other_ctx: lb.Context, tmp_path: Path
) -> None:
    branch = _started(ctx, seed=1)
    list(branch.generate(constraint=lambda text: len(text) < 5))
    branch.save(tmp_path / "x.branch")
    assert lb.Branch.load(other_ctx, tmp_path / "x.branch").finish_reason == "constraint"


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("error", [SnapshotError("no K/V"), KeyboardInterrupt()], ids=repr)
def test_loading_that_is_refused_or_interrupted_leaves_nothing(
    fills: bool, error: BaseException, small_ctx: lb.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = lb.Branch.start(small_ctx, [2, 3, 4], seed=1).snapshot()
    set_state = ContextHandle.set_state

    def refuse(handle: ContextHandle, seq_id: int, state: np.ndarray) -> None:
        if fills:
            set_state(handle, seq_id, state)
        raise error

    monkeypatch.setattr(ContextHandle, "set_state", refuse)
    with pytest.raises(type(error)):
        lb.Branch.restore(small_ctx, snapshot)
    small_ctx.audit()
    assert small_ctx.usage().cells_used == 0
    assert small_ctx.sequences.holders() == []


# -- files -----------------------------------------------------------------------------------------


def test_a_file_keeps_its_mode(
    small_ctx: lb.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file is its owner's only, and its name may be long. A full disk leaves the old one."""
    branch = lb.Branch.start(small_ctx, [2, 3], seed=1)
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / ("x" * 255)
    for mode in (0o600, 0o644):
        branch.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(mode)
    branch.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    old = path.read_bytes()
    branch.step()

    def full(_: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(SnapshotError, match="No space left"):
            branch.save(path)
    assert path.read_bytes() == old and list(folder.iterdir()) == [path]
    with pytest.raises(SnapshotError, match=r"there is no folder \S*/missing(?!\S)"):
        branch.save(tmp_path / "missing" / "x.branch")
    for place in (folder, Path(os.devnull)):
        with pytest.raises(SnapshotError, match="written") as refused:
            branch.save(place)
        assert "regular" in str(refused.value) + str(refused.value.hint)


def test_what_is_no_file_is_refused(small_ctx: lb.Context, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("not a snapshot" * 20)
    (tmp_path / "empty").touch()
    toys.write_llama(tmp_path / "model.gguf")
    for name in ("missing", ".", "pipe", "text", "empty", "model.gguf", "a\0b"):
        with pytest.raises(SnapshotError):
            lb.Branch.load(small_ctx, tmp_path / name)


def test_another_model_or_setting_is_refused(tmp_path: Path) -> None:
    with (
        lb.Model(toys.write_llama(tmp_path / "a.gguf")) as model,
        lb.Model(toys.write_llama(tmp_path / "b.gguf", seed=5)) as other,
        lb.Context(model, n_ctx=256, n_threads=1, flash_attention=True) as ctx,
    ):
        branch = lb.Branch.start(ctx, [2, 3, 4], seed=1)
        branch.save(tmp_path / "x.branch")
        cases: dict[str, tuple[lb.Model, dict[str, Any]]] = {
            "another model: a.gguf, this context has b.gguf": (other, {}),
            "another kv_type": (model, {"kv_type": "q8_0"}),
            "another flash_attention": (model, {"flash_attention": False}),
            "another rope": (model, {"rope_freq_scale": 0.5}),
        }
        for reason, (its_model, options) in cases.items():
            with lb.Context(its_model, n_ctx=256, n_threads=1, **options) as wrong:
                with pytest.raises(SnapshotError, match=reason):
                    lb.Branch.load(wrong, tmp_path / "x.branch")
                with pytest.raises(SnapshotError, match=reason):
                    lb.Branch.restore(wrong, branch.snapshot())
                assert wrong.sequences.holders() == []


# -- fuzzing ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(small_ctx: lb.Context, tmp_path: Path) -> Path:
    """The file of a branch with every kind of state."""
    settings = lb.SamplingParams(seed=1, repeat_penalty=1.2, logit_bias={3: 0.5})
    grammar = "root ::= [a-n]*"
    with lb.Branch.start(small_ctx, [2, 3, 4, 5], sampling=settings, grammar=grammar) as branch:
        branch.generate(6).finish()
        branch.save(tmp_path / "x.branch")
    return tmp_path / "x.branch"


def _mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """Flip a bit, or replace some bytes by as many or others: insert, remove, cut, overwrite."""
    is_early = rng.random() < 0.4  # in header or metadata, a small part of the file
    at = int(rng.integers(min(700, len(data)) if is_early else len(data)))
    if rng.random() < 0.3:
        return data[:at] + bytes([data[at] ^ 1 << int(rng.integers(8))]) + data[at + 1 :]
    n_old, n_new = (int(rng.choice([0, 1, 4, 40, 200])) for _ in range(2))
    end = len(data) if rng.random() < 0.2 else at + n_old
    source = int(rng.integers(len(data)))
    new = (rng.bytes(n_new), b"\xff" * n_new, data[source : source + n_new])[rng.integers(3)]
    return data[:at] + new + data[end:]


def test_no_mutated_file_is_accepted(small_ctx: lb.Context, saved: Path) -> None:
    """SOAK=20 in the environment tries twenty times as many."""
    rng, data, n_tried = np.random.default_rng(20), saved.read_bytes(), 0
    while n_tried < 2000 * int(os.environ.get("SOAK", "1")):
        mutated = _mutated(data, rng)
        if mutated == data:
            continue
        n_tried += 1
        saved.write_bytes(mutated)
        with pytest.raises(SnapshotError):
            lb.Branch.load(small_ctx, saved)
    assert small_ctx.usage().cells_used == 0
    saved.write_bytes(data)
    with lb.Branch.load(small_ctx, saved) as branch:
        branch.step()


# Values that are refused, by the names that lead to them; "raw" is all of the metadata.
DEEP, RUNAWAY = "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, 'root ::= "a"{5,2}'
METADATA: dict[str, list[object]] = {
    "raw": [
        b'{"seed":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\x00\xff" * 50,
        b"[]",
        b'{"seed":' + b"9" * 100_000 + b"}",
        b"",
    ],
    "seed": ["1", 1.5, True],
    "n_prompt": [11, -1, 3],
    "pending": ["f0" * 4, "zz"],
    "finish_reason": ["because", ["stop"]],
    "grammar": [DEEP, RUNAWAY, "root ::= (", 'root ::= "zzz"', 5],
    "sampling": [[]],
    "sampling temperature": [-1, math.nan],
    "sampling cunning": [1],
    "sampling dry_sequence_breakers": [5, [5]],
    "sampling logit_bias": [[[16, 1.0]], [[-1, 1.0]], [[1, 2, 3]], {"1": 2}, [[1, math.inf]]],
    "origin": [None],
    "origin n_layer": [3],
    "origin n_vocab": [True],
    "origin fingerprint": ["0" * 64],
    "origin architecture": ["mamba"],
}


Forge = Callable[[Snapshot, dict[str, Any]], Snapshot]


def _meta(names: str, value: object) -> Forge:
    def change(snapshot: Snapshot, metadata: dict[str, Any]) -> Snapshot:
        *path, last = names.split()
        for name in path:
            metadata = metadata[name]
        metadata[last] = value
        return snapshot

    return change


def _array(name: str, change: Callable[[Any], object]) -> Forge:
    """Change an array, or return another one."""

    def changed(snapshot: Snapshot, _: object) -> Snapshot:
        array = getattr(snapshot, name).copy()
        other = change(array)
        arrays: dict[str, Any] = {name: array if other is None else other}
        return replace(snapshot, **arrays)

    return changed


def _put_end(n: int) -> Callable[[Any], object]:
    return lambda array: array[:n]


def _put(at: int, value: object, form: str = "") -> Callable[[Any], object]:
    return lambda array: (array.view(form) if form else array).__setitem__(at, value)


def _more(n: int) -> Callable[[Any], object]:
    return lambda array: np.append(array, np.zeros(n, array.dtype))


FORGERIES: dict[str, Forge] = {
    **{
        f"{names} {i}": _meta(names, value)
        for names, values in METADATA.items()
        for i, value in enumerate(values)
    },
    "token_negative": _array("tokens", _put(2, -1)),
    "token_n_vocab": _array("tokens", _put(2, 16)),
    "token_huge": _array("tokens", _put(2, 0x7FFFFFFF)),
    "logits_nan": _array("logits", _put(0, math.nan)),
    "logits_infinite": _array("logits", _put(0, math.inf)),
    "key_nan": _array("state", _put(78, 0x7FC0, "<u2")),
    "value_infinite": _array("state", _put(-1, 0xFF80, "<u2")),
    **{
        f"{name} {n:+}": _array(name, _more(n) if n > 0 else _put_end(n))
        for name, numbers in {
            "tokens": (-1, 1), "surprisals": (-1, 1, 1000), "logits": (-16, 1000),
            "state": (-10_000, -1, 1, 1 << 20),
        }.items()
        for n in numbers
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_file_is_refused(
    name: str, small_ctx: lb.Context, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sizes and checksums are right."""
    n_metadata = HEADER.unpack_from(saved.read_bytes())[2]
    metadata = json.loads(saved.read_bytes()[HEADER.size + 32 :][:n_metadata])
    whole = Snapshot.read(saved)

    def write(snapshot: Snapshot) -> None:
        raw = metadata["raw"] if "raw" in metadata else json.dumps(metadata).encode()
        with monkeypatch.context() as patch:
            text = SimpleNamespace(encode=lambda: raw)
            patch.setattr("llamabranch.branch.snapshot.json.dumps", lambda *_, **__: text)
            snapshot.write(saved)

    write(whole)
    lb.Branch.load(small_ctx, saved).prune()  # as it was
    write(FORGERIES[name](whole, metadata))
    monkeypatch.setattr(ContextHandle, "set_state", _never)
    with pytest.raises(SnapshotError) as caught:
        lb.Branch.load(small_ctx, saved)
    assert len(str(caught.value)) < 400
    assert small_ctx.sequences.holders() == []


def _never(*_: object) -> bool:
    raise AssertionError("llama.cpp was asked")


def test_any_number_of_a_state_that_is_forged_is_refused(
    small_ctx: lb.Context, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Magic, sequence, streams, n, then (position, 1, sequence) for each of the 10 cells, then
    transposed, layers, and the first tensor's type and row size. llama.cpp reads no sequence.
    """
    monkeypatch.setattr(ContextHandle, "set_state", _never)
    whole = Snapshot.read(saved)
    sequences = {1, *range(6, 34, 3)}
    for at in sorted({*range(39)} - sequences):
        for value in (0, 1, 2, 9, 10, 11, 32, 0x7FFFFFFF, 0xFFFFFFFF):
            forged = whole.state.copy()
            number = forged[4 * at : 4 * at + 4].view("<u4")
            if number[0] != value:
                number[0] = value
                with pytest.raises(SnapshotError):
                    lb.Branch.restore(small_ctx, replace(whole, state=forged))
    assert small_ctx.sequences.holders() == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mamba", "lfm2"])
def test_no_forged_state_harms_a_neighbour(architecture: str, tmp_path: Path) -> None:
    """Arbitrary K/V is refused, or its numbers are valid and affect only its own branch."""
    path = toys.write_toy(tmp_path / "toy.gguf", architecture)
    with (
        lb.Model(path) as model,
        lb.Context(model, n_ctx=256, n_seq_max=4, n_batch=32, n_threads=1) as ctx,
    ):
        neighbour = lb.Branch.start(ctx, [2, 3, 4], seed=1)
        expected = neighbour.fork().extend([5, 6], "all")
        snapshot = lb.Branch.start(ctx, [2, 4, 6, 8, 10, 12], seed=1).snapshot()
        rng = np.random.default_rng(8)
        refused = 0
        for _ in range(400):
            state = snapshot.state.copy()
            at = int(rng.integers(min(len(state), 200) if rng.random() < 0.5 else len(state)))
            state[at] ^= 1 << int(rng.integers(8))
            try:
                branch = lb.Branch.restore(ctx, replace(snapshot, state=state))
            except SnapshotError:
                refused += 1
            else:
                row = branch.extend([3])[0]
                # A recurrent state is not shared with other branches, and may overflow.
                assert np.isfinite(row).all() or architecture in ("mamba", "lfm2")
                branch.prune()
        assert refused > 50
        for row, again in zip(expected, neighbour.fork().extend([5, 6], "all"), strict=True):
            np.testing.assert_allclose(row, again, atol=rounding(ctx))
        ctx.audit()


# -- layouts no toy has ----------------------------------------------------------------------------


def _cells(n: int, extension: int, tensors: list[tuple[int, int]], n_layer: int) -> bytes:
    cells = b"".join(struct.pack("<iI", i, 1) + bytes(extension) + bytes(4) for i in range(n))
    blocks = b"".join(struct.pack("<iQ", kind, size) + bytes(n * size) for kind, size in tensors)
    return struct.pack("<II", 1, n) + cells + struct.pack("<II", 0, n_layer) + blocks


@pytest.mark.parametrize("extension", [0, 8, 12])
@pytest.mark.parametrize("has_values", [True, False])
def test_layout_with_cell_extensions_or_without_values(extension: int, has_values: bool) -> None:
    tensors = [(1, 16)] * (4 if has_values else 2)

    def state(n: int) -> np.ndarray:
        raw = struct.pack("<Ii", 77, 3) + _cells(n, extension, tensors, 2)
        return np.frombuffer(raw, np.uint8)

    layout = StateLayout.learn(state(2), 2)
    assert layout is not None
    assert layout.extension == extension
    assert len(layout.parts[0].tensors) == len(tensors)
    layout.check(state(9), 9)
    assert len(state(9)) <= layout.max_bytes(9)
    with pytest.raises(SnapshotError):
        layout.check(state(9), 8)


def test_state_of_an_unknown_layout_is_saved_and_loaded_only_if_trusted(
    small_ctx: lb.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert StateLayout.learn(np.zeros(100, np.uint8), 2) is None
    assert StateLayout.learn(np.zeros(0, np.uint8), 2) is None
    branch = lb.Branch.start(small_ctx, [2, 3], seed=1)
    monkeypatch.setattr(small_ctx.kv_cache, "state_layout", None)
    branch.save(tmp_path / "x.branch")
    with pytest.raises(lb.errors.UnsupportedError) as caught:
        lb.Branch.load(small_ctx, tmp_path / "x.branch")
    assert "trusted=True" in str(caught.value.hint)
    assert small_ctx.sequences.holders() == [branch]
    loaded = lb.Branch.load(small_ctx, tmp_path / "x.branch", trusted=True)
    np.testing.assert_array_equal(loaded.logits, branch.logits)
    assert [t.token for t in loaded.generate(8)] == [t.token for t in branch.generate(8)]
    small_ctx.audit()
