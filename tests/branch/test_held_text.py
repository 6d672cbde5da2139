"""Text that is held back for a stop string is emitted at the end, however the generation ends.

The stop string is the text's own continuation, so that some text is held back wherever it ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from drafts import make

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams
from llamabranch.errors import CacheFullError, CapacityError, DecodeInterruptedError

N_CTX = 256
N_PROMPT = 240
DRAFTERS = ("none", "model", "suffix")


@pytest.fixture(scope="module")
def params(target: lb.Model) -> SamplingParams:
    bias = {target.eos or 0: -math.inf}
    return SamplingParams(temperature=0.8, seed=3, logit_bias=bias)


@pytest.fixture(scope="module")
def pieces(target: lb.Model, params: SamplingParams) -> list[str]:
    """The text, token by token; it is much longer than the small context."""
    with (
        Context(target, n_ctx=1024, n_seq_max=1, n_threads=1, exact=True) as ctx,
        Branch.start(ctx, [5] * N_PROMPT, sampling=params) as branch,
    ):
        return [produced.text for produced in branch.generate(60)]


@pytest.fixture
def small(target: lb.Model) -> Iterator[Context]:
    with Context(target, n_ctx=N_CTX, n_seq_max=4, n_threads=1, exact=True) as ctx:
        yield ctx
        assert ctx.usage().cells_used == 0
        ctx.audit()


def stop_after(pieces: list[str], n: int) -> tuple[str, ...]:
    """Return a string that is nearly complete after ``n`` tokens, and is then not continued."""
    return ("".join(pieces[n - 4 : n]) + "\x00",)


def shown(items: list[lb.Produced]) -> str:
    """Return the emitted text. An item with ``is_stop`` does not belong to it."""
    for item in items:
        assert item.is_stop == (item.token == -1)
    assert not any(item.is_stop for item in items[:-1])
    return "".join(item.text for item in items)


@pytest.mark.parametrize("which", DRAFTERS)
@pytest.mark.parametrize(
    ("caller", "end"), [("speculator", "capacity"), ("engine", "capacity"), ("engine", "cancelled")]
)
def test_it_is_emitted_at_the_end(
    caller: str,
    end: str,
    which: str,
    small: Context,
    draft_ctx: Context,
    pieces: list[str],
    params: SamplingParams,
) -> None:
    n = N_CTX - N_PROMPT + 1 if end == "capacity" else 6  # the last one needs no cell
    config = lb.SpeculativeConfig(draft_k=3 if end == "capacity" else 0)
    drafter, prompt, stop = make(which, draft_ctx), [5] * N_PROMPT, stop_after(pieces, n)
    items: list[lb.Produced] = []
    done: Any = None
    if caller == "speculator":
        speculator = lb.Speculator(small, drafter, config)
        done = speculator.generate(prompt, max_tokens=None, sampling=params, stop=stop)
        with pytest.raises(CacheFullError):
            for item in done:
                items.append(item)
        assert [item.token for item in items[:-1]] == done.tokens
        assert list(done) == []
    else:
        engine = Engine(small, drafter, config, max_tokens=None)
        request = Request(prompt, max_tokens=None, sampling=params, stop=stop)
        for event in engine.stream([request]):
            assert done is None
            done = event.result
            if event.emitted is not None:
                items.append(event.emitted)
                if end == "cancelled" and len(items) == n:
                    engine.abort("0")
    assert done.finish_reason == end and len(done.tokens) == n
    assert shown(items) == done.text == "".join(pieces[:n])


@pytest.mark.parametrize("how", ["close", "interrupt", "session", "close at the full cache"])
def test_generation_that_is_ended_has_it_in_its_text(
    how: str, ctx: Context, small: Context, pieces: list[str], params: SamplingParams
) -> None:
    at_end = how == "close at the full cache"
    n = N_CTX - N_PROMPT + 1 if at_end else 6
    context, stop = small if at_end else ctx, stop_after(pieces, n)
    branch = Branch.start(context, [5] * N_PROMPT, sampling=params)
    generation: Any = lb.Speculator(context).generate(branch, max_tokens=None, stop=stop)
    if how == "session":
        generation = lb.InferenceSession(context, branch, stop=stop)
        items = [generation.next_token() for _ in range(n)]
        assert generation.text == shown(items)
    else:
        items = list(itertools.islice(generation, n))
    assert shown(items) != "".join(pieces[:n])
    if how == "interrupt":
        ctx.interrupt()
        with pytest.raises(DecodeInterruptedError):
            for item in generation:
                items.append(item)
        assert shown(items) == "".join(pieces[:n])
    for _ in range(2):
        with suppress(CapacityError):  # the branch has no cell for the last one
            generation.close()
    assert generation.text == "".join(pieces[:n])
    assert len(generation.tokens) == n
    branch.prune()


@pytest.mark.parametrize("which", DRAFTERS)
def test_session_has_it_in_its_text_and_goes_on_when_there_is_room(
    which: str, small: Context, draft_ctx: Context, pieces: list[str], params: SamplingParams
) -> None:
    n = 9
    guest = Branch.start(small, [7] * (N_CTX - N_PROMPT - n + 1))
    drafter = make(which, draft_ctx)
    stop = "".join(pieces[n - 4 : n + 2])  # complete two tokens later
    config = lb.SpeculativeConfig(draft_k=2)
    with lb.InferenceSession(
        small, [5] * N_PROMPT, sampling=params, stop=[stop], config=config
    ) as session:
        emitted = ""
        with pytest.raises(CacheFullError):
            while (item := session.next_token(drafter)) is not None:
                emitted += item.text
        assert session.text == "".join(pieces[:n])
        assert session.text.startswith(emitted)
        assert emitted != session.text
        with pytest.raises(CacheFullError):
            session.next_token(drafter)
        assert session.text == "".join(pieces[:n])
        guest.prune()
        while (item := session.next_token(drafter)) is not None:
            emitted += item.text
        assert session.finish_reason == "stop"
        assert session.text == emitted == "".join(pieces[: n - 4])
