"""Checks that every public name, method and property has a docstring.

This is a Griffe extension, named in ``mkdocs.yml``. With a strict build a warning ends the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe

LOGGER = griffe.get_logger(__name__)

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class PublicDocstrings(griffe.Extension):
    """Warn of public names without a docstring; show Sphinx roles as code."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        for name in pkg.exports or ():
            member = pkg.members[str(name)]
            for path, obj in _public(f"{pkg.path}.{name}", member):
                if obj.docstring is None:
                    LOGGER.warning("%s has no docstring", path)


def _public(
    path: str, member: griffe.Object | griffe.Alias
) -> Iterator[tuple[str, griffe.Object | griffe.Alias]]:
    """Yield a public name and the public names in it, except plain attributes (their class has these)."""
    obj = member.final_target if isinstance(member, griffe.Alias) else member
    if isinstance(obj, griffe.Attribute) and "property" not in obj.labels:
        return
    yield path, obj
    if isinstance(obj, griffe.Class):
        inner = {name: child for name, child in obj.members.items() if not name.startswith("_")}
    elif isinstance(obj, griffe.Module):
        inner = {str(name): obj.members[str(name)] for name in obj.exports or ()}
    else:
        return
    for name, child in inner.items():
        yield from _public(f"{path}.{name}", child)
