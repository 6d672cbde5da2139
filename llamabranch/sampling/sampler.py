"""From logits to the distribution from which the next token is drawn.

A llama.cpp sampler chain is used as a *transform*: it masks, truncates, penalises and scales, and returns
the remaining candidates. It never draws; :class:`~llamabranch.sampling.distribution.Distribution` does
that, with counter-based noise. XTC is the only llama.cpp sampler with a random decision of its own. So
our noise decides whether XTC applies, and llama.cpp gets 1 or 0 as its probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ..arguments import instance, shown
from ..errors import ConfigError, GrammarError
from ..model import Model, TokenIds, token_list
from ..native import core
from ..native.sampler import CandidateBuffer, SamplerHandle, softmax_agrees
from .constraint import ConstraintState
from .distribution import Distribution, candidates, falling
from .grammar import Grammar
from .grammar.guidance import Matcher
from .noise import MIXTURE, uniform
from .params import SamplingParams

LogitsArray = npt.NDArray[np.float32]

_FLOAT_MAX = float(np.finfo(np.float32).max)
_SAFE = 1e37  # small additions to smaller logits stay in a 32-bit float's range
_LOGIT = 1e6  # an upper bound for a model's logits
_LEAST_NORMAL = 1e-300


class Sampler:
    """Turns a row of logits into the distribution of the next token; keeps the state of the samplers.

    Penalties and DRY keep the last tokens, a logits processor keeps all tokens, a grammar its position,
    and a constraint the text. Without these the sampler has no state, and ``clone`` returns the sampler
    itself.

    Attributes:
        is_argmax: whether the result is always the largest logit, regardless of earlier tokens.
        constraint: the state of a generation's constraint, or None. It changes which token is drawn,
            but not the distribution.
    """

    def __init__(
        self, model: Model, params: SamplingParams, grammar: Grammar | None = None
    ) -> None:
        """Build the chain.

        Raises:
            GrammarError: the grammar does not parse, or the model has no text.
            ConfigError: a bias for a token that does not exist.
        """
        instance("sampling", params, SamplingParams)
        if grammar is not None:
            instance("grammar", grammar, Grammar, "Grammar(gbnf), or a text in GBNF")
        bad = [token for token in params.logit_bias if not 0 <= token < model.n_vocab]
        if bad:
            raise ConfigError(
                f"logit_bias contains token {shown(bad[0])}; the vocabulary ends at {model.n_vocab - 1}"
            )
        self.model = model
        self.params = params
        self.grammar = grammar
        self._greedy = params.temperature == 0.0
        self._tokens: list[int] | None = None if params.logits_processor is None else []
        self._history = self._build_history()
        self._truncation = self._build_truncation()
        self._xtc = self._build_xtc()
        self._temperature_step = self._build_temperature()
        self._grammar_state = None if grammar is None else grammar.start(model)
        self.constraint: ConstraintState | None = None
        self._buffer = CandidateBuffer(model.n_vocab)
        self._bias = self._build_bias()
        # If top-k is the first step, llama.cpp needs only the k largest logits.
        no_mask = self._history is None and self._grammar_state is None
        truncates_first = no_mask and self._truncation is not None and params.top_n_sigma <= 0
        self._checks_temperature = self._temperature_may_fail()
        # Penalties could push a logit out of the range of a 32-bit float.
        is_large = self._logit_bound() > _SAFE or params.dry_multiplier > 1.0
        self._overflows = params.uses_history and is_large
        self._first_k = params.top_k if truncates_first and params.top_k < model.n_vocab else 0
        steps = (self._history, self._truncation, self._xtc, self._grammar_state, self._bias)
        self.is_argmax = self._greedy and all(s is None for s in (*steps, self._tokens))
        self._suits_core = core.available and self._is_common()
        self._row_sampler: core.RowSampler | None = None

    def _is_common(self) -> bool:
        """Return True if the compiled core supports all settings in use."""
        p = self.params
        if (self._history, self._xtc, self._tokens) != (None, None, None):
            return False
        if self._greedy:
            return self._truncation is None
        return (
            p.typical_p == 1.0
            and p.top_n_sigma <= 0.0
            and p.min_keep == 1
            and not self._checks_temperature
            and (p.top_p == 1.0 or softmax_agrees())
        )

    # -- the steps, in llama.cpp's order; None = nothing to do ---------------------------------------

    def _build_bias(self) -> tuple[npt.NDArray[np.int64], LogitsArray] | None:
        bias = self.params.logit_bias
        if not bias:
            return None
        values = np.array([float(value) for value in bias.values()], dtype=np.float32)
        return np.array(list(bias), dtype=np.int64), values

    def _build_history(self) -> SamplerHandle | None:
        p = self.params
        if not p.uses_history:
            return None
        # -1 = the whole context: a number larger than any branch. llama.cpp stores only the tokens that
        # exist.
        whole = max(self.model.n_ctx_train, 1 << 16)
        chain = SamplerHandle.chain(self.model.handle)
        if p.penalises:
            last_n = whole if p.penalty_last_n == -1 else min(whole, p.penalty_last_n)
            chain.add(
                "penalties", self.model.n_vocab, last_n,
                p.repeat_penalty, p.frequency_penalty, p.presence_penalty,
            )  # fmt: skip
        if p.dry_multiplier > 0 and self.model.has_text:
            last_n = whole if p.dry_penalty_last_n == -1 else min(whole, p.dry_penalty_last_n)
            chain.add_dry(
                p.dry_multiplier, p.dry_base, p.dry_allowed_length, last_n,
                p.dry_sequence_breakers,
            )  # fmt: skip
        return chain

    def _build_truncation(self) -> SamplerHandle | None:
        p = self.params
        chain = SamplerHandle.chain(self.model.handle)
        # At temperature 0 only typical-p and XTC can remove the most probable token.
        needed = not self._greedy or p.typical_p < 1.0 or p.xtc_probability > 0
        if needed:
            if p.top_n_sigma > 0:
                chain.add("top_n_sigma", p.top_n_sigma)
            if 0 < p.top_k < self.model.n_vocab:
                chain.add("top_k", p.top_k)
            if p.typical_p < 1.0:
                # typical-p takes the logarithm of every probability, so one 0 would make all of them NaN.
                chain.add("min_p", 1e-30, 1)
                chain.add("typical", p.typical_p, p.min_keep)
            if p.top_p < 1.0:
                chain.add("top_p", p.top_p, p.min_keep)
            if p.min_p > 0.0:
                chain.add("min_p", p.min_p, p.min_keep)
        return chain if len(chain) else None

    def _build_xtc(self) -> SamplerHandle | None:
        p = self.params
        if p.xtc_probability <= 0 or p.xtc_threshold > 0.5:
            return None
        chain = SamplerHandle.chain(self.model.handle)
        chain.add("xtc", 1.0, p.xtc_threshold, p.min_keep, 0)
        return chain

    def _build_temperature(self) -> SamplerHandle | None:
        p = self.params
        if self._greedy or (p.temperature == 1.0 and p.dynatemp_range == 0.0):
            return None
        # If nothing comes between them, the temperature joins the truncation chain, which saves a call.
        joins = self._xtc is None and not self._temperature_may_fail()
        joined = self._truncation if joins else None
        chain = SamplerHandle.chain(self.model.handle) if joined is None else joined
        chain.add("temp_ext", p.temperature, p.dynatemp_range, p.dynatemp_exponent)
        return None if chain is joined else chain

    def _logit_bound(self) -> float:
        """Return an upper bound of the logits before the temperature divides them."""
        bias = (abs(value) for value in self.params.logit_bias.values() if value > -math.inf)
        bound = _LOGIT if self._tokens is None else _FLOAT_MAX
        bound += max(bias, default=0.0)
        repeat = self.params.repeat_penalty if self.params.penalises else 1.0
        return bound * max(repeat, 1.0 / max(repeat, _LEAST_NORMAL))

    def _temperature_may_fail(self) -> bool:
        """Return True if masked tokens or an overflow could make the temperature step fail."""
        p = self.params
        bound = self._logit_bound() / p.temperature if p.temperature > 0.0 else 0.0
        return p.dynatemp_range > 0.0 or p.dry_multiplier > 0.0 or bound > _SAFE

    # -- use ---------------------------------------------------------------------------------------

    @property
    def is_stateless(self) -> bool:
        """True if accepted tokens do not change later distributions."""
        states = (self._history, self._grammar_state, self._tokens, self.constraint)
        return states == (None, None, None, None)

    @property
    def row_sampler(self) -> core.RowSampler | None:
        """The compiled core for these settings; None if there is a state, or no compiled core."""
        return self.current_row_sampler if self.is_stateless else None

    @property
    def current_row_sampler(self) -> core.RowSampler | None:
        """The compiled core for the next token; None if it is missing or does not support these settings.

        Use it at once, because copies of this sampler share it, each with its own grammar mask.

        Raises:
            GrammarError: the grammar is too complex at this position.
        """
        if self._row_sampler is None and self._suits_core:
            p = self.params
            self._row_sampler = core.RowSampler(
                self.model.n_vocab,
                temperature=p.temperature,
                top_k=p.top_k if p.top_k < self.model.n_vocab else 0,
                top_p=p.top_p,
                min_p=p.min_p,
                bias=p.logit_bias,
                is_masked=self._grammar_state is not None,
            )
        if self._row_sampler is not None and self._grammar_state is not None:
            self._row_sampler.use_mask(self._grammar_state.mask())
        return self._row_sampler

    def distribution(self, logits: LogitsArray, position: int = 0, seed: int = 0) -> Distribution:
        """Return the distribution of the next token for ``logits`` (V,); the state does not change.

        ``position`` is the position of the next token. Only XTC uses it and ``seed``, to decide whether
        it applies.

        Raises:
            GrammarError: the grammar is complete, or allows no token.
            ConfigError: the logits contain NaN, no token is left, or the logits processor has failed.
        """
        if logits.shape != (self.model.n_vocab,):
            raise ConfigError(f"logits must have shape ({self.model.n_vocab},), not {logits.shape}")
        if self._tokens is not None:
            logits = self._process(logits, self._tokens)
        if self.is_argmax:
            token = int(logits.argmax())
            if logits[token] != logits[token]:
                raise ConfigError("no token can be drawn: the logits contain NaN")
            return Distribution.point(token)
        compiled = self.current_row_sampler
        if compiled is not None:
            address, logits = core.address_of(logits)
            top = compiled.candidates(address)
            if top is not None:
                return Distribution.from_logweights(*top)
        if self._bias is not None:
            tokens, values = self._bias
            logits = logits.copy()
            logits[tokens] += values
        buffer = self._buffer
        chosen = candidates(logits, self._first_k) if self._first_k else None
        if self._grammar_state is not None:
            chosen = self._allowed(self._grammar_state, logits)
        buffer.fill(logits if chosen is None else logits[chosen], chosen)
        if self._history is not None:
            self._history.apply(buffer)
            if self._overflows:
                self._limit_penalised(logits)
        if self._truncation is not None:
            self._truncation.apply(buffer)
        chance = self.params.xtc_probability
        if self._xtc is not None and uniform(seed, position, MIXTURE) < chance:
            self._drop_masked()
            self._xtc.apply(buffer)
        if self._temperature_step is not None:
            if self._checks_temperature:
                return self._apply_temperature(self._temperature_step)
            self._temperature_step.apply(buffer)
        ids, left = buffer.read()
        if self._greedy:
            best = left.max() if len(left) else math.nan
            if not math.isfinite(best):
                raise ConfigError("no token is left to draw: every logit is masked or NaN")
            return Distribution.point(int(ids[left == best].min()))
        return Distribution.from_logits(left, ids)

    def draw_allowed(self, logits: LogitsArray, position: int, seed: int) -> int:
        """Return the first token that the constraint allows, in the order of a draw without replacement.

        If it refuses all tokens that the settings leave, try the other tokens, most probable first.

        Raises:
            ConstraintError: the constraint allows no token.
        """
        state = self.constraint
        if state is None:
            raise ConfigError("there is no constraint")
        for token in self._in_order(logits, position, seed):
            if state.allows(token):
                return token
        raise state.dead_end()

    def _in_order(self, logits: LogitsArray, position: int, seed: int) -> Iterator[int]:
        distribution = self.distribution(logits, position, seed)
        for i in distribution.order(seed, position):
            yield int(distribution.ids[i])
        ids, scores = self.processed(logits)
        if len(distribution) < len(ids):
            left = ~np.isin(ids, distribution.ids)
            ids, scores = ids[left], scores[left]
            for i in falling(scores):
                yield int(ids[i])

    def constrained(self, state: ConstraintState | None) -> Sampler:
        """Return a copy with the same tokens and another constraint, or none."""
        sampler = object.__new__(Sampler)
        sampler.__dict__.update(self.__dict__)
        sampler.constraint = state
        return sampler.clone()

    def processed(
        self, scores: npt.NDArray[np.floating]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """Return the tokens that may come next and their scores after bias, grammar and penalties.

        Scores are not truncated, scaled by the temperature or normalised. The state does not change.

        Args:
            scores: logits, or log-probabilities as beam search processes them, (V,).

        Returns:
            ids, int32 (K,), each once and in no particular order, and scores, float64 (K,). K is 0 if
            nothing is allowed. Penalties are computed in 32-bit floats.
        """
        if scores.shape != (self.model.n_vocab,):
            raise ConfigError(f"scores must have shape ({self.model.n_vocab},), not {scores.shape}")
        if self._tokens is not None:
            scores = self._process(scores, self._tokens)
        biased = scores.astype(np.float64)
        if self._bias is not None:
            tokens, values = self._bias
            biased[tokens] += values
        ids = np.flatnonzero(biased > -np.inf).astype(np.int32)
        if self._grammar_state is not None:
            mask = self._grammar_state.mask()
            ids = ids[(mask[ids >> 5] >> (ids & 31).astype(np.uint32) & 1).astype(bool)]
        if self._history is not None and len(ids):
            self._buffer.fill(biased[ids].astype(np.float32), ids)
            self._history.apply(self._buffer)
            ids, penalised = self._buffer.read()
            return ids, penalised.astype(np.float64)
        return ids, biased[ids]

    def _process(self, logits: npt.NDArray[np.floating], tokens: list[int]) -> LogitsArray:
        """Return the result of the logits processor for ``logits`` after ``tokens``."""
        function = self.params.logits_processor
        try:
            arguments = np.array(tokens, dtype=np.intc), logits.astype(np.float32)
            processed = np.asarray(function and function(*arguments))
        except Exception as error:
            raise ConfigError(f"logits_processor raised {error!r}") from error
        if processed.shape != logits.shape or processed.dtype.kind not in "fiu":
            raise ConfigError(
                f"logits_processor must return logits of shape {logits.shape}, not {processed!r:.60}"
            )
        with np.errstate(over="ignore"):
            processed = processed.astype(np.float32)
        if not math.isfinite(processed.max()):
            raise ConfigError(
                f"the largest logit that logits_processor returned is {processed.max()}"
            )
        return processed

    def _allowed(self, state: Matcher, logits: LogitsArray) -> npt.NDArray[np.intp]:
        """Return the tokens that the grammar allows, ascending, without those whose logit is -inf."""
        # Truncation must not get an empty array.
        allowed = np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))
        allowed = allowed[logits[allowed] > -np.inf]
        if not len(allowed):
            if not state.mask().any():
                raise GrammarError("the grammar is complete: no token may follow")
            raise GrammarError("the grammar allows only tokens here that have a logit of -inf")
        return allowed

    def _drop_masked(self) -> None:
        """Remove masked tokens: XTC and dynamic temperature would count them as candidates."""
        ids, left = self._buffer.read()
        masked = left == -np.inf
        if masked.any() and not masked.all():
            self._buffer.fill(left[~masked], ids[~masked])

    def _limit_penalised(self, logits: LogitsArray) -> None:
        """Replace logits that penalties pushed out of the range of a 32-bit float."""
        ids, left = self._buffer.read()
        best = left.max()
        if math.isfinite(best):
            return
        over, before = left == best, logits[ids]
        if best > 0:  # divided by a tiny repeat penalty, so the largest is far above the rest
            left[over] = np.where(before[over] == before[over].max(), _FLOAT_MAX, 0.0)
        else:  # all overflowed to -inf, so the allowed ones become equal
            left[before > -np.inf] = 0.0
        self._buffer.fill(left, ids)

    def _apply_temperature(self, step: SamplerHandle) -> Distribution:
        """Apply the temperature; if 32-bit floats overflow, the largest logit becomes certain."""
        self._drop_masked()
        ids, before = self._buffer.read()
        step.apply(self._buffer)
        kept_ids, scaled = self._buffer.read()
        if not len(scaled) or math.isfinite(scaled.max()) or not math.isfinite(before.max()):
            return Distribution.from_logits(scaled, kept_ids)
        return Distribution.from_logits(np.where(before == before.max(), 0.0, -np.inf), ids)

    def allows(self, token: SupportsIndex) -> bool:
        """Return True unless the grammar forbids ``token`` at this position."""
        token = self.model.token_id(token)
        return self._grammar_state is None or self._grammar_state.allows(token)

    @property
    def n_allowed(self) -> int:
        """How many tokens the grammar allows next; 0 without a grammar."""
        state = self._grammar_state
        return 0 if state is None else int.from_bytes(state.mask().tobytes(), "little").bit_count()

    def accept(self, token: SupportsIndex) -> None:
        """Update the state with a generated token.

        Raises:
            GrammarError: the grammar forbids it; the state is unchanged.
        """
        token = self.model.token_id(token)
        if self._grammar_state is not None:
            if not self.allows(token):
                text = self.model.piece(token)
                raise GrammarError(f"the grammar does not allow token {token} ({text!r}) here")
            self._grammar_state.accept(token)
        self._remember((token,))

        if self.constraint is not None:
            self.constraint = self.constraint.accept(token)

    def _remember(self, tokens: Sequence[int]) -> None:
        if self._tokens is not None:
            self._tokens += tokens
        if self._history is not None:
            for token in tokens:
                self._history.accept(token)

    def count_allowed(self, tokens: Iterable[int]) -> int:
        """Return how many of ``tokens`` the grammar allows, one after the other."""
        if self._grammar_state is None:
            return sum(1 for _ in tokens)
        state, n = self._grammar_state.clone(), 0
        for token in tokens:
            if not state.allows(token):
                break
            state.accept(token)
            n += 1
        return n

    def after(self, tokens: Iterable[int]) -> Sampler:
        """Return the sampler after ``tokens``: a copy if it has a state.

        Raises:
            GrammarError: the grammar does not allow them.
        """
        if self.is_stateless:
            return self
        sampler = self.clone()
        for token in tokens:
            sampler.accept(token)
        return sampler

    def accept_prompt(self, tokens: TokenIds) -> None:
        """Remember prompt tokens, which count for penalties but not for the grammar."""
        if self._history is not None or self._tokens is not None:
            tokens = token_list(tokens)
            self.model.check_tokens(tokens)
            self._remember(tokens)

    def clone(self) -> Sampler:
        """Return an independent copy with the same state."""
        if self.is_stateless:
            return self
        clone = object.__new__(Sampler)
        clone.__dict__.update(self.__dict__)
        clone._history = None if self._history is None else self._history.clone()
        clone._tokens = None if self._tokens is None else [*self._tokens]
        clone._grammar_state = None if self._grammar_state is None else self._grammar_state.clone()
        return clone

    def replay(self, prompt: Sequence[int], generated: Sequence[int]) -> Sampler:
        """Return a sampler with the state after exactly these tokens."""
        if self.is_stateless:
            return self
        sampler = Sampler(self.model, self.params, self.grammar)
        sampler.constraint = None if self.constraint is None else self.constraint.start()
        sampler.accept_prompt(prompt)
        for token in generated:
            sampler.accept(token)
        return sampler
