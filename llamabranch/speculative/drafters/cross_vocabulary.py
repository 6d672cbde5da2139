"""Drafting across vocabularies: through the text, since the tokens mean different things.

Known as universal assisted decoding (Timor et al. 2025, 2502.05202, string-level exact match): the text
so far is encoded for the draft model, what it goes on to say is encoded back, and the tokens after
the point where both agree are proposed as certain. The target's verdict is what it always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ...branch import Branch
from ...errors import CapacityError, TokenizeError
from ...model import Model
from ..length.base import DraftLength
from .base import Draft, DraftState

__all__ = ["TranslatingState"]

_WINDOW = 12  # tokens before the end that are encoded again: a word may take several


class TranslatingState:
    """A branch of a draft model with another vocabulary, which follows the target's text.

    Each proposal encodes the whole text again, so its cost grows with the text; only what changed is
    decoded by the draft model.
    """

    def __init__(self, branch: Branch, target: Model) -> None:
        self._branch = branch
        self._target = target

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Catch up with the text, go on with it, and return what of that is target tokens."""
        draft = Draft(drafter=self._branch.ctx.model.name, stopped="no evidence")
        if not length.consider(draft.drafter):
            draft.stopped = "off"
            return draft
        start = perf_counter()
        decodes = self._branch.ctx.decoder.n_decodes
        try:
            text = b"".join(map(self._target.piece, tokens)).decode("utf-8")
            self._catch_up(draft, text)
            said = self._go_on(draft, length, limit)
            draft.tokens = self._translate(tokens, said)[:limit]
        except CapacityError:
            draft.stopped = "capacity"
        except (UnicodeDecodeError, TokenizeError):  # the text ends inside a character
            pass
        draft.n_decodes = self._branch.ctx.decoder.n_decodes - decodes
        draft.seconds = perf_counter() - start
        return draft

    def _catch_up(self, draft: Draft, text: str) -> None:
        branch = self._branch
        encoded = branch.ctx.tokenize(text)
        if not encoded:
            raise TokenizeError("there is no text to follow yet")
        same = 0
        for ours, theirs in zip(branch.tokens, encoded, strict=False):
            if ours != theirs:
                break
            same += 1
        same = min(same, len(encoded) - 1)  # at least one token is decoded, for its logits
        draft.n_read = len(encoded) - same
        branch.rewind(same)
        branch.sequence.decode_unscored(encoded[same:])

    def _go_on(self, draft: Draft, length: DraftLength, limit: int) -> str:
        branch, said = self._branch, b""
        while len(draft.entropies) < limit:
            entropy = branch.entropy()
            draft.entropies.append(entropy)
            if not length.goes_on(len(draft.entropies) - 1, entropy):
                draft.stopped = length.reason
                break
            produced = branch.produce()
            if produced.is_stop:
                draft.stopped = "end"
                break
            said += branch.ctx.model.piece(produced.token)
            if len(draft.entropies) == limit:
                draft.stopped = "length"
                break
            branch.commit(produced.token)
        return said.decode("utf-8", "ignore")

    def _translate(self, tokens: Sequence[int], said: str) -> list[int]:
        """Return the target tokens of ``said``, or none if it runs into the word before it."""
        if not said:
            return []
        pieces = [self._target.piece(token) for token in tokens[-_WINDOW:]]
        before = b"".join(pieces)
        while before:  # the window may begin inside a character
            try:
                window = before.decode("utf-8")
                break
            except UnicodeDecodeError:
                before = b"".join(pieces := pieces[1:])
        else:
            window = ""
        encoded = self._target.tokenize(window + said, add_special=False)
        done = 0
        for i, token in enumerate(encoded):
            if done == len(before):
                return encoded[i:]
            done += len(self._target.piece(token))
        return []

    def observe(self, n_tokens: int) -> None:
        """Nothing to forget: the next proposal compares the texts."""

    def fork(self, target: Branch) -> DraftState:
        """Return a state in the same state that drafts for ``target``."""
        branch = self._branch.fork()
        branch.detach()  # states end in any order
        return TranslatingState(branch, target.ctx.model)

    def close(self) -> None:
        """Free its sequence."""
        if not self._branch.ctx.closed:
            self._branch.prune()
