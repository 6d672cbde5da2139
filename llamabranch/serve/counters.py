"""Totals over all texts, and the times of one by llama-server's names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..engine import Result

__all__ = ["Counters", "timings"]


def timings(result: Result) -> dict[str, object]:
    """Return llama-server's ``timings`` of a text.

    The first token comes from the last decode of the prompt: rates are over the others.
    """
    n_cached, n = result.num_cached_tokens, len(result.tokens)
    n_prompt = result.num_prompt_tokens - n_cached
    prompt_s, predicted_s = _seconds(result)
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


def _seconds(result: Result) -> tuple[float, float]:
    """Return the seconds of a text's prompt, and those from its first token to its last."""
    first, last = result.first_token_s, result.last_token_s
    if first is None or last is None:
        return 0.0, 0.0
    return first - (result.queued_s or 0.0), last - first


@dataclass
class Counters:
    """What the engine's own totals do not tell."""

    texts: int = 0
    cancelled: int = 0  # requests whose client went away
    longest: int = 0  # tokens of a text, prompt included
    prompt_s: float = 0.0
    predicted_s: float = 0.0
    requests: Counter[int] = field(default_factory=Counter)  # by status

    def add(self, result: Result) -> None:
        """Count a text that has ended."""
        prompt_s, predicted_s = _seconds(result)
        self.texts += 1
        self.longest = max(self.longest, result.num_prompt_tokens + len(result.tokens))
        self.prompt_s += prompt_s
        self.predicted_s += predicted_s
