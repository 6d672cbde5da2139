"""Downloads from the Hugging Face hub into the cache that llama.cpp, transformers and we share.

huggingface_hub (the extra ``hub``) does the requests, tokens and redirects; it is imported when something
is downloaded and not before. What it leaves out is done here: the SHA-256 of a file is checked before the
file gets its name, the disk is checked for all files before the first begins, and a download that was
interrupted goes on where it ended. The layout is huggingface_hub's: ``blobs/SHA256``, a link to it in
``snapshots/COMMIT/``, the commit of a branch in ``refs/``, locks in ``.locks/``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import ConfigError, DownloadError, UnsupportedError
from .caches import hub_cache
from .choice import choose
from .spec import HubSpec, is_safe_path

__all__ = ["DownloadPlan", "RemoteFile", "download", "plan_download", "search_hub"]

Progress = Callable[[int, int], None]  # bytes that are here, bytes in all

_SPARE_BYTES = 64 << 20  # left free on the disk
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_COMMIT = _SHA1
_PIECE = 1 << 20
_LARGEST_OVER_HTTP = 50 * 10**9  # the hub serves larger files through Xet only


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its path there and its size in bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class DownloadPlan:
    """What a download would fetch.

    Attributes:
        spec: what was asked for.
        commit: the commit that it is at now.
        files: the model's files, all shards in order.
        missing: those that are not in the cache.
        partial_bytes: how much of the missing ones is there from an interrupted download.
        cache: the folder of the cache.
    """

    spec: HubSpec
    commit: str
    files: tuple[RemoteFile, ...]
    missing: tuple[RemoteFile, ...]
    partial_bytes: int
    cache: Path

    @property
    def path(self) -> Path:
        """Where the model will be; of a model in shards the first."""
        return _pointer(self, self.files[0].path)

    @property
    def missing_bytes(self) -> int:
        """Bytes to download, without what an interrupted download left."""
        return sum(file.size for file in self.missing) - self.partial_bytes


def plan_download(spec: HubSpec) -> DownloadPlan:
    """Ask the hub which files ``spec`` names, how large they are and which are missing.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        ConfigError: the repository has no such tag or file.
        DownloadError: the hub cannot be reached, or refuses.
    """
    client = _client()
    where = spec.repository
    with _translated(where):
        info = client.HfApi(endpoint=_endpoint()).model_info(
            where, revision=spec.revision, files_metadata=True
        )
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise DownloadError(f"the hub gives no commit of {where}")
    sizes = {
        str(item.rfilename): int(item.size or 0)
        for item in info.siblings or ()
        if is_safe_path(str(item.rfilename))
    }
    files = tuple(
        RemoteFile(path, sizes[path])
        for path in choose(sizes, spec.tag, file=spec.file, where=where)
    )
    plan = DownloadPlan(spec, commit, files, (), 0, hub_cache())
    missing = tuple(file for file in files if not _pointer(plan, file.path).is_file())
    shas = {str(item.rfilename): _lfs_sha256(item) for item in info.siblings or ()}
    partial = 0
    for file in missing:
        with contextlib.suppress(OSError):
            partial += _partial(_blobs(plan) / (shas[file.path] or "")).stat().st_size
    return DownloadPlan(spec, commit, files, missing, partial, plan.cache)


def download(plan: DownloadPlan, progress: Progress | None = None) -> Path:
    """Download what is missing and return the path of the model.

    What was downloaded before an interruption is used again. Two processes that want the same file share
    one download: the second waits for the first.

    Args:
        plan: from `plan_download`.
        progress: called with the bytes that are here and the bytes of all missing files.

    Raises:
        DownloadError: the hub cannot be reached or refuses, the bytes are not those that it announced, or
            the cache cannot be written or the disk is full. No file has got its name then.
    """
    client = _client()
    _check_space(plan)
    total, before = sum(file.size for file in plan.missing), 0
    for file in plan.missing:

        def report(done: int, base: int = before) -> None:
            if progress is not None:
                progress(base + done, total)

        try:
            _download_file(client, plan, file, report)
        except OSError as error:
            raise _disk_error(error, plan.cache) from error
        before += file.size
        report(0, before)
    with contextlib.suppress(OSError):  # a convenience of later look-ups
        _write_reference(plan)
    return plan.path


def search_hub(words: str, limit: int = 20) -> list[tuple[str, int]]:
    """Return GGUF repositories whose name has these words, and their downloads, most used first.

    Raises:
        UnsupportedError, DownloadError: as for `plan_download`.
    """
    client = _client()
    with _translated("the search"):
        found = client.HfApi(endpoint=_endpoint()).list_models(
            search=words, filter="gguf", sort="downloads", limit=limit
        )
        return [(str(each.id), int(each.downloads or 0)) for each in found]


# -- one file -----------------------------------------------------------------------------------------


def _download_file(
    client: _Client, plan: DownloadPlan, file: RemoteFile, report: Callable[[int], None]
) -> None:
    repository = plan.spec.repository
    pointer = _pointer(plan, file.path)
    url = client.hf_hub_url(repository, file.path, revision=plan.commit, endpoint=_endpoint())
    with _translated(f"{repository}/{file.path}"):
        metadata = client.get_hf_file_metadata(url, endpoint=_endpoint())
        headers = client.build_hf_headers()
    etag, size = str(metadata.etag), metadata.size
    if not (_SHA256.fullmatch(etag) or _SHA1.fullmatch(etag)):
        raise DownloadError(f"the hub gives no checksum of {file.path}", hint="use another mirror")
    if (size or 0) > _LARGEST_OVER_HTTP:
        raise DownloadError(
            f"{file.path} is larger than 50 GB, which the hub does not serve in one piece",
            hint=f"`hf download {repository} {file.path}` fetches it; it is found there afterwards",
        )
    blob = _blobs(plan) / etag
    lock = plan.cache / ".locks" / _repository_folder(repository) / f"{etag}.lock"
    for folder in (blob.parent, pointer.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with client.WeakFileLock(
        lock
    ):  # huggingface_hub's own: `hf download` waits for us, and we for it
        if not blob.is_file():
            partial = _partial(blob)
            resumed = partial.is_file() and partial.stat().st_size > 0
            for attempt in range(2):
                with _translated(f"{repository}/{file.path}"):
                    digest = _transfer(client, url, headers, partial, size, etag, report)
                if digest == etag:
                    break
                partial.unlink()
                if attempt == 1 or not resumed:
                    raise DownloadError(
                        f"{file.path} has SHA {digest[:12]}..., but the hub announced {etag[:12]}...",
                        hint="what was downloaded is discarded: try again; if that does not help, "
                        "something between here and the hub changes files",
                    )
            os.replace(partial, blob)
        _link(blob, pointer)


def _transfer(
    client: _Client,
    url: str,
    headers: dict[str, str],
    partial: Path,
    size: int | None,
    etag: str,
    report: Callable[[int], None],
) -> str:
    """Append to ``partial`` what it lacks and return the checksum of the whole.

    The hub redirects to where the file lies, each time with a fresh signature: a later attempt may come
    after the first one has expired. The token is not sent there, since that is another host.
    """

    class Bar:
        """What huggingface_hub needs of a tqdm: it counts bytes."""

        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.done = initial
            report(self.done)

        def update(self, n: int = 1) -> None:
            self.done += n
            report(self.done)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def close(self) -> None:
            pass

    with open(partial, "ab") as raw:
        present = raw.tell()
        if size is not None and present > size:
            raw.truncate(0)
            present = 0
        file = _HashedFile(raw, partial, etag, size)
        try:
            client.http_get(
                url,
                file,
                resume_size=present,
                headers=headers,
                expected_size=size,
                displayed_filename=partial.name,
                tqdm_class=Bar,
            )
            return file.digest()
        finally:
            file.stop()


class _HashedFile:
    """A file that is hashed while it is written, in a thread: hashing frees the GIL."""

    def __init__(self, raw: BinaryIO, path: Path, etag: str, size: int | None) -> None:
        self._raw, self._path = raw, path
        self._is_sha256 = bool(_SHA256.fullmatch(etag))
        self._size = size
        self._begin(from_file=raw.tell() > 0)

    def _begin(self, *, from_file: bool) -> None:
        self._hash = hashlib.sha256() if self._is_sha256 else hashlib.sha1(usedforsecurity=False)
        if not self._is_sha256:  # git's id of a small file
            self._hash.update(f"blob {self._size}\0".encode())
        self._chunks: queue.Queue[bytes | None] = queue.Queue(maxsize=32)
        self._thread = threading.Thread(target=self._run, args=(from_file,), daemon=True)
        self._failed = False
        self._thread.start()

    def _run(self, from_file: bool) -> None:
        try:
            if from_file:
                left = self._raw.tell()
                with open(self._path, "rb") as before:
                    while left and (piece := before.read(min(_PIECE, left))):
                        self._hash.update(piece)
                        left -= len(piece)
        except OSError:
            self._failed = True
        while (chunk := self._chunks.get()) is not None:
            self._hash.update(chunk)

    def write(self, data: bytes) -> int:
        written = self._raw.write(data)
        self._chunks.put(data)
        return written

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, position: int, whence: int = 0) -> int:
        return self._raw.seek(position, whence)

    def truncate(self, size: int | None = None) -> int:
        """Cut the file where it is: the server sends it from the beginning again."""
        length = self._raw.truncate(size)
        self.stop()
        self._raw.flush()
        self._begin(from_file=length > 0)
        return length

    def flush(self) -> None:
        self._raw.flush()

    def digest(self) -> str:
        """Return the checksum of everything written, in hex."""
        self._raw.flush()
        self.stop()
        return "unreadable" if self._failed else self._hash.hexdigest()

    def stop(self) -> None:
        """End the thread, once it has hashed what was written."""
        if self._thread.is_alive():
            self._chunks.put(None)
            self._thread.join()


# -- the layout of the cache ---------------------------------------------------------------------------


def _repository_folder(repository: str) -> str:
    return "models--" + repository.replace("/", "--")


def _blobs(plan: DownloadPlan) -> Path:
    return plan.cache / _repository_folder(plan.spec.repository) / "blobs"


def _pointer(plan: DownloadPlan, path: str) -> Path:
    return plan.cache / _repository_folder(plan.spec.repository) / "snapshots" / plan.commit / path


def _partial(blob: Path) -> Path:
    return blob.with_name(blob.name + ".incomplete")


def _link(blob: Path, pointer: Path) -> None:
    """Give a verified file its name; where there are no links, move it."""
    try:
        os.symlink(os.path.relpath(blob, pointer.parent), pointer)
    except FileExistsError:
        if not pointer.is_file():  # it dangles
            pointer.unlink()
            _link(blob, pointer)
    except OSError:
        os.replace(blob, pointer)


def _write_reference(plan: DownloadPlan) -> None:
    revision = plan.spec.revision or "main"
    if _COMMIT.fullmatch(revision):
        return
    reference = plan.cache / _repository_folder(plan.spec.repository) / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    draft = reference.with_name(f".{reference.name}.{os.getpid()}")
    draft.write_text(plan.commit, encoding="utf-8")
    os.replace(draft, reference)


def _check_space(plan: DownloadPlan) -> None:
    folder = plan.cache
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if plan.missing_bytes + _SPARE_BYTES > free:
        raise DownloadError(
            f"{plan.spec} needs {plan.missing_bytes / 1e9:.2f} GB, and {folder} has "
            f"{free / 1e9:.2f} GB left",
            hint="free some space, choose a smaller quantization, or set HF_HUB_CACHE to another disk",
        )


def _disk_error(error: OSError, cache: Path) -> DownloadError:
    return DownloadError(
        f"cannot write to {error.filename or cache}: {error.strerror or error}",
        hint="free some space, or set HF_HUB_CACHE to a folder that can be written",
    )


# -- huggingface_hub -----------------------------------------------------------------------------------


class _Client:
    """The parts of huggingface_hub that are used here."""

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        try:
            import huggingface_hub
            from huggingface_hub import constants, file_download, utils
        except ImportError as error:
            raise UnsupportedError(
                "downloading needs huggingface_hub, which is not installed",
                hint="pip install 'llamabranch[hub]', or fetch the file by hand and give its path",
            ) from error
        # Pieces of 10 MB, its own choice, are copied into fresh memory each time: a quarter of its time.
        constants.DOWNLOAD_CHUNK_SIZE = _PIECE
        self.HfApi = huggingface_hub.HfApi
        self.hf_hub_url = huggingface_hub.hf_hub_url
        self.get_hf_file_metadata = huggingface_hub.get_hf_file_metadata
        self.build_hf_headers = utils.build_hf_headers
        self.WeakFileLock = utils.WeakFileLock
        self.http_get = file_download.http_get


def _client() -> _Client:
    return _Client()


def _endpoint() -> str | None:
    """Return the hub's address as llama.cpp finds it; huggingface_hub reads its own only at import."""
    given = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT")
    return given.rstrip("/") if given else None


