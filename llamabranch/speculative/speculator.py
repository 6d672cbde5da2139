"""A whole generation out of rounds: streaming, stop strings, limits, statistics."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from time import perf_counter

from ..arguments import whole
from ..branch import Branch, Produced
from ..branch.output import OutputBuffer
from ..context import Context
from ..errors import CapacityError, ConfigError, LlamaBranchError
from ..model import TokenIds
from ..native import forkable_lock
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar
from .config import SpeculativeConfig
from .draft_cache import DraftCache
from .drafters.base import Drafter, NullDrafter
from .length.auto import draft_length
from .length.base import DraftLength, FixedLength
from .round import Stream, finish_at
from .rules import choose_rule
from .stats import SpeculativeStats

__all__ = ["Generation", "Produced", "Speculator"]


class Speculator:
    """Continues prompts or branches of ``target``, helped by ``drafter``.

    Many threads may share one, each with generations and branches of its own.

    Args:
        target: the context whose text it is.
        drafter: who proposes; None = nobody, which is plain decoding.
        config: how much to draft.

    Raises:
        VocabularyMismatchError: the drafter does not speak the target's tokens.

    Attributes:
        length: the draft-length controller, which learns over all generations.
        stats: counts and times of all generations that have ended.
    """

    def __init__(
        self,
        target: Context,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self.target = target
        self.drafter: Drafter = drafter or NullDrafter()
        self.drafter.check(target.model)
        self.config = config or SpeculativeConfig()
        self.length: DraftLength = FixedLength(0)  # nobody to ask
        if not isinstance(self.drafter, NullDrafter):
            self.length = draft_length(self.config, self.drafter.width)
        self.stats = SpeculativeStats()
        self._drafts = DraftCache(self.drafter)
        self._lock = forkable_lock()

    def rule_for(self, branch: Branch) -> str:
        """Return the acceptance rule that the configuration means for ``branch``."""
        return choose_rule(
            self.config.rule,
            seed_given=branch.seed_given or self.drafter.width > 1,
            temperature=branch.sampling.temperature,
        )

    def generate(
        self,
        prompt: str | TokenIds | Branch,
        *,
        max_tokens: int | None = 128,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        grammar: Grammar | str | None = None,
        top_logprobs: int = 0,
    ) -> Generation:
        """Start a generation; iterate over what is returned, or call its ``finish()``.

        Args:
            prompt: text, token ids, or a branch. A branch is continued in place with its own sampling
                and grammar; at the end it holds exactly the tokens that were yielded, also where the
                cache had no cell for the last. What the drafter knows of it, or of a branch it was
                forked from, is kept for the next time.
            max_tokens: the most tokens to say; None = until the model ends or the cache is full.
            sampling, grammar: as for ``Branch.start``.
            stop: strings that end the text. ``text`` leaves them out; ``tokens``, and a branch that is
                continued, hold the tokens that completed them.
            top_logprobs: how many alternatives to report with each token.

        Raises:
            ConfigError, TokenizeError, GrammarError, CapacityError: nothing was started.
        """
        transcript = OutputBuffer(max_tokens, stop)
        top_logprobs = whole("top_logprobs", top_logprobs, 0)
        owned = not isinstance(prompt, Branch)
        if isinstance(prompt, Branch):
            if sampling is not None or grammar is not None:
                raise ConfigError("a branch has its own sampling and grammar")
            if prompt.ctx is not self.target:
                raise ConfigError("the branch lives in another context")
            branch = prompt
        else:
            branch = Branch.start(self.target, prompt, grammar=grammar, sampling=sampling)
        return Generation(self, branch, owned, transcript, top_logprobs)

    def open_stream(
        self, branch: Branch, stats: SpeculativeStats, n_alternatives: int = 0
    ) -> Stream:
        """Return the rounds of ``branch``; give its draft state back with ``close_stream``."""
        rule = self.rule_for(branch)
        state = self._drafts.take(branch, rule)
        return Stream(branch, state, self.length.stream(), rule, stats, n_alternatives)

    def close_stream(self, stream: Stream, *, keep: bool) -> None:
        """Count its last steps; keep the draft state for the branch's next generation, or free it."""
        stream.report()
        self._drafts.give_back(stream.branch, stream.state, stream.rule, keep=keep)

    def add_stats(self, stats: SpeculativeStats) -> None:
        """Count a generation that has ended."""
        with self._lock:
            self.stats.add(stats)

    def explain(self) -> str:
        """Return in words and numbers how it drafts, why, and what came of it."""
        if isinstance(self.drafter, NullDrafter):
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
                f"{stats.mean_acceptance_length:.2f} tokens a round; a tested token is accepted with "
                f"probability {stats.alpha_hat:.2f} ({low:.2f} to {high:.2f})"
            )
        if stats.stop_reasons:
            reasons = sorted(stats.stop_reasons.items(), key=lambda item: -item[1])
            lines.append("drafts ended by: " + ", ".join(f"{why} {n}" for why, n in reasons))
        return "\n".join(lines)

    def forget(self, branch: Branch) -> None:
        """Free what the drafter keeps for ``branch``."""
        self._drafts.forget(branch)


