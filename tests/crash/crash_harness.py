"""What the crash cases share: a world to misuse, the register of cases, and how they are run.

Every case uses the public API, must raise the typed error that it names, and must leave the context
unchanged. Afterwards a scratch sequence must give the same logits to the bit, and the accounting must
agree with llama.cpp.
"""

from __future__ import annotations

import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import toys

from llamabranch import Branch, Context, Model
from llamabranch.errors import LlamaBranchError

CASE_SECONDS = 20  # seconds of CPU time: an endless loop is a failure, a busy machine is not
MEMORY_BYTES = 4 << 30  # so that an absurd allocation fails here and not in the whole machine

ABC = 'root ::= "abc"'  # a grammar with one sentence

Errors = type[BaseException] | tuple[type[BaseException], ...]
Action = Callable[["World"], object]
GROUPS: dict[str, dict[str, Action]] = {}
# The cases of each group that also run in the process of the tests.
QUICK: dict[str, list[str]] = {}


class World:
    """What the cases of one group share: files, a model, a context, a branch of ten tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = toys.write_llama(folder / "model.gguf", vocab="bytes", n_layer=2)
        self.model = Model(self.path)
        self.ctx = self.context()
        self.root = Branch.start(self.ctx, [0, *range(60, 69)], seed=1, temperature=1.0)
        self.logits = self.root.logits
        self.reference = self._scratch()

    def context(self, **options: object) -> Context:
        """Open a small context."""
        small = {"n_ctx": 256, "n_seq_max": 4, "n_batch": 32, "n_threads": 1}
        return Context(self.model, **{**small, **options})  # type: ignore[arg-type]

    def _scratch(self) -> np.ndarray:
        self.ctx.kv_cache_remove(0)
        self.ctx.decode([70, 71, 72], 0)
        row = self.ctx.logits()
        self.ctx.kv_cache_remove(0)
        return row

    def check(self) -> None:
        """Fail unless the context and its branch are as they were."""
        for seq_id in (0, 1):
            self.ctx.kv_cache_remove(seq_id)
        if not np.array_equal(self._scratch(), self.reference):
            raise AssertionError("a scratch sequence gives other logits than before")
        if self.root.position != 10 or not np.array_equal(self.root.logits, self.logits):
            raise AssertionError("the branch is not as before")
        self.ctx.audit()
        if self.ctx.usage().sequences != {self.root.seq_id: 10}:
            raise AssertionError(f"cells are lost: {self.ctx.usage()}")

    def file(self, data: bytes) -> Path:
        """Write a file of these bytes."""
        path = self.folder / "case.bin"
        path.write_bytes(data)
        return path

    @contextmanager
    def branch(self, prompt: str = "ab", **settings: object) -> Iterator[Branch]:
        """Give a branch for one case."""
        branch = Branch.start(self.ctx, prompt, **{"seed": 1, **settings})  # type: ignore[arg-type]
        try:
            yield branch
        finally:
            branch.prune_subtree()


def case(
    group: str, name: str | None = None, *, is_quick: bool = False
) -> Callable[[Action], Action]:
    """Register a function as a case of a group."""

    def register(action: Action) -> Action:
        GROUPS.setdefault(group, {})[name or action.__name__] = action
        if is_quick:
            QUICK.setdefault(group, []).append(name or action.__name__)
        return action

    return register


def refuses(group: str, error: Errors, **calls: Action | tuple[str, Action]) -> None:
    """Register one-line cases that must raise ``error``, some with words that its message must have."""
    for name, action_or_pair in calls.items():
        said, call = action_or_pair if isinstance(action_or_pair, tuple) else ("", action_or_pair)

        def action(world: World, call: Action = call, said: str = said) -> None:
            message = must_raise(error, lambda: call(world))
            assert said in message, f"{said!r} is not in {message!r}"

        case(group, name, is_quick=True)(action)


def must_raise(error: Errors, call: Callable[..., object], *arguments: object) -> str:
    """Fail unless ``call(*arguments)`` raises ``error``, or one of them; return its message and hint."""
    try:
        result = call(*arguments)
    except LlamaBranchError as raised:
        if not isinstance(raised, error):
            raise
        if not str(raised).strip():
            raise AssertionError("the error says nothing") from raised
        return f"{raised} {raised.hint}"
    raise AssertionError(f"no error; it returned {result!r:.60}")


def run(group: str, first: str | None = None, n: str | None = None) -> None:
    """Run ``n`` cases of a group, or all, from the case named ``first`` on; print a line for each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    names = list(GROUPS[group])
    names = names[names.index(first) if first else 0 :][: int(n) if n else None]
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for name in names:
            signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
            print(f"start {name}", flush=True)
            try:
                GROUPS[group][name](world)
                world.check()
                print("ok", flush=True)
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                text = f"{type(error).__name__} at {where}: {error}"
                print(" ".join(text.split())[:400], flush=True)
                with suppress(LlamaBranchError, AssertionError):
                    world.check()
        signal.setitimer(signal.ITIMER_PROF, 0)
    print("end", flush=True)
