"""A GGUF file of any content gives a typed error with the reason, or a model that runs; never a crash.

The trials run in another process (this file as a program), so that a crash fails the test.
``tests/crash`` has the single files that are known to crash a process that does not check them.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import toys
from commands import said_by
from programs import run_code, run_python

import llamabranch as lb
from llamabranch.errors import LlamaBranchError, ModelLoadError
from llamabranch.native.gguf_check import check_header, find_fatal
from llamabranch.native.gguf_reader import read_header

TRIAL_SECONDS = 20  # an endless loop is a failure, too
MEMORY_BYTES = 4 << 30
RAN = "ran"
TARGET = lb.hub.resolve("tale-target")

# A trial: ["cut", length], ["flip", position, bit], ["noise", seed, length], or several flips.
Trial = list[object]


# -- the program -----------------------------------------------------------------------------------


def edited(data: bytes, trial: Sequence[object]) -> bytes:
    kind, *numbers = trial
    values = [int(str(number)) for number in numbers]
    if kind == "cut":
        return data[: values[0]]
    if kind == "noise":
        return np.random.default_rng(values[0]).bytes(values[1])
    if kind == "gguf":  # noise that begins like a GGUF with some values and tensors
        head = b"GGUF" + bytes([3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0])
        return head + np.random.default_rng(values[0]).bytes(values[1])
    changed = bytearray(data)
    for at, bit in zip(values[::2], values[1::2], strict=True):
        changed[at] ^= 1 << bit
    return bytes(changed)


def outcome(path: Path) -> str:
    """Load a file and use it; return "ran", or the error."""
    try:
        with lb.Model(path) as model, lb.Context(model, n_ctx=256, n_threads=1) as ctx:
            branch = lb.Branch.start(ctx, [t % model.n_vocab for t in (2, 3, 4)], seed=1)
            for _ in range(2):
                branch.step()
            assert isinstance(branch.text, str)
    except LlamaBranchError as error:
        return f"{type(error).__name__}: {error}"
    return RAN


def program() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    base, trials = json.load(sys.stdin)
    data = Path(base).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        for number, trial in enumerate(trials):
            signal.alarm(TRIAL_SECONDS)
            path = Path(folder, f"{number}.gguf")
            path.write_bytes(edited(data, trial))
            print(json.dumps(outcome(path)), flush=True)
            path.unlink()


# -- the tests -------------------------------------------------------------------------------------


def outcomes(base: Path, trials: list[Trial]) -> list[str]:
    """Return the outcome of each trial; fail with the trials that crashed their process."""
    texts: list[str] = []
    dead: list[str] = []
    while len(texts) < len(trials):
        done = run_python(__file__, stdin=json.dumps([str(base), trials[len(texts) :]]), code=None)
        texts += [json.loads(line) for line in done.stdout.splitlines()]
        if len(texts) < len(trials):
            last = (done.stderr.strip().splitlines() or ["no output"])[-1][-200:]
            dead.append(f"{trials[len(texts)]} ended with {done.returncode}: {last}")
            texts.append("dead")
    assert not dead, "\n".join(dead)
    return texts


@pytest.fixture(scope="module")
def header_bytes() -> int:
    """The length of the bundled target's header."""
    return int(gguf.GGUFReader(TARGET).data_offset)


