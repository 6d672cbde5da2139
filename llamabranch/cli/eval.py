"""``llamabranch eval``: how well a model does at tasks with right answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated

import typer

from llamabranch import ConfigError
from llamabranch.eval import Item, Sample, Task, TaskResult, find_task, run_task, task_names

from .bundles import with_bundles
from .console import Console, print_json
from .files import check_new_file
from .formats import number
from .jsonl import read_text
from .measuring import Progress, interruptible, scoring_options
from .options import OUTPUT, REQUESTS, OutputOptions, RuntimeOptions, TargetOptions

_SEQUENCES = 64
_N_CTX = 4096


@with_bundles
def eval(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK",
            help="Tasks that are shipped, or of --tasks-dir. Default: all of the one or the other.",
        ),
    ] = None,
    tasks_dir: Annotated[
        Path | None,
        typer.Option(help="A folder of tasks, one NAME.jsonl each.", rich_help_panel=REQUESTS),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Items of each task at most.", rich_help_panel=REQUESTS),
    ] = None,
    list_tasks: Annotated[
        bool, typer.Option("--list", help="List the tasks, and score nothing.")
    ] = False,
    samples_file: Annotated[
        Path | None,
        typer.Option(
            "--samples",
            help="Write what the model made of each item to this file, one a line, at once.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Leave out the items that are in --samples.", rich_help_panel=OUTPUT
        ),
    ] = False,
    *,
    models: TargetOptions,
    runtime: RuntimeOptions,
    output: OutputOptions,
) -> None:
    """Score a model on tasks with right answers, offline.

    Tasks of lm-evaluation-harness run through `llamabranch.eval.LlamaBranchLM` in Python.
    """
    with output.console() as console, ExitStack() as stack:
        if tasks_dir is not None and not tasks_dir.is_dir():
            raise ConfigError(f"{tasks_dir} is not a folder")
        listed = names or task_names(tasks_dir)
        if not listed:
            raise ConfigError(f"{tasks_dir} has no tasks", hint="a task is a file NAME.jsonl")
        tasks = [find_task(task, tasks_dir) for task in dict.fromkeys(listed)]
        if list_tasks:
            _print_tasks(console, tasks, as_json=output.as_json)
            return
        done, file = _open_samples(samples_file, resume, tasks, stack)
        name = models.target_name
        models.find(name)
        more = scoring_options(name, runtime, min(_SEQUENCES, runtime.n_batch or _SEQUENCES))
        if runtime.n_ctx is None:
            more["n_ctx"] = _N_CTX
        ctx = runtime.open(name, console, stack, **more)
        results: list[TaskResult] = []
        start_s = time.perf_counter()
        with interruptible(console) as interrupted:
            for task in tasks:
                items = task.items[:limit]
                begun = [sample for sample in done[task.name] if sample.item in items]
                shown = Progress(console, f"items of {task.name}", len(items), len(begun))
                found = list(begun)

                def note(
                    sample: Sample,
                    task: Task = task,
                    found: list[Sample] = found,
                    shown: Progress = shown,
                ) -> None:
                    found.append(sample)
                    if file is not None:
                        line = {"task": task.name, **_as_dict(sample)}
                        file.write(json.dumps(line, ensure_ascii=False) + "\n")
                        file.flush()
                    right = sum(each.is_right for each in found)
                    shown.show(len(found), f"{right / len(found):.1%} right")

                results.append(TaskResult(task, ()))
                try:
                    results[-1] = run_task(ctx, task, limit=limit, done=begun, on_sample=note)
                finally:
                    if not results[-1].samples:
                        results[-1] = TaskResult(task, tuple(found))
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


def _open_samples(
    path: Path | None, resume: bool, tasks: list[Task], stack: ExitStack
) -> tuple[dict[str, list[Sample]], IO[str] | None]:
    """Return the samples of each task that the file has, and the file, open for more."""
    done: dict[str, list[Sample]] = {task.name: [] for task in tasks}
    if path is None:
        if resume:
            raise ConfigError("--resume needs --samples, where the results are kept")
        return done, None
    if not resume or not path.exists():
        check_new_file(path, hint="name another file, or go on with --resume")
        return done, stack.enter_context(path.open("w", encoding="utf-8"))
    items = {(task.name, item.id): item for task in tasks for item in task.items}
    lines = read_text(path).split("\n")
    whole = "".join(f"{line}\n" for line in lines[:-1])  # the last one may have been cut
    for number_, line in enumerate(lines[:-1], 1):
        try:
            data = json.loads(line)
            item = items.get((data["task"], data["id"]))
            if item is not None:
                done[data["task"]].append(_sample(item, data))
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{path}, line {number_}, is no sample: {error}") from None
    file = stack.enter_context(path.open("r+", encoding="utf-8"))
    file.seek(len(whole.encode()))
    file.truncate()
    return done, file


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
