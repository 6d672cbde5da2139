"""Cores of workers: no two share one, and they come back when a process ends, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamabranch.scale.placement import cache_domains, claim_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system has no sched_setaffinity"
)


def test_claims_share_no_core(tmp_path: Path) -> None:
    domains = [[0, 1, 2], [3, 4, 5]]
    first = claim_cores(2, tmp_path, domains)
    second = claim_cores(2, tmp_path, domains)
    third = claim_cores(2, tmp_path, domains)  # no domain has two free: one of each
    assert first is not None and second is not None and third is not None
    assert [first.cores, second.cores, third.cores] == [[0, 1], [3, 4], [2, 5]]
    assert claim_cores(1, tmp_path, domains) is None
    second.close()
    again = claim_cores(2, tmp_path, domains)
    assert again is not None
    assert again.cores == [3, 4]
    for claim in (first, third, again):
        claim.close()


def test_more_cores_than_there_are(tmp_path: Path) -> None:
    assert claim_cores(3, tmp_path, [[0, 1]]) is None
    all_of_them = claim_cores(2, tmp_path, [[0, 1]])  # a claim that failed holds nothing
    assert all_of_them is not None
    all_of_them.close()
    assert claim_cores(1, tmp_path, []) is None


def test_cores_of_a_killed_process_are_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from llamabranch.scale.placement import claim_cores\n"
        f"claim = claim_cores(2, Path({str(tmp_path)!r}), [[0, 1]])\n"
        "print(claim.cores, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[0, 1]\n"
        assert claim_cores(1, tmp_path, [[0, 1]]) is None
        process.kill()
        process.wait()
    claim = claim_cores(2, tmp_path, [[0, 1]])
    assert claim is not None
    claim.close()


def test_domains_have_each_core_of_this_process_once() -> None:
    cores = [core for domain in cache_domains() for core in domain]
    assert sorted(cores) == sorted(os.sched_getaffinity(0))
