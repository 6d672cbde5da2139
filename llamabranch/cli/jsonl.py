"""Requests from the command line and from lines of files: prompts, JSON objects, OpenAI's batch files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

import llamabranch as lb
from llamabranch import ConfigError, Request, SamplingParams

from .files import is_unicode, read_standard_input, read_text, schema_text, text_lines

Url = Literal["/v1/chat/completions", "/v1/completions"]
_INVALID = "surrogateescape"  # bytes that are not UTF-8 make one line invalid, not the file
_EXCLUSIVE = (
    ("prompt", "messages"), ("id", "custom_id"),
    ("grammar", "json_schema", "regex", "choice", "response_format"),
)  # fmt: skip
_PAIR = re.compile(r"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..")  # or a backslash
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_SETTINGS = {each.name for each in fields(SamplingParams)} - {"logprobs", "logits_processor"}
_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "repetition_penalty": "repeat_penalty"}
# Fields of OpenAI's API that do not change the text.
_IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip


_Token = Annotated[int, Meta(ge=0, lt=2**31)]  # C's int


class _Format(Struct):
    """A ``response_format`` of OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, object] = {}

    @property
    def schema(self) -> object:
        """The schema of the text, None for free text."""
        if self.type == "json_schema":
            if "schema" not in self.json_schema:
                raise ConfigError("response_format needs a json_schema with a schema")
            return self.json_schema["schema"]
        return {"type": "object"} if self.type == "json_object" else None


class _Line(Struct, forbid_unknown_fields=True):
    """A request without its sampling settings; see `read_requests`."""

    prompt: str | list[_Token] | None = None
    messages: list[dict[str, object]] | None = None
    id: str | int | None = None
    custom_id: str | int | None = None
    max_tokens: int | None = None
    stop: str | list[str] = ""
    grammar: str | None = None
    json_schema: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    response_format: _Format | None = None
    n: int = 1
    priority: int = 0
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    parse_special: bool = True
    stream: bool = False

    def parsed_grammar(self) -> lb.Grammar | None:
        """Return the grammar that the text must follow."""
        schema = self.response_format.schema if self.response_format else self.json_schema
        if isinstance(schema, str):
            schema = schema_text(schema)
        if isinstance(schema, (str, dict)):
            return lb.Grammar.from_json_schema(schema)
        if self.regex is not None:
            return lb.Grammar.from_regex(self.regex)
        if self.choice is not None:
            return lb.Grammar.from_choices(self.choice)
        return None if self.grammar is None else lb.Grammar(self.grammar)

    def n_alternatives(self) -> int | None:
        """Return how many alternatives to list, None for no detail.

        ``logprobs`` is a number, as in vLLM, or true together with ``top_logprobs``, as in OpenAI's chat
        API.
        """
        if isinstance(self.logprobs, bool):
            return self.top_logprobs or 0 if self.logprobs else None
        if self.logprobs is not None and self.top_logprobs is not None:
            raise ConfigError("with top_logprobs, logprobs must be true or false")
        return self.top_logprobs if self.logprobs is None else self.logprobs


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
    found = [Request(prompt, id=str(i), sampling=sampling) for i, prompt in enumerate(prompts)]
    if input_file is None:
        return found
    if input_file == "-":
        text = read_standard_input(_INVALID)
        is_json = text.lstrip().startswith("{")
    else:
        text = read_text(Path(input_file), _INVALID)
        is_json = Path(input_file).suffix in (".jsonl", ".ndjson")
    lines = text_lines(text)
    return found + read_requests(lines, json_lines=is_json, sampling=sampling, first=len(found))


