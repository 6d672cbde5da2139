"""Drafting with a model of another vocabulary, through the text.

Known as universal assisted decoding (Timor et al. 2025, 2502.05202, string-level exact match): the text
so far is tokenized for the draft model, the text it generates is tokenized for the target, and the
target tokens after the end of the text so far are proposed as point masses. They are accepted or
rejected like any other draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ...branch import Branch
from ...context.prefix_cache import n_common
from ...errors import CapacityError, TokenizeError
from ...generation.drafter import Draft, DraftLength, DraftState
from ...generation.text import Text
from ...model import Model

__all__ = ["TranslatingState"]

_WINDOW = 12  # tokens before the end that are tokenized again with the draft


class TranslatingState:
    """A branch of a draft model with another vocabulary, which follows the target's text.

    Each draft tokenizes the whole text again, so its cost grows with the text; the draft model decodes
    only the tokens that changed.
    """

    def __init__(self, branch: Branch, target: Model) -> None:
        self._branch = branch
        self._target = target

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        """Decode the text as far as it is new, generate after it, and return that in target tokens."""
        draft = Draft(drafter=self._branch.ctx.model.name, stopped="no evidence")
        if not length.consider(draft.drafter):
            draft.stopped = "off"
            return draft
        start = perf_counter()
        decodes = self._branch.ctx.decoder.n_decodes
        try:
            text = b"".join(map(self._target.piece, tokens)).decode("utf-8")
            self._resync(draft, text)
            generated = self._generate(draft, length, limit)
            draft.tokens = self._translate(tokens, generated)[:limit]
        except CapacityError:
            draft.stopped = "capacity"
        except (UnicodeDecodeError, TokenizeError):  # it is empty or ends inside a character
            pass
        draft.n_decodes = self._branch.ctx.decoder.n_decodes - decodes
        draft.seconds = perf_counter() - start
        return draft

    def _resync(self, draft: Draft, text: str) -> None:
        branch = self._branch
        encoded = branch.ctx.tokenize(text)
        if not encoded:
            raise TokenizeError("cannot draft for an empty text")
        same = n_common(branch.tokens, encoded[:-1])  # one is decoded at least, for its logits
        draft.n_read = len(encoded) - same
        branch.rewind(same)
        branch.sequence.decode_unscored(encoded[same:])

    def _generate(self, draft: Draft, length: DraftLength, limit: int) -> str:
        branch, generated = self._branch, b""
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
            generated += branch.ctx.model.piece(produced.token)
            if len(draft.entropies) == limit:
                draft.stopped = "length"
                break
            branch.commit(produced.token)
        return generated.decode("utf-8", "ignore")

    def _translate(self, tokens: Sequence[int], generated: str) -> list[int]:
        """Return the target tokens of ``generated``; none if one of them would begin before it."""
        if not generated:
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
        encoded = self._target.tokenize(window + generated, add_special=False)
        done = 0
        for i, token in enumerate(encoded):
            if done == len(before):
                return encoded[i:]
            done += len(self._target.piece(token))
        return []

    def observe(self, n_tokens: int) -> None:
        """Do nothing: the next draft compares the texts."""

    def fork(self, target: Text) -> DraftState:
        """Return a copy of this state that drafts for ``target``."""
        branch = self._branch.fork()
        branch.detach()  # states may be closed in any order
        return TranslatingState(branch, target.ctx.model)

    def close(self) -> None:
        """Free its sequence."""
        if not self._branch.ctx.closed:
            self._branch.prune()
