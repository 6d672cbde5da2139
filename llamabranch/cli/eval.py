"""``llamabranch eval``: how well a model does at tasks with right answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, ClassVar

import typer

from llamabranch import ConfigError, Context
from llamabranch.eval import Item, Sample, Task, TaskResult, find_task, run_task, task_names

from .bundles import option, with_bundles
from .console import Console, print_json
from .files import check_new_file
from .formats import number
from .jsonl import read_text
from .measuring import Progress, interruptible, scoring_options
from .options import OUTPUT, REQUESTS, OutputOptions, RuntimeOptions, TargetOptions

_SEQUENCES = 64
_N_CTX = 4096


@dataclass(frozen=True)
class TaskOptions:
    """Which items are scored, and where what is known of each goes."""

    panel: ClassVar[str] = REQUESTS

    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK",
            help="Tasks that are shipped, or of --tasks-dir. Default: all of the one or the other.",
            rich_help_panel="Arguments",
        ),
    ] = None
    tasks_dir: Path | None = option(None, "A folder of tasks, one NAME.jsonl each.")
    limit: int | None = option(None, "Items of each task at most.", min=1)
    list_tasks: bool = option(False, "List the tasks, and score nothing.", "--list")
    samples_file: Path | None = option(
        None,
        "Write what the model made of each item to this file, one a line, at once.",
        "--samples",
        rich_help_panel=OUTPUT,
    )
    resume: bool = option(
        False, "Leave out the items that are in --samples.", "--resume", rich_help_panel=OUTPUT
    )


@with_bundles
def eval(
    *, given: TaskOptions, models: TargetOptions, runtime: RuntimeOptions, output: OutputOptions
) -> None:
    """Score a model on tasks with right answers, offline.

    Tasks of lm-evaluation-harness run through `llamabranch.eval.LlamaBranchLM` in Python.
    """
    with output.console() as console, ExitStack() as stack:
        tasks = _tasks(given)
        if given.list_tasks:
            _print_tasks(console, tasks, as_json=output.as_json)
            return
        done, models_of, file = _open_samples(given.samples_file, given.resume, tasks, stack)
        name = models.announce(console)
        models.find(name)
        more = scoring_options(name, runtime, min(_SEQUENCES, runtime.n_batch or _SEQUENCES))
        if runtime.n_ctx is None:
            more["n_ctx"] = _N_CTX
        ctx = runtime.open(name, console, stack, **more)
        if models_of - {_model_key(ctx)}:
            raise ConfigError(
                f"{given.samples_file} has samples of another model or K/V type than {name}",
                hint="resume with the same model and options, or name another file",
            )
        results: list[TaskResult] = []
        start_s = time.perf_counter()
        with interruptible(console) as interrupted:
            for task in tasks:
                _run(ctx, task, given.limit, done[task.name], file, console, results)
        seconds = time.perf_counter() - start_s
        results = [result for result in results if result.samples]
        if output.as_json:
            answer = {"model": name, "name": ctx.model.name, "seconds": seconds}
            exact = ctx.capabilities.batch_invariant
            tables = [result.as_dict() for result in results]
            print_json({**answer, "batch_invariant": exact, "tasks": tables})
        elif results:
            _print(console, results)
        if interrupted:
            raise interrupted[0]


def _tasks(given: TaskOptions) -> list[Task]:
    """Return the tasks that are asked for. Raises ConfigError if there are none."""
    folder = given.tasks_dir
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    names = given.names or task_names(folder)
    if not names:
        raise ConfigError(f"{folder} has no tasks", hint="a task is a file NAME.jsonl")
    return [find_task(name, folder) for name in dict.fromkeys(names)]


def _model_key(ctx: Context) -> str:
    """Return what samples are of, so that none of another model or K/V type come among them."""
    return f"{ctx.model.fingerprint} {ctx.kv_type}"


def _run(
    ctx: Context,
    task: Task,
    limit: int | None,
    done: list[Sample],
    file: IO[str] | None,
    console: Console,
    results: list[TaskResult],
) -> None:
    """Add the result of a task to ``results``: of the items that are done, where it is interrupted."""
    items = task.items[:limit]
    found = [sample for sample in done if sample.item in items]
    shown = Progress(console, f"items of {task.name}", len(items), len(found))

    def note(sample: Sample) -> None:
        found.append(sample)
        if file is not None:
            line = {"task": task.name, "model": _model_key(ctx), **_as_dict(sample)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
        right = sum(each.is_right for each in found)
        shown.show(len(found), f"{right / len(found):.1%} right")

    result = TaskResult(task, ())
    try:
        result = run_task(ctx, task, limit=limit, done=tuple(found), on_sample=note)
    finally:
        results.append(result if result.samples else TaskResult(task, tuple(found)))


def _open_samples(
    path: Path | None, resume: bool, tasks: list[Task], stack: ExitStack
) -> tuple[dict[str, list[Sample]], set[str], IO[str] | None]:
    """Return the samples of each task that the file has, their models, and the file, open for more."""
    models_of: set[str] = set()
    done: dict[str, list[Sample]] = {task.name: [] for task in tasks}
    if path is None:
        if resume:
            raise ConfigError("--resume needs --samples, where the results are kept")
        return done, models_of, None
    if not resume or not path.is_file():
        check_new_file(path, hint="name another file, or go on with --resume")
        return done, models_of, stack.enter_context(path.open("w", encoding="utf-8"))
    items = {(task.name, item.id): item for task in tasks for item in task.items}
    lines = read_text(path).split("\n")
    whole = "".join(f"{line}\n" for line in lines[:-1])  # the last one may have been cut
    for number_, line in enumerate(lines[:-1], 1):
        try:
            data = json.loads(line)
            item = items.get((data["task"], data["id"]))
            if item is not None:
                done[data["task"]].append(_sample(item, data))
                models_of.add(str(data["model"]))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{path}, line {number_}, is no sample: {error}") from None
    file = stack.enter_context(path.open("r+", encoding="utf-8"))
    file.seek(len(whole.encode()))
    file.truncate()
    return done, models_of, file


def _as_dict(sample: Sample) -> dict[str, object]:
    return {
        "id": sample.item.id,
        "answer": sample.item.answer,
        "logprobs": sample.logprobs,
        "is_greedy": sample.is_greedy,
        "is_right": sample.is_right,
    }


def _sample(item: Item, data: Mapping[str, object]) -> Sample:
    """Return what `_as_dict` was called on; raises if it is of another item."""
    logprobs, greedy = data["logprobs"], data["is_greedy"]
    if not isinstance(logprobs, list) or not isinstance(greedy, list):
        raise TypeError("no lists")
    if len(logprobs) != len(item.choices) or data["answer"] != item.answer:
        raise ValueError(f"{item.id!r} is another item")
    return Sample(item, tuple(map(float, logprobs)), tuple(map(bool, greedy)))


def _print_tasks(console: Console, tasks: list[Task], *, as_json: bool) -> None:
    if as_json:
        described = [
            {"task": task.name, "n_items": len(task.items), "path": str(task.path)}
            for task in tasks
        ]
        print_json({"tasks": described})
        return
    rows = [
        (task.name, str(len(task.items)), "choices" if task.is_choice else "targets")
        for task in tasks
    ]
    console.table(("task", "items", "kind"), rows, left=("kind",))


def _print(console: Console, results: list[TaskResult]) -> None:
    rows = []
    for result in results:
        low, high = result.interval
        n, n_items = len(result.samples), len(result.task.items)
        for metric, (value, stderr) in result.metrics.items():
            is_first = metric == "acc"
            rows.append(
                (
                    result.task.name if is_first else "",
                    (str(n) if n == n_items else f"{n} of {n_items}") if is_first else "",
                    metric,
                    number(value, 4),
                    number(stderr, 4),
                    f"{low:.3f} to {high:.3f}" if is_first else "",
                    number(result.chance, 3) if is_first else "",
                )
            )
    console.table(
        ("task", "items", "metric", "value", "±", "95 % interval", "chance"), rows, left=("metric",)
    )
