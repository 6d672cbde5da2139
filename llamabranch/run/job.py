"""A running request (`Job`) and its texts: each text is a `Choice` with a state.

The texts of a request continue its prompt, or an existing text, as in a search.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from time import perf_counter
from typing import cast

from ..context.logits import LogitsRow, TokenScore
from ..context.progress import PromptProgress, Reading
from ..context.sessions import Session
from ..errors import CapacityError, LlamaBranchError
from ..generation.drafter import NO_STATE, DraftState, SpeculativeStats
from ..generation.output import OutputBuffer, Produced
from ..generation.text import Text
from ..generation.thought import AnswerBuffer, ThoughtBuffer, forced_token
from ..generation.verify import rule_name
from ..model import TurnEvent
from ..model.tools import begun_answer
from ..request.openai import named_pieces
from ..request.record import Record
from ..request.request import Plan, Request
from ..request.result import EngineStats, Event, Result
from ..request.turns import TurnPieces, shown_pieces
from ..sampling import Grammar, Sampler, SamplingParams
from ..sampling.constraint import ConstraintCalls, ConstraintState
from ..sampling.noise import derive_seed, seed_from_text
from .drafting import Drafting
from .running import RunningText

_numbers = count()  # of all jobs
Key = tuple[int, int, int]  # (priority, number of the request, sample), in the order of admission


class State(Enum):
    """The state of a choice."""

    WAITING = "waits in the queue"
    RUNNING = "has a sequence: reads the tokens that the cache lacks, then generates"
    PARKED = "is not continued for now; it keeps its sequence while there is room"
    ENDED = "has its result"


@dataclass(eq=False)
class Caller(ABC):
    """Who asks for texts: one call, an engine, or a search.

    Attributes:
        drafting: how its texts are drafted.
        stats: counts its work; several callers may share it.
        sampling, max_tokens: for requests that do not set their own.
        parallel: the maximum number of texts at a time; None = as many as there are sequences.
        wait_s: how long to wait, in seconds, while other users of the context, such as branches,
            hold all sequences.
        events: the events of its texts that it has not taken yet.
        failure: a step's error that was not raised to it yet. Until then its texts are parked.
    """

    drafting: Drafting
    stats: EngineStats
    parallel: int | None = None
    wait_s: float = 0.0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    events: deque[Told] = field(init=False, default_factory=deque)
    failure: BaseException | None = field(init=False, default=None)

    @abstractmethod
    def run(self) -> Generator[Event, None, None]:
        """Yield the events of all its texts, until they have ended."""

    @abstractmethod
    def abort(self, name: str) -> None:
        """End the texts of a job at the next step."""


class Job:
    """A running request; see ``Context.submit``.

    ``for event in job`` yields its events. Each of its texts is a `Choice`, which is created when the
    text is next in the queue.

    Args:
        request, name: the request and its id.
        caller: who asks.
        seed: the seeds of the texts are derived from it, unless the request has one.
        reports_tokens: whether there are events for tokens; without them log-probabilities are computed
            only if the request asks for them.
        beginning: the text that all texts of the request continue, with the settings and the grammar
            of that text, and the logits after it. The request's prompt is then ignored.

    Raises:
        ConfigError: an empty prompt for a model without a BOS token, or a bad stop string.
        TokenizeError: text or token ids the model does not know.

    Attributes:
        number: how many jobs of the program came before it.
        prompt: the token ids that all its texts begin with.
        model: the model that generates.
        samples: the numbers of the texts that have no choice yet.
        choices: the choices that have no result yet, by the numbers of their texts.
        taken: the numbers of the texts whose result its caller has taken.
        tools: for messages: the functions that its texts may call.
        grammar: the grammar of its texts, which also allows calls.
        is_aborted: whether its texts must end at the next step.
        is_paused: whether its texts are parked.
        thinking: how its texts think before they answer; None = they do not.
        sampling: the settings of its texts; each choice sets its own seed.
        max_tokens: the maximum number of tokens of a text, including its thought; None = no limit.
        seed: the seed of its first text.
        session: the session of the request, if it names one.
        door, dropped: where the request came from, and lines that were left out; see `Record`.
        record: its cost, from its first admission on.
        on_record: called with the record in the step that ends the last text; it must not raise.
        finish_reason: why its first text ended, once a text has ended.
    """

    def __init__(
        self,
        request: Request,
        name: str,
        caller: Caller,
        seed: int,
        *,
        reports_tokens: bool = True,
        beginning: Text | None = None,
    ) -> None:
        self.request = request
        self.beginning = beginning
        self.name = name
        self.caller = caller
        self.number = next(_numbers)
        self.arrival = perf_counter()
        self.ctx = ctx = caller.drafting.ctx
        self.model = model = ctx.model
        if beginning is None:
            plan = request.plan(model)
        else:
            plan = Plan(beginning.shown.copy(), None, None)
        self.prompt, self.thinking, self.grammar, self.tools = plan
        self.samples = deque(range(request.n))
        self.taken: set[int] = set()
        self.choices: dict[int, Choice] = {}
        self.is_aborted = self.is_paused = False
        self.session: Session | None = None
        self.door = "python"
        self.dropped: list[str] = []
        self.record: Record | None = None
        self.on_record: Callable[[Record], object] | None = None
        self.finish_reason = ""
        params = request.sampling or caller.sampling
        self.reports_tokens = reports_tokens
        logprobs = params.logprobs and (reports_tokens or request.top_logprobs is not None)
        self.sampling = params.replace(logprobs=logprobs)
        self.seed = params.drawn_seed(derive_seed(seed, seed_from_text(name)))
        self.max_tokens = caller.max_tokens if request.max_tokens is None else request.max_tokens
        OutputBuffer(self.max_tokens, request.stop)  # raises for a bad stop string
        self._pieces: dict[int, TurnPieces] = {}  # of the turns of its texts
        self._results: list[Result] = []

    @property
    def is_idle(self) -> bool:
        """Whether all its texts have ended."""
        return not (self.choices or self.samples)

    def __iter__(self) -> Iterator[Event]:
        """Yield the events of its caller, which are only this job's if it was submitted by itself."""
        return self.caller.run()

    @property
    def results(self) -> list[Result]:
        """All its texts, by their numbers. Waits until they have ended."""
        for _ in self:
            pass
        return self._results

    def cancel(self) -> None:
        """End its texts at the next step; their results have the text so far."""
        self.caller.abort(self.name)

    def read(self, event: Event) -> list[Event]:
        """Return an event as its caller gets it: for a conversation, with the parts of the turn.

        Events with held-back text may come before it.
        """
        number, result, told, shown = event.sample, event.result, list[TurnEvent](), event.emitted
        pieces, held = self._turn_pieces(number), list[Produced]()
        if pieces is not None and shown is not None:
            told = pieces.feed_token(self.model, shown)
            if pieces.reads_calls:
                *held, shown = shown_pieces(shown, told)
        if result is not None:
            if number not in self.taken:
                insort(self._results, result, key=lambda each: each.sample)
                self.taken.add(number)
            result.choices = self._results
            if pieces is not None:
                self._pieces.pop(number, None)
                is_cut, turn = result.is_cut, result.separate_calls(self.model)
                told = pieces.finish(turn, is_cut=is_cut)
                held = shown_pieces(None, told) if pieces.reads_calls else []
        if told or shown is not event.emitted:
            event = replace(event, emitted=shown, turn=told)
        return [*(Event(self.name, number, each) for each in held), event]

    def _turn_pieces(self, number: int) -> TurnPieces | None:
        """Return the reader of a text's turn; None if the text is not an answer."""
        if self.tools is None:
            return None
        if number not in self._pieces:
            messages, calls = self.request.prompt, self.tools.is_used
            begun, salt = begun_answer(messages) if calls else "", str(len(messages))
            self._pieces[number] = TurnPieces(
                self.tools, salt, begun, eager=self.grammar is not None
            )
        return self._pieces[number]

    @property
    def is_waiting(self) -> bool:
        """Whether one of its texts has never had a sequence. Callable from any thread."""
        choices = list(self.choices.values())
        return bool(self.samples) or any(choice.n_cached is None for choice in choices)

    @property
    def rests(self) -> bool:
        """Whether its texts must not be continued for now."""
        return self.is_paused or self.caller.failure is not None

    @property
    def key(self) -> Key:
        """The key of its next text in the queue."""
        return self.request.priority, self.number, self.samples[0]

    def next_choice(self) -> Choice:
        """Create and return the choice of its next text."""
        choice = Choice(self, self.samples[0])
        self.choices[choice.sample] = choice
        self.samples.popleft()
        return choice


