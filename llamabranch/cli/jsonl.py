"""Requests from the command line and from lines of files: prompts, JSON objects, OpenAI's batch files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

import llamabranch as lb
from llamabranch import ConfigError, Request, SamplingParams

from .files import is_unicode, read_standard_input, read_text, schema_text, text_lines

Url = Literal["/v1/chat/completions", "/v1/completions"]
_INVALID = "surrogateescape"  # bytes that are not UTF-8 make one line invalid, not the file
# Escaped surrogate pairs, and escaped backslashes, which may stand before a "u".
_PAIR = re.compile(r"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


class _Envelope(Struct, forbid_unknown_fields=True):
    """A line of an OpenAI batch file."""

    custom_id: str
    url: Url
    body: dict[str, object]
    method: Literal["POST"] = "POST"


@dataclass(frozen=True)
class BatchRequest(Request):
    """A request from a line of an OpenAI batch file; its answer has that format too."""

    url: Url = "/v1/chat/completions"


def job_requests(
    prompts: Sequence[str], input_file: str | None, sampling: SamplingParams
) -> list[Request]:
    """Return a request for each prompt, and for each line of ``input_file`` ("-": standard input)."""
    for prompt in prompts:
        if not is_unicode(prompt):
            raise ConfigError(f"the prompt {prompt!r:.60} is not UTF-8")
    requests = [Request(prompt, id=str(i), sampling=sampling) for i, prompt in enumerate(prompts)]
    if input_file is None:
        return requests
    if input_file == "-":
        text = read_standard_input(_INVALID)
        is_json = text.lstrip().startswith("{")
    else:
        text = read_text(Path(input_file), _INVALID)
        is_json = Path(input_file).suffix in (".jsonl", ".ndjson")
    lines = text_lines(text)
    return requests + read_requests(
        lines, json_lines=is_json, sampling=sampling, first=len(requests)
    )


def read_requests(
    lines: Iterable[str],
    *,
    json_lines: bool,
    sampling: SamplingParams | None = None,
    first: int = 0,
) -> list[Request]:
    """Return a request for each line, which is a prompt or a JSON object.

    `Request.from_json` lists the keys of an object. Here ``json_schema`` may also be the name of a file,
    and an object may also be a line of an OpenAI batch file. The argument ``sampling`` has the settings
    that an object leaves out. Empty lines are skipped. A request without an id gets its line number as
    id, counted from ``first``.

    Raises:
        ConfigError: a request is invalid, and the message has its line number; or ``lines`` is one
            text.
    """
    if isinstance(lines, (str, bytes, bytearray)):
        raise ConfigError(
            f"requests are read from lines, not from {type(lines).__name__}",
            hint="give an open file, or text.split('\\n')",
        )
    requests, hint = list[Request](), None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not is_unicode(line):
                raise ConfigError("it is not UTF-8")
            data = _parsed(line) if json_lines else line.rstrip("\r\n")
            requests.append(_request(data, str(first + len(requests)), sampling))
            continue
        except RecursionError:
            reason = "it is nested too deeply"
        except (lb.LlamaBranchError, msgspec.MsgspecError, ValueError, TypeError) as error:
            reason, hint = str(error)[:300], getattr(error, "hint", None)
        raise ConfigError(f"line {number}: invalid request: {reason}", hint=hint)
    return requests


def _parsed(line: str) -> Any:
    """Return the value of a line of JSON."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        if _HALF_PAIR.search(_PAIR.sub("", line)):  # msgspec's message is less clear
            raise ConfigError(
                "half of a surrogate pair is not valid Unicode",
                hint="text was cut in the middle of a character, for example \\ud83d of \\ud83d\\ude00",
            ) from None
        raise


def _request(data: Any, name: str, sampling: SamplingParams | None) -> Request:
    if isinstance(data, str):
        data = {"prompt": data}
    if not isinstance(data, dict):
        raise ConfigError(f"a request must be an object, not {data!r:.60}")
    if "body" not in data:
        return Request.from_json(_with_schema(data), name, sampling)
    envelope = msgspec.convert(data, _Envelope)
    request = BatchRequest.from_json(
        _with_schema(envelope.body) | {"custom_id": envelope.custom_id},
        name,
        sampling,
        needs=["messages" if "chat" in envelope.url else "prompt"],
    )
    return replace(request, url=envelope.url)


def _with_schema(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, with the schema itself if a file was named."""
    schema = data.get("json_schema")
    return data | {"json_schema": schema_text(schema)} if isinstance(schema, str) else data


def answer(name: str, results: Sequence[lb.Result]) -> dict[str, object]:
    """Return the line of OpenAI's output file for all texts of one request.

    ``error`` is the first error of the texts. ``response`` is None if there is an error and no text
    has a token.
    """
    results = sorted(results, key=lambda result: result.sample)
    error = next((result.error for result in results if result.error is not None), None)
    response = None
    if error is None or any(result.tokens for result in results):
        body = replace(results[0], choices=list(results)).to_openai()
        response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    failed = None if error is None else {"code": type(error).__name__, "message": str(error)}
    return {
        "id": f"batch_req_{name}", "custom_id": name, "response": response, "error": failed,
    }  # fmt: skip
