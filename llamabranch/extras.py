"""Packages that only some features need: the extras of ``pyproject.toml``."""

from __future__ import annotations

import json
from importlib.util import find_spec

from .errors import UnsupportedError

__all__ = ["install_command", "require"]


def require(extra: str, feature: str, *modules: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: its name, for example "serve".
        feature: what needs it, as the subject of a sentence: "the server".
        modules: the modules to look for, for example "starlette".

    Raises:
        UnsupportedError: one is missing. The hint is the command that installs the extra.
    """
    missing = [name for name in modules if not _is_installed(name)]
    if missing:
        raise UnsupportedError(
            f"{feature} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed",
            hint=install_command(extra),
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # raised by a finder that another package installed
        return False


def install_command(extra: str) -> str:
    """Return the command that installs an extra from where the package itself was installed.

    If pip installed the package from a folder, ``direct_url.json`` (PEP 610) names it, and the command
    works in any folder.
    """
    from importlib import metadata  # imports sockets, so only if a package is missing

    where = "llamabranch"
    try:
        origin = json.loads(metadata.distribution(where).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if url.startswith("file://") and "dir_info" in origin:
        editable = "--editable " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}'{url.removeprefix('file://')}[{extra}]'"
    return f"pip install '{where}[{extra}]'"
