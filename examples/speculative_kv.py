"""Speculative decoding on the raw K/V primitives: draft, fork, verify, accept, bonus, clean up.

Two models, greedy. The text is the target's own: the draft only decides how much of it one decode yields.
"""

import llamabranch as lb

PROMPT, MAX_TOKENS, DRAFT_LENGTH, MAX_ENTROPY = "The quick brown fox", 30, 5, 5.0
GREEDY = lb.SamplingParams(temperature=0.0)


def main() -> None:
    with lb.load("tale-target") as target, lb.load("tale-draft") as draft:
        output = target.tokenize(PROMPT)
        n_prompt = len(output)
        target.decode(output, 0)
        output.append(target.sample(GREEDY))  # said, but not decoded yet: the pending token
        iterations = drafted = accepted = 0

        while len(output) - n_prompt < MAX_TOKENS and not target.model.is_eog(output[-1]):
            # 1. DRAFT with the small model, after it has read what it missed; stop where it is unsure.
            draft.decode(output[draft.kv_cache_size(0) :], draft.kv_cache_size(0))
            guesses: list[int] = []
            while len(guesses) < DRAFT_LENGTH and draft.model_entropy("nats") < MAX_ENTROPY:
                guesses.append(draft.sample(GREEDY))
                draft.decode(guesses[-1:], draft.kv_cache_size(0))

            # 2. FORK the target's cache: a tag on its cells, no K/V is copied.
            target.kv_seq_copy(0, 1)

            # 3. VERIFY the pending token and all guesses in one decode.
            start = target.kv_cache_size(1)
            target.decode([output[-1], *guesses], start, seq_id=1, logits="all")
            verdicts = [int(target.logits(row).argmax()) for row in range(len(guesses) + 1)]

            # 4. ACCEPT while the target would have said the same; 5. BONUS: what it says next.
            n = 0
            while n < len(guesses) and guesses[n] == verdicts[n]:
                n += 1
            output += [*guesses[:n], verdicts[n]]

            # 6. CLEAN UP: cut what fell from both caches, and let the verified fork take over.
            target.kv_cache_remove(1, start + 1 + n)
            target.kv_seq_copy(1, 0)
            target.kv_cache_remove(1)
            draft.kv_cache_remove(0, min(draft.kv_cache_size(0), start + 1 + n))
            iterations, drafted, accepted = iterations + 1, drafted + len(guesses), accepted + n

        text = output[n_prompt : n_prompt + MAX_TOKENS]
        print(PROMPT + target.detokenize(text))
        print("=" * 50 + "\nStatistics\n" + "=" * 50)
        print(f"  Iterations: {iterations}\n  Tokens drafted: {drafted}")
        print(f"  Tokens accepted: {accepted}\n  Accept rate: {accepted / max(drafted, 1):.1%}")
        print(f"  Output tokens: {len(text)}")


if __name__ == "__main__":
    main()
