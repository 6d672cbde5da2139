"""The time of a plain step: the part of llama.cpp and the part of this library."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import llamabranch as lb
from llamabranch.bench import DecodeClock, Spread

__all__ = ["StepCost", "step_cost"]


@dataclass(frozen=True)
class StepCost:
    """Seconds of the parts of a plain step: medians over the steps of a branch."""

    decode: Spread  # inside llama_decode
    produce: Spread  # from the logits to the token and its text
    commit: Spread  # appending it to the branch, without the decode

    @property
    def ours(self) -> float:
        """Seconds of this library, outside ``llama_decode``."""
        return self.produce.median + self.commit.median

    @property
    def share(self) -> float:
        """Share of this library in the whole step."""
        return self.ours / (self.ours + self.decode.median)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "decode_s": self.decode.as_dict(),
            "produce_s": self.produce.as_dict(),
            "commit_s": self.commit.as_dict(),
            "share": self.share,
        }


def step_cost(branch: lb.Branch, n: int, warm_up: int = 4) -> StepCost:
    """Time ``n`` steps of ``branch`` after ``warm_up`` untimed ones; EOG tokens do not end it."""
    decodes, produces, commits = [], [], []
    with DecodeClock(branch.ctx) as clock:
        for i in range(warm_up + n):
            inside = clock.seconds
            start = perf_counter()
            token = branch.produce().token
            produced = perf_counter()
            branch.commit(token)
            end = perf_counter()
            inside = clock.seconds - inside
            if i >= warm_up:
                decodes.append(inside)
                produces.append(produced - start)
                commits.append(end - produced - inside)
    return StepCost(Spread.of(decodes), Spread.of(produces), Spread.of(commits))
