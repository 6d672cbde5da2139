"""What one drafted token costs besides llama.cpp's own calls, part by part: a draft model and a head.

    python -m benchmarks.draft [--head NAME]

Drafts of four tokens follow one another through the same text, as if one or two of each were accepted,
in loops that do more and more of a draft: from ``llama_decode`` of one token at a time, the floor, to the
drafter. The target does not decode in between. The loops take turns, and each part is the difference
of two of them within a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import llamabranch as lb
from llamabranch.bench import Sample, Series, Spread, interleave
from llamabranch.speculative.drafters.head import target_states
from llamabranch.speculative.length.base import FixedLength

from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title

DECODE = "llama_decode, a token at a time"
TEXT = "+ the new tokens of the text, in the first decode"
ENCODE = "+ llama_encode of their hidden states"
DRAFT = "+ the draft: draws, distributions, cutting, the books"

K = 4
NEW = (3, 2, 4, 1, 3, 2)  # tokens of the text that are new to each draft

States = npt.NDArray[np.float32]


class Text(NamedTuple):
    """A text, from the target, and what a head reads of it."""

    branch: lb.Branch
    tokens: list[int]
    n_prompt: int
    features: States

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield how many tokens were read before each draft, and how many of the text it follows."""
        at = self.n_prompt
        for n in cycle(NEW):
            if at + n > len(self.tokens):
                return
            yield at, at + n
            at += n


class Drafting(NamedTuple):
    """A drafter and its context."""

    name: str
    drafter: lb.ModelDrafter | lb.EagleDrafter
    rungs: tuple[str, ...]

    @property
    def ahead(self) -> int:
        return int(isinstance(self.drafter, lb.EagleDrafter))


def main() -> None:
    """Measure the draft model and the head."""
    described = parser("one drafted token, part by part", runs=9, prompts=5, tokens=100)
    described.add_argument("--head", default="tale-eagle", help="an EAGLE-3 head for the target")
    args = described.parse_args()
    settings = Settings.of(args, tokens=16)
    results: dict[str, object] = {}
    with settings.context(settings.target) as target, settings.context(settings.draft) as draft:
        head = lb.load(args.head, target=target, n_threads=settings.threads)
        contestants = (
            Drafting("draft", lb.ModelDrafter(draft), (DECODE, TEXT, DRAFT)),
            Drafting("head", lb.EagleDrafter(head), (DECODE, TEXT, ENCODE, DRAFT)),
        )
        for t in settings.temperatures:
            results[f"T = {t:g}"] = measure(target, contestants, t, settings)
        models = {"target": target.model, "draft": draft.model, "head": head.model}
        emit("draft", settings, models, results)


def measure(
    target: lb.Context, contestants: tuple[Drafting, ...], temperature: float, settings: Settings
) -> dict[str, object]:
    """Print the ladders; return them for JSON."""
    params = lb.SamplingParams(temperature=temperature, seed=1)
    texts = [
        _text(target, prompt, params, settings.tokens) for prompt in PROMPTS[: settings.prompts]
    ]

    def work(each: Drafting, rung: str) -> Callable[[int], Callable[[int], Sample]]:
        def timed(item: int) -> Sample:
            return _drafts(each, texts[item]) if rung == DRAFT else _bare(each, texts[item], rung)

        return lambda run: timed

    series = interleave(
        {f"{e.name} {rung}": work(e, rung) for e in contestants for rung in e.rungs},
        n_runs=settings.runs,
        n_items=len(texts),
    )
    for text in texts:
        text.branch.prune()
    found: dict[str, object] = {}
    for each in contestants:
        own = [series[f"{each.name} {rung}"] for rung in each.rungs]
        rows = [
            (
                rung,
                number(1e6 * _seconds(own[i]).median, 1),
                pm(_difference(own[i - 1], own[i]) if i else Spread.of([]), 1),
                percent(own[0].rate.median and own[i].ratio(own[0]).median),
            )
            for i, rung in enumerate(each.rungs)
        ]
        caption = (
            f"A token drafted by {title(each.drafter.ctx.model)}, T = {temperature:g}: "
            f"{settings.threads} threads, {len(texts)} texts x {settings.tokens} tokens, "
            f"drafts of {K}, medians of {settings.runs} runs"
        )
        table(caption, ("what is done", "µs a token", "more than before", "speed"), rows)
        found[each.name] = {
            rung: series_json(one, own[0]) for rung, one in zip(each.rungs, own, strict=True)
        }
    return found


def _text(ctx: lb.Context, prompt: str, params: lb.SamplingParams, n: int) -> Text:
    branch = lb.Branch.start(ctx, prompt, sampling=params)
    n_prompt = branch.position
    list(branch.generate(n))
    return Text(
        branch, branch.tokens, n_prompt, target_states(ctx, branch.seq_id, branch.tokens, 0)
    )


# -- the loops -------------------------------------------------------------------------------------


def _bare(each: Drafting, text: Text, rung: str) -> Sample:
    """Make llama.cpp's calls of the drafts and nothing else."""
    ctx, ahead = each.drafter.ctx, each.ahead
    handle: Any = ctx.decoder.handle
    tokens, n_embd = text.tokens, handle.n_embd
    if ahead:  # any states do
        n = min(len(handle.states), len(text.features))
        handle.states[:n] = text.features[:n, :n_embd]

    def decode(new: list[int], position: int) -> None:
        n = len(new)
        handle.tokens[:n], handle.positions[:n] = new, range(position, position + n)
        handle.seqs[:n], handle.wants_logits[:n] = 0, ahead
        handle.wants_logits[n - 1] = 1
        if handle.decode(n):
            raise SystemExit("llama_decode failed")

    decode(tokens[ahead : text.n_prompt], 0)
    n_drafted, seconds = 0, 0.0
    for start, end in text.ends():
        begun = perf_counter()
        if rung == DECODE:
            for i in range(K):
                decode([tokens[start]], start - ahead + i)
            handle.remove(0, start - ahead, -1)
        else:
            if rung == ENCODE:
                ctx.decoder.encode(text.features[start - 1 : end - 1])
            decode(tokens[start:end], start - ahead)
            for i in range(K - 1):
                decode([tokens[start]], end - ahead + i)
            handle.remove(0, end - ahead, -1)
        seconds += perf_counter() - begun
        if rung == DECODE:
            decode(tokens[start:end], start - ahead)
        n_drafted += K
    handle.remove(0, -1, -1)
    return Sample(n_drafted, seconds)


def _drafts(each: Drafting, text: Text) -> Sample:
    """Draft."""
    state = each.drafter.start(text.branch, "seeded")
    state.propose(text.tokens[: text.n_prompt], FixedLength(1), 1)
    state.observe(text.n_prompt)
    n_drafted, begun = 0, perf_counter()
    for _, end in text.ends():
        n_drafted += len(state.propose(text.tokens[:end], FixedLength(K), K).tokens)
        state.observe(end)
    seconds = perf_counter() - begun
    state.close()
    return Sample(n_drafted, seconds)


# -- figures ---------------------------------------------------------------------------------------


def _seconds(series: Series) -> Spread:
    """Return the seconds a token of each run."""
    return Spread.of([1.0 / rate for rate in series.rates])


def _difference(before: Series, after: Series) -> Spread:
    """Return how many microseconds a token more ``after`` takes, within each run."""
    return Spread.of(
        [1e6 * (1.0 / a - 1.0 / b) for a, b in zip(after.rates, before.rates, strict=True)]
    )


if __name__ == "__main__":
    main()
