"""Tasks of reasoning-gym: `reasoning_gym:chain_sum?size=500&seed=1&min_terms=2`.

The parameters are those of the task's configuration. Rows have `question`, `answer`, null if the
task has several right ones, and the record that the verifier `reasoning_gym` scores by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msrl import reasoning_tasks
from msrl.errors import MsrlError
from msrl.types import JsonObject

_DEFAULTS = {"size": 500, "seed": 0}
package_version = reasoning_tasks.installed_version


def complete(task: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with size and seed.

    Raises:
        MsrlError: The package is not installed, or the task or a parameter does not exist.
    """
    completed = {**_DEFAULTS, **parameters}
    for name, minimum in (("size", 1), ("seed", 0)):
        if type(completed[name]) is not int or completed[name] < minimum:
            raise MsrlError(f"{name}={completed[name]}: must be a whole number from {minimum}")
    reasoning_tasks.make_dataset(task, completed)
    return completed


def open_task(task: str, parameters: Mapping[str, Any]) -> Callable[[int], JsonObject]:
    """Return the function that generates a row by its number."""
    dataset = reasoning_tasks.make_dataset(task, parameters)

    def generate(number: int) -> JsonObject:
        record = reasoning_tasks.make_record(dataset, task, parameters, number)
        entry = record["entry"]
        return {"question": entry["question"], "answer": entry["answer"], "record": record}

    return generate
