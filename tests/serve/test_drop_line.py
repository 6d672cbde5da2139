"""``--drop-line``: a line that changes with each request is left out, and costs nothing."""

from __future__ import annotations

import re
import time

import pytest
from serving import post, serving

from llamabranch.errors import ConfigError, GrammarError
from llamabranch.sampling.grammar import LinePattern
from llamabranch.serve import ServeSettings

TALE = "Once upon a time there was a king who had a daughter, and she was as fair as the day."


def test_a_changing_line_is_left_out_at_every_door() -> None:
    """The prompt is the same as without the line; the record has the line."""
    drop = ("^x-billing: ", "cch=[0-9a-f]+$")
    with serving({"exact": False}, drop_lines=drop) as server, server.client() as api:
        user = [{"role": "user", "content": "x-billing: this is not the system's"}]
        common = {"max_tokens": 1, "temperature": 0}
        for i, line in enumerate(("x-billing: 1\n", "x-billing: 22\n", "a cch=65abc\r\n", "")):
            system = {"role": "system", "content": f"{line}{TALE}"}
            asked = [system, *user]
            usage = post(api, 200, "/v1/chat/completions", messages=asked, **common)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == (usage["prompt_tokens"] - 1 if i else 0)
            body = {"system": system["content"], "messages": user}
            usage = post(api, 200, "/v1/messages", **body, **common)["usage"]
            assert usage["input_tokens"] == 1
            n = post(api, 200, "/v1/messages/count_tokens", **body)["input_tokens"]
            assert n == 1 + usage["cache_read_input_tokens"]
            for record in server.ctx.requests[-2:]:
                assert record.dropped == ([line.strip()] if line else [])
                assert record.reread == 0


def test_expressions_that_are_invalid_or_match_everything_are_refused() -> None:
    for source in (".*", "", "^", "$", "^$", "a?", "(", "["):
        with pytest.raises((GrammarError, ConfigError), match="drop_lines"):
            ServeSettings(drop_lines=(source,))
    for source, reason in (
        ("a(", "'a(' is refused: unclosed group"),
        ("*a", "missing expression"),
        ("a|^b", "inside are not"),
    ):
        with pytest.raises(GrammarError, match=re.escape(reason)) as caught:
            ServeSettings(drop_lines=(source,))
        assert "\n" not in str(caught.value)


def test_an_expression_is_searched_in_linear_time() -> None:
    """Python's own ``re`` needs longer than the age of the universe for these."""
    start = time.process_time()
    for source, line in (("^(a+)+$", "a" * 5000 + "b"), ("(a|a)*b$", "a" * 5000)):
        assert not LinePattern(source).matches(line)
    assert LinePattern("é.*\\.").matches("café noir.") and LinePattern("^é").matches("é")
    assert not LinePattern("^b").matches("ab") and not LinePattern("a$").matches("ab")
    assert LinePattern("b").matches("abc") and LinePattern("a").matches("a\udcff")
    assert time.process_time() - start < 60
