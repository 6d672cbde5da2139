"""Which cores a worker uses: Ray assigns a number of CPUs to a process, but no cores.

Workers of a node take cores by locking one file for each core, so that no two share one; the system
gives a lock back when its process ends, however it ends. Cores of one cache or memory domain are taken
together where enough of them are free.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CoreClaim", "cache_domains", "claim_cores", "lock_folder"]

_CPUS = Path("/sys/devices/system/cpu")


class CoreClaim:
    """Cores that this process has locked; they are free again once it is closed, or the process ends."""

    def __init__(self, files: dict[int, int]) -> None:
        self._files = files

    @property
    def cores(self) -> list[int]:
        """The numbers of the cores."""
        return sorted(self._files)

    def close(self) -> None:
        """Give the cores back."""
        for file in self._files.values():
            os.close(file)
        self._files = {}


def lock_folder() -> Path:
    """Return the folder of this node's lock files, one for each user."""
    name = f"llamabranch-cores-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    return Path(tempfile.gettempdir()) / name


def claim_cores(n: int, folder: Path, domains: Sequence[Sequence[int]]) -> CoreClaim | None:
    """Lock ``n`` free cores, of one domain if one has as many; None if the node has not as many.

    Args:
        n: how many cores, at least 1.
        folder: of the lock files; it is created.
        domains: the cores that may be used, by domain.
    """
    try:
        import fcntl
    except ImportError:  # Windows has neither these locks nor sched_setaffinity
        return None
    folder.mkdir(parents=True, exist_ok=True)

    def lock(core: int) -> int | None:
        file = os.open(folder / f"core-{core}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return None
        return file

    everywhere = [core for domain in domains for core in domain]
    for cores in [*(domain for domain in domains if len(domain) >= n), everywhere]:
        held: dict[int, int] = {}
        for core in cores:
            file = lock(core)
            if file is not None:
                held[core] = file
            if len(held) == n:
                return CoreClaim(held)
        CoreClaim(held).close()
    return None


def cache_domains() -> list[list[int]]:
    """Return the cores that this process may use, grouped by their last-level cache and memory node.

    Hyperthreads come after the first thread of each core, so that a claim of half of the cores has no two
    threads of one core.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    domains: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        folder = _CPUS / f"cpu{cpu}"
        caches = sorted(folder.glob("cache/index*/level"))
        last = max(caches, key=lambda path: _read(path), default=None)
        shared = "" if last is None else _read(last.parent / "shared_cpu_list")
        node = next((path.name for path in sorted(folder.glob("node[0-9]*"))), "")
        siblings = _read(folder / "topology" / "thread_siblings_list").replace("-", ",").split(",")
        is_second = siblings[0].isdigit() and int(siblings[0]) != cpu
        domains.setdefault((node, shared), []).append((is_second, cpu))
    return [[cpu for _, cpu in sorted(found)] for _, found in sorted(domains.items())]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
