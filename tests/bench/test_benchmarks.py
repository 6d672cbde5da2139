"""The benchmarks run, their arithmetic is right, padded models equal their source. No speed is tested."""

from __future__ import annotations

import cProfile
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import llamabranch as lb
from benchmarks import answer_tasks, answers, llama_tools
from benchmarks.clocks import CallClock, interleave, verify_costs
from benchmarks.drafters import AdversarialDrafter
from benchmarks.llama_tools import LlamaTools, ToolError, parse_report
from benchmarks.paired import holm, mcnemar
from benchmarks.paired import interval as paired_interval
from benchmarks.prompts import PROMPTS
from benchmarks.readme import answer_in, questions
from benchmarks.report import is_padded
from benchmarks.step import OTHER, Work, measure, seconds_by_part, step_cost
from llamabranch.bench import timing
from llamabranch.bench.timing import Interval, Maker, Series, Spread, Stopped, Timing
from llamabranch.bench.workloads import DecodeClock, verify_times
from llamabranch.native import core

ROOT = Path(__file__).parents[2]
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the extra `test` is not installed: gguf"
)

SIMPLE_REPORT = """
0.00.100.405 I encoded    5 tokens in    0.002 seconds, speed: 3203.075 t/s
0.00.100.422 I decoded   41 tokens in    0.032 seconds, speed: 1291.745 t/s
0.00.100.443 I n_draft   = 4
0.00.100.453 I n_predict = 41
0.00.100.463 I n_drafted = 102
0.00.100.473 I n_accept  = 15
0.00.100.483 I accept    = 14.706%
"""
LOOKUP_REPORT = """
0.00.057.446 I decoded   41 tokens in    0.012 seconds, speed: 3416.951 t/s
0.00.057.467 I n_draft      = 3
0.00.057.477 I n_predict    = 41
0.00.057.487 I n_drafted    = 18
0.00.057.529 I n_accept     = 1
"""


def program(name: str, cache: Path, *arguments: str) -> dict[str, object]:
    """Run a benchmark at its smallest; return its JSON line."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--no-peers"]
    command += ["--cache", str(cache), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    *tables, line = done.stdout.splitlines()
    assert any(text.startswith("| ") for text in tables), "tables come before the line"
    found: dict[str, object] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what the benchmarks make."""
    return tmp_path_factory.mktemp("benchmarks")


# -- the programs ----------------------------------------------------------------------------------


@needs_gguf
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "speculative",
        "peers",
        "fork",
        "batch",
        "sampling",
        "search",
        "step",
        "evaluation",
        "constraints",
        "siblings",
    ],
)
def test_benchmark_ends_with_one_json_line(name: str, cache: Path) -> None:
    if name == "step" and not core.available:
        pytest.skip("the compiled core is not built")
    found = program(name, cache)
    assert found["benchmark"] == name
    assert {"hardware", "versions", "models", "settings", "results"} <= set(found)
    models, versions = found["models"], found["versions"]
    assert isinstance(models, dict) and isinstance(versions, dict)
    assert len(models["target"]["hash"]) == 64
    assert {"llamabranch", "llama_cpp_python", "llama_cpp"} <= set(versions)
    assert found["results"]


@needs_gguf
def test_speculative_benchmark_finds_the_text_of_plain_decoding(cache: Path) -> None:
    results = program("speculative", cache, "--tokens", "12")["results"]
    assert isinstance(results, dict)
    cells = results["0.8"]["cells"]
    seeded = [cell for name, cell in cells.items() if "rule" not in name]
    assert len(seeded) > 10
    assert all(cell["same_text"] == cell["compared_text"] == 1 for cell in seeded)


@needs_gguf
@pytest.mark.slow
def test_tasks_are_measured_with_every_length(cache: Path) -> None:
    found = program("tasks", cache, "--target", "tale-target", "--only", "edit", "free")
    results = found["results"]
    assert isinstance(results, dict)
    assert list(results) == ["edit, T = 0.8", "free, T = 0.8"]
    for task in results.values():
        cells = task["compared"]
        assert list(cells) == ["plain", "auto", "fixed 3", "fixed 7", "fixed 15"]
        assert set(task["auto_over"]) == {"plain", task["best_fixed"]}


