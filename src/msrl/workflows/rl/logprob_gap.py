"""Gap between the log-probabilities of engine and trainer in each step, and its alarm.

T tokens of a sequence. Only tokens of the version that the trainer has at the start of a step
count: the gap of older ones includes the updates since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from msrl.diagnose.gap import Gap, healthy_range, measure
from msrl.tracking.rollouts import LoggedValues
from msrl.workflows.rl.update.batches import PreparedStep

METRIC = "rollout/logprob_gap"
_P99 = f"{METRIC}_p99"
_MEAN_IN_UPDATE = "sampler_logprob_difference"


def measured_gap(prepared: PreparedStep, values: LoggedValues, version: int | None) -> Gap | None:
    """Return the gap of the tokens for which the step has the trainer's log-probabilities.

    These are all trained tokens if the step computes them before its first update, else those of
    `log.tokens`. None: there are none.

    Args:
        prepared: Prepared step.
        values: Values of `log.tokens`.
        version: Policy version whose tokens count; None if it sampled all of them.
    """
    fields, arrays = prepared.sequences.fields, prepared.arrays
    rows = fields.get("old_logprobs") or values.get("trainer_logprobs")
    if not rows:
        return None
    trained, count = np.concatenate(rows), len(rows)
    mask = np.concatenate(prepared.sequences.loss_masks[:count])
    if version is not None:
        mask = mask & (np.concatenate(arrays.scatter(arrays.versions)[:count]) == version)
    gap = measure(np.concatenate(fields["sampler_logprobs"][:count])[mask], trained[mask])
    return gap if gap.num_tokens else None


@dataclass
class GapMonitor:
    """Metrics of the gap in each step, and a warning when it leaves the range of its dtype.

    Attributes:
        dtype: dtype of engine and trainer.
        run_dir: Folder of the run.
        note: Function that logs a line.
        is_async: Whether older versions may have sampled tokens of a step.
        has_one_update: Whether a step has one update of tokens that the current version sampled.
            Its loss has measured the mean then.
    """

    dtype: str
    run_dir: Path
    note: Callable[[str], None]
    is_async: bool
    has_one_update: bool
    _is_raised: bool = False

    def metrics(
        self,
        step: int,
        prepared: PreparedStep,
        values: LoggedValues,
        trained: Mapping[str, float],
    ) -> dict[str, float]:
        """Return the metrics of a step, and warn if they were healthy in the step before.

        Args:
            step: Step, counted from 0, which is the trainer's version.
            prepared: Prepared step.
            values: Values of `log.tokens`.
            trained: Metrics of the updates.
        """
        version = step if self.is_async else None
        gap = measured_gap(prepared, values, version)
        metrics = dict[str, float]()
        if gap is not None:
            metrics = {METRIC: gap.mean, f"{METRIC}_p99": gap.p99, f"{METRIC}_max": gap.largest}
        elif self.has_one_update and _MEAN_IN_UPDATE in trained:
            metrics = {METRIC: trained[_MEAN_IN_UPDATE]}
        self._check(step + 1, metrics)
        return metrics

    def _check(self, step: int, metrics: Mapping[str, float]) -> None:
        if not metrics:
            return
        limits, mean, p99 = healthy_range(self.dtype), metrics[METRIC], metrics.get(_P99)
        is_raised = not (mean <= limits.mean and (p99 is None or p99 <= limits.p99))
        if is_raised and not self._is_raised:
            measured, healthy = f"{mean:.2g}", f"mean {limits.mean:g}"
            if p99 is not None:
                measured, healthy = f"{measured} (p99 {p99:.2g})", f"{healthy}, p99 {limits.p99:g}"
            self.note(
                f"warning: step {step}: {METRIC}={measured} nats: engine and trainer differ more "
                f"than {self.dtype} explains ({healthy}). Find the cause: msrl diagnose mismatch "
                f"{self.run_dir}"
            )
        self._is_raised = is_raised
