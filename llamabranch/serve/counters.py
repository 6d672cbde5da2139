"""Totals over all texts, and the times of one, by llama-server's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine import Result
from ..speculative import SpeculativeStats

__all__ = ["Counters", "timings"]


def timings(result: Result) -> dict[str, object]:
    """Return llama-server's ``timings`` of a text.

    The first token comes from the last decode of the prompt: rates are over the others.
    """
    n_cached, n = result.num_cached_tokens, len(result.tokens)
    n_prompt = result.num_prompt_tokens - n_cached
    prompt_s, predicted_s = seconds(result)
    per_token = predicted_s / (n - 1) if n > 1 else 0.0
    found: dict[str, object] = {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / n_prompt if n_prompt else 0.0,
        "prompt_per_second": n_prompt / prompt_s if prompt_s else 0.0,
        "predicted_n": n,
        "predicted_ms": 1e3 * predicted_s,
        "predicted_per_token_ms": 1e3 * per_token,
        "predicted_per_second": 1 / per_token if per_token else 0.0,
    }
    if result.stats.num_draft_tokens:
        found["draft_n"] = result.stats.num_draft_tokens
        found["draft_n_accepted"] = result.stats.num_accepted_tokens
    return found


def seconds(result: Result) -> tuple[float, float]:
    """Return the seconds of a text's prompt, and those from its first token to its last."""
    first, last = result.first_token_s, result.last_token_s
    if first is None or last is None:
        return 0.0, 0.0
    return first - (result.queued_s or 0.0), last - first


@dataclass
class Counters:
    """Totals over all texts that have ended."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_s: float = 0.0
    predicted_tokens: int = 0
    predicted_s: float = 0.0
    most_tokens: int = 0
    texts: int = 0
    requests: dict[int, int] = field(default_factory=dict)  # by status
    cancelled: int = 0
    speculative: SpeculativeStats = field(default_factory=SpeculativeStats)

    def add(self, result: Result) -> None:
        """Count a text."""
        prompt_s, predicted_s = seconds(result)
        n = len(result.tokens)
        self.texts += 1
        self.prompt_tokens += result.num_prompt_tokens - result.num_cached_tokens
        self.cached_tokens += result.num_cached_tokens
        self.prompt_s += prompt_s
        self.predicted_tokens += n
        self.predicted_s += predicted_s
        self.most_tokens = max(self.most_tokens, result.num_prompt_tokens + n)
        self.speculative.add(result.stats)

    def note_request(self, status: int) -> None:
        """Count a request; status 0 is one whose client went away."""
        if status == 0:
            self.cancelled += 1
        else:
            self.requests[status] = self.requests.get(status, 0) + 1
