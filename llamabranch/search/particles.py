"""Sequential Monte Carlo: weighted texts that are resampled while they are generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..arguments import bounded, choice, finite, flag, function, real, whole
from ..branch import Branch
from ..context.logits import LogitsRow
from ..errors import ConfigError, DecodeInterruptedError, GrammarError
from ..generation.text import Text
from ..model import stop_strings
from ..sampling import Distribution, SamplingParams
from ..sampling.constraint import ConstraintCalls, ConstraintLike, ConstraintState
from ..sampling.noise import RULE, uniform
from .checks import MOST_STEPS, MOST_TEXTS, check_start, first_seed, token_limit
from .constraints import weighted_draw
from .frontier import Frontier
from .node import SearchNode
from .resampling import SCHEMES, ancestors, effective_size, log_mean
from .result import SearchResult
from .texts import completes_stop, hypothesis
from .tree import OnStep, SearchTree

__all__ = ["Filter", "Potential", "SeededDraws", "run_particles", "smc"]


Logits = npt.NDArray[np.float32]


class Potential:
    """A weight for texts; ``smc`` multiplies the model's probability by it. Subclass it.

    Weights are logarithms, nats: 0 = 1, -inf = impossible. The target of ``smc`` is proportional to the
    model's probability of a text times exp(``complete``). ``prefix`` decides which unfinished texts are
    worth continuing: the better it predicts their final weight, the fewer particles are needed. It may be
    -inf only if ``complete`` is -inf for every text that starts with this one.
    """

    def prefix(self, text: str) -> float:
        """Return the log-weight of an unfinished text, without the prompt."""
        return 0.0

    def complete(self, text: str) -> float:
        """Return the log-weight of a finished text, without the prompt; default: that of ``prefix``."""
        return self.prefix(text)


class Proposal(Protocol):
    """Chooses the distribution from which a particle's next token is drawn."""

    def __call__(self, text: str, target: Distribution) -> Distribution:
        """Return the distribution to draw from.

        Args:
            text: the text generated so far.
            target: the model's distribution of the next token, over the tokens that the grammar allows.
                The result must have all its tokens.
        """


class Draws(Protocol):
    """The random numbers of a run."""

    def token(self, source: Distribution | Following, step: int, slot: int) -> int:
        """Return the token drawn from ``source`` for a slot."""

    def order(self, source: Distribution, step: int, slot: int) -> Iterator[int]:
        """Yield the indices of all tokens of ``source``, in the order of a draw without replacement."""

    def uniform(self, step: int, index: int) -> float:
        """Return the ``index``-th uniform number of the resampling in ``step``."""


class SeededDraws:
    """Draws that depend only on (seed, position + step x N + slot), so no two slots share noise."""

    def __init__(self, seed: int, position: int, n: int) -> None:
        self._seed = seed
        self._position = position
        self._n = n

    def token(self, source: Distribution | Following, step: int, slot: int) -> int:
        """Return the token drawn from ``source`` for a slot."""
        return source.draw(self._seed, self._position + step * self._n + slot)

    def order(self, source: Distribution, step: int, slot: int) -> Iterator[int]:
        """Yield the indices of all tokens of ``source``, in the order of a draw without replacement."""
        return source.order(self._seed, self._position + step * self._n + slot)

    def uniform(self, step: int, index: int) -> float:
        """Return a uniform number for the resampling."""
        return uniform(self._seed, self._position + step, RULE, index)


