"""How certain a model is: the entropy before each token, and the surprisal of the drawn one."""

import math

import llamabranch as lb


def main() -> None:
    with lb.load() as ctx:
        branch = lb.Branch.start(ctx, "Once upon a time", temperature=0.8, seed=3)
        print("entropy  surprisal  token        most probable tokens")
        for _ in range(20):
            entropy = branch.entropy("bits")
            likely = lb.Distribution.from_logits(branch.logits).top(3)
            produced = branch.step()
            if produced.is_stop:
                break
            surprisal = -produced.logprob / math.log(2)  # nats to bits
            others = ", ".join(f"{ctx.detokenize([t])!r} {math.exp(lp):.0%}" for t, lp in likely)
            print(f"{entropy:7.2f}  {surprisal:9.2f}  {produced.text!r:12} {others}")
        print(f"\nperplexity of the generated text: {branch.perplexity():.1f}")
        print(f"text: {branch.text}")


if __name__ == "__main__":
    main()