class Generation:
    """One text in the making: an iterator of :class:`Produced`, and what is known of it so far.

    Attributes:
        stats: counts and times; complete at the end.
        seed: what its draws are made of.
    """

    def __init__(
        self,
        speculator: Speculator,
        branch: Branch,
        owned: bool,
        transcript: OutputBuffer,
        n_alternatives: int,
    ) -> None:
        self.seed = branch.seed
        self.stats = SpeculativeStats()
        self._transcript = transcript
        # The loop does not know this object: a generation that is forgotten ends at once.
        self._events = _run(speculator, branch, owned, transcript, n_alternatives, self.stats)

    @property
    def text(self) -> str:
        """What was yielded, joined: without the stop string that ended it, and once it is closed with
        what was held back for one."""
        return self._transcript.text

    @property
    def tokens(self) -> list[int]:
        """The ids of what was yielded, a copy: with those of a stop string, without end tokens."""
        return list(self._transcript.tokens)

    @property
    def finish_reason(self) -> str | None:
        """ "stop" (end token or stop string), "length", "capacity", or None while it runs."""
        return self._transcript.finish_reason

    @property
    def elapsed_s(self) -> float:
        """Seconds spent inside the loop, the prompt's prefill not counted."""
        return self._transcript.elapsed_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the loop, nan before the first."""
        n = len(self._transcript.tokens)
        return n / self.elapsed_s if self.elapsed_s > 0 else float("nan")

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
        """Stop here: the branch keeps exactly what was yielded. Idempotent."""
        self._events.close()


def _run(
    speculator: Speculator,
    branch: Branch,
    owned: bool,
    transcript: OutputBuffer,
    n_alternatives: int,
    stats: SpeculativeStats,
) -> Generator[Produced, None, None]:
    base = branch.position
    start = perf_counter()
    is_heard = True
    try:
        stream = speculator.open_stream(branch, stats, n_alternatives)
        try:
            now: list[Produced] = []
            while transcript.finish_reason is None:
                now = now or (
                    stream.round(transcript.draft_limit) if stream.pending else [stream.begin()]
                )
                shown = transcript.add(now.pop(0))
                if shown is not None:
                    transcript.elapsed_s += perf_counter() - start
                    is_heard = False
                    try:
                        yield shown
                        is_heard = True
                    finally:
                        start = perf_counter()
        finally:
            try:
                if not owned and not branch.ctx.closed:
                    finish_at(branch, base + len(transcript.tokens), stream.pending)
            finally:
                speculator.close_stream(stream, keep=not owned)
    except LlamaBranchError as error:
        if isinstance(error, CapacityError):
            transcript.finish_reason = "capacity"
        held = transcript.break_off()
        if held is not None and is_heard:  # a generator that is being closed may not yield
            transcript.elapsed_s += perf_counter() - start
            try:
                yield held
            finally:
                start = perf_counter()
        raise
    finally:
        transcript.break_off()
        stats.num_emitted_tokens = len(transcript.tokens)
        speculator.add_stats(stats)
        if owned and not branch.ctx.closed:
            branch.prune()
        transcript.elapsed_s += perf_counter() - start