class Following:
    """The possible next tokens of a sequence: a copy of its logits, and its sampler.

    Attributes:
        is_possible: False if the grammar allows no token.
        log_mass: the log of the sum of p ** ``power`` over the tokens that the grammar allows.
        power: the power to which the probabilities are raised.
    """

    def __init__(self, sequence: Text, power: float = 1.0) -> None:
        sampler, row = sequence.sampler, sequence.logits_row().array.copy()
        self._row = LogitsRow(row)
        self._sampler = sampler
        self._position, self._seed = sequence.position, sequence.seed
        self._target: Distribution | None = None
        self.is_possible, self.log_mass, self.power = True, 0.0, power
        if sampler.is_stateless and power == 1.0:
            return
        # The sequence gets another sampler when it continues.
        try:
            self._target = sampler.distribution(row, self._position, self._seed)
        except GrammarError:
            self.is_possible = False
            return
        if sampler.grammar is not None:
            scale = sampler.params.temperature
            _, kept = sampler.processed(row)
            _, every = sampler.processed(row, masked=False)
            self.log_mass = min(0.0, _log_sum(kept / scale) - _log_sum(every / scale))
        if power != 1.0:
            raised = power * self._target.logprobs
            log_sum = _log_sum(raised)
            self.log_mass = power * self.log_mass + log_sum
            self._target = Distribution(self._target.ids, raised - log_sum)

    @property
    def target(self) -> Distribution:
        """The target's distribution of the next token; use it only if ``is_possible``."""
        if self._target is None:
            self._target = self._sampler.distribution(self._row.array, self._position, self._seed)
        return self._target

    def draw(self, seed: int, position: int) -> int:
        """Draw a token from ``target``; the compiled core can do so without the whole distribution."""
        if self._target is None:
            return self._row.draw(self._sampler, seed, position)
        return self._target.draw(seed, position)

    def log_end(self, eog_tokens: Iterable[int]) -> float:
        """Return the log of the probability that the text ends here, under the model and the grammar."""
        ends = [self.target.logprob(token) for token in sorted(eog_tokens)]
        possible = np.array([p for p in ends if p > -math.inf])
        return self.log_mass + _log_sum(possible) if len(possible) else -math.inf

    def log_base(self, token: int) -> float:
        """Return the log-probability of ``token`` under the settings, before grammar and power."""
        return (self.target.logprob(token) + self.log_mass) / self.power

    def logprob(self, token: int) -> float:
        """Return the model's own log-probability of ``token``, nats."""
        return self._row.logprob(token)


class _Particle(NamedTuple):
    """One weighted text; copies share everything."""

    node: SearchNode
    text: str
    log_weight: float
    log_prefix: float
    twist: float = 0.0
    reason: str | None = None
    state: ConstraintState | None = None
    log_base: float = (
        0.0  # log p of its text under the settings; only counted if the power is not 1
    )


def smc(
    branch: Branch,
    particles: int = 8,
    max_tokens: int = 64,
    *,
    potentials: Sequence[Potential] = (),
    critic: Callable[[str], float] | None = None,
    proposal: Proposal | None = None,
    constraint: ConstraintLike | None = None,
    max_rejects: int = 64,
    power: float = 1.0,
    ramp: int = 0,
    threshold: float = 0.5,
    resampling: str = "systematic",
    force_end: bool = True,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    on_step: OnStep | None = None,
) -> SearchResult:
    """Draw weighted texts by sequential Monte Carlo (Lew et al. 2023, 2306.03081; Loula et al. 2025,
    2504.13139).

    The target is the model's distribution of texts at the branch's temperature, conditioned on its
    grammar and multiplied by the potentials. Forbidding tokens one by one, as ``Branch.generate`` does
    with a grammar, draws from another distribution: a text that runs into a dead end counts as much as
    any other. Here each particle is weighted by the mass that the grammar left at each token. The texts
    are properly weighted: with any settings the mean weight is an unbiased estimate of the normalising
    constant, and normalised averages are consistent.

    In each step every particle draws a token, and its weight is multiplied by the weight of the draw. If
    the weights have become too unequal, particles are resampled: heavy ones are forked, light ones are
        dropped.

    Args:
        branch: a branch that has read the prompt; it does not change. Its settings must not truncate,
            since a token that cannot be drawn biases the result: ``top_k=0, top_p=1, min_p=0``, and a
            temperature above 0. Logit bias and penalties belong to the target.
        particles: N. One particle without potentials gives the text that ``branch.generate`` gives.
        max_tokens: the most tokens of a text, not counting its EOG token.
        potentials: weights that are part of the target.
        critic: returns the log-weight, nats, of an unfinished text, which only guides the resampling. It
            is undone in the next step, so it changes no expectation.
        proposal: chooses the distribution of a draw; None = the target's own next-token distribution.
        constraint: decides which texts belong to the target, as for ``Branch.generate``. If it refuses a
            token, another one is drawn, and the weights stay exact: see `weighted_draw`.
        max_rejects: the most tokens to try for one draw; more tries only lower the variance.
        power: the target is proportional to the probability of a text to this power, so above 1 probable
            texts count more (power sampling, 2510.14901). This is not temperature 1 / ``power``, which
            favours probable tokens and not probable texts.
        ramp: number of tokens over which the power rises from 1. The target is the same, but the first
            tokens vary more.
        threshold: resample if the effective number of particles is below this share of N; 0 = never,
            1 = as soon as weights differ.
        resampling: "systematic", "stratified", "multinomial" or "residual".
        force_end: True = a text that reaches ``max_tokens`` is ended there, and its weight is multiplied
            by the probability of an EOG token; the target is texts of at most ``max_tokens``. False = the
            target is texts cut at ``max_tokens``.
        stop: strings that end a text.
        seed: the seed of the draws; None = the branch's.
        on_step: called after each step with the statistics so far; if it returns true, the search ends.

    Returns:
        the texts of the particles with a weight above 0; equal texts are merged. ``score`` is the log of
        a text's share of the total weight, so exp(score) sums to 1. ``log_evidence`` is the log of the
        mean weight; if no particle could be continued, it is -inf and there are no hypotheses.
        ``effective_sizes`` shows how unequal the weights became.

    Raises:
        ConfigError: a value is out of range, settings truncate, or a proposal lacks a token of the
            target.
        Errors of potentials; BranchStateError, CapacityError, DecodeError: the search frees its
        sequences.
    """
    check_start(branch, on_step)
    n = whole("particles", particles, 1, MOST_TEXTS)
    max_tokens = whole("max_tokens", token_limit(max_tokens), 1)
    threshold = bounded("threshold", threshold, 0, 1)
    choice("resampling", resampling, SCHEMES)
    _check_potentials(potentials)
    for name, argument in (("critic", critic), ("proposal", proposal)):
        if argument is not None:
            function(name, argument)
    flag("force_end", force_end)
    power = bounded("power", power, 0.01, 100)
    ramp = whole("ramp", ramp, 0, MOST_STEPS)
    max_rejects = whole("max_rejects", max_rejects, 1, MOST_STEPS)
    asked = None if constraint is None else ConstraintCalls(constraint)
    _check_support(branch.sampling)
    stop, seed = stop_strings(stop), first_seed(branch, seed)
    options = Filter(
        potentials, critic, proposal, threshold, resampling, force_end, stop, asked, max_rejects,
        power, ramp,
    )  # fmt: skip
    with Frontier(branch, on_step) as frontier:
        return run_particles(
            frontier,
            n,
            max_tokens,
            SeededDraws(seed, branch.position, n),
            options,
        )


