"""llama_context: decoding NumPy batches, logits rows, memory operations, interruption.

The caller checks the arguments: llama.cpp aborts the process on almost every invalid one.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as C

from ..errors import ConfigError, SnapshotError, UsageError
from . import core, staging
from .handle import Handle, forkable_lock, generation
from .interrupts import call_in_thread, in_main_thread, is_interrupted
from .library import address_of, libc, logged_reason, recorded_log
from .model import ModelHandle
from .state_layout import State, with_streams, without_streams
from .stops import Stops

Rows = npt.NDArray[np.float32]

KV_TYPES = {  # ggml_type of K, and of V
    "f32": (0, 0),
    "f16": (1, 1),
    "q4_0": (2, 2),
    "q4_1": (3, 3),
    "q5_0": (6, 6),
    "q5_1": (7, 7),
    "q8_0": (8, 8),
    "q8_0/f16": (8, 1),
    "iq4_nl": (20, 20),
    "bf16": (30, 30),
}
FLASH_ATTENTION = {"auto": -1, False: 0, True: 1}
ROPE_SCALING = {None: -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}

# The bindings create a ctypes pointer object in each call. Passing a plain address takes a tenth of the
# time.
_get_logits = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", C._lib))
_llama_decode = C.llama_decode
_int32_p = ctypes.POINTER(ctypes.c_int32)
_uint8_p = ctypes.POINTER(ctypes.c_uint8)

# llama.cpp calls the abort callback after each node of its graph. The callback is C's own strlen over two
# bytes: it returns 0 while the first is 0, and 1 once it is 1. A Python callback would wait for the GIL
# at every node, and would lose a KeyboardInterrupt that is raised in it.
_is_asked_to_stop = ctypes.cast(libc.strlen, C.ggml_abort_callback)

# If tokens times parameters reach this number, a decode takes tenths of a second on a few cores. It
# then runs in its own thread, so that Ctrl-C can stop it.
_WORTH_A_THREAD = 1e10
_first_team: int | None = None  # generation() of the process that first used several threads
_INTERRUPTED = 2  # llama_decode's return code

# A thread that calls llama.cpp with n_threads > 1 gets a team of OpenMP threads, which wait for its next
# call. libgomp counts the waiting threads of all teams. If there are more of them than cores, none of
# them spins, and every barrier of a graph takes system calls. For example, a decode of 0.6 ms takes 7 ms
# with two cores and one waiting helper of another team. So a thread that hands its work to another
# thread releases its team.
_pause_teams = getattr(C._lib, "omp_pause_resource_all", None)  # missing: llama.cpp without OpenMP
_SOFT = 1


# The fields of llama_context_params by llama.cpp's names, checked and complete.
NativeContextParams = dict[str, Any]
NATIVE_NAMES = frozenset(dir(C.llama_context_params))


class ContextHandle(Handle):
    """A llama_context with its batch buffers and a view of its logits.

    Args:
        model: the model of the llama_context.
        options: fields of llama_context_params, by llama.cpp's names.
        target: only for a head: the context whose hidden states it reads.
        uses_mtp: compute the MTP layers of the model instead of its trunk.
        shares_memory: its decodes read the K/V of the target, so both have one lock.

    Without ``kv_unified``, each sequence has its own ``n_ctx_seq`` cells, and ``copy``, or an id of
    ``n_seq_max`` or more, aborts the process. Hold ``lock`` while using the handle; freeing acquires it
    too.

    Attributes:
        n_rollback: how many tokens of a recurrent state can be undone.
        stops: the requests to stop a decode; a decode that is stopped returns 2.
    """

    closes_first = True
    lock: threading.RLock
    states: Rows  # only for a head: the state of each token of the batch, (n_batch, n_embd_out)
    _rows: Rows
    rows_address: int | None  # the address of the rows that ``rows`` returned
    row_capacity: int

    def __init__(
        self,
        model: ModelHandle,
        options: NativeContextParams,
        target: ContextHandle | None = None,
        *,
        uses_mtp: bool = False,
        shares_memory: bool = False,
    ) -> None:
        params = C.llama_context_default_params()
        for name, value in options.items():
            setattr(params, name, value)
        params.no_perf = True
        if target is not None:
            staging.check_available()
            params.ctx_type = int(uses_mtp)
            params.ctx_other = target.ptr
        _check_threads(max(options["n_threads"], options["n_threads_batch"]))
        self.lock = target.lock if target is not None and shares_memory else forkable_lock()
        self.stops = stops = Stops()
        self._stop = stops.flag
        self._stop_address = ctypes.c_char.from_buffer(self._stop)
        lock = self.lock

        def free(ptr: object) -> None:
            stops.stop()  # another thread may be decoding when the model is closed, or at exit
            with lock:
                C.llama_free(ptr)

        with recorded_log():
            is_created = self.make(
                lambda: C.llama_init_from_model(model.ptr, params),
                free,
                name="context",
                parents=(model,) if target is None else (model, target),
            )
        if not is_created:
            raise ConfigError(
                f"llama.cpp cannot create the context: {logged_reason()}",
                hint="lower n_ctx, or use another kv_type or flash_attention",
            )
        ptr = self.unchecked_ptr
        _close_at_exit(self)
        self._address = address_of(ptr)
        self._memory: Any = C.llama_get_memory(ptr)  # None once it is closed
        self.has_memory = bool(self._memory)
        self.n_vocab = model.n_vocab
        self.architecture = model.architecture
        self.n_layer = model.number("n_layer")
        self.n_embd = model.number("n_embd")
        self.n_embd_out = model.number("n_embd_out")
        self.n_ctx = int(C.llama_n_ctx(ptr))
        self.n_ctx_seq = int(C.llama_n_ctx_seq(ptr))
        self.n_rollback = int(C.llama_n_rs_seq(ptr))  # 0 if the architecture cannot undo tokens
        self.kv_unified = options["kv_unified"]
        self.n_batch = min(int(C.llama_n_batch(ptr)), options["n_batch"])
        self.n_outputs_max = options["n_outputs_max"]
        self.is_head = target is not None
        self._open_batch(self.n_batch)
        self.n_seq_max = options["n_seq_max"]
        self.forget_rows()
        self._allow_stops(model, options["n_ubatch"])

    def close(self) -> None:
        """Free the heads, then the context, whose memory is empty from then on."""
        if self.closed:
            return
        self.close_children()
        self.stops.stop()  # another thread may be decoding
        with self.lock:
            self._memory = None
            super().close()

    def _allow_stops(self, model: ModelHandle, n_ubatch: int) -> None:
        """Make decodes stoppable: inside a graph, or else between micro-batches."""
        # With recurrent memory, a graph also moves the states of sequences that are not in the batch,
        # and stopping halfway would corrupt them. GPU backends do not call the abort callback.
        moves_states = C.llama_model_is_recurrent(model.ptr) or C.llama_model_is_hybrid(model.ptr)
        self.stops_inside = not moves_states and not model.on_gpu
        self.n_chunk = self.n_batch if self.stops_inside else min(self.n_batch, n_ubatch)
        self.n_watched = max(2, int(_WORTH_A_THREAD / max(1, model.number("n_params"))))
        if not moves_states:
            stop_at = ctypes.cast(ctypes.byref(self._stop_address), ctypes.c_void_p)
            C.llama_set_abort_callback(self.unchecked_ptr, _is_asked_to_stop, stop_at)

    def _open_batch(self, n: int) -> None:
        """Make the arrays of the batch, and the stepper of the compiled core."""
        self.tokens = np.zeros(n, dtype=np.int32)
        self.positions = np.zeros(n, dtype=np.int32)
        self.n_seqs = np.ones(n, dtype=np.int32)
        self.seqs = np.zeros(n, dtype=np.int32)
        self.wants_logits = np.zeros(n, dtype=np.int8)
        self._seq_pointers = self.seqs.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
        self._batch = C.llama_batch()
        self._batch.embd = None
        self._batch.token = self.tokens.ctypes.data_as(_int32_p)
        self._batch.pos = self.positions.ctypes.data_as(_int32_p)
        self._batch.n_seq_id = self.n_seqs.ctypes.data_as(_int32_p)
        self._batch.seq_id = self._seq_pointers.ctypes.data_as(ctypes.POINTER(_int32_p))
        self._batch.logits = self.wants_logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        if self.is_head:  # each token of the batch and each row of logits has a state
            self.states = np.zeros((n, self.n_embd_out), dtype=np.float32)
            self._batch.embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            staging.functions["set_nextn"](self.unchecked_ptr, True, True)
        self._stepper: core.Stepper | None = None  # None if the compiled core cannot decode
        if core.available:
            self._stepper = core.Stepper(
                decode=address_of(C._lib.llama_decode),
                get_logits=address_of(C._lib.llama_get_logits),
                ctx=self._address,
                stop=ctypes.addressof(self._stop_address),
                batch=self._batch,
            )

    # -- decoding ----------------------------------------------------------------------------------

    def decode(self, n: int) -> int:
        """Decode the first ``n`` entries of the batch arrays; return llama_decode's code."""
        if self._stop[0]:
            return _INTERRUPTED
        self._batch.n_tokens = n
        if n >= self.n_watched and self.stops_inside and in_main_thread():
            return self._decode_apart()
        code: int = C.llama_decode(self.unchecked_ptr, self._batch)
        return code

    @property
    def stepper(self) -> core.Stepper | None:
        """The object that decodes and draws in one call; None without the core, or if there is a hook.

        The core calls llama.cpp by address, so it bypasses a replaced binding.
        """
        return self._stepper if C.llama_decode is _llama_decode else None

    def _decode_apart(self) -> int:
        """Decode in another thread, so that this one can receive Ctrl-C and stop the decode."""
        release_threads()  # the other thread gets its own team
        try:
            code = call_in_thread(
                lambda: int(C.llama_decode(self.unchecked_ptr, self._batch)),
                stop=self.stops.stop,
                is_to_stop=is_interrupted,
            )
        except BaseException:
            self.stops.resume()
            raise
        if code == 0 and is_interrupted():  # the decode ended before it could be stopped
            self.stops.resume()
        return code

    def rows(self, n: int) -> Rows:
        """Return the last decode's output rows, float32 (n, V), in batch order.

        A view into llama.cpp's buffer, valid until the next decode.
        """
        address = _get_logits(self._address)
        if address != self.rows_address or n > len(self._rows):
            self.row_capacity = max(self.row_capacity, n)
            size = self.row_capacity * self.n_vocab
            raw = (ctypes.c_float * size).from_address(address)
            self._rows = np.ctypeslib.as_array(raw).reshape(-1, self.n_vocab)
            self.rows_address = address
        return self._rows

    def forget_rows(self) -> None:
        """Forget the address of the logits buffer: llama.cpp frees it when it cannot enlarge it."""
        self.rows_address = None
        self._rows = np.empty((0, self.n_vocab), dtype=np.float32)
        # llama.cpp starts with n_seq_max rows and moves the buffer when it needs more.
        self.row_capacity = self.n_seq_max

    def set_threads(self, n_threads: int, n_threads_batch: int) -> None:
        """Set the threads for single tokens and for batches, at most as many as at creation."""
        C.llama_set_n_threads(self.ptr, n_threads, n_threads_batch)

    # -- memory ------------------------------------------------------------------------------------

    def remove(self, seq_id: int, start: int, end: int) -> bool:
        """Remove positions [start, end) of a sequence (end -1 = its end); return False if impossible."""
        return bool(C.llama_memory_seq_rm(self._memory, seq_id, start, end))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Tag the cells of ``source`` in [start, end) with ``target``, which must be empty."""
        C.llama_memory_seq_cp(self._memory, source, target, start, end)

    def clear(self) -> None:
        """Empty the memory, unless the context uses another one's, which llama.cpp would empty too."""
        if self.architecture != staging.SHARING_HEAD:
            C.llama_memory_clear(self._memory, True)

    def position_range(self, seq_id: int) -> tuple[int, int]:
        """Return the smallest and largest position of a sequence, (-1, -1) if it is empty."""
        return (
            int(C.llama_memory_seq_pos_min(self._memory, seq_id)),
            int(C.llama_memory_seq_pos_max(self._memory, seq_id)),
        )

    def state(self, seq_id: int) -> State:
        """Return the state of a sequence, uint8 (n,), a copy; empty if llama.cpp failed."""
        state = self._state(seq_id, C.LLAMA_STATE_SEQ_FLAGS_NONE)
        whole = self.kv_unified or not len(state)
        return state if whole else without_streams(state, seq_id, self.n_seq_max)

    def partial_state(self, seq_id: int) -> State:
        """Return the part of a state that cannot be cut: recurrent states and window cells."""
        return self._state(seq_id, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def _state(self, seq_id: int, flags: int) -> State:
        size = int(C.llama_state_seq_get_size_ext(self.ptr, seq_id, flags))
        state = np.empty(size, dtype=np.uint8)
        address = state.ctypes.data_as(_uint8_p)
        written = int(C.llama_state_seq_get_data_ext(self.ptr, address, size, seq_id, flags))
        return state if written == size else state[:0]

    def set_state(self, seq_id: int, state: State) -> None:
        """Restore the state of a sequence.

        Raises:
            SnapshotError: llama.cpp refuses it; the message has the reason. The sequence is then
                undefined.
        """
        if not self.kv_unified:
            state = with_streams(state, self.n_seq_max)
        self._set_state(seq_id, state, C.LLAMA_STATE_SEQ_FLAGS_NONE)

    def set_partial_state(self, seq_id: int, state: State) -> None:
        """Put a ``partial_state`` back into a sequence that still has its cells; errors as above."""
        self._set_state(seq_id, state, C.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def _set_state(self, seq_id: int, state: State, flags: int) -> None:
        arguments = self.ptr, state.ctypes.data_as(_uint8_p), len(state), seq_id, flags
        if C.llama_state_seq_set_data_ext(*arguments) != len(state):
            with recorded_log():  # try again to get the reason
                if C.llama_state_seq_set_data_ext(*arguments) != len(state):
                    raise SnapshotError(f"llama.cpp cannot take the K/V: {logged_reason()}")


_open: weakref.WeakSet[ContextHandle] = weakref.WeakSet()


def _close_at_exit(handle: ContextHandle) -> None:
    """Close contexts before everything else at exit, because a daemon thread may still be decoding."""
    if not _open:
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # after weakref.finalize's hook, so it runs before that
    _open.add(handle)


def _close_all() -> None:
    for handle in list(_open):
        handle.close()


def release_threads() -> None:
    """Release this thread's team, so that another thread decodes without delay.

    The next decode starts a new team. Does nothing in a child of fork(), which does not have its
    parent's threads.
    """
    if _first_team == generation() and _pause_teams is not None:
        _pause_teams(_SOFT)


def _check_threads(n: int) -> None:
    """Raise an error if OpenMP would wait forever, as in a child of a process that used it."""
    global _first_team
    if n == 1:
        return
    if _first_team is None:
        _first_team = generation()
    if _first_team != generation():
        raise UsageError(
            "the parent process computed with several threads before fork(), so OpenMP would wait "
            "forever in this process",
            hint='start processes with the method "spawn", or open the context with n_threads=1',
        )
