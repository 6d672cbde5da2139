r"""Patterns of JSON schemas mean what ECMAScript means by them.

Each pattern is drawn together with its translation to Python's ``re``, piece by piece. Texts drawn under
the grammar must match. Short texts of difficult characters must be accepted exactly if they match.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from test_json_schema import accepts, walk

import llamabranch as lb
from llamabranch import Grammar
from llamabranch.errors import GrammarError

N_PATTERNS, N_TEXTS = 300, 4

_SPACE = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_UNSURE = r"\x1c-\x1f\x85\ufeff"  # white space to some: in neither class
# An item of a class in ECMAScript, and in Python.
ITEMS = [
    ("\\\\", "\\\\"), ('"', '"'), ('\\"', '"'), ("/", "/"), ("\\/", "/"), ("&&", "&"),
    ("--a", r"\--a"), ("~~", "~"), ("[", r"\["), ("||", "|"), ("a-c", "a-c"), ("<>", "<>"),
    (r"\-", r"\-"), (r"\]", r"\]"),
    (r"\d", "0-9"), (r"\w", "A-Za-z0-9_"), (r"\n", r"\n"), (r"\t", r"\t"), (r"\b", r"\x08"),
    (r"\x00-\x1f", r"\x00-\x1f"), (r"\u00e9", "é"), (r"\u{1F600}", "😀"), (r"\cJ", r"\n"), ("^", r"\^"),
    (r"\ud83d\ude00", "😀"), (r"\^", r"\^"), (":*?", ":*?"), (r"\0", r"\x00"), (r"\.", r"\."),
    ("{}", "{}"), (r"\s", _SPACE), (r"\$", "$"), (r"\v", r"\x0b"), ("é", "é"), (r"\x7f", r"\x7f"),
    (r"+\--/", r"+\--/"), (r"\d-x", r"0-9\-x"),
]  # fmt: skip
# Items that are not classes.
ATOMS = [
    ("a", "a"), ("&&", "&&"), ("--", "--"), ('"', '"'), (r"\\", r"\\"), (r"\/", "/"), ("-", "-"),
    ("~", "~"), (".", r"[^\n\r\u2028\u2029]"), (r"\d", "[0-9]"), (r"\D", "[^0-9]"),
    (r"\w", "[A-Za-z0-9_]"),
    (r"\W", "[^A-Za-z0-9_]"), (r"\s", f"[{_SPACE}]"), (r"\S", f"[^{_SPACE}{_UNSURE}]"),
    ("[^]", r"[\s\S]"),
    ("(?:a|bb)", "(?:a|bb)"), ("(?<n>x)", "(?:x)"), (r"\u{e9}", "é"), (r"\n", r"\n"), ("{", r"\{"),
    ("}", r"\}"), ("]", r"\]"), (r"\$", r"\$"), (r"\p{L}", r"[^\W\d_]"), (r"\x22", '"'),
    ("#", r"\#"), (" ", r"\ "),
]  # fmt: skip
_REPEATS = ["", "", "", "+", "*", "?", "{2}", "{1,3}", "+?", "{2,}"]
_ALPHABET = 'ab"\\/&-~[]\n\t é😀0_<^:.\x01\x7f|{}$#'


def _drawn(rng: random.Random) -> tuple[str, str]:
    """Return a pattern, and the same for ``re``."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.6:
            chosen = rng.sample(ITEMS, rng.randint(1, 4))
            # At the beginning ^ negates, and a dash stands for itself only there.
            chosen.sort(key=lambda item: (item[0].startswith("^"), not item[0].startswith("-")))
            sign = rng.choice(["", "^"])
            if not sign and chosen[0][0] == "^":
                chosen = [("a", "a"), *chosen]
            text, same = ("".join(pair[i] for pair in chosen) for i in (0, 1))
            piece = f"[{sign}{text}]", f"[{sign}{same}]"
        else:
            piece = rng.choice(ATOMS)
            if len(piece[0]) == 2 and piece[0] in ("&&", "--"):
                pieces.append(piece)
                continue
        repeat = rng.choice(_REPEATS)
        pieces.append((piece[0] + repeat, piece[1] + repeat))
    pattern, same = ("".join(pair[i] for pair in pieces) for i in (0, 1))
    return (f"^{pattern}$", f"^(?:{same})\\Z") if rng.random() < 0.8 else (pattern, same)