def _lfs_sha256(item: object) -> str | None:
    lfs = getattr(item, "lfs", None)
    sha = getattr(lfs, "sha256", None)
    return sha if isinstance(sha, str) and _SHA256.fullmatch(sha) else None


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise huggingface_hub's errors as ours: its message, and what to do."""
    from huggingface_hub import errors

    try:
        yield
    except (DownloadError, ConfigError):
        raise
    except errors.GatedRepoError as error:
        raise _refused(
            error, what, "accept its terms on its page on the hub, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the name; for a private repository set HF_TOKEN or run `hf auth login`"
        raise _refused(error, what, hint) from error
    except errors.RevisionNotFoundError as error:
        raise _refused(error, what, "check the revision, after @") from error
    except errors.EntryNotFoundError as error:
        raise _refused(error, what, "check the name of the file") from error
    except errors.HfHubHTTPError as error:
        raise _refused(error, what, _HINTS.get(_status(error) or 0, "try again later")) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{what}: {error}") from error
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise
        raise _refused(error, what, _UNREACHED) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in (
            "httpx",
            "httpx2",
            "httpcore",
            "httpcore2",
        ):
            raise
        raise _refused(error, what, _UNREACHED) from error


_UNREACHED = (
    "what has arrived is kept: try again to go on from there; check the network and HF_ENDPOINT"
)
_HINTS = {
    401: "set HF_TOKEN or run `hf auth login`",
    403: "this token may not read it: see the repository's page on the hub",
    429: "too many requests: wait some minutes, or set HF_TOKEN",
}


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _refused(error: Exception, what: str, hint: str) -> DownloadError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return DownloadError(f"cannot download {what}: {reason}", status=_status(error), hint=hint)
