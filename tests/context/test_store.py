"""The prefix store: what a restart keeps, for each kind of memory; no file can harm a text."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from decodes import Decodes
from programs import TESTS, run_code

import llamabranch as lb
from llamabranch import Branch, Context
from llamabranch.context import kv_file
from llamabranch.context.kv_file import HEADER
from llamabranch.errors import CacheFolderWarning, ConfigError

Make = Callable[..., Context]

# Architecture, options, and whether a text whose end is not stored is used.
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "unified": ("llama", {"exact": True}, True),
    "transposed": ("llama", {"flash_attention": False}, True),
    "q8_0": ("llama", {"kv_type": "q8_0"}, True),
    "non-unified": ("llama", {"kv_unified": False, "exact": True, "n_ctx": 2048 * 6}, True),
    "window": ("gemma3", {"kv_type": "bf16"}, True),
    "window, cells used again": ("gemma3", {"kv_type": "bf16", "swa_full": False}, True),
    "recurrent": ("mamba", {}, True),
    "rwkv": ("rwkv7", {}, True),
    "hybrid": ("lfm2", {}, True),
    "hybrid, no checkpoints": ("lfm2", {"checkpoint_ram": 0}, False),
    "hybrid, qwen": ("qwen35", {}, True),
}


def text(seed: int, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 200, n)]


DOCUMENT = text(0, 1200)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _is_never_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's measured speed never counts: on a busy machine a toy is decoded faster."""
    monkeypatch.setattr("llamabranch.context.store._KNOWN_S", -1)


@pytest.fixture
def opened(toy: lb.Model, folder: Path) -> Make:
    """Opens a context with the folder."""

    def make(**options: Any) -> Context:
        usual: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 2, "n_threads": 1, "exact": True}
        return Context(toy, **{**usual, "cache_dir": folder, **options})

    return make


def n_read(ctx: Context, tokens: list[int]) -> tuple[int, np.ndarray[Any, Any]]:
    """Return how many tokens of a prompt are read, and the logits after it; it is kept."""
    with pytest.MonkeyPatch.context() as patch:
        decodes = Decodes(patch)
        branch = Branch.start(ctx, tokens)
        row = branch.logits
        branch.prune()
    ctx.audit()
    sizes = zip(decodes.sizes, decodes.codes, strict=True)
    return sum(size for size, code in sizes if code == 0), row


def fill(make: Make, *texts: list[int], **options: Any) -> list[np.ndarray[Any, Any]]:
    """Read texts in a context and close it; return the logits after each."""
    with make(**options) as ctx:
        return [n_read(ctx, tokens)[1] for tokens in texts]


def files(folder: Path) -> list[Path]:
    """Return the files of texts."""
    return sorted(path for path in folder.iterdir() if path.suffix != ".sha256")


# -- what a restart keeps --------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"window", "hybrid, no checkpoints"}))
def test_the_same_request_reads_no_more_than_its_last_tokens(
    name: str, tmp_path: Path, folder: Path
) -> None:
    """Also one whose last words are others, and both after a restart."""
    architecture, options, _ = KINDS[name]
    path = toys.write_toy(tmp_path / "toy.gguf", architecture, vocab="bytes")
    usual: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 6, "n_threads": 1, "cache_dir": folder}
    prompts = (DOCUMENT, 16), (DOCUMENT, 16), ([*DOCUMENT[:-4], *text(1, 9)], 30)
    with lb.Model(path) as model:
        for i in range(2):
            with Context(model, **usual | options) as ctx:
                for j, (prompt, most) in enumerate(prompts):
                    result = ctx.complete(prompt, max_tokens=3, min_tokens=3, drafter=None)
                    assert result.evaluated <= most or i == j == 0


