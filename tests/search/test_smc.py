"""smc: every run enumerated, so that expectation and variance are exact; identities, waves, accounts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import toys
from failing import check_every_failure

import llamabranch as lb
from llamabranch import Branch, Context, Distribution, search
from llamabranch.errors import ConfigError, UsageError
from llamabranch.sampling.constraint import ConstraintCalls
from llamabranch.search import particles as module
from llamabranch.search.particles import Following
from llamabranch.search.resampling import SCHEMES, ancestors
from llamabranch.search.sequences import SearchSequences

PLAIN = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
STORY = "Once upon a time there was"


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    found: npt.NDArray[np.float64] = wide - np.logaddexp.reduce(wide)
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lb.Model]:
    """A random model with 4 tokens: 0 BOS, 1 EOG, "a", "b"."""
    path = tmp_path_factory.mktemp("four") / "four.gguf"
    with lb.Model(
        toys.write_llama(path, vocab=toys.Vocabulary((toys.BOS, toys.EOS, "a", "b")))
    ) as model:
        yield model


@pytest.fixture
def little(four: lb.Model) -> Iterator[Context]:
    with Context(four, n_ctx=256, n_seq_max=8, n_threads=1, batch_invariant=True) as context:
        yield context
        context.audit()


class Script:
    """The random choices of one run, and the probability of making them."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.widths: list[int] = []
        self.probability = 1.0

    def pick(self, probabilities: Sequence[float]) -> int:
        at = len(self.widths)
        if at == len(self.choices):
            self.choices.append(0)
        self.widths.append(len(probabilities))
        self.probability *= probabilities[self.choices[at]]
        return self.choices[at]

    def following(self) -> list[int] | None:
        """Return the choices of the next run, None after the last."""
        choices = self.choices[: len(self.widths)]
        while choices and choices[-1] + 1 == self.widths[len(choices) - 1]:
            choices.pop()
        if not choices:
            return None
        choices[-1] += 1
        return choices

    # As the draws of a run:

    def token(self, source: Distribution | Following, step: int, slot: int) -> int:
        proposal = source if isinstance(source, Distribution) else source.target
        return int(proposal.ids[self.pick(proposal.probs.tolist())])

    def order(self, source: Distribution, step: int, slot: int) -> Iterator[int]:
        probs = source.probs.tolist()
        left = list(range(len(probs)))
        while left:
            total = sum(probs[i] for i in left)
            yield left.pop(self.pick([probs[i] / total for i in left]))

    def uniform(self, step: int, index: int) -> float:
        raise AssertionError("the test replaces resampling's uniform numbers")


class SharedNoise(Script):
    """What seeding by step alone would do: all slots draw with the same noise."""

    def __init__(self, choices: list[int]) -> None:
        super().__init__(choices)
        self._known: dict[int, int] = {}

    def token(self, source: Distribution | Following, step: int, slot: int) -> int:
        if slot == 0:
            self._known[step] = super().token(source, step, slot)
        return self._known[step]


def enumerated(script: Script) -> Callable[..., list[int]]:
    """Return ``ancestors`` with uniform numbers that take one value of each piece between thresholds."""

    def choose(scheme: str, weights: npt.NDArray[np.float64], _: object) -> list[int]:
        n = len(weights)
        known: dict[int, float] = {}

        def uniform(i: int) -> float:
            if i not in known:
                sums = np.cumsum(weights)
                if scheme == "systematic":
                    cuts = {float(n * c - j) for c in sums for j in range(n)}
                elif scheme == "stratified":
                    cuts = {float(n * c - i) for c in sums}
                elif scheme == "multinomial":
                    cuts = set(map(float, sums))
                else:
                    rest = weights * n - np.floor(weights * n + 1e-12)
                    cuts = set(map(float, np.cumsum(rest / rest.sum())))
                ends = sorted({0.0, 1.0, *(c for c in cuts if 1e-14 < c < 1 - 1e-14)})
                pieces = list(itertools.pairwise(ends))
                low, high = pieces[script.pick([b - a for a, b in pieces])]
                known[i] = (low + high) / 2
            return known[i]

        return ancestors(scheme, weights, uniform)

    return choose


