"""Downloads from a fake hub: which files come, who finds them, typed errors, and nothing half-written.

They need huggingface_hub, which the extra `test` installs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, running_hub
from programs import run_code

import llamabranch as lb

REPOSITORY = "me/tale-GGUF"
DATA = bytes(range(256)) * 4000
Q8_0, F16 = "tale-Q8_0.gguf", "tale-F16.gguf"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one repository, and empty caches."""
    with running_hub(tmp_path, monkeypatch) as served:
        served.add(REPOSITORY, {Q8_0: DATA, F16: DATA[::-1], "README.md": b"a tale"})
        yield served


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub try again at once."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)


def cache() -> Path:
    return Path(os.environ["HF_HUB_CACHE"])


def named() -> list[str]:
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
    assert (path.name, path.read_bytes()) == (Q8_0, DATA)
    count = len(hub.requests)
    assert lb.fetch(f"{REPOSITORY}:Q8_0") == lb.hub.resolve(REPOSITORY) == path
    assert len(hub.requests) == count
    assert hub.sent == len(DATA)
    assert capsys.readouterr() == ("", "")
    hub.add("Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": b"weights", "b-Q4_K_M.gguf": b""})
    assert lb.fetch("qwen3-0.6b").read_bytes() == b"weights"  # a name of the catalogue
    assert lb.hub.resolve("qwen3-0.6b") == lb.hub.resolve("Qwen/Qwen3-0.6B-GGUF:Q8_0")


def test_huggingface_hub_finds_what_we_downloaded_and_we_what_it_did(hub: FakeHub) -> None:
    from huggingface_hub import hf_hub_download

    path = lb.fetch(REPOSITORY)
    their_path = hf_hub_download(REPOSITORY, Q8_0, cache_dir=cache(), local_files_only=True)
    assert their_path == str(path)
    endpoint = os.environ["HF_ENDPOINT"]
    theirs = hf_hub_download(REPOSITORY, F16, cache_dir=cache(), endpoint=endpoint)
    count = len(hub.requests)
    assert str(lb.fetch(f"{REPOSITORY}:F16")) == theirs
    assert len(hub.requests) == count


def test_shards_come_together_and_a_revision_by_its_name(hub: FakeHub) -> None:
    parts = {f"big/m-Q4_K_M-0000{i}-of-00003.gguf": bytes([i]) * 1000 for i in (1, 2, 3)}
    commit = hub.add("me/big", {**parts, "big/mmproj-F16.gguf": b"no"})
    path = lb.fetch("me/big")
    assert path.name == "m-Q4_K_M-00001-of-00003.gguf"
    firsts = [shard.read_bytes()[:1] for shard in sorted(path.parent.iterdir())]
    assert firsts == [b"\1", b"\2", b"\3"]
    assert lb.fetch(f"me/big@{commit}:Q4_K_M") == path
    assert lb.fetch("me/big/big/mmproj-F16.gguf").read_bytes() == b"no"
    hub.add("me/tiny", {"t-Q8_0.gguf": b""})
    assert lb.fetch("me/tiny").read_bytes() == b""


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


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["api", "head", "get"])
@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "HF_TOKEN"), (403, "terms"), (404, "name"), (429, "too many"), (500, "later")],
)
def test_refusal_is_an_error_with_the_message_of_the_hub_and_a_next_step(
    hub: FakeHub, no_wait: None, where: str, status: int, hint: str
) -> None:
    hub.faulty, hub.status = where, status
    with pytest.raises(lb.errors.DownloadError) as caught:
        lb.fetch(f"{REPOSITORY}:Q8_0")
    assert caught.value.status == status
    assert hint in str(caught.value.hint)
    assert "because of the weather" in str(caught.value) or where == "get"
    assert not named()
    hub.faulty = ""
    assert lb.fetch(f"{REPOSITORY}:Q8_0").read_bytes() == DATA


def nobody_answers(patched: pytest.MonkeyPatch, _hub: FakeHub) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        patched.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")


def the_connection_breaks(_patched: pytest.MonkeyPatch, hub: FakeHub) -> None:
    hub.cut = 400_000


def cache_is_a_file(patched: pytest.MonkeyPatch, _hub: FakeHub) -> None:
    (cache().parent / "a file").touch()  # below which root cannot write either
    patched.setenv("HF_HUB_CACHE", str(cache().parent / "a file" / "hub"))


def no_huggingface_hub(patched: pytest.MonkeyPatch, _hub: FakeHub) -> None:
    patched.setitem(sys.modules, "huggingface_hub", None)


def hostile_names(_patched: pytest.MonkeyPatch, hub: FakeHub) -> None:
    hub.add(REPOSITORY, {"../../../evil-Q8_0.gguf": b"evil"})


def absolute_names(_patched: pytest.MonkeyPatch, hub: FakeHub) -> None:
    hub.add(REPOSITORY, {f"{cache().parent}/evil-Q8_0.gguf": b"evil"})


@pytest.mark.parametrize(
    ("prepare", "kind", "message", "hint"),
    [
        (nobody_answers, lb.errors.DownloadError, "cannot download", "HF_ENDPOINT"),
        (the_connection_breaks, lb.errors.DownloadError, "cannot download", "try again"),
        (cache_is_a_file, lb.errors.DownloadError, "a file", "HF_HUB_CACHE"),
        (no_huggingface_hub, lb.errors.UnsupportedError, "huggingface_hub", "[hub]'"),
        (hostile_names, lb.errors.DownloadError, "cannot download", ""),
        (absolute_names, lb.errors.DownloadError, "cannot download", ""),
    ],
)
def test_what_prevents_a_download_is_an_error_with_a_hint_and_nothing_has_a_name(
    prepare: Callable[[pytest.MonkeyPatch, FakeHub], None],
    kind: type[lb.LlamaBranchError],
    message: str,
    hint: str,
    hub: FakeHub,
    no_wait: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    prepare(monkeypatch, hub)
    with pytest.raises(kind, match=message) as caught:
        lb.fetch(f"{REPOSITORY}:Q8_0")
    assert hint in str(caught.value.hint)
    assert getattr(caught.value, "status", None) is None
    assert not named() and not list(tmp_path.rglob("*evil-*"))


def test_ctrl_c_leaves_nothing_with_a_name_and_the_next_run_completes_it(hub: FakeHub) -> None:
    hub.gate = threading.Event()
    command = [*(sys.executable, "-m", "llamabranch.cli", "models", "pull"), f"{REPOSITORY}:Q8_0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not any(request.startswith("GET /me/") for request in hub.requests):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    hub.gate.set()
    assert (process.returncode, out, err.splitlines()[-1]) == (130, "", "interrupted")
    assert not named()
    hub.gate = None
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert out == f"{lb.hub.resolve(f'{REPOSITORY}:Q8_0')}\n"
    assert Path(out.strip()).read_bytes() == DATA


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


def test_offline_opens_no_socket_and_finds_what_is_here(hub: FakeHub) -> None:
    path = lb.fetch(f"{REPOSITORY}:Q8_0")
    asked = (REPOSITORY, f"{REPOSITORY}:F16", "qwen3-4b")
    absent = [f"{name} is not on this machine, and HF_HUB_OFFLINE is set" for name in asked[1:]]
    output = run_code(NO_SOCKETS, *asked, HF_HUB_OFFLINE="1")
    assert output.splitlines() == [str(path), *absent, "False"]
