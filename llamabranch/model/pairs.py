"""Whether one model can draft for another: the vocabularies, and what heads require."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..native import staging
from ..native.gguf_check import rotation_fault
from ..native.gguf_reader import Header, read_header

FILES_OF_HEADS = ("eagle3", "mtp-only")  # the kinds of files that are not models by themselves


class _Model(Protocol):
    """The attributes of a model that are compared."""

    path: Path
    name: str
    loads_mtp: bool
    n_vocab: int
    n_embd: int
    n_layer: int
    architecture: str
    n_mtp_layers: int
    target_layers: tuple[int, ...]
    vocab_type: str
    bos: int | None
    eos: int | None

    def entry(self, token: int) -> tuple[bytes, bool]: ...


@dataclass(frozen=True)
class VocabularyReport:
    """Whether two models have the same vocabulary.

    ``n_vocab`` has the sizes (target, draft), ``n_different`` is the number of ids that mean different
    tokens, and ``first_difference`` is the smallest such id.
    """

    compatible: bool
    reason: str
    n_vocab: tuple[int, int]
    n_different: int
    first_difference: int | None

    def __bool__(self) -> bool:
        return self.compatible


def compare(target: _Model, draft: _Model) -> VocabularyReport:
    """Return whether ``draft`` can draft for ``target`` token by token, and if not, why."""
    ours, theirs = target.n_vocab, draft.n_vocab
    shared, n_different, first = min(ours, theirs), 0, None
    if target.vocab_type != draft.vocab_type:
        n_different = max(ours, theirs)
        reason = f"tokenizer kinds differ: {target.vocab_type} and {draft.vocab_type}"
    elif different := [t for t in range(shared) if target.entry(t) != draft.entry(t)]:
        n_different, first = len(different), different[0]
        reason = (
            f"{n_different} of {shared} shared token ids differ, the first is {first}: "
            f"{target.entry(first)[0]!r} and {draft.entry(first)[0]!r}"
        )
    elif (target.bos, target.eos) != (draft.bos, draft.eos):
        reason = (
            f"BOS and EOS tokens differ: {target.bos}, {target.eos} and {draft.bos}, {draft.eos}"
        )
    else:
        # Models of one family pad their vocabularies differently; the padding is never drawn.
        padding = (
            f"the first {shared} tokens are equal; {abs(ours - theirs)} exist in one model only"
        )
        reason = f"the same {ours} tokens" if ours == theirs else padding
        return VocabularyReport(True, reason, (ours, theirs), 0, None)
    return VocabularyReport(False, reason, (ours, theirs), n_different, first)


def head_kind(header: Header) -> str:
    """Return which kind of head a file contains, as ``Model.head_kind`` does."""
    if header.architecture == "eagle3":
        return "eagle3"
    if _why_no_layers(header):
        return ""
    return "mtp-only" if is_head_only(header) else "mtp"


def is_head_only(header: Header) -> bool:
    """Return whether a file has MTP layers, but not the model that they draft for."""
    if header.architecture == staging.SHARING_HEAD:
        return True
    names = {tensor.name for tensor in header.tensors}
    return "blk.0.attn_norm.weight" not in names and _n_layers(header, names) > 0


def _n_layers(header: Header, names: Container[str]) -> int:
    """Return how many of the MTP layers that a file declares it really has."""
    n = header.integer("nextn_predict_layers")
    first = header.integer("block_count") - n
    return sum(f"blk.{first + i}.nextn.eh_proj.weight" in names for i in range(n))


def _why_no_layers(header: Header) -> str:
    """Return why the MTP layers of a file cannot be used; "" if they can."""
    architecture, n = header.architecture, header.integer("nextn_predict_layers")
    if n <= 0:
        return "it has no MTP layers"
    if not staging.available:
        return staging.reason
    if architecture == staging.SHARING_HEAD:
        return ""
    if architecture not in staging.MTP_LAYERS:
        return f"llama.cpp does not compute the MTP layers of {architecture} models"
    if n > 1 and architecture not in staging.MTP_CHAINS:
        return f"llama.cpp computes one MTP layer of {architecture} models, the file has {n}"
    names = {tensor.name for tensor in header.tensors}
    if _n_layers(header, names) < n:
        return "the file lacks the weights of its MTP layers"
    if architecture == "mimo2":
        first = header.integer("block_count") - n
        for kind in ("attn_qkv", "ffn_gate", "ffn_up", "ffn_down"):
            lacking = [i for i in range(first, first + n) if f"blk.{i}.{kind}.weight" not in names]
            if lacking:
                return f"llama.cpp needs blk.{lacking[0]}.{kind}.weight in MTP layers of {architecture}"
    return ""


def why_no_eagle(head: _Model, target: _Model) -> str:
    """Return why ``head``, an EAGLE-3 head, cannot draft for ``target``; "" if it can.

    There is no way to tell whether it was trained for this very target. A head for another model of the
    same shape works, but few of its drafts are accepted.
    """
    if not staging.available:
        return staging.reason
    header = read_header(head.path)
    width = header.integer("target_hidden_size")
    if reason := _width_fault(width, target):
        return reason
    for layer in head.target_layers:
        if not 0 <= layer <= target.n_layer:
            return f"it reads layer {layer}, {target.name} has {target.n_layer}"
        known = staging.NEXTN_OUTPUT if layer == target.n_layer else staging.LAYER_INPUTS
        if target.architecture not in known:
            return (
                f"llama.cpp does not give the hidden states of {target.architecture} models"
                f" (layer {layer})"
            )
    return _vocabulary_fault(head, target) or _shape_fault(head, target, header)


def _shape_fault(head: _Model, target: _Model, header: Header) -> str:
    """Return why llama.cpp would abort on the head's own tensors; "" if they are fine."""
    if head.n_layer != 1:
        return f"it has {head.n_layer} layers, but llama.cpp supports heads of one layer"
    key, value = header.head_sizes(max(1, header.integer("attention.head_count", 1)))
    if key != value:
        return f"its keys have {key} numbers, but its values have {value}"
    if reason := rotation_fault(header.integer("rope.dimension_count", key), key):
        return reason
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name in ("token_embd.weight", "output.weight"):
        if name not in shapes and head.n_embd != target.n_embd:
            return (
                f"it has no {name}, and its width is {head.n_embd}, "
                f"but {target.name} has {target.n_embd}"
            )
    embedding = shapes.get("token_embd.weight")
    if embedding is not None and embedding[-1] < head.n_vocab:
        return f"its embedding has {embedding[-1]} tokens, but the vocabulary has {head.n_vocab}"
    if "d2t" not in shapes:
        n_rows = shapes.get("output.weight", (0, head.n_vocab))[-1]
        if n_rows != head.n_vocab:
            return f"its output has {n_rows} tokens, its vocabulary {head.n_vocab}, and no d2t"
    elif "output.weight" not in shapes:
        return "it has its own vocabulary (d2t), but no output.weight"
    return ""