def _check_potentials(potentials: Sequence[Potential]) -> None:
    """Raise ConfigError unless ``potentials`` is a list of objects with the methods of `Potential`."""
    is_list = isinstance(potentials, Sequence) and not isinstance(potentials, (str, bytes))
    for potential in potentials if is_list else [potentials]:
        methods = (getattr(potential, name, None) for name in ("prefix", "complete"))
        if not is_list or isinstance(potential, type) or not all(map(callable, methods)):
            raise ConfigError(
                f"potentials must be a list of Potential objects, not {potentials!r:.40}",
                hint="for example potentials=[Mine()], where class Mine(lb.search.Potential)",
            )


def _check_support(params: SamplingParams) -> None:
    """Raise ConfigError if some token that the model can generate is never drawn."""
    if params.temperature == 0.0:
        raise ConfigError("smc draws tokens: give the branch a temperature above 0")
    truncates = {
        "top_k": params.top_k != 0,
        "top_p": params.top_p < 1.0,
        "min_p": params.min_p > 0.0,
        "typical_p": params.typical_p < 1.0,
        "top_n_sigma": params.top_n_sigma > 0.0,
        "xtc_probability": params.xtc_probability > 0.0,
        "dynatemp_range": params.dynatemp_range != 0.0,
    }
    wrong = [name for name, is_on in truncates.items() if is_on]
    if wrong:
        raise ConfigError(
            f"smc cannot use {', '.join(wrong)}: a token that cannot be drawn biases the weights",
            hint="start the branch with top_k=0, top_p=1.0, min_p=0.0",
        )


@dataclass(frozen=True)
class Filter:
    """The settings of `run_particles`: the arguments of `smc`, already checked."""

    potentials: Sequence[Potential] = ()
    critic: Callable[[str], float] | None = None
    proposal: Proposal | None = None
    threshold: float = 0.5
    resampling: str = "systematic"
    force_end: bool = True
    stop: Sequence[str] = ()
    constraint: ConstraintCalls | None = None
    max_rejects: int = 64
    power: float = 1.0
    ramp: int = 0

    def power_at(self, step: int, max_tokens: int) -> float:
        """Return the power for the token of ``step``; after the ramp, or the last token, ``power``."""
        if step >= min(self.ramp, max_tokens):
            return self.power
        return 1.0 + (self.power - 1.0) * step / self.ramp


