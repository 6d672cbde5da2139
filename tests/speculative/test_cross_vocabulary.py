"""Drafting across vocabularies: the bundled draft with renumbered tokens still drafts through the text.

The renumbered model gives the same texts the same probabilities. So any lower acceptance comes only from
drafting through the text instead of by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import toys
from drafts import FIXED, GREEDY, PROMPTS, WARM, plain, write_renumbered

import llamabranch as lb
from llamabranch import Branch, Context, ModelDrafter, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.errors import VocabularyMismatchError
from llamabranch.speculative import Text


@pytest.fixture(scope="module")
def renumbered(
    target: lb.Model, draft: lb.Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[lb.Model]:
    path = write_renumbered(draft, tmp_path_factory.mktemp("renumbered"))
    with lb.Model(path) as model:
        assert [model.piece(t) for t in model.eog_tokens] == [
            draft.piece(t) for t in draft.eog_tokens
        ]
        assert target.compatibility(model).path == "text"
        assert target.compatibility(draft).path == "tokens"
        yield model


@pytest.fixture
def renumbered_ctx(renumbered: lb.Model) -> Iterator[Context]:
    with Context(renumbered, n_ctx=1024, n_seq_max=8, n_threads=1) as ctx:
        yield ctx
        ctx.audit()


def test_acceptance_is_near_that_of_drafting_by_tokens(
    ctx: Context, draft_ctx: Context, renumbered_ctx: Context
) -> None:
    """At temperature 0 both propose the draft's argmax, except for unfinished words in the text."""
    rates = []
    for drafter in (ModelDrafter(draft_ctx), ModelDrafter(renumbered_ctx)):
        speculator = Speculator(ctx, drafter, SpeculativeConfig(draft_k=4))
        for prompt in PROMPTS:
            speculator.generate(prompt, max_tokens=120, sampling=GREEDY).finish()
        rates.append(speculator.stats.draft_acceptance_rate)
    direct, translated = rates
    assert 0.6 * direct < translated < 1.4 * direct


def test_translated_draft_draws_with_noise_of_its_own(
    ctx: Context, renumbered_ctx: Context
) -> None:
    """Under the token rule a draft must be independent of the target's draws."""
    with Branch.start(ctx, PROMPTS[0], sampling=WARM) as branch:
        speculator = Speculator(ctx, ModelDrafter(renumbered_ctx), FIXED)
        speculator.generate(branch, max_tokens=8).finish()
        holders = [b for b in renumbered_ctx.sequences.holders() if isinstance(b, Text)]
        assert [b.seed == branch.seed for b in holders] == [False]
        speculator.forget(branch)


@pytest.mark.parametrize("way", ["draft_ctx", "renumbered_ctx"])
def test_states_follow_forks_that_outlive_their_parents(
    way: str, ctx: Context, request: pytest.FixtureRequest
) -> None:
    """The state of a fork is made from its parent's and ends with the parent. Tokens read are shared."""
    other = request.getfixturevalue(way)
    speculator = Speculator(ctx, ModelDrafter(other), FIXED)
    root = Branch.start(ctx, PROMPTS[0] * 8, sampling=WARM)
    n_steps = speculator.generate(root, max_tokens=10).finish().stats.draft_forward_passes
    before, child = other.usage().cells_used, root.fork()
    again = speculator.generate(child, max_tokens=10).finish()
    assert again.stats.draft_forward_passes <= n_steps + 8
    assert other.usage().cells_used < before + 20
    assert other.usage().cells_shared > 100
    child.promote()
    speculator.generate(PROMPTS[1], max_tokens=5, sampling=WARM).finish()  # closes ended states
    speculator.generate(child, max_tokens=10).finish()
    assert child.generated == [t.token for t in plain(ctx, PROMPTS[0] * 8, WARM, 30)]
    child.prune()
    speculator.forget(child)
    assert other.usage().cells_used == 0


# -- bytes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[lb.Model, lb.Model]]:
    """A random model over bytes, and a similar model with the bytes numbered backwards and no BOS."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = toys.Vocabulary.named("bytes").tokens[2:]
    backwards = toys.Vocabulary((toys.BOS, toys.EOS, *reversed(alphabet)))
    first = toys.write_llama(folder / "a.gguf", vocab="bytes")
    second = toys.write_llama(
        folder / "b.gguf", vocab=backwards, metadata={"tokenizer.ggml.add_bos_token": False}
    )
    with lb.Model(first) as a, lb.Model(second) as b:
        yield a, b


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_bytes_that_are_no_text_are_not_translated_but_the_text_is_right(
    temperature: float, byte_pair: tuple[lb.Model, lb.Model]
) -> None:
    """A random model over bytes writes much that is not UTF-8. Then nothing is proposed."""
    params = SamplingParams(temperature=temperature, seed=1, logit_bias={1: -math.inf})
    target, draft = byte_pair
    with Context(target, n_threads=1) as ctx, Context(draft, n_threads=1) as other:
        for prompt in ("abc", "é", [0], [0, 130, 131]):
            expected = [t.token for t in plain(ctx, prompt, params, 60)]
            speculator = Speculator(ctx, ModelDrafter(other), FIXED)
            generation = speculator.generate(prompt, max_tokens=60, sampling=params).finish()
            assert generation.tokens == expected
        bos = params.replace(
            temperature=0.0, logit_bias={0: 100.0}
        )  # control tokens alone: no text
        run = Speculator(ctx, ModelDrafter(other), FIXED).generate([0], max_tokens=9, sampling=bos)
        assert run.finish().tokens == [0] * 9 and run.stats.num_draft_tokens == 0
        ctx.audit()
        other.audit()
        assert other.usage().cells_used == 0


# -- pairs that cannot -------------------------------------------------------------------------------


def test_pairs_that_cannot_draft_are_refused(
    tmp_path: Path, ctx: Context, renumbered_ctx: Context
) -> None:
    untranslated = ModelDrafter(renumbered_ctx, translate=False)
    with (
        lb.Model(toys.write_llama(tmp_path / "none.gguf", vocab="none")) as mute,
        Context(mute, n_threads=1) as silent,
    ):
        assert ctx.model.compatibility(mute).path == "none"
        chain = lb.ChainDrafter([lb.SuffixDrafter(), untranslated])
        refused: tuple[tuple[Context, lb.Drafter], ...] = (
            (ctx, untranslated), (ctx, chain), (ctx, ModelDrafter(silent)), (silent, ModelDrafter(ctx)),
        )  # fmt: skip
        for target, drafter in refused:
            with pytest.raises(VocabularyMismatchError, match="cannot draft") as caught:
                Speculator(target, drafter, FIXED)
            assert caught.value.hint


def test_models_without_text_draft_for_each_other(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=1)
    paths = [
        toys.write_llama(tmp_path / f"{i}.gguf", vocab="none", drift=0.3 * i) for i in range(2)
    ]
    with (
        lb.Model(paths[0]) as first,
        lb.Model(paths[1]) as two,
        Context(first, n_threads=1) as ctx,
        Context(two, n_threads=1) as other,
    ):
        expected = [t.token for t in plain(ctx, [3, 4], params, 40)]
        speculator = Speculator(ctx, ModelDrafter(other), FIXED)
        generation = speculator.generate([3, 4], max_tokens=40, sampling=params).finish()
        assert generation.tokens == expected
        assert generation.stats.num_accepted_tokens > 0
