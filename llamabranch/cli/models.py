"""``llamabranch models``: the models known by name, and which of them are on this machine."""

from __future__ import annotations

from llamabranch import hub

from .bundles import with_bundles
from .console import print_json
from .options import OutputOptions


@with_bundles
def models(*, output: OutputOptions) -> None:
    """List the models of models.txt and mark those that are on this machine.

    A target is followed by the draft that goes with it. The names are what
    --target and --draft take.
    """
    with output.console() as console:
        found = [(entry, hub.locate(entry)) for entry in hub.catalogue()]
        if output.as_json:
            print_json(
                {
                    "models": [
                        {
                            "name": entry.name,
                            "role": entry.role,
                            "repository": entry.repository,
                            "file": entry.file,
                            "licence": entry.licence,
                            "size": entry.size,
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
        if any(path is None for _, path in found):
            console.line()
            console.line("Fetch one that is not here with: hf download REPOSITORY FILE")
