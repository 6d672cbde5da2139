"""Costs of the settings of attention that a test chooses, instead of measured ones."""

from __future__ import annotations

import json
from pathlib import Path

from llamabranch.context import kv_type as measured

EVEN = [1e-6, 1e-6, 1e-6]  # seconds per token: for one text, for eight texts, for a prompt


def forget() -> None:
    """The measurements of this process; a new process reads the profile."""
    measured._attention.cache_clear()
    measured._found.clear()


def write_costs(
    profile: Path, attention: dict[str, list[float]], weights: list[float] = EVEN
) -> None:
    """Replace the measurements. A setting that is not named costs as much as the weights."""
    known = json.loads(profile.read_text())
    for costs in known[measured._ATTENTION].values():
        costs.update({name: attention.get(name, EVEN) for name in costs})
    for entry in known.get(measured._WEIGHTS, {}).values():
        entry["seconds"] = weights
    profile.write_text(json.dumps(known))
    forget()
