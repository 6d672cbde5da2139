"""The file of a job's results: which texts it holds, with which settings, and appending to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO

from llamabranch import ConfigError, Grammar, Model, Request, Result

from ..files import sync
from .console import OutputError
from .files import check_new_file, write_error
from .jsonl import cut_incomplete_line, drop_failed, read_results, write_record
from .openai_batch import BatchRequest, answer
from .prompts import digest

__all__ = ["JobSettings", "ResultFile"]

_OLD = "prompt "  # before the digest of a prompt alone, for the records of version 0.2
_SYNC_S = 0.25  # seconds between two requests to store results on the disk

# The settings that determine the texts of a job, and their names on the command line.
_NAMES = {
    "model": "the model (--target)",
    "kv_type": "--kv-type",
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

    ``model`` and ``sampling`` are digests. Drafter, draft length and the number of texts
    at a time are left out because they change no text. ``seed`` None: not known yet.
    """

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
    ) -> None:
        self.path = path
        self.job = job
        self.done: set[tuple[str, int]] = set()
        self._file: IO[str] | None = None
        self._synced = 0.0  # when the disk was last asked to store it
        self._jobs: list[Mapping[str, object]] = []  # those of the records, each once
        self._n_failed = 0  # records of errors, which are run again
        self._gathered: dict[
            str, list[Result]
        ] = {}  # of requests in envelopes: one line for all texts
        if not resume or not path.is_file():
            check_new_file(path, hint="continue it with --resume, or name another file")
            return
        try:
            self._read(requests)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None

    def _read(self, requests: Iterable[Request]) -> None:
        """Read which texts are there, and check that they are those of ``requests``."""
        found: dict[str, str] = {}
        problem: ConfigError | None = None  # raised once the whole file is known to hold results
        for record in read_results(self.path):
            name = str(record.get("custom_id", record["id"]))
            try:
                job = dict(_job_of(record, self.path))
            except ConfigError as error:
                problem = problem or error
                continue
            given = str(job.pop("request", _OLD + digest(record.get("prompt"))))
            job.pop("prompts", None)  # of version 0.2: a digest of all lines
            if job not in self._jobs:
                self._jobs.append(job)
            if record.get("error"):
                self._n_failed += 1
                continue
            if found.setdefault(name, given) != given:
                problem = problem or self._of_other_prompts(name)
            self.done.update((name, sample) for sample in _samples(record))
        if problem is None and self._jobs:
            self._adopt_seed(self._jobs[0])
            self._check()  # first: settings of the command line are part of every request
        for request in requests:
            given = found.pop(str(request.id), "")
            if given and given not in (_digest(request), _OLD + digest(_listed(request.prompt))):
                raise self._of_other_prompts(str(request.id))
        for name in found:
            raise self._of_other_prompts(name)
        if problem is not None:
            raise problem

    def _of_other_prompts(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.path} has results of other prompts, or of other settings on a line: the id {name!r}",
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

    def open(self, model: Model, seed: int) -> None:
        """Open it for appending, now that the model and the seed are known.

        An incomplete last line and the records of errors are removed first.

        Raises:
            ConfigError: it was made with another model, or cannot be written.
        """
        self.job = replace(self.job, model=model.fingerprint[:16], seed=seed)
        self._model = model
        self._check()
        self._jobs.clear()
        try:
            if self._n_failed:
                drop_failed(self.path)
            else:
                cut_incomplete_line(self.path)
            self._file = self.path.open("a", encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}") from None

    def write(self, result: Result, request: Request) -> None:
        """Append one result of ``request``, which is given as it was read.

        All texts of a request in an envelope make one line, which is written when the last one is there.
        What was written outlives this process at once. The disk is asked to store what was appended a few
        times a second and at the end, not for each result, since that can take longer than a text.

        Raises:
            OutputError: the disk is full or broken; what was written before is kept.
        """
        if self._file is None:
            raise RuntimeError("the file of results is not open")
        try:
            record = self._record(result, request)
            if record is None:
                return
            write_record(self._file, record)
            if monotonic() - self._synced >= _SYNC_S:
                sync(self._file)
                self._synced = monotonic()
        except OSError as error:
            raise self._failed(error) from None

    def _record(self, result: Result, request: Request) -> dict[str, object] | None:
        record: dict[str, object]
        if isinstance(request, BatchRequest):
            results = self._gathered.setdefault(result.id, [])
            results.append(result)
            if len(results) < request.n:
                return None
            del self._gathered[result.id]
            record = answer(request, results, self._model.name, self._model.piece)
        else:
            record = result.as_dict(stats=False)
        return {**record, "job": {**asdict(self.job), "request": _digest(request)}}

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
            sync(self._file)
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
        return write_error(self.path, error, hint)


def _digest(request: Request) -> str:
    """Return a digest of what the texts of a request depend on, beside the settings of the job."""
    grammar = request.grammar
    return digest(
        {
            "prompt": _listed(request.prompt),
            "max_tokens": request.max_tokens,
            "sampling": None if request.sampling is None else asdict(request.sampling),
            "stop": list(request.stop),
            "grammar": grammar.as_dict() if isinstance(grammar, Grammar) else grammar,
            "n": request.n,
            "parse_special": request.parse_special,
        }
    )


def _samples(record: Mapping[str, object]) -> Iterable[int]:
    """Return which texts of its request a record has."""
    if "custom_id" not in record:
        sample = record.get("sample", 0)
        return [sample] if isinstance(sample, int) else []
    response = record.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    choices = body.get("choices") if isinstance(body, dict) else None
    return range(len(choices)) if isinstance(choices, list) else []


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
