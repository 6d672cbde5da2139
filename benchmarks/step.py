"""The cost of a step besides llama.cpp's own calls: by part, by folder, and as a context grows.

    python -m benchmarks.step [--only plain drafted folders growth]

plain, drafted: loops that do more and more of a step, with the same texts. The first one only calls
``llama_decode``. The last one is ``Branch.generate``, or a drafter whose drafts of four tokens move
through a text as if one or two tokens of each were accepted. The loops take turns. The time of a part is
the difference of two loops within a run. The parts of a plain step are also timed alone, again and again
on the same row.
folders: the time outside ``llama_decode`` by folder of the package (``--modules``: by file). A profiler
slows Python down, so it only gives the shares. The total is that of a timed run.
growth: steps and forks with 256 to 32,768 cells and 1 to 64 branches. The time of this library
should not grow faster than llama.cpp's. The last column is the growth of ours over the growth of theirs.
"""

from __future__ import annotations

import argparse
import cProfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from time import perf_counter
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import llamabranch as lb
from llamabranch.bench.timing import Spread, Timing
from llamabranch.context.logits import LogitsRow
from llamabranch.context.token_states import kept_states
from llamabranch.generation.drafter import FixedLength
from llamabranch.sampling import Sampler
from llamabranch.sampling.noise import DRAW

from .clocks import CallClock, DecodeClock, interleave, median_time
from .plotting import Curve, save_plot
from .prompts import PROMPTS, long_prompt
from .report import Settings, emit, number, parser, percent, pm, series_json, table, title

__all__ = ["OTHER", "StepCost", "Work", "measure", "seconds_by_part", "step_cost"]

PARTS = ("plain", "drafted", "folders", "growth")


def main() -> None:
    """Measure the chosen parts."""
    described = parser("the cost of a step", runs=9, prompts=5, temperatures=(0.8,))
    add = described.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    add("--head", default="tale-eagle", help="an EAGLE-3 head for the target (drafted)")
    add("--modules", action="store_true", help="by module instead of by folder (folders)")
    add("--cells", type=int, nargs="+", help="context sizes; default: 256 to 32768 (growth)")
    add("--branches", type=int, nargs="+", help="default: 1 to 64 (growth)")
    add("--plots", type=Path, help="folder for growth-*.png; default: that of --cache")
    args = described.parse_args()
    results: dict[str, object] = {}
    programs = {"plain": plain, "drafted": drafted, "folders": folders, "growth": growth}
    # The default numbers of tokens; drafts need a text that is long enough.
    tokens = {"plain": 150, "drafted": 100, "folders": 400, "growth": 64}
    for name in args.only:
        args.defaults["tokens"] = tokens[name]
        settings = Settings.of(args, tokens=16)
        results[name] = programs[name](settings, args)
    with settings.context(settings.target) as target, settings.context(settings.draft) as draft:
        models = {"target": target.model, "draft": draft.model}
        emit("step", settings, models, results)


# -- loops that do more and more -------------------------------------------------------------------

DECODE = "llama_decode"


def ladder(
    caption: str, loops: Mapping[str, Callable[[int], Timing]], runs: int, n_items: int
) -> dict[str, object]:
    """Time the loops in turn, print how much more each takes than the one before, return the figures."""

    def maker(loop: Callable[[int], Timing]) -> Callable[[int], Callable[[int], Timing]]:
        return lambda run: loop

    series = interleave(
        {name: maker(loop) for name, loop in loops.items()},
        n_runs=runs,
        n_items=n_items,
    )
    rungs = list(series.values())
    rows = []
    for i, (name, rung) in enumerate(series.items()):
        seconds = Spread.of([1.0 / rate for rate in rung.rates])
        pairs = zip(rung.rates, rungs[i - 1].rates, strict=True) if i else ()
        added = Spread.of([1e6 * (1.0 / after - 1.0 / before) for after, before in pairs])
        speed = percent(rungs[0].rate.median and rung.ratio(rungs[0]).median)
        rows.append((name, number(1e6 * seconds.median, 1), pm(added, 1), speed))
    caption += f", {n_items} prompts, medians of {runs} runs"
    table(caption, ("what is done", "µs a token", "more than before", "speed"), rows)
    return {name: series_json(rung, rungs[0]) for name, rung in series.items()}


