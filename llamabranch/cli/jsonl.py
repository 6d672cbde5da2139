"""Requests and results as JSON lines: one object a line.

Reading never changes a file; `cut_incomplete_line` repairs one whose writer was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import IO, TYPE_CHECKING

import llamabranch as lb
from llamabranch import ConfigError, LlamaBranchError

if TYPE_CHECKING:
    from llamabranch import Request, Result, SamplingParams

__all__ = ["cut_incomplete_line", "read_requests", "read_results", "write_result"]

_FIELDS = {
    "prompt", "messages", "id", "custom_id", "max_tokens", "stop", "grammar", "json_schema", "regex",
    "choice", "n", "priority", "seed", "sampling", "logprobs", "top_logprobs", "prompt_logprobs",
}  # fmt: skip
_GRAMMARS = ("grammar", "json_schema", "regex", "choice")
_PIECE = 1 << 16
_PREFIX = b'{"id": '  # of every line that `write_result` writes


def read_requests(
    lines: Iterable[str], *, json_lines: bool, sampling: SamplingParams | None = None
) -> Iterator[Request]:
    """Yield a request for each line: a prompt as it is, or a JSON object.

    An object has ``prompt`` (text or token ids) or ``messages``, and optionally ``id`` or ``custom_id``,
    ``max_tokens``, ``stop``, ``grammar`` (GBNF), ``json_schema`` (an object, or the name of a file),
    ``regex`` or ``choice`` (a list of texts), ``n``, ``priority``, ``logprobs``, ``top_logprobs``,
    ``prompt_logprobs``, ``seed`` and ``sampling`` (an object of settings). The argument
    ``sampling`` gives the settings that an object leaves out. Empty lines are skipped.

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
        raise ConfigError("a request is an object with a prompt or messages")
    unknown = sorted(set(data) - _FIELDS)
    if unknown:
        name = unknown[0]
        settings = {field.name for field in fields(lb.SamplingParams)}
        hint = f'write "sampling": {{"{name}": ...}}' if name in settings else None
        raise ConfigError(f"unknown field {name!r}", hint=hint)
    excluded = [("prompt", "messages"), ("id", "custom_id"), *combinations(_GRAMMARS, 2)]
    for one, other in excluded:
        if data.get(one) is not None and data.get(other) is not None:
            raise ConfigError(f"{one} and {other} exclude each other")
    prompt = data.get("prompt")
    if data.get("messages") is not None:
        prompt = data["messages"]
        if (
            not isinstance(prompt, list)
            or not all(isinstance(one, dict) for one in prompt)
            or not prompt
        ):
            raise ConfigError("messages must be a list of objects with role and content")
    if not isinstance(prompt, (str, list)):
        raise ConfigError("the prompt must be text or a list of token ids")
    identity = data.get("custom_id") if data.get("id") is None else data["id"]
    return lb.Request(
        prompt,
        id=None if identity is None else _identity(identity),
        max_tokens=data.get("max_tokens"),
        top_logprobs=_top_logprobs(data),
        prompt_logprobs=data.get("prompt_logprobs"),
        priority=data.get("priority", 0),
        sampling=_settings(data, sampling),
        stop=data.get("stop") or (),
        grammar=_grammar(data),
        n=data.get("n", 1),
    )


def _grammar(data: Mapping[str, object]) -> lb.Grammar | None:
    grammar, schema = data.get("grammar"), data.get("json_schema")
    if schema is not None:
        if not isinstance(schema, (str, dict)):
            raise ConfigError(
                f"json_schema must be an object or the name of a file, not {schema!r:.40}"
            )
        if isinstance(schema, str) and not schema.lstrip().startswith("{"):
            try:
                schema = Path(schema).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"cannot read the schema {schema!r:.80}: {error}") from None
        return lb.Grammar.from_json_schema(schema)
    if data.get("regex") is not None:
        return lb.Grammar.from_regex(str(data["regex"]))
    choice = data.get("choice")
    if choice is not None:
        if not isinstance(choice, list):
            raise ConfigError(f"choice must be a list of texts, not {choice!r:.40}")
        return lb.Grammar.from_choices(choice)
    return None if grammar is None else lb.Grammar(str(grammar))


def _top_logprobs(data: Mapping[str, object]) -> int | None:
    """Return how many alternatives to list, None for no detail.

    ``logprobs`` is a number, as in vLLM, or true beside ``top_logprobs``, as in OpenAI's chat API.
    """
    given, top = data.get("logprobs"), data.get("top_logprobs")
    if given is False:
        return None
    if given is True:
        given = 0 if top is None else top
    elif given is None:
        given = top
    elif top is not None:
        raise ConfigError("logprobs is true or false beside top_logprobs")
    if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
        raise ConfigError(f"logprobs and top_logprobs must be whole numbers, not {given!r}")
    return given


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


def write_result(
    file: IO[str],
    result: Result,
    job: Mapping[str, object] | None = None,
    *,
    stats: bool = False,
) -> None:
    """Append one line and give it to the operating system, so that it survives the end of the process.

    Args:
        file: an open text file.
        result: what to write.
        job: the settings that the text was made with; they become the field ``job``.
        stats: add the statistics of drafting, which can take more bytes than all the rest.

    Raises:
        OSError: the disk is full, or the file cannot be written for another reason.
    """
    record = result.as_dict(stats=stats)
    if job is not None:
        record["job"] = dict(job)
    line = json.dumps(record, ensure_ascii=False)
    if not _is_unicode(
        line
    ):  # a prompt with a lone surrogate: its request failed, but the result is written
        line = json.dumps(record)
    file.write(line + "\n")
    file.flush()


def read_results(path: Path) -> Iterator[Mapping[str, object]]:
    """Yield the records of a file; an incomplete last line (no newline) is left out.

    Raises:
        ConfigError: a line that is not a record, or a last line that is not the beginning of one:
            it may be a file of another kind.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if line[: len(_PREFIX)] != _PREFIX[: len(line)]:
                    raise ConfigError(
                        f"{path}, line {number}: invalid result: it does not begin with an id"
                    )
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: invalid result: {error}") from error
            if not isinstance(record, dict) or "id" not in record:
                raise ConfigError(f"{path}, line {number}: invalid result: it has no id")
            yield record


def cut_incomplete_line(path: Path) -> None:
    """Cut off what follows the last newline: a record that was not written completely.

    Raises:
        OSError: the file cannot be read or written.
    """
    if not path.is_file():
        return
    n_bytes = end = path.stat().st_size
    with path.open("rb") as file:
        while end > 0:  # from the end, in pieces
            start = max(0, end - _PIECE)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
    if end < n_bytes:
        os.truncate(path, end)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
