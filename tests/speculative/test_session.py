"""InferenceSession: a text asked for token by token, with or without a drafter, decided at every call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from drafts import FIXED

import llamabranch as lb
from llamabranch import Branch, Context, InferenceSession, SamplingParams, SpeculativeConfig
from llamabranch.errors import CacheFullError, ClosedError, ConfigError

PROMPT = "Once upon a time there was a king who had three daughters, and the youngest"
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=42)

Said = list[tuple[int, str, float, float]]
Chooser = Callable[[int], lb.Drafter | None]


def plain(ctx: Context, params: SamplingParams, n: int, stop: Sequence[str] = ()) -> Said:
    with Branch.start(ctx, PROMPT, sampling=params) as branch:
        return [(t.token, t.text, t.logprob, t.entropy) for t in branch.generate(n, stop)]


def drain(session: InferenceSession, choose: Chooser = lambda i: None) -> Said:
    said: Said = []
    while True:
        t = session.next_token(choose(len(said)))
        if t is None:
            return said
        said.append((t.token, t.text, t.logprob, t.entropy))


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("how", ["never", "always", "switching", "other drafters", "tree"])
def test_text_is_that_of_plain_decoding_however_it_is_asked_for(
    how: str, params: SamplingParams, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    expected = plain(other_ctx, params, 60)
    model, lookup = lb.ModelDrafter(draft_ctx), lb.speculative.PromptLookupDrafter(min_ngram=1)
    twin = lb.ModelDrafter(other_ctx)
    choose: dict[str, Chooser] = {
        "never": lambda i: None,
        "always": lambda i: model,
        "switching": lambda i: model if (i // 7) % 2 else None,
        "other drafters": lambda i: (None, model, lookup, twin)[(i // 5) % 4],
        "tree": lambda i: lb.ModelDrafter(draft_ctx, width=2) if i % 9 == 0 else None,
    }
    with InferenceSession(ctx, PROMPT, sampling=params, max_tokens=60, config=FIXED) as session:
        assert drain(session, choose[how]) == expected
        assert session.finish_reason == "length"
        assert session.tokens == [t for t, *_ in expected]
        assert session.text == "".join(text for _, text, *_ in expected)
        assert session.next_token(model) is None
        stats = session.stats
        assert stats.num_emitted_tokens == 60
        assert (stats.num_drafts > 0) == (how != "never")
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


def test_fallback_takes_effect_when_nothing_is_waiting(ctx: Context, other_ctx: Context) -> None:
    twin = lb.ModelDrafter(other_ctx)
    config = SpeculativeConfig(draft_k=3)
    with InferenceSession(ctx, PROMPT, sampling=WARM, config=config) as session:
        for i in range(5):
            session.next_token(twin if i < 5 else None)
        n = session.stats.num_drafts
        emitted = session.next_token()
        assert emitted is not None
        assert emitted.source == "plain"
        assert session.stats.num_drafts == n
        assert session.stats.num_plain_steps >= 1


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 11])
def test_limit_is_kept_in_the_middle_of_a_block(
    n: int, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    expected = plain(other_ctx, WARM, n)
    for drafter in (None, lb.ModelDrafter(draft_ctx), lb.ModelDrafter(other_ctx)):
        branch = Branch.start(ctx, PROMPT, sampling=WARM)
        start = branch.position
        with InferenceSession(ctx, branch, max_tokens=n, config=FIXED) as session:
            assert drain(session, lambda i, d=drafter: d) == expected  # type: ignore[misc]
            assert session.finish_reason == "length"
        assert branch.tokens[start:] == [t for t, *_ in expected]
        with Branch.start(other_ctx, branch.tokens) as again:
            assert np.array_equal(branch.logits, again.logits)
        branch.prune()


def test_stop_string_ends_the_text_before_it(
    ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    text = "".join(t for _, t, *_ in plain(other_ctx, WARM, 80))
    for at in (5, 31, 60, 61, 62):
        stop = [text[at : at + 7], "\x00"]
        expected = plain(other_ctx, WARM, 80, stop)
        for drafter in (None, lb.ModelDrafter(draft_ctx)):
            branch = Branch.start(ctx, PROMPT, sampling=WARM)
            start = branch.position
            with InferenceSession(ctx, branch, stop=stop, max_tokens=80, config=FIXED) as session:
                assert drain(session, lambda i, d=drafter: d) == expected  # type: ignore[misc]
                assert session.finish_reason == "stop"
                assert session.text == text[: text.index(stop[0])]
            assert branch.tokens[start:] == [t for t, *_ in expected]
            branch.prune()


def test_end_token_ends_the_text(
    ctx: Context, draft_ctx: Context, other_ctx: Context, target: lb.Model
) -> None:
    assert target.eos is not None
    ended = 0
    for seed in range(6):
        params = SamplingParams(temperature=0.9, seed=seed, logit_bias={target.eos: 8.0})
        with Branch.start(other_ctx, PROMPT, sampling=params) as branch:
            expected = [t.token for t in branch.generate(40)]
            reason = branch.finish_reason
        for drafter in (None, lb.ModelDrafter(draft_ctx), lb.ModelDrafter(other_ctx)):
            branch = Branch.start(ctx, PROMPT, sampling=params)
            start = branch.position
            with InferenceSession(ctx, branch, max_tokens=40, config=FIXED) as session:
                assert [t for t, *_ in drain(session, lambda i, d=drafter: d)] == expected  # type: ignore[misc]
                assert session.finish_reason == reason
                assert session.next_token() is None
            assert branch.tokens[start:] == expected
            branch.prune()
        ended += reason == "stop"
    assert ended >= 2


def test_grammar_holds(ctx: Context, draft_ctx: Context, other_ctx: Context) -> None:
    grammar = 'root ::= ("yes" | "no" | "may" "be"){4,8} "."'
    with Branch.start(other_ctx, PROMPT, sampling=WARM, grammar=grammar) as branch:
        expected = "".join(t.text for t in branch.generate(60))
    drafter = lb.ModelDrafter(draft_ctx)
    with InferenceSession(ctx, PROMPT, sampling=WARM, grammar=grammar, config=FIXED) as session:
        drain(session, lambda i: drafter if i % 4 else None)
        assert session.text == expected
        assert session.finish_reason == "stop"


# -- closing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(8))
def test_closed_session_leaves_exactly_what_was_returned(
    n: int, ctx: Context, draft_ctx: Context, other_ctx: Context
) -> None:
    expected = [t for t, *_ in plain(other_ctx, WARM, 20)]
    for drafter in (None, lb.ModelDrafter(draft_ctx), lb.ModelDrafter(other_ctx)):
        branch = Branch.start(ctx, PROMPT, sampling=WARM)
        start = branch.position
        session = InferenceSession(ctx, branch, config=FIXED)
        for _ in range(n):
            session.next_token(drafter)
        session.close()
        session.close()
        assert branch.tokens[start:] == expected[:n]
        with Branch.start(other_ctx, branch.tokens) as again:
            assert np.array_equal(branch.logits, again.logits)
        with pytest.raises(ClosedError):
            session.next_token(drafter)
        assert [t.token for t in branch.generate(20 - n)] == expected[n:]
        branch.prune()
        assert draft_ctx.usage().cells_used == 0


def test_closed_session_prunes_a_branch_of_its_own(ctx: Context, draft_ctx: Context) -> None:
    session = InferenceSession(ctx, PROMPT, sampling=WARM, config=FIXED)
    session.next_token(lb.ModelDrafter(draft_ctx))
    assert ctx.usage().cells_used > 0
    session.close()
    assert session.branch.state == "pruned"
    assert ctx.usage().cells_used == draft_ctx.usage().cells_used == 0


def test_forgotten_session_gives_everything_back(ctx: Context, draft_ctx: Context) -> None:
    for _ in range(12):  # more than there are sequences
        session = InferenceSession(ctx, PROMPT, sampling=WARM, config=FIXED)
        for _ in range(3):
            session.next_token(lb.ModelDrafter(draft_ctx))
    del session
    gc.collect()
    assert ctx.usage().cells_used == draft_ctx.usage().cells_used == 0


def test_session_survives_the_draft_context(
    ctx: Context, draft: lb.Model, other_ctx: Context
) -> None:
    expected = plain(other_ctx, WARM, 30)
    with InferenceSession(ctx, PROMPT, sampling=WARM, max_tokens=30, config=FIXED) as session:
        with Context(draft, n_ctx=256, n_threads=1) as small:
            drafter = lb.ModelDrafter(small)
            said = [session.next_token(drafter) for _ in range(10)]
        said += [session.next_token() for _ in range(20)]
        assert [(t.token, t.text, t.logprob, t.entropy) for t in said if t] == expected


def test_session_closes_after_its_context(target: lb.Model, draft_ctx: Context) -> None:
    ctx = Context(target, n_ctx=256, n_threads=1)
    session = InferenceSession(ctx, PROMPT, sampling=WARM, config=FIXED)
    session.next_token(lb.ModelDrafter(draft_ctx))
    ctx.close()
    with pytest.raises(ClosedError):
        for _ in range(8):
            session.next_token()
    session.close()


def test_full_cache_ends_a_session_where_plain_decoding_ends(
    target: lb.Model, draft_ctx: Context
) -> None:
    with Context(target, n_ctx=256, n_seq_max=2, n_threads=1) as ctx:
        tokens = []
        for drafter in (None, lb.ModelDrafter(draft_ctx)):
            branch = Branch.start(ctx, [5] * 240, sampling=WARM)
            session = InferenceSession(ctx, branch, config=FIXED)
            with pytest.raises(CacheFullError):
                drain(session, lambda i, d=drafter: d)  # type: ignore[misc]
            tokens.append(session.tokens)
            with pytest.raises(CacheFullError):
                session.next_token(drafter)
            branch.prune()
            session.close()  # nothing is left to settle
            ctx.audit()
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) >= 16


@pytest.mark.parametrize("max_tokens", [16, 17, None])
@pytest.mark.parametrize("drafts", [False, True])
def test_session_closes_in_a_full_cache_and_its_branch_holds_what_was_returned(
    drafts: bool, max_tokens: int | None, target: lb.Model, draft_ctx: Context
) -> None:
    drafter = lb.ModelDrafter(draft_ctx) if drafts else None
    with Context(target, n_ctx=256, n_seq_max=2, n_threads=1) as ctx:
        branch = Branch.start(ctx, [5] * 240, sampling=WARM)
        session = InferenceSession(ctx, branch, max_tokens=max_tokens, config=FIXED)
        if max_tokens is None:
            with pytest.raises(CacheFullError):
                drain(session, lambda i: drafter)
        else:
            drain(session, lambda i: drafter)
            assert session.finish_reason == "length"
        session.close()
        assert branch.generated == session.tokens
        assert len(session.tokens) == (max_tokens or 17)
        branch.rewind(240)  # and it can be used on
        assert [t.token for t in branch.generate(16)] == session.tokens[:16]
        branch.prune()
        ctx.audit()
    assert draft_ctx.usage().cells_used == 0


# -- misuse ----------------------------------------------------------------------------------------


def test_session_checks_its_arguments_at_once(ctx: Context, other_ctx: Context) -> None:
    with pytest.raises(ConfigError):
        InferenceSession(ctx, PROMPT, max_tokens=-1)
    with pytest.raises(ConfigError):
        InferenceSession(ctx, PROMPT, stop="")
    with Branch.start(other_ctx, PROMPT) as branch:
        with pytest.raises(ConfigError, match="another context"):
            InferenceSession(ctx, branch, config=FIXED)
        with pytest.raises(ConfigError, match="its own"):
            InferenceSession(other_ctx, branch, sampling=GREEDY)
    assert ctx.usage().cells_used == 0


def test_drafter_of_another_vocabulary_is_refused_when_it_is_given(
    ctx: Context, toy: lb.Model, other_ctx: Context
) -> None:
    expected = plain(other_ctx, WARM, 5)
    with Context(toy, n_threads=1) as strange:
        drafter = lb.ModelDrafter(strange, translate=False)
        with InferenceSession(ctx, PROMPT, sampling=WARM, max_tokens=5, config=FIXED) as session:
            assert session.next_token() is not None
            with pytest.raises(lb.errors.VocabularyMismatchError):
                session.next_token(drafter)
            assert drain(session) == expected[1:]
