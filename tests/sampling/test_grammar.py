"""Grammars: errors with their reason, GBNF as llama.cpp reads it, masks, choices, expressions, limits.

Grammars that are cut, spliced and mutated test whether we read GBNF as llama.cpp does.
"""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Callable
from functools import partial
from graphlib import CycleError, TopologicalSorter

import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp as C
from test_json_schema import accepts

import llamabranch as lb
from llamabranch import Grammar, SamplingParams
from llamabranch.errors import GrammarError
from llamabranch.native.sampler import CandidateBuffer, SamplerHandle
from llamabranch.sampling import Sampler
from llamabranch.sampling.grammar.gbnf import Gbnf

GBNF: list[tuple[str, str]] = [
    ("root", "line 1, column 5: expected '::=', found the end"),
    ("root := [a]", "line 1, column 6: expected '::=', found ':'"),
    ("root ::= (", "line 1, column 11: expected '\\)', found the end"),
    ("root ::= [a])", "line 1, column 13: expected a new line or the end, found '\\)'"),
    ("root ::= a\na ::= b\n", "the rule 'b' is not defined"),
    ('root ::= b\nroot ::= "a"', "the rule 'b' is not defined"),
    ("start ::= [a]", "no rule 'root'"),
    ("# nothing\n", "no rule"),
    ('root ::= "a', "line 1, column 10: the string does not end"),
    ("root ::= [a", "line 1, column 10: the set does not end"),
    ("root ::= [a-", "the set does not end"),
    ('root ::=\n  "a" |\n  "\\d"', r"line 3, column 4: unknown escape \\d"),
    ('root ::= "\\x4"', "2 hexadecimal digits"),
    ("root ::= *", "'\\*' has nothing to repeat"),
    ('root ::= ""+', "nothing to repeat"),
    ("root ::= [a]{0}*", "nothing to repeat"),
    ("root ::= [a]{x}", "expected a number"),
    ("root ::= [a]{,3}", "expected a number"),
    ("root ::= [a]{1;2}", "expected ','"),
    ("root ::= [a]{3,2}", "below its minimum"),
    ("root ::= [a]{2001}", "limit of 2000"),
    ("root ::= " + "(" * 300 + "[a]" + ")" * 300, "nested deeper"),
    ("root ::= <[x]>", "the id of a token"),
    ("root ::= <abc", "expected '>'"),
    ("root ::= []", "line 1, column 10: an empty set matches nothing"),
    ("root ::= [az-a]", "line 1, column 12: the range ends before it begins"),
    ('root ::= "a" [^] "b"', "line 1, column 14: an empty set matches nothing"),
    ("root ::= [a]\0", "NUL"),
    *(
        (f'root ::= "a"\n  {start} "b"', "line 2, column 3: expected the name of a rule, .*: "
         "a line break ended the rule 'root'")
        for start in ("|", '"c"', "[c]", "(", "*", "+", "?", "{2}", "<c>", "!<c>", ".", ")")
    ),
    ('root ::=\n  | "a"\n  | "b"', "line 3, column 3: .*: a line break ended the rule 'root'"),
    ('root ::= "a"\r\n  | "b"', "line 2, column 3: .*: a line break ended the rule 'root'"),
    ('root ::= x\nx ::= "a" # c\n# d\n\n | [b]', "line 5, column 2: .* ended the rule 'x'"),
    *(
        (f'root ::= "a"\n  b{rest}\nb ::= "c"', "line 2, .*: a line break ended the rule 'root'")
        for rest in ("", " b", ' "c"', " |", "*", " (b)", " [c]")
    ),
    *(
        (f'root ::= {text}b ::= "c"', "found '::=': .* part of the rule 'root'")
        for text in ("\n", '"a" ', '"a" |\n', '"a" | b ', "| ", '("a" | "d") ')
    ),
]  # fmt: skip


