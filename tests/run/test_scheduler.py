"""Texts that are parked: they keep their cells until others need them, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys

import llamabranch as lb
from llamabranch import Context, Request
from llamabranch.run.job import Choice, State

STORY = "The wolf ran and the wolf ran and the wolf"
WARM = lb.SamplingParams(temperature=0.8, seed=5)


def choice_of(engine: lb.Engine, name: str, n_tokens: int) -> Choice:
    """Step until a request has so many tokens; return its text."""
    while True:
        choices = engine.client.jobs[name].choices
        if choices and len(choices[0].output.tokens) >= n_tokens:
            return choices[0]
        engine.step()


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_a_paused_text_keeps_its_cells_until_others_need_them(
    target: lb.Model, n_seq_max: int
) -> None:
    """A text that takes its place begins like it, but has settings of its own."""
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "exact": True}
    with Context(target, n_seq_max=n_seq_max, **options) as ctx, lb.Engine(ctx) as engine:
        settings = [lb.SamplingParams(temperature=t, seed=2) for t in (0.0, 0.7, 1.0)]
        others = [Request(STORY, max_tokens=12, sampling=each) for each in settings]
        first = Request(STORY, max_tokens=12, sampling=WARM)
        alone = engine.generate([first])[0], *engine.generate(others)
        name = engine.add_request(first)
        choice = choice_of(engine, name, 5)
        engine.client.pause(name)
        names = [engine.add_request(other) for other in others]
        events = engine.step()
        assert choice.state is State.PARKED
        while engine.client.jobs.keys() & names:
            events += engine.step()
        assert [choice.state, choice.sequence, choice.num_preemptions] == [State.PARKED, None, 1]
        engine.client.resume(name)
        while engine.has_unfinished():
            events += engine.step()
    results = {event.id: event.result for event in events if event.result is not None}
    assert [results[each].tokens for each in (name, *names)] == [each.tokens for each in alone]


def test_texts_that_do_not_fit_together_run_one_after_the_other(tmp_path: Path) -> None:
    """The window's cells are fewer than the table knows; no two texts may meet again and again."""
    path = toys.write_toy(tmp_path / "window.gguf", "gemma3", vocab="bytes")
    beginning = [2 + (i * i + 3 * i) % 190 for i in range(700)]
    options: dict[str, Any] = {"n_ctx": 1280, "n_seq_max": 2, "n_threads": 1, "swa_full": False}
    with lb.Model(path) as model, Context(model, **options) as ctx:
        prompts = [beginning + [5 + k] * 30 for k in range(3)]
        results = ctx.complete(prompts, max_tokens=3, min_tokens=3)
        assert [result.finish_reason for result in results] == ["length"] * 3
