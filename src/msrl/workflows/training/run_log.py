"""What both trainings keep of a run: its folder, its trackers, and the report at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.tracking.console import StepConsole
from msrl.tracking.metrics import MetricsWriter, read_metrics
from msrl.tracking.plots import plot_metrics
from msrl.tracking.report import summarize, write_report
from msrl.tracking.run import RunFolder
from msrl.tracking.tracker import Trackers, open_trackers
from msrl.types import StepReport
from msrl.workflows.training.settings import run_path


def checkpoint_root(config: Config) -> Path:
    """Where the run's checkpoints go; absolute, since workers may run elsewhere."""
    return (Path(config.checkpoint.save) if config.checkpoint.save else run_path(config) / "checkpoints").absolute()


def counted(number: int, noun: str) -> str:
    """A number of things, in words: `1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class RunLog:
    """An open run: takes the report of every step; on a clean end it writes the summary and the curves."""

    def __init__(self, config: Config, *, num_steps: int, start_step: int, curves: Sequence[str]) -> None:
        self._folder = RunFolder.create(
            config.run.dir, config.run.name, config=config.model_dump(mode="json"), resume=config.checkpoint.resume != "none"
        )
        self.path = self._folder.path
        self._curves = tuple(curves)
        resumed_step = start_step if config.checkpoint.resume != "none" else None
        metrics = MetricsWriter(self.path, resumed_step=resumed_step)
        if metrics.num_dropped:
            print(f"{metrics.path}: left out {metrics.num_dropped} steps that are done again", file=sys.stderr)
        self.has_reports = bool(read_metrics(self.path))  # of an attempt that goes on here
        trackers = [
            metrics,
            StepConsole(num_steps, every_steps=config.log.every_steps),
            *open_trackers(config.log.trackers, self.path, resumed_step=resumed_step),
        ]
        self._trackers = Trackers(trackers)

    def say(self, text: str) -> None:
        """A line on standard error, about what takes long enough to be wondered at."""
        print(text, file=sys.stderr, flush=True)

    def log(self, report: StepReport) -> None:
        """Raises MsrlError where the disk does not take it."""
        with self._written(f"what step {report.step} reported"):
            self._trackers.log(report)

    def finish(self, results: Mapping[str, str]) -> None:
        """Write report.md and the curves, and print where the results are. Raises MsrlError where the disk does not take them."""
        reports = read_metrics(self.path)
        if reports:
            with self._written("the report", "the training is done and its checkpoints are whole"):
                report = write_report(self.path, summarize(reports), results=results)
                plot_metrics(reports, self._curves, self.path / "curves.png", title=self.path.name)
            results = {**results, "report": str(report)}
        for name, value in results.items():
            print(f"{name}: {value}")

    @contextmanager
    def _written(self, what: str, advice: str = "make room, and go on with --resume auto") -> Iterator[None]:
        """Around what writes to the run's folder."""
        try:
            yield
        except OSError as error:
            raise MsrlError(f"{self.path}: {what} could not be written ({error.strerror or error}); {advice}") from error

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._written("the last that was reported"):
                self._trackers.close()
        except MsrlError:
            if error is None:  # else the same once more, after the first time has been said
                raise
        finally:
            self._folder.close()
