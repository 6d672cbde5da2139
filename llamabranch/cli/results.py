"""The file of a job's results: reading its texts and settings, and appending to it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import IO, Any

import msgspec
from msgspec import Struct

from llamabranch import ConfigError, Grammar, Model, Request, Result

from ..files import atomic_write, digest, sync
from .files import check_new_file, is_unicode, writing
from .jsonl import BatchRequest, answer

_OLD = "prompt "  # prefix of the digest of a prompt alone, which version 0.2 stored
_OTHER_PROMPTS = "has results of other prompts, or of other settings on a line: the id {!r}"
_PREFIX = b'{"id": '  # how every line that is written here begins
_KEPT = "the results written so far are kept; --resume continues from there"
# msgspec's errors are ValueErrors from 0.22 on.
_BAD = (msgspec.MsgspecError, ValueError, LookupError, TypeError, RecursionError)
_SYNC_S = 0.25  # the fewest seconds between two syncs of the file to the disk

# The settings that determine the texts of a job, and the message if one differs.
_SETTINGS = {
    "model": "the model (--target) differs",
    "kv_type": "--kv-type was {}, not {}",
    "samples": "--samples was {}, not {}",
    "sampling": "the sampling settings (--temperature, --top-k, ..., --max-tokens, --stop, "
    "--ignore-eos, --grammar, --json-schema, --chat) differ",
    "rule": "--rule was {}, not {}",
    "seed": "--seed was {}, not {}",
}


class _Record(Struct):
    """The fields that a line has in both formats, ours and OpenAI's."""

    id: str | int
    job: dict[str, Any]
    custom_id: str | int = ""
    sample: int = 0


