"""Shared by tests of the engine: the text of a request that runs alone, all events, a random model."""

from __future__ import annotations

from pathlib import Path

import toys

from llamabranch import Branch, Context, Engine, Event, Request, Result, SamplingParams

PROMPTS = ["Once upon a time", "The wolf", "In the forest there stood", "A king had a daughter"]


def alone(ctx: Context, request: Request, result: Result) -> list[int]:
    """Return the tokens of the request when it runs alone."""
    params = (request.sampling or SamplingParams()).replace(seed=result.seed)
    with Branch.start(ctx, request.prompt, sampling=params, grammar=request.grammar) as branch:
        return [t.token for t in branch.generate(request.max_tokens, request.stop)]


def check_alone(ctx: Context, request: Request, result: Result) -> None:
    """Fail unless tokens, text and finish reason are those of the request when it runs alone."""
    params = (request.sampling or SamplingParams()).replace(seed=result.seed)
    with Branch.start(ctx, request.prompt, sampling=params, grammar=request.grammar) as branch:
        text = "".join(t.text for t in branch.generate(request.max_tokens, request.stop))
        found = result.tokens, result.text, result.finish_reason
        assert found == (branch.generated, text, branch.finish_reason), (request, result)


def run(engine: Engine) -> list[Event]:
    """Return the events of all steps until nothing is left."""
    events = []
    while engine.has_unfinished():
        events += engine.step()
    return events


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
    return toys.write_llama(
        path, vocab="bytes", weights="q8_0", n_layer=1, n_embd=32, n_head=1, n_ff=32
    )