def why_no_mtp(head: _Model, target: _Model) -> str:
    """Return why the MTP layers of ``head``, maybe ``target`` itself, cannot draft for ``target``."""
    if head.n_mtp_layers == 0:
        no_head = "" if head is target else "is not an EAGLE-3 head and "
        return f"{head.name} {no_head}has no MTP layers"
    reason = _why_no_layers(read_header(head.path))
    if reason:
        return reason
    if not head.loads_mtp:
        return f"the MTP layers of {head.name} were not loaded: use Model(..., load_mtp=True)"
    if head is target:
        return ""
    if head.architecture == staging.SHARING_HEAD:
        return _sharing_fault(head, target) or _vocabulary_fault(head, target)
    if head.architecture != target.architecture:
        return (
            f"its MTP layers belong to a {head.architecture} model, "
            f"and {target.name} is a {target.architecture} model"
        )
    return _width_fault(head.n_embd, target) or _vocabulary_fault(head, target)


def _sharing_fault(head: _Model, target: _Model) -> str:
    """Return why a head cannot attend to the K/V of the target's last two layers; "" if it can.

    llama.cpp does not check these layers. It uses the last for full attention and the second to last
    for a window.
    """
    if target.architecture != staging.SHARING_TARGET:
        return (
            f"it reads the K/V of a {staging.SHARING_TARGET} model, "
            f"and {target.name} is a {target.architecture} model"
        )
    ours, theirs = read_header(head.path), read_header(target.path)
    width = ours.integer("embedding_length_out")
    if reason := _width_fault(width, target):
        return reason
    n = theirs.integer("block_count")
    if [_of_layer(theirs, "attention.sliding_window_pattern", i) for i in (n - 2, n - 1)] != [1, 0]:
        return f"the last two layers of {target.name} must be one with a window and one without"
    for key in ("key_length", "value_length", "key_length_swa", "value_length_swa"):
        size, other = (header.integer(f"attention.{key}") for header in (ours, theirs))
        if size != other:
            return f"its {key} is {size}, but {target.name} has {other}"
    for i in range(ours.integer("block_count")):
        read = n - 1 - _of_layer(ours, "attention.sliding_window_pattern", i)
        count = _of_layer(ours, "attention.head_count_kv", i)
        other = _of_layer(theirs, "attention.head_count_kv", read)
        if count != other:
            return f"its layer {i} reads {count} K/V heads, but layer {read} of {target.name} has {other}"
    return ""


def _of_layer(header: Header, key: str, layer: int) -> int:
    """Return a layer's value for a key that has either one number or one per layer."""
    values = header.integers(key)
    return int(values[layer if 0 <= layer < len(values) else 0]) if values else 0


def _width_fault(width: int, target: _Model) -> str:
    if width == target.n_embd:
        return ""
    return f"it reads hidden states of {width} numbers, but {target.name} has {target.n_embd}"


def _vocabulary_fault(head: _Model, target: _Model) -> str:
    report = compare(target, head)
    if not report.compatible:
        return f"their vocabularies differ: {report.reason}"
    if head.n_vocab != target.n_vocab:
        return f"it has {head.n_vocab} tokens, {target.name} has {target.n_vocab}"
    return ""
