"""Downloads from the Hugging Face hub into the cache that llama.cpp, transformers and we share.

huggingface_hub (the extra ``hub``) does it; it is imported when something is downloaded and not before.
What `hf_hub_download` leaves out is done here: the disk is checked for all files before the first begins,
an interrupted download is resumed, and the SHA-256 of a file is checked before the file gets its name.
Files of more than 50 GB the hub sends through Xet only, which checks what it gets by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigError, DownloadError, LlamaBranchError, UnsupportedError
from ..files import atomic_write
from .caches import find, hub_cache
from .choice import choose
from .spec import HubSpec, is_safe_path

_SPARE_BYTES = 64 << 20  # left free on the disk
_LARGEST_OVER_HTTP = 50 * 10**9


@dataclass(frozen=True)
class _Files:
    """The files of a model, and which of them are here.

    Attributes:
        spec: what was asked for.
        commit: the commit that it is at now.
        sizes: the bytes of its files, all shards in order.
        missing: those that are not in the cache.
        n_partial: bytes of the missing ones that an interrupted download left.
        folder: the repository's in the cache, with ``blobs``, ``refs`` and ``snapshots``.
    """

    spec: HubSpec
    commit: str
    sizes: Mapping[str, int]
    missing: Sequence[str]
    n_partial: int
    folder: Path

    @property
    def first(self) -> str:
        """The file to load: of a model in shards the first."""
        return next(iter(self.sizes))

    @property
    def n_missing(self) -> int:
        """Bytes to download, without what an interrupted download left."""
        return sum(self.sizes[name] for name in self.missing) - self.n_partial


def download(spec: HubSpec) -> Path:
    """Ask the hub which files ``spec`` names, download what is missing, and return the path to load.

    What another program has of them is taken instead. What was downloaded before an interruption is used
    again. Two processes that want the same file share one download: the second waits for the first. The
    size is announced on standard error; huggingface_hub shows its bar on a terminal.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        ConfigError: the repository has no such tag or file.
        DownloadError: the hub cannot be reached or refuses, the bytes are not those that it announced, or
            the cache cannot be written or the disk is full. No file has its name then.
    """
    files = _look_up(spec)
    if files.missing:
        if local := find(replace(spec, file=files.first, tag=None)):
            return local.path
        _announce(files)
        _check_space(files)
    for name in files.missing:
        try:
            with _requests(f"{spec.repository}/{name}"):
                _download_file(files, name)
        except OSError as error:
            raise DownloadError(
                f"cannot write to {error.filename or files.folder.parent}: {error.strerror or error}",
                hint="free some space, or set HF_HUB_CACHE to a folder that can be written",
            ) from error
    reference = files.folder / "refs" / (spec.revision or "main")
    if reference.name != files.commit:
        with contextlib.suppress(OSError):  # a convenience of later look-ups
            reference.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(reference) as opened:
                opened.write(files.commit.encode())
    return files.folder / "snapshots" / files.commit / files.first


def note(text: str) -> None:
    """Print a line on standard error, if there is one."""
    with contextlib.suppress(OSError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def _look_up(spec: HubSpec) -> _Files:
    where = spec.repository
    with _requests(where):
        import huggingface_hub

        info = huggingface_hub.HfApi(endpoint=_endpoint()).model_info(
            where, revision=spec.revision, files_metadata=True
        )
    commit, listed = str(info.sha), {str(item.rfilename): item for item in info.siblings or ()}
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise DownloadError(f"the hub gives no commit of {where}")
    names = choose(filter(is_safe_path, listed), spec.tag, file=spec.file, where=where)
    folder = hub_cache() / ("models--" + where.replace("/", "--"))
    missing = [name for name in names if not (folder / "snapshots" / commit / name).is_file()]
    n_partial = 0
    for name in missing:
        with contextlib.suppress(OSError):
            n_partial += _partial(folder, getattr(listed[name].lfs, "sha256", None)).stat().st_size
    sizes = {name: int(listed[name].size or 0) for name in names}
    return _Files(spec, commit, sizes, missing, n_partial, folder)


def _partial(folder: Path, sha256: str | None) -> Path:
    """Return where a file is until it is complete."""
    return folder / "blobs" / f"{sha256}.incomplete"


def _announce(files: _Files) -> None:
    """Tell what is about to be downloaded, how large it is and where it goes."""
    parts = f" in {len(files.sizes)} parts" if len(files.sizes) > 1 else ""
    rest = ", the rest of an interrupted download" if files.n_partial else ""
    n = files.n_missing
    size = f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
    name = f"{files.spec.repository}/{files.first}"
    note(f"downloading {name}{parts}: {size}{rest}, to {files.folder.parent}")


# -- one file -----------------------------------------------------------------------------------------


def _download_file(files: _Files, file: str) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    repository, commit, endpoint = files.spec.repository, files.commit, _endpoint()
    url = hf_hub_url(repository, file, revision=commit, endpoint=endpoint)
    metadata = get_hf_file_metadata(url, endpoint=endpoint)
    sha256, size = str(metadata.etag), metadata.size
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise DownloadError(f"the hub gives no checksum of {file}", hint="use another mirror")
    if size is not None and size <= _LARGEST_OVER_HTTP:
        _stream_blob(files.folder, url, sha256, size)
    # Where the blob is there it makes the link in the snapshot.
    path = hf_hub_download(
        repository, file, revision=commit, cache_dir=files.folder.parent, endpoint=endpoint
    )
    if not os.path.islink(path):  # without links the snapshot has a copy
        (files.folder / "blobs" / sha256).unlink(missing_ok=True)


def _stream_blob(folder: Path, url: str, sha256: str, size: int) -> None:
    """Put the file at ``blobs/SHA``: download what is not here yet, check it, rename it.

    The hub redirects to where the file is, each time with a fresh signature: a later attempt may come
    after the first one has expired. The token is not sent there, since that is another host.

    Raises:
        DownloadError: the bytes are wrong; they are discarded.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    part = _partial(folder, sha256)
    blob, lock = part.with_name(sha256), folder.parent / ".locks" / folder.name / f"{sha256}.lock"
    for each in (blob.parent, lock.parent):
        each.mkdir(parents=True, exist_ok=True)
    # The lock is that of `hf_hub_download`: other programs wait for us, and we for them.
    with WeakFileLock(lock):
        if blob.is_file():
            return
        is_resumed = part.is_file() and 0 < part.stat().st_size <= size
        for mode in ("ab", "wb") if is_resumed else ("wb",):  # what was here may be damaged
            with open(part, mode) as opened:
                given, headers = opened.tell(), build_hf_headers()
                http_get(url, opened, resume_size=given, headers=headers, expected_size=size)
            if _sha256(part) == sha256:
                os.replace(part, blob)
                return
        part.unlink()
    raise DownloadError(
        f"{url.rpartition('/')[2]} has not the SHA {sha256[:12]}... that the hub announced",
        hint="what was downloaded is discarded: try again; if that does not help, "
        "something between here and the hub changes files",
    )


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with open(path, "rb") as opened:
        while piece := opened.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()


