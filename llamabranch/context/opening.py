"""Open the native context of a model or of a head: resolve the parameters, then find out what it can do.

`Capabilities` reports the result, which also decides the class of `Memory`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..arguments import figure
from ..errors import BranchStateError, DecodeError, SnapshotError, UnsupportedError
from ..model import Model
from ..native.context import ContextHandle
from ..native.library import max_sequences
from ..native.state_layout import StateLayout
from .cell_table import Usage
from .exactness import most_exact_rows, why_not_exact
from .memory import MOST_WITH_WINDOW, Memory, NonUnified, RollingBack, States, Windowed
from .params import EXACT_KV_TYPES, ContextParams
from .room import BYTES_OF_NUMBER, check_room, memory_bytes
from .runner import Runner, decode_run
from .threads import ThreadWatch

_MOST_OFF = 20  # equal logits may differ by 1/20 of what another token changes
_ROLLBACKS, _ROLLBACK_PART = (8, 4), 8  # tokens to undo, if their states fit into 1/8 of RAM
_OF_HEAD = "a head only drafts"
_BESIDE = "give the target's context: Context(head, target=ctx), or load(name, target=ctx)"


@dataclass(frozen=True)
class Capabilities:
    """What this context's memory can do; determined when it is created.

    Args:
        can_truncate: any number of tokens can be dropped from the end of a sequence. (A sequence with a
            sliding window that was restored from a snapshot has only the last window; a branch that
            drops tokens is then decoded again.)
        can_share: sequences can share cells; otherwise (``kv_unified=False``) a fork copies them.
        sliding_window: size of the attention window in tokens; 0 = no window.
        recurrent: some of the memory is a state instead of cells.
        exact: a token's logits do not depend, to the bit, on what else is in the batch or the cache.
            (One exception, reported by ``usage().in_order``: the cache ran full while raw sequences or an
            unfinished prompt prevented compaction, see ``compaction.py``.)
        exact_reason: why, or why not.
        state_bytes: the size of a sequence's recurrent state; 0 = it has none. ``rollback`` more states
            are kept.
        checkpoints: whether earlier states are kept, for memory that cannot drop the end of a sequence.
        checkpoints_reason: why, or why not.
        rollback: for memory with recurrent states, how many drafted tokens are verified in place:
            llama.cpp keeps the states of this many last tokens of each sequence. 0 = drafts are
            verified on a fork.
        rollback_reason: why, or why not.
    """

    can_truncate: bool
    can_share: bool
    sliding_window: int
    recurrent: bool
    exact: bool
    exact_reason: str
    state_bytes: int = 0
    checkpoints: bool = False
    checkpoints_reason: str = "the end of a sequence can be dropped"
    rollback: int = 0
    rollback_reason: str = "the end of a sequence can be dropped"


class Target(Protocol):
    """The context that a head drafts for."""

    model: Model
    capabilities: Capabilities
    params: ContextParams
    decoder: Runner

    def usage(self) -> Usage:
        """Return how full its cache is."""


def open_native(
    model: Model, requested: ContextParams, target: Target | None
) -> tuple[ContextParams, Capabilities, Runner]:
    """Create the native context of ``model``, or of ``model`` as a head of ``target``, and try it out.

    Errors: see `Context`.

    Returns:
        The parameters with every default resolved, what the context can do, and the runner that decodes
        in it; the context is empty.
    """
    if target is not None:
        if requested.cache_dir is not None:
            raise UnsupportedError("a head has no cache_dir: it computes its K/V from the target's")
        requested = _head_params(model, target, requested)
    else:
        _check_generates(model)
    params = requested.resolve(model)
    is_head = target is not None
    if not model.shares_memory:
        check_room(model, params, is_head=is_head)
    n_trained = None if model.shares_memory else requested.trained_length(model)  # the target warns
    if requested.n_rs_seq == "auto" and not is_head:
        params = replace(params, n_rs_seq=_most_rollback(model, params))
    if params.exact:
        _check_exact(model, why_not_exact(model, params, is_head=is_head))
    handle = _create(model, params, target)
    try:
        if params.exact:  # the only thing that is measured
            n_exact = most_exact_rows(Runner(_plain_memory(handle)), model, params)
            if n_exact < (params.n_ubatch or handle.n_batch):
                handle.close()
                # Without unified KV, llama.cpp computes one token of each sequence in the same batch.
                least = max(2, 1 if params.kv_unified else params.n_seq_max or 0)
                reason = f"measured: logits of batches of more than {n_exact} tokens differ"
                _check_exact(model, reason if n_exact < least else "")
                params = replace(params, n_ubatch=n_exact)
                handle = _create(model, params, target)
        memory: Memory = States(handle)
        if target is None:
            capabilities, memory = _probe(handle, model, params)
        elif not model.shares_memory:
            capabilities, memory = _probe(handle, model, params, is_head=True)
            if not memory.can_draft:
                raise UnsupportedError(
                    "a head must be able to drop its drafts", hint="leave swa_full out"
                )
        else:  # trials would need memory
            if not handle.kv_unified:
                _check_copies(None)
            capabilities = replace(
                target.capabilities, can_truncate=False, exact=False, exact_reason=_OF_HEAD
            )
        encoded = 0 if target is None else _open_head(handle, model, target)
    except BaseException as error:
        handle.close()
        if requested.kv_unified == "auto" and isinstance(error, UnsupportedError):
            return open_native(model, replace(requested, kv_unified=True), target)
        raise
    watch = _watch(model, requested, params, handle)
    return params, capabilities, Runner(memory, n_trained, encoded, watch)


def _check_exact(model: Model, reason: str) -> None:
    """Raise UnsupportedError if there is a ``reason`` why a context of ``model`` cannot be exact."""
    if reason:
        hint = (
            "it needs weights on the CPU that llama.cpp computes the same way in all batches, "
            f"such as Q8_0 or Q4_0, kv_type {' or '.join(EXACT_KV_TYPES)}, and flash attention"
        )
        if model.extra_buffers:
            hint += "; extra_buffers=False may allow some"
        raise UnsupportedError(f"this context cannot be exact: {reason}", hint=hint)


def _plain_memory(handle: ContextHandle) -> Memory:
    return Memory(handle) if handle.kv_unified else NonUnified(handle)


def _watch(
    model: Model, requested: ContextParams, params: ContextParams, handle: ContextHandle
) -> ThreadWatch | None:
    """Return a watch that uses fewer threads on busy cores; None if the user set their number."""
    most = params.n_threads or 1
    if requested.n_threads or requested.n_threads_batch or most == 1 or model.on_gpu:
        return None
    return ThreadWatch(handle.set_threads, sorted({1, most // 2, most}, reverse=True))


def _check_generates(model: Model) -> None:
    """Raise UnsupportedError, with the reason, unless ``model`` generates text by itself."""
    if model.architecture == "eagle3" and not model.vocab_only:
        raise UnsupportedError(
            f"{model.name} is an EAGLE-3 head: it works only together with its target",
            hint=_BESIDE,
        )
    if model.vocab_only or not model.can_generate:
        kind = "only its vocabulary is loaded" if model.vocab_only else "it predicts no tokens"
        hint = None
        if model.n_mtp_layers and not model.vocab_only:
            kind += ", its MTP layers work only together with their target"
            hint = _BESIDE
        raise UnsupportedError(f"cannot create a context for {model.name}: {kind}", hint=hint)


def _most_rollback(model: Model, params: ContextParams) -> int:
    """Return how many earlier states per sequence fit into memory; 0 if the model has no states."""
    room = (memory_bytes() or 0) // _ROLLBACK_PART
    of_each = model.state_numbers * BYTES_OF_NUMBER * (params.n_seq_max or 1)
    most = params.most_rollback
    return next((n for n in _ROLLBACKS if n <= most and n * of_each <= room), 0) if of_each else 0


def _create(model: Model, params: ContextParams, target: Target | None) -> ContextHandle:
    """Return the native context; ``target`` is set for the context of a head."""
    native = params.native()
    if target is None:
        handle = ContextHandle(model.handle, native)
        if not handle.has_memory:
            handle.close()
            raise UnsupportedError(f"{model.name} has no memory: it cannot generate")
        return handle
    with target.decoder.handle.lock:
        if model.shares_memory and target.usage().cells_used:
            raise BranchStateError(
                f"{model.name} shares the memory of its target, and opening it would empty that memory",
                hint="open it before anything is decoded, or prune all branches first",
            )
        return ContextHandle(
            model.handle,
            native,
            target.decoder.handle,
            uses_mtp=not model.target_layers,
            shares_memory=model.shares_memory,
        )


def _open_head(handle: ContextHandle, model: Model, target: Target) -> int:
    """Make the target keep its hidden states; return how many numbers an encoder reads per token."""
    layers = model.target_layers or (target.model.n_layer,)
    reader = weakref.ref(handle)

    def is_read() -> bool:
        head = reader()
        return head is not None and not head.closed

    with target.decoder.handle.lock:
        width = target.decoder.watch_hidden(layers, is_read).width
    return width if model.target_layers else 0


def _head_params(model: Model, target: Target, requested: ContextParams) -> ContextParams:
    """Return the parameters of a head's context; the target's are the defaults.

    Raises:
        UnsupportedError: ``model`` cannot draft for the target; the message says why.
    """
    target.decoder.check_open()
    theirs = target.params
    reason = target.model.head_fault(model)
    if reason:
        raise UnsupportedError(
            f"{model.name} cannot draft for {target.model.name} as a head: {reason}",
            hint="`llamabranch models show TARGET HEAD` shows whether one can draft for the other",
        )
    requested = replace(
        requested,
        n_threads=requested.n_threads or theirs.n_threads,
        n_threads_batch=requested.n_threads_batch or theirs.n_threads_batch,
    )
    if model.shares_memory:
        if requested.prefix_cache:
            raise UnsupportedError("a head that reads the memory of its target caches no prefixes")
        return replace(
            requested,
            kv_unified=theirs.kv_unified,
            swa_full=theirs.swa_full,
            n_ctx=target.decoder.handle.n_ctx,
            n_seq_max=theirs.n_seq_max,
            kv_type=theirs.kv_type,
            flash_attention=theirs.flash_attention,
        )
    # If there are several MTP layers, each has its own sequences with the K/V of the same texts.
    n_layers = max(1, model.n_mtp_layers)
    return replace(
        requested,
        n_ctx=requested.n_ctx or target.decoder.handle.n_ctx * n_layers,
        n_seq_max=requested.n_seq_max or min((theirs.n_seq_max or 1) * n_layers, max_sequences()),
    )


def _probe(
    handle: ContextHandle, model: Model, params: ContextParams, *, is_head: bool = False
) -> tuple[Capabilities, Memory]:
    """Find out by short trials what an empty context can do; return the result and its empty memory.

    Args:
        params: the resolved parameters with which the context was created.
        is_head: the context computes a head, not the model's trunk.
    """
    # A head has attention only, even if the model in the same file has other memory.
    recurrent = model.memory_type in ("recurrent", "hybrid") and not is_head
    # llama.cpp reports success for a removal even if cells that the window needs are already gone, and
    # later decodes would attend to an incomplete window. With ``swa_full`` and ``Windowed`` these cells
    # stay.
    window = model.n_swa if model.memory_type == "sliding-window" else 0
    memory = _plain_memory(handle)
    runner = Runner(memory)
    decode_run(runner, [3 % model.n_vocab, 10 % model.n_vocab], 0, "none")
    layout = StateLayout.learn(handle.state(0), n_tokens=2)
    state_bytes = 0 if layout is None else layout.state_bytes
    # If llama.cpp keeps states of the last tokens, a removal works, but only once after each decode.
    can_truncate = not handle.n_rollback and memory.drop(0, 1)
    if layout is not None and layout.is_cells_only:
        window = 0  # no layer uses it
    if window:
        can_truncate &= params.swa_full and handle.n_seq_max <= MOST_WITH_WINDOW
        can_truncate &= layout is not None and layout.has_window
    memory.clear()
    n_rollback, can_return = 0, False
    rollback_reason = reason = "the end of a sequence can be dropped"
    if not can_truncate:
        n_rollback, rollback_reason = _can_undo(runner, model, params)
        can_return, reason = _can_return(runner, model.n_vocab, params.checkpoint_ram)
    if not handle.kv_unified:
        _check_copies(layout)
        memory = NonUnified(handle, layout)
    elif not can_truncate:
        max_bytes = params.checkpoint_ram if can_return else 0
        memory = States(handle, layout, max_bytes)
        if n_rollback:
            memory = RollingBack(handle, layout, max_bytes, n_rollback)
    elif window:
        memory = Windowed(handle, layout, window)
    else:
        memory = Memory(handle, layout, keeps_order=params.exact)
    capabilities = Capabilities(
        can_truncate=can_truncate,
        can_share=handle.kv_unified,
        sliding_window=window,
        recurrent=recurrent,
        exact=params.exact,
        exact_reason=f"measured: logits of batches of {params.n_ubatch} tokens are equal to the bit"
        if params.exact
        else "not asked for (exact=True asks for it)",
        state_bytes=state_bytes,
        checkpoints=can_return,
        checkpoints_reason=reason,
        rollback=n_rollback,
        rollback_reason=rollback_reason,
    )
    return capabilities, memory


def _can_undo(runner: Runner, model: Model, params: ContextParams) -> tuple[int, str]:
    """Try out how many tokens of a decode an empty context can undo; return the number and a reason.

    The logits after an undo must equal the logits of a text that never had these tokens.
    """
    memory, n_vocab = runner.memory, model.n_vocab
    n = memory.handle.n_rollback
    if not n:
        if not params.n_rs_seq:
            return 0, "n_rs_seq is 0, or its states take too much memory"
        return 0, f"llama.cpp keeps no earlier states of {model.architecture}"
    tokens = [(3 + 7 * i) % n_vocab for i in range(n + 2)]
    try:
        for k in {1, n}:
            memory.clear()
            prefix, after = tokens[: len(tokens) - k], 5 % n_vocab
            decode_run(runner, tokens[:1], 0, "none")
            decode_run(runner, tokens[1:], 0, "none")
            if not memory.drop(0, len(prefix)):
                return 0, "llama.cpp does not undo the end of a decode"
            undone = decode_run(runner, [after], 0, "last")[0].array.copy()
            memory.clear()
            decode_run(runner, tokens, 0, "none")
            whole = decode_run(runner, [after], 0, "last")[0].array.copy()
            memory.clear()
            decode_run(runner, prefix, 0, "none")
            plain = decode_run(runner, [after], 0, "last")[0].array
            off, moved = (float(np.abs(row - plain).max()) for row in (undone, whole))
            if not off <= moved / _MOST_OFF:
                return 0, f"after {k} tokens that were undone, logits were off by {figure(off, 2)}"
        return n, f"{n} tokens were undone, and logits after them were off by {figure(off, 2)}"
    except DecodeError as error:
        return 0, f"after tokens that were undone: {error.message}"
    finally:
        memory.clear()


def _can_return(runner: Runner, n_vocab: int, max_bytes: int) -> tuple[bool, str]:
    """Try out whether an empty context can return to a saved state; return the answer and a reason.

    After the return, the logits must be the same as before; without it, they must differ, or the trial
    proves nothing.
    """
    memory, token = runner.memory, 5 % n_vocab
    try:
        decode_run(runner, [3 % n_vocab, 10 % n_vocab, token], 0, "none")
        state = memory.handle.partial_state(0)
        if not max_bytes:
            return False, "checkpoint_ram is 0"
        if not 0 < len(state) <= max_bytes:
            return False, f"a state takes {len(state)} bytes, checkpoint_ram is {max_bytes}"
        before, after = (decode_run(runner, [token], 0, "last")[0].array.copy() for _ in range(2))
        memory.handle.set_partial_state(0, state)
        if not memory.drop(0, 3):
            return False, "llama.cpp does not drop what follows a state that was put back"
        again = decode_run(runner, [token], 0, "last")[0].array
        off, moved = (float(np.abs(row - before).max()) for row in (again, after))
        if not off <= moved / _MOST_OFF:
            return False, f"after a state that was put back, logits were off by {figure(off, 2)}"
        return True, f"a state was put back, and logits after it were off by {figure(off, 2)}"
    except SnapshotError as error:
        return False, error.message
    finally:
        memory.clear()


def _check_copies(layout: StateLayout | None) -> None:
    """Raise UnsupportedError if the cells of a sequence cannot be copied with non-unified KV."""
    if layout is None or not layout.is_cells_only:
        raise UnsupportedError(
            "kv_unified=False: llama.cpp writes K/V in an unknown form, so forks cannot copy it"
        )
