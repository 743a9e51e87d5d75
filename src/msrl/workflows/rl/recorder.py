"""Record of the steps of a run: reports, rollouts, values of tokens, the gap and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msrl.algorithms.rollout_arrays import group_arrays
from msrl.plan.derived import updates_per_step
from msrl.tracking.plots import plot_distributions
from msrl.tracking.rollouts import LoggedValues
from msrl.trainer.objective.batches import num_loss_tokens
from msrl.types import StepReport
from msrl.workflows.rl.logprob_gap import GapMonitor
from msrl.workflows.rl.model_groups import ModelGroups
from msrl.workflows.rl.rollouts import StepRollouts
from msrl.workflows.rl.setup import RLSetup
from msrl.workflows.rl.step import Clock, step_metrics
from msrl.workflows.rl.token_values import TokenValues
from msrl.workflows.rl.update.batches import PreparedStep
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.scoring import make_judge
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.session import TrainingSession


class Recorder:
    """Writer of everything that a run keeps of its steps, except checkpoints."""

    def __init__(self, job: RLSetup, trainers: ModelGroups, session: TrainingSession) -> None:
        config, self._job, self._run_dir = job.config, job, session.run_dir
        log, is_async = config.log, job.has_older_versions
        self.rollouts = RolloutLog(
            self._run_dir,
            job.tokenizer,
            is_on=log.save_rollouts,
            format=log.rollouts,
            judge=make_judge(config),
        )
        self._token_values = TokenValues(config, trainers, self.rollouts, session.note)
        has_one_update = updates_per_step(config) == 1 and not is_async
        self._trainers = trainers
        # A replay with other settings trains another policy than the one that sampled.
        note = session.note if job.plan.has_engines else _ignore
        self._gaps = GapMonitor(config.model, self._run_dir, note, is_async, has_one_update)

    def token_values(self, prepared: PreparedStep, clock: Clock) -> LoggedValues:
        """Compute the values of `log.tokens`. Call it before the first update of a step."""
        temperature = self._job.config.rollout.sampling.temperature
        self._gaps.prepare(prepared, self._trainers, temperature, clock)
        return self._token_values.of_step(prepared, clock)

    def record(
        self,
        step: int,
        batch: StepRollouts,
        prepared: PreparedStep,
        values: LoggedValues,
        trained: Mapping[str, float],
        clock: Clock,
    ) -> StepReport:
        """Return the report of a step; write its rollouts and draw its plots.

        Args:
            step: Step, counted from 0.
            batch: Its rollouts.
            prepared: What was computed before its updates.
            values: Result of `token_values`.
            trained: Metrics of its updates.
            clock: Its times.
        """
        gap = self._gaps.metrics(step, prepared, values, trained)
        metrics = {
            **step_metrics(batch.scores, trained, clock.seconds),
            **gap,
            **batch.metrics,
            **self._mfu(prepared, clock),
        }
        seconds = {**clock.seconds, "step": sum(clock.seconds.values())}
        self.rollouts.write(
            step + 1,
            batch.train_groups,
            prepared.sequences,
            batch.dropped_groups,
            values=values,
            times=clock.ended_at,
        )
        self._plot_distributions(step + 1, batch)
        return StepReport(step + 1, metrics, seconds, batch.scores.notes)

    def _mfu(self, prepared: PreparedStep, clock: Clock) -> dict[str, float]:
        """Return the model FLOPs utilization of the updates; nothing for a step without one.

        Generation is excluded because memory bandwidth limits it, not arithmetic.
        """
        job, seconds = self._job, clock.seconds.get("update", 0.0)
        if not seconds:
            return {}
        sequences, epochs = prepared.sequences, job.config.train.updates.epochs
        num_tokens, shape = num_loss_tokens(sequences), job.plan.shape
        return mfu(shape, job.config, job.platform, [sequences], num_tokens, seconds, passes=epochs)

    def _plot_distributions(self, step: int, batch: StepRollouts) -> None:
        """Plot lengths and rewards of all responses, if `log.length_plot_every` is set."""
        every = self._job.config.log.length_plot_every
        if every is None or step % every:
            return
        arrays = group_arrays(batch.scores.groups)
        values: dict[str, Sequence[float]] = {
            "response length in tokens": arrays.lengths.ravel().tolist(),
            "reward": arrays.rewards[arrays.decided].tolist(),
        }
        path = self._run_dir / "distributions" / f"step_{step:06d}.png"
        plot_distributions(values, path, title=f"{self._run_dir.name}, step {step}")


def _ignore(_: str) -> None:
    """Drop a line."""