@pytest.mark.parametrize("name", KINDS)
def test_after_a_restart_only_new_tokens_are_read(name: str, tmp_path: Path, folder: Path) -> None:
    architecture, options, has_parts = KINDS[name]
    path = toys.write_toy(tmp_path / "toy.gguf", architecture, vocab="bytes")
    usual = {"n_ctx": 2048, "n_seq_max": 6, "n_batch": 32, "n_threads": 1, "cache_dir": folder}
    options = usual | options
    more, other = text(1, 9), text(2, 60)
    with lb.Model(path) as model:

        def make(**changed: Any) -> Context:
            return Context(model, **{**options, **changed})

        with make() as ctx:
            n_read(ctx, DOCUMENT)
        with make(cache_dir=None, prefix_cache=False) as ctx, Branch.start(ctx, DOCUMENT) as branch:
            branch.append(more)
            continued = branch.logits
        for _ in range(2):
            with make() as ctx:
                n, row = n_read(ctx, DOCUMENT + more)
                assert n <= len(more)
                np.testing.assert_array_equal(row, continued)
        with make() as ctx:  # texts that part from it, and one that is a part of it
            n, row = n_read(ctx, DOCUMENT[:900] + other)
            assert (n < 900) == has_parts
            n_again, _ = n_read(ctx, DOCUMENT[:700])
            assert n_again <= 700
        with make(cache_dir=None, prefix_cache=False) as ctx:
            _, alone = n_read(ctx, DOCUMENT[:900] + other)
            scale = float(np.abs(alone).max())
            np.testing.assert_allclose(row, alone, atol=0.05 * scale)


def test_k_v_is_the_same_to_the_bit(opened: Make) -> None:
    with opened() as ctx:
        branch = Branch.start(ctx, DOCUMENT, seed=1)
        layout = ctx.kv_cache.state_layout
        assert layout is not None
        state = layout.joined([(ctx.kv_cache.handle.state(branch.seq_id), 0, 2000)])
        line = [token.token for token in branch.generate(20)]
    with opened() as ctx:
        other = Branch.start(ctx, text(5, 30))  # the cells are others
        again = Branch.create(ctx, branch.sampling)
        assert again.sequence.take_cached(DOCUMENT[:-1]) == len(DOCUMENT) - 1
        again.prefill(DOCUMENT[-1:])
        restored = layout.joined([(ctx.kv_cache.handle.state(again.seq_id), 0, 2000)])
        np.testing.assert_array_equal(restored[8:], state[8:])
        assert [token.token for token in again.generate(20)] == line
        other.prune()
        assert ctx.usage().in_order


def test_a_beginning_that_texts_share_is_stored_once(opened: Make, folder: Path) -> None:
    a, b = DOCUMENT + text(1, 100), DOCUMENT + text(2, 50)
    fill(opened, a)
    n_one = sum(path.stat().st_size for path in files(folder))
    (row,) = fill(opened, b)
    sizes = [path.stat().st_size for path in files(folder)]
    assert len(sizes) == 2
    assert sum(sizes) - n_one < n_one / 10
    with opened() as ctx:
        n, again = n_read(ctx, b)
        assert n == 1
        np.testing.assert_array_equal(row, again)
        assert n_read(ctx, a)[0] == 1


