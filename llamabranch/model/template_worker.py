"""Renders chat templates. It runs in its own process and imports nothing from this package.

It reads requests and writes replies, one JSON object per line, until its input ends. Templates run in
Jinja's immutable sandbox, with the names that Hugging Face's templates use and nothing else. The sandbox
keeps them from files and from Python; time and memory are limited from outside (``templates.py``).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

_LONGEST = 1 << 24  # characters of a rendered text: more tokens than any context has


class _Refused(Exception):
    """The template itself refuses the messages, with a reason."""


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, which marks the assistant's text for training. It is rendered."""

        tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise _Refused(message)

    class Sandbox(ImmutableSandboxedEnvironment):
        """Lets a template change lists and dictionaries that it made itself."""

        def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
            if isinstance(obj, (list, dict, set)) and id(obj) not in _given:
                return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
            return super().is_safe_attribute(obj, attr, value)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
    )
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < and > for HTML.
    return json.dumps(
        list(value) if isinstance(value, Iterator) else value,  # such as the filter `map` returns
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _reply(source: str, variables: Mapping[str, object]) -> dict[str, str]:
    """Return the ``text``, or an error: ``missing``, ``invalid``, ``refused``, ``failed``."""
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        return {"missing": str(error)}
    try:
        template = _compiled(source)
    except (TemplateError, RecursionError) as error:
        return {"invalid": str(error)}
    _given.clear()
    _given.update(_containers(variables))
    try:
        text = template.render(variables)
    except _Refused as error:
        return {"refused": str(error)}
    except MemoryError:
        raise
    except Exception as error:  # the template may raise anything
        return {"failed": f"{type(error).__name__}: {error}"}
    if len(text) > _LONGEST:
        return {"failed": f"its text has {len(text)} characters, more than {_LONGEST}"}
    return {"text": text}


_given: set[int] = set()  # the ids of the template's arguments, which it must not change


def _containers(value: object) -> Iterator[int]:
    """Yield the ids of a JSON value's lists and dictionaries."""
    if isinstance(value, (list, dict)):
        yield id(value)
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


@lru_cache(maxsize=8)
def _variables(source: str) -> list[str]:
    """Return the names of the variables that a template uses and does not set."""
    try:
        from jinja2 import TemplateError, meta
    except ImportError:
        return []
    try:
        return sorted(meta.find_undeclared_variables(_compiled(source).environment.parse(source)))
    except (TemplateError, RecursionError):
        return []


def _limits(memory_bytes: int, cpu_s: int) -> Callable[[], None]:
    """Limit the memory of this process; return a function that limits the processor time of a request.

    If the system has no such limits, nothing is limited. The time limit matters only if the parent
    process has ended; until then, the parent's own limit is stricter.
    """
    try:
        import resource
    except ImportError:  # Windows
        return lambda: None

    def limit(resource_id: int, value: int) -> None:
        _, most = resource.getrlimit(resource_id)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource_id, (value if most < 0 else min(value, most), most))

    limit(resource.RLIMIT_AS, memory_bytes)
    return lambda: limit(resource.RLIMIT_CPU, int(time.process_time()) + cpu_s)


def main(lines: Iterable[str], memory_bytes: int, cpu_s: int) -> None:
    """Answer each request line on standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    limit_time = _limits(memory_bytes, cpu_s)
    for line in lines:
        limit_time()
        request = json.loads(line)
        source = request["source"]
        replies = [_reply(source, variables) for variables in request["batch"]]
        reply = {"names": _variables(source), "replies": replies}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path += sys.argv[3:]  # where Jinja is: this interpreter was started without site packages
    main(sys.stdin, int(sys.argv[1]), int(sys.argv[2]))
