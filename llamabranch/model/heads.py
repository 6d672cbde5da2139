"""Whether a head drafts for a model: what must fit so that llama.cpp computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from ..native import heads
from ..native.gguf_reader import Header, read_header
from .vocabulary import Vocabulary, compare

__all__ = ["head_kind", "is_head_only", "why_no_eagle", "why_no_mtp"]


class _Model(Vocabulary, Protocol):
    """The part of a model that is looked at."""

    path: Path
    loads_mtp: bool

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def n_embd(self) -> int: ...

    @property
    def n_layer(self) -> int: ...

    @property
    def n_mtp_layers(self) -> int: ...

    @property
    def target_layers(self) -> tuple[int, ...]: ...


def head_kind(header: Header) -> str:
    """Return "eagle3" for a head, "mtp" for MTP layers that llama.cpp computes, else ""."""
    if header.architecture == "eagle3":
        return "eagle3"
    names = {tensor.name for tensor in header.tensors}
    has_layers = header.integer("nextn_predict_layers") > 0 and any(
        name.endswith(".nextn.eh_proj.weight") for name in names
    )
    if has_layers and "blk.0.attn_norm.weight" in names and not why_no_layers(header.architecture):
        return "mtp"
    return ""


def is_head_only(header: Header) -> bool:
    """Return whether a file has MTP layers and nothing that they could draft for."""
    names = {tensor.name for tensor in header.tensors}
    return header.integer("nextn_predict_layers") > 0 and (
        "blk.0.attn_norm.weight" not in names
        and any(name.endswith(".nextn.eh_proj.weight") for name in names)
    )


def why_no_layers(architecture: str) -> str:
    """Return why the MTP layers of an architecture cannot be computed; "" if they can."""
    if not heads.available:
        return heads.reason
    if architecture not in heads.NEXTN_OUTPUT:
        return f"llama.cpp does not compute the MTP layers of {architecture} models"
    return ""


def why_no_eagle(head: _Model, target: _Model) -> str:
    """Return why ``head`` is no EAGLE-3 head that can draft for ``target``; "" if it is one.

    Whether it was trained for this very target cannot be known: a head for another model of the same
    shape drafts, but little of its draft is accepted.
    """
    if head.architecture != "eagle3":
        return f"{head.name} is a {head.architecture} model, no EAGLE-3 head"
    if not heads.available:
        return heads.reason
    header = read_header(head.path)
    width = header.integer("target_hidden_size")
    if width != target.n_embd:
        return f"it reads hidden states of {width} numbers, those of {target.name} have {target.n_embd}"
    for layer in head.target_layers:
        if not 0 <= layer <= target.n_layer:
            return f"it reads layer {layer}, {target.name} has {target.n_layer}"
        known = heads.NEXTN_OUTPUT if layer == target.n_layer else heads.LAYER_INPUTS
        if target.architecture not in known:
            return (
                f"llama.cpp does not give the hidden states of {target.architecture} models"
                f" (layer {layer})"
            )
    report = compare(target, head)
    if not report.compatible:
        return f"their vocabularies differ: {report.reason}"
    if head.n_vocab != target.n_vocab:
        return f"it has {head.n_vocab} tokens, {target.name} has {target.n_vocab}"
    return _shape_fault(head, target, header)


def _shape_fault(head: _Model, target: _Model, header: Header) -> str:
    """Return what of the head's own tensors llama.cpp would abort on, "" if nothing."""
    if head.n_layer != 1:
        return f"it has {head.n_layer} layers: llama.cpp computes heads of one"
    n_head = header.integer("attention.head_count", 1)
    usual = head.n_embd // max(1, n_head)
    sizes = [header.integer(f"attention.{kind}_length", usual) for kind in ("key", "value")]
    if sizes[0] != sizes[1]:
        return f"its keys have {sizes[0]} numbers, its values {sizes[1]}"
    rotated = header.integer("rope.dimension_count", sizes[0])
    if not 0 < rotated <= sizes[0] or rotated % 2:
        return f"rope.dimension_count is {rotated}, not an even part of the head size {sizes[0]}"
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name in ("token_embd.weight", "output.weight"):
        if name not in shapes and head.n_embd != target.n_embd:
            return (
                f"it has no {name} of its own, and a width of {head.n_embd}, "
                f"not the {target.n_embd} of {target.name}"
            )
    embedding = shapes.get("token_embd.weight")
    if embedding is not None and embedding[-1] < head.n_vocab:
        return f"its embedding has {embedding[-1]} tokens, the vocabulary {head.n_vocab}"
    if "d2t" not in shapes:
        n_rows = shapes.get("output.weight", (0, head.n_vocab))[-1]
        if n_rows != head.n_vocab:
            return f"its output has {n_rows} tokens, the vocabulary {head.n_vocab}, and no d2t"
    elif "output.weight" not in shapes:
        return "it has d2t, a vocabulary of its own, but no output.weight"
    return ""


def why_no_mtp(target: _Model) -> str:
    """Return why ``target`` cannot draft with MTP layers of its own; "" if it can."""
    if target.n_mtp_layers == 0:
        return f"{target.name} has no MTP layers"
    reason = why_no_layers(target.architecture)
    if reason:
        return reason
    if not target.loads_mtp:
        return f"the MTP layers of {target.name} were not loaded: use Model(..., load_mtp=True)"
    if head_kind(read_header(target.path)) != "mtp":
        return f"the file of {target.name} lacks the weights of its MTP layers"
    return ""
