"""Where a token's time goes: llama_decode, and each folder of the package.

    python -m benchmarks.hotpath [--modules]

Every generation runs several times from the same state. The timed runs give the total and the time inside
``llama_decode``. One more run, under cProfile, tells in which folder (or module) of the package the rest
is spent. A profiler slows Python down, so only proportions are taken from it: they divide what the timed
run spent outside ``llama_decode``.
"""

from __future__ import annotations

import cProfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import CodeType

import llamabranch as lb
from llamabranch.bench import DecodeClock

from .prompts import PROMPTS
from .report import Settings, emit, number, parser, percent, table, title

PACKAGE = Path(lb.__file__).parent
DECODE = "llama_decode"
OTHER = "NumPy, standard library"
CLOCK = "bench/"  # the clock's own time, no part of a generation

Work = Callable[[], int]  # generates, and returns the number of tokens
Start = Callable[[ExitStack], Work]  # reads the prompt; what is open is closed by the stack


@dataclass(frozen=True)
class Times:
    """Seconds of each part of a token's time; they add up to ``total``."""

    parts: Mapping[str, float]
    total: float
    n_tokens: int

    @property
    def ours(self) -> float:
        """Seconds a token outside ``llama_decode``."""
        return self.total - self.parts[DECODE]

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "parts_s": dict(self.parts),
            "total_s": self.total,
            "ours_s": self.ours,
            "n_tokens": self.n_tokens,
        }


def main() -> None:
    """Measure plain and speculative generations."""
    described = parser("where a token's time goes", runs=3, tokens=400, temperatures=(0.0, 0.8))
    described.add_argument("--k", type=int, default=4, help="tokens drafted a round")
    described.add_argument("--modules", action="store_true", help="by module instead of by folder")
    args = described.parse_args()
    settings = Settings.of(args, prompts=1)
    n = settings.tokens
    results = {}
    with settings.context(settings.target) as target, settings.context(settings.draft) as draft:
        for t in settings.temperatures:
            for name, start, contexts in (
                ("plain", plain_text(target, t, n), [target]),
                (f"{args.k} drafted", drafted_text(target, draft, t, n, args.k), [target, draft]),
            ):
                times = measure(start, contexts, settings.runs, by_module=args.modules)
                results[f"{name}, T = {t:g}"] = times.as_dict()
                about = title(*(ctx.model for ctx in contexts))
                _show(f"{name}, T = {t:g}, {about}, {settings.threads} threads", times)
        models = {"target": target.model, "draft": draft.model}
        emit("hotpath", settings, models, results, k=args.k)


def plain_text(ctx: lb.Context, temperature: float, n: int) -> Start:
    """Return a plain generation of at most ``n`` tokens."""

    def start(stack: ExitStack) -> Work:
        branch = lb.Branch.start(ctx, PROMPTS[0], temperature=temperature, seed=1)
        stack.enter_context(branch)
        return lambda: sum(1 for _ in branch.generate(n))

    return start


def drafted_text(
    target: lb.Context, draft: lb.Context, temperature: float, n: int, k: int
) -> Start:
    """Return a speculative generation; the draft model reads the prompt when it begins."""

    def start(stack: ExitStack) -> Work:
        config = lb.SpeculativeConfig(draft_k=k)
        speculator = lb.Speculator(target, lb.ModelDrafter(draft), config)
        branch = lb.Branch.start(target, PROMPTS[0], temperature=temperature, seed=1)
        stack.enter_context(branch)
        stack.callback(speculator.forget, branch)
        return lambda: sum(1 for _ in speculator.generate(branch, max_tokens=n))

    return start


# -- measuring -------------------------------------------------------------------------------------


def measure(
    start: Start, contexts: Sequence[lb.Context], runs: int, *, by_module: bool = False
) -> Times:
    """Time a generation ``runs`` times and profile it once; the fastest timed run counts."""
    timed = []
    for _ in range(runs + 1):  # the first warms up
        with ExitStack() as stack, _clock(contexts) as decode_s:
            work = start(stack)
            before, begin = decode_s(), perf_counter()
            n_tokens = work()
            timed.append((perf_counter() - begin, decode_s() - before, n_tokens))
    total, decode, n_tokens = min(timed[1:])
    profile = cProfile.Profile()
    with ExitStack() as stack, _clock(contexts) as decode_s:
        work = start(stack)
        before = decode_s()
        with profile:
            work()
        profiled_decode = decode_s() - before
    found = seconds_by_part(profile, by_module=by_module)
    inside = "native/context.py" if by_module else "native/"  # the caller of llama_decode
    found[inside] = max(0.0, found[inside] - profiled_decode)
    scale = (total - decode) / sum(found.values())
    parts = {part: seconds * scale / n_tokens for part, seconds in found.items()}
    return Times({DECODE: decode / n_tokens, **parts}, total / n_tokens, n_tokens)


def seconds_by_part(profile: cProfile.Profile, *, by_module: bool = False) -> dict[str, float]:
    """Return the seconds that a profile found in each folder (or module) of the package.

    A function outside the package counts for the part that called it; one that was called by another
    function outside the package counts as ``OTHER``.
    """
    found: dict[str, float] = {}
    for entry in profile.getstats():
        caller = _part(entry.code, by_module)
        if caller is not None:
            found[caller] = found.get(caller, 0.0) + entry.inlinetime
        for call in entry.calls or ():
            if _part(call.code, by_module) is None:
                part = caller or OTHER
                found[part] = found.get(part, 0.0) + call.inlinetime
    return {part: seconds for part, seconds in found.items() if not part.startswith(CLOCK)}


def _part(code: CodeType | str, by_module: bool) -> str | None:
    """Return the folder or module of the package that ``code`` is of, None for other code."""
    if isinstance(code, str):  # of a builtin function: its name
        return None
    try:
        path = Path(code.co_filename).relative_to(PACKAGE)
    except ValueError:
        return None
    return path.as_posix() if by_module or len(path.parts) == 1 else f"{path.parts[0]}/"


@contextmanager
def _clock(contexts: Sequence[lb.Context]) -> Iterator[Callable[[], float]]:
    """Give a function that returns the seconds spent inside ``llama_decode`` so far."""
    with ExitStack() as stack:
        clocks = [stack.enter_context(DecodeClock(ctx)) for ctx in contexts]
        yield lambda: sum(clock.seconds for clock in clocks)


# -- tables ----------------------------------------------------------------------------------------


def _show(caption: str, times: Times) -> None:
    parts = [(DECODE, times.parts[DECODE])]
    parts += sorted(
        (item for item in times.parts.items() if item[0] != DECODE), key=lambda item: -item[1]
    )
    parts += [("all", times.total), ("all but llama_decode", times.ours)]
    rows = [(name, number(1e6 * s, 1), percent(s / times.total)) for name, s in parts]
    table(f"Time of a token, {caption}", ("part", "µs", "share"), rows)


if __name__ == "__main__":
    main()
