"""Where two texts part that should be the same, and how close a call it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..branch import Branch
from ..context import Context
from ..distribution import gumbel_noise
from ..model import token_list
from ..sampling import SamplingParams

__all__ = ["Divergence", "first_divergence"]


@dataclass(frozen=True)
class Divergence:
    """The first token in which two continuations of a prompt differ.

    ``position`` counts from the first generated token. ``gap`` is by how much the first of the two tokens
    won when the prefix was decoded in one piece, in the units that decide: logits at temperature 0,
    else log-probability plus noise, nats. Where logits depend on the batch, a near-tie flips: a gap
    far above the size of such differences (0.01 to 1, by weights and K/V type) is a bug instead.
    """

    position: int
    tokens: tuple[int | None, int | None]
    gap: float

    def __str__(self) -> str:
        return f"first difference at token {self.position}: {self.tokens}, top-2 gap {self.gap:.3g}"


def first_divergence(
    ctx: Context,
    prompt: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
    sampling: SamplingParams,
    seed: int = 0,
) -> Divergence | None:
    """Return where ``left`` and ``right``, both said after ``prompt``, differ; None if nowhere.

    Decodes the common prefix once, on a branch of its own.

    Raises:
        CapacityError: no sequence or no cells for that. TokenizeError: no token ids.
    """
    prompt, left, right = token_list(prompt), token_list(left), token_list(right)
    same = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    if same == max(len(left), len(right)):
        return None
    tokens = tuple(line[same] if same < len(line) else None for line in (left, right))
    with Branch.start(ctx, [*prompt, *left[:same]], sampling=sampling, seed=seed) as branch:
        if sampling.temperature == 0.0:
            with ctx.lock:  # the row is valid until anybody else decodes
                (_, first), (_, second) = branch.next_row().top(2)
            gap = first - second
        else:
            choices = branch.distribution()
            keys = choices.logprobs + gumbel_noise(seed, branch.position, choices.ids)
            ordered = sorted(keys.tolist(), reverse=True)
            gap = ordered[0] - ordered[1] if len(ordered) > 1 else float("inf")
    return Divergence(same, (tokens[0], tokens[1]), gap)