def run_particles(
    frontier: Frontier, n: int, max_tokens: int, draws: Draws, options: Filter
) -> SearchResult:
    """Run ``smc`` over ``frontier`` with these random numbers."""
    return _Run(frontier, max_tokens, draws, options).run(n)


class _Run:
    """The particles of one search: how they are drawn, weighed and resampled."""

    def __init__(self, frontier: Frontier, max_tokens: int, draws: Draws, options: Filter) -> None:
        self._frontier = frontier
        self._tree = frontier.tree
        self._model = self._tree.ctx.model
        self._max_tokens = max_tokens
        self._draws = draws
        self._options = options

    def run(self, n: int) -> SearchResult:
        """Run ``n`` particles to their ends."""
        tree, options = self._tree, self._options
        root, power = tree.root, options.power_at(0, self._max_tokens)
        with tree.ctx.lock:
            following = {root: Following(tree.branch.sequence, power)}
        start, state = self._potential("prefix", ""), None
        if options.constraint is not None:
            state = ConstraintState(options.constraint, self._model, options.stop)
        group = [_Particle(root, "", start, start, state=state)] * n
        sizes: list[float] = []
        if tree.observer is not None:
            tree.observer.effective_sizes = sizes

        def read(_: SearchNode, sequence: Text) -> Following:
            return Following(sequence, power)

        for step in range(self._max_tokens + 1):
            moved = [self._moved(p, following.get(p.node), step, i) for i, p in enumerate(group)]
            group, size = self._resampled(moved, step)
            sizes.append(size)
            running = [p for p in group if p.reason is None and p.log_weight > -math.inf]
            if tree.end_step() or not running:
                break
            nodes = list(dict.fromkeys(p.node for p in running))  # equal texts share a node
            power = options.power_at(step + 1, self._max_tokens)
            try:
                rows = self._frontier.advance(nodes, read)
            except DecodeInterruptedError as error:
                tree.was_cancelled(error)
                break
            following = dict(zip(nodes, rows, strict=True))
        tree.stats.count_constraint(options.constraint)
        return _result(tree, group, sizes, options.stop)

    # -- a step of a particle ----------------------------------------------------------------------

    def _moved(
        self, particle: _Particle, after: Following | None, step: int, slot: int
    ) -> _Particle:
        """Continue a particle by a token, or end it; a particle that has ended does not change."""
        if particle.reason is not None:
            return particle
        dead = particle._replace(log_weight=-math.inf, twist=0.0, reason="stop")
        if after is None or particle.log_weight == -math.inf or not after.is_possible:
            return dead
        if step == self._max_tokens:
            return self._forced_end(particle, after)
        options = self._options
        source: Distribution | Following = after
        if options.proposal is not None:
            source = _proposed(options.proposal, particle.text, after.target)
        is_cut = step + 1 == self._max_tokens and not options.force_end
        token, particle = self._drawn(particle, source, step, slot, is_cut)
        if token is None:
            return dead
        weight = particle.log_weight - particle.twist + after.log_mass
        if isinstance(source, Distribution) and source is not after.target:
            weight += after.target.logprob(token) - source.logprob(token)
        node = self._tree.follow(particle.node, token, after.logprob(token))
        text, reason, twist = particle.text + node.text, None, 0.0
        if self._model.is_eog(token) or completes_stop(node, options.stop):
            reason = "stop"
        elif is_cut:
            reason = "length"
        if reason is None:
            log_prefix = self._potential("prefix", text)
        else:
            ended_text = text
            for mark in options.stop:
                ended_text = ended_text.split(mark)[0]
            log_prefix = self._potential("complete", ended_text)
        weight += log_prefix - particle.log_prefix
        if reason is None and weight > -math.inf and options.critic is not None:
            twist = finite("what the critic returns", options.critic(text))
        moved = particle._replace(
            node=node, text=text, log_weight=weight + twist, log_prefix=log_prefix, twist=twist,
            reason=reason,
        )  # fmt: skip
        return self._raised(moved, after, token, step)

    def _drawn(
        self,
        particle: _Particle,
        source: Distribution | Following,
        step: int,
        slot: int,
        is_cut: bool,
    ) -> tuple[int | None, _Particle]:
        """Return the next token, None if none is allowed, and the particle with its new weight.

        ``is_cut``: the text is cut after this token, unless it ends by itself.
        """
        state = particle.state
        if state is None:
            return self._draws.token(source, step, slot), particle
        target = source if isinstance(source, Distribution) else source.target
        order = self._draws.order(target, step, slot)

        def allows(token: int) -> bool:
            return state.after(token, is_last=is_cut) is not None

        token, log_weight = weighted_draw(target, order, allows, self._options.max_rejects)
        after = None if token is None else state.after(token, is_last=is_cut)
        return token, particle._replace(log_weight=particle.log_weight + log_weight, state=after)

    def _raised(self, particle: _Particle, after: Following, token: int, step: int) -> _Particle:
        """Return ``particle`` after ``token``, with the power that holds from now on."""
        options = self._options
        power = options.power
        if particle.reason is None:
            power = options.power_at(step + 1, self._max_tokens)
        rise = power - options.power_at(step, self._max_tokens)
        if after.power == 1.0 and not rise:
            return particle
        log_base = particle.log_base + after.log_base(token)
        weight = particle.log_weight + rise * log_base
        return particle._replace(log_weight=weight, log_base=log_base)

    def _forced_end(self, particle: _Particle, after: Following) -> _Particle:
        """Return ``particle`` ended by an EOG token that was not drawn."""
        weight = particle.log_weight - particle.twist
        weight += self._potential("complete", particle.text) - particle.log_prefix
        weight += after.log_end(self._model.eog_tokens)
        if weight > -math.inf and particle.state is not None and not particle.state.may_end():
            weight = -math.inf
        return particle._replace(log_weight=weight, twist=0.0, reason="length")

    def _potential(self, method: str, text: str) -> float:
        """Return the sum of the potentials' log-weights of a text, by this method."""
        log_weights = [
            real("what a potential returns", getattr(potential, method)(text))
            for potential in self._options.potentials
        ]
        if any(value != value or value == math.inf for value in log_weights):
            raise ConfigError("a potential must return log-weights below infinity, not NaN")
        return sum(log_weights)

    def _resampled(self, group: list[_Particle], step: int) -> tuple[list[_Particle], float]:
        """Replace light particles by copies of heavy ones, if the weights have become too unequal.

        Returns:
            the particles, and their effective number before the resampling.
        """
        options = self._options
        log_weights = [p.log_weight for p in group]
        mean = log_mean(log_weights)
        if mean == -math.inf:
            return group, 0.0
        weights = np.exp(np.array(log_weights) - mean)
        weights /= weights.sum()
        size = effective_size(weights)
        is_enough = not size < options.threshold * len(group) * (1.0 - 1e-12)
        if is_enough or all(p.reason is not None for p in group):
            return group, size
        chosen = ancestors(options.resampling, weights, lambda i: self._draws.uniform(step, i))
        return [group[i]._replace(log_weight=mean) for i in chosen], size