@needs_gguf
@pytest.mark.slow
def test_results_of_the_readme_are_measured(cache: Path) -> None:
    names = ["--q8-0", "tale-target", "--bf16", "tale-target"]
    results = program("readme", cache, *names, "--only", "edit", "json", "vote")["results"]
    assert isinstance(results, dict)
    assert list(results) == ["edit, Q8_0", "edit, BF16", "json, Q8_0", "json, BF16", "vote, Q8_0"]
    assert all(results[name]["same_texts"] == 1 for name in list(results)[:4])


@needs_gguf
def test_answers_go_on_with_the_plan_of_the_file(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    first = program("answers", cache, "--out", str(out))["results"]
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["plan"] for line in lines[:5]] == list(answer_tasks.TASKS)
    assert [(line["task"], line["item"]) for line in lines[5:]] == [
        (task, i) for i in (0, 1) for task in answer_tasks.TASKS
    ]
    assert program("answers", cache, "--out", str(out))["results"] == first
    assert len(out.read_text("utf-8").splitlines()) == len(lines)
    assert isinstance(first, dict)
    for line in lines[5:]:
        methods = line["methods"]
        if line["task"] in answers.ANSWERS:  # the lossless stop changes no answer
            lossless, whole = methods["vote of 8, lossless stop"], methods[answers.VOTE]
            assert lossless["answer"] == whole["answer"]
            assert lossless["tokens"] <= 8 * whole["tokens"]
        assert all(x["valid"] for name, x in methods.items() if name == "rejection" and x["text"])
    assert len(first["planned"]) == len(answers.PLANNED)
    assert all(0.0 <= x["p"] <= x["p_holm"] <= 1.0 for x in first["planned"])


@pytest.mark.parametrize("task", answer_tasks.TASKS)
def test_items_have_a_right_answer_that_is_valid(task: str) -> None:
    prompts = set()
    for seed in range(40):
        level = answer_tasks.LEVELS[task][seed % 3]
        asked = answer_tasks.item(task, seed, level)
        prompts.add(asked.prompt)
        right = {
            "problems": f" 1 + 1 = {asked.answer}", "dates": f" so = {asked.answer}",
            "records": f" {asked.answer}",
        }.get(task, asked.answer)  # fmt: skip
        if asked.answer:
            assert asked.is_right(right) and asked.is_valid(right) and not asked.is_right("")
            if asked.constraint is not None:
                lb.search.check_constraint(asked.constraint, [right])
                assert not asked.constraint.complete(right[:-1])
        assert asked.answer == answer_tasks.item(task, seed, level).answer
    assert len(prompts) > 30


def test_words_keep_the_rules_of_letters() -> None:
    begin, without = answer_tasks.Words(2, "b"), answer_tasks.Words(2, without="e")
    acrostic = answer_tasks.Words(3, "cat")
    lb.search.check_constraint(begin, [" big boats"])
    lb.search.check_constraint(without, [" cat dog"])
    lb.search.check_constraint(acrostic, [" cow ant tiger"])
    for wrong in (" big", " big big", " big boats back", " big cats", "big boats", " Big boats"):
        assert not begin.complete(wrong)
    assert not begin.prefix(" big boats b") and not begin.prefix(" big c")
    assert not without.prefix(" cat we") and not acrostic.prefix(" cow b")