def moments(
    root: Branch,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    max_tokens: int,
    kind: type[Script] = Script,
    **options: Any,
) -> tuple[float, float, dict[str, float]]:
    """Return E[Z], Var[Z] and E[Z x share of each text], over all runs of the filter."""
    first = second = total = 0.0
    texts: dict[str, float] = {}
    choices: list[int] | None = []
    while choices is not None:
        script = kind(choices)
        monkeypatch.setattr(module, "ancestors", enumerated(script))
        with SearchSequences(root) as lines:
            found = module.run_particles(lines, n, max_tokens, script, module.Filter(**options))
        assert found.log_evidence is not None
        z, p = math.exp(found.log_evidence), script.probability
        total, first, second = total + p, first + p * z, second + p * z * z
        for h in found.hypotheses:
            texts[h.text] = texts.get(h.text, 0.0) + p * z * math.exp(h.score)
        choices = script.following()
    assert total == pytest.approx(1.0, abs=1e-12)
    return first, second - first * first, texts


def exact(root: Branch, max_tokens: int, weight: Callable[[str], float]) -> dict[str, float]:
    """Return probability x weight of every text of at most ``max_tokens`` that ends with EOG."""
    found: dict[str, float] = {}
    model, start = root.ctx.model, root.position

    def visit(branch: Branch, tokens: tuple[int, ...], probability: float) -> None:
        probs = np.exp(log_softmax(branch.logits))
        text = model.detokenize(tokens)
        found[text] = found.get(text, 0.0) + probability * float(probs[1]) * weight(text)
        if len(tokens) < max_tokens:
            for token in (0, 2, 3):
                branch.commit(token)
                visit(branch, (*tokens, token), probability * float(probs[token]))
                branch.rewind(start + len(tokens))

    with root.fork() as branch:
        branch.resample(PLAIN)
        visit(branch, (), 1.0)
    return {text: value for text, value in found.items() if value > 0.0}


class LikesB(search.Potential):
    """Texts with many b; a prefix counts a little less than the whole."""

    def prefix(self, text: str) -> float:
        return 0.7 * text.count("b")

    def complete(self, text: str) -> float:
        return 1.1 * text.count("b") - 0.2 * text.count("a")


def likes_b(text: str) -> float:
    return math.exp(LikesB().complete(text))


def agree(found: dict[str, float], expected: dict[str, float]) -> None:
    assert set(found) == set(expected)
    for text, value in expected.items():
        assert found[text] == pytest.approx(value, abs=1e-12)


CASES = [("systematic", 0.0), ("systematic", 0.9), *((scheme, 1.0) for scheme in SCHEMES)]


@pytest.mark.parametrize(("scheme", "threshold"), CASES)
def test_evidence_and_weighted_texts_are_unbiased(
    little: Context, monkeypatch: pytest.MonkeyPatch, scheme: str, threshold: float
) -> None:
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        expected = exact(root, 2, likes_b)
        mean, _, texts = moments(
            root,
            monkeypatch,
            2,
            2,
            potentials=[LikesB()],
            resampling=scheme,
            threshold=threshold,
        )
        assert mean == pytest.approx(sum(expected.values()), abs=1e-12)
        agree(texts, expected)