class ResultFile:
    """A file that results are appended to, one JSON object a line, each with the job's settings.

    Args:
        path: the file.
        job: the settings that determine the texts, some as digests. ``model`` is None, and so is ``seed``
            unless the user set it. Drafter, draft length and the number of texts at a time are left out
            because they do not change the text.
        requests: the requests of the job.
        resume: whether to continue the file if it exists.

    Raises:
        ConfigError: the file exists and ``resume`` is False, or it belongs to another job.
    """

    def __init__(
        self, path: Path, job: Mapping[str, Any], requests: Iterable[Request], *, resume: bool
    ) -> None:
        self.path, self.job = path, dict(job)
        self.done: set[tuple[str, int]] = set()
        self._file: IO[str] | None = None
        self._synced = 0.0  # when the file was last synced to the disk
        self._jobs: list[Mapping[str, Any]] = []  # the different jobs of the records
        self._n_failed = 0  # records of failed requests, which run again
        self._n_bytes: int | None = None  # length of its complete lines, if it is continued
        # The texts of requests that wait for the last text of their line.
        self._texts: dict[str, list[Result]] = {}
        if not resume or not path.is_file():
            check_new_file(path, hint="continue it with --resume, or name another file")
            return
        try:
            self._read(requests)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None

    def _read(self, requests: Iterable[Request]) -> None:
        """Read which texts the file has, and check that they belong to ``requests``."""
        digests: dict[str, str] = {}
        for record in self._records():
            name = str(record.get("custom_id", record["id"]))
            job = record["job"]
            prompt_digest = str(job.pop("request", _OLD + digest(record.get("prompt"))))
            job.pop("prompts", None)  # version 0.2 stored a digest of all lines
            if job.get("rule") == "auto":  # up to version 0.3; the rules of one job may differ
                job["rule"] = "seeded"
            if job not in self._jobs:
                self._jobs.append(job)
            if record.get("error"):
                self._n_failed += 1
                continue
            if digests.setdefault(name, prompt_digest) != prompt_digest:
                raise self._refused(_OTHER_PROMPTS.format(name))
            n = 1 if "sample" in record else len(record["response"]["body"]["choices"])
            self.done.update((name, record.get("sample", i)) for i in range(n))
        if self._jobs:
            seed, ours = self._jobs[0].get("seed"), self.job["seed"]
            # Use the seed of the file, unless the user set another one.
            if isinstance(seed, int) and ours in (None, seed):
                self.job |= {"seed": seed, "seed_given": self._jobs[0].get("seed_given") is True}
            self._check()  # comes first, because every request includes the settings of the command line
        for request in requests:
            prompt_digest = digests.pop(str(request.id), "")
            if prompt_digest and prompt_digest not in (
                _digest(request),
                _OLD + digest(request.prompt),
            ):
                raise self._refused(_OTHER_PROMPTS.format(request.id))
        for name in digests:
            raise self._refused(_OTHER_PROMPTS.format(name))

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield the records; an incomplete last line is left out if it could begin a record."""
        self._n_bytes = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and line[: len(_PREFIX)] == _PREFIX[: len(line)]:
                    return
                try:
                    record = json.loads(line)
                    if not line.endswith(b"\n"):
                        raise ValueError("it is incomplete")
                    msgspec.convert(record, _Record)
                    if "sample" not in record and not record.get("error"):
                        record["response"]["body"]["choices"]
                except _BAD as error:
                    message = f"{self.path}, line {number}: invalid result: {error}"
                    raise ConfigError(message) from error
                self._n_bytes += len(line)
                yield record

    def _refused(self, reason: str) -> ConfigError:
        hint = "resume with the prompts and settings it was started with, or name another file"
        return ConfigError(f"{self.path} {reason}", hint=hint)

    def _check(self) -> None:
        for theirs in self._jobs:
            differences = [
                message.format(theirs.get(name), self.job[name])
                for name, message in _SETTINGS.items()
                if self.job[name] not in (None, theirs.get(name))
            ]
            if differences:
                raise self._refused(f"was made with other settings: {'; '.join(differences)}")

    def open(self, model: Model, seed: int) -> None:
        """Open the file for appending, now that the model and the seed are known.

        An incomplete last line and the records of errors are removed first.

        Raises:
            ConfigError: the file was made with another model, or cannot be written.
        """
        theirs = self._jobs[0].get("model") if self._jobs else None
        is_old = theirs == model.quick_key[:16]  # the file is from a version before 0.4
        self.job |= {"model": theirs if is_old else model.fingerprint[:16], "seed": seed}
        self._check()
        try:
            if self._n_failed:
                with self.path.open("rb") as old, atomic_write(self.path) as new:
                    new.writelines(line for line in old if _is_result(line))
            elif self._n_bytes is not None:
                os.truncate(self.path, self._n_bytes)
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}") from None

    def write(self, result: Result, request: Request) -> None:
        """Append one result of ``request``, which is the request as it was read.

        All texts of a request of an OpenAI batch go into one line, which is written when the last one
        ends. Written lines survive the end of this process. The disk is synced a few times a second and
        at the end, not for each result, because that can take longer than a text.

        Raises:
            OutputError: the disk is full or broken; what was written before is kept.
        """
        if self._file is None:
            raise RuntimeError("the file of results is not open")
        record = result.as_dict(stats=False)
        if isinstance(request, BatchRequest):
            texts = self._texts.setdefault(result.id, [])
            texts.append(result)
            if len(texts) < request.n:
                return
            record = answer(result.id, self._texts.pop(result.id))
        record["job"] = {**self.job, "request": _digest(request)}
        line = json.dumps(record, ensure_ascii=False)
        with writing(self.path, _KEPT):
            self._file.write((line if is_unicode(line) else json.dumps(record)) + "\n")
            self._file.flush()
            if monotonic() - self._synced >= _SYNC_S:
                sync(self._file)
                self._synced = monotonic()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file is None:
            return
        try:
            if error is None:
                with writing(self.path, _KEPT):
                    sync(self._file)
        finally:
            # After a failed write, close() writes again and fails again.
            with contextlib.suppress(OSError):
                self._file.close()


def _is_result(line: bytes) -> bool:
    """Return whether a line is complete and not the record of an error."""
    return line.endswith(b"\n") and not (b'"error"' in line and json.loads(line).get("error"))


def _digest(request: Request) -> str:
    """Return a digest of the parts of a request that determine its texts, without the job's settings."""
    grammar = request.grammar
    return digest(
        {
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "sampling": None if request.sampling is None else asdict(request.sampling),
            "stop": request.stop,
            "grammar": grammar.as_dict() if isinstance(grammar, Grammar) else grammar,
            "n": request.n,
            "parse_special": request.parse_special,
        }
    )
