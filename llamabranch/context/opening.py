"""Open the native context of a model or of a head: resolve parameters, try it out, choose threads.

`Capabilities` reports the result. Callers use the `Memory` object that was chosen for this kind of
memory.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..arguments import figure
from ..errors import BranchStateError, DecodeError, SnapshotError, UnsupportedError
from ..model import Model
from ..native import ContextHandle, NativeContextParams, StateLayout, max_sequences
from .cell_table import Usage
from .exactness import exactness_of
from .kv_type import EXACT, MOST_EXTRA, Setting, measured_costs
from .memory import MOST_WITH_WINDOW, Memory, NonUnified, RollingBack, States, Windowed
from .params import INVARIANT_KV_TYPES, ContextParams, warn_of_length
from .room import BYTES_OF_NUMBER, check_room, memory_bytes
from .runner import Runner, decode_run
from .threads import ThreadTuner

__all__ = ["Capabilities", "open_native"]


_MOST_OFF = 20  # rounding may change logits by at most 1/20 of what another token changes
_ROLLBACKS, _ROLLBACK_PART = (8, 4), 8  # tokens to undo; their states may take 1/8 of the memory
_BESIDE = "give the target's context: Context(head, target=ctx), or load(name, target=ctx)"


@dataclass(frozen=True)
class Capabilities:
    """What this context's memory can do; determined when it is created.

    Args:
        can_truncate: the end of a sequence can be dropped, however long it is. (If a sequence with a
            sliding window was restored from a snapshot, only the end of the window is there; a branch
            that drops more is decoded again.)
        can_share: sequences can share cells; otherwise (``kv_unified=False``) a fork copies them.
        sliding_window: size of the attention window in tokens, or 0 without a window.
        recurrent: some of the memory is a state instead of cells.
        batch_invariant: a token's logits do not depend, to the bit, on what else is in the batch or the
            cache. (One exception, reported by ``usage().in_order``: the cache ran full while raw
            sequences or an unfinished prompt prevented compaction, see ``compaction.py``.)
        batch_invariant_reason: why, or why not.
        exact_rows: the measured number of rows up to which a decode is exact: each row has, to the bit,
            the logits that it has alone. ``n_batch`` = no size was found that differs; 0 = not measured.
            With a sliding window nothing more is known, because cells that are used again may change
            order.
        total_variation: the largest measured total variation between the distributions of a row in a
            batch and of the same row alone; 0.0 = they are equal, None = not measured.
        state_bytes: the size of the recurrent state of a sequence; 0 without one.
        checkpoints: whether earlier states are kept, if the end of a sequence cannot be dropped.
        checkpoints_reason: why, or why not.
        rollback: how many drafted tokens are verified in place, if the memory has recurrent states:
            llama.cpp keeps this many states of the last tokens of each sequence. 0 = drafts are verified
            on a fork.
        rollback_reason: why, or why not.
        rollback_bytes: the size of these states of a sequence, in addition to ``state_bytes``.
        exact_read_ratio, exact_write_ratio: the time that a batch-invariant context of this model takes
            to read a prompt, and to generate, divided by the time of the fastest context; with 2,048
            cells on this processor. 1.0 = it is the fastest, None = not measured.
    """

    can_truncate: bool
    can_share: bool
    sliding_window: int
    recurrent: bool
    batch_invariant: bool
    batch_invariant_reason: str
    exact_rows: int = 0
    total_variation: float | None = None
    state_bytes: int = 0
    checkpoints: bool = False
    checkpoints_reason: str = "the end of a sequence can be dropped"
    rollback: int = 0
    rollback_reason: str = "the end of a sequence can be dropped"
    rollback_bytes: int = 0
    exact_read_ratio: float | None = None
    exact_write_ratio: float | None = None

    @property
    def cost_of_exact(self) -> str:
        """A sentence about what exactness costs on this processor; "" if it was not measured."""
        if self.exact_read_ratio is None or self.exact_write_ratio is None:
            return ""
        read, write = map(_in_words, (self.exact_read_ratio, self.exact_write_ratio))
        verb = "reads" if self.batch_invariant else "would read"
        also = "generates" if self.batch_invariant else "generate"
        return f"exact {verb} prompts {read} and {also} {write} on this processor"


def _in_words(ratio: float) -> str:
    return f"{ratio:.1f} x slower" if ratio >= 1.05 else "as fast"


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
        requested = _head_params(model, target, requested)
    else:
        _check_generates(model)
    resolved = requested.resolve(model)  # raises its errors before a warning
    if not model.shares_memory:
        check_room(model, resolved, is_head=target is not None)
    n_trained = _trained_length(model, requested)
    tuner, capabilities, memory = _probed(model, requested, target)
    params = tuner.params
    try:
        if params.cache_ram and not memory.can_copy:
            raise UnsupportedError(
                f"cache_ram is not possible with {model.memory_type} memory, which cannot be copied",
                hint="leave cache_ram out; prefix_cache works without it",
            )
        encoded = 0 if target is None else _open_head(memory.handle, model, target)
    except BaseException:
        memory.handle.close()
        raise
    watch = None if target is not None else tuner.watch(memory.handle)
    return params, capabilities, Runner(memory, n_trained, encoded, watch)


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


def _trained_length(model: Model, requested: ContextParams) -> int | None:
    """Return the length beyond which a text gets a warning, or None; warn now of ``n_ctx`` itself."""
    if model.shares_memory:
        return None  # the target warns
    trained = requested.trained_length(model)
    # Many cells for several sequences are usually meant for many texts; for one sequence they are meant
    # for a long text.
    n_ctx = requested.n_ctx if requested.n_seq_max in (None, 1) else None
    if trained is None or n_ctx is None or n_ctx <= trained:
        return trained
    warn_of_length(f"n_ctx={n_ctx} is", trained, n_ctx)
    return None  # warn only once


def _probed(
    model: Model, requested: ContextParams, target: Target | None
) -> tuple[ThreadTuner, Capabilities, Memory]:
    """Create the native context and try out what it can do; again if the trial changes its parameters.

    If batches are not exact, or exactness costs too much, the fastest attention is used. With
    ``batch_invariant=True`` a decode has at most as many rows as are exact.
    """
    first = resolved = requested.resolve(model)
    if (
        requested.n_rs_seq == "auto" and target is None
    ):  # if the file has the size of the states, this is known before anything is opened
        n_rollback = _most_rollback(model.state_numbers * BYTES_OF_NUMBER, resolved)
        if n_rollback:
            requested = replace(requested, n_rs_seq=n_rollback)
            first = resolved = replace(resolved, n_rs_seq=n_rollback)
    reason = ""
    variation: float | None = None
    ratios: tuple[float | None, float | None] = None, None
    while True:
        tuner = ThreadTuner(model, resolved)
        params = tuner.params
        handle = _create(model, params.native(), target)
        try:
            if target is not None and model.shares_memory:  # trials need memory
                return tuner, *_probe_sharing_head(handle, target.capabilities)
            capabilities, memory = _probe(handle, model, params, is_head=target is not None)
            if requested.n_rs_seq == "auto" and target is None and not params.n_rs_seq:
                n_rollback = _most_rollback(capabilities.state_bytes, params)
                if n_rollback:
                    handle.close()
                    requested = replace(requested, n_rs_seq=n_rollback)
                    first = resolved = replace(resolved, n_rs_seq=n_rollback)
                    continue
            if resolved is first and target is None:
                if capabilities.batch_invariant:
                    ratios, again = _weighed(model, handle, requested, params)
                else:
                    again = _adapted(model, resolved, requested, capabilities)
                if again is not None:
                    handle.close()
                    reason = capabilities.batch_invariant_reason
                    variation = capabilities.total_variation
                    if capabilities.batch_invariant:
                        reason, variation = "", None
                    elif capabilities.exact_rows and again.kv_type != resolved.kv_type:
                        reason += f" (with {resolved.kv_type} K/V)"
                    resolved = again
                    continue
            if target is not None and not memory.can_draft:
                raise UnsupportedError(
                    "a head must be able to drop what it has drafted", hint="leave swa_full out"
                )
            tuner.tune(handle)
        except BaseException as error:
            handle.close()
            if requested.kv_unified == "auto" and isinstance(error, UnsupportedError):
                return _probed(model, replace(requested, kv_unified=True), target)
            raise
        if reason:
            if capabilities.batch_invariant:
                at_once = f"decodes, and prompts, of {resolved.n_ubatch} tokens at a time"
                more = "; extra_buffers=False may allow more" if model.extra_buffers else ""
                reason = f"by {at_once}{more}: {reason}"
                variation = 0.0
            capabilities = replace(
                capabilities, batch_invariant_reason=reason, total_variation=variation
            )
        capabilities = replace(
            capabilities, exact_read_ratio=ratios[0], exact_write_ratio=ratios[1]
        )
        if capabilities.cost_of_exact and not capabilities.batch_invariant:
            reason = f"{capabilities.cost_of_exact} (batch_invariant=True asks for it)"
            capabilities = replace(capabilities, batch_invariant_reason=reason)
        return tuner, capabilities, memory


def _most_rollback(state_bytes: int, params: ContextParams) -> int:
    """Return how many states of the last tokens fit into memory; 0 if the model has no states."""
    room = (memory_bytes() or 0) // _ROLLBACK_PART
    of_each, most = state_bytes * (params.n_seq_max or 1), params.most_rollback
    return next((n for n in _ROLLBACKS if n <= most and n * of_each <= room), 0) if of_each else 0


def _adapted(
    model: Model, resolved: ContextParams, requested: ContextParams, capabilities: Capabilities
) -> ContextParams | None:
    """Return the parameters for a model whose batches are not exact with ``resolved``; None = keep them.

    Raises:
        UnsupportedError: ``batch_invariant=True`` is not possible.
    """
    if resolved.batch_invariant is True:
        rows = capabilities.exact_rows
        # Without unified KV llama.cpp computes one token of every sequence together.
        least = 2 if resolved.kv_unified else max(2, resolved.n_seq_max or 0)
        if model.memory_type == "attention" and rows >= least:
            return replace(resolved, n_ubatch=rows)
        hint = (
            "it needs weights on the CPU that llama.cpp computes the same way in all batches, "
            f"such as Q8_0 or Q4_0, kv_type {' or '.join(INVARIANT_KV_TYPES)}, and flash attention"
        )
        raise UnsupportedError(
            f"this context cannot be batch-invariant: {capabilities.batch_invariant_reason}",
            hint=hint + ("; extra_buffers=False may allow some" if model.extra_buffers else ""),
        )
    if model.memory_type != "attention":
        return None
    faster = requested.resolve(model, tries_exact=False)
    return None if faster == resolved else faster


def _weighed(
    model: Model, handle: ContextHandle, requested: ContextParams, params: ContextParams
) -> tuple[tuple[float | None, float | None], ContextParams | None]:
    """Return the two ratios of exactness; and other parameters if the ratios are too high.

    Args:
        model, handle: the model and the handle of the exact context, which is empty before and after.
        requested: the parameters that the user passed. A K/V type among them is kept.
        params: the parameters with which the context was created.
    """
    if requested.kv_type != "auto":
        return (None, None), None
    faster = requested.resolve(model, tries_exact=False)
    fast = Setting(faster.kv_type, faster.flash_attention is not False)
    native = params.native()
    threads = native["n_threads"], native["n_threads_batch"]
    costs = measured_costs(model, handle, (EXACT, fast), threads)
    if costs is None:
        return (None, None), None
    exact, least = costs
    ratios = round(exact.read / least.read, 2), round(exact.generated / least.generated, 2)
    is_dear = max(ratios) > MOST_EXTRA and requested.batch_invariant == "auto"
    return ratios, faster if is_dear else None


def _create(model: Model, native: NativeContextParams, target: Target | None) -> ContextHandle:
    """Return the native context; ``target`` is set for the context of a head."""
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
    """Let the target keep its hidden states; return how many numbers per token an encoder reads."""
    layers = model.target_layers or (target.model.n_layer,)
    reader = weakref.ref(handle)

    def is_read() -> bool:
        head = reader()
        return head is not None and not head.closed

    with target.decoder.handle.lock:
        width = target.decoder.watch_hidden(layers, is_read).width
    return width if model.target_layers else 0


def _head_params(model: Model, target: Target, requested: ContextParams) -> ContextParams:
    """Return the parameters of a head's context; those that are missing are the target's.

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
            batch_invariant=False,
        )
    # Each of several MTP layers has sequences of its own, with the K/V of the same texts.
    n_layers = max(1, model.n_mtp_layers)
    return replace(
        requested,
        n_ctx=requested.n_ctx or target.decoder.handle.n_ctx * n_layers,
        n_seq_max=requested.n_seq_max or min((theirs.n_seq_max or 1) * n_layers, max_sequences()),
    )


