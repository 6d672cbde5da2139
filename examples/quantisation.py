"""Choose the smallest of several quantisations that is still close to the largest.

    python quantisation.py model-bf16.gguf model-q8_0.gguf model-q4_0.gguf

Each is compared with the largest on a text (here the package's own docstrings). Without arguments
it compares the bundled models, which are two different models, as the numbers show.
"""

import inspect
import sys
from pathlib import Path

import llamabranch as lb
from llamabranch.eval import divergence, perplexity

MOST_KL = 0.02  # nats a token on average: hard to notice
WINDOW, CHUNKS = 128, 12


def main() -> None:
    names = sys.argv[1:] or ["tale-target", "tale-draft"]
    sizes = {name: Path(lb.hub.resolve(name)).stat().st_size / 1e6 for name in names}
    base, *others = sorted(names, key=lambda name: -sizes[name])
    methods = [value for _, value in inspect.getmembers(lb.Branch, callable)]
    text = "\n".join(inspect.getdoc(method) or "" for method in methods)
    chosen = base
    with lb.load(base, n_ctx=WINDOW, n_seq_max=1) as reference:
        alone = perplexity(reference, text, WINDOW, chunks=CHUNKS)
        print(f"{base}: {sizes[base]:.1f} MB, perplexity {alone.value:.2f}, the base")
        for name in others:
            with lb.load(name, n_ctx=WINDOW, n_seq_max=1) as ctx:
                stats = divergence(reference, ctx, text, WINDOW, chunks=CHUNKS).statistics
            print(
                f"{name}: {sizes[name]:.1f} MB, perplexity {stats.perplexity.value:.2f}, KL divergence "
                f"{stats.mean.value:.4f} ± {stats.mean.stderr:.4f} nats, "
                f"{stats.same_top.value:.1%} the same most probable token"
            )
            if stats.mean.value <= MOST_KL:
                chosen = name
    print(f"Use {chosen}: the smallest with a mean KL divergence of at most {MOST_KL} nats.")


if __name__ == "__main__":
    main()
