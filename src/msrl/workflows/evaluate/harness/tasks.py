"""Tasks of lm-evaluation-harness 0.4.13, with the number of examples and the rows of the user.

Only the folder of a benchmark in the harness's package is indexed. Functions that its YAML files
name are those of the package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from msrl.errors import MsrlError
from msrl.rewards import sandbox
from msrl.workflows.evaluate.harness.benchmark import Benchmark
from msrl.workflows.evaluate.harness.programs import sandboxed_programs
from msrl.workflows.evaluate.harness.rows import BenchmarkFolder, digest

_PACKAGE, _VERSION = "lm_eval", "0.4.13"
_FEWSHOT_SEED = 1234  # of the harness


# Exceptions of templates and functions of a task for values that they do not expect.
ROW_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)


def unreadable(name: str, error: Exception, row: int | None = None) -> MsrlError:
    """Return the error for a row of a task whose values the harness cannot use."""
    where = name if row is None else f"{name}, row {row + 1}"
    text = (str(error).splitlines() or [""])[0]
    return MsrlError(
        f"evaluate.benchmark_data: {where}: lm-evaluation-harness cannot use the values of a row "
        f"({type(error).__name__}: {text}). Compare its columns with those of the published "
        "dataset."
    )


@dataclass(frozen=True, slots=True)
class LoadedBenchmark:
    """Tasks of a benchmark.

    Attributes:
        benchmark: Its declaration.
        loaded: Tasks and groups, as the harness's evaluator takes them.
        shots: Number of examples before each question.
        rows: Digest of the local files; empty for those of the hub.
    """

    benchmark: Benchmark
    loaded: Mapping[str, Any]
    shots: int
    rows: str

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The tasks by name."""
        return self.loaded["tasks"]

    @property
    def top(self) -> str:
        """Name of the group or of the only task."""
        groups = self.loaded["groups"]
        names = (self.benchmark.task, self.benchmark.chat_task)
        return next((name for name in names if name in groups), next(iter(self.tasks)))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the tasks, and of their group."""
        items = {**self.tasks, **self.loaded["groups"]}
        versions = (
            getattr(item, "VERSION", getattr(item, "version", "")) for item in items.values()
        )
        return dict(zip(items, map(str, versions), strict=True))

    def begin(self) -> None:
        """Draw the same examples as in every evaluation."""
        for task in self.tasks.values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)


def version() -> str:
    """Return the version of the harness.

    Raises:
        MsrlError: Another version is installed, whose tasks may differ.
        ModuleNotFoundError: It is not installed.
    """
    importlib.import_module(_PACKAGE)
    installed = importlib.metadata.version(_PACKAGE)
    if installed != _VERSION:
        raise MsrlError(
            f"evaluate.benchmarks: {_PACKAGE} {installed} is installed, and msrl reads the tasks "
            f"of {_VERSION}. Install it with: pip install 'msrl[benchmarks]'"
        )
    return installed


def load(
    benchmark: Benchmark, data: str | None, *, shots: int | None, is_chat: bool
) -> LoadedBenchmark:
    """Load the tasks and the rows of a benchmark.

    Args:
        benchmark: Declaration of the benchmark.
        data: Folder of the rows; None for the hub.
        shots: Number of examples; None for that of the suite.
        is_chat: True if the questions go through a chat template.

    Raises:
        MsrlError: A file or a column is missing, there are not enough examples, or this machine
            lacks what the benchmark needs.
        ModuleNotFoundError: A package is not installed.
    """
    _check_machine(benchmark)
    logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
    importlib.import_module("datasets").disable_progress_bars()
    with sandboxed_programs() if benchmark.runs_code else nullcontext():
        manager, used = _manager(benchmark.folder), list[Path]()
        folder = None
        if data is not None:
            folder = BenchmarkFolder(Path(data), benchmark.name, benchmark.columns)
        task = benchmark.chat_task if is_chat else benchmark.task
        kind = _local_task(benchmark, folder, shots, used, has_subjects=_is_group(manager, task))
        try:
            loaded = _build(manager, task, kind)
        except (AssertionError, ModuleNotFoundError) as error:
            if getattr(error, "name", None):
                raise
            reason = str(error).partition(". ")[0]  # that the module of the task raises
            raise MsrlError(
                f"evaluate.benchmarks: {benchmark.name}: {reason}. Install it with: "
                "pip install 'msrl[benchmarks]'"
            ) from error
        except ROW_ERRORS as error:
            raise unreadable(benchmark.name, error) from error
    first = next(iter(loaded["tasks"].values()))
    return LoadedBenchmark(benchmark, loaded, first.config.num_fewshot, digest(used))


def _check_machine(benchmark: Benchmark) -> None:
    """Raise MsrlError if this machine has no sandbox or no resource that the benchmark needs."""
    reason = sandbox.refusal() if benchmark.runs_code else None
    if reason is not None:
        raise MsrlError(
            f"evaluate.benchmarks: {benchmark.name} runs programs of the model, which needs a "
            f"sandbox: {reason}"
        )
    if not benchmark.nltk_data:
        return
    data = importlib.import_module("nltk.data")
    try:
        data.find(benchmark.nltk_data)
    except LookupError:
        resource = benchmark.nltk_data.rpartition("/")[2]
        raise MsrlError(
            f"evaluate.benchmarks: {benchmark.name} needs the resource {benchmark.nltk_data} of "
            f"NLTK, which is not installed. Run `python -m nltk.downloader {resource}`, or set "
            "NLTK_DATA to a folder that has it."
        ) from None


def _manager(folder: str) -> Any:
    """Return the index of the tasks in a folder of the harness's package."""
    tasks = importlib.import_module(f"{_PACKAGE}.tasks")
    root = Path(str(tasks.__file__)).parent / folder
    return tasks.TaskManager(include_defaults=False, include_path=[root])


