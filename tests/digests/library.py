"""All calls of the library that the record needs. If a public name changes, only this file changes.

A ``World`` opens the models, gives each case fresh contexts, and adds ``seed_shift`` to every seed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # where it is run as a program

import together
import toys
from drafts import Eager, Newest

import llamabranch as lb
from llamabranch.generation.drafter import DraftLength, NullState
from llamabranch.speculative import Draft, DraftState

DATA = Path(lb.__file__).parent / "data"
N_THREADS = 1
Settings = Mapping[str, object]
Prompt = str | Sequence[int]

FREE = {1: -math.inf}  # the toys' end token; if it is forbidden, their texts do not end


# The source of each model: a file, or a function that writes one.
MODELS: dict[str, Path | Callable[[Path], Path]] = {
    "target": DATA / "tale-target-q8_0.gguf",
    "draft": DATA / "tale-draft-q8_0.gguf",
    **{
        f"{kind}{suffix}": partial(
            toys.write_toy, architecture=kind, vocab="bytes", seed=2, drift=drift
        )
        for kind in ("llama", "gemma3", "mamba", "rwkv7", "lfm2")
        for suffix, drift in (("", 0.0), (" draft", 0.3))
    },
}


def _config(config: Mapping[str, object]) -> lb.SpeculativeConfig:
    """Return the settings of a case; "auto", up to version 0.3, was "seeded" where a seed is given."""
    if config.get("rule") == "auto":
        config = {**config, "rule": "seeded"}
    return lb.SpeculativeConfig(**{"draft_k": 4, **config})  # type: ignore[arg-type]


@dataclass
class Said:
    """A text, and the numbers that were reported for its tokens."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    alternatives: list[float] = field(default_factory=list)

    def hear(self, event: lb.Produced) -> None:
        """Add a token that a branch, a generation, a session or an engine yielded."""
        self.text += event.text
        if event.is_stop:
            return
        self.tokens.append(event.token)
        self.logprobs.append(event.logprob)
        self.entropies.append(event.entropy)
        self.alternatives += [p for _, p in event.alternatives]

    @classmethod
    def of(cls, events: Iterable[lb.Produced]) -> Said:
        said = cls()
        for event in events:
            said.hear(event)
        return said


def continue_branch(branch: lb.Branch, n: int, stop: Sequence[str] = ()) -> Said:
    """Let a branch generate ``n`` more tokens."""
    said = Said.of(branch.generate(n, stop))
    said.finish = branch.finish_reason
    return said


def continue_together(ctx: lb.Context, branches: Sequence[lb.Branch], n: int) -> list[Said]:
    """Let branches generate up to ``n`` more tokens together; branches that end stay."""
    texts = {branch: Said() for branch in branches}
    for _ in range(n):
        for branch, produced in together.step(ctx, [b for b in branches if not b.is_stop]).items():
            texts[branch].hear(produced)
    return list(texts.values())


