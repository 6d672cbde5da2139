"""Shared by tests of the engine: the text of a request that runs alone, all events, a random model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import toys

from llamabranch import Branch, Context, Engine, Event, Request, Result, SamplingParams

PROMPTS = ["Once upon a time", "The wolf", "In the forest there stood", "A king had a daughter"]


def check_alone(ctx: Context, request: Request, result: Result) -> None:
    """Fail unless a text is that of its request when it runs alone, or the beginning of it."""
    params = (request.sampling or SamplingParams()).replace(seed=result.seed)
    with Branch.start(ctx, request.prompt, sampling=params, grammar=request.grammar) as branch:
        text = "".join(t.text for t in branch.generate(request.max_tokens, request.stop))
        expected = branch.generated_tokens, text, branch.finish_reason
    if result.finish_reason in ("cancelled", "capacity"):
        assert result.tokens == expected[0][: len(result.tokens)], (request, result)
    else:
        assert (result.tokens, result.text, result.finish_reason) == expected, (request, result)


def run(engine: Engine) -> list[Event]:
    """Return the events of all steps until nothing is left."""
    events = []
    while engine.has_unfinished():
        events += engine.step()
    return events


@dataclass
class Heard:
    """What the events of a text have said: its tokens, text and thought, and its result."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    thought: str = ""
    result: Result | None = None


def heard(events: Iterable[Event]) -> dict[tuple[str, int], Heard]:
    """Return what was said of each text, by (id, sample); it must be what the results say."""
    texts: dict[tuple[str, int], Heard] = {}
    for event in events:
        said = texts.setdefault((event.id, event.sample), Heard())
        assert said.result is None, "a text ended twice"
        assert not (event.thought and (event.text or said.text))
        if event.ended_thought:
            said.tokens = [token.token for token in event.ended_thought]
        elif event.emitted is not None and not event.emitted.is_stop:
            said.tokens.append(event.emitted.token)
        said.text += event.text
        said.thought += event.thought
        if event.result is not None:
            result = said.result = event.result
            found = said.tokens, said.text, said.thought.strip()
            assert found == (result.tokens, result.text, result.thought), result
    return texts


def results_of(events: list[Event]) -> dict[str, Result]:
    """Return the results among events by their ids."""
    return {event.id: event.result for event in events if event.result is not None}


def assert_clean(*contexts: Context) -> None:
    """Assert that only the prefix caches have something left, and clear them."""
    for ctx in contexts:
        usage = ctx.usage()
        assert (usage.cells_used, ctx.n_seq_free, usage.in_order) == (0, ctx.n_seq_max, True)
        if ctx.prefix_cache is not None:
            ctx.prefix_cache.clear()
            usage = ctx.usage()
        assert (usage.cells_cached, usage.cells_reserved) == (0, 0)
        ctx.audit()


def write_tiny(path: Path) -> Path:
    """Write a random model over bytes whose step takes a fraction of a millisecond."""
    return toys.write_llama(path, vocab="bytes", n_layer=1, n_embd=32, n_head=1, n_ff=32)
