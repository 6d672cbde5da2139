"""``load``: from a name or a path to a context."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypedDict, cast

from .context import Context
from .errors import ConfigError
from .model import Model
from .native import set_log_level

if TYPE_CHECKING:
    from typing_extensions import Unpack
from .hub import BUNDLED_TARGET, resolve
from .hub.catalogue import _nearest

__all__ = ["LoadOptions", "load"]


class ModelOptions(TypedDict, total=False):
    """Options of `load` that go to `Model`."""

    n_gpu_layers: int
    use_mmap: bool
    use_mlock: bool
    check_tensors: bool
    extra_buffers: bool | str


class ContextOptions(TypedDict, total=False):
    """Options of `load` that go to `Context`."""

    n_ctx: int | None
    n_seq_max: int | None
    n_batch: int
    n_ubatch: int | None
    n_threads: int | None
    n_threads_batch: int | None
    flash_attention: bool | str
    kv_type: str
    batch_invariant: bool | str
    swa_full: bool
    offload_kqv: bool
    rope_scaling: str | None
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    n_outputs_max: int | None


class LoadOptions(ModelOptions, ContextOptions, total=False):
    """Every option of `load`."""


def load(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[float], None] | None = None,
    verbose: bool = False,
    **options: Unpack[LoadOptions],
) -> Context:
    """Load a model and create a context for it.

    Args:
        name_or_path: as for `resolve`; None = the bundled target.
        progress: called with the loaded fraction, 0.0 to 1.0.
        verbose: show llama.cpp's log on standard error from now on, for the whole process.
        options: those of `Model` and of `Context`.

    Returns:
        A context that owns its model: closing the context closes the model, too.

    Raises:
        ConfigError: an unknown name or option, or an invalid value.
        ModelLoadError: the file cannot be loaded.
    """
    if verbose:
        set_log_level("info")
    known = [*ModelOptions.__annotations__, *ContextOptions.__annotations__]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"load() has no option {name!r}", hint=_nearest(name, known, "options")
            )
    path = resolve(BUNDLED_TARGET if name_or_path is None else name_or_path)
    model = Model(
        path,
        progress=progress,
        **cast(ModelOptions, _pick(options, ModelOptions.__annotations__)),
    )
    try:
        context = Context(
            model, **cast(ContextOptions, _pick(options, ContextOptions.__annotations__))
        )
    except BaseException:
        model.close()
        raise
    context._owns_model = True
    return context


def _pick(options: Mapping[str, object], names: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if name in names}
