"""Toys with few tokens, and all their texts with probabilities, for exact tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import toys

import llamabranch as lb
from llamabranch import Branch, Context

PLAIN = lb.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3)
EOG = 1


@contextmanager
def toy_of_letters(
    folders: pytest.TempPathFactory, letters: str, n_ctx: int = 256, n_seq_max: int = 8
) -> Iterator[Context]:
    """Open a context of a random model with BOS (0, which has no text), EOG (1) and these letters."""
    path = folders.mktemp("few") / "few.gguf"
    vocabulary = toys.Vocabulary((toys.BOS, toys.EOS, *letters))
    with (
        lb.Model(toys.write_llama(path, vocab=vocabulary)) as model,
        Context(model, n_ctx=n_ctx, n_seq_max=n_seq_max, n_threads=1, exact=True) as context,
    ):
        yield context
        context.audit()


def every_text(
    root: Branch, n: int, settings: lb.SamplingParams | None = None
) -> dict[tuple[int, ...], float]:
    """Return the probability of all tokens that may follow: up to ``n``, or fewer that end with EOG.

    It comes from ``log_probs``, or with settings from the distribution of draws; the last digits differ.
    """
    by_text: dict[tuple[int, ...], float] = {}

    def visit(branch: Branch, tokens: tuple[int, ...], before: float) -> None:
        drawn = branch.distribution().dense(root.ctx.model.n_vocab)
        probs = np.exp(branch.log_probs()) if settings is None else drawn
        for token, p in enumerate(probs.tolist()):
            if p > 0.0:
                longer = (*tokens, token)
                by_text[longer] = before * p
                if token != EOG and len(longer) < n:
                    with branch.fork() as child:
                        child.commit(token)
                        visit(child, longer, by_text[longer])

    with root.fork() as branch:
        branch.resample(settings or PLAIN)
        visit(branch, (), 1.0)
    return by_text


def ended(
    root: Branch, n: int, settings: lb.SamplingParams | None = None
) -> dict[tuple[int, ...], float]:
    """Return the probability of each text of at most ``n`` tokens, EOG not counted but in the key."""
    every = every_text(root, n + 1, settings)
    return {tokens: p for tokens, p in every.items() if tokens[-1] == EOG}
