"""Structured output: the cost of a mask, extraction with and without drafts, accepted real schemas.

    python -m benchmarks.structured --target MODEL.gguf --threads 1

The text is JSON under one schema of eight fields, from ten short documents. These take turns: free
text, plain JSON, JSON drafted by the grammar, JSON drafted by the grammar and copies (length "auto" and
fixed), and llama-server with the same schema. Where drafts are exact, drafted JSON must be the plain one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

import llamabranch as lb
from llamabranch.bench.timing import Maker, Series, Spread, Timing, Work

from .clocks import interleave
from .llama_server import LlamaServer
from .llama_tools import ToolError, build_server
from .report import Settings, emit, number, parser, pm, table, title
from .wide import cached_wide

VOCABULARIES = (4096, 49_152, 262_144)
SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city_of_residence": {"type": "string", "maxLength": 30},
        "occupation": {"type": "string", "maxLength": 40},
        "employment_status": {"enum": ["employed", "self-employed", "retired", "student"]},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "has_children": {"type": "boolean"},
        "contact_email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
    },
    "required": [
        "full_name", "age", "city_of_residence", "occupation", "employment_status", "hobbies",
        "has_children", "contact_email",
    ],
    "additionalProperties": False,
}  # fmt: skip
TEXTS = (
    "Maria Lindqvist is a 42 year old marine biologist who lives in Gothenburg. She enjoys sailing, "
    "chess and baking bread with her two sons. Her address is maria.lindqvist@example.org.",
    "At 67, the former railway engineer Otto Baumgartner spends his days in Innsbruck painting "
    "landscapes and repairing clocks. He has no children and no e-mail address.",
    "Chiara Benedetti, 23, studies architecture in Bologna and plays volleyball and the violin. "
    "You can write to chiara@studenti.example.it.",
    "Our neighbour Samuel Okafor, aged 35, runs his own bakery in Leeds. After work he coaches a "
    "football team in which his daughter plays (samuel@okafor-bread.example).",
    "Ingrid Solheim retired last year, at 61, as head nurse of the hospital of Bergen. She knits, hikes "
    "and sings in a choir; her three children live abroad.",
    "Yuki Tanaka, a 29 year old translator from Osaka, works for herself. She collects stamps and grows "
    "bonsai trees. Contact: tanaka.yuki@translate.example.",
    "Pierre Delacroix (54) teaches history at a school in Lyon. He plays tennis, reads novels and cooks "
    "for his wife and their son. His mail is p.delacroix@lycee.example.fr.",
    "The student Amina Rahimi, 20 years old, moved to Rotterdam to study medicine; she swims and draws. "
    "She has no children. amina.rahimi@uni.example.nl reaches her.",
    "Carlos Mendoza is employed as a bus driver in Valencia. He is 48, has four children, and spends "
    "his weekends fishing, dancing and playing the guitar.",
    "Dr. Helena Novak, 39, a self-employed dentist in Prague, rides horses and restores old furniture. "
    "She and her twins answer mail at helena@novak-dental.example.cz.",
)
DRAFTERS: dict[str, tuple[Callable[[], lb.Drafter], int | str]] = {
    "plain": (lb.speculative.NullDrafter, 0),
    "grammar, auto": (lb.GrammarDrafter, "auto"),
    "grammar+suffix, auto": (lb.GrammarDrafter.copying, "auto"),
    "grammar+suffix, 15": (lb.GrammarDrafter.copying, 15),
}


def main() -> None:
    """Measure all three parts."""
    described = parser(
        "structured output", runs=3, prompts=len(TEXTS), tokens=160, temperatures=(0.0, 0.8)
    )
    described.add_argument("--schemas", type=Path, help="a JSON file with a list of schemas")
    args = described.parse_args()
    settings = Settings.of(args, tokens=24)
    results: dict[str, object] = {"draws": _draws(settings)}
    with settings.context(settings.target) as ctx:
        for temperature in settings.temperatures:
            results[f"extraction, T = {temperature:g}"] = _extraction(settings, ctx, temperature)
        if args.schemas is not None:
            results["schemas"] = _compile_all(json.loads(args.schemas.read_text("utf-8")))
        emit("structured", settings, {"target": ctx.model}, results)


# -- the cost of a mask ------------------------------------------------------------------------------


def _draws(settings: Settings) -> dict[str, object]:
    """Compare the draw of a token with and without a grammar, for vocabularies of three sizes."""
    rows: list[tuple[str, ...]] = []
    results: dict[str, object] = {}
    grammar = lb.Grammar.from_json_schema(SCHEMA)
    for n_vocab in VOCABULARIES[: 1 if settings.quick else None]:
        path = cached_wide(settings.cache, n_vocab)
        with lb.Model(str(path), vocab_only=True) as model:
            start = perf_counter()
            grammar.start(model)
            first_s = perf_counter() - start
            for temperature in settings.temperatures:
                params = lb.SamplingParams(temperature=temperature, seed=1)
                free, masked = (_draw_s(model, params, g) for g in (None, grammar))
                more = 1e3 * (masked.median - free.median)
                name = f"{n_vocab:,} tokens, T = {temperature:g}"
                medians = (number(1e3 * spread.median, 3) for spread in (free, masked))
                rows.append((name, *medians, number(more, 3), number(first_s, 2)))
                results[name] = {
                    "free_s": free.as_dict(), "masked_s": masked.as_dict(), "tokenizer_s": first_s,
                }  # fmt: skip
    columns = ("", "free, ms", "masked, ms", "difference, ms", "first use of a model, s")
    table("A draw from a row of logits, and the token accepted", columns, rows)
    return results


def _draw_s(model: lb.Model, params: lb.SamplingParams, grammar: lb.Grammar | None) -> Spread:
    rows = np.random.default_rng(1).normal(0, 3, (8, model.n_vocab)).astype(np.float32)
    seconds: list[float] = []
    while len(seconds) < 200:
        sampler = lb.sampling.Sampler(model, params, grammar)
        for position in range(60):
            start = perf_counter()
            token = sampler.distribution(rows[position % 8], position, 1).draw(1, position)
            sampler.accept(token)
            seconds.append(perf_counter() - start)
            if model.is_eog(token):
                break
    return Spread.of(seconds[3:])


# -- extraction --------------------------------------------------------------------------------------


def _extraction(settings: Settings, ctx: lb.Context, temperature: float) -> dict[str, object]:
    grammar = lb.Grammar.from_json_schema(SCHEMA)
    prompts = [f"Text: {text}\nThe same as JSON: " for text in TEXTS[: settings.prompts]]
    decodes: dict[str, list[int]] = {}
    parsed: dict[str, list[object]] = {}

    def work(name: str, run: int) -> Work:
        drafter, length = DRAFTERS.get(name, (lb.speculative.NullDrafter, 0))
        config = lb.SpeculativeConfig(draft_k=length)
        speculator = lb.Speculator(ctx, drafter(), config)

        def generate(i: int) -> Timing:
            params = lb.SamplingParams(temperature=temperature, seed=i)
            under = None if name == "free text" else grammar
            generation = speculator.generate(
                prompts[i], sampling=params, grammar=under, max_tokens=settings.tokens
            ).finish()
            if run == settings.runs - 1:  # by then its times and acceptance are known
                decodes.setdefault(name, []).append(generation.stats.target_forward_passes)
                if under is not None and generation.finish_reason == "stop":
                    parsed.setdefault(name, []).append(grammar.parse(generation.text))
            return Timing(
                len(generation.tokens),
                generation.elapsed_s,
                tuple(generation.tokens),
                generation.stats,
            )

        return generate

    makers: dict[str, Maker] = {name: partial(work, name) for name in ("free text", *DRAFTERS)}
    server = _server(settings, ctx)
    if server is not None:

        def ask(run: int) -> Work:
            def generate(i: int) -> Timing:
                answer = server.generate(
                    ctx.model.tokenize(prompts[i]), settings.tokens, json_schema=SCHEMA,
                    temperature=temperature, seed=i,
                )  # fmt: skip
                return Timing(answer.n_tokens, answer.generating_s)

            return generate

        makers["llama-server"] = ask
    try:
        series = interleave(makers, n_runs=settings.runs, n_items=len(prompts))
    finally:
        if server is not None:
            server.close()
    plain = series["plain"]
    rows: list[tuple[str, ...]] = []
    results: dict[str, object] = {}
    for name, one_series in series.items():
        same, n = one_series.same_texts(plain) if name in DRAFTERS else (0, 0)
        n_decodes = sum(decodes.get(name, []))
        ratio = one_series.ratio(plain)
        rows.append((
            name, pm(one_series.rate, 1), pm(ratio), str(n_decodes) if n_decodes else "-",
            f"{same}/{n}" if n else "-",
            f"{len(parsed.get(name, []))}/{len(prompts)}" if name in DRAFTERS else "-",
        ))  # fmt: skip
        results[name] = _json_of(one_series, plain) | {"decodes": n_decodes, "same": same, "of": n}
    columns = ("", "tokens/s", "over plain JSON", "decodes", "same text", "complete")
    caption = (
        f"JSON of eight fields from {len(prompts)} texts, T = {temperature:g}, {title(ctx.model)}, "
        f"{settings.threads} threads; exact drafts: {ctx.capabilities.exact}"
    )
    table(caption, columns, rows)
    return results


def _json_of(series: Series, base: Series) -> dict[str, object]:
    return {"rate": series.rate.as_dict(), "over_plain": series.ratio(base).as_dict()}


def _server(settings: Settings, ctx: lb.Context) -> LlamaServer | None:
    if not settings.peers:
        return None
    try:
        program = build_server(settings.cache, settings.peers_bin)
        return LlamaServer(
            program, Path(ctx.model.path), threads=settings.threads, n_ctx=settings.n_ctx
        )
    except ToolError as error:
        print(f"without llama-server: {error}", file=sys.stderr)
        return None


# -- schemas -----------------------------------------------------------------------------------------


def _compile_all(schemas: list[object]) -> dict[str, object]:
    """Compile every schema of a list; count the refused ones by reason."""
    seconds: list[float] = []
    refused: dict[str, int] = {}
    for schema in schemas:
        start = perf_counter()
        try:
            lb.Grammar.from_json_schema(json.dumps(schema))
        except lb.errors.GrammarError as error:
            reason = str(error)[:80]
            refused[reason] = refused.get(reason, 0) + 1
        seconds.append(perf_counter() - start)
    n = len(schemas)
    spread = Spread.of(seconds)
    rows = [("accepted", f"{n - sum(refused.values())} of {n}"),
            ("time of one, ms", pm(Spread.of([1e3 * s for s in seconds]), 2)),
            *((reason, str(count)) for reason, count in sorted(refused.items()))]  # fmt: skip
    table("Schemas", ("", ""), rows)
    return {"n": n, "refused": refused, "seconds": spread.as_dict()}


if __name__ == "__main__":
    main()
