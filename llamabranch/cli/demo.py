"""``llamabranch demo``: what forks, drafts and scores are for, measured on the bundled pair."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len

from llamabranch import (
    Branch,
    BranchStore,
    Context,
    Generation,
    ModelDrafter,
    NullDrafter,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
    hub,
)
from llamabranch.bench import Machine
from llamabranch.pictures import TreeLine
from llamabranch.search import SearchNode, outline

from .bundles import with_bundles
from .compare import Comparison, RoundCost, compare, round_cost, run
from .console import SOURCE_STYLES, Console, print_json
from .formats import number
from .interrupts import InterruptHandler
from .options import OutputOptions, RuntimeOptions, Threads
from .trees import LEGEND, drawn_tree

__all__ = ["demo"]

N_PROMPT = 500
N_FORKS = 8
N_STEPS = 24
N_DRAFTED = 4
N_TOKENS = 64
SEED = 7
BEGINNING = "Once upon a time"
OPENING = "The old king looked out of the window and saw"
ENDINGS = (
    " a horse in the garden.",
    " that the moon was made of silver.",
    " three quarterly tax reports.",
)
NEXT = (
    ('llamabranch speculate "The old king" --compare', "drafts against plain decoding, in full"),
    ("llamabranch speculate -hf Qwen/Qwen3-4B-GGUF --chat", "a model of your own, with its draft"),
    ('llamabranch generate --prompts "Once" "Long ago"', "many texts in one batch"),
    ("llamabranch bench", "the fastest setting on this machine"),
    ("llamabranch doctor", "is everything as fast as it could be?"),
)


@with_bundles
def demo(*, threads: Threads = None, output: OutputOptions) -> None:
    """Show what this is for, in half a minute: forks, drafts, scores, all measured as you watch.

    Eight continuations of one long prompt in one batch against eight runs; speculative decoding with the
    text of plain decoding; three endings ranked by the model. Everything runs on the bundled pair.
    """
    with output.console() as console, ExitStack() as stack:
        start = time.perf_counter()
        runtime = RuntimeOptions(n_ctx=1024, threads=threads)
        target = runtime.open(hub.BUNDLED_TARGET, console, stack, n_seq_max=N_FORKS + 1)
        draft = runtime.open(
            hub.BUNDLED_DRAFT, console, stack, n_threads=target.n_threads
        )  # one number for both: they take turns
        show = Console(color=False, silent=True) if output.as_json else console
        with InterruptHandler([target, draft]) as interrupts:
            machine = Machine.now()
            show.line(f"{machine.processor}, {machine.cores} cores, {target.n_threads} in use")
            forks = _fork(target, interrupts)
            forks.print(show)
            drafts = _draft(target, draft, show, interrupts)
            drafts.print(show)
            ranking = _rank(target)
            _print_ranking(ranking, show)
        elapsed = time.perf_counter() - start
        if output.as_json:
            print_json(
                {
                    "forks": forks.as_json(),
                    "speculative": drafts.as_json(),
                    "ranking": [{"text": text, "perplexity": ppl} for ppl, text in ranking],
                    "machine": machine.as_dict(),
                    "n_threads": target.n_threads,
                    "elapsed_s": elapsed,
                }
            )
            return
        console.heading(f"That took {elapsed:.1f} s. Next:")
        width = max(len(command) for command, _ in NEXT)
        fits = 4 + width + max(len(what) for _, what in NEXT) <= console.out.width
        for command, what in NEXT:
            console.line(
                f"  {command.ljust(width)}  {what}" if fits else f"  {command}\n    {what}"
            )


# -- eight continuations of one prompt -----------------------------------------------------------------


@dataclass(frozen=True)
class _Forks:
    """One prompt forked, stepped together, against as many runs one by one."""

    n_prompt: int
    together_s: float
    together_tokens: int
    one_by_one_s: float
    one_by_one_tokens: int
    fork_s: float
    cells_before: int
    cells_after: int
    same_texts: bool
    root: TreeLine

    def as_json(self) -> dict[str, object]:
        return {
            "n_prompt": self.n_prompt,
            "n_forks": N_FORKS,
            "together": {"seconds": self.together_s, "tokens_evaluated": self.together_tokens},
            "one_by_one": {
                "seconds": self.one_by_one_s,
                "tokens_evaluated": self.one_by_one_tokens,
            },
            "speedup": self.one_by_one_s / self.together_s,
            "fork_ms": 1e3 * self.fork_s,
            "kv_cells_before_forks": self.cells_before,
            "kv_cells_after_forks": self.cells_after,
            "same_texts": self.same_texts,
            "tree": _as_json(self.root),
        }

    def print(self, console: Console) -> None:
        console.heading(
            f"1. One prompt of {self.n_prompt} tokens, forked {N_FORKS} ways, {N_STEPS} tokens each"
        )
        console.table(
            ("", "forked, in one batch", "one by one"),
            [
                ("seconds", f"{self.together_s:.2f}", f"{self.one_by_one_s:.2f}"),
                ("tokens evaluated", f"{self.together_tokens:,}", f"{self.one_by_one_tokens:,}"),
                ("same texts", "yes" if self.same_texts else "no", ""),
            ],
        )
        console.line()
        console.line(
            f"Together they are {self.one_by_one_s / self.together_s:.1f} times as fast: the prompt is "
            "read once, and each decode continues all of them."
        )
        copied = self.cells_after - self.cells_before
        nothing = "nothing was copied" if copied == 0 else f"{copied} were copied"
        console.line(
            f"{N_FORKS} forks took {1e3 * self.fork_s:.2f} ms. The K/V cache held {self.cells_before} "
            f"tokens before them and {self.cells_after} after: {nothing}."
        )
        console.line(f"What they wrote. {LEGEND}")
        console.line()
        console.render(drawn_tree(self.root, longest=200))


def _fork(ctx: Context, interrupts: InterruptHandler) -> _Forks:
    prompt = _long_prompt(ctx)
    sampling = SamplingParams(
        temperature=0.8, seed=SEED, logit_bias=dict.fromkeys(ctx.model.eog_tokens, -math.inf)
    )
    store = BranchStore(ctx)
    _continued_alone(ctx, prompt[:64], sampling, 4)  # the first decodes of a context are slower
    start = time.perf_counter()
    with Branch.start(ctx, prompt, sampling=sampling) as root:
        cells_before, fork_start = ctx.usage().cells_used, time.perf_counter()
        children = root.fork_many(N_FORKS)
        fork_s = time.perf_counter() - fork_start
        cells_after = ctx.usage().cells_used
        written: list[list[tuple[int, float]]] = [[] for _ in children]
        for _ in range(N_STEPS):
            interrupts.check()
            for tokens, produced in zip(written, store.step(children).values(), strict=True):
                tokens.append((produced.token, produced.logprob))
        together_s = time.perf_counter() - start
        seeds = [child.seed for child in children]
        for child in children:
            child.prune()
    start, alone = time.perf_counter(), []
    for seed in seeds:
        interrupts.check()
        alone.append(_continued_alone(ctx, prompt, sampling.replace(seed=seed), N_STEPS))
    one_by_one_s = time.perf_counter() - start
    tail = "... " + ctx.model.detokenize(prompt[-24:]).lstrip()
    return _Forks(
        n_prompt=len(prompt),
        together_s=together_s,
        together_tokens=len(prompt) + N_FORKS * N_STEPS,
        one_by_one_s=one_by_one_s,
        one_by_one_tokens=N_FORKS * (len(prompt) + N_STEPS),
        fork_s=fork_s,
        cells_before=cells_before,
        cells_after=cells_after,
        same_texts=alone == [[token for token, _ in tokens] for tokens in written],
        root=_tree(ctx, tail, written),
    )


def _long_prompt(ctx: Context) -> list[int]:
    """Return a prompt that the model itself wrote."""
    banned = dict.fromkeys(ctx.model.eog_tokens, -math.inf)
    with Branch.start(ctx, BEGINNING, temperature=0.8, seed=SEED, logit_bias=banned) as branch:
        for _ in branch.generate(N_PROMPT - branch.position):
            pass
        return branch.tokens[:N_PROMPT]


def _continued_alone(
    ctx: Context, prompt: Sequence[int], sampling: SamplingParams, n: int
) -> list[int]:
    with Branch.start(ctx, prompt, sampling=sampling) as branch:
        return [branch.step().token for _ in range(n)]


def _tree(ctx: Context, prompt: str, written: Sequence[Sequence[tuple[int, float]]]) -> TreeLine:
    """Return what the texts share and where they part; the most probable continuation comes first."""
    root = SearchNode(None, (), 0.0, prompt)
    for tokens in written:
        node = root
        for token, logprob in tokens:
            known = next((child for child in node.children if child.tokens == (token,)), None)
            if known is None:
                text, pending = ctx.model.text_after(token, node.pending)
                known = SearchNode(node, (token,), node.logprob + logprob, text, pending)
            node = known
    for node in root.walk():
        node.children.sort(key=lambda child: -child.logprob)
    return outline(root)


def _as_json(line: TreeLine) -> dict[str, object]:
    p = line.probability
    return {
        "text": line.text,
        "probability": 1.0 if math.isnan(p) else p,
        "children": list(map(_as_json, line.children)),
    }


# -- speculative decoding --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drafts:
    """Speculative decoding of one text, and how it compares with plain decoding."""

    comparison: Comparison | None
    cost: RoundCost | None

    def as_json(self) -> dict[str, object] | None:
        compared = self.comparison
        if compared is None:
            return None
        return {
            "text": compared.speculative.text,
            "same_text": compared.same_text,
            "tokens_per_s": compared.speculative_tokens_per_s,
            "plain_tokens_per_s": compared.plain_tokens_per_s,
            "speedup": compared.speedup,
            "verdict": compared.verdict,
            "stats": compared.speculative.stats.as_dict(),
            "why": self.why(),
        }

    def why(self) -> str:
        """Return one sentence: why it pays here or not."""
        if self.comparison is None or self.cost is None:
            return ""
        cost, verdict = self.cost, self.comparison.verdict
        pays = {"faster": "It pays here", "slower": "It does not pay here"}.get(
            verdict, "The times vary too much here to tell whether it pays"
        )
        if verdict == ("faster" if cost.round_cost > cost.tokens_a_round else "slower"):
            pays += ", though the times of its parts, which vary, do not tell why"
        return (
            f"{pays}: a round of {N_DRAFTED} drafts costs {cost.round_cost:.2f} target steps "
            f"(a drafted token {cost.c:.2f}, checking {N_DRAFTED + 1} tokens {cost.v:.2f}) and "
            f"yields {cost.tokens_a_round:.2f} tokens"
            + (
                "."
                if verdict == "faster"
                else "; the bundled target is tiny, and --draft-length auto (the default) stops "
                "drafting where it does not pay."
            )
        )

    def print(self, console: Console) -> None:
        compared = self.comparison
        if compared is None:
            return
        stats = compared.speculative.stats
        tried = stats.num_tested_tokens_per_pos
        console.table(
            ("position in the draft", *(str(i + 1) for i in range(len(tried)))),
            [
                ("tested", *map(str, tried)),
                ("accepted", *map(str, stats.num_accepted_tokens_per_pos)),
                (
                    "accept rate",
                    *(
                        number(100 * yes / of if of else math.nan, 0, " %")
                        for yes, of in zip(stats.num_accepted_tokens_per_pos, tried, strict=True)
                    ),
                ),
            ],
        )
        console.line()
        same = "the same text as" if compared.same_text else "another text than"
        console.line(
            f"{stats.mean_acceptance_length:.2f} tokens a round, {same} plain decoding, at "
            f"{compared.speculative_tokens_per_s:,.0f} against {compared.plain_tokens_per_s:,.0f} "
            f"tokens a second. {self.why()}"
        )


def _draft(
    target: Context, draft: Context, console: Console, interrupts: InterruptHandler
) -> _Drafts:
    console.heading(f"2. Speculative decoding, {N_DRAFTED} tokens drafted a round")
    console.legend()
    config = SpeculativeConfig(draft_k=N_DRAFTED)
    speculator = Speculator(target, ModelDrafter(draft), config)
    plain = Speculator(target, NullDrafter(), config)
    sampling = SamplingParams(temperature=0.8, seed=SEED)

    def generate(speculator: Speculator) -> Generation:
        return speculator.generate(BEGINNING, max_tokens=N_TOKENS, sampling=sampling)

    drafting, decoding = partial(generate, speculator), partial(generate, plain)
    for warming_up in (drafting, decoding):
        run(warming_up, None, interrupts)
    story = _Story(console)
    story.write(BEGINNING, "dim")
    first = run(
        drafting, lambda token: story.write(token.text, SOURCE_STYLES[token.source]), interrupts
    )
    story.end()
    comparison = compare(first, drafting, decoding, interrupts)
    cost = None
    if comparison is not None:
        cost = round_cost(comparison.speculative.stats, comparison.plain.stats)
    return _Drafts(comparison, cost)


class _Story:
    """Writes text piece by piece, on a terminal broken between words; into a pipe as it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = console.out.width
        self._column = 0
        self._space = ""  # before the word
        self._word: list[tuple[str, str]] = []  # (text, style): several tokens can make a word

    def write(self, text: str, style: str) -> None:
        """Add text; its last word is held back until it is complete."""
        for part in re.findall(r"\n| +|[^ \n]+", text):
            if part == "\n" or part.isspace():
                self._write_word()
                self._space += part
            else:
                self._word.append((part, style))

    def end(self) -> None:
        """Write what is held back, and an empty line."""
        self._write_word()
        self._console.write("\n\n")

    def _write_word(self) -> None:
        width = cell_len("".join(text for text, _ in self._word))
        if "\n" not in self._space and self._column + len(self._space) + width > self._width:
            self._space = "\n"
        self._console.write(self._space)
        self._column = cell_len((self._column * " " + self._space).rpartition("\n")[2]) + width
        for text, style in self._word:
            self._console.write(text, style)
        self._space, self._word = "", []


# -- ranking ---------------------------------------------------------------------------------------------


def _rank(ctx: Context) -> list[tuple[float, str]]:
    """Return (perplexity, text) of the endings, the likeliest first."""
    found = []
    with Branch.start(ctx, OPENING) as root:
        for ending in ENDINGS:
            with root.fork() as branch:
                branch.extend(ctx.model.tokenize(ending, add_special=False))
                found.append((branch.perplexity("fork"), ending))
    return sorted(found)


def _print_ranking(ranking: Sequence[tuple[float, str]], console: Console) -> None:
    console.heading("3. Three endings, ranked by the model")
    console.line(f"{OPENING} ...")
    console.table(
        ("perplexity", "ending"),
        [(f"{perplexity:8.1f}", f"...{ending}") for perplexity, ending in ranking],
        left=("ending",),
    )
