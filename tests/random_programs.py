"""Random programs on one context, with everything that may use it, and with functions that use it again.

A program starts, forks, extends and prunes branches, completes prompts, chats, searches, and runs an
engine, in a cache so small that it becomes full. Its `logits_processor`s, constraints and callbacks call
the same context, and some raise KeyboardInterrupt. Each text must be what it is alone: in an exact
context token for token and with the same log-probabilities, elsewhere within rounding.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from random import Random
from typing import Any

import numpy as np

import llamabranch as lb
from llamabranch import Branch, Context, Engine, Request, SamplingParams, search
from llamabranch.errors import CapacityError, DecodeInterruptedError, UsageError

N_CELLS, N_SEQ = 384, 6
CONFIG = lb.SpeculativeConfig(draft_k=3)  # "auto" depends on times
ROUNDING = 0.05  # of a log-probability, and of the total variation of two distributions

Tokens = Sequence[int]


def same_logits(tokens: Any, logits: Any) -> Any:
    """A logits processor that changes nothing: the texts of those that call ``meddle`` are its texts."""
    return logits


class Alone:
    """What texts are in a context that nothing else uses; answers are kept.

    Args:
        ctx: that context.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._texts: dict[tuple[Any, ...], list[int]] = {}

    def text(self, prompt: Tokens, sampling: SamplingParams, n: int) -> list[int]:
        """Return the first ``n`` tokens after ``prompt``, fewer if the text ends before."""
        key = (*prompt, -1, repr(sampling), n)
        if key not in self._texts:
            with Branch.start(self.ctx, list(prompt), sampling=sampling) as branch:
                self._texts[key] = branch.generate(n).finish().tokens
        return self._texts[key]

    def logprobs(self, prompt: Tokens, tokens: Tokens) -> list[float]:
        """Return the log-probability of each of ``tokens`` after ``prompt``."""
        with Branch.start(self.ctx, list(prompt)) as branch:
            return [score.logprob for score in branch.score(list(tokens))]

    def log_probs(self, tokens: Tokens) -> Any:
        """Return the log-probabilities of all tokens after ``tokens``."""
        with Branch.start(self.ctx, list(tokens)) as branch:
            return branch.log_probs()


