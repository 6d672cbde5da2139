"""The interfaces of drafters, draft states and draft lengths; counts and times of speculation.

All requests share one *drafter*; each request has a *draft state* of its own. The state gets the
tokens of the text and proposes tokens that may follow. ``observe`` then tells it how many were
accepted, and it forgets the rest.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple, Protocol

from ..arguments import instance
from ..context import Context
from ..model import Model
from ..sampling import Distribution
from ..sampling.constraint import ConstraintStats
from .text import Text


@dataclass(slots=True)
class Draft:
    """The tokens that a draft state proposes. Only ``tokens`` is required.

    Attributes:
        tokens: the drafted ids.
        sources: ``sources[i]`` is the distribution that ``tokens[i]`` was drawn from. Empty if no token
            was drawn at random.
        entropies: the entropies of the drafter's distributions, in nats: one for each time the state
            asked the length for another token, even if no token was drawn after that. They are NaN if
            the length does not read entropies. Empty if the state never asked the length; `propose`
            then asks it afterwards, without an entropy.
        n_read: how many tokens of the text were new to the drafter.
        seconds, n_decodes: the cost of the draft. If ``seconds`` is 0, the caller measures the
            time.
        stopped: why the draft is not longer: "length", "entropy", "goodput" (more tokens would not
            raise the throughput), "end" (nothing can follow), "capacity" (no room), "no evidence"
            or "off" (the drafter was not used).
        drafter: the name of the drafter that made it.
        forced: for each token, whether a grammar allowed no other text; empty if no token was
            forced.
    """

    tokens: list[int] = field(default_factory=list)
    sources: list[Distribution] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    n_read: int = 0
    seconds: float = 0.0
    n_decodes: int = 0
    stopped: str = "length"
    drafter: str = ""
    forced: list[bool] = field(default_factory=list)

    def cut(self, n: int) -> None:
        """Keep the first ``n`` tokens."""
        del self.tokens[n:], self.sources[n:], self.forced[n:]


NO_DRAFT = Draft(stopped="off")  # for a round that does not call the drafter


class Round(NamedTuple):
    """The outcome of a draft.

    Attributes:
        draft: the draft that was tested; `NO_DRAFT` for a plain step.
        n_accepted: how many of its tokens were accepted.
        overhead_s: seconds spent on sampling, the acceptance rule, text and clean-up.
    """

    draft: Draft
    n_accepted: int = 0
    overhead_s: float = 0.0


class DraftLength(ABC):
    """How many tokens one sequence drafts. It decides before each token is drawn.

    Each sequence has its own length, made by ``stream()`` and used by one thread at a time. Lengths
    that share measurements may be used by different threads.

    Attributes:
        limit: the maximum number of tokens a draft may have.
        entropy_stop: no token is drawn from a distribution with more entropy than this, in nats.
        reads_entropy: whether it uses entropies to decide or to learn; if not, they may be NaN.
        reason: why ``goes_on`` last returned False: "length", "entropy" or "goodput".
        n_before: how many tokens of the draft came from another drafter, before this one's tokens.
    """

    reads_entropy: bool
    reason = "length"
    n_before = 0

    def __init__(self, limit: int, entropy_stop: float | None) -> None:
        self.limit = limit
        self.entropy_stop = math.inf if entropy_stop is None else entropy_stop

    def stream(self) -> DraftLength:
        """Return a length for another sequence; both share their measurements."""
        return copy.copy(self)

    def plain_steps(self, n_behind: int) -> int:
        """Return how many plain steps to take before the drafter is called; 0 = call it now.

        The drafter has ``n_behind`` new tokens to process before it can draft.
        """
        return 0 if self.limit > 0 else 64  # after these steps it is asked again

    def consider(self, drafter: str) -> bool:
        """Return whether the drafter of this name should draft.

        Later ``goes_on`` calls are about this drafter. A draft state calls this method first of all. In
        a chain of drafters, each state calls it.
        """
        return True

    def goes_on(self, n_drafted: int, entropy: float) -> bool:
        """Return whether to draw another token after ``n_drafted`` tokens.

        ``entropy`` is the entropy of the distribution it would be drawn from, in nats; NaN = not known.
        """
        n = self.n_before + n_drafted
        if n >= self.limit:
            self.reason = "length"
        elif entropy > self.entropy_stop:
            self.reason = "entropy"
        elif self.pays(n, entropy):
            return True
        else:
            self.reason = "goodput"
        return False

    def pays(self, n_drafted: int, entropy: float) -> bool:
        """Return whether another token is worth its time, limits aside."""
        return True

    def learn(  # noqa: B027  (a fixed length learns nothing)
        self, rounds: Sequence[Round], n_tokens: int, verify_s: float, n_rounds: int = 1
    ) -> None:
        """Learn from the rounds of all sequences that shared a decode of the target.

        Args:
            rounds: one round for each sequence.
            n_tokens: the number of tokens in the decode.
            verify_s: seconds of the decode; NaN if it also read prompts, because its time then says
                nothing about drafts.
            n_rounds: how many rounds this stands for. Plain steps are reported together, with the
                median of their seconds, because a single slow step would be misleading.
        """

    @abstractmethod
    def explain(self) -> str:
        """Explain its decisions, with the numbers behind them."""


class FixedLength(DraftLength):
    """Drafts ``k`` tokens, or fewer if an entropy is above ``entropy_stop`` (nats)."""

    def __init__(self, k: int, entropy_stop: float | None = None) -> None:
        super().__init__(k, entropy_stop)
        self.reads_entropy = entropy_stop is not None

    def explain(self) -> str:
        """Describe the fixed number and the entropy limit."""
        stop = f", fewer above {self.entropy_stop:g} nats" if self.reads_entropy else ""
        length = f"always {self.limit} tokens a draft{stop}" if self.limit else "no drafts"
        return f"{length}: the length is fixed"


class DraftState(Protocol):
    """The state of a drafter for one request."""

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Return at most ``limit`` tokens that may follow ``tokens``.

        ``tokens`` begins with the tokens that the last ``observe`` call kept. The state asks
        ``length`` before it draws a token, never after.
        """

    def observe(self, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` of text and draft, and forget the rest (rejected or removed)."""

    def fork(self, target: Text) -> DraftState:
        """Return a copy for ``target``. Next, ``observe`` is called with the number of common tokens."""

    def close(self) -> None:
        """Free the sequences and the memory that the state holds."""


def checked_drafter(drafter: Drafter | None, target: Model) -> Drafter:
    """Return ``drafter`` if it fits ``target``, or a drafter that never drafts for None.

    Raises:
        ConfigError: it is not a drafter.
        UnsupportedError, VocabularyMismatchError: it cannot draft for ``target``.
    """
    if drafter is None:
        return NullDrafter()
    hint = "ModelDrafter(ctx) drafts with the model of a context, EagleDrafter or MTPDrafter with a head"
    if callable(drafter) and not isinstance(drafter, type):
        hint = "FunctionDrafter(f) drafts with a function of the tokens and a number"
    instance("drafter", drafter, Drafter, hint).check(target)  # type: ignore[type-abstract]
    return drafter


def propose(state: DraftState, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
    """Return the draft of ``state``; measure its time and ask the length if the state did not.

    Tokens beyond the chosen length are cut off. The length decides from the results of earlier drafts
    and never sees these tokens, so cutting them off is as lossless as not drawing them.
    """
    start = perf_counter()
    draft = state.propose(tokens, length, limit)
    instance(
        f"what {type(state).__qualname__}.propose returns", draft, Draft, "Draft() is no draft"
    )
    if not draft.seconds:
        draft = replace(draft, seconds=perf_counter() - start)
    if not draft.tokens or draft.entropies or not length.reads_entropy:
        return draft
    draft = replace(  # a copy, because the state may keep its draft
        draft, tokens=list(draft.tokens), sources=list(draft.sources), entropies=[],
        forced=list(draft.forced),
    )  # fmt: skip
    if not length.consider(draft.drafter):
        draft.cut(0)
        draft.stopped = "off"
        return draft
    for n in range(len(draft.tokens)):
        draft.entropies.append(math.nan)
        if not length.goes_on(n, math.nan):
            draft.stopped = length.reason
            draft.cut(n)
            break
    return draft


class DraftRequest(NamedTuple):
    """One sequence's request for a draft, with the arguments of ``DraftState.propose``."""

    state: DraftState
    tokens: Sequence[int]
    length: DraftLength
    limit: int


class Drafter(ABC):
    """Makes draft states. Subclass it to write your own drafter."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in statistics."""

    @property
    def contexts(self) -> list[Context]:
        """The contexts of the models it drafts with."""
        return []

    @abstractmethod
    def check(self, target: Model) -> None:
        """Raise VocabularyMismatchError if it cannot draft for ``target``."""

    @abstractmethod
    def start(self, target: Text, rule: str) -> DraftState:
        """Return a new state that drafts for ``target`` after its last token.

        Its draws must be independent of the target's, except under the rule "seeded".
        """

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request, made by this drafter's states. Default: one by one.

        Override it to share work between requests, such as a draft model's decodes. The override must
        then set the ``seconds`` of the drafts and ask the lengths itself.
        """
        return [propose(*request) for request in requests]


class NullDrafter(Drafter):
    """Never drafts: plain decoding through the same loop."""

    name = "none"

    def check(self, target: Model) -> None:
        """Accept any target."""

    def start(self, target: Text, rule: str) -> DraftState:
        """Return a state that never drafts."""
        return NO_STATE


class NullState:
    """Never drafts and holds nothing."""

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Return an empty draft."""
        return Draft()

    def observe(self, n_tokens: int) -> None:
        """Do nothing: there is nothing to forget."""

    def fork(self, target: Text) -> DraftState:
        """Return itself, because it holds nothing."""
        return self

    def close(self) -> None:
        """Do nothing: it holds nothing."""


NO_STATE = NullState()  # the state of a text without drafts


@dataclass
class SpeculativeStats(ConstraintStats):
    """Counts and times of one generation, or the sum over many.

    ``num_drafts`` is the number of rounds with a draft, ``num_plain_steps`` of those without one. A
    round is one decode of the target. ``num_draft_tokens`` is the number of drafted tokens.
    ``num_accepted_tokens`` counts accepted tokens, without the bonus or corrected token after them.
    ``num_accepted_tokens_per_pos[i]`` is how often the (i+1)-th token of a draft was accepted.
    ``num_tested_tokens_per_pos[i]`` is how often it was tested, because all tokens before it had been
    accepted. ``num_forced_tokens`` counts the accepted tokens that a grammar had forced.
    ``num_draft_steps`` and ``draft_step_time_s`` leave out drafts before which the drafter had to read
    more than the last round's tokens, such as a prompt or text that was generated while it was off.
    ``stop_reasons`` counts why drafts were not longer. ``target_s_by_n[n]`` is the total time of the
    target decodes of n tokens, ``target_decodes_by_n[n]`` their number. Times are in seconds.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_tested_tokens_per_pos: list[int] = field(default_factory=list)
    num_forced_tokens: int = 0
    num_emitted_tokens: int = 0
    num_plain_steps: int = 0
    draft_forward_passes: int = 0
    draft_time_s: float = 0.0
    num_draft_steps: int = 0
    draft_step_time_s: float = 0.0
    verify_time_s: float = 0.0
    plain_time_s: float = 0.0
    stop_reasons: dict[str, int] = field(default_factory=dict)
    target_decodes_by_n: dict[int, int] = field(default_factory=dict)
    target_s_by_n: dict[int, float] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """How many decodes of the target generated tokens of the text, without decodes of its prompt."""
        return self.num_drafts + self.num_plain_steps

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted; nan if nothing was drafted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round with a draft: 1 + accepted / rounds; nan if there was no draft."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def alpha_hat(self) -> float:
        """The estimated probability that a drafted token is accepted if all before it were.

        ``draft_acceptance_rate`` is lower, because it also counts tokens that were never tested after a
        rejected one. nan without a draft.
        """
        return _ratio(self.num_accepted_tokens, sum(self.num_tested_tokens_per_pos))

    @property
    def alpha_interval(self) -> tuple[float, float]:
        """A 95 % confidence interval of ``alpha_hat`` (Wilson 1927); (nan, nan) without a draft."""
        n, z = sum(self.num_tested_tokens_per_pos), 1.96
        if n == 0:
            return (math.nan, math.nan)
        a = self.alpha_hat
        middle = (a + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(a * (1 - a) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return (max(0.0, middle - half), min(1.0, middle + half))

    @property
    def conditional_rates_per_pos(self) -> list[float]:
        """For each position, the share of tested tokens that were accepted."""
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_tested_tokens_per_pos, strict=True)
        return [_ratio(accepted, tested) for accepted, tested in pairs]

    @property
    def c(self) -> float:
        """Draft cost ratio: time of a draft step / time of a plain step; nan if one is missing."""
        return _ratio(self.draft_step_s, _ratio(self.plain_time_s, self.num_plain_steps))

    @property
    def draft_step_s(self) -> float:
        """Seconds of a draft step (a draft model's decode, or a copied token); nan without one."""
        return _ratio(self.draft_step_time_s, self.num_draft_steps)

    @property
    def v(self) -> dict[int, float]:
        """Verify cost ratio v(n): mean time of a target decode of n tokens / mean time for one token.

        Empty if no decode had one token.
        """
        counts, times = self.target_decodes_by_n, self.target_s_by_n
        if not counts.get(1):
            return {}
        single_s = times[1] / counts[1]
        return {n: times[n] / counts[n] / single_s for n in sorted(counts)}

    @property
    def speedup_predicted(self) -> float:
        """Tokens per second in rounds with a draft, divided by tokens per second in plain steps.

        It is nan if there were no drafts or no plain steps. It only uses the times of this generation.
        To measure a real speedup, run the same prompt without drafts.
        """
        drafted_s = _ratio(self.draft_time_s + self.verify_time_s, self.num_drafts)
        plain_s = _ratio(self.plain_time_s, self.num_plain_steps)
        return _ratio(self.mean_acceptance_length * plain_s, drafted_s)

    def record_steps(self, n_steps: int, n_read: int, seconds: float) -> None:
        """Count the steps of a draft, before which the drafter read ``n_read`` new tokens."""
        self.draft_time_s += seconds
        if n_read <= 2 and n_steps:
            self.num_draft_steps += n_steps
            self.draft_step_time_s += seconds

    def record_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Count one verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += n_drafted
        self.num_accepted_tokens += n_accepted
        for counts in (self.num_accepted_tokens_per_pos, self.num_tested_tokens_per_pos):
            counts.extend([0] * (n_drafted - len(counts)))
        for i in range(n_accepted):
            self.num_accepted_tokens_per_pos[i] += 1
        for i in range(min(n_accepted + 1, n_drafted)):
            self.num_tested_tokens_per_pos[i] += 1

    def count_decode(self, n: int, seconds: float, times: int = 1) -> None:
        """Count ``times`` target decodes of ``n`` tokens each, which took ``seconds`` in total."""
        self.target_decodes_by_n[n] = self.target_decodes_by_n.get(n, 0) + times
        self.target_s_by_n[n] = self.target_s_by_n.get(n, 0.0) + seconds

    def count_plain(self, n: int, decode_s: float, stopped: str) -> None:
        """Count ``n`` plain steps, their total seconds, and why there was no draft."""
        self.num_plain_steps += n
        self.plain_time_s += decode_s
        self.count_decode(1, decode_s, n)
        self.count_stop(stopped, n)

    def count_stop(self, reason: str, times: int = 1) -> None:
        """Count why a draft was not longer."""
        self.stop_reasons[reason] = self.stop_reasons.get(reason, 0) + times

    def add(self, other: SpeculativeStats) -> None:
        """Add another generation's counts and times to these."""
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, list):
                width = max(len(mine), len(theirs))
                padded = [x + [0] * (width - len(x)) for x in (mine, theirs)]
                setattr(self, f.name, [a + b for a, b in zip(*padded, strict=True)])
            elif isinstance(mine, dict):
                for reason, count in theirs.items():
                    mine[reason] = mine.get(reason, 0) + count
            else:
                setattr(self, f.name, mine + theirs)

    def as_dict(self) -> dict[str, object]:
        """Return all counts, times and ratios as JSON types; nan becomes None."""
        known: dict[str, object] = dataclasses.asdict(self)
        names = "num_rounds", "draft_acceptance_rate", "mean_acceptance_length", "alpha_hat", "c"
        known |= {n: _or_none(getattr(self, n)) for n in (*names, "speedup_predicted")}
        known["v"] = self.v
        for name in ("alpha_interval", "conditional_rates_per_pos"):
            known[name] = [_or_none(x) for x in getattr(self, name)]
        return known


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
