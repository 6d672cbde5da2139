"""Three tasks for lm-evaluation-harness that come with the package. They need no network.

``suite/`` holds a file of JSON objects for each task, all of one kind:

``{"context": ..., "choices": [...], "answer": 0}``  which choice is the most probable continuation
``{"context": ..., "target": ...}``                  whether the model would generate the target greedily
"""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import ConfigError

__all__ = ["suite", "suite_items"]

_SUITE = Path(__file__).parent / "suite"


def suite() -> list[dict[str, object]]:
    """Return the configurations of the shipped tasks, for ``lm_eval.simple_evaluate(tasks=suite())``."""
    return [_configuration(path) for path in sorted(_SUITE.glob("*.jsonl"))]


def suite_items(name: str) -> list[dict[str, object]]:
    """Return the items of a shipped task from its file.

    Raises:
        ConfigError: no shipped task has this name.
    """
    names = sorted(path.stem for path in _SUITE.glob("*.jsonl"))
    if name not in names:
        raise ConfigError(f"there is no task {name!r}", hint=f"tasks: {', '.join(names)}")
    lines = (_SUITE / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _configuration(path: Path) -> dict[str, object]:
    if "choices" in suite_items(path.stem)[0]:
        kind, metrics = "multiple_choice", ("acc", "acc_norm")
        answers = {"doc_to_choice": "choices", "doc_to_target": "answer"}
    else:
        kind, metrics = "loglikelihood", ("perplexity", "acc")
        answers = {"doc_to_target": "target"}
    return {
        "task": path.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": kind,
        "doc_to_text": "context",
        "target_delimiter": "",
        **answers,
        "metric_list": [{"metric": metric} for metric in metrics],
    }
