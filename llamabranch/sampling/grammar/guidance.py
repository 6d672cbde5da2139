"""The only module that uses llguidance: grammars in its form, one tokenizer per model, matchers.

It is imported when the first grammar is made. A failure inside it becomes a GrammarError.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import GrammarError
from ...native.handle import forkable_lock

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from ...model import Model

T = TypeVar("T")
Mask = npt.NDArray[np.uint32]

_SEPARATORS = {"single": (", ", ": "), "none": (",", ":"), "any": (",", ":")}
# Lexemes inside JSON strings, whose masks are computed once, when the tokenizer is made.
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]+']
_MOST_REASON = 300

_tokenizers: weakref.WeakKeyDictionary[Model, LLTokenizer] = weakref.WeakKeyDictionary()
_lock = forkable_lock()


def compiled(kind: str, source: str, whitespace: str = "any") -> str:
    """Return a grammar in llguidance's form, from a "lark" text, a "regex" or a "json_schema".

    Raises:
        GrammarError: llguidance refuses it.
    """
    from llguidance import LLMatcher

    item, key = _SEPARATORS[whitespace]
    options: JsonCompileOptions = {
        "whitespace_flexible": whitespace == "any", "item_separator": item, "key_separator": key,
        "json_allow_general_unicode_escapes": True,
    }  # fmt: skip
    of_kind: dict[str, Callable[[], str]] = {
        "lark": lambda: LLMatcher.grammar_from_lark(source),
        "regex": lambda: LLMatcher.grammar_from_regex(source),
        "json_schema": lambda: LLMatcher.grammar_from_json_schema(source, overrides=options),
    }
    grammar = _guarded(of_kind[kind])
    reason = _guarded(lambda: LLMatcher.validate_grammar(grammar))
    if reason:
        raise _refusal(reason, "pattern: " if kind == "json_schema" else "")
    return grammar


def _guarded(call: Callable[[], T]) -> T:
    try:
        return call()
    except ValueError as error:
        raise _refusal(str(error)) from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # from Rust; it is not an Exception
            raise _refusal(f"llguidance failed: {error}") from None
        raise


def _refusal(reason: str, keyword: str = "") -> GrammarError:
    text = reason.split("\n<state>")[0].strip()
    if match := re.search(
        r"regex parse error:.*\nerror: ([^\n]*)(?:\n +(\d+) \|)?", text, re.DOTALL
    ):
        line = f", in line {match[2]}" if match[2] not in (None, "1") else ""
        text = f"{keyword}{match[1]}{line}"
    if len(text) > _MOST_REASON:
        text = text[: _MOST_REASON - 3] + "..."
    if text.startswith("NoExtension"):
        text = "no text satisfies it"
    return GrammarError(f"the grammar is refused: {text}")


def _tokenizer(model: Model) -> LLTokenizer:
    from llguidance import LLTokenizer

    with _lock:
        tokenizer = _tokenizers.get(model)
        if tokenizer is None:
            handle = model.handle
            tokenizer = _guarded(
                lambda: LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
                    tokens=handle.pieces(),
                    vocab_ptr=handle.vocab_address,
                    tokenize_fptr=handle.tokenize_address,
                    eos_token=list(model.eog_tokens),
                    slices=_SLICES,
                )
            )
            _tokenizers[model] = tokenizer
        return tokenizer


class Matcher:
    """The state of a grammar after the tokens accepted so far.

    Args:
        model: the model whose tokens it matches.
        grammar: a result of ``compiled``.

    Raises:
        GrammarError: the grammar names a token that the vocabulary lacks, or no text satisfies it.
    """

    def __init__(self, model: Model, grammar: str) -> None:
        from llguidance import LLMatcher

        tokenizer = _tokenizer(model)
        self._model = model
        self._mask: Mask | None = None
        self._is_ended = False  # by an EOG token
        self._matcher: LLMatcher = _guarded(lambda: LLMatcher(tokenizer, grammar, log_level=0))
        self._check()
        if not self.mask().any():
            raise _refusal("no text satisfies it")

    def mask(self) -> Mask:
        """Return which tokens may come next, one bit each, uint32 ((V + 31) // 32,); do not modify it.

        EOG tokens are allowed only where the text may end. If the next text is forced, only the first
        token that the tokenizer would use for it is allowed.

        Raises:
            GrammarError: the grammar is too complex at this position.
        """
        self._model.handle  # noqa: B018  (raises ClosedError: the tokenizer needs the model)
        if self._mask is None:
            mask = np.zeros((self._model.n_vocab + 31) // 32, dtype=np.uint32)
            if not self._is_ended:
                address, size = mask.ctypes.data, mask.nbytes
                _guarded(lambda: self._matcher.unsafe_compute_mask_ptr(address, size))
                self._check()
            self._mask = mask
        return self._mask

    def allows(self, token: int) -> bool:
        """Return whether ``token`` may come next, even if the tokenizer would not choose it."""
        if self._is_ended:
            return False
        if self._model.is_eog(token):
            return self._matcher.is_accepting()
        return not self._matcher.is_stopped() and self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Advance by a token that is allowed."""
        self._mask = None
        if self._model.is_eog(token):
            self._is_ended = True
            return
        _guarded(lambda: self._matcher.consume_token(token))
        self._check()

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next; [] if nothing is forced."""
        if self._is_ended or self._matcher.is_stopped():
            return []
        self._model.handle  # noqa: B018  (raises ClosedError: the tokenizer needs the model)
        tokens = _guarded(self._matcher.compute_ff_tokens)
        self._check()
        return tokens

    def clone(self) -> Matcher:
        """Return an independent copy with the same state."""
        clone = object.__new__(Matcher)
        clone.__dict__.update(self.__dict__)
        clone._matcher = self._matcher.deep_copy()
        return clone

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())


class LinePattern:
    """A regular expression that is searched for in single lines, in linear time.

    ``^`` and ``$`` are allowed at its ends. Any thread may use it.

    Raises:
        GrammarError: the expression is invalid, or it matches an empty line.
    """

    def __init__(self, source: str) -> None:
        from llguidance import LLMatcher, LLTokenizer

        head, tail = ("" if source[:1] == "^" else ".*"), ("" if source[-1:] == "$" else ".*")
        inner = source.removeprefix("^").removesuffix("$")
        try:
            grammar = compiled("regex", f"{head}(?:{inner}){tail}")
        except GrammarError as error:
            reason = str(error).partition("refused: ")[2]
            if "lookarounds" in reason:  # what llguidance calls them, with the whole expression
                reason = r"^, $ and \b inside are not supported"
            raise GrammarError(f"{source[:100]!r} is refused: {reason}") from error
        self._matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        if self.matches(""):
            raise GrammarError(f"{source!r} matches lines without a text")

    def matches(self, line: str) -> bool:
        """Return whether a line contains a match."""
        matcher, given = self._matcher.deep_copy(), line.encode("utf-8", "replace")
        n = matcher.try_consume_tokens(list(given))
        return n == len(given) and matcher.is_accepting()