# -- a plain step ----------------------------------------------------------------------------------

Loop = Callable[[lb.Branch, int], int]  # decodes at most that many tokens, returns how many


def plain(settings: Settings, args: argparse.Namespace) -> dict[str, object]:
    """Measure the target and the draft model."""
    results: dict[str, object] = {}
    for role, name in (("target", settings.target), ("draft", settings.draft)):
        with settings.context(name) as ctx:
            results[role] = {f"T = {t:g}": _plain(ctx, t, settings) for t in settings.temperatures}
    return results


def _plain(ctx: lb.Context, temperature: float, settings: Settings) -> dict[str, object]:
    params = lb.SamplingParams(temperature=temperature, seed=1)
    prompts = PROMPTS[: settings.prompts]

    def timed(loop: Loop) -> Callable[[int], Timing]:
        def run(item: int) -> Timing:
            with lb.Branch.start(ctx, prompts[item], sampling=params) as branch:
                branch.produce()
                begin = perf_counter()
                n = loop(branch, settings.tokens)
                return Timing(n, perf_counter() - begin)

        return run

    loops: dict[str, Loop] = {
        DECODE: _decode,
        "+ the draw, in the same call": lambda branch, n: _fused(branch, n, measured=False),
        "+ log-sum-exp and entropy, in the same call": lambda b, n: _fused(b, n, measured=True),
        "+ Branch.step: the text, the checks, the books": _steps,
        "+ Branch.generate: limits, stop strings, the iterator": (
            lambda branch, n: sum(1 for _ in branch.generate(n))
        ),
    }
    rungs = ladder(
        f"A step of {title(ctx.model)}, T = {temperature:g}: {settings.threads} threads, "
        f"{settings.tokens} tokens",
        {name: timed(loop) for name, loop in loops.items()},
        settings.runs,
        len(prompts),
    )
    alone = parts_alone(ctx, params)
    table(
        "The parts alone, on one row again and again",
        ("part", "µs"),
        [(name, number(1e6 * spread.median, 1)) for name, spread in alone.items()],
    )
    return {"ladder": rungs, "alone_s": {name: spread.as_dict() for name, spread in alone.items()}}


def _decode(branch: lb.Branch, n: int) -> int:
    """Call ``llama_decode`` and nothing else, always with the same token."""
    handle, seq_id, token = branch.ctx.decoder.handle, branch.seq_id, branch.tokens[-1]
    start = branch.position
    for position in range(start, start + n):
        handle.tokens[0], handle.positions[0] = token, position
        handle.seqs[0], handle.wants_logits[0] = seq_id, 1
        if handle.decode(1):
            raise SystemExit("llama_decode failed")
    handle.remove(seq_id, start, -1)  # the branch has not recorded these tokens
    return n


def _fused(branch: lb.Branch, n: int, *, measured: bool) -> int:
    """Decode and draw in the compiled core, and nothing else."""
    handle, seq_id, token = branch.ctx.decoder.handle, branch.seq_id, branch.produce().token
    sampler = _compiled(branch.sequence.sampler)
    start, stepper = branch.position, handle.stepper
    if stepper is None:
        raise SystemExit("the compiled core is not available")
    for position in range(start, start + n):
        if stepper.step(token, position, seq_id, sampler, branch.seed, DRAW, measured):
            raise SystemExit("llama_decode failed")
        token = max(0, sampler.choice.token)  # -1: NumPy would decide; the time is the same
    handle.remove(seq_id, start, -1)
    return n


def _steps(branch: lb.Branch, n: int) -> int:
    for done in range(n):
        if branch.step().is_stop:
            return done
    return n


