"""The drafter for the texts of a context, its settings, and the draft states that are kept."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ..arguments import instance, real, whole
from ..context import Context
from ..context.context import text_context
from ..context.prefix_cache import n_common
from ..errors import CapacityError, ConfigError
from ..native import forkable_lock
from ..sampling import SamplingParams
from .drafter import (
    NO_STATE,
    Drafter,
    DraftLength,
    DraftState,
    FixedLength,
    NullDrafter,
    SpeculativeStats,
    checked_drafter,
)
from .length import AutoLength
from .loop import Loop, RunningText
from .text import Text
from .verify import RULES, Rule, rule_name

__all__ = ["Drafting", "SpeculativeConfig", "draft_length"]


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to speculate.

    Args:
        draft_k: tokens to draft in each round, 0 to 256. "auto" measures while it runs and drafts
            the number of tokens with the highest throughput, or none if drafting does not pay. The
            first token comes from the prompt's logits and the last one needs no draft, so nothing
            is drafted with ``max_tokens=2``.
        max_draft_tokens: the most tokens that "auto" may draft in a round, 1 to 256.
        entropy_stop: end a draft before a token whose distribution has more than this entropy, in
            nats; None = never. The decision does not depend on the drawn token, so it is lossless.
        rule: how drafted tokens are accepted: "seeded", "token" or "block". All three are lossless:
            they keep the target's distribution. Under "seeded" the text also equals the text of
            plain decoding with the same seed. At temperature 0 this holds for all three. With a
            draft model and a temperature above 0, "block" accepts the most tokens. You may pass a
            rule of your own: a function with the arguments of `token_rule`. `rule_error` verifies
            by enumeration whether it is lossless.

    Raises:
        ConfigError: a value out of range.
    """

    draft_k: int | str = "auto"
    max_draft_tokens: int = 16
    entropy_stop: float | None = None
    rule: Rule = "seeded"

    def __post_init__(self) -> None:
        limit = whole("max_draft_tokens", self.max_draft_tokens, 1, 256)
        object.__setattr__(self, "max_draft_tokens", limit)
        if not isinstance(self.draft_k, str):
            object.__setattr__(self, "draft_k", whole("draft_k", self.draft_k, 0, 256))
        elif self.draft_k != "auto":
            raise ConfigError(f"draft_k must be 'auto' or from 0 to 256, not {self.draft_k!r}")
        if self.rule not in RULES and not callable(self.rule):
            raise ConfigError(f"unknown rule {self.rule!r}: use one of {', '.join(RULES)}")
        if self.entropy_stop is not None:
            stop = real("entropy_stop", self.entropy_stop)
            if not stop >= 0:
                raise ConfigError(f"entropy_stop must be None or at least 0 nats, not {stop!r}")
            object.__setattr__(self, "entropy_stop", stop)


