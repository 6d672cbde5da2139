"""The law of drafting: with any drafter, any caller and any other texts beside it, the text is plain.

"Plain" means the text of ``Branch.generate`` with one decode per token. In an exact context the
logits of a verified token equal, to the bit, those of a token decoded alone, and every loop draws with
the noise of (seed, position). So tokens, texts, log-probabilities and entropies are compared with ==.
Then follow toys with other kinds of memory. Where their logits depend on the batch, numbers are compared
up to rounding.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import toys
from drafts import FIXED, GREEDY, PROMPTS, WARM, Eager

import llamabranch as lb
from llamabranch import Branch, Context, Grammar, SamplingParams, SpeculativeConfig, Speculator
from llamabranch.errors import CacheFullError, ClosedError, LlamaBranchError
from llamabranch.generation.drafter import DraftLength, NullState
from llamabranch.speculative import Draft, NullDrafter

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
    """A request for a text."""

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


def heard(
    *texts: tuple[Iterable[lb.Produced], Callable[[], str | None]],
) -> list[Said]:
    """Read texts to their ends, one token of each in turn. The second item tells why a text ended."""
    seen: list[list[lb.Produced]] = [[] for _ in texts]
    errors = [""] * len(texts)
    running = {i: iter(tokens) for i, (tokens, _) in enumerate(texts)}
    while running:
        for i, text in list(running.items()):
            try:
                seen[i].append(next(text))
            except StopIteration:
                del running[i]
            except LlamaBranchError as caught:
                errors[i] = type(caught).__name__
                del running[i]
    return [
        Said(
            [token.token for token in tokens if not token.is_stop],
            "".join(token.text for token in tokens),
            [(token.logprob, token.entropy) for token in tokens if not token.is_stop],
            error or reason(),
        )
        for tokens, error, (_, reason) in zip(seen, errors, texts, strict=True)
    ]


def plain(ctx: Context, case: Case) -> Said:
    with start(ctx, case) as branch:
        (outcome,) = heard((branch.generate(case.n, case.stop), lambda: branch.finish_reason))
        return outcome._replace(how="length") if case.n == 0 else outcome


def start(ctx: Context, case: Case) -> Branch:
    return Branch.start(ctx, case.prompt, sampling=case.sampling, grammar=case.grammar)


def free(ctx: Context) -> list[Case]:
    return [Case(prompt, sampling, 48) for prompt in PROMPTS for sampling in (GREEDY, WARM)]


def penalties(ctx: Context) -> list[Case]:
    base = SamplingParams(seed=7)
    return [
        Case(PROMPTS[2], base.replace(temperature=temperature, **settings))  # type: ignore[arg-type]
        for temperature in (0.0, 0.8)
        for settings in LOOKING_BACK
    ]


def limits(ctx: Context) -> list[Case]:
    prompts: list[str | list[int]] = [PROMPTS[0], "", []]
    return [Case(prompt, n=n) for n in (*range(8), 23) for prompt in prompts]


def ends(ctx: Context) -> list[Case]:
    """The end token is made likely for target and draft, so that drafts run past it."""
    return [
        Case(PROMPTS[i % 3], SamplingParams(seed=i, logit_bias={ctx.model.eos or 0: bias}), 60)
        for i in range(4)
        for bias in (6.0, 9.0, 12.0)
    ]


def stops(ctx: Context) -> list[Case]:
    """Stop strings in the middle of tokens and of blocks, and some that may begin at the text's end."""
    text = plain(ctx, Case(n=120)).text
    stopping = [Case(n=120, stop=(text[at : at + 6], "never")) for at in (3, 20, 50, 101, 102, 103)]
    never = tuple(chr(c) + "\x00never" for c in range(32, 127))
    return stopping + [case._replace(stop=never) for case in ends(ctx)[:3]]


def grammars(ctx: Context) -> list[Case]:
    settings = (GREEDY, WARM, WARM.replace(repeat_penalty=1.3, dry_multiplier=0.8))
    return [Case(PROMPTS[0], s, 90, grammar=g) for g in GRAMMARS for s in settings]


