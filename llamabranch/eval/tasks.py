"""Tasks: items with a right answer, in files of JSON objects, and how often a model finds it.

A file has one object a line, all of one kind:

``{"context": ..., "choices": [...], "answer": 0}``  which choice is the most probable continuation
``{"context": ..., "target": ...}``                  whether the target is what the model would write
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..context import Context
from ..errors import ConfigError
from ..files import path_of
from .perplexity import exp
from .scoring import Score, score

_SUITE = Path(__file__).parent / "suite"
_Z = 1.959963984540054  # of a 95 % interval


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        id: its name in its task.
        context: what comes before.
        choices: what may follow; a single one is a target that has to be the model's own continuation.
        answer: the index of the right one.
    """

    id: str
    context: str
    choices: tuple[str, ...]
    answer: int = 0


@dataclass(frozen=True)
class Task:
    """Items of one kind, and where they come from."""

    name: str
    path: Path
    items: tuple[Item, ...] = field(repr=False)

    @property
    def is_choice(self) -> bool:
        """Whether its items have choices, or a target."""
        return len(self.items[0].choices) > 1

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Task:
        """Read a task from a file; its name is the file's.

        Raises:
            ConfigError: the file cannot be read, is not UTF-8, or a line is no item; names the line.
        """
        path = path_of(path)
        try:
            text = path.read_text("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8", hint="convert it: iconv -t utf-8") from None
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        lines = enumerate(text.split("\n"), 1)
        items = tuple(_item(path, number, line) for number, line in lines if line.strip())
        if not items:
            raise ConfigError(f"{path} has no items")
        if len({len(item.choices) > 1 for item in items}) > 1:
            raise ConfigError(f"{path} has items with choices and items with targets")
        if len({item.id for item in items}) < len(items):
            raise ConfigError(f"{path} has two items with one id")
        return cls(path.stem, path, items)


@dataclass(frozen=True)
class Sample:
    """What a model made of an item.

    Attributes:
        item: the item.
        logprobs: of each choice, nats.
        is_greedy: of each choice, whether it is what the model would write at temperature 0.
    """

    item: Item
    logprobs: tuple[float, ...]
    is_greedy: tuple[bool, ...]

    @property
    def is_right(self) -> bool:
        """Whether the answer is the most probable choice, or the target what the model would write."""
        return self._answers(self.logprobs)

    @property
    def is_right_by_length(self) -> bool:
        """The same for log-probabilities a character, the harness's ``acc_norm``."""
        choices = zip(self.logprobs, self.item.choices, strict=True)
        return self._answers([logprob / len(choice) for logprob, choice in choices])

    def _answers(self, values: Sequence[float]) -> bool:
        if len(values) == 1:
            return self.is_greedy[0]
        return values.index(max(values)) == self.item.answer


@dataclass(frozen=True)
class TaskResult:
    """How well a model did.

    Attributes:
        task: the task.
        samples: of the items that are done, in the order of the task.
    """

    task: Task
    samples: tuple[Sample, ...] = field(repr=False)

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """Values with their standard errors, by the harness's names.

        ``acc``: the share of right answers. ``acc_norm``: that by log-probability a character.
        ``perplexity``: of targets, exp of the mean of -log p.
        """
        found = {"acc": _mean([sample.is_right for sample in self.samples])}
        if self.task.is_choice:
            found["acc_norm"] = _mean([sample.is_right_by_length for sample in self.samples])
        else:
            mean, stderr = _mean([-sample.logprobs[0] for sample in self.samples])
            value = exp(mean)
            found["perplexity"] = value, value * stderr
        return found

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of ``acc``, Wilson's."""
        n = len(self.samples)
        if not n:
            return math.nan, math.nan
        share = sum(sample.is_right for sample in self.samples) / n
        z = _Z * _Z / n
        half = _Z * math.sqrt(share * (1 - share) / n + z / (4 * n))
        return (share + z / 2 - half) / (1 + z), (share + z / 2 + half) / (1 + z)

    @property
    def chance(self) -> float:
        """The share of right answers of a guess."""
        shares = [1 / len(sample.item.choices) for sample in self.samples]
        return _mean(shares)[0] if self.task.is_choice else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return JSON types, without the samples."""
        return {
            "task": self.task.name,
            "n_items": len(self.task.items),
            "n_done": len(self.samples),
            "metrics": {k: {"value": v, "stderr": e} for k, (v, e) in self.metrics.items()},
            "interval_95": list(self.interval),
            "chance": self.chance,
        }


def task_names(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the names of the tasks that are shipped, or of the ``.jsonl`` files of a folder."""
    return sorted(path.stem for path in path_of(folder or _SUITE).glob("*.jsonl"))


def find_task(name: str, folder: str | os.PathLike[str] | None = None) -> Task:
    """Return a task by its name: one of ``folder``, or one that is shipped.

    Raises:
        ConfigError: there is none of that name, or its file is no task.
    """
    folders = [_SUITE] if folder is None else [path_of(folder), _SUITE]
    for place in folders:
        if (path := place / f"{name}.jsonl").is_file():
            return Task.read(path)
    known = {each for place in folders for each in task_names(place)}
    raise ConfigError(f"there is no task {name!r}", hint=f"tasks: {', '.join(sorted(known))}")


def run_task(
    ctx: Context,
    task: Task,
    *,
    limit: int | None = None,
    on_sample: Callable[[Sample], None] | None = None,
) -> TaskResult:
    """Return how well a model does at a task; items share what they have in common, see `score`.

    Args:
        ctx: of the model; the more cells and sequences are free, the faster it is.
        task: from `find_task` or `Task.read`.
        limit: how many items at most, from the beginning; None = all.
        on_sample: called with each sample as soon as it is known, in any order.

    Raises:
        ConfigError: a choice without tokens. CacheFullError: an item is longer than the context; nothing
            is decoded. TokenizeError, DecodeError.
    """
    items = task.items[:limit]

    def sample(number: int, scores: list[Score]) -> Sample:
        logprobs, greedy = zip(*((its.logprob, its.is_greedy) for its in scores), strict=True)
        return Sample(items[number], logprobs, greedy)

    def note(number: int, scores: list[Score]) -> None:
        if on_sample is not None:
            on_sample(sample(number, scores))

    names = [f"{task.name}, item {item.id}" for item in items]
    found = score(ctx, [(i.context, i.choices) for i in items], on_done=note, names=names)
    return TaskResult(task, tuple(map(sample, range(len(found)), found)))


def _item(path: Path, number: int, line: str) -> Item:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number} is no JSON: {error}") from None
    if isinstance(data, dict):  # tables have null where a column is empty
        data = {name: value for name, value in data.items() if value is not None}
    match data:
        case {"context": str(context), "target": target}:
            choices, answer, n_keys = [target], 0, 2
        case {"context": str(context), "choices": [_, _, *_] as choices, "answer": answer}:
            n_keys = 3
        case _:
            choices, answer, n_keys = [], 0, 0
    is_answer = type(answer) is int and 0 <= answer < len(choices)
    are_texts = all(isinstance(choice, str) and choice for choice in choices)
    if not is_answer or not are_texts or len(data.keys() - {"id"}) != n_keys:
        raise ConfigError(
            f"{path}, line {number} is not an object with context, choices and answer, or with context "
            "and target"
        )
    return Item(str(data.get("id", number)), context, tuple(choices), answer)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, as the harness computes them."""
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, math.sqrt(variance / n)