def read_requests(
    lines: Iterable[str],
    *,
    json_lines: bool,
    sampling: SamplingParams | None = None,
    first: int = 0,
) -> list[Request]:
    """Return a request for each line, which is a prompt or a JSON object.

    An object has ``prompt`` (text or token ids) or ``messages``, and optionally ``id`` or ``custom_id``,
    ``max_tokens``, ``stop``, ``grammar`` (GBNF), ``json_schema`` (an object, or the name of a file),
    ``regex`` or ``choice`` (a list of texts), ``n``, ``priority``, ``logprobs``, ``top_logprobs``,
    ``prompt_logprobs``, sampling settings by their names or in ``sampling``, and ``parse_special``:
    control tokens written in a ``prompt`` are parsed unless it is false, those in ``messages`` never are.
    Settings that an object leaves out are those of the argument ``sampling``. Empty lines are skipped. An
    object may also be a line of an OpenAI batch file. A request without an id gets its line number as id,
    counted from ``first``.

    Raises:
        ConfigError: an invalid request, with its line number; or one text instead of lines.
    """
    if isinstance(lines, (str, bytes, bytearray)):
        raise ConfigError(
            f"requests are read from lines, not from {type(lines).__name__}",
            hint="give an open file, or text.split('\\n')",
        )
    found, hint = list[Request](), None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not is_unicode(line):
                raise ConfigError("it is not UTF-8")
            data = _parsed(line) if json_lines else line.rstrip("\r\n")
            found.append(_request(data, str(first + len(found)), sampling))
            continue
        except RecursionError:
            reason = "it is nested too deeply"
        except (lb.LlamaBranchError, msgspec.MsgspecError, ValueError, TypeError) as error:
            reason, hint = str(error)[:300], getattr(error, "hint", None)
        raise ConfigError(f"line {number}: invalid request: {reason}", hint=hint)
    return found


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


def _object(name: str, value: object) -> dict[str, Any]:
    """Return ``value``, which must be a JSON object."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be an object, not {value!r:.60}")
    return value


def _request(data: Any, name: str, sampling: SamplingParams | None) -> Request:
    if isinstance(data, str):
        data = {"prompt": data}
    data, url = _object("a request", data), None
    if "body" in data:
        envelope = msgspec.convert(data, _Envelope)
        url, data = envelope.url, {**envelope.body, "custom_id": envelope.custom_id}
    given = {
        _OTHER_NAMES.get(key, key): value
        for key, value in data.items()
        if value is not None and key not in _IGNORED
    }
    settings = dict(_object("sampling", given.pop("sampling", {})))
    settings |= {key: given.pop(key) for key in _SETTINGS & given.keys()}
    if "logit_bias" in settings:  # keys in JSON are always text
        bias = _object("logit_bias", settings["logit_bias"])
        settings["logit_bias"] = {int(k): v for k, v in bias.items()}
    line = msgspec.convert(given, _Line)
    if line.stream:
        raise ConfigError("stream is not possible in a file of requests")
    for names in _EXCLUSIVE:
        both = [each for each in names if getattr(line, each) is not None]
        if len(both) > 1:
            raise ConfigError(f"{' and '.join(both)} exclude each other")
    needed = ["prompt", "messages"] if url is None else ["messages" if "chat" in url else "prompt"]
    prompt = next((given[key] for key in needed if given.get(key) not in (None, [])), None)
    if prompt is None:
        raise ConfigError(f"a request needs {' or '.join(needed)}")
    request = Request(
        prompt,
        id=str(next((each for each in (line.id, line.custom_id) if each is not None), name)),
        max_tokens=line.max_tokens,
        stop=line.stop or (),
        n=line.n,
        top_logprobs=line.n_alternatives(),
        sampling=(sampling or SamplingParams()).replace(**settings) if settings else sampling,
        grammar=line.parsed_grammar(),
        priority=line.priority,
        prompt_logprobs=line.prompt_logprobs,
        parse_special=line.parse_special,
    )
    return request if url is None else BatchRequest(**vars(request), url=url)


def answer(name: str, results: Sequence[lb.Result]) -> dict[str, object]:
    """Return the line of OpenAI's output file for all texts of one request.

    The error is the first one; ``response`` is None if there is an error and no text has a token.
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