def _probe(
    handle: ContextHandle, model: Model, params: ContextParams, *, is_head: bool = False
) -> tuple[Capabilities, Memory]:
    """Find out what an empty context can do, by short trials; return that and its empty memory.

    Args:
        params: the resolved parameters with which the context was created.
        is_head: the context computes a head, not the model's trunk.
    """
    # A head has attention only, even if the model in the same file has other memory.
    recurrent = model.memory_type in ("recurrent", "hybrid") and not is_head
    # llama.cpp reports a removal as done even if cells that the window needs are already gone; later
    # decodes would attend to an incomplete window. With ``swa_full`` and ``Windowed`` these cells stay.
    window = model.n_swa if model.memory_type == "sliding-window" else 0
    memory = Memory(handle) if handle.kv_unified else NonUnified(handle)
    runner = Runner(memory)
    decode_run(runner, [3 % model.n_vocab, 10 % model.n_vocab], 0, "none")
    layout = StateLayout.learn(handle.state(0), n_tokens=2)
    state_bytes = 0 if layout is None else layout.state_bytes
    # If llama.cpp keeps states of the last tokens, a removal succeeds, but only once after each decode.
    can_truncate = not handle.n_rollback and memory.drop(0, 1)
    if layout is not None and layout.is_cells_only:
        window = 0  # no layer uses it
    if window:
        can_truncate &= params.swa_full and handle.n_seq_max <= MOST_WITH_WINDOW
        can_truncate &= layout is not None and layout.has_window
    memory.clear()
    n_rollback, rollback_reason = 0, "the end of a sequence can be dropped"
    if not can_truncate:
        n_rollback, rollback_reason = _can_undo(runner, model, params)
    can_return, reason = False, "the end of a sequence can be dropped"
    if not can_truncate:
        can_return, reason = _can_return(runner, model.n_vocab, params.checkpoint_ram)
    exactness = exactness_of(runner, model, params, is_head=is_head)
    n_ubatch = params.n_ubatch or handle.n_batch
    invariant = exactness.rows >= n_ubatch and model.memory_type == "attention"
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
        memory = Memory(handle, layout, keeps_order=invariant and not is_head)
    capabilities = Capabilities(
        can_truncate=can_truncate,
        can_share=handle.kv_unified,
        sliding_window=window,
        recurrent=recurrent,
        batch_invariant=invariant,
        batch_invariant_reason=exactness.reason,
        exact_rows=exactness.rows,
        total_variation=exactness.total_variation,
        state_bytes=state_bytes,
        checkpoints=can_return,
        checkpoints_reason=reason,
        rollback=n_rollback,
        rollback_reason=rollback_reason,
        rollback_bytes=handle.n_rollback * state_bytes,
    )
    return capabilities, memory


def _can_undo(runner: Runner, model: Model, params: ContextParams) -> tuple[int, str]:
    """Try out how many tokens of a decode can be undone in an empty context; return the number, and why.

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
    """Try out whether an empty context can return to a saved state; return the answer and the reason.

    After the return the logits must be the same as before. Without it they must differ, so that the
    trial shows something.
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


def _probe_sharing_head(handle: ContextHandle, target: Capabilities) -> tuple[Capabilities, Memory]:
    """Return what a head can do that reads its target's memory; it has no memory to try out."""
    if not handle.kv_unified:
        _check_copies(None)
    capabilities = replace(
        target,
        can_truncate=False,
        batch_invariant=False,
        exact_rows=0,
        total_variation=None,
        batch_invariant_reason="not established for a head that reads the K/V of its target",
    )
    return capabilities, States(handle)


def _check_copies(layout: StateLayout | None) -> None:
    """Raise UnsupportedError if the cells of a sequence cannot be copied with non-unified KV."""
    if layout is None or not layout.is_cells_only:
        raise UnsupportedError(
            "kv_unified=False: llama.cpp writes K/V in an unknown form, so forks cannot copy it"
        )
