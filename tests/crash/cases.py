"""Run the cases of a group in this process: ``python cases.py GROUP [FIRST [HOW MANY]]``.

One line says which case starts, one how it ended; a case without the second line ended the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import crash_branches
import crash_files
import crash_memory
import crash_sampling
import crash_speculative
from crash_harness import GROUPS, run

__all__ = ["GROUPS"]

MODULES = (
    crash_memory,
    crash_files,
    crash_sampling,
    crash_branches,
    crash_speculative,
)

if __name__ == "__main__":
    first = sys.argv[2] if len(sys.argv) > 2 else None
    run(sys.argv[1], first, int(sys.argv[3]) if len(sys.argv) > 3 else None)
