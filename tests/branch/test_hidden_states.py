"""Hidden states of a branch equal llama.cpp's own, also after forks, rewinds and batches."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import together
import toys
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.errors import (
    SequencesExhaustedError,
    UnsupportedError,
)

TEXT = "Once upon a time there was a king."
HEAD = Path(lb.__file__).parent / "data" / "tale-eagle-q8_0.gguf"


def of_llama_cpp(model: lb.Model, tokens: list[int]) -> dict[int, Any]:
    """Return the embeddings and the output of each layer of a plain llama.cpp context."""
    by_layer: dict[int, Any] = {}
    name, data = C._lib.ggml_get_name, C._lib.ggml_get_data
    name.restype, data.restype = ctypes.c_char_p, ctypes.c_void_p
    name.argtypes = data.argtypes = [ctypes.c_void_p]
    size = len(tokens), model.n_embd

    def rows(address: int) -> Any:
        raw = (ctypes.c_float * (size[0] * size[1])).from_address(address)
        return np.array(raw, dtype=np.float32).reshape(size)

    @C.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
    def see(tensor: int, asks: bool, _: object) -> bool:
        called = name(tensor).decode()
        is_output = called.startswith("l_out-")
        if is_output and not asks:
            by_layer[int(called.removeprefix("l_out-")) + 1] = rows(data(tensor))
        return is_output or not asks

    params = C.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    params.embeddings, params.cb_eval = True, see
    ctx = C.llama_init_from_model(model.handle.ptr, params)
    try:
        token_array = (C.llama_token * len(tokens))(*tokens)
        assert C.llama_decode(ctx, C.llama_batch_get_one(token_array, len(tokens))) == 0
        by_layer[model.n_layer] = rows(
            ctypes.cast(C.llama_get_embeddings(ctx), ctypes.c_void_p).value or 0
        )
    finally:
        C.llama_free(ctx)
    return by_layer


def test_states_are_llama_cpps(target: lb.Model, toy: lb.Model) -> None:
    for model in (target, toy):
        with Context(model, n_ctx=256, n_threads=1, kv_type="f16", exact=False) as ctx:
            branch = Branch.start(ctx, TEXT)
            expected = of_llama_cpp(model, branch.tokens)
            assert set(expected) == set(range(1, model.n_layer + 1))
            for layer, rows in expected.items():
                states = branch.hidden_states(layer)
                assert (
                    states.shape == (branch.position, model.n_embd) and states.dtype == np.float32
                )
                np.testing.assert_allclose(states, rows, rtol=1e-3, atol=2e-2 * np.abs(rows).mean())
                np.testing.assert_array_equal(branch.hidden_states(layer, 3), states[3:])
            last = branch.hidden_state()
            np.testing.assert_array_equal(last, branch.hidden_state(model.n_layer))
            np.testing.assert_array_equal(
                branch.hidden_state(-2), branch.hidden_state(model.n_layer - 1)
            )
            last[:] = 0  # a copy
            assert branch.hidden_state().any()
            ctx.audit()


@pytest.mark.parametrize("layer", [0, 2, -1])
def test_states_follow_forks_rewinds_and_batches(ctx: Context, layer: int) -> None:
    def alone(tokens: list[int]) -> Any:
        with Context(ctx.model, n_ctx=256, n_threads=1, exact=True) as fresh:
            return Branch.start(fresh, tokens).hidden_states(layer)

    root = Branch.start(ctx, TEXT, temperature=0.8, seed=1)
    n, expected = root.position, root.produce()
    first = root.hidden_states(layer)
    assert root.produce() == expected and ctx.n_seq_free == ctx.n_seq_max - 1
    children = root.fork_many(3)
    together.step(ctx, children)
    for child in children:
        child.step()
        states = child.hidden_states(layer)
        np.testing.assert_array_equal(states[:n], first)
        np.testing.assert_array_equal(states, alone(child.tokens))
        np.testing.assert_array_equal(child.hidden_state(layer), states[-1])
        child.rewind(n)
        np.testing.assert_array_equal(child.hidden_states(layer), first)
        child.append(" The queen")
        np.testing.assert_array_equal(child.hidden_states(layer), alone(child.tokens))
    drafted = lb.Speculator(ctx, lb.SuffixDrafter(), lb.SpeculativeConfig(draft_k=3))
    drafted.generate(root, max_tokens=16).finish()
    np.testing.assert_array_equal(root.hidden_states(layer), alone(root.tokens))
    ctx.audit()


def test_what_memory_or_sequences_do_not_allow_is_refused(ctx: Context, tmp_path: Path) -> None:
    with Context(ctx.model, n_ctx=256, n_seq_max=1, n_threads=1, exact=True) as single:
        alone = Branch.start(single, TEXT)
        for layer in (1, -1):
            with pytest.raises(SequencesExhaustedError):
                alone.hidden_state(layer)
        assert alone.step() and alone.hidden_state(1).any()  # kept with the token
    for kind in ("mamba", "gemma3"):
        path = toys.write_toy(tmp_path / f"{kind}.gguf", kind, vocab="bytes")
        with lb.load(path, n_ctx=256, n_threads=1) as other:
            branch = Branch.start(other, "abc")
            assert branch.hidden_states().shape == (branch.position, other.model.n_embd)
            with pytest.raises(UnsupportedError, match=kind) as caught:
                branch.hidden_state(1)
            assert "layer -1" in str(caught.value.hint)
            assert branch.produce()


def test_a_head_and_a_reader(target: lb.Model) -> None:
    with Context(target, n_ctx=256, n_threads=1, exact=True) as ctx:
        branch = Branch.start(ctx, TEXT, temperature=0.0)
        layers = {layer: branch.hidden_states(layer) for layer in range(target.n_layer + 1)}
        with Context(lb.Model(HEAD), owns_model=True, target=ctx) as head:
            read, other = head.model.target_layers[0], None
            for layer, rows in layers.items():
                if layer in head.model.target_layers or layer == target.n_layer:
                    np.testing.assert_array_equal(branch.hidden_states(layer), rows)
                else:
                    other = layer
                    with pytest.raises(UnsupportedError, match="head"):
                        branch.hidden_states(layer)
            speculator = lb.Speculator(ctx, lb.EagleDrafter(head), lb.SpeculativeConfig(draft_k=3))
            with branch.fork() as fork:
                speculator.generate(fork, max_tokens=12).finish()
                assert fork.hidden_states(read).shape[0] == fork.position
        assert other is not None
        np.testing.assert_array_equal(branch.hidden_states(other), layers[other])
        ctx.audit()
