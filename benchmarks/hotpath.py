"""The hot path taken apart: which part of a step takes how long, for plain decoding and for a round.

    python -m benchmarks.hotpath

Methods are wrapped, and each is charged with its own time, without that of the wrapped ones it calls.
What the wrappers cost is measured and taken off; the step's time without any wrapper stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

import llamabranch as lb
from llamabranch.bench import Spread
from llamabranch.context.logits import LogitsRow
from llamabranch.speculative.drafters.model import ModelLine
from llamabranch.speculative.round import Stream

from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, table, title

SLOWEST = 0.1  # of the laps is left out: something else ran then
TURN = 10  # steps with wrappers, then as many without
REST = "the loop itself"

Names = Mapping[str, tuple[type, Sequence[str]]]  # part: whose methods, which


def parts_of(ctx: lb.Context) -> Names:
    """Return the parts of a decode step and the methods that are charged to them."""
    decoder = ctx.decoder
    handle = type(decoder.handle)
    return {
        "llama_decode": (handle, ("decode",)),
        "logits row": (handle, ("rows",)),
        "decoding, ours": (type(decoder), ("advance", "decode", "decode_run", "_protect_rows")),
        "memory of llama.cpp": (handle, ("remove", "copy")),
        "cell ledger": (type(decoder.cells), ("append", "remove", "next_position")),
        "dropping the tail": (type(decoder), ("drop",)),
        "log-probability, entropy": (LogitsRow, ("_measure", "logprob", "entropy")),
        "sampling": (lb.Sampler, ("distribution",)),
        "the draw": (lb.Distribution, ("draw",)),
        "sampler's memory": (lb.Sampler, ("accept", "allows", "clone")),
        "text": (lb.Model, ("text_after",)),
        "describing the token": (lb.Branch, ("describe",)),
        "bookkeeping, produce": (lb.Branch, ("produce", "next_row", "draw")),
        "bookkeeping, commit": (
            lb.Branch, ("commit", "check_commit", "take", "follow", "append_unscored"),
        ),
        "bookkeeping, round": (lb.Branch, ("verify", "judge", "settle", "rewind")),
    }  # fmt: skip


# The phases of a round; what runs inside of one is told apart from the same part elsewhere.
PHASES: Names = {
    "draft": (Stream, ("plan",)),
    "verify": (Stream, ("verify",)),
    "rule and text": (Stream, ("settle",)),
    "clean-up": (ModelLine, ("observe",)),
}


@dataclass
class Lap:
    """Seconds and calls of each part, by (phase, part), in one step."""

    whole: float = 0.0
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)


class Wraps:
    """Charges the methods of classes with their own time, while it is entered."""

    def __init__(self, parts: Names, phases: Names, cost: tuple[float, float] = (0, 0)) -> None:
        self._parts = parts
        self._phases = phases
        self._inside, self._outside = cost  # of a wrapper: charged to its method, to its caller
        self._undo = ExitStack()
        self._stack: list[list[float]] = []  # what the wrapped calls inside each open one took
        self._phase = [""]
        self.lap = Lap()

    def __enter__(self) -> Wraps:
        for names, is_phase in ((self._parts, False), (self._phases, True)):
            for part, (owner, methods) in names.items():
                for method in methods:
                    self._wrap(owner, method, part, is_phase)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _wrap(self, owner: type, method: str, part: str, is_phase: bool) -> None:
        inner: Callable[..., object] = getattr(owner, method)
        home = next(cls for cls in owner.__mro__ if method in vars(cls))
        stack, phases = self._stack, self._phase

        def timed(*arguments: object, **named: object) -> object:
            if is_phase:
                phases.append(part)
            key = (phases[-1], "" if is_phase else part)
            within = [0.0]
            stack.append(within)
            start = perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                took = perf_counter() - start
                stack.pop()
                if is_phase:
                    phases.pop()
                lap = self.lap
                own = took - within[0] - self._inside
                lap.seconds[key] = lap.seconds.get(key, 0.0) + own
                lap.calls[key] = lap.calls.get(key, 0) + 1
                if stack:
                    stack[-1][0] += took + self._outside

        setattr(home, method, timed)
        self._undo.callback(setattr, home, method, inner)

    def take(self, whole: float) -> Lap:
        """Return what was charged since the last time, in a step that took ``whole`` seconds."""
        lap, self.lap = self.lap, Lap()
        lap.whole = whole
        return lap


def wrapper_cost(n: int = 2000) -> tuple[float, float]:
    """Return the seconds a wrapper costs: inside its own measure, and outside of it."""

    class Nothing:
        def inner(self) -> None:
            return None

        def outer(self) -> None:
            for _ in range(n):
                self.inner()

    nothing = Nothing()
    nothing.outer()
    start = perf_counter()
    nothing.outer()
    bare = (perf_counter() - start) / n
    parts: Names = {"inner": (Nothing, ("inner",)), "outer": (Nothing, ("outer",))}
    laps = []
    with Wraps(parts, {}) as wraps:
        for _ in range(9):
            nothing.outer()
            laps.append(wraps.take(0.0))
    inside = Spread.of([lap.seconds["", "inner"] / n for lap in laps]).median
    outside = Spread.of([lap.seconds["", "outer"] / n for lap in laps]).median
    return max(0.0, inside - bare / 2), max(0.0, outside - bare / 2)


def main() -> None:
    """Take plain steps and rounds apart."""
    described = parser("the hot path", runs=1, prompts=1, tokens=400, temperatures=(0.0, 0.8))
    described.add_argument("--k", type=int, default=4, help="tokens drafted a round")
    args = described.parse_args()
    settings = Settings.of(args)
    cost = wrapper_cost()
    results: dict[str, object] = {"wrapper_s": {"inside": cost[0], "outside": cost[1]}}
    n_ctx = 256 + 3 * (args.k + 1) * (settings.tokens + 4 * TURN)  # room for what is said
    with (
        settings.context(settings.target, n_ctx=n_ctx) as target,
        settings.context(settings.draft, n_ctx=n_ctx) as draft,
    ):
        about = f"{title(target.model)}, {settings.threads} threads"
        for temperature in settings.temperatures:
            caption = f"One plain step, T = {temperature:g}, {about}"
            found = _plain(target, temperature, settings.tokens, cost)
            results[f"plain, T = {temperature:g}"] = _show(caption, found, rounds=False)
        temperature = settings.temperatures[-1]
        caption = (
            f"One round of {args.k} drafted, T = {temperature:g}, "
            f"{title(target.model, draft.model)}, {settings.threads} threads"
        )
        found = _rounds(target, draft, temperature, settings.tokens // 4, args.k, cost)
        results[f"round, T = {temperature:g}"] = _show(caption, found, rounds=True)
        models = {"target": target.model, "draft": draft.model}
        emit("hotpath", settings, models, results, k=args.k)


@dataclass
class Found:
    """Laps with wrappers, and the mean seconds of a step without."""

    laps: list[Lap]
    bare_s: float


def _plain(ctx: lb.Context, temperature: float, n: int, cost: tuple[float, float]) -> Found:
    with lb.Branch.start(ctx, PROMPTS[0], temperature=temperature, seed=1) as branch:

        def step() -> None:  # end tokens are taken like others
            branch.commit(branch.produce().token)

        return _measure(step, n, Wraps(parts_of(ctx), {}, cost))


def _rounds(
    target: lb.Context,
    draft: lb.Context,
    temperature: float,
    n: int,
    k: int,
    cost: tuple[float, float],
) -> Found:
    speculator = lb.Speculator(target, lb.ModelDrafter(draft), lb.SpeculativeConfig(draft_k=k))
    with lb.Branch.start(target, PROMPTS[0], temperature=temperature, seed=1) as branch:
        stream = speculator.open_stream(branch, lb.SpeculativeStats())
        stream.begin()
        try:
            return _measure(lambda: stream.round(k), n, Wraps(parts_of(target), PHASES, cost))
        finally:
            speculator.close_stream(stream, keep=False)


def _measure(step: Callable[[], object], n: int, wraps: Wraps) -> Found:
    """Run about ``n`` steps with and as many without wrappers, in short turns: the context grows."""
    bare: list[float] = []
    laps: list[Lap] = []
    while len(laps) < n:
        bare += list(_turn(step))[1:]  # the first of a turn is slower: methods were changed
        with wraps:
            laps += [wraps.take(took) for took in _turn(step)][1:]
    laps.sort(key=lambda lap: lap.whole)
    fast = sorted(bare)[: _most(bare)]
    return Found(laps[: _most(laps)], sum(fast) / len(fast))


def _turn(step: Callable[[], object]) -> Iterator[float]:
    """Run some steps; yield what each took."""
    for _ in range(TURN + 1):
        start = perf_counter()
        step()
        yield perf_counter() - start


def _most(values: Sequence[object]) -> int:
    return max(1, round(len(values) * (1 - SLOWEST)))


# -- tables ----------------------------------------------------------------------------------------


def _show(caption: str, found: Found, *, rounds: bool) -> dict[str, object]:
    laps = found.laps
    found_keys = {key for lap in laps for key in lap.seconds}
    mean = {k: sum(lap.seconds.get(k, 0.0) for lap in laps) / len(laps) for k in found_keys}
    phases = ["", *PHASES]
    keys = sorted(mean, key=lambda key: (phases.index(key[0]), -mean[key]))
    calls = {key: sum(lap.calls.get(key, 0) for lap in laps) / len(laps) for key in keys}
    total = sum(mean.values())
    rows = []
    for phase, part in keys:
        seconds = mean[phase, part]
        rows.append(
            (
                *([phase] if rounds else []),
                part or REST,
                number(1e6 * seconds, 1),
                percent(seconds / total),
                number(calls[phase, part], 1),
            )
        )
    ours = total - sum(seconds for (_, part), seconds in mean.items() if part == "llama_decode")
    blank = [""] if rounds else []
    rows.append((*blank, "all of it", number(1e6 * total, 1), "100.0 %", "-"))
    rows.append((*blank, "all but llama_decode", number(1e6 * ours, 1), percent(ours / total), "-"))
    rows.append((*blank, "the same without wrappers", number(1e6 * found.bare_s, 1), "-", "-"))
    columns = ("part", "µs", "share", "calls")
    table(
        f"{caption}: means without the slowest {SLOWEST:.0%} of the laps",
        ("phase", *columns) if rounds else columns,
        rows,
    )
    return {
        "parts": [
            {
                "phase": phase,
                "part": part or REST,
                "s": mean[phase, part],
                "calls": calls[phase, part],
            }
            for phase, part in keys
        ],
        "total_s": total,
        "ours_s": ours,
        "bare_s": found.bare_s,
    }


if __name__ == "__main__":
    main()
