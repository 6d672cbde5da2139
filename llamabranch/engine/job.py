"""A request in the engine, and each of its texts: waiting, prefilling its prompt, generating, done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter

from ..branch import Branch, Produced
from ..branch.output import OutputBuffer
from ..context.logits import LogitsRow, TokenScore
from ..errors import LlamaBranchError
from ..model import Model
from ..sampling import Grammar, SamplingParams
from ..sampling.noise import derive_seed, seed_from_text
from ..speculative import SpeculativeStats
from ..speculative.round import Stream
from .request import Request, Result

__all__ = ["Job", "Submission", "refusal"]

Key = tuple[int, int, int]  # priority, number of the request, sample: the order of admission


class Submission:
    """A request with its prompt tokenized; makes a job for each of its texts when its turn comes.

    Args:
        request: the request.
        name: its id.
        number: how many requests came before it.
        model: tokenizes the prompt.
        sampling, max_tokens, seed: the engine's, for what the request leaves out.
        samples: the numbers of the texts to generate.
        logprobs: whether somebody reads the tokens' log-probabilities; otherwise none are computed.

    Raises:
        ConfigError: an empty prompt for a model without a beginning token, or a bad stop string.
        TokenizeError: text or token ids the model does not know.

    Attributes:
        samples: the numbers of the texts that have not begun.
        n_unfinished: how many of its texts have no result yet.
        queued: its texts that have begun and wait: the next one, and those that were preempted.
    """

    def __init__(
        self,
        request: Request,
        name: str,
        number: int,
        model: Model,
        sampling: SamplingParams,
        max_tokens: int | None,
        seed: int,
        samples: Iterable[int],
        *,
        logprobs: bool = True,
    ) -> None:
        self.request = request
        self.name = name
        self.number = number
        self.arrival = perf_counter()
        self.prompt = model.prompt_tokens(request.prompt)
        self.samples = deque(samples)
        self.n_unfinished = len(self.samples)
        self.queued: list[Job] = []
        params = request.sampling or sampling
        logprobs = params.logprobs and (logprobs or request.top_logprobs is not None)
        self._params = params.replace(logprobs=logprobs)
        params_seed = self._params.seed
        self._seed = derive_seed(seed, seed_from_text(name)) if params_seed is None else params_seed
        self._max_tokens = max_tokens if request.max_tokens is None else request.max_tokens
        OutputBuffer(self._max_tokens, request.stop)  # raises for a bad stop string

    @property
    def key(self) -> Key:
        """The place in the queue of its next text."""
        return self.request.priority, self.number, self.samples[0]

    def next_job(self) -> Job:
        """Begin its next text."""
        sample = self.samples.popleft()
        seed = self._seed if sample == 0 else derive_seed(self._seed, sample)
        return Job(self, sample, self._params.replace(seed=seed), self._max_tokens)


class Job:
    """One text of a request, with everything that survives a preemption.

    A preempted job loses its sequence and cells, but not what it has generated: once it is admitted
    again, its prompt and its generated tokens are decoded again, and it continues after them.

    Attributes:
        prompt: its token ids.
        output: the tokens and the text generated so far.
        branch: the sequence it holds; None while it waits.
        stream: its speculative rounds; None until the prompt is decoded.
        shared: the job whose cells its prompt begins with, and the number of those tokens.
        key: its place in the queue; of the running jobs the one with the largest is preempted first.
        n_cached: prompt tokens that were in the cache when it was first admitted; None before.
        n_preempted: how often it was preempted.
        pending: its last token, which is emitted but not yet decoded.
        scores: the ratings of the prompt's tokens so far, if they are asked for.
    """

    def __init__(
        self,
        submission: Submission,
        sample: int,
        sampling: SamplingParams,
        max_tokens: int | None,
    ) -> None:
        request = submission.request
        self.submission = submission
        self.request = request
        self.name = submission.name
        self.sample = sample
        self.prompt = submission.prompt
        self.sampling = sampling
        self.key: Key = request.priority, submission.number, sample
        self.output = OutputBuffer(max_tokens, request.stop)
        self.stats = SpeculativeStats()
        self.branch: Branch | None = None
        self.stream: Stream | None = None
        self.shared: tuple[Job | None, int] = (None, 0)
        self.n_cached: int | None = None
        self.n_preempted = 0
        self.pending: Produced | None = None
        self.scores: list[TokenScore | None] = [None]
        self._details: list[Produced] = []
        self._admitted: float | None = None
        self._first: float | None = None
        self._last: float | None = None

    def __repr__(self) -> str:
        return f"<Job {self.name!r} sample {self.sample}, {len(self.output.tokens)} tokens>"

    @property
    def to_cache(self) -> list[int]:
        """The tokens the cache must hold before it can go on: the prompt, and those generated so far.

        The last generated token is left out: it is pending, and is decoded in the next round.
        """
        return [*self.prompt, *self.output.tokens[:-1]]

    @property
    def n_to_cache(self) -> int:
        """How many tokens ``to_cache`` has."""
        return len(self.prompt) + max(0, len(self.output.tokens) - 1)

    @property
    def n_uncached(self) -> int:
        """How many tokens of ``to_cache`` are not in the cache yet."""
        done = 0 if self.branch is None else self.branch.position
        return self.n_to_cache - done

    @property
    def needs_scores(self) -> bool:
        """True while tokens of the prompt are to be rated: their logits are needed."""
        asked = self.request.prompt_logprobs is not None
        return asked and len(self.scores) < len(self.prompt)

    def score(self, rows: Sequence[LogitsRow], start: int) -> None:
        """Rate the prompt tokens that follow those whose logits are ``rows``, from ``start`` on."""
        k = self.request.prompt_logprobs or 0
        del self.scores[start + 1 :]
        for row, token in zip(rows, self.prompt[start + 1 :], strict=False):
            self.scores.append(row.score(token, k))

    def admit(self, branch: Branch, n_cached: int) -> None:
        """Give it a sequence that holds the first ``n_cached`` tokens of ``to_cache``."""
        self.branch = branch
        if self._admitted is None:
            self._admitted = perf_counter()
            self.n_cached = n_cached

    def add(self, emitted: Sequence[Produced]) -> list[Produced]:
        """Add new tokens to the output; return those that have text to show."""
        shown = []
        for one in emitted:
            if self.output.finish_reason is not None:
                break
            self.pending = one
            text = self.output.add(one)
            if text is not None:
                shown.append(text)
            if self.request.top_logprobs is not None and not one.is_stop:
                self._details.append(one)
        if emitted:
            self._last = perf_counter()
            if self._first is None:
                self._first = self._last
        return shown

    def release(self) -> None:
        """Free the sequences it holds, that of its drafter included."""
        if self.stream is not None:
            self.stream.report()
            self.stream.state.close()
            self.stream = None
        if self.branch is not None:
            if not self.branch.ctx.closed:
                self.branch.sequence.keep_cached(is_last=True)
                self.branch.prune()
            self.branch = None
        self.shared = (None, 0)

    def result(self, reason: str, error: LlamaBranchError | None = None) -> Result:
        """Return its result, with ``reason`` as the finish reason."""
        self.stats.num_emitted_tokens = len(self.output.tokens)
        grammar = self.request.grammar
        return Result(
            id=self.name,
            sample=self.sample,
            prompt=self.request.prompt,
            text=self.output.text,
            tokens=list(self.output.tokens),
            finish_reason=reason,
            seed=self.sampling.seed or 0,
            stats=self.stats,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.n_cached or 0,
            n_preempted=self.n_preempted,
            error=error,
            queued_s=self._since_arrival(self._admitted),
            first_token_s=self._since_arrival(self._first),
            last_token_s=self._since_arrival(self._last),
            logprobs=None if self.request.top_logprobs is None else self._details,
            prompt_logprobs=None if self.request.prompt_logprobs is None else self.scores,
            emitted=tuple(self.output.emitted),
            grammar=grammar if isinstance(grammar, Grammar) else None,
        )

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.submission.arrival


def refusal(request: Request, name: str, sample: int, error: LlamaBranchError) -> Result:
    """Return the result of a text that could not even be queued."""
    params = request.sampling
    return Result(
        id=name,
        sample=sample,
        prompt=request.prompt,
        text="",
        tokens=[],
        finish_reason="error",
        seed=0 if params is None else params.seed or 0,
        stats=SpeculativeStats(),
        error=error,
    )
