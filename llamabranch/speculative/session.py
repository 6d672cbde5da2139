"""A whole generation out of rounds: streaming, stop strings, limits, statistics."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from ..branch import Branch
from ..context import Context
from ..errors import CapacityError, ConfigError
from ..sampling import Grammar, SamplingParams
from ..stopping import StopStrings
from .config import SpeculativeConfig
from .drafters import Drafter, NullDrafter
from .length import draft_length
from .round import Emitted, Stream
from .stats import SpeculativeStats

__all__ = ["Emitted", "Generation", "Speculator"]


class Speculator:
    """Continues prompts or branches of ``target``, helped by ``drafter``.

    Args:
        target: the context whose text it is.
        drafter: who proposes; None = nobody, which is plain decoding.
        config: how much to draft.

    Raises:
        VocabularyMismatchError: the drafter does not speak the target's tokens.
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
        self.length = draft_length(self.config)
        self.stats = SpeculativeStats()

    def generate(
        self,
        prompt: str | Sequence[int] | Branch,
        *,
        max_tokens: int | None = 128,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        grammar: Grammar | str | None = None,
    ) -> Generation:
        """Start a generation; iterate over what is returned, or call its ``finish()``.

        Args:
            prompt: text, token ids, or a branch. A branch is continued in place with its own sampling
                and grammar; at the end it holds exactly the tokens that were yielded.
            max_tokens: the most tokens to say; None = until the model ends or the cache is full.
            sampling, grammar: as for ``Branch.start``.
            stop: strings that end the text; they are not part of it.

        Raises:
            ConfigError, TokenizeError, GrammarError, CapacityError: nothing was started.
        """
        if max_tokens is not None and max_tokens < 0:
            raise ConfigError(f"max_tokens must not be negative, is {max_tokens}")
        stops = StopStrings(stop)
        owned = not isinstance(prompt, Branch)
        if isinstance(prompt, Branch):
            if sampling is not None or grammar is not None:
                raise ConfigError("a branch has its own sampling and grammar")
            branch = prompt
        else:
            branch = Branch.start(self.target, prompt, grammar=grammar, sampling=sampling)
        return Generation(self, branch, owned, max_tokens, stops)


class Generation:
    """One text in the making: an iterator of :class:`Emitted`, and what is known of it so far.

    Attributes:
        text: what was yielded, joined.
        tokens: its ids; end tokens are not among them.
        finish_reason: "stop" (end token or stop string), "length", "capacity", or None while it runs.
        stats: counts and times; complete at the end.
        seed: what its draws are made of.
        elapsed_s: seconds spent inside the loop, the prompt's prefill not counted.
    """

    def __init__(
        self,
        speculator: Speculator,
        branch: Branch,
        owned: bool,
        max_tokens: int | None,
        stops: StopStrings,
    ) -> None:
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.stats = SpeculativeStats()
        self.seed = branch.seed
        self.elapsed_s = 0.0
        self._texts: list[str] = []
        self._speculator = speculator
        self._branch = branch
        self._owned = owned
        self._base = branch.position
        self._max_tokens = max_tokens
        self._stops = stops
        self._events = self._run()

    @property
    def text(self) -> str:
        """What was yielded, joined."""
        return "".join(self._texts)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the loop, nan before the first."""
        return len(self.tokens) / self.elapsed_s if self.elapsed_s > 0 else float("nan")

    def __iter__(self) -> Iterator[Emitted]:
        return self

    def __next__(self) -> Emitted:
        start = perf_counter()
        try:
            return next(self._events)
        finally:
            self.elapsed_s += perf_counter() - start

    def finish(self) -> Generation:
        """Run to the end; return itself."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Stop here: the branch keeps exactly what was yielded. Idempotent."""
        self._events.close()

    def _run(self) -> Generator[Emitted, None, None]:
        speculator = self._speculator
        line = speculator.drafter.line(self._branch)
        stream = Stream(self._branch, line, speculator.length, self.stats)
        try:
            yield from self._say(stream)
        except CapacityError:
            self.finish_reason = "capacity"
            raise
        finally:
            self._end(stream)

    def _say(self, stream: Stream) -> Iterator[Emitted]:
        most = self._max_tokens
        if most == 0:
            self.finish_reason = "length"
            return
        said = [stream.begin()]
        while True:
            for emitted in said:
                if emitted.is_stop:
                    self.finish_reason = "stop"
                    return
                emitted = self._shown(emitted, last=len(self.tokens) + 1 == most)
                self.tokens.append(emitted.token)
                self._texts.append(emitted.text)
                if self._stops.found is not None:
                    self.finish_reason = "stop"
                elif len(self.tokens) == most:
                    self.finish_reason = "length"
                yield emitted
                if self.finish_reason is not None:
                    return
            limit = 1 << 30 if most is None else most - len(self.tokens) - 1
            said = stream.round(limit)

    def _shown(self, emitted: Emitted, last: bool) -> Emitted:
        """Return the token with the text that may be shown with it."""
        text = self._stops.feed(emitted.text)
        if last or self._stops.found is not None:
            text += self._stops.flush()
        return emitted if text == emitted.text else replace(emitted, text=text)

    def _end(self, stream: Stream) -> None:
        self.stats.num_emitted_tokens = len(self.tokens)
        self._speculator.stats.add(self.stats)
        if not stream.branch.ctx.closed:
            if self._owned:
                self._branch.prune()
            else:
                stream.finish(self._base + len(self.tokens))
        stream.line.close()