def test_file_cut_anywhere_is_refused_with_the_reason(header_bytes: int) -> None:
    """At every 4 KiB of the header, and in the weights."""
    size = TARGET.stat().st_size
    in_header = [0, 1, 4, 23, *range(4096, header_bytes, 4096)]
    in_data = [header_bytes, header_bytes + 1, size // 3, size // 2, size - 4096, size - 1]
    texts = outcomes(TARGET, [["cut", end] for end in in_header + in_data])
    assert texts[0].endswith("the file is empty")
    for text in texts[1 : len(in_header)]:
        assert text.startswith("ModelLoadError: cannot load ")
        assert (
            "in the middle of its header" in text or "not a GGUF" in text or "header says" in text
        )
    for text in texts[len(in_header) :]:
        assert "the file is truncated: its last" in text, text


def test_noise_is_refused() -> None:
    sizes = (1, 24, 100, 5000, 200_000)
    trials: list[Trial] = [[kind, i, n] for kind in ("noise", "gguf") for i, n in enumerate(sizes)]
    assert all(text.startswith("ModelLoadError: ") for text in outcomes(TARGET, trials))


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_in_the_header_kill_no_process(seed: int, header_bytes: int) -> None:
    """One or three bits are flipped, half of them in the first 2 KiB, where the numbers are."""
    rng = np.random.default_rng(seed)
    trials: list[Trial] = []
    for _ in range(80):
        end = header_bytes if rng.random() < 0.5 else 2048
        trial: Trial = ["flip"]
        for _ in range(int(rng.choice([1, 1, 3]))):
            trial += [int(rng.integers(end)), int(rng.integers(8))]
        trials.append(trial)
    texts = outcomes(TARGET, trials)
    # A flipped bit in the text of a token is harmless, one in a size is not.
    assert 5 < texts.count(RAN) < 75
    assert all(text == RAN or text.split(":")[0].endswith("Error") for text in texts)


def test_model_without_an_eog_token_generates_up_to_its_limit(tmp_path: Path) -> None:
    """Only ``max_tokens`` ends its texts. (With 12 tokens or more llama.cpp would use id 11 as EOS.)"""
    tokens = tuple("@ABCDEFGHIJ")
    metadata: dict[str, toys.Value | None] = {
        "tokenizer.ggml.eos_token_id": None,
        "tokenizer.ggml.token_type": [int(gguf.TokenType.CONTROL)]
        + [int(gguf.TokenType.NORMAL)] * (len(tokens) - 1),
    }
    path = toys.write_llama(
        tmp_path / "endless.gguf", vocab=toys.Vocabulary(tokens), metadata=metadata
    )
    with lb.Model(path) as model, lb.Context(model, n_ctx=256, n_threads=1) as ctx:
        assert model.eog_tokens == frozenset()
        branch = lb.Branch.start(ctx, "ABC", temperature=1.0, seed=1)
        assert len(list(branch.generate(100))) == 100
        assert branch.finish_reason == "length"
        (result,) = lb.Engine(ctx).generate([lb.Request("ABC", max_tokens=50)])
        assert (len(result.tokens), result.finish_reason) == (50, "length")


# -- other files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GG", b"\0" * 999, bytes(range(200, 256)) * 9, b"FUGG" + bytes(100), b"lmgg" + bytes(100),
        b"version https://git-lfs.github.com/spec/v1\n", b"<!DOCTYPE html>\n<html>", b"PK\x03\x04",
    ],
)  # fmt: skip
def test_file_that_is_no_gguf_is_refused_with_its_first_bytes(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    for vocab_only in (False, True):
        with pytest.raises(ModelLoadError, match="it is not a GGUF file") as raised:
            lb.Model(path, vocab_only=vocab_only)
        assert f"(it begins with {data[:16]!r})" in str(raised.value)


@pytest.mark.parametrize("architecture", ["llama", "", "clip", "controlvector"])
def test_gguf_that_is_no_model_is_refused(architecture: str, tmp_path: Path) -> None:
    """An adapter, an importance matrix, a projector, a control vector."""
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if not architecture:  # the writer puts one into every file
        writer.kv_data[0].clear()
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
    toys.finish(writer, path)
    for vocab_only in (False, True):
        with pytest.raises(ModelLoadError):
            lb.Model(path, vocab_only=vocab_only)
    assert said_by("models", "show", path)


def test_vocabulary_without_weights_is_named(tmp_path: Path) -> None:
    path = toys.write_llama(tmp_path / "vocab.gguf", vocab="bytes", drop=("*",))
    with pytest.raises(ModelLoadError, match="it has only a vocabulary, no weights") as raised:
        lb.load(path)
    assert "vocab_only=True" in str(raised.value.hint)
    with lb.Model(path, vocab_only=True) as model:
        assert model.detokenize(model.tokenize("ab")).strip() == "ab"


# -- the table of fatal files ------------------------------------------------------------------------

# Of `toys.BROKEN`; at each llama.cpp ended the process by SIGABRT, seen with llama-cpp-python 0.3.36: in
# which phase, and what it printed: the condition of the failed assertion, or its message.
FATAL = {
    "duplicate_tokens": ("load", "id_to_token.size() == token_to_id.size()"),
    "zero_blocks": ("load", "hparams.n_layer_all > 0"),
    "nextn_layers": ("load", "hparams.n_layer_nextn <= hparams.n_layer_all"),
    "rwkv_head_size": ("context", "ggml_nelements(a) == ne0*ne1*ne2"),
    "nan_epsilon": ("decode", "eps >= 0.0f"),
    "many_experts": ("load", "hparams.n_expert <= LLAMA_MAX_EXPERTS"),
    "experts_unused": ("load", "n_expert_used_max > 0"),
    "many_groups": ("load", "hparams.n_expert_groups < hparams.n_expert"),
    "uneven_groups": ("load", "hparams.n_expert % hparams.n_expert_groups == 0"),
    "rope_scaling": (
        "load", "hparams.rope_scaling_type_train != LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED",
    ),
    "huge_head_count_kv": ("context", "ggml_nelements(a) == ne0*ne1*ne2"),
    "unequal_heads": ("context", "n_embd_head == hparams.n_embd_head_k()"),
    "odd_rotation": ("decode", "n_dims % 2 == 0"),
    "lfm2_one_kind_of_layer": ("decode", "GGML_ASSERT(buffer)"),
    "gemma3_pattern_1": ("context", "hparams.is_swa_any()"),
    "half_precision_norms": ("decode", "binary_op: unsupported types"),
}  # fmt: skip


@pytest.mark.parametrize("name", FATAL)
def test_file_of_each_fatal_case_is_refused_for_it(name: str, tmp_path: Path) -> None:
    path = toys.write_broken(tmp_path / "fatal.gguf", name)
    fault = find_fatal(read_header(path))
    assert fault is not None and fault[0] == name
    in_vocabulary = name == "duplicate_tokens"
    for vocab_only in (False, True) if in_vocabulary else (False,):
        with pytest.raises(ModelLoadError) as raised:
            check_header(path, vocab_only=vocab_only)
        assert raised.value.message == f"cannot load {path}: {fault[1]}"
        assert raised.value.hint == ("convert the model again" if in_vocabulary else None)
    if not in_vocabulary:
        check_header(path, vocab_only=True)


# -- alignment ---------------------------------------------------------------------------------------

LOADED = """
    import sys
    import llamabranch as lb

    for path in sys.argv[1:]:
        with lb.Model(path) as model, lb.Context(model, n_ctx=256, n_threads=1) as ctx:
            branch = lb.Branch.start(ctx, "abc", temperature=1.0, seed=1)
            print("".join(str(t.token) for t in branch.generate(12)), flush=True)
"""


@pytest.mark.parametrize("n_parts", [1, 2])
def test_model_of_any_alignment_is_loaded(tmp_path: Path, n_parts: int) -> None:
    """llama.cpp ends the process at one whose weights it maps beside multiples of 32 bytes."""
    paths = [toys.write_llama(tmp_path / "plain.gguf", weights="f32")]
    for alignment in (1, 2, 4, 8, 16, 32, 64, 4096):
        for n_bytes in (0, 16):  # one of them puts the weights of alignment 16 elsewhere
            path = tmp_path / f"{alignment}-{n_bytes}.gguf"
            paths += [
                toys.write_aligned(paths[0], path, alignment, n_bytes=n_bytes, n_parts=n_parts)
            ]
    mappable = [read_header(path).is_mappable for path in paths]
    assert mappable.count(False) >= 4 and all(mappable[-6:])
    first, *others = run_code(LOADED, *paths).split()
    assert others == [first] * 16


@pytest.mark.parametrize(
    "kind", ["UINT8", "INT8", "UINT16", "INT16", "INT32", "UINT64", "INT64", "FLOAT64"]
)
@pytest.mark.parametrize("value", [1, 3, 32])
def test_alignment_of_another_type_is_refused(tmp_path: Path, kind: str, value: int) -> None:
    source = toys.write_llama(tmp_path / "plain.gguf")
    path = toys.write_aligned(source, tmp_path / "a.gguf", value, gguf.GGUFValueType[kind])
    with pytest.raises(ModelLoadError, match=r"general\.alignment"):
        lb.Model(path)


if __name__ == "__main__":
    program()
