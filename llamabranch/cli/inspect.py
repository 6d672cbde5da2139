"""``llamabranch inspect``: what a model is, and whether two can speculate together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llamabranch import Context, Model, hub
from llamabranch.model import VocabularyReport

from .bundles import with_bundles
from .candidates import ACCEPTANCES, Candidate, Gain, candidates, measure
from .console import Console, print_json
from .formats import base_name, decimal_size
from .options import HubOptions, LoadingOptions, OutputOptions, TargetOptions

N_CTX = 256  # enough to probe what the memory can do


@dataclass(frozen=True)
class _Opened:
    """A model; ``context`` is None for a head, which has none without its target."""

    model: Model
    context: Context | None


@with_bundles
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A GGUF path, a name from `llamabranch models`, or user/repo[:tag]. "
            "Default: as for the other commands.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Argument(metavar="DRAFT", help="A second model: can it draft for the first?"),
    ] = None,
    *,
    finding: HubOptions,
    loading: LoadingOptions,
    output: OutputOptions,
) -> None:
    """Print architecture, size, vocabulary, memory type and capabilities of a model.

    With two models, print both and whether the second can draft for the first; if not, why. With one,
    list the models that could draft for it, and what theory expects of them on this machine.
    """
    with output.console() as console, ExitStack() as stack:
        model = TargetOptions(target=model).announce(console)
        names = [model] if draft is None else [model, draft]
        for name in names:
            finding.find(name)
        opened = [_open(name, loading, console, stack) for name in names]
        first = opened[0]
        report = fault = None
        if len(opened) == 2:
            report = first.model.compatibility(opened[1].model)
            if opened[1].context is None:
                fault = first.model.head_fault(opened[1].model)

        @contextmanager
        def open_draft(path: Path) -> Iterator[Context]:
            with ExitStack() as closing:
                yield loading.open(str(path), console, closing, n_ctx=N_CTX)

        if output.as_json:
            answer: dict[str, object] = {"models": [_facts(each) for each in opened]}
            if fault is not None:
                answer["compatible"] = not fault
                answer["path"] = "none" if fault else "hidden states"
                answer["reason"] = fault or "the head fits the hidden states of the first"
            elif report is not None:
                answer["compatible"] = report.compatible
                answer["path"] = report.path
                answer["reason"] = report.reason
            else:
                answer["drafts"] = [
                    _draft_facts(each, gain) for each, gain in _drafts(model, first, open_draft)
                ]
            print_json(answer)
            return
        columns = [_lines(each) for each in opened]
        names = [base_name(name) for name in names]
        console.table(
            ("", *names),
            [(label, *(column[label] for column in columns)) for label in columns[0]],
            left=names,
        )
        for name, each in zip(names, opened, strict=True):
            if each.context is not None and not each.context.capabilities.batch_invariant:
                console.line()
                reason = each.context.capabilities.batch_invariant_reason
                console.line(
                    f"{name} is not batch-invariant: {reason}. Rounding depends on how many tokens are "
                    "decoded at once there, and can change a text that is drafted or batched."
                )
        if fault is not None:
            console.line()
            _print_head_verdict(console, opened[1].model, fault)
        elif report is not None:
            console.line()
            _print_verdict(console, report)
        else:
            _print_drafts(console, _drafts(model, first, open_draft))


def _open(name: str, loading: LoadingOptions, console: Console, stack: ExitStack) -> _Opened:
    path = hub.resolve(name)
    if Model.is_head(path):
        return _Opened(stack.enter_context(Model(path)), None)
    context = loading.open(name, console, stack, n_ctx=N_CTX)
    return _Opened(context.model, context)


def _drafts(
    name: str, target: _Opened, open_draft: Callable[[Path], AbstractContextManager[Context]]
) -> list[tuple[Candidate, Gain | None]]:
    """Return the models that could draft, and what those that are here would bring."""
    context = target.context
    if context is None or not context.model.can_generate:
        return []
    found = []
    for each in candidates(name):
        gain = None
        is_head = each.path is not None and Model.is_head(each.path)
        if each.path is not None and each.drafts_by == "tokens" and not is_head:
            with open_draft(each.path) as draft:
                gain = measure(context, draft)
        found.append((each, gain))
    return found


def _draft_facts(each: Candidate, gain: Gain | None) -> dict[str, object]:
    return {
        "name": each.name,
        "path": None if each.path is None else str(each.path),
        "size_bytes": each.size_bytes,
        "drafts_by": each.drafts_by,
        "listed": each.listed,
        "c": None if gain is None else gain.c,
        "v": None if gain is None else {str(n): ratio for n, ratio in gain.v.items()},
        "expected": None
        if gain is None
        else [
            {"acceptance": a, "draft_length": length, "speedup": speedup}
            for a, (length, speedup) in zip(ACCEPTANCES, gain.best, strict=True)
        ],
    }


def _print_drafts(console: Console, found: Sequence[tuple[Candidate, Gain | None]]) -> None:
    console.line()
    if not found:
        console.line("No model that could draft for it is on this machine.")
        return
    console.line(
        "Models that could draft for it (--draft auto takes the first that drafts by tokens):"
    )
    console.line()
    headings = [f"speedup at {100 * a:.0f} % accepted" for a in ACCEPTANCES]
    rows = []
    for each, gain in found:
        cells = ["-"] * (1 + len(ACCEPTANCES))
        if gain is not None:
            cells = [f"{gain.c:.2f}"]
            for length, speedup in gain.best:
                cells.append(f"{speedup:.2f} ({length} drafted)" if length else "no gain")
        where = "here" if each.path is not None else "to download"
        rows.append(
            (base_name(each.name), decimal_size(each.size_bytes), each.drafts_by, where, *cells)
        )
    console.table(("draft", "size", "drafts by", "", "c", *headings), rows, left=("drafts by", ""))
    measured = next((gain for _, gain in found if gain is not None), None)
    if measured is not None:
        console.line()
        costs = ", ".join(f"{n} tokens {ratio:.2f}" for n, ratio in measured.v.items() if n > 1)
        console.line(
            f"Measured now: c is the time of a draft step in target steps; verifying takes {costs}."
        )


def _facts(opened: _Opened) -> dict[str, object]:
    model, context = opened.model, opened.context
    facts: dict[str, object] = {
        "path": str(model.path),
        "name": model.name,
        "architecture": model.architecture,
        "description": model.description,
        "file_type": model.file_type,
        "n_params": model.n_params,
        "size_bytes": model.size_bytes,
        "n_layer": model.n_layer,
        "n_embd": model.n_embd,
        "n_ctx_train": model.n_ctx_train,
        "n_vocab": model.n_vocab,
        "vocab_type": model.vocab_type,
        "bos": model.bos,
        "eos": model.eos,
        "chat_template": model.chat_template is not None,
        "memory_type": model.memory_type,
        "fingerprint": model.fingerprint,
        "mtp_layers": model.n_mtp_layers,
        "head_kind": Model.head_kind(model.path),
        "shares_memory": model.shares_memory,
        "eagle3": None,
        "capabilities": None,
    }
    if model.target_layers:
        facts["eagle3"] = {
            "target_layers": list(model.target_layers),
            "target_hidden_size": _target_width(model),
        }
    if context is not None:
        found = context.capabilities
        facts["capabilities"] = {
            "can_truncate": found.can_truncate,
            "can_share": found.can_share,
            "sliding_window": found.sliding_window,
            "recurrent": found.recurrent,
            "batch_invariant": found.batch_invariant,
            "batch_invariant_reason": found.batch_invariant_reason,
        }
    return facts


def _target_width(model: Model) -> int:
    """Return the width of the hidden states that a head reads."""
    for key in ("target_hidden_size", "embedding_length_out"):
        found = model.metadata.get(f"{model.architecture}.{key}")
        if found is not None:
            return int(found)
    return model.n_embd


def _lines(opened: _Opened) -> dict[str, str]:
    model = opened.model
    found = None if opened.context is None else opened.context.capabilities
    return {
        "file": model.path.name,
        "name": model.name or "-",
        "architecture": model.architecture,
        "parameters": f"{model.n_params:,}",
        "size": f"{decimal_size(model.size_bytes)} ({model.file_type})",
        "layers x width": f"{model.n_layer} x {model.n_embd}",
        "trained context": f"{model.n_ctx_train:,} tokens",
        "vocabulary": f"{model.n_vocab:,} tokens ({model.vocab_type})",
        "BOS, EOS token": f"{_token(model, model.bos)}, {_token(model, model.eos)}",
        "chat template": _yes(model.chat_template is not None),
        "memory": model.memory_type,
        "can truncate": "-" if found is None else _yes(found.can_truncate),
        "can share a prefix": "-" if found is None else _yes(found.can_share),
        "batch-invariant": "-" if found is None else _yes(found.batch_invariant),
        "drafts with": _drafts_with(model),
        "fingerprint": model.fingerprint[:16],
    }


def _drafts_with(model: Model) -> str:
    """Return what the file offers for drafting with hidden states."""
    if model.target_layers:
        layers = ", ".join(str(layer) for layer in model.target_layers)
        return f"layers {layers} of a target of width {_target_width(model)} (EAGLE-3)"
    n, kind = model.n_mtp_layers, Model.head_kind(model.path)
    layers = f"{n} MTP layer{'s' if n > 1 else ''}"
    if kind == "mtp":
        return f"its {layers} (--draft mtp)"
    if kind == "mtp-only":
        reads = "over the K/V of" if model.shares_memory else "for"
        return f"{layers} {reads} a target of width {_target_width(model)}"
    return "-"


def _token(model: Model, token: int | None) -> str:
    if token is None:
        return "none"
    text = model.piece(token).decode(errors="replace")  # empty for a control token
    return f"{token} {text!r}" if text else str(token)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _print_head_verdict(console: Console, head: Model, fault: str) -> None:
    if fault:
        console.line(f"{head.name} is a head that cannot draft for the first: {fault}.", "yellow")
    else:
        console.line(
            f"{head.name} is a head that fits the hidden states of the first: it can draft for it. "
            "Whether it was trained for it, only the acceptance shows.",
            "green",
        )


def _print_verdict(console: Console, report: VocabularyReport) -> None:
    if report.path == "tokens":
        console.line(f"These two can speculate together, token by token: {report.reason}.", "green")
    elif report.path == "text":
        console.line(
            f"These two can speculate together through the text only: {report.reason}. "
            "Every draft is then tokenized again, which costs time, and fewer tokens are accepted.",
            "yellow",
        )
    else:
        console.line(f"These two cannot speculate together: {report.reason}", "yellow")
