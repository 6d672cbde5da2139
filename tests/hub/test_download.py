"""Downloads from a fake hub: what arrives, who else finds it, and everything that can go wrong.

They need huggingface_hub, which the extra `test` installs. Nothing waits for a clock: the client's waits
before it tries again are left out.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, Fault, empty_caches, serve

import llamabranch as lb

pytest.importorskip("huggingface_hub", reason="downloads need huggingface_hub")

REPOSITORY = "me/tale-GGUF"
DATA = bytes(range(256)) * 4000
Q8_0, F16 = "tale-Q8_0.gguf", "tale-F16.gguf"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one repository, and empty caches."""
    empty_caches(tmp_path, monkeypatch)
    # huggingface_hub reads this when it is imported, and a test of evaluation may have been offline then.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serve() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        served.add(REPOSITORY, {Q8_0: DATA, F16: DATA[::-1], "README.md": b"a tale"})
        yield served


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once; and write small pieces, as bytes arrive (1 MB at a time otherwise)."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)


def cache() -> Path:
    return Path(os.environ["HF_HUB_CACHE"])


def named(pattern: str = "*") -> list[str]:
    """Return the files in blobs and snapshots that have a final name."""
    paths = [*cache().glob("models--*/blobs/*"), *cache().glob("models--*/snapshots/*/**/*")]
    return [path.name for path in paths if path.is_file() and path.suffix != ".incomplete"]


# -- what arrives ----------------------------------------------------------------------------------


