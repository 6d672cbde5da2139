"""Two models on one text on the page, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from paging import DRAFT, TARGET, Paged

import llamabranch as lb
from llamabranch.eval import pair

WINDOW = 64


@contextmanager
def opened(path: Path, n_ctx: int = WINDOW) -> Iterator[lb.Context]:
    options: Any = {"kv_type": "f16", "batch_invariant": False, "n_threads": 1}
    with lb.load(path, n_ctx=n_ctx, n_seq_max=1, **options) as ctx:
        yield ctx


def keeping(places: list[pair.PairScore]) -> Callable[[int, list[pair.PairScore]], bool]:
    def keep(_: int, scores: list[pair.PairScore]) -> bool:
        places.extend(scores)
        return False

    return keep


def test_divergences_are_sums_over_the_vocabulary() -> None:
    with opened(TARGET) as a, opened(DRAFT) as b:
        tokens = a.model.prompt_tokens("Once upon a time there was a fox")
        places: list[pair.PairScore] = []
        pair.read_pair((a, b), tokens, 1, None, keeping(places))
        for i, place in enumerate(places, 1):
            logs = []
            for ctx in (a, b):
                with lb.Branch.start(ctx, tokens[:i]) as branch:
                    logs.append(branch.log_probs())
            p, q = logs
            sums = [float(np.sum(np.exp(x) * (x - y))) for x, y in ((p, q), (q, p))]
            assert [place.kl, place.klr] == pytest.approx(sums, rel=1e-4, abs=1e-7)
            assert place.score.logprob == pytest.approx(float(p[tokens[i]]), abs=1e-4)
            assert place.same == (p.argmax() == q.argmax())


def test_ids_of_one_model_only_are_left_out(tmp_path: Path) -> None:
    small = toys.write_llama(tmp_path / "small.gguf", vocab=300, weights="f32")
    large = toys.write_llama(tmp_path / "large.gguf", vocab=340, weights="f32")
    with opened(small) as a, opened(large) as b:
        assert pair.same_vocabulary(a.model, b.model)
        tokens = a.model.tokenize("abcdefgh")
        places: list[pair.PairScore] = []
        pair.read_pair((a, b), tokens, 1, None, keeping(places))
        assert all(math.isfinite(place.kl) and place.kl >= 0 for place in places)


def of_bytes(folder: Path) -> Path:
    """Write a model with another tokenizer."""
    metadata = {"context_length": 2048}
    return toys.write_llama(folder / "b.gguf", vocab="bytes", weights="f32", metadata=metadata)


def test_the_page_tells_why_other_tokenizers_have_no_divergence(tmp_path: Path) -> None:
    with Paged(tmp_path, partner=of_bytes(tmp_path)) as page:
        assert page.doc()["models"]["B"]["same_vocabulary"] is False
        root = page.type("Once upon a time there was")
        page.done("compare", node=root["id"], mode="read")
        compared = page.tokens(root["id"])["compare"][-1]
        assert "kl" not in compared and "tokenizers" in compared["why"]
        assert compared["totals"]["bpbB"] > 0
        page.do("compare", 409, node=root["id"], mode="lockstep")


# -- the command -----------------------------------------------------------------------------------


BOTH = ("--against", TARGET, "-m", DRAFT)


HOSTILE = "\x1b[31m red \u202e reversed </script><img src=x onerror=alert(1)> \x00 end. "
