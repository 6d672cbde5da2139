"""A drafter with a state for each text: it draws one of the tokens that have followed the last token."""

import copy
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

import llamabranch as lb
from llamabranch.speculative import Draft, DraftLength, Text


class Followers(lb.Drafter):  # the drafter, and the state of each text
    name = "followers"

    def __init__(self, seed: int = 0, rule: str = "") -> None:
        self.seed, self.rule, self.noise = seed, rule, np.random.default_rng(seed)
        self.seen, self.after = [-1], defaultdict[int, list[int]](list)

    def check(self, target: lb.Model) -> None: ...  # any target: these are tokens of its own text
    def close(self) -> None: ...  # it holds no sequence

    def start(self, target: Text, rule: str) -> "Followers":
        return Followers(target.seed, rule)

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        for token in tokens[len(self.seen) - 1 :]:  # what is new since the last call
            self.after[self.seen[-1]].append(token)
            self.seen.append(token)
        # Under "seeded" both use the same noise and often draw the same token; else it is independent.
        seed = self.seed if self.rule == "seeded" else int(self.noise.integers(1 << 62))
        draft, last = Draft(drafter="followers"), tokens[-1]
        while len(draft.tokens) < limit and self.after[last]:
            counts = np.bincount(self.after[last]).astype(np.float64)
            draft.sources.append(lb.Distribution.from_probs(counts))
            draft.tokens += [last := draft.sources[-1].draw(seed, len(tokens) + len(draft.tokens))]
        return draft

    def observe(self, n_tokens: int) -> None:
        while len(self.seen) > n_tokens + 1:  # after a rewind
            del self.seen[-1]
            self.after[self.seen[-1]].pop()

    def fork(self, target: Text) -> "Followers":
        other = copy.deepcopy(self)
        other.seed = target.seed
        return other


def main() -> None:
    with lb.load() as ctx, lb.Branch.start(ctx, "The king had", temperature=0.7, seed=1) as root:
        speculator = lb.Speculator(ctx, Followers(), lb.SpeculativeConfig(draft_k=3))
        print(speculator.generate(root, max_tokens=60).finish().text)
        child, plain = root.fork(), root.fork().generate_text(60)  # a state is forked with its text
        print(f"as plain: {speculator.generate(child, max_tokens=60).finish().text == plain}")
        print(f"accepted: {speculator.stats.num_accepted_tokens}")


if __name__ == "__main__":
    main()
