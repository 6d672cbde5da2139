"""What "auto" keeps between runs: where, when and how it is merged, and that no text depends on it."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toys

import llamabranch as lb
from llamabranch import SamplingParams, SpeculativeConfig
from llamabranch.bench import PairBench, Sweep
from llamabranch.generation import profile as pair_profile
from llamabranch.generation.length.acceptance import AcceptanceCounts
from llamabranch.generation.length.auto import AutoLength
from llamabranch.generation.length.base import RoundReport
from llamabranch.generation.profile import (
    PairProfile,
    context_key,
    keep_decode_times,
)
from llamabranch.profile import machine_key, write_entries

AUTO = SpeculativeConfig(draft_k="auto")
PROMPT = "Once upon a time there was a king who had three daughters"
WARM = SamplingParams(temperature=0.8, seed=7)
N_BUCKETS = AcceptanceCounts.SIZE


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of this test's own; no slow draft on a busy machine ends drafting before it is timed."""
    path = tmp_path / "cache" / "profile.json"
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(path))
    monkeypatch.setattr(AutoLength, "LOST_STEPS", math.inf)
    return path


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny targets are timed too, and however long it takes on a busy machine."""
    monkeypatch.setattr(pair_profile, "LEAST_BYTES", 0)
    monkeypatch.setattr(pair_profile, "_MOST_S", 1e9)


def sections(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def times_key(ctx: lb.Context) -> str:
    return f"{machine_key()}, {context_key(ctx)}"


def fresh_c(path: Path) -> float:
    (drafts,) = sections(path)["drafters"].values()
    return float(drafts["c"])


def keep_times(ctx: lb.Context, **changes: object) -> None:
    entry: dict[str, object] = {
        "t1_ms": 2.0,
        "v": {"1": 1.0, "2": 1.1, "5": 1.4, "9": 1.8, "17": 2.6},
        "decodes": {"1": 64, "2": 64, "5": 64, "9": 64, "17": 64},
        "measured": "2026-01-02",
    }
    write_entries([("decode_times", times_key(ctx), entry | changes)])


def keep_drafter(ctx: lb.Context, drafter: lb.Drafter, chance: float, **changes: object) -> None:
    entry: dict[str, object] = {
        "c": 0.1,
        "drafts": 64,
        "tested": [50.0] * N_BUCKETS,
        "accepted": [50.0 * chance] * N_BUCKETS,
        "drawn": [10.0] * N_BUCKETS,
        "measured": "2026-01-03",
    }
    (key,) = drafter.profile_keys.values()
    write_entries([("drafters", f"{times_key(ctx)}, {key}", entry | changes)])


def generate(ctx: lb.Context, drafter: lb.Drafter, n: int = 48) -> tuple[list[int], lb.Speculator]:
    speculator = lb.Speculator(ctx, drafter, AUTO)
    return speculator.generate(PROMPT, max_tokens=n, sampling=WARM).finish().tokens, speculator


# -- what is kept ----------------------------------------------------------------------------------


def test_a_run_keeps_costs_and_acceptance_and_the_next_begins_with_them(
    ctx: lb.Context, draft_ctx: lb.Context, profile: Path
) -> None:
    drafter = lb.ModelDrafter(draft_ctx)
    tokens, speculator = generate(ctx, drafter)
    assert "nothing yet" not in speculator.explain()
    assert "an assumed 0.50" in speculator.explain()
    kept = sections(profile)
    assert kept["version"] == 1
    (times,) = kept["decode_times"].values()
    (drafts,) = kept["drafters"].values()
    assert list(kept["decode_times"]) == [times_key(ctx)]
    assert times["t1_ms"] > 0 and times["v"]["1"] == 1.0
    assert set(times["v"]) == set(times["decodes"])
    assert drafts["c"] > 0 and len(drafts["tested"]) == N_BUCKETS
    assert 0 < drafts["drafts"] <= 64

    again, second = generate(ctx, drafter)
    assert again == tokens
    assert f"the profile of {times['measured']} and " in second.explain()
    assert "assumed" not in second.explain()
    # No plain steps to begin with, and no short drafts: both are known.
    assert isinstance(second.length, AutoLength)
    fresh = lb.Speculator(ctx, drafter, AUTO).length
    assert isinstance(fresh, AutoLength)
    said = fresh.explain()  # before anything was generated
    assert said.count(f"from the profile of {times['measured']}") == 2
    assert f"a drafted token costs {fresh_c(profile):.2f} of" in said
    assert "(0 of 0 tested and earlier runs)" in said
    assert fresh.plain_steps(1) == 0
    times = sections(profile)["decode_times"][times_key(ctx)]
    assert {n: fresh.verify_cost(int(n)) for n in times["v"]} == pytest.approx(times["v"])


def test_nothing_is_read_or_written_where_it_is_off(
    ctx: lb.Context, draft_ctx: lb.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMABRANCH_PROFILE", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, speculator = generate(ctx, lb.ModelDrafter(draft_ctx))
    assert not list(tmp_path.iterdir())
    assert "profile" not in speculator.explain()


def test_fixed_lengths_keep_nothing(ctx: lb.Context, draft_ctx: lb.Context, profile: Path) -> None:
    for drafter, config in (
        (lb.ModelDrafter(draft_ctx), SpeculativeConfig(draft_k=3)),
        (None, AUTO),
    ):
        lb.Speculator(ctx, drafter, config).generate(PROMPT, max_tokens=8, sampling=WARM).finish()
    assert not profile.exists()


def test_an_engine_and_a_session_keep_what_they_learn(
    ctx: lb.Context, draft_ctx: lb.Context, profile: Path
) -> None:
    keep_times(ctx)  # else nothing is kept unless some decode has one token, which time decides
    drafter = lb.ModelDrafter(draft_ctx)
    requests = [lb.Request(PROMPT, max_tokens=n, sampling=WARM) for n in (12, 40)]
    with lb.Engine(ctx, drafter, AUTO) as engine:
        engine.generate(requests)
    (key,) = sections(profile)["drafters"]
    assert ", batched, " in key  # a draft step of several streams has other costs
    engine = lb.Engine(ctx, drafter, AUTO)
    engine.generate(requests[:1])
    assert "the profile of" in engine.explain()
    with lb.InferenceSession(ctx, PROMPT, sampling=WARM, config=AUTO, max_tokens=40) as session:
        while session.next_token(drafter) is not None:
            pass
    assert len(sections(profile)["drafters"]) == 2


def test_each_drafter_of_a_chain_is_kept_by_itself(
    ctx: lb.Context, draft_ctx: lb.Context, profile: Path
) -> None:
    lookup, model = lb.speculative.PromptLookupDrafter(), lb.ModelDrafter(draft_ctx)
    chain = lb.ChainDrafter([lookup, model])
    assert chain.profile_keys == {**lookup.profile_keys, **model.profile_keys}
    keep_times(ctx)
    keep_drafter(ctx, lookup, 0.8)
    keep_drafter(ctx, model, 0.3)
    found = PairProfile(ctx, chain, batched=False).known()
    chances = {n: d.counts.accepted[0] / d.counts.tested[0] for n, d in found.drafters.items()}
    assert chances == {lookup.name: pytest.approx(0.8), model.name: pytest.approx(0.3)}


def test_other_models_widths_and_threads_have_entries_of_their_own(
    target: lb.Model, draft_ctx: lb.Context, toy: lb.Model
) -> None:
    with (
        lb.Context(target, n_ctx=256, n_threads=1) as one,
        lb.Context(target, n_ctx=256, n_threads=2, n_threads_batch=1) as two,
        lb.Context(target, n_ctx=256, n_threads=1, kv_type="f16") as f16,
        lb.Context(toy, n_ctx=256, n_threads=1) as other,
    ):
        assert len({context_key(ctx) for ctx in (one, two, f16, other)}) == 4
    keys = [lb.ModelDrafter(draft_ctx, width=width).profile_keys for width in (1, 2)]
    assert keys[0] != keys[1]
    assert list(keys[0]) == list(keys[1]) == [draft_ctx.model.name]


def test_it_is_written_at_the_end_of_a_generation_and_seldom(
    ctx: lb.Context, draft_ctx: lb.Context, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(pair_profile, "write_entries", lambda entries: written.append(1))
    now = 1000.0
    monkeypatch.setattr(pair_profile, "monotonic", lambda: now)
    speculator = lb.Speculator(ctx, lb.ModelDrafter(draft_ctx), AUTO)
    generation = speculator.generate(PROMPT, max_tokens=24, sampling=WARM)
    for _ in range(20):
        next(generation)
    assert not written
    generation.finish()
    assert len(written) == 1
    speculator.generate(PROMPT, max_tokens=8, sampling=WARM).finish()
    assert len(written) == 1
    now += 60.0
    speculator.generate(PROMPT, max_tokens=8, sampling=WARM).finish()
    assert len(written) == 2
    now += 60.0
    speculator.drafting.save_profile()  # nothing was learned since
    assert len(written) == 2


def test_many_short_runs_write_it_seldom_and_their_end_writes_the_rest(
    target: lb.Model, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(pair_profile, "write_entries", lambda entries: written.append(1))
    monkeypatch.setattr(pair_profile, "monotonic", lambda: 1000.0)

    async def run() -> None:
        async with lb.AsyncEngine(context, lb.SuffixDrafter()) as engine:
            for _ in range(3):
                await engine.complete(PROMPT, max_tokens=8)
            assert len(written) <= 1

    with lb.Context(target, n_ctx=256, n_threads=1) as context:
        keep_times(context)
        asyncio.run(run())
        assert len(written) == 2
        with lb.Engine(context, lb.SuffixDrafter()) as engine:
            for n in (8, 40):
                engine.add_request(lb.Request(PROMPT, max_tokens=n))
            while engine.has_unfinished():
                engine.step()
            assert len(written) == 3
        assert len(written) == 4
        for _ in range(4):
            context.complete(PROMPT, max_tokens=8)
        assert len(written) == 5
    assert len(written) == 6


def test_a_stream_that_is_left_open_ends_in_silence(profile: Path) -> None:
    script = """
        import llamabranch as lb

        ctx = lb.load(n_ctx=256, n_threads=1, n_threads_batch=1)
        text = 3 * "one two three four " + "one two"
        stream = ctx.complete(text, max_tokens=100, temperature=0, stream=True)
        for number, event in enumerate(stream):
            if number > 40:
                break
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_runs_are_merged_by_weight_and_old_ones_fade(ctx: lb.Context, profile: Path) -> None:
    drafter = lb.speculative.PromptLookupDrafter()
    keep_times(ctx, decodes={"1": 64, "2": 64, "5": 10**9, "9": 64, "17": 64})
    keep_drafter(ctx, drafter, 0.5)

    def run(n_rounds: int) -> None:
        length, kept = PairProfile.open(ctx, drafter, AUTO)
        assert kept is not None and length.consider(drafter.name)
        for _ in range(n_rounds):
            length.learn(RoundReport.plain(1, 0.001, 0.0))
            length.learn(RoundReport(drafter.name, True, (0.3,) * 4, 4, 4, 5, 4 * 0.0003, 0.003))
        kept.save(length)

    run(1)
    first = sections(profile)["decode_times"][times_key(ctx)]
    assert first["t1_ms"] < 2.0
    assert 1.4 < first["v"]["5"] < 1.5  # one decode among 65
    assert first["v"]["9"] == 1.8
    for _ in range(12):
        run(30)
    later = sections(profile)
    times = later["decode_times"][times_key(ctx)]
    assert times["t1_ms"] == pytest.approx(1.0, rel=0.05)
    assert times["v"]["5"] == pytest.approx(3.0, rel=0.05)
    assert max(times["decodes"].values()) == 64
    (drafts,) = later["drafters"].values()
    assert drafts["c"] == pytest.approx(0.3, rel=0.1)
    assert drafts["accepted"][2] > 0.9 * drafts["tested"][2]  # the bucket of 0.3 nats


