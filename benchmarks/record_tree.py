"""Draw docs/tree.svg, the first picture in the README: eight forks of a prompt that SmolLM2 continues.

python -m benchmarks.record_tree [MODEL]
"""

from __future__ import annotations

import sys

import llamabranch as lb
from llamabranch.cli.trees import LEGEND, drawn_tree, tree_of
from llamabranch.pictures import Token, TreeLine

from .record_demo import PICTURE, recorder, save

PROMPT = "The best thing about the sea is"
N_FORKS, N_TOKENS, SEED = 8, 16, 3
COLUMNS = 92


def main() -> None:
    """Fork, generate, draw."""
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m:Q8_0"
    with (
        lb.load(name, n_seq_max=N_FORKS + 1) as ctx,
        lb.Branch.start(ctx, PROMPT, temperature=0.8, seed=SEED) as root,
    ):
        forks = root.fork_many(N_FORKS)
        texts = [list(fork.generate(N_TOKENS, stop=[".", "\n"])) for fork in forks]
        n_prompt = root.position
    console = recorder(COLUMNS)
    console.print(drawn_tree(TreeLine([Token(PROMPT)], children=tree_of(texts)), longest=200))
    console.print(
        f"\n{N_FORKS} forks: the {n_prompt} tokens of the prompt are read once, no K/V is copied. "
        + LEGEND,
        style="dim",
        highlight=False,
    )
    save(
        console, "llamabranch: eight forks of a prompt, SmolLM2-135M", PICTURE.with_name("tree.svg")
    )


if __name__ == "__main__":
    main()
