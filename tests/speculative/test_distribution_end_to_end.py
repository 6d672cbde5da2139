"""The real loop on a real model emits tokens with the model's own probabilities.

The target is a random model of 16 tokens, so the law of its first tokens can be computed: softmax of its
logits at the temperature, cut to the best k, multiplied along every path. Many generations with different
seeds are compared with that law by a statistic that is standard normal for a right loop. Seeds are fixed.
With new seeds a right loop would exceed the limit of 4 with odds of about 3e-5 for each of the 39
statistics: one false failure in 800 such runs. Loops that are known to be wrong must exceed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import toys
from departure import departure

import llamabranch as lb
from llamabranch import Branch, Context, Distribution, SamplingParams, SpeculativeConfig
from llamabranch.generation.drafter import DraftRequest
from llamabranch.speculative import Draft

Text = tuple[int, ...]
Law = dict[Text, float]

PROMPT = "badcaf"
DEPTH = 4  # the number of counted tokens: the first is drawn plainly, the others come from rounds
N = 1500
LIMIT = 4.0
END = 1  # the toys' end token; it is the last of its text
CUT = SamplingParams(temperature=0.9, top_k=3, top_p=1.0, min_p=0.0)
OPEN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


# -- the statistic -------------------------------------------------------------------------------


def worst(texts: Sequence[Text], law: Law) -> float:
    """Return the largest departure: of whole texts, of tokens from rounds, of the second token."""
    departures = []
    for part in (slice(None), slice(1, None), slice(1, 2)):
        of_part: Law = {}
        for text, weight in law.items():
            of_part[text[part]] = of_part.get(text[part], 0.0) + weight
        departures.append(departure(Counter(text[part] for text in texts), of_part))
    return max(departures)


# -- the law ---------------------------------------------------------------------------------------


def probabilities(
    logits: np.ndarray[tuple[int], np.dtype[np.float32]], params: SamplingParams
) -> Law:
    """Return softmax at the temperature over the best top_k, computed without the library."""
    x = logits.astype(np.float64)
    ids = np.argsort(-x, kind="stable")[: params.top_k or len(x)]
    p = np.exp((x[ids] - x[ids].max()) / params.temperature)
    p /= p.sum()
    return {(int(i),): float(w) for i, w in zip(ids, p, strict=True)}


def exact_law(ctx: Context, params: SamplingParams, depth: int) -> Law:
    """Return the probability of every text of ``depth`` tokens, or fewer if it ends before."""

    def below(branch: Branch, left: int) -> Law:
        law: Law = {}
        for (token,), weight in probabilities(branch.logits, params).items():
            if left == 1 or token == END:
                law[(token,)] = weight
                continue
            with branch.fork() as child:
                child.extend([token])
                rests = below(child, left - 1).items()
                law |= {(token, *rest): weight * share for rest, share in rests}
        return law

    with Branch.start(ctx, PROMPT, sampling=params) as root:
        law = below(root, depth)
    assert sum(law.values()) == pytest.approx(1.0)
    return law


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Context]]:
    folder = tmp_path_factory.mktemp("end_to_end")
    opened: dict[str, Context] = {}
    for kind, more in (("llama", {"n_ff": 64}), ("mamba", {})):
        for drift in (0.0, 0.5):
            name = f"{kind} draft" if drift else kind
            size: dict[str, Any] = {"n_layer": 1, "n_embd": 32, **more}
            path = toys.write_toy(folder / f"{name}.gguf", kind, seed=3, drift=drift, **size)
            opened[name] = Context(lb.Model(path), n_ctx=512, n_seq_max=16, n_threads=1)
    yield opened
    for ctx in opened.values():
        ctx.audit()
        assert ctx.usage().cells_used == 0
        ctx.close()
        ctx.model.close()


@pytest.fixture(scope="module")
def laws(contexts: dict[str, Context]) -> dict[str, Law]:
    return {
        "cut": exact_law(contexts["llama"], CUT, DEPTH),
        "open": exact_law(contexts["llama"], OPEN, 3),
        "mamba": exact_law(contexts["mamba"], CUT, DEPTH),
    }


def said(
    ctx: Context,
    drafter: lb.Drafter,
    rule: str,
    params: SamplingParams,
    *,
    depth: int = DEPTH,
    n: int = N,
    k: int = 3,
    entropy_stop: float | None = None,
) -> tuple[list[Text], lb.speculative.SpeculativeStats]:
    """Return the beginnings of ``n`` speculative texts, each of another seed."""
    config = SpeculativeConfig(draft_k=k, rule=rule, entropy_stop=entropy_stop)
    speculator = lb.Speculator(ctx, drafter, config)
    texts = []
    with Branch.start(ctx, PROMPT, sampling=params) as root:
        for seed in range(n):
            with root.fork() as branch:
                branch.reseed(seed)
                generation = speculator.generate(branch, max_tokens=DEPTH + 2).finish()
                ended = [END] if generation.finish_reason == "stop" else []
                texts.append(tuple([*generation.tokens, *ended][:depth]))
                speculator.forget(branch)
    return texts, speculator.stats


# -- right loops -------------------------------------------------------------------------------------

Make = Callable[[dict[str, Context]], lb.Drafter]
OWN = SamplingParams(temperature=1.4, top_k=5, top_p=1.0, min_p=0.0)
DRAFTERS: dict[str, Make] = {
    "model": lambda c: lb.ModelDrafter(c["llama draft"]),
    "own settings": lambda c: lb.ModelDrafter(c["llama draft"], OWN),
    "chain": lambda c: lb.ChainDrafter(
        [lb.SuffixDrafter(min_match=1), lb.ModelDrafter(c["llama draft"])]
    ),
    "mamba": lambda c: lb.ModelDrafter(c["mamba draft"]),
}
# The rule, the drafter, the law, and more for ``said``.
LOOPS: list[tuple[str, str, str, dict[str, Any]]] = [
    *((rule, "model", "cut", {}) for rule in ("token", "block", "seeded")),
    ("block", "mamba", "mamba", {"n": 600}),  # recurrent memory
    *((rule, "own settings", "cut", {}) for rule in ("token", "block")),
    *((rule, "model", "open", {"depth": 3}) for rule in ("token", "block")),  # and ends
    ("token", "chain", "cut", {}),
    ("token", "model", "cut", {"entropy_stop": 1.2}),  # a draft that stops before a draw
]


@pytest.mark.parametrize(("rule", "who", "which", "more"), LOOPS)
def test_first_tokens_have_the_models_own_probabilities(
    rule: str,
    who: str,
    which: str,
    more: dict[str, Any],
    contexts: dict[str, Context],
    laws: dict[str, Law],
) -> None:
    params = OPEN if which == "open" else CUT
    target = contexts["mamba" if which == "mamba" else "llama"]
    texts, stats = said(target, DRAFTERS[who](contexts), rule, params, **more)
    assert worst(texts, laws[which]) < LIMIT
    assert 0.05 < stats.draft_acceptance_rate < 0.95  # some tokens were accepted, and some rejected
    if "entropy_stop" in more:
        assert stats.stop_reasons["entropy"] > N / 10
    else:
        assert stats.num_drafts > len(texts)
    assert which != "open" or any(text[-1] == END for text in texts)


# -- wrong loops: the same statistic must see them ---------------------------------------------------


class Tampering(lb.ModelDrafter):
    """A drafter whose proposals are changed after they were drawn."""

    def __init__(self, ctx: Context, change: Callable[[Draft], None]) -> None:
        super().__init__(ctx)
        self.change = change

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = super().propose_many(requests)
        for draft in drafts:
            self.change(draft)
        return drafts


def drop_the_unlikely(draft: Draft) -> None:
    """Cut the draft before a drawn token that is unlikely."""
    for i, (token, source) in enumerate(zip(draft.tokens, draft.sources, strict=True)):
        if source.prob(token) < 0.35:
            del draft.tokens[i:], draft.sources[i:]
            return


def report_a_flat_source(draft: Draft) -> None:
    """Claim that each of the tokens that could be drawn was equally probable."""
    draft.sources = [Distribution.from_logits(0.0 * q.logprobs, q.ids) for q in draft.sources]


@pytest.mark.parametrize("change", [drop_the_unlikely, report_a_flat_source])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_statistic_sees_a_biased_drafter(
    rule: str,
    change: Callable[[Draft], None],
    contexts: dict[str, Context],
    laws: dict[str, Law],
) -> None:
    drafter = Tampering(contexts["llama draft"], change)
    texts, _ = said(contexts["llama"], drafter, rule, CUT)
    assert worst(texts, laws["cut"]) > 1.25 * LIMIT
