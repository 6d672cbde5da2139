"""Options: few, the same everywhere, by llama.cpp's names; help, hints, former names."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
from commands import answer, run, said_by
from toys import CHAT_TEMPLATE, write_toy

import llamabranch as lb
from llamabranch import hub
from llamabranch.cli.app import COMMANDS, HIDDEN, MOVED, load_command
from llamabranch.cli.command import HINTS, IGNORED, SETTINGS
from llamabranch.cli.options import setting_names

TARGET, DRAFT = str(hub.resolve(hub.BUNDLED_TARGET)), str(hub.resolve(hub.BUNDLED_DRAFT))
SHORT = ("-c", "256", "-d", "none")


def options(name: str) -> list[Any]:
    return [
        param
        for param in cast(Any, load_command(name).params)
        if param.param_type_name == "option" and param.name != "help" and not param.hidden
    ]


def test_there_are_thirteen_commands_at_most_and_their_own_help_begins_as_the_list() -> None:
    assert len(COMMANDS) <= 13
    for name, line in COMMANDS.items():
        assert (load_command(name).help or "").split("\n\n")[0].replace("\n", " ") == line
        assert load_command(name).name == name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_few_options_and_help_shows_the_first_of_them(name: str) -> None:
    command: Any = load_command(name)
    assert len(options(name)) <= 35
    assert len(command.first) <= 14
    assert command.first <= {param.name for param in options(name)}
    short, whole = (run(name, flag).stdout for flag in ("--help", "--help-all"))
    for param in options(name):
        assert param.opts[0] in whole
        assert (f"{param.opts[0]} " in short) >= (param.name in command.first)
    if len(options(name)) > len(command.first):
        assert "--help-all" in short and "Other names" not in short
    assert short.count("--") <= whole.count("--")


def test_an_option_means_the_same_in_every_command() -> None:
    meant: dict[str, str] = {}
    for name in COMMANDS:
        for param in options(name):
            if param.name == "text_file":  # llama-perplexity's -f
                continue
            for option in param.opts:
                assert meant.setdefault(option, param.opts[0]) == param.opts[0], (name, option)


# -- llama.cpp's spellings -----------------------------------------------------------------------------

# Each line gives the same text by other names of the same options. All have -m, -c and -t.
SPELLINGS = (
    ("generate", "The old king", "--target", TARGET, "--draft", DRAFT, "--draft-length", 3,
     "--max-tokens", 12, "--temperature", 0.7, "--seed", 5, "--n-ctx", 256, "--threads", 1),
    ("generate", "-p", "The old king", "-m", TARGET, "-md", DRAFT, "--draft-max", 3, "-n", 12,
     "--temp", 0.7, "-s", 5, "-c", 256, "-t", 1, "-ngl", 0, "-np", 1),
    ("generate", "-f", "FILE", "--model", TARGET, "--model-draft", DRAFT, "--spec-draft-n-max", 3,
     "--n-predict", 12, "--temp", 0.7, "--seed", 5, "--ctx-size", 256, "-t", 1,
     "--n-gpu-layers", "all", "-fa", "1"),
    ("generate", "--prompts", "The old king", "--target_model", TARGET, "--draft_model", DRAFT,
     "--gamma", 3, "--max_tokens=12", "--temperature", 0.7, "--seed", 5, "-c", 256, "-t", 1),
    ("generate", "The old king", "-m", TARGET, "--auto_regressive", "-n12", "--temp", 0.7, "-s5",
     "-c", 256, "-t", 1, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.05, "--repeat-penalty", 1,
     "-ctk", "bf16", "-ctv", "bf16", "--parallel", 4),
)  # fmt: skip


def test_a_text_is_the_same_by_the_names_of_llama_cpp_vllm_and_the_papers(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("The old king\n")
    token_ids = []
    for line in SPELLINGS:
        arguments = [str(path) if word == "FILE" else word for word in line]
        token_ids.append(answer(*arguments)["results"][0]["tokens"])
    assert token_ids == [token_ids[0]] * len(SPELLINGS)


@pytest.mark.parametrize(
    "settings",
    [
        {"typical_p": 0.9, "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.2},
        {"presence_penalty": 1, "frequency_penalty": 0.5, "penalty_last_n": 20},
        {"dry_multiplier": 2, "dry_base": 1.2, "dry_allowed_length": 1, "dry_sequence_breakers": ("e",)},
        {"dynatemp_range": 0.7, "dynatemp_exponent": 2, "logit_bias": {300: 4.5, 301: -50.0}},
    ],
    ids=["truncation", "penalties", "dry", "temperature and bias"],
)  # fmt: skip
def test_rare_settings_are_those_of_the_library(settings: dict[str, object]) -> None:
    prompt = "Once upon a time there was a king and a king and a king"
    common = ("speculate", prompt, *SHORT, "-n", "24", "-s", "3", "--temp", "1.2")
    texts = [f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in settings.items()]
    tokens = answer(*common, *(word for text in texts for word in ("-S", text)))["tokens"]
    sampling = lb.SamplingParams(temperature=1.2, seed=3).replace(**settings)  # type: ignore[arg-type]
    with lb.load(n_ctx=256, n_threads=1) as ctx:
        expected = lb.Speculator(ctx).generate(prompt, max_tokens=24, sampling=sampling).finish()
    assert tokens == expected.tokens
    assert tokens != answer(*common)["tokens"]


def test_settings_of_loading_and_drafting_are_taken() -> None:
    arguments = ("speculate", "Once upon a time", "-s", "1", "-n", "12")
    plain = answer(*arguments, "-d", "none")["tokens"]
    for more in (
        ("-S", "n_batch=64", "-S", "n_ubatch=16", "-S", "use_mlock=true", "-S", "use_mmap=false"),
        ("-S", "kv_unified=false"),
        ("-k", "4", "-S", "rule=seeded", "-S", "entropy_stop=1"),
    ):
        assert answer(*arguments, *more)["tokens"] == plain
    assert answer(*arguments, "-k", "4", "-S", "rule=token")["rule"] == "token"
    report = answer("generate", "Once", "-n", "4", "-S", "batch_invariant=false")
    assert report["batch_invariant"] is False


def test_minus_one_is_a_random_seed_and_no_limit() -> None:
    arguments = ("speculate", "Once", *SHORT, "--temp", "1.5")
    seeds = {answer(*arguments, "-n", "4", "-s", "-1")["seed"] for _ in range(2)}
    assert len(seeds) == 2 and -1 not in seeds
    limited = answer(*arguments, "-n", "-1", "-s", "1", "--ignore-eos")
    assert limited["finish_reason"] == "capacity"


def test_context_of_zero_tokens_is_the_trained_length() -> None:
    with lb.Model(hub.resolve(hub.BUNDLED_TARGET), vocab_only=True) as model:
        n_ctx = int(model.metadata["llama.context_length"])
    arguments = ("speculate", "Once", "-d", "none", "-n", "-1", "-s", "1", "--ignore-eos")
    assert n_ctx - 4 <= len(answer(*arguments, "-c", "0")["tokens"]) <= n_ctx


def test_structure_is_a_text_a_file_or_an_expression(tmp_path: Path) -> None:
    grammar, schema = tmp_path / "g.gbnf", tmp_path / "s.json"
    grammar.write_text('root ::= " yes" | " no"')
    schema.write_text('{"enum": ["king", "queen"]}')
    arguments = ("speculate", "Once", "-s", "1")
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
    assert (
        answer(*arguments, *system)["tokens"]
        == answer(*arguments, *system, "--chat")["tokens"]
        == asked
    )
    assert answer(*arguments, "--chat")["tokens"] == expected([user])
    wrapped = expected("<Be brief.><Hi>")
    for named in (own, own.read_text()):
        assert answer(*arguments, *system, "--chat-template", named)["tokens"] == wrapped
    assert "unknown chat template 'ChatML'" in said_by(*arguments, "--chat-template", "ChatML")


DONE_ANYWAY = ("-no-cnv", "--no-conversation", "--no-context-shift")  # by generate


# -- hints ---------------------------------------------------------------------------------------------


def test_flags_that_a_command_lacks_get_a_hint() -> None:
    assert sum(len(names.split()) for names in HINTS) <= 60
    known = {option for name in COMMANDS for p in options(name) for option in p.opts}
    for names, hint in HINTS.items():
        for name in names.split():
            if name in known | {*DONE_ANYWAY, "-cnv", "--conversation"}:
                continue  # an option of another command, or without effect
            message = said_by("generate", name, r"x\n")
            assert f"No such option: {name} (" in message, name
            assert hint.split()[0] in message
            assert run("generate", name).exit_code == 2
    assert "--temperature" in said_by("generate", "--temprature", "1")
    assert "llamabranch generate -m" in said_by("-m", "a.gguf", "-p", "x")
    assert "$'...\\n...'" in said_by("speculate", r"a\nb", *SHORT, "-n", "1")


def test_flags_of_llama_cpp_that_change_no_text_are_taken_in_silence() -> None:
    few = ("-n", "4", "-s", "1", "-d", "none", "-m", "tale-target")
    arguments = ("generate", "-p", "The king", *few)
    expected = run(*arguments)
    flags = IGNORED[0].split()
    flags += [part for name in IGNORED[1].split() for part in (name, "1")]
    flags += ["--color", "-co", "on", "--log-colors=off", "-cnv", "-e", "--mirostat", "0"]
    flags += [*DONE_ANYWAY, "-b", "256", "--ubatch-size=64", "--mlock", "--no-mmap", "-tb", "1"]
    flags += ["-ngl", "99"]
    result = run(*arguments, *flags)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.stdout
    assert result.stderr.split(",")[:2] == expected.stderr.split(",")[:2]
    for name in ("--color", "--numa"):  # in front of a prompt
        more = () if name == "--color" else ("distribute",)
        assert run("generate", name, *more, *arguments[1:]).stdout == expected.stdout
    assert "n_batch must be" in said_by(*arguments, "-b", "-5")
    assert run("chat", "-cnv", "--color", "-p", "Hi", "-n", "1").exit_code == 0


@pytest.mark.smollm2
def test_conversation_is_chat_for_a_model_with_a_template() -> None:
    arguments = ("speculate", "Hi", "-n", "4", "-s", "1", "-d", "none", "-m", "smollm2-135m")
    chat = answer(*arguments, "--chat")["tokens"]
    assert answer(*arguments, "-cnv")["tokens"] == chat != answer(*arguments, "-no-cnv")["tokens"]


def test_flags_that_would_change_the_text_are_refused_together_each_with_what_to_use() -> None:
    arguments = ("--mirostat", "2", "--presence-penalty", "0.5", "--typical=0.9", "--keep", "-1")
    message = said_by(
        "generate", "-p", "Hi", *arguments, "--lora", "a.gguf", "--temprature", "1", "--zzz"
    )
    assert message.count("No such option") == 1
    for part in (
        "--mirostat (there is no mirostat",
        "--presence-penalty (-S presence_penalty=VALUE)",
        "--typical (-S typical_p=VALUE)",
        "--keep (it is not here)",
        "--lora (it is not supported)",
        "--temprature (did you mean --temperature?)",
        "; --zzz",
    ):
        assert part in message, part
    for name in sorted(set().union(*setting_names().values())):
        option = "--" + name.replace("_", "-")
        known = {flag for p in options("generate") for flag in p.opts}
        if option not in known and option not in " ".join((*HINTS, *SETTINGS, *IGNORED.values())):
            assert f"{option} (-S {name}=VALUE)" in said_by("generate", option, "1")


def test_a_value_that_looks_like_an_option_is_a_value() -> None:
    assert run("speculate", "--stop", "-hff", "-n", "2").exit_code == 0
    assert run("speculate", "-n2", "-k2", "-dlookup").exit_code == 0
    for prompt in ("-b", "-hff"):
        assert run("speculate", "-n", "2", "-t", "1", *SHORT, "--", prompt).exit_code == 0


@pytest.mark.parametrize("name", MOVED)
def test_former_commands_name_the_new_one(name: str) -> None:
    result = run(name, "x", "--json")
    assert result.exit_code == 2
    assert f"llamabranch {MOVED[name]}" in json.loads(result.stdout)["error"]["message"]
    assert MOVED[name].split()[0].rstrip(",") in COMMANDS


def test_hidden_names_are_not_listed_and_work() -> None:
    shown = run("--help").stdout
    assert all(name in shown for name in COMMANDS)
    for name in HIDDEN:
        assert name not in shown
        assert run(name, "--help").exit_code == 0
    assert run("--version").stdout.startswith("llamabranch 0.")


@pytest.mark.smollm2
def test_commands_agree_on_the_model_and_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without -m, generate and select silently used the tale model, chat and demo SmolLM2."""
    catalogue = importlib.import_module("llamabranch.hub.catalogue")
    few = ("-n", "1", "--temp", "0")
    commands = (
        ("generate", "-p", "The capital of France is", *few),
        ("score", "--context", "The capital of France is", " Paris", " Rome", "--best", "mean"),
        ("chat", "-p", "Hello", *few),
    )
    for name in ("smollm2-135m", "tale-target"):
        monkeypatch.setattr(catalogue, "DEFAULT_MODEL", name)
        for command in commands:
            assert f"model: {name}" in run(*command).stderr, command
    monkeypatch.setattr(catalogue, "DEFAULT_MODEL", "not-installed")
    assert "model: tale-target" in run(*commands[0]).stderr
    assert "model: " not in run(*commands[1], "-m", "tale-target").stderr
