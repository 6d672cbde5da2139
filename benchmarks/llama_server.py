"""``llama-server`` with one slot and its prompt cache, timed over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import NamedTuple

from .llama_tools import ToolError

__all__ = ["Answer", "LlamaServer"]

_START_S = 60.0


class Answer(NamedTuple):
    """A completion: its tokens, the evaluated prompt tokens, and the seconds to the first token.

    ``generating_s``: the seconds of the completion without the prompt, as the server counts them.
    """

    n_tokens: int
    n_evaluated: int
    first_s: float
    generating_s: float


class LlamaServer:
    """A server on a free port of this machine; ``close`` ends it.

    Raises:
        ToolError: the server does not start.
    """

    def __init__(
        self,
        program: Path,
        model: Path,
        *,
        threads: int,
        n_ctx: int,
        kv_type: str = "bf16",
        more: Sequence[str] = (),
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [
            program, "-m", model, "-c", n_ctx, "-t", threads, "-tb", threads, "-np", 1,
            "--host", "127.0.0.1", "--port", self._port, "--no-ui", "-ctk", kv_type, "-ctv", kv_type,
            "-cram", 0,  # nothing from an earlier run is cached
            *more,
        ]  # fmt: skip
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([str(x) for x in command], stdout=quiet, stderr=quiet)
        end = perf_counter() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or perf_counter() > end:
                self.close()
                raise ToolError("llama-server does not start")
            sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def generate(self, prompt: Sequence[int], n_tokens: int, **more: object) -> Answer:
        """Continue token ids, greedily unless ``more`` fields of the request say otherwise.

        Raises:
            ToolError: the answer is not a stream of tokens.
        """
        body = {
            "prompt": list(prompt), "n_predict": n_tokens, "temperature": 0.0, "stream": True,
            "cache_prompt": True, **more,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        start, first_s = perf_counter(), 0.0
        connection.request("POST", "/completion", json.dumps(body))
        for line in connection.getresponse():
            if not line.startswith(b"data: "):
                continue
            first_s = first_s or perf_counter() - start
            event = json.loads(line[6:])
            if event.get("stop"):
                timings = event["timings"]
                generating_s = float(timings["predicted_ms"]) / 1000
                n, n_prompt = int(timings["predicted_n"]), int(timings["prompt_n"])
                return Answer(n, n_prompt, first_s, generating_s)
        raise ToolError("llama-server gives no answer")

    def chat(
        self, messages: Sequence[Mapping[str, str]], n_tokens: int
    ) -> tuple[str, int, int, float]:
        """Answer greedily; return the text, tokens read and generated, and seconds to the first token."""
        body = {
            "messages": list(messages), "max_tokens": n_tokens, "temperature": 0.0, "stream": True,
            "cache_prompt": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        start, first_s, text = perf_counter(), 0.0, ""
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            if delta.get("content"):
                first_s = first_s or perf_counter() - start
                text += delta["content"]
            if "timings" in event:
                timings = event["timings"]
                n_read, n = int(timings["prompt_n"]), int(timings["predicted_n"])
                return text, n_read, n, first_s or perf_counter() - start
        raise ToolError("llama-server gives no answer")

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()
