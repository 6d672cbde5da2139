"""A chat of ten turns with a retry and an edit: tokens evaluated, time to the first token of each turn.

python -m benchmarks.chat --target FILE

Both sides render the same chat template and answer greedily, and each keeps its own conversation. Runs
alternate. Each run has a system message of its own, so nothing from an earlier run is cached.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import llamabranch as lb

from . import llama_tools
from .llama_server import LlamaServer
from .report import Settings, emit, number, parser, table, title

TURNS = (
    "Name three colours.", "Which of them is the sky?", "And the grass?", "Name two animals.",
    "Which is the larger one?", "Where does it live?", "What does it eat?", "Name a city.",
    "In which country is it?", "Say goodbye.",
)  # fmt: skip
N_BEFORE_RETRY, N_BEFORE_EDIT, EDITED = 3, 7, 5
EDIT = "Name three animals, please."
# For models without a template of their own, such as the bundled target.
TEMPLATE = "chatml"

Times = list[float]
Outcome = tuple[Times, int, int]  # seconds to each first token, tokens evaluated, distinct tokens


def main() -> None:
    """Measure both on one model."""
    settings = Settings.of(
        parser("a chat against llama-server", runs=5, prompts=1, tokens=32).parse_args()
    )
    with lb.load(
        settings.target, n_ctx=4096, n_seq_max=32, n_threads=settings.threads,
        chat_template=_template(settings.target),
    ) as ctx:  # fmt: skip
        makers: dict[str, Callable[[int], Outcome]] = {
            "Chat": lambda run: by_chat(ctx, f"Session {run}.", settings.tokens)
        }
        server = None
        if settings.peers:
            program = llama_tools.build_server(settings.cache, settings.peers_bin)
            more = [] if ctx.model.chat_template != TEMPLATE else ["--chat-template", TEMPLATE]
            server = LlamaServer(
                program,
                ctx.model.path,
                threads=settings.threads,
                n_ctx=4096,
                more=["-cram", "2048", *more],
            )
            makers["llama-server"] = lambda run: by_server(
                server, f"Session {run}.", settings.tokens
            )
        outcomes_of: dict[str, list[Outcome]] = {name: [] for name in makers}
        try:
            for run in range(settings.runs + 1):  # the first one warms up
                for name, make in makers.items():
                    outcome = make(run)
                    if run:
                        outcomes_of[name].append(outcome)
        finally:
            if server is not None:
                server.close()
        rows, results = [], {}
        for name, outcomes in outcomes_of.items():
            turns = [
                1e3 * statistics.median(times)
                for times in zip(*(o[0] for o in outcomes), strict=True)
            ]
            evaluated, distinct = outcomes[-1][1:]
            results[name] = {
                "first_token_ms": turns, "evaluated_tokens": evaluated,
                "distinct_tokens": distinct or None,
            }  # fmt: skip
            shown = (str(distinct) if distinct else "-", str(evaluated))
            rows.append((name, *shown, number(statistics.median(turns), 1), number(max(turns), 1)))
        columns = (
            "",
            "distinct tokens",
            "evaluated",
            "first token, median of turns, ms",
            "slowest turn",
        )
        table(
            f"A chat of {len(TURNS) + 2} answers, {title(ctx.model)}, {settings.threads} threads",
            columns,
            rows,
        )
        emit("chat", settings, {"target": ctx.model}, results)


def _template(name: str) -> str | None:
    with lb.Model(lb.hub.resolve(name), vocab_only=True) as model:
        return TEMPLATE if model.chat_template is None else None


def by_chat(ctx: lb.Context, system: str, n_tokens: int) -> Outcome:
    """Hold the conversation with `Chat`. At temperature 0 a retry draws the same answer again."""
    times: Times = []
    texts: list[list[int]] = []
    with lb.Chat(ctx, system=system, temperature=0.0, max_tokens=n_tokens, seed=1) as chat:

        def take(begin: Callable[[], lb.chat.Answer]) -> None:
            start = perf_counter()
            answer = begin()
            next(answer, None)
            times.append(perf_counter() - start)
            answer.finish()
            texts.append(answer.prompt + answer.tokens)

        for i, text in enumerate(TURNS):
            take(lambda text=text: chat.send(text))  # type: ignore[misc]
            if i + 1 == N_BEFORE_RETRY:
                take(chat.retry)
            if i + 1 == N_BEFORE_EDIT:
                take(lambda: chat.edit(EDITED, EDIT))
        n_evaluated = chat.stats.num_evaluated_tokens
    distinct = {tuple(text[: i + 1]) for text in texts for i in range(len(text))}
    return times, n_evaluated, len(distinct)


def by_server(server: LlamaServer, system: str, n_tokens: int) -> Outcome:
    """Hold the same conversation over ``/v1/chat/completions``."""
    messages = [{"role": "system", "content": system}]
    times: Times = []
    n_evaluated = 0

    def take() -> None:
        nonlocal n_evaluated
        text, n_read, n, first_s = server.chat(messages, n_tokens)
        messages.append({"role": "assistant", "content": text})
        times.append(first_s)
        n_evaluated += n_read + n

    for i, text in enumerate(TURNS):
        messages.append({"role": "user", "content": text})
        take()
        if i + 1 == N_BEFORE_RETRY:
            messages.pop()
            take()
        if i + 1 == N_BEFORE_EDIT:
            del messages[1 + 2 * (EDITED - 1) :]
            messages.append({"role": "user", "content": EDIT})
            take()
    return times, n_evaluated, 0


if __name__ == "__main__":
    main()
