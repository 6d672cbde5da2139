"""Self-consistency: many sampled texts, one answer each, and the majority decides."""

import re

import llamabranch as lb
from llamabranch import search

PROMPT = "In the middle of the forest there lived an old"


def first_word(text: str) -> str | None:
    """Return the first word of ``text``."""
    match = re.search(r"\w+", text)
    return match[0] if match else None


def main() -> None:
    with lb.load(n_seq_max=17, n_ctx=4096) as ctx:
        with lb.Branch.start(ctx, PROMPT, temperature=0.9, seed=3) as branch:
            for confidence in (None, 1.0):
                result = search.vote(branch, first_word, 32, 12, confidence=confidence, stop=["."])
                ranked = ", ".join(f"{answer} {n}" for answer, n in list(result.votes.items())[:6])
                stats = result.stats
                heard = [h for h in result.hypotheses if h.finish_reason != "decided"]
                print(f"confidence {confidence}: {len(heard)} texts")
                print(f"  votes: {ranked}")
                print(f"  {stats.target_forward_passes} decodes, {stats.generated} tokens")
        print(f"the text of the winner: {PROMPT}{result.text}")


if __name__ == "__main__":
    main()
