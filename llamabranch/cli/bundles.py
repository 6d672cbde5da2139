"""Bundles of options: dataclasses whose fields Typer reads as options of a command.

Commands share most of their options. A bundle declares each option once, with its default, and converts
it to the library's argument; a command takes the bundles that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from inspect import Parameter, Signature, cleandoc, signature
from typing import Annotated, TypeVar

import typer
from typing_extensions import get_type_hints  # Python 3.10's own adds None to some types

T = TypeVar("T")


def option(default: T, text: str, names: str = "", **more: object) -> T:
    """Return the field of a bundle that is an option of a command.

    Args:
        default: its value if the user does not set it.
        text: its line in --help.
        names: its names, separated by spaces; "" = one name, made from the field's name.
        more: other arguments of `typer.Option`.
    """
    make: Callable[..., object] = typer.Option
    return field(default=default, metadata={_OPTION: make(*names.split(), help=text, **more)})


def argument(text: str, *, metavar: str) -> list[str] | None:
    """Return a field of a bundle for the arguments of a command that are not options."""
    info: object = typer.Argument(
        metavar=metavar, help=text, show_default=False, rich_help_panel="Arguments"
    )
    return field(default=None, metadata={_OPTION: info})


_OPTION = "option"  # the key of an option in the metadata of its field


def with_bundles(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with the fields of its bundles as parameters, for Typer to read.

    A parameter whose type is a dataclass is a bundle. Its fields become options; each is declared
    by `option`, by `argument` or by its annotation. The heading of an option in the help is the
    ``panel`` of the class, unless the field names another heading. --help shows the fields that
    ``first`` names, and --help-all shows all. The command gets the bundle, built from the options
    that the user gave.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    bundles: dict[str, type] = {}
    first: set[str] = set()
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and is_dataclass(kind):
            bundles[parameter.name] = kind
            parameters += _parameters(kind)
            first |= {n for base in kind.__mro__ for n in vars(base).get("first", "").split()}
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=kind))

    def run(**values: object) -> None:
        arguments: dict[str, object] = {}
        for name, kind in bundles.items():
            arguments[name] = kind(**{item.name: values.pop(item.name) for item in fields(kind)})
        command(**arguments, **values)

    # One line per paragraph, so that --help can wrap it at any width.
    doc = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(command.__doc__ or ""))
    run.__name__, run.__doc__ = command.__name__, doc
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.first = frozenset(first)  # type: ignore[attr-defined]
    return run


def _parameters(bundle: type) -> Iterator[Parameter]:
    hints = get_type_hints(bundle, include_extras=True)
    panels = {
        name: getattr(kind, "panel", None)
        for kind in reversed(bundle.__mro__)
        for name in vars(kind).get("__annotations__", ())
    }
    for bundle_field in fields(bundle):
        hint, info = hints[bundle_field.name], bundle_field.metadata.get(_OPTION)
        if info is not None:
            info.rich_help_panel = info.rich_help_panel or panels[bundle_field.name]
            hint = Annotated[hint, info]
        yield Parameter(
            bundle_field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if bundle_field.default is MISSING else bundle_field.default,
            annotation=hint,
        )
