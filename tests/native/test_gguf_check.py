"""Every row of the table of fatal files: a file that ends the process is refused, and for that row."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys

from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import check_header, find_fatal
from llamabranch.native.gguf_reader import read_header

# Of `toys.BROKEN`; llama.cpp 0.3.36 ended the process by SIGABRT at each.
FATAL = (
    "duplicate_tokens", "zero_blocks", "nextn_layers", "rwkv_head_size", "nan_epsilon",
    "many_experts", "experts_unused", "many_groups", "uneven_groups", "rope_scaling",
    "huge_head_count_kv", "unequal_heads", "odd_rotation", "lfm2_one_kind_of_layer",
    "gemma3_pattern_1", "half_precision_norms",
)  # fmt: skip


@pytest.mark.parametrize("name", FATAL)
def test_file_of_each_fatal_case_is_refused_for_it(name: str, tmp_path: Path) -> None:
    path = toys.write_broken(tmp_path / "fatal.gguf", name)
    found = find_fatal(read_header(path))
    assert found is not None and found[0] == name
    with pytest.raises(ModelLoadError) as raised:
        check_header(path)
    assert raised.value.message == f"cannot load {path}: {found[1]}"
    in_vocabulary = name == "duplicate_tokens"
    assert raised.value.hint == ("convert the model again" if in_vocabulary else None)
    if in_vocabulary:
        with pytest.raises(ModelLoadError):
            check_header(path, vocab_only=True)
    else:
        check_header(path, vocab_only=True)
