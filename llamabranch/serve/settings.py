"""The settings of a server, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address

from ..arguments import whole
from ..errors import ConfigError
from ..sampling import SamplingParams

__all__ = ["ServeSettings", "is_loopback"]


@dataclass(frozen=True)
class ServeSettings:
    """How a server listens, whom it serves, and its limits.

    Args:
        host, port: where it listens; port 0 = any that is free.
        api_keys: clients must send one of them; none = everybody is served.
        allow_origins: origins of web pages that may call it, such as ``https://example.org``; "localhost"
            = every page of this machine, "*" = every page.
        allowed_hosts: names by which it may be called, besides ``host`` and localhost: what a client
            sends as ``Host``. Addresses pass.
        alias: the name of the model for clients, or several, with commas between; None = its own.
        parallel: texts at a time; more wait.
        max_queue: requests that may wait; one more is refused with 429.
        max_body: bytes of a request's body at most.
        max_choices: texts of one request at most: prompts times ``n``.
        request_timeout_s, send_timeout_s: a request that takes longer, and one whose client takes no
            data for as long, is cancelled.
        shutdown_timeout_s: how long running requests may go on once the server is to end.
        max_branches: nodes of branches at most.
        branch_ttl_s: a tree of branches that nobody has used for as long is deleted.
        metrics, slots: whether /metrics and /slots answer.
        log_requests: print one line for each request.
        max_tokens: the limit of texts whose request has none; None = the context's end.
        seed: of requests that have none; None = another one each.
        sampling: the settings that a request does not give.

    Raises:
        ConfigError: a value out of range, or an address that others can reach and no key.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    alias: str | None = None
    parallel: int = 8
    max_queue: int = 256
    max_body: int = 8 << 20
    max_choices: int = 128
    request_timeout_s: float = 600.0
    send_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0
    max_branches: int = 4096
    branch_ttl_s: float = 3600.0
    metrics: bool = True
    slots: bool = True
    log_requests: bool = False
    max_tokens: int | None = None
    seed: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65_535), ("parallel", 1, None), ("max_queue", 0, None), ("max_body", 1, None),
            ("max_choices", 1, None), ("max_branches", 0, None),
        ):  # fmt: skip
            whole(name, getattr(self, name), least, most)
        for name in ("request_timeout_s", "send_timeout_s", "shutdown_timeout_s", "branch_ttl_s"):
            value = getattr(self, name)
            if not value >= 0:
                raise ConfigError(f"{name} must be at least 0 seconds, not {value!r}")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("an API key must be ASCII text that is not empty")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"on {self.host} everybody who reaches this machine could use the server: give it a key",
                hint="--api-key KEY or --api-key-file FILE, or listen on 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
