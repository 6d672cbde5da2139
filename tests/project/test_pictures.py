"""What a drawn tree consists of."""

from __future__ import annotations

import math

import pytest

from llamabranch.pictures import Token, TreeLine, visible


def test_a_line_has_the_text_of_its_tokens_and_the_probability_of_the_first() -> None:
    line = TreeLine([Token("a", math.log(0.25)), Token("b", -9.0)])
    assert line.text == "ab"
    assert line.probability == pytest.approx(0.25)
    assert TreeLine([Token("a", 1e-9)]).probability == 1.0  # rounding may exceed 0
    assert math.isnan(TreeLine([Token("a prompt")]).probability)
    assert math.isnan(TreeLine([]).probability)


def test_characters_that_cannot_be_seen_are_written_as_their_code() -> None:
    assert visible("caf\u00e9 \u202eabc\x00") == "caf\u00e9 \\u202eabc\\u0000"
