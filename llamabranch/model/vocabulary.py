"""Comparing two vocabularies: can a model draft for another one token by token?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["VocabularyReport", "compare"]


class Vocabulary(Protocol):
    """The part of a model that is compared."""

    n_vocab: int

    @property
    def vocab_type(self) -> str: ...

    @property
    def has_text(self) -> bool: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    def entry(self, token: int) -> tuple[bytes, bool]: ...


@dataclass(frozen=True)
class VocabularyReport:
    """Whether two models have the same vocabulary.

    ``n_vocab`` are the sizes (target, draft), ``n_different`` is the number of ids that mean
    different tokens, ``first_difference`` is the smallest of them.
    """

    compatible: bool
    reason: str
    n_vocab: tuple[int, int]
    n_different: int
    first_difference: int | None
    both_have_text: bool = True

    @property
    def path(self) -> str:
        """How the second model can draft for the first: by "tokens", through the "text", or "none"."""
        if self.compatible:
            return "tokens"
        return "text" if self.both_have_text else "none"

    def __bool__(self) -> bool:
        return self.compatible


def compare(target: Vocabulary, draft: Vocabulary) -> VocabularyReport:
    """Return whether ``draft`` can draft for ``target`` token by token, and if not, why."""
    ours, theirs = target.n_vocab, draft.n_vocab
    shared, n_different, first = min(ours, theirs), 0, None
    if target.vocab_type != draft.vocab_type:
        n_different = max(ours, theirs)
        reason = f"tokenizer kinds differ: {target.vocab_type} and {draft.vocab_type}"
    elif different := [t for t in range(shared) if target.entry(t) != draft.entry(t)]:
        n_different, first = len(different), different[0]
        reason = (
            f"{n_different} of {shared} shared token ids differ, the first is {first}: "
            f"{target.entry(first)[0]!r} and {draft.entry(first)[0]!r}"
        )
    elif (target.bos, target.eos) != (draft.bos, draft.eos):
        reason = (
            f"BOS and EOS tokens differ: {target.bos}, {target.eos} and {draft.bos}, {draft.eos}"
        )
    else:
        # Models of one family pad their vocabularies differently; the padding is never drawn.
        padding = (
            f"the first {shared} tokens are equal; {abs(ours - theirs)} exist in one model only"
        )
        reason = f"the same {ours} tokens" if ours == theirs else padding
        return VocabularyReport(True, reason, (ours, theirs), 0, None)
    text = target.has_text and draft.has_text
    return VocabularyReport(False, reason, (ours, theirs), n_different, first, text)
