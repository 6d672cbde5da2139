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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ConfigError, DownloadError, LlamaBranchError, UnsupportedError
from ..files import atomic_write
from .caches import hub_cache
from .choice import choose
from .spec import HubSpec, is_safe_path

_SPARE_BYTES = 64 << 20  # left free on the disk
_LARGEST_OVER_HTTP = 50 * 10**9


@dataclass(frozen=True)
class DownloadPlan:
    """What a download would fetch.

    Attributes:
        spec: what was asked for.
        commit: the commit that it is at now.
        files: the model's files, all shards in order, and their bytes.
        missing: those that are not in the cache.
        partial_bytes: how much of the missing ones is there from an interrupted download.
        cache: the folder of the cache.
    """

    spec: HubSpec
    commit: str
    files: Mapping[str, int]
    missing: Mapping[str, int]
    partial_bytes: int
    cache: Path

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache, with ``blobs``, ``refs`` and ``snapshots``."""
        return self.cache / ("models--" + self.spec.repository.replace("/", "--"))

    @property
    def first(self) -> str:
        """The file to load: of a model in shards the first."""
        return next(iter(self.files))

    @property
    def missing_bytes(self) -> int:
        """Bytes to download, without what an interrupted download left."""
        return sum(self.missing.values()) - self.partial_bytes

    def path_of(self, file: str) -> Path:
        """Return where a file will be."""
        return self.folder / "snapshots" / self.commit / file

    def partial_of(self, sha256: str) -> Path:
        """Return where a file is until it is complete."""
        return self.folder / "blobs" / f"{sha256}.incomplete"


def plan_download(spec: HubSpec) -> DownloadPlan:
    """Ask the hub which files ``spec`` names, how large they are and which are missing.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        ConfigError: the repository has no such tag or file.
        DownloadError: the hub cannot be reached, or refuses.
    """
    where = spec.repository
    with _requests(where):
        import huggingface_hub

        info = huggingface_hub.HfApi(endpoint=_endpoint()).model_info(
            where, revision=spec.revision, files_metadata=True
        )
    commit = str(info.sha)
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise DownloadError(f"the hub gives no commit of {where}")
    listed = {str(item.rfilename): item for item in info.siblings or ()}
    names = choose(filter(is_safe_path, listed), spec.tag, file=spec.file, where=where)
    files = {name: int(listed[name].size or 0) for name in names}
    plan = DownloadPlan(spec, commit, files, {}, 0, hub_cache())
    missing = {name: size for name, size in files.items() if not plan.path_of(name).is_file()}
    n_partial = 0
    for name in missing:
        with contextlib.suppress(OSError):
            sha256 = getattr(listed[name].lfs, "sha256", None)
            n_partial += plan.partial_of(str(sha256)).stat().st_size
    return replace(plan, missing=missing, partial_bytes=n_partial)


def download(plan: DownloadPlan) -> Path:
    """Download what is missing and return the path of the model; of one in shards the first.

    What was downloaded before an interruption is used again. Two processes that want the same file share
    one download: the second waits for the first. huggingface_hub shows its bar on a terminal.

    Raises:
        DownloadError: the hub cannot be reached or refuses, the bytes are not those that it announced, or
            the cache cannot be written or the disk is full. No file has its name then.
    """
    _check_space(plan)
    for file in plan.missing:
        try:
            with _requests(f"{plan.spec.repository}/{file}"):
                _download_file(plan, file)
        except OSError as error:
            raise DownloadError(
                f"cannot write to {error.filename or plan.cache}: {error.strerror or error}",
                hint="free some space, or set HF_HUB_CACHE to a folder that can be written",
            ) from error
    reference = plan.folder / "refs" / (plan.spec.revision or "main")
    if reference.name != plan.commit:
        with contextlib.suppress(OSError):  # a convenience of later look-ups
            reference.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(reference) as opened:
                opened.write(plan.commit.encode())
    return plan.path_of(plan.first)


# -- one file -----------------------------------------------------------------------------------------


def _download_file(plan: DownloadPlan, file: str) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    repository, endpoint = plan.spec.repository, _endpoint()
    url = hf_hub_url(repository, file, revision=plan.commit, endpoint=endpoint)
    metadata = get_hf_file_metadata(url, endpoint=endpoint)
    sha256, size = str(metadata.etag), metadata.size
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise DownloadError(f"the hub gives no checksum of {file}", hint="use another mirror")
    if size is not None and size <= _LARGEST_OVER_HTTP:
        _stream_blob(plan, url, sha256, size)
    # Where the blob is there it makes the link in the snapshot.
    path = hf_hub_download(
        repository, file, revision=plan.commit, cache_dir=plan.cache, endpoint=endpoint
    )
    if not os.path.islink(path):  # without links the snapshot has a copy
        (plan.folder / "blobs" / sha256).unlink(missing_ok=True)


def _stream_blob(plan: DownloadPlan, url: str, sha256: str, size: int) -> None:
    """Put the file at ``blobs/SHA``: download what is not here yet, check it, rename it.

    The hub redirects to where the file is, each time with a fresh signature: a later attempt may come
    after the first one has expired. The token is not sent there, since that is another host.

    Raises:
        DownloadError: the bytes are wrong; they are discarded.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    part = plan.partial_of(sha256)
    blob, lock = part.with_name(sha256), plan.cache / ".locks" / plan.folder.name / f"{sha256}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
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


def _check_space(plan: DownloadPlan) -> None:
    folder = next(each for each in (plan.cache, *plan.cache.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    if plan.missing_bytes + _SPARE_BYTES > free:
        raise DownloadError(
            f"{plan.spec} needs {plan.missing_bytes / 1e9:.2f} GB, and {folder} has "
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
