"""A context that does not fit into the machine is refused at once; one that fits is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import toys

import llamabranch as lb
from llamabranch import Context, Model
from llamabranch.context import room
from llamabranch.context.params import ContextParams
from llamabranch.errors import ConfigError

GIB = 1 << 30
ARCHITECTURES = ("llama", "gemma3", "lfm2", "glm4moe", "qwen35", "mimo2", "gemma4")


@pytest.fixture
def of_16_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated machine; no context is created on it."""

    def create(*_: object) -> object:
        raise AssertionError("llama.cpp was asked for it")

    monkeypatch.setattr(room, "memory_bytes", lambda: 16 * GIB)
    monkeypatch.setattr("llamabranch.context.opening.ContextHandle", create)


@pytest.mark.usefixtures("of_16_gib")
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *((architecture, {}) for architecture in ARCHITECTURES),
        *(("llama", options) for options in (
            {"n_ctx": 2**31 - 256}, {"n_seq_max": 1}, {"n_seq_max": 200, "kv_unified": False},
            {"kv_type": "q4_0"}, {"kv_type": "iq4_nl"}, {"prefix_cache": True},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_cells_that_do_not_fit_are_refused_at_once(
    architecture: str, options: dict[str, Any], target: lb.Model, tmp_path: Path
) -> None:
    path = target.path
    if architecture != "llama":
        path = toys.write_toy(tmp_path / "toy.gguf", architecture)
    message = r"needs at least [\d,.]+ GB .* 17\.2 GB"
    with Model(path) as model, pytest.raises(ConfigError, match=message) as raised:
        Context(model, n_threads=1, **{"n_ctx": 10**9, **options})
    smaller = re.search(r"n_ctx=([\d,]+) could fit", str(raised.value.hint))
    assert smaller is not None
    assert 0 < int(smaller[1].replace(",", "")) < 10**9


def taken(
    model: Model, kind: str, capfd: pytest.CaptureFixture[str], **options: Any
) -> tuple[float, int]:
    """Return the bytes that llama.cpp takes for cells (KV) or states (RS), and those of a state."""
    lb.set_log_level("info")
    try:
        capfd.readouterr()
        with Context(model, n_threads=1, exact=False, **options) as ctx:
            state_bytes = ctx.capabilities.state_bytes
    finally:
        lb.set_log_level("none")
    sizes = re.findall(rf"{kind} buffer size = +([\d.]+) MiB", capfd.readouterr().err)
    assert sizes
    return sum(map(float, sizes)) * 2**20, state_bytes


@pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "f32"])
def test_least_is_not_more_than_llama_cpp_takes(
    architecture: str, kv_type: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"n_ctx": 65536, "kv_type": kv_type}
    with Model(toys.write_toy(tmp_path / "toy.gguf", architecture)) as model:
        least = room.cell_bytes(model, ContextParams(**options).resolve(model))
        most = taken(model, "KV", capfd, **options)[0] + 65536 * room.BYTES_OF_CELL
    assert least <= most + 2**14
    if architecture == "llama":
        assert least == pytest.approx(most, rel=0.01)


@pytest.mark.filterwarnings("ignore::llamabranch.errors.ContextLengthWarning")
def test_what_fits_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toys.write_llama(tmp_path / "toy.gguf")
    with Model(path) as model:
        least = room.cell_bytes(model, ContextParams(n_ctx=4096).resolve(model))
        monkeypatch.setattr(room, "memory_bytes", lambda: least)
        Context(model, n_ctx=4096, n_threads=1).close()
        with pytest.raises(ConfigError, match="needs at least"):
            Context(model, n_ctx=4352, n_threads=1)
        monkeypatch.setattr(room, "memory_bytes", lambda: None)
        Context(model, n_ctx=4352, n_threads=1).close()
    path = toys.write_mamba(tmp_path / "mamba.gguf")
    with Model(path) as model:  # its memory does not depend on n_ctx
        least = room.least_state_bytes(model, ContextParams(n_ctx=256).resolve(model))
        monkeypatch.setattr(room, "memory_bytes", lambda: least)
        Context(model, n_ctx=4096, n_threads=1).close()


@pytest.mark.usefixtures("of_16_gib")
@pytest.mark.parametrize("architecture", ["qwen35", "lfm2", "nemotron_h", "mamba"])
@pytest.mark.parametrize(
    "options", [{"n_seq_max": 200}, {"n_seq_max": 200, "n_rs_seq": 8}, {"n_rs_seq": 64}], ids=str
)
def test_states_that_do_not_fit_are_refused_with_their_size(
    architecture: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toys.write_toy(tmp_path / "toy.gguf", architecture)
    with Model(path) as model:
        params = ContextParams(n_ctx=256, n_threads=1, **options).resolve(model)
        states = room.least_state_bytes(model, params)
        n_seq_max, n_rs_seq = params.n_seq_max or 0, options.get("n_rs_seq", 0)
        assert states == n_seq_max * (1 + n_rs_seq) * model.state_numbers * 4 > 0
        # Half of the states fit.
        limit = room.cell_bytes(model, params) + states // 2
        monkeypatch.setattr(room, "memory_bytes", lambda: limit)
        monkeypatch.setattr(room, "BYTES_OF_CELL", 0)
        message = rf"n_seq_max={n_seq_max} with n_rs_seq={n_rs_seq} needs .* MB for the states"
        with pytest.raises(ConfigError, match=message) as raised:
            Context(model, n_ctx=256, n_threads=1, **options)
        fits = re.search(r"at most n_seq_max=(\d+) could fit", str(raised.value.hint))
        assert fits is not None
        assert n_seq_max // 2 <= int(fits[1]) < n_seq_max
        assert ("n_rs_seq=0" in str(raised.value.hint)) == bool(n_rs_seq)


@pytest.mark.parametrize("architecture", ["qwen35", "lfm2", "nemotron_h", "mamba"])
@pytest.mark.parametrize("n_rs_seq", [0, 7])
def test_states_take_what_the_header_says(
    architecture: str, n_rs_seq: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 150, "n_rs_seq": n_rs_seq}
    with Model(toys.write_toy(tmp_path / "toy.gguf", architecture, n_layer=6)) as model:
        least = room.least_state_bytes(model, ContextParams(**options).resolve(model))
        n_bytes, state_bytes = taken(model, "RS", capfd, **options)
        assert state_bytes >= model.state_numbers * 4
    if architecture == "mamba" and n_rs_seq:  # llama.cpp keeps no other states of it
        least //= 1 + n_rs_seq
    assert least == pytest.approx(n_bytes, rel=0.02, abs=2**13)


def test_memory_is_that_of_the_machine() -> None:
    assert (room.memory_bytes() or 0) > 2**28
