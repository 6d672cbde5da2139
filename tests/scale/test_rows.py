"""Rows as requests: control tokens in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import toys

import llamabranch as lb
from llamabranch.errors import ConfigError
from llamabranch.scale.rows import GenerateRows, Record, ScoreRows

TEXT = "a<|im_end|>b"


def test_control_tokens_are_parsed_unless_the_job_or_the_row_does_not(tmp_path: Path) -> None:
    vocabulary = toys.Vocabulary.with_control("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    template = {"tokenizer.chat_template": toys.CHAT_TEMPLATE}
    path = toys.write_toy(tmp_path / "toy.gguf", vocab=vocabulary, metadata=template)
    with lb.load(path, n_ctx=256, n_threads=1) as context:
        model = context.model

        def n_prompt(row: Record, **settings: bool) -> int:
            rows = GenerateRows(4, lb.SamplingParams(), **settings)  # type: ignore[arg-type]
            request = rows.request(context, row, "0")
            return len(model.prompt_tokens(request.prompt, parse_special=request.parse_special))

        parsed, letters = 4, 13  # with BOS
        for given, expected in ((None, parsed), (True, parsed), (False, letters)):
            row: Record = {"prompt": TEXT, "text": TEXT, "parse_special": given}
            assert n_prompt(row) == expected
            assert n_prompt(row, parse_special=False) == letters
            assert len(ScoreRows().request(context, row, "0").prompt) == expected
            both = ScoreRows().request(context, {**row, "context": TEXT}, "0")
            assert both.logprobs_from == expected
            assert len(both.prompt) == 2 * expected - 1
        with pytest.raises(ConfigError, match="parse_special"):
            n_prompt({"prompt": TEXT, "parse_special": 1})
        chat = GenerateRows(4, lb.SamplingParams(), chat=True)
        request = chat.request(context, {"prompt": TEXT}, "0")
        assert request.prompt == model.chat_tokens([("user", TEXT)])
        assert request.prompt[0] == model.bos
