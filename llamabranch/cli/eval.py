"""``llamabranch eval``: how good models are: at tasks with right answers, or by the text they predict."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from llamabranch import ConfigError, Context, hub
from llamabranch.eval import Sample, Task, TaskResult, find_task, run_task, task_names

from .bundles import argument, option, with_bundles
from .console import Console, Progress
from .eval_text import ReadingOptions, compare_models, measure, scoring_options
from .formats import number
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
            if reading.chunks or reading.save_to:
                raise ConfigError("--chunks and --save-logits need --perplexity FILE")
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
    results: list[tuple[str, list[TaskResult], dict[str, Any]]] = []
    file = _SampleFile(reading, console)
    names = models.names(console)
    for name in names:
        hub.resolve(name, download=None)
    if reading.output_file is not None and len(names) > 1:
        raise ConfigError("--output is for one model", hint="give one file for each run")
    try:
        for name in names:
            more = scoring_options(name, models, _SEQUENCES)
            if models.n_ctx is None:
                more["n_ctx"] = _N_CTX
            with models.open(name, console, **more) as ctx:
                found = list[TaskResult]()
                about: dict[str, Any] = {"model": name, "name": ctx.model.name}
                about["batch_invariant"] = ctx.capabilities.batch_invariant
                results.append((name, found, about))
                start_s = time.perf_counter()
                try:
                    for task in tasks:
                        _run(ctx, task, given.limit, file, console, found)
                finally:
                    about["seconds"] = time.perf_counter() - start_s
                    about["tasks"] = [result.as_dict() for result in found]
    finally:  # what is done is printed also when it is interrupted
        console.progress("")
        if any(found for _, found, _ in results):
            _print(console, results, with_model=len(names) > 1)
            answers = [about for _, _, about in results]
            console.answer(answers[0] if len(names) == 1 else {"models": answers})


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
    found = list[Sample]()
    shown = Progress(console, f"items of {task.name}")

    def note(sample: Sample) -> None:
        found.append(sample)
        file.write(task, ctx, sample)
        right = sum(each.is_right for each in found)
        shown.show(len(found), len(order), f"{right / len(found):.1%} right")

    try:
        run_task(ctx, task, limit=limit, on_sample=note)
    finally:
        if found:
            found.sort(key=lambda sample: order[sample.item.id])
            results.append(TaskResult(task, tuple(found)))


class _SampleFile:
    """The samples of tasks, one JSON object a line."""

    def __init__(self, reading: ReadingOptions, console: Console) -> None:
        path = reading.check_output()
        self._file: IO[str] | None = None
        if path is not None:
            self._file = console.resources.enter_context(path.open("a", encoding="utf-8"))

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


def _print(
    console: Console,
    results: list[tuple[str, list[TaskResult], dict[str, Any]]],
    *,
    with_model: bool,
) -> None:
    rows: list[tuple[str, ...]] = []
    for model, result in ((model, result) for model, found, _ in results for result in found):
        low, high = result.interval
        n, n_items = len(result.samples), len(result.task.items)
        first = (model, result.task.name, str(n) if n == n_items else f"{n} of {n_items}")
        last = (f"{low:.3f} to {high:.3f}", number(result.chance, 3))
        for metric, (value, stderr) in result.metrics.items():
            figures = (metric, number(value, 4), number(stderr, 4))
            is_first = metric == "acc"
            row = (
                *(first if is_first else ("",) * 3),
                *figures,
                *(last if is_first else ("",) * 2),
            )
            rows.append(row if with_model else row[1:])
    columns = ("task", "items", "metric", "value", "±", "95 % interval", "chance")
    console.table((*("model",) * with_model, *columns), rows, left=("task", "metric"))
