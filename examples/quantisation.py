"""Choose the smallest of several quantisations that is still close to the largest.

    python quantisation.py model-bf16.gguf model-q8_0.gguf model-q4_0.gguf

Without arguments it compares the bundled models, which are two different models, as the numbers
show.
"""

import sys
import tempfile
from pathlib import Path

import llamabranch as lb
from llamabranch.eval import divergence, perplexity, suite_items

MOST_KL = 0.02  # nats a token on average: hard to notice
WINDOW, CHUNKS = 128, 12


def main() -> None:
    names = sys.argv[1:] or ["tale-target", "tale-draft"]
    models = sorted(names, key=lambda name: -Path(lb.hub.resolve(name)).stat().st_size)
    text = "\n".join(str(item["context"]) for item in suite_items("last_word")[:40])
    chosen = models[0]
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder) / "base.logits"
        for name in models:
            megabytes = Path(lb.hub.resolve(name)).stat().st_size / 1e6
            with lb.load(name, n_ctx=WINDOW, n_seq_max=1, kv_type="f16") as ctx:
                if name == models[0]:
                    base = perplexity(ctx, text, WINDOW, chunks=CHUNKS, save_to=logits)
                    print(f"{name}: {megabytes:.1f} MB, perplexity {base.value:.2f}, the base")
                    continue
                stats = divergence(ctx, logits).statistics
            print(
                f"{name}: {megabytes:.1f} MB, perplexity {stats.perplexity.value:.2f}, KL divergence "
                f"{stats.mean.value:.4f} ± {stats.mean.stderr:.4f} nats, "
                f"{stats.same_top.value:.1%} the same most probable token"
            )
            if stats.mean.value <= MOST_KL:
                chosen = name
    print(f"Use {chosen}: the smallest with a mean KL divergence of at most {MOST_KL} nats.")


if __name__ == "__main__":
    main()
