"""The law of drafting: whatever drafts, whoever asks, whatever runs beside it, the text is the plain one.

"Plain" is ``Branch.generate``, one decode a token. In a batch-invariant context the logits of a verified
token are those of a token decoded alone, to the bit, and every loop draws with the noise of (seed,
position): so tokens, texts, log-probabilities and entropies are compared with ==.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import toys
from drafts import FIXED, GREEDY, PROMPTS, WARM, take_turns

import llamabranch as lb
from llamabranch import Branch, Context, Grammar, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.errors import CacheFullError, ClosedError, LlamaBranchError
from llamabranch.generation.drafter import DraftLength
from llamabranch.speculative import Draft, NullDrafter, PromptLookupDrafter

DATA = Path(lb.__file__).parent / "data"
LOOKING_BACK = [
    {"repeat_penalty": 1.3, "penalty_last_n": 20},
    {"frequency_penalty": 0.7, "presence_penalty": 0.5, "penalty_last_n": -1},
    {"dry_multiplier": 0.9, "dry_allowed_length": 1},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"repeat_penalty": 1.1, "dry_multiplier": 0.5, "top_p": 0.7, "typical_p": 0.9},
]
GRAMMARS: list[str | Grammar] = [
    r'root ::= ("yes" | "no" | "may" "be" | " and "){4,9} "."',
    Grammar.from_json_schema({"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}),
    r"""
        root ::= sentence{3,6} end
        sentence ::= "The " ("king" | "witch" | "frog") " " ("slept" | "wept") more? ". "
        more ::= " and " ("sang" | "danced")
        end ::= "The end."
    """,
]  # fmt: skip
SENTENCE = r"""
    root ::= "The " ("king" | "witch" | "frog") " " ("slept" | "wept") " and " last "."
    last ::= "sang" | "danced"
