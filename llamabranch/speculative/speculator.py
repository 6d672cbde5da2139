"""Prompts and branches, continued with a drafter."""

from __future__ import annotations

from collections.abc import Sequence

from ..arguments import whole
from ..branch import Branch
from ..context import Context
from ..errors import ConfigError
from ..generation.config import SpeculativeConfig
from ..generation.drafter import Drafter, DraftLength
from ..generation.drafting import Drafting
from ..generation.generation import Generation
from ..generation.output import OutputBuffer
from ..model import Prompt
from ..sampling import SamplingParams
from ..sampling.grammar import Grammar

__all__ = ["Speculator", "start_or_continue"]


class Speculator:
    """Continues prompts or branches of ``target`` by speculative decoding with ``drafter``.

    Threads may share one if each has generations and branches of its own.

    Args:
        target: the context that generates.
        drafter: proposes the drafts; None = plain decoding.
        config: how much to draft.

    Raises:
        ConfigError: an argument of another type.
        UnsupportedError: ``target`` is the context of a head, or the drafter is a head for another model.
        VocabularyMismatchError: the drafter cannot draft for the target's vocabulary.

    Attributes:
        target, drafter, config: as given.
        stats: counts and times of all generations that have ended.
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
            prompt: text, token ids, messages, or a branch. A branch is continued in place with its own
                sampling and grammar; at the end it holds exactly the tokens that were yielded, even if
                the cache had no cell for the last. The drafter's state for it is kept for its next
                generation, and for those of branches forked from it.
            max_tokens, stop, top_logprobs: as for ``Branch.generate``.
            sampling, grammar, parse_special: as for ``Branch.start``.

        Raises:
            ConfigError, TokenizeError, GrammarError, CapacityError: nothing was started.
        """
        output = OutputBuffer(max_tokens, stop)
        top_logprobs = whole("top_logprobs", top_logprobs, 0)
        branch = start_or_continue(self.target, prompt, sampling, grammar, parse_special)
        release = None if branch is prompt else branch.prune
        text = branch.sequence
        return Generation(self.drafting, text, output, top_logprobs, owner=branch, release=release)

    def explain(self) -> str:
        """Return a description of how it drafts, with the measurements behind it and the acceptance."""
        return self.drafting.explain()

    def forget(self, branch: Branch) -> None:
        """Free the draft state that is kept for ``branch``, if there is one."""
        self.drafting.forget(branch.sequence)


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
