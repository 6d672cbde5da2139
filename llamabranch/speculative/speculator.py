"""A whole generation, round by round: streaming, stop strings, limits, statistics."""

from __future__ import annotations

import reprlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from time import perf_counter

from ..arguments import whole
from ..branch import Branch, Produced
from ..branch.output import OutputBuffer
from ..context import Context
from ..context.context import text_context
from ..errors import CapacityError, ClosedError, ConfigError, LlamaBranchError
from ..model import Prompt
from ..native import forkable_lock
from ..pictures import tokens_picture
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .config import SpeculativeConfig, checked_config
from .draft_cache import DraftCache
from .drafters.base import Drafter, NullDrafter, checked_drafter
from .drafters.grammar import GrammarDrafter
from .joint import Joint
from .length.base import DraftLength, FixedLength
from .profile import PairProfile
from .round import Stream, finish_at
from .rules import Rule, choose_rule, rule_name
from .stats import SpeculativeStats

__all__ = ["Generation", "Produced", "Speculator", "start_or_continue"]


class Speculator:
    """Continues prompts or branches of ``target`` by speculative decoding with ``drafter``.

    Threads may share one if each has generations and branches of its own.

    Args:
        target: the context that generates.
        drafter: proposes the drafts; None = plain decoding, except of texts with a grammar, for which
            ``GrammarDrafter.copying()`` drafts. ``NullDrafter()`` = plain decoding of all texts.
        config: how much to draft.

    Raises:
        ConfigError: an argument of another type.
        UnsupportedError: ``target`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the target's vocabulary.

    Attributes:
        length: the draft-length controller, which learns from all generations.
        joint: runs its streams.
        stats: counts and times of all generations that have ended.
    """

    def __init__(
        self,
        target: Context,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self.target = text_context("target", target)
        self.drafter = checked_drafter(drafter, target.model)
        self.config = checked_config(config)
        self.length: DraftLength = FixedLength(0)  # without a drafter nothing is drafted
        self._profile: PairProfile | None = None
        is_plain = isinstance(self.drafter, NullDrafter)
        if not is_plain:
            self.length, self._profile = PairProfile.open(target, self.drafter, self.config)
        self.joint = Joint(target, self.length, None if is_plain else self.drafter)
        self.stats = SpeculativeStats()
        self._is_default = drafter is None
        self._of_grammars: Speculator | None = None  # drafts where none was asked for
        self._drafts = DraftCache(self.drafter)
        self._lock = forkable_lock()

    def _for(self, branch: Branch) -> Speculator:
        """Return the speculator for ``branch``: this one, or one that drafts from its grammar."""
        if not self._is_default or branch.grammar is None:
            return self
        if not self.target.kv_cache.can_draft:
            return self
        with self._lock:
            if self._of_grammars is None:
                self._of_grammars = Speculator(self.target, GrammarDrafter.copying(), self.config)
                self._of_grammars.stats, self._of_grammars._lock = self.stats, self._lock
            return self._of_grammars

    def rule_for(self, branch: Branch) -> str:
        """Return the name of the acceptance rule used for ``branch``, "auto" resolved."""
        return rule_name(self._rule(branch))

    def _rule(self, branch: Branch) -> Rule:
        return choose_rule(
            self.config.rule,
            seed_given=branch.seed_given or self.drafter.width > 1,
            temperature=branch.sampling.temperature,
        )

    def generate(
        self,
        prompt: Prompt | Branch,
        *,
        max_tokens: int | None = 128,
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] = (),
        grammar: Grammar | str | None = None,
        top_logprobs: int = 0,
        parse_special: bool = True,
    ) -> Generation:
        """Start a generation; iterate over it, or call its ``finish()``.

        Args:
            prompt: text, token ids, messages, or a branch. A branch is continued in place with its own
                sampling and grammar; at the end it holds exactly the tokens that were yielded, even if
                the cache had no cell for the last. The drafter's state for it is kept for its next
                generation, and for those of branches forked from it.
            max_tokens: the most tokens to generate; None = until the model ends the text or the cache
                is full.
            sampling, grammar, parse_special: as for ``Branch.start``.
            stop: strings that end the text. ``text`` leaves them out; ``tokens``, and a branch that is
                continued, hold the tokens that completed them.
            top_logprobs: how many alternatives to report with each token.

        Raises:
            ConfigError, TokenizeError, GrammarError, CapacityError: nothing was started.
        """
        output = OutputBuffer(max_tokens, stop)
        top_logprobs = whole("top_logprobs", top_logprobs, 0)
        branch = start_or_continue(self.target, prompt, sampling, grammar, parse_special)
        owned = branch is not prompt
        return Generation(self._for(branch), branch, owned, output, top_logprobs)

    def open_stream(
        self, branch: Branch, stats: SpeculativeStats, n_alternatives: int = 0
    ) -> Stream:
        """Return a stream that continues ``branch``; end it with ``close_stream``."""
        rule = self._rule(branch)
        state = self._drafts.take(branch, rule)
        return Stream(branch, state, self.length.stream(), rule, stats, n_alternatives)

    def close_stream(self, stream: Stream, *, keep: bool) -> None:
        """Report its last steps; keep the draft state for the branch's next generation, or free it."""
        stream.report()
        self._drafts.give_back(stream.branch, stream.state, stream.rule, keep=keep)

    def add_stats(self, stats: SpeculativeStats) -> None:
        """Add the counts and times of a generation that has ended."""
        with self._lock:
            self.stats.add(stats)
        self.save_profile()

    def save_profile(self) -> None:
        """Keep what "auto" has learned in the profile of the machine; at most once in some seconds."""
        if self._profile is not None:
            self._profile.save(self.length)

    def explain(self) -> str:
        """Return a description of how it drafts, with the measurements behind it and the acceptance."""
        if self._of_grammars is not None:
            return self._of_grammars.explain()
        if self.joint.drafter is None:
            return "plain decoding: there is no drafter"
        stats = SpeculativeStats()
        with self._lock:
            stats.add(self.stats)
        lines = [f"drafter: {self.drafter.name}; {self.length.explain()}"]
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

    def forget(self, branch: Branch) -> None:
        """Free the draft state that is kept for ``branch``, if there is one."""
        self._drafts.forget(branch)
        if self._of_grammars is not None:
            self._of_grammars.forget(branch)


