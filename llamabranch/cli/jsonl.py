"""Requests and results as JSON lines: one object a line.

Reading never changes a file; `cut_incomplete_line` repairs one whose writer was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import llamabranch as lb
from llamabranch import ConfigError, LlamaBranchError

if TYPE_CHECKING:
    from llamabranch import Request, Result, SamplingParams

__all__ = ["cut_incomplete_line", "read_requests", "read_results", "write_result"]

_FIELDS = {
    "prompt", "id", "max_tokens", "stop", "grammar", "n", "priority", "seed", "sampling",
    "top_logprobs", "prompt_logprobs",
}  # fmt: skip
_PREFIX = b'{"id": '  # of every line that `write_result` writes


def read_requests(
    lines: Iterable[str], *, json_lines: bool, sampling: SamplingParams | None = None
) -> Iterator[Request]:
    """Yield a request for each line: a prompt as it is, or a JSON object.

    An object has ``prompt`` (text or token ids) and optionally ``id``, ``max_tokens``, ``stop``,
    ``grammar``, ``n``, ``priority``, ``top_logprobs``, ``prompt_logprobs``, ``seed`` and ``sampling`` (an
    object of settings). The argument ``sampling`` gives
    the settings that an object leaves out. Empty lines are skipped.

    Raises:
        ConfigError: an invalid request, with its line number; or one text instead of lines.
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
            yield lb.Request(line.rstrip("\r\n"), sampling=sampling)
            continue
        try:
            yield _request(json.loads(line), sampling)
        except RecursionError:
            raise ConfigError(f"line {number}: invalid request: it is nested too deeply") from None
        except (LlamaBranchError, ValueError, TypeError) as error:
            hint = error.hint if isinstance(error, LlamaBranchError) else None
            raise ConfigError(f"line {number}: invalid request: {error}", hint=hint) from error


def _request(data: object, sampling: SamplingParams | None) -> Request:
    if isinstance(data, str):
        return lb.Request(data, sampling=sampling)
    if not isinstance(data, dict):
        raise ConfigError("a request is an object with a prompt")
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r}")
    prompt = data.get("prompt")
    if not isinstance(prompt, (str, list)):
        raise ConfigError("the prompt must be text or a list of token ids")
    identity, stop, grammar = data.get("id"), data.get("stop") or (), data.get("grammar")
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop must be text or a list of texts, not {stop!r}")
    return lb.Request(
        prompt,
        id=None if identity is None else _identity(identity),
        max_tokens=data.get("max_tokens"),
        top_logprobs=data.get("top_logprobs"),
        prompt_logprobs=data.get("prompt_logprobs"),
        priority=data.get("priority", 0),
        sampling=_settings(data, sampling),
        stop=texts,
        grammar=None if grammar is None else lb.Grammar(grammar),
        n=data.get("n", 1),
    )


def _identity(value: object) -> str:
    text = str(value)
    if not _is_unicode(text):
        raise ConfigError(f"the id {text!r} is not valid Unicode")
    return text


def _settings(data: Mapping[str, object], sampling: SamplingParams | None) -> SamplingParams | None:
    given = data.get("sampling")
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"sampling must be an object of settings, not {given!r}")
    settings = dict(given or {})
    if data.get("seed") is not None:
        settings["seed"] = data["seed"]
    if not settings:
        return sampling
    if "logit_bias" in settings:
        bias = settings["logit_bias"]
        if not isinstance(bias, dict):
            raise ConfigError(f"logit_bias must be an object of token ids, not {bias!r}")
        settings["logit_bias"] = {int(k): v for k, v in bias.items()}  # JSON has only text keys
    return (sampling or lb.SamplingParams()).replace(**settings)


def write_result(file: IO[str], result: Result, job: Mapping[str, object] | None = None) -> None:
    """Append one line and give it to the operating system, so that it survives the end of the process.

    Args:
        file: an open text file.
        result: what to write.
        job: the settings that the text was made with; they become the field ``job``.

    Raises:
        OSError: the disk is full, or the file cannot be written for another reason.
    """
    record = result.as_dict()
    if job is not None:
        record["job"] = dict(job)
    line = json.dumps(record, ensure_ascii=False)
    if not _is_unicode(
        line
    ):  # a prompt with a lone surrogate: its request failed, but the result is written
        line = json.dumps(record)
    file.write(line + "\n")
    file.flush()


def read_results(path: Path) -> list[Mapping[str, object]]:
    """Return the records of a file; an incomplete last line (no newline) is left out.

    Raises:
        ConfigError: a line that is not a record, or a last line that is not the beginning of one:
            it may be a file of another kind.
    """
    if not path.exists():
        return []
    *lines, last = path.read_bytes().split(b"\n")
    if last[: len(_PREFIX)] != _PREFIX[: len(last)]:
        raise ConfigError(
            f"{path}, line {len(lines) + 1}: invalid result: it does not begin with an id"
        )
    records: list[Mapping[str, object]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: invalid result: {error}") from error
        if not isinstance(record, dict) or "id" not in record:
            raise ConfigError(f"{path}, line {number}: invalid result: it has no id")
        records.append(record)
    return records


def cut_incomplete_line(path: Path) -> None:
    """Cut off what follows the last newline: a record that was not written completely.

    Raises:
        OSError: the file cannot be read or written.
    """
    if not path.is_file():
        return
    data = path.read_bytes()
    n_complete = data.rfind(b"\n") + 1
    if n_complete < len(data):
        os.truncate(path, n_complete)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