def test_token_that_the_vocabulary_lacks_is_refused_with_its_name(
    toy: lb.Model, capfd: pytest.CaptureFixture[str]
) -> None:
    grammar = Grammar('root ::= "a" <nothing> !<|bos|>')
    with pytest.raises(GrammarError, match="'<nothing>', which is several tokens"):
        Sampler(toy, SamplingParams(), grammar)
    Sampler(toy, SamplingParams(), Grammar("root ::= <|bos|> <[7]> !<[8]>"))
    assert capfd.readouterr().err == ""


class OfLlamaCpp(SamplerHandle):
    """A grammar in llama.cpp's own sampler, the judge."""

    def __init__(self, model: lb.Model, gbnf: str) -> None:
        ptr = C.llama_sampler_init_grammar(model.handle.vocab, gbnf.encode(), b"root")
        if not ptr:
            raise GrammarError("llama.cpp refuses it")
        super().__init__(ptr, model.handle)
        self._buffer, self._n_vocab = CandidateBuffer(model.n_vocab), model.n_vocab

    def bits(self) -> npt.NDArray[np.uint8]:
        """Return which tokens may come next."""
        allowed = np.zeros(self._n_vocab, dtype=np.uint8)
        self._buffer.fill(np.zeros(self._n_vocab, dtype=np.float32))
        self.apply(self._buffer)
        ids, logits = self._buffer.read()
        allowed[ids[logits > -np.inf]] = 1
        return allowed


_PART = re.compile(r'/(?:[^/\\]|\\.)*/|[rR]\d+|<[^>]*>|""|\{[\d,]*\}|[()|]')


def _read(parts: list[str], empty: set[str]) -> tuple[bool, set[str], bool]:
    """Read alternatives in Lark.

    Return whether they may be empty, the rules that they may begin with, and whether something that may
    be empty is repeated.
    """
    firsts, repeats, ways, is_empty = set[str](), False, [True], True
    while parts and (part := parts.pop(0)) != ")":
        if part[0] == "{":
            low, high = part[1:-1].split(",")
            repeats |= is_empty and high not in ("0", "1")
            is_empty |= low == "0"
            continue
        ways[-1] &= is_empty
        begins, is_empty = {part} - {"("}, part in empty or part in ('""', "|")
        if part == "|":
            ways.append(True)
        elif part == "(":
            is_empty, begins, inner = _read(parts, empty)
            repeats |= inner
        firsts |= begins if ways[-1] else set()
    ways[-1] &= is_empty
    return any(ways), firsts, repeats


def _loops(text: str) -> bool:
    """Return whether llama.cpp refuses a grammar, or loops: it has left recursion, or repeats nothing."""
    lines = (line.split(":", 1) for line in Gbnf(text).lark().splitlines()[1:])
    parts = {name: _PART.findall(body) for name, body in lines}
    empty: set[str] = set()
    while more := {name for name in parts if _read([*parts[name]], empty)[0]} - empty:
        empty |= more
    read = {name: _read([*parts[name]], empty) for name in parts}
    try:
        TopologicalSorter(
            {name: firsts & parts.keys() for name, (_, firsts, _) in read.items()}
        ).prepare()
    except CycleError:
        return True
    return any(repeats for _, _, repeats in read.values())


# Where the check is stricter than llama.cpp's parser.
STRICTER = ("the limit", "below its minimum", "nested", "an empty set", "the range", "is not defined",
            "which ends")  # fmt: skip


