"""The settings of a server, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address

from ..arguments import placed, whole
from ..errors import ConfigError
from ..sampling import SamplingParams
from ..sampling.grammar import LinePattern


@dataclass(frozen=True)
class ServeSettings:
    """Where a server listens, who may use it, and its limits.

    Args:
        host, port: where it listens; port 0 = any free one.
        api_keys: clients must send one of them; () = no key is needed.
        allow_origins: origins of web pages that may call it, such as ``https://example.org``; "localhost"
            = every page of this machine, "*" = every page.
        allowed_hosts: host names, besides ``host`` and localhost, that a client may send as ``Host``.
            Numeric addresses pass.
        alias: the name of the model for clients; None = its own.
        parallel: texts at a time; more wait.
        max_queue: how many requests may wait; further ones are refused with 429.
        max_body: the most bytes of a request's body.
        max_choices: the maximum number of texts of one request: prompts times ``n``.
        send_timeout_s: a request is cancelled if its client reads no data for this long.
        shutdown_timeout_s: how long running requests may continue when the server shuts down.
        log_requests: log a line for each request: what it cost and why, or why it was refused.
        max_tokens: the limit for requests that set none; None = until the context is full.
        sampling: defaults for settings that a request leaves out.
        drop_lines: regular expressions. Lines of system prompts that contain a match are left out, so
            that a line that changes with each request does not change the prompt. They are searched in
            the first 100,000 characters; ``^`` and ``$`` are allowed at their ends.

    Raises:
        GrammarError: an expression is invalid, or matches an empty line.
        ConfigError: a value is out of range, or others can reach the address and there is no key.
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
    send_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0
    log_requests: bool = True
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drop_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65_535), ("parallel", 1, None), ("max_queue", 0, None), ("max_body", 1, None),
            ("max_choices", 1, None),
        ):  # fmt: skip
            whole(name, getattr(self, name), least, most)
        for name in ("send_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            if not value >= 0:
                raise ConfigError(f"{name} must be at least 0 seconds, not {value!r}")
        for source in self.drop_lines:
            with placed("drop_lines"):
                LinePattern(source)
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("an API key must be ASCII text that is not empty")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"on {self.host} everybody who can reach this machine could use the server: set a key",
                hint="use --api-key KEY or listen on 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
