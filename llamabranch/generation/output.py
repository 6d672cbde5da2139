"""What is given out: tokens, with limits, EOG tokens and stop strings, the output so far, and statistics.

Branches, sessions and the engine all emit through it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..arguments import whole
from ..context.logits import Alternative
from ..model import NO_TOKEN, StopStrings
from ..sampling.constraint import ConstraintStats

__all__ = ["OutputBuffer", "Produced", "SpeculativeStats"]


class Produced(NamedTuple):
    """A token that a branch, a generation or an engine emits.

    Attributes:
        token: its id.
        text: the text it completes (a character split over several tokens comes with its last one).
        is_stop: whether it is an EOG (end of generation) token, which ends the generation. It is not part
            of the tokens, but may carry text that was held back for a stop string; where an error ends
            the text, its id is -1 and its numbers are NaN.
        logprob, entropy: of the model's own distribution at this position, nats, before any sampling
            setting; NaN with ``SamplingParams(logprobs=False)``.
        source: "drafted" (proposed and accepted), "forced" (the same, where the grammar allowed no other
            text), "bonus" (the target's own after a draft that was
            accepted whole), "corrected" (the target's own where a draft was rejected) or "plain".
        alternatives: the requested number of most probable tokens, best first: pairs (token,
            log-probability) with an attribute ``text``.
        rank: 1 + how many tokens the model finds more probable; 0 where no alternatives were asked for.
    """

    token: int
    text: str
    is_stop: bool
    logprob: float
    entropy: float
    source: str = "plain"
    alternatives: tuple[Alternative, ...] = ()
    rank: int = 0

    def with_text(self, text: str) -> Produced:
        """Return it with another text: a part may be held back for a stop string."""
        return self if text == self.text else self._replace(text=text)


class OutputBuffer:
    """The tokens and the text of one generation so far.

    Args:
        max_tokens: the most tokens to emit; None = until the model ends.
        stop: strings that end the text; ``text`` leaves them out, ``tokens`` includes theirs.
        stop_tokens: ids that end the text, and are part of it.
        min_tokens: the stop strings are looked for after this many tokens.

    Raises:
        ConfigError: a limit that is no integer or negative, or an empty stop string.

    Attributes:
        tokens: ids, those of a stop string included; EOG tokens are not among them.
        texts: the text emitted with each token; joined they are the text, without the stop string.
        emitted: each of ``tokens`` with all that is known of it.
        finish_reason: "stop" (EOG token or stop string), "length", None while it continues, or what
            ``break_off`` was given. Nobody else sets it.
        is_stuck: it cannot continue for now, but may later: meanwhile ``text`` includes the text held
            back for a stop string.
        elapsed_s: seconds so far, if the caller counts them.
    """

    def __init__(
        self,
        max_tokens: int | None,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if max_tokens is not None:
            max_tokens = whole("max_tokens", max_tokens, 0)
        self._max_tokens = max_tokens
        self._stops = StopStrings(stop)
        self._stop_tokens = frozenset(stop_tokens)
        self.min_tokens = min_tokens
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.emitted: list[Produced] = []
        self.finish_reason: str | None = "length" if max_tokens == 0 else None
        self.is_stuck = False
        self.elapsed_s = 0.0

    @property
    def text(self) -> str:
        """The emitted text."""
        return "".join(self.texts) + (self._stops.held if self.is_stuck else "")

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or else the stop token, that has ended the text; None if neither has."""
        if self._stops.found is not None or not self.tokens:
            return self._stops.found
        return self.tokens[-1] if self.tokens[-1] in self._stop_tokens else None

    @property
    def draft_limit(self) -> int:
        """The most tokens a draft may have so that the round overruns neither limit."""
        n = len(self.tokens)
        limit = 1 << 30 if self._max_tokens is None else self._max_tokens
        return (min(limit, self.min_tokens) if n < self.min_tokens else limit) - n - 1

    def add(self, emitted: Produced) -> Produced | None:
        """Add the next token; return it with the text to emit, None if there is nothing to emit.

        An EOG token is emitted only to carry text that was held back for a stop string.
        """
        self.is_stuck = False
        if emitted.is_stop:
            self.finish_reason = "stop"
            held = self._stops.flush()
            if not held:
                return None
            self.texts.append(held)
            return emitted.with_text(held)
        n = len(self.tokens) + 1
        is_end = emitted.token in self._stop_tokens
        last = self._max_tokens is not None and n >= self._max_tokens
        text, reason = emitted.text, "length" if last else None
        if n > self.min_tokens:
            text = self._stops.show(text, last=last or is_end)
        if is_end or self._stops.found is not None:
            reason = "stop"
        # Nothing is called from here on: what the handler of a signal raises comes before or after.
        self.tokens += (emitted.token,)
        self.emitted += (emitted,)
        self.texts += (text,)
        self.finish_reason = reason
        return emitted.with_text(text)

    def break_off(self, reason: str | None = None) -> Produced | None:
        """End the text without an EOG token; return the held-back text as an item, None if there is none.

        After a regular end, and on a second call, no text is held back.

        Args:
            reason: why it cannot go on: "capacity", "cancelled" or "rejected"; None: it may, or has ended
        """
        self.finish_reason = reason or self.finish_reason
        held = self._stops.flush()
        if not held:
            return None
        self.texts.append(held)
        return Produced(NO_TOKEN, held, True, math.nan, math.nan)


@dataclass
class SpeculativeStats(ConstraintStats):
    """Counts and times of one generation, or the sum over many.

    ``num_drafts`` counts the rounds with a draft, ``num_draft_tokens`` the drafted tokens,
    ``num_accepted_tokens`` those that were accepted (without the bonus or corrected token after them),
    ``num_accepted_tokens_per_pos[i]`` how often the (i+1)-th token of a draft was accepted, and
    ``num_tested_tokens_per_pos[i]`` how often it was tested: all tokens before it had been accepted.
    ``num_forced_tokens`` counts those accepted that a grammar had forced.
    ``num_draft_steps`` and ``draft_step_time_s`` leave out the drafts before which the drafter read more
    than the last round's tokens: a prompt, or what was generated while it was off.
    ``stop_reasons`` counts why drafts were not longer; ``target_s_by_n[n]`` is the time of all target
    decodes of n tokens, ``target_decodes_by_n[n]`` their number. Times in seconds.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_tested_tokens_per_pos: list[int] = field(default_factory=list)
    num_forced_tokens: int = 0
    num_emitted_tokens: int = 0
    num_plain_steps: int = 0
    target_forward_passes: int = 0
    draft_forward_passes: int = 0
    draft_time_s: float = 0.0
    num_draft_steps: int = 0
    draft_step_time_s: float = 0.0
    verify_time_s: float = 0.0
    sample_time_s: float = 0.0
    rollback_time_s: float = 0.0
    plain_time_s: float = 0.0
    stop_reasons: dict[str, int] = field(default_factory=dict)
    target_decodes_by_n: dict[int, int] = field(default_factory=dict)
    target_s_by_n: dict[int, float] = field(default_factory=dict)

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
        """The estimated probability that a drafted token is accepted, given that those before it were.

        ``draft_acceptance_rate`` is lower: it also counts the drafted tokens that were never tested
        because one before them was rejected. nan without a draft.
        """
        return _ratio(self.num_accepted_tokens, sum(self.num_tested_tokens_per_pos))

    @property
    def alpha_interval(self) -> tuple[float, float]:
        """A 95 % confidence interval of ``alpha_hat`` (Wilson 1927), (nan, nan) without a draft."""
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
        """Draft cost ratio: time of a draft step over that of a plain step; nan without either."""
        return _ratio(self.draft_step_s, _ratio(self.plain_time_s, self.num_plain_steps))

    @property
    def draft_step_s(self) -> float:
        """Seconds of a draft step: a decode of the draft model, or a copied token; nan without one."""
        return _ratio(self.draft_step_time_s, self.num_draft_steps)

    @property
    def v(self) -> dict[int, float]:
        """Verify cost ratio v(n): mean time of a target decode of n tokens over that of one token.

        Empty if no decode had one token.
        """
        counts, times = self.target_decodes_by_n, self.target_s_by_n
        if not counts.get(1):
            return {}
        one = times[1] / counts[1]
        return {n: times[n] / counts[n] / one for n in sorted(counts)}

    @property
    def speedup_predicted(self) -> float:
        """Tokens per second of rounds with a draft over those of plain steps; nan without either.

        It uses this generation's own times; measuring a speedup needs a plain run of the same prompt.
        """
        drafted_s = _ratio(self.draft_time_s + self.verify_time_s, self.num_drafts)
        plain_s = _ratio(self.plain_time_s, self.num_plain_steps)
        return _ratio(self.mean_acceptance_length * plain_s, drafted_s)

    def record_steps(self, n_steps: int, n_read: int, seconds: float) -> None:
        """Count the drafter's steps of a draft before which it read ``n_read`` new tokens."""
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
        """Count ``times`` target decodes of ``n`` tokens each, which together took ``seconds``."""
        self.target_forward_passes += times
        self.target_decodes_by_n[n] = self.target_decodes_by_n.get(n, 0) + times
        self.target_s_by_n[n] = self.target_s_by_n.get(n, 0.0) + seconds

    def count_plain(self, n: int, decode_s: float, sample_s: float, stopped: str) -> None:
        """Count ``n`` plain steps, the seconds of all of them together, and why there was no draft."""
        self.num_plain_steps += n
        self.plain_time_s += decode_s
        self.sample_time_s += sample_s
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
        """Return all counts, times and ratios as JSON types; what is nan above is None."""
        known: dict[str, object] = dataclasses.asdict(self)
        names = "draft_acceptance_rate", "mean_acceptance_length", "alpha_hat", "c"
        known |= {n: _or_none(getattr(self, n)) for n in (*names, "speedup_predicted")}
        known["v"] = self.v
        for name in ("alpha_interval", "conditional_rates_per_pos"):
            known[name] = [_or_none(x) for x in getattr(self, name)]
        return known


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
