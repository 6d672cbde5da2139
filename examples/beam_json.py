"""The most probable JSON record that follows a schema: beam search under a grammar, against greedy."""

import json
import math

import llamabranch as lb
from llamabranch import search

SCHEMA = {
    "type": "object",
    "properties": {
        "hero": {"enum": ["king", "fairy", "wolf", "youngest son"]},
        "place": {"enum": ["forest", "castle", "village"]},
        "is_happy": {"type": "boolean"},
    },
    "required": ["hero", "place", "is_happy"],
}
PROMPT = "The youngest son went through the forest to the castle. As a record: "


def main() -> None:
    with lb.load(n_seq_max=16) as ctx:
        grammar = lb.Grammar.from_json_schema(SCHEMA)
        with lb.Branch.start(ctx, PROMPT, grammar=grammar, temperature=0.0) as branch:
            for beams in (1, 8):
                result = search.beam_search(branch, beams, 60, length_penalty=0.0)
                print(f"{beams} beams, {result.stats.target_forward_passes} decodes:")
                for hypothesis in result.hypotheses[:3]:
                    print(f"  {hypothesis.logprob:8.2f} nats  {json.loads(hypothesis.text)}")
        best = math.exp(result.best.logprob - result.hypotheses[-1].logprob)
        print(f"The best of the last search is {best:.0f} times as probable as its worst.")


if __name__ == "__main__":
    main()
