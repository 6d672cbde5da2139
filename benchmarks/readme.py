"""The four results in the README, with SmolLM2-135M.

    python -m benchmarks.readme [--only edit json vote chat] [--q8-0 FILE] [--bf16 FILE]

``ctx.complete`` decodes the edit and the JSON text with its defaults and with ``drafter=None``, in turn.
The prompt is cached, and ratios are taken within a run. The questions in ``arithmetic.txt`` are answered
greedily, by one sample, and by a vote of eight. The time of the vote, whose forks share decodes, is
compared with eight calls of ``complete``, which find the prompt in the cache too. All of it takes some
minutes on two cores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import llamabranch as lb
from llamabranch.bench.timing import Spread
from llamabranch.cli.demo import PERSON, SCHEMA
from llamabranch.speculative.combined import DrafterChoice

from .prompts import TASKS
from .report import Settings, emit, number, parser, percent, pm, table, title

PARTS = ("edit", "json", "vote", "chat")
N_VOTES, TEMPERATURE = 8, 0.7
QUESTIONS = Path(__file__).with_name("arithmetic.txt")
SHOTS = (
    ("Tim has 8 pens and finds 5 more. How many pens does he have?", "8 + 5 = 13"),
    ("A tree has 17 pears. 9 fall down. How many are left?", "17 - 9 = 8"),
    ("Each box has 6 cups. How many cups are in 7 boxes?", "6 x 7 = 42"),
    ("A bag has 34 beans, another has 28. How many beans are there?", "34 + 28 = 62"),
)
TURNS = (
    "Name three rivers in Europe.", "Which of them is the longest?", "Name a city on it.",
    "What can one eat there?", "Suggest a walk of one hour.", "Say it all in one sentence.",
)  # fmt: skip


def main() -> None:
    """Measure all of them, or some."""
    described = parser("the results in the README", runs=5, prompts=1, tokens=160)
    described.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    described.add_argument("--q8-0", default="smollm2-135m:Q8_0", help="the model in Q8_0")
    described.add_argument("--bf16", default="smollm2-135m:BF16", help="the model in BF16")
    args = described.parse_args()
    settings = Settings.of(args, tokens=24)
    results: dict[str, object] = {}
    with (
        settings.context(args.q8_0, n_ctx=4096, n_seq_max=24) as q8_0,
        settings.context(args.bf16, n_ctx=4096, n_seq_max=24) as bf16,
    ):
        for part in args.only:
            results[f"{part}, Q8_0"] = _measure(part, q8_0, settings)
            if part in ("edit", "json"):
                results[f"{part}, BF16"] = _measure(part, bf16, settings)
        emit("readme", settings, {"target": q8_0.model, "bf16": bf16.model}, results)


def _measure(part: str, ctx: lb.Context, settings: Settings) -> Mapping[str, object]:
    if part == "edit":
        caption = "A function with a variable renamed"
        return _drafted(caption, ctx, settings, TASKS["edit"], stop=("\n\n", "\n```"), schema=None)
    if part == "json":
        prompt = f"Text: {PERSON}\nThe same as JSON: "
        return _drafted(
            "JSON of five fields from a text", ctx, settings, prompt, stop=(), schema=SCHEMA
        )
    return _voted(ctx, settings) if part == "vote" else _talked(ctx, settings)


# -- drafts without a draft model ----------------------------------------------------------------------


def _drafted(
    caption: str,
    ctx: lb.Context,
    settings: Settings,
    prompt: str,
    *,
    stop: Sequence[str],
    schema: Mapping[str, object] | None,
) -> Mapping[str, object]:
    """Compare ``complete`` with plain decoding, at temperature 0."""
    drafters: dict[str, DrafterChoice] = {"auto": "auto", "plain": None}
    seconds: dict[str, list[float]] = {name: [] for name in drafters}
    decodes: dict[str, list[float]] = {name: [] for name in drafters}
    results: dict[str, lb.Result] = {}
    n_same = 0
    for run in range(settings.runs + 2):  # two to warm up: `auto` learns
        for name in list(drafters)[:: 1 if run % 2 else -1]:
            start = perf_counter()
            results[name] = ctx.complete(
                prompt, drafter=drafters[name], max_tokens=settings.tokens, stop=stop,
                temperature=0.0, json_schema=schema,
            )  # fmt: skip
            if run > 1:
                seconds[name].append(perf_counter() - start)
                decodes[name].append(results[name].stats.target_forward_passes)
        n_same += run > 1 and results["auto"].text == results["plain"].text
    faster = Spread.of([b / a for a, b in zip(seconds["auto"], seconds["plain"], strict=True)])
    rows = [
        (
            name, pm(Spread.of(seconds[name])), pm(faster) if name == "auto" else "1",
            str(len(result.tokens)), pm(Spread.of(decodes[name]), 0),
        )
        for name, result in results.items()
    ]  # fmt: skip
    exact = ctx.capabilities.exact
    table(
        f"{caption}, {title(ctx.model)}, {settings.threads} threads; the same text in {n_same} of "
        f"{settings.runs} runs, guaranteed: {exact}",
        ("", "seconds", "over plain", "tokens", "target decodes"), rows,
    )  # fmt: skip
    return {
        "seconds": {name: Spread.of(samples).as_dict() for name, samples in seconds.items()},
        "decodes": {name: Spread.of(samples).as_dict() for name, samples in decodes.items()},
        "faster": faster.as_dict(), "same_texts": n_same, "exact": exact,
        "tokens": len(results["auto"].tokens), "text": results["auto"].text,
        "parsed": results["auto"].parsed_or(None) if schema else None,
    }  # fmt: skip


# -- best of eight by a vote ---------------------------------------------------------------------------


def questions() -> list[tuple[str, str]]:
    """Return the questions of ``arithmetic.txt`` with their answers."""
    lines = QUESTIONS.read_text("utf-8").splitlines()
    return [(question, answer) for question, answer in (line.split("\t") for line in lines)]


def prompt_of(question: str) -> str:
    """Return a question after the four examples."""
    shots = "".join(f"Question: {example}\nAnswer: {worked}\n\n" for example, worked in SHOTS)
    return f"{shots}Question: {question}\nAnswer:"


def answer_in(text: str) -> str | None:
    """Return the number after the equals sign; None without one."""
    match = re.search(r"=\s*(\d+)", text)
    return match[1] if match else None


def _voted(ctx: lb.Context, settings: Settings) -> Mapping[str, object]:
    """Answer all questions in three ways."""
    asked = questions()[: 3 if settings.quick else None]
    greedy = right_samples = voted = 0.0
    shared_s: list[float] = []
    single_s: list[float] = []
    for number_, (question, answer) in enumerate(asked):
        prompt, seed = prompt_of(question), 100 * number_ + 1
        first = ctx.complete(prompt, max_tokens=16, stop="\n", temperature=0.0)
        greedy += answer_in(first.text) == answer
        start = perf_counter()
        with lb.Branch.start(ctx, prompt, temperature=TEMPERATURE, seed=seed) as root:
            read_s = perf_counter() - start
            start = perf_counter()
            result = lb.search.vote(root, answer_in, N_VOTES, 16, stop="\n")
            shared_s.append(perf_counter() - start)
        voted += result.answer == answer
        right_samples += (
            sum(answer_in(sample.text) == answer for sample in result.hypotheses) / N_VOTES
        )
        start = perf_counter()
        for i in range(N_VOTES):
            ctx.complete(prompt, max_tokens=16, stop="\n", temperature=TEMPERATURE, seed=seed + i)
        single_s.append(perf_counter() - start)
    n = len(asked)
    faster = Spread.of([b / a for a, b in zip(shared_s, single_s, strict=True)])
    table(
        f"{n} word problems, four examples, {title(ctx.model)}, {settings.threads} threads",
        ("", "right", "share"),
        [
            ("one answer, T = 0", f"{greedy:.0f}", percent(greedy / n)),
            (
                f"one answer, T = {TEMPERATURE:g} (mean of 8)",
                f"{right_samples:.1f}",
                percent(right_samples / n),
            ),
            (f"vote of {N_VOTES}, T = {TEMPERATURE:g}", f"{voted:.0f}", percent(voted / n)),
        ],
    )
    table(
        "Seconds for eight answers to a question that has been read",
        ("", "seconds", "over eight calls"),
        [
            ("forked, shared decodes", pm(Spread.of(shared_s), 3), pm(faster)),
            ("eight calls of complete", pm(Spread.of(single_s), 3), "1"),
        ],
    )
    return {
        "n": n, "greedy": greedy, "one_sample": right_samples, "vote": voted, "faster": faster.as_dict(),
        "shared_s": Spread.of(shared_s).as_dict(), "single_s": Spread.of(single_s).as_dict(),
        "last_prompt_s": read_s,
    }  # fmt: skip


# -- a conversation that branches ----------------------------------------------------------------------


def _talked(ctx: lb.Context, settings: Settings) -> Mapping[str, object]:
    """Hold a chat with a retry, an edit and a switch back; count the tokens that are evaluated."""
    evaluated = anew = n_answers = 0
    turns = TURNS[:2] if settings.quick else TURNS
    with lb.Chat(ctx, seed=1, temperature=0.5, max_tokens=48) as chat:

        def take(answer: lb.chat.Answer) -> None:
            nonlocal anew, n_answers
            answer.finish()
            anew += len(answer.prompt) + len(answer.tokens)
            n_answers += 1

        for turn in turns:
            take(chat.send(turn))
        take(chat.retry())
        take(chat.edit(2, "Which of them flows through the most countries?"))
        take(chat.send("Name its source."))
        chat.switch(1)
        take(chat.send("Thank you. One more walk, please."))
        evaluated = chat.stats.num_evaluated_tokens
    table(
        f"A conversation of {n_answers} answers on 3 branches, {title(ctx.model)}",
        ("", "tokens evaluated"),
        [
            ("Chat", f"{evaluated:,}"),
            ("each prompt and answer anew", f"{anew:,}"),
            ("times as many", number(anew / evaluated, 1)),
        ],
    )
    return {"evaluated": evaluated, "anew": anew, "answers": n_answers}


if __name__ == "__main__":
    main()
