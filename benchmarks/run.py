"""Run the benchmarks of the documents one after another, each in a process of its own.

    python -m benchmarks.run [--only drafts serve] [--quick] [other options of the programs]

Other options are passed on to each program. Tables are printed as they come; the last line of each
program is its JSON line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

PROGRAMS = ("length", "drafts", "serve", "agents")


def main() -> None:
    """Run the selected programs; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description="all benchmarks")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    args, others = parser.parse_known_args()
    failed = []
    for program in args.only:
        print(f"\n## {program}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{program}", *others]
        if subprocess.run(command, check=False).returncode:
            failed.append(program)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
