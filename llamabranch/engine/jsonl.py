"""Requests and results as files: one JSON object a line, each whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from ..errors import ConfigError
from ..sampling import SamplingParams
from .request import Request, Result

__all__ = ["read_requests", "read_results", "write_result"]

_FIELDS = {"prompt", "id", "max_tokens", "stop", "grammar", "n", "seed", "sampling"}


def read_requests(
    lines: Iterable[str], *, json_lines: bool, sampling: SamplingParams | None = None
) -> Iterator[Request]:
    """Yield a request for each line: a prompt as it is, or a JSON object.

    An object has ``prompt`` (text or token ids) and optionally ``id``, ``max_tokens``, ``stop``,
    ``grammar``, ``n``, ``seed`` and ``sampling`` (an object of settings; what it leaves out is as in
    the argument ``sampling``, and so is a request without settings). Empty lines are skipped.

    Raises:
        ConfigError: a line that is no request, and says which line; or one text instead of lines.
    """
    if isinstance(lines, (str, bytes, bytearray)):
        raise ConfigError(
            f"requests are read from lines, not from {type(lines).__name__}",
            hint="give an open file, or text.splitlines()",
        )
    return _requests(lines, json_lines, sampling)


def _requests(
    lines: Iterable[str], json_lines: bool, sampling: SamplingParams | None
) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not json_lines:
            yield Request(line.rstrip("\r\n"), sampling=sampling)
            continue
        try:
            yield _request(json.loads(line), sampling)
        except (ConfigError, ValueError, TypeError) as error:
            raise ConfigError(f"line {number} is no request: {error}") from error


def _request(data: object, sampling: SamplingParams | None) -> Request:
    if isinstance(data, str):
        return Request(data, sampling=sampling)
    if not isinstance(data, dict):
        raise ConfigError("a request is an object with a prompt")
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r}")
    prompt = data.get("prompt")
    if not isinstance(prompt, (str, list)):
        raise ConfigError("the prompt must be text or a list of token ids")
    settings = dict(data.get("sampling") or {})
    if data.get("seed") is not None:
        settings["seed"] = data["seed"]
    if settings:
        if "logit_bias" in settings:  # JSON has only text keys
            settings["logit_bias"] = {int(k): v for k, v in settings["logit_bias"].items()}
        sampling = (sampling or SamplingParams()).but(**settings)
    identity, stop = data.get("id"), data.get("stop") or ()
    return Request(
        prompt,
        id=None if identity is None else str(identity),
        max_tokens=data.get("max_tokens"),
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        grammar=data.get("grammar"),
        n=data.get("n", 1),
    )


def write_result(file: IO[str], result: Result) -> None:
    """Append one line and push it to the disk: what stands there survives the process."""
    record = result.as_dict()
    line = json.dumps(record, ensure_ascii=False)
    if not _is_unicode(line):  # a prompt with half a surrogate pair, refused but reported
        line = json.dumps(record)
    file.write(line + "\n")
    file.flush()
    os.fsync(file.fileno())


def read_results(path: Path) -> list[Mapping[str, object]]:
    """Return the whole records of a file that was perhaps cut off, and cut off its torn last line.

    Raises:
        ConfigError: a line before the last that is no record.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records: list[Mapping[str, object]] = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is no result: {error}") from error
        if not isinstance(record, dict) or "id" not in record:
            raise ConfigError(f"{path}, line {number} is no result: it has no id")
        records.append(record)
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return records


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
