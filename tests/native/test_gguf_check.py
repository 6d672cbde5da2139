"""Every row of the table of fatal files: a file meets it, and without the check it ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import pytest
import toys

from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import check_header, find_fatal
from llamabranch.native.gguf_reader import read_header

SEEN_IN = "0.3.36"  # of llama-cpp-python, which contains llama.cpp


class FatalCase(NamedTuple):
    """What ends the process, always by SIGABRT.

    Attributes:
        name: of the file that shows it, in ``toys.py``.
        phase: where the process ended: "load" of the model, creating a "context", first "decode".
        symptom: what llama.cpp printed: the condition of the failed assertion, or its message.
    """

    name: str
    phase: str
    symptom: str


# fmt: off
FATAL = (
    FatalCase("duplicate_tokens", "load", "id_to_token.size() == token_to_id.size()"),
    FatalCase("zero_blocks", "load", "hparams.n_layer_all > 0"),
    FatalCase("nextn_layers", "load", "hparams.n_layer_nextn <= hparams.n_layer_all"),
    FatalCase("rwkv_head_size", "context", "ggml_nelements(a) == ne0*ne1*ne2"),
    FatalCase("nan_epsilon", "decode", "eps >= 0.0f"),
    FatalCase("many_experts", "load", "hparams.n_expert <= LLAMA_MAX_EXPERTS"),
    FatalCase("experts_unused", "load", "n_expert_used_max > 0"),
    FatalCase("many_groups", "load", "hparams.n_expert_groups < hparams.n_expert"),
    FatalCase("uneven_groups", "load", "hparams.n_expert % hparams.n_expert_groups == 0"),
    FatalCase("rope_scaling", "load",
              "hparams.rope_scaling_type_train != LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED"),
    FatalCase("huge_head_count_kv", "context", "ggml_nelements(a) == ne0*ne1*ne2"),
    FatalCase("unequal_heads", "context", "n_embd_head == hparams.n_embd_head_k()"),
    FatalCase("odd_rotation", "decode", "n_dims % 2 == 0"),
    FatalCase("lfm2_one_kind_of_layer", "decode", "GGML_ASSERT(buffer)"),
    FatalCase("gemma3_pattern_1", "context", "hparams.is_swa_any()"),
    FatalCase("half_precision_norms", "decode", "binary_op: unsupported types"),
)
# fmt: on

PROGRAM = Path(__file__).with_name("load_unchecked.py")
CASES = pytest.mark.parametrize("case", FATAL, ids=[case.name for case in FATAL])


@CASES
def test_file_of_each_fatal_case_is_refused_for_it(case: FatalCase, tmp_path: Path) -> None:
    path = toys.write_broken(tmp_path / "fatal.gguf", case.name)
    found = find_fatal(read_header(path))
    assert found is not None and found[0] == case.name
    with pytest.raises(ModelLoadError) as raised:
        check_header(path)
    assert raised.value.message == f"cannot load {path}: {found[1]}"
    in_vocabulary = case.name == "duplicate_tokens"
    assert raised.value.hint == ("convert the model again" if in_vocabulary else None)
    if in_vocabulary:
        with pytest.raises(ModelLoadError):
            check_header(path, vocab_only=True)
    else:
        check_header(path, vocab_only=True)


@CASES
def test_llama_cpp_ends_the_process_as_the_table_says(case: FatalCase, tmp_path: Path) -> None:
    if llama_cpp.__version__ != SEEN_IN:
        pytest.skip(f"seen in {SEEN_IN}, this is {llama_cpp.__version__}")
    path = toys.write_broken(tmp_path / "fatal.gguf", case.name)
    for options in ((), ("vocab_only",)) if case.name == "duplicate_tokens" else ((),):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(path), *options],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            check=False,
        )
        assert done.stdout.split()[-1] == case.phase, done.stderr[-500:]
        assert done.returncode == -signal.SIGABRT
        assert case.symptom in done.stderr
