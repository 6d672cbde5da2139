"""BranchStore: many branches in one decode, each as if it were alone. Either all change or none."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import numpy as np
import pytest

import llamabranch as lb
from llamabranch import Branch, BranchStore, Context, SamplingParams
from llamabranch.errors import (
    GrammarError,
    TokenizeError,
)

STORY = "Once upon a time there was a poor woodcutter who lived with his wife and two children"
WARM = SamplingParams(temperature=0.9, seed=3)
LOOKING_BACK = WARM.replace(repeat_penalty=1.3, penalty_last_n=16, dry_multiplier=0.8)

Facts = tuple[list[int], list[float], float, lb.Produced]


def facts(branch: Branch) -> Facts:
    return branch.tokens, branch.logits.tolist(), branch.log_likelihood(), branch.produce()


def same(first: Branch, second: Branch) -> bool:
    a, b = facts(first), facts(second)
    return a[:2] == b[:2] and repr(a[2]) == repr(b[2]) and a[3] == b[3]


# -- one decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [WARM, LOOKING_BACK], ids=["plain", "looking back"])
def test_step_is_stepping_in_turn_to_the_bit(
    params: SamplingParams, ctx: Context, other_ctx: Context
) -> None:
    together, in_turn = (
        Branch.start(c, STORY, sampling=params).fork_many(6) for c in (ctx, other_ctx)
    )
    store = BranchStore(ctx)
    for i in range(20):
        group = together[: 1 + i % 6]
        before = ctx.decoder.n_decodes
        produced = store.step(group)
        assert ctx.decoder.n_decodes == before + 1
        assert list(produced) == group
        for branch in in_turn[: 1 + i % 6]:
            branch.step()
    for stepped, alone in zip(together, in_turn, strict=True):
        assert same(stepped, alone)


@pytest.mark.parametrize("n_batch", [8, 32, 512])
def test_prefill_packs_prompts_into_as_few_decodes_as_possible(
    n_batch: int, target: lb.Model, other_ctx: Context
) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(2, 4000, n).tolist() for n in (3, 50, 1, 17, 29)]
    with Context(target, n_ctx=512, n_seq_max=8, n_batch=n_batch, n_threads=1, exact=True) as ctx:
        branches = [Branch.create(ctx, WARM) for _ in prompts]
        before = ctx.decoder.n_decodes
        BranchStore(ctx).prefill(dict(zip(branches, prompts, strict=True)))
        assert ctx.decoder.n_decodes - before == -(-100 // n_batch)
        for branch, prompt in zip(branches, prompts, strict=True):
            with Branch.start(other_ctx, prompt, sampling=WARM) as alone:
                assert same(branch, alone)
        BranchStore(ctx).step(branches)
        ctx.audit()


def test_what_has_ended_and_nothing_cost_no_decode(ctx: Context) -> None:
    ended = Branch.start(ctx, STORY, sampling=WARM)
    ended.steer({ctx.model.eos or 0: 100.0})
    store, before = BranchStore(ctx), ctx.decoder.n_decodes
    for _ in range(2):
        assert store.step([ended])[ended].is_stop
    assert store.step([]) == {}
    store.commit({})
    store.prefill({})
    assert ctx.decoder.n_decodes == before


# -- all or none -------------------------------------------------------------------------------------


def test_bad_token_for_one_moves_none(ctx: Context) -> None:
    branches = [Branch.start(ctx, STORY, sampling=WARM), Branch.start(ctx, [5, 6], sampling=WARM)]
    empty = [Branch.create(ctx, WARM) for _ in range(2)]
    bound = Branch.start(ctx, STORY, sampling=WARM, grammar='root ::= "yes" | "no"')
    before, store = [facts(b) for b in branches], BranchStore(ctx)
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (TokenizeError, lambda: store.commit({branches[0]: 7, branches[1]: 4096})),
        (GrammarError, lambda: store.commit({branches[0]: 7, bound: 7})),
        (TokenizeError, lambda: store.prefill({empty[0]: [1, 2, 3], empty[1]: [4, -1]})),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert repr([facts(b) for b in branches]) == repr(before)
    assert [b.position for b in empty] == [0, 0]


# -- trees of branches -------------------------------------------------------------------------------


def test_retain_only_leaves_one_root(ctx: Context, other_ctx: Context) -> None:
    winner = Branch.start(ctx, STORY, sampling=WARM).fork().fork()
    list(winner.generate(5))
    grandchild, stranger = winner.fork(), Branch.start(ctx, [5, 6, 7])
    before = facts(winner)
    for _ in range(2):  # a second time does nothing
        BranchStore(ctx).retain_only(winner)
        assert grandchild.state == stranger.state == "pruned"
        assert (winner.parent, winner.children, winner.fork_position) == (None, [], 0)
        assert repr(facts(winner)) == repr(before)
        assert (ctx.usage().cells_used, ctx.n_seq_free) == (winner.position, 7)
    assert winner.logits.tolist() == Branch.start(other_ctx, winner.tokens).logits.tolist()
    child = winner.fork()
    child.detach()  # so that its parent can be pruned
    assert (child.parent, child.fork_position, winner.children) == (None, 0, [])
    winner.prune()
    winner.prune()
    assert child.tokens == winner.tokens and ctx.n_seq_free == 7


def test_tree_has_the_text_of_each_edge_and_the_chosen_columns(ctx: Context) -> None:
    store = BranchStore(ctx)
    assert str(store.tree()) == ""
    root = Branch.start(ctx, STORY, sampling=WARM)
    child, other = root.fork_many(2)
    leaf = child.fork()
    lines = str(store.tree(["seq_id"])).split("\n")
    assert [line[: line.index("'")] for line in lines] == ["", "├─ ", "│  └─ ", "└─ "]
    for line, branch in zip(lines, (root, child, leaf, other), strict=True):
        assert line.endswith(f"  seq {branch.seq_id}")
    leaf.prune()
    other.prune()
    for _ in range(4):
        store.step([child])
    tree = store.tree(["logprob", "perplexity", "tokens", "fork", "position", "seed", "state"])
    first, second = str(tree).split("\n")
    n = root.position
    edge = ctx.model.detokenize(child.tokens[n:])
    start, end = first.split("...")  # long texts are cut in their middle
    assert root.text.startswith(start[1:]) and end.split("'")[0] in root.text
    assert len(start) > 20 and "log p" not in first
    assert second.startswith(f"└─ {edge!r}  log p {child.log_likelihood('fork'):.2f}, ")
    assert f"perplexity {child.perplexity('fork'):.2f}, 4 tokens, at {n}, ends at {n + 4}" in second
    assert second.endswith(f"seed {child.seed}, ready")
    child.prune()
    assert repr(tree).split("\n") == [first, second]  # it shows the branches as they were


def test_tree_is_coloured_on_a_terminal_only(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    with Branch.start(ctx, STORY) as root, root.fork():
        tree = BranchStore(ctx).tree()
        pipe, terminal = io.StringIO(), Terminal()
        tree.print(pipe)
        tree.print(terminal)
        assert pipe.getvalue() == f"{tree}\n"
        shown = terminal.getvalue()
        assert "\x1b[" in shown
        assert re.sub("\x1b\\[[0-9]*m", "", shown) == pipe.getvalue()
        monkeypatch.setenv("NO_COLOR", "1")
        plain = Terminal()
        tree.print(plain)
        assert plain.getvalue() == pipe.getvalue()
