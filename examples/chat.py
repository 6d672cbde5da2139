"""A conversation of ten turns: with a prefix cache, each turn reads only what is new.

Every turn's prompt is the whole conversation so far. Its K/V is still there from the turns before, so
only the new line is read; the texts are the same as without the cache.
"""

import llamabranch as lb

OPENING = "Once upon a time there was a king who had a clever daughter."
LINES = [f"On day {day}, the {who} asked:" for day in range(1, 6) for who in ("king", "fox")]


def converse(target: lb.Context) -> tuple[str, int, int]:
    """Return the conversation, the tokens of all prompts, and how many of them were read."""
    engine = lb.Engine(target, max_tokens=24, seed=7)
    history = target.tokenize(OPENING)
    n_prompt = 0
    for line in LINES:
        history += target.tokenize(f"\n{line}", add_special=False)
        engine.add_request(lb.Request(history, id=line))
        while engine.has_unfinished():
            for event in engine.step():
                if event.result is not None:
                    history += event.result.tokens
                    n_prompt += event.result.num_prompt_tokens
    return target.detokenize(history), n_prompt, engine.stats.prompt_tokens


def main() -> None:
    with lb.load("tale-target", prefix_cache=True) as target:
        text, n_prompt, n_read = converse(target)
    with lb.load("tale-target") as target:
        text_without, _, n_read_without = converse(target)
    print(text)
    print(f"  Tokens of all prompts: {n_prompt}")
    print(f"  Read with the prefix cache: {n_read}")
    print(f"  Read without it: {n_read_without}")
    print(f"  Same conversation: {text == text_without}")


if __name__ == "__main__":
    main()
