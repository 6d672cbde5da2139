"""Options: few, the same everywhere, by llama.cpp's names; help on one screen."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from commands import ENDLESS, answer, run, said_by
from toys import CHAT_TEMPLATE, write_toy

import llamabranch as lb
from llamabranch import hub
from llamabranch.cli.app import COMMANDS, load_command
from llamabranch.cli.options import PANELS

TARGET, DRAFT = str(hub.resolve(hub.BUNDLED_TARGET)), str(hub.resolve(hub.BUNDLED_DRAFT))
SHORT = ("-c", "256", "-d", "none")
# The spellings of llama.cpp that stay.
LLAMA_CPP = {
    *("-m", "-md", "-p", "-n", "-c", "-t", "-ngl", "-hf", "--temp", "--top-k", "--top-p"),
    *("--min-p", "--seed", "-j", "--grammar", "-fa", "-ctk"),
}


def options(name: str) -> list[Any]:
    return [
        param
        for param in cast(Any, load_command(name).params)
        if param.param_type_name == "option" and param.name != "help"
    ]


def test_ten_commands_and_speculate_and_their_own_help_begins_as_the_list() -> None:
    assert list(COMMANDS) == [
        *("demo", "generate", "speculate", "chat", "agent", "open", "serve", "score", "bench"),
        *("models", "doctor"),
    ]
    shown = run("--help").stdout
    for name, line in COMMANDS.items():
        assert (load_command(name).help or "").split("\n\n")[0] == line
        assert load_command(name).name == name and f"  {name:<10} {line}\n" in shown
    assert run("--version").stdout.startswith("llamabranch 0.")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_a_screen_with_a_sentence_two_examples_and_every_option(name: str) -> None:
    assert len(options(name)) <= 24
    lines = run(name, "-h").stdout.splitlines()
    assert len(lines) <= 40 and all(len(line) <= 80 for line in lines)
    sentence, empty, *examples, end = lines[:5]
    assert sentence == COMMANDS[name] and empty == end == ""
    assert all(re.match(f"  (.*[|] )?(llamabranch {name}|pip) ", f"{line} ") for line in examples)
    panels = [line[:-1] for line in lines[5:] if line.endswith(":") and line[0] != " "]
    assert panels == [panel for panel in PANELS if panel in panels] and panels[-1] == "Output"
    for param in options(name):
        assert any(f"{param.opts[0]} " in f"{line.replace(',', ' ')} " for line in lines), (
            param.opts
        )


def test_an_option_means_the_same_in_every_command() -> None:
    meant: dict[str, str] = {}
    for name in COMMANDS:
        for param in options(name):
            for option in param.opts:
                if option not in ("--file", "-f"):  # turns, a text, a document
                    assert meant.setdefault(option, param.opts[0]) == param.opts[0], (name, option)
    assert {option for p in options("generate") for option in p.opts} >= LLAMA_CPP


# Each line gives the same text by other names of the same options. All have -m, -c and -t.
SPELLINGS = (
    ("generate", "The old king", "--target", TARGET, "--draft", DRAFT, "--draft-length", 3,
     "--max-tokens", 12, "--temperature", 0.7, "--seed", 5, "--n-ctx", 256, "--threads", 1),
    ("generate", "-p", "The old king", "-m", TARGET, "-md", DRAFT, "--draft-max", 3, "-n", 12,
     "--temp", 0.7, "-s", 5, "-c", 256, "-t", 1, "-ngl", 0, "-S", "n_seq_max=1"),
    ("generate", "--prompts", "The old king", "--target_model", TARGET, "--draft_model", DRAFT,
     "--gamma", 3, "--max_tokens=12", "--temperature", 0.7, "--seed", 5, "-c", 256, "-t", 1),
    ("generate", "The old king", "-m", TARGET, "--auto_regressive", "-n12", "--temp", 0.7, "-s5",
     "-c", 256, "-t", 1, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.05, "-S", "repeat_penalty=1"),
)  # fmt: skip


def test_a_text_is_the_same_by_the_names_of_llama_cpp_vllm_and_the_papers() -> None:
    token_ids = [answer(*line, "--exact")["tokens"] for line in SPELLINGS]
    assert token_ids == [token_ids[0]] * len(SPELLINGS)


def test_rare_settings_are_those_of_the_library() -> None:
    settings: dict[str, Any] = {
        "typical_p": 0.9, "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.2,
        "dry_multiplier": 2, "dry_base": 1.2, "dry_allowed_length": 1, "dry_sequence_breakers": ["e"],
        "dynatemp_range": 0.7, "repeat_penalty": 1.1, "logit_bias": {"300": 4.5, "301": -50.0},
    }  # fmt: skip
    prompt = "Once upon a time there was a king and a king and a king"
    common = ("speculate", prompt, *SHORT, "-n", "24", "-s", "3", "--temp", "1.2")
    words = [f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()]
    settings["logit_bias"] = {300: 4.5, 301: -50.0}
    sampling = lb.SamplingParams(temperature=1.2, seed=3, **settings)
    with lb.load(n_ctx=256, n_threads=1) as ctx:
        text = lb.Speculator(ctx).generate(prompt, max_tokens=24, sampling=sampling).finish()
    tokens = answer(*common, *(part for word in words for part in ("-S", word)))["tokens"]
    assert tokens == text.tokens != answer(*common)["tokens"]


def test_settings_of_loading_drafting_and_requests_are_taken() -> None:
    arguments = ("speculate", "Once upon a time", "-s", "1", "-n", "12", "--exact")
    plain = answer(*arguments, "-d", "none")["tokens"]
    for more in (
        ("-S", "n_batch=64", "-S", "n_ubatch=16", "-S", "use_mlock=true", "-S", "use_mmap=false"),
        ("-k", "4", "-S", "rule=seeded", "-S", "entropy_stop=1"),
    ):
        assert answer(*arguments, *more)["tokens"] == plain
    three = answer("generate", "Once", "-n", "4", "-S", "n=3", "-S", "top_logprobs=1")["results"]
    assert [result["sample"] for result in three] == [0, 1, 2]
    assert len(three[0]["logprobs"][0]["alternatives"]) == 1


def test_short_forms_minus_one_and_a_context_of_zero_tokens() -> None:
    fixed = ("generate", "Once upon a time", "-n", "4", "-c", "256", "-s", "1")
    plain, exact = (answer(*fixed, *more)["exact"] for more in ((), ("--exact",)))
    assert (plain, exact) == (False, True)
    assert "no such option: --exact" in said_by("models", "list", "--exact").lower()
    free = ("speculate", "Once", *SHORT, "--temp", "1.5")  # -1: a random seed, no limit
    seeds = {answer(*free, "-n", "4", "-s", "-1")["seed"] for _ in range(2)}
    assert len(seeds) == 2 and -1 not in seeds
    limited = answer(*free, "-n", "-1", "-s", "1", *ENDLESS)
    assert limited["finish_reason"] == "capacity"
    with lb.Model(hub.resolve(hub.BUNDLED_TARGET), vocab_only=True) as model:
        n_ctx = int(model.metadata["llama.context_length"])
    arguments = ("generate", "Once " * 450, "-d", "none", "-n", "-1", "-s", "1", "-c", "0")
    report = answer(*arguments, "-S", "min_tokens=2000")
    n = report["stats"]["evaluated"] + len(report["tokens"])
    assert report["finish_reason"] == "capacity" and n_ctx - 4 <= n <= n_ctx + 1


def test_structure_is_a_text_a_file_or_an_expression(tmp_path: Path) -> None:
    grammar, schema = tmp_path / "g.gbnf", tmp_path / "s.json"
    grammar.write_text('root ::= " yes" | " no"')
    schema.write_text('{"enum": ["king", "queen"]}')
    arguments = ("generate", "Once", "-s", "1")
    for option, texts in (
        (("--grammar", grammar), (" yes", " no")),
        (("--grammar", grammar.read_text()), (" yes", " no")),
        (("--grammar", "/ (yes|no)/"), (" yes", " no")),
        (("-j", schema), ('"king"', '"queen"')),
        (("--json-schema", schema.read_text()), ('"king"', '"queen"')),
    ):
        assert answer(*arguments, *option)["text"] in texts


def test_system_message_and_template_are_taken(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    model = write_toy(tmp_path / "chat.gguf", vocab="bytes", metadata=template)
    own = tmp_path / "template.jinja"
    own.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    arguments = ("speculate", "Hi", "-m", model, *SHORT, "-n", "8", "-s", "1")

    def expected(prompt: str | list[dict[str, str]]) -> list[int]:
        with lb.load(model, n_ctx=256, n_threads=1) as ctx:
            sampling = lb.SamplingParams(seed=1)
            text = lb.Speculator(ctx).generate(prompt, max_tokens=8, sampling=sampling)
            return text.finish().tokens

    system, user = ("-sys", "Be brief."), {"role": "user", "content": "Hi"}
    asked = expected([{"role": "system", "content": "Be brief."}, user])
    assert answer(*arguments, *system)["tokens"] == asked
    assert answer(*arguments, "--chat")["tokens"] == expected([user])
    wrapped = expected("<Be brief.><Hi>")
    for named in (own, own.read_text()):
        assert answer(*arguments, *system, "-S", f"chat_template={named}")["tokens"] == wrapped
    assert "unknown chat template 'ChatML'" in said_by(*arguments, "-S", "chat_template=ChatML")


def test_a_value_that_looks_like_an_option_is_a_value() -> None:
    assert run("speculate", "-S", "stop=-hff", "-n", "2").exit_code == 0
    assert run("speculate", "-n2", "-k2", "-dsuffix").exit_code == 0
    assert run("speculate", "-n", "2", "-t", "1", *SHORT, "--", "-b").exit_code == 0
    assert answer("generate", "--prompts=--exact", "-n", "1")["results"][0]["prompt"] == "--exact"
    results = answer("generate", "--json", "--prompts", "A", "B", "--exact", "--max_tokens=1")[
        "results"
    ]
    assert [result["prompt"] for result in results] == ["A", "B"]
    assert run("generate", "-p", "-p", "-n", "1", "-m", "tale-target").exit_code == 0


@pytest.mark.smollm2
def test_the_default_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = importlib.import_module("llamabranch.hub.catalogue")
    few = ("generate", "The capital of France is", "-n", "1", "-c", "256")
    for name, shown in (("smollm2-135m", "smollm2-135m"), ("not-installed", "tale-target")):
        monkeypatch.setattr(catalogue, "DEFAULT_MODEL", name)
        assert f"model: {shown}" in run(*few).stderr
    assert "model: " not in run(*few, "-m", "tale-target").stderr