class Program:
    """One program. ``run`` runs it, and checks that it leaves nothing behind.

    Args:
        ctx: an empty context of `N_SEQ` sequences.
        alone: the texts of the same model.
        seed: of the program.
        tally: counts programs, comparisons, interrupts and what else happened.
    """

    def __init__(self, ctx: Context, alone: Alone, seed: int, tally: Counter[str]) -> None:
        self.ctx, self.alone, self.tally = ctx, alone, tally
        self.random = Random(seed)
        self.branches: list[Branch] = []
        self.streams: list[Iterator[lb.Event]] = []
        self.requests: dict[str, Request] = {}
        self.engine = Engine(ctx, self.drafter(), CONFIG, seed=seed, wait_s=0)
        self.has_chat = ctx.model.chat_template is not None
        self.chat = lb.Chat(ctx, None, max_tokens=4, seed=seed) if self.has_chat else None
        self.rounding = ROUNDING
        self.is_exact = ctx.capabilities.exact
        self.is_busy = False
        self.may_interrupt = self.random.random() < 0.5
        self.acts: list[Callable[[], None]] = [
            self.start, self.on_a_branch, self.on_a_branch, self.on_a_branch, self.complete, self.say,
            self.serve, self.serve, self.look,
        ]  # fmt: skip

    # -- arguments ------------------------------------------------------------------------------------

    def tokens(self, most: int = 60) -> list[int]:
        """Return a prompt; many prompts have a beginning in common."""
        n = min(self.ctx.n_vocab, 200) - 10
        a, stem = self.random.randrange(20), self.random.randrange(3)
        shared = [5 + (stem * 31 + i * 7) % n for i in range(self.random.randint(1, most))]
        return shared + [5 + (a * 17 + i) % n for i in range(self.random.randrange(4))]

    def settings(self, *, meddles: bool = True) -> dict[str, Any]:
        """Return sampling settings; ``meddles``: some have a processor that uses the context."""
        settings: dict[str, Any] = {"seed": self.random.randrange(9), "temperature": 0.8}
        settings |= self.random.choice(
            [{}, {"temperature": 0.0}, {"top_k": 20}, {"repeat_penalty": 1.2}]
        )
        if meddles and self.random.random() < 0.4:
            settings["logits_processor"] = self.processor
        return settings

    def plain(self, sampling: SamplingParams) -> SamplingParams:
        """Return the settings without ``meddle``."""
        has_processor = sampling.logits_processor is not None
        return sampling.replace(logits_processor=same_logits if has_processor else None)

    def drafter(self) -> lb.Drafter | None:
        kind = self.random.randrange(3)
        if kind == 0 or not self.ctx.kv_cache.undoes(1):
            return None
        if kind == 1:
            return lb.SuffixDrafter()
        return lb.FunctionDrafter(self.propose)

    def options(self) -> dict[str, Any]:
        """Return options by which a request calls ``meddle``."""
        kind = self.random.randrange(4)
        if kind == 0:
            return {"constraint": self.allows}
        return {"on_prompt_progress": self.heard} if kind == 1 else {}

    # -- functions of the user --------------------------------------------------------------------------

    def processor(self, tokens: Any, logits: Any) -> Any:
        self.meddle()
        return logits

    def propose(self, tokens: Tokens, n: int) -> list[int]:
        self.meddle()
        return [tokens[-1]] * min(n, 3)

    def allows(self, text: str) -> bool:
        self.meddle()
        return True

    def heard(self, progress: object) -> None:
        self.meddle()

    def reward(self, text: str) -> float:
        self.meddle()
        return len(text)

    def meddle(self) -> None:
        """Use the context, now and then; a function that is called meanwhile does nothing."""
        if self.is_busy or self.random.random() < 0.6:
            return
        self.is_busy = True
        try:
            if self.may_interrupt and self.random.random() < 0.05:
                raise KeyboardInterrupt
            self.tally["used inside"] += 1
            kind = self.random.randrange(6)
            if kind == 0 and self.branches:
                self.random.choice(self.branches).score(self.tokens(4))
            elif kind == 1 and self.ctx.n_seq_free:  # without one it would wait
                self.complete(n_prompts=2, max_tokens=2)
            elif kind == 2 and self.branches:
                self.random.choice(self.branches).fork().prune()
            elif kind == 3:
                with Branch.start(self.ctx, self.tokens(30)) as branch:
                    branch.generate(2).finish()
            elif kind == 4:
                self.engine.add_request(self.request())
            elif self.requests:
                self.engine.abort(self.random.choice(list(self.requests)))
        except (CapacityError, UsageError) as error:
            self.tally[type(error).__name__] += 1
        finally:
            self.is_busy = False

    # -- comparisons -----------------------------------------------------------------------------------

    def check(self, prompt: Tokens, emitted: Sequence[lb.Produced]) -> None:
        """Compare log-probabilities of generated tokens with those of the same tokens alone."""
        drawn = [produced for produced in emitted if not produced.is_stop]
        if drawn:
            expected = self.alone.logprobs(prompt, [produced.token for produced in drawn])
            found = [produced.logprob for produced in drawn]
            self.tally["comparisons"] += len(found)
            if self.is_exact and self.ctx.kv_cache.disorders == 0:
                assert found == expected, (prompt, emitted)
            else:
                assert np.allclose(found, expected, rtol=0, atol=self.rounding), (found, expected)

    def check_text(
        self, prompt: Tokens, sampling: SamplingParams, emitted: Sequence[lb.Produced], n: int
    ) -> None:
        """Compare a text with the text of the same prompt and seed alone."""
        self.check(prompt, emitted)
        if self.is_exact and self.ctx.kv_cache.disorders == 0:
            tokens = [produced.token for produced in emitted if not produced.is_stop]
            expected = self.alone.text(prompt, self.plain(sampling), n)
            # A constraint lets no text end inside a character, so a text may be longer than it is alone.
            assert tokens[: len(expected)] == expected[: len(tokens)], (prompt, tokens, expected)

    def check_branch(self, branch: Branch) -> None:
        """Compare the distribution after a branch with that after the same tokens alone."""
        if branch.state in ("pruned", "empty"):
            return
        with self.skipping():
            found = branch.log_probs()
            expected = self.alone.log_probs(branch.tokens)
            self.tally["comparisons"] += 1
            if self.is_exact and self.ctx.kv_cache.disorders == 0:
                assert np.array_equal(found, expected), branch
            else:
                assert np.abs(np.exp(found) - np.exp(expected)).sum() / 2 < self.rounding, branch

    def check_result(
        self, result: lb.Result, prompt: Tokens, sampling: SamplingParams, n: int
    ) -> None:
        self.tally[result.finish_reason] += 1
        assert result.finish_reason in ("length", "stop", "cancelled", "capacity"), result.error
        if result.finish_reason == "capacity":
            assert isinstance(result.error, CapacityError)
        self.check_text(prompt, sampling.replace(seed=result.seed), result.emitted, n)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Ignore a full cache."""
        try:
            yield
        except CapacityError as error:
            self.tally[type(error).__name__] += 1

    # -- what a program does ----------------------------------------------------------------------------

    def start(self) -> None:
        sampling = SamplingParams(**self.settings())
        progress = self.heard if self.random.random() < 0.3 else None
        self.branches.append(
            Branch.start(self.ctx, self.tokens(), sampling=sampling, on_prompt_progress=progress)
        )

    def on_a_branch(self) -> None:
        if not self.branches:
            return self.start()
        branch = self.random.choice(self.branches)
        kind = self.random.randrange(11)
        if kind == 0:
            self.branches.append(branch.fork())
        elif kind == 1:
            branch.extend(self.tokens(8))
        elif kind == 2:
            progress = self.heard if self.random.random() < 0.5 else None
            branch.append(self.tokens(60), on_prompt_progress=progress)
        elif kind == 3:
            branch.rewind(self.random.randint(1, branch.position))
        elif kind == 4:
            branch.prune_subtree()
        elif kind == 5:
            before, tokens = branch.tokens, self.tokens(8)
            found = [score.logprob for score in branch.score(tokens)]
            assert branch.tokens == before
            self.check(
                before,
                [lb.Produced(t, "", False, p, 0.0) for t, p in zip(tokens, found, strict=True)],
            )
        elif kind == 6:
            branch.resample(SamplingParams(**self.settings()))
        elif kind == 7:
            self.branches.append(Branch.restore(self.ctx, branch.snapshot()))
        elif kind == 8:
            self.ctx.interrupt()
            branch.extend(self.tokens(40))
        else:
            self.generate(branch)
        self.branches = [branch for branch in self.branches if branch.state != "pruned"]
        return None

    def generate(self, branch: Branch) -> None:
        before, sampling = branch.tokens, branch.sampling
        n, n_taken = self.random.randint(1, 8), self.random.randint(1, 16)
        constraint = self.allows if self.random.random() < 0.3 else None
        generation = branch.generate(
            n, drafter=self.drafter(), config=CONFIG, constraint=constraint
        )
        try:
            for _ in zip(range(n_taken), generation, strict=False):
                if self.random.random() < 0.1:
                    self.meddle()
        finally:
            generation.close()
            assert branch.tokens[len(before) :] == generation.tokens
        self.check_text(before, sampling, generation.emitted, n)

    def complete(self, n_prompts: int = 3, max_tokens: int = 6) -> None:
        prompts = [self.tokens() for _ in range(self.random.randint(1, n_prompts))]
        settings, n = self.settings(), self.random.randint(1, 3)
        sampling = SamplingParams(**settings)
        options = self.options() if not self.is_busy else {}
        options |= {"n": n, "max_tokens": max_tokens, "sampling": sampling, "drafter": None}
        if not self.is_busy and self.random.random() < 0.3:
            stream = self.ctx.complete(prompts, stream=True, **options)
            n_taken = self.random.randrange(30)
            with closing(stream):
                for _, event in zip(range(n_taken), stream, strict=False):
                    if event.result is not None:
                        prompt = prompts[int(event.id)]
                        self.check_result(event.result, prompt, sampling, max_tokens)
            return
        for result, prompt in zip(self.ctx.complete(prompts, **options), prompts, strict=True):
            for choice in result.choices:
                self.check_result(choice, prompt, sampling, max_tokens)

    def say(self) -> None:
        if self.chat is None:
            return self.complete()
        kind = self.random.randrange(4)
        if kind == 0:
            messages = [{"role": "user", "content": self.random.choice(["Hi", "A tale", "No"])}]
            settings = self.settings()
            result = self.ctx.chat(messages, max_tokens=5, **settings)
            prompt = self.ctx.model.chat_tokens(messages)
            return self.check_result(result, prompt, SamplingParams(**settings), 5)
        if kind == 1 and self.chat.exchanges:
            answer = self.chat.retry()
        elif kind == 2 and self.chat.exchanges:
            answer = self.chat.edit(1, "Another question")
        else:
            answer = self.chat.send(self.random.choice(["Hello", "And then?"]))
        prompt, emitted = answer.prompt, []
        with closing(answer):
            for produced in answer:
                emitted.append(produced)
                if self.random.random() < 0.2:
                    self.meddle()
                if self.random.random() < 0.1:
                    break
        self.check(prompt, emitted)
        return None

    def request(self) -> Request:
        sampling = SamplingParams(**self.settings())
        return Request(
            self.tokens(), max_tokens=self.random.randint(1, 8), sampling=sampling,
            n=self.random.choice([1, 1, 3]), priority=self.random.randrange(2), **self.options(),
        )  # fmt: skip

    def serve(self) -> None:
        if self.random.random() < 0.5:
            request = self.request()
            self.requests[self.engine.add_request(request)] = request
        if self.random.random() < 0.2 and self.requests:
            self.engine.abort(self.random.choice(list(self.requests)))
        for _ in range(self.random.randint(1, 8)):
            self.hear(self.engine.step())

    def hear(self, events: Sequence[lb.Event]) -> None:
        for event in events:
            request = self.requests.get(event.id)  # None: a function has added it
            if event.result is not None and request is not None:
                assert isinstance(request.prompt, list) and request.sampling and request.max_tokens
                self.check_result(
                    event.result, request.prompt, request.sampling, request.max_tokens
                )

    def look(self) -> None:
        """Search from a branch, which must not change."""
        if not self.branches:
            return self.start()
        branch = self.random.choice(self.branches)
        before, kind = branch.tokens, self.random.randrange(3)
        try:
            if kind == 0:
                search.best_of_n(branch, 3, 4, reward=self.reward, seed=3)
            elif kind == 1:
                search.beam_search(branch, 2, 4)
            else:
                search.vote(branch, lambda text: self.reward(text) and text[:1], 3, 4, seed=3)
        finally:
            assert branch.tokens == before
        return None

    def act(self) -> None:
        act = self.random.choice(self.acts)
        try:
            with self.skipping():
                act()
        except KeyboardInterrupt:
            self.tally["interrupts"] += 1
        except DecodeInterruptedError:
            self.tally["interrupted"] += 1
        self.branches = [branch for branch in self.branches if branch.state != "pruned"]
        self.ctx.audit()
        if self.branches:
            self.check_branch(self.random.choice(self.branches))

    def run(self, n_acts: int = 10) -> None:
        for _ in range(n_acts):
            self.act()
        self.may_interrupt = False
        self.hear(self.engine.close(drain=self.random.random() < 0.5))
        if self.chat is not None:
            self.chat.close()
        for branch in self.branches:
            branch.prune_subtree()
        self.branches.clear()
        gc.collect()
        ctx = self.ctx
        ctx.audit()
        assert ctx.n_seq_free == N_SEQ
        if ctx.prefix_cache is not None:
            self.tally["cached"] += ctx.prefix_cache.n_hit_tokens
            self.tally["evicted"] += ctx.prefix_cache.n_evicted
            ctx.prefix_cache.clear()
        usage = ctx.usage()
        assert (usage.cells_used, usage.cells_cached, usage.cells_reserved) == (0, 0, 0)
        self.tally["programs"] += 1
