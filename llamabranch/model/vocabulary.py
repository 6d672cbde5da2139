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
    text = target.has_text and draft.has_text
    if target.vocab_type != draft.vocab_type:
        reason = f"tokenizer kinds differ: {target.vocab_type} and {draft.vocab_type}"
        return VocabularyReport(False, reason, (ours, theirs), max(ours, theirs), None, text)
    shared = min(ours, theirs)
    different = [t for t in range(shared) if target.entry(t) != draft.entry(t)]
    first = different[0] if different else None
    if first is not None:
        reason = (
            f"{len(different)} of {shared} shared token ids differ, the first is {first}: "
            f"{target.entry(first)[0]!r} and {draft.entry(first)[0]!r}"
        )
        return VocabularyReport(False, reason, (ours, theirs), len(different), first, text)
    if (target.bos, target.eos) != (draft.bos, draft.eos):
        reason = (
            f"BOS and EOS tokens differ: {target.bos}, {target.eos} and {draft.bos}, {draft.eos}"
        )
        return VocabularyReport(False, reason, (ours, theirs), 0, None, text)
    if ours == theirs:
        reason = f"the same {ours} tokens"
    else:
        # Models of one family pad their vocabularies differently; the padding is never drawn.
        reason = (
            f"the first {shared} tokens are equal; {abs(ours - theirs)} exist in one model only"
        )
    return VocabularyReport(True, reason, (ours, theirs), 0, None)