def _is_group(manager: Any, task: str) -> bool:
    return task in manager.all_groups


def _build(manager: Any, task: str, kind: type[Any]) -> Mapping[str, Any]:
    """Build a task, or the tasks of a group, with a class of tasks."""
    entry = manager.task_index[task]
    # TaskFactory.build (0.4.13) passes overrides on to all tasks of a group, and `class` is the
    # class of a task in place of ConfigurableTask.
    built = manager._factory.build(entry, overrides={"class": kind}, registry=manager.task_index)
    return manager.load(built)


def _local_task(
    benchmark: Benchmark,
    folder: BenchmarkFolder | None,
    shots: int | None,
    used: list[Path],
    *,
    has_subjects: bool,
) -> type[Any]:
    """Return a class of tasks that reads the rows of a folder, or of the hub.

    `used` receives the files that its tasks have read.
    """
    from datasets import Dataset

    base: Any = importlib.import_module("lm_eval.api.task").ConfigurableTask

    class LocalTask(base):
        def __init__(self, config: dict[str, Any]) -> None:
            settings = {key: value for key, value in config.items() if key != "class"}
            super().__init__(config=_with_shots(settings, benchmark, shots))

        def download(self, dataset_kwargs: Any = None, **options: Any) -> None:
            if folder is None:
                self.dataset = _of_hub(benchmark, self.config)
                return
            subject, self.dataset = _subject(self.config), dict[str, Any]()
            for split in _splits(self.config):
                rows = folder.read(subject, split, has_subjects=has_subjects)
                used.extend(folder.files(subject, split, has_subjects=has_subjects))
                self.dataset[split] = _dataset(Dataset, rows, benchmark)

    return LocalTask


def _dataset(kind: Any, rows: list[dict[str, Any]], benchmark: Benchmark) -> Any:
    """Return rows as the harness reads them.

    Raises:
        MsrlError: A column has values of different types.
    """
    import pyarrow as pa

    try:
        return kind.from_list(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise MsrlError(
            f"evaluate.benchmark_data: a column of {benchmark.name} has values of different "
            f"types: {str(error).splitlines()[0]}"
        ) from error


def _subject(config: Any) -> str:
    """Return the name of a task's subset, or of its dataset without the name of the suite."""
    if config.dataset_name:
        return str(config.dataset_name)
    return str(config.dataset_path).rpartition("/")[2].removeprefix("agieval-")


def _splits(config: Any) -> list[str]:
    """Return the splits that a task reads: of the questions, and of the examples."""
    splits = [config.test_split or config.validation_split]
    if config.num_fewshot and config.fewshot_config.samples is None:
        splits.append(config.fewshot_config.split or config.training_split)
    return list(dict.fromkeys(splits))


def _with_shots(config: dict[str, Any], benchmark: Benchmark, shots: int | None) -> dict[str, Any]:
    """Return the configuration of a task with a number of examples.

    Without examples, the task does not read their split.

    Raises:
        MsrlError: The suite has not as many examples.
    """
    own = config.get("num_fewshot")
    count = shots if shots is not None else (benchmark.shots if own is None else own)
    examples = (config.get("fewshot_config") or {}).get("samples")
    examples = examples() if callable(examples) else examples
    split = config.get("fewshot_split") or config.get("training_split")
    if count and examples is None and split is None:
        raise MsrlError(f"evaluate.num_fewshot={count}: {benchmark.name} has no examples. Use 0.")
    if examples is not None and count > len(examples):
        raise MsrlError(
            f"evaluate.num_fewshot={count}: {benchmark.name} has {len(examples)} examples. "
            f"Use {len(examples)} or fewer."
        )
    if count:
        return {**config, "num_fewshot": count}
    unread = ["training_split", "fewshot_split"]
    if config.get("test_split"):
        unread.append("validation_split")
    return {**config, **dict.fromkeys(unread), "num_fewshot": 0}


def _of_hub(benchmark: Benchmark, config: Any) -> Any:
    """Return the dataset of a task from the hub. No code of the dataset runs.

    Raises:
        MsrlError: The hub does not provide it.
    """
    import datasets

    options = dict(config.dataset_kwargs or {})
    options.pop("trust_remote_code", None)
    try:
        return datasets.load_dataset(config.dataset_path, config.dataset_name, **options)
    except Exception as error:  # of the network, the hub, or the files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise MsrlError(
            f"evaluate.benchmarks: {benchmark.name}: the hub does not provide the dataset "
            f"{config.dataset_path}: {reason[0]}. Set evaluate.benchmark_data to a folder of rows."
        ) from error
