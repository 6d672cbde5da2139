"""Where two texts that should be equal first differ, what decided it, and whether rounding explains it.

In a context that is not batch-invariant, a token's logits depend slightly on the other tokens of its
decode. These rounding differences can change a sampled token where the decision is close: between the two
largest logits, between two log-probabilities plus noise, or on which side of a truncation's boundary a
token lies. Which of these it is, and how large a difference is needed, is found by experiment: the real
sampler is given logits that are moved further and further until it draws the other token. How large
rounding differences are is measured: the text is decoded again token by token, in runs of several
lengths as verification does, and in a batch with other texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
from rounding import gumbel_noise

from llamabranch import Branch, BranchStore, Context, Grammar, SamplingParams
from llamabranch.cli.comparison import TRUNCATIONS, FirstDifference, Logits
from llamabranch.errors import ConfigError, GrammarError
from llamabranch.generation.drafter import Draft
from llamabranch.generation.verify import Plan
from llamabranch.model import token_list
from llamabranch.sampling import Sampler

__all__ = ["Divergence", "Logits", "first_divergence"]

# Tokens in a decode: their number decides how the logits are rounded.
_RUNS = (1, 2, 3, 4, 5, 6, 9, 17, 33)
# Texts that are decoded in one batch, tokens of each that are compared, and logits kept for that.
_N_TEXTS, _N_STEPS, _MOST_LOGITS = 8, 64, 1 << 22
_LEAST, _MOST = 2.0**-20, 32.0  # the smallest and the largest move that is tried, in logits
_N_BISECTIONS = 12


class Divergence(FirstDifference):
    """The first token in which two continuations of a prompt differ, and what decided between them.

    ``decided_by`` may also be "temperature": the dynamic one, through the entropy. If rounding does not
    explain it, something else made the texts differ: settings or a seed other than those given, or a bug.
    """

    def __str__(self) -> str:
        verdict = "explained by rounding" if self.explained else "not explained by rounding"
        return (
            f"first difference at token {self.position}: {self.tokens}, decided by {self.decided_by}, "
            f"gap {self.gap:.3g}; logits differ by {self.difference:.3g} between decodes: {verdict}"
        )


def first_divergence(
    ctx: Context,
    prompt: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
    sampling: SamplingParams,
    seed: int = 0,
    grammar: Grammar | str | None = None,
) -> Divergence | None:
    """Return where ``left`` and ``right``, both generated after ``prompt``, differ; None if nowhere.

    ``sampling``, ``seed`` and ``grammar`` are those that both were drawn with, under the rule "seeded"
    (at temperature 0 under any). The common prefix is decoded several times, on branches of its own.

    Raises:
        CapacityError: no free sequence or cells to decode it. TokenizeError: invalid token ids.
        GrammarError: the common prefix does not follow the grammar.
    """
    prompt, left, right = token_list(prompt), token_list(left), token_list(right)
    same = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    if same == max(len(left), len(right)):
        return None
    if isinstance(grammar, str):
        grammar = Grammar(grammar)
    if not prompt:
        with Branch.start(ctx, prompt) as branch:  # an empty prompt starts with the BOS token
            prompt = branch.tokens
    prefix = list(left[:same])
    tokens = tuple(text[same] if same < len(text) else None for text in (left, right))

    def make(params: SamplingParams) -> Sampler:
        return Sampler(ctx.model, params, grammar).replay(prompt, prefix)

    rows = list(_rows(ctx, prompt, prefix))
    found = _Decision(make, sampling, rows, len(prompt) + same, seed)
    whole = [*prompt, *prefix]
    difference = (
        found.difference
        if len(whole) < 2
        else max(found.difference, _difference_in_batch(ctx, whole))
    )
    gap, decided_by = max(map(found.turn, tokens))
    return Divergence(same, (tokens[0], tokens[1]), gap, difference, decided_by)


# -- rounding differences ----------------------------------------------------------------------------


def _rows(ctx: Context, prompt: Sequence[int], prefix: Sequence[int]) -> Iterator[Logits]:
    """Yield the logits after prompt and prefix, the prefix decoded in runs of each length.

    As in verification, logits are computed for every token; the last run is padded with tokens that are
    then rejected.
    """
    whole = [*prompt, *prefix]
    # Without a common prefix the end of the prompt is decoded in runs: the texts differ right after it.
    start = len(prompt) if prefix else max(1, len(prompt) - max(_RUNS))
    with Branch.start(ctx, whole[:start], temperature=0.0) as branch:
        if start == len(whole):
            yield branch.logits
            return
        n_rest = len(whole) - start
        most = ctx.n_outputs_max
        if not ctx.fits(branch.seq_id, 1):
            most = 1  # there longer runs need a free sequence: they are verified on a fork
        for n in sorted({min(n, most) for n in (*_RUNS, n_rest)}):
            branch.rewind(start)
            runs = [whole[i : i + n] for i in range(start, len(whole), n)]
            for run in runs[:-1]:
                _verify(branch, run)
            last = runs[-1]
            yield _verify(branch, [*last, *[last[-1]] * (n - len(last))], len(last))


def _difference_in_batch(ctx: Context, whole: Sequence[int]) -> float:
    """Return how far logits move if texts are decoded in one batch instead of one at a time.

    Other texts in the cache matter too: sums are then computed in another order, and once in a few
    dozen tokens a K/V value is rounded the other way, which moves logits far more than the order of
    the sums does. So several texts made of these tokens are tried, and the logits after many of their
    tokens are compared.
    """
    n = min(_N_TEXTS, ctx.n_seq_free)
    if n < 2 or (n + 1) * len(whole) > ctx.usage().cells_free:
        return 0.0  # too little room: only the differences measured without a batch are used
    n_rows = min(_N_STEPS, max(1, _MOST_LOGITS // (n * ctx.n_vocab)), len(whole) - 1)
    start = len(whole) - n_rows
    texts = [[*whole[i:], *whole[:i]] for i in (k * len(whole) // n for k in range(n))]
    plain = SamplingParams(temperature=0.0)
    with ExitStack() as stack:
        branches = [stack.enter_context(Branch.create(ctx, plain)) for _ in texts]
        store = BranchStore(ctx)
        store.prefill({b: text[:start] for b, text in zip(branches, texts, strict=True)})
        together: list[list[Logits]] = []
        for at in range(start, len(whole)):
            store.commit({b: text[at] for b, text in zip(branches, texts, strict=True)})
            together.append([branch.logits for branch in branches])
    found = 0.0
    for i, text in enumerate(texts):
        with Branch.start(ctx, text[:start], sampling=plain) as branch:
            for at, rows in enumerate(together, start):
                branch.commit(text[at])
                found = max(found, _spread(branch.logits, rows[i]))
    return found


def _verify(branch: Branch, run: Sequence[int], n_kept: int | None = None) -> Logits:
    """Decode ``run`` and keep its first ``n_kept`` tokens; return a copy of the logits after them."""
    kept = list(run[:n_kept])
    with branch.ctx.lock:
        plan = Plan(branch.sequence, Draft(list(run)))
        try:
            row = np.array(plan.decode()[len(kept) - 1].array)
            plan.keep(len(kept))
        except BaseException:
            plan.end()
            raise
    return row


def _spread(row: Logits, other: Logits) -> float:
    """Return how far logits moved relative to each other between two rows."""
    known = np.isfinite(row) & np.isfinite(other)
    moves = (row - other)[known]
    return float(moves.max() - moves.min()) if len(moves) else 0.0


# -- the decision ------------------------------------------------------------------------------------


class _Decision:
    """One sampled token, whose draw can be repeated with other logits."""

    def __init__(
        self,
        make: Callable[[SamplingParams], Sampler],
        params: SamplingParams,
        rows: Sequence[Logits],
        position: int,
        seed: int,
    ) -> None:
        self._make = make
        self._sampler = make(params)
        self._row = rows[0]  # decoded token by token, as plain decoding does
        self._others = rows[1:]
        self._position = position
        self._seed = seed
        self.difference = max((_spread(self._row, row) for row in rows[1:]), default=0.0)

    def _draw(self, row: Logits) -> int | None:
        """Return the token drawn from ``row``, None if none can be drawn."""
        try:
            choices = self._sampler.distribution(row, self._position, self._seed)
        except (GrammarError, ConfigError):
            return None
        return choices.draw(self._seed, self._position)

    def turn(self, token: int | None) -> tuple[float, str]:
        """Return how far logits must move for ``token`` to be drawn (None = EOG), and what decides."""
        model = self._sampler.model
        drawn = self._draw(self._row)
        wins: Callable[[int | None], bool] = partial(_is, token)
        if token is None:
            ends = model.eog_tokens
            if not ends:
                return math.inf, "nothing"
            wins = set(ends).__contains__
            token = max(ends, key=lambda end: float(self._row[end]))
        if wins(drawn):
            return 0.0, ""
        best, moved, entropic = math.inf, self._row, False
        for direction, by_entropy in self._directions(token, drawn):
            far = self._least(direction, wins, best)
            if far < best:
                best, moved, entropic = far, self._move(direction, far), by_entropy
        if best == math.inf:
            return math.inf, "nothing"
        return 2 * best, self._reason(token, drawn, moved, entropic)

    def _move(self, direction: Logits, far: float) -> Logits:
        moved: Logits = self._row + np.float32(far) * direction
        return moved

    def _least(self, direction: Logits, wins: Callable[[int | None], bool], most: float) -> float:
        """Return the least move, below ``most``, after which the token is drawn; inf if there is none."""
        low, high = 0.0, _LEAST
        while not wins(self._draw(self._move(direction, high))):
            low, high = high, 2 * high
            if high > _MOST or low >= most:
                return math.inf
        for _ in range(_N_BISECTIONS):
            middle = (low + high) / 2
            if wins(self._draw(self._move(direction, middle))):
                high = middle
            else:
                low = middle
        return high

    def _directions(self, token: int, drawn: int | None) -> Iterator[tuple[Logits, bool]]:
        """Yield directions to move logits in (each by at most 1), and whether they change the entropy.

        These change a draw with the smallest moves: ``token`` rises, or ``drawn`` sinks, relative to the
        other, to all others, or to the larger ones (whose mass top-p counts); and the moves that were
        measured. Where several truncations apply there is no formula for the smallest move.
        """
        row = self._row
        ones = np.ones_like(row)
        rises = -ones
        rises[token] = 1.0
        if drawn is not None:
            against = np.zeros_like(row)
            against[token], against[drawn] = 1.0, -1.0
            yield against, False
            sinks = ones.copy()
            sinks[drawn] = -1.0
            yield sinks, False
            outweighed = np.where(row > row[drawn], ones, -ones)
            yield outweighed, False
        yield rises, False
        lightened = np.where(row >= row[token], -ones, ones)
        lightened[token] = 1.0
        yield lightened, False
        params = self._sampler.params
        if params.temperature > 0:
            # All tokens with larger keys sink; that also frees their places within the truncations.
            noise = gumbel_noise(self._seed, self._position, np.arange(len(row), dtype=np.int32))
            keys = row / params.temperature + noise
            yield np.where(keys > keys[token], -ones, ones), False
        for other in self._others:
            spread = _spread(other, self._row)
            if spread > 0:
                moves = np.where(np.isfinite(other) & np.isfinite(row), other - row, 0.0)
                middle = (moves.max() + moves.min()) / 2
                yield ((moves - middle) * (2 / spread)).astype(np.float32), False
        x = row.astype(np.float64) - float(row.max())
        logprobs = x - math.log(np.exp(x).sum())
        entropy = -float(np.dot(np.exp(logprobs), np.where(np.isfinite(logprobs), logprobs, 0.0)))
        if params.xtc_probability > 0:  # the tokens nearest its threshold decide what it drops
            threshold = math.log(max(params.xtc_threshold, 1e-9))
            for side, sign in ((logprobs >= threshold, -1.0), (logprobs < threshold, 1.0)):
                near = np.where(side, np.abs(logprobs - threshold), np.inf)
                crosses = np.full_like(row, -sign)
                crosses[near.argmin()] = sign
                yield crosses, False
        # Along the gradient of the entropy: towards more, and towards less.
        flatter = np.where(logprobs + entropy > 0, -ones, ones)
        yield flatter, True
        yield -flatter, True

    def _reason(self, token: int, drawn: int | None, moved: Logits, entropic: bool) -> str:
        """Return what decides between ``drawn`` with these logits and ``token`` with ``moved`` ones."""
        params = self._sampler.params
        dropped = self._dropped_by(self._row, token)
        if not dropped and drawn is not None:
            dropped = self._dropped_by(moved, drawn)
        if dropped:
            return dropped
        if params.temperature == 0.0:
            return "logits"
        return "temperature" if entropic and params.dynatemp_range > 0 else "scores"

    def _dropped_by(self, row: Logits, token: int) -> str:
        """Return the settings that prevent ``token`` from being drawn from ``row``, "" if it can be."""
        params = self._sampler.params
        used = [name for name, off in TRUNCATIONS.items() if getattr(params, name) != off]
        if params.temperature == 0.0 and params.typical_p == 1.0 and params.xtc_probability == 0.0:
            return ""  # the other truncations never drop the largest logit
        if not used or self._has(row, token, ()):
            return ""
        for name in used:
            if self._has(row, token, [name]):
                return name
        # No single setting does it: find a minimal set that must be off together.
        left = list(used)
        for name in used:
            fewer = [other for other in left if other != name]
            if self._has(row, token, fewer):
                left = fewer
        return "+".join(left) if self._has(row, token, left) else ""

    def _has(self, row: Logits, token: int, without: Sequence[str]) -> bool:
        """Return whether ``token`` can be drawn with the truncations ``without`` switched off."""
        off: dict[str, object] = {name: TRUNCATIONS[name] for name in without}
        params = self._sampler.params
        if params.temperature == 0.0:  # which token is the largest left does not matter here
            off["temperature"] = 1.0
        try:
            sampler = self._make(params.replace(**off)) if off else self._sampler
            choices = sampler.distribution(row, self._position, self._seed)
        except (GrammarError, ConfigError):
            return False
        return bool((choices.ids == token).any())


def _is(token: int | None, drawn: int | None) -> bool:
    return drawn == token
