"""The sampling settings, checked."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypeVar, cast

from typing_extensions import TypedDict, Unpack

from ..arguments import instance, items, nearest, plain_int, real, shown, whole
from ..errors import ConfigError, UnsupportedError

T = TypeVar("T", int, float)

_FLOAT_MAX = (2 - 2**-23) * 2.0**127
_INT_MAX = 2**31 - 1


class _Range(NamedTuple):
    """The range of a setting, from ``low`` to ``high``; ``is_open``: ``low`` itself is excluded."""

    low: float
    high: float
    is_open: bool = False


def _within(default: T, low: float, high: float, is_open: bool = False) -> T:
    """Return a numeric field of ``SamplingParams`` with its range."""
    return field(default=default, metadata={"range": _Range(low, high, is_open)})


# Arguments that are not sampling settings, and the functions that take them.
_ARGUMENTS = {
    **dict.fromkeys(("max_tokens", "stop"), "complete, chat, generate and Request"),
    **dict.fromkeys(("stop_tokens", "prompt_logprobs"), "complete, chat and Request"),
    "n": "complete, chat and Request; a branch has fork_many(n)",
    "top_logprobs": "complete, chat, Request and Speculator.generate",
    "json_schema": "complete and chat: a pydantic model, or a JSON schema",
    "regex": "complete and chat",
    "choices": "complete and chat: a list of texts",
    "grammar": "complete, chat, Request and Branch.start",
    **dict.fromkeys(("min_tokens", "priority"), "complete, chat and Request"),
    **dict.fromkeys(("tools", "tool_choice"), "chat"),
}
# Names of the same argument in other libraries.
_ELSEWHERE = {
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens max_length n_predict "
    "num_predict",
    "stop": "stop_sequences stop_strings stopping_criteria",
    "temperature": "temp",
    "tools": "functions",
    "stop_tokens": "stop_token_ids eos_token_id",
    "n": "num_return_sequences",
    "json_schema": "response_format response_model guided_json schema format",
    "regex": "guided_regex",
    "choices": "guided_choice",
    "grammar": "guided_grammar",
    "repeat_penalty": "repetition_penalty penalty_repeat",
    "penalty_last_n": "repeat_last_n",
    "logits_processor": "logits_processors",
    "typical_p": "typical",
}
_HERE = {name: here for here, names in _ELSEWHERE.items() for name in names.split()}
_HINTS = {
    "options": "pass each by its name: temperature=0.8, max_tokens=100",
    "best_of": "use lb.search.best_of_n, or n=8 with complete and chat: result.choices",
    "num_beams": "lb.search.beam_search",
    "do_sample": "temperature=0 always takes the most probable token",
    "ignore_eos": "set logit_bias={token: -inf} for each of the model's EOG tokens",
    "echo": "use result.prompt + result.text",
    "system": 'chat takes it as the first message: {"role": "system", "content": "..."}',
}


class SamplingSettings(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for editors and type checkers."""

    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    penalty_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    logit_bias: Mapping[int, float]
    min_keep: int
    seed: int | None
    logprobs: bool
    logits_processor: Callable[..., object] | None