def test_fetch_announces_the_size_downloads_once_and_then_needs_no_network(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lb.fetch(f"{REPOSITORY}:q8_0")
    message = f"downloading {REPOSITORY}/{Q8_0}: 1.0 MB, to {cache()}\n"
    assert capsys.readouterr() == ("", message)
    assert path.read_bytes() == DATA
    assert path.name == Q8_0
    assert path.is_symlink()
    count = len(hub.requests)
    assert lb.fetch(f"{REPOSITORY}:Q8_0") == lb.hub.resolve(REPOSITORY) == path
    assert len(hub.requests) == count
    assert hub.sent == len(DATA)
    assert capsys.readouterr() == ("", "")


def test_huggingface_hub_finds_what_we_downloaded_and_we_what_it_did(hub: FakeHub) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir, try_to_load_from_cache

    path = lb.fetch(REPOSITORY)
    assert try_to_load_from_cache(REPOSITORY, Q8_0, cache_dir=cache()) == str(path)
    their_path = hf_hub_download(REPOSITORY, Q8_0, cache_dir=cache(), local_files_only=True)
    assert their_path == str(path)
    scanned = scan_cache_dir(cache())
    assert not scanned.warnings
    (repository,) = scanned.repos
    assert (repository.repo_id, repository.size_on_disk) == (REPOSITORY, len(DATA))
    assert set(repository.refs) == {"main"}
    theirs = hf_hub_download(REPOSITORY, F16, cache_dir=cache(), endpoint=hub.endpoint)
    count = len(hub.requests)
    assert str(lb.fetch(f"{REPOSITORY}:F16")) == theirs
    assert len(hub.requests) == count
    models = [(model.name, model.cache) for model in lb.hub.local_models()]
    assert models == [(f"{REPOSITORY}/{name}", "Hugging Face") for name in (F16, Q8_0)]


def test_shards_come_together_and_a_revision_by_its_name(hub: FakeHub) -> None:
    parts = {f"big/m-Q4_K_M-0000{i}-of-00003.gguf": bytes([i]) * 1000 for i in (1, 2, 3)}
    added = hub.add("me/big", {**parts, "big/mmproj-F16.gguf": b"no"})
    path = lb.fetch("me/big")
    assert path.name == "m-Q4_K_M-00001-of-00003.gguf"
    firsts = [shard.read_bytes()[:1] for shard in sorted(path.parent.iterdir())]
    assert firsts == [b"\1", b"\2", b"\3"]
    assert lb.fetch(f"me/big@{added.commit}:Q4_K_M") == path
    assert lb.fetch("me/big/big/mmproj-F16.gguf").read_bytes() == b"no"
    hub.add("me/tiny", {"t-Q8_0.gguf": b""})
    assert lb.fetch("me/tiny").read_bytes() == b""


def test_new_commit_of_main_is_what_offline_finds_afterwards(hub: FakeHub) -> None:
    old = lb.fetch(f"{REPOSITORY}:Q8_0")
    added = hub.add(REPOSITORY, {Q8_0: b"new", F16: b"new too"})
    new = lb.fetch(f"{REPOSITORY}@{added.commit}:Q8_0")
    assert new.read_bytes() == b"new"
    assert lb.fetch(f"{REPOSITORY}:F16").read_bytes() == b"new too"
    assert lb.hub.resolve(f"{REPOSITORY}:Q8_0") == new != old


def test_repository_alone_is_what_llama_cpp_takes_whatever_is_here(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    q4_k_m = "tale-Q4_K_M.gguf"
    hub.add("me/both", {Q8_0: DATA, q4_k_m: b"small", F16: b"large"})
    here = lb.fetch("me/both:F16")
    assert lb.hub.resolve("me/both") == here
    with monkeypatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        assert lb.fetch("me/both") == here
    assert lb.fetch("me/both").name == q4_k_m
    assert lb.hub.resolve("me/both").name == q4_k_m
    sent = hub.sent
    assert lb.fetch("me/both").name == q4_k_m
    assert hub.sent == sent  # asked again, not sent again
    hub.add("me/other", {Q8_0: DATA, F16: b"large"})
    assert lb.fetch("me/other:F16").name == F16
    assert lb.fetch("me/other").name == Q8_0
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert lb.fetch("me/both").name == q4_k_m


def test_name_of_the_catalogue_downloads_its_file(hub: FakeHub) -> None:
    hub.add("Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": b"weights", "b-Q4_K_M.gguf": b""})
    assert lb.fetch("qwen3-0.6b").read_bytes() == b"weights"
    assert lb.hub.resolve("qwen3-0.6b") == lb.hub.resolve("Qwen/Qwen3-0.6B-GGUF:Q8_0")


def test_load_downloads_only_where_that_was_asked_for(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lb.hub.resolve("tale-draft").read_bytes()
    hub.add("me/draft", {"tale-draft-q8_0.gguf": data})
    with pytest.raises(lb.ConfigError, match="is not on this machine"):
        lb.load("me/draft", n_ctx=64)
    assert not hub.requests
    with lb.load("me/draft", n_ctx=64, download=True) as context:
        assert context.model.path.read_bytes() == data
    monkeypatch.setenv("LLAMABRANCH_DOWNLOAD", "1")
    with pytest.raises(lb.errors.ModelLoadError):
        lb.load(f"{REPOSITORY}:F16")
    monkeypatch.setenv("LLAMABRANCH_DOWNLOAD", "perhaps")
    with pytest.raises(lb.ConfigError, match="must be 1 or 0"):
        lb.load("me/other")


# -- tokens ----------------------------------------------------------------------------------------


def test_token_goes_to_the_hub_and_not_to_where_files_lie(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/secret", {Q8_0: DATA}, private=True)
    hub.add("me/gated", {Q8_0: DATA}, gated=True)
    with pytest.raises(lb.errors.DownloadError, match=r"(?i)repository not found") as caught:
        lb.fetch("me/secret")
    assert caught.value.status == 404
    assert "HF_TOKEN" in str(caught.value.hint)
    with pytest.raises(lb.errors.DownloadError, match="Access to model is restricted") as caught:
        lb.fetch("me/gated")
    assert caught.value.status == 401
    assert "accept its terms" in str(caught.value.hint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert lb.fetch("me/secret").read_bytes() == lb.fetch("me/gated").read_bytes() == DATA
    hosts = {headers["Host"].partition(":")[0] for _, headers in hub.of("GET")}
    assert hosts == {"127.0.0.1", "localhost"}
    for _, headers in [*hub.of("GET"), *hub.of("HEAD")]:
        if headers["Host"].startswith("localhost"):
            assert "authorization" not in {name.lower() for name in headers}


# -- what goes wrong on the way --------------------------------------------------------------------


REFUSED = [
    (401, "", "HF_TOKEN"),
    (403, "", "this token may not read it"),
    (404, "RepoNotFound", "check the name"),
    (404, "RevisionNotFound", "after @"),
    (404, "EntryNotFound", "name of the file"),
    (429, "", "too many requests"),
    (500, "", "later"),
    (503, "", "later"),
]


@pytest.mark.parametrize("where", ["api", "head", "get"])
@pytest.mark.parametrize(("status", "code", "hint"), REFUSED)
def test_refusal_is_an_error_with_the_message_of_the_hub_and_a_next_step(
    hub: FakeHub, no_wait: None, where: str, status: int, code: str, hint: str
) -> None:
    hub.faults.append(Fault(where, status, code, "because of the weather"))
    with pytest.raises(lb.errors.DownloadError) as caught:
        lb.fetch(f"{REPOSITORY}:Q8_0")
    assert caught.value.status == status
    assert hint in str(caught.value.hint)
    assert "because of the weather" in str(caught.value) or where == "get"
    assert not named()
    hub.faults.clear()
    assert lb.fetch(f"{REPOSITORY}:Q8_0").read_bytes() == DATA


def test_connection_that_breaks_is_resumed_or_leaves_nothing(hub: FakeHub, no_wait: None) -> None:
    hub.faults += [Fault("get", cut=300_000, times=2)]
    assert lb.fetch(f"{REPOSITORY}:Q8_0").read_bytes() == DATA
    ranges = [headers.get("Range") for headers in hub.sendings()]
    assert ranges[0] is None
    assert all(
        byte_range is not None and byte_range.startswith("bytes=") for byte_range in ranges[1:]
    )
    before = named()
    broken: list[tuple[str, list[Fault]]] = [
        ("cannot download", [Fault("get", cut=400_000, times=1), Fault("get", cut=0)]),
        (f"of size {len(DATA)} but has size {len(DATA) // 2}", [Fault("get", short=True)]),
    ]
    for message, faults in broken:
        hub.faults = faults
        with pytest.raises(lb.errors.DownloadError, match=message) as caught:
            lb.fetch(f"{REPOSITORY}:F16")
        assert "force_download" not in str(caught.value)
        assert "try again" in str(caught.value.hint)
        assert named() == before


def test_other_bytes_than_the_hub_names_are_deleted(hub: FakeHub) -> None:
    """One bit is wrong, the size is right. The next download is right."""
    hub.faults = [Fault("get", wrong=True, times=1)]
    with pytest.raises(
        lb.errors.DownloadError, match=f"{Q8_0} is not the file that the hub describes"
    ) as caught:
        lb.fetch(f"{REPOSITORY}:Q8_0")
    assert "download it again" in str(caught.value.hint)
    assert named() == []
    with pytest.raises(lb.errors.ConfigError, match="not on this machine"):
        lb.hub.resolve(f"{REPOSITORY}:Q8_0")
    assert lb.fetch(f"{REPOSITORY}:Q8_0").read_bytes() == DATA
    parts = {f"m-Q4_K_M-0000{i}-of-00003.gguf": bytes([i]) * 1000 for i in (1, 2, 3)}
    hub.add("me/big", parts)
    hub.faults = [Fault("get", times=1), Fault("get", wrong=True, times=1)]
    with pytest.raises(lb.errors.DownloadError, match=r"00002-of-00003\.gguf is not the file"):
        lb.fetch("me/big")
    hub.requests.clear()
    path = lb.fetch("me/big")
    assert [shard.read_bytes()[0] for shard in sorted(path.parent.iterdir())] == [1, 2, 3]
    assert len(hub.sendings()) == 2  # the first part was right


def test_check_that_was_interrupted_is_made_again_without_a_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_path: Path) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("llamabranch.hub.download.sha256", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lb.fetch(f"{REPOSITORY}:Q8_0")
    with pytest.raises(lb.errors.ConfigError, match="not on this machine"):
        lb.hub.resolve(f"{REPOSITORY}:Q8_0")
    assert lb.fetch(f"{REPOSITORY}:Q8_0").read_bytes() == DATA
    assert hub.sent == len(DATA)


def run(code: str, *arguments: str, **environment: str) -> str:
    """Run a program with the hub and the caches of this test; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_disk_without_links_has_one_copy(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    path = lb.fetch(REPOSITORY)
    assert not path.is_symlink()
    assert path.read_bytes() == DATA
    assert named() == [Q8_0]
    assert lb.fetch(REPOSITORY) == path
    assert hub.sent == len(DATA)


def test_hostile_names_in_a_listing_are_not_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("me/evil", {"z-Q8_0.gguf": b"good"}, names=[
        *("../../../evil-Q8_0.gguf", "/tmp/evil-Q8_0.gguf", "a\\..\\evil-Q8_0.gguf"),
        *("..", "a//evil-Q8_0.gguf", "z-Q8_0.gguf"),
    ])  # fmt: skip
    assert lb.fetch("me/evil:Q8_0").read_bytes() == b"good"
    assert not list(tmp_path.rglob("*evil-*"))


# -- the disk --------------------------------------------------------------------------------------


FULL_DISK = """
import resource, signal, sys
import llamabranch as lb
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    lb.fetch(sys.argv[1])
except lb.errors.DownloadError as error:
    print(error, "|", error.hint)
"""


def test_disk_that_fills_up_is_an_error_and_leaves_nothing_with_a_name(hub: FakeHub) -> None:
    output = run(FULL_DISK, f"{REPOSITORY}:Q8_0")
    assert output.startswith("cannot write to")
    assert "free some space" in output
    assert not named()
    assert lb.fetch(f"{REPOSITORY}:Q8_0").read_bytes() == DATA


def nobody_answers(patched: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        patched.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")


def disk_is_full(patched: pytest.MonkeyPatch) -> None:
    room = type(shutil.disk_usage("/"))(10**9, 10**9, 500_000)
    patched.setattr("shutil.disk_usage", lambda _path: room)


def cache_is_a_file(patched: pytest.MonkeyPatch) -> None:  # which root cannot write below either
    cache().touch()
    patched.setenv("HF_HUB_CACHE", str(cache() / "hub"))


def connection_is_reset(patched: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    patched.setattr("huggingface_hub.hf_hub_download", fail)


def no_huggingface_hub(patched: pytest.MonkeyPatch) -> None:
    patched.setitem(sys.modules, "huggingface_hub", None)


@pytest.mark.parametrize(
    ("prepare", "kind", "message", "hint"),
    [
        (nobody_answers, lb.errors.DownloadError, "cannot download", "HF_ENDPOINT"),
        (connection_is_reset, lb.errors.DownloadError, "cannot download.*reset by peer", "network"),
        (disk_is_full, lb.errors.DownloadError, r"0\.5 MB left", "HF_HUB_CACHE"),
        (cache_is_a_file, lb.errors.DownloadError, "cannot write to", "HF_HUB_CACHE"),
        (no_huggingface_hub, lb.errors.UnsupportedError, "huggingface_hub", "[hub]'"),
    ],
)
def test_what_prevents_a_download_is_an_error_with_a_hint_and_nothing_is_sent(
    prepare: Callable[[pytest.MonkeyPatch], None],
    kind: type[lb.LlamaBranchError],
    message: str,
    hint: str,
    hub: FakeHub,
    no_wait: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(monkeypatch)
    with pytest.raises(kind, match=message) as caught:
        lb.fetch(f"{REPOSITORY}:Q8_0")
    assert hint in str(caught.value.hint)
    assert getattr(caught.value, "status", None) is None
    assert hub.sent == 0 and not cache().is_dir()


# -- offline ---------------------------------------------------------------------------------------

NO_SOCKETS = """
import socket, sys
def refuse(*_):
    raise AssertionError("a socket")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
import llamabranch as lb
for given in sys.argv[1:]:
    try:
        print(lb.fetch(given))
    except lb.ConfigError as error:
        print(error)
print("huggingface_hub" in sys.modules)
"""


def test_offline_opens_no_socket_and_finds_what_is_here(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lb.fetch(f"{REPOSITORY}:Q8_0")
    asked = (REPOSITORY, f"{REPOSITORY}:F16", "qwen3-4b")
    absent = [f"{name} is not on this machine, and HF_HUB_OFFLINE is set" for name in asked[1:]]
    lines = run(NO_SOCKETS, *asked, HF_HUB_OFFLINE="1").splitlines()
    assert lines == [str(path), *absent, "False"]
    count = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(lb.ConfigError, match="HF_HUB_OFFLINE is set"):
        lb.fetch(f"{REPOSITORY}:F16")
    assert len(hub.requests) == count


# -- processes -------------------------------------------------------------------------------------

FETCH = "import sys, llamabranch as lb; print(lb.fetch(sys.argv[1]))"


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: object) -> None:
    """Wait until a function returns something true, for at most a minute."""
    assert callable(condition)
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_processes_share_one_download(hub: FakeHub) -> None:
    hub.gate = threading.Event()
    both = [start("-c", FETCH, f"{REPOSITORY}:Q8_0") for _ in range(2)]
    wait_for(lambda: len(hub.of("HEAD")) == 2)
    wait_for(lambda: len(hub.sendings()) == 1)
    hub.gate.set()
    answers = [process.communicate(timeout=300) for process in both]
    assert {out for out, _ in answers} == {f"{lb.hub.resolve(f'{REPOSITORY}:Q8_0')}\n"}
    assert len(hub.sendings()) == 1
    assert hub.sent == len(DATA)


def test_ctrl_c_leaves_nothing_with_a_name_and_the_next_run_completes_it(hub: FakeHub) -> None:
    hub.gate = threading.Event()
    command = ("-m", "llamabranch.cli", "models", "pull", f"{REPOSITORY}:Q8_0")
    process = start(*command)
    wait_for(hub.sendings)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    hub.gate.set()
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted"
    assert not named()
    hub.gate = None
    out, err = start(*command).communicate(timeout=300)
    assert out == f"{lb.hub.resolve(f'{REPOSITORY}:Q8_0')}\n", err
    assert Path(out.strip()).read_bytes() == DATA