class World:
    """Models, opened once; contexts, fresh for each case."""

    def __init__(self, folder: Path) -> None:
        self.seed_shift = 0
        self.folder = folder
        self.used: set[str] = set()  # the models of the running case
        self._models: dict[str, lb.Model] = {}
        self._all = ExitStack()
        self._case = ExitStack()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_case()
        self._all.close()

    def end_case(self) -> None:
        """Close the contexts of the case that ran."""
        self._case.close()
        self.used = set()

    # -- models and contexts -----------------------------------------------------------------------

    def file(self, name: str) -> Path:
        """Return a model's file, written if it is a toy."""
        source = MODELS[name]
        if isinstance(source, Path):
            return source
        path = self.folder / f"{name.replace(' ', '-')}.gguf"
        return path if path.exists() else source(path)

    def model(self, name: str) -> lb.Model:
        self.used.add(name)
        if name not in self._models:
            self._models[name] = self._all.enter_context(lb.Model(self.file(name)))
        return self._models[name]

    def context(self, name: str = "target", **options: object) -> lb.Context:
        """Return a fresh context, exact if it can be; by default with 1024 cells and 8 sequences."""
        model, options = self.model(name), {"kv_type": "bf16", **options}
        exact = model.memory_type == "attention" and "target" not in options
        exact &= (
            options["kv_type"] in ("bf16", "q8_0") and options.get("flash_attention") is not False
        )
        chosen = {"n_ctx": 1024, "n_seq_max": 8, "n_threads": N_THREADS, "exact": exact, **options}
        return self._case.enter_context(lb.Context(model, **chosen))  # type: ignore[arg-type]

    # -- settings ----------------------------------------------------------------------------------

    def seed(self, seed: int) -> int:
        return seed + self.seed_shift

    def params(self, settings: Settings) -> lb.SamplingParams:
        """Return sampling settings; their seed is 11 unless they have one."""
        chosen = {"seed": 11, **settings}
        seed = chosen["seed"]
        assert isinstance(seed, int)
        chosen["seed"] = self.seed(seed)
        return lb.SamplingParams(**chosen)  # type: ignore[arg-type]

    @staticmethod
    def grammar(given: str | Mapping[str, object] | None) -> lb.Grammar | None:
        """Return a grammar from GBNF text or a JSON schema."""
        if given is None:
            return None
        return lb.Grammar(given) if isinstance(given, str) else lb.Grammar.from_json_schema(given)

    def start(
        self,
        ctx: lb.Context,
        prompt: Prompt,
        settings: Settings,
        grammar: str | Mapping[str, object] | None = None,
    ) -> lb.Branch:
        return lb.Branch.start(
            ctx, prompt, grammar=self.grammar(grammar), sampling=self.params(settings)
        )

    # -- speculation -------------------------------------------------------------------------------

    def drafter(
        self, which: str, draft: str = "draft", same: str = "target", **options: object
    ) -> lb.Drafter | None:
        """Return a drafter of one kind; models get fresh contexts with ``options``."""
        makers: dict[str, Callable[[], lb.Drafter | None]] = {
            "nobody": lambda: None,
            "null": lb.speculative.NullDrafter,
            "model": lambda: lb.ModelDrafter(self.context(draft, **options)),
            "same model": lambda: lb.ModelDrafter(self.context(same, **options)),
            "own settings": lambda: lb.ModelDrafter(
                self.context(draft, **options), self.params({"temperature": 1.3, "top_k": 0})
            ),
            "suffix": lambda: Eager(2.0),
            "chain": lambda: lb.ChainDrafter(
                [
                    Newest(6, 3),
                    lb.SuffixDrafter(),
                    lb.ModelDrafter(self.context(draft, **options)),
                ]
            ),
            "useless": lambda: Custom(lambda position: 7, None),
            "adversary": lambda: Custom(lambda position: (31 * position) % 200 + 2, None),
            "uniform": lambda: Custom(
                None,
                lb.Distribution.from_probs(np.full(32, 1 / 32), np.arange(40, 72, dtype=np.int32)),
            ),
        }
        return makers[which]()

    def speculator(
        self, target: lb.Context, drafter: lb.Drafter | None, **config: object
    ) -> lb.Speculator:
        return lb.Speculator(target, drafter, _config(config))

    def generate(
        self,
        speculator: lb.Speculator,
        prompt: Prompt | lb.Branch,
        n: int,
        settings: Settings | None = None,
        *,
        stop: Sequence[str] = (),
        grammar: str | Mapping[str, object] | None = None,
        top: int = 0,
    ) -> Said:
        """Run a generation to its end; a branch has its own settings."""
        generation = speculator.generate(
            prompt,
            max_tokens=n,
            sampling=None if settings is None else self.params(settings),
            grammar=self.grammar(grammar),
            stop=stop,
            top_logprobs=top,
        )
        said = Said.of(generation)
        said.finish = generation.finish_reason
        return said

    def session(
        self,
        target: lb.Context,
        prompt: Prompt | lb.Branch,
        turns: Sequence[lb.Drafter | None],
        n: int,
        settings: Settings | None,
        *,
        stop: Sequence[str] = (),
        grammar: str | Mapping[str, object] | None = None,
        **config: object,
    ) -> Said:
        """Generate with a session, token by token, each time with the next of the drafters."""
        said = Said()
        with lb.InferenceSession(
            target,
            prompt,
            sampling=None if settings is None else self.params(settings),
            grammar=self.grammar(grammar),
            config=_config(config),
            max_tokens=n,
            stop=stop,
        ) as session:
            turn = 0
            while (event := session.next_token(turns[turn % len(turns)])) is not None:
                said.hear(event)
                turn += 1
            said.finish = session.finish_reason
        return said

    # -- the engine --------------------------------------------------------------------------------

    def request(
        self, prompt: Prompt, settings: Settings | None = None, **options: object
    ) -> lb.Request:
        grammar = options.pop("grammar", None)
        assert grammar is None or isinstance(grammar, (str, Mapping))
        return lb.Request(
            prompt,
            sampling=None if settings is None else self.params(settings),
            grammar=self.grammar(grammar),
            **options,  # type: ignore[arg-type]
        )

    def engine(
        self,
        target: lb.Context,
        drafter: lb.Drafter | None,
        settings: Settings,
        n: int,
        **config: object,
    ) -> lb.Engine:
        """Return an engine with a seed of its own; requests may have none."""
        sampling = self.params(settings)
        unseeded = {f: getattr(sampling, f) for f in sampling.__dataclass_fields__} | {"seed": None}
        return lb.Engine(
            target,
            drafter,
            _config(config),
            sampling=lb.SamplingParams(**unseeded),
            max_tokens=n,
            seed=self.seed(5),
        )

    @staticmethod
    def run(engine: lb.Engine, requests: Sequence[lb.Request | str]) -> list[Said]:
        """Return each text, in the order of the requests and their samples."""
        heard: dict[tuple[str, int], Said] = {}

        def on_event(event: lb.Event) -> None:
            said = heard.setdefault((event.id, event.sample), Said())
            if event.emitted is not None:
                said.hear(event.emitted)

        results = engine.generate(requests, on_event=on_event)
        texts = []
        for result in results:
            said = heard[result.id, result.sample]
            assert said.tokens == result.tokens
            said.text, said.finish = result.text, result.finish_reason
            texts.append(said)
        return texts


class Custom(NullState, lb.Drafter):
    """A user's drafter: it proposes by position, or draws from one distribution."""

    name = "custom"

    def __init__(
        self, token: Callable[[int], int] | None, distribution: lb.Distribution | None
    ) -> None:
        self._token = token
        self._distribution = distribution

    def check(self, target: lb.Model) -> None:
        """Accept any target."""

    def start(self, target: lb.speculative.Text, rule: str) -> DraftState:
        return self

    def propose(self, tokens: Sequence[int], length: DraftLength, limit: int) -> Draft:
        start, n = len(tokens), 0
        length.consider(self.name)
        while n < limit and length.goes_on(n, 1.0):
            n += 1
        places = range(start, start + n)
        if self._token is not None:
            return Draft([self._token(place) for place in places], drafter=self.name)
        source = self._distribution
        assert source is not None
        drawn = [source.draw(99, place) for place in places]
        return Draft(drawn, [source] * n, entropies=[1.0] * n, drafter=self.name)
