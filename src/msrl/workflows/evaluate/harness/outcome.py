"""Results of lm-evaluation-harness as metrics, intervals and rows of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrl.algorithms.intervals import mean_interval
from msrl.workflows.evaluate.harness.tasks import LoadedBenchmark

_STDERR = "_stderr"
_FIELDS = frozenset(("name", "alias", "sample_len", "sample_count"))


def metrics(loaded: LoadedBenchmark, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracy of a benchmark, its other metrics, and the accuracies of its tasks.

    The accuracy has the name of the benchmark; other names are `gsm8k/exact_match,strict-match`
    and `mmlu/mmlu_astronomy`.
    """
    name, main, top = loaded.benchmark.name, loaded.benchmark.metric, loaded.top
    values: dict[str, float] = {name: float(results[top][main])}
    for metric, value in results[top].items():
        is_metric = metric not in _FIELDS and _STDERR not in metric and metric != main
        if is_metric and isinstance(value, int | float):
            values[f"{name}/{metric}"] = float(value)
    for task, content in results.items():
        if task != top and main in content:
            values[f"{name}/{task}"] = float(content[main])
    return values


def interval(
    loaded: LoadedBenchmark,
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    accuracy: float,
    confidence: float,
) -> dict[str, tuple[float, float]]:
    """Return the interval of the accuracy over all questions.

    It is empty if the accuracy is not the share of correct questions.
    """
    metric, _, chosen = loaded.benchmark.metric.partition(",")
    values = np.array(
        [
            float(sample[metric])
            for task in samples.values()
            for sample in task
            if sample["filter"] == chosen
        ]
    )
    is_share = bool(len(values)) and bool(((values >= 0) & (values <= 1)).all())
    if not is_share or not np.isclose(values.mean(), accuracy):
        return {}
    return {loaded.benchmark.name: mean_interval(values, 1, confidence)}


def rows(
    loaded: LoadedBenchmark, samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, object]]:
    """Return a row for each question.

    It has the prompt, the target and the metrics, and either the response with the answers that
    were found in it, or the choices with their log-likelihoods.
    """
    metric, _, chosen = loaded.benchmark.metric.partition(",")
    questions: dict[tuple[str, int], dict[str, object]] = {}
    for task, entries in samples.items():
        for sample in entries:
            key = task, int(sample["doc_id"])
            row = questions.setdefault(key, _row(task, sample))
            name = str(sample["filter"])
            if "answers" in row:
                _part(row, "answers")[name] = _plain(sample["filtered_resps"][0])
            for measured in sample["metrics"]:
                _part(row, "metrics")[f"{measured},{name}"] = _plain(sample[measured])
            if name == chosen and metric in sample:
                row["is_right"] = bool(float(sample[metric]) == 1.0)
    return list(questions.values())


def _row(task: str, sample: Mapping[str, Any]) -> dict[str, object]:
    arguments, responses = sample["arguments"], sample["resps"]
    row: dict[str, object] = {
        "task": task,
        "row": int(sample["doc_id"]),
        "prompt": arguments[0][0],
        "target": _plain(sample["target"]),
    }
    if isinstance(arguments[0][1], str):
        row["choices"] = [argument[1] for argument in arguments]
        row["logprobs"] = [float(response[0][0]) for response in responses]
    else:
        row |= {"response": responses[0][0], "answers": {}}
    return {**row, "metrics": {}, "is_right": None}


def _part(row: dict[str, object], name: str) -> dict[str, object]:
    part = row[name]
    assert isinstance(part, dict)
    return part


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, str | int | float | bool | None) else str(value)
