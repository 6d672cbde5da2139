"""From logits to the distribution that is drawn from: settings, grammar, sampler.

A llama.cpp sampler chain serves as a *transform*: it masks, truncates, penalises and scales, and hands
the surviving candidates back. Nothing in it draws; :class:`~llamabranch.distribution.Distribution`
does, from counter-based noise. XTC is the one sampler of llama.cpp that draws while it transforms, so
its coin is taken from the same noise and the sampler is applied for certain or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from .distribution import MIXTURE, Distribution, candidates, uniform
from .errors import ConfigError, GrammarError
from .grammar import Grammar
from .model import Model
from .native import CandidateBuffer, GrammarHandle, SamplerHandle

__all__ = ["Sampler", "SamplingParams"]

LogitsArray = npt.NDArray[np.float32]


# Name: smallest value, largest value, and whether the smallest itself is excluded.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 1e4, False),
    "dynatemp_range": (0.0, 1e4, False),
    "dynatemp_exponent": (0.0, 1e4, False),
    "top_k": (0, 2**31 - 1, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, True),
    "top_n_sigma": (-1.0, 1e4, False),
    "xtc_probability": (0.0, 1.0, False),
    "xtc_threshold": (0.0, 1.0, False),
    "repeat_penalty": (0.0, 1e4, True),
    "frequency_penalty": (-1e4, 1e4, False),
    "presence_penalty": (-1e4, 1e4, False),
    "penalty_last_n": (-1, 2**31 - 1, False),
    "dry_multiplier": (0.0, 1e4, False),
    "dry_base": (1.0, 1e4, False),
    "dry_allowed_length": (1, 2**31 - 1, False),
    "dry_penalty_last_n": (-1, 2**31 - 1, False),
    "min_keep": (1, 2**31 - 1, False),
}
_INTEGERS = {
    "top_k", "penalty_last_n", "dry_allowed_length", "dry_penalty_last_n", "min_keep",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Names, meaning, defaults and order are llama.cpp's.

    Order: logit bias, grammar, penalties, DRY, top-n-sigma, top-k, typical-p, top-p, min-p, XTC,
    temperature. A grammar always masks before anything truncates, so the distribution is the model's
    own given that the grammar holds.

    Args:
        temperature: 0 takes the most probable token.
        dynatemp_range, dynatemp_exponent: dynamic temperature within temperature +- range.
        top_k: keep the k most probable; 0 = all.
        top_p: keep the smallest set with this much probability; 1 = off.
        min_p: drop tokens below min_p times the largest probability; 0 = off.
        typical_p: locally typical sampling; 1 = off.
        top_n_sigma: keep logits within n standard deviations of the largest; -1 or 0 = off.
        xtc_probability, xtc_threshold: with that probability drop all but the least likely of the
            tokens above the threshold; 0 = off.
        repeat_penalty, frequency_penalty, presence_penalty, penalty_last_n: penalties over the last n
            tokens, prompt included; 1, 0, 0 = off. penalty_last_n -1 = the whole context.
        dry_*: the "don't repeat yourself" penalty on repeated sequences; multiplier 0 = off.
        logit_bias: token id to what is added to its logit; -inf forbids it.
        min_keep: truncating samplers leave at least that many tokens.
        seed: what the noise is made of; None picks one (ask the branch for it).

    Raises:
        ConfigError: a value out of range, or not a number.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_keep: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high, low_open) in _RANGES.items():
            value = getattr(self, name)
            whole = name in _INTEGERS
            kinds = (int,) if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                kind = "an integer" if whole else "a number"
                raise ConfigError(f"{name} must be {kind}, not {value!r}")
            if not (low <= value <= high) or (low_open and value == low):
                bracket = "(" if low_open else "["
                raise ConfigError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise ConfigError(f"seed must be an integer or None, not {self.seed!r}")
        breakers: object = self.dry_sequence_breakers
        if isinstance(breakers, str):
            raise ConfigError("dry_sequence_breakers must be a sequence of strings, not one string")
        object.__setattr__(self, "dry_sequence_breakers", tuple(self.dry_sequence_breakers))
        if any(not isinstance(b, str) or not b for b in self.dry_sequence_breakers):
            raise ConfigError("dry_sequence_breakers must be strings that are not empty")
        if not all(b.isprintable() or b.isspace() for b in self.dry_sequence_breakers):
            raise ConfigError("dry_sequence_breakers must be printable text")
        bias = dict(self.logit_bias)
        for token, value in bias.items():
            if not isinstance(token, int) or not isinstance(value, (int, float)):
                raise ConfigError(f"logit_bias maps token ids to numbers, not {token!r}: {value!r}")
            if math.isnan(value) or value == math.inf:
                raise ConfigError(
                    f"logit_bias of token {token} must be finite or -inf, not {value}"
                )
        object.__setattr__(self, "logit_bias", bias)

    def but(self, **changes: object) -> SamplingParams:
        """Return a copy with some settings changed.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ConfigError(
                f"unknown sampling setting {unknown[0]!r}",
                hint="known: " + ", ".join(sorted(known)),
            )
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def uses_history(self) -> bool:
        """True if penalties or DRY look at the tokens so far."""
        return self._penalises or self.dry_multiplier > 0

    @property
    def _penalises(self) -> bool:
        return self.penalty_last_n != 0 and (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class Sampler:
    """Turns a row of logits into the distribution to draw from, and remembers what was drawn.

    Memory: penalties and DRY keep the tokens they look at, a grammar keeps where it stands; without
    them the sampler has no state and ``clone`` returns the sampler itself.
    """

    def __init__(
        self, model: Model, params: SamplingParams, grammar: Grammar | None = None
    ) -> None:
        """Build the chain.

        Raises:
            GrammarError: the grammar does not parse, or the model has no text.
            ConfigError: a bias for a token that does not exist.
        """
        bad = [token for token in params.logit_bias if not 0 <= token < model.n_vocab]
        if bad:
            raise ConfigError(
                f"logit_bias names token {bad[0]}, the last one is {model.n_vocab - 1}"
            )
        self.model = model
        self.params = params
        self.grammar = grammar
        self._greedy = params.temperature == 0.0
        self._history = self._build_history()
        self._cut = self._build_cut()
        self._xtc = self._build_xtc()
        self._heat = self._build_heat()
        self._grammar_state = self._build_grammar()
        self._grammar_done = False
        self._buffer = CandidateBuffer(model.n_vocab)
        self._bias = self._build_bias()
        # Where top-k comes first the others need not be looked at: only its candidates go to llama.cpp.
        no_mask = self._history is None and self._grammar_state is None
        cuts_first = no_mask and self._cut is not None and params.top_n_sigma <= 0
        self._first_k = params.top_k if cuts_first and params.top_k < model.n_vocab else 0
        self._plain_argmax = self._greedy and all(
            stage is None
            for stage in (self._history, self._cut, self._xtc, self._grammar_state, self._bias)
        )

    # -- the stages, in llama.cpp's order; None = nothing to do --------------------------------------

    def _build_bias(self) -> tuple[npt.NDArray[np.int64], LogitsArray] | None:
        bias = self.params.logit_bias
        if not bias:
            return None
        return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), np.float32)

    def _build_grammar(self) -> GrammarHandle | None:
        if self.grammar is None:
            return None
        if not self.model.has_text:
            raise GrammarError("a grammar needs a model with a vocabulary")
        return GrammarHandle(self.model.handle, self.grammar.gbnf)

    def _build_history(self) -> SamplerHandle | None:
        p = self.params
        if not p.uses_history:
            return None
        # "The whole context" is more than any branch holds; llama.cpp keeps what has come so far.
        whole = max(self.model.n_ctx_train, 1 << 16)
        chain = SamplerHandle.chain(self.model.handle)
        if p._penalises:
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

    def _build_cut(self) -> SamplerHandle | None:
        p = self.params
        chain = SamplerHandle.chain(self.model.handle)
        # At temperature 0 only typical-p can change which token is the most probable one left.
        needed = not self._greedy or p.typical_p < 1.0 or p.xtc_probability > 0
        if needed:
            if p.top_n_sigma > 0:
                chain.add("top_n_sigma", p.top_n_sigma)
            if 0 < p.top_k < self.model.n_vocab:
                chain.add("top_k", p.top_k)
            if p.typical_p < 1.0:
                # It takes the logarithm of every probability: one that is 0 would make all NaN.
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

    def _build_heat(self) -> SamplerHandle | None:
        p = self.params
        if self._greedy or (p.temperature == 1.0 and p.dynatemp_range == 0.0):
            return None
        joins = self._cut is not None and self._xtc is None  # nothing in between: one call less
        chain = self._cut if joins and self._cut else SamplerHandle.chain(self.model.handle)
        chain.add("temp_ext", p.temperature, p.dynatemp_range, p.dynatemp_exponent)
        return None if joins else chain

    # -- use ---------------------------------------------------------------------------------------

    @property
    def is_stateless(self) -> bool:
        """True if what was accepted does not change what comes next."""
        return self._history is None and self._grammar_state is None

    @property
    def is_greedy(self) -> bool:
        """True at temperature 0: the distribution is a point."""
        return self._greedy

    @property
    def takes_the_best(self) -> bool:
        """True if the draw is the largest logit, whatever came before."""
        return self._plain_argmax

    def distribution(self, logits: LogitsArray, position: int = 0, seed: int = 0) -> Distribution:
        """Return what is drawn from, given the model's ``logits`` (V,); changes nothing.

        ``position`` is that of the token to be drawn; only XTC's coin depends on it and on ``seed``.

        Raises:
            GrammarError: the grammar is complete or leaves no token.
            ConfigError: the logits are NaN, or no token is left.
        """
        if logits.shape != (self.model.n_vocab,):
            raise ConfigError(f"logits must have shape ({self.model.n_vocab},), not {logits.shape}")
        if self._plain_argmax:
            token = int(logits.argmax())
            if logits[token] != logits[token]:
                raise ConfigError("no token can be drawn: the logits are not numbers")
            return Distribution.point(token)
        if self._bias is not None:
            tokens, values = self._bias
            logits = logits.copy()
            logits[tokens] += values
        buffer = self._buffer
        chosen = candidates(logits, self._first_k) if self._first_k else None
        buffer.fill(logits if chosen is None else logits[chosen], chosen)
        if self._grammar_state is not None:
            self._apply_grammar(self._grammar_state)
        if self._history is not None:
            self._history.apply(buffer)
        if self._cut is not None:
            self._cut.apply(buffer)
        if self._xtc is not None and self._xtc_falls(position, seed):
            self._xtc.apply(buffer)
        if self._heat is not None:
            self._heat.apply(buffer)
        ids, left = buffer.read()
        if self._greedy:
            best = left.max() if len(left) else math.nan
            if not math.isfinite(best):
                raise ConfigError("no token is left to draw: every logit is masked or not a number")
            return Distribution.point(int(ids[left == best].min()))
        return Distribution.from_logits(left, ids)

    def _apply_grammar(self, state: GrammarHandle) -> None:
        if self._grammar_done:
            raise GrammarError("the grammar is complete: nothing can follow")
        state.apply(self._buffer)
        # Top-p and its like must never see an array without a candidate: drop what is masked here.
        ids, left = self._buffer.read()
        keep = left > -np.inf
        if not keep.any():
            raise GrammarError("the grammar allows no token of this vocabulary here")
        self._buffer.fill(left[keep], ids[keep])

    def _xtc_falls(self, position: int, seed: int) -> bool:
        return uniform(seed, position, MIXTURE) < self.params.xtc_probability

    def allows(self, token: int) -> bool:
        """Return True unless the grammar forbids ``token`` here."""
        self.model.check_tokens((token,))
        if self._grammar_state is None:
            return True
        if self._grammar_done:
            return False
        return self._grammar_state.allows(token, self._buffer)

    def accept(self, token: int) -> None:
        """Remember a token that was generated.

        Raises:
            GrammarError: the grammar forbids it; nothing has changed.
        """
        if self._grammar_state is not None:
            if not self.allows(token):
                text = self.model.piece(token)
                raise GrammarError(f"the grammar does not allow token {token} ({text!r}) here")
            self._grammar_state.accept(token)
            self._grammar_done = self.model.is_end(token)
        else:
            self.model.check_tokens((token,))
        if self._history is not None:
            self._history.accept(token)

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Remember prompt tokens: they count for penalties, not for the grammar."""
        if self._history is not None:
            for token in tokens:
                self._history.accept(token)

    def clone(self) -> Sampler:
        """Return a sampler in the same state that goes its own way."""
        if self.is_stateless:
            return self
        twin = object.__new__(Sampler)
        twin.__dict__.update(self.__dict__)
        twin._history = None if self._history is None else self._history.clone()
        twin._grammar_state = None if self._grammar_state is None else self._grammar_state.clone()
        return twin

    def fresh(self, params: SamplingParams | None = None) -> Sampler:
        """Return a sampler without memory, with these or other settings."""
        return Sampler(self.model, params or self.params, self.grammar)

    def replay(self, prompt: Sequence[int], generated: Sequence[int]) -> Sampler:
        """Return a sampler that has seen exactly these tokens."""
        if self.is_stateless:
            return self
        sampler = self.fresh()
        sampler.accept_prompt(prompt)
        for token in generated:
            sampler.accept(token)
        return sampler