class Drafting:
    """Drafts for the texts of a context with one drafter, and keeps the draft states.

    A text has at most one draft state, which belongs to the drafter that drafted last for this
    text. The state is kept between generations, so that the drafter decodes no text twice. A text
    without a state gets a fork of its nearest ancestor's state, or a new state. ``observe`` tells a
    state how many of its tokens the text still has. When a draft model runs out of sequences, the
    least recently used states are closed.

    Threads may share one `Drafting`. Only one thread at a time uses or forks a state. No lock is
    held while a method of a state runs, because that method may wait for a context's lock.

    Args:
        ctx: the context that generates.
        drafter: proposes the drafts; None = no drafts.
        config: how much to draft.
        batched: whether texts share decodes, as in an engine. If they do, nothing is drafted with
            memory that cannot drop the last tokens of a sequence.

    Attributes:
        loop: runs the texts.
        stats: counts and times of all generations that have ended.
    """

    def __init__(
        self,
        ctx: Context,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
        *,
        batched: bool = False,
    ) -> None:
        self.ctx = text_context("target", ctx)
        self.drafter = checked_drafter(drafter, ctx.model)
        config = SpeculativeConfig() if config is None else config
        self.config = instance("config", config, SpeculativeConfig)
        self.stats = SpeculativeStats()
        if isinstance(self.drafter, NullDrafter) or (batched and not ctx.kv_cache.undoes(1)):
            self.loop = Loop(ctx, FixedLength(0))  # nothing is drafted
        else:
            self.loop = Loop(ctx, draft_length(self.config, self.drafter, ctx), self.drafter)

    @property
    def length(self) -> DraftLength:
        """The draft-length controller, which learns from all generations."""
        return self.loop.length

    def open(self, text: Text, stats: SpeculativeStats, n_alternatives: int = 0) -> RunningText:
        """Return ``text`` as one that shares no decode; call ``close`` at the end."""
        rule = self.config.rule if text.sampler.constraint is None else "seeded"
        state = NO_STATE if self.loop.drafter is None else self._state(text, rule)
        length = self.length.stream()
        return RunningText(text, state, length, rule, stats, n_alternatives, alone=True)

    def close(self, running: RunningText, *, keep: bool, is_changed: bool = False) -> None:
        """Report the last steps. Keep the draft state for the text's next generation, or free it.

        ``is_changed``: whether other code has changed the text since its last round.
        """
        running.report()
        text, state = running.text, running.state
        if state is NO_STATE:
            return
        with _lock:
            kept = _kept(text)
            if kept is not None and kept.state is state:  # else another thread has replaced it
                if keep and not text.is_pruned and not text.ctx.closed:
                    kept.tokens = running.seen or kept.tokens if is_changed else list(text.shown)
                    kept.returned = next(_returns)
                    kept.is_used = False
                    return
                text.draft_state = None
        state.close()

    def add_stats(self, stats: SpeculativeStats) -> None:
        """Add the counts and times of a finished generation."""
        with _lock:
            self.stats.add(stats)

    def explain(self) -> str:
        """Return a description of how it drafts, with its measurements and the acceptance."""
        drafter = self.loop.drafter
        if drafter is None:
            return "plain decoding: there is no drafter"
        stats = SpeculativeStats()
        with _lock:
            stats.add(self.stats)
        lines = [f"drafter: {drafter.name}; {self.length.explain()}"]
        if stats.num_drafts:
            low, high = stats.alpha_interval
            drafts = "1 draft" if stats.num_drafts == 1 else f"{stats.num_drafts} drafts"
            lines.append(
                f"{drafts}: {stats.draft_acceptance_rate:.1%} of the drafted tokens were accepted, "
                f"{stats.mean_acceptance_length:.2f} tokens a drafted round; of those tested "
                f"{stats.alpha_hat:.0%} (95 % interval {low:.0%} to {high:.0%})"
            )
        if stats.stop_reasons:
            reasons = sorted(stats.stop_reasons.items(), key=lambda item: -item[1])
            lines.append("drafts ended by: " + ", ".join(f"{why} {n}" for why, n in reasons))
        return "\n".join(lines)

    # -- draft states ------------------------------------------------------------------------------

    def _state(self, text: Text, rule: Rule) -> DraftState:
        """Return the state that drafts for ``text`` after its last token."""
        kept = self._use(text, text, rule, draws_alike=True)
        if kept is not None:
            kept.state.observe(n_common(kept.tokens, text.shown))
            return kept.state
        while True:
            try:
                state = self._make(text, rule)
                break
            except CapacityError:
                if not self._free_oldest():  # no room for a draft state: decode plainly
                    return NO_STATE
        _free(text)
        if state is not NO_STATE:
            with _lock:
                text.draft_state = _Kept(state, self.drafter, _made_for(text, rule))
                _holders.add(text)
        return state

    def _use(
        self, holder: Text, text: Text, rule: Rule, *, draws_alike: bool = False
    ) -> _Kept | None:
        """Return the state of ``holder``, marked as in use; None if ``text`` cannot use it.

        The state can be used if no other thread uses it, if it belongs to this drafter, and if it
        was made for the same rule and for drafts from the same position on. With ``draws_alike`` it
        must also have been made for the same seed and settings.
        """
        n = 4 if draws_alike else 2
        with _lock:
            kept = _kept(holder)
            if kept is None or kept.is_used or kept.drafter is not self.drafter:
                return None
            if kept.made_for[:n] != _made_for(text, rule)[:n]:
                return None
            kept.is_used = True
            return kept

    def _make(self, text: Text, rule: Rule) -> DraftState:
        relative: Text | None = text  # a text whose seed or settings changed forks its own state
        while relative is not None:
            kept = self._use(relative, text, rule)
            if kept is not None:
                try:
                    state = kept.state.fork(text)
                    state.observe(n_common(kept.tokens, text.shown))
                    return state
                finally:
                    with _lock:
                        kept.is_used = False
                        is_kept = relative.draft_state is kept
                    if not is_kept:  # another thread removed or replaced it meanwhile
                        kept.state.close()
            relative = relative.parent
        return self.drafter.start(text, rule_name(rule))

    def forget(self, text: Text) -> None:
        """Free the draft state of ``text`` if it is this drafter's."""
        kept = _kept(text)
        if kept is not None and kept.drafter is self.drafter:
            _free(text)

    def _free_oldest(self) -> bool:
        """Free the least recently used state that takes room from this drafter.

        States that are in use stay. Return False if there was no state to free.
        """
        with _lock:
            every = [(kept, text) for text in _holders if (kept := _kept(text)) is not None]
            ours = [pair for pair in every if not pair[0].is_used and self._shares(pair[0].drafter)]
        if not ours:
            return False
        _free(min(ours, key=lambda pair: pair[0].returned)[1])
        return True

    def _shares(self, other: Drafter) -> bool:
        """Return whether another drafter is this one, or drafts with the same context."""
        ours = self.drafter.contexts
        return other is self.drafter or any(a is b for a in ours for b in other.contexts)


@dataclass(eq=False)
class _Kept:
    """The draft state of a text, what it was made for, and the text's tokens when it was returned."""

    state: DraftState
    drafter: Drafter
    made_for: tuple[Rule, int, int, SamplingParams]
    tokens: Sequence[int] = ()
    returned: int = 0  # number of its last return, counted over all states
    is_used: bool = True  # a thread drafts with it or forks it; no other thread may use it now


_lock = forkable_lock()  # for the draft states of all texts
_holders: weakref.WeakSet[Text] = weakref.WeakSet()  # texts that have or had a draft state
_returns = itertools.count(1)


def _kept(text: Text) -> _Kept | None:
    return cast("_Kept | None", text.draft_state)


def _free(text: Text) -> None:
    """Free the draft state of ``text``, if there is one."""
    with _lock:
        kept, text.draft_state = _kept(text), None
    if kept is not None and not kept.is_used:  # otherwise the thread that uses it closes it
        kept.state.close()


def _made_for(text: Text, rule: Rule) -> tuple[Rule, int, int, SamplingParams]:
    """Return what a state depends on: rule, where drafting may begin, seed, and settings."""
    n_prompt = text.n_prompt if text.grammar is None else text.answer_start
    return rule, n_prompt, text.seed, text.sampling


def draft_length(
    config: SpeculativeConfig, drafter: Drafter | None = None, ctx: Context | None = None
) -> DraftLength:
    """Return the draft length that ``config`` sets; "auto" uses what was learned on ``ctx`` before."""
    if isinstance(config.draft_k, int):
        return FixedLength(config.draft_k, config.entropy_stop)
    return AutoLength(config.max_draft_tokens, config.entropy_stop, drafter, ctx)
