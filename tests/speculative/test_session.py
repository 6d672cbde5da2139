"""InferenceSession: a text asked for token by token; `test_drafted_text` has its texts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import pytest
from drafts import FIXED, GREEDY, PROMPTS, WARM, plain

import llamabranch as lb
from llamabranch import Branch, Context, InferenceSession, SpeculativeConfig
from llamabranch.errors import CacheFullError, ClosedError, ConfigError

Said = list[tuple[int, str, float, float]]
Chooser = Callable[[int], lb.Drafter | None]
PROMPT = PROMPTS[0]


def facts(tokens: Iterable[lb.Produced | None]) -> Said:
    return [(t.token, t.text, t.logprob, t.entropy) for t in tokens if t is not None]


def drain(session: InferenceSession, choose: Chooser = lambda i: None) -> Said:
    said: list[lb.Produced] = []
    while (one := session.next_token(choose(len(said)))) is not None:
        said.append(one)
    return facts(said)


def test_each_token_may_have_another_drafter(
    ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    model = lb.ModelDrafter(draft_ctx)
    lookup = lb.speculative.PromptLookupDrafter(min_ngram=1)
    drafters = (None, model, lookup, lb.ModelDrafter(other_ctx))
    for params in (GREEDY, WARM):
        expected = facts(plain(other_ctx, PROMPT, params, 60))
        with InferenceSession(ctx, PROMPT, sampling=params, max_tokens=60, config=FIXED) as session:
            assert drain(session, lambda i: drafters[(i // 5) % 4]) == expected
            assert session.next_token(model) is None
    for context in (ctx, draft_ctx, other_ctx):
        assert context.usage().cells_used == 0


def test_tokens_tell_where_they_came_from(ctx: Context, other_ctx: Context) -> None:
    twin = lb.ModelDrafter(other_ctx)
    config = SpeculativeConfig(draft_k=3)
    with InferenceSession(ctx, PROMPT, sampling=WARM, config=config) as session:
        sources = []
        for i in range(13):
            emitted = session.next_token(None if i == 3 else twin)
            assert emitted is not None
            sources.append(emitted.source)
    # The fourth token was waiting when it was asked for without a drafter: it is not drawn again.
    assert sources == ["plain", *(["drafted"] * 3 + ["bonus"]) * 3]


# -- closing -----------------------------------------------------------------------------------------


def test_closed_or_forgotten_session_gives_everything_back(
    ctx: Context, draft_ctx: Context
) -> None:
    for is_closed in (True, False):
        for _ in range(12):  # more than there are sequences
            session = InferenceSession(ctx, PROMPT, sampling=WARM, config=FIXED)
            for _ in range(3):
                session.next_token(lb.ModelDrafter(draft_ctx))
            if is_closed:
                session.close()
                assert session.branch.state == "pruned"
        del session
        gc.collect()
        assert ctx.usage().cells_used == draft_ctx.usage().cells_used == 0


def test_session_survives_the_draft_context(
    ctx: Context, draft: lb.Model, other_ctx: Context
) -> None:
    expected = facts(plain(other_ctx, PROMPT, WARM, 30))
    with InferenceSession(ctx, PROMPT, sampling=WARM, max_tokens=30, config=FIXED) as session:
        with Context(draft, n_ctx=256, n_threads=1) as small:
            drafter = lb.ModelDrafter(small)
            said = [session.next_token(drafter) for _ in range(10)]
        said += [session.next_token() for _ in range(20)]
        assert facts(said) == expected


def test_session_closes_after_its_context(target: lb.Model, draft_ctx: Context) -> None:
    ctx = Context(target, n_ctx=256, n_threads=1)
    session = InferenceSession(ctx, PROMPT, sampling=WARM, config=FIXED)
    session.next_token(lb.ModelDrafter(draft_ctx))
    ctx.close()
    with pytest.raises(ClosedError):
        for _ in range(8):
            session.next_token()
    session.close()


def test_session_closes_in_a_full_cache_and_its_branch_holds_what_was_returned(
    target: lb.Model, draft_ctx: Context
) -> None:
    with Context(target, n_ctx=256, n_seq_max=2, n_threads=1) as ctx:
        branch = Branch.start(ctx, [5] * 240, sampling=WARM)
        session = InferenceSession(ctx, branch, config=FIXED)
        drafter = lb.ModelDrafter(draft_ctx)
        with pytest.raises(CacheFullError):
            drain(session, lambda i: drafter)
        session.close()
        assert branch.generated == session.tokens
        assert len(session.tokens) == 17
        branch.rewind(240)  # and it can be used on
        assert [t.token for t in branch.generate(16)] == session.tokens[:16]
        branch.prune()
        ctx.audit()
    assert draft_ctx.usage().cells_used == 0


# -- misuse ----------------------------------------------------------------------------------------


def test_branch_of_another_context_is_refused(ctx: Context, other_ctx: Context) -> None:
    with (
        Branch.start(other_ctx, PROMPT) as branch,
        pytest.raises(ConfigError, match="another context"),
    ):
        InferenceSession(ctx, branch, config=FIXED)
    assert ctx.usage().cells_used == 0


def test_drafter_of_another_vocabulary_is_refused_when_it_is_given(
    ctx: Context, toy: lb.Model, other_ctx: Context
) -> None:
    expected = facts(plain(other_ctx, PROMPT, WARM, 5))
    with Context(toy, n_threads=1) as strange:
        drafter = lb.ModelDrafter(strange, translate=False)
        with InferenceSession(ctx, PROMPT, sampling=WARM, max_tokens=5, config=FIXED) as session:
            assert session.next_token() is not None
            with pytest.raises(lb.errors.VocabularyMismatchError):
                session.next_token(drafter)
            assert drain(session) == expected[1:]


def test_text_that_is_appended_after_the_last_token_stays(ctx: Context) -> None:
    with Branch.start(ctx, PROMPT, sampling=WARM) as branch:
        session = InferenceSession(ctx, branch)
        assert session.next_token() is not None
        branch.append(", she said")
        tokens = branch.tokens
        session.close()
        assert branch.tokens == tokens