"""


# -- what is asked for -------------------------------------------------------------------------------


class Case(NamedTuple):
    """A text that is asked for."""

    prompt: str | list[int] = PROMPTS[0]
    sampling: SamplingParams = WARM
    n: int | None = 40
    stop: tuple[str, ...] = ()
    grammar: str | Grammar | None = None


class Said(NamedTuple):
    """A text, and how it ended: the reason, or the name of the error."""

    tokens: list[int]
    text: str
    numbers: list[tuple[float, float]]
    how: str | None


def heard(tokens: Iterable[lb.Produced], reason: Callable[[], str | None]) -> Said:
    """Listen to the end."""
    seen: list[lb.Produced] = []
    error = ""
    try:
        seen.extend(tokens)
    except LlamaBranchError as caught:
        error = type(caught).__name__
    said = [one for one in seen if not one.is_stop]
    return Said(
        [one.token for one in said],
        "".join(one.text for one in seen),
        [(one.logprob, one.entropy) for one in said],
        error or reason(),
    )


def plain(ctx: Context, case: Case) -> Said:
    with start(ctx, case) as branch:
        said = heard(branch.generate(case.n, case.stop), lambda: branch.finish_reason)
        return said._replace(how="length") if case.n == 0 else said


def start(ctx: Context, case: Case) -> Branch:
    return Branch.start(ctx, case.prompt, sampling=case.sampling, grammar=case.grammar)


def free(ctx: Context) -> list[Case]:
    return [Case(prompt, sampling, 48) for prompt in PROMPTS for sampling in (GREEDY, WARM)]


def penalties(ctx: Context) -> list[Case]:
    base = SamplingParams(seed=7)
    return [
        Case(PROMPTS[2], base.replace(temperature=temperature, **settings))
        for temperature in (0.0, 0.8)
        for settings in LOOKING_BACK
    ]


def limits(ctx: Context) -> list[Case]:
    prompts: list[str | list[int]] = [PROMPTS[0], "", []]
    return [Case(prompt, n=n) for n in (*range(8), 23) for prompt in prompts]


def ends(ctx: Context) -> list[Case]:
    """The end is made likely, for target and draft alike, so that drafts run past it."""
    return [
        Case(PROMPTS[i % 3], SamplingParams(seed=i, logit_bias={ctx.model.eos or 0: bias}), 60)
        for i in range(4)
        for bias in (6.0, 9.0, 12.0)
    ]


def stops(ctx: Context) -> list[Case]:
    """In the middle of tokens and of blocks; the last ones could begin, and then the text ends."""
    text = plain(ctx, Case(n=120)).text
    found = [Case(n=120, stop=(text[at : at + 6], "never")) for at in (3, 20, 50, 101, 102, 103)]
    never = tuple(chr(c) + "\x00never" for c in range(32, 127))
    return found + [case._replace(stop=never) for case in ends(ctx)[:3]]


def grammars(ctx: Context) -> list[Case]:
    settings = (GREEDY, WARM, WARM.replace(repeat_penalty=1.3, dry_multiplier=0.8))
    return [Case(PROMPTS[0], s, 90, grammar=g) for g in GRAMMARS for s in settings]


def dead_ends(ctx: Context) -> list[Case]:
    """The grammar is complete, and no end token may be drawn: an error, or the limit comes before it."""
    bias = dict.fromkeys(ctx.model.eog_tokens, -math.inf)
    found = []
    for i in range(3):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=i, logit_bias=bias)
            case = Case(PROMPTS[i], params, 60, grammar=SENTENCE)
            found += [case, case._replace(n=len(plain(ctx, case).tokens))]
    return found


CASES = {f.__name__: f for f in (free, penalties, limits, ends, stops, grammars, dead_ends)}


# -- what drafts -------------------------------------------------------------------------------------


class Hostile(lb.Drafter):
    """Drafts what the target would say and then lies, only lies, ends, or nothing, in turn.

    ``ends``: always what it would say, to the end, and then more ends.
    """

    name = "hostile"

    def __init__(self, knowing: lb.Drafter, *, ends: bool = False) -> None:
        self.knowing, self.ends = knowing, ends

    def check(self, target: lb.Model) -> None:
        """Claim to fit."""

    def start(self, target: lb.speculative.Text, rule: str) -> HostileState:
        return HostileState(self.knowing.start(target, rule), target.ctx.model, self.ends)


class HostileState:
    def __init__(self, knowing: lb.speculative.DraftState, model: lb.Model, ends: bool) -> None:
        self.knowing, self.model, self.ends = knowing, model, ends
        self.n_rounds = self.n_standing = 0

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        assert len(tokens) >= self.n_standing
        self.n_rounds += 1
        truth = self.knowing.propose(tokens, length, limit).tokens
        if self.ends:
            return Draft([*truth, *[self.model.eos or 0] * 5][:limit], n_decodes=1)
        truth = truth[: self.n_rounds % 6]
        lies = [(31 * self.n_rounds + 7 * i) % self.model.n_vocab for i in range(5)]
        end = self.model.eos or 0
        kinds = [
            [], lies, [end] * 4, [*truth, end, *lies], [*truth, *reversed(lies)], [tokens[-1]] * 6,
            [*truth, *lies],
        ]  # fmt: skip
        return Draft(kinds[self.n_rounds % 7][:limit], n_decodes=1)

    def observe(self, n_tokens: int) -> None:
        assert n_tokens >= self.n_standing - 1  # the last one may have no cell
        self.n_standing = n_tokens
        self.knowing.observe(n_tokens)

    def fork(self, target: lb.speculative.Text) -> HostileState:
        return HostileState(self.knowing.fork(target), self.model, self.ends)

    def close(self) -> None:
        self.knowing.close()


class World(NamedTuple):
    """The target's context, and those that draft: the draft, the target itself, the draft renumbered."""

    ctx: Context
    draft: Context
    twin: Context
    renumbered: Context

    def check(self) -> None:
        """Nothing is left."""
        for ctx in self:
            ctx.audit()
            assert (ctx.usage().cells_used, ctx.n_seq_free) == (0, 8)


