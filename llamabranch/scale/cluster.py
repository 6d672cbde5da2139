"""Ray: the connection to a cluster, Ray Data's settings, its errors as ours, the ledger's actor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from ..errors import JobError, LlamaBranchError, UnsupportedError
from ..extras import install_command
from .folder import Folder
from .ledger import Ledger

if TYPE_CHECKING:
    from ray.actor import ActorHandle


def make_ledger() -> ActorHandle:
    """Return a new ledger for `WorkerOptions`: with it a row that ends its process becomes an error.

    It ends with the program that made it. Only for ``map_batches``: whole jobs have their own.

    Raises:
        UnsupportedError: Ray is not installed.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # On this node: if it goes, the whole job goes.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(Ledger).options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
    )
    return actor.remote()


def import_ray() -> ModuleType:
    """Return the module, with ``ray.data`` imported.

    Raises:
        UnsupportedError: it is not installed.
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
    """Connect to a cluster, unless this process is connected, and disconnect afterwards."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    if address in (None, "local"):
        # Logical CPUs: one more, because the filter of a resumed job takes one.
        ray.init(
            address="local",
            num_cpus=math.ceil(workers * cpus) + 1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    else:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def data_context(**values: object) -> Iterator[None]:
    """Set values of Ray Data's context for the datasets that are made inside."""
    from ray.data import DataContext

    context = DataContext.get_current().copy()
    for name, value in values.items():
        setattr(context, name, value)
    with DataContext.current(context):
        yield


@contextmanager
def translated(output: Folder) -> Iterator[None]:
    """Turn errors of Ray and of the file system into ours."""
    import ray.exceptions

    try:
        yield
    except (ray.exceptions.RayError, OSError) as error:
        cause: BaseException | None = error
        while cause is not None:
            is_rays = isinstance(cause, ray.exceptions.RayError)  # its copies of our errors too
            if isinstance(cause, (LlamaBranchError, OSError)) and not is_rays:
                break
            inner = getattr(cause, "cause", None)
            cause = inner if isinstance(inner, BaseException) else cause.__cause__
        if isinstance(cause, LlamaBranchError):
            raise cause from None
        last = str(error).strip().rpartition("\n")[2]
        text = f"the job failed: {last or type(error).__name__}"
        hint = "what is written is kept; resume the job"
        if isinstance(cause, OSError):
            text = f"cannot write to {output.path}: {cause.strerror or cause}"
            hint = (
                "what was written is kept; free some space if the disk is full, and resume the job"
            )
        raise JobError(text, hint=hint) from error
