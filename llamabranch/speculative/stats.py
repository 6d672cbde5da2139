"""What happened in a speculative generation, under vLLM's names and a few of ours."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

__all__ = ["SpeculativeStats"]


@dataclass
class SpeculativeStats:
    """Counts and times of one generation, or of many added up.

    ``num_drafts`` counts the rounds with a draft, ``num_draft_tokens`` what they proposed,
    ``num_accepted_tokens`` what of it stood (the bonus or corrected token after it not counted),
    ``num_accepted_tokens_per_pos[i]`` how often the (i+1)-th token of a draft stood. Times in seconds.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_emitted_tokens: int = 0
    num_plain_steps: int = 0
    target_forward_passes: int = 0
    draft_forward_passes: int = 0
    draft_time_s: float = 0.0
    verify_time_s: float = 0.0
    sample_time_s: float = 0.0
    plain_time_s: float = 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted; nan if nothing was drafted."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round: 1 + accepted / rounds; nan if there was no draft."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    def record_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Count one verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += n_drafted
        self.num_accepted_tokens += n_accepted
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (n_drafted - len(per_pos)))
        for i in range(n_accepted):
            per_pos[i] += 1

    def add(self, other: SpeculativeStats) -> None:
        """Add another generation's counts and times to these."""
        for f in dataclasses.fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(mine, list):
                width = max(len(mine), len(theirs))
                padded = [x + [0] * (width - len(x)) for x in (mine, theirs)]
                setattr(self, f.name, [a + b for a, b in zip(*padded, strict=True)])
            else:
                setattr(self, f.name, mine + theirs)

    def as_dict(self) -> dict[str, float | int | list[int] | None]:
        """Return everything, ready for JSON: rates that do not exist are None."""
        known: dict[str, float | int | list[int] | None] = dataclasses.asdict(self)
        for name in ("draft_acceptance_rate", "mean_acceptance_length"):
            value = getattr(self, name)
            known[name] = None if value != value else value
        return known


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