def test_a_grammar_is_weighted_by_the_mass_it_keeps(
    little: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = 'root ::= "ab" | "b" "b"? | "aab"'
    allowed = {"ab", "b", "bb"}  # "aab" is longer than two tokens: those particles die
    with Branch.start(little, "ab", sampling=PLAIN, grammar=rule) as root:
        with Branch.start(little, "ab", sampling=PLAIN) as unbound:
            free = exact(unbound, 2, lambda text: 1.0)
        # BOS has no text: "b" may also be written with one, which the grammar forbids.
        expected = {}
        with root.fork() as branch:
            for text in allowed:
                with branch.fork() as one:
                    p = 0.0
                    for token in [*little.tokenize(text, add_special=False), 1]:
                        p += float(log_softmax(one.logits)[token])
                        if token != 1:
                            one.commit(token)
                    expected[text] = math.exp(p)
        assert all(value <= free[text] + 1e-15 for text, value in expected.items())
        mean, _, texts = moments(root, monkeypatch, 2, 2, threshold=1.0)
        assert mean == pytest.approx(sum(expected.values()), abs=1e-12)
        agree(texts, expected)


class OneB:
    """Texts with exactly one b."""

    def prefix(self, text: str) -> bool:
        return text.count("b") <= 1

    def complete(self, text: str) -> bool:
        return text.count("b") == 1


def flat(text: str, target: Distribution) -> Distribution:
    return Distribution.from_probs(np.full(len(target), 1.0), target.ids)


def cold(text: str, target: Distribution) -> Distribution:
    return Distribution.from_probs(target.probs**2, target.ids)


@pytest.mark.parametrize(("n", "max_tokens", "threshold"), [(1, 2, 0.0), (2, 1, 1.0)])
@pytest.mark.parametrize("max_rejects", [1, 2, 3, 64])
@pytest.mark.parametrize("proposal", [None, cold], ids=["model", "cold"])
def test_weights_under_a_constraint_are_exact(
    little: Context,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    max_tokens: int,
    threshold: float,
    max_rejects: int,
    proposal: Any,
) -> None:
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        expected = exact(root, max_tokens, lambda text: float(OneB().complete(text)))
        mean, _, texts = moments(
            root, monkeypatch, n, max_tokens, constraint=ConstraintCalls(OneB()),
            max_rejects=max_rejects, threshold=threshold, proposal=proposal,
        )  # fmt: skip
        assert mean == pytest.approx(sum(expected.values()), abs=1e-12)
        agree(texts, expected)
        assert all(OneB().complete(text) for text in texts)


def test_a_constraint_beside_a_grammar_a_potential_and_cut_texts(
    little: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        wanted = exact(root, 2, lambda text: OneB().complete(text) * likes_b(text))
        mean, _, texts = moments(
            root, monkeypatch, 1, 2, constraint=ConstraintCalls(OneB()), potentials=[LikesB()]
        )
        assert mean == pytest.approx(sum(wanted.values()), abs=1e-12)
        agree(texts, wanted)
        # The mass of texts of two tokens, or fewer with EOG, that have one b.
        p = np.exp(log_softmax(root.logits))
        cut = 0.0
        for first, has_b in ((0, 0), (2, 0), (3, 1)):
            with root.fork() as branch:
                branch.commit(first)
                q = np.exp(log_softmax(branch.logits))
            cut += float(p[first] * (q[0] + q[1] + q[2] if has_b else q[3]))
        mean, _, texts = moments(
            root, monkeypatch, 1, 2, constraint=ConstraintCalls(OneB()), force_end=False
        )
        assert mean == pytest.approx(cut, abs=1e-12) and all(map(OneB().complete, texts))
    rule = 'root ::= "ab" | "b" "b"? | "a"'
    with Branch.start(little, "ab", sampling=PLAIN, grammar=rule) as bound:
        free, _, _ = moments(bound, monkeypatch, 1, 2)
        mean, _, texts = moments(bound, monkeypatch, 1, 2, constraint=ConstraintCalls(OneB()))
        assert set(texts) == {"ab", "b"}
        _, _, every = moments(bound, monkeypatch, 1, 2)
        agree(texts, {text: every[text] for text in ("ab", "b")})
        assert mean < free


@pytest.mark.parametrize(("n", "max_tokens", "threshold"), [(1, 2, 0.0), (2, 1, 1.0), (2, 2, 1.0)])
@pytest.mark.parametrize(("power", "ramp"), [(2.0, 0), (0.5, 0), (3.0, 1), (3.0, 2), (2.0, 9)])
def test_a_power_of_whole_texts_is_exact(
    little: Context,
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    max_tokens: int,
    threshold: float,
    power: float,
    ramp: int,
) -> None:
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        # By tokens, since a text can be written in several ways: BOS has no text.
        expected: dict[str, float] = {}

        def visit(branch: Branch, text: str, p: float, depth: int) -> None:
            probs = np.exp(log_softmax(branch.logits))
            expected[text] = expected.get(text, 0.0) + (p * float(probs[1])) ** power
            for token, piece in ((0, ""), (2, "a"), (3, "b"))[: 3 * (depth < max_tokens)]:
                with branch.fork() as child:
                    child.commit(token)
                    visit(child, text + piece, p * float(probs[token]), depth + 1)

        visit(root, "", 1.0, 0)
        mean, _, texts = moments(
            root, monkeypatch, n, max_tokens, threshold=threshold, power=power, ramp=ramp
        )
        assert mean == pytest.approx(sum(expected.values()), abs=1e-12)
        agree(texts, expected)


def test_a_power_beside_a_grammar_and_a_constraint(
    little: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = 'root ::= "ab" | "b" "b"? | "a"'
    with Branch.start(little, "ab", sampling=PLAIN, grammar=rule) as bound:
        _, _, every = moments(bound, monkeypatch, 1, 2)  # each text has one way to be written
        for ramp in (0, 1):
            mean, _, texts = moments(
                bound, monkeypatch, 1, 2, constraint=ConstraintCalls(OneB()), power=2.0, ramp=ramp
            )
            wanted = {text: every[text] ** 2 for text in ("ab", "b")}
            assert mean == pytest.approx(sum(wanted.values()), abs=1e-12)
            agree(texts, wanted)


def test_a_power_of_one_changes_no_particle(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        free = search.smc(root, 4, 10)
        same = search.smc(root, 4, 10, power=1.0, ramp=3)
        assert same.hypotheses == free.hypotheses and same.log_evidence == free.log_evidence
        sharp = search.smc(root, 8, 10, power=4.0, force_end=False)
        assert max(h.logprob for h in sharp.hypotheses) > max(h.logprob for h in free.hypotheses)


def test_a_constraint_that_refuses_nothing_changes_no_particle(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        free = search.smc(root, 4, 10)
        same = search.smc(root, 4, 10, constraint=lambda text: True)
        assert [h.tokens for h in same.hypotheses] == [h.tokens for h in free.hypotheses]
        assert same.log_evidence == pytest.approx(free.log_evidence, abs=1e-12)
        one = search.smc(root, 1, 10, constraint=lambda text: "e" not in text)
        with root.fork() as branch:
            text = branch.generate(10, constraint=lambda text: "e" not in text).finish()
        assert one.hypotheses[0].tokens == text.tokens


def test_particles_keep_the_constraint_and_their_calls_are_few(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        free = search.smc(root, 8, 12, stop=["."], force_end=False)
        found = search.smc(
            root, 8, 12, stop=["."], force_end=False, constraint=lambda text: "e" not in text
        )
        assert found.hypotheses and all("e" not in h.text for h in found.hypotheses)
        assert found.log_evidence is not None and found.log_evidence < 0.0
        assert any("e" in h.text for h in free.hypotheses)
        none = search.smc(root, 4, 6, constraint=lambda text: len(text) < 4 and text != "")
        assert not none.hypotheses and none.log_evidence == -math.inf
        assert ctx.n_seq_free == 7
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            search.smc(root, 4, 6, constraint=lambda text: 1 // (len(text) // 5 - 1) > 0)
        assert ctx.n_seq_free == 7


def test_a_proposal_and_a_critic_change_no_expectation(
    little: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def critic(text: str) -> float:
        return 2.0 if text.startswith("a") else -1.0

    with Branch.start(little, "ab", sampling=PLAIN) as root:
        expected = exact(root, 2, likes_b)
        for options in ({"proposal": flat}, {"critic": critic}):
            mean, _, texts = moments(
                root, monkeypatch, 2, 2, threshold=1.0, potentials=[LikesB()], **options
            )
            assert mean == pytest.approx(sum(expected.values()), abs=1e-12)
            agree(texts, expected)


def test_texts_cut_at_the_limit_are_the_target_without_a_forced_end(
    little: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        mean, _, _ = moments(root, monkeypatch, 2, 2, force_end=False, threshold=1.0)
        assert mean == pytest.approx(1.0, abs=1e-12)


def test_slots_draw_independently_and_sharing_noise_doubles_the_variance(
    little: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbiasedness does not show shared noise; the variance does."""
    options: dict[str, Any] = {"potentials": [LikesB()], "threshold": 0.0}
    with Branch.start(little, "ab", sampling=PLAIN) as root:
        mean, one, _ = moments(root, monkeypatch, 1, 2, **options)
        same, two, _ = moments(root, monkeypatch, 2, 2, **options)
        trap, shared, _ = moments(root, monkeypatch, 2, 2, SharedNoise, **options)
    assert same == pytest.approx(mean, abs=1e-12)
    assert two == pytest.approx(one / 2, abs=1e-12)
    assert trap == pytest.approx(mean, abs=1e-12)
    assert shared == pytest.approx(one, abs=1e-12)


def test_no_two_draws_of_a_run_share_their_noise() -> None:
    seen = []

    class Recorder(Distribution):
        def draw(self, seed: int, position: int, purpose: int = 0) -> int:
            seen.append((seed, position))
            return 0

    draws = module.SeededDraws(7, 11, 5)
    proposal = Recorder(np.array([0], dtype=np.int32), np.zeros(1))
    for step, slot in itertools.product(range(9), range(5)):
        draws.token(proposal, step, slot)
    assert len(set(seen)) == 45
    alone = module.SeededDraws(7, 11, 1)
    seen.clear()
    alone.token(proposal, 4, 0)
    assert seen == [(7, 15)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_slot_is_taken_as_often_as_its_weight_says(scheme: str) -> None:
    weights = np.array([0.0, 0.45, 0.05, 0.3, 0.2])
    counts, script = np.zeros(5), Script([])
    choices: list[int] | None = []
    while choices is not None:
        script = Script(choices)
        chosen = enumerated(script)(scheme, weights, None)
        assert len(chosen) == 5
        assert chosen == sorted(chosen)
        counts += script.probability * np.bincount(chosen, minlength=5)
        if scheme == "systematic":
            copies = np.bincount(chosen, minlength=5)
            assert (np.abs(copies - 5 * weights) < 1).all()
        choices = script.following()
    assert counts == pytest.approx(5 * weights, abs=1e-9)


# -- on a real model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", [None, 'root ::= " " [a-z ]+ "."'], ids=["free", "grammar"])
def test_one_particle_is_plain_text(ctx: Context, grammar: str | None) -> None:
    params = PLAIN.replace(temperature=0.7)
    with Branch.start(ctx, STORY, sampling=params, grammar=grammar) as root:
        found = search.smc(root, 1, 24).best
        with root.fork() as branch:
            text = "".join(t.text for t in branch.generate(24))
            assert found.text == text
            assert found.score == 0.0
            assert found.tokens == branch.generated


@pytest.mark.parametrize("n_seq_max", [2, 4])
def test_fewer_sequences_than_particles_give_the_same(
    target: lb.Model, ctx: Context, n_seq_max: int
) -> None:
    class Short(search.Potential):
        def prefix(self, text: str) -> float:
            return -0.2 * len(text)

    options: dict[str, Any] = {"potentials": [Short()], "threshold": 0.9}
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        expected = search.smc(root, 6, 10, **options)
        assert expected.stats.decodes == 10
        assert expected.stats.tokens_redecoded == 0
    with (
        Context(target, n_ctx=256, n_seq_max=n_seq_max, n_threads=1, batch_invariant=True) as small,
        Branch.start(small, STORY, sampling=PLAIN) as root,
    ):
        found = search.smc(root, 6, 10, **options)
        assert found.hypotheses == expected.hypotheses
        assert found.log_evidence == expected.log_evidence
        small.audit()


def test_shares_sum_to_one_and_equal_texts_are_merged(ctx: Context) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN, grammar='root ::= " a" | " no"') as root:
        found = search.smc(root, 8, 4)
    assert len({h.text for h in found.hypotheses}) == len(found.hypotheses) <= 2
    assert sum(math.exp(h.score) for h in found.hypotheses) == pytest.approx(1.0)
    assert found.log_evidence is not None
    assert found.log_evidence < 0


def test_effective_sizes_tell_how_unequal_the_weights_are(ctx: Context) -> None:
    class Short(search.Potential):
        def prefix(self, text: str) -> float:
            return -0.2 * len(text)

    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        equal = search.smc(root, 6, 8, force_end=False)
        unequal = search.smc(root, 6, 8, potentials=[Short()], threshold=0.0)
        resampled = search.smc(root, 6, 8, potentials=[Short()], threshold=1.0)
    assert equal.effective_sizes == pytest.approx([6.0] * len(equal.effective_sizes))
    assert len(unequal.hypotheses) == 6  # so that each share is that of one particle
    shares = [math.exp(hypothesis.score) for hypothesis in unequal.hypotheses]
    assert unequal.effective_sizes[-1] == pytest.approx(1 / sum(share**2 for share in shares))
    assert 1.0 <= unequal.effective_sizes[-1] < 6.0
    assert resampled.effective_sizes[0] == unequal.effective_sizes[0]
    assert min(resampled.effective_sizes) > min(unequal.effective_sizes)


def test_an_observer_sees_the_tree_and_the_effective_sizes(ctx: Context) -> None:
    class Watch(search.SearchObserver):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def __call__(self, stats: search.SearchStats) -> bool:
            assert self.root is not None
            self.seen.append((sum(1 for _ in self.root.walk()), len(self.effective_sizes)))
            return False

    watch = Watch()
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        found = search.smc(root, 4, 5, force_end=False, on_step=watch)
    assert watch.root is found.tree
    assert list(watch.effective_sizes) == list(found.effective_sizes)
    assert watch.seen == sorted(watch.seen)
    assert watch.seen[-1][0] > watch.seen[0][0] > 1
    with pytest.raises(TypeError, match="abstract"):
        search.SearchObserver()  # type: ignore[abstract]


def test_nothing_possible_is_no_hypothesis(ctx: Context) -> None:
    class Never(search.Potential):
        def prefix(self, text: str) -> float:
            return -math.inf if text else 0.0

    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        found = search.smc(root, 4, 5, potentials=[Never()])
    assert found.hypotheses == []
    assert found.log_evidence == -math.inf
    assert found.effective_sizes[-1] == 0.0
    assert found.text == ""


def test_a_failed_decode_leaves_nothing_behind(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        assert (
            check_every_failure(root, lambda: search.smc(root, 4, 6).hypotheses, monkeypatch) == 6
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"particles": 0},
        {"max_tokens": 0},
        {"threshold": 1.5},
        {"resampling": "best"},
        {"seed": "x"},
        {"critic": lambda text: math.inf},
        {"proposal": lambda text, target: Distribution.point(5)},
        {"stop": 3},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_arguments_are_refused(ctx: Context, wrong: dict[str, Any]) -> None:
    with Branch.start(ctx, STORY, sampling=PLAIN) as root:
        with pytest.raises(ConfigError):
            search.smc(root, **{"max_tokens": 3, **wrong})
        assert ctx.n_seq_free == 7


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}, {"typical_p": 0.9}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_that_truncate_are_refused(ctx: Context, settings: dict[str, Any]) -> None:
    with (
        Branch.start(ctx, STORY, sampling=PLAIN.replace(**settings)) as root,
        pytest.raises(ConfigError),
    ):
        search.smc(root, 2, 3)


def test_without_a_text_there_is_no_best_one(ctx: Context) -> None:
    """No particle can end: the estimate of the evidence is 0, and there is nothing to choose from."""
    with Branch.start(ctx, STORY, sampling=PLAIN, grammar='root ::= "x"{40}') as root:
        found = search.smc(root, 3, 2)
    assert found.hypotheses == [] and found.log_evidence == -math.inf and found.text == ""
    with pytest.raises(UsageError, match="no text"):
        _ = found.best