def _names_unknown_settings(cls: type[SamplingParams]) -> type[SamplingParams]:
    """Make the constructor raise ConfigError for an unknown setting; the hint says where it belongs."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked(self: SamplingParams, *args: object, **settings: object) -> None:
        check_names(settings)
        init(self, *args, **settings)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@_names_unknown_settings
@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings. Names, meaning, defaults and order are the same as in llama.cpp.

    Order: logits processor, logit bias, grammar, penalties, DRY, top-n-sigma, top-k, typical-p, top-p,
    min-p, XTC, temperature. A grammar masks tokens before any truncation, so the result is the model's
    distribution over the tokens that the grammar allows.

    Args:
        temperature: 0 = always the most probable token (greedy).
        dynatemp_range, dynatemp_exponent: dynamic temperature between temperature - range and
            temperature + range.
        top_k: keep the k most probable; 0 or -1 = all.
        top_p: keep the fewest tokens whose probabilities add up to at least this; 1 = off.
        min_p: drop tokens below min_p times the largest probability; 0 = off.
        typical_p: locally typical sampling; 1 = off.
        top_n_sigma: keep logits within n standard deviations of the largest; -1 or 0 = off.
        xtc_probability, xtc_threshold: with this probability, drop all tokens above the threshold except
            the least probable of them; 0 = off.
        repeat_penalty, frequency_penalty, presence_penalty, penalty_last_n: penalties over the last n
            tokens, prompt included; 1, 0, 0 = off. penalty_last_n -1 = the whole context.
        dry_*: the "don't repeat yourself" penalty on repeated sequences; multiplier 0 = off.
        logit_bias: maps a token id to a number that is added to its logit; -inf = never this token.
        min_keep: truncation keeps at least this many tokens.
        seed: an integer from 0 to 2^64 - 1. -1 = a random seed for each text (``Branch.seed`` tells
            which). None = an engine derives one from its own seed; anything else uses a random one.
        logprobs: False = tokens have no log-probability or entropy (both are NaN), and branches have no
            surprisals. This saves time with each token; the text is the same.
        logits_processor: a function that gets the ids of all tokens so far and the model's logits, and
            returns the logits to use, as in llama-cpp-python. It may depend only on these two, because
            it is also called for drafted tokens, any number of times per position.

    Raises:
        ConfigError: an unknown setting, or a value that is out of range or not a number.
    """

    temperature: float = _within(0.8, 0.0, 1e4)
    dynatemp_range: float = _within(0.0, 0.0, 1e4)
    dynatemp_exponent: float = _within(1.0, 0.0, 1e4)
    top_k: int = _within(40, -1, _INT_MAX)
    top_p: float = _within(0.95, 0.0, 1.0, is_open=True)
    min_p: float = _within(0.05, 0.0, 1.0)
    typical_p: float = _within(1.0, 0.0, 1.0, is_open=True)
    top_n_sigma: float = _within(-1.0, -1.0, 1e4)
    xtc_probability: float = _within(0.0, 0.0, 1.0)
    xtc_threshold: float = _within(0.1, 0.0, 1.0)
    repeat_penalty: float = _within(1.0, 0.0, 1e4, is_open=True)
    frequency_penalty: float = _within(0.0, -1e4, 1e4)
    presence_penalty: float = _within(0.0, -1e4, 1e4)
    penalty_last_n: int = _within(64, -1, _INT_MAX)
    dry_multiplier: float = _within(0.0, 0.0, 1e4)
    dry_base: float = _within(1.75, 1.0, 1e4)
    dry_allowed_length: int = _within(2, 1, _INT_MAX)
    dry_penalty_last_n: int = _within(-1, -1, _INT_MAX)
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_keep: int = _within(1, 1, _INT_MAX)
    seed: int | None = None
    logprobs: bool = True
    logits_processor: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name, is_int, (low, high, is_open) in _ranges():
            setting = getattr(self, name)
            value = whole(name, setting) if is_int else real(name, setting)
            if not (low <= value <= high) or (is_open and value == low):
                bracket = "(" if is_open else "["
                raise ConfigError(
                    f"{name} must be in {bracket}{low:.15g}, {high:.15g}], not {shown(value)}"
                )
            if value is not setting:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "seed", checked_seed(self.seed))
        if not isinstance(self.logprobs, bool):
            raise ConfigError(
                f"logprobs must be True or False, not {shown(self.logprobs)}",
                hint=f"top_logprobs={plain_int(self.logprobs) or 'k'} gives the most probable tokens at "
                f"each position; it is an argument of {_ARGUMENTS['top_logprobs']}",
            )
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise ConfigError(
                f"logits_processor must be a function, not {self.logits_processor!r:.60}",
                hint="f(input_ids, logits) returns the logits to use; combine several functions into one",
            )
        breakers = items("dry_sequence_breakers", self.dry_sequence_breakers)
        object.__setattr__(self, "dry_sequence_breakers", tuple(breakers))
        if any(not isinstance(b, str) or not b for b in self.dry_sequence_breakers):
            raise ConfigError("dry_sequence_breakers must be strings that are not empty")
        if not all(b.isprintable() or b.isspace() for b in self.dry_sequence_breakers):
            raise ConfigError("dry_sequence_breakers must be printable text")
        bias = {}
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(
                f"logit_bias must be a dictionary, not {self.logit_bias!r:.60}",
                hint="for example {token: -1.5}, or {} for none",
            )
        for key, added in self.logit_bias.items():
            token, value = (
                whole("a token of logit_bias (an id of tokenize)", key),
                real("logit_bias", added),
            )
            bias[token] = value
            if value != value or value > _FLOAT_MAX:
                raise ConfigError(
                    f"logit_bias of token {shown(token)} must be at most {_FLOAT_MAX:.4g} (the largest "
                    f"32-bit float), or -inf, not {value if isinstance(value, float) else 'more'}"
                )
            if value < -_FLOAT_MAX:
                bias[token] = -math.inf  # it is below all 32-bit floats
        object.__setattr__(self, "logit_bias", bias)

    def replace(self, **changes: Unpack[SamplingSettings]) -> SamplingParams:
        """Return a copy with some settings changed.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        return replace(self, **changes)  # type: ignore[arg-type]

    def drawn_seed(self, otherwise: int | None = None) -> int:
        """Return the seed of a text: ``seed``, a random one for -1, and ``otherwise`` if none is set.

        Without ``otherwise``, that is random too.
        """
        from .noise import random_seed  # imports NumPy, which commands that look things up do not

        seed = otherwise if self.seed is None else self.seed
        return random_seed() if seed is None or seed == -1 else seed

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON types: a bias is a pair, with null for -inf.

        Raises:
            UnsupportedError: there is a ``logits_processor``, which cannot be written.
        """
        settings: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        if settings.pop("logits_processor") is not None:
            raise UnsupportedError(
                "a logits_processor is a function, which cannot be saved",
                hint="branch.resample(params.replace(logits_processor=None)) first; set it again after",
            )
        settings["logit_bias"] = [
            [token, None if value == -math.inf else value]
            for token, value in self.logit_bias.items()
        ]
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> SamplingParams:
        """Return the settings from the result of ``as_dict``; missing ones have their defaults.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        settings = instance("settings", settings, dict)
        check_names(settings)
        pairs, breakers = (settings.get(n, []) for n in ("logit_bias", "dry_sequence_breakers"))
        if not isinstance(pairs, list) or not isinstance(breakers, (list, tuple)):
            raise ConfigError("logit_bias and dry_sequence_breakers must be lists")
        try:
            bias = {token: -math.inf if added is None else added for token, added in pairs}
        except (TypeError, ValueError):
            raise ConfigError("the logit bias must consist of pairs of numbers") from None
        return cls(**cast(SamplingSettings, {**settings, "logit_bias": bias}))  # type: ignore[arg-type]

    @property
    def uses_history(self) -> bool:
        """True if penalties or DRY depend on the tokens so far."""
        return self.penalises or self.dry_multiplier > 0

    @property
    def penalises(self) -> bool:
        """True if tokens are penalised for having occurred."""
        return self.penalty_last_n != 0 and (
            self.repeat_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@functools.cache
def _ranges() -> list[tuple[str, bool, _Range]]:
    """Return each numeric setting's range, and whether it is an integer."""
    numbers = [f for f in fields(SamplingParams) if "range" in f.metadata]
    return [(f.name, type(f.default) is int, f.metadata["range"]) for f in numbers]


