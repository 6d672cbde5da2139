"""Random programs on one context, with everything that may use it, and with functions that use it again.

A program has one user or two, each in a thread of its own. A user starts, forks, extends and prunes
branches, completes prompts, chats, searches, and runs engines, agents, sessions and speculators, in a
cache so small that it becomes full. Streams stay open while other things happen. The functions of the
user (constraints, processors, drafters, tools, rewards, listeners) call the same context, and some raise.
Each text must be what it is alone: in an exact context token for token and with the same
log-probabilities, elsewhere within rounding. Nothing that is asserted depends on when a thread runs.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager, suppress
from itertools import count
from random import Random
from typing import Any, cast

import numpy as np
from engine_runs import heard

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams, search
from llamabranch.agents import Report, Step
from llamabranch.errors import (
    CapacityError,
    DecodeInterruptedError,
    LlamaBranchError,
    UsageError,
)

N_CELLS, N_SEQ = 384, 6
CONFIG = lb.SpeculativeConfig(draft_k=3)  # "auto" depends on times
ROUNDING = 0.05  # of the total variation of two distributions, and mostly of a log-probability
AGENT_TOKENS = 80
# Calls cost few tokens: functions are not described.
TEMPLATE = (
    "{% if tools %}+{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    '<call>{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}</call>'
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

Tokens = Sequence[int]
Use = Callable[[], object]
Pieces = Generator[None, None, None]  # something that a user does, with pauses


class Fault(Exception):
    """Raised by functions of a user."""


def root(error: BaseException | None) -> BaseException | None:
    """Return the exception that led to an error."""
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_raised(error: BaseException | None) -> bool:
    """Return whether an error comes from what a program raises itself."""
    return isinstance(root(error), RAISED) or any(
        f"raised {each.__name__}(" in str(error) for each in RAISED
    )


def same_logits(tokens: Any, logits: Any) -> Any:
    """A logits processor that changes nothing: the texts of those that use the context are its texts."""
    return logits


def agent(target: Context | lb.AsyncEngine, seed: int, use: Use = lambda: None) -> lb.Agent:
    """Return an agent that must call a function once, and then answers."""

    def work() -> str:
        use()
        return "done"

    return lb.Agent(
        target, tools=[work], tool_choice="required", parallel_tool_calls=False, max_turns=2,
        max_tokens=AGENT_TOKENS, temperature=0.8, seed=seed,
    )  # fmt: skip


def transcript(report: Report) -> tuple[Any, ...]:
    calls = [
        call._replace(id="") for call in report.calls
    ]  # an id depends on the place of a sample
    return report.tokens, report.text, calls, report.finish_reason


RAISED = Fault, KeyboardInterrupt, DecodeInterruptedError  # what a program raises itself


class Alone:
    """What texts are in a context that nothing else uses; answers are kept. Any thread may ask.

    Args:
        ctx: that context.
        rounding: how much a log-probability may differ where a context is not exact.
    """

    def __init__(self, ctx: Context, rounding: float = ROUNDING) -> None:
        self.ctx, self.rounding = ctx, rounding
        self._lock = threading.Lock()
        self._texts: dict[tuple[Any, ...], list[int]] = {}
        self._reports: dict[tuple[str, int], Report] = {}

    def text(self, prompt: Tokens, sampling: SamplingParams, n: int) -> list[int]:
        """Return the first ``n`` tokens after ``prompt``, fewer if the text ends before."""
        key = (*prompt, -1, repr(sampling), n)
        with self._lock:
            if key not in self._texts:
                with Branch.start(self.ctx, list(prompt), sampling=sampling) as branch:
                    self._texts[key] = branch.generate(n).finish().tokens
            return self._texts[key]

    def report(self, task: str, seed: int) -> Report:
        """Return the report of `agent`."""
        with self._lock:
            if (task, seed) not in self._reports:
                self._reports[task, seed] = agent(self.ctx, seed).run(task)
            return self._reports[task, seed]

    def logprobs(self, prompt: Tokens, tokens: Tokens) -> list[float]:
        """Return the log-probability of each of ``tokens`` after ``prompt``."""
        with self._lock, Branch.start(self.ctx, list(prompt)) as branch:
            return [score.logprob for score in branch.score(list(tokens))]

    def log_probs(self, tokens: Tokens) -> Any:
        """Return the log-probabilities of all tokens after ``tokens``."""
        with self._lock, Branch.start(self.ctx, list(tokens)) as branch:
            return branch.log_probs()


class User:
    """What one thread does.

    Args:
        program: the program, with what its users share.
        seed: of the choices.
    """

    def __init__(self, program: Program, seed: float) -> None:
        self.program, self.random = program, Random(seed)
        self.ctx, self.alone, self.tally = program.ctx, program.alone, Counter[str]()
        self.thread = threading.current_thread()
        self.failure: BaseException | None = None
        self.branches: list[Branch] = []
        self.open: list[Pieces] = []
        self.agents: list[Pieces] = []  # those of `open` that are an agent's
        self.engines: dict[Engine, list[lb.Event]] = {}  # with the events so far
        self.added: dict[Engine, list[Request]] = {}
        self.chat = lb.Chat(self.ctx, drafter=None, max_tokens=4, seed=self.random.randrange(9))
        self.may_raise = self.random.random() < 0.5
        self.is_over = False  # whether texts that end now are no longer compared
        self.busy = threading.RLock()  # one function at a time uses the context
        self.depth = 0
        self.reopen()
        self.acts: list[Callable[[], object]] = [
            self.start, self.on_a_branch, self.on_a_branch, self.on_a_branch, self.complete, self.say,
            self.serve, self.serve, self.serve, self.generate_all, self.look, self.begin, self.begin,
            self.begin, self.go_on, self.go_on, self.go_on, self.run_tasks, self.reopen, self.ask,
        ]  # fmt: skip

    # -- arguments -----------------------------------------------------------------------------------

    def tokens(self, most: int = 60) -> list[int]:
        """Return a prompt; many prompts have a beginning in common."""
        n = min(self.ctx.n_vocab, 200) - 10
        a, stem = self.random.randrange(20), self.random.randrange(3)
        shared = [5 + (stem * 31 + i * 7) % n for i in range(self.random.randint(1, most))]
        return shared + [5 + (a * 17 + i) % n for i in range(self.random.randrange(4))]

    def settings(self) -> dict[str, Any]:
        """Return sampling settings; some have a processor that uses the context."""
        settings: dict[str, Any] = {"seed": self.random.randrange(9), "temperature": 0.8}
        settings |= self.random.choice(
            [{}, {"temperature": 0.0}, {"top_k": 20}, {"repeat_penalty": 1.2}]
        )
        if self.random.random() < 0.4:
            use = self.use()
            settings["logits_processor"] = lambda tokens, logits: (use(), logits)[1]
        return settings

    def plain(self, sampling: SamplingParams) -> SamplingParams:
        """Return the settings with a processor that does nothing."""
        has_processor = sampling.logits_processor is not None
        return sampling.replace(logits_processor=same_logits if has_processor else None)

    def drafter(self) -> lb.Drafter | None:
        """Return a drafter, or None; each proposes many tokens that are rejected."""
        kind, use = self.random.randrange(6), self.use()

        def propose(tokens: list[int], n: int) -> list[int]:
            use()
            return [tokens[-1]] * min(n, 3)

        if kind == 0:
            return None
        if kind == 1:
            return lb.SuffixDrafter()
        if kind < 4 or not self.program.drafters:
            return lb.FunctionDrafter(propose)
        return self.random.choice(self.program.drafters)

    def options(self) -> dict[str, Any]:
        """Return options by which a request uses the context."""
        kind, use = self.random.randrange(4), self.use()
        name = f"{'parent_' * self.random.randrange(2)}session_id"
        options: dict[str, Any] = {"ttl": self.random.choice([0, 600])}
        options |= {"session_id": self.random.choice("abc"), name: self.random.choice("abc")}
        if kind == 0:
            options["constraint"] = lambda text: use() is None
        elif kind == 1:
            options["on_prompt_progress"] = lambda progress: use()
        return options

    def request(self) -> Request:
        """Return a request; some have a prompt that never fits."""
        sampling, use = SamplingParams(**self.settings()), self.use()

        def on_round(trace: object) -> None:
            use()

        prompt = self.tokens()
        if self.random.random() < 0.05:
            prompt = [5] * (self.ctx.n_ctx_seq + self.random.randint(1, 9))
        request = Request(
            prompt, id=f"request {next(self.program.numbers)}", max_tokens=self.random.randint(1, 8),
            sampling=sampling, n=self.random.choice([1, 1, 3]), priority=self.random.randrange(2),
            on_round=on_round if self.random.random() < 0.5 else None,
            prompt_logprobs=0 if self.random.random() < 0.1 else None, **self.options(),
        )  # fmt: skip
        self.program.requests[str(request.id)] = request
        return request

    # -- functions of the user -----------------------------------------------------------------------

    def use(self) -> Use:
        """Return a function that uses the context now and then; any thread may call it.

        Its choices do not depend on those of others.
        """
        random = Random(self.random.random())
        return lambda: self.meddle(random)

    def meddle(self, random: Random) -> None:
        """Use the context, now and then. Functions that are called meanwhile do it more rarely."""
        if self.is_over or not self.busy.acquire(blocking=False):
            return
        outer, self.random, self.depth = self.random, random, self.depth + 1
        try:
            if random.random() < (0.4, 0.1, 0)[min(self.depth, 3) - 1]:
                self.tally["used inside"] += 1
                self.use_context()
        except (CapacityError, UsageError) as error:
            self.tally[type(error).__name__] += 1
        finally:
            self.random, self.depth = outer, self.depth - 1
            self.busy.release()

    def use_context(self) -> None:
        """Do something that every function may do."""
        kind, is_own = self.random.randrange(12), threading.current_thread() is self.thread
        engines = [*self.random.choice(self.program.users).engines]
        if kind == 0 and self.branches:
            self.random.choice(self.branches).score(self.tokens(4))
        elif kind == 1:
            self.complete(n_prompts=2, max_tokens=2)
        elif kind == 2 and self.branches:
            self.random.choice(self.branches).fork().prune()
        elif kind == 3:
            with Branch.start(self.ctx, self.tokens(30)) as branch:
                branch.generate(2).finish()
        elif kind == 4 and engines:
            self.add_request(self.random.choice(engines))
        elif kind == 5:
            self.abort(engines)
        elif kind == 6 and is_own:
            self.go_on(1, is_inside=True)
        elif kind == 8 and is_own and self.engines:  # refused if it is inside a step of this engine
            self.step(self.random.choice([*self.engines]))
        elif kind == 9 and self.branches:
            search.vote(self.random.choice(self.branches), lambda text: text[:1], 2, 2, seed=3)
        elif kind == 10 and is_own and self.ctx.n_seq_free:
            self.chat.send("Again").finish()
        elif kind in (7, 11) and self.may_raise:
            self.raise_something(is_own=is_own)

    def raise_something(self, *, is_own: bool) -> None:
        kind = self.random.randrange(4)
        if kind == 0:
            self.ctx.interrupt()
        elif kind == 1 or not is_own:
            raise Fault
        elif kind == 2 and self.thread is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt

    # -- comparisons ---------------------------------------------------------------------------------

    @property
    def is_exact(self) -> bool:
        return self.ctx.capabilities.exact and self.ctx.kv_cache.disorders == 0

    def check(self, prompt: Tokens, emitted: Sequence[lb.Produced]) -> None:
        """Compare log-probabilities of generated tokens with those of the same tokens alone."""
        drawn = [produced for produced in emitted if not produced.is_stop]
        if drawn:
            tokens = [produced.token for produced in drawn]
            self.compare([produced.logprob for produced in drawn], prompt, tokens)

    def compare(self, found: list[float], prompt: Tokens, tokens: Tokens) -> None:
        """Compare log-probabilities of ``tokens`` after ``prompt``."""
        expected = self.alone.logprobs(prompt, tokens)
        self.tally["comparisons"] += len(found)
        if self.is_exact:
            assert found == expected, (prompt, tokens, found, expected)
        else:
            rounding = self.alone.rounding
            assert np.allclose(found, expected, rtol=0, atol=rounding), (found, expected)

    def check_text(
        self, prompt: Tokens, sampling: SamplingParams, emitted: Sequence[lb.Produced], n: int
    ) -> None:
        """Compare a text with the text of the same prompt and seed alone."""
        self.check(prompt, emitted)
        if n and self.is_exact:
            tokens = [produced.token for produced in emitted if not produced.is_stop]
            expected = self.alone.text(prompt, self.plain(sampling), n)
            # A constraint lets no text end inside a character, so a text may be longer than it is alone.
            assert tokens[: len(expected)] == expected[: len(tokens)], (prompt, tokens, expected)

    @contextmanager
    def checking(
        self, prompt: Tokens, sampling: SamplingParams, emitted: Sequence[lb.Produced], n: int
    ) -> Iterator[None]:
        """Compare a text when the block ends, or is closed before."""
        try:
            yield
        except GeneratorExit:
            if not self.is_over:
                self.check_text(prompt, sampling, emitted, n)
            raise
        self.check_text(prompt, sampling, emitted, n)

    def check_branch(self, branch: Branch) -> None:
        """Compare the distribution after a branch with that after the same tokens alone."""
        if branch.state in ("pruned", "empty"):
            return
        found = branch.log_probs()
        expected = self.alone.log_probs(branch.tokens)
        self.tally["comparisons"] += 1
        if self.is_exact:
            assert np.array_equal(found, expected), branch
        else:
            assert np.abs(np.exp(found) - np.exp(expected)).sum() / 2 < ROUNDING, branch

    def check_result(
        self, result: lb.Result, prompt: Tokens, sampling: SamplingParams, n: int
    ) -> None:
        self.tally[result.finish_reason] += 1
        assert self.may_end_so(result.finish_reason, result.error), result.error
        if len(prompt) > self.ctx.n_ctx_seq:
            self.tally["never fits"] += 1
            assert not result.tokens
            return
        self.check_text(prompt, sampling.replace(seed=result.seed), result.emitted, n)

    def may_end_so(self, reason: str, error: BaseException | None) -> bool:
        """Return whether a program may end a text so."""
        if reason in ("capacity", "error"):
            is_full = reason == "capacity" and isinstance(root(error), CapacityError)
            return is_full or is_raised(error) or self.ctx.closed
        return reason in ("length", "stop", "cancelled")

    def check_request(self, result: lb.Result) -> None:
        """Compare a text of a request of this program."""
        request = self.program.requests[result.id]
        assert isinstance(request.prompt, list) and request.sampling and request.max_tokens
        self.check_result(result, request.prompt, request.sampling, request.max_tokens)
        if request.prompt_logprobs is not None and result.tokens:
            _, *scores = result.prompt_logprobs or [None]
            self.tally["scores"] += len(scores)
            found = [score.logprob for score in scores if score is not None]
            assert len(found) == len(request.prompt) - 1
            if found:
                self.compare(found, request.prompt[:1], request.prompt[1:])

    def check_report(self, report: Report, task: str) -> None:
        """Compare an agent's conversation."""
        self.tally["reports"] += 1
        self.tally["calls"] += len(report.calls)
        assert report.finish_reason == "turns" or self.may_end_so(
            report.finish_reason, report.error
        ), report
        if self.is_exact and report.exact:
            alone = self.alone.report(task, report.seed)
            if report.finish_reason == alone.finish_reason:
                assert transcript(report) == transcript(alone)
            else:
                assert report.tokens == alone.tokens[: len(report.tokens)]

    # -- branches ------------------------------------------------------------------------------------

    def start(self) -> None:
        sampling, use = SamplingParams(**self.settings()), self.use()
        progress = (lambda progress: use()) if self.random.random() < 0.3 else None
        self.branches.append(
            Branch.start(self.ctx, self.tokens(), sampling=sampling, on_prompt_progress=progress)
        )

    def on_a_branch(self) -> None:
        if not self.branches:
            return self.start()
        branch, use = self.random.choice(self.branches), self.use()
        kind = self.random.randrange(12)
        if kind == 0:
            self.branches.append(branch.fork())
        elif kind == 11 and branch.parent is not None:
            branch.promote()
        elif kind == 1:
            branch.extend(self.tokens(8))
        elif kind == 2:
            progress = (lambda progress: use()) if self.random.random() < 0.5 else None
            branch.append(self.tokens(60), on_prompt_progress=progress)
        elif kind == 3:
            branch.rewind(self.random.randint(1, branch.position))
        elif kind == 4:
            branch.prune_subtree()
        elif kind == 5:
            before, tokens = branch.tokens, self.tokens(8)
            found = [score.logprob for score in branch.score(tokens)]
            assert branch.tokens == before
            self.compare(found, before, tokens)
        elif kind == 6:
            branch.resample(SamplingParams(**self.settings()))
        elif kind == 7:
            self.branches.append(Branch.restore(self.ctx, branch.snapshot()))
        elif kind == 8:
            self.ctx.interrupt()
            branch.extend(self.tokens(40))
        else:
            self.generate(branch)
        return None

    def generate(self, branch: Branch) -> None:
        before, sampling, use = branch.tokens, branch.sampling, self.use()
        n, n_taken = self.random.randint(1, 8), self.random.randint(1, 16)
        constraint = (lambda text: use() is None) if self.random.random() < 0.3 else None
        generation = branch.generate(
            n, drafter=self.drafter(), config=CONFIG, constraint=constraint
        )
        try:
            for _ in zip(range(n_taken), generation, strict=False):
                use()
        finally:
            generation.close()
            assert self.ctx.closed or branch.tokens[len(before) :] == generation.tokens
        self.check_text(before, sampling, generation.emitted, n)

    def look(self) -> None:
        """Search from a branch, which must not change."""
        if not self.branches:
            return self.start()
        branch, use = self.random.choice(self.branches), self.use()
        before, kind = branch.tokens, self.random.randrange(3)
        try:
            if kind == 0:
                search.best_of_n(branch, 3, 4, reward=lambda text: (use(), len(text))[1], seed=3)
            elif kind == 1:
                search.beam_search(branch, 2, 4)
            else:
                search.vote(branch, lambda text: (use(), text[:1])[1], 3, 4, seed=3)
        finally:
            assert self.ctx.closed or branch.tokens == before
        return None

    # -- calls and chats -----------------------------------------------------------------------------

    def call(self, n_prompts: int = 3, max_tokens: int = 6) -> tuple[list[list[int]], Any]:
        """Return prompts, and options of ``complete``."""
        prompts = [self.tokens() for _ in range(self.random.randint(1, n_prompts))]
        options = self.options() | {"n": self.random.randint(1, 3), "max_tokens": max_tokens}
        options |= {"sampling": SamplingParams(**self.settings()), "drafter": self.drafter()}
        return prompts, options

    def complete(self, n_prompts: int = 3, max_tokens: int = 6) -> None:
        if not self.ctx.n_seq_free:  # it would wait for one
            return
        prompts, options = self.call(n_prompts, max_tokens)
        for result, prompt in zip(self.ctx.complete(prompts, **options), prompts, strict=True):
            for choice in result.choices:
                self.check_result(choice, prompt, options["sampling"], max_tokens)

    def say(self) -> None:
        if not self.ctx.n_seq_free:
            return
        messages = [{"role": "user", "content": self.random.choice(["Hi", "A tale", "No"])}]
        settings = self.settings()
        result = self.ctx.chat(messages, max_tokens=5, drafter=self.drafter(), **settings)
        prompt = self.ctx.model.chat_tokens(messages)
        self.check_result(result, prompt, SamplingParams(**settings), 5)

    # -- streams, which stay open while other things happen ------------------------------------------

    def begin(self) -> None:
        kinds = [self.streaming, self.generating, self.speculating, self.session]
        if self.ctx.n_seq_free > 1:  # they would wait for one
            kinds += [self.completing, self.answering, self.chatting, self.working]
        begun = self.random.choice(kinds)
        self.tally[begun.__name__] += 1
        self.open.append(begun())
        if begun == self.working:
            self.agents.append(self.open[-1])
        self.go_on()

    def go_on(self, most: int = 12, *, is_inside: bool = False) -> None:
        """Go on with something that is open; then close it or leave it open.

        Inside a function that the context calls, nobody can wait for an agent, which has a thread.
        """
        usable = [each for each in self.open if not (is_inside and each in self.agents)]
        if not usable:
            return
        pieces = self.random.choice(usable)
        self.open.remove(pieces)
        for _ in range(self.random.randint(1, most)):
            if next(pieces, Fault) is Fault:
                return
        if len(self.open) > 2 or self.random.random() < 0.2:
            pieces.close()
        else:
            self.open.append(pieces)

    def completing(self) -> Pieces:
        prompts, options = self.call()
        with closing(self.ctx.complete(prompts, stream=True, **options)) as events:
            for event in events:
                if event.result is not None:
                    prompt = prompts[int(event.id)]
                    self.check_result(event.result, prompt, options["sampling"], 6)
                yield

    def streaming(self) -> Pieces:
        requests = [self.request() for _ in range(self.random.randint(1, 3))]
        engine = self.random.choice([*self.engines])
        with closing(engine.stream(requests)) as events:
            for event in events:
                if event.result is not None:
                    self.check_request(event.result)
                yield

    def generating(self) -> Pieces:
        sampling = SamplingParams(**self.settings())
        with Branch.start(self.ctx, self.tokens(), sampling=sampling) as branch:
            tokens, emitted = branch.tokens, list[lb.Produced]()
            with self.checking(tokens, sampling, emitted, 12):
                for produced in branch.generate(12, drafter=self.drafter(), config=CONFIG):
                    emitted.append(produced)
                    yield

    def speculating(self) -> Pieces:
        prompt, sampling = self.tokens(), SamplingParams(**self.settings())
        speculator, emitted = lb.Speculator(self.ctx, self.drafter(), CONFIG), list[lb.Produced]()
        with self.checking(prompt, sampling, emitted, 12):
            for produced in speculator.generate(prompt, max_tokens=12, sampling=sampling):
                emitted.append(produced)
                yield

    def session(self) -> Pieces:
        """Every token has another drafter."""
        prompt, sampling = self.tokens(), SamplingParams(**self.settings())
        drafters, emitted = [self.drafter(), self.drafter(), None], list[lb.Produced]()
        with (
            self.checking(prompt, sampling, emitted, 12),
            lb.InferenceSession(
                self.ctx, prompt, sampling=sampling, config=CONFIG, max_tokens=12
            ) as session,
        ):
            while (token := session.next_token(self.random.choice(drafters))) is not None:
                emitted.append(token)
                yield

    def answering(self) -> Pieces:
        kind, chat = self.random.randrange(3), self.chat
        if kind == 0 and chat.exchanges:
            answer = chat.retry()
        elif kind == 1 and chat.exchanges:
            answer = chat.edit(1, "Another question")
        else:
            answer = chat.send(self.random.choice(["Hello", "And then?"]))
        prompt, sampling, emitted = answer.prompt, chat.sampling, list[lb.Produced]()
        with self.checking(prompt, sampling, emitted, 0), closing(answer):
            for event in answer:
                emitted += [] if event.emitted is None else [event.emitted]
                yield

    def chatting(self) -> Pieces:
        messages, sampling = [("user", "A tale")], SamplingParams(**self.settings())
        prompt, options = self.ctx.model.chat_tokens(messages), self.options()
        options |= {"max_tokens": 8, "sampling": sampling, "drafter": self.drafter()}
        with closing(self.ctx.chat(messages, stream=True, **options)) as events:
            for event in events:
                if event.result is not None:
                    self.check_result(event.result, prompt, sampling, 8)
                yield

    def working(self) -> Pieces:
        """An agent, which works on while nobody looks."""
        task = self.random.choice(["Go.", "Work!"])
        steps = agent(self.ctx, self.random.randrange(3), self.use()).stream(task)
        with closing(cast("Generator[Step, None, None]", steps)):
            for step in steps:
                if step.report is not None:
                    self.check_report(step.report, task)
                yield

    # -- engines -------------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Open another engine; close one with whatever it has to do."""
        if len(self.engines) > 1:
            self.close_engine(self.random.choice([*self.engines]))
        parallel = self.random.choice([None, None, 1, 2])
        engine = Engine(
            self.ctx, self.drafter(), CONFIG, seed=self.random.randrange(9), wait_s=0,
            parallel=parallel,
        )  # fmt: skip
        self.engines[engine], self.added[engine] = [], []

    def close_engine(self, engine: Engine) -> None:
        """Close an engine; all its requests have ended, each text once, and as its events say."""
        drain, is_closed = self.random.random() < 0.5, False
        while not is_closed:
            with self.surviving():
                events = engine.close(drain=drain)
                is_closed = True
        self.hear(engine, events)
        texts = heard(self.engines.pop(engine))
        added = self.added.pop(engine)
        # Requests of a context that another thread has closed have no results.
        for request in [] if self.ctx.closed else added:
            results = [texts[str(request.id), i].result for i in range(request.n)]
            assert None not in results, request
            self.tally["requests"] += 1

    def add_request(self, engine: Engine) -> None:
        """Add a request to an engine, which may be another user's."""
        request = self.request()
        engine.add_request(request)
        for user in self.program.users:
            user.added.get(engine, []).append(request)

    def abort(self, engines: Sequence[Engine]) -> None:
        if engines and self.program.requests:
            name = self.random.choice([*self.program.requests.copy()])
            self.random.choice(engines).abort(name)

    def step(self, engine: Engine) -> None:
        self.hear(engine, engine.step())

    def hear(self, engine: Engine, events: Sequence[lb.Event]) -> None:
        self.engines[engine] += events
        for event in events:
            if event.result is not None:
                self.check_request(event.result)

    def serve(self) -> None:
        engine = self.random.choice([*self.engines])
        for _ in range(self.random.choice([0, 1, 3])):
            self.add_request(engine)
        if self.random.random() < 0.2:
            self.abort([engine])
        for _ in range(self.random.randint(1, 8)):
            self.step(engine)

    def generate_all(self) -> None:
        """A job, with a listener that uses the context."""
        requests = [self.request() for _ in range(self.random.randint(1, 3))]
        use, engine = self.use(), self.random.choice([*self.engines])

        def on_event(event: lb.Event) -> None:
            use()

        for result in engine.generate(requests, on_event=on_event):
            self.check_request(result)

    def ask(self) -> None:
        """Run an agent."""
        if self.ctx.n_seq_free < 2:
            return
        task, n = self.random.choice(["Go.", "Work!"]), self.random.randint(1, 2)
        report = agent(self.ctx, self.random.randrange(3), self.use()).run(task, n)
        for each in report.choices:
            self.check_report(each, task)

    def async_engine(self) -> lb.AsyncEngine:
        seed, buffer = self.random.randrange(9), self.random.choice([1, 9])
        return lb.AsyncEngine(self.ctx, self.drafter(), CONFIG, seed=seed, wait_s=0, buffer=buffer)

    def run_tasks(self) -> None:
        """Let tasks share an engine that has a thread of its own; some leave early.

        Another user's tasks and later ones may share it too.
        """
        self.tally["run_tasks"] += 1
        is_shared = self.random.random() < 0.4
        engine = self.program.engine if is_shared else self.async_engine()
        plans = [(self.request(), self.random.randint(1, 30)) for _ in range(3)]
        call = self.tokens(), SamplingParams(**self.settings())
        has_agent, use = self.random.random() < 0.3, self.use()

        async def read(request: Request, most: int) -> None:
            events = engine.generate(request)
            async with aclosing(cast("AsyncGenerator[lb.Event, None]", events)):
                async for event in events:
                    if event.result is not None:
                        self.check_request(event.result)
                    most -= 1
                    if not most:
                        return

        async def complete(prompt: list[int], sampling: SamplingParams) -> None:
            result = await engine.complete(prompt, max_tokens=6, sampling=sampling)
            self.check_result(result, prompt, sampling, 6)

        async def main() -> None:
            try:
                tasks = [*(read(*plan) for plan in plans), complete(*call)]
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                if has_agent:
                    self.check_report(await agent(engine, 1, use).arun("Go."), "Go.")
            finally:
                if not is_shared:
                    await engine.close()
            for error in ended:
                if error is not None:
                    raise error

        asyncio.run(main())

    # -- a life --------------------------------------------------------------------------------------

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Ignore what a program raises itself."""
        try:
            yield
        except BaseException as error:
            if not is_raised(error):
                raise
            self.tally[type(root(error)).__name__] += 1

    def act(self) -> None:
        with self.surviving():
            act = self.random.choice(self.acts)
            is_short = self.may_raise and self.random.random() < 0.1
            seconds = self.random.random() / 100 if is_short else 1000
            with suppress(CapacityError), self.ctx.time_limit(seconds):
                act()
            self.tally["acts"] += 1
            self.branches = [branch for branch in self.branches if branch.state != "pruned"]
            while len(self.branches) * len(self.program.users) > N_SEQ:
                self.branches.pop(0).prune_subtree()
            self.ctx.audit()
            if self.branches:
                with suppress(CapacityError):
                    self.check_branch(self.random.choice(self.branches))

    def run(self, n_acts: int) -> None:
        """Act; keep what is raised. When another user closes the context, this ends."""
        self.thread = threading.current_thread()
        try:
            for _ in range(n_acts):
                self.act()
        except BaseException as error:
            if not (self.ctx.closed and isinstance(root(error), LlamaBranchError)):
                self.failure = error

    def finish(self) -> None:
        """Close everything."""
        for pieces in self.open:
            with self.surviving():  # an interrupt may be left
                pieces.close()
        for engine in [*self.engines]:
            self.close_engine(engine)
        self.chat.close()
        for branch in self.branches:
            branch.prune_subtree()

    def forget(self) -> None:
        """Close nothing, and keep nothing."""
        self.is_over = True
        self.open.clear()
        self.agents.clear()
        self.engines.clear()
        self.added.clear()
        self.branches.clear()
        del self.chat

    def find_closed(self) -> None:
        """Use everything after the context was closed: all that happens is an error, or nothing."""
        self.is_over = True
        uses: list[Callable[[], object]] = [
            *(lambda pieces=pieces: next(pieces, None) for pieces in self.open),
            *(pieces.close for pieces in self.open),
            *(lambda engine=engine: engine.step() for engine in self.engines),
            *(lambda engine=engine: engine.generate("x") for engine in self.engines),
            *(engine.close for engine in self.engines),
            *(lambda branch=branch: branch.extend([5]) for branch in self.branches),
            *(lambda branch=branch: branch.fork() for branch in self.branches),
            *(lambda branch=branch: branch.prune_subtree() for branch in self.branches),
            lambda: self.ctx.complete("x"),
        ]
        for use in uses:
            # A step before may have left a fault.
            with self.surviving(), suppress(LlamaBranchError):
                use()


class Program:
    """One program. ``run`` runs it, and checks that it leaves nothing behind.

    Args:
        ctx: an empty context of `N_SEQ` sequences.
        alone: the texts of the same model.
        seed: of the program.
        tally: counts programs, comparisons, interrupts and what else happened.
        drafters: draft models and heads that texts may use.
    """

    def __init__(
        self,
        ctx: Context,
        alone: Alone,
        seed: int,
        tally: Counter[str],
        drafters: Sequence[lb.Drafter] = (),
    ) -> None:
        self.random = random = Random(seed)
        self.ctx, self.alone, self.tally, self.drafters = ctx, alone, tally, drafters
        self.numbers = count()
        self.requests: dict[str, Request] = {}
        self.users: list[User] = []
        self.users += [User(self, random.random()) for _ in range(random.choice([1, 1, 2]))]
        self.engine = self.users[0].async_engine()  # of all users

    def run(self, n_acts: int = 5) -> None:
        first, *others = self.users
        threads = [threading.Thread(target=user.run, args=[n_acts]) for user in others]
        for thread in threads:
            thread.start()
        first.run(n_acts)
        end = self.random.choice(["finish", "finish", "forget", "close"])
        if end == "close":
            self.ctx.close()
        for thread in threads:
            thread.join()
        for user in self.users:
            if user.failure is not None:
                raise user.failure
            user.may_raise = False
        self.engine.shut_down(drain=end == "finish")
        for user in self.users:
            {"finish": user.finish, "forget": user.forget, "close": user.find_closed}[end]()
            self.tally.update(user.tally)
        self.tally.update(["programs", end])
        if end == "close":
            return
        self.users.clear()
        gc.collect()
        for ctx in (self.ctx, *(ctx for drafter in self.drafters for ctx in drafter.contexts)):
            ctx.audit()
            assert ctx.n_seq_free == ctx.n_seq_max
            if ctx.prefix_cache is not None:
                self.tally["cached"] += ctx.prefix_cache.n_hit_tokens
                self.tally["evicted"] += ctx.prefix_cache.n_evicted
                ctx.prefix_cache.clear()
            usage = ctx.usage()
            assert (usage.cells_used, usage.cells_cached, usage.cells_reserved) == (0, 0, 0)
