"""Wrong arguments of every search: a typed error before anything is decoded or taken."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, search
from llamabranch.errors import ConfigError, LlamaBranchWarning

STORY = "Once upon a time"
Values = tuple[object, ...]

NOT_INTEGER: Values = (2.5, math.nan, math.inf, True, "3", [3], np.array([1, 2]))
NO_NUMBER: Values = ("1", True, [1], 1j, np.array([1.0, 2.0]), math.nan)
BIG: Values = (10**400, math.inf)
FUNCTION: Values = (-1, 1, True, "len", [], object())


# What no argument of a type takes, by its annotation.
WRONG: dict[str, Values] = {
    "Branch": (None, 1, "Once", [1, 2], Branch, object()),
    "int": (*NOT_INTEGER, None, -1, -(2**63), 2**63, 1 << 9000),
    "int | None": NOT_INTEGER,
    "float": (None, *NO_NUMBER, *BIG),
    "float | None": NO_NUMBER,
    "bool": (0, 1, "yes", None, [], np.array([True])),
    "bool | str": ("always", 0, 1, None, 1.0, [], np.array([True, False])),
    "str | Sequence[str]": (
        5, True, b"x", [""], "", [1], ["a", None], {"a": 1}, object(), np.array(["a"]),
    ),
    "Callable[[str], float] | None": FUNCTION,
    "Callable[[str], Answer | None]": (*FUNCTION, None),
}  # fmt: skip
# What is out of the range of an argument.
BEYOND: dict[str, Values] = {
    "beams": (0, 10**9),
    "width": (0, -1, 10**9),
    "n": (0, 2**63),
    "best_of_n n": (10**9,),
    "vote n": (10**9,),
    "max_tokens": (-1, 2**31, 2**63, 1 << 9000),
    "beam_search max_tokens": (0,),
    "length_penalty": (33.0, -33.0, 1e308, -1e308),
    "confidence": (*BIG, 0, 0.5, 0.95, 1.5),
}

Call = Callable[..., object]
SEARCHES: dict[str, tuple[Call, dict[str, Any]]] = {
    "beam_search": (search.beam_search, {}),
    "best_of_n": (search.best_of_n, {}),
    "vote": (search.vote, {"answer": str}),
}


def cases() -> list[Any]:
    """Return all arguments of all searches with their wrong values."""
    return [
        pytest.param(
            name,
            key,
            (*WRONG[p.annotation], *BEYOND.get(key, ()), *BEYOND.get(f"{name} {key}", ())),
            id=f"{name}-{key}",
        )
        for name, (call, _) in SEARCHES.items()
        for key, p in inspect.signature(call).parameters.items()
    ]


@pytest.mark.parametrize(("name", "argument", "values"), cases())
def test_a_wrong_argument_is_a_typed_error_before_anything_happens(
    name: str, argument: str, values: Values, shared_branch: Branch
) -> None:
    call, needed = SEARCHES[name]
    branch, ctx = shared_branch, shared_branch.ctx
    before = ctx.decoder.n_decodes, ctx.usage(), ctx.n_seq_free, branch.tokens
    for value in values:
        arguments = needed | {"branch": branch, argument: value}
        with pytest.raises((ConfigError, lb.errors.TokenizeError)) as raised:
            call(arguments.pop("branch"), **arguments)
        assert str(raised.value)
        assert (ctx.decoder.n_decodes, ctx.usage(), ctx.n_seq_free, branch.tokens) == before


@pytest.fixture(scope="module")
def shared_branch(target: lb.Model) -> Any:
    with lb.Context(target, n_ctx=512, n_seq_max=6, n_threads=1) as ctx:
        branch = Branch.start(ctx, STORY, seed=1)
        branch.fork().prune()
        yield branch
        ctx.audit()


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("state", ["pruned", "empty", "closed"])
def test_a_branch_that_cannot_be_continued(name: str, state: str, target: lb.Model) -> None:
    call, needed = SEARCHES[name]
    with lb.Context(target, n_ctx=256, n_threads=1) as ctx:
        branch = Branch.create(ctx)
        if state == "pruned":
            branch.prune()
        if state == "closed":
            ctx.close()
        before = ctx.decoder.n_decodes
        with pytest.raises(lb.errors.UsageError):
            call(branch, **needed)
        assert ctx.decoder.n_decodes == before


def test_what_a_reward_returns_is_checked(shared_branch: Branch) -> None:
    before = shared_branch.ctx.usage(), shared_branch.ctx.n_seq_free
    for value in (None, *NO_NUMBER):
        options: Any = {"reward": lambda _, v=value: v}
        with pytest.raises(ConfigError):
            search.best_of_n(shared_branch, max_tokens=2, **options)
        assert (shared_branch.ctx.usage(), shared_branch.ctx.n_seq_free) == before


def test_what_is_no_answer_is_warned_of(shared_branch: Branch) -> None:
    for value in ([1], {"a": 1}, 1j, b"1", object()):
        with pytest.warns(LlamaBranchWarning, match="what answer returns"):
            search.vote(shared_branch, lambda _, value=value: value, 2, 2)  # type: ignore[misc]


def test_lengths_are_penalised_within_the_limits(shared_branch: Branch) -> None:
    for penalty in (-32, 32):
        result = search.beam_search(shared_branch, 2, 40, length_penalty=penalty)
        assert math.isfinite(result.best.score) and result.best.score != 0.0
