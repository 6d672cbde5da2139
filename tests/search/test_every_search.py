"""What all searches promise: room, drafts and other texts change no text, and nothing is left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import toys
from llama_cpp import llama_cpp as C

import llamabranch as lb
from llamabranch import Branch, Context, SuffixDrafter, search
from llamabranch.errors import CacheFullError, ConfigError, DecodeInterruptedError
from llamabranch.sampling.noise import derive_seed

STORY = "The wolf ran and the wolf ran and the wolf"
N_CELLS = 256  # llama.cpp's least
WHOLE: dict[str, Any] = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
WARM = lb.SamplingParams(**WHOLE)
CHOICES = [" beautiful and good", " beautiful", " telephone wires", " beautiful and bad", " be"]
Run = Callable[..., Any]


class Short(search.Potential):
    """Allow only short texts."""

    def prefix(self, text: str) -> float:
        return -0.2 * len(text)


def likes_e(text: str) -> float:
    return text.count("e") / (1 + len(text))


def first_letter(text: str) -> str | None:
    """Return one of three answers, or none for some texts."""
    letters = [c for c in text.lower() if c.isalpha()]
    place = ord(letters[0]) % 7 if letters else 6
    return None if place == 6 else "aaabbc"[place]


def spells(text: str) -> list[str]:
    return [] if len(text) == 5 else [" a", " b", " c", " d"] if not text else list("abcd")


def no_s(text: str) -> bool:
    return "s" not in text


STEPS: dict[str, Any] = {"reward": likes_e, "beam_width": 2, "step": 3, "max_tokens": 8}
RUNS: dict[str, Run] = {
    "beam_search": partial(search.beam_search, beams=4, max_tokens=8, n=4),
    "best_of_n": partial(search.best_of_n, n=5, max_tokens=12),
    "best_of_n rejects": partial(search.best_of_n, n=5, max_tokens=9, reject_every=4),
    "vote": partial(search.vote, answer=first_letter, n=6, max_tokens=6),
    # One text at a time. With more, the votes would depend on which texts end first.
    "vote decided": partial(
        search.vote, answer=first_letter, n=8, max_tokens=6, confidence=1.0, width=1
    ),
    "step_search": partial(search.step_search, n=4, **STEPS),
    "step_search entropy": partial(search.step_search, n=4, **{**STEPS, "entropy": 2.0}),
    "smc": partial(search.smc, particles=5, max_tokens=7, potentials=[Short()], threshold=0.9),
    "smc constraint": partial(search.smc, particles=4, max_tokens=6, constraint=no_s, power=2.0),
    "rejection": partial(
        search.rejection, constraint=no_s, n=3, max_tokens=6, stop=[".", ","], max_draws=30
    ),
    "tree_search moves": partial(
        search.tree_search, reward=likes_e, iterations=12, expand=spells, n=5
    ),
    "tree_search samples": partial(
        search.tree_search, reward=likes_e, iterations=10, expand=2, step=2, max_tokens=6,
        rollout_tokens=2, n=6,
    ),
    "select": partial(search.select, choices=CHOICES),
    "select contrast": partial(search.select, choices=CHOICES, method="contrast"),
}  # fmt: skip
OBSERVED = [name for name in RUNS if "select" not in name]
DRAFTED = [name for name in RUNS if name.split()[0] in ("best_of_n", "vote", "step_search")]
DRAFTED.append("tree_search samples")


def outcome(result: Any) -> tuple[Any, ...]:
    """Return the result of a search without its cost and its tree."""
    if isinstance(result, search.Selection):
        return result.choice, result.logprobs, result.scores
    # The length of texts that were not needed for a decision depends on the room.
    hypotheses = [h for h in result.hypotheses if h.finish_reason != "decided"]
    return hypotheses, result.votes, result.log_evidence, result.valid_mass


@contextmanager
def nothing_is_left(root: Branch) -> Iterator[None]:
    """Assert that afterwards ``root`` and the content of its context are unchanged."""
    ctx = root.ctx

    def state() -> tuple[object, ...]:
        room = ctx.n_seq_free, ctx.usage().cells_used
        return *room, root.tokens, root.logits.tolist(), root.produce(), root.children

    before = state()
    yield
    assert state() == before
    ctx.audit()


# -- the texts -----------------------------------------------------------------------------------------


def mean(h: search.Hypothesis) -> float:
    return h.logprob / len(h.tokens)


def e_score(h: search.Hypothesis) -> float:
    return likes_e(h.text)


def zero(_: search.Hypothesis) -> float:
    return 0.0


COLD = {"temperature": 0.0}
STEP: Run = partial(search.step_search, reward=likes_e, n=1, beam_width=1, max_tokens=30)
SMC: Run = partial(search.smc, particles=1, max_tokens=24)
# A search for one text; the settings; the options of `generate` for the same text; its score.
ALONE: dict[str, tuple[Run, dict[str, Any], dict[str, Any], Callable[[Any], float]]] = {
    "beam_search": (partial(search.beam_search, beams=1, max_tokens=40), COLD, {}, mean),
    "beam_search of a token": (partial(search.beam_search, beams=1, max_tokens=1), COLD, {}, mean),
    "best_of_n": (partial(search.best_of_n, n=1, max_tokens=20), {}, {}, mean),
    "step_search": (partial(STEP, step=4), {}, {}, e_score),
    "step_search comma": (partial(STEP, step=","), {}, {}, e_score),
    "smc": (SMC, {}, {}, zero),
    "smc grammar": (SMC, {"grammar": 'root ::= " " [a-z ]+ "."'}, {}, zero),
    "smc constraint": (partial(SMC, constraint=no_s), {}, {"constraint": no_s}, zero),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_text_is_the_plain_text(ctx: Context, name: str) -> None:
    run, settings, options, score = ALONE[name]
    with Branch.start(ctx, STORY, **{**WHOLE, **settings}) as root, root.fork() as branch:
        best = run(root).best
        plain = branch.generate(run.keywords["max_tokens"], **options).finish()  # type: ignore[attr-defined]
        assert (best.tokens, best.text) == (plain.tokens, plain.text)
        assert best.finish_reason == branch.finish_reason
        if best.finish_reason == "length":  # otherwise the end counts, too
            assert best.logprob == pytest.approx(branch.log_likelihood(), abs=1e-3)
        assert best.score == pytest.approx(score(best))


@pytest.mark.parametrize("name", [name for name in OBSERVED if name != "tree_search moves"])
def test_a_stop_string_ends_texts_before_it(ctx: Context, name: str) -> None:
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        result = RUNS[name](root, stop=["e", ","])
        assert "stop" in {h.finish_reason for h in result.hypotheses}
        for h in result.hypotheses:
            text = ctx.detokenize(h.tokens)
            assert not {*"e,"} & {*h.text} and text.startswith(h.text)
            assert text == h.text or (text[len(h.text)] in "e," and h.finish_reason == "stop")
            assert h.node.path_tokens[: len(h.tokens)] == h.tokens


# -- room, drafts, company -----------------------------------------------------------------------------

ROOMS: dict[str, dict[str, Any]] = {
    "2 sequences": {"n_seq_max": 2, "n_batch": 64},
    "3 sequences": {"n_seq_max": 3, "n_batch": 64},
    "small batches": {"n_seq_max": 4, "n_batch": 4},
    "few cells": {"n_seq_max": 8, "n_batch": 64},
    "own cells": {"n_seq_max": 4, "n_ctx": 4 * N_CELLS, "kv_unified": False},
}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", RUNS)
def test_little_room_gives_the_same(target: lb.Model, ctx: Context, name: str, room: str) -> None:
    run = RUNS[name]
    with Branch.start(ctx, STORY, sampling=WARM) as root, nothing_is_left(root):
        expected = run(root)
        if not name.startswith(("rejection", "tree_search")):  # these return to earlier nodes
            assert expected.stats.tokens_redecoded == 0
    options = {"n_ctx": N_CELLS, "n_threads": 1, "batch_invariant": True, **ROOMS[room]}
    with (
        Context(target, **options) as small,
        Branch.start(small, STORY, sampling=WARM) as root,
    ):
        others = [[9] * (small.usage().cells_free - 24)] if room == "few cells" else []
        rivals = [Branch.start(small, tokens) for tokens in others]
        with nothing_is_left(root):
            result = run(root)
        assert all(rival.position == len(others[0]) for rival in rivals)
        assert outcome(result) == outcome(expected)
        if room == "3 sequences" and name in OBSERVED:
            assert result.stats.peak_sequences == (1 if name == "vote decided" else 2)


@pytest.mark.parametrize("kind", ["suffix", "model"])
@pytest.mark.parametrize("name", DRAFTED)
def test_drafters_change_no_text(ctx: Context, draft_ctx: Context, name: str, kind: str) -> None:
    drafters: dict[str, Callable[[], Any]] = {
        "suffix": SuffixDrafter,
        "model": lambda: lb.ModelDrafter(draft_ctx),
    }
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        expected = outcome(RUNS[name](root))
        assert outcome(RUNS[name](root, drafter=drafters[kind]())) == expected
    assert draft_ctx.n_seq_free == 8 and draft_ctx.usage().cells_used == 0


@pytest.mark.parametrize("name", RUNS)
def test_recurrent_memory_searches_too(tmp_path: Path, name: str) -> None:
    outcomes = []
    more = {"drafter": SuffixDrafter()} if name in DRAFTED else {}  # it is ignored
    with lb.Model(toys.write_lfm2(tmp_path / "lfm2.gguf", vocab="bytes")) as model:
        for n_seq_max in (7, 3):
            with (
                Context(model, n_ctx=512, n_seq_max=n_seq_max, n_threads=1) as ctx,
                Branch.start(ctx, "abcabc", sampling=WARM) as root,
                nothing_is_left(root),
            ):
                outcomes.append(outcome(RUNS[name](root, **more)))
    if "select" in name:
        assert outcomes[0][2] == pytest.approx(outcomes[1][2], abs=1e-3)
    else:
        assert [h.tokens for h in outcomes[0][0]] == [h.tokens for h in outcomes[1][0]] != []


@pytest.mark.parametrize("name", RUNS)
def test_where_no_sequence_is_free_the_reason_is_told(target: lb.Model, name: str) -> None:
    with (
        Context(target, n_ctx=256, n_seq_max=1, n_threads=1) as narrow,
        Branch.start(narrow, STORY, sampling=WARM) as only,
        pytest.raises(lb.errors.SequencesExhaustedError) as caught,
    ):
        RUNS[name](only)
    assert caught.value.hint


@pytest.mark.parametrize("name", RUNS)
def test_a_full_cache_ends_texts_or_the_search(target: lb.Model, name: str) -> None:
    """Texts that are sampled have "capacity"; a search that compares its texts raises."""
    with (
        Context(target, n_ctx=256, n_seq_max=8, n_threads=1, batch_invariant=True) as ctx,
        Branch.start(ctx, STORY, sampling=WARM) as root,
        Branch.start(ctx, [9] * (ctx.usage().cells_free - 2)),
        nothing_is_left(root),
    ):
        if name in DRAFTED:
            hypotheses = RUNS[name](root).hypotheses
            assert {h.finish_reason for h in hypotheses} - {"decided"} == {"capacity"}
            assert {len(h.tokens) for h in hypotheses if h.finish_reason == "capacity"} == {3}
        else:
            with pytest.raises(CacheFullError):
                RUNS[name](root)


@pytest.mark.parametrize("drafter", [None, SuffixDrafter()], ids=["plain", "drafted"])
def test_a_text_that_waits_for_cells_is_counted_twice(ctx: Context, drafter: Any) -> None:
    """Tokens read again after a wait are counted. All others are decoded once, shared beginnings too."""
    with (
        Branch.start(ctx, STORY, sampling=WARM) as root,
        Branch.start(ctx, [9] * (ctx.usage().cells_free - 70)),
    ):
        result = search.best_of_n(root, 6, 30, drafter=drafter)
        stats = result.stats
        assert stats.decodes > 1.5 * 29  # texts had to wait for others for a long time
        assert 0 < stats.tokens_redecoded < stats.tokens_decoded / 2
        if drafter is None:
            beginnings = {tuple(h.tokens[:n]) for h in result.hypotheses for n in range(1, 30)}
            assert stats.tokens_decoded - stats.tokens_redecoded == len(beginnings)


def test_a_cache_that_is_full_in_the_last_step_changes_no_text(target: lb.Model) -> None:
    """A text that had to wait does not continue in the branch of a text that began elsewhere."""
    prompt = target.tokenize("The wolf ran and the wolf ran and the wolf " * 40)[:226]
    for seed in range(4):
        texts = []
        for n_ctx in (1024, 256):
            with (
                Context(target, n_ctx=n_ctx, n_seq_max=6, n_threads=1, batch_invariant=True) as ctx,
                Branch.start(ctx, prompt, temperature=0.5, seed=seed) as root,
            ):
                root.steer(dict.fromkeys(target.eog_tokens, -50.0))
                result = search.step_search(
                    root, lambda text: len(text) % 5, 4, beam_width=2, max_steps=2, step=4,
                    max_tokens=20,
                )  # fmt: skip
                texts.append(sorted(h.text for h in result.hypotheses))
        assert texts[0] == texts[1]


# -- cells of their own: sequences that cannot make room for each other --------------------------------

NO_END = lb.SamplingParams(temperature=0.9, seed=3, logit_bias={1: -math.inf})
BYTES = [5, 6, 7, 8, 9, 5, 6, 7, 8]


@pytest.fixture
def own(toy: lb.Model) -> Iterator[Context]:
    with Context(toy, n_ctx=4 * N_CELLS, n_seq_max=4, n_threads=1, kv_unified=False) as ctx:
        yield ctx
        ctx.audit()


@pytest.mark.parametrize("drafter", [None, SuffixDrafter()], ids=["plain", "drafted"])
def test_full_texts_end_and_the_others_are_not_begun_again(own: Context, drafter: Any) -> None:
    with Branch.start(own, BYTES, sampling=NO_END) as branch:
        result = search.best_of_n(branch, 3, None, drafter=drafter)
    assert {h.finish_reason for h in result.hypotheses} == {"capacity"}
    assert {len(h.tokens) for h in result.hypotheses} == {N_CELLS - len(BYTES) + 1}
    if drafter is None:
        assert result.stats.tokens_decoded == 3 * (N_CELLS - len(BYTES))
    texts = []
    for i in range(3):
        with Branch.start(
            own, BYTES, sampling=NO_END.replace(seed=derive_seed(3, i) if i else 3)
        ) as alone:
            texts.append(alone.generate(N_CELLS - len(BYTES)).finish().tokens)
    assert sorted(h.tokens[:-1] for h in result.hypotheses) == sorted(texts)


# -- what ends a search early ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_a_failed_decode_leaves_nothing_behind(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each decode in turn is interrupted, by llama.cpp's own abort; afterwards the text is the same."""
    run, real, n, fail_at = RUNS[name], C.llama_decode, 0, -1
    drafted = name in DRAFTED[::2]
    more: dict[str, Any] = {"drafter": SuffixDrafter()} if drafted else {}
    if name in OBSERVED:
        more["on_step"] = lambda stats: False

    def decode(ptr: object, batch: C.llama_batch) -> int:
        nonlocal n
        if n == fail_at:
            ctx.interrupt()
        n += 1
        return int(real(ptr, batch))

    monkeypatch.setattr(C, "llama_decode", decode)
    with Branch.start(ctx, STORY, sampling=WARM) as root:
        n = 0
        expected, n_decodes = outcome(run(root, **more)), n
        assert n_decodes >= (1 if "select" in name else 3)
        for fail_at in range(n_decodes):
            n = 0
            with nothing_is_left(root):
                try:
                    run(root, **more)
                except DecodeInterruptedError:
                    continue
            assert drafted and n <= fail_at  # with a drafter the number of decodes may differ
        n, fail_at = 0, -1
        assert outcome(run(root, **more)) == expected