def checked_seed(seed: object) -> int | None:
    """Return a seed: an integer from 0 to 2^64 - 1, -1 for a random one, or None.

    Raises:
        ConfigError: it is something else.
    """
    integer = plain_int(seed)
    if seed is None or (integer is not None and -1 <= integer < 1 << 64):
        return integer
    raise ConfigError(
        f"seed must be an integer from 0 to 2^64 - 1, or -1 for a random one, not {shown(seed):.60}"
    )


def settings_of(sampling: SamplingParams | None, **changes: object) -> SamplingParams:
    """Return ``sampling``, or the defaults if it is None, with some settings changed.

    Raises:
        ConfigError: ``sampling`` has another type, or a name or a value is bad.
    """
    params = SamplingParams() if sampling is None else sampling
    params = instance("sampling", params, SamplingParams, "SamplingParams(temperature=0.8, ...)")
    return params.replace(**cast(SamplingSettings, changes)) if changes else params


def check_names(settings: Mapping[str, object], arguments: Collection[str] = ()) -> None:
    """Raise ConfigError for a name that is not a sampling setting; the hint says what may be meant.

    Args:
        settings: the settings by name.
        arguments: other arguments of the call.
    """
    known = sorted(field.name for field in fields(SamplingParams))
    unknown = sorted(map(str, set(settings) - set(known)))
    if not unknown:
        return
    name = unknown[0]
    here = _HERE.get(name, name)
    means = [] if here == name else [f"{here} here"]
    if here in _ARGUMENTS:
        means.append(f"an argument of {_ARGUMENTS[here]}")
    kind = "argument" if arguments else "sampling setting"
    hint = f"{name} is {', '.join(means)}" if means else _HINTS.get(name)
    names = [*(argument for argument in arguments if argument not in known), *known]
    listed = "arguments" if arguments else "settings"
    raise ConfigError(f"unknown {kind} {name!r}", hint=hint or nearest(name, names, listed))
