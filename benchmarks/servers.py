"""Servers in processes of their own: ``llamabranch serve`` and llama-server, asked over plain sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

from .llama_tools import SERVER, ToolError, program
from .prompts import PROMPTS
from .report import Settings

__all__ = ["Answer", "Served", "request", "start_ours", "start_theirs"]

_START_S = 120.0


class Answer(NamedTuple):
    """An answer: the text, its number of tokens, and the seconds to the first part and to the end.

    ``n_read``: the prompt tokens that were not cached; 0 if the request did not ask for the usage.
    """

    text: str
    n_tokens: int
    first_s: float
    total_s: float
    n_read: int = 0


class Served:
    """A server in a process of its own; ``close`` ends it."""

    def __init__(self, command: Sequence[object], port: int) -> None:
        self.port = port
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([str(x) for x in command], stdout=quiet, stderr=quiet)
        end = perf_counter() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or perf_counter() > end:
                self.close()
                raise ToolError(f"{command[0]} does not start")
            sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            return asyncio.run(request(self.port, "GET", "/health", None))[0] == 200
        except OSError:
            return False

    async def ask(self, body: Mapping[str, object], begun: asyncio.Event | None = None) -> Answer:
        """Return the answer to a request. The first part of a stream sets ``begun``."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        start = perf_counter()
        if not body.get("stream"):
            _, reply = await request(self.port, "POST", path, body)
            (choice,) = json.loads(reply)["choices"]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            n = int(json.loads(reply)["usage"]["completion_tokens"])
            return Answer(text, n, perf_counter() - start, perf_counter() - start)
        reader, writer = await send(self.port, "POST", path, body)
        first_s, parts = 0.0, []
        with closing(writer):
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    first_s = first_s or perf_counter() - start
                    parts.append(line)
                    if begun is not None:
                        begun.set()
                elif line.startswith(b"data: [DONE]"):
                    break
        total_s = perf_counter() - start
        events = [json.loads(line[6:]) for line in parts]
        text = "".join(
            choice.get("text") or "" for event in events for choice in event.get("choices", ())
        )
        limit = body["max_tokens"]
        n = limit if isinstance(limit, int) else 0
        used = events[-1].get("usage") if events else None
        n_read = (
            used["prompt_tokens"] - used["prompt_tokens_details"]["cached_tokens"] if used else 0
        )
        return Answer(text, n, first_s, total_s, n_read)

    def complete(self, prompt: Sequence[int], n_tokens: int, **more: object) -> dict[str, float]:
        """Let llama-server continue token ids; return its own timings.

        These are ``prompt_n`` and ``prompt_ms`` for the evaluated part of the prompt, and
        ``predicted_n`` and ``predicted_ms`` for the text.

        Raises:
            ToolError: the server refuses.
        """
        body = {"prompt": list(prompt), "n_predict": n_tokens, "cache_prompt": True, **more}
        status, reply = asyncio.run(request(self.port, "POST", "/completion", body))
        if status != 200:
            raise ToolError(f"llama-server refuses: {reply[:300]!r}")
        timings: dict[str, float] = json.loads(reply)["timings"]
        return timings

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


async def send(
    port: int, method: str, path: str, body: Mapping[str, object] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request; return the reader and the writer of the connection."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(head.encode() + data)
    return reader, writer


async def request(
    port: int, method: str, path: str, body: Mapping[str, object] | None
) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    reader, writer = await send(port, method, path, body)
    with closing(writer):
        first = await reader.readline()
        if not first:
            raise ConnectionResetError("no answer")
        status = int(first.split()[1])
        chunked = False
        while (line := await reader.readline()).strip():
            chunked |= line.lower().startswith(b"transfer-encoding: chunked")
        if not chunked:
            return status, await reader.read()
        content = b""
        while n := int(await reader.readline(), 16):
            content += await reader.readexactly(n)
            await reader.readline()
        return status, content


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_ours(settings: Settings, path: Path, *more: object) -> Served:
    """Start ``llamabranch serve``."""
    port = _free_port()
    command = [
        sys.executable, "-m", "llamabranch.cli", "serve", "-m", path, "--port", port,
        "-t", settings.threads, *more,
    ]  # fmt: skip
    return Served(command, port)


def start_theirs(settings: Settings, model: Path, *more: object) -> Served:
    """Start llama-server; without repacked weights if these make it crash, as on processors with AMX."""
    path = program(SERVER, settings.cache, settings.peers_bin)
    for repacks in ((), ("--no-repack",)):
        port = _free_port()
        command = [
            path, "-m", model, "--port", port, "-t", settings.threads, "-tb", settings.threads,
            "--no-ui", "--metrics", *repacks, *more,
        ]  # fmt: skip
        try:
            side = Served(command, port)
        except ToolError:
            if repacks:
                raise
        else:
            try:
                asyncio.run(side.ask({"prompt": " ".join(PROMPTS), "max_tokens": 2}))
                return side
            except OSError:
                side.close()
        print("llama-server crashes with repacked weights: --no-repack is used", file=sys.stderr)
    raise ToolError("llama-server crashes at its first answer")
