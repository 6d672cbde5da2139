"""From names to files: models.txt, the caches, the bundled pair, and `load`."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

import llamabranch as lb
from llamabranch import hub
from llamabranch.load import LoadOptions

LINE = "qwen3-4b | target | Qwen/Qwen3-4B-GGUF | Qwen3-4B-Q4_K_M.gguf | Apache-2.0 | 2.50 GB"
DRAFT_LINE = "tiny | draft | owner/name | tiny.gguf | MIT | 1 MB"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches instead of this machine's."""
    monkeypatch.setenv("LLAMABRANCH_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


# -- models.txt ------------------------------------------------------------------------------------


def test_catalogue_lists_the_bundled_pair_first() -> None:
    first, second, *others = hub.catalogue()
    assert (first.name, first.role, first.bundled) == (hub.BUNDLED_TARGET, "target", True)
    assert (second.name, second.role, second.bundled) == (hub.BUNDLED_DRAFT, "draft", True)
    assert others
    assert not any(entry.bundled for entry in others)


def test_catalogue_alternates_targets_and_their_drafts() -> None:
    entries = hub.catalogue()
    assert [entry.role for entry in entries] == ["target", "draft"] * (len(entries) // 2)
    for target, draft in zip(entries[::2], entries[1::2], strict=True):
        assert hub.draft_for(target.name) == draft.name
        assert draft.size_bytes < target.size_bytes


def test_catalogue_sizes_of_bundled_files_are_true() -> None:
    for entry in hub.catalogue():
        if entry.bundled:
            size = hub.resolve(entry.name).stat().st_size
            assert size == pytest.approx(entry.size_bytes, rel=0.05)


def test_draft_has_no_draft() -> None:
    assert hub.draft_for(hub.BUNDLED_DRAFT) is None
    assert hub.draft_for("/some/file.gguf") is None


def test_parse_skips_comments_and_blank_lines() -> None:
    (entry,) = hub.parse_catalogue(f"# a comment\n\n  {LINE}\n")
    assert entry.name == "qwen3-4b"
    assert entry.repository == "Qwen/Qwen3-4B-GGUF"
    assert entry.size_bytes == 2_500_000_000
    assert entry.download_command == "hf download Qwen/Qwen3-4B-GGUF Qwen3-4B-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("qwen3-4b | target | Qwen/Qwen3-4B-GGUF", "3 fields instead of 6"),
        (LINE + " | more", "7 fields instead of 6"),
        (LINE.replace("Apache-2.0", ""), "the licence is empty"),
        (LINE.replace("qwen3-4b", "qwen 3"), "contains a space or a slash"),
        (LINE.replace("| target |", "| teacher |"), "'teacher', not target or draft"),
        (LINE.replace("Qwen/Qwen3-4B-GGUF", "Qwen3"), "neither owner/name"),
        (LINE.replace("_M.gguf", "_M.bin"), "not the name of a .gguf file"),
        (LINE.replace("2.50 GB", "big"), "the size 'big'"),
    ],
)
def test_parse_refuses_a_bad_line_by_its_number(line: str, complaint: str) -> None:
    with pytest.raises(lb.ConfigError, match=r"models\.txt, line 3: .*") as caught:
        hub.parse_catalogue(f"# models\n\n{line}\n")
    assert complaint in caught.value.message


def test_parse_refuses_a_name_twice() -> None:
    with pytest.raises(lb.ConfigError, match="line 2: duplicate name 'qwen3-4b'"):
        hub.parse_catalogue(f"{LINE}\n{LINE}\n")


def test_parse_refuses_a_draft_without_a_target() -> None:
    with pytest.raises(lb.ConfigError, match="line 1: the draft 'tiny' does not follow a target"):
        hub.parse_catalogue(DRAFT_LINE)
    with pytest.raises(lb.ConfigError, match="line 3"):
        hub.parse_catalogue(f"{LINE}\n{DRAFT_LINE}\n{DRAFT_LINE.replace('tiny', 'tinier')}\n")


# -- resolve ---------------------------------------------------------------------------------------


