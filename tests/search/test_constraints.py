"""Constraints as functions: words, lines, the check, and the exact weight of a draw."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rounding import gumbel_noise

from llamabranch import Distribution, search
from llamabranch.errors import ConfigError
from llamabranch.search.constraints import weighted_draw

ANSWERS = itertools.cycle([True, False])


def short(word: str) -> bool:
    return len(word) <= 4


def test_words_are_asked_about_when_they_have_ended() -> None:
    rule = search.words(short)
    for text, may_go_on, is_valid in (
        ("", True, True),
        ("one two", True, True),
        ("one tremendous", True, False),
        ("one tremendous ", False, False),
        ("tremendous one", False, False),
        (" one\ttwo ", True, True),
    ):
        assert (rule.prefix(text), rule.complete(text)) == (may_go_on, is_valid)
    eager = search.words(short, partial=short)
    assert not eager.prefix("one tremendous") and eager.prefix("one trem")
    short.partial = short  # type: ignore[attr-defined]
    try:
        assert not search.words(short).prefix("one tremendous")
    finally:
        del short.partial  # type: ignore[attr-defined]


def test_lines_are_asked_about_when_they_have_ended() -> None:
    rule = search.lines(lambda line: line.endswith("."))
    assert rule.prefix("One.\nTw") and not rule.complete("One.\nTw")
    assert rule.complete("One.\nTwo.") and rule.complete("One.\n")
    assert not rule.prefix("One\n") and not rule.prefix("One.\n\nTwo.")


def test_the_check_accepts_what_is_right() -> None:
    search.check_constraint(search.words(short), ["one two", "", "a b c "])
    search.check_constraint(lambda text: "e" not in text, ["Without it", "也 ok"])


def dictionary(text: str) -> bool:
    """The usual mistake: the last word may not be complete yet."""
    return all(word in ("one", "two") for word in text.split())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (dictionary, "'o', which begins a valid text"),
        (search.words(lambda word: word == "one"), "is a valid text"),
        (itertools.cycle([True, False]).__next__, "raised TypeError"),
        (lambda text: next(ANSWERS), "then False"),
        (lambda text: 1, "must return True or False"),
        (5, "cannot be 5"),
    ],
    ids=["whole words", "incomplete", "raises", "impure", "no bool", "no function"],
)
def test_the_check_finds_what_is_wrong(rule: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        search.check_constraint(rule, ["one two"])
    assert raised.value.hint


@pytest.mark.parametrize("wrong", [None, 5, "short"])
def test_lifts_need_functions(wrong: Any) -> None:
    for lift in (search.words, search.lines):
        with pytest.raises(ConfigError):
            lift(wrong)
        if wrong is not None:
            with pytest.raises(ConfigError):
                lift(short, partial=wrong)


def orders(probs: list[float]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield every order of a draw without replacement, with its probability."""
    for order in itertools.permutations(range(len(probs))):
        p, left = 1.0, 1.0
        for i in order:
            p *= probs[i] / left
            left -= probs[i]
            if left < 1e-12:
                break
        yield p, order


@pytest.mark.parametrize("max_rejects", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("allowed", [{0}, {1, 3}, {4}, {0, 1, 2, 3, 4}, set(), {2, 4}])
def test_the_weight_of_a_draw_is_unbiased(max_rejects: int, allowed: set[int]) -> None:
    probs = [0.4, 0.3, 0.15, 0.1, 0.05]
    source = Distribution.from_probs(np.array(probs))
    total, mass = 0.0, np.zeros(5)
    for p, order in orders(probs):
        n_calls = 0

        def allows(token: int) -> bool:
            nonlocal n_calls
            n_calls += 1
            return token in allowed

        token, log_weight = weighted_draw(source, iter(order), allows, max_rejects)
        total += p
        if token is not None:
            mass[token] += p * math.exp(log_weight)
            n_refused = next(i for i, token in enumerate(order) if token in allowed)
            assert token == order[n_refused] and n_calls <= n_refused + 2
        assert n_calls <= max_rejects + 1
    assert total == pytest.approx(1.0, abs=1e-12)
    expected = [p if i in allowed else 0.0 for i, p in enumerate(probs)]
    np.testing.assert_allclose(mass, expected, atol=1e-12)


def test_a_rest_of_little_mass_keeps_its_digits() -> None:
    logprobs = np.array([-1e-9, -21.0, -22.0, -30.0])
    source = Distribution(np.arange(4, dtype=np.int32), logprobs - np.logaddexp.reduce(logprobs))
    token, log_weight = weighted_draw(source, iter([0, 1, 2, 3]), lambda token: token == 3)
    rest = np.exp(logprobs)
    expected = rest[3] / rest.sum()
    assert token == 3 and math.exp(log_weight) == pytest.approx(expected, rel=1e-9)


def test_an_order_begins_with_the_draw_and_follows_the_noise() -> None:
    rng = np.random.default_rng(3)
    for n in (1, 2, 63, 64, 65, 300):
        source = Distribution.from_logits(rng.normal(size=n) * 2)
        for position in range(5):
            order = list(source.order(7, position))
            assert sorted(order) == list(range(n))
            assert int(source.ids[order[0]]) == source.draw(7, position)
            keys = source.logprobs + gumbel_noise(7, position, source.ids)
            assert (np.diff(keys[order]) <= 1e-12).all()
