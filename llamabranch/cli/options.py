"""The options of the commands: their names, limits and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODELS = "Models"
_REQUESTS = "Requests"
_DRAFTING = "Drafting"
_SAMPLING = "Sampling"
_RUNTIME = "Runtime"
_OUTPUT = "Output"

Prompt = Annotated[str, typer.Argument(help="What to continue; - reads standard input.")]

Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        "-m",
        help="A GGUF path, or a name from `llamabranch models`. Default: the bundled target.",
        rich_help_panel=_MODELS,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        "-md",
        help="A GGUF path, a name, `lookup`, `suffix`, a chain such as `suffix+NAME`, or `none`. "
        "Default: the draft listed with the target.",
        rich_help_panel=_MODELS,
    ),
]

DraftLength = Annotated[
    str,
    typer.Option(
        "--draft-length",
        "-k",
        metavar="N|auto",
        help="Tokens to draft a round.",
        rich_help_panel=_DRAFTING,
    ),
]
DraftWidth = Annotated[
    int,
    typer.Option(
        min=1,
        max=16,
        help="Candidates at each place of a draft; above 1 the draft is a tree.",
        rich_help_panel=_DRAFTING,
    ),
]
Rule = Annotated[
    str,
    typer.Option(
        metavar="auto|seeded|token|block",
        help="Which drafted tokens stand; auto is seeded with a seed, at temperature 0 and for trees, "
        "else block.",
        rich_help_panel=_DRAFTING,
    ),
]
EntropyStop = Annotated[
    float | None,
    typer.Option(
        help="End a draft where the draft's entropy exceeds this many nats.",
        rich_help_panel=_DRAFTING,
    ),
]

MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", "-n", min=1, help="Tokens to generate.", rich_help_panel=_SAMPLING
    ),
]
Temperature = Annotated[
    float, typer.Option(help="0 takes the most probable token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int, typer.Option(help="Keep the k most probable; 0 keeps all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.", rich_help_panel=_SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(
        help="Drop what is less probable than this share of the best; 0 is off.",
        rich_help_panel=_SAMPLING,
    ),
]
RepeatPenalty = Annotated[
    float, typer.Option(help="Penalise recent tokens; 1 is off.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        "-s",
        help="With a seed the text is that of plain decoding, whatever the draft.",
        rich_help_panel=_SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End at this text; may be repeated.", rich_help_panel=_SAMPLING),
]
IgnoreEnd = Annotated[
    bool,
    typer.Option("--ignore-end", help="Go on past end tokens.", rich_help_panel=_SAMPLING),
]
GrammarFile = Annotated[
    Path | None, typer.Option(help="A file with a GBNF grammar.", rich_help_panel=_SAMPLING)
]
JsonSchema = Annotated[
    str | None,
    typer.Option(help="A JSON schema: a file, or the JSON itself.", rich_help_panel=_SAMPLING),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Wrap the prompt in the target's chat template.",
        rich_help_panel=_SAMPLING,
    ),
]

NCtx = Annotated[
    int | None,
    typer.Option("--n-ctx", "-c", help="Context size in tokens.", rich_help_panel=_RUNTIME),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.", rich_help_panel=_RUNTIME)]
GpuLayers = Annotated[
    int | None,
    typer.Option(
        "--gpu-layers",
        "-ngl",
        help="Layers to put on the GPU; -1 is all.",
        rich_help_panel=_RUNTIME,
    ),
]
KvType = Annotated[
    str | None,
    typer.Option(help="Type of the K/V cache: f16, bf16, q8_0, ...", rich_help_panel=_RUNTIME),
]

TargetModel = Annotated[
    str | None,
    typer.Option(
        "--target-model",
        "--target",
        "-t",
        "-m",
        help="A GGUF path, or a name from `llamabranch models`. Default: the bundled target.",
        rich_help_panel=_MODELS,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        "--draft",
        "-d",
        "-md",
        help="A GGUF path, a name, `lookup`, `suffix`, a chain such as `suffix+NAME`, or `none`. "
        "Default: the draft listed with the target.",
        rich_help_panel=_MODELS,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        "--prompt",
        "-p",
        metavar="P1 P2 ...",
        help="What to continue: one or more texts; may be repeated.",
        rich_help_panel=_REQUESTS,
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        "-i",
        metavar="FILE|-",
        help="A file of prompts, one a line, or of JSON objects (.jsonl); - is standard input.",
        rich_help_panel=_REQUESTS,
    ),
]
Samples = Annotated[
    int,
    typer.Option(min=1, help="Texts for each prompt, from one prefill.", rich_help_panel=_REQUESTS),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Append each result to this file as it ends, one JSON object a line.",
        rich_help_panel=_REQUESTS,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Leave out what --output holds already.",
        rich_help_panel=_REQUESTS,
    ),
]
Gamma = Annotated[
    str,
    typer.Option(
        "--gamma",
        "--draft-length",
        "-k",
        metavar="N|auto",
        help="Tokens to draft a round.",
        rich_help_panel=_DRAFTING,
    ),
]
AutoRegressive = Annotated[
    bool,
    typer.Option(
        "--auto-regressive",
        help="Decode plainly, without a draft: the same as --draft none.",
        rich_help_panel=_DRAFTING,
    ),
]
Parallel = Annotated[
    int,
    typer.Option(min=1, max=255, help="Texts at a time.", rich_help_panel=_RUNTIME),
]

BenchPrompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        "-p",
        help="What to continue; may be repeated. Default: four of its own.",
        rich_help_panel=_REQUESTS,
    ),
]
BenchTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        min=1,
        help="Tokens for each prompt. Default: 64.",
        rich_help_panel=_REQUESTS,
    ),
]
Runs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How often everything is measured. Default: 3.",
        rich_help_panel=_REQUESTS,
    ),
]
Longest = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="The longest draft of the sweep. Default: 8.",
        rich_help_panel=_DRAFTING,
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="One prompt, one run, 16 tokens, lengths 1 and 2: does it run? The times mean little.",
        rich_help_panel=_REQUESTS,
    ),
]
OutputFolder = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write bench.json, speed.png and acceptance.png into this folder.",
        rich_help_panel=_OUTPUT,
    ),
]

Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Also decode plainly: tokens a second, speedup, same text.",
        rich_help_panel=_OUTPUT,
    ),
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain", help="Say how it drafted, why, and what stood.", rich_help_panel=_OUTPUT
    ),
]
TopLogprobs = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --json: list each token with this many alternatives.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=_OUTPUT),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours.", rich_help_panel=_OUTPUT)]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show llama.cpp's log.", rich_help_panel=_OUTPUT),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=_OUTPUT)]

Acceptance = Annotated[
    list[float] | None,
    typer.Option(
        "--acceptance",
        "-a",
        help="Chance that a drafted token stands if those before it stood; may be repeated.",
    ),
]
DraftLengths = Annotated[
    list[int] | None,
    typer.Option("--draft-length", "-k", help="Tokens drafted a round; may be repeated."),
]
DraftCosts = Annotated[
    list[float] | None,
    typer.Option("--c", "-c", help="Time of a draft step over a target step; may be repeated."),
]
VerifyCost = Annotated[
    str,
    typer.Option(
        metavar="V|N:V,N:V,...",
        help="Time to verify, in target steps: one number, or points to go straight between.",
    ),
]
