"""One text of a request and its state: waiting, prefilling its prompt, generating, done."""

from __future__ import annotations

from collections.abc import Sequence

from ..branch import Branch, Produced
from ..branch.output import OutputBuffer
from ..errors import LlamaBranchError
from ..model import Model
from ..sampling import SamplingParams
from ..sampling.noise import derive_seed, seed_from_text
from ..speculative import SpeculativeStats
from ..speculative.round import Stream
from .request import Request, Result

__all__ = ["Job", "jobs_of", "refusal"]


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
        arrival: the order of first admission; the newest job is preempted first.
        n_preempted: how often it was preempted.
        pending: while it holds no sequence: its last token, which is emitted but not yet decoded.
    """

    def __init__(
        self,
        request: Request,
        name: str,
        sample: int,
        prompt: list[int],
        sampling: SamplingParams,
        max_tokens: int | None,
    ) -> None:
        self.request = request
        self.name = name
        self.sample = sample
        self.prompt = prompt
        self.sampling = sampling
        self.output = OutputBuffer(max_tokens, request.stop)
        self.stats = SpeculativeStats()
        self.branch: Branch | None = None
        self.stream: Stream | None = None
        self.shared: tuple[Job | None, int] = (None, 0)
        self.arrival = 0
        self.n_preempted = 0
        self.pending: Produced | None = None

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

    def add(self, emitted: Sequence[Produced]) -> list[Produced]:
        """Add new tokens to the output; return those that have text to show."""
        shown = []
        for one in emitted:
            if self.output.finish_reason is not None:
                break
            text = self.output.add(one)
            if text is not None:
                shown.append(text)
        return shown

    def release(self) -> None:
        """Free the sequences it holds, that of its drafter included."""
        if self.stream is not None:
            self.stream.report()
            self.pending = self.stream.pending
            self.stream.state.close()
            self.stream = None
        if self.branch is not None:
            if not self.branch.ctx.closed:
                self.branch.prune()
            self.branch = None
        self.shared = (None, 0)

    def result(self, reason: str, error: LlamaBranchError | None = None) -> Result:
        """Return its result, with ``reason`` as the finish reason."""
        self.stats.num_emitted_tokens = len(self.output.tokens)
        return Result(
            id=self.name,
            sample=self.sample,
            prompt=self.request.prompt,
            text=self.output.text,
            tokens=list(self.output.tokens),
            finish_reason=reason,
            seed=self.sampling.seed or 0,
            stats=self.stats,
            n_prompt=len(self.prompt),
            n_preempted=self.n_preempted,
            error=error,
            emitted=tuple(self.output.emitted),
        )


def jobs_of(
    request: Request,
    name: str,
    model: Model,
    sampling: SamplingParams,
    max_tokens: int | None,
    seed: int,
    *,
    logprobs: bool,
) -> list[Job]:
    """Return a job for each text of ``request``; settings it leaves out are the engine's.

    Without ``logprobs`` nobody reads the tokens' log-probabilities, and none are computed.

    Raises:
        ConfigError: an empty prompt for a model without a beginning token, or a bad stop string.
        TokenizeError: text or token ids the model does not know.
    """
    prompt = model.prompt_tokens(request.prompt)
    params = request.sampling or sampling
    first = derive_seed(seed, seed_from_text(name)) if params.seed is None else params.seed
    most = max_tokens if request.max_tokens is None else request.max_tokens
    return [
        Job(
            request,
            name,
            sample,
            prompt,
            params.replace(
                seed=first if sample == 0 else derive_seed(first, sample),
                logprobs=params.logprobs and logprobs,
            ),
            most,
        )
        for sample in range(request.n)
    ]


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