def _log_sum(x: npt.NDArray[np.float64]) -> float:
    top = float(x.max())
    return top + math.log(float(np.exp(x - top).sum()))


def _proposed(proposal: Proposal, text: str, target: Distribution) -> Distribution:
    """Return the distribution that the proposal chooses for ``target``.

    Raises:
        ConfigError: the result is not a distribution, or lacks tokens of the target.
    """
    source = proposal(text, target)
    if not isinstance(source, Distribution):
        raise ConfigError(f"the proposal returned {source!r}, not a Distribution")
    if source is not target and len(np.setdiff1d(target.ids, source.ids)):
        raise ConfigError(
            "the proposal leaves out tokens of the target, which biases the weights",
            hint="mix it with the target, for example 0.9 x yours + 0.1 x target",
        )
    return source


def _result(
    tree: SearchTree, group: list[_Particle], sizes: Sequence[float], stop: Sequence[str]
) -> SearchResult:
    log_weights = [p.log_weight - p.twist for p in group]
    evidence = log_mean(log_weights)
    share: dict[tuple[int, ...], float] = {}
    members: dict[tuple[int, ...], _Particle] = {}
    for particle, log_weight in zip(group, log_weights, strict=True):
        if log_weight > -math.inf:
            key = tuple(particle.node.path_tokens)
            share[key] = share.get(key, 0.0) + math.exp(log_weight - evidence) / len(group)
            members.setdefault(key, particle)
    hypotheses = [
        hypothesis(tree.ctx.model, p.node, stop, math.log(share[key]), p.reason or "cancelled")
        for key, p in members.items()
        if share[key] > 0.0
    ]
    hypotheses.sort(key=lambda h: -h.score)
    tree.root.prune_open()
    return SearchResult(
        hypotheses, tree.stats, tree.root, log_evidence=evidence, effective_sizes=tuple(sizes)
    )
