"""Beam search of Hugging Face transformers on the weights of a GGUF file, for ``benchmarks.search``.

    python benchmarks/search_hf.py FILE.gguf THREADS DTYPE...

This program needs torch, transformers and gguf, and nothing of this project. It prints a JSON line when
it is ready. Then it answers each line {"dtype", "prompt", "beams", "tokens"} with {"seconds", "tokens"}:
the time of ``generate`` with the prompt, and the ids that it generated.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Answer one line after the other."""
    import torch
    import transformers

    file, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    models = {}
    for dtype in sys.argv[3:]:
        models[dtype] = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
        ).eval()
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = torch.tensor([asked["prompt"]])
        begun = time.perf_counter()
        with torch.inference_mode():
            texts = models[asked["dtype"]].generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=asked["beams"],
                max_new_tokens=asked["tokens"],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - begun
        print(json.dumps({"seconds": seconds, "tokens": texts[0, prompt.shape[1] :].tolist()}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
