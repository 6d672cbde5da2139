"""Token trees: several continuations, one decode, and still the text of plain decoding."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import toys
from drafts import FIXED

import llamabranch as lb
from llamabranch import Branch, Context, ModelDrafter, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.errors import ConfigError
from llamabranch.generation.length import FixedLength
from llamabranch.generation.rules import DraftTree

PROMPTS = [
    "Once upon a time there was a king who had three daughters, and the youngest",
    "The wolf knocked at the door and said, “",
]
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)


def plain(ctx: Context, prompt: str | list[int], params: SamplingParams, n: int) -> list[int]:
    with Branch.start(ctx, prompt, sampling=params) as branch:
        return [t.token for t in branch.generate(n)]


def propose(drafter: ModelDrafter, branch: Branch, k: int) -> lb.speculative.Draft:
    line = drafter.start(branch.sequence, "seeded")
    draft = line.propose([*branch.tokens, branch.produce().token], FixedLength(k), k)
    line.observe(branch.position)
    line.close()
    return draft


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("width", [2, 3, 5])
def test_every_beginning_of_a_proposal_is_a_tree(
    width: int, params: SamplingParams, ctx: Context, draft_ctx: Context
) -> None:
    with Branch.start(ctx, PROMPTS[0], sampling=params) as branch:
        draft = propose(ModelDrafter(draft_ctx, width=width), branch, 4)
        parents = draft.parents
        assert parents is not None
        assert width <= len(draft.tokens) == len(parents) <= 4 * width
        assert max(draft.depths()) == draft.n_steps <= 4
        for n in range(len(parents) + 1):
            tree = DraftTree(draft.tokens[:n], parents[:n])
            assert all(len(tree.children(node)) <= width for node in range(-1, n))
    assert draft_ctx.usage().cells_used == 0


def test_tree_holds_what_a_chain_would_have_proposed(ctx: Context, draft_ctx: Context) -> None:
    """The first candidate of every node has the largest key: following them gives the chain."""
    for seed in range(8):
        with Branch.start(ctx, PROMPTS[0], temperature=0.8, seed=seed) as branch:
            chain = propose(ModelDrafter(draft_ctx), branch, 2).tokens
            draft = propose(ModelDrafter(draft_ctx, width=3), branch, 2)
            assert draft.parents is not None
            roots = [i for i, p in enumerate(draft.parents) if p == -1]
            assert draft.tokens[roots[0]] == chain[0]


@pytest.mark.parametrize(
    ("params", "width"),
    [(GREEDY, 2), (GREEDY, 3), (WARM, 2)],
    ids=["greedy, 2", "greedy, 3", "seeded"],
)
def test_target_that_drafts_trees_for_itself_never_falls_at_once(
    params: SamplingParams, width: int, ctx: Context, other_ctx: Context
) -> None:
    """A wide level may use up the nodes, so the path may be cut short."""
    drafter = ModelDrafter(other_ctx, width=width)
    speculator = Speculator(ctx, drafter, SpeculativeConfig(draft_k=4))
    for prompt in PROMPTS:
        generation = speculator.generate(prompt, max_tokens=81, sampling=params).finish()
        assert generation.tokens == plain(other_ctx, prompt, params, 81)
    assert speculator.stats.conditional_rates_per_pos[0] == 1.0
    assert speculator.stats.mean_acceptance_length > 3.0


def test_wider_trees_emit_more_tokens_a_round(ctx: Context, draft_ctx: Context) -> None:
    lengths = []
    for width in (1, 2, 4):
        drafter = ModelDrafter(draft_ctx, width=width)
        speculator = Speculator(ctx, drafter, SpeculativeConfig(draft_k=4))
        for seed in range(4):
            params = SamplingParams(temperature=1.0, seed=seed)
            speculator.generate(PROMPTS[seed % 2], max_tokens=32, sampling=params).finish()
        lengths.append(speculator.stats.mean_acceptance_length)
    assert lengths[0] < lengths[1] < lengths[2]


# -- what a greedy tree must look at besides the logits -----------------------------------------------


def test_greedy_trees_propose_nothing_that_is_forbidden(ctx: Context, draft_ctx: Context) -> None:
    with Branch.start(ctx, PROMPTS[0], sampling=GREEDY) as branch:
        free = propose(ModelDrafter(draft_ctx, width=3), branch, 3)
        banned = GREEDY.replace(logit_bias=dict.fromkeys(set(free.tokens), -math.inf))
        branch.resample(banned)
        draft = propose(ModelDrafter(draft_ctx, width=3), branch, 3)
        assert draft.tokens
        assert not set(draft.tokens) & set(free.tokens)


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[lb.Model, lb.Model]]:
    """A target of 16 tokens and a draft that has six more."""
    folder = tmp_path_factory.mktemp("padded")
    longer = toys.Vocabulary((toys.BOS, toys.EOS, *"abcdefghijklmnopqrst"))
    with (
        lb.Model(toys.write_llama(folder / "target.gguf")) as target,
        lb.Model(toys.write_llama(folder / "draft.gguf", vocab=longer)) as draft,
    ):
        assert target.compatibility(draft).path == "tokens"
        yield target, draft


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "seeded"])
def test_tokens_that_only_the_draft_has_are_never_proposed(
    params: SamplingParams, width: int, padded: tuple[lb.Model, lb.Model]
) -> None:
    params = params.replace(logit_bias={1: -math.inf})
    with Context(padded[0], n_threads=1) as ctx, Context(padded[1], n_threads=1) as other:
        generation = Speculator(ctx, ModelDrafter(other, width=width), FIXED).generate(
            "abc", max_tokens=60, sampling=params
        )
        assert [t.token for t in generation] == plain(ctx, "abc", params, 60)
        assert generation.stats.num_draft_tokens > 60


# -- rules and room ------------------------------------------------------------------------------------


def test_trees_need_the_seeded_rule_and_auto_chooses_it(ctx: Context, draft_ctx: Context) -> None:
    tree = ModelDrafter(draft_ctx, width=2)
    chain = lb.ChainDrafter([lb.speculative.PromptLookupDrafter(), tree])
    assert chain.width == 2
    for rule in ("token", "block"):
        speculator = Speculator(ctx, tree, SpeculativeConfig(rule=rule, draft_k=4))
        with pytest.raises(ConfigError, match="seeded"):
            speculator.generate(PROMPTS[0], max_tokens=5, sampling=WARM).finish()
    assert ctx.usage().cells_used == draft_ctx.usage().cells_used == 0
    for drafter in (tree, chain):
        speculator = Speculator(ctx, drafter, FIXED)
        unseeded = SamplingParams(temperature=0.8)
        generation = speculator.generate(PROMPTS[0], max_tokens=20, sampling=unseeded).finish()
        assert generation.tokens == plain(ctx, PROMPTS[0], WARM.replace(seed=generation.seed), 20)


@pytest.mark.parametrize("n_seq_max", [1, 2, 3, 4])
def test_trees_are_cut_to_the_sequences_there_are(
    n_seq_max: int, target: lb.Model, draft_ctx: Context
) -> None:
    with Context(target, n_ctx=256, n_seq_max=n_seq_max, n_threads=1) as ctx:
        expected = plain(ctx, PROMPTS[0], WARM, 40)
        speculator = Speculator(ctx, ModelDrafter(draft_ctx, width=4), FIXED)
        generation = speculator.generate(PROMPTS[0], max_tokens=40, sampling=WARM).finish()
        assert generation.tokens == expected
        assert generation.stats.num_accepted_tokens > 0  # a chain needs no sequence
        ctx.audit()


@pytest.mark.parametrize("n_seq_max", [1, 2, 3])
def test_draft_without_sequences_for_a_tree_does_not_change_the_text(
    n_seq_max: int, ctx: Context, draft: lb.Model
) -> None:
    with Context(draft, n_ctx=256, n_seq_max=n_seq_max, n_threads=1) as small:
        speculator = Speculator(ctx, ModelDrafter(small, width=2), FIXED)
        generation = speculator.generate(PROMPTS[0], max_tokens=40, sampling=WARM).finish()
        assert generation.tokens == plain(ctx, PROMPTS[0], WARM, 40)
        small.audit()
        assert small.usage().cells_used == 0


@pytest.mark.parametrize("write", [toys.write_mamba, toys.write_lfm2], ids=["mamba", "lfm2"])
def test_recurrent_target_takes_the_trees_first_chain(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    params = WARM.replace(logit_bias={1: -math.inf})
    with (
        lb.Model(write(tmp_path / "target.gguf")) as target,
        lb.Model(write(tmp_path / "draft.gguf", drift=0.3)) as draft,
        Context(target, n_threads=1) as ctx,
        Context(draft, n_threads=1) as other,
    ):
        speculator = Speculator(ctx, ModelDrafter(other, width=3), FIXED)
        generation = speculator.generate("abc", max_tokens=40, sampling=params).finish()
        assert generation.tokens == plain(ctx, "abc", params, 40)
        assert generation.stats.num_accepted_tokens > 0
        ctx.audit()


def test_recurrent_draft_can_propose_trees(tmp_path: Path) -> None:
    params = WARM.replace(logit_bias={1: -math.inf})
    with (
        lb.Model(toys.write_llama(tmp_path / "target.gguf")) as target,
        lb.Model(toys.write_mamba(tmp_path / "draft.gguf")) as draft,
        Context(target, n_threads=1) as ctx,
        Context(draft, n_threads=1) as other,
    ):
        speculator = Speculator(ctx, ModelDrafter(other, width=2), FIXED)
        generation = speculator.generate("abc", max_tokens=40, sampling=params).finish()
        assert generation.tokens == plain(ctx, "abc", params, 40)
        assert generation.stats.num_accepted_tokens > 0
        other.audit()
        assert other.usage().cells_used == 0


@pytest.mark.parametrize("n", range(1, 6))
def test_ctrl_c_before_a_fork_is_detached_is_what_the_caller_gets(
    n: int, ctx: Context, draft_ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    detach, n_calls = Branch.detach, 0

    def interrupted(branch: Branch) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == n:
            raise KeyboardInterrupt
        detach(branch)

    speculator = lb.Speculator(
        ctx, lb.ModelDrafter(draft_ctx, width=2), lb.SpeculativeConfig(draft_k=4)
    )
    with Branch.start(ctx, "Once upon a time", seed=1) as branch:
        monkeypatch.setattr(Branch, "detach", interrupted)
        with pytest.raises(KeyboardInterrupt):
            speculator.generate(branch, max_tokens=20).finish()
        monkeypatch.undo()
        draft_ctx.audit()
        assert len(speculator.generate(branch, max_tokens=20).finish().tokens) == 20
        speculator.forget(branch)
    assert draft_ctx.usage().cells_used == 0


@pytest.mark.parametrize(
    ("write", "width", "n_seq_max"), [(toys.write_llama, 4, 4), (toys.write_mamba, 1, 1)]
)
def test_drafting_without_sequences_never_searches_for_garbage(
    write: Callable[..., Path], width: int, n_seq_max: int, tmp_path: Path
) -> None:
    """A search takes a large program a third of a second, and there would be one in each round."""
    searches: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        searches.append(phase)

    with (
        lb.Model(toys.write_llama(tmp_path / "target.gguf")) as target,
        lb.Model(write(tmp_path / "draft.gguf", drift=0.3)) as draft,
        Context(target, n_threads=1) as ctx,
        Context(draft, n_seq_max=n_seq_max, n_threads=1) as small,
    ):
        speculator = Speculator(ctx, ModelDrafter(small, width=width), FIXED)
        gc.disable()
        gc.callbacks.append(note)
        try:
            generation = speculator.generate("abc", max_tokens=20, sampling=WARM).finish()
        finally:
            gc.callbacks.remove(note)
            gc.enable()
        assert generation.tokens == plain(ctx, "abc", WARM, 20)
    assert not searches


def test_a_tree_needs_a_sequence_for_each_candidate_of_a_level(
    ctx: Context, draft: lb.Model
) -> None:
    with (
        Context(draft, n_ctx=256, n_seq_max=5, n_threads=1) as small,
        Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch,
    ):
        assert propose(ModelDrafter(small, width=4), branch, 4).n_steps == 4
        assert propose(ModelDrafter(small, width=5), branch, 4).n_steps == 1
