"""Downloads from the Hugging Face hub into the cache that llama.cpp, transformers and we share.

huggingface_hub (the extra ``hub``) downloads; it is imported only when something is downloaded. This
module chooses the files of a model and announces their size.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ..errors import DownloadError, LlamaBranchError
from ..extras import require
from .caches import hub_cache
from .choice import HubSpec, choose

_ACCESS = (
    "check the name, the revision after @ and the name of the file; for a private or gated repository "
    "accept its terms on its page on the hub, and set HF_TOKEN or run `hf auth login`"
)
_HINTS: dict[int | None, str] = {
    **dict.fromkeys((401, 403, 404), _ACCESS),
    429: "too many requests: wait some minutes, or set HF_TOKEN",
    None: "try again; check the network, HF_ENDPOINT, and that HF_HUB_CACHE has free space",
}


def download(spec: HubSpec) -> Path:
    """Ask the hub which files ``spec`` names, download the missing ones, and return the path to load.

    Raises:
        UnsupportedError: huggingface_hub is not installed.
        ConfigError: the repository has no such tag or file.
        DownloadError: the hub cannot be reached or refuses, a file is incomplete, or the cache cannot be
            written. No incomplete file has its final name then.
    """
    require("hub", "downloading", "huggingface_hub")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    # huggingface_hub reads the variable itself, but only when it is imported.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None)
    where, cache = spec.repository, hub_cache()
    try:
        info = api.model_info(where, revision=spec.revision, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
        names = choose(sizes, spec.tag, file=spec.file, where=where)
        here = {name: try_to_load_from_cache(where, name, cache, info.sha) for name in names}
        if missing := [name for name, path in here.items() if path is None]:
            megabytes = sum(sizes[name] for name in missing) / 1e6
            note(f"downloading {where}/{names[0]}: {megabytes:,.1f} MB, to {cache}")
        paths = [
            api.hf_hub_download(where, name, revision=spec.revision, cache_dir=cache)
            for name in names
        ]
    except LlamaBranchError:
        raise
    except (errors.HTTPError, errors.XetDownloadError, OSError, RuntimeError, ValueError) as error:
        # hf_hub_download puts the reason why it could not reach the hub into a cause.
        is_vague = isinstance(error, errors.LocalEntryNotFoundError)
        cause = (error.__cause__ or error) if is_vague else error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise DownloadError(
            f"cannot download {spec}: {reason}",
            status=status,
            hint=_HINTS.get(status, "try again later"),
        ) from error
    return Path(paths[0])


def note(text: str) -> None:
    """Print a line on standard error, if there is one."""
    with contextlib.suppress(OSError, AttributeError):
        print(text, file=sys.stderr, flush=True)
