"""Grammars and settings that mislead, overflow or mask everything."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from crash_harness import ABC, World, case, must_raise, refuses

from llamabranch import Branch, Grammar, SamplingParams
from llamabranch.errors import ConfigError, GrammarError, LlamaBranchError, TokenizeError
from llamabranch.sampling import Sampler

# -- grammar ---------------------------------------------------------------------------------------


GRAMMARS = {
    "empty": "",
    "blank": " \n ",
    "repetition_overflows": 'root ::= "a"{99999999999999999999}',
    "repetition_enormous": 'root ::= "a"{1000000}',
    "repetition_of_rules": 'root ::= b{999} b ::= c{999} c ::= d{999} d ::= "a"{999}',
    "nested_20000_deep": f'root ::= {"(" * 20_000}"a"{")" * 20_000}',
    "left_recursion_in_a_ring": 'root ::= x "a"\nx ::= y "b"\ny ::= root "c"',
    "chain_of_20000_rules": "root ::= r0\n"
    + "".join(f"r{i} ::= r{i + 1}\n" for i in range(20_000)),
    "surrogate": 'root ::= "\udc80"',
}


def _use_grammar(w: World, gbnf: str) -> None:
    with w.branch(grammar=Grammar(gbnf)) as branch:
        for _ in range(3):
            branch.step()


refuses(
    "grammar",
    GrammarError,
    **{f"gbnf_{name}": lambda w, g=gbnf: _use_grammar(w, g) for name, gbnf in GRAMMARS.items()},
    not_text=lambda w: Grammar(5),  # type: ignore[arg-type]
    schema_missing_reference=lambda w: Grammar.from_json_schema({"$ref": "#/nowhere"}),
    schema_remote_reference=lambda w: Grammar.from_json_schema({"$ref": "https://localhost:1/x"}),
    schema_is_a_list=lambda w: Grammar.from_json_schema("[1]"),
)

ODD_GRAMMARS = {
    "no_body": "root ::=",
    "braces_in_a_string": 'root ::= "a{5,2}(((("',
    "empty_string": 'root ::= ""',
    "repetition_nested": 'root ::= (((("a"{1000}){1000}){1000}){1000}){1000}',
    "repetition_with_recursion": 'root ::= ((("a" | "(" root ")"){0,2000}){0,2000}){0,2000}',
    "stars_of_nothing": 'root ::= (""*)* "a"',
    "star_of_optional": 'root ::= ("a"?)*',
    "zero_times": 'root ::= "a"{0} "b"',
    "no_byte_in_class": "root ::= [^\\x00-\\U0010FFFF]",
    "class_backwards": "root ::= [z-a]",
    "not_in_the_vocabulary": 'root ::= "\U0001f642"+',
    "ambiguous": 'root ::= ("a" | "a" "a" | "a" "a" "a")+ | [a-z]*',
    "exponentially_ambiguous": 'root ::= x x x x x x x x x x x x "b"\nx ::= "a"? "a"?',
    "any_byte": "root ::= .+",
}


def _survive_grammar(w: World, gbnf: str) -> None:
    with suppress(LlamaBranchError):
        _use_grammar(w, gbnf)


for _name, _gbnf in ODD_GRAMMARS.items():
    case("grammar", f"odd_{_name}")(partial(_survive_grammar, gbnf=_gbnf))


def _ids(w: World, text: str) -> list[int]:
    return w.model.tokenize(text, add_special=False)


@case("grammar")
def disallowed_token(w: World) -> None:
    a, b, c = _ids(w, "abc")
    with w.branch(grammar=Grammar(ABC)) as branch:
        for token in (c, b, 0, 1, 257):
            must_raise(GrammarError, branch.commit, token)
            must_raise(GrammarError, branch.extend, [a, b, c, token] if token != 1 else [a, token])
        assert branch.position == 3
        for token in (-1, 258, 1 << 40):
            must_raise(TokenizeError, branch.commit, token)
            must_raise(TokenizeError, branch.extend, [a, token])
        branch.commit(a)
        must_raise(GrammarError, lambda: branch.commit(a))
        assert [branch.step().text, branch.step().text] == ["b", "c"]
        assert branch.step().is_stop


@case("grammar")
def token_after_completion(w: World) -> None:
    with w.branch(grammar=Grammar(ABC), logit_bias={1: 1e9}) as branch:
        must_raise(GrammarError, branch.commit, 1)  # the end, which is not allowed yet
        assert branch.step().text == "a"
        branch.extend(_ids(w, "bc"))
        must_raise(GrammarError, branch.commit, _ids(w, "a")[0])
        branch.commit(1)
        for token in (1, 0, 60):
            must_raise(GrammarError, branch.commit, token)
        must_raise(GrammarError, branch.produce)
        must_raise(GrammarError, branch.distribution)
        must_raise(GrammarError, branch.fork().step)


# -- sampling --------------------------------------------------------------------------------------

refuses(
    "sampling",
    ConfigError,
    bias_token_minus_one=lambda w: Branch.create(w.ctx, SamplingParams(logit_bias={-1: 1.0})),
    bias_token_n_vocab=lambda w: Branch.create(w.ctx, SamplingParams(logit_bias={258: 1.0})),
    steer_token=lambda w: w.root.steer({1 << 40: 1.0}),
    unknown_setting=lambda w: Branch.start(w.ctx, "a", heat=1.0),  # type: ignore[call-arg]
    raw_bias_token=lambda w: w.ctx.sample(SamplingParams(logit_bias={999: 1.0})),
)

DRY: dict[str, Any] = {"dry_multiplier": 0.8}
BREAKERS = ("\0", "é", "🙂" * 50, "a" * 500, "x")
EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-30}, {"temperature": 1e4}, {"temperature": 1.0, "dynatemp_range": 5.0},
    {"top_k": 1}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0},
    {"typical_p": 1e-9}, {"top_n_sigma": 1e-9}, {"top_n_sigma": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 1e-9}, {"min_keep": (1 << 31) - 1},
    {"repeat_penalty": 1e-30, "frequency_penalty": 1e4, "presence_penalty": -1e4},
    {"repeat_penalty": 1.1, "penalty_last_n": (1 << 31) - 1},
    {"repeat_penalty": 1.1, "penalty_last_n": -1}, {**DRY, "dry_penalty_last_n": (1 << 31) - 1},
    {"dry_multiplier": 1e4, "dry_base": 1e4, "dry_allowed_length": 1},
    {**DRY, "dry_sequence_breakers": BREAKERS},
    {**DRY, "dry_sequence_breakers": tuple(f"{i}" for i in range(500))},
    {**DRY, "dry_sequence_breakers": ("\udc80",)},
    {"logit_bias": {5: 1e300, 6: -1e300}}, {"seed": 1 << 200}, {"seed": -5},
]  # fmt: skip


def _survive_sampling(w: World, settings: dict[str, object]) -> None:
    with suppress(ConfigError), w.branch("aaaaaaa aaaaaaa", **settings) as branch:
        for _ in range(4):
            branch.step()
        branch.fork().step()


for _number, _settings in enumerate(EXTREMES):
    _name = f"extreme_{_number}_{next(iter(_settings))}"
    case("sampling", _name)(partial(_survive_sampling, settings=_settings))


@case("sampling")
def all_tokens_masked(w: World) -> None:
    nothing = dict.fromkeys(range(258), -math.inf)
    a = Grammar('root ::= "a"')
    for settings in ({"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 1}, {"typical_p": 0.5}):
        for grammar in (None, a):
            with w.branch(**settings, grammar=grammar) as branch:
                branch.steer(nothing)
                must_raise((ConfigError, GrammarError), branch.step)
                must_raise((ConfigError, GrammarError), branch.produce)
                branch.steer({})
                assert branch.step().text == "a" or grammar is None


@case("sampling")
def logits_that_are_not_numbers(w: World) -> None:
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(typical_p=0.5),
    ):
        sampler = Sampler(w.model, params)
        for value in (math.nan, -math.inf, math.inf):
            row = np.full(258, value, np.float32)
            with suppress(ConfigError):
                assert 0 <= sampler.distribution(row).draw(1, 0) < 258
        row = w.logits.copy()
        row[7] = math.nan
        with suppress(ConfigError):
            sampler.distribution(row).draw(1, 0)
        must_raise(ConfigError, sampler.distribution, np.zeros(5, np.float32))
