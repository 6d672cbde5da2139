"""A whole generation out of rounds: streaming, stop strings, limits, statistics."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from ..branch import Branch
from ..context import Context
from ..errors import CapacityError, ConfigError
from ..grammar import Grammar
from ..sampling import SamplingParams
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
        self.seed = branch.seed
        self.elapsed_s = 0.0
        self._said = _Said()
        self.stats = self._said.stats
        # The loop knows what it has said, not this object: a forgotten generation ends at once.
        self._events = _run(speculator, branch, owned, max_tokens, stops, self._said)

    @property
    def text(self) -> str:
        """What was yielded, joined."""
        return "".join(self._said.texts)

    @property
    def tokens(self) -> list[int]:
        """The ids of what was yielded, a copy; end tokens are not among them."""
        return list(self._said.tokens)

    @property
    def finish_reason(self) -> str | None:
        """ "stop" (end token or stop string), "length", "capacity", or None while it runs."""
        return self._said.finish_reason

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the loop, nan before the first."""
        return len(self._said.tokens) / self.elapsed_s if self.elapsed_s > 0 else float("nan")

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


@dataclass
class _Said:
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)


def _run(
    speculator: Speculator,
    branch: Branch,
    owned: bool,
    max_tokens: int | None,
    stops: StopStrings,
    said: _Said,
) -> Generator[Emitted, None, None]:
    base = branch.position
    line = speculator.drafter.line(branch)
    stream = Stream(branch, line, speculator.length, said.stats)
    try:
        yield from _say(stream, said, max_tokens, stops)
    except CapacityError:
        said.finish_reason = "capacity"
        raise
    finally:
        said.stats.num_emitted_tokens = len(said.tokens)
        speculator.stats.add(said.stats)
        if not branch.ctx.closed:
            if owned:
                branch.prune()
            else:
                stream.finish(base + len(said.tokens))
        line.close()


def _say(
    stream: Stream, said: _Said, most: int | None, stops: StopStrings
) -> Generator[Emitted, None, None]:
    if most == 0:
        said.finish_reason = "length"
        return
    now = [stream.begin()]
    while True:
        for emitted in now:
            if emitted.is_stop:
                said.finish_reason = "stop"
                return
            said.tokens.append(emitted.token)
            last = len(said.tokens) == most
            text = stops.feed(emitted.text)
            if last or stops.found is not None:
                text += stops.flush()
            if text != emitted.text:
                emitted = replace(emitted, text=text)
            said.texts.append(text)
            if stops.found is not None:
                said.finish_reason = "stop"
            elif last:
                said.finish_reason = "length"
            yield emitted
            if said.finish_reason is not None:
                return
        limit = 1 << 30 if most is None else most - len(said.tokens) - 1
        now = stream.round(limit)