def dead_ends(ctx: Context) -> list[Case]:
    """The grammar is complete, but end tokens are forbidden: an error, unless the limit comes before."""
    bias = dict.fromkeys(ctx.model.eog_tokens, -math.inf)
    at_ends = []
    for i in range(3):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=i, logit_bias=bias)
            case = Case(PROMPTS[i], params, 60, grammar=SENTENCE)
            at_ends += [case, case._replace(n=len(plain(ctx, case).tokens))]
    return at_ends


CASES = {f.__name__: f for f in (free, penalties, limits, ends, stops, grammars, dead_ends)}


# -- what drafts -------------------------------------------------------------------------------------


class Hostile(lb.Drafter):
    """Drafts, in turn: right tokens and then wrong ones, only wrong ones, end tokens, and nothing.

    ``ends``: always the right tokens up to the end, and then more end tokens.
    """

    name = "hostile"

    def __init__(self, knowing: lb.Drafter, *, ends: bool = False) -> None:
        self.knowing, self.ends = knowing, ends

    def check(self, target: lb.Model) -> None:
        """Accept any target."""

    def start(self, target: lb.speculative.Text, rule: str) -> Any:
        return HostileState(self.knowing.start(target, rule), target.ctx.model, self.ends)


class HostileState(NullState):
    def __init__(self, knowing: lb.speculative.DraftState, model: lb.Model, ends: bool) -> None:
        self.knowing, self.model, self.ends = knowing, model, ends
        self.n_rounds = self.n_standing = 0

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        assert len(tokens) >= self.n_standing
        self.n_rounds += 1
        truth, end = self.knowing.propose(tokens, length, limit).tokens, self.model.eos or 0
        if self.ends:
            return Draft([*truth, *[end] * 5][:limit], n_decodes=1)
        truth = truth[: self.n_rounds % 6]
        lies = [(31 * self.n_rounds + 7 * i) % self.model.n_vocab for i in range(5)]
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
    """The context of the target, and those of drafters: the draft, the target itself, another kind.

    The other is the draft again, or a model with the usual memory.
    """

    ctx: Context
    draft: Context
    twin: Context
    other: Context

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
    "past the end": lambda w: Hostile(lb.ModelDrafter(w.twin), ends=True),
    "own settings": lambda w: lb.ModelDrafter(w.draft, SamplingParams(temperature=1.5, seed=1)),
    "usual memory": lambda w: lb.ModelDrafter(w.other),
    "suffix": lambda w: Eager(),
    "chain": lambda w: lb.ChainDrafter([lb.SuffixDrafter(), lb.ModelDrafter(w.draft)]),
    "grammar": lambda w: lb.GrammarDrafter(lb.ModelDrafter(w.draft)),
    "function": lambda w: lb.FunctionDrafter(lambda tokens, k: [7] * (k + 5), "sevens"),
}
SILENT = ("nobody", "none")


@pytest.fixture(scope="module")
def world(target: lb.Model, draft: lb.Model) -> Iterator[World]:
    models = (target, draft, target, draft)
    opened = [Context(m, n_ctx=1024, n_seq_max=8, n_threads=1, exact=True) for m in models]
    yield World(*opened)
    for ctx in opened:
        ctx.close()


Expected = dict[str, tuple[list[Case], list[Said]]]


@pytest.fixture(scope="module")
def expected(world: World) -> Expected:
    """The texts of plain decoding, each made once."""
    by_kind = {name: cases(world.ctx) for name, cases in CASES.items()}
    return {name: (cases, [plain(world.ctx, c) for c in cases]) for name, cases in by_kind.items()}


# -- who asks ----------------------------------------------------------------------------------------

Asked = tuple[list[Said], lb.speculative.SpeculativeStats]
Drafter = lb.Drafter | None