def test_paired_tests_are_exact() -> None:
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert mcnemar(6, 0) == mcnemar(0, 6) == 2 / 64
    assert mcnemar(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired_interval([1.0] * 5) == (1.0, 1.0)
    low, high = paired_interval([0.0, 1.0] * 50)
    assert low == pytest.approx(0.4, abs=0.02) and high == pytest.approx(0.6, abs=0.02)


def test_low_confidence_is_compared_within_a_question() -> None:
    right = [[True, False], [True, True], [False, True]]
    assert answers.auroc(right, [[2.0, 1.0], [0.0, 9.0], [3.0, 3.0]]) == 0.75
    assert math.isnan(answers.auroc([[True]], [[1.0]]))


def test_word_problems_are_forty_with_whole_numbers() -> None:
    asked = questions()
    assert len({question for question, _ in asked}) == len(asked) == 40
    assert all(answer_in(f"= {answer}.") == answer for _, answer in asked)


def test_run_lists_every_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--list"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    steps = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert {"decode", "peers", "speculative", "batch", "layouts", "fork"} <= set(steps)
    parts = {f"step-{part}" for part in ("plain", "drafted", "folders", "growth")}
    assert {"sampling", "search", "resident", *parts} <= set(steps)
    assert {"speculative-150M-f16", "peers-350M-f16"} <= set(steps)


# -- timing ----------------------------------------------------------------------------------------


def test_contestants_take_turns_in_alternating_order_with_fresh_state() -> None:
    seen: list[str] = []
    made: list[tuple[str, int]] = []

    def contestant(name: str) -> Maker:
        def make(run: int) -> object:
            made.append((name, run))

            def work(item: int) -> Timing:
                seen.append(f"{name}{item}")
                return Timing(1, 0.5)

            return work

        return make  # type: ignore[return-value]

    found = interleave({"a": contestant("a"), "b": contestant("b")}, n_runs=2, n_items=2)
    assert seen == ["a0", "b0", "a0", "b0", "b1", "a1", "b0", "a0", "a1", "b1"]
    assert made == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert found["a"].rates == [2.0, 2.0]


def test_a_stopped_run_keeps_the_items_that_all_contestants_finished() -> None:
    def contestant(last: int) -> Maker:
        def work(item: int) -> Timing:
            if item > last:
                raise Stopped
            return Timing(1, 0.5)

        return lambda run: work

    found = interleave({"a": contestant(2), "b": contestant(1)}, n_runs=2, n_items=4)
    assert [len(run) for run in found["a"].runs] == [2]
    assert [len(run) for run in found["b"].runs] == [2]
    at_once = timing.interleave({"a": contestant(-1)}, n_runs=2, n_items=4)
    assert at_once["a"].runs == []


def test_ratio_is_the_median_of_ratios_within_a_run() -> None:
    def series(*seconds: float) -> Series:
        return Series([[Timing(12, s)] for s in seconds])

    slow_machine_in_run_two = series(1.0, 4.0, 1.0), series(2.0, 8.0, 3.0)
    fast, slow = slow_machine_in_run_two
    assert fast.ratio(slow) == Spread(2.0, 2.0, 3.0)
    assert fast.rate == Spread(12.0, 3.0, 12.0)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 13, 20, 36, 100])
def test_interval_of_the_median_covers_it_in_95_of_100(n: int) -> None:
    """Each of n ratios is below the true median with probability 1/2: this alone gives the coverage."""
    values = [float(i) for i in range(n)]
    found = Interval.of(values[::-1])
    below, above = int(found.low), int(found.high)
    assert below == n - 1 - above

    def covered(low: int, high: int) -> float:
        """Chance that more than ``low`` and at most ``high`` of n tosses are heads."""
        return float(sum(math.comb(n, k) for k in range(low + 1, high + 1)) / 2**n)

    assert covered(below, above) >= 0.95
    assert covered(below + 1, above - 1) < 0.95  # a narrower one would not
    assert found.n == n
    assert found.low <= found.median <= found.high


def test_too_few_pairs_have_no_interval_and_no_verdict() -> None:
    for n in range(6):
        found = Interval.of([2.0] * n)
        assert math.isnan(found.low) and math.isnan(found.high)
        assert found.verdict == "inconclusive"
    assert Interval.of([]).as_dict() == {"median": None, "low": None, "high": None, "n": 0}
    assert Interval.of([2.0] * 6).verdict == "faster"
    assert Interval.of([0.5] * 6).verdict == "slower"
    assert Interval.of([0.5] * 6 + [math.nan]).n == 6


def test_interval_of_a_series_compares_item_by_item() -> None:
    def series(*seconds: float) -> Series:
        return Series([[Timing(10, s) for s in seconds[i::2]] for i in range(2)])

    found = series(1, 1, 1, 1, 1, 1).interval(series(2, 3, 2, 3, 2, 3))
    assert (found.low, found.median, found.high, found.n) == (2.0, 2.5, 3.0, 6)


def test_spread_of_nothing_is_nan() -> None:
    assert math.isnan(Spread.of([]).median)
    assert Spread.of([]).as_dict() == {"median": None, "low": None, "high": None}
    assert Spread.of([math.nan, 2.0]).median == 2.0


