"""Log of a run that both trainings use: run folder, trackers and the final report."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from msrl.cluster.ray_loss import RayLostError, described_by
from msrl.config.own_files import own_digests
from msrl.config.schema import Config
from msrl.config.secrets import recorded, redacted
from msrl.errors import MsrlError, ProcessFailedError, RunFailedError, VerificationError
from msrl.limits import print_note, printable
from msrl.plan.run_plan import checkpoint_folder
from msrl.processes.unreported_end import UnreportedEnd
from msrl.tracking.comparison import Comparison, compare
from msrl.tracking.console import StepConsole
from msrl.tracking.log_file import FILE_NAME as LOG_FILE
from msrl.tracking.log_file import LogFile, logged_output
from msrl.tracking.metrics import MetricsWriter, read_metrics
from msrl.tracking.plots import plot_metrics
from msrl.tracking.prometheus import PrometheusTracker
from msrl.tracking.report import summarize, write_report
from msrl.tracking.rollouts import remove_after
from msrl.tracking.run import CONFIG, RunFolder, resume_command
from msrl.tracking.tracker import Trackers, open_trackers
from msrl.trainer.checkpointing.resume import saved_steps
from msrl.types import StepReport
from msrl.workflows.shown_rollouts import rollouts_with_images


def count_text(number: int, noun: str) -> str:
    """Return a count with its noun: `1 engine`, `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


CURVES_FILE = "curves.png"


def write_results(
    path: Path,
    results: Mapping[str, str],
    *,
    curves: Sequence[str],
    command: str | None,
    differences: Sequence[str] = (),
    recorded: Path | None = None,
) -> None:
    """Write the report and the curves of the run folder `path`, and print the results.

    Args:
        path: folder of the run.
        results: lines of the report.
        curves: metrics to draw.
        command: command that continues with the results.
        differences: accepted differences from the file of another system.
        recorded: folder of the run whose recorded rollouts this one trains on.
    """
    reports = read_metrics(path)
    if reports:
        has_curves = any(name in report.metrics for report in reports for name in curves)
        if has_curves:
            plot_metrics(reports, curves, path / CURVES_FILE, title=path.name)
        picture = CURVES_FILE if has_curves else None
        report = write_report(
            path,
            summarize(reports),
            results=results,
            picture=picture,
            rollouts=rollouts_with_images(path),
            command=command,
            differences=differences,
            comparison=_comparison(recorded, reports),
        )
        results = {**results, "report": str(report)}
    if command is not None:
        results = {**results, "next": command}
    for name, value in results.items():
        print(f"{name}: {value}")


def recorded_run(config: Config) -> Path | None:
    """Return the folder of the run whose recorded rollouts a run trains on; None without one."""
    path = config.rollout.replay.path
    return Path(path) if path is not None and (Path(path) / CONFIG).is_file() else None


def _comparison(recorded: Path | None, reports: Sequence[StepReport]) -> Comparison | None:
    """Compare a run with the one whose rollouts it trains on, if that has reports."""
    others = [] if recorded is None else read_metrics(recorded)
    return compare(str(recorded), others, reports) if others else None


def next_command(
    config: Config,
    path: Path,
    results: Mapping[str, str],
    is_completed: bool,
    *,
    is_reward_model: bool = False,
) -> str | None:
    """Return the command that uses the result of a run, or that resumes it; None without one.

    Adapters are used with their base model. A reward model cannot chat.
    """
    if not is_completed:
        return resume_command(path) if "checkpoint" in results else None
    if is_reward_model:
        return None
    if "Hugging Face model" in results:
        return shlex.join(["msrl", "chat", "--model", str(path / "hf")])
    if "checkpoint" not in results:
        return None
    folder = config.checkpoint.save or str(path / "checkpoints")
    if config.train.lora.rank is not None:
        chat = ["--model", str(config.model.path), "--set", f"chat.lora={folder}"]
        return shlex.join(["msrl", "chat", *chat])
    return shlex.join(["msrl", "chat", "--model", folder])


class RunLog:
    """Log of an open run: the report of every step, and after a clean end summary and curves."""

    def __init__(
        self,
        config: Config,
        *,
        num_steps: int,
        start_step: int,
        curves: Sequence[str],
        trackers: Sequence[str] | None = None,
        is_reward_model: bool = False,
    ) -> None:
        """Open the folder of the run. `trackers` come from the configuration by default."""
        self._is_reward_model = is_reward_model
        self._folder = RunFolder.create(
            config.run.dir,
            config.run.name,
            config=recorded(config),
            resume=config.checkpoint.resume != "none",
            num_steps=num_steps,
            files=own_digests(config),
        )
        self.path = self._folder.path
        self._config = config
        self._curves = tuple(curves)
        resumed_step = start_step if config.checkpoint.resume != "none" else None
        self._names = config.log.trackers if trackers is None else trackers
        self._num_steps, self._last_step = num_steps, start_step
        self._trackers = self._open_trackers(resumed_step)
        self._is_completed = False
        self._log_file = LogFile(self.path / LOG_FILE)
        self._stack = ExitStack()

    def _open_trackers(self, resumed_step: int | None) -> Trackers:
        """Return the trackers, without the steps after `resumed_step`, which are repeated."""
        metrics = MetricsWriter(self.path, resumed_step=resumed_step)
        if resumed_step is not None:
            remove_after(self.path, resumed_step)
        if metrics.num_dropped:
            print_note(
                f"{metrics.path}: dropped {metrics.num_dropped} steps that are repeated after the "
                "resume"
            )
        self.has_reports = bool(read_metrics(self.path))  # of an earlier attempt of this run
        console = StepConsole(self._num_steps, every_steps=self._config.log.every_steps)
        options = self._config.log.options
        trackers = open_trackers(self._names, self.path, resumed_step=resumed_step, options=options)
        return Trackers([metrics, console, *trackers, *self._prometheus()])

    def _prometheus(self) -> tuple[PrometheusTracker, ...]:
        """Return the tracker of `log.prometheus`, if it is set."""
        port = self._config.log.prometheus
        return () if port is None else (PrometheusTracker(port, self.path.name),)

    def rewind(self, step: int) -> None:
        """Remove the reports of the steps after `step`, which the run repeats."""
        with self._writing("the last reports"):
            self._trackers.close()
        self._trackers = self._open_trackers(step)
        self._last_step = step

    def note(self, text: str) -> None:
        """Print a line on standard error, without secrets of the configuration."""
        print_note(redacted(text, self._config))

    def show_stage(self, step: int, stage: str = "") -> None:
        """Show the running step and its stage until the next call; step 0 shows nothing."""
        stages = f": {stage}" if stage else ""
        self._status.show(f"step {step}/{self._num_steps}{stages}" if step else "")

    def log(self, report: StepReport) -> None:
        """Log the report of a step. Raises MsrlError if it cannot be written."""
        if report.notes:
            notes = tuple(redacted(note, self._config) for note in report.notes)
            report = replace(report, notes=notes)
        with self._writing(f"the report of step {report.step}"):
            self._trackers.log(report)
        self._last_step = report.step

    def finish(self, results: Mapping[str, str]) -> None:
        """Write report.md and the curves, and print the results.

        Raises MsrlError if they cannot be written.
        """
        self._is_completed = self._last_step >= self._num_steps or "end" in results
        with self._writing("the report", "The training is done and its checkpoints are complete."):
            write_results(
                self.path,
                results,
                curves=self._curves,
                differences=self._config.run.differences,
                recorded=recorded_run(self._config),
                command=next_command(
                    self._config,
                    self.path,
                    results,
                    self._is_completed,
                    is_reward_model=self._is_reward_model,
                ),
            )

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
        self._status = self._stack.enter_context(logged_output(self._log_file))
        self._end = self._stack.enter_context(UnreportedEnd(self._killed_text()))
        self._stack.enter_context(described_by(self._describe_loss))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        try:
            with self._writing("the last reports"):
                self._trackers.close()
                self._record_end(error)
        except MsrlError:
            if error is None:  # otherwise the first error is reported
                raise
        finally:
            self._log_file.close()
            self._folder.close()
        if isinstance(error, ProcessFailedError):
            raise RunFailedError(self._failure_text(error)) from error

    def _describe_loss(self, error: RayLostError) -> str:
        """Record the end of a process that is blocked in a call of Ray, and return its message."""
        self._end.cancel()
        with suppress(OSError):
            self._record_end(error)
        return self._failure_text(error)

    def _killed_text(self) -> str:
        """Return the message on an end that this process cannot report, as after SIGKILL."""
        cause = "it was killed, for example for lack of memory, or it lost its Ray node (raylet)"
        lines = [f"msrl ended before it could report the cause: {cause}."]
        if command := resume_command(self.path):
            lines.append(f"Completed checkpoints are kept. Resume with: {command}")
        return printable("\n".join([*lines, f"Details: {self.path / LOG_FILE}"]))

    def _failure_text(self, error: ProcessFailedError) -> str:
        """Return the message on a failed process: cause, checkpoint, command that resumes, log."""
        root = checkpoint_folder(self._config)
        steps, command = saved_steps(root), resume_command(self.path)
        lines = [redacted(error.summary, self._config)]
        if steps and command is not None:
            lines.append(f"The last checkpoint is that of step {steps[-1]}. Resume with: {command}")
        else:
            lines.append(f"There is no checkpoint yet (step {self._last_step} was the last one).")
        lines.append(f"Details: {self.path / LOG_FILE}")
        return "\n".join(lines)

    def _record_end(self, error: BaseException | None) -> None:
        """Write how the attempt ended to the log and to attempts.jsonl."""
        if isinstance(error, Exception):
            is_users = isinstance(error, (MsrlError, VerificationError))
            text = str(error) if is_users else "".join(traceback.format_exception(error))
            self._log_file.write(redacted(f"The run failed: {text}", self._config))
            line = redacted(str(error), self._config).strip().partition("\n")[0]
            self._folder.record_end("failed", self._last_step, line or type(error).__name__)
        elif error is not None or not self._is_completed:
            self._log_file.write(f"The run was interrupted after step {self._last_step}")
            self._folder.record_end("interrupted", self._last_step)
        else:
            self._log_file.write(f"The run is complete after step {self._last_step}")
            self._folder.record_end("completed", self._last_step)