def start_or_continue(
    target: Context,
    prompt: Prompt | Branch,
    sampling: SamplingParams | None,
    grammar: Grammar | str | None,
    parse_special: bool,
) -> Branch:
    """Return the branch to continue: the one that is given, or a new one that has read the prompt.

    Raises:
        ConfigError: a branch of another context, or settings for one, which has its own.
    """
    if not isinstance(prompt, Branch):
        return Branch.start(
            target, prompt, grammar=grammar, sampling=sampling, parse_special=parse_special
        )
    if sampling is not None or grammar is not None:
        raise ConfigError("a branch has its own sampling and grammar")
    if prompt.ctx is not target:
        raise ConfigError("the branch belongs to another context")
    return prompt


class Generation:
    """A running generation: an iterator of :class:`Produced`, with the text and tokens so far.

    Attributes:
        stats: counts and times; complete at the end.
        seed: the seed of its draws.
    """

    def __init__(
        self,
        speculator: Speculator,
        branch: Branch,
        owned: bool,
        output: OutputBuffer,
        n_alternatives: int,
    ) -> None:
        self.seed = branch.seed
        self.stats = SpeculativeStats()
        self._output = output
        # The loop holds no reference to this object, so a generation that is dropped ends at once.
        self._events = _run(speculator, branch, owned, output, n_alternatives, self.stats)

    @property
    def text(self) -> str:
        """The text of the yielded tokens, without the stop string that ended it.

        Text that was held back as a possible beginning of a stop string is included once it is closed.
        """
        return self._output.text

    @property
    def tokens(self) -> list[int]:
        """The ids of the yielded tokens, a copy: those of a stop string included, EOG tokens not."""
        return list(self._output.tokens)

    @property
    def finish_reason(self) -> str | None:
        """ "stop" (EOG token or stop string), "length", "capacity", or None while it runs."""
        return self._output.finish_reason

    @property
    def elapsed_s(self) -> float:
        """Seconds spent generating, without the prompt's prefill and the caller's time between tokens."""
        return self._output.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of ``elapsed_s``; nan before the first."""
        n = len(self._output.tokens)
        return n / self.elapsed_s if self.elapsed_s > 0 else float("nan")

    @property
    def emitted(self) -> list[Produced]:
        """Each of ``tokens`` with its text, log-probability, entropy and source, a copy."""
        return list(self._output.emitted)

    def __repr__(self) -> str:
        ended = self.finish_reason or "running"
        return f"<Generation {reprlib.repr(self.text)}, {len(self.tokens)} tokens, {ended}>"

    def _repr_html_(self) -> str:
        caption = f"{len(self.tokens)} tokens, seed {self.seed}, {self.finish_reason or 'running'}"
        if self.stats.num_drafts:
            caption += f", {self.stats.mean_acceptance_length:.2f} tokens a drafted round"
        return tokens_picture(self._output.emitted, caption=caption)

    def __iter__(self) -> Iterator[Produced]:
        return self._events

    def __next__(self) -> Produced:
        return next(self._events)

    def finish(self) -> Generation:
        """Run to the end; return itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stop here: a branch that was given keeps exactly the yielded tokens. Idempotent."""
        self._events.close()


def _run(
    speculator: Speculator,
    branch: Branch,
    owned: bool,
    output: OutputBuffer,
    n_alternatives: int,
    stats: SpeculativeStats,
) -> Generator[Produced, None, None]:
    with branch.sequence.generating():
        base = branch.position
        start = perf_counter()
        is_consumed = True
        try:
            stream = speculator.open_stream(branch, stats, n_alternatives)
            run = speculator.joint.round
            try:
                emitted: list[Produced] = []
                while output.finish_reason is None:
                    emitted = emitted or run(stream, output.draft_limit)
                    shown = output.add(emitted.pop(0))
                    if shown is not None:
                        output.elapsed_s += perf_counter() - start
                        is_consumed = False
                        try:
                            yield shown
                            is_consumed = True
                        finally:
                            start = perf_counter()
            finally:
                try:
                    if not owned and not branch.ctx.closed:
                        # Of a branch that is forgotten too, the sampler may be freed already.
                        with suppress(ClosedError):
                            finish_at(branch, base + len(output.tokens), stream.pending)
                finally:
                    speculator.close_stream(stream, keep=not owned)
        except LlamaBranchError as error:
            held = output.break_off("capacity" if isinstance(error, CapacityError) else None)
            if held is not None and is_consumed:  # a generator that is being closed may not yield
                output.elapsed_s += perf_counter() - start
                try:
                    yield held
                finally:
                    start = perf_counter()
            raise
        finally:
            output.break_off()
            stats.num_emitted_tokens = len(output.tokens)
            speculator.add_stats(stats)
            if owned and not branch.ctx.closed:
                branch.prune()
            output.elapsed_s += perf_counter() - start