def by_prompt(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Generate each with a speculator, from its prompt."""
    speculator, texts = Speculator(ctx, drafter, config), []
    for case in cases:
        generation = speculator.generate(
            case.prompt, sampling=case.sampling, grammar=case.grammar, max_tokens=case.n,
            stop=case.stop,
        )  # fmt: skip
        texts += heard((generation, lambda g=generation: g.finish_reason))  # type: ignore[misc]
        assert (generation.tokens, generation.text) == texts[-1][:2]
    return texts, speculator.stats


def by_branch(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Continue branches with a speculator, two in turn; then the branches are as if read."""
    speculator, texts = Speculator(ctx, drafter, config), []
    for i in range(0, len(cases), 2):
        branches = [start(ctx, case) for case in cases[i : i + 2]]
        running = [
            speculator.generate(branch, max_tokens=case.n, stop=case.stop)
            for branch, case in zip(branches, cases[i:], strict=False)
        ]
        heard_texts = heard(*((g, lambda g=g: g.finish_reason) for g in running))
        for branch, case, generation, text in zip(
            branches, cases[i:], running, heard_texts, strict=False
        ):
            assert branch.generated_tokens == generation.tokens == text.tokens
            with Branch.start(ctx, branch.tokens, sampling=case.sampling) as again:
                assert np.array_equal(branch.logits, again.logits)
                if case.grammar is None:
                    now, read = branch.distribution(), again.distribution()
                    assert np.array_equal(now.ids, read.ids)
                    assert np.array_equal(now.logprobs, read.logprobs)
            if text.tokens:
                mean = np.mean([logprob for logprob, _ in text.numbers])
                assert branch.perplexity() == pytest.approx(math.exp(-mean))
            speculator.forget(branch)
            branch.prune()
        texts += heard_texts
    return texts, speculator.stats


def by_session(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Generate with a session: token by token with the drafter, another one and none, in turn."""
    texts, stats = [], lb.speculative.SpeculativeStats()
    other = drafter if type(drafter) in (type(None), NullDrafter) else lb.SuffixDrafter(min_match=1)
    turns = (drafter, other, drafter, None)
    for case in cases:
        with lb.InferenceSession(
            ctx, case.prompt, sampling=case.sampling, grammar=case.grammar, max_tokens=case.n,
            stop=case.stop, config=config,
        ) as session:  # fmt: skip

            def tokens(session: lb.InferenceSession = session) -> Iterator[lb.Produced]:
                n = 0
                while (token := session.next_token(turns[n // 5 % 4])) is not None:
                    n += 1
                    yield token

            texts += heard((tokens(), lambda s=session: s.finish_reason))  # type: ignore[misc]
            assert (session.tokens, session.text) == texts[-1][:2]
            stats.add(session.stats)
    return texts, stats


def by_engine(
    ctx: Context, drafter: Drafter, config: SpeculativeConfig, cases: list[Case]
) -> Asked:
    """Generate all of them at once with an engine, so that each text runs beside the others."""
    engine = lb.Engine(ctx, drafter, config, max_tokens=None)
    requests = [
        lb.Request(c.prompt, sampling=c.sampling, grammar=c.grammar, max_tokens=c.n, stop=c.stop)
        for c in cases
    ]
    events: list[lb.Event] = []
    results = engine.generate(requests, on_event=events.append)
    for result in results:
        shown = [e.emitted for e in events if e.id == result.id and e.emitted is not None]
        assert "".join(token.text for token in shown) == result.text
    return [
        Said(
            result.tokens,
            result.text,
            [(token.logprob, token.entropy) for token in result.emitted],
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
    drafter: str, caller: str, cases: str, world: World, expected: Expected
) -> None:
    asked, wanted = expected[cases]
    config = SpeculativeConfig(draft_k=5)
    texts, stats = CALLERS[caller](world.ctx, DRAFTERS[drafter](world), config, asked)
    for case, drafted, text in zip(asked, texts, wanted, strict=True):
        assert drafted == text, case
    world.check()
    assert stats.num_emitted_tokens == sum(len(s.tokens) for s in wanted)
    if cases == "ends" and drafter == "same model":  # no draft continues after an end token
        assert stats.stop_reasons["end"] > 0
    if cases == "free":
        is_wrong = drafter == "function" and caller != "session"
        assert (stats.num_drafts > 0) == (drafter not in SILENT)
        assert (stats.num_accepted_tokens > 0) == (drafter not in SILENT and not is_wrong)
        if drafter == "same model" and caller != "session":
            assert stats.draft_acceptance_rate == 1.0


def test_the_cases_are_what_they_are_for(world: World, expected: Expected) -> None:
    ways = {name: [s.how for s in texts] for name, (_, texts) in expected.items()}
    assert ways["ends"].count("stop") >= 6
    assert set(ways["stops"]) == {"stop"}
    assert ways["grammars"].count("stop") >= 6
    free_text = plain(world.ctx, Case(n=120)).text
    for case, outcome in zip(*expected["stops"], strict=True):
        if "never" in case.stop:
            assert outcome.text == free_text[: free_text.index(case.stop[0])]
        else:  # nothing is held back in the end
            assert outcome.text == world.ctx.detokenize(outcome.tokens)
    assert ways["dead_ends"] == ["GrammarError", "length"] * 6
    assert all(s.text.endswith(("sang.", "danced.")) for s in expected["dead_ends"][1])
    asked, texts = expected["limits"]
    assert [len(s.tokens) for s in texts] == [case.n for case in asked]


CONFIGS = [
    *(SpeculativeConfig(draft_k=k) for k in (0, 1, 2, 16, 64, "auto")),
    *(SpeculativeConfig(draft_k=6, entropy_stop=limit) for limit in (0.0, 0.5, 2.0)),
    SpeculativeConfig(entropy_stop=1.0, max_draft_tokens=3),
    *(SpeculativeConfig(draft_k=4, rule=rule) for rule in ("token", "block")),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("drafter", ["model", "hostile", "suffix", "chain", "function"])
def test_any_length_and_at_temperature_zero_any_rule_gives_the_plain_text(
    drafter: str, caller: str, config: SpeculativeConfig, world: World, expected: Expected
) -> None:
    names = ("free",) if config.rule == "seeded" else ("free", "grammars", "dead_ends")
    pairs = [pair for name in names for pair in zip(*expected[name], strict=True)]
    if config.rule != "seeded":
        pairs = [(case, outcome) for case, outcome in pairs if case.sampling.temperature == 0.0]
    asked = [case for case, _ in pairs]
    texts, stats = CALLERS[caller](world.ctx, DRAFTERS[drafter](world), config, asked)
    assert texts == [outcome for _, outcome in pairs]
    assert stats.num_draft_tokens == 0 or config.draft_k != 0
    world.check()


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafter", ["same model", "hostile"])
def test_texts_of_rejection_rules_leave_their_state_and_end_where_they_may(
    drafter: str, rule: str, world: World, expected: Expected
) -> None:
    """Rejected tokens leave no penalty, and nothing follows an accepted end token."""
    config = SpeculativeConfig(draft_k=8, rule=rule)
    for name in ("penalties", "ends", "dead_ends"):
        asked = [case for case in expected[name][0] if case.sampling.temperature]
        texts, stats = by_branch(world.ctx, DRAFTERS[drafter](world), config, asked)
        assert stats.num_accepted_tokens > 0
        for text in texts:
            assert not world.ctx.model.eog_tokens & {*text.tokens}
        ways = [text.how for text in texts]
        if name == "ends":
            assert ways.count("stop") >= 6
        if name == "dead_ends":
            assert ways.count("GrammarError") >= 3
            assert all(
                text.text.endswith(("sang.", "danced.")) for text in texts if text.how != "length"
            )
    world.check()


# -- how it ends otherwise ---------------------------------------------------------------------------


def begin(
    caller: str, ctx: Context, drafter: Drafter, prompt: str | Branch
) -> tuple[Callable[[], lb.Produced | None], Callable[[], None]]:
    """Begin a text; return a function that gives the next token, and one that closes the text."""
    if caller == "session":
        own_sampling = None if isinstance(prompt, Branch) else WARM
        session = lb.InferenceSession(ctx, prompt, sampling=own_sampling, config=FIXED)
        return (lambda: session.next_token(drafter)), session.close
    if caller == "branch" and isinstance(prompt, str):
        prompt = Branch.start(ctx, prompt, sampling=WARM)
    own_sampling = None if isinstance(prompt, Branch) else WARM
    generation = Speculator(ctx, drafter, FIXED).generate(prompt, sampling=own_sampling)
    return (lambda: next(generation)), generation.close


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("caller", ["prompt", "branch", "session"])
def test_closed_or_forgotten_texts_give_everything_back(
    caller: str, is_closed: bool, world: World
) -> None:
    for _ in range(12):  # more than there are sequences
        following, close = begin(caller, world.ctx, lb.ModelDrafter(world.draft), PROMPTS[0])
        for _ in range(3):
            following()
        if is_closed:
            close()
    del following, close
    gc.collect()
    world.check()


@pytest.mark.parametrize("caller", ["prompt", "branch", "session"])
def test_closed_contexts_end_texts_with_a_clear_error(
    caller: str, target: lb.Model, draft_ctx: Context
) -> None:
    ctx = Context(target, n_ctx=256, n_threads=1, exact=True)
    following, close = begin(caller, ctx, lb.ModelDrafter(draft_ctx), PROMPTS[0])
    following()
    ctx.close()
    with pytest.raises(ClosedError):
        for _ in range(8):
            following()
    close()
    del following, close
    gc.collect()
    assert draft_ctx.usage().cells_used == 0


@pytest.mark.parametrize("caller", ["prompt", "session", "engine"])
@pytest.mark.parametrize("drafter", ["nobody", "model", "hostile", "suffix"])
def test_full_cache_ends_every_text_at_the_same_token(
    drafter: str, caller: str, world: World, target: lb.Model
) -> None:
    """Drafts take no cells away from the text. The last token needs no cell."""
    endless = WARM.replace(logit_bias={target.eos or 0: -1e9})
    cases = [Case([5] * (256 - n), endless, None) for n in (16, 1, 0)]
    cases += [Case([5] * 240, endless, n) for n in (15, 16, 17, 18)]
    with Context(target, n_ctx=256, n_seq_max=2, n_threads=1, exact=True) as ctx:
        for case in cases:
            (outcome,), _ = CALLERS[caller](ctx, DRAFTERS[drafter](world), FIXED, [case])
            n_most = 256 - len(case.prompt) + 1
            is_full = case.n is None or case.n > n_most
            assert outcome.how == (CacheFullError.__name__ if is_full else "length")
            assert len(outcome.tokens) == min(case.n or n_most, n_most)
            assert outcome == plain(ctx, case)
        ctx.audit()
        assert ctx.usage().cells_used == 0
    world.check()


# -- every kind of memory ----------------------------------------------------------------------------

# Toys with random weights; their EOG token is forbidden, so that texts run past the sliding window (32).
MEMORIES: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma3": {"swa_full": False}, "mamba": {}, "rwkv7": {}, "lfm2": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", MEMORIES)
def test_without_a_free_sequence_only_memory_that_drops_a_tail_drafts(
    kind: str, tmp_path: Path
) -> None:
    """Other memory verifies drafts on a fork. The texts are in the digests and the random programs."""
    size: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "kv_type": "bf16", **MEMORIES[kind]}
    case = Case("abcdefgabcdefg", SamplingParams(seed=7, logit_bias={1: -math.inf}), 70)
    with (
        lb.Model(toys.write_toy(tmp_path / "target.gguf", kind, vocab="bytes", seed=2)) as model,
        Context(model, n_seq_max=8, **size) as draft_ctx,
        Context(model, n_seq_max=1, **size) as ctx,
    ):
        wanted = plain(ctx, case)
        for caller in (by_prompt, by_session):
            (text,), stats = caller(ctx, lb.ModelDrafter(draft_ctx), FIXED, [case])
            assert text.tokens == wanted.tokens
            assert (stats.num_accepted_tokens > 0) == ctx.kv_cache.undoes(1)
        ctx.audit()
        draft_ctx.audit()
        assert ctx.usage().cells_used == draft_ctx.usage().cells_used == 0