def _compiled(sampler: Sampler) -> Any:
    if sampler.row_sampler is None:
        raise SystemExit("this needs the compiled core, and settings that it knows")
    return sampler.row_sampler


def parts_alone(ctx: lb.Context, params: lb.SamplingParams) -> dict[str, Spread]:
    """Time the parts of a step on one row, in the compiled core and in NumPy."""
    with lb.Branch.start(ctx, PROMPTS[0], sampling=params) as branch:
        logits, token = branch.logits, branch.produce().token
        position, model = branch.position, ctx.model
    sampler = Sampler(model, params)
    compiled, address = _compiled(sampler), LogitsRow(logits).address
    distribution = sampler.distribution(logits, position, 1)
    return {
        "compiled: log-sum-exp and entropy": median_time(
            lambda: LogitsRow(logits, address).entropy(), 400
        ),
        "compiled: candidates and draw": median_time(
            lambda: compiled.sample(address, 1, position, DRAW, False), 400
        ),
        "NumPy: the draw from given candidates": median_time(
            lambda: distribution.draw(1, position), 400
        ),
        "the text of the token": median_time(lambda: model.text_after(token, b""), 400),
    }


# -- a drafted token -------------------------------------------------------------------------------

TEXT = "+ the new tokens of the text, in the first decode"
ENCODE = "+ llama_encode of their hidden states"
DRAFT = "+ the draft: draws, distributions, cutting, the books"

K = 4
NEW = (3, 2, 4, 1, 3, 2)  # tokens of the text that are new to each draft

States = npt.NDArray[np.float32]
Drafter = lb.ModelDrafter | lb.EagleDrafter


class Text(NamedTuple):
    """A text that the target generated, with the hidden states that a head reads."""

    branch: lb.Branch
    tokens: list[int]
    n_prompt: int
    features: States

    def ends(self) -> Iterator[tuple[int, int]]:
        """Yield two lengths for each draft: of the text read before, and of the text to continue."""
        at = self.n_prompt
        for n in cycle(NEW):
            if at + n > len(self.tokens):
                return
            yield at, at + n
            at += n


def drafted(settings: Settings, args: argparse.Namespace) -> dict[str, object]:
    """Measure the draft model and the head."""
    with ExitStack() as stack:
        target = stack.enter_context(settings.context(settings.target))
        draft = stack.enter_context(settings.context(settings.draft))
        head = stack.enter_context(lb.load(args.head, target=target, n_threads=settings.threads))
        contestants: dict[str, tuple[Drafter, tuple[str, ...]]] = {
            "draft": (lb.ModelDrafter(draft), (DECODE, TEXT, DRAFT)),
            "head": (lb.EagleDrafter(head), (DECODE, TEXT, ENCODE, DRAFT)),
        }
        return {
            f"T = {t:g}": {
                name: _drafted(target, drafter, rungs, t, settings)
                for name, (drafter, rungs) in contestants.items()
            }
            for t in settings.temperatures
        }


def _drafted(
    target: lb.Context, drafter: Drafter, rungs: tuple[str, ...], t: float, settings: Settings
) -> dict[str, object]:
    params = lb.SamplingParams(temperature=t, seed=1)
    texts = [
        _text(target, prompt, params, settings.tokens) for prompt in PROMPTS[: settings.prompts]
    ]

    def timed(rung: str) -> Callable[[int], Timing]:
        if rung == DRAFT:
            return lambda item: _drafts(drafter, texts[item])
        return lambda item: _bare(drafter, texts[item], rung)

    results = ladder(
        f"A token drafted by {title(drafter.ctx.model)}, T = {t:g}: {settings.threads} threads, "
        f"{settings.tokens} tokens, drafts of {K}",
        {rung: timed(rung) for rung in rungs},
        settings.runs,
        len(texts),
    )
    for text in texts:
        text.branch.prune()
    return results