def test_a_long_text_has_several_files_and_a_deleted_one_costs_only_its_end(
    opened: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamabranch.context.store._PIECE", 512)
    fill(opened, DOCUMENT)
    assert len(files(folder)) == 3
    newest = sorted(files(folder), key=lambda path: path.stat().st_mtime_ns)
    newest[0].unlink()  # the end of a text goes first
    with opened() as ctx:
        assert n_read(ctx, DOCUMENT)[0] == len(DOCUMENT) - 1024


def test_what_is_evicted_is_read_back(opened: Make, folder: Path) -> None:
    with opened(n_ctx=1536) as ctx:
        _, first = n_read(ctx, DOCUMENT)
        n_read(ctx, text(4, 1000))  # the first text loses its end
        n, row = n_read(ctx, DOCUMENT)
        assert n == 1
        np.testing.assert_array_equal(row, first)
    assert len(files(folder)) == 2


def test_short_texts_are_not_stored(opened: Make, folder: Path) -> None:
    fill(opened, DOCUMENT[:511])
    assert files(folder) == []


def test_calls_use_it(target: lb.Model, folder: Path) -> None:
    story = "The dog ran to the river. " * 80
    for is_again in (False, True):
        with Context(target, n_ctx=1024, n_threads=1, cache_dir=folder) as ctx:
            answer = ctx.complete(story, max_tokens=3, temperature=0.0)
            assert (answer.cached > 500) == is_again


def test_a_program_that_never_closes_its_context_keeps_it_too(folder: Path) -> None:
    program = """
        import sys, llamabranch as lb
        ctx = lb.load(n_ctx=2048, n_threads=1, cache_dir=sys.argv[1])
        lb.Branch.start(ctx, [2 + i % 90 for i in range(700)])
    """
    run_code(program, folder)
    assert len(files(folder)) == 1


def test_reading_that_would_be_slower_is_not_done(
    opened: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamabranch.context.store._KNOWN_S", 600)
    fill(opened, DOCUMENT, text(6, 700))
    with opened() as ctx:
        assert n_read(ctx, DOCUMENT)[0] == 1  # the folder is measured
        ctx.kv_cache.tokens_per_s = 1e12
        assert n_read(ctx, text(6, 700))[0] == 700
        ctx.kv_cache.tokens_per_s = 1.0
        Branch.start(ctx, text(7, 1900)).prune()  # evicts it
        ctx.kv_cache.tokens_per_s = 1.0
        assert n_read(ctx, text(6, 700))[0] == 1


# -- files that are not used -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"kv_type": "q8_0"}, {"exact": False, "kv_type": "bf16"}, {"rope_freq_base": 5000.0}],
    ids=lambda options: next(iter(options)),
)
def test_other_settings_have_other_files(
    opened: Make, folder: Path, options: dict[str, Any]
) -> None:
    fill(opened, DOCUMENT)
    with opened(**options) as ctx:
        assert n_read(ctx, DOCUMENT)[0] == len(DOCUMENT)
    assert len(files(folder)) == 2
    with opened() as ctx:
        assert n_read(ctx, DOCUMENT)[0] == 1


def test_another_model_has_other_files(opened: Make, folder: Path, tmp_path: Path) -> None:
    fill(opened, DOCUMENT)
    path = toys.write_llama(tmp_path / "other.gguf", vocab="bytes", seed=9)
    with lb.Model(path) as model, opened() as ctx:
        with Context(model, n_ctx=2048, n_threads=1, exact=True, cache_dir=folder) as other:
            assert n_read(other, DOCUMENT)[0] == len(DOCUMENT)
        assert n_read(ctx, DOCUMENT)[0] == 1


def damaged(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 0x41
    path.write_bytes(content)


def shortened(path: Path, at: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: at % len(content)])


@pytest.mark.parametrize("harm", [damaged, shortened])
def test_a_damaged_file_is_a_miss_and_is_removed(
    harm: Callable[[Path, int], None], opened: Make, folder: Path
) -> None:
    (row,) = fill(opened, DOCUMENT)
    (path,) = files(folder)
    good = path.read_bytes()
    places = [*range(HEADER.size + 32 + 60), *range(-3, 0), *range(200, len(good), len(good) // 40)]
    with opened() as ctx:
        for at in places[::7]:
            ctx.kv_cache_clear()
            harm(path, at)
            n, again = n_read(ctx, DOCUMENT)
            assert n == len(DOCUMENT), at
            np.testing.assert_array_equal(row, again)
            assert not path.exists(), at
            path.write_bytes(good)
        ctx.kv_cache_clear()
        assert n_read(ctx, DOCUMENT)[0] == 1


@pytest.mark.parametrize("is_listed", [True, False])
def test_swapped_files_are_not_used(is_listed: bool, opened: Make, folder: Path) -> None:
    texts = DOCUMENT, text(6, 1200)
    rows = fill(opened, *texts, n_ctx=4096)
    one, two = files(folder)
    contents = one.read_bytes(), two.read_bytes()
    with opened(n_ctx=4096) as ctx:
        if is_listed:
            assert n_read(ctx, text(7, 20))[0] == 20
        one.write_bytes(contents[1])
        two.write_bytes(contents[0])
        for tokens, row in zip(texts, rows, strict=True):
            n, again = n_read(ctx, tokens)
            assert n == len(tokens)
            np.testing.assert_array_equal(row, again)
        assert not one.exists()
        assert not two.exists()


def test_a_file_with_right_checksums_and_wrong_k_v_reaches_no_cache(
    opened: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are not finite, or its positions are others."""
    real = kv_file.write
    for position in (16, -2000):

        def forge(path: Path, magic: bytes, about: bytes, arrays: Any, at: int = position) -> None:
            state = arrays.state.copy()
            state[at : at + 8] = 0xFF
            real(path, magic, about, arrays._replace(state=state))

        with monkeypatch.context() as patch:
            patch.setattr("llamabranch.context.store.write", forge)
            (row,) = fill(opened, DOCUMENT)
        with opened() as ctx:
            n, again = n_read(ctx, DOCUMENT)
            assert n == len(DOCUMENT)
            np.testing.assert_array_equal(row, again)
            assert files(folder) == []
        shutil.rmtree(folder)


def test_foreign_files_stay_and_are_not_opened(opened: Make, folder: Path) -> None:
    folder.mkdir()
    (folder / ".profile").write_text("mine")
    (folder / "notes.kv").write_text("mine")
    os.utime(folder / ".profile", (0, 0))
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / f"{'0' * 16}-{'0' * 32}.kv")
    fill(opened, DOCUMENT, cache_size=1 << 20)
    with opened(cache_size=1) as ctx:
        assert n_read(ctx, DOCUMENT)[0] == 1
    assert (folder / ".profile").exists()
    assert (folder / "notes.kv").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can chown")
def test_files_of_another_user_stay_and_are_not_used(opened: Make, folder: Path) -> None:
    fill(opened, DOCUMENT)
    (path,) = files(folder)
    os.chown(path, 4321, 4321)
    fill(opened, text(6, 600), cache_size=1 << 20)
    with opened(cache_size=1) as ctx:
        assert n_read(ctx, DOCUMENT)[0] == len(DOCUMENT)
        assert n_read(ctx, text(6, 600))[0] == 1
    assert path.exists()


@pytest.mark.parametrize("name", ["unified", "non-unified", "window", "hybrid"])
def test_random_texts_while_files_are_harmed(
    name: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that share beginnings, restarts, a full cache; files are deleted, damaged and swapped."""
    monkeypatch.setattr("llamabranch.context.store.MIN_STORED", 64)
    monkeypatch.setattr("llamabranch.context.store._PIECE", 100)
    architecture, options, _ = KINDS[name]
    path = toys.write_toy(tmp_path / "toy.gguf", architecture, vocab="bytes")
    options = {"n_ctx": 1024, "n_seq_max": 3, "n_threads": 1} | options
    draw = random.Random(name)

    def some_text() -> list[int]:
        tokens = text(draw.randrange(3), 300)[: draw.randint(20, 300)]
        for _ in range(draw.randrange(4)):
            tokens += text(draw.randrange(5), draw.randint(1, 120))
        return tokens

    def harm() -> None:
        there = list(folder.glob("*.kv"))
        if len(there) < 2 or draw.random() < 0.6:
            return
        one, two = draw.sample(there, 2)
        content = one.read_bytes()
        match draw.choice(("delete", "damage", "shorten", "swap")):
            case "delete":
                one.unlink()
            case "damage":
                damaged(one, draw.randrange(1 << 30))
            case "shorten":
                shortened(one, draw.randrange(1 << 30))
            case "swap":
                one.write_bytes(two.read_bytes())
                two.write_bytes(content)

    allowed = 0.0 if "exact" in options else 0.2
    with lb.Model(path) as model, Context(model, **options) as clean:
        for _ in range(10 * int(os.environ.get("SOAK", "1"))):
            size = draw.choice((200_000, 20_000_000))
            with Context(model, **options, cache_dir=folder, cache_size=size) as ctx:
                for _ in range(draw.randint(1, 10)):
                    with suppress(FileNotFoundError):  # the context's thread makes space
                        harm()
                    tokens = some_text()
                    _, row = n_read(ctx, tokens)
                    _, expected = n_read(clean, tokens)
                    assert float(np.abs(row - expected).max()) <= allowed


# -- the folder ------------------------------------------------------------------------------------


def test_names_are_hashes_and_only_the_owner_can_read(opened: Make, folder: Path) -> None:
    fill(opened, DOCUMENT)
    (path,) = files(folder)
    assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{32}\.kv", path.name)
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_hash_of_the_model_is_computed_once(opened: Make, folder: Path) -> None:
    path = toys.write_llama(folder.with_name("own.gguf"), vocab="bytes", seed=5)
    found = []
    for content in (None, "", "x y", f"{'0' * 16} {'0' * 64}"):
        with lb.Model(path) as model:
            if content is not None:
                (note,) = folder.glob("*.sha256")
                note.write_text(content)
            with Context(model, n_ctx=256, n_threads=1, cache_dir=folder):
                found.append(model.fingerprint)
    (note,) = folder.glob("*.sha256")
    assert found == [note.read_text().split()[1]] * 4
    note.write_text(note.read_text()[:-1] + "x")  # no hexadecimal digit
    with lb.Model(path) as model, Context(model, n_ctx=256, n_threads=1, cache_dir=folder):
        assert model.fingerprint == found[0]
    os.utime(path, (1, 1))
    with lb.Model(path) as model, Context(model, n_ctx=256, n_threads=1, cache_dir=folder):
        assert len(list(folder.glob("*.sha256"))) == 2


@pytest.mark.parametrize("place", ["file", "below a file", "null", "proc"])
def test_a_folder_that_cannot_be_used_is_refused(
    place: str, opened: Make, tmp_path: Path, toy: lb.Model
) -> None:
    (tmp_path / "file").write_text("mine")
    places = {"null": "a\0b", "proc": "/proc/x", "below a file": tmp_path / "file" / "x"}
    with pytest.raises(ConfigError, match="cache_dir"):
        opened(cache_dir=places.get(place, tmp_path / place))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(opened: Make, folder: Path) -> None:
    folder.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cache_dir"):
        opened()


def test_bad_options_are_refused(opened: Make) -> None:
    with pytest.raises(ConfigError, match="prefix_cache"):
        opened(prefix_cache=False)
    for size in (-1, "x", None, "-1GiB", "1 PB", "", "1e9"):
        with pytest.raises(ConfigError, match="cache_size"):
            opened(cache_size=size)
    with pytest.raises(ConfigError, match="path"):
        opened(cache_dir=7)


def test_the_least_recently_used_are_deleted(opened: Make, folder: Path) -> None:
    texts = [text(seed, 700) for seed in (11, 12, 13)]
    fill(opened, texts[0])
    (first,) = files(folder)
    limit = int(2.5 * first.stat().st_size)
    fill(opened, texts[1], cache_size=limit)
    fill(opened, texts[0], cache_size=limit)  # used again
    fill(opened, texts[2], cache_size=limit)
    assert len(files(folder)) == 2
    with opened(cache_size=limit) as ctx:
        assert [n_read(ctx, tokens)[0] for tokens in texts] == [1, 700, 1]


def test_a_clock_that_is_set_back_does_not_delete_what_is_new(
    opened: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text(seed, 700) for seed in (11, 12)]
    fill(opened, texts[0])
    (first,) = files(folder)
    later = time.time_ns() + 10**15
    os.utime(first, ns=(later, later))
    fill(opened, texts[1], cache_size=int(1.5 * first.stat().st_size))
    (path,) = files(folder)
    assert path != first
    assert path.stat().st_mtime_ns > later


def test_a_folder_that_is_deleted_meanwhile_ends_the_writing(opened: Make, folder: Path) -> None:
    with pytest.warns(CacheFolderWarning, match="no more K/V"), opened() as ctx:
        n_read(ctx, DOCUMENT)
        shutil.rmtree(folder)
        n_read(ctx, text(6, 1200))


def test_a_close_that_is_interrupted_while_it_writes_closes_the_context(
    toy: lb.Model, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    ctx = lb.load(toy.path, n_ctx=2048, n_threads=1, cache_dir=folder)
    n_read(ctx, DOCUMENT)
    monkeypatch.setattr("llamabranch.files.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ctx.close()
    assert ctx.closed
    assert ctx.model.closed
    assert files(folder) == []


# -- crashes and neighbours ------------------------------------------------------------------------

WRITER = """
    import os, signal, sys
    import llamabranch as lb
    from pathlib import Path
    folder, model, end = sys.argv[1:4]
    real = os.replace
    def replace(*paths):
        if end == "killed" and str(paths[1]).endswith(".kv"):
            os.kill(os.getpid(), signal.SIGKILL)
        real(*paths)
    os.replace = replace
    tokens = [2 + (i * i + 7 * i) % 198 for i in range(1200)]
    if end == "full":
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with lb.load(model, n_ctx=2048, n_seq_max=2, n_threads=1, exact=True, cache_dir=folder) as ctx:
        for seed in range(3):
            branch = lb.Branch.start(ctx, [2 + seed, *tokens])
            print(float(branch.logits.sum()))
            branch.prune()
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_a_process_killed_while_it_writes_leaves_no_half_file(
    opened: Make, toy: lb.Model, folder: Path
) -> None:
    run_code(WRITER, folder, toy.path, "killed", code=-9)
    (half,) = files(folder)
    assert half.name.startswith(".")
    tokens = [2 + (i * i + 7 * i) % 198 for i in range(1200)]
    with opened() as ctx:
        assert n_read(ctx, [2, *tokens])[0] == 1201
    assert half.exists()  # another process may be writing it
    os.utime(half, (0, 0))
    fill(opened, text(8, 600))
    assert not half.exists()
    assert len(files(folder)) == 2


@pytest.mark.skipif(os.name != "posix", reason="RLIMIT_FSIZE")
def test_a_full_disk_is_told_once_and_changes_no_text(toy: lb.Model, folder: Path) -> None:
    plain = run_code(WRITER, folder.with_name("other"), toy.path, "none")
    told = """
        import sys, warnings
        from pathlib import Path
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            exec(Path(sys.argv[4]).read_text())
        print([str(w.category.__name__) for w in caught])
    """
    script = folder.with_name("writer.py")
    script.write_text(textwrap.dedent(WRITER))
    lines = run_code(told, folder, toy.path, "full", script).splitlines()
    assert lines[-1] == "['CacheFolderWarning']"
    assert lines[:-1] == plain.splitlines()
    assert files(folder) == []


def test_two_processes_on_one_folder(opened: Make, toy: lb.Model, folder: Path) -> None:
    """They write the same texts, and delete each other's files all the time."""
    program = """
        import sys, numpy as np, llamabranch as lb
        folder, model, seed = sys.argv[1:4]
        rng = np.random.default_rng(int(seed))
        texts = [[int(t) for t in np.random.default_rng(n).integers(2, 200, 600)] for n in range(4)]
        rows = {}
        for _ in range(12):
            with lb.load(model, n_ctx=1024, n_seq_max=2, n_threads=1, exact=True,
                         cache_dir=folder, cache_size=400_000) as ctx:
                for n in rng.permutation(4):
                    with lb.Branch.start(ctx, texts[n]) as branch:
                        assert np.array_equal(rows.setdefault(n, branch.logits), branch.logits)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program), folder, toy.path, seed],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for seed in ("1", "2")
    ]  # fmt: skip
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
    assert sum(path.stat().st_size for path in files(folder)) <= 600_000
