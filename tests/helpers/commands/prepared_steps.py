"""Steps of scored groups, prepared for their update without ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.config.loader import load
from msrl.types import ScoredGroup
from msrl.workflows.rl.update.advantages import StepAdvantages
from msrl.workflows.rl.update.batches import PreparedStep, prepared_step
from msrl.workflows.rl.update.values import StepValues


def make_step(
    groups: Sequence[ScoredGroup],
    advantages: np.ndarray | None = None,  # [N]
    is_trained: np.ndarray | None = None,  # [P, G]
    *sets: str,
    values: StepValues | None = None,
) -> PreparedStep:
    """Return a step with these advantages, by default 0, of completions that are all trained on."""
    arrays = rollout_arrays(groups)
    own = np.zeros(int(arrays.lengths.sum())) if advantages is None else advantages
    flags = np.ones_like(arrays.decided) if is_trained is None else is_trained
    config, result = load(sets=sets).config, StepAdvantages(own, None, {})
    return prepared_step(arrays, flags, result, values or StepValues(), {}, config)
