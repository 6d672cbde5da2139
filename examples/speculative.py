"""Speculative decoding with the Branch API: fork, draft, prune, verify, accept, bonus.

The draft model has a branch of its own with the same tokens. Both use one seed, so the text is exactly
that of plain decoding with this seed. `llamabranch.Speculator` is a fast version of this loop.
"""

import llamabranch as lb

PROMPT, MAX_TOKENS, DRAFT_LENGTH, MAX_ENTROPY, SEED = "The quick brown fox", 30, 4, 5.0, 7


def main() -> None:
    with lb.load("tale-target") as target, lb.load("tale-draft") as small:
        # 1. MAIN holds the accepted tokens; the helper holds the same tokens in the draft model.
        settings = lb.SamplingParams(temperature=0.8, seed=SEED)
        main_branch = lb.Branch.start(target, PROMPT, sampling=settings)
        helper = lb.Branch.start(small, PROMPT, sampling=settings)
        sampler = lb.sampling.Sampler(target.model, settings)
        n_prompt, iterations, drafted, accepted = main_branch.position, 0, 0, 0

        while main_branch.position - n_prompt < MAX_TOKENS:
            # 2. FORK the helper, 3. DRAFT on the fork, 4. PRUNE it by leaving the block.
            guesses: list[int] = []
            with helper.fork() as scratch:
                while len(guesses) < DRAFT_LENGTH and scratch.entropy("nats") < MAX_ENTROPY:
                    produced = scratch.step()
                    if produced.is_stop:
                        break
                    guesses.append(produced.token)

            # 5. VERIFY on a fork of main: one decode gives the logits after every guess.
            start, trial = main_branch.position, main_branch.fork()
            rows = [main_branch.logits, *(trial.extend(guesses, "all") if guesses else [])]
            n = 0
            while True:
                target_token = sampler.distribution(rows[n], start + n, SEED).draw(SEED, start + n)
                if n == len(guesses) or target_token != guesses[n]:
                    break
                n += 1
            iterations, drafted, accepted = iterations + 1, drafted + len(guesses), accepted + n

            # 6. ACCEPT the matching tokens: the fork, truncated to them, replaces main.
            trial.rewind(start + n)
            trial.promote()
            main_branch = trial
            if target.model.is_eog(target_token):
                break

            # 7. BONUS (or correction): the target's own token, also when everything was accepted.
            main_branch.commit(target_token)
            helper.extend([*guesses[:n], target_token])

        print(main_branch.text + "\n" + "=" * 50 + "\nStatistics\n" + "=" * 50)
        print(f"  Iterations: {iterations}\n  Tokens drafted: {drafted}")
        print(f"  Tokens accepted: {accepted}\n  Accept rate: {accepted / max(drafted, 1):.1%}")
        print(f"  Output tokens: {main_branch.position - n_prompt}")


if __name__ == "__main__":
    main()