class Watch(search.SearchObserver):
    """Counts the nodes at each step. Interrupts a decode in the second one, or ends the search."""

    def __init__(self, ctx: Context, interrupts: bool) -> None:
        self.ctx, self.interrupts = ctx, interrupts
        self.n_nodes: list[int] = []

    def __call__(self, stats: search.SearchStats) -> bool:
        assert self.root is not None
        self.n_nodes.append(sum(1 for _ in self.root.walk()))
        if len(self.n_nodes) == 2 and self.interrupts:
            self.ctx.interrupt()
        return len(self.n_nodes) == 2 + self.interrupts


@pytest.mark.parametrize("interrupts", [False, True])
@pytest.mark.parametrize("name", OBSERVED)
def test_ended_early_it_returns_what_there_is(ctx: Context, name: str, interrupts: bool) -> None:
    """Also if a decode is interrupted and the observer, which sees the tree, then ends the search."""
    watch = Watch(ctx, interrupts)
    with Branch.start(ctx, STORY, sampling=WARM) as root, nothing_is_left(root):
        result = RUNS[name](root, on_step=watch)
    tree: search.SearchNode = result.tree
    assert watch.root is tree and watch.n_nodes == sorted(watch.n_nodes)
    if not name.startswith("tree_search"):  # which reports a group of rewards once more
        assert len(watch.n_nodes) == 2 + interrupts
    elif name == "tree_search moves":
        assert tree.n_visits == 2 * 4  # two groups
    assert list(watch.effective_sizes) == list(result.effective_sizes)
    assert not any(node.status == "open" for node in tree.walk() if not node.children)
    if name != "tree_search moves":  # whose rewards are no steps
        assert result.stats.steps == 2
    if name not in ("rejection", "tree_search moves"):
        assert {h.finish_reason for h in result.hypotheses} - {"decided"} == {"cancelled"}
    lengths = [len(h.tokens) for h in result.hypotheses]
    method = name.split()[0]
    if method in ("beam_search", "best_of_n", "smc"):
        assert set(lengths) == {3 if method == "best_of_n" else 2}
    if method in ("beam_search", "best_of_n", "step_search"):
        assert len(lengths) == (5 if method == "best_of_n" else 4)


FAILING = [(name, "on_step") for name in OBSERVED] + [
    ("best_of_n", "reward"), ("best_of_n rejects", "score"), ("step_search", "reward"),
    ("tree_search samples", "reward"), ("tree_search moves", "expand"), ("smc", "critic"),
    ("smc constraint", "constraint"), ("rejection", "constraint"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "argument"), FAILING)
def test_what_a_function_raises_comes_through_and_nothing_is_left(
    ctx: Context, name: str, argument: str
) -> None:
    """An exception of a constraint is named in a ConfigError."""
    calls = count()
    kind: type[BaseException] = KeyboardInterrupt if argument == "on_step" else ZeroDivisionError

    def fails(text: Any) -> Any:
        if next(calls) == (1 if argument == "on_step" else 3):
            raise kind("division by zero")
        return {"expand": [" a"], "constraint": True, "on_step": False}.get(argument, 1.0)

    with (
        Branch.start(ctx, STORY, sampling=WARM) as root,
        nothing_is_left(root),
        pytest.raises(
            ConfigError if argument == "constraint" else kind,
            match=r"ZeroDivisionError|division by zero",
        ),
    ):
        RUNS[name](root, **{argument: fails})
