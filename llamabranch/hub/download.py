"""Downloads from the Hugging Face hub into the cache that llama.cpp, transformers and we share.

huggingface_hub (the extra ``hub``) downloads; it is imported only when something is downloaded. This
module does what `hf_hub_download` does not: it chooses the files of a model, announces their size, and
checks that the disk has space for all of them before the first download begins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, DownloadError, LlamaBranchError, UnsupportedError
from ..extras import install_command
from ..files import sha256
from .caches import hub_cache
from .choice import choose
from .spec import HubSpec

_SPARE_BYTES = 64 << 20  # left free on the disk
_LONG_CHECK_BYTES = 2 << 30  # checking a file of this size takes some seconds


def download(spec: HubSpec) -> Path:
    """Ask the hub which files ``spec`` names, download what is missing, and return the path to load.

    Files that another program has downloaded are not downloaded again. If two processes need the same
    file, the second waits for the first. The size is announced on standard error; on a terminal
    huggingface_hub shows a progress bar.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        ConfigError: the repository has no such tag or file.
        DownloadError: the hub cannot be reached or refuses, a file is incomplete or its SHA-256 differs
            from the hub's, the cache cannot be written, or the disk is full. No file has its final name
            then.
    """
    where, root = spec.repository, hub_cache()
    with _requests(where):
        from huggingface_hub import HfApi, hf_hub_download

        endpoint = _endpoint()
        info = HfApi(endpoint=endpoint).model_info(
            where, revision=spec.revision, files_metadata=True
        )
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    names = choose(siblings, spec.tag, file=spec.file, where=where)
    snapshot = root / f"models--{where.replace('/', '--')}" / "snapshots" / str(info.sha)
    missing = [name for name in names if not (snapshot / name).is_file()]
    if missing:
        n_bytes = sum(siblings[name].size or 0 for name in missing)
        parts = f" in {len(names)} parts" if len(names) > 1 else ""
        note(f"downloading {where}/{names[0]}{parts}: {_size(n_bytes)}, to {root}")
        _check_space(root, n_bytes, str(spec))
    paths = []
    for name in names:
        with _requests(f"{where}/{name}"):
            paths.append(
                hf_hub_download(
                    where, name, revision=spec.revision, cache_dir=root, endpoint=endpoint
                )
            )
        lfs = siblings[name].lfs
        if name in missing and lfs is not None:
            _check_content(Path(paths[-1]), lfs.sha256, f"{where}/{name}")
    return Path(paths[0])


def _check_content(path: Path, expected: str, address: str) -> None:
    """Raise DownloadError, and delete the file, if its SHA-256 differs from the hub's.

    If the program ends before the check, the file has no final name. It is then checked the next time it
    is needed, and not downloaded again.
    """
    if path.stat().st_size >= _LONG_CHECK_BYTES:
        note(f"checking {path.name}")
    blob, is_right = path.resolve(), False
    try:
        is_right = sha256(path) == expected
        if not is_right:
            blob.unlink()
            raise DownloadError(
                f"{address} is not the file that the hub describes (its SHA-256 differs); "
                "it was deleted",
                hint="download it again; if that does not help, a proxy or a mirror (HF_ENDPOINT) "
                "alters it",
            )
    finally:
        if not is_right and path.is_symlink():
            path.unlink()


def note(text: str) -> None:
    """Print a line on standard error, if there is one."""
    with contextlib.suppress(OSError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def _check_space(root: Path, n_bytes: int, name: str) -> None:
    folder = next(parent for parent in (root, *root.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if n_bytes + _SPARE_BYTES > free:
        raise DownloadError(
            f"{name} needs {_size(n_bytes)}, and {folder} has {_size(free)} left",
            hint="free some space, choose a smaller quantization, or set HF_HUB_CACHE to another disk",
        )


def _endpoint() -> str | None:
    """Return the hub's address as llama.cpp finds it; huggingface_hub reads its own only at import."""
    address = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT")
    return address.rstrip("/") if address else None


_HINTS = {
    401: "set HF_TOKEN or run `hf auth login`; for a gated model accept its terms on its page on the hub",
    403: "this token may not read it: accept its terms on its page on the hub",
    404: "check the name, the revision after @ and the name of the file; for a private repository set "
    "HF_TOKEN or run `hf auth login`",
    429: "too many requests: wait some minutes, or set HF_TOKEN",
    None: "try again; check the network and HF_ENDPOINT",
}


@contextlib.contextmanager
def _requests(address: str) -> Iterator[None]:
    """Import huggingface_hub, and raise its errors as ours, with a hint."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise UnsupportedError(
            "downloading needs huggingface_hub, which is not installed",
            hint=f"{install_command('hub')}, or download the file by hand and use its path",
        ) from error
    try:
        yield
    except LlamaBranchError:
        raise
    except errors.HFValidationError as error:
        raise ConfigError(f"{address}: {error}") from error
    except (errors.HTTPError, errors.XetDownloadError, OSError, RuntimeError, ValueError) as error:
        is_network = isinstance(error, (ConnectionError, TimeoutError))
        if isinstance(error, OSError) and error.errno is not None and not is_network:
            raise DownloadError(
                f"cannot write to {error.filename or hub_cache()}: {error.strerror or error}",
                hint="free some space, or set HF_HUB_CACHE to a folder that can be written",
            ) from error
        # hf_hub_download puts the reason why it could not reach the hub into a cause.
        is_vague = isinstance(error, errors.LocalEntryNotFoundError)
        cause = (error.__cause__ or error) if is_vague else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        # The rest of the message is about options that we do not have.
        words = " ".join(str(cause).split())
        message = words.partition(" Please retry with")[0]
        reason = message or type(cause).__name__
        raise DownloadError(
            f"cannot download {address}: {reason}",
            status=status,
            hint=_HINTS.get(status, "try again later"),
        ) from error
