"""Rows of a task in place of those of a data file."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import unquote

import yaml

from msrl import registry
from msrl.errors import MsrlError
from msrl.processes.child import ONE_THREAD, WorkerProcess
from msrl.processes.messages import RAISED, READY
from msrl.types import JsonObject

# Some tasks iterate over sets of texts, whose order follows from the hashes.
_ENVIRONMENT = {**ONE_THREAD, "PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class TaskRows:
    """Rows that a package generates. `name` is the input as the user wrote it."""

    name: str
    package: str
    task: str
    parameters: Mapping[str, Any]
    version: str

    def __str__(self) -> str:
        return self.name

    @property
    def identity(self) -> JsonObject:
        """Everything that the rows depend on."""
        return {
            "package": self.package,
            "task": self.task,
            "parameters": dict(self.parameters),
            "version": self.version,
        }

    def generate(self) -> Generator[JsonObject | MsrlError]:
        """Yield the rows, which another process generates; an error in place of a failed one.

        Raises:
            MsrlError: The process has ended.
        """
        setup = (self.package, self.task, dict(self.parameters))
        worker = WorkerProcess("msrl.data.tasks._worker", setup, sys.path, environment=_ENVIRONMENT)
        number = 0
        try:
            while (frames := worker.receive()) is not None:
                for kind, _, detail in frames:
                    if kind == READY:
                        return
                    number += 1
                    error = MsrlError(f"{self.name}: row {number}: {detail}")
                    yield error if kind == RAISED else json.loads(detail)
            raise MsrlError(
                f"{self.name}: the process that generates the rows ended after row {number} with "
                f"exit code {worker.exit_code()}."
            )
        finally:
            worker.kill()


def open_rows(name: str) -> TaskRows:
    """Return the rows of `PACKAGE:TASK?KEY=VALUE&KEY=VALUE`.

    Raises:
        MsrlError: The name has another form, or its package, task or a parameter does not exist.
    """
    package, _, rest = name.partition(":")
    task, _, query = rest.partition("?")
    try:
        if not task:
            raise MsrlError(f"names no task. Write {package}:TASK?size=500.")
        module = import_module(f"{registry.TASKS}.{package}")
        parameters = module.complete(task, _parameters(query))
        return TaskRows(name, package, task, parameters, module.package_version())
    except MsrlError as error:
        raise MsrlError(f"preprocess.input={name}: {error}") from error


def _parameters(query: str) -> dict[str, Any]:
    """Return the parameters of a name. Values are YAML, as those of `--set`.

    Raises:
        MsrlError: A parameter has no value, or is set twice.
    """
    parameters: dict[str, Any] = {}
    for item in filter(None, query.split("&")):
        key, separator, text = item.partition("=")
        if not separator:
            raise MsrlError(f"{item}: has no value. Write {item}=VALUE.")
        if key in parameters:
            raise MsrlError(f"{key}: is set twice. Remove one.")
        parameters[key] = _value(unquote(text))
    return parameters


def _value(text: str) -> Any:
    """Return the JSON value of a YAML text; a text that is no YAML, or a date, stays a text."""
    with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, RecursionError):
        return json.loads(json.dumps(yaml.safe_load(text)))
    return text
