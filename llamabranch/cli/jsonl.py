"""Requests and results as JSON lines: one object a line.

Reading never changes a file; `cut_incomplete_line` repairs one whose writer was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import llamabranch as lb
from llamabranch import ConfigError, LlamaBranchError

from ..files import atomic_write
from .console import Console
from .files import is_unicode

if TYPE_CHECKING:
    from llamabranch import Request, SamplingParams

__all__ = [
    "InvalidLines",
    "cut_incomplete_line",
    "drop_failed",
    "parse_json",
    "parse_lines",
    "read_requests",
    "read_results",
    "text_id",
    "write_record",
]

_FIELDS = {
    "prompt", "messages", "id", "custom_id", "max_tokens", "stop", "grammar", "json_schema", "regex",
    "choice", "n", "priority", "seed", "sampling", "logprobs", "top_logprobs", "prompt_logprobs",
    "parse_special",
}  # fmt: skip
_GRAMMARS = ("grammar", "json_schema", "regex", "choice")
_PIECE = 1 << 16
_MOST_TOKENS = 1 << 31  # token ids are C's int
_Parsed = TypeVar("_Parsed")
_PREFIX = b'{"id": '  # of every line that `write_result` writes


class InvalidLines:
    """The lines of a file that cannot be used: all are counted, the first ones kept.

    Attributes:
        n: how many.
        errors: of the first of them; each message begins with ``line N``.
    """

    MOST = 20  # lines whose errors are kept

    def __init__(self) -> None:
        self.n = 0
        self.errors: list[ConfigError] = []

    def add(self, error: ConfigError) -> None:
        """Count a line."""
        self.n += 1
        if len(self.errors) < self.MOST:
            self.errors.append(error)

    def report(self, console: Console) -> None:
        """Print what is wrong with each line, if there are several.

        Raises:
            ConfigError: there are invalid lines.
        """
        if self.n == 1:
            raise self.errors[0]
        for error in self.errors:
            console.note(error.message + (f" ({error.hint})" if error.hint else ""))
        if self.n > len(self.errors):
            console.note(f"and {self.n - len(self.errors)} more")
        if self.n:
            numbers = ", ".join(each.message.partition(":")[0][5:] for each in self.errors)
            more = ", ..." if self.n > len(self.errors) else ""
            raise ConfigError(f"{self.n} lines are invalid: {numbers}{more}")


def parse_lines(
    lines: Iterable[str],
    parse: Callable[[str, int, int], _Parsed],
    what: str,
    on_invalid: Callable[[ConfigError], None] | None,
) -> Iterator[_Parsed]:
    """Yield what ``parse`` makes of each line that is not empty.

    Args:
        parse: gets the line, its number from 1, and its index from 0 among the lines that are not empty.
        what: what a line is, for messages.
        on_invalid: called with the error of a line, which is left out; None = the error is raised.

    Raises:
        ConfigError: an invalid line, with its number.
    """
    index = -1
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        index += 1
        reason: object
        hint = None
        try:
            if not is_unicode(line):
                raise ConfigError("it is not UTF-8")
            parsed = parse(line, number, index)
        except RecursionError:
            reason = "it is nested too deeply"
        except (LlamaBranchError, ValueError, TypeError) as error:
            reason, hint = error, error.hint if isinstance(error, LlamaBranchError) else None
        else:
            yield parsed
            continue
        invalid = ConfigError(f"line {number}: invalid {what}: {reason}", hint=hint)
        if on_invalid is None:
            raise invalid
        on_invalid(invalid)


def read_requests(
    lines: Iterable[str],
    *,
    json_lines: bool,
    sampling: SamplingParams | None = None,
    first: int = 0,
    on_invalid: Callable[[ConfigError], None] | None = None,
) -> Iterator[Request]:
    """Yield a request for each line: a prompt as it is, or a JSON object.

    An object has ``prompt`` (text or token ids) or ``messages``, and optionally ``id`` or ``custom_id``,
    ``max_tokens``, ``stop``, ``grammar`` (GBNF), ``json_schema`` (an object, or the name of a file),
    ``regex`` or ``choice`` (a list of texts), ``n``, ``priority``, ``logprobs``, ``top_logprobs``,
    ``prompt_logprobs``, ``seed``, ``sampling`` (an object of settings) and ``parse_special``: control
    tokens written in a ``prompt`` are parsed unless it is false, those in ``messages`` never are. The
    argument ``sampling`` gives the settings that an object leaves out. Empty lines are skipped. An object
    may also be a line of an OpenAI batch file. What has no id gets its place among the lines, from
    ``first`` on.

    ``on_invalid`` is called with the error of an invalid line, which is left out; without it the error is
    raised.

    Raises:
        ConfigError: an invalid request, with its line number; or one text instead of lines.
    """
    if isinstance(lines, (str, bytes, bytearray)):
        raise ConfigError(
            f"requests are read from lines, not from {type(lines).__name__}",
            hint="give an open file, or text.splitlines()",
        )

    def parse(line: str, _number: int, index: int) -> Request:
        if not json_lines:
            return lb.Request(line.rstrip("\r\n"), id=str(first + index), sampling=sampling)
        return _request(parse_json(line), str(first + index), sampling)

    return parse_lines(lines, parse, "request", on_invalid)


def parse_json(line: str) -> object:
    """Return the value of a line.

    Raises:
        ConfigError: it is no JSON, or half of a surrogate pair is in it, which is no text.
        RecursionError: it is nested too deeply.
    """
    try:
        data: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{error.msg} at character {error.pos + 1}") from None
    if "\\u" in line and not is_unicode(json.dumps(data, ensure_ascii=False)):
        raise ConfigError(
            "half of a surrogate pair is not valid Unicode",
            hint="text was cut in the middle of a character, as \\ud83d of \\ud83d\\ude00",
        )
    return data


def _request(data: object, name: str, sampling: SamplingParams | None) -> Request:
    if isinstance(data, str):
        return lb.Request(data, id=name, sampling=sampling)
    if not isinstance(data, dict):
        raise ConfigError("a request is an object with a prompt or messages")
    # Imported with the first request: it needs llama.cpp, which `doctor` and `models` do without.
    from .openai_batch import BatchRequest, is_envelope, open_envelope

    if is_envelope(data):
        inner, url = open_envelope(data)
        return BatchRequest.of(_request(inner, name, sampling), url)
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
    if data.get("messages") is None and not isinstance(prompt, str):
        wrong = next((t for t in prompt if type(t) is not int or not 0 <= t < _MOST_TOKENS), None)
        if wrong is not None or not prompt:
            raise ConfigError(
                "the prompt has no tokens" if not prompt else f"{wrong!r:.40} is not a token id"
            )
    identity = data.get("custom_id") if data.get("id") is None else data["id"]
    return lb.Request(
        prompt,
        id=name if identity is None else text_id(identity),
        max_tokens=data.get("max_tokens"),
        top_logprobs=_top_logprobs(data),
        prompt_logprobs=data.get("prompt_logprobs"),
        priority=data.get("priority", 0),
        sampling=_settings(data, sampling),
        stop=data.get("stop") or (),
        grammar=_grammar(data),
        n=data.get("n", 1),
        parse_special=data.get("parse_special", True),
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


def text_id(value: object) -> str:
    """Return an id as text.

    Raises:
        ConfigError: it is neither text nor a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"an id must be text or a whole number, not {value!r:.40}")
    return str(value)


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


def write_record(file: IO[str], record: Mapping[str, object]) -> None:
    """Append one line and give it to the operating system, so that it survives the end of the process.

    Raises:
        OSError: the disk is full, or the file cannot be written for another reason.
    """
    line = json.dumps(record, ensure_ascii=False)
    if not is_unicode(line):
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


def drop_failed(path: Path) -> None:
    """Write the file anew without the records of errors and without an incomplete last line.

    It takes the place of the old one once it is complete.

    Raises:
        OSError: the file cannot be read or written; then it is as before.
    """
    with path.open("rb") as old, atomic_write(path) as new:
        for line in old:
            if line.endswith(b"\n") and not (b'"error"' in line and json.loads(line).get("error")):
                new.write(line)
