"""The file of a job's results: which texts it holds, with which settings, and appending to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO

from llamabranch import ConfigError, Request, Result

from .console import OutputError
from .jsonl import cut_incomplete_line, read_results, write_result
from .prompts import digest

__all__ = ["JobSettings", "ResultFile"]

_SYNC_S = 0.25  # seconds between two requests to store results on the disk

# The settings that determine the texts of a job, and their names on the command line.
_NAMES = {
    "model": "the model (--target)",
    "kv_type": "--kv-type",
    "prompts": "the prompts (--prompts, --input)",
    "samples": "--samples",
    "sampling": "the sampling settings (--temperature, --top-k, ..., --max-tokens, --stop, "
    "--ignore-eos, --grammar, --json-schema, --regex, --choice, --chat)",
    "rule": "--rule",
    "seed": "--seed",
}
_SHOWN = {"kv_type", "samples", "rule", "seed"}  # the others are digests


@dataclass(frozen=True)
class JobSettings:
    """The settings that determine the texts of a job; every record of its file holds them.

    ``model``, ``prompts`` and ``sampling`` are digests. Drafter, draft length and the number of texts
    at a time are left out because they change no text. ``seed`` None: not known yet.
    """

    prompts: str
    sampling: str
    samples: int
    rule: str
    kv_type: str
    seed: int | None
    seed_given: bool
    model: str | None = None

    def differences(self, record: Mapping[str, object]) -> list[str]:
        """Return the options that differ in ``record``; what is not known yet is left out."""
        ours = asdict(self)
        found = []
        for field, name in _NAMES.items():
            if ours[field] is None or record.get(field) == ours[field]:
                continue
            was = f" was {record.get(field)}, not {ours[field]}" if field in _SHOWN else " differ"
            found.append(name + (" differs" if field == "model" else was))
        return found


class ResultFile:
    """A file that results are appended to, one JSON object a line, each with the job's settings.

    Raises:
        ConfigError: it exists and is not to be resumed, or belongs to another job.
    """

    def __init__(
        self,
        path: Path,
        job: JobSettings,
        requests: Iterable[Request],
        *,
        resume: bool,
        stats: bool = False,
    ) -> None:
        self.path = path
        self.job = job
        self._stats = stats
        self.done: set[tuple[str, int]] = set()
        self._file: IO[str] | None = None
        self._synced = 0.0  # when the disk was last asked to store it
        self._jobs: list[Mapping[str, object]] = []  # those of the records, each once
        if not resume:
            if path.is_file() and path.stat().st_size:
                raise ConfigError(
                    f"{path} already exists", hint="continue it with --resume, or name another file"
                )
            return
        try:
            self._read(requests)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        if self._jobs:
            self._adopt_seed(self._jobs[0])
        self._check()

    def _read(self, requests: Iterable[Request]) -> None:
        """Read which texts are there, and check that they are those of ``requests``."""
        found: dict[str, str] = {}
        problem: ConfigError | None = None  # raised once the whole file is known to hold results
        for record in read_results(self.path):
            name, sample = str(record["id"]), record.get("sample", 0)
            prompt = digest(record.get("prompt"))
            if found.setdefault(name, prompt) != prompt:
                problem = problem or self._of_other_prompts(name)
            if isinstance(sample, int):
                self.done.add((name, sample))
            try:
                job = _job_of(record, self.path)
            except ConfigError as error:
                problem = problem or error
                continue
            if job not in self._jobs:
                self._jobs.append(job)
        if not found:
            return
        for request in requests:
            prompt = found.pop(str(request.id), "")
            if prompt and prompt != digest(_listed(request.prompt)):
                raise self._of_other_prompts(str(request.id))
        for name in found:
            raise self._of_other_prompts(name)
        if problem is not None:
            raise problem

    def _of_other_prompts(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.path} has results of other prompts: the id {name!r}",
            hint="resume with the prompts it was started with, or name another file",
        )

    def _adopt_seed(self, record: Mapping[str, object]) -> None:
        """Continue with the seed of the file, unless another one was given."""
        seed = record.get("seed")
        if isinstance(seed, int) and self.job.seed in (None, seed):
            given = record.get("seed_given") is True
            self.job = replace(self.job, seed=seed, seed_given=given)

    def _check(self) -> None:
        for record in self._jobs:
            found = self.job.differences(record)
            if found:
                raise ConfigError(
                    f"{self.path} was made with other settings: {'; '.join(found)}",
                    hint="resume with the settings it was started with, or name another file",
                )

    def open(self, model: str, seed: int) -> None:
        """Open it for appending, now that the model's fingerprint and the seed are known.

        An incomplete last line is cut off first.

        Raises:
            ConfigError: it was made with another model, or cannot be written.
        """
        self.job = replace(self.job, model=model[:16], seed=seed)
        self._check()
        self._jobs.clear()
        try:
            cut_incomplete_line(self.path)
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}") from None

    def write(self, result: Result) -> None:
        """Append one result.

        It survives the end of this process at once. The disk is asked to store what was appended a few
        times a second and at the end, not for each result, since that can take longer than a text.

        Raises:
            OutputError: the disk is full or broken; what was written before is kept.
        """
        if self._file is None:
            raise RuntimeError("the file of results is not open")
        try:
            write_result(self._file, result, asdict(self.job), stats=self._stats)
            if monotonic() - self._synced >= _SYNC_S:
                os.fsync(self._file.fileno())
                self._synced = monotonic()
        except OSError as error:
            raise self._failed(error) from None

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as failure:
            if error is None:
                raise self._failed(failure) from None
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self._file is None:
            return
        try:
            self._file.close()  # after a failed write it tries to flush again, and fails again
        except OSError as failure:
            if error is None:
                raise self._failed(failure) from None

    def _failed(self, error: OSError) -> OutputError:
        hint = "the results written so far are kept; --resume continues from there"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space; " + hint
        return OutputError(f"cannot write {self.path}: {error.strerror or error}", hint=hint)


def _listed(prompt: str | Sequence[object]) -> str | list[object]:
    return prompt if isinstance(prompt, str) else list(prompt)


def _job_of(record: Mapping[str, object], path: Path) -> Mapping[str, object]:
    job = record.get("job")
    if not isinstance(job, dict):
        raise ConfigError(
            f"{path} does not record its settings: the result {record['id']!r} has no job",
            hint="version 0.1.0 wrote such files; they cannot be resumed safely: name another file",
        )
    return job
