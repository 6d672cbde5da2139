"""The prefix store: a folder with the K/V of texts, so that a restart does not decode prompts again.

A *segment* is a file with the K/V of some tokens and the key of the segment with the tokens before them.
So texts with the same beginning share the segments of that beginning. The key is the file's name, and a
hash of all these tokens, of the model, and of everything else that K/V depends on. Several processes
may use one folder: files appear only when they are complete, their checksums are checked, and a file
that is damaged or gone is a miss. At the size limit, the least recently used files are deleted, the
last segment of a text first. No error here stops a text. The caller holds the context's lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import (
    CacheFolderWarning,
    ConfigError,
    SnapshotError,
    UnsupportedError,
    in_thread,
    warn,
)
from ..files import digest, path_of
from ..model.text import n_common
from ..native.handle import generation
from ..native.library import engine_versions, system_info
from ..native.state_layout import State
from .checkpoints import Checkpoint
from .kv_file import Arrays, HasKV, KVCompatibility, read_arrays, read_head, write
from .memory import END

MIN_STORED = 512  # tokens; shorter texts are not worth a file
_MIN_GAINED = 8  # tokens
_PIECE = 2048  # the maximum number of tokens of a segment whose K/V can be cut
_MAGIC = b"\x89LBSTORE"
_ENDING = ".kv"
# The names of segments, and of the temporary files of this folder.
_NAME = re.compile(
    r"[0-9a-f]{16}-[0-9a-f]{32}\.kv|\.[0-9a-f]{16}(-[0-9a-f]{15}|\.sha256)\.[0-9a-f]{16}"
)
_STALE_NS = 60 * 10**9  # a temporary file this old was left by a dead process
_MOST_WAITING = 2  # texts that wait to be written
_KNOWN_S = 600  # how long the measured speed of the folder stays valid
_NO_FLOATS = np.empty(0)


class _About(msgspec.Struct):
    """The metadata of a segment."""

    parent: str
    start: int
    points: list[tuple[int, int]]  # each checkpoint's position and bytes


@dataclass(eq=False)
class Segment:
    """A part of a text whose K/V is in a file or waits to be written.

    Attributes:
        key: the name of the file, without its ending.
        parent: the key of the segment before it; "" = it begins a text.
        start: how many tokens are before it.
        tokens: its own tokens.
        points: positions of its checkpoints.
        n_bytes: the size of the file.
    """

    key: str
    parent: str
    start: int
    tokens: list[int]
    points: list[int]
    n_bytes: int

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)


@dataclass(eq=False)
class Found:
    """K/V read from the folder.

    Attributes:
        start, end: the positions of the K/V.
        pieces: states, each with the start and the end of the positions that are used.
        points: the checkpoints up to ``end``.
        path: the segments, the last one first.
        seconds: how long it took to read.
    """

    start: int
    end: int
    path: list[Segment]
    pieces: list[tuple[State, int, int]] = field(default_factory=list)
    points: list[Checkpoint] = field(default_factory=list)
    seconds: float = 0.0


def open_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder, creating it if it is missing.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    folder = path_of(path).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cache_dir {str(folder)!r} cannot be used: {error}",
            hint="give a folder that this user can write",
        ) from error
    return folder


class PrefixStore:
    """Texts whose K/V is in a folder.

    Args:
        folder: see ``open_folder``.
        max_bytes: the most bytes of all this user's files in it, including files of other models and
            processes.
        ctx: the context whose texts are stored.

    Raises:
        UnsupportedError: llama.cpp writes the K/V in an unknown form.
        UsageError: the model's file was changed after it was loaded.
    """

    def __init__(self, folder: Path, max_bytes: int, ctx: HasKV) -> None:
        layout = ctx.kv_cache.state_layout
        if layout is None:
            raise UnsupportedError("cache_dir: llama.cpp writes K/V in an unknown form")
        self._folder, self._max_bytes = folder, max_bytes
        self._memory, self._layout = ctx.kv_cache, layout
        # Everything besides the tokens that K/V depends on, to the bit.
        ctx.model.remember_fingerprint(folder)
        about = asdict(KVCompatibility.of(ctx)) | engine_versions()
        about |= {
            "model": "", "system": system_info(), "exact": ctx.params.exact,
            "extra_buffers": ctx.model.extra_buffers, "on_gpu": ctx.model.on_gpu,
            "layout": repr(layout), "memory": type(self._memory).__name__,
        }  # fmt: skip
        self._scope = digest(about)
        self._segments: dict[str, Segment] = {}
        self._seen: object = None  # the state of the folder when it was last listed
        self._clock = 0  # the latest time of use
        self._speed = 0.0  # bytes per second
        self._known_until = 0.0  # how long the speed stays valid
        self._is_on = True  # False: nothing more is written
        self._generation = generation()
        self._waiting: dict[str, tuple[State, list[Checkpoint]]] = {}
        self._jobs: Queue[list[Segment] | None] = Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None

    def _key(self, parent: str, start: int, tokens: npt.ArrayLike) -> str:
        content = np.array(tokens, "<i4").tobytes()
        about = f"{self._scope} {parent} {start} ".encode()
        return f"{self._scope}-{hashlib.sha256(about + content).hexdigest()[:32]}"

    # -- which segments there are ------------------------------------------------------------------

    def _files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """Yield this user's files, finished or not; raise OSError if the folder is gone."""
        own = os.getuid() if hasattr(os, "getuid") else 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == own
                    if is_own and _NAME.fullmatch(entry.name):
                        yield entry, status

    def _list(self) -> None:
        """List the segments again, if the folder has changed."""
        there: dict[str, int] = {}
        waiting = set(self._waiting)  # before the listing: they may be written meanwhile
        try:
            seen = self._folder.stat().st_mtime_ns
            if seen == self._seen:
                return
            there = {
                entry.name.removesuffix(_ENDING): status.st_size
                for entry, status in self._files()
                if entry.name.startswith(self._scope) and entry.name.endswith(_ENDING)
            }
        except OSError:
            seen = None  # the folder is gone
        self._seen = seen
        for key in [*self._segments]:
            if key not in there and key not in waiting:
                del self._segments[key]
        for key, n_bytes in there.items():
            if key not in self._segments:
                with suppress(OSError):
                    try:
                        self._segments[key] = self._open(key, n_bytes)
                    except (SnapshotError, ValueError):  # ValueError: it is being truncated
                        self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_ENDING}"

    def _open(self, key: str, n_bytes: int) -> Segment:
        """Read the beginning of a file, which describes the segment.

        Raises:
            OSError: it cannot be read. SnapshotError: it is damaged, or has another name.
        """
        with self._path(key).open("rb") as file:
            head, metadata = read_head(file, _MAGIC)
            tokens = np.frombuffer(file.read(4 * head.n_tokens), "<i4")
        about = self._parse(key, metadata, tokens)
        points = [position for position, _ in about.points]
        return Segment(key, about.parent, about.start, tokens.tolist(), points, n_bytes)

    def _contents(self, key: str) -> tuple[State, list[Checkpoint]]:
        """Return the state and the checkpoints of a file; errors as for ``_open``."""
        with self._path(key).open("rb") as file:
            head, metadata = read_head(file, _MAGIC)
            tokens, _, _, state = read_arrays(file, head)
        points = self._parse(key, metadata, tokens).points
        end = len(state) - sum(size for _, size in points)
        checkpoints, at = list[Checkpoint](), end
        for position, size in points:
            checkpoints.append(Checkpoint(position, state[at : at + size], None))
            at += size
        return state[: max(end, 0)], checkpoints

    def _parse(self, key: str, metadata: bytes, tokens: npt.NDArray[np.int32]) -> _About:
        try:
            about = msgspec.json.decode(metadata, type=_About)
        except (msgspec.MsgspecError, ValueError) as error:
            raise SnapshotError(f"the metadata is invalid: {error}") from error
        if self._key(about.parent, about.start, tokens) != key:
            raise SnapshotError("the file has another name")
        return about

    def _discard(self, segment: Segment, *, damaged: bool = True) -> None:
        """Forget a segment until the folder changes; if its file is damaged, delete it."""
        self._segments.pop(segment.key, None)
        if damaged:
            with suppress(OSError):
                self._path(segment.key).unlink()

    def _match(self, tokens: Sequence[int]) -> tuple[tuple[int, str], tuple[int, str]]:
        """Return how many of ``tokens`` can be taken and from which segment, and how many are there.

        A memory that cannot be cut can take a segment only as a whole, or up to a checkpoint.
        """
        self._list()
        tokens = list(tokens)
        usable, common = (0, ""), (0, "")
        matched = {"": 0}
        for segment in sorted(self._segments.values(), key=lambda segment: segment.start):
            n = segment.start
            if matched.get(segment.parent, -1) < n:
                continue
            if segment.tokens[:1] == tokens[n : n + 1]:
                n += n_common(segment.tokens, tokens[n : segment.end])
            matched[segment.key] = n
            if n > common[0]:
                common = n, segment.key
            if n < segment.end and not self._layout.is_cells_only:
                n = max((point for point in segment.points if point <= n), default=0)
            if n > usable[0]:
                usable = n, segment.key
        return usable, common

    def _path_to(self, key: str) -> list[Segment]:
        """Return the segments of a text, the last one first."""
        path = []
        while key:
            path.append(self._segments[key])
            key = path[-1].parent
        return path

    # -- reading -----------------------------------------------------------------------------------

    def n_common(self, tokens: Sequence[int], n_held: int) -> int:
        """Return how many of ``tokens`` can be read back, if that is faster; else ``n_held``.

        ``n_held`` of them need not be read.
        """
        found = self._worth(tokens, n_held)
        return n_held if found is None else found.end

    def _worth(self, tokens: Sequence[int], n_held: int) -> Found | None:
        """Return what to read, if reading it takes less time than decoding the tokens."""
        (n, key), _ = self._match(tokens)
        if n < n_held + _MIN_GAINED:
            return None
        path = self._path_to(key)
        start = n_held if self._memory.can_move else 0
        decoding = self._memory.tokens_per_s
        n_bytes = sum(segment.n_bytes for segment in path if segment.end > start)
        is_known = decoding > 0 and time.monotonic() < self._known_until
        if is_known and n_bytes / self._speed > (n - n_held) / decoding:
            return None
        return Found(start, n, path)

    def read(self, tokens: Sequence[int], n_held: int) -> Found | None:
        """Read the K/V of ``tokens`` after the first ``n_held``, and make room for it; None = a miss."""
        while (found := self._worth(tokens, n_held)) is not None:
            began, limit = time.perf_counter(), found.end
            for segment in found.path:
                if limit <= found.start:
                    break
                try:
                    state, points = self._waiting.get(segment.key) or self._contents(segment.key)
                except (OSError, SnapshotError, ValueError) as error:
                    self._discard(segment, damaged=not isinstance(error, OSError))
                    break
                except MemoryError:
                    return None
                found.pieces.insert(0, (state, max(segment.start, found.start), limit))
                found.points += [p for p in points if segment.start < p.n_tokens <= limit]
                limit = segment.start
            if limit <= found.start:
                self._use(found.path)
                found.seconds = time.perf_counter() - began
                return found if self._has_room(found.end - found.start) else None
        return None

    def _has_room(self, n: int) -> bool:
        memory = self._memory
        if memory.cells_per_sequence is not None:
            return n <= memory.cells_per_sequence
        if self._layout.needs_cells and memory.n_vacant < n:
            memory.reclaim(n)
            return memory.n_vacant >= n
        return True

    def place(self, found: Found, seq_id: int) -> int:
        """Put the K/V that was read into a sequence; return how many tokens the sequence then holds.

        The sequence must hold the first tokens of the text, or none.
        """
        memory, layout = self._memory, self._layout
        n_held = memory.next_position(seq_id)
        if n_held < found.start or n_held >= found.end:
            return n_held
        start, began = n_held if memory.can_move else 0, time.perf_counter()
        pieces = [
            (state, max(low, start), high) for state, low, high in found.pieces if high > start
        ]
        try:
            rest = next((p.state for p in found.points if p.n_tokens == found.end), None)
            state = layout.joined(pieces, rest)
            layout.check(state, found.end, start)
            if not memory.can_draft:
                for point in found.points:
                    layout.partial.check(point.state, point.n_tokens)
        except MemoryError:
            return n_held
        except (SnapshotError, ValueError, IndexError):  # somebody has forged the checksums
            for segment in found.path:
                self._discard(segment)
            return n_held
        with suppress(SnapshotError, MemoryError):
            if start:
                memory.place(seq_id, state, start, found.end - start)
            else:
                memory.drop(seq_id, 0)
                memory.set_state(seq_id, state, found.end)
            if memory.next_position(seq_id):
                memory.set_points(seq_id, found.points)
            n_bytes = sum(len(state) for state, _, _ in found.pieces)
            self._speed = n_bytes / (found.seconds + time.perf_counter() - began)
            self._known_until = time.monotonic() + _KNOWN_S
        return memory.next_position(seq_id)

    # -- writing -----------------------------------------------------------------------------------

    def save(self, seq_id: int, tokens: Sequence[int], *, now: bool = False) -> None:
        """Write the K/V of a sequence soon, or ``now``, unless the folder already has it."""
        if not self._is_on or len(tokens) < MIN_STORED or self._generation != generation():
            return
        (n_usable, usable), (n, parent) = self._match(tokens)
        if n_usable > len(tokens) - _MIN_GAINED:
            self._use(self._path_to(usable))
            return
        path = self._path_to(parent)
        # If less than half of a segment is used, reading it takes longer than it saves.
        while path and 2 * (n - path[0].start) < len(path[0].tokens):
            n = path.pop(0).start
        memory = self._memory
        try:
            points = memory.points(seq_id, n)
            state = memory.raw_piece(seq_id, n)
        except (SnapshotError, MemoryError):
            return
        if not 0 < len(state) <= self._max_bytes:
            return
        size = _PIECE if self._layout.is_cells_only else END
        positions = [point.n_tokens for point in points]
        for start in range(n, max(len(tokens), n + 1), size):
            own, parent = list(tokens[start : start + size]), path[0].key if path else ""
            key = self._key(parent, start, own)
            path.insert(0, Segment(key, parent, start, own, positions, len(state)))
            self._segments[key], self._waiting[key] = path[0], (state, points)
        if now or not self._has_writer():
            self._write(path)
        else:
            self._jobs.put(path)

    def _has_writer(self) -> bool:
        """Return whether there is a writer thread, after trying to start one."""
        if self._thread is None:
            thread = threading.Thread(target=in_thread(self._work), daemon=True)
            with suppress(RuntimeError):  # at exit, or with too many threads
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _work(self) -> None:
        while (path := self._jobs.get()) is not None:
            with suppress(CacheFolderWarning):  # warnings may be errors
                self._write(path)

    def _write(self, path: list[Segment]) -> None:
        """Write the segments of a text that were not written yet. This needs no lock."""
        for segment in reversed(path):
            waiting = self._waiting.get(segment.key)
            if waiting is None:
                continue
            try:
                if self._is_on:
                    self._write_one(segment, *waiting)
            except FileNotFoundError as error:  # another process has deleted the temporary file
                if not self._folder.is_dir():
                    self._stop(error)
            except OSError as error:
                self._stop(error)
            except (MemoryError, ValueError, IndexError):
                pass  # it is not stored
            finally:
                del self._waiting[segment.key]
        self._use(path)

    def _write_one(self, segment: Segment, state: State, points: Sequence[Checkpoint]) -> None:
        states = [point.state for point in points]
        own = self._layout.joined([(state, segment.start, segment.end)])
        about = _About(segment.parent, segment.start, [(p.n_tokens, len(p.state)) for p in points])
        arrays = Arrays(
            np.array(segment.tokens, np.int32), _NO_FLOATS, _NO_FLOATS.astype(np.float32),
            np.concatenate((own, *states)),
        )  # fmt: skip
        segment.n_bytes = len(arrays.state)
        self._make_space(segment.n_bytes)
        write(self._path(segment.key), _MAGIC, msgspec.json.encode(about), arrays)

    def _make_space(self, n_bytes: int) -> None:
        """Delete the least recently used files, and temporary files that dead processes left."""
        files = []
        for entry, status in self._files():
            if entry.name.startswith("."):
                if abs(time.time_ns() - status.st_mtime_ns) > _STALE_NS:
                    Path(entry.path).unlink(missing_ok=True)
            else:
                files.append((status.st_mtime_ns, status.st_size, entry.path))
        files.sort()
        # The clock may have been set back.
        self._clock = max(self._clock, *(used for used, _, _ in files[-1:]), 0)
        total = n_bytes + sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self._max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size

    def _use(self, path: Iterable[Segment]) -> None:
        """Mark segments as used now, the last of a text first, so that earlier segments are newer."""
        for segment in path:
            self._clock = max(time.time_ns(), self._clock + 1)
            with suppress(OSError):
                os.utime(self._path(segment.key), ns=(self._clock, self._clock))

    def _stop(self, error: Exception) -> None:
        """Stop writing, and warn about it."""
        if self._is_on:
            self._is_on = False
            warn(f"no more K/V is written to {self._folder}: {error}", CacheFolderWarning)

    def close(self, texts: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Write the waiting texts and these, each a sequence and its tokens; then stop."""
        if self._thread is not None and self._generation == generation():
            self._jobs.put(None)
            self._thread.join()
        for seq_id, tokens in texts:
            self.save(seq_id, tokens, now=True)
        self._is_on = False
