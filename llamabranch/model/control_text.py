"""The texts of control tokens: find them in rendered conversations, and make them harmless in messages.

llama.cpp turns the text of a control token into that token, no matter who wrote it. So a message that
contains ``<|im_end|>`` could end its turn and begin another one in any role. Therefore, before a
template is rendered, we replace one character of each such text in a message by a stand-in, a character
that occurs nowhere else. This tells the template's own text from the texts that were passed to it,
wherever it puts them.

The template sees the stand-in too. So it does not act on a control token's text in a message, for
example to cut off a reasoning part. A control token that a template builds around a value, as in ``'<|'
+ role + '|>'``, counts as the template's own.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

from ..errors import ConfigError
from .text import n_common

Given = TypeVar("Given")
StandIns = Mapping[int, str]  # the original of each stand-in, for `str.translate`


class ControlText:
    """Finds the texts of a vocabulary's control tokens.

    Args:
        tokens: the control tokens by their texts: the id of each, and whether llama.cpp drops white
            space before and after it.
    """

    def __init__(self, tokens: Mapping[str, tuple[int, bool, bool]]) -> None:
        self._tokens = tokens
        self._ids = frozenset(token for token, _, _ in tokens.values())
        pattern = _one_of(sorted(tokens)) if tokens else "(?!)"
        self._exact = re.compile(pattern)
        # Templates can change the case. The look-ahead also finds overlapping texts.
        self._alike = re.compile(f"(?=({pattern}))", re.IGNORECASE)
        lower = [text.lower() for text in tokens]
        self._texts = sorted(lower)
        self._reversed = sorted(text[::-1] for text in lower)
        self._first = frozenset(text[0] for text in lower)
        self._last = frozenset(text[-1] for text in lower)
        self._longest = max(map(len, lower), default=0)

    # -- the input of a template -------------------------------------------------------------------

    def guard(self, value: Given, cuts: Iterable[str]) -> tuple[Given, StandIns]:
        """Return the value with no text that can become a control token, and the stand-ins in it.

        Args:
            value: an argument of the template.
            cuts: strings at which the template may cut texts, or that it may remove from them.

        Raises:
            ConfigError: the value is nested too deep.
        """
        chosen: dict[str, str] = {}
        removed = re.compile(
            "|".join([r"\s+", *map(re.escape, sorted(cuts, key=len, reverse=True))])
        )

        def guarded(value: object, key: str) -> object:
            if isinstance(value, str):
                if key != "content" and value.isidentifier():  # a role, a type, the name of a tool
                    return value
                characters = list(value)
                for i in self._places(value, removed):
                    characters[i] = stand_in(characters[i])
                return "".join(characters)
            if isinstance(value, Mapping):
                return {
                    guarded(name, ""): guarded(member, str(name)) for name, member in value.items()
                }
            if isinstance(value, (list, tuple)):
                return type(value)(guarded(item, key) for item in value)
            return value

        def stand_in(character: str) -> str:
            if character not in chosen:
                used = json.dumps([value, *cuts], ensure_ascii=False, skipkeys=True, default=_plain)
                private_use = map(chr, range(0xF0000, 0xFFFFE))
                free = (c for c in private_use if c not in used)
                chosen[character] = next(c for c in free if c not in chosen.values())
            return chosen[character]

        try:
            copy = cast(Given, guarded(value, ""))
        except RecursionError:
            raise ConfigError("messages, tools and variables are nested too deep") from None
        return copy, {ord(mark): character for character, mark in chosen.items()}

    def _places(self, text: str, removed: re.Pattern[str]) -> set[int]:
        """Return which characters to replace so that no control token contains a part of ``text``."""
        places = {match.start() for match in self._alike.finditer(text)}
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if start >= end:
            return places
        # The text next to it may complete a token that begins at its end, or ends at its beginning.
        for i in range(max(start, end - self._longest), end):
            if text[i].lower() in self._first and _has_prefix(self._texts, text[i:end].lower()):
                places.add(end - 1)
        for i in range(start, min(end, start + self._longest)):
            if text[i].lower() in self._last:
                tail = text[start : i + 1].lower()[::-1]
                if _has_prefix(self._reversed, tail):
                    places.add(start)
        # "<|im_<think>end|>" becomes one when <think> is removed.
        opens = [i for i, character in enumerate(text) if character.lower() in self._first]
        if opens:
            joined = removed.sub("", text)
            if len(self._alike.findall(joined)) > len(self._alike.findall(text)):
                places.update(opens)
        return places

    # -- the output of a template ------------------------------------------------------------------

    def tokenize(
        self, text: str, stand_ins: StandIns, tokenize: Callable[[str, bool], list[int]]
    ) -> list[int]:
        """Return the tokens of a rendered conversation.

        Args:
            text: the text with its stand-ins.
            stand_ins: their originals.
            tokenize: turns a text into tokens; the flag says whether to parse control tokens in it.
        """
        restored = text.translate(stand_ins)
        own = list(self._exact.finditer(text))
        if [match.span() for match in own] == [m.span() for m in self._exact.finditer(restored)]:
            return tokenize(restored, True)
        tokens: list[int] = []
        at, follows = 0, False
        # As in llama.cpp, text between control tokens is tokenized by itself.
        for match in (*own, None):
            piece = text[at : match.start() if match else None]
            token, before, after = self._tokens[match.group()] if match else (-1, False, False)
            piece = piece.lstrip(_SPACE) if follows else piece
            piece = piece.rstrip(_SPACE) if before else piece
            piece_tokens = tokenize(piece.translate(stand_ins), False) if piece else []
            if not self._ids.isdisjoint(piece_tokens):  # user-defined: parsed in any text
                parts = re.split(f"(?<=[{''.join(map(chr, stand_ins))}])", piece)
                piece_tokens = [
                    t for part in parts for t in tokenize(part.translate(stand_ins), False)
                ]
            tokens += piece_tokens
            if match:
                tokens.append(token)
                at, follows = match.end(), after
        return tokens


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else repr(value)


_SPACE = " \t\n\v\f\r"  # as C's isspace


def _has_prefix(ordered: Sequence[str], prefix: str) -> bool:
    """Return whether a text of a sorted list begins with ``prefix``."""
    at = bisect_left(ordered, prefix)
    return at < len(ordered) and ordered[at].startswith(prefix)


def _one_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches the longest of some sorted texts; common beginnings appear once."""
    first, last = texts[0], texts[-1]
    start = first[: n_common(first, last)]
    by_next: dict[str, list[str]] = {}
    for text in texts:
        if text != start:
            by_next.setdefault(text[len(start)], []).append(text[len(start) :])
    pattern = re.escape(start)
    if by_next:
        choice = "|".join(_one_of(rest) for rest in by_next.values())
        pattern += f"(?:{choice}){'?' if start in texts else ''}"
    return pattern
