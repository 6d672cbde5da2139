"""One token at a time: each call chooses whether to use a draft model.

`next_token(drafter)` runs a speculative round if no token of the last round is left, and returns the
tokens one by one; `next_token()` uses plain decoding, which also happens if the drafter proposes nothing.
"""

from collections.abc import Callable

import llamabranch as lb

PROMPT, MAX_TOKENS = "The old king had three sons.", 60
SAMPLING = lb.SamplingParams(temperature=0.8, seed=5)
Choice = Callable[[int], lb.Drafter | None]


def generate(target: lb.Context, choose: Choice) -> lb.InferenceSession:
    """Continue PROMPT; `choose` returns the drafter for the n-th token, or None."""
    config = lb.SpeculativeConfig(draft_k=4)
    with lb.InferenceSession(
        target, PROMPT, sampling=SAMPLING, config=config, max_tokens=MAX_TOKENS
    ) as session:
        while session.next_token(choose(len(session.tokens))) is not None:
            pass
    return session


def main() -> None:
    with lb.load("tale-target", exact=True) as target, lb.load("tale-draft") as small:
        draft = lb.ModelDrafter(small)
        ways: dict[str, Choice] = {
            "standard": lambda n: None,
            "speculative": lambda n: draft,
            "only the second half": lambda n: draft if n >= MAX_TOKENS // 2 else None,
        }
        sessions = {name: generate(target, choose) for name, choose in ways.items()}
        print(PROMPT + sessions["standard"].text + "\n")
        print(f"{'way':22}{'tokens':>8}{'target decodes':>16}{'accepted':>10}  ended by")
        for name, session in sessions.items():
            stats = session.stats
            accepted = f"{stats.num_accepted_tokens}/{stats.num_draft_tokens}"
            print(
                f"{name:22}{len(session.tokens):8}{stats.num_rounds:16}"
                f"{accepted:>10}  {session.finish_reason}"
            )
        same = len({tuple(session.tokens) for session in sessions.values()}) == 1
        print(f"\nthe same tokens every time: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
