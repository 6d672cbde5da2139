"""Wrong arguments of every search: a typed error before anything is decoded or taken."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, search
from llamabranch.errors import ConfigError, LlamaBranchWarning

STORY = "Once upon a time"
Values = tuple[object, ...]

NOT_INTEGER: Values = (2.5, math.nan, math.inf, True, "3", [3], np.array([1, 2]))
NOT_POSITIVE: Values = (0, -1, -(2**63), 1 << 9000, None, *NOT_INTEGER)
COUNT: Values = (*NOT_POSITIVE, 10**9, 2**63)
NO_NUMBER: Values = ("1", True, [1], 1j, np.array([1.0, 2.0]), math.nan)
BIG: Values = (10**400, math.inf)
FUNCTION: Values = (-1, 1, True, "len", [], object())
CONSTRAINT: Values = (*FUNCTION, lb.search.Potential, "no e")


def score(text: object) -> float:
    return 1.0


# What no argument of a type takes, by its annotation.
WRONG: dict[str, Values] = {
    "Branch": (None, 1, "Once", [1, 2], Branch, object()),
    "int": (*NOT_INTEGER, None, -1, -(2**63), 2**63, 1 << 9000),
    "int | None": NOT_INTEGER,
    "float": (None, *NO_NUMBER, *BIG),
    "float | None": NO_NUMBER,
    "bool": (0, 1, "yes", None, [], np.array([True])),
    "bool | str": ("always", 0, 1, None, 1.0, [], np.array([True, False])),
    "str": ("", "best", 1, True, None, [], ["mean"], np.array(["beam", "mean"]), b"mean"),
    "str | int": ("", 0, -1, 2.5, True, None, b"x", []),
    "str | Callable[[Hypothesis], float]": (1, None, "best", [], np.array(["mean"]), b"sum"),
    "str | Sequence[str]": (
        5, True, b"x", [""], "", [1], ["a", None], {"a": 1}, object(), np.array(["a"]),
    ),
    "Sequence[str]": (None, "ab", b"ab", 5, [], [""], [1], ["a", ""], ["a", "\ud800"], {"a": 1}),
    "Sequence[Potential]": (
        -1, None, "ab", [1], [None], search.Potential(), [search.Potential], score, {"a": 1},
    ),
    "OnStep | None": FUNCTION,
    "Proposal | None": FUNCTION,
    "Callable[[str], float]": (*FUNCTION, None),
    "Callable[[str], float] | None": FUNCTION,
    "Callable[[str], Answer | None]": (*FUNCTION, None),
    "ConstraintLike | None": CONSTRAINT,
    "Callable[[str], bool] | Constraint": (*CONSTRAINT, None),
    "Drafter | None": (
        -1, 1, "suffix", True, [], object(), lb.SuffixDrafter,
    ),
    "Expand | int": (0, -1, 2.5, True, None, "ab", [], 10**9, 2**63),
}  # fmt: skip
MUST_DRAW = ("beam_search", "smc", "rejection", "tree_search", "TreeSearch")
# What is out of the range of an argument.
BEYOND: dict[str, Values] = {
    **dict.fromkeys(("beams", "max_steps", "particles", "max_draws", "iterations"), (0, 10**9)),
    **dict.fromkeys(("parallel", "width"), (0, -1, 10**9)),
    "n": (0, 2**63),
    **{f"{name} n": (10**9,) for name in ("best_of_n", "vote", "step_search", "rejection")},
    "beam_search n": (5,),
    "beam_width": (0, 3, 10**9),
    "max_tokens": (-1, 2**31, 2**63, 1 << 9000),
    **{f"{name} max_tokens": (0,) for name in MUST_DRAW},
    "max_rejects": (0,),
    "reject_every": (0, -1),
    "length_penalty": (33.0, -33.0, 1e308, -1e308),
    "confidence": (*BIG, 0, 0.5, 0.95, 1.5),
    "entropy": (-1.0,),
    "threshold": (-0.1, 1.1),
    "power": (0, -1, 101),
    "exploration": (-1, 1e10),
}

Call = Callable[..., object]
SEARCHES: dict[str, tuple[Call, dict[str, Any]]] = {
    "beam_search": (search.beam_search, {}),
    "best_of_n": (search.best_of_n, {}),
    "vote": (search.vote, {"answer": str}),
    "step_search": (search.step_search, {"reward": score}),
    "smc": (search.smc, {}),
    "rejection": (search.rejection, {"constraint": score}),
    "select": (search.select, {"choices": [" there"]}),
    "tree_search": (search.tree_search, {"reward": score}),
    "TreeSearch": (search.TreeSearch, {}),
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
        settings = lb.SamplingParams(seed=1, top_k=0, top_p=1.0, min_p=0.0)  # smc refuses others
        branch = Branch.start(ctx, STORY, sampling=settings)
        branch.fork().prune()
        yield branch
        ctx.audit()


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("state", ["pruned", "empty", "closed"])
def test_a_branch_that_cannot_be_continued(name: str, state: str, target: lb.Model) -> None:
    call, needed = SEARCHES[name]
    with lb.Context(target, n_ctx=256, n_threads=1) as ctx:
        branch = Branch.create(ctx, lb.SamplingParams(top_k=0, top_p=1.0, min_p=0.0))
        if state == "pruned":
            branch.prune()
        if state == "closed":
            ctx.close()
        before = ctx.decoder.n_decodes
        with pytest.raises(lb.errors.UsageError):
            call(branch, **needed)
        assert ctx.decoder.n_decodes == before


def test_a_drafter_must_suit_the_target(shared_branch: Branch) -> None:
    class Other(lb.SuffixDrafter):
        def check(self, target: lb.Model) -> None:
            raise lb.errors.VocabularyMismatchError("another vocabulary")

    before = shared_branch.ctx.decoder.n_decodes
    with pytest.raises(lb.errors.VocabularyMismatchError):
        search.best_of_n(shared_branch, 2, drafter=Other())
    assert shared_branch.ctx.decoder.n_decodes == before


def test_arguments_and_settings_that_exclude_each_other(shared_branch: Branch) -> None:
    ctx, plain = shared_branch.ctx, shared_branch.sampling
    with pytest.raises(ConfigError, match="score or reward"):
        search.best_of_n(shared_branch, 2, score="sum", reward=len)
    with pytest.raises(ConfigError, match="multiple of beam_width"):
        search.step_search(shared_branch, len, 4, beam_width=3)
    settings = {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "temperature": 0.0, "typical_p": 0.9}
    for name, value in settings.items():
        root = Branch.start(ctx, STORY, sampling=plain.replace(**{name: value}))  # type: ignore[arg-type]
        with root, pytest.raises(ConfigError, match=name):
            search.smc(root, 2, 3)
    root = Branch.start(ctx, STORY, sampling=plain, grammar='root ::= "a"')
    with root, pytest.raises(ConfigError, match="grammar") as raised:
        search.rejection(root, lambda text: True)
    assert "smc" in (raised.value.hint or "")


def test_trees_are_asked_and_drawn_with_what_they_know(shared_branch: Branch) -> None:
    with search.TreeSearch(shared_branch, 2, max_tokens=4) as tree:
        for n in COUNT:
            with pytest.raises(ConfigError):
                tree.ask(n)  # type: ignore[arg-type]
        for n in NOT_POSITIVE:
            with pytest.raises(ConfigError):
                tree.result(n)  # type: ignore[arg-type]
        asked = tree.ask(3)
        node = asked[0][0]
        for wrong in (
            None,
            1,
            "a",
            [],
            object(),
            search.SearchNode(None, (), 0.0),
            tree.lines.root,
        ):
            with pytest.raises(lb.errors.UsageError):
                tree.tell(wrong, 1.0)  # type: ignore[arg-type]
        for value in (None, "1", math.nan, math.inf, True):
            with pytest.raises(ConfigError):
                tree.tell(node, value)  # type: ignore[arg-type]
        for leaf, _ in asked:
            tree.tell(leaf, 0.5)
        with pytest.raises(lb.errors.UsageError):
            tree.tell(node, 0.5)  # a second time
        assert tree.result(3).best.score == 0.5
    for wrong in (None, 1, "a", []):
        with pytest.raises(ConfigError):
            search.outline(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        search.SearchObserver()  # type: ignore[abstract]


RETURNS: dict[str, tuple[Call, str, Values]] = {
    "best_of_n": (search.best_of_n, "reward", (None, *NO_NUMBER)),
    "best_of_n score": (search.best_of_n, "score", (None, *NO_NUMBER)),
    "step_search": (search.step_search, "reward", (None, *NO_NUMBER, math.inf)),
    "tree_search": (search.tree_search, "reward", (None, *NO_NUMBER)),
    "tree_search moves": (
        partial(search.tree_search, reward=score, iterations=2),
        "expand",
        (None, 5, "ab", [""], [1], iter(["a"])),
    ),
    "smc critic": (search.smc, "critic", (None, *NO_NUMBER, math.inf)),
    # The distribution is over a vocabulary with other tokens.
    "smc proposal": (search.smc, "proposal", (None, 5, lb.Distribution.point(5))),
}


@pytest.mark.parametrize("name", RETURNS)
def test_what_functions_return_is_checked(name: str, shared_branch: Branch) -> None:
    call, argument, values = RETURNS[name]
    before = shared_branch.ctx.usage(), shared_branch.ctx.n_seq_free
    for value in values:
        with pytest.raises(ConfigError):
            call(shared_branch, max_tokens=2, **{argument: lambda *_, value=value: value})
        assert (shared_branch.ctx.usage(), shared_branch.ctx.n_seq_free) == before


def test_what_is_no_answer_is_warned_of(shared_branch: Branch) -> None:
    for value in ([1], {"a": 1}, 1j, b"1", object()):
        with pytest.warns(LlamaBranchWarning, match="what answer returns"):
            search.vote(shared_branch, lambda _, value=value: value, 2, 2)  # type: ignore[misc]


def test_lengths_are_penalised_within_the_limits(shared_branch: Branch) -> None:
    for penalty in (-32, 32):
        result = search.beam_search(shared_branch, 2, 40, length_penalty=penalty)
        assert math.isfinite(result.best.score) and result.best.score != 0.0