def _walk(text: str, model: lb.Model, rng: random.Random) -> int:
    """Follow random texts in llguidance and in llama.cpp; compare all masks.

    Return how many, or -1 if a grammar is refused by both.
    """
    try:
        Gbnf(text).lark(model)
    except GrammarError as error:
        if not any(word in str(error) for word in STRICTER):
            with pytest.raises(GrammarError):
                OfLlamaCpp(model, text)
        return -1
    if _loops(text):
        return 0
    theirs, n, token = OfLlamaCpp(model, text), 0, 0
    try:
        grammar = Grammar(text)
        ours = grammar.start(model)
    except GrammarError:  # for example an empty range
        return 0
    for n in range(1, 9):
        bits = np.unpackbits(ours.mask().view(np.uint8), bitorder="little")[: model.n_vocab]
        # llama.cpp does not check which bytes of a character may follow its first one: it takes overlong
        # forms and surrogates.
        is_inside = token >= 2 and model.piece(token) >= b"\x80"
        right, taken = theirs.bits(), bits.copy()
        if grammar.names_tokens:  # to llguidance a token that is named is no text, too
            if is_inside:
                break
            taken[2] = 0  # to llama.cpp the byte 0 is no token
            assert not (_without_invalid(taken) & ~_without_invalid(right) & 1).any(), text
        elif is_inside:
            assert not (taken & ~right & 1).any(), text
        else:
            assert np.array_equal(_without_invalid(taken), _without_invalid(right)), (text, n)
        choices = np.flatnonzero(bits)
        token = int(rng.choice(choices.tolist()))
        if model.is_eog(token):
            break
        ours.accept(token)
        theirs.accept(token)
    return n


