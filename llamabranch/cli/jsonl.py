"""Requests from the command line and from lines of files: prompts, JSON objects, OpenAI's batch files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import llamabranch as lb
from llamabranch import ConfigError, Request, SamplingParams
from llamabranch.model import chat_messages

from ..arguments import choice, instance, plain_int
from .files import is_unicode, read_standard_input, read_text, schema_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_GRAMMARS = ("grammar", "json_schema", "regex", "choice")
_FIELDS = {
    "prompt", "messages", "id", "custom_id", "max_tokens", "stop", *_GRAMMARS, "n", "priority",
    "seed", "sampling", "logprobs", "top_logprobs", "prompt_logprobs", "parse_special",
}  # fmt: skip
_UNCHANGED = {"max_tokens", "prompt_logprobs", "priority", "n", "parse_special", "stop"}
_EXCLUDED = (("prompt", "messages"), ("id", "custom_id"), *combinations(_GRAMMARS, 2))
_MOST_TOKENS = 1 << 31  # token ids are C's int
_INVALID = "surrogateescape"  # bytes that are not UTF-8 make one line invalid, not the file
# Of the body of a line of OpenAI's: what we call the same, settings of sampling, what changes no text.
_SAME = {"messages", "prompt", "n", "stop", "seed", "logprobs", "top_logprobs", "max_tokens"}
_SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias",
    "repeat_penalty",
}  # fmt: skip
_IGNORED = {
    "model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip
_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "repetition_penalty": "repeat_penalty"}


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
    lines = text.split("\n")
    return found + read_requests(lines, json_lines=is_json, sampling=sampling, first=len(found))


def read_requests(
    lines: Iterable[str],
    *,
    json_lines: bool,
    sampling: SamplingParams | None = None,
    first: int = 0,
) -> list[Request]:
    """Return a request for each line: a prompt as it is, or a JSON object.

    An object has ``prompt`` (text or token ids) or ``messages``, and optionally ``id`` or ``custom_id``,
    ``max_tokens``, ``stop``, ``grammar`` (GBNF), ``json_schema`` (an object, or the name of a file),
    ``regex`` or ``choice`` (a list of texts), ``n``, ``priority``, ``logprobs``, ``top_logprobs``,
    ``prompt_logprobs``, ``seed``, ``sampling`` (an object of settings) and ``parse_special``: control
    tokens written in a ``prompt`` are parsed unless it is false, those in ``messages`` never are. The
    argument ``sampling`` gives the settings that an object leaves out. Empty lines are skipped. An object
    may also be a line of an OpenAI batch file. What has no id gets its place among the lines, from
    ``first`` on.

    Raises:
        ConfigError: an invalid request, with its line number; or one text instead of lines.
    """
    if isinstance(lines, (str, bytes, bytearray)):
        raise ConfigError(
            f"requests are read from lines, not from {type(lines).__name__}",
            hint="give an open file, or text.splitlines()",
        )

    found, hint = list[Request](), None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if not is_unicode(line):
                raise ConfigError("it is not UTF-8")
            data = _parsed(line) if json_lines else {"prompt": line.rstrip("\r\n")}
            found.append(_request(data, str(first + len(found)), sampling))
            continue
        except RecursionError:
            reason = "it is nested too deeply"
        except (lb.LlamaBranchError, ValueError, TypeError) as error:
            reason, hint = str(error), getattr(error, "hint", None)
        raise ConfigError(f"line {number}: invalid request: {reason}", hint=hint)
    return found


def _parsed(line: str) -> object:
    """Return the value of a line; ConfigError for half of a surrogate pair, which is no text."""
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
        data = {"prompt": data}
    if not isinstance(data, dict):
        raise ConfigError("a request is an object with a prompt or messages")
    url = data.get("url")
    if "body" in data or "url" in data:
        data = _body(data)
    for field in sorted(set(data) - _FIELDS):
        settings = {each.name for each in fields(SamplingParams)}
        hint = f'write "sampling": {{"{field}": ...}}' if field in settings else None
        raise ConfigError(f"unknown field {field!r}", hint=hint)
    data = {key: value for key, value in data.items() if value is not None}
    for one, other in _EXCLUDED:
        if one in data and other in data:
            raise ConfigError(f"{one} and {other} exclude each other")
    request = Request(  # which checks what it gets
        _prompt(data),
        id=_text_id(data.get("id", data.get("custom_id", name))),
        top_logprobs=_top_logprobs(data),
        sampling=_settings(data, sampling),
        grammar=_grammar(data),
        **{key: data[key] for key in _UNCHANGED & data.keys()},
    )
    return request if url is None else BatchRequest(**vars(request), url=url)


def _prompt(data: Mapping[str, Any]) -> Any:
    """Return text, token ids or messages."""
    if "messages" in data:
        return chat_messages(data["messages"])
    prompt = data.get("prompt")
    if not isinstance(prompt, (str, list)):
        raise ConfigError("the prompt must be text or a list of token ids")
    if prompt == []:
        raise ConfigError("the prompt has no tokens")
    for token in prompt if isinstance(prompt, list) else ():
        if type(token) is not int or not 0 <= token < _MOST_TOKENS:
            raise ConfigError(f"{token!r:.40} is not a token id")
    return prompt


def _text_id(value: object) -> str:
    """Return an id as text; ConfigError if it is neither text nor a whole number."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"an id must be text or a whole number, not {value!r:.40}")
    return str(value)


