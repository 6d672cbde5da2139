"""How many files a token, a round and a step pass, followed as they run: no more than before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import llamabranch as lb

PACKAGE = Path(lb.__file__).parent
WARM = lb.SamplingParams(temperature=0.8, seed=1)


def followed(act: Callable[[], object]) -> list[str]:
    """Return the files of the package in which functions are called, in the order of their first call."""
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files[path.relative_to(PACKAGE).as_posix()] = None

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return list(files)


def token() -> list[str]:
    with lb.load(n_threads=1) as ctx:
        tokens = lb.Branch.start(ctx, "Once upon a time", sampling=WARM).generate(max_tokens=20)
        for _ in range(10):
            next(tokens)
        return followed(lambda: next(tokens))


def round_() -> list[str]:
    with lb.load(n_threads=1) as ctx, lb.load("tale-draft", n_threads=1) as draft:
        config = lb.SpeculativeConfig(draft_k=4)
        speculator = lb.Speculator(ctx, lb.ModelDrafter(draft), config)
        generation = speculator.generate("The king", max_tokens=200, sampling=WARM)
        while generation.stats.num_drafts < 5:
            next(generation)

        def rounds() -> None:  # with drafts that are accepted whole, and others
            while generation.stats.num_drafts < 25:
                next(generation)

        return followed(rounds)


def step() -> list[str]:
    with lb.load(n_seq_max=4, n_ctx=1024, n_threads=1) as ctx:
        engine = lb.Engine(ctx, None, seed=1)
        for _ in range(4):
            engine.add_request(lb.Request("Once upon a time", max_tokens=30, sampling=WARM))
        for _ in range(5):
            engine.step()
        return followed(engine.step)


@pytest.mark.parametrize(("way", "most"), [(token, 13), (round_, 17), (step, 18)])
def test_few_files_are_passed(way: Callable[[], list[str]], most: int) -> None:
    files = way()
    assert len(files) <= most, "\n".join(files)