def test_decode_clock_counts_every_decode_and_restores_the_handle(ctx: lb.Context) -> None:
    with lb.Branch.start(ctx, "Once upon", temperature=0.0) as branch:
        with DecodeClock(ctx) as clock:
            branch.step()
            branch.step()
        branch.step()
    assert clock.n_calls == 2
    assert clock.seconds > 0
    assert ctx.decoder.hook(None) is None


def test_costs_leave_the_context_empty(ctx: lb.Context) -> None:
    times = verify_costs(ctx, (1, 3), n_prefix=8, repeats=2)
    assert set(times) == {1, 3}
    with lb.Branch.start(ctx, "Once upon", temperature=0.8, seed=1) as branch:
        step = step_cost(branch, 3)
    assert 0 < step.share < 1
    assert ctx.usage().cells_used == 0


def test_call_clock_adds_up_the_methods_it_is_given(ctx: lb.Context) -> None:
    with lb.Branch.start(ctx, "Once upon", temperature=0.0) as branch:
        with CallClock(ctx.decoder.handle, "copy", "remove") as clock:
            branch.fork().prune()
            branch.step()
        branch.fork().prune()
    assert clock.n_calls == 2
    assert clock.seconds > 0
    assert not {"copy", "remove"} & set(vars(ctx.decoder.handle))


def test_verify_costs_end_when_stop_returns_true(ctx: lb.Context) -> None:
    with pytest.raises(Stopped):
        verify_times(ctx, (1, 2), n_prefix=8, repeats=2, stop=lambda: True)
    assert ctx.usage().cells_used == 0


def test_profile_counts_builtins_and_numpy_for_the_part_that_called_them(
    target: lb.Model,
) -> None:
    row = np.random.default_rng(1).standard_normal(target.n_vocab).astype(np.float32)
    profile = cProfile.Profile()
    sampler = lb.sampling.Sampler(target, lb.SamplingParams(temperature=0.8, seed=1))
    with profile:
        begin = time.perf_counter()
        for i in range(200):
            sampler.distribution(row, i, 1).draw(1, i)
        whole = time.perf_counter() - begin
    found = seconds_by_part(profile)
    assert {"sampling/", "native/"} <= set(found) <= {"sampling/", "native/", "arguments.py", OTHER}
    assert all(seconds >= 0 for seconds in found.values())
    assert 0.5 * whole < sum(found.values()) <= whole
    modules = seconds_by_part(profile, by_module=True)
    assert {"sampling/sampler.py", "sampling/distribution.py"} <= set(modules)
    assert ("native/core.py" if core.available else "native/sampler.py") in modules
    assert sum(modules.values()) == pytest.approx(sum(found.values()))


def test_parts_of_a_generation_add_up_to_its_time(ctx: lb.Context) -> None:
    opened = []

    def start(stack: ExitStack) -> Work:
        branch = lb.Branch.start(ctx, "Once upon", temperature=0.8, seed=1)
        opened.append(stack.enter_context(branch))
        return lambda: sum(1 for _ in branch.generate(8))

    times = measure(start, [ctx], runs=2)
    assert len(opened) == 4  # one to warm up, two that are timed, one that is profiled
    assert times.n_tokens == 8
    assert sum(times.parts.values()) == pytest.approx(times.total)
    assert {"llama_decode", "branch/", "context/", "sampling/", "native/"} <= set(times.parts)
    assert not any(part.startswith("bench/") for part in times.parts)
    assert 0 < times.parts["llama_decode"] < times.total
    assert ctx.usage().cells_used == 0


@needs_gguf
def test_hotpath_shows_plain_and_drafted_generations(cache: Path) -> None:
    results = program("step", cache, "--only", "folders", "--temperatures", "0.8")["results"]
    assert isinstance(results, dict)
    results = results["folders"]
    assert list(results) == ["plain, T = 0.8", "4 drafted, T = 0.8"]
    for times in results.values():
        assert sum(times["parts_s"].values()) == pytest.approx(times["total_s"])
        assert times["ours_s"] == pytest.approx(times["total_s"] - times["parts_s"]["llama_decode"])
    assert "speculative/" in results["4 drafted, T = 0.8"]["parts_s"]
    assert "speculative/" not in results["plain, T = 0.8"]["parts_s"]