# -- what is not valid -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"t1_ms": 0},
        {"t1_ms": "2"},
        {"t1_ms": True},
        {"v": [1.0]},
        {"v": {}},
        {"v": {"1": 1.0, "two": 1.1}},
        {"v": {"1": 1.0, "-2": 1.1}},
        {"v": {"1": 1.0, "9" * 5000: 1.1}},
        {"v": {"1": 1.0, "2": -1.0}},
        {"v": {"1": 1.0, "2": None}},
        {"v": {"2": 1.1}},
        {"decodes": None},
        {"decodes": {"1": 0}},
        {"v": {"1": 1.0, "2": 10**400}},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_invalid_times_are_ignored(
    changes: dict[str, object], ctx: lb.Context, profile: Path
) -> None:
    drafter = lb.speculative.PromptLookupDrafter()
    keep_times(ctx, **changes)
    keep_drafter(ctx, drafter, 0.5)
    found = PairProfile(ctx, drafter, batched=False).known()
    assert not found.target_s and not found.drafters
    generate(ctx, drafter, 12)


@pytest.mark.parametrize(
    "changes",
    [
        {"c": 0},
        {"c": "cheap"},
        {"drafts": -1},
        {"tested": [1.0]},
        {"tested": None},
        {"tested": [None] * N_BUCKETS},
        {"accepted": [51.0] * N_BUCKETS},
        {"accepted": [-1.0] * N_BUCKETS},
        {"drawn": ["often"] * N_BUCKETS},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_invalid_drafters_are_ignored(
    changes: dict[str, object], ctx: lb.Context, profile: Path
) -> None:
    drafter = lb.speculative.PromptLookupDrafter()
    keep_times(ctx)
    keep_drafter(ctx, drafter, 0.5, **changes)
    found = PairProfile(ctx, drafter, batched=False).known()
    assert found.target_s[1] == pytest.approx(0.002) and not found.drafters


def test_a_model_whose_file_is_gone_keeps_nothing(tmp_path: Path, profile: Path) -> None:
    path = toys.write_llama(tmp_path / "toy.gguf", vocab="bytes")
    with lb.Model(path) as model:
        path.unlink()
        with lb.Context(model, n_ctx=256, n_threads=1) as ctx:
            generate(ctx, lb.speculative.PromptLookupDrafter(), 12)
    assert not profile.exists()


# -- the text --------------------------------------------------------------------------------------


def test_text_never_depends_on_the_profile(
    ctx: lb.Context, draft_ctx: lb.Context, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = lb.ModelDrafter(draft_ctx)
    monkeypatch.setenv("LLAMABRANCH_PROFILE", "0")
    texts, n_drafted = [], []

    def note() -> None:
        tokens, speculator = generate(ctx, drafter)
        texts.append(tokens)
        n_drafted.append(speculator.stats.num_draft_tokens)

    note()
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(profile))
    note()
    for chance, flat in ((0.95, 0.01), (0.05, 1.0)):
        v = {str(n): 1 + flat * (n - 1) for n in (1, 2, 5, 9, 17)}
        keep_times(ctx, v=v)
        keep_drafter(ctx, drafter, chance)
        known = PairProfile(ctx, drafter, batched=False).known()
        assert known.drafters  # what the next text begins with
        note()
    assert all(text == texts[0] for text in texts)
    assert n_drafted[2] > 0


# -- decodes that are timed while nobody waits -----------------------------------------------------

FEW = SpeculativeConfig(max_draft_tokens=2)


def opened(ctx: lb.Context) -> tuple[AutoLength, PairProfile]:
    length, profile = PairProfile.open(ctx, lb.speculative.PromptLookupDrafter(), FEW)
    assert isinstance(length, AutoLength) and profile is not None
    return length, profile


def n_timed(profile: PairProfile) -> int:
    return sum(map(len, profile._timed.values()))


def test_nothing_is_decoded_before_a_text(ctx: lb.Context, profile: Path, any_size: None) -> None:
    n_decodes = ctx.decoder.n_decodes
    speculator = lb.Speculator(ctx, lb.speculative.PromptLookupDrafter(), AUTO)
    engine = lb.Engine(ctx, lb.speculative.PromptLookupDrafter(), AUTO)
    assert ctx.decoder.n_decodes == n_decodes and ctx.kv_cache.cells.clock == 0
    assert "from nothing yet" in speculator.explain()
    engine.generate([lb.Request(PROMPT, max_tokens=8, sampling=WARM)])
    assert "learned from this run's decodes: 1" in engine.explain()
    (times,) = sections(profile)["decode_times"].values()
    assert "1" in times["v"]


def test_every_size_is_timed_one_decode_at_a_time_and_kept(
    ctx: lb.Context, profile: Path, any_size: None
) -> None:
    length, kept = opened(ctx)
    n = 1
    while kept.measure(length):
        n += 1
    assert n == 12 and length.curve.n_measured == {1: 4, 2: 4, 3: 4}
    assert not kept.measure(length)
    assert "measured while nothing ran: 1 to 3" in length.curve.explain()
    assert "others" not in length.curve.explain()
    (times,) = sections(profile)["decode_times"].values()
    assert times["decodes"] == {"1": 4, "2": 4, "3": 4}
    again, kept = opened(ctx)
    assert "from the profile: 1 to 3" in again.curve.explain()
    assert not kept.measure(again)
    keep_times(ctx, decodes={"1": 64, "2": 3, "5": 64, "9": 64, "17": 64})
    assert opened(ctx)[1].measure(again)  # two tokens were decoded three times only, three never


def _observed(target: lb.Model, *, measures: bool) -> list[object]:
    """Return all that a user can see of a context in use, and what it generates."""
    with lb.Context(target, n_ctx=512, n_seq_max=4, n_threads=1) as ctx:
        length, profile = opened(ctx)

        def idle() -> None:
            for _ in range(6 * measures):
                assert profile.measure(length) == (n_timed(profile) < 12)

        idle()
        ctx.keep_prefixes()
        plain = lb.speculative.NullDrafter()  # what is drafted depends on the times
        first = ctx.complete(PROMPT, max_tokens=24, temperature=0.0, drafter=plain).tokens
        with lb.Branch.start(ctx, PROMPT, sampling=WARM) as branch:
            before = branch.fork()
            ctx.decode([5, 6, 7], 0, logits="all")
            idle()
            ctx.audit()
            assert length.curve.n_measured == ({1: 4, 2: 4, 3: 4} if measures else {})
            seen: list[object] = [ctx.usage(), ctx.decoder.n_decodes, ctx.n_seq_free, first]
            seen += [ctx.logits(i).tobytes() for i in range(3)]
            seen += [before.logits.tobytes(), ctx.sample(SamplingParams(temperature=1.0, seed=3))]
            seen += [[(t.token, t.logprob) for t in each.generate(24)] for each in (before, branch)]
            before.prune()
        again = ctx.complete(PROMPT, max_tokens=24, temperature=0.0, drafter=plain).tokens
        return [*seen, again, ctx.usage()]


def test_timing_decodes_leaves_a_context_in_use_as_it_was(
    target: lb.Model, any_size: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for measures in (True, False):
        monkeypatch.setenv("LLAMABRANCH_PROFILE", str(tmp_path / f"{measures}.json"))
        seen.append(_observed(target, measures=measures))
    assert seen[0] == seen[1]


def test_only_what_is_free_is_used(
    target: lb.Model, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lb.Context(target, n_ctx=256, n_seq_max=1, n_threads=1) as ctx:
        length, kept = opened(ctx)
        assert not kept.measure(length)  # a bundled model is tiny
        monkeypatch.setattr(pair_profile, "LEAST_BYTES", 0)
        length, kept = opened(ctx)
        with lb.Branch.start(ctx, PROMPT):
            assert kept.measure(length) and n_timed(kept) == 0
        with lb.Branch.start(ctx, [5] * 255):
            assert kept.measure(length) and n_timed(kept) == 0
        assert kept.measure(length) and n_timed(kept) == 1
    assert kept.measure(length) and n_timed(kept) == 1  # it is closed
    path = toys.write_toy(tmp_path / "toy.gguf", "mamba", vocab="bytes")
    with lb.Model(path) as model, lb.Context(model, n_ctx=256, n_threads=1) as ctx:
        length, kept = opened(ctx)
        assert not kept.measure(length)


def test_slow_decodes_are_not_timed(
    ctx: lb.Context, profile: Path, any_size: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_profile, "_MOST_S", 0.0)
    length, kept = opened(ctx)
    assert not kept.measure(length) and length.curve.n_measured == {1: 1}


def test_who_waits_ends_the_decode_and_no_other_one(
    ctx: lb.Context, profile: Path, any_size: None
) -> None:
    length, kept = opened(ctx)
    kept.end_measuring()
    assert kept.measure(length) and n_timed(kept) == 1

    def ended(decode: Callable[[int], int], n: int) -> int:
        kept.end_measuring()
        return decode(n)

    ctx.decoder.hook(ended)
    assert kept.measure(length) and n_timed(kept) == 1
    ctx.decoder.hook(None)
    ctx.decode([5], 0)
    ctx.audit()


def test_an_interruption_that_waits_is_not_swallowed(
    ctx: lb.Context, profile: Path, any_size: None
) -> None:
    length, kept = opened(ctx)
    ctx.interrupt()
    assert kept.measure(length) and n_timed(kept) == 0
    with pytest.raises(lb.DecodeInterruptedError):
        ctx.decode([5], 0)


def test_an_idle_engine_times_decodes(ctx: lb.Context, profile: Path, any_size: None) -> None:
    async def run() -> None:
        async with lb.AsyncEngine(ctx, lb.speculative.PromptLookupDrafter(), FEW) as engine:
            most = 2 + ctx.n_seq_max
            while f"measured while nothing ran: 1 to {most}" not in engine.engine.explain():
                await asyncio.sleep(0.05)
            found = await engine.complete(PROMPT, max_tokens=8, temperature=0.0)
            assert len(found.tokens) == 8

    asyncio.run(run())


# -- bench -----------------------------------------------------------------------------------------


def test_bench_keeps_the_times_it_measures(
    ctx: lb.Context, draft_ctx: lb.Context, profile: Path
) -> None:
    def run(lengths: tuple[int | str, ...]) -> dict[str, Any]:
        bench = PairBench(
            ctx, lambda: lb.ModelDrafter(draft_ctx), [ctx.tokenize(PROMPT)], WARM,
            Sweep(lengths, n_tokens=16, n_runs=1, n_pairs=1, verify_s=0.0),
        )  # fmt: skip
        report = bench.run()
        found: dict[str, Any] = sections(profile)["decode_times"][times_key(ctx)]
        assert found["v"]["2"] == pytest.approx(report.v[2], abs=1e-3)
        return found

    first = run((1,))
    assert set(first["decodes"]) == {"1", "2"}
    keep_decode_times(ctx, {1: 0.5, 9: 1.0})
    assert set(run((1,))["v"]) == {"1", "2", "9"}
