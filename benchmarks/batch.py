"""Many branches in one decode, compared with one branch after another and with llama-batched-bench.

python -m benchmarks.batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

import llamabranch as lb
from llamabranch.bench.pair import seed_of
from llamabranch.bench.timing import Maker, Series, Spread, Timing, Work

from . import llama_tools
from .clocks import interleave, verify_costs
from .llama_tools import LlamaTools
from .prompts import PROMPTS
from .report import Settings, emit, number, parser, pm, series_json, table, title

TOGETHER, IN_TURN = "BranchStore.step", "one after another"
ENGINE, ENGINE_DRAFTS = "Engine", "Engine, draft model, auto length"
BATCHED, BATCHED_UNIFIED = "llama-batched-bench", "llama-batched-bench, unified cache"


def main() -> None:
    """Measure one model with growing numbers of streams."""
    described = parser("batching", runs=5, prompts=3, tokens=64, temperatures=(0.0, 0.8))
    described.add_argument("--streams", type=int, nargs="+", help="default: 1 2 4 8 16")
    args = described.parse_args()
    settings = Settings.of(args)
    streams = sorted(args.streams or ([1, 2] if settings.quick else [1, 2, 4, 8, 16]))
    tools = None
    if settings.peers:
        tools = LlamaTools(
            settings.peers_bin or llama_tools.build(settings.cache),
            threads=settings.threads,
            n_ctx=settings.n_ctx,
        )
    n_ctx = max(settings.n_ctx, 128 + (settings.tokens + 8) * (max(streams) + 1))
    n_seq_max = max(streams) + 1
    with (
        settings.context(settings.target, n_ctx=n_ctx, n_seq_max=n_seq_max) as target,
        settings.context(settings.draft, n_ctx=n_ctx, n_seq_max=n_seq_max) as draft,
    ):
        sizes = sorted({1, 2, 3, 4, 6, 8, 12, 16, *streams})
        if settings.quick:
            sizes = sorted({1, *streams})
        repeats, prefix = (3, 16) if settings.quick else (15, 64)
        v = {}
        for role, ctx in (("target", target), ("draft", draft)):
            times = verify_costs(ctx, sizes, n_prefix=prefix, repeats=repeats)
            v[role] = {n: seconds / times[1] for n, seconds in times.items()}
            caption = (
                f"v(n): one decode of n tokens over one of 1, {title(ctx.model)}, "
                f"t(1) = {1e3 * times[1]:.3f} ms"
            )
            table(caption, ("n", *map(str, sizes)), [("v(n)", *map(number, v[role].values()))])
        results: dict[str, object] = {"v": v}
        for temperature in settings.temperatures:
            bench = Batch(target, draft, settings, temperature, tools)
            results[f"{temperature:g}"] = bench.measure(streams, v["target"])
        models = {"target": target.model, "draft": draft.model}
        emit("batch", settings, models, results)


class Batch:
    """The measurements of one temperature. Prompts are evaluated before the clock starts."""

    def __init__(
        self,
        target: lb.Context,
        draft: lb.Context,
        settings: Settings,
        temperature: float,
        tools: LlamaTools | None,
    ) -> None:
        self._target = target
        self._draft = draft
        self._settings = settings
        self._temperature = temperature
        self._tools = tools
        self._prompts = [target.tokenize(prompt) for prompt in PROMPTS[: settings.prompts]]

    def measure(self, streams: Sequence[int], v: Mapping[int, float]) -> dict[str, object]:
        """Measure and print every number of streams."""
        by_streams = {}
        for n in streams:
            makers: dict[str, Maker] = {
                TOGETHER: self._branches(n, together=True),
                IN_TURN: self._branches(n, together=False),
                ENGINE: self._engine(n, drafts=False),
                ENGINE_DRAFTS: self._engine(n, drafts=True),
            }
            if self._tools is not None:
                makers[BATCHED] = self._batched(n, self._tools, unified=False)
                makers[BATCHED_UNIFIED] = self._batched(n, self._tools, unified=True)
            by_streams[n] = interleave(
                makers, n_runs=self._settings.runs, n_items=len(self._prompts)
            )
        self._show(by_streams, v)
        return {str(n): self._json(n, series, v) for n, series in by_streams.items()}

    def _sampling(self, run: int, item: int) -> lb.SamplingParams:
        return lb.SamplingParams(temperature=self._temperature, seed=seed_of(run, item))

    # -- the contestants ---------------------------------------------------------------------------

    def _branches(self, n: int, *, together: bool) -> Maker:
        ctx, n_tokens = self._target, self._settings.tokens

        def make(run: int) -> Work:
            def work(item: int) -> Timing:
                sampling = self._sampling(run, item)
                with lb.Branch.start(ctx, self._prompts[item], sampling=sampling) as root:
                    children = root.fork_many(n)
                    start = perf_counter()
                    if together:
                        generated = _step_all(ctx, children, n_tokens)
                    else:
                        generated = sum(
                            sum(1 for _ in child.generate(n_tokens)) for child in children
                        )
                    return Timing(generated, perf_counter() - start)

            return work

        return make

    def _engine(self, n: int, *, drafts: bool) -> Maker:
        from llamabranch.engine import Engine, Event, Request

        def make(run: int) -> Work:
            drafter = lb.ModelDrafter(self._draft) if drafts else None
            config = lb.SpeculativeConfig(draft_k="auto")
            engine = Engine(self._target, drafter, config, max_tokens=self._settings.tokens, seed=1)

            def work(item: int) -> Timing:
                first: dict[int, float] = {}
                tokens = 0

                def note(event: Event) -> None:
                    nonlocal tokens
                    if event.emitted is not None and not event.emitted.is_stop:
                        tokens += 1
                        first.setdefault(event.sample, perf_counter())

                request = Request(self._prompts[item], sampling=self._sampling(run, item), n=n)
                results = engine.generate([request], on_event=note)
                end = perf_counter()
                failed = [result.error for result in results if result.error is not None]
                if failed:
                    raise failed[0]
                # The time begins with the first token, which needs no decode after the prompt.
                return Timing(tokens - len(first), end - min(first.values()))

            return work

        return make

    def _batched(self, n: int, tools: LlamaTools, *, unified: bool) -> Maker:
        path, n_tokens = self._target.model.path, self._settings.tokens

        def work(item: int) -> Timing:
            n_prompt = len(self._prompts[item])
            timings = tools.batched(path, [n], n_prompt=n_prompt, n=n_tokens, unified=unified)
            return timings[n]

        return lambda run: work

    # -- tables ------------------------------------------------------------------------------------

    def _show(self, by_streams: Mapping[int, Mapping[str, Series]], v: Mapping[int, float]) -> None:
        settings = self._settings
        rows = []
        for n, series in by_streams.items():
            batched = _best(series)
            gain = series[TOGETHER].ratio(series[IN_TURN])
            rows.append(
                (
                    str(n),
                    pm(series[IN_TURN].rate, 0),
                    pm(series[TOGETHER].rate, 0),
                    pm(gain),
                    number(n / v[n]),
                    number(gain.median / (n / v[n])),
                    pm(series[ENGINE].rate, 0),
                    pm(series[ENGINE_DRAFTS].rate, 0),
                    pm(series[BATCHED].rate, 0) if BATCHED in series else "-",
                    pm(series[BATCHED_UNIFIED].rate, 0) if BATCHED in series else "-",
                    pm(series[ENGINE].ratio(batched)) if batched else "-",
                    pm(series[ENGINE_DRAFTS].ratio(series[ENGINE])),
                )
            )
        columns = (
            "streams", f"{IN_TURN}, tokens/s", TOGETHER, "together over in turn", "n / v(n)",
            "share of n / v(n)", ENGINE, ENGINE_DRAFTS, BATCHED, BATCHED_UNIFIED,
            "Engine over the better of them", "drafting over not drafting",
        )  # fmt: skip
        caption = (
            f"Streams, T = {self._temperature:g}. {title(self._target.model)}: {settings.threads} "
            f"threads, {len(self._prompts)} prompts x {settings.tokens} tokens a stream, medians of "
            f"{settings.runs} runs (lowest to highest)"
        )
        table(caption, columns, rows)

    def _json(
        self, n: int, series: Mapping[str, Series], v: Mapping[int, float]
    ) -> dict[str, object]:
        gain: Spread = series[TOGETHER].ratio(series[IN_TURN])
        best = _best(series)
        return {
            "compared": {
                name: series_json(one_series, series[IN_TURN])
                for name, one_series in series.items()
            },
            "together_over_in_turn": gain.as_dict(),
            "share_of_n_over_v": gain.median / (n / v[n]),
            "engine_over_batched_bench": series[ENGINE].ratio(best).as_dict() if best else None,
        }


def _best(series: Mapping[str, Series]) -> Series | None:
    """Return the faster layout of llama-batched-bench."""
    if BATCHED not in series:
        return None
    return max((series[BATCHED], series[BATCHED_UNIFIED]), key=lambda layout: layout.rate.median)


def _step_all(ctx: lb.Context, branches: Sequence[lb.Branch], n: int) -> int:
    """Step all branches together until each has ``n`` tokens or an EOG token; return the tokens."""
    store = lb.BranchStore(ctx)
    running = list(branches)
    tokens = 0
    for _ in range(n):
        produced = store.step(running)
        running = [branch for branch in running if not produced[branch].is_stop]
        tokens += len(running)
        if not running:
            break
    return tokens


if __name__ == "__main__":
    main()
