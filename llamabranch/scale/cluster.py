"""The connection to a Ray cluster. Ray's errors are turned into llamabranch's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ..errors import JobError, LlamaBranchError, UnsupportedError
from ..extras import install_command
from .folder import Folder


def import_ray() -> ModuleType:
    """Return the module ``ray``, with ``ray.data`` imported.

    Raises:
        UnsupportedError: Ray is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UnsupportedError(
            f"jobs on a cluster need Ray: {error}", hint=install_command("scale")
        ) from None
    module: ModuleType = ray
    return module


@contextmanager
def cluster(address: str | None, workers: int, cpus: float) -> Iterator[None]:
    """Connect to a cluster and disconnect afterwards. A connection that exists is left as it is."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    is_local = address in (None, "local")
    # One logical CPU more than the workers need: if a node is lost, its input is read again there.
    size = {"num_cpus": math.ceil(workers * cpus) + 1, "include_dashboard": False}
    ray.init(
        address="local" if is_local else address,
        log_to_driver=False,
        logging_level="ERROR",
        **(size if is_local else {}),
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def translated(output: Folder) -> Iterator[None]:
    """Turn errors of Ray and of the file system into llamabranch's errors."""
    import ray.exceptions

    try:
        yield
    except (ray.exceptions.RayError, OSError) as error:
        cause: BaseException | None = error
        while cause is not None:
            is_rays = isinstance(cause, ray.exceptions.RayError)  # such as its copies of ours
            if isinstance(cause, (LlamaBranchError, OSError)) and not is_rays:
                break
            inner = getattr(cause, "cause", None)
            cause = inner if isinstance(inner, BaseException) else cause.__cause__
        if isinstance(cause, LlamaBranchError):
            raise cause from None
        last = str(error).strip().rpartition("\n")[2]
        text = f"the job failed: {last or type(error).__name__}"
        hint = "what was written is kept; resume the job"
        if isinstance(error, ray.exceptions.RayActorError):
            text = "the job failed: its workers died again and again"
            hint = f"Ray's logs of the workers say why; is there enough memory for each? {hint}"
        if isinstance(cause, OSError):
            text = f"cannot write to {output.path}: {cause.strerror or cause}"
            hint = (
                "what was written is kept; free some space if the disk is full, and resume the job"
            )
        raise JobError(text, hint=hint) from error
