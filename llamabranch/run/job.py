"""A request that is run (`Submission`), and its texts: each text is a `Job` with a state.

The texts of a request continue its prompt, or a text that exists already, as in a search.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from time import perf_counter

from ..context.logits import LogitsRow, TokenScore
from ..context.progress import Reading
from ..errors import CapacityError, LlamaBranchError
from ..generation.draft_states import Beginning
from ..generation.drafter import NO_STATE, DraftState, SpeculativeStats
from ..generation.output import OutputBuffer, Produced
from ..generation.text import Text
from ..generation.thought import AnswerBuffer, ThoughtBuffer, forced_token
from ..generation.verify import rule_name
from ..model import is_chat
from ..model.thoughts import plan_thinking
from ..request.openai import named_pieces
from ..request.request import Event, Request, Result
from ..sampling import Grammar, Sampler, SamplingParams
from ..sampling.constraint import ConstraintCalls, ConstraintState
from ..sampling.noise import derive_seed, seed_from_text
from .loop import Loop
from .running import RunningText

__all__ = ["Job", "State", "Submission"]

Key = tuple[int, int, int]  # (priority, number of the request, sample), in the order of admission


class State(Enum):
    """The state of a job."""

    WAITING = "waits in the queue"
    READING = "has a sequence, and reads the tokens that the cache lacks"
    RUNNING = "generates"
    PARKED = "is not continued for now; it keeps its sequence while there is room"
    ENDED = "has its result"


class Submission:
    """A tokenized request. It creates the job of a text when the text is the next in the queue.

    Args:
        request, name: the request and its id.
        number: how many requests came before it.
        loop: runs its texts; ``loop.ctx`` is the context that generates.
        sampling, max_tokens, seed: the engine's values, for a request that does not set its own.
        samples: the numbers of the texts to generate.
        reports_tokens: whether there are events for tokens; without them log-probabilities are computed
            only if the request asks for them.
        beginning: holds the text that all texts of the request continue, with the settings and the
            grammar of that text. The request's prompt is then ignored.

    Raises:
        ConfigError: an empty prompt for a model without a BOS token, or a bad stop string.
        TokenizeError: text or token ids the model does not know.

    Attributes:
        prompt: the token ids that all its texts begin with.
        model: the model that generates.
        samples: the numbers of the texts that have no job yet.
        jobs: the jobs that have no result yet, by the numbers of their texts.
        is_aborted: whether its texts must end at the next step.
        thinking: how its texts begin with a thought; None = they do not.
        sampling: the settings of its texts; each job sets its own seed.
        max_tokens: the most tokens of a text, including its thought; None = no limit.
        seed: the seed of its first text.
    """

    def __init__(
        self,
        request: Request,
        name: str,
        number: int,
        loop: Loop,
        sampling: SamplingParams,
        max_tokens: int | None,
        seed: int,
        samples: Iterable[int],
        *,
        reports_tokens: bool = True,
        beginning: Beginning | None = None,
    ) -> None:
        self.request = request
        self.beginning = beginning
        self.name = name
        self.number = number
        self.arrival = perf_counter()
        self.loop = loop
        self.model = model = loop.ctx.model
        if beginning is not None:
            self.prompt = beginning.text.shown.copy()
        else:
            self.prompt = model.prompt_tokens(request.prompt, parse_special=request.parse_special)
        self.samples = deque(samples)
        self.thinking = request.thinking
        if self.thinking is None and is_chat(request.prompt):
            self.prompt, self.thinking = plan_thinking(model, self.prompt)
        self.jobs: dict[int, Job] = {}
        self.is_aborted = False
        params = request.sampling or sampling
        self.reports_tokens = reports_tokens
        logprobs = params.logprobs and (reports_tokens or request.top_logprobs is not None)
        self.sampling = params.replace(logprobs=logprobs)
        self.seed = params.drawn_seed(derive_seed(seed, seed_from_text(name)))
        self.max_tokens = max_tokens if request.max_tokens is None else request.max_tokens
        OutputBuffer(self.max_tokens, request.stop)  # raises for a bad stop string
        model.check_tokens(request.stop_tokens)

    @property
    def key(self) -> Key:
        """The key of its next text in the queue."""
        return self.request.priority, self.number, self.samples[0]

    def next_job(self) -> Job:
        """Create and return the job of its next text."""
        job = self.job(self.samples[0])
        self.jobs[job.sample] = job
        self.samples.popleft()
        return job

    def job(self, sample: int) -> Job:
        """Return a job for the text of this number, which also determines the seed."""
        return Job(self, sample)


class Job:
    """One text of a request, with everything that survives a preemption.

    A preempted job loses its sequence and cells, but keeps the tokens that it has generated. Once it
    is admitted again, its prompt and these tokens are decoded again, and it continues after them.

    Args:
        submission: the request.
        sample: the number of the text in the request, from 0.

    Attributes:
        prompt: the token ids that its output continues. In an answer they include the thought.
        n_prompt: how many of them are the request's prompt.
        n_read: how many of them count as read. With ``Request.continues``, the rest counts as
            generated.
        thought: the tokens of a thought that has ended, including tokens that were added to end it.
        thought_text: the text of that thought, without tags.
        output: the tokens and the text generated so far. The answer after a thought gets a new one.
        sequence: the text in the cache; None while it waits without a sequence, and once it has
            ended.
        running: the text as the loop runs it; None until the prompt is read.
        stats: counts its rounds.
        state: its current state.
        n_decoded: how many tokens of its prompt the last step has read.
        error: why these tokens could not be read, or why the job cannot be served at all.
        shared: the job with which it shares the cells of its first tokens, and the number of these
            tokens.
        equals: the jobs of the request that share its thought. They wait, and get its tokens.
        key: its place in the queue. The running job with the largest key is preempted first.
        n_cached: prompt tokens that were in the cache when it was first admitted; None before.
        num_preemptions: how often it was preempted.
        constraint: calls the request's constraint; None without one.
        scores: the scores of the prompt's tokens so far, if the request asks for scores.
        is_announced: False until the first progress report, if the request asks for reports.
    """

    def __init__(self, submission: Submission, sample: int) -> None:
        request = submission.request
        self.submission = submission
        self.request = request
        self.name = submission.name
        self.sample = sample
        self.thought_text = ""
        self.prompt = submission.prompt
        self.n_prompt = len(self.prompt)
        self.n_read = self.n_prompt - request.continues
        self._seed = submission.seed if sample == 0 else derive_seed(submission.seed, sample)
        self.key: Key = request.priority, submission.number, sample
        self.thought: list[Produced] = []
        thinking = submission.thinking
        self.output = (
            self._answer_output()
            if thinking is None
            else ThoughtBuffer(submission.model, thinking, submission.max_tokens)
        )
        self.stats = SpeculativeStats()
        constraint = request.constraint
        self.constraint = None if constraint is None else ConstraintCalls(constraint)
        self.state = State.WAITING
        self.sequence: Text | None = None
        self.running: RunningText | None = None
        # After a thought, its ``running`` is kept until the answer runs: the drafter has read it.
        self._thought_running: RunningText | None = None
        self.n_decoded = 0
        self.error: LlamaBranchError | None = None
        self.shared: tuple[Job | None, int] = (None, 0)
        self.equals: list[Job] = []
        self.n_cached: int | None = None
        self.num_preemptions = 0
        self.scores: list[TokenScore | None] = [None]
        self._reading: Reading | None = None  # only if the request asks for progress
        self.is_announced = True
        self._admitted: float | None = None
        self._disorders = (
            -1
        )  # of the memory when it was admitted; -1 = cells were out of order then
        self._first: float | None = None
        self._last: float | None = None

    def __repr__(self) -> str:
        n = len(self.output.tokens)
        return f"<Job {self.name!r} sample {self.sample}, {n} tokens>"

    def _answer_output(self) -> OutputBuffer:
        """Return an empty buffer for the answer. The tokens of the thought count for its limit."""
        request, thinking = self.request, self.submission.thinking
        limits = self._n_left, request.stop, request.stop_tokens, request.min_tokens
        if not self.thought or thinking is None or request.grammar or request.constraint:
            return OutputBuffer(*limits)
        return AnswerBuffer(self.submission.model, thinking.start, *limits)

    @property
    def _n_left(self) -> int | None:
        """The most tokens after its thoughts; None = no limit."""
        n = self.submission.max_tokens
        return None if n is None else max(0, n - len(self.thought))

    @property
    def sampling(self) -> SamplingParams:
        """Its settings. Until it has ``min_tokens``, tokens that end the text are forbidden."""
        sampling = self.submission.sampling
        bias = sampling.logit_bias
        if len(self.output.tokens) < self.output.min_tokens and not self.shares_thought:
            ends = {*self.submission.model.eog_tokens, *self.request.stop_tokens}
            bias = {**bias, **dict.fromkeys(ends, -math.inf)}
        return sampling.replace(logit_bias=bias, seed=self.seed)

    @property
    def seed(self) -> int:
        """The seed of its draws. While it shares a thought, that is the seed of the first text."""
        return self.submission.seed if self.shares_thought else self._seed

    @property
    def grammar(self) -> Grammar | str | None:
        """The grammar that it follows now: None in a thought, and otherwise the request's."""
        return None if self.is_thinking else self.request.grammar

    def new_sampler(self) -> Sampler:
        """Return a sampler with its settings and grammar that has accepted no token.

        Raises:
            GrammarError, ConfigError: the grammar or the settings are invalid.
        """
        grammar = self.grammar
        if isinstance(grammar, str):
            grammar = Grammar(grammar)
        return Sampler(self.submission.model, self.sampling, grammar)

    # -- states --------------------------------------------------------------------------------------

    @property
    def is_thinking(self) -> bool:
        """Whether it generates a thought, or a text that may still become one."""
        return isinstance(self.output, ThoughtBuffer)

    @property
    def ends_thought(self) -> bool:
        """Whether its thought has ended, and an answer follows."""
        output = self.output
        return isinstance(output, ThoughtBuffer | AnswerBuffer) and output.ended is not None

    @property
    def shares_thought(self) -> bool:
        """Whether it generates one thought for all texts of its request, which wait for its end."""
        thinking = self.submission.thinking
        is_first = self.is_thinking and not self.thought
        return is_first and thinking is not None and thinking.is_shared

    def answer(self) -> list[Event]:
        """Begin the answer if a thought has ended; otherwise do nothing.

        If the answer begins with another thought, that one is continued first, within the budget.

        Some tokens may be forced between the thought and the answer. They are read next. Without
        them, the last token of the thought is read again. So are all tokens that the memory had to
        drop because it cannot be cut at the answer.

        Returns:
            the event that reports the thought's tokens, if events are reported.
        """
        output, thinking = self.output, self.submission.thinking
        if not isinstance(output, ThoughtBuffer | AnswerBuffer) or output.ended is None:
            return []
        text, n_kept, forced = output.ended
        kept = output.emitted[:n_kept]
        if isinstance(output, AnswerBuffer):
            kept = [produced._replace(text="", is_thought=True) for produced in kept]
        n_kept += len(self.thought)
        self.thought = [*self.thought, *kept, *map(forced_token, forced)]
        self.thought_text = self._with_thought(text)
        self.prompt = [*self.submission.prompt, *(produced.token for produced in self.thought)]
        self.n_read = len(self.prompt)
        if isinstance(output, AnswerBuffer) and thinking is not None:
            left = thinking.budget and max(0, thinking.budget - len(self.thought))
            self.output = ThoughtBuffer(
                self.submission.model, replace(thinking, is_open=True, budget=left), self._n_left,
                continues=bool(self.thought_text),
            )  # fmt: skip
        else:
            self.output = self._answer_output()
        if self.sequence is not None:
            n = min(self.text.n_cached, self.n_prompt + n_kept, len(self.prompt) - 1)
            self.text.begin_anew(n, self.new_sampler())
            self._reading = None
            self.text.seed = self.seed
            self._thought_running, self.running = self.running, None
            self.shared = (None, 0)
            self.state = State.READING
        if not self.submission.reports_tokens:
            return []
        return [Event(self.name, self.sample, ended_thought=self.thought)]

    def _with_thought(self, text: str) -> str:
        """Return the text of its thoughts, with ``text`` as the last one."""
        return "\n\n".join(filter(None, (self.thought_text, text)))

    @property
    def is_reading(self) -> bool:
        """Whether it reads its prompt (after a preemption also the tokens generated so far)."""
        return self.state is State.READING

    def admit(self, sequence: Text, n_cached: int) -> None:
        """Give it a sequence that holds its first ``n_cached`` tokens."""
        self.sequence = sequence
        self.state = State.READING
        if self.wants_rows:  # cached tokens are before ``logprobs_from`` and get no score
            self.scores += [None] * (n_cached + 1 - len(self.scores))
        self.note_admitted(n_cached)
        if self.request.prompt_progress or self.request.on_prompt_progress is not None:
            self._reading, self.is_announced = Reading(n_cached, self.n_to_cache), False

    def note_admitted(self, n_cached: int) -> None:
        """Note the time and ``n_cached`` of its first admission; a later call does nothing."""
        if self._admitted is None:
            self._admitted = perf_counter()
            self.n_cached = n_cached
            memory = self.submission.loop.ctx.kv_cache
            self._disorders = memory.disorders if memory.in_order else -1

    def begin(self) -> list[Produced]:
        """Start to generate once all tokens are read. Return the token that it draws, if any.

        The list is empty if the last token must be decoded first, or if the text ends here.
        """
        request, output, loop = self.request, self.output, self.submission.loop
        # 1. Find a draft state to fork, so that the drafter reads no token twice.
        rule, parent_state = loop.config.rule, None
        if self.constraint is not None and not self.is_thinking:
            rule, model = "seeded", self.submission.model
            self.text.constrain(
                ConstraintState(self.constraint, model, request.stop, request.stop_tokens)
            )
        source, n_shared = self.shared
        beginning, drafts = self.submission.beginning, True
        thought, self._thought_running = self._thought_running, None
        if beginning is not None:
            parent_state, n_shared = beginning.draft_state(), len(self.submission.prompt)
            drafts = parent_state is not None
        elif thought is not None and thought.rule == rule and self.grammar is None:
            parent_state, n_shared = thought.state, self.text.n_decoded
        elif (
            source is not None
            and source.running is not None
            and source.running.rule == rule
            and source.grammar == self.grammar
        ):
            parent_state = source.running.state
        state: DraftState = NO_STATE
        if drafts and loop.drafts and output.finish_reason is None:
            with suppress(CapacityError):  # without room for a state there are no drafts
                if parent_state is None:
                    state = loop.drafter.start(self.text, rule_name(rule))
                else:
                    state = parent_state.fork(self.text)
        # 2. Let the loop run the text.
        self.running = running = RunningText(
            self.text, state, loop.length.stream(), rule, self.stats, request.top_logprobs or 0
        )
        if parent_state is not None:
            running.state.observe(n_shared)
        running.on_round = request.on_round
        if thought is not None:
            thought.close()
        self.state = State.RUNNING
        # 3. Draw the first token. A job that was preempted continues after its last token instead.
        if len(running.text.tokens) < len(self.prompt) + len(output.tokens):
            last = output.emitted[-1]
            running.text.append(last.token, -last.logprob, None)
            return []
        if output.finish_reason is not None:
            return []
        self.text.unsettle()
        return [] if self.text.is_behind else [running.draw()]

    def release(self) -> None:
        """Free its sequence and its draft states. It can be admitted again."""
        open_texts, sequence = (self.running, self._thought_running), self.sequence
        self.running, self._thought_running, self.shared = None, None, (None, 0)
        try:
            for running in open_texts:
                if running is not None:
                    running.close()
        finally:  # also if the drafter, which may be the user's code, raises an error
            if sequence is not None and not sequence.ctx.closed:
                if self.submission.beginning is None:
                    sequence.keep_cached(is_last=True)
                sequence.release()
            self.sequence = None

    # -- reading -------------------------------------------------------------------------------------

    @property
    def text(self) -> Text:
        """``sequence``, for callers that know that it holds one."""
        if self.sequence is None:
            raise RuntimeError(f"{self!r} holds no sequence")
        return self.sequence

    @property
    def to_cache(self) -> list[int]:
        """The prompt and the generated tokens but the last, which the next round decodes.

        The cache must hold them before that round.
        """
        return [*self.prompt, *self.output.tokens[:-1]]

    @property
    def n_to_cache(self) -> int:
        """How many tokens ``to_cache`` has."""
        return len(self.prompt) + max(0, len(self.output.tokens) - 1)

    @property
    def n_uncached(self) -> int:
        """How many tokens of ``to_cache`` are not in the cache yet."""
        n_cached = 0 if self.sequence is None else self.sequence.n_cached
        return max(0, self.n_to_cache - n_cached)

    @property
    def cells(self) -> list[int]:
        """The tokens whose cells other texts can share: in the cache, or being read into it."""
        return self.to_cache if self.n_uncached else self.text.tokens[: self.text.n_cached]

    @property
    def wants_rows(self) -> bool:
        """True while tokens of the prompt must be scored, because that needs their logits."""
        has_scores = self.request.prompt_logprobs is not None
        return has_scores and len(self.scores) < self.n_prompt

    def unread(self) -> list[int]:
        """Return the tokens of ``to_cache`` that are not in the cache yet."""
        return self.to_cache[self.text.n_cached :]

    def read(self, tokens: Sequence[int], rows: Sequence[LogitsRow]) -> None:
        """Append the first tokens of ``unread``, which were decoded.

        ``rows`` has the logits after each of them if ``wants_rows``, else after the last one if
        that is the last of ``unread``.
        """
        start = self.text.n_cached - len(tokens)
        if start < len(self.text.tokens):  # a decode failed, and the memory had to drop tokens
            self.text.forget(start)
        if self.wants_rows:
            k = self.request.prompt_logprobs or 0
            del self.scores[start + 1 :]
            following = self.prompt[start + 1 : self.n_prompt]
            for token_row, token in zip(rows, following, strict=False):
                self.scores.append(token_row.score(token, self.submission.model, k))
        row = rows[-1] if rows and not self.n_uncached else None
        self.text.append_unscored(tokens, row, self.n_read - start)

    def note_read(self) -> list[Event]:
        """Report how much of ``to_cache`` is in the cache; return the event, if it was requested."""
        self.is_announced = True
        if self._reading is None:
            return []
        progress = self._reading.progress(self.text.n_cached)
        if self.request.on_prompt_progress is not None:
            self.request.on_prompt_progress(progress)
        event = Event(self.name, self.sample, progress=progress)
        return [event] if self.request.prompt_progress else []

    @property
    def place(self) -> object:
        """A value that changes whenever a step makes progress with the job."""
        text = self.sequence
        cached = None if text is None else (text.n_cached, len(text.tokens))
        return self.key, self.state, cached, len(self.thought), len(self.output.tokens)

    # -- output --------------------------------------------------------------------------------------

    def emit(self, produced: Produced) -> list[Event]:
        """Add a token to the output; return the event of its text, if any."""
        reports, key = self.submission.reports_tokens, (self.name, self.sample)
        # This is one line so that an interrupt between two lines cannot lose an event.
        return [Event(*key, t) for t in self.output.emit(self.output.add(produced)) if reports]

    def break_off(self, reason: str | None = None) -> list[Event]:
        """End its output; return the event of text that was held back, if any."""
        reports, key = self.submission.reports_tokens, (self.name, self.sample)
        return [Event(*key, t) for t in self.output.emit(self.output.break_off(reason)) if reports]

    def note_token(self) -> None:
        """Note the time of a new token. At ``min_tokens``, allow the tokens that end the text."""
        self._last = perf_counter()
        if 0 < self.output.min_tokens == len(self.output.tokens):
            self.text.resample(self.sampling)
        if self._first is None:
            self._first = self._last

    def result(self, reason: str, error: LlamaBranchError | None = None) -> Result:
        """Return its result, with ``reason`` as the finish reason."""
        emitted = [*self.thought, *self.output.emitted]
        tokens = [*(produced.token for produced in self.thought), *self.output.tokens]
        n_thought, thought, text = len(self.thought), self.thought_text, self.output.text
        if isinstance(self.output, ThoughtBuffer):  # there is no answer
            thought = self._with_thought(self.output.thought)
            n_thought, text = len(tokens), ""
        self.stats.num_emitted_tokens = len(tokens)
        self.stats.count_constraint(self.constraint)
        grammar = self.request.grammar
        n_unscored = max(1, min(self.request.logprobs_from, self.n_prompt))
        scores = [None] * n_unscored + self.scores[n_unscored:]
        logprobs = None if self.request.top_logprobs is None else emitted
        ctx = self.submission.loop.ctx
        was_in_order = self._admitted is None or self._disorders == ctx.kv_cache.disorders
        is_exact = ctx.capabilities.exact and was_in_order and ctx.kv_cache.in_order
        return Result(
            id=self.name,
            sample=self.sample,
            prompt=self.request.prompt,
            text=text,
            tokens=tokens,
            thought=thought,
            n_thought_tokens=n_thought,
            finish_reason=reason,
            seed=self._seed,
            stats=self.stats,
            num_prompt_tokens=self.n_prompt,
            num_cached_tokens=self.n_cached or 0,
            num_preemptions=self.num_preemptions,
            stop_reason=self.output.stop_reason,
            error=error,
            queued_s=self._since_arrival(self._admitted),
            first_token_s=self._since_arrival(self._first),
            last_token_s=self._since_arrival(self._last),
            logprobs=logprobs,
            prompt_logprobs=None if self.request.prompt_logprobs is None else scores,
            emitted=tuple(emitted),
            exact=is_exact,
            grammar=grammar if isinstance(grammar, Grammar) else None,
            model=self.submission.model.name,
            pieces={} if logprobs is None else named_pieces(self.submission.model, logprobs),
        )

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.submission.arrival
