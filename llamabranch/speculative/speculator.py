"""Continue prompts and branches with a drafter: as a generation, or one token per call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ..arguments import whole
from ..branch import Branch, Produced
from ..branch.generation import Generation
from ..context import Context
from ..errors import ClosedError, ConfigError, LlamaBranchError
from ..generation.config import SpeculativeConfig
from ..generation.drafter import Drafter, DraftLength, SpeculativeStats
from ..generation.output import OutputBuffer
from ..model import Prompt
from ..run.drafting import Drafting
from ..run.solo import Solo
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar


class Speculator:
    """Continues prompts or branches of ``target`` by speculative decoding with ``drafter``.

    Several threads may share a speculator if each thread uses its own generations and branches.

    Args:
        target: the context that generates.
        drafter: proposes the drafts; None = plain decoding.
        config: how much to draft.

    Raises:
        ConfigError: an argument has the wrong type.
        UnsupportedError: ``target`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the target's vocabulary.

    Attributes:
        target, drafter, config: the arguments.
        stats: counts and times, summed over all generations that have ended.
    """

    def __init__(
        self,
        target: Context,
        drafter: Drafter | None = None,
        config: SpeculativeConfig | None = None,
    ) -> None:
        self.drafting = drafting = Drafting(target, drafter, config)
        self.target, self.drafter, self.config = target, drafting.drafter, drafting.config
        self.stats = drafting.stats

    @property
    def length(self) -> DraftLength:
        """The draft-length controller, which learns from all generations."""
        return self.drafting.length

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
            prompt: text, token ids, messages, or a branch. A branch is continued in place with its
                own sampling and grammar. At the end, it has exactly the tokens that were yielded, even
                if the cache had no room for the last one. The drafter's state for the branch is kept
                for the branch's next generation and for its forks.
            max_tokens, stop, top_logprobs: as for ``Branch.generate``.
            sampling, grammar, parse_special: as for ``Branch.start``.

        Raises:
            ConfigError, TokenizeError, GrammarError, CapacityError: the generation was not started.
        """
        output = OutputBuffer(max_tokens, stop)
        top_logprobs = whole("top_logprobs", top_logprobs, 0)
        branch = _start_or_continue(self.target, prompt, sampling, grammar, parse_special)
        release = None if branch is prompt else branch.prune
        text = branch.sequence
        return Generation(self.drafting, text, output, top_logprobs, owner=branch, release=release)

    def explain(self) -> str:
        """Explain how much it drafts and why: measured costs and acceptance."""
        if not self.drafting.drafts:
            return "plain decoding: there is no drafter"
        lines = [f"drafter: {self.drafter.name}; {self.length.explain()}"]
        stats = self.drafting.total()
        if stats.num_draft_tokens:
            drafts = "1 draft" if stats.num_drafts == 1 else f"{stats.num_drafts} drafts"
            accepted, drafted = stats.num_accepted_tokens, stats.num_draft_tokens
            lines.append(
                f"{drafts}: accept rate {accepted / drafted * 100:.0f} % ({accepted} of {drafted}), "
                f"{stats.mean_acceptance_length:.2f} tokens a drafted round"
            )
        return "\n".join(lines)

    def forget(self, branch: Branch) -> None:
        """Free the draft state that is kept for ``branch``, if there is one."""
        self.drafting.states.forget(branch.sequence)


class InferenceSession:
    """Generates one token per call. Each call may use a different drafter, or none.

    Args:
        target: the context that generates.
        prompt: text, token ids, messages, or a branch to continue.
        sampling, grammar, parse_special: as for ``Branch.start``.
        config: how much to draft when ``next_token`` is given a drafter.
        max_tokens, stop: as for ``Branch.generate``.

    Attributes:
        branch: the branch that is continued; it has the tokens that were returned.
        stats: counts and times so far.
    """

    def __init__(
        self,
        target: Context,
        prompt: Prompt | Branch,
        *,
        sampling: SamplingParams | None = None,
        grammar: Grammar | str | None = None,
        config: SpeculativeConfig | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        parse_special: bool = True,
    ) -> None:
        self.stats = SpeculativeStats()
        self._output = OutputBuffer(max_tokens, stop)
        self._target = target
        self._config = config
        # The keys are ids, because a drafter may not be hashable. The value keeps it alive.
        self._draftings: dict[int, Drafting] = {}
        self.branch = _start_or_continue(target, prompt, sampling, grammar, parse_special)
        self._owned = self.branch is not prompt
        self._text = self.branch.sequence
        self._solo = Solo(self._text, self._output, self.stats, keeps=not self._owned)
        self._closed = False
        self._generating = ExitStack()  # marks the text as generating until ``close``
        self._generating.enter_context(self._text.generating())

    @property
    def tokens(self) -> list[int]:
        """A copy of the ids that ``next_token`` has returned, including a stop string's tokens."""
        return list(self._output.tokens)

    @property
    def text(self) -> str:
        """The text of ``tokens``, without the stop string that ended it.

        After an error or ``close``, it includes text that was held back because a stop string might
        begin there.
        """
        return self._output.text

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", or None while it runs."""
        return self._output.finish_reason

    def next_token(self, drafter: Drafter | None = None) -> Produced | None:
        """Return the next token, or None at the end.

        With a ``drafter``, the call runs a round, which drafts, verifies and may accept several tokens.
        It returns the first one, and the next calls return the others before they run another round.
        Without a drafter, the target decodes one token. Under the acceptance rule "seeded", the
        default, the text does not depend on which calls had a drafter. An EOG token is returned only if
        it carries text that was held back because a stop string might begin there.

        Raises:
            ClosedError: the session is closed. VocabularyMismatchError, CapacityError, DecodeError.
        """
        if self._closed:
            raise ClosedError("the session is closed")
        if self.finish_reason is not None:
            return None
        drafting = self._draftings.get(id(drafter))
        if drafting is None:
            drafting = Drafting(self._target, drafter, self._config)
            self._draftings[id(drafter)] = drafting
        try:
            shown = self._solo.next(drafting)
        except LlamaBranchError:
            self._output.is_stuck = True  # a later call may succeed if there is room again
            raise
        self.stats.num_emitted_tokens = len(self._output.tokens)
        return shown

    def close(self) -> None:
        """End here. If the prompt was a branch, it keeps exactly the returned tokens. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._generating.close()
        self._output.break_off()
        self._solo.end(decodes=True)
        for drafting in self._draftings.values():
            drafting.states.forget(self._text)
        if self._owned and not self.branch.ctx.closed:
            self.branch.prune()

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _start_or_continue(
    target: Context,
    prompt: Prompt | Branch,
    sampling: SamplingParams | None,
    grammar: Grammar | str | None,
    parse_special: bool,
) -> Branch:
    """Return the branch to continue: ``prompt`` itself, or a new branch that has read it.

    Raises:
        ConfigError: the branch belongs to another context, or ``sampling`` or ``grammar`` is set for a
            branch, which has its own.
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
