"""Values of single tokens for the rollout record, before the first update (`log.tokens`).

T tokens of a sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msrl.config.schema import Config
from msrl.plan.derived import needs_reference, samples_per_step
from msrl.tracking.rollouts import LoggedValues
from msrl.trainer.objective.batches import select
from msrl.trainer.objective.requests import TokenRequest, TokenValue
from msrl.types import Floats
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update.batches import PreparedStep
from msrl.workflows.rl.update.values import forward_limits
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.training.trainer_group import TrainerGroup

_GROUPS_PER_LOGGED = 16  # `log.tokens: sampled` logs one of so many groups
_BYTES = 18  # of a token in the record without the values of `log.tokens`, uncompressed
_BYTES_OF_VALUE = 4


# Column of the record, the field of a prepared step that holds it, and the model and the value to
# request.
_COLUMNS: Sequence[tuple[str, str, str, TokenValue]] = (
    ("reference_logprobs", "reference_logprobs", "reference", "logprobs"),
    ("trainer_logprobs", "old_logprobs", "policy", "logprobs"),
    ("entropies", "entropies", "policy", "entropies"),
)


@dataclass
class TokenValues:
    """Values of `log.tokens`, up to the size limit of `log.tokens_max_gb`."""

    config: Config
    trainers: TrainerGroup
    log: RolloutLog
    note: Callable[[str], None]
    _is_over: bool = False

    def of_step(self, prepared: PreparedStep, clock: Clock) -> LoggedValues:
        """Compute the values of the logged samples, the first ones, that a step has not computed.

        Call it before the first update.
        """
        numbers = self._numbers(len(prepared.trainable))
        if not numbers or self._limit_is_reached():
            return {}
        missing = defaultdict[str, dict[str, TokenValue]](dict)  # by model
        for column, field, model, value in _COLUMNS:
            if model == "reference" and not needs_reference(self.config):
                continue
            if field not in prepared.sequences.fields:
                missing[model][column] = value
        if not missing:
            return {}
        sampled = prepared.sequences._replace(loss_masks=prepared.trainable, fields={})
        sequences, columns = select(sampled, numbers), dict[str, Sequence[Floats]]()
        temperature, limits = self.config.rollout.sampling.temperature, forward_limits(self.config)
        with clock("token_values"):
            for model, values in missing.items():
                request = TokenRequest(tuple(values.values()), model, temperature)
                result = self.trainers.forward(request, sequences, limits)
                columns |= {column: result[value] for column, value in values.items()}
        return columns

    def _numbers(self, num_samples: int) -> range:
        """Return the numbers of the samples to log: all, or those of the first groups."""
        if self.config.log.tokens == "none":
            return range(0)
        if self.config.log.tokens == "all":
            return range(num_samples)
        size = self.config.rollout.samples_per_prompt
        num_groups = max(1, num_samples // size // _GROUPS_PER_LOGGED)
        return range(num_groups * size)

    def _limit_is_reached(self) -> bool:
        if self._is_over:
            return True
        limit = self.config.log.tokens_max_gb
        self._is_over = self.log.is_over(limit * 1e9)
        if self._is_over:
            self.note(
                f"log.tokens_max_gb={limit:g}: {self.log.folder} has reached the limit, so "
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