def test_resolve_finds_the_bundled_pair() -> None:
    for name in (hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT):
        path = hub.resolve(name)
        assert path.is_file()
        assert path.suffix == ".gguf"


def test_resolve_takes_a_path(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    assert hub.resolve(path) == path
    assert hub.resolve(str(path)) == path


def test_resolve_reports_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(lb.ConfigError, match="there is no file"):
        hub.resolve(tmp_path / "absent.gguf")


def test_resolve_refuses_a_folder_and_names_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "inside.gguf").touch()
    with pytest.raises(lb.ConfigError, match="is a folder") as caught:
        hub.resolve(tmp_path)
    assert "inside.gguf" in (caught.value.hint or "")


def test_resolve_suggests_the_nearest_name() -> None:
    with pytest.raises(lb.ConfigError, match="no model is called 'tale-targte'") as caught:
        hub.resolve("tale-targte")
    assert "did you mean tale-target?" in (caught.value.hint or "")


def test_resolve_gives_the_command_that_fetches_a_model(caches: Path) -> None:
    with pytest.raises(lb.ConfigError, match="is not on this machine") as caught:
        hub.resolve("qwen3-0.6b")
    assert "hf download Qwen/Qwen3-0.6B-GGUF Qwen3-0.6B-Q8_0.gguf" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "place",
    [
        "ours/Qwen3-0.6B-Q8_0.gguf",
        "ours/Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf",
        "hub/models--Qwen--Qwen3-0.6B-GGUF/snapshots/0123abcd/Qwen3-0.6B-Q8_0.gguf",
    ],
)
def test_resolve_looks_in_the_caches(caches: Path, place: str) -> None:
    path = caches / place
    path.parent.mkdir(parents=True)
    path.touch()
    assert hub.resolve("qwen3-0.6b") == path


def test_resolve_prefers_the_current_revision_of_the_hub_cache(caches: Path) -> None:
    folder = caches / "hub/models--Qwen--Qwen3-0.6B-GGUF"
    for revision in ("aaaa", "bbbb"):
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "snapshots" / revision / "Qwen3-0.6B-Q8_0.gguf").touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbbb")
    assert hub.resolve("qwen3-0.6b").parent.name == "bbbb"


def test_hub_cache_follows_hf_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMABRANCH_CACHE", str(tmp_path / "ours"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = tmp_path / "home/hub/models--Qwen--Qwen3-0.6B-GGUF/snapshots/0/Qwen3-0.6B-Q8_0.gguf"
    path.parent.mkdir(parents=True)
    path.touch()
    assert hub.resolve("qwen3-0.6b") == path


# -- load ------------------------------------------------------------------------------------------


def test_load_without_a_name_opens_the_bundled_target() -> None:
    with lb.load(n_ctx=256, n_seq_max=2) as context:
        assert context.model.path == hub.resolve(hub.BUNDLED_TARGET)
        assert context.n_ctx == 256
        assert context.n_seq_max == 2


def test_load_closes_the_model_with_the_context() -> None:
    context = lb.load(hub.BUNDLED_DRAFT, n_ctx=256)
    model = context.model
    context.close()
    assert context.closed
    assert model.closed


def test_load_reports_progress_up_to_one() -> None:
    seen: list[float] = []
    with lb.load(hub.BUNDLED_DRAFT, progress=seen.append, n_ctx=256):
        assert seen == sorted(seen)
        assert seen[-1] == pytest.approx(1.0)


def test_load_refuses_an_unknown_option() -> None:
    with pytest.raises(lb.ConfigError, match="no option 'n_ctxx'") as caught:
        lb.load(n_ctxx=4096)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean n_ctx?"


def test_load_closes_the_model_when_the_context_cannot_be_created() -> None:
    with pytest.raises(lb.ConfigError):
        lb.load(hub.BUNDLED_DRAFT, n_ctx=-5)


def test_load_options_are_those_of_model_and_context() -> None:
    of_model = {*inspect.signature(lb.Model).parameters} - {"path", "progress", "vocab_only"}
    of_context = {field.name for field in dataclasses.fields(lb.ContextParams)}
    assert set(LoadOptions.__annotations__) == of_model | of_context
