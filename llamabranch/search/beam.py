"""Beam search, token for token like Hugging Face's ``generate(num_beams=...)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

from ..arguments import bounded, whole
from ..branch import Branch
from ..context.runner import Batch
from ..errors import ConfigError
from ..generation.text import Text
from ..model import Model, StopStrings, stop_strings
from ..model.tree import TextNode
from ..request.result import EngineStats
from .beams import Beams, Candidate, best_tokens
from .result import Hypothesis, SearchResult
from .start import MOST_TEXTS, check_start, token_limit


def beam_search(
    branch: Branch,
    beams: int = 4,
    max_tokens: int = 64,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stop: str | Sequence[str] = (),
) -> SearchResult:
    """Return the most probable continuations that a beam search finds, at most one per beam.

    A beam's score is the sum of the model's log-probabilities after the branch's logit bias, grammar and
    penalties, without renormalisation; temperature and truncation are ignored. The final score is that
    sum divided by (number of tokens, including EOG) ** ``length_penalty``. Each token costs one decode
    for all beams; the first token costs none.

    Args:
        branch: a branch that has read the prompt; it stays unchanged.
        beams: the number of beams; each needs a free sequence.
        max_tokens: the token limit of a text, including EOG; beams that reach it are finished.
        length_penalty: positive values favour long texts, negative ones short texts; from -32 to 32.
        early_stopping: True = end when ``beams`` texts are finished. False = then continue until the
            best running beam, scored at its present length, is no better than the worst finished text.
            "never" = continue until no running beam can become better. Textbook beam search is "never"
            with ``length_penalty`` 0.
        stop: strings that end a text, as an EOG token does.

    Raises:
        ConfigError: a value out of range. SequencesExhaustedError: fewer than ``beams`` sequences are
        free. BranchStateError, CacheFullError, DecodeError: the search has freed its sequences.
    """
    beams = whole("beams", beams, 1, MOST_TEXTS)
    max_tokens = whole("max_tokens", token_limit(max_tokens), 1)
    # These bounds ensure that a power of a length neither overflows nor becomes 0.
    length_penalty = bounded("length_penalty", length_penalty, -32, 32)
    if not isinstance(early_stopping, (bool, str)) or early_stopping not in (True, False, "never"):
        raise ConfigError(f"early_stopping must be True, False or 'never', not {early_stopping!r}")
    stop = stop_strings(stop)
    check_start(branch, beams)
    stats, model, start = EngineStats(), branch.ctx.model, perf_counter()
    selection = Beams(beams, len(model.eog_tokens), max_tokens, length_penalty, early_stopping)
    running: list[_Beam] = [_Beam(None, branch, 0, "", branch.sequence.incomplete, 0.0)]
    with closing(_Sequences(branch, stats, selection.n_kept)) as sequences:
        continuations = [sequences.scored(branch.sequence)]
        for n_tokens in range(1, max_tokens + 1):
            chosen = selection.choose([best for best, _ in continuations])
            texts = [_continued(model, running, continuations, c) for c in chosen]
            for text in texts:
                text.end(model, stop, is_last=n_tokens == max_tokens)
            kept = selection.advance(chosen, [bool(text.reason) for text in texts], texts)
            if selection.is_done:
                break
            running = [texts[i] for i in kept]
            continuations = sequences.advance(running)
    stats.elapsed_s = perf_counter() - start
    ended = [(f.key, f.final) for f in selection.finished if isinstance(f.key, _Beam)]
    return SearchResult([text.hypothesis(model, stop, score) for text, score in ended], stats)


@dataclass(eq=False)
class _Beam(TextNode):
    """A text: its parent continued by ``token``.

    Attributes:
        text: the text of all its tokens; ``pending`` has the bytes of an incomplete character after it.
        logprob: the sum of log p of its tokens, nats.
        reason: why it has ended; "" while it runs.
        branch: holds its tokens; until ``token`` is decoded, this is its parent's branch.
    """

    parent: _Beam | None
    branch: Branch
    token: int
    text: str
    pending: bytes
    logprob: float
    reason: str = ""

    def end(self, model: Model, stop: Sequence[str], *, is_last: bool) -> None:
        """Note whether the text ends here. ``is_last``: it has reached ``max_tokens``."""
        if model.is_eog(self.token) or any(string in self.text for string in stop):
            self.reason = "stop"
        elif is_last:
            self.reason = "length"

    def hypothesis(self, model: Model, stop: Sequence[str], score: float) -> Hypothesis:
        """Return it as a result, without the stop string in its text."""
        tokens = [beam.token for beam in self.path[1:]]
        if model.is_eog(self.token):
            tokens.pop()
        text = StopStrings(stop).show(self.text, last=True)
        return Hypothesis(tokens, text, self.logprob, score, self.reason)


Scores = list[tuple[int, float]]  # the best tokens after a text, with their scores
Continued = tuple[Scores, dict[int, float]]  # and the log-probabilities under the model, nats


def _continued(
    model: Model, running: Sequence[_Beam], continuations: Sequence[Continued], chosen: Candidate
) -> _Beam:
    """Continue a running beam with the token that was chosen."""
    parent, token, piece = running[chosen.beam], chosen.token, ""
    pending = parent.pending
    if not model.is_eog(token):
        piece, pending = model.text_after(token, pending)
    logprob = parent.logprob + continuations[chosen.beam][1][token]
    return _Beam(parent, parent.branch, token, parent.text + piece, pending, logprob)


class _Sequences:
    """The branches of the running beams, all forked from the search's branch and freed at its end.

    Args:
        branch, stats: the search's branch and cost.
        k: how many of the best tokens after each beam are returned.
    """

    def __init__(self, branch: Branch, stats: EngineStats, k: int) -> None:
        self._root, self._stats, self._k = branch, stats, k
        self._held: list[Branch] = []

    def close(self) -> None:
        """Free all sequences."""
        if not self._root.ctx.closed:
            self._free(())

    def advance(self, beams: Sequence[_Beam]) -> list[Continued]:
        """Decode the last token of each beam in one decode; return the best tokens after each.

        A beam's last child takes over its branch; the others get forks.
        """
        ctx, batch = self._root.ctx, Batch()
        with ctx.lock:
            left = Counter(beam.branch for beam in beams)
            self._free(left)
            for beam in beams:
                left[beam.branch] -= 1
                if left[beam.branch] or beam.branch is self._root:
                    beam.branch = self._forked(beam.branch)
            texts = [beam.branch.sequence for beam in beams]
            for text, beam in zip(texts, beams, strict=True):
                text.settle()
                batch.add(text.seq_id, [beam.token])
            before = ctx.decoder.n_decodes
            rows = ctx.decoder.decode(batch)
            for text, beam, (row,) in zip(texts, beams, rows, strict=True):
                text.append_unscored([beam.token], row)
            self._stats.target_forward_passes += ctx.decoder.n_decodes - before
            self._stats.generated += len(beams)
            return [self.scored(text) for text in texts]

    def scored(self, text: Text) -> Continued:
        """Return the best tokens after a text: ``k``, or fewer if a grammar forbids the rest.

        A score is a log-probability after logit bias, grammar and penalties, not normalised again.
        """
        with text.lock:
            every = text.logits_row().log_probs()
            best = best_tokens(*text.sampler.processed(every), self._k)
            return best, {token: float(every[token]) for token, _ in best}

    def _forked(self, branch: Branch) -> Branch:
        self._held.append(branch.fork())
        self._held[-1].detach()
        return self._held[-1]

    def _free(self, used: Collection[Branch]) -> None:
        """Free all branches except these."""
        for branch in self._held:
            if branch not in used:
                branch.prune()
        self._held = [branch for branch in self._held if branch in used]