def _text(ctx: lb.Context, prompt: str, params: lb.SamplingParams, n: int) -> Text:
    branch = lb.Branch.start(ctx, prompt, sampling=params)
    n_prompt = branch.position
    list(branch.generate(n))
    return Text(branch, branch.tokens, n_prompt, kept_states(ctx, branch.seq_id, branch.tokens, 0))


def _bare(drafter: Drafter, text: Text, rung: str) -> Timing:
    """Make only those calls of llama.cpp that drafting needs."""
    ctx, ahead = drafter.ctx, int(isinstance(drafter, lb.EagleDrafter))
    handle: Any = ctx.decoder.handle
    tokens, n_embd = text.tokens, handle.n_embd
    if ahead:  # any states will do
        n = min(len(handle.states), len(text.features))
        handle.states[:n] = text.features[:n, :n_embd]

    def decode(new: list[int], position: int) -> None:
        n = len(new)
        handle.tokens[:n], handle.positions[:n] = new, range(position, position + n)
        handle.seqs[:n], handle.wants_logits[:n] = 0, ahead
        handle.wants_logits[n - 1] = 1
        if handle.decode(n):
            raise SystemExit("llama_decode failed")

    decode(tokens[ahead : text.n_prompt], 0)
    n_drafted, seconds = 0, 0.0
    for start, end in text.ends():
        begun = perf_counter()
        if rung == DECODE:
            for i in range(K):
                decode([tokens[start]], start - ahead + i)
            handle.remove(0, start - ahead, -1)
        else:
            if rung == ENCODE:
                ctx.decoder.encode(text.features[start - 1 : end - 1])
            decode(tokens[start:end], start - ahead)
            for i in range(K - 1):
                decode([tokens[start]], end - ahead + i)
            handle.remove(0, end - ahead, -1)
        seconds += perf_counter() - begun
        if rung == DECODE:
            decode(tokens[start:end], start - ahead)
        n_drafted += K
    handle.remove(0, -1, -1)
    return Timing(n_drafted, seconds)


def _drafts(drafter: Drafter, text: Text) -> Timing:
    """Draft with the drafter itself."""
    state = drafter.start(text.branch.sequence, "seeded")
    state.propose(text.tokens[: text.n_prompt], FixedLength(1), 1)
    state.observe(text.n_prompt)
    n_drafted, begun = 0, perf_counter()
    for _, end in text.ends():
        n_drafted += len(state.propose(text.tokens[:end], FixedLength(K), K).tokens)
        state.observe(end)
    seconds = perf_counter() - begun
    state.close()
    return Timing(n_drafted, seconds)


# -- by folder -------------------------------------------------------------------------------------

PACKAGE = Path(lb.__file__).parent
OTHER = "NumPy, standard library"
CLOCK = "bench/"  # the clock's own time, no part of a generation

Work = Callable[[], int]  # generates, and returns the number of tokens
Start = Callable[[ExitStack], Work]  # reads the prompt; the stack closes what it opens


@dataclass(frozen=True)
class Times:
    """Seconds of each part of a token's time; they add up to ``total``."""

    parts: Mapping[str, float]
    total: float
    n_tokens: int

    @property
    def ours(self) -> float:
        """Seconds per token outside ``llama_decode``."""
        return self.total - self.parts[DECODE]

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "parts_s": dict(self.parts),
            "total_s": self.total,
            "ours_s": self.ours,
            "n_tokens": self.n_tokens,
        }


def folders(settings: Settings, args: argparse.Namespace) -> dict[str, object]:
    """Measure plain and speculative generations."""
    results: dict[str, object] = {}
    with settings.context(settings.target) as target, settings.context(settings.draft) as draft:
        for t in settings.temperatures:
            for name, start, contexts in (
                ("plain", plain_text(target, t, settings.tokens), [target]),
                (f"{K} drafted", drafted_text(target, draft, t, settings.tokens), [target, draft]),
            ):
                times = measure(start, contexts, min(3, settings.runs), by_module=args.modules)
                results[f"{name}, T = {t:g}"] = times.as_dict()
                about = title(*(ctx.model for ctx in contexts))
                _show_times(f"{name}, T = {t:g}, {about}, {settings.threads} threads", times)
    return results