@needs_gguf
def test_resident_engine_reads_what_requests_share_once(cache: Path) -> None:
    results = program("resident", cache)["results"]
    assert isinstance(results, dict)
    for load in results["loads"].values():
        evaluated = load["evaluated_tokens"]
        assert evaluated["Engine, prefix cache"] <= 1.05 * load["distinct_tokens"]
        assert evaluated["Engine"] > 1.5 * load["distinct_tokens"]
    assert set(results["async"]) == {"1", "2"}
    assert set(results["compaction_ms"]) == {"copying K/V", "decoding again"}


@needs_gguf
def test_layouts_are_timed_side_by_side(cache: Path) -> None:
    results = program("layouts", cache)["results"]
    assert isinstance(results, dict)
    assert set(results) == {"1 x 20", "2 x 20"}
    both = {"Engine, unified cache", "Engine, own cells", "one after another"}
    assert set(results["2 x 20"]["compared"]) == both
    assert set(results["1 x 20"]["compared"]) == both - {"Engine, own cells"}


def test_kv_types_are_timed_and_compared(cache: Path) -> None:
    results = program("kv_types", cache)["results"]
    assert isinstance(results, dict)
    (found,) = results.values()
    assert set(found) == {"f16", "bf16", "q8_0"}
    assert found["bf16"]["difference"] == found["q8_0"]["difference"] == 0


def test_edges_are_measured(cache: Path) -> None:
    found = program("edges", cache, "--only", "curve", "opening", "engine")["results"]
    assert isinstance(found, dict)
    assert set(found["curve"]) == {str(n) for n in range(1, 10)}
    assert set(found["opening"]) == {"exactness_s"}
    kinds = ("Engine(model, parallel=8)", "one cache")
    assert set(found["engine"]) == {f"{n}, {kind}" for n in (8, 16) for kind in kinds}


def test_growth_draws_its_plots(cache: Path) -> None:
    plots = ("--plots", str(cache / "plots"))
    results = program("step", cache, "--only", "growth", *plots)["results"]
    assert isinstance(results, dict)
    results = results["growth"]
    assert list(results["cells"]) == ["64", "128"]
    assert list(results["branches"]) == ["1", "2"]
    for name in ("growth-cells.png", "growth-branches.png"):
        assert (cache / "plots" / name).read_bytes().startswith(b"\x89PNG")


@needs_gguf
def test_wide_model_has_the_vocabulary_it_is_asked_for(tmp_path: Path) -> None:
    from benchmarks.wide import cached_wide

    path = cached_wide(tmp_path, 128_256)
    assert cached_wide(tmp_path, 128_256) == path
    with lb.Model(path) as model:
        assert model.n_vocab == 128_256
        assert model.detokenize(model.tokenize("a b")) == "a b"


# -- peers -----------------------------------------------------------------------------------------


def test_reports_of_the_programs_are_parsed() -> None:
    simple, lookup = parse_report(SIMPLE_REPORT), parse_report(LOOKUP_REPORT)
    assert simple.n_tokens == 41
    assert simple.n_tokens / simple.seconds == pytest.approx(1291.745)
    assert simple.stats is not None
    assert simple.stats.draft_acceptance_rate == pytest.approx(15 / 102)
    assert simple.stats.mean_acceptance_length == pytest.approx(41 / 26)
    assert lookup.stats is not None
    assert (lookup.stats.num_draft_tokens, lookup.stats.num_accepted_tokens) == (18, 1)


def test_a_missing_report_or_program_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="no report"):
        parse_report("nothing of the kind")
    with pytest.raises(ToolError, match="llama-bench"):
        LlamaTools(tmp_path, threads=1, n_ctx=64)


def test_programs_that_are_built_are_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.llama_tools.metadata.version", lambda _: "0.0.0")
    folder = tmp_path / "llama-cpp-python-0.0.0" / "build" / "bin"
    folder.mkdir(parents=True)
    for name in llama_tools.PROGRAMS:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    assert llama_tools.build(tmp_path) == folder


# -- useless drafters, padded and useless models ------------------------------------------------------


