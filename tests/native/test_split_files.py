"""A model split into files, as gguf-split and gguf-py split one: the first part alone has metadata."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import toys
from commands import answer, texts

import llamabranch as lb
from llamabranch.errors import ModelLoadError
from llamabranch.native.gguf_check import check_header

Parts = list[Path]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return toys.write_llama(tmp_path / "whole.gguf", vocab="bytes", n_ctx_train=512)


def text_of(path: Path) -> list[int]:
    with lb.load(path, n_ctx=256, n_threads=1) as ctx:
        return ctx.complete("ab", max_tokens=8, seed=1).tokens


@pytest.mark.parametrize("n_parts", [2, 5])
@pytest.mark.parametrize("empty_first", [False, True])
def test_split_model_is_the_model(whole: Path, n_parts: int, empty_first: bool) -> None:
    (whole.parent / "parts").mkdir()
    parts = toys.write_split(whole, whole.parent / "parts", n_parts, empty_first=empty_first)
    for part in parts[1:]:
        fields = gguf.GGUFReader(part).fields
        assert {name for name in fields if not name.startswith("GGUF.")} == {
            "split.no", "split.count", "split.tensors.count",
        }  # fmt: skip
    single, several = check_header(whole), check_header(parts[0])
    assert sorted(t.name for t in several.tensors) == sorted(t.name for t in single.tensors)
    assert several.parts == tuple(parts)
    assert text_of(parts[0]) == text_of(whole)
    with lb.Model(parts[0], vocab_only=True) as model:
        assert model.tokenize("ab")


def test_commands_open_a_split_model(whole: Path) -> None:
    first, _ = toys.write_split(whole, whole.parent)
    assert answer("models", "show", first)["models"][0]["n_params"]
    report = answer("generate", "-m", first, "-p", "ab", "-n", "4", "-md", first, "-c", "256")
    assert len(texts(report)) == 1


def missing(parts: Parts) -> Path:
    parts[1].unlink()
    return parts[0]


def swapped(parts: Parts) -> Path:
    parts[1].rename(parts[1].with_suffix(".x"))
    parts[2].rename(parts[1])
    parts[1].with_suffix(".x").rename(parts[2])
    return parts[0]


def of_another_model(parts: Parts) -> Path:
    """A part of another model that is split into the same number of parts."""
    other = toys.write_llama(parts[0].with_name("other.gguf"), n_layer=5)
    shutil.copy(toys.write_split(other, other.parent, 3)[1], parts[1])
    return parts[0]


def not_split(parts: Parts) -> Path:
    toys.write_llama(parts[1])
    return parts[0]


def cut_off(parts: Parts) -> Path:
    parts[2].write_bytes(parts[2].read_bytes()[:-40])
    return parts[0]


def not_gguf(parts: Parts) -> Path:
    parts[2].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n")
    return parts[0]


def renamed(part: int, name: str) -> Callable[[Parts], Path]:
    return lambda parts: parts[part].rename(parts[part].with_name(name))


WRONG: list[tuple[Callable[[Parts], Path], str, str]] = [
    (lambda parts: parts[2], "it is part 3 of 3 of", "use the first part: .*-00001-of-00003.gguf"),
    (renamed(2, "x-00003-of-00003.gguf"), "part 3 of 3", "x-00001-of-00003.gguf, which is not in"),
    (renamed(1, "second.gguf"), "part 2 of 3", "name ends in -00001-of-00003.gguf"),
    *(
        (renamed(0, name), "does not end in -00001-of-00003.gguf", "original names of all parts")
        for name in ("model.gguf", "model-00001-of-00004.gguf")
    ),
    (missing, "part 2 of 3 is missing: whole-00002-of-00003.gguf", "in one folder"),
    (swapped, "whole-00002.*it is not part 2 of 3 of a model: it is part 3 of 3", "again"),
    (of_another_model, "its parts have .* tensors", "different models"),
    (not_split, "it is not part of a split model", "again"),
    (cut_off, "whole-00003.*truncated", "download it again"),
    (not_gguf, "whole-00003.*it is not a GGUF file", "download it again"),
]


@pytest.mark.parametrize(
    ("spoil", "reason", "hint"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("vocab_only", [False, True])
def test_what_is_wrong_with_parts_is_said(
    spoil: Callable[[Parts], Path], reason: str, hint: str, vocab_only: bool, whole: Path
) -> None:
    path = spoil(toys.write_split(whole, whole.parent, 3))
    if vocab_only and spoil in (of_another_model, cut_off):
        return  # seen in the lists of tensors, which are not read for a vocabulary
    with pytest.raises(ModelLoadError, match=reason) as raised:
        lb.Model(path, vocab_only=vocab_only)
    assert raised.value.hint is not None
    assert re.search(hint, raised.value.hint), raised.value.hint


def test_fatal_tensor_in_a_later_part_is_found(tmp_path: Path) -> None:
    path = toys.write_broken(tmp_path / "norms.gguf", "half_precision_norms")
    last = toys.write_llama(tmp_path / "late.gguf", half=("blk.1.ffn_norm.weight",))
    for file in (path, last):
        parts = toys.write_split(file, tmp_path, 4)
        with pytest.raises(ModelLoadError, match="is not F32"):
            check_header(parts[0])