def plain_text(ctx: lb.Context, temperature: float, n: int) -> Start:
    """Return a plain generation of at most ``n`` tokens."""

    def start(stack: ExitStack) -> Work:
        branch = lb.Branch.start(ctx, PROMPTS[0], temperature=temperature, seed=1)
        stack.enter_context(branch)
        return lambda: sum(1 for _ in branch.generate(n))

    return start


def drafted_text(target: lb.Context, draft: lb.Context, temperature: float, n: int) -> Start:
    """Return a speculative generation; the draft model reads the prompt when it begins."""

    def start(stack: ExitStack) -> Work:
        config = lb.SpeculativeConfig(draft_k=K)
        speculator = lb.Speculator(target, lb.ModelDrafter(draft), config)
        branch = lb.Branch.start(target, PROMPTS[0], temperature=temperature, seed=1)
        stack.enter_context(branch)
        stack.callback(speculator.forget, branch)
        return lambda: sum(1 for _ in speculator.generate(branch, max_tokens=n))

    return start


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
    seconds = seconds_by_part(profile, by_module=by_module)
    inside = "native/context.py" if by_module else "native/"  # the caller of llama_decode
    seconds[inside] = max(0.0, seconds[inside] - profiled_decode)
    scale = (total - decode) / sum(seconds.values())
    parts = {part: seconds * scale / n_tokens for part, seconds in seconds.items()}
    return Times({DECODE: decode / n_tokens, **parts}, total / n_tokens, n_tokens)


def seconds_by_part(profile: cProfile.Profile, *, by_module: bool = False) -> dict[str, float]:
    """Return the seconds that a profile found in each folder (or module) of the package.

    A function outside the package counts for the part that called it; one that was called by another
    function outside the package counts as ``OTHER``.
    """
    by_part: dict[str, float] = {}
    for entry in profile.getstats():
        caller = _part(entry.code, by_module)
        if caller is not None:
            by_part[caller] = by_part.get(caller, 0.0) + entry.inlinetime
        for call in entry.calls or ():
            if _part(call.code, by_module) is None:
                part = caller or OTHER
                by_part[part] = by_part.get(part, 0.0) + call.inlinetime
    return {part: seconds for part, seconds in by_part.items() if not part.startswith(CLOCK)}


def _part(code: CodeType | str, by_module: bool) -> str | None:
    """Return the folder or module of the package that ``code`` belongs to; None for other code."""
    if isinstance(code, str):  # the name of a builtin function
        return None
    try:
        path = Path(code.co_filename).relative_to(PACKAGE)
    except ValueError:
        return None
    return path.as_posix() if by_module or len(path.parts) == 1 else f"{path.parts[0]}/"