Maker = Callable[[World], lb.Drafter | None]
DRAFTERS: dict[str, Maker] = {
    "nobody": lambda w: None,
    "none": lambda w: NullDrafter(),
    "model": lambda w: lb.ModelDrafter(w.draft),
    "same model": lambda w: lb.ModelDrafter(w.twin),
    "hostile": lambda w: Hostile(lb.ModelDrafter(w.twin)),
    "own settings": lambda w: lb.ModelDrafter(w.draft, SamplingParams(temperature=1.5, seed=1)),
    "other vocabulary": lambda w: lb.ModelDrafter(w.renumbered),
    "lookup": lambda w: PromptLookupDrafter(max_ngram=3, min_ngram=1),
    "suffix": lambda w: lb.SuffixDrafter(8, 1, factor=4.0, offset=4.0, min_probability=0.0),
    "chain": lambda w: lb.ChainDrafter([PromptLookupDrafter(), lb.ModelDrafter(w.draft)]),
    "grammar": lambda w: lb.GrammarDrafter(lb.ModelDrafter(w.draft)),
    "function": lambda w: lb.FunctionDrafter(lambda tokens, k: [7] * (k + 5), "sevens"),
}
SILENT = ("nobody", "none")


@pytest.fixture(scope="module")
def world(
    target: lb.Model, draft: lb.Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    order = np.random.default_rng(1).permutation(draft.n_vocab).tolist()
    path = tmp_path_factory.mktemp("renumbered") / "draft.gguf"
    toys.write_permuted(DATA / "tale-draft-q8_0.gguf", path, order)
    models = (target, draft, target, lb.Model(path))
    opened = [Context(m, n_ctx=1024, n_seq_max=8, n_threads=1) for m in models]
    yield World(*opened)
    for ctx in opened:
        ctx.close()


@pytest.fixture(scope="module")
def expected(world: World) -> dict[str, list[tuple[Case, Said]]]:
    """The texts of plain decoding, each made once."""
    made = {name: cases(world.ctx) for name, cases in CASES.items()}
    return {name: [(c, plain(world.ctx, c)) for c in cases] for name, cases in made.items()}


# -- who asks ----------------------------------------------------------------------------------------

Asked = tuple[list[Said], lb.SpeculativeStats]
Drafter = lb.Drafter | None


def by_prompt(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Ask a speculator for each, by its prompt."""
    speculator, found = Speculator(ctx, drafter, config), []
    for case in cases:
        generation = speculator.generate(
            case.prompt, sampling=case.sampling, grammar=case.grammar, max_tokens=case.n,
            stop=case.stop,
        )  # fmt: skip
        said = heard(generation, lambda g=generation: g.finish_reason)  # type: ignore[misc]
        assert (generation.tokens, generation.text) == (said.tokens, said.text)
        found.append(said)
    return found, speculator.stats


def by_branch(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Ask a speculator to go on with a branch, which then is as if it had read its tokens."""
    speculator, found = Speculator(ctx, drafter, config), []
    for case in cases:
        with start(ctx, case) as branch:
            generation = speculator.generate(branch, max_tokens=case.n, stop=case.stop)
            said = heard(generation, lambda g=generation: g.finish_reason)  # type: ignore[misc]
            assert branch.generated == generation.tokens == said.tokens
            with Branch.start(ctx, branch.tokens) as again:
                assert np.array_equal(branch.logits, again.logits)
            if said.tokens:
                mean = np.mean([logprob for logprob, _ in said.numbers])
                assert branch.perplexity() == pytest.approx(math.exp(-mean))
            speculator.forget(branch)
            found.append(said)
    return found, speculator.stats


def by_session(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Ask a session token by token, with the drafter and without it by turns."""
    found, stats = [], lb.SpeculativeStats()
    for case in cases:
        with lb.InferenceSession(
            ctx, case.prompt, sampling=case.sampling, grammar=case.grammar, max_tokens=case.n,
            stop=case.stop, config=config,
        ) as session:  # fmt: skip

            def tokens(session: lb.InferenceSession = session) -> Iterator[lb.Produced]:
                n = 0
                while (one := session.next_token(drafter if n // 7 % 3 != 2 else None)) is not None:
                    n += 1
                    yield one

            said = heard(tokens(), lambda s=session: s.finish_reason)  # type: ignore[misc]
            assert (session.tokens, session.text) == (said.tokens, said.text)
            found.append(said)
            stats.add(session.stats)
    return found, stats


def by_engine(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Ask an engine for all of them at once: each text is in the company of the others."""
    engine = lb.Engine(ctx, drafter, config, max_tokens=None)
    requests = [
        lb.Request(c.prompt, sampling=c.sampling, grammar=c.grammar, max_tokens=c.n, stop=c.stop)
        for c in cases
    ]
    events: list[lb.Event] = []
    results = engine.generate(requests, on_event=events.append)
    for result in results:
        shown = [e.emitted for e in events if e.id == result.id and e.emitted is not None]
        assert "".join(one.text for one in shown) == result.text
    return [
        Said(
            result.tokens,
            result.text,
            [(one.logprob, one.entropy) for one in result.emitted],
            result.finish_reason if result.error is None else type(result.error).__name__,
        )
        for result in results
    ], engine.stats.speculative


CALLERS = {"prompt": by_prompt, "branch": by_branch, "session": by_session, "engine": by_engine}
WAYS = [(drafter, caller) for drafter in DRAFTERS for caller in CALLERS]


# -- the law -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize(("drafter", "caller"), WAYS)
def test_drafted_text_is_the_plain_text(
    drafter: str,
    caller: str,
    cases: str,
    world: World,
    expected: dict[str, list[tuple[Case, Said]]],
) -> None:
    asked, wanted = [case for case, _ in expected[cases]], [said for _, said in expected[cases]]
    config = SpeculativeConfig(draft_k=5)
    found, stats = CALLERS[caller](world.ctx, DRAFTERS[drafter](world), config, asked)
    for case, said, text in zip(asked, found, wanted, strict=True):
        assert said == text, case
    world.check()
    assert stats.num_emitted_tokens == sum(len(said.tokens) for said in wanted)
    if cases == "free":
        assert (stats.num_drafts > 0) == (drafter not in SILENT)
        assert (stats.num_accepted_tokens > 0) == (drafter not in (*SILENT, "function"))
        if drafter == "same model":
            assert stats.draft_acceptance_rate == 1.0


def test_the_cases_are_what_they_are_for(
    world: World, expected: dict[str, list[tuple[Case, Said]]]
) -> None:
    ways = {name: [said.how for _, said in cases] for name, cases in expected.items()}
    assert ways["ends"].count("stop") >= 6
    assert set(ways["stops"]) == {"stop"}
    assert ways["grammars"].count("stop") >= 6
    free_text = plain(world.ctx, Case(n=120)).text
    for case, said in expected["stops"]:
        if "never" in case.stop:
            assert said.text == free_text[: free_text.index(case.stop[0])]
        else:  # nothing is held back in the end
            assert said.text == world.ctx.detokenize(said.tokens)
    assert ways["dead_ends"] == ["GrammarError", "length"] * 6
    assert all(said.text.endswith(("sang.", "danced.")) for _, said in expected["dead_ends"])
    assert [len(said.tokens) for _, said in expected["limits"]] == [
        case.n for case, _ in expected["limits"]
    ]


@pytest.mark.parametrize("caller", CALLERS)
def test_what_is_drafted_after_the_end_is_not_emitted(
    caller: str, world: World, expected: dict[str, list[tuple[Case, Said]]]
) -> None:
    drafter = Hostile(lb.ModelDrafter(world.twin), ends=True)
    asked, wanted = [case for case, _ in expected["ends"]], [said for _, said in expected["ends"]]
    found, _ = CALLERS[caller](world.ctx, drafter, SpeculativeConfig(draft_k=6), asked)
    assert found == wanted
    world.check()


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("drafter", ["model", "hostile", "suffix", "function"])
def test_at_temperature_zero_every_rule_gives_the_plain_text(
    drafter: str,
    caller: str,
    rule: str,
    world: World,
    expected: dict[str, list[tuple[Case, Said]]],
) -> None:
    every = [pair for name in ("free", "grammars", "dead_ends") for pair in expected[name]]
    greedy = [(case, said) for case, said in every if case.sampling.temperature == 0.0]
    config = SpeculativeConfig(draft_k=4, rule=rule)
    found, _ = CALLERS[caller](
        world.ctx, DRAFTERS[drafter](world), config, [case for case, _ in greedy]
    )
    assert found == [said for _, said in greedy]
    world.check()


@pytest.mark.parametrize(
    "config",
    [
        *(SpeculativeConfig(draft_k=k) for k in (0, 1, 2, 16, 64, "auto")),
        *(SpeculativeConfig(draft_k=6, entropy_stop=limit) for limit in (0.0, 0.5, 2.0)),
        SpeculativeConfig(entropy_stop=1.0, max_draft_tokens=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("drafter", ["model", "other vocabulary", "suffix", "chain", "function"])
def test_length_of_the_draft_does_not_matter(
    drafter: str,
    caller: str,
    config: SpeculativeConfig,
    world: World,
    expected: dict[str, list[tuple[Case, Said]]],
) -> None:
    asked, wanted = [case for case, _ in expected["free"]], [said for _, said in expected["free"]]
    found, stats = CALLERS[caller](world.ctx, DRAFTERS[drafter](world), config, asked)
    assert found == wanted
    assert stats.num_draft_tokens == 0 or config.draft_k != 0
    world.check()


@pytest.mark.parametrize("caller", ["branch", "session"])
@pytest.mark.parametrize("drafter", ["nobody", "model", "same model", "hostile"])
def test_what_is_abandoned_has_left_exactly_what_was_given_out(
    drafter: str, caller: str, world: World, expected: dict[str, list[tuple[Case, Said]]]
) -> None:
    case, said = expected["free"][1]
    for n in range(14):
        with start(world.ctx, case) as branch:
            if caller == "branch":
                speculator = Speculator(world.ctx, DRAFTERS[drafter](world), FIXED)
                generation = speculator.generate(branch)
                given = [next(generation).token for _ in range(n)]
                generation.close()
                generation.close()
                assert generation.tokens == given
                assert list(generation) == []
                speculator.forget(branch)
            else:
                session = lb.InferenceSession(world.ctx, branch, config=FIXED)
                drafts, given = DRAFTERS[drafter](world), []
                for _ in range(n):
                    one = session.next_token(drafts)
                    given += [] if one is None else [one.token]
                session.close()
                session.close()
                with pytest.raises(ClosedError):
                    session.next_token(drafts)
            assert branch.generated == given == said.tokens[:n]
            with Branch.start(world.ctx, branch.tokens) as again:
                assert np.array_equal(branch.logits, again.logits)
            assert [t.token for t in branch.generate(10)] == said.tokens[n : n + 10]
    world.check()


@pytest.mark.parametrize("caller", ["prompt", "session", "engine"])
@pytest.mark.parametrize("drafter", ["nobody", "model", "hostile", "suffix"])
def test_full_cache_ends_every_text_at_the_same_token(
    drafter: str, caller: str, world: World, target: lb.Model
) -> None:
    """Drafts do not take the place of a token; the last one needs no cell."""
    endless = WARM.replace(logit_bias={target.eos or 0: -1e9})
    cases = [Case([5] * (256 - n), endless, None) for n in (16, 1, 0)]
    with Context(target, n_ctx=256, n_seq_max=2, n_threads=1) as ctx:
        for case in cases:
            (said,), _ = CALLERS[caller](ctx, DRAFTERS[drafter](world), FIXED, [case])
            assert said.how == CacheFullError.__name__
            assert len(said.tokens) == 256 - len(case.prompt) + 1
            assert said == plain(ctx, case)
        ctx.audit()
        assert ctx.usage().cells_used == 0
    world.check()


@pytest.mark.parametrize("drafter", ["model", "lookup", "suffix", "chain", "other vocabulary"])
def test_generations_take_turns(drafter: str, world: World) -> None:
    """The states of one drafter interleave; each branch goes on as if it were alone."""
    speculator = Speculator(world.ctx, DRAFTERS[drafter](world), FIXED)
    with Branch.start(world.ctx, PROMPTS[2], sampling=WARM) as root:
        children = take_turns(speculator, root, 24)
        for child in children:
            speculator.forget(child)
            child.prune()
    world.check()