@pytest.mark.parametrize("k", [4, "auto"])
def test_adversarial_drafter_changes_no_text(ctx: lb.Context, k: int | str) -> None:
    sampling = lb.SamplingParams(temperature=0.8, seed=7)
    with lb.Branch.start(ctx, PROMPTS[0], sampling=sampling) as branch:
        plain = [produced.token for produced in branch.generate(24)]
    speculator = lb.Speculator(ctx, AdversarialDrafter(), lb.SpeculativeConfig(draft_k=k))
    drafted = speculator.generate(PROMPTS[0], max_tokens=24, sampling=sampling).finish()
    assert drafted.tokens == plain
    assert drafted.stats.num_draft_tokens > 0


def logits(path: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Return the logits after each token, float32 (n, V)."""
    with lb.load(path, n_ctx=256, n_threads=1) as ctx:
        ctx.decode(tokens, 0, logits="all")
        return np.array([ctx.logits(i) for i in range(len(tokens))])


@needs_gguf
def test_padded_q8_0_model_computes_its_source(target: lb.Model, tmp_path: Path) -> None:
    """Weights are copied bit for bit, added outputs are zero: only the order of sums may differ."""
    from benchmarks.padded import make_padded

    path = make_padded(target.path, tmp_path / "padded.gguf", 12_000_000, "q8_0")
    tokens = target.tokenize(PROMPTS[0])
    wanted = logits(target.path, tokens)
    assert np.abs(logits(path, tokens) - wanted).max() < 1e-3 * wanted.std()
    with lb.Model(path) as padded:
        assert abs(padded.n_params - 12_000_000) < 600_000
        assert (padded.file_type, padded.n_layer) == ("Q8_0", target.n_layer)
        assert target.compatibility(padded)
        assert is_padded(padded)
    assert not is_padded(target)


@needs_gguf
def test_deeper_padded_f16_model_computes_its_source_in_f16(
    target: lb.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import padded

    plain = padded.make_padded(target.path, tmp_path / "plain.gguf", target.n_params, "f16")
    monkeypatch.setattr(padded, "WIDEST", 1024)
    path = padded.make_padded(target.path, tmp_path / "deep.gguf", 12_000_000, "f16")
    tokens = target.tokenize(PROMPTS[1])
    wanted = logits(plain, tokens)
    assert np.abs(logits(path, tokens) - wanted).max() < 0.02 * wanted.std()
    with lb.Model(path) as made:
        assert made.n_layer > target.n_layer
        assert abs(made.n_params - 12_000_000) < 1_200_000


@needs_gguf
@pytest.mark.parametrize("n_params", [50_000_000, 150_000_000, 350_000_000])
def test_shapes_of_padded_models_are_natural(n_params: int) -> None:
    from benchmarks.padded import Shape, plan_shape

    n_fixed, n_attention, n_embd = 1_048_832, 197_120, 256
    shape = plan_shape(n_params, Shape(6, 768), n_fixed, n_attention, n_embd)
    total = n_fixed + shape.n_layer * (n_attention + 3 * n_embd * shape.n_ff)
    assert 4096 <= shape.n_ff <= 8192
    assert shape.n_ff % 256 == 0
    assert abs(total / n_params - 1) < 0.05


@needs_gguf
def test_padding_refuses_smaller_sizes_and_unknown_types(target: lb.Model, tmp_path: Path) -> None:
    from benchmarks.padded import make_padded, parse_size

    with pytest.raises(ValueError, match="more than"):
        make_padded(target.path, tmp_path / "small.gguf", 1_000_000)
    with pytest.raises(ValueError, match="q4_0"):
        make_padded(target.path, tmp_path / "type.gguf", 12_000_000, "q4_0")
    assert not list(tmp_path.iterdir())
    assert parse_size("150M") == 150_000_000
    assert parse_size("12345") == 12345


@needs_gguf
def test_useless_model_has_the_vocabulary_and_flat_logits(draft: lb.Model, tmp_path: Path) -> None:
    from benchmarks.padded import cached_useless

    path = cached_useless(draft.path, tmp_path)
    assert cached_useless(draft.path, tmp_path) == path
    with lb.load(path, n_ctx=256, n_threads=1) as ctx:
        assert draft.compatibility(ctx.model)
        assert ctx.model.n_params == draft.n_params
        ctx.decode(draft.tokenize(PROMPTS[2]), 0)
        assert ctx.model_entropy() > 7
