"""Servers in processes of their own: ``llamabranch serve`` and llama-server, asked over plain sockets."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter, sleep

import llamabranch as lb

from .report import Settings

OURS, THEIRS = "llamabranch serve", "llama-server"
_START_S = 120.0


class ToolError(RuntimeError):
    """A program is missing, failed, or answered something that cannot be parsed."""


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

    async def stream(self, body: Mapping[str, object]) -> None:
        """Read the stream of a completion to its end."""
        streamed = {**body, "stream": True}
        reader, writer = await send(self.port, "POST", "/v1/completions", streamed)
        with closing(writer):
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    break

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


@contextmanager
def alone(name: str, sides: Mapping[str, Served]) -> Iterator[None]:
    """Stop the other sides in the block: an idle server also uses the processor."""
    others = [side for other, side in sides.items() if other != name]
    for side in others:
        side.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for side in others:
            side.send_signal(signal.SIGCONT)


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


def has_amx() -> bool:
    """Return True if llama.cpp would use AMX. The library turns it off, so its peers must, too."""
    return "AMX_INT8 = 1" in lb.system_info()


def start_theirs(settings: Settings, model: Path, *more: object) -> Served:
    """Start llama-server; on processors with AMX without repacked weights, which make it crash.

    Raises:
        ToolError: the folder that ``--peers`` names has no llama-server, or it does not start.
    """
    path = settings.peers and shutil.which("llama-server", path=settings.peers)
    if not path:
        raise ToolError(f"{settings.peers or '--peers'} has no llama-server")
    port, repacks = _free_port(), ["--no-repack"] if has_amx() else []
    command = [
        path, "-m", model, "--port", port, "-t", settings.threads, "-tb", settings.threads,
        "--no-ui", *repacks, *more,
    ]  # fmt: skip
    return Served(command, port)
