"""Values of single tokens for the rollout record, before the first update (`log.tokens`).

T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msrl.algorithms.packing import Sequences, rl_sequences
from msrl.config.schema import Config
from msrl.plan.derived import needs_reference, samples_per_step
from msrl.trainer.objective.batches import BatchLimits
from msrl.types import Floats
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update import PreparedStep
from msrl.workflows.training.trainer_group import TrainerGroup

_GROUPS_PER_LOGGED = 16  # `log.tokens: sampled` logs one of so many groups
_BYTES = 18  # of a token in the record without the values of `log.tokens`, uncompressed
_BYTES_OF_VALUE = 4

ValuesBySample = Mapping[str, Mapping[int, Floats]]
"""Arrays [T] by the name of a column and the number of a sample."""


@dataclass
class TokenValues:
    """Computation of the values of `log.tokens`, up to the size limit of `log.tokens_max_gb`."""

    config: Config
    trainers: TrainerGroup
    folder: Path  # with the rollouts of the run
    note: Callable[[str], None]
    _is_over: bool = False

    def compute(self, prepared: PreparedStep, clock: Clock) -> ValuesBySample:
        """Return the values of the logged samples that the step has not computed."""
        numbers = self._numbers(len(prepared.samples))
        if not numbers or self._limit_is_reached():
            return {}
        with clock("token_values"):
            return self._compute(prepared, numbers)

    def _compute(self, prepared: PreparedStep, numbers: Sequence[int]) -> ValuesBySample:
        sequences = _sequences(prepared, numbers, self.trainers.dp_size)
        limits = _limits(self.config)
        temperature = self.config.rollout.sampling.temperature
        fields, values = prepared.sequences.fields, dict[str, Sequence[Floats]]()
        if "old_logprobs" not in fields and "entropies" not in fields:
            both = self.trainers.logprobs_and_entropies(sequences, limits, temperature)
            values["trainer_logprobs"], values["entropies"] = both
        elif "old_logprobs" not in fields:
            values["trainer_logprobs"] = self.trainers.logprobs(sequences, limits, temperature)
        elif "entropies" not in fields:
            values["entropies"] = self.trainers.token_statistic(
                sequences, limits, temperature, "entropy"
            )
        if needs_reference(self.config) and "reference_logprobs" not in fields:
            values["reference_logprobs"] = self.trainers.logprobs(
                sequences, limits, temperature, of_reference=True
            )
        return {name: dict(zip(numbers, arrays, strict=False)) for name, arrays in values.items()}

    def _numbers(self, num_samples: int) -> list[int]:
        """Return the numbers of the samples to log: all, or those of the first groups."""
        if self.config.log.tokens == "none":
            return []
        if self.config.log.tokens == "all":
            return list(range(num_samples))
        size = self.config.rollout.samples_per_prompt
        num_groups = max(1, num_samples // size // _GROUPS_PER_LOGGED)
        return list(range(num_groups * size))

    def _limit_is_reached(self) -> bool:
        if self._is_over:
            return True
        size = sum(path.stat().st_size for path in self.folder.glob("*.parquet"))
        limit = self.config.log.tokens_max_gb
        self._is_over = size > limit * 1e9
        if self._is_over:
            self.note(
                f"log.tokens_max_gb={limit:g}: {self.folder} has reached the limit, so "
                "log.tokens adds no more values"
            )
        return self._is_over


def size_note(config: Config, num_steps: int) -> str | None:
    """Return the largest size of the rollout record of a run; None without `log.tokens`."""
    log, rollout = config.log, config.rollout
    if log.tokens == "none":
        return None
    num_values = 3 if needs_reference(config) else 2
    share = 1 if log.tokens == "all" else 1 / min(_GROUPS_PER_LOGGED, rollout.prompts_per_step)
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    per_token = _BYTES + share * num_values * _BYTES_OF_VALUE
    size = num_steps * samples_per_step(config) * length * per_token
    return (
        f"log.tokens={log.tokens}: the rollout record of {num_steps} steps takes at most "
        f"{size / 1e9:.3g} GB before compression; values of tokens are added up to "
        f"{log.tokens_max_gb:g} GB (log.tokens_max_gb)"
    )


def _sequences(prepared: PreparedStep, numbers: Sequence[int], dp_size: int) -> Sequences:
    """Return the samples as sequences with all response tokens.

    The first one is repeated until their number is divisible by the number of data-parallel ranks.
    """
    samples = [replace(prepared.samples[number], is_trained=True) for number in numbers]
    return rl_sequences([*samples, *[samples[0]] * (-len(samples) % dp_size)])


def _limits(config: Config) -> BatchLimits:
    train = config.train
    count = train.forward_micro_batch or train.micro_batch
    return BatchLimits(count, train.max_tokens_per_micro_batch)
