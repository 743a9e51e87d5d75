"""Log of a run that both trainings use: run folder, trackers and the final report."""

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
    """Return the folder of the run's checkpoints.

    It is absolute, because workers may have another working directory.
    """
    return (
        Path(config.checkpoint.save) if config.checkpoint.save else run_path(config) / "checkpoints"
    ).absolute()


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class RunLog:
    """Log of an open run: the report of every step, and after a clean end summary and curves."""

    def __init__(
        self, config: Config, *, num_steps: int, start_step: int, curves: Sequence[str]
    ) -> None:
        self._folder = RunFolder.create(
            config.run.dir,
            config.run.name,
            config=config.model_dump(mode="json"),
            resume=config.checkpoint.resume != "none",
        )
        self.path = self._folder.path
        self._curves = tuple(curves)
        resumed_step = start_step if config.checkpoint.resume != "none" else None
        metrics = MetricsWriter(self.path, resumed_step=resumed_step)
        if metrics.num_dropped:
            print(
                f"{metrics.path}: dropped {metrics.num_dropped} steps that are repeated after the "
                "resume",
                file=sys.stderr,
            )
        self.has_reports = bool(read_metrics(self.path))  # of an earlier attempt of this run
        trackers = [
            metrics,
            StepConsole(num_steps, every_steps=config.log.every_steps),
            *open_trackers(config.log.trackers, self.path, resumed_step=resumed_step),
        ]
        self._trackers = Trackers(trackers)

    def note(self, text: str) -> None:
        """Print a line on standard error before work that takes long."""
        print(text, file=sys.stderr, flush=True)

    def log(self, report: StepReport) -> None:
        """Log the report of a step. Raises MsrlError if it cannot be written."""
        with self._writing(f"the report of step {report.step}"):
            self._trackers.log(report)

    def finish(self, results: Mapping[str, str]) -> None:
        """Write report.md and the curves, and print the results.

        Raises MsrlError if they cannot be written.
        """
        reports = read_metrics(self.path)
        if reports:
            with self._writing(
                "the report", "The training is done and its checkpoints are complete."
            ):
                report = write_report(self.path, summarize(reports), results=results)
                plot_metrics(reports, self._curves, self.path / "curves.png", title=self.path.name)
            results = {**results, "report": str(report)}
        for name, value in results.items():
            print(f"{name}: {value}")

    @contextmanager
    def _writing(
        self, content: str, advice: str = "Free some space, and resume with --resume auto."
    ) -> Iterator[None]:
        """Turn an OSError of writing to the run folder into an MsrlError."""
        try:
            yield
        except OSError as error:
            raise MsrlError(
                f"{self.path}: {content} could not be written ({error.strerror or error}). {advice}"
            ) from error

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._writing("the last reports"):
                self._trackers.close()
        except MsrlError:
            if error is None:  # otherwise the first error is reported
                raise
        finally:
            self._folder.close()
