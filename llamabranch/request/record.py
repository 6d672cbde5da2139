"""What each request has cost, and why its tokens were read."""

from __future__ import annotations

from math import nan
from typing import Literal

from msgspec import Struct, field

Kind = Literal[
    "first", "new", "changed", "evicted", "rewritten", "retokenized", "memory", "scored"
]  # fmt: skip


def per_second(n_tokens: int, seconds: float) -> float:
    """Return tokens per second; nan for no tokens, or no time."""
    return n_tokens / seconds if n_tokens > 0 and seconds > 0 else nan


class Cause(Struct, frozen=True, omit_defaults=True):
    """Why tokens of a prompt were read.

    Attributes:
        kind: "first" (no earlier text begins like the prompt), "new" (it continues an earlier text),
            "changed" (it differs from an earlier request), "evicted" (other texts needed the cells),
            "rewritten" (the chat template or the client writes an earlier answer differently),
            "retokenized" (an earlier answer has the same text, but other tokens), "memory" (the
            model's memory cannot return to the place where the texts part) or "scored" (the request
            asks for the log-probabilities of these tokens).
        n_tokens: how many tokens were read for this reason.
        told: the reason in words.
        start: the position of the first of them.
        compared_with: the number of the earlier request that it is compared with; None = none.
        place: where the texts differ: the message, and the line in it.
        before, after: the text around the first difference, in the earlier request and in this one.
    """

    kind: Kind
    n_tokens: int
    told: str
    start: int = 0
    compared_with: int | None = None
    place: str = ""
    before: str = ""
    after: str = ""

    @property
    def is_again(self) -> bool:
        """Whether the tokens had been read before."""
        return self.kind not in ("first", "new")


class Record(Struct, omit_defaults=True):
    """What a request has cost.

    Attributes:
        number: counts the requests of a context, from 0.
        time: when it was admitted, in seconds since 1970.
        door: where it came from: "messages", "chat", "completions" (endpoints of a server) or "python".
        id: the id of the request.
        session, parent: its session, and the parent of that session.
        num_prompt_tokens, cached, evaluated: tokens of the prompt; those that were not read because
            they were in the cache; those that were read, or will be while it runs. If it ended before
            its prompt was read, the two add up to less.
        generated: tokens of all its texts.
        queued_s, read_s, write_s: seconds until it was admitted, from there to the first token of all
            its texts, or to its end without a token, and from there to the last token.
        finish_reason: of its first text, once all have ended; "" while it runs.
        causes: why ``evaluated`` tokens were read; their ``n_tokens`` add up to that.
        follows: the number of the request whose prompt, or answer, it continues or differs from.
        dropped: lines of its system prompt that were left out.
        hint: what would help; "" if nothing is known.
    """

    number: int
    time: float
    door: str
    id: str
    session: str = ""
    parent: str = ""
    num_prompt_tokens: int = 0
    cached: int = 0
    evaluated: int = 0
    generated: int = 0
    queued_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    finish_reason: str = ""
    causes: list[Cause] = field(default_factory=list)
    follows: int | None = None
    dropped: list[str] = field(default_factory=list)
    hint: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all its texts per second, after the first token."""
        return per_second(self.generated - 1, self.write_s)

    @property
    def reread(self) -> int:
        """How many of its tokens had been read before and were read again."""
        return sum(cause.n_tokens for cause in self.causes if cause.is_again)

    def line(self) -> str:
        """Return the record as one line of a log, with the reasons why tokens were read again."""
        numbers = (
            f"{self.door} {self.session or self.id}: "
            f"{self.num_prompt_tokens:,} token{'s' * (self.num_prompt_tokens != 1)} = "
            f"{self.cached:,} cached + {self.evaluated:,} read in {self.read_s:.1f} s, "
            f"{self.generated:,} generated in {self.write_s:.1f} s"
        )
        told = [cause.told for cause in self.causes if cause.is_again]
        is_whole = self.finish_reason not in ("cancelled", "error", "capacity")
        ended = "" if is_whole else self.finish_reason
        return "  ".join(filter(None, (numbers, *told, self.hint, ended)))
