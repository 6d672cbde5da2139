"""``load``: open a context for a model's name or path."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, cast

from .arguments import instance, nearest, shown
from .context import Context as AnyContext
from .context.params import ContextOptions
from .engine.context import Context
from .errors import ConfigError
from .model import Model
from .native.library import set_log_level

if TYPE_CHECKING:
    from typing_extensions import Unpack
from .hub import BUNDLED_TARGET, resolve

# Options of llama-cpp-python's Llama, and what to use here instead.
_HINTS = {
    "embedding": "there are no embeddings here; Branch.hidden_states() has the states of a text's tokens",
    "logits_all": "Branch.score and prompt_logprobs score every token; decode(logits='all') has all rows",
    "add_bos": "a text begins with the model's BOS token; pass token ids for another beginning",
}


class ModelOptions(TypedDict, total=False):
    """Options of `load` that go to `Model`."""

    n_gpu_layers: int
    use_mmap: bool
    use_mlock: bool
    check_tensors: bool
    extra_buffers: bool | str
    load_mtp: bool
    chat_template: str | None


class LoadOptions(ModelOptions, ContextOptions, total=False):
    """Every option of `load`."""


def load(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[float], None] | None = None,
    download: bool | None = None,
    verbose: bool = False,
    target: AnyContext | None = None,
    **options: Unpack[LoadOptions],
) -> Context:
    """Load a model and create a context for it.

    Args:
        name_or_path: a path to a GGUF file, a name from `catalogue`, or ``user/repo[:tag]`` on the
            Hugging Face hub, as for `resolve`. None = the small model that comes with llamabranch.
        progress: called with the loaded fraction, 0.0 to 1.0.
        download: True = download a model that is not on this machine, as `fetch` does; False =
            raise ConfigError. None = the environment variable ``LLAMABRANCH_DOWNLOAD`` decides (1
            or 0). If it is not set, the model is downloaded only if standard error is a terminal;
            its size is shown there first.
        target: for an EAGLE-3 head, the context it drafts for: ``EagleDrafter(load("head.gguf",
            target=ctx))``. Leave it out for a model that generates.
        verbose: show llama.cpp's log on standard error from now on, for the whole process.
        options: options of the context and of the model. These are used most:

            - ``n_ctx``: the size of the cache in tokens, shared by all sequences (2,048, or the
              length that the model was trained for if that is less). ``n_seq_max``: how many
              sequences there may be at a time (16, at most 256).
            - ``n_threads``, ``n_threads_batch``: threads for decoding one token, and for many (by
              default the physical cores, or fewer while other programs use them).
            - ``n_gpu_layers``: layers to offload; -1 = all (the default).
            - ``exact``: True = texts do not depend, to the bit, on drafts or on what else is in a
              batch, so the same seed gives the same text. This is tried out with the model, and
              refused where it does not hold. False (the default) = texts may differ by rounding.
            - ``kv_type`` ("f16", "bf16", "q8_0", ...; "auto" = f16, or bf16 in an exact context) and
              ``flash_attention`` (True, False, or "auto" = wherever llama.cpp can).
            - ``prefix_cache``: keep K/V for prompts that begin alike (on after the first ``complete``,
              ``chat`` or ``AsyncEngine``). ``cache_dir``: a folder that keeps it after the context is
              closed, and gives it to the next one; ``cache_size``: the most bytes of it ("8GiB").
            - For models whose memory cannot drop the end of a text, such as recurrent ones:
              ``checkpoint_ram`` is how many bytes of host memory hold earlier states (512 MiB).
              ``n_rs_seq`` is how many of the latest states are kept, so that drafts are verified
              in place ("auto").
            - ``kv_unified``: True = all sequences share one cache; False = each has its own part;
              or "auto".
            - ``load_mtp``: load MTP layers too (False). ``chat_template``: replaces the file's.

            `Model` and `ContextParams` explain these and the others.

    Returns:
        A context that owns its model: closing the context closes the model, too.

    Raises:
        ConfigError: an unknown name or option, an invalid value, or a model that is not on this machine
            and may not be downloaded.
        DownloadError, UnsupportedError: the model cannot be downloaded, see `fetch`.
        UnsupportedError: ``exact=True`` does not hold for this model; the message has the reason.
        ModelLoadError: the file cannot be loaded.
    """
    if verbose:
        set_log_level("info")
    known = [*ModelOptions.__annotations__, *ContextOptions.__annotations__]
    for name in options:
        if name not in known:
            hint = _HINTS.get(name) or nearest(name, known, "options")
            raise ConfigError(f"load() has no option {name!r}", hint=hint)
    if target is not None:
        hint = "pass the context that generates, for example lb.load(), not its model or name"
        instance("target", target, AnyContext, hint)
    if name_or_path is not None and not isinstance(name_or_path, (str, os.PathLike)):
        raise ConfigError(f"a model is a path or a name, not {shown(name_or_path)}")
    path = resolve(BUNDLED_TARGET if name_or_path is None else name_or_path, download=download)
    of_model, of_context = (
        {name: value for name, value in options.items() if name in kind.__annotations__}
        for kind in (ModelOptions, ContextOptions)
    )
    model = Model(path, progress=progress, **cast(ModelOptions, of_model))
    try:
        return Context(model, owns_model=True, target=target, **cast(ContextOptions, of_context))
    except BaseException:
        model.close()
        raise
