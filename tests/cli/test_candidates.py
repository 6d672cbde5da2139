"""``--draft auto`` and the candidates of ``inspect``: by vocabulary, by size, here or on the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import toys
from typer.testing import CliRunner, Result

import llamabranch as lb
from llamabranch import hub
from llamabranch.cli import app
from llamabranch.cli.candidates import candidates, choose_draft, measure

COMMIT = "c" * 40
SHORT = ("-n", "2", "--threads", "1", "--n-ctx", "256", "--prompts", "a", "--explain")


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a byte vocabulary, and caches with models that could draft for it or could not."""
    for name in ("HF_HUB_CACHE", "LLAMABRANCH_CACHE", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("LLAMA_CACHE", "OLLAMA_MODELS", "LLAMABRANCH_DOWNLOAD"):
        monkeypatch.delenv(name, raising=False)
    snapshot = tmp_path / f"HF_HUB_CACHE/models--me--drafts/snapshots/{COMMIT}"
    studio = tmp_path / "HOME/.lmstudio/models/me/other"
    for folder in (snapshot, studio):
        folder.mkdir(parents=True)
    toys.write_llama(snapshot / "fitting-Q8_0.gguf", vocab="bytes", n_layer=1)
    toys.write_llama(snapshot / "larger-Q8_0.gguf", vocab="bytes", n_layer=4, n_ff=512)
    toys.write_llama(snapshot / "too-large-Q8_0.gguf", vocab="bytes", n_layer=12, n_ff=512)
    toys.write_llama(studio / "foreign-Q8_0.gguf", vocab="small", n_layer=1)
    (studio / "damaged-Q8_0.gguf").write_bytes(b"GGUF" + bytes(50_000))
    return toys.write_llama(tmp_path / "big.gguf", vocab="bytes", n_layer=16, n_ff=512)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_candidates_are_those_of_the_vocabulary_first_and_of_about_a_tenth_of_the_size(
    target: Path,
) -> None:
    found = candidates(str(target))
    assert [(each.name, each.drafts_by) for each in found] == [
        ("me/drafts/fitting-Q8_0.gguf", "tokens"),
        ("me/drafts/larger-Q8_0.gguf", "tokens"),
        ("me/other/foreign-Q8_0.gguf", "text"),
    ]
    for each in found:
        assert each.path == hub.resolve(each.name)
        assert each.size_bytes == each.path.stat().st_size


def test_draft_auto_takes_the_fittest_and_says_so(target: Path) -> None:
    result = run("generate", "-m", str(target), "--draft", "auto", *SHORT)
    assert result.exit_code == 0, result.stderr
    assert "draft: suffix+me/drafts/fitting-Q8_0.gguf\n" in result.stderr
    result = run("generate", "--draft", "auto", *SHORT)
    assert "draft: tale-draft\n" in result.stderr


def test_another_quantization_of_the_target_is_no_draft(target: Path) -> None:
    same = target.with_name("f32.gguf")
    toys.write_llama(same, vocab="bytes", n_layer=12, n_ff=512, weights="f32")
    (other,) = target.parent.rglob("too-large-Q8_0.gguf")
    assert other.stat().st_size < same.stat().st_size / 2
    assert other not in [each.path for each in candidates(str(same))]


def test_draft_auto_copies_from_the_text_where_no_model_fits(target: Path) -> None:
    for path in (target.parent / "HF_HUB_CACHE").rglob("*.gguf"):
        path.unlink()
    result = run("generate", "-m", str(target), "--draft", "auto", *SHORT)
    assert result.exit_code == 0, result.stderr
    assert "copying from the text (suffix)" in result.stderr


def test_listed_draft_that_is_not_here_is_asked_for_first(target: Path) -> None:
    snapshot = target.parent / f"HF_HUB_CACHE/models--Qwen--Qwen3-4B-GGUF/snapshots/{COMMIT}"
    snapshot.mkdir(parents=True)
    target.rename(snapshot / "Qwen3-4B-Q4_K_M.gguf")
    first, *others = candidates("qwen3-4b")
    assert (first.name, first.path, first.drafts_by) == ("qwen3-0.6b", None, "unknown")
    assert others
    asked: list[str] = []

    def allowed(name: str) -> Path:
        asked.append(name)
        return snapshot

    assert choose_draft("qwen3-4b", allowed) == "qwen3-0.6b"
    assert asked == ["qwen3-0.6b"]
    assert choose_draft("qwen3-4b", hub.resolve) == "me/drafts/fitting-Q8_0.gguf"


def test_bundled_draft_is_offered_to_its_own_vocabulary_only(tmp_path: Path) -> None:
    large = toys.write_llama(tmp_path / "large.gguf", vocab="bytes", n_layer=8, n_ff=8192)
    assert large.stat().st_size > 4 * hub.resolve(hub.BUNDLED_DRAFT).stat().st_size
    assert hub.BUNDLED_DRAFT not in [each.name for each in candidates(str(large))]
    found = {each.name: each.drafts_by for each in candidates(hub.BUNDLED_TARGET)}
    assert found[hub.BUNDLED_DRAFT] == "tokens"


def test_a_batch_timed_faster_than_one_token_promises_nothing_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(ctx: lb.Context, sizes: Sequence[int], **options: int) -> dict[int, float]:
        slow = 1.0 if len(sizes) > 1 else 0.02  # of the target the first decode was disturbed
        return {n: slow if n == 1 else 0.02 for n in sizes}

    monkeypatch.setattr("llamabranch.cli.candidates.verify_costs", timed)
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(tmp_path / "profile.json"))
    with lb.load(n_ctx=256, n_threads=1) as ctx:
        gain = measure(ctx, ctx)
    assert gain is not None
    for a, (length, speedup) in zip((0.6, 0.8), gain.best, strict=True):
        assert 1 <= speedup <= lb.theory.expected_tokens(a, length)


def test_inspect_lists_candidates_and_what_theory_expects_of_them(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = json.loads(run("inspect", str(target), "--json").stdout)["drafts"]
    assert [each["name"] for each in listed[:2]] == [
        "me/drafts/fitting-Q8_0.gguf",
        "me/drafts/larger-Q8_0.gguf",
    ]
    assert listed[0]["c"] is None  # nothing is timed in tests
    shown = run("inspect", str(target)).stdout
    assert "me/drafts/fitting-Q8_0.gguf" in shown
    assert "drafts" not in json.loads(run("inspect", "tale-target", "tale-draft", "--json").stdout)
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(target.parent / "profile.json"))
    with (
        lb.load(target, n_ctx=256, n_threads=1) as context,
        lb.load("me/drafts/fitting-Q8_0.gguf", n_ctx=256, n_threads=1) as draft,
    ):
        gain = measure(context, draft)
    assert gain is not None
    assert gain.c > 0
    assert gain.v[1] == 1
    for a, (length, speedup) in zip((0.6, 0.8), gain.best, strict=True):
        assert 0 <= length <= 8
        assert 1 <= speedup <= lb.theory.expected_tokens(a, length)


def test_model_without_text_or_that_cannot_be_rewound_has_nothing_to_measure(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = toys.write_llama(tmp_path / "bare.gguf", vocab="none")
    assert candidates(str(bare)) == []
    monkeypatch.setenv("LLAMABRANCH_PROFILE", str(tmp_path / "profile.json"))
    mamba = toys.write_mamba(tmp_path / "mamba.gguf", vocab="bytes")
    with lb.load(mamba, n_ctx=256, n_threads=1) as context:
        assert measure(context, context) is None
