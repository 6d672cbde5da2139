"""Every row of the table of fatal files: such a file is refused, for the reason of that row."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys

from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import check_header, find_fatal
from llamabranch.native.gguf_reader import read_header

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
    with pytest.raises(ModelLoadError) as raised:
        check_header(path)
    assert raised.value.message == f"cannot load {path}: {fault[1]}"
    in_vocabulary = name == "duplicate_tokens"
    assert raised.value.hint == ("convert the model again" if in_vocabulary else None)
    if in_vocabulary:
        with pytest.raises(ModelLoadError):
            check_header(path, vocab_only=True)
    else:
        check_header(path, vocab_only=True)
