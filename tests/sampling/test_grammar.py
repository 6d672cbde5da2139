"""Grammars: errors with their reason, GBNF as llama.cpp reads it, masks, choices, expressions, limits.

That our reading of GBNF and llama.cpp's agree is tried with grammars that are cut, spliced and mutated.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import llamabranch as lb
from llamabranch import Grammar, Sampler, SamplingParams
from llamabranch.errors import GrammarError
from llamabranch.native import GrammarHandle
from llamabranch.sampling.grammar.sampler_matcher import SamplerMatcher


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("root", "line 1, column 5: expected '::=', found the end"),
        ("root := [a]", "line 1, column 6: expected '::=', found ':'"),
        ("root ::= (", "line 1, column 11: expected '\\)', found the end"),
        ("root ::= [a])", "line 1, column 13: expected a new line or the end, found '\\)'"),
        ("root ::= a\na ::= b\n", "the rule 'b' is not defined"),
        ("start ::= [a]", "no rule 'root'"),
        ("# nothing\n", "no rule"),
        ('root ::= "a', "line 1, column 10: the string does not end"),
        ("root ::= [a", "line 1, column 10: the set does not end"),
        ("root ::= [a-", "the set does not end"),
        ('root ::=\n  "a" |\n  "\\d"', r"line 3, column 4: unknown escape \\d"),
        ('root ::= "\\x4"', "2 hexadecimal digits"),
        ("root ::= *", "'\\*' has nothing to repeat"),
        ('root ::= ""+', "nothing to repeat"),
        ("root ::= [a]{x}", "expected a number"),
        ("root ::= [a]{,3}", "expected a number"),
        ("root ::= [a]{1;2}", "expected ','"),
        ("root ::= [a]{3,2}", "below its minimum"),
        ("root ::= [a]{2001}", "limit of 2000"),
        ("root ::= ([a]{50} [b]{0,50}){50}", "limit of 2000"),
        ("root ::= " + "(" * 300 + "[a]" + ")" * 300, "nested deeper"),
        ("root ::= <[x]>", "the id of a token"),
        ("root ::= <abc", "expected '>'"),
        ('root ::= root "a" | "b"', "left recursion: the rule 'root'"),
        ("root ::= ( | [a])*", "left recursion"),
        ("root ::= [a]\0", "NUL"),
    ],
    ids=lambda s: s[:30],
)
def test_reason_is_in_the_error_and_not_on_standard_error(
    gbnf: str, reason: str, toy: lb.Model, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GrammarError, match=reason):
        Sampler(toy, SamplingParams(), Grammar(gbnf))
    assert capfd.readouterr().err == ""


def test_token_that_the_vocabulary_lacks_is_refused_with_its_name(
    toy: lb.Model, capfd: pytest.CaptureFixture[str]
) -> None:
    grammar = Grammar('root ::= "a" <nothing> !<|bos|>')
    assert grammar.token_texts == ("<nothing>", "<|bos|>")
    with pytest.raises(GrammarError, match="'<nothing>', which is not one token"):
        Sampler(toy, SamplingParams(), grammar)
    Sampler(toy, SamplingParams(), Grammar("root ::= <|bos|> <[7]> !<[8]>"))
    assert capfd.readouterr().err == ""


def _walk(text: str, model: lb.Model, rng: random.Random) -> int:
    """Follow random texts in llguidance and in llama.cpp; compare all masks. Return how many."""
    grammar = Grammar(text)
    if not grammar.guidance:
        return 0
    ours, theirs, n, token = grammar.start(model), SamplerMatcher(model, text, ()), 0, 0
    for n in range(1, 9):
        mask = ours.mask()
        # Which bytes of a character may follow its first llama.cpp does not check: it takes overlong forms
        # and surrogates.
        is_inside = token >= 2 and model.piece(token) >= b"\x80"
        if is_inside:
            assert not (mask & ~theirs.mask()).any(), text
        else:
            assert np.array_equal(_without_invalid(mask), _without_invalid(theirs.mask())), (
                text,
                n,
            )
        choices = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(choices):
            break
        token = int(rng.choice(choices.tolist()))
        ours.accept(token)
        theirs.accept(token)
    return n


def _without_invalid(mask: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Return a mask of the byte tokens without bytes that begin no character: 80 to C1, F5 to FF."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.concatenate((bits[: 2 + 0x80], bits[2 + 0xC2 : 2 + 0xF5]))


@pytest.mark.parametrize("seed", range(3))
def test_llguidance_follows_gbnf_as_llama_cpp_does(
    seed: int, toy: lb.Model, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    n = sum(_walk(text, toy, rng) for text in [*VALID[:4], VALID[4]] for _ in range(6))
    for _ in range(150):
        text = _mutated(rng)
        try:
            grammar = Grammar(text)
        except GrammarError:
            continue
        if not grammar.token_texts and "<[" not in text:
            n += _walk(text, toy, rng)
    capfd.readouterr()
    assert n > 100


def test_left_recursion_that_llama_cpp_overlooks_is_refused() -> None:
    """``b`` can be empty through ``c``: llama.cpp looks only one rule deep, and would loop forever."""
    with pytest.raises(GrammarError, match="left recursion"):
        Grammar('root ::= b root "x" | "y"\nb ::= c\nc ::= ""')
    # The recursion is at the end of the alternative: llama.cpp detects this case.
    Grammar('root ::= ws* "x"\nws ::= sp\nsp ::= " "?')


VALID = [
    'root ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
    'term ::= id | num | "(" ws expr ")" ws\nid ::= [a-z] [a-z0-9_]* ws\n'
    "num ::= [0-9]+ ws\nws ::= [ \\t\\n]*",
    'root ::= "a" | "b" # a comment ( [ "\r\n\n x-1 ::= (\n[^\\]\\"a-z]\n|.{2,3} )? root?',
    'root ::= "é€\\u00e9\\U0001F600\\x41" [é-ü] {3} ( | "x") {0,2} "" []',
    "root ::= a a\na ::= b{2,} c{ 1 , 4 }\nb ::= [-a] | [a-]\nc ::= (((. .) | !<[3]>)) <[5]>",
    '\n\nroot   ::=  root-2|\n "z"\nroot-2 ::= [x] root-2 | \n',
]


PIECES = [
    '"', "[", "]", "(", ")", "|", "*", "+", "?", "{2}", "{,", "{1,", "}", "::=", "\n", "\\", "#", "-", "^",
    "a", "root", " ", ".", '""', "<[3]>", "!", "<", ">", "é", "\\x4", "ws",
]  # fmt: skip


def _mutated(rng: random.Random) -> str:
    """Return one of VALID after some changes; often it is still a grammar."""
    changes: list[Callable[[str, int], str]] = [
        lambda s, i: s[:i] + rng.choice(PIECES) + s[i:],
        lambda s, i: s[:i] + s[i + 1 :],
        lambda s, i: s[:i],
        lambda s, i: s[:i] + s[i : i + 6] + s[i:],
        lambda s, i: s[:i] + "\n" + rng.choice(VALID),
    ]
    text = rng.choice(VALID)
    for _ in range(rng.randint(1, 3)):
        text = rng.choice(changes)(text, rng.randrange(len(text) + 1))
    return text


def _agrees(text: str, model: lb.Model) -> bool:
    """Return True if a grammar is accepted, after comparing the check with llama.cpp's parser."""
    try:
        names = Grammar(text).token_texts
        taken = all(len(model.handle.tokenize(n.encode(), False, True)) == 1 for n in names)
    except GrammarError as error:
        taken = False
        if any(
            word in str(error) for word in ("the limit", "below its minimum", "nested", "left rec")
        ):
            return False  # stricter than the parser, which would hang, overflow or drop the limit
    try:
        GrammarHandle(model.handle, text).close()
        parsed = True
    except GrammarError:
        parsed = False
    assert taken == parsed, text
    return taken


@pytest.mark.parametrize("text", VALID, ids=lambda s: s[:20])
def test_check_takes_what_llama_cpp_takes(text: str, toy: lb.Model) -> None:
    assert _agrees(text, toy)


@pytest.mark.parametrize("seed", range(4))
def test_check_and_llama_cpp_agree_on_mutated_grammars(
    seed: int, toy: lb.Model, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    taken = 0
    for _ in range(250):
        text = _mutated(rng)
        taken += bool(text.strip()) and _agrees(text, toy)
    capfd.readouterr()  # what the parser prints
    assert 20 < taken < 230