# -- the disk and the hub ------------------------------------------------------------------------------


def _check_space(files: _Files) -> None:
    folder = next(each for each in files.folder.parents if each.exists())
    free = shutil.disk_usage(folder).free
    if files.n_missing + _SPARE_BYTES > free:
        raise DownloadError(
            f"{files.spec} needs {files.n_missing / 1e9:.2f} GB, and {folder} has "
            f"{free / 1e9:.2f} GB left",
            hint="free some space, choose a smaller quantization, or set HF_HUB_CACHE to another disk",
        )


def _endpoint() -> str | None:
    """Return the hub's address as llama.cpp finds it; huggingface_hub reads its own only at import."""
    given = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT")
    return given.rstrip("/") if given else None


_HINTS = {
    401: "set HF_TOKEN or run `hf auth login`; of a gated model accept its terms on its page on the hub",
    403: "this token may not read it: accept its terms on its page on the hub",
    404: "check the name, the revision after @ and the name of the file; for a private repository set "
    "HF_TOKEN or run `hf auth login`",
    429: "too many requests: wait some minutes, or set HF_TOKEN",
    None: "what has arrived is kept: try again to go on from there; check the network and HF_ENDPOINT",
}


@contextlib.contextmanager
def _requests(what: str) -> Iterator[None]:
    """Import huggingface_hub, and raise its errors as ours: its message, and what to do."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise UnsupportedError(
            "downloading needs huggingface_hub, which is not installed",
            hint="pip install 'llamabranch[hub]', or fetch the file by hand and give its path",
        ) from error
    try:
        yield
    except LlamaBranchError:
        raise
    except errors.HFValidationError as error:
        raise ConfigError(f"{what}: {error}") from error
    except (errors.HTTPError, errors.XetDownloadError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk
        # hf_hub_download tells why it could not ask the hub in a cause.
        is_vague = isinstance(error, errors.LocalEntryNotFoundError)
        cause = (error.__cause__ or error) if is_vague else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise DownloadError(
            f"cannot download {what}: {reason}",
            status=status,
            hint=_HINTS.get(status, "try again later"),
        ) from error
