"""A request's text on its way: waiting, reading its prompt, running, done."""

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
    """One text of a request, with all that survives a preemption.

    ``prompt`` are its token ids. A preempted job lost its sequence, not its words: it reads prompt and
    words again and goes on from there.
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
        self.transcript = OutputBuffer(max_tokens, request.stop)
        self.stats = SpeculativeStats()
        self.branch: Branch | None = None
        self.stream: Stream | None = None
        self.shared: tuple[Job | None, int] = (
            None,
            0,
        )  # whose cells its prompt begins with, and how many
        self.arrival = 0  # the order of first admission; the newest is preempted first
        self.n_preempted = 0
        self.pending: Produced | None = None  # its last word, while it has no sequence

    def __repr__(self) -> str:
        return f"<Job {self.name!r} sample {self.sample}, {len(self.transcript.tokens)} tokens>"

    @property
    def to_read(self) -> list[int]:
        """What must stand in the cache before it can go on: the prompt, and what it said already.

        The last word is left out if there is one: it is pending, and goes in with the next round.
        """
        return [*self.prompt, *self.transcript.tokens[:-1]]

    @property
    def n_unread(self) -> int:
        """How many of those tokens are not in the cache yet."""
        done = 0 if self.branch is None else self.branch.position
        return len(self.prompt) + max(0, len(self.transcript.tokens) - 1) - done

    @property
    def is_running(self) -> bool:
        """True once the prompt is read."""
        return self.stream is not None

    def say(self, emitted: Sequence[Produced]) -> list[Produced]:
        """Take new tokens in; return those to show."""
        shown = []
        for one in emitted:
            if self.transcript.finish_reason is not None:
                break
            text = self.transcript.add(one)
            if text is not None:
                shown.append(text)
        return shown

    def release(self) -> None:
        """Free the sequences it holds."""
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
        """Return what came of it."""
        self.stats.num_emitted_tokens = len(self.transcript.tokens)
        return Result(
            id=self.name,
            sample=self.sample,
            prompt=self.request.prompt,
            text=self.transcript.text,
            tokens=list(self.transcript.tokens),
            finish_reason=reason,
            seed=self.sampling.seed or 0,
            stats=self.stats,
            n_prompt=len(self.prompt),
            n_preempted=self.n_preempted,
            error=error,
        )


def jobs_of(
    request: Request,
    name: str,
    model: Model,
    sampling: SamplingParams,
    max_tokens: int | None,
    seed: int,
) -> list[Job]:
    """Return a job for each text of ``request``; what it leaves open is taken from the engine's own.

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
            params.replace(seed=first if sample == 0 else derive_seed(first, sample)),
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
