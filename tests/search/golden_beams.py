"""Write golden_beams.json: what transformers' beam search finds over fixed tables of logits.

    python tests/search/golden_beams.py

This needs torch and transformers; the tests do not. The tables come from a formula that the tests use,
too.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

N_VOCAB = 40
PROMPT = 3  # the only token of the prompt
# Unusual cases that show when a search may end: with "never" and penalties above 0.
TELLING = (3, 125)
PATH = Path(__file__).with_name("golden_beams.json")


def logits(seed: int, n_tokens: int, last: int, eog: list[int]) -> list[float]:
    """Return the logits after ``n_tokens`` generated tokens of which ``last`` is the last one."""
    row = []
    for token in range(N_VOCAB):
        x = (seed * 1_000_003 + n_tokens * 8191 + last * 131 + token + 1) * 2_654_435_761 % 2**32
        x = (x ^ (x >> 15)) * 2_246_822_519 % 2**32
        x = (x ^ (x >> 13)) * 3_266_489_917 % 2**32
        row.append((x >> 8) / 2**24 * 6 - 3 + (1.5 if token in eog else 0.0))
    return row


def cases() -> list[dict[str, Any]]:
    """Return the settings of all cases."""
    grid = itertools.product(
        [2, 3, 4, 8],
        [-1.0, 0.0, 0.5, 1.0, 2.0],
        [False, True, "never"],
        [[], [1], [1, 2], [0, 5, 7]],
        [1, 3, 6, 12],
    )
    names = ("beams", "length_penalty", "early_stopping", "eog", "max_tokens")
    return [
        {"seed": seed, **dict(zip(names, chosen, strict=True))}
        for seed, chosen in enumerate(random.Random(7).sample(list(grid), 160))
        if seed % 2 == 0 or seed in TELLING
    ]


def main() -> None:
    """Run transformers on every case and write what it finds."""
    import torch
    import transformers
    from transformers.modeling_outputs import CausalLMOutput

    class Table(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
        config_class = transformers.PretrainedConfig
        seed: int = 0
        eog: list[int] = []  # noqa: RUF012  (replaced for each case)

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig(vocab_size=N_VOCAB))
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
            rows = [
                logits(self.seed, len(row) - 1, row[-1], self.eog) for row in input_ids.tolist()
            ]
            return CausalLMOutput(logits=torch.tensor(rows)[:, None, :])

        def prepare_inputs_for_generation(
            self, input_ids: torch.Tensor, **_: object
        ) -> dict[str, torch.Tensor]:
            return {"input_ids": input_ids}

    model = Table().eval()
    golden = []
    for case in cases():
        model.seed, model.eog = case["seed"], case["eog"]
        output = model.generate(
            torch.tensor([[PROMPT]]),
            num_beams=case["beams"],
            num_return_sequences=case["beams"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            max_new_tokens=case["max_tokens"],
            eos_token_id=case["eog"] or None,
            pad_token_id=N_VOCAB - 1,
            do_sample=False,
            use_cache=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
        texts = [row[1 : 1 + n] for row, n in zip(output.sequences.tolist(), lengths, strict=True)]
        scores = [round(score, 5) for score in output.sequences_scores.tolist()]
        golden.append({**case, "texts": texts, "scores": scores})
    lines = ",\n".join(json.dumps(case) for case in golden)
    PATH.write_text(
        f'{{"transformers": "{transformers.__version__}", "cases": [\n{lines}\n]}}\n', "utf-8"
    )


if __name__ == "__main__":
    main()
