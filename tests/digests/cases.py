"""The table of cases: each has a name and a function that gives texts and numbers.

Every draw has a seed, so that a text is a function of the settings. The draft length "auto" depends on
measured times. Such cases are seeded or greedy, so that the text does not depend on the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import together

import llamabranch as lb

from .library import FREE, Prompt, Said, Settings, World, continue_branch, continue_together


@dataclass
class Outcome:
    """The outcome of a case."""

    texts: list[Said]
    numbers: dict[str, float] = field(default_factory=dict)


Case = Callable[[World], Outcome]
Constraint = str | Mapping[str, object]
Options = dict[str, Any]

N = 60  # tokens of a text
TALE = "Once upon a time there was a king who had three daughters, and the youngest"
ECHO = (  # a prompt in which penalties and copying drafters have an effect
    "The wolf said: let me in, let me in. The pig said: no, no, not by the hair of my chin. "
    "The wolf said: let me in, let me in. The pig said: no, no, not by the"
)
TALK = "“Who is there?” cried the old woman,"
FAR = "In a village at the edge of a great forest — far away — there lived"
PROMPTS: dict[str, Prompt] = {"tale": TALE, "echo": ECHO, "talk": TALK, "far": FAR, "empty": ""}
GREEDY: Settings = {"temperature": 0.0}
WARM: Settings = {}
HOT: Settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
BACK: Settings = {
    "temperature": 0.9,
    "repeat_penalty": 1.3,
    "penalty_last_n": 32,
    "dry_multiplier": 0.8,
}


def changed_texts(name: str) -> slice | None:
    """Return which texts of a case have changed on purpose since 0.1; None if no text has.

    Since 0.3 grammars are llguidance's, and a JSON schema, which one of the engine's requests has, allows
    other white space. The noise of raw draws depended on the number of decodes, and so on ``n_batch``;
    now it depends on the position. Version 0.1 copied from earlier texts too. This can show in the
    second text of a speculator if its drafts decide what is drawn, so not under the rule "seeded".
    """
    if name.startswith("context/raw"):
        return slice(None)
    if name.startswith(("speculative/chain, token", "speculative/chain, block")):
        return slice(1, 2)
    mixed = ("engine/mixed", "engine/greedy", "engine/few sequences", "engine/small batches")
    return slice(10, 11) if name.startswith(mixed) else None


# -- one text --------------------------------------------------------------------------------------


def plain(
    world: World,
    settings: Settings,
    prompt: Prompt = ECHO,
    *,
    n: int = N,
    stop: Sequence[str] = (),
    grammar: Constraint | None = None,
    model: str = "target",
    **options: object,
) -> Outcome:
    ctx = world.context(model, **options)
    with world.start(ctx, prompt, settings, grammar) as branch:
        return Outcome([continue_branch(branch, n, stop)])


SAMPLING: dict[str, Settings] = {
    "default": {},
    "temperature 0": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "temperature 2": {"temperature": 2.0},
    "only temperature": {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "nothing": HOT,
    "seed 0": {"seed": 0},
    "seed -7": {"seed": 2**64 - 7},  # 0.1 to 0.4 took -7 modulo 2^64
    "seed 2**40": {"seed": 2**40},
    "dynatemp": {"dynatemp_range": 0.6},
    "dynatemp, exponent": {"dynatemp_range": 0.6, "dynatemp_exponent": 2.5},
    "top-k 1": {"top_k": 1},
    "top-k 5": {**HOT, "top_k": 5},
    "top-p": {**HOT, "top_p": 0.7},
    "top-p, min keep": {**HOT, "top_p": 0.05, "min_keep": 6},
    "min-p": {**HOT, "min_p": 0.12},
    "typical-p": {**HOT, "typical_p": 0.6},
    "typical-p at temperature 0": {"temperature": 0.0, "typical_p": 0.3},
    "top-n-sigma": {**HOT, "top_n_sigma": 2.2, "temperature": 1.2},
    "xtc": {**HOT, "xtc_probability": 0.6, "xtc_threshold": 0.08},
    "xtc always": {**HOT, "xtc_probability": 1.0, "xtc_threshold": 0.05, "min_p": 0.05},
    "xtc at temperature 0": {"temperature": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "repeat penalty": {"repeat_penalty": 1.4},
    "repeat penalty at temperature 0": {"temperature": 0.0, "repeat_penalty": 1.2},
    "frequency penalty": {"frequency_penalty": 0.7},
    "presence penalty": {"presence_penalty": 1.1},
    "penalty last 8": {"repeat_penalty": 1.8, "penalty_last_n": 8},
    "penalty over all": {"repeat_penalty": 1.4, "presence_penalty": 0.5, "penalty_last_n": -1},
    "dry": {"dry_multiplier": 1.5},
    "dry, base": {"dry_multiplier": 0.1, "dry_base": 6.0, "dry_allowed_length": 1},
    "dry, allowed 1": {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    "dry, last 20": {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": 20},
    "dry, breakers": {
        "dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": ("the", " no"),
    },
    "dry, no breakers": {
        "dry_multiplier": 3.0, "dry_base": 2.5, "dry_allowed_length": 1, "dry_sequence_breakers": (),
    },
    "bias": {"logit_bias": {467: -3.0, 715: -4.0, 261: 1.5, 16: 2.0}},
    "bias that forbids": {"logit_bias": dict.fromkeys(range(2, 400, 3), -math.inf)},
    "bias at temperature 0": {"temperature": 0.0, "logit_bias": {261: -8.0, 270: -math.inf}},
    "all truncations": {
        "top_n_sigma": 3.0, "top_k": 30, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.02, "min_keep": 2,
    },
    "everything": {
        "temperature": 1.1, "top_k": 50, "typical_p": 0.95, "top_p": 0.95, "min_p": 0.01,
        "xtc_probability": 0.3, "xtc_threshold": 0.15, "repeat_penalty": 1.1, "frequency_penalty": 0.1,
        "presence_penalty": 0.1, "penalty_last_n": 40, "dry_multiplier": 0.5, "logit_bias": {16: 1.0},
    },
    "penalties and xtc": {**BACK, "xtc_probability": 0.5, "xtc_threshold": 0.1},
}  # fmt: skip
TEXTS: dict[str, Settings] = {
    f"temperature {t:g}, seed {seed}": {"temperature": t, "seed": seed}
    for t in (0.0, 0.7, 1.0)
    for seed in ((1,) if t == 0 else (1, 12345))
}
STOPS: dict[str, tuple[str, ...]] = {
    "word": ("the",),
    "over tokens": ("ing t", " and "),
    "first of many": ("zebra", ".", ", "),
    "never": ("qqq",),
}
PAIRS: Constraint = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "brave": {"type": "boolean"},
        "kind": {"enum": ["king", "wolf", "witch"]},
    },
    "required": ["name", "brave", "kind"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Constraint] = {
    "one of": 'root ::= " king" | " wolf" | " witch and a " [a-z]{3,9}',
    "words": 'root ::= (" " [a-z]+){12} "."',
    "lines": 'root ::= line line line\nline ::= [A-Z] [a-z ]{8,30} "." "\\n"',
}


# -- branches --------------------------------------------------------------------------------------


def forks(world: World, settings: Settings, model: str = "target", **options: object) -> Outcome:
    """A family: the texts of forks, in turn and after their parent has continued."""
    root = world.start(world.context(model, **options), TALE, settings)
    texts = [continue_branch(root, 10)]
    children = root.fork_many(3)
    twin = root.fork()
    texts += [continue_branch(child, 20) for child in children]
    texts.append(continue_branch(root, 20))
    grandchild = children[1].fork()
    grandchild.reseed(world.seed(77))
    texts += [continue_branch(branch, 15) for branch in (grandchild, children[1], twin)]
    numbers = {
        f"{since} {i}": branch.perplexity(since)
        for i, branch in enumerate((root, *children, grandchild, twin))
        for since in ("fork", "prompt")
    }
    return Outcome(texts, numbers)


def steered(world: World, settings: Settings) -> Outcome:
    root = world.start(world.context(), TALE, settings)
    texts = [continue_branch(root, 10)]
    root.steer({16: 4.0, 261: -math.inf})
    child = root.fork()
    texts += [continue_branch(root, 20), continue_branch(child, 10)]
    child.steer({})
    texts.append(continue_branch(child, 15))
    child.resample(world.params({"temperature": 1.0, "top_k": 8, "seed": 21}))
    texts.append(continue_branch(child, 15))
    return Outcome(texts)


def rewound(world: World, settings: Settings, model: str = "target", **options: object) -> Outcome:
    """Rewound and generated again, generated differently, rewound into the prompt and extended."""
    branch = world.start(world.context(model, **options), ECHO, settings)
    n = branch.position
    texts = [continue_branch(branch, 30)]
    branch.rewind(n + 12)
    texts.append(continue_branch(branch, 18))
    branch.rewind(n + 5)
    branch.reseed(world.seed(3))
    texts.append(continue_branch(branch, 20))
    numbers = {"perplexity": branch.perplexity("prompt")}
    branch.rewind(n - 6)
    branch.prefill([30, 40, 50])
    texts.append(continue_branch(branch, 20))
    return Outcome(texts, numbers)


def committed(world: World, settings: Settings) -> Outcome:
    """Tokens from outside, one by one and many at once, and their scores."""
    branch = world.start(world.context(), TALE, settings)
    numbers = {"entropy": branch.entropy(), "bits": branch.entropy("bits")}
    numbers["surprisal"] = branch.surprisal(300)
    numbers["bits of 16"] = branch.surprisal(16, "bits")
    for token in (300, 16, 400):
        branch.commit(token)
    numbers["sum of logits"] = float(branch.logits.sum())
    rows = branch.extend([500, 600, 700], logits="all")
    numbers |= {f"logit {i}": float(row.max()) for i, row in enumerate(rows)}
    numbers["perplexity"] = branch.perplexity("prompt")
    for i, (token, probability) in enumerate(branch.distribution().top(5)):
        numbers |= {f"top {i}": float(token), f"of top {i}": probability}
    texts = [continue_branch(branch, 30)]
    numbers["perplexity at the end"] = branch.perplexity("prompt")
    return Outcome(texts, numbers)


def stored(world: World, settings: Settings, model: str = "target", **options: object) -> Outcome:
    """Many branches in one decode: prompts, steps, commits, and one branch that stays."""
    ctx = world.context(model, **options)
    branches = [
        lb.Branch.create(ctx, world.params({**settings, "seed": seed})) for seed in (1, 2, 3)
    ]
    prompts = (TALE, ECHO, TALK)
    together.prefill(ctx, {b: ctx.tokenize(p) for b, p in zip(branches, prompts, strict=True)})
    texts = continue_together(ctx, branches, 25)
    together.commit(ctx, {branch: 20 + i for i, branch in enumerate(branches)})
    branches.append(branches[0].fork())
    branches[-1].reseed(world.seed(9))
    texts += continue_together(ctx, branches, 15)
    numbers = {f"perplexity {i}": b.perplexity("prompt") for i, b in enumerate(branches)}
    for branch in (branches[0], *branches[2:]):
        branch.prune_subtree()
    texts += continue_together(ctx, branches[1:2], 10)
    return Outcome(texts, numbers)


def saved(world: World, settings: Settings) -> Outcome:
    """Saved to a file, loaded elsewhere and continued; and the same through memory."""
    ctx = world.context()
    branch = world.start(ctx, ECHO, settings, "root ::= [^0-9]*")
    texts = [continue_branch(branch, 20)]
    path = world.folder / "branch.lbs"
    branch.save(path)
    other = world.context(n_ctx=512, n_seq_max=4)
    loaded = lb.Branch.load(other, path)
    restored = lb.Branch.restore(ctx, branch.snapshot())
    branches = (branch, loaded, restored)
    texts += [continue_branch(b, 30) for b in branches]
    numbers = {f"perplexity {i}": b.perplexity("prompt") for i, b in enumerate(branches)}
    return Outcome(texts, numbers)


def raw(world: World, **options: object) -> Outcome:
    """The raw calls of a context: rows of logits, shared sequences, draws."""
    ctx = world.context("target", **options)
    tokens = [(7 * i + 3) % 4096 for i in range(60)]
    ctx.decode(tokens, 0)
    ctx.kv_seq_copy(0, 1)
    ctx.decode([70, 71, 72], 60, seq_id=1, logits="all")
    numbers = {f"row {i}": float(ctx.logits(i).max()) for i in range(3)}
    numbers |= {"entropy": ctx.model_entropy(), "surprisal": ctx.model_surprisal(99, "bits")}
    drawn = []
    for i, settings in enumerate((GREEDY, WARM, HOT, SAMPLING["xtc"], SAMPLING["all truncations"])):
        drawn.append(ctx.sample(world.params({**settings, "seed": i})))
    ctx.kv_cache_remove(1, 61)
    ctx.decode([80, 81], 61, seq_id=1)
    drawn.append(ctx.sample(world.params(HOT)))
    numbers["after"] = float(np.abs(ctx.logits()).sum())
    return Outcome([Said(drawn, ctx.detokenize(drawn))], numbers)


# -- speculation -----------------------------------------------------------------------------------

DRAFTERS = (
    "nobody", "null", "model", "same model", "own settings", "suffix", "chain", "useless",
    "adversary", "uniform",
)  # fmt: skip


def speculated(
    world: World,
    which: str,
    settings: Settings,
    prompts: Sequence[Prompt] = (ECHO, TALE),
    *,
    n: int = 40,
    stop: Sequence[str] = (),
    grammar: Constraint | None = None,
    top: int = 0,
    target: str = "target",
    draft: str = "draft",
    options: Settings | None = None,
    **config: object,
) -> Outcome:
    """Several texts of one speculator. It uses for the later ones what it learned from the first."""
    options = options or {}
    drafter = world.drafter(which, draft, target, **options)
    speculator = world.speculator(world.context(target, **options), drafter, **config)
    return Outcome(
        [
            world.generate(speculator, p, n, settings, stop=stop, grammar=grammar, top=top)
            for p in prompts
        ]
    )


def speculated_family(world: World, which: str, settings: Settings, **config: object) -> Outcome:
    """Branches continued in place, forked, rewound and reseeded between generations."""
    ctx = world.context()
    speculator = world.speculator(ctx, world.drafter(which), **config)
    root = world.start(ctx, TALE, settings)
    texts = [world.generate(speculator, root, 20)]
    children = root.fork_many(2)
    texts += [world.generate(speculator, child, 20) for child in children]
    root.rewind(root.position - 8)
    texts.append(world.generate(speculator, root, 15))
    root.reseed(world.seed(4))
    texts.append(world.generate(speculator, root, 15, stop=("zebra",)))
    texts.append(continue_branch(children[0], 10))
    return Outcome(texts)


def session(
    world: World,
    turns: Sequence[str],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
    grammar: Constraint | None = None,
    **config: Any,
) -> Outcome:
    """Token by token, each with another drafter; then on an existing branch."""
    ctx = world.context()
    drafters_by_name = {which: world.drafter(which) for which in dict.fromkeys(turns)}
    drafters = [drafters_by_name[which] for which in turns]
    texts = [world.session(ctx, ECHO, drafters, 50, settings, stop=stop, grammar=grammar, **config)]
    branch = world.start(ctx, TALE, settings, grammar)
    texts.append(world.session(ctx, branch, drafters, 20, None, **config))
    texts.append(continue_branch(branch, 10))
    return Outcome(texts)


# -- the engine ------------------------------------------------------------------------------------


def job(world: World) -> list[lb.Request | str]:
    """Requests of all kinds."""
    request = world.request
    return [
        TALE,
        request(ECHO),
        request(TALK, GREEDY),
        request(FAR, {"seed": 3, "temperature": 1.0}, max_tokens=70),
        request(ECHO, BACK, max_tokens=30),
        request("The king", id="samples", n=3),
        request(list(range(40, 160)), HOT, max_tokens=12),
        request(TALE, WARM, stop=(",", " and ")),
        request("A name:", WARM, grammar=PAIRS),
        request("The old woman", SAMPLING["everything"], n=2),
        request("Nothing more", max_tokens=0),
        request("One", GREEDY, max_tokens=1),
        "The queen",
        "Deep in the wood",
    ]


def shared_prefixes(world: World) -> list[lb.Request | str]:
    """One long beginning with many ends, and samples of the same prompt."""
    long = f"{ECHO} hair of my chin. {TALE} went away. "
    return [
        long,
        *(f"{long}{end}" for end in ("The wolf", "The pig", "She said", "He said")),
        world.request(long, n=4),
        world.request(long + "The wolf", {"seed": 8, "temperature": 0.6}),
    ]


def crowd(world: World) -> list[lb.Request | str]:
    """More requests than fit into a small cache."""
    return [*(f"{TALE} {i}" for i in range(5)), world.request(ECHO, n=3)]


def engine(
    world: World,
    requests: Callable[[World], list[lb.Request | str]],
    which: str = "nobody",
    settings: Settings = WARM,
    *,
    n: int = 30,
    preempts: bool = False,
    target: str = "target",
    draft: str = "draft",
    options: Settings | None = None,
    **config: object,
) -> Outcome:
    drafter = world.drafter(which, draft, target)
    the_engine = world.engine(
        world.context(target, **(options or {})), drafter, settings, n, **config
    )
    texts = world.run(the_engine, requests(world))
    assert not preempts or the_engine.stats.preemptions, "the cache was to be too small"
    return Outcome(texts)


# -- other memories --------------------------------------------------------------------------------

TOY_SETTINGS: dict[str, Settings] = {
    "greedy": {"temperature": 0.0, "logit_bias": FREE},
    "warm": {"temperature": 0.9, "logit_bias": FREE},
    "penalties": {**BACK, "logit_bias": FREE},
}


def toy_job(world: World) -> list[lb.Request | str]:
    return [
        "abcabcabc",
        world.request("the cat the cat", TOY_SETTINGS["penalties"]),
        world.request("abcabc", TOY_SETTINGS["warm"], n=2),
        world.request(list(range(40, 100)), TOY_SETTINGS["greedy"]),
        "xyz",
    ]


# -- all of them -----------------------------------------------------------------------------------


def table(
    name: str,
    run: Callable[..., Outcome],
    axes: Mapping[str, Sequence[object] | Mapping[str, object]],
    **given: object,
) -> dict[str, Case]:
    """Return a case for each combination of the values of all axes; the last axis changes fastest.

    An axis is an argument of ``run`` and its values, with labels for the name if the values are not
    their own labels. A value of the axis "*" stands for several arguments.
    """
    cases: dict[str, Case] = {}
    labelled = [a if isinstance(a, Mapping) else {str(v): v for v in a} for a in axes.values()]
    for labels in product(*labelled):
        chosen: Options = dict(given)
        for axis, values, label in zip(axes, labelled, labels, strict=True):
            value = values[label]
            chosen.update(value if axis == "*" else {axis: value})  # type: ignore[call-overload]
        cases[name.format(*labels)] = partial(run, **chosen)
    return cases


def pairs(names: str, *values: tuple[object, object]) -> dict[str, Options]:
    """Return an axis of two arguments, named by both."""
    return {f"{a}, {b}": dict(zip(names.split(), (a, b), strict=True)) for a, b in values}


RULES = ("token", "block")
AT: dict[str, Settings] = {"greedy": GREEDY, "warm": WARM}
AT_ALL: dict[str, Settings] = {**AT, "penalties": BACK}
CONTEXTS: dict[str, Options] = {
    "f16 cache": {"kv_type": "f16"},
    "q8_0 cache": {"kv_type": "q8_0"},
    "f32 cache, no flash attention": {"kv_type": "f32", "flash_attention": False},
    "small batches": {"n_batch": 16, "n_ubatch": 8},
    "rope scaled": {"rope_scaling": "linear", "rope_freq_scale": 0.5},
    "yarn": {"rope_scaling": "yarn", "rope_freq_scale": 0.5, "yarn_orig_ctx": 512},
    "draft model": {"model": "draft"},
}
SESSIONS: dict[str, Options] = {
    "nobody": {"turns": ("nobody",), "settings": WARM},
    "model": {"turns": ("model",), "settings": WARM, "draft_k": 4},
    "auto": {"turns": ("model",), "settings": WARM, "draft_k": "auto"},
    "greedy": {"turns": ("model", "suffix"), "settings": GREEDY, "draft_k": 4},
    "in turn": {
        "turns": ("nobody", "model", "suffix", "same model"), "settings": WARM, "draft_k": 3,
    },
    "token rule": {
        "turns": ("model", "nobody", "model"), "settings": HOT, "draft_k": 3, "rule": "token",
    },
    "block rule": {"turns": ("model",), "settings": HOT, "draft_k": 4, "rule": "block"},
    "stop": {
        "turns": ("model", "nobody"), "settings": WARM, "draft_k": 4, "stop": (" and ", "the "),
    },
    "grammar": {
        "turns": ("model",), "settings": WARM, "draft_k": 3, "grammar": GRAMMARS["lines"],
    },
    "penalties": {"turns": ("model", "suffix"), "settings": BACK, "draft_k": 3},
}  # fmt: skip
MEMORIES: dict[str, Options] = {
    "llama": {},
    "gemma3": {},
    "gemma3, part of the window": {"swa_full": False},
    "mamba": {},
    "rwkv7": {},
    "lfm2": {},
}


def memory_cases(memory: str, options: Options) -> dict[str, Case]:
    model = memory.split(",")[0]
    warm = TOY_SETTINGS["warm"]
    opened: Options = {"model": model, **options}
    spoken: Options = {"target": model, "draft": f"{model} draft", "options": options}
    prompts = ("abcdefgabcdefg", "the cat the cat")
    drafts: Options = {"which": "model", "prompts": prompts, **spoken}
    rules = pairs(
        "which rule", ("model", "seeded"), ("model", "token"), ("model", "block"),
        ("same model", "seeded"), ("suffix", "seeded"),
    )  # fmt: skip
    shared: Options = {"requests": toy_job, "settings": warm, "n": 30}
    cases: dict[str, Case] = {
        **table("{}", plain, {"settings": TOY_SETTINGS}, prompt=prompts[1], **opened),
        **table("drafts of {}", speculated, {"*": rules}, settings=warm, n=40, draft_k=3, **drafts),
        "drafts, penalties": partial(
            speculated, settings=TOY_SETTINGS["penalties"], draft_k=4, **drafts
        ),
        **{run.__name__: partial(run, settings=warm, **opened) for run in FAMILIES},
        "engine": partial(engine, target=model, options=options, **shared),
        "engine, drafts": partial(engine, which="model", draft_k=3, **shared, **spoken),
    }
    return {f"memory/{memory}/{name}": case for name, case in cases.items()}


FAMILIES: tuple[Callable[..., Outcome], ...] = (forks, rewound, stored)
# "suffix" is not compared under a rejection rule, for the reason in `changed_texts`.
ALONE = [which for which in DRAFTERS if which != "suffix"]
CASES: dict[str, Case] = {
    **table("sampling/{}", plain, {"settings": SAMPLING}),
    **table("prompt/{}, {}", plain, {"prompt": PROMPTS, "settings": TEXTS}),
    **table("stop/{}, {}", plain, {"stop": STOPS, "settings": AT}, prompt=TALE),
    **table("grammar/{}, {}", plain, {"grammar": GRAMMARS, "settings": AT_ALL}, prompt=TALE),
    **table("context/{}", plain, {"*": CONTEXTS}, settings=WARM, n=70),
    "context/raw": raw,
    "context/raw, f16 cache": partial(raw, kv_type="f16"),
    **{
        name: case
        for run in (forks, steered, rewound, committed, stored, saved)
        for name, case in table(
            f"branches/{run.__name__}, {{}}", run, {"settings": AT_ALL}
        ).items()
    },
    **table(
        "speculative/{}, seeded, {}", speculated, {"which": DRAFTERS, "draft_k": (4, "auto")},
        settings=WARM, rule="seeded",
    ),
    **table(
        "speculative/{}, temperature 0", speculated, {"which": DRAFTERS}, settings=GREEDY, draft_k=5
    ),
    **table(
        "speculative/{}, {}, {}", speculated,
        {"which": ALONE, "rule": RULES, "settings": {"warm": WARM, "hot": HOT}}, draft_k=4,
    ),
    **table(
        "speculative/model, {}, {} drafted", speculated,
        {"rule": ("auto", "seeded", *RULES), "draft_k": (0, 2, 12)},
        which="model", settings=HOT, max_draft_tokens=32,
    ),
    **table(
        "speculative/{}, entropy stop", speculated,
        {
            "*": pairs("which rule", ("model", "seeded"), ("model", "token"), ("model", "block"),
                       ("suffix", "seeded"), ("chain", "seeded"), ("chain", "token"),
                       ("chain", "block")),
        },
        settings=WARM, draft_k=8, entropy_stop=1.5,
    ),
    **table(
        "speculative/{}, {}", speculated,
        {
            "*": pairs("which rule", ("model", "seeded"), ("model", "token")),
            "settings": {
                "penalties": BACK, **{k: SAMPLING[k] for k in ("xtc", "bias", "everything")},
            },
        },
        draft_k=3,
    ),
    **table(
        "speculative/{}, grammar {}", speculated,
        {
            "*": pairs("which rule", ("model", "seeded"), ("model", "block")),
            "grammar": GRAMMARS,
        },
        settings=WARM, prompts=(TALE,), draft_k=3,
    ),
    **table(
        "speculative/{}, stop {}", speculated, {"which": ("nobody", "model"), "stop": STOPS},
        settings=WARM, draft_k=4,
    ),
    "speculative/model, alternatives": partial(
        speculated, which="model", settings=WARM, draft_k=4, top=3
    ),
    **table(
        "speculative/family of {}", speculated_family,
        {
            "*": pairs("which rule", ("nobody", "auto"), ("model", "seeded"), ("model", "token"),
                       ("model", "block"), ("suffix", "seeded")),
        },
        settings=WARM, draft_k=4,
    ),
    **table("session/{}", session, {"*": SESSIONS}),
    **table(
        "engine/{}, {}", engine,
        {
            "requests": {"mixed": job, "shared prefixes": shared_prefixes},
            "*": pairs("which draft_k", ("nobody", 4), ("model", 2), ("model", 5), ("model", "auto"),
                       ("suffix", 3), ("chain", 4),
                       ("chain", "auto")),
        },
    ),
    **table(
        "engine/mixed, {} rule, {}", engine, {"rule": RULES, "which": ("model",)},
        requests=job, settings=HOT, draft_k=3,
    ),
    "engine/greedy": partial(engine, requests=job, which="model", settings=GREEDY, draft_k=4),
    **table(
        "engine/preempted, {}", engine, {"which": ("nobody", "model")}, requests=crowd,
        n=60, preempts=True, draft_k=3, options={"n_ctx": 256, "n_seq_max": 6, "n_batch": 64},
    ),
    "engine/few sequences": partial(engine, requests=job, options={"n_seq_max": 2, "n_batch": 32}),
    "engine/small batches": partial(
        engine, requests=job, which="model", draft_k=4, options={"n_batch": 16, "n_ctx": 2048}
    ),
    **{k: case for m, options in MEMORIES.items() for k, case in memory_cases(m, options).items()},
}  # fmt: skip
