"""``llamabranch eval``: how good models are: at tasks with right answers, or by the text they predict."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, ClassVar

import typer

from llamabranch import ConfigError, Context, hub
from llamabranch.eval import Item, Sample, Task, TaskResult, find_task, run_task, task_names

from .bundles import option, with_bundles
from .console import Console, print_json
from .eval_text import Reading, compare_models, measure_against, measure_perplexity
from .files import check_new_file, read_text
from .formats import number
from .measuring import Progress, interruptible, scoring_options
from .options import OUTPUT, TEXT, ModelOptions, OutputOptions

_SEQUENCES = 64
_N_CTX = 4096


@dataclass(frozen=True)
class EvalModels(ModelOptions):
    """The models that are measured."""

    target: list[str] | None = option(  # type: ignore[assignment]
        None,
        "A GGUF file, a name from `llamabranch models`, or user/repo[:tag]; repeat it for several. "
        "Default: smollm2-135m where it is installed, else tale-target.",
        *("--model", "-m", "--target", "-hf"),
        first=True,
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

    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK",
            help="Tasks that are shipped, or of --tasks-dir. Default: all of the one or the other.",
            rich_help_panel="Arguments",
        ),
    ] = None
    tasks_dir: Path | None = option(None, "A folder of tasks, one NAME.jsonl each.", first=True)
    limit: int | None = option(None, "Items of each task at most.", min=1, first=True)
    list_tasks: bool = option(False, "List the tasks, and score nothing.", "--list", first=True)


@dataclass(frozen=True)
class ReadingOptions:
    """Which text is read, and what the models are compared with."""

    panel: ClassVar[str] = "Perplexity and KL divergence"

    text_file: Path | None = option(
        None,
        "The text: a file in UTF-8. It is cut into chunks of --ctx-size tokens (512), of which the "
        "second half is scored, as llama-perplexity does.",
        *("--perplexity", "--file", "-f"),
        metavar="FILE",
        first=True,
    )
    against: str | None = option(
        None,
        "A model that the others are compared with by KL divergence; or what --save-logits or "
        "llama-perplexity wrote of one, which holds the text too.",
        metavar="MODEL|FILE",
        first=True,
    )
    chunks: int | None = option(
        None, "Score so many chunks at most.  [default: all; 16 with --against MODEL]", min=1,
        first=True,
    )  # fmt: skip
    stride: int | None = option(
        None,
        "Sliding windows, each so many tokens after the last one: another number.",
        *("--stride", "--ppl-stride"),
        min=1,
    )
    save_to: Path | None = option(
        None,
        "Write the log-probabilities to this file, for --against and llama-perplexity.",
        *("--save-logits", "--save-all-logits", "--kl-divergence-base"),
    )
    kept_file: Path | None = option(
        None,
        "Write the results to this file, also when interrupted; of tasks, each item on a line.",
        *("--output", "-o"),
        rich_help_panel=OUTPUT,
        first=True,
    )
    resume: bool = option(False, "Go on where --output ends.", "--resume", rich_help_panel=OUTPUT)


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
    with output.console() as console, ExitStack() as stack:
        if reading.text_file is not None or reading.against is not None:
            if given.names or given.tasks_dir or given.limit or given.list_tasks:
                raise ConfigError("tasks go with neither --perplexity nor --against")
            _read(reading, models, console, stack, as_json=output.as_json)
        else:
            if reading.chunks or reading.stride or reading.save_to:
                raise ConfigError("--chunks, --stride and --save-logits need --perplexity FILE")
            _score_tasks(given, reading, models, console, stack, as_json=output.as_json)


def _read(
    reading: ReadingOptions,
    models: EvalModels,
    console: Console,
    stack: ExitStack,
    *,
    as_json: bool,
) -> None:
    """Measure models by a text."""
    against = reading.against
    is_file = against is not None and Path(against).is_file() and not _is_model(Path(against))
    if against is not None and not is_file and reading.text_file is None:
        hint = "or give --against a file that --save-logits wrote, which holds the text"
        raise ConfigError("--against MODEL needs --perplexity FILE, the text", hint=hint)
    task = Reading(
        text_file=reading.text_file,
        chunks=reading.chunks,
        stride=reading.stride,
        save_to=reading.save_to,
        kept_file=reading.kept_file,
        resume=reading.resume,
        as_json=as_json,
    )
    names = models.names(console)
    if against is not None and is_file:
        measure_against(Path(against), task, names, models, console, stack)
    elif against is None and len(names) == 1:
        measure_perplexity(task, names[0], models, console, stack)
    else:
        compare_models(task, names, against, models, console)


def _is_model(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


# -- tasks ---------------------------------------------------------------------------------------------


def _score_tasks(
    given: TaskOptions,
    reading: ReadingOptions,
    models: EvalModels,
    console: Console,
    stack: ExitStack,
    *,
    as_json: bool,
) -> None:
    tasks = _tasks(given)
    if given.list_tasks:
        _print_tasks(console, tasks, as_json=as_json)
        return
    done, models_of, file = _open_samples(reading.kept_file, reading.resume, tasks, stack)
    names = models.names(console)
    for name in names:
        hub.resolve(name)
    if file is not None and len(names) > 1:
        raise ConfigError("--output is for one model", hint="give one file for each run")
    answers: list[dict[str, object]] = []
    results: list[tuple[str, TaskResult]] = []
    with interruptible(console) as interrupted:
        for name in names:
            with ExitStack() as closing:
                more = scoring_options(name, models, _SEQUENCES)
                if models.n_ctx is None:
                    more["n_ctx"] = _N_CTX
                ctx = models.open(name, console, closing, **more)
                if models_of - {_model_key(ctx)}:
                    raise ConfigError(
                        f"{reading.kept_file} has samples of another model or K/V type than {name}",
                        hint="resume with the same model and options, or name another file",
                    )
                start_s = time.perf_counter()
                found: list[TaskResult] = []
                try:
                    for task in tasks:
                        _run(ctx, task, given.limit, done[task.name], file, console, found)
                finally:
                    found = [result for result in found if result.samples]
                    results += [(name, result) for result in found]
                    answers.append(
                        {
                            "model": name,
                            "name": ctx.model.name,
                            "seconds": time.perf_counter() - start_s,
                            "batch_invariant": ctx.capabilities.batch_invariant,
                            "tasks": [result.as_dict() for result in found],
                        }
                    )
    if as_json:
        print_json(answers[0] if len(names) == 1 and answers else {"models": answers})
    elif results:
        _print(console, results, with_model=len(names) > 1)
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
            line = {
                "task": task.name,
                "model": _model_key(ctx),
                "id": sample.item.id,
                "answer": sample.item.answer,
                "logprobs": sample.logprobs,
                "is_greedy": sample.is_greedy,
                "is_right": sample.is_right,
            }
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
            raise ConfigError("--resume needs --output, where the results are kept")
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


def _sample(item: Item, data: Mapping[str, object]) -> Sample:
    """Return the sample of a line; raises if it is of another item."""
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


def _print(console: Console, results: list[tuple[str, TaskResult]], *, with_model: bool) -> None:
    rows: list[tuple[str, ...]] = []
    for model, result in results:
        low, high = result.interval
        n, n_items = len(result.samples), len(result.task.items)
        for metric, (value, stderr) in result.metrics.items():
            is_first = metric == "acc"
            row = (
                result.task.name if is_first else "",
                (str(n) if n == n_items else f"{n} of {n_items}") if is_first else "",
                metric,
                number(value, 4),
                number(stderr, 4),
                f"{low:.3f} to {high:.3f}" if is_first else "",
                number(result.chance, 3) if is_first else "",
            )
            rows.append((model if is_first else "", *row) if with_model else row)
    columns = ("task", "items", "metric", "value", "±", "95 % interval", "chance")
    console.table((*("model",) * with_model, *columns), rows, left=("task", "metric"))