def _without_invalid(bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the bits of the bytes that begin a character, and of EOG.

    To llama.cpp the name of BOS is text.
    """
    return np.concatenate((bits[1 : 2 + 0x80], bits[2 + 0xC2 : 2 + 0xF5]))


VALID = [
    'root ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
    'term ::= id | num | "(" ws expr ")" ws\nid ::= [a-z] [a-z0-9_]* ws\n'
    "num ::= [0-9]+ ws\nws ::= [ \\t\\n]*",
    'root ::= "a" | "b" x-1 # a comment ( [ "\r\n\n x-1 ::= (\n[^\\]\\"a-z]\n|.{2,3} )? root?',
    'root ::= "é€\\u00e9\\U0001F600\\x41" [é-ü] {3} ( | "x") {0,2} ""',
    "root ::= a a\na ::= b{2,} c{ 1 , 4 }\nb ::= [-a] | [a-]\nc ::= (((. .) | !<[3]>)) <[5]>",
    '\n\nroot   ::=  root-2|\n "z"\nroot-2 ::= [x] root-2 | \n',
]


PIECES = [
    '"', "[", "]", "(", ")", "|", "*", "+", "?", "{2}", "{0}", "{,", "{1,", "}", "::=", "\n", "\\", "#",
    "-", "^", "a", "root", " ", ".", '""', "<[3]>", "!", "<", ">", "é", "\\x4", "ws",
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


@pytest.mark.parametrize("seed", range(4))
def test_gbnf_is_read_and_followed_as_by_llama_cpp(
    seed: int, toy: lb.Model, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    # Recursion at the end of an alternative is no left recursion.
    valid = [*VALID, 'root ::= ws* "x"\nws ::= sp\nsp ::= " "?']
    n = [_walk(text, toy, rng) for text in valid for _ in range(6)]
    assert min(n) >= 0
    mutated = filter(str.strip, (_mutated(rng) for _ in range(250)))
    n_mutated = [_walk(text, toy, rng) for text in mutated]
    capfd.readouterr()  # what the parser prints
    assert 20 < sum(found >= 0 for found in n_mutated) < 230
    assert sum(found for found in [*n, *n_mutated] if found > 0) > 100


# -- other kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ('root ::= "a" ("" | "b")*', ["a", "ab", "abbb"], ["", "aba"]),
        ('root ::= ([a]? | [b]*)+ "c"', ["c", "abbc"], ["", "ca"]),
        ('root ::= e* "c"\ne ::= f\nf ::= "x"?', ["c", "xxc"], ["cx"]),
        ('root ::= "(" ("" | "b" | root)* ")"', ["()", "(b()(bb))"], ["(", "(a)"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["", "a"]),
        ('root ::= b root "x" | "y"\nb ::= c\nc ::= ""', ["y", "yxx"], ["", "x"]),
        ("root ::= ( | [a] | <[101]>)*", ["", "aa", "aca"], ["b"]),  # 101 is "c"
    ],
)
def test_what_may_be_empty_may_be_repeated_and_rules_may_begin_with_themselves(
    text: str, right: list[str], wrong: list[str], toy: lb.Model
) -> None:
    grammar = Grammar(text)
    for each in (*right, *wrong):
        tokens = [*toy.tokenize(each, add_special=False), 1]
        n = Sampler(toy, SamplingParams(), grammar).count_allowed(tokens)
        assert (n == len(tokens)) == (each in right), each


def test_id_that_the_vocabulary_lacks_is_refused_before_the_first_token(toy: lb.Model) -> None:
    for text in ("root ::= <[999999]>", 'root ::= "a" | "b" !<[999999]>'):
        with pytest.raises(
            GrammarError, match="refers to <\\[999999\\]>, but this vocabulary has 258"
        ):
            Grammar(text).start(toy)


def test_many_rules_beside_one_another_are_a_grammar(toy: lb.Model) -> None:
    """As for some hundred tools, whose calls each have several rules."""
    rules = "".join(f'\nr{i}: "{i}," (r{i} | s{i})?\ns{i}: "{i};"' for i in range(600))
    grammar = Grammar.from_lark(f"start: {' | '.join(f'r{i}' for i in range(600))}{rules}")
    assert accepts(toy, grammar, "77,77,77;") and not accepts(toy, grammar, "77,78;")


CHOICES = ["red", "red and blue", 'a "quote" \\ / [x]{2}', "line\nbreak", "é€😀", " "]
TEXTS: list[tuple[Grammar, list[str], list[str]]] = [
    *((Grammar.from_regex(pattern), valid, invalid) for pattern, valid, invalid in (
        ("[a-z]+", ["a", "abc"], ["", "A", "a1"]),
        (r"^\d{3}-\d{2}$", ["123-45"], ["12-345", "x123-45", "123-456"]),
        ("yes|no", ["yes", "no"], ["yesno", "y"]),
        (r"a/b\.c", ["a/b.c"], ["a/bxc"]),
        (r"\p{Lu}\p{Ll}*", ["Éa"], ["éa"]),
        ("(?:ab){2,3}", ["abab", "ababab"], ["ab", "abababab"]),
        ("a?", ["", "a"], ["aa"]),
    )),
    (Grammar.from_choices(CHOICES), CHOICES,
     ["", "re", "redd", "red and", "a quote", "line", "  ", "é"]),
    (Grammar.from_lark('start: "(" NAME ("," NAME)* ")"\nNAME: /[a-z]+/'), ["(a,bc)"], ["(a,)"]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_grammar_is_of_the_whole_text(number: int, toy: lb.Model) -> None:
    grammar, valid, invalid = TEXTS[number]
    assert all(accepts(toy, grammar, text) for text in valid)
    assert not any(accepts(toy, grammar, text) for text in invalid)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar('root ::= "a" | "b"'), Grammar.from_choices(["a", "b"]), Grammar.from_regex("a|b"),
        Grammar.from_lark('start: "a"'), Grammar.from_json_schema({"enum": [1]}, whitespace="none"),
    ],
    ids=lambda grammar: grammar.kind,
)  # fmt: skip
def test_grammar_is_the_same_after_json_and_pickle(grammar: Grammar) -> None:
    assert Grammar.from_dict(json.loads(json.dumps(grammar.as_dict()))) == grammar
    assert pickle.loads(pickle.dumps(grammar)) == grammar


# -- masks -----------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["king", "wolf", "witch"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
}


@pytest.mark.parametrize(
    "grammar",
    [Grammar.from_json_schema(SCHEMA), Grammar.from_regex(r"(\w+ ){2,4}\."), Grammar(VALID[0])],
    ids=["schema", "regex", "gbnf"],
)
def test_mask_is_what_the_matcher_answers_token_by_token(
    grammar: Grammar, target: lb.Model
) -> None:
    """If the next text is certain, the mask has only the first token of its normal tokenization."""
    rng = random.Random(3)
    state = grammar.start(target)
    n_forced = 0
    for _ in range(25):
        bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: target.n_vocab]).tolist()
        assert not bits[target.n_vocab :].any()
        assert target.eog_tokens & set(allowed) in (frozenset(), target.eog_tokens)
        forced = state.forced()
        if forced:
            n_forced += 1
            assert allowed == forced[:1]
        else:
            assert allowed == [token for token in range(target.n_vocab) if state.allows(token)]
        if not allowed:
            break
        token = rng.choice([t for t in allowed if not target.is_eog(t)] or allowed)
        state.accept(token)
        if target.is_eog(token):
            assert not state.mask().any()
    assert (n_forced > 3) == (grammar.kind == "json_schema")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_p=0.7, seed=2),
        SamplingParams(top_k=0, top_p=1.0, min_p=0.0, temperature=1.3), SamplingParams(top_k=3),
        SamplingParams(logit_bias={5: 2.0, 82: -3.0}), SamplingParams(repeat_penalty=1.3, typical_p=0.9),
    ],
)  # fmt: skip
def test_draw_is_from_the_masked_row_before_anything_is_truncated(
    params: SamplingParams, target: lb.Model
) -> None:
    """The reference has no grammar: every other token has a bias of -inf."""
    rng = np.random.default_rng(5)
    sampler = Sampler(target, params, Grammar.from_json_schema(SCHEMA))
    for position in range(20):
        row = rng.normal(0, 3, target.n_vocab).astype(np.float32)
        distribution = sampler.distribution(row, position, 7)
        mask = sampler.processed(np.zeros(target.n_vocab))[0]
        hidden = np.full(target.n_vocab, -np.inf)
        hidden[mask] = 0.0
        bias = {t: float(hidden[t]) + params.logit_bias.get(t, 0.0) for t in range(target.n_vocab)}
        plain = Sampler(target, params.replace(logit_bias=bias))
        plain._history = sampler._history
        expected = plain.distribution(row, position, 7)
        assert distribution.dense(target.n_vocab) == pytest.approx(
            expected.dense(target.n_vocab), abs=1e-6
        )
        sampler.accept(distribution.draw(3, position))


# -- what is not accepted ----------------------------------------------------------------------------

HOSTILE: dict[str, Callable[[], Grammar]] = {
    "too many properties": lambda: Grammar.from_json_schema(
        {"properties": {f"p{i}": {"type": "string"} for i in range(30_000)}}
    ),
    "parts multiplied": lambda: Grammar.from_json_schema({"allOf": [
        {"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(8)]} for i in range(8)
    ]}),
    "expression of 5 MB": lambda: Grammar.from_regex("a" * 5_000_000),
    "expression of 50,000 levels": lambda: Grammar.from_regex("(" * 50_000 + "a" + ")" * 50_000),
    "expression that nothing matches": lambda: Grammar.from_regex(r"[^\s\S]"),
    "expression that does not parse": lambda: Grammar.from_regex("(a"),
    "lark of 100,000 levels": lambda: Grammar.from_lark("start: " + "(" * 10**5 + "/a/" + ")" * 10**5),
    **{
        f"lark of a chain of {n:,} rules": partial(
            Grammar.from_lark,
            f"start: {name}0\n{name}{n}: /a/\n"
            + "\n".join(f"{name}{i}: {name}{i + 1}" for i in range(n)),
        )
        for name, n in (("r", 3_000), ("A", 30_000))
    },
    "lark with a schema of 100,000 levels": lambda: Grammar.from_lark("start: %json " + "[" * 10**5),
    "lark with a chain of schemas": lambda: Grammar.from_lark(
        'start: %json {"$ref": "#/$defs/d0", "$defs": {'
        + ", ".join(f'"d{i}": {{"$ref": "#/$defs/d{i + 1}"}}' for i in range(5_000))
        + ', "d5000": {"type": "null"}}}'
    ),
    "lark without end": lambda: Grammar.from_lark('start: start "a"'),
    "lark without rules": lambda: Grammar.from_lark("nothing"),
    "lark of an unknown name": lambda: Grammar.from_lark("start: foo"),
    **{
        f"3,000 groups, {kind}": partial(Grammar, "\n".join((
            "root ::= r0", f"r1000 ::= {end}",
            *(f'r{i} ::= ("x" ("x" ("x" r{i + 1})))' for i in range(1000)),
        )))
        for kind, end in (("chain", '"y"'), ("recursion", '"y" | "z" r0'))
    },
    "an end token": lambda: Grammar("root ::= [a-z]* <[1]>"),
    "NUL": lambda: Grammar.from_regex("a\0"),
    "no choice": lambda: Grammar.from_choices([]),
    "an empty choice": lambda: Grammar.from_choices(["a", ""]),
    "no text": lambda: Grammar.from_regex("  "),
    **{f"lark token {i}": partial(Grammar.from_lark, lark) for i, lark in enumerate((
        "start: <nothing>", "start: <[9999999]>", "start: <|nothing|> /a/",
    ))},
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Grammar], str]] = {
    **{gbnf[:30]: (partial(Grammar, gbnf), reason) for gbnf, reason in GBNF},
    **{name: (make, "") for name, make in HOSTILE.items()},
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_grammar_is_an_error_at_once_with_its_reason(
    name: str, toy: lb.Model, capfd: pytest.CaptureFixture[str]
) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(GrammarError, match=reason or None) as caught:
        Sampler(toy, SamplingParams(), make())
    assert len(str(caught.value)) < 500
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("bar", ["|", "\n  |", "|\n "])
def test_hint_about_a_line_that_begins_with_a_bar_leads_to_a_grammar_that_works(
    bar: str, toy: lb.Model
) -> None:
    """The hint is right after '|' and in parentheses, too. Nothing before '|' is the empty text."""
    with pytest.raises(GrammarError) as caught:
        Grammar('root ::= "a"\n  | "b"')
    assert "inside parentheses" in (caught.value.hint or "")
    assert "allows the empty text" in (caught.value.hint or "")
    for gbnf, allows_empty in (
        ('root ::= "a" |\n "b"', False),
        (f'root ::= ("a" {bar} "b")', False),
        (f'root ::= ({bar} "a" {bar} "b")', True),
        ('root ::=\n  | "a" | "b"', True),
    ):
        state, theirs = Grammar(gbnf).start(toy), OfLlamaCpp(toy, gbnf)
        end = min(toy.eog_tokens)
        assert state.allows(end) is allows_empty, gbnf
        assert theirs.bits()[end] == allows_empty, gbnf


def test_hint_of_a_grammar_that_does_not_parse_fits_its_error() -> None:
    """A text without rules gets an example; where no line continues a rule, there is no hint about it."""
    for gbnf in ("| [a]", '"yes" | "no"', '{"type": "object"}', "[0-9]+"):
        with pytest.raises(GrammarError, match="line 1, column 1: expected the name") as none:
            Grammar(gbnf)
        assert 'root ::= "yes" | "no"' in (none.value.hint or "")
    for gbnf in ('root ::= "a"\nmy_rule ::= "b"', 'root ::= "a"\nb = "c"', 'root ::= "a";'):
        with pytest.raises(GrammarError) as other:
            Grammar(gbnf)
        assert other.value.hint is None and "line break" not in str(other.value)


@pytest.mark.parametrize(
    "pattern", ["((a{1,1000}){1,1000}){1,1000}", "(.*a){1,500}.{1,500}", "[ab]*a[ab]{30}"]
)
def test_expression_that_explodes_neither_hangs_nor_takes_all_memory(
    pattern: str, toy: lb.Model
) -> None:
    """Such a grammar is refused, or its states are computed when they are needed."""
    try:
        sampler = Sampler(toy, SamplingParams(), Grammar.from_regex(pattern))
        for position in range(60):
            row = np.random.default_rng(position).normal(0, 1, toy.n_vocab).astype(np.float32)
            sampler.accept(sampler.distribution(row).draw(1, position))
    except GrammarError:
        pass


def test_a_grammar_ends_with_its_model(target: lb.Model) -> None:
    with lb.Model(target.path) as model:
        state = Grammar.from_choices(["ab", "cd"]).start(model)
    with pytest.raises(lb.errors.ClosedError):
        state.mask()
