"""One token at a time, with a draft model or without: each call decides for itself.

`next_token(drafter)` runs a round when nothing is waiting and hands out its tokens one by one;
`next_token()` decodes plainly, which is also what happens where a drafter has nothing to propose.
"""

from collections.abc import Callable

import llamabranch as lb

PROMPT, MAX_TOKENS = "The old king had three sons.", 60
SAMPLING = lb.SamplingParams(temperature=0.8, seed=5)
Choice = Callable[[int], lb.Drafter | None]


def tell(target: lb.Context, choose: Choice) -> lb.InferenceSession:
    """Tell the tale; `choose` names the drafter, or None, for the n-th token."""
    config = lb.SpeculativeConfig(draft_k=4)
    with lb.InferenceSession(
        target, PROMPT, sampling=SAMPLING, config=config, max_tokens=MAX_TOKENS
    ) as session:
        while session.next_token(choose(len(session.tokens))) is not None:
            pass
    return session


def main() -> None:
    with lb.load("tale-target") as target, lb.load("tale-draft") as small:
        draft = lb.ModelDrafter(small)
        ways: dict[str, Choice] = {
            "standard": lambda n: None,
            "speculative": lambda n: draft,
            "only the second half": lambda n: draft if n >= MAX_TOKENS // 2 else None,
        }
        sessions = {name: tell(target, choose) for name, choose in ways.items()}
        print(PROMPT + sessions["standard"].text + "\n")
        print(f"{'way':22}{'tokens':>8}{'target decodes':>16}{'accepted':>10}  ended by")
        for name, session in sessions.items():
            stats = session.stats
            accepted = f"{stats.num_accepted_tokens}/{stats.num_draft_tokens}"
            print(
                f"{name:22}{len(session.tokens):8}{stats.target_forward_passes:16}"
                f"{accepted:>10}  {session.finish_reason}"
            )
        same = len({tuple(session.tokens) for session in sessions.values()}) == 1
        print(f"\nthe same tokens every time: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
