"""constraint=: texts that follow a rule in Python, drawn as if refused tokens had no probability."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rounding import gumbel_noise

import llamabranch as lb
from llamabranch import Branch, Context, Grammar, SuffixDrafter
from llamabranch.errors import ConfigError
from llamabranch.sampling.constraint import ConstraintCalls, ConstraintState

STORY = "The wolf ran and the wolf ran and the wolf"
WHOLE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 1},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "seed": 6, **WHOLE},
    {"temperature": 0.9, "seed": 7, "repeat_penalty": 1.2},
]


def no_e(text: str) -> bool:
    return "e" not in text.lower()


class Short:
    """Between one and three words."""

    def prefix(self, text: str) -> bool:
        return len(text.split()) <= 3

    def complete(self, text: str) -> bool:
        return 1 <= len(text.split()) <= 3


@pytest.mark.parametrize(
    ("settings", "is_drawn"),
    [
        ({"temperature": 1.0, **WHOLE}, True),
        ({"temperature": 0.0}, False),
        ({"temperature": 0.7, "top_k": 1}, False),
    ],
)
def test_each_token_is_the_first_allowed_one_in_the_order_of_the_draw(
    ctx: Context, settings: dict[str, Any], is_drawn: bool
) -> None:
    """After the tokens that the settings leave, the most probable ones follow."""
    with Branch.start(ctx, STORY, seed=3, **settings) as root, root.fork() as branch:
        text, n_refused = "", 0
        generation = root.generate(25, constraint=no_e)
        for token in generation:
            keys = branch.log_probs()
            if is_drawn:
                keys += gumbel_noise(3, branch.position, ctx.model.n_vocab)
            for best in np.argsort(-keys, kind="stable").tolist():
                piece = ctx.model.piece(best).decode("utf-8", "replace")
                if ctx.model.is_eog(best) or no_e(text + piece):
                    break
                n_refused += 1
            assert token.token == best
            text += token.text
            if not token.is_stop:
                branch.commit(best)
    assert generation.text == text
    assert generation.stats.constraint_rejections == n_refused > 0
    assert generation.stats.constraint_calls <= n_refused + 2 * len(generation.tokens)


def test_a_text_ends_where_it_is_complete(ctx: Context) -> None:
    """What comes before a stop string must be complete."""
    asked: list[str] = []

    class Even:
        def prefix(self, text: str) -> bool:
            return True

        def complete(self, text: str) -> bool:
            asked.append(text)
            return text.count(" ") % 2 == 0

    n_ended = 0
    cases: list[tuple[Any, Any]] = [(Short(), ()), (Short(), "."), (Even(), [",", "."])]
    with Branch.start(ctx, "Once upon a time", temperature=0.8, seed=4) as root:
        for constraint, stop in cases:
            for seed in range(6):
                with root.fork() as branch:
                    branch.reseed(seed)
                    generation = branch.generate(60, stop, constraint=constraint).finish()
                assert constraint.prefix(generation.text)
                if generation.finish_reason == "stop":
                    assert constraint.complete(generation.text)
                    assert not any(part in generation.text for part in stop)
                    n_ended += isinstance(constraint, Even)
    assert n_ended >= 3
    assert not any(set(",.") & set(text) for text in asked)


def test_a_grammar_masks_first(ctx: Context) -> None:
    grammar = Grammar.from_regex(" [a-z]{1,6} [a-z]{1,6}\\.")
    with Branch.start(ctx, "The", grammar=grammar, temperature=1.0, seed=2) as root:
        for seed in range(8):
            with root.fork() as branch:
                branch.reseed(seed)
                generation = branch.generate(30, constraint=no_e, drafter=SuffixDrafter()).finish()
            assert re.fullmatch(" [a-df-z]{1,6} [a-df-z]{1,6}\\.", generation.text)


def test_a_constraint_gets_whole_characters(toy: lb.Model) -> None:
    def is_wide(text: str) -> bool:
        """Allow only letters of two to four bytes."""
        return all(ord(c) > 127 and c != "\ufffd" for c in text)

    with (
        Context(toy, n_ctx=256, n_seq_max=2, n_threads=1, exact=True) as ctx,
        Branch.start(ctx, [3, 4], temperature=1.0, seed=3, top_k=0, min_p=0.0) as root,
    ):
        generation = root.generate(60, constraint=is_wide).finish()
        whole = "".join(token.text for token in generation.emitted)
        assert is_wide(whole) and len(whole) >= 10
        assert {len(c.encode()) for c in whole} & {2, 3, 4}
        # The constraint is called once for a character of several tokens: with its last token.
        assert generation.stats.constraint_calls < generation.stats.constraint_rejections + 60


def test_between_two_tokens_a_branch_may_be_used(ctx: Context) -> None:
    with Branch.start(ctx, STORY, temperature=0.9, seed=5) as root:
        with root.fork() as branch:
            whole = branch.generate(20, constraint=no_e).finish().tokens
        with root.fork() as branch:
            first = branch.generate(8, constraint=no_e).finish().tokens
            assert first + branch.generate(12, constraint=no_e).finish().tokens == whole
        with root.fork() as branch:
            generation = branch.generate(20, constraint=no_e)
            token_ids = [next(generation).token for _ in range(6)]
            with branch.fork() as child:
                assert child.sequence.sampler.constraint is None
                free = child.generate(14).finish().text
                assert not no_e(free)
            branch.rewind(branch.position - 3)
            token_ids = token_ids[:3] + [token.token for token in generation]
            assert token_ids == whole[:3] + whole[3:20][: len(token_ids) - 3]
            assert branch.sequence.sampler.constraint is None


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_drafts_change_no_text_and_complete_gives_the_same(
    ctx: Context, settings: dict[str, Any]
) -> None:
    prompts = [STORY, "The"]
    results = ctx.complete(prompts, max_tokens=40, n=2, constraint=no_e, **settings)
    free = ctx.complete(prompts, max_tokens=20, n=2, **settings)
    for prompt, result in zip(prompts, results, strict=True):
        for choice in result.choices:
            assert no_e(choice.text) and choice.finish_reason in ("length", "stop")
            assert choice.stats.constraint_calls >= len(choice.tokens) - 1
        for drafter in (None, SuffixDrafter()):
            with Branch.start(ctx, prompt, **settings) as branch:
                n_prompt = branch.position
                generation = branch.generate(40, drafter=drafter, constraint=no_e).finish()
                assert branch.tokens[n_prompt:] == generation.tokens == result.tokens
            assert len(generation.tokens) > 20
    assert not all(no_e(result.text) for result in free)


def test_a_dead_end_keeps_the_text_so_far(ctx: Context) -> None:
    def three(text: str) -> bool:
        """No text is complete, and no text has more than three characters."""
        return len(text) <= 3

    class Never:
        def prefix(self, text: str) -> bool:
            return three(text)

        def complete(self, text: str) -> bool:
            return False

    for constraint, most in ((Never(), 3), (lambda text: text == "", 0), (lambda text: False, 0)):
        with Branch.start(ctx, "The", temperature=0.8, seed=1) as root:
            n_free = ctx.n_seq_free
            generation = root.generate(10, constraint=constraint).finish()
            # A function that allows "" lets the text end there.
            ends = most == 0 and constraint("")  # type: ignore[operator]
            assert generation.finish_reason == ("stop" if ends else "constraint")
            assert len(generation.text) <= most and root.tokens[1:] is not None
            assert root.finish_reason == generation.finish_reason
            assert most or constraint("") or generation.stats.constraint_calls <= 70  # type: ignore[operator]
            assert ctx.n_seq_free == n_free
        result = ctx.complete("The", max_tokens=10, seed=1, constraint=constraint)
        assert result.finish_reason == generation.finish_reason and len(result.text) <= most
        assert result.error is None
    ctx.audit()


def test_tokens_without_text_do_not_hide_a_dead_end(toy: lb.Model) -> None:
    """Behind a text, or behind a byte that begins a character, they would go on for ever."""
    state = ConstraintState(ConstraintCalls(lambda text: len(text) <= 1), toy)
    (silent,) = (t for t in range(toy.n_vocab) if not toy.piece(t) and not toy.is_eog(t))
    byte = next(t for t in range(toy.n_vocab) if toy.piece(t) == b"\xc3")
    for begun in (state, state.accept(byte), state.accept(*toy.tokenize("a", add_special=False))):
        for _ in range(8):
            assert begun.allows(silent)
            begun = begun.accept(silent)
        assert not begun.allows(silent)
    assert state.allows(byte)


def raises(text: str) -> bool:
    return 1 // (8 - min(len(text), 8)) >= 0


def forgets(text: str) -> Any:
    return None if len(text) > 8 else True


class Moody:
    """Refuses a text that it has allowed before."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def prefix(self, text: str) -> bool:
        is_new = text not in self.seen
        self.seen.add(text)
        return is_new and len(self.seen) < 10

    def complete(self, text: str) -> bool:
        return False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: raises, "raised ZeroDivisionError"),
        (lambda: forgets, "must return True or False, not None"),
        (Moody, "which it allowed before"),
    ],
)
def test_a_faulty_constraint_is_a_typed_error(
    ctx: Context, make: Callable[[], Any], message: str
) -> None:
    with Branch.start(ctx, "The", temperature=0.8, seed=1) as root:
        n_free, start = ctx.n_seq_free, root.position
        for drafter in (None, SuffixDrafter()):
            generation = root.generate(40, constraint=make(), drafter=drafter)
            with pytest.raises(ConfigError, match=message) as raised:
                generation.finish()
            assert raised.value.hint
            assert root.tokens[start:] == generation.tokens
            assert root.sequence.sampler.constraint is None
            root.rewind(start)
        assert ctx.n_seq_free == n_free
    ctx.audit()
    result = ctx.complete("The", max_tokens=40, seed=1, constraint=make())
    assert isinstance(result.error, ConfigError) and result.tokens