def _grammar(data: Mapping[str, Any]) -> lb.Grammar | None:
    schema = data.get("json_schema")
    if schema is not None:
        if not isinstance(schema, (str, dict)):
            message = "json_schema must be an object, its text or the name of a file"
            raise ConfigError(f"{message}, not {schema!r:.40}")
        return lb.Grammar.from_json_schema(
            schema_text(schema) if isinstance(schema, str) else schema
        )
    if "regex" in data:
        return lb.Grammar.from_regex(str(data["regex"]))
    if "choice" in data:
        return lb.Grammar.from_choices(instance("choice", data["choice"], list))
    return lb.Grammar(str(data["grammar"])) if "grammar" in data else None


def _top_logprobs(data: Mapping[str, Any]) -> int | None:
    """Return how many alternatives to list, None for no detail.

    ``logprobs`` is a number, as in vLLM, or true beside ``top_logprobs``, as in OpenAI's chat API.
    """
    given, top = data.get("logprobs"), data.get("top_logprobs")
    if given is False:
        return None
    if given is not None and given is not True and top is not None:
        raise ConfigError("logprobs is true or false beside top_logprobs")
    found = (top or 0) if given is True else top if given is None else given
    if found is not None and plain_int(found) is None:
        raise ConfigError(f"logprobs and top_logprobs must be whole numbers, not {found!r:.40}")
    return found


def _settings(data: Mapping[str, Any], sampling: SamplingParams | None) -> SamplingParams | None:
    settings = dict(instance("sampling", data.get("sampling", {}), dict))
    if "seed" in data:
        settings["seed"] = data["seed"]
    if not settings:
        return sampling
    if "logit_bias" in settings:  # JSON has only text as keys
        bias = instance("logit_bias", settings["logit_bias"], dict)
        settings["logit_bias"] = {int(k): v for k, v in bias.items()}
    return (sampling or SamplingParams()).replace(**settings)


# -- OpenAI's batch files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchRequest(Request):
    """A request that came in a line of an OpenAI batch file; its answer takes the same form."""

    url: str = CHAT


def _body(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line of an OpenAI batch file by our names."""
    for field in sorted(set(data) - {"custom_id", "method", "url", "body"}):
        raise ConfigError(f"unknown field {field!r} beside body")
    url, body = data.get("url"), instance("body", data.get("body"), dict)
    choice("method", data.get("method", "POST"), ("POST",))
    choice("url", url, (CHAT, COMPLETIONS))
    needed = "messages" if url == CHAT else "prompt"
    if body.get(needed) is None:
        raise ConfigError(f"the body of {url} needs {needed}")
    name = instance("custom_id", data.get("custom_id"), str)
    found: dict[str, Any] = {"custom_id": name, "sampling": {}}
    for field, value in body.items():
        own = _OTHER_NAMES.get(field, field)
        if value is None or field in _IGNORED or (field == "stream" and value is False):
            continue
        if own != field and body.get(own) is not None:
            raise ConfigError(f"{own} and {field} exclude each other")
        if own in _SAME:
            found[own] = value
        elif own in _SAMPLING:
            found["sampling"][own] = value
        elif field == "response_format":
            found["json_schema"] = _schema(value)
        else:
            raise ConfigError(f"the field {field!r} of a body is not supported")
    return found


def _schema(given: Any) -> dict[str, Any] | None:
    """Return the schema that a ``response_format`` asks for, None for free text."""
    try:
        kind = given["type"]
        schema = given["json_schema"]["schema"] if kind == "json_schema" else {"type": "object"}
        if kind in ("text", "json_object", "json_schema") and isinstance(schema, dict):
            return None if kind == "text" else schema
    except (TypeError, KeyError):
        pass
    raise ConfigError(f"response_format is text, json_object or a json_schema, not {given!r:.60}")


def answer(name: str, results: Sequence[lb.Result]) -> dict[str, object]:
    """Return the line of OpenAI's output file for all texts of one request.

    An error is that of the first that has one; ``response`` is None if no text has a token then.
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
