"""Options by the names of llama.cpp, vLLM and the papers; prompts from files; lists of numbers; help."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from toys import CHAT_TEMPLATE, write_toy
from typer.testing import CliRunner, Result

import llamabranch as lb
from llamabranch import hub
from llamabranch.cli import app
from llamabranch.cli.app import COMMANDS, load_command
from llamabranch.cli.llama_cpp import REFUSED
from llamabranch.cli.options import DRAFT_LENGTH_NAMES
from llamabranch.cli.parsing import options_named

TARGET, DRAFT = str(hub.resolve(hub.BUNDLED_TARGET)), str(hub.resolve(hub.BUNDLED_DRAFT))


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def run_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def commands() -> dict[str, typer.core.TyperCommand]:
    return {name: load_command(name) for name in COMMANDS}


def test_command_line_of_llama_cpp_gives_the_text_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("The old king\n")
    ours = run_json(
        "speculate", "The old king", "--target", TARGET, "--draft", DRAFT, "--draft-length", "3",
        "--max-tokens", "12", "--temperature", "0.7", "--seed", "5", "--n-ctx", "256",
        "--threads", "1", "--gpu-layers", "0",
    )  # fmt: skip
    short = run_json(
        "speculate", "-p", "The old king", "-m", TARGET, "-md", DRAFT, "--draft-max", "3",
        "-n", "12", "--temp", "0.7", "-s", "5", "-c", "256", "-t", "1", "-ngl", "0",
    )  # fmt: skip
    long = run_json(
        "speculate", "--file", str(path), "--model", TARGET, "--model-draft", DRAFT,
        "--spec-draft-n-max", "3", "--n-predict", "12", "--temp", "0.7", "--seed", "5",
        "--ctx-size", "256", "--threads", "1", "--n-gpu-layers", "0",
    )  # fmt: skip
    assert ours["tokens"] == short["tokens"] == long["tokens"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_short_option_means_the_same_in_every_command(name: str) -> None:
    meant: dict[str, str] = {}
    for command in commands().values():
        for param in command.params:
            for option in param.opts:
                if not option.startswith("--"):
                    meant.setdefault(option, param.opts[0])
    # ``theory -a`` is the papers' symbol, ``serve -a`` llama-server's.
    alike = {"--prompts": "--prompt", "--prompt": "--prompt", "--acceptance": "--alias"}
    for param in commands()[name].params:
        for option in param.opts:
            if option.startswith("-") and not option.startswith("--"):
                first, here = meant[option], param.opts[0]
                assert alike.get(here, here) == alike.get(first, first), option


@pytest.mark.parametrize("name", DRAFT_LENGTH_NAMES)
def test_draft_length_has_one_meaning_under_every_name(name: str) -> None:
    table = run_json("theory", name, "3")["table"]
    assert isinstance(table, list)
    assert {row["draft_length"] for row in table} == {3}


def test_a_file_is_one_prompt_of_generate(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Once upon\na time\n\n")
    arguments = ("-n", "2", "--draft", "none", "-t", "1", "--n-ctx", "256")
    answer = run_json("generate", "-p", "A", "-f", str(path), *arguments)
    results = answer["results"]
    assert isinstance(results, list)
    prompts = {result["prompt"] for result in results}
    assert prompts == {"A", "Once upon\na time\n"}  # one newline is taken off, as llama.cpp does


def test_a_prompt_is_given_once() -> None:
    result = run("speculate", "a", "-p", "b")
    assert result.exit_code == 2
    assert "more than one prompt" in result.stderr


def test_select_takes_all_arguments_as_choices_after_a_prompt_option() -> None:
    arguments = ("-t", "1", "-c", "256")
    first = run_json("select", "The king was", " old", " ill", *arguments)
    other = run_json("select", " old", " ill", "-p", "The king was", *arguments)
    assert {**first, "stats": None} == {**other, "stats": None}  # they hold times
    assert run("select", "The king was").exit_code == 2


def test_score_takes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time\n")
    arguments = ("-t", "1", "-c", "256")
    assert run_json("score", "-f", str(path), *arguments) == run_json(
        "score", "Once upon a time", *arguments
    )


def test_theory_takes_lists() -> None:
    listed = run_json("theory", "-k", "4,8", "-a", "0.6,0.9", "--c", "0.1,0.3")
    repeated = run_json(
        "theory", "-k", "4", "-k", "8", "-a", "0.6", "-a", "0.9", "--c", "0.1", "--c", "0.3"
    )
    assert listed == repeated
    result = run("theory", "-k", "4,x")
    assert result.exit_code == 2
    assert "--draft-length" in result.stderr


def test_theory_takes_what_bench_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    lengths = [{"draft_length": length} for length in (1, 2, "auto")]
    path.write_text(
        json.dumps({"a": 0.5, "c": 0.25, "v": {"1": 1.0, "3": 1.5}, "lengths": lengths})
    )
    measured = run_json("theory", str(path))
    given = run_json(
        "theory", "-a", "0.5", "--c", "0.25", "-k", "1,2", "--verify-cost", "1:1,3:1.5"
    )
    assert measured["table"] == given["table"] and measured["best"] == given["best"]
    table = run_json("theory", str(path), "-a", "0.9")["table"]
    assert isinstance(table, list)
    assert {row["acceptance"] for row in table} == {0.9}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a": null, "c": 0.1, "v": {}, "lengths": []}', "no JSON"]
)
def test_theory_refuses_other_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    result = run("theory", str(path))
    assert result.exit_code == 2
    assert "bench" in result.stderr


def test_a_number_as_draft_is_refused_with_the_option_to_use() -> None:
    result = run("speculate", "--draft", "16")
    assert result.exit_code == 2
    assert "--draft-length 16" in result.stderr


@pytest.mark.parametrize("width", ["60", "120"])
def test_help_is_wrapped_at_the_width_of_the_terminal(
    width: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("TERMINAL_WIDTH", width)
    # Typer reads that variable once, when the first help of the process is printed.
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", int(width))
    shown = run("speculate", "--help").stdout
    above = shown.split("╭")[0]
    lines = [line.rstrip() for line in above.splitlines()]
    longest = max(map(len, lines))
    assert longest <= int(width)
    # A line that is not the last of its paragraph had no room for the next word.
    for line, after in pairwise(lines):
        if line.strip() and after.strip():
            assert len(line) + 1 + len(after.split()[0]) >= int(width) - 1


def test_help_names_one_long_name_and_lists_the_others() -> None:
    shown = run("speculate", "--help").stdout
    options, others = shown.split("Other names of these options:")
    for name in ("--gamma", "--ctx-size", "--n-predict", "--temp"):
        assert name in others.split()[-1] or f"{name}," in others
        assert name not in options.replace("--temperature", "").split()


# -- llama.cpp's options -----------------------------------------------------------------------------

OPTIONS = Path(__file__).with_name("llama_cpp_options.txt")  # of llama-cli and llama-server
SHORT = ("-t", "1", "-c", "256", "-d", "none")


def names_of(command: str) -> set[str]:
    params = commands()[command].params
    return {option for p in params for option in (*p.opts, *p.secondary_opts)}


def test_every_option_of_llama_cpp_is_taken_or_refused_with_a_hint() -> None:
    known = names_of("generate") | names_of("speculate") | {"--help", "-h"}
    for name in OPTIONS.read_text("utf-8").split():
        assert name in known or REFUSED.get(name), name


def test_hints_name_options_that_exist() -> None:
    for name, hint in REFUSED.items():
        assert options_named(hint) <= names_of("generate") | {"--help"}, (name, hint)
        for command, rest in re.findall(r"`llamabranch ([a-z]*)(.*?)`", hint):
            options = set(re.findall(r"--[a-z-]+", rest))
            assert options <= (names_of(command) if command else {"--version"}), (name, hint)


def said_by(*arguments: str) -> str:
    return " ".join(run(*arguments).stderr.replace("│", " ").split())


def test_habitual_options_of_llama_server_are_taken() -> None:
    given = ("-fa", "on", "--jinja", "-cb", "-a", "x", "--no-webui", "-ctk", "f16", "-ctv", "f16")
    assert "cannot read" in said_by("serve", *given, "--api-key-file", "/no/such/file")
    assert "K and V have one type" in said_by("serve", "-ctk", "q8_0", "-ctv", "f16")
    assert "none of on, off, auto" in said_by("serve", "-fa", "maybe")
    for option in ("--cache-reuse", "--slot-save-path", "--props", "--reasoning-format", "-ctxcp"):
        said = said_by("serve", option)
        assert f"No such option: {option} (" in said and "in llamabranch generate" not in said


def test_types_of_k_and_v_are_one_type() -> None:
    from llamabranch.cli.options import RuntimeOptions

    plain = run_json("score", "Once upon a time", "-t", "1", "--kv-type", "f16")
    given = ("score", "Once upon a time", "-t", "1", "-ctk", "f16", "-fa", "on")
    assert run_json(*given) == plain
    assert RuntimeOptions(flash_attn="off").options()["flash_attention"] is False


def test_values_of_llama_cpp_are_taken(tmp_path: Path) -> None:
    plain = ("generate", "-p", "Once upon a time", *SHORT)
    text = run_json(*plain, "--temp", "0")["results"][0]["text"]
    assert run_json(*plain, "--temp", "-1")["results"][0]["text"] == text
    for more in (("-ngl", "all"), ("-ngl", "auto"), ("-ngl", "-1"), ("-fa", "1", "-ctk", "bf16")):
        assert run_json(*plain, "--temp", "0", *more)["results"][0]["text"] == text
    assert "Invalid value for" in said_by(*plain, "-ngl", "most")
    assert "needs flash attention" in said_by(*plain, "-ctv", "q8_0", "-fa", "0")
    assert "doctor" in said_by(*plain, "--list-devices")


def test_generate_takes_prompts_as_arguments() -> None:
    given = ("The king", "--temp", "0", *SHORT)
    (alone,) = run_json("generate", *given)["results"]
    assert alone["text"] == run_json("generate", "-p", *given)["results"][0]["text"]
    found = run_json("generate", "The king", "The fox", *given[1:], "-p", "The wolf")["results"]
    assert [each["prompt"] for each in found] == ["The king", "The fox", "The wolf"]
    read = run("generate", "-", *given[1:], "--json", stdin="The king")
    assert json.loads(read.stdout)["results"][0]["text"] == alone["text"]


def test_a_grammar_is_a_text_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "g.gbnf"
    path.write_text('root ::= "a" | "b"')
    given = ("Once", *SHORT, "-s", "1", "--grammar")
    tokens = run_json("speculate", *given, path.read_text())["tokens"]
    assert tokens == run_json("speculate", *given, str(path))["tokens"]
    assert "cannot read" in said_by("speculate", *given, "nothing.gbnf")


def test_commands_and_options_of_other_programs_get_a_hint(tmp_path: Path) -> None:
    assert "llamabranch generate -m" in said_by("-m", "a.gguf", "-p", "x")
    assert "'generate'" in said_by("complete", "-p", "x")
    assert "not llama-bench's" in said_by("bench", "-p", "512", "-r", "3")
    assert "llamabranch kld" in said_by("perplexity", "--kl-divergence")
    (tmp_path / "q8.gguf").touch()
    for name in ("q8.guf", "q9.gguf"):
        assert f"did you mean {tmp_path}/q8.gguf" in said_by(
            "score", "a", "-m", f"{tmp_path}/{name}"
        )


def test_backslash_n_in_a_prompt_is_noted_unless_escapes_are_decided() -> None:
    note = "two characters here"
    assert note in said_by("speculate", r"a\nb", *SHORT, "-n", "1")
    assert note not in said_by("speculate", r"a\nb", *SHORT, "-n", "1", "--no-escape")


def test_what_is_suggested_for_an_unknown_option_exists() -> None:
    for option in ("--colour", "--colors", "--temprature", "--flash-atn", "--mirostatt"):
        said = " ".join(run("speculate", option).stderr.replace("│", " ").split())
        assert f"No such option: {option}" in said
        assert options_named(said.split(option, 1)[1].split("Usage")[0]) <= names_of("speculate")


def test_minus_one_is_a_random_seed_and_no_limit() -> None:
    given = ("Once", *SHORT, "--temp", "1.5")
    seeds = {run_json("speculate", *given, "-n", "4", "-s", "-1")["seed"] for _ in range(2)}
    assert len(seeds) == 2 and -1 not in seeds
    limited = run_json("speculate", *given, "-n", "-1", "-s", "1", "--ignore-eos")
    assert limited["finish_reason"] == "capacity"
    assert run("speculate", "-n", "0").exit_code == run("speculate", "-n", "-3").exit_code == 2
    assert "needs a limit" in run("search", "-n", "-1").stderr


def test_context_of_zero_tokens_is_the_trained_length() -> None:
    with lb.Model(hub.resolve(hub.BUNDLED_TARGET), vocab_only=True) as model:
        n_ctx = int(model.metadata["llama.context_length"])
    given = ("Once", "-t", "1", "-d", "none", "-n", "-1", "-s", "1", "--ignore-eos")
    tokens = run_json("speculate", *given, "-c", "0")["tokens"]
    assert isinstance(tokens, list)
    assert n_ctx - 4 <= len(tokens) <= n_ctx


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (
            "--typical 0.9 --top-n-sigma 2 --xtc-probability 0.5 --xtc-threshold 0.2",
            {"typical_p": 0.9, "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.2},
        ),
        (
            "--presence-penalty 1 --frequency-penalty 0.5 --repeat-penalty 1.1 --repeat-last-n 20",
            {
                "presence_penalty": 1, "frequency_penalty": 0.5, "repeat_penalty": 1.1,
                "penalty_last_n": 20,
            },
        ),
        (
            "--dry-multiplier 2 --dry-base 1.2 --dry-allowed-length 1 --dry-penalty-last-n 30 "
            "--dry-sequence-breaker x --dry-sequence-breaker none --dry-sequence-breaker e",
            {
                "dry_multiplier": 2, "dry_base": 1.2, "dry_allowed_length": 1,
                "dry_penalty_last_n": 30, "dry_sequence_breakers": ("e",),
            },
        ),
        (
            "--dynatemp-range 0.7 --dynatemp-exp 2 -l 300+4.5 --logit-bias 301-inf",
            {"dynatemp_range": 0.7, "dynatemp_exponent": 2, "logit_bias": {300: 4.5, 301: -float("inf")}},
        ),
    ],
    ids=["truncation", "penalties", "dry", "temperature and bias"],
)  # fmt: skip
def test_samplers_of_llama_cpp_are_those_of_the_library(
    options: str, settings: dict[str, object]
) -> None:
    prompt = "Once upon a time there was a king and a king and a king"
    given = (prompt, *SHORT, "-n", "24", "-s", "3", "--temp", "1.2")
    found = run_json("speculate", *given, *options.split())["tokens"]
    sampling = lb.SamplingParams(temperature=1.2, seed=3).replace(**settings)
    with lb.load(n_ctx=256, n_threads=1) as ctx:
        expected = lb.Speculator(ctx).generate(prompt, max_tokens=24, sampling=sampling).finish()
    assert found == expected.tokens
    assert found != run_json("speculate", *given)["tokens"]


def test_logit_bias_that_is_none_is_refused() -> None:
    for text in ("5", "a+1", "5+x", "+1"):
        result = run("speculate", "-l", text)
        assert result.exit_code == 2
        assert "--logit-bias" in result.stderr


def test_escapes_are_processed_on_request_in_what_the_command_line_holds() -> None:
    given = (*SHORT, "-n", "4", "-s", "1")
    plain = run_json("speculate", "a\nb\tc\\d\\q\x41", *given)["tokens"]
    assert run_json("speculate", r"a\nb\tc\\d\q\x41", "-e", *given)["tokens"] == plain
    assert run_json("speculate", "-p", r"a\nb\tc\\d\q\x41", *given, "-e")["tokens"] == plain
    assert run_json("speculate", r"a\nb\tc\\d\q\x41", "--no-escape", *given)["tokens"] != plain
    result = run_json("generate", "-p", r"a\nb", "-e", "--stop", r"\x20", *given)["results"]
    assert isinstance(result, list)
    assert result[0]["prompt"] == "a\nb"
    assert " " not in result[0]["text"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = {"tokenizer.chat_template": CHAT_TEMPLATE}
    path = tmp_path_factory.mktemp("chat") / "chat.gguf"
    return write_toy(path, vocab="bytes", metadata=template)


def test_system_prompt_and_template_are_taken(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Be brief.\n")
    source = tmp_path / "template.jinja"
    source.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    given = ("Hi", "-m", str(chat_model), *SHORT, "-n", "8", "-s", "1")

    def tokens(prompt: list[int]) -> list[int]:
        sampling = lb.SamplingParams(seed=1)
        return lb.Speculator(ctx).generate(prompt, max_tokens=8, sampling=sampling).finish().tokens

    messages = [("system", "Be brief."), ("user", "Hi")]
    with lb.load(chat_model, n_ctx=256, n_threads=1) as ctx:
        written = [{"role": role, "content": content} for role, content in messages]
        expected = tokens(ctx.model.prompt_tokens(written))
        for option in (
            ("-sys", "Be brief."),
            ("-sysf", str(file)),
            ("--chat", "-sys", "Be brief."),
        ):
            assert run_json("speculate", *given, *option)["tokens"] == expected
        own = tokens(ctx.tokenize("<Be brief.><Hi>", parse_special=True))
    result = run_json(
        "generate", "-p", *given, "-sys", "Be brief.", "--chat-template-file", str(source)
    )
    with lb.load(chat_model, chat_template=source.read_text(), n_ctx=256) as ctx:
        assert ctx.model.apply_chat_template(messages) == "<Be brief.><Hi>"
    with lb.load(chat_model, chat_template="llama2", n_ctx=256) as ctx:
        assert "[INST]" in ctx.model.apply_chat_template(messages)
    by_text = run_json(
        "speculate", *given, "-sys", "Be brief.", "--chat-template", source.read_text()
    )
    assert by_text["tokens"] == own
    assert result["failed"] == 0
    both = run("speculate", *given, "-sys", "a", "-sysf", str(file))
    assert both.exit_code == 2
    assert "exclude each other" in both.stderr


def test_batch_sizes_and_ways_to_load_are_taken() -> None:
    given = ("Once upon a time", "-s", "1", "-n", "8", *SHORT)
    plain = run_json("speculate", *given)["tokens"]
    loaded = run_json("speculate", *given, "-b", "64", "-ub", "16", "--mlock", "--no-mmap")
    assert loaded["tokens"] == plain
    assert run_json("speculate", *given, "-b", "4")["tokens"] == plain


def test_a_pipe_gets_the_texts_alone_in_the_order_of_the_prompts() -> None:
    given = ("-p", "Once", "The old", "A", "-s", "2", "-n", "9", "--parallel", "2", *SHORT)
    results = run_json("generate", *given)["results"]
    assert isinstance(results, list)
    texts = [record["text"] for record in sorted(results, key=lambda record: str(record["id"]))]
    assert run("generate", *given).stdout == "\n\n".join(texts) + "\n"
    shown = run("generate", *given, "--display-prompt").stdout
    assert f"[1] The old{texts[1]}\n\n" in shown