@contextmanager
def _clock(contexts: Sequence[lb.Context]) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds spent inside ``llama_decode`` so far."""
    with ExitStack() as stack:
        clocks = [stack.enter_context(DecodeClock(ctx)) for ctx in contexts]
        yield lambda: sum(clock.seconds for clock in clocks)


def _show_times(caption: str, times: Times) -> None:
    parts = [(DECODE, times.parts[DECODE])]
    parts += sorted(
        (item for item in times.parts.items() if item[0] != DECODE), key=lambda item: -item[1]
    )
    parts += [("all", times.total), ("all but llama_decode", times.ours)]
    rows = [(name, number(1e6 * s, 1), percent(s / times.total)) for name, s in parts]
    table(f"Time of a token, {caption}", ("part", "µs", "share"), rows)


# -- as a context grows ----------------------------------------------------------------------------

N_TOGETHER = 8  # branches in one decode, where the context grows
BRANCH_CELLS = 256  # context, where the branches grow
SPARE = 2048  # cells for the tokens generated after the prefix

PLAIN, FORK, JOINT = "plain step", "fork and prune", f"step of {N_TOGETHER} branches"
JOINT_OF, FORK_OF = "step of all branches", "fork and prune beside them"


@dataclass(frozen=True)
class Part:
    """Seconds of one kind of work: inside llama.cpp, and in this library."""

    theirs: Spread
    ours: Spread

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {"llama_cpp_s": self.theirs.as_dict(), "ours_s": self.ours.as_dict()}


BySize = Mapping[int, Mapping[str, Part]]  # at each size, each kind of work


def growth(settings: Settings, args: argparse.Namespace) -> dict[str, object]:
    """Measure the draft model: it fills 32,768 cells soonest, and our share is largest."""
    quick, n = settings.quick, settings.tokens
    cells = sorted(args.cells or ([64, 128] if quick else [256 << i for i in range(8)]))
    branches = sorted(args.branches or ([1, 2] if quick else [1 << i for i in range(7)]))
    n_seq_max = max(*branches, N_TOGETHER) + 2
    folder = args.plots or settings.cache
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {}
    with settings.context(settings.draft, n_ctx=max(cells) + SPARE, n_seq_max=n_seq_max) as ctx:
        about = f"{title(ctx.model)}: {settings.threads} threads, medians of {n}"
        for dimension, measured in (
            ("cells", _by_cells(ctx, cells, n)),
            ("branches", _by_branches(ctx, branches, n)),
        ):
            caption = (
                f"As the {'context grows' if dimension == 'cells' else 'branches grow'}, {about}"
            )
            _show_growth(caption, dimension, measured)
            _plot(folder / f"growth-{dimension}.png", caption, dimension, measured)
            results[dimension] = {
                str(size): {kind: part.as_dict() for kind, part in parts.items()}
                for size, parts in measured.items()
            }
    return results


def _by_cells(ctx: lb.Context, cells: Sequence[int], n: int) -> BySize:
    measured = {}
    text = long_prompt(ctx, max(cells))
    sampling = lb.SamplingParams(temperature=0.8, seed=1)
    with lb.Branch.start(ctx, text[: cells[0]], sampling=sampling) as root:
        for size in cells:
            if size > root.position:
                root.prefill(text[root.position : size])
            parts = {FORK: _forks(ctx, root, n)}
            with root.fork() as child:
                parts[PLAIN] = _clocked_steps(ctx, _alone(child), n)
            children = root.fork_many(N_TOGETHER)
            parts[JOINT] = _clocked_steps(ctx, _joint(ctx, children), max(1, n // 2))
            for child in children:
                child.prune()
            measured[size] = parts
    return measured


def _by_branches(ctx: lb.Context, branches: Sequence[int], n: int) -> BySize:
    measured = {}
    sampling = lb.SamplingParams(temperature=0.8, seed=1)
    for size in branches:
        with lb.Branch.start(ctx, long_prompt(ctx, BRANCH_CELLS), sampling=sampling) as root:
            children = root.fork_many(size)
            measured[size] = {
                FORK_OF: _forks(ctx, root, n),
                # As many rounds as the spare cells allow.
                JOINT_OF: _clocked_steps(ctx, _joint(ctx, children), min(n, SPARE // size // 2)),
            }
    return measured


def _alone(branch: lb.Branch) -> Callable[[], object]:
    """Return the work of a plain step."""
    return lambda: branch.commit(branch.produce().token)


def _joint(ctx: lb.Context, branches: Sequence[lb.Branch]) -> Callable[[], object]:
    """Return the work of a step of all branches in one decode; EOG tokens do not end it."""
    store = lb.BranchStore(ctx)
    return lambda: store.commit({branch: branch.produce().token for branch in branches})


def _clocked_steps(ctx: lb.Context, step: Callable[[], object], n: int) -> Part:
    with DecodeClock(ctx) as clock:
        return _timed(clock, step, n)


def _forks(ctx: lb.Context, root: lb.Branch, n: int) -> Part:
    with CallClock(ctx.decoder.handle, "copy", "remove") as clock:
        return _timed(clock, lambda: root.fork().prune(), n)


def _timed(
    clock: CallClock | DecodeClock, work: Callable[[], object], n: int, warm_up: int = 3
) -> Part:
    theirs, ours = [], []
    for i in range(warm_up + n):
        before, start = clock.seconds, perf_counter()
        work()
        whole, inside = perf_counter() - start, clock.seconds - before
        if i >= warm_up:
            theirs.append(inside)
            ours.append(whole - inside)
    return Part(Spread.of(theirs), Spread.of(ours))


def _growth(measured: BySize, kind: str, size: int) -> tuple[float, float]:
    """Return llama.cpp's time and ours, each divided by that of the first size."""
    first, now = measured[min(measured)][kind], measured[size][kind]
    return now.theirs.median / first.theirs.median, now.ours.median / first.ours.median


