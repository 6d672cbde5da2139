"""``llamabranch eval``: how good models are: at tasks with right answers, or by the text they predict."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from llamabranch import ConfigError, Context, hub
from llamabranch.eval import Sample, Task, TaskResult, find_task, run_task, task_names

from .bundles import argument, option, with_bundles
from .console import Console, number
from .eval_text import ReadingOptions, compare_models, measure, scoring_options
from .files import read_text
from .options import TEXT, ModelOptions, OutputOptions

_SEQUENCES = 64
_N_CTX = 4096


@dataclass(frozen=True)
class EvalModels(ModelOptions):
    """The models that are measured."""

    first: ClassVar[str] = "target"

    target: list[str] | None = option(  # type: ignore[assignment]
        None,
        "A GGUF file, a name from `llamabranch models`, or user/repo[:tag]; repeat it for several. "
        "Default: smollm2-135m where it is installed, else tale-target.",
        "--model -m --target -hf",
    )

    def names(self, console: Console) -> list[str]:
        """Return the names of the models, each once; the default is named on standard error."""
        if self.target is not None:
            return list(dict.fromkeys(self.target))
        return [self.announce(console)]


@dataclass(frozen=True)
class TaskOptions:
    """Which items are scored."""

    panel: ClassVar[str] = TEXT
    first: ClassVar[str] = "tasks_dir limit list_tasks"

    names: list[str] | None = argument(
        "Tasks that are shipped, or of --tasks-dir. Default: all of the one or the other.",
        metavar="TASK",
    )
    tasks_dir: Path | None = option(None, "A folder of tasks, one NAME.jsonl each.")
    limit: int | None = option(None, "Items of each task at most.", min=1)
    list_tasks: bool = option(False, "List the tasks, and score nothing.", "--list")

    def tasks(self) -> list[Task]:
        """Return the tasks that are asked for. Raises ConfigError if there are none."""
        folder = self.tasks_dir
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder")
        names = self.names or task_names(folder)
        if not names:
            raise ConfigError(f"{folder} has no tasks", hint="a task is a file NAME.jsonl")
        return [find_task(name, folder) for name in dict.fromkeys(names)]


@with_bundles
def eval(
    *,
    given: TaskOptions,
    reading: ReadingOptions,
    models: EvalModels,
    output: OutputOptions,
) -> None:
    """Measure models: tasks with right answers, perplexity, KL divergence.

    Without --perplexity and --against the tasks are scored, offline. With several models there is one
    table. Tasks of lm-evaluation-harness run through `llamabranch.eval.LlamaBranchLM` in Python.
    """
    with output.console() as console:
        against = reading.against
        if reading.text_file is None and against is None:
            if reading.chunks or reading.stride or reading.save_to:
                raise ConfigError("--chunks, --stride and --save-logits need --perplexity FILE")
            _score_tasks(given, reading, models, console)
            return
        if given.names or given.tasks_dir or given.limit or given.list_tasks:
            raise ConfigError("tasks go with neither --perplexity nor --against")
        if reading.text_file is None and reading.logits is None:
            hint = "or give --against a file that --save-logits wrote, which holds the text"
            raise ConfigError("--against MODEL needs --perplexity FILE, the text", hint=hint)
        names = models.names(console)
        if len(names) == 1 and (against is None or reading.logits is not None):
            measure(reading, names[0], models, console)
        elif reading.logits is not None:
            hint = "--against MODEL compares several"
            raise ConfigError(f"{against} is compared with one model", hint=hint)
        else:
            compare_models(reading, names, against, models, console)


# -- tasks ---------------------------------------------------------------------------------------------


def _score_tasks(
    given: TaskOptions, reading: ReadingOptions, models: EvalModels, console: Console
) -> None:
    tasks = given.tasks()
    if given.list_tasks:
        rows = [(t.name, len(t.items), "choices" if t.is_choice else "targets") for t in tasks]
        console.table(("task", "items", "kind"), rows, left=("kind",))
        described = [{"task": t.name, "n_items": len(t.items), "path": str(t.path)} for t in tasks]
        console.answer({"tasks": described})
        return
    names = models.names(console)
    if reading.output_file is not None and len(names) > 1:
        raise ConfigError("--output is for one model", hint="give one file for each run")
    for name in names:
        hub.resolve(name, download=None)
    file = _SampleFile(reading, tasks, console)
    answers: list[dict[str, Any]] = []
    lines: list[tuple[object, ...]] = []
    try:
        for name in names:
            more = scoring_options(name, models, _SEQUENCES)
            if models.n_ctx is None:
                more["n_ctx"] = _N_CTX
            with models.open(name, console, **more) as ctx:
                file.check(name, ctx)
                found, start_s = list[TaskResult](), time.perf_counter()
                try:
                    for task in tasks:
                        _run(ctx, task, given.limit, file, console, found)
                finally:
                    lines += [(name, *row) for result in found for row in _rows(result)]
                    about: dict[str, Any] = {"model": name, "name": ctx.model.name}
                    about["batch_invariant"] = ctx.capabilities.batch_invariant
                    about["seconds"] = time.perf_counter() - start_s
                    answers.append({**about, "tasks": [result.as_dict() for result in found]})
    finally:  # what is done is printed also when it is interrupted
        console.progress("")
        if lines:
            columns = ("model", "task", "items", "metric", "value", "±", "95 % interval", "chance")
            skipped = len(names) == 1  # the model
            lines = [line[skipped:] for line in lines]
            console.table(columns[skipped:], lines, left=("task", "metric"))
            console.answer(answers[0] if len(names) == 1 else {"models": answers})


def _rows(result: TaskResult) -> list[tuple[object, ...]]:
    """Return what the table shows of a task: a row for each metric."""
    n, n_items = len(result.samples), len(result.task.items)
    low, high = result.interval
    last = {"acc": (f"{low:.3f} to {high:.3f}", number(result.chance, 3))}
    first = result.task.name, str(n) if n == n_items else f"{n} of {n_items}"
    return [
        (*first, metric, number(value, 4), number(stderr, 4), *last.get(metric, ("", "")))
        for metric, (value, stderr) in result.metrics.items()
    ]


def _run(
    ctx: Context,
    task: Task,
    limit: int | None,
    file: _SampleFile,
    console: Console,
    results: list[TaskResult],
) -> None:
    """Add the result of a task to ``results``: of the items that are done, where it is interrupted."""
    order = {item.id: i for i, item in enumerate(task.items[:limit])}
    found = list({s.item.id: s for s in file.done[task.name] if s.item.id in order}.values())

    def note(sample: Sample) -> None:
        found.append(sample)
        file.write(task, ctx, sample)
        console.progress(f"{len(found)} of {len(order)} items of {task.name}")

    try:
        run_task(ctx, task, limit=limit, done=tuple(found), on_sample=note)
    finally:
        if found:
            found.sort(key=lambda sample: order[sample.item.id])
            results.append(TaskResult(task, tuple(found)))


class _SampleFile:
    """The samples of tasks, one JSON object a line; with ``resume`` those that are there are ``done``."""

    def __init__(self, reading: ReadingOptions, tasks: list[Task], console: Console) -> None:
        self._path = path = reading.output_file
        self.done: dict[str, list[Sample]] = {task.name: [] for task in tasks}
        self._models: set[str] = set()
        self._file: IO[str] | None = None
        earlier = reading.resumed_file()
        if earlier is not None:
            self._read(earlier, tasks)
        if path is not None:
            self._file = console.resources.enter_context(path.open("a", encoding="utf-8"))

    def _read(self, path: Path, tasks: list[Task]) -> None:
        """Read what is done; the last line, which may have been cut, is removed."""
        items = {(task.name, item.id): item for task in tasks for item in task.items}
        lines = read_text(path).split("\n")[:-1]
        for n, line in enumerate(lines, 1):
            try:
                data = json.loads(line)
                item = items.get((data["task"], data["id"]))
                if item is None:
                    continue
                logprobs, greedy = tuple(map(float, data["logprobs"])), data["is_greedy"]
                if len(logprobs) != len(item.choices) or data["answer"] != item.answer:
                    raise ValueError(f"{item.id!r} is another item")
                self.done[data["task"]].append(Sample(item, logprobs, tuple(map(bool, greedy))))
                self._models.add(str(data["model"]))
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(f"{path}, line {n}, is no sample: {error}") from None
        os.truncate(path, sum(len(line.encode()) + 1 for line in lines))

    def check(self, name: str, ctx: Context) -> None:
        """Raise ConfigError if samples of another model or K/V type are there."""
        if self._models - {_model_key(ctx)}:
            raise ConfigError(
                f"{self._path} has samples of another model or K/V type than {name}",
                hint="resume with the same model and options, or name another file",
            )

    def write(self, task: Task, ctx: Context, sample: Sample) -> None:
        """Append a sample."""
        about: dict[str, Any] = {"task": task.name, "model": _model_key(ctx)}
        about |= {"id": sample.item.id, "answer": sample.item.answer}
        names = ("logprobs", "is_greedy", "is_right")
        line = {**about, **{name: getattr(sample, name) for name in names}}
        if self._file is not None:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()


def _model_key(ctx: Context) -> str:
    return f"{ctx.model.fingerprint} {ctx.kv_type}"
