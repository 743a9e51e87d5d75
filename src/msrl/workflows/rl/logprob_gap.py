"""Gap between the log-probabilities of engine and trainer in each step, and its alarm.

The alarm compares the gap with what rounding of bfloat16 changes in the log-probabilities of the
policy itself. The first step measures it, and later runs of the same folder read it.

T tokens of a sequence. Only tokens of the version that the trainer has at the start of a step
count: the gap of older ones includes the updates since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from msrl.config.sections.general import ModelConfig
from msrl.diagnose.gap import Gap, HealthyRange, healthy_range, measure, rounding_range
from msrl.files import write_text
from msrl.tracking.rollouts import LoggedValues
from msrl.trainer.objective.batches import BatchLimits, select
from msrl.trainer.objective.requests import TokenRequest
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update.batches import PreparedStep
from msrl.workflows.training.trainer_group import TrainerGroup

METRIC = "rollout/logprob_gap"
_P99 = f"{METRIC}_p99"
_MEAN_IN_UPDATE = "sampler_logprob_difference"
ROUNDING_FILE = "rounding.json"
_MAX_SEQUENCES = 32  # whose rounding is measured


def measured_rounding(
    prepared: PreparedStep, trainers: TrainerGroup, temperature: float
) -> Gap | None:
    """Return what rounding changes in the policy's log-probabilities; None without tokens.

    The ranks score some sequences of a step twice, in the dtype of the model and in float32, one
    sequence at a time. Call it before the first update.
    """
    trainable = prepared.trainable
    numbers = [number for number, mask in enumerate(trainable) if mask.any()]
    step = max(1, len(numbers) // _MAX_SEQUENCES)
    chosen = numbers[::step][:_MAX_SEQUENCES]
    if not chosen:
        return None
    sampled = prepared.sequences._replace(loss_masks=trainable, fields={})
    sequences = select(sampled, chosen)
    rows = [
        trainers.forward(
            TokenRequest(temperature=temperature, in_float32=in_float32), sequences, BatchLimits(1)
        )["logprobs"]
        for in_float32 in (False, True)
    ]
    mask = np.concatenate(sequences.loss_masks)
    rounded, exact = (np.concatenate(row)[mask] for row in rows)
    return measure(rounded, exact)


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
    """Metrics of the gap in each step, and a warning when rounding does not explain it.

    Attributes:
        model: Settings of the model, with the dtype of engine and trainer.
        run_dir: Folder of the run.
        note: Function that logs a line.
        is_async: Whether older versions may have sampled tokens of a step.
        has_one_update: Whether a step has one update of tokens that the current version sampled.
            Its loss has measured the mean then.
    """

    model: ModelConfig
    run_dir: Path
    note: Callable[[str], None]
    is_async: bool
    has_one_update: bool
    _limits: HealthyRange | None = None
    _is_raised: bool = False

    def prepare(
        self, prepared: PreparedStep, trainers: TrainerGroup, temperature: float, clock: Clock
    ) -> None:
        """Measure the rounding of the model, unless the run has recorded it.

        Call it before the first update of a step.
        """
        if self.model.dtype != "bfloat16" or self._limits is not None:
            return
        rounding = self._recorded()
        if rounding is None:
            with clock("logprobs"):
                rounding = measured_rounding(prepared, trainers, temperature)
            if rounding is None:
                return
            text = json.dumps({**self._settings(), **asdict(rounding)}, indent=2)
            write_text(self.run_dir / ROUNDING_FILE, f"{text}\n")
        self._limits = rounding_range(rounding)

    def _settings(self) -> dict[str, str]:
        """Return the settings that the rounding depends on."""
        return {
            "dtype": self.model.dtype,
            "logits_dtype": self.model.logits_dtype or self.model.dtype,
        }

    def _recorded(self) -> Gap | None:
        """Return the rounding that the run has recorded with its present settings."""
        path = self.run_dir / ROUNDING_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            settings = {name: values.pop(name) for name in self._settings()}
            return Gap(**values) if settings == self._settings() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # it is measured again

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
        limits = self._limits or healthy_range(self.model.dtype)
        mean, p99 = metrics[METRIC], metrics.get(_P99)
        is_raised = not (mean <= limits.mean and (p99 is None or p99 <= limits.p99))
        if is_raised and not self._is_raised:
            measured, healthy = f"{mean:.2g}", f"mean {limits.mean:.2g}"
            if p99 is not None:
                measured = f"{measured} (p99 {p99:.2g})"
                healthy = f"{healthy}, p99 {limits.p99:.2g}"
            self.note(
                f"warning: step {step}: {METRIC}={measured} nats: engine and trainer differ more "
                f"than rounding of {self.model.dtype} explains for this model ({healthy}). Find "
                f"the cause: msrl diagnose mismatch {self.run_dir}"
            )
        self._is_raised = is_raised