Told = tuple[Job, Event]  # an event, and its job


class Choice:
    """One text of a request, with everything that survives a preemption.

    A preempted choice loses its sequence and cells, but keeps the tokens that it has generated. Once it
    is admitted again, its prompt and these tokens are decoded again, and it continues after them.

    Args:
        job: the request.
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
        error: why these tokens could not be read, or why the choice cannot be served at all.
        shared: the choice with which it shares the cells of its first tokens, and the number of these
            tokens.
        equals: the choices of the request that share its thought. They wait, and get its tokens.
        key: its place in the queue. The running choice with the largest key is preempted first.
        n_cached: prompt tokens that were in the cache when it was first admitted; None before.
        n_unread: tokens of the request's prompt that have never been in the cache so far.
        num_preemptions: how often it was preempted.
        constraint: calls the request's constraint; None without one.
        scores: the scores of the prompt's tokens so far, if the request asks for scores.
        is_announced: False until the first progress report, if the request asks for reports.
    """

    def __init__(self, job: Job, sample: int) -> None:
        request = job.request
        self.job = job
        self.request = request
        self.name = job.name
        self.sample = sample
        self.thought_text = ""
        self.prompt = job.prompt
        self.n_prompt = len(self.prompt)
        self.n_read = self.n_prompt - request.continues
        self._seed = job.seed if sample == 0 else derive_seed(job.seed, sample)
        self.key: Key = request.priority, job.number, sample
        self.thought: list[Produced] = []
        thinking = job.thinking
        self.output = (
            self._answer_output()
            if thinking is None
            else ThoughtBuffer(job.model, thinking, job.max_tokens)
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
        self.shared: tuple[Choice | None, int] = (None, 0)
        self.equals: list[Choice] = []
        self.n_cached: int | None = None
        self.n_unread = self.n_prompt
        self.num_preemptions = 0
        self.scores: list[TokenScore | None] = [None]
        self._reading: Reading | None = None  # only if the request asks for progress
        self.is_announced = True
        self._admitted: float | None = None
        # ``disorders`` of the memory at its admission; -1 = cells were out of order then.
        self._disorders = -1
        self._first: float | None = None
        self._last: float | None = None

    def __repr__(self) -> str:
        n = len(self.output.tokens)
        return f"<Choice {self.name!r} sample {self.sample}, {n} tokens>"

    def _answer_output(self) -> OutputBuffer:
        """Return an empty buffer for the answer. The tokens of the thought count for its limit."""
        request, thinking = self.request, self.job.thinking
        limits = self._n_left, request.stop, request.stop_tokens, request.min_tokens
        if not self.thought or thinking is None or self.job.grammar or request.constraint:
            return OutputBuffer(*limits)
        return AnswerBuffer(self.job.model, thinking.start, *limits)

    @property
    def _n_left(self) -> int | None:
        """The most tokens after its thoughts; None = no limit."""
        n = self.job.max_tokens
        return None if n is None else max(0, n - len(self.thought))

    @property
    def sampling(self) -> SamplingParams:
        """Its settings. Until it has ``min_tokens``, tokens that end the text are forbidden."""
        sampling = self.job.sampling
        bias = sampling.logit_bias
        if len(self.output.tokens) < self.output.min_tokens and not self.shares_thought:
            ends = {*self.job.model.eog_tokens, *self.request.stop_tokens}
            bias = {**bias, **dict.fromkeys(ends, -math.inf)}
        return sampling.replace(logit_bias=bias, seed=self.seed)

    @property
    def seed(self) -> int:
        """The seed of its draws. While it shares a thought, that is the seed of the first text."""
        return self.job.seed if self.shares_thought else self._seed

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that it follows now; None in a thought."""
        return None if self.is_thinking else self.job.grammar

    def new_sampler(self) -> Sampler:
        """Return a sampler with its settings and grammar that has accepted no token.

        Raises:
            GrammarError, ConfigError: the grammar or the settings are invalid.
        """
        return Sampler(self.job.model, self.sampling, self.grammar)

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
        thinking = self.job.thinking
        is_first = self.is_thinking and not self.thought
        return is_first and thinking is not None and thinking.is_shared

    def answer(self) -> list[Told]:
        """Begin the answer if a thought has ended; otherwise do nothing.

        If the answer begins with another thought, that one is continued first, within the budget.

        Some tokens may be forced between the thought and the answer. They are read next. Without
        them, the last token of the thought is read again. So are all tokens that the memory had to
        drop because it cannot be cut at the answer.

        Returns:
            the event that reports the thought's tokens, if events are reported.
        """
        output, thinking = self.output, self.job.thinking
        if not isinstance(output, ThoughtBuffer | AnswerBuffer) or output.ended is None:
            return []
        text, n_kept, forced = output.ended
        kept = output.emitted[:n_kept]
        if isinstance(output, AnswerBuffer):
            kept = [produced._replace(text="", is_thought=True) for produced in kept]
        n_kept += len(self.thought)
        self.thought = [*self.thought, *kept, *map(forced_token, forced)]
        self.thought_text = self._with_thought(text)
        self.prompt = [*self.job.prompt, *(produced.token for produced in self.thought)]
        self.n_read = len(self.prompt)
        if isinstance(output, AnswerBuffer) and thinking is not None:
            left = thinking.budget and max(0, thinking.budget - len(self.thought))
            self.output = ThoughtBuffer(
                self.job.model, replace(thinking, is_open=True, budget=left), self._n_left,
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
        if not self.job.reports_tokens:
            return []
        return self.told(ended_thought=self.thought)

    def _with_thought(self, text: str) -> str:
        """Return the text of its thoughts, with ``text`` as the last one."""
        return "\n\n".join(filter(None, (self.thought_text, text)))

    @property
    def is_reading(self) -> bool:
        """Whether it reads its prompt (after a preemption also the tokens generated so far)."""
        return self.state is State.RUNNING and self.running is None

    def admit(self, sequence: Text, n_cached: int) -> None:
        """Give it a sequence that holds its first ``n_cached`` tokens."""
        self.sequence = sequence
        self.state = State.RUNNING
        if self.job.session is not None:
            self.job.session.begin(sequence)
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
            self.n_unread = max(0, self.n_prompt - n_cached)
            memory = self.job.ctx.kv_cache
            self._disorders = memory.disorders if memory.in_order else -1

    def begin(self) -> list[Produced]:
        """Start to generate once all tokens are read. Return the token that it draws, if any.

        The list is empty if the last token must be decoded first, or if the text ends here.
        """
        request, output, drafting = self.request, self.output, self.job.caller.drafting
        # 1. Find a draft state to fork, so that the drafter reads no token twice.
        rule, parent_state = drafting.config.rule, None
        if self.constraint is not None and not self.is_thinking:
            rule, model = "seeded", self.job.model
            self.text.constrain(
                ConstraintState(self.constraint, model, request.stop, request.stop_tokens)
            )
        source, n_shared = self.shared
        thought, self._thought_running = self._thought_running, None
        if thought is not None and thought.rule == rule and self.grammar is None:
            parent_state, n_shared = thought.state, self.text.n_decoded
        elif (
            source is not None
            and source.running is not None
            and source.running.rule == rule
            and source.running.drafting.drafter is drafting.drafter
            and source.grammar == self.grammar
        ):
            parent_state = source.running.state
        state: DraftState = NO_STATE
        if drafting.drafts and output.finish_reason is None:
            with suppress(CapacityError):  # without room for a state there are no drafts
                if parent_state is None:
                    state = drafting.drafter.start(self.text, rule_name(rule))
                else:
                    state = parent_state.fork(self.text)
        # 2. Let the loop run the text.
        self.running = running = RunningText(
            drafting, self.text, state, rule, self.stats, request.top_logprobs or 0
        )
        if parent_state is not None:
            running.state.observe(n_shared)
        running.on_round = request.on_round
        if thought is not None:
            thought.close()
        # 3. Draw the first token. A choice that was preempted continues after its last token instead.
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
            if sequence is not None and self.job.session is not None:
                self.job.session.end(sequence)
            if sequence is not None and not sequence.ctx.closed:
                if self.job.beginning is None:
                    sequence.keep_cached(self.job.session, is_last=True)
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
        """The prompt and all generated tokens except the last, which the next round decodes.

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
                self.scores.append(token_row.score(token, self.job.model, k))
        n_left, memory = self.n_uncached, self.job.ctx.kv_cache
        if n_left > 0 and memory.n_first(n_left + len(tokens)) == len(tokens):
            memory.mark_before_end(self.text.seq_id)
        row = rows[-1] if rows and not n_left else None
        self.text.append_unscored(tokens, row, self.n_read - start)
        self.n_unread = max(0, min(self.n_unread, self.n_prompt - self.text.n_cached))

    def note_read(self) -> list[Told]:
        """Report how much of ``to_cache`` is in the cache; return the event, if it was requested."""
        self.is_announced = True
        if self._reading is None:
            return []
        progress = self._reading.progress(self.text.n_cached)
        if self.request.on_prompt_progress is not None:
            self.request.on_prompt_progress(progress)
        return self.told(progress=progress) if self.request.prompt_progress else []

    # -- output --------------------------------------------------------------------------------------

    def told(
        self,
        *,
        result: Result | None = None,
        progress: PromptProgress | None = None,
        ended_thought: Sequence[Produced] = (),
    ) -> list[Told]:
        """Return an event of this text; see `Event`."""
        event = Event(self.name, self.sample, None, result, progress, ended_thought=ended_thought)
        return [(self.job, event)]

    def emit(self, produced: Produced) -> list[Told]:
        """Add a token to the output; return the event of its text, if any."""
        job, its, reports = self.job, (self.name, self.sample), self.job.reports_tokens
        # This is one line so that an interrupt between two lines cannot lose an event.
        return [
            (job, Event(*its, t)) for t in self.output.emit(self.output.add(produced)) if reports
        ]

    def break_off(self, reason: str | None = None) -> list[Told]:
        """End its output; return the event of text that was held back, if any."""
        job, its, reports = self.job, (self.name, self.sample), self.job.reports_tokens
        return [
            (job, Event(*its, t))
            for t in self.output.emit(self.output.break_off(reason))
            if reports
        ]

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
        n_unscored = max(1, min(self.request.logprobs_from, self.n_prompt))
        scores = [None] * n_unscored + self.scores[n_unscored:]
        logprobs = None if self.request.top_logprobs is None else emitted
        ctx = self.job.ctx
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
            cached=min(self.n_cached or 0, self.n_prompt),
            unread=self.n_unread,
            num_preemptions=self.num_preemptions,
            stop_reason=self.output.stop_reason,
            error=error,
            queued_s=self._since_arrival(self._admitted),
            first_token_s=self._since_arrival(self._first),
            last_token_s=self._since_arrival(self._last),
            logprobs=logprobs,
            prompt_logprobs=None if self.request.prompt_logprobs is None else scores,
            emitted=tuple(emitted),
            end=self.output.eog,
            exact=is_exact,
            grammar=cast("Grammar | None", self.request.grammar),
            tools=self.job.tools,
            model=self.job.model.name,
            record=self.job.record,
            pieces={} if logprobs is None else named_pieces(self.job.model, logprobs),
        )

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.job.arrival
