"""Drafts of what a grammar forces: the same text as plain decoding, in fewer decodes.

Contexts are exact, so texts are compared with ==.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from drafts import FIXED

import llamabranch as lb
from llamabranch import (
    Branch,
    ChainDrafter,
    Context,
    Distribution,
    Engine,
    FunctionDrafter,
    Grammar,
    GrammarDrafter,
    ModelDrafter,
    Request,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
    SuffixDrafter,
)
from llamabranch.generation.drafter import Draft, DraftLength, DraftState, FixedLength, NullState
from llamabranch.generation.text import Text
from llamabranch.speculative.combined import DrafterChoice

SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_hero": {"type": "string", "maxLength": 16},
        "kind": {"enum": ["a king of the north", "a wolf", "a witch"]},
        "is_brave": {"type": "boolean"},
        "age": {"type": "integer", "minimum": 0, "maximum": 200},
    },
    "required": ["name_of_the_hero", "kind", "is_brave", "age"],
}
JSON = Grammar.from_json_schema(SCHEMA)
GRAMMARS = {
    "schema": JSON,
    "regex": Grammar.from_regex(r"The (king|wolf) of the forest is [a-z]{3,9} and \d{1,3} years old\."),
    "gbnf": Grammar('root ::= line line\nline ::= "The old " [a-z]+ " said: " [a-z ]{4,12} ".\\n"'),
    "recursive gbnf": Grammar('root ::= "[" ("item of " [a-c] | root) ", and so on]"'),
    "lark": Grammar.from_lark('start: "list of: " W ("; then " W)~2 "."\nW: /[a-z]{2,6}/'),
    "token": Grammar("root ::= <[82]> [a-z]{3}"),
}  # fmt: skip
PROMPT = "The hero, a king of the north called Gerda, was 12 years old. As JSON: "
LONG = SpeculativeConfig(draft_k=12)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, seed=4),
    "penalties": SamplingParams(temperature=0.7, repeat_penalty=1.2, seed=2),
}


DRAFTERS: dict[str, Callable[[Context], lb.Drafter]] = {
    "grammar": lambda draft: GrammarDrafter(),
    "grammar+suffix": lambda draft: GrammarDrafter.copying(),
    "grammar+model": lambda draft: GrammarDrafter(ModelDrafter(draft)),
    "grammar+suffix+model": lambda draft: GrammarDrafter(
        ChainDrafter([SuffixDrafter(), ModelDrafter(draft)])
    ),
}


def plain(ctx: Context, grammar: Grammar | None, params: SamplingParams) -> list[int]:
    with Branch.start(ctx, PROMPT, sampling=params, grammar=grammar) as branch:
        return [token.token for token in branch.generate(60) if not token.is_stop]


@pytest.mark.parametrize("config", [LONG, SpeculativeConfig()], ids=["long", "auto"])
@pytest.mark.parametrize("which", DRAFTERS)
def test_drafted_text_is_the_plain_one(
    which: str, config: SpeculativeConfig, ctx: Context, draft_ctx: Context
) -> None:
    drafter = DRAFTERS[which](draft_ctx)
    assert drafter.name == which or which.endswith("model")
    for grammar in GRAMMARS.values():
        for params in SETTINGS.values():
            generation = Speculator(ctx, drafter, config).generate(
                PROMPT, sampling=params, grammar=grammar, max_tokens=60
            )
            assert generation.finish().tokens == plain(ctx, grammar, params)
            assert generation.stats.num_forced_tokens == sum(
                t.source == "forced" for t in generation.emitted
            )


@pytest.mark.parametrize("rule", ["token", "block", "seeded"])
def test_all_that_is_forced_is_accepted(rule: str, ctx: Context, draft_ctx: Context) -> None:
    config = SpeculativeConfig(draft_k=12, rule=rule)
    for which, make in DRAFTERS.items():
        warm = Speculator(ctx, make(draft_ctx), config).generate(
            PROMPT, sampling=SamplingParams(temperature=0.9), grammar=JSON, max_tokens=80
        )
        assert isinstance(JSON.parse(warm.finish().text), dict), which
        assert warm.stats.num_forced_tokens > 10
    generation = Speculator(ctx, GrammarDrafter(), config).generate(
        PROMPT, sampling=SETTINGS["greedy"], grammar=JSON, max_tokens=80
    )
    stats = generation.finish().stats
    assert stats.draft_acceptance_rate == 1.0
    assert stats.num_forced_tokens == stats.num_accepted_tokens > 0.4 * len(generation.tokens)
    assert stats.num_rounds < 0.65 * len(generation.tokens)
    assert JSON.parse(generation.text)["is_brave"] in (True, False)  # type: ignore[index]


def test_a_second_answer_is_forced_too(ctx: Context) -> None:
    """Text is added after a rewound answer, and the branch is forked."""
    speculator = Speculator(ctx, GrammarDrafter.copying(), LONG)
    with Branch.start(ctx, PROMPT, sampling=SETTINGS["seeded"], grammar=JSON) as branch:
        speculator.generate(branch, max_tokens=9).finish()
        branch.rewind(branch.position - 4)
        branch.append("\nThe next one as JSON: ")
        for line in (branch.fork(), branch):
            generation = speculator.generate(line, max_tokens=60).finish()
            assert generation.stats.num_forced_tokens > 15


def test_tokens_that_the_grammar_refuses_are_not_verified(ctx: Context) -> None:
    nonsense = FunctionDrafter(lambda tokens, k: [300, 301, 302, 303][:k])
    generation = Speculator(ctx, nonsense, FIXED).generate(
        PROMPT, sampling=SETTINGS["greedy"], grammar=Grammar.from_choices(["123 456 789"])
    )
    assert generation.finish().text == "123 456 789"
    assert generation.stats.num_draft_tokens == 0
    assert set(generation.stats.target_decodes_by_n) == {1}


def test_values_may_be_drawn_at_random_once_and_copied_later(ctx: Context) -> None:
    """As in a chain of copies and a model. Before, the second one had no source: IndexError."""
    model = ctx.model
    letter = next(token for token in range(model.n_vocab) if model.piece(token) == b" a")
    sources = iter([[Distribution.from_probs(np.array([0.5, 0.5]), np.array([letter, 0]))], []])

    class Values(NullState, lb.Drafter):
        name = "values"

        def check(self, target: lb.Model) -> None: ...

        def start(self, target: Text, rule: str) -> DraftState:
            return self

        def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
            source = next(sources, None)
            return Draft([letter] * (source is not None), source or [], stopped="no evidence")

    grammar = Grammar.from_regex("The old king: [ab]; the young king: [ab]; the queen.")
    with Branch.start(ctx, PROMPT, grammar=grammar) as branch:
        state = GrammarDrafter(Values()).start(branch.sequence, "token")
        draft = state.propose(branch.tokens, FixedLength(64), 64)
    assert draft.forced.count(False) == 2 and draft.forced[-1]
    assert len(draft.sources) == len(draft.tokens)
    drawn = draft.forced.index(False)
    for i, (token, source) in enumerate(zip(draft.tokens, draft.sources, strict=True)):
        assert source.prob(token) == (0.5 if i == drawn else 1.0)


@pytest.mark.parametrize("drafter", ["auto", None])
def test_engine_drafts_for_each_request_what_its_own_grammar_forces(
    drafter: DrafterChoice, ctx: Context
) -> None:
    """This is the default. A request without a grammar has no drafter then."""
    params = SamplingParams(temperature=0.8, seed=5)
    grammars = [None, *GRAMMARS.values()]
    requests = [Request(PROMPT, grammar=g, sampling=params, max_tokens=60) for g in grammars]
    for config in (LONG, SpeculativeConfig()):
        results = Engine(ctx, drafter, config).generate(requests)
        for result, grammar in zip(results, grammars, strict=True):
            assert result.tokens == plain(ctx, grammar, params)
            done = grammar is not None and result.finish_reason == "stop"
            assert result.parsed_or(None) == (grammar.parse(result.text) if done else None)  # type: ignore[union-attr]
        free, json = (result.stats.num_forced_tokens for result in results[:2])
        assert (free == 0 and (json > 0) == (drafter == "auto")) or config is not LONG
