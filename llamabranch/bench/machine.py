"""The machine of a measurement: processor, cores, load, and the build of llama.cpp."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ..native.library import available_cores, engine_versions, system_info


def load_average() -> float | None:
    """Return the load average of the last minute; None if the system does not report it."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


@dataclass(frozen=True)
class Machine:
    """The machine at the start of a measurement.

    ``cores`` is how many cores this process may use. ``load`` is the load average of the last
    minute. ``features`` are the instruction sets that llama.cpp was compiled for.
    """

    processor: str
    cores: int
    load: float | None
    llama_cpp_python: str
    llama_cpp: str
    features: tuple[str, ...]

    @classmethod
    def now(cls) -> Machine:
        """Return the state of the machine now."""
        versions = engine_versions()
        features = tuple(re.findall(r"(\w+) = 1\b", system_info()))
        releases = versions["llama_cpp_python"], versions["llama_cpp"]
        return cls(processor_name(), available_cores(), load_average(), *releases, features)

    def describe(self) -> list[str]:
        """Return lines that describe the machine."""
        load = "unknown" if self.load is None else f"{self.load:.2f}"
        return [
            f"processor: {self.processor}",
            f"cores: {self.cores} for this process, {os.cpu_count()} in all; load {load}",
            f"llama.cpp: {self.llama_cpp or 'unknown'} (llama-cpp-python {self.llama_cpp_python})",
            f"compiled for: {' '.join(self.features) or 'no special instructions'}",
        ]

    def as_dict(self) -> dict[str, object]:
        """Return the fields for JSON, and the current load average."""
        return {**asdict(self), "load_after": load_average()}


def processor_name() -> str:
    """Return the system's name for the processor, or "unknown"."""
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown"


def processor_flags() -> frozenset[str]:
    """Return the processor's features as Linux names them; empty if they are unknown."""
    return frozenset(_cpuinfo("flags", "Features").split())


def _cpuinfo(*names: str) -> str:
    """Return the first value of one of ``names`` in Linux's /proc/cpuinfo, or ""."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""
