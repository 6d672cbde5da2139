"""Text and bytes are iterable, too: no call takes them for token ids, or for a list of prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from divergence import first_divergence

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request
from llamabranch.cli.jsonl import read_requests
from llamabranch.errors import ConfigError, LlamaBranchError, TokenizeError

BYTES = {"bytes": b"abc", "bytearray": bytearray(b"abc"), "memoryview": memoryview(b"abc")}
NO_IDS: dict[str, object] = {**BYTES, "text": "abc", "number": 5, "nothing": None}
NO_PROMPTS = {name: value for name, value in NO_IDS.items() if name != "text"}

# Each takes token ids; the branch has read some.
TAKES_IDS: dict[str, Callable[[Branch, Any], object]] = {
    "prefill": lambda b, ids: b.prefill(ids),
    "extend": lambda b, ids: b.extend(ids),
    "store.prefill": lambda b, ids: lb.BranchStore(b.ctx).prefill({b: ids}),
    "decode": lambda b, ids: b.ctx.decode(ids, 0),
    "detokenize": lambda b, ids: b.ctx.detokenize(ids),
    "model.detokenize": lambda b, ids: b.ctx.model.detokenize(ids),
    "divergence prompt": lambda b, ids: first_divergence(b.ctx, ids, [5], [6], b.sampling),
    "divergence left": lambda b, ids: first_divergence(b.ctx, [5], ids, [5], b.sampling),
    "divergence right": lambda b, ids: first_divergence(b.ctx, [5], [5], ids, b.sampling),
}
# Each takes a prompt: text or token ids.
TAKES_PROMPT: dict[str, Callable[[Context, Any], object]] = {
    "start": lambda ctx, prompt: Branch.start(ctx, prompt),
    "speculator": lambda ctx, prompt: lb.Speculator(ctx).generate(prompt),
    "session": lambda ctx, prompt: lb.InferenceSession(ctx, prompt),
    "request": lambda ctx, prompt: Request(prompt),
    "generate": lambda ctx, prompt: Engine(ctx).generate([prompt]),
}


def refuse(kind: type[LlamaBranchError], call: Callable[[], object], *, hinted: bool) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert not hinted or caught.value.hint


@pytest.mark.parametrize("value", NO_IDS.values(), ids=NO_IDS)
@pytest.mark.parametrize("call", TAKES_IDS.values(), ids=TAKES_IDS)
def test_text_and_bytes_are_no_token_ids(
    call: Callable[[Branch, Any], object], value: object, ctx: Context
) -> None:
    branch = Branch.start(ctx, [5, 6])
    refuse(TokenizeError, lambda: call(branch, value), hinted=True)
    assert branch.tokens == [5, 6]
    assert ctx.usage().sequences == {branch.seq_id: 2}


def test_check_of_token_ids_refuses_bytes(ctx: Context) -> None:
    for value in BYTES.values():
        refuse(TokenizeError, lambda v=value: ctx.model.check_tokens(v), hinted=True)  # type: ignore[misc]
    ctx.model.check_tokens((5, 6))


@pytest.mark.parametrize("value", NO_PROMPTS.values(), ids=NO_PROMPTS)
@pytest.mark.parametrize("call", TAKES_PROMPT.values(), ids=TAKES_PROMPT)
def test_bytes_are_no_prompt(
    call: Callable[[Context, Any], object], value: object, ctx: Context
) -> None:
    refuse(
        ConfigError,
        lambda: call(ctx, value),
        hinted=isinstance(value, tuple(map(type, BYTES.values()))),
    )
    assert ctx.usage().cells_used == 0
    assert ctx.n_seq_free == ctx.n_seq_max


@pytest.mark.parametrize("requests", [b"abc", bytearray(b"abc"), {"a": "b"}, 5, None], ids=repr)
def test_what_is_no_request_is_refused(requests: Any, ctx: Context) -> None:
    engine = Engine(ctx, max_tokens=2)

    refuse(ConfigError, lambda: engine.generate(requests), hinted=True)
    refuse(ConfigError, lambda: engine.stream(requests), hinted=True)
    assert engine.stats.target_forward_passes == 0


@pytest.mark.parametrize("skip", ["ab", ("0", 0), [0], 5, [("0", "0")], {"0": 0}], ids=repr)
def test_what_to_skip_is_pairs(skip: Any, ctx: Context) -> None:
    refuse(ConfigError, lambda: Engine(ctx).generate(["a"], skip=skip), hinted=True)


def test_requests_are_read_from_lines(ctx: Context) -> None:
    for text in ("one\ntwo\n", b"one\ntwo\n"):
        refuse(ConfigError, lambda t=text: read_requests(t, json_lines=False), hinted=True)  # type: ignore[misc]
    read = read_requests(iter(["one\n", "two\n"]), json_lines=False)
    assert [request.prompt for request in read] == ["one", "two"]


def test_ids_come_in_any_kind_of_sequence(ctx: Context) -> None:
    """What was taken before is taken still."""
    for prompt in ((5, 6, 7), range(5, 8), [5, 6, 7]):
        with Branch.start(ctx, prompt) as branch:
            assert branch.tokens == [5, 6, 7]
        (result,) = Engine(ctx, max_tokens=1).generate([Request(prompt)])
        assert (result.num_prompt_tokens, result.finish_reason) == (3, "length")
    (result,) = Engine(ctx, max_tokens=1).generate(prompt for prompt in ["text"])
    assert len(result.tokens) == 1
