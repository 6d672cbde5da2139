"""Texts that are parked: they keep their cells until others need them, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

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