def _kinds(measured: BySize) -> list[str]:
    return list(measured[min(measured)])


def _show_growth(caption: str, dimension: str, measured: BySize) -> None:
    rows = []
    for kind in _kinds(measured):
        for size, parts in measured.items():
            theirs, ours = _growth(measured, kind, size)
            rows.append(
                (
                    kind,
                    f"{size:,}",
                    number(1e6 * parts[kind].theirs.median, 1),
                    number(1e6 * parts[kind].ours.median, 1),
                    number(theirs),
                    number(ours),
                    number(ours / theirs),
                )
            )
    columns = (
        "", dimension, "llama.cpp, µs", "ours, µs", "llama.cpp, times the first", "ours, times the first",
        "ours over theirs",
    )  # fmt: skip
    table(caption, columns, rows)


def _plot(path: Path, caption: str, dimension: str, measured: BySize) -> None:
    curves = []
    sizes = list(measured)
    for colour, kind in enumerate(_kinds(measured)):
        for whose in ("llama.cpp", "ours"):
            parts = [measured[size][kind] for size in sizes]
            spreads = [part.theirs if whose == "llama.cpp" else part.ours for part in parts]
            y = [1e6 * spread.median for spread in spreads]
            label, dashed = f"{kind}, {whose}", whose == "llama.cpp"
            curves.append(Curve(label, sizes, y, computed=dashed, colour=colour))
    save_plot(path, caption, (dimension, "µs"), curves, log=True)


# -- one number, for other programs ----------------------------------------------------------------


@dataclass(frozen=True)
class StepCost:
    """Seconds of the parts of a plain step: medians over the steps of a branch."""

    decode: Spread  # inside llama_decode
    produce: Spread  # from the logits to the token and its text
    commit: Spread  # appending it to the branch, without the decode

    @property
    def ours(self) -> float:
        """Seconds of this library, outside ``llama_decode``."""
        return self.produce.median + self.commit.median

    @property
    def share(self) -> float:
        """Share of this library in the whole step."""
        return self.ours / (self.ours + self.decode.median)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "decode_s": self.decode.as_dict(),
            "produce_s": self.produce.as_dict(),
            "commit_s": self.commit.as_dict(),
            "share": self.share,
        }


def step_cost(branch: lb.Branch, n: int, warm_up: int = 4) -> StepCost:
    """Time ``n`` steps of ``branch`` after ``warm_up`` untimed ones; EOG tokens do not end it."""
    decodes, produces, commits = [], [], []
    with DecodeClock(branch.ctx) as clock:
        for i in range(warm_up + n):
            inside = clock.seconds
            start = perf_counter()
            token = branch.produce().token
            produced = perf_counter()
            branch.commit(token)
            end = perf_counter()
            inside = clock.seconds - inside
            if i >= warm_up:
                decodes.append(inside)
                produces.append(produced - start)
                commits.append(end - produced - inside)
    return StepCost(Spread.of(decodes), Spread.of(produces), Spread.of(commits))


if __name__ == "__main__":
    main()