_CONTROL = r"[\x00-\x1f\x7f]"
CASES = [_drawn(random.Random(seed)) for seed in range(N_PATTERNS)]


@pytest.mark.parametrize("first", range(0, N_PATTERNS, 20))
def test_patterns_mean_what_ecmascript_means(first: int, toy: lb.Model) -> None:
    n_refused = 0
    for number, (pattern, same) in enumerate(CASES[first : first + 20], first):
        judge = re.compile(same)
        try:
            grammar = Grammar.from_json_schema(
                {"type": "string", "pattern": pattern, "maxLength": 30}
            )
        except GrammarError:  # what Rust's syntax lacks
            n_refused += 1
            continue
        for seed in range(N_TEXTS):
            text = walk(toy, grammar, seed)
            assert judge.search(json.loads(text)), (pattern, text)
        rng = random.Random(number)
        for _ in range(40):
            value = "".join(rng.choices(_ALPHABET, k=rng.randint(0, 4)))
            is_right = judge.search(value) is not None
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")
            takes = accepts(toy, grammar, text)
            # Control characters that a pattern does not name may be refused, since \u would be needed.
            assert takes == is_right or (is_right and re.search(_CONTROL, value)), (pattern, text)
    assert n_refused <= 12


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("(?i)^[^a]b$", ["xb", "xB"], ["ab", "AB", "Ab"]),
        ("^(?i:ab)c$", ["ABc", "abc"], ["abC"]),
        ("^(?s:.)$", ["\n"], ["aa"]),
        (r"^[\w.%+-]+@[\w-]+\.[a-z]{2,}$", ["a.b+c@d-e.org"], ["a@b", "@b.org"]),
        (r"^[\p{L}\p{N}_ ]+$", ["Ωé 9_"], ["a-b"]),
        (r"^[^\p{L}]+$", ["1-2"], ["é", "a"]),
        (r"^\p{Script=Greek}+$", ["Ω"], ["a"]),
        ("^.$", ["a", "😀"], ["\n", "\r", "\u2028"]),
        (r"^\d$", ["5"], ["٥"]),
    ],
)  # fmt: skip
def test_flags_properties_and_unicode_are_those_of_the_page(
    pattern: str, texts: list[str], others: list[str], toy: lb.Model
) -> None:
    grammar = Grammar.from_json_schema({"type": "string", "pattern": pattern})
    written = [json.dumps(text, ensure_ascii=False) for text in texts]
    assert [text for text in written if not accepts(toy, grammar, text)] == []
    assert [text for text in others if accepts(toy, grammar, json.dumps(text))] == []


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"^\bа$", "lookarounds not supported"), ("(?=a)", "look-around"), ("(?<!a)b", "look-around"),
        (r"(a)\1", "backreferences"), ("(a", "unclosed group"), ("a)", "unopened group"),
        ("[a", "unclosed character class"), ("[b-a]", "invalid character class range"),
        ("a\\", "incomplete"), (r"a\Z", "unrecognized escape"), (r"\q", "unrecognized escape"),
        ("a{3,1}", "invalid repetition count range"), ("a{,3}", "repetition quantifier"),
        (r"\u{110000}", "not a Unicode scalar value"), ("(?>a)", "unrecognized flag"),
        (r"\p{Nonsense}", "property"), ("^[--/]+$", "set operator"), ("^[]a]$", "empty class"),
        ("^[^]{2}$", "empty class"),
    ],
)  # fmt: skip
def test_what_no_grammar_can_follow_is_refused_by_name(pattern: str, reason: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"pattern": pattern}}}
    with pytest.raises(GrammarError, match=re.escape(reason.replace("\\\\", "\\"))) as caught:
        Grammar.from_json_schema(schema)
    assert "#/properties/a" in str(caught.value)
