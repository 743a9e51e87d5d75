"""Log-probabilities of recorded responses under the initial weights of a run.

They stand for those of the sampling distribution, if a record has none. The run computes them once
and keeps them in its folder, because a resumed run no longer has these weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.errors import MsrlError
from msrl.files import atomic_write
from msrl.limits import print_note
from msrl.plan.run_plan import RunPlan
from msrl.trainer.objective.requests import TokenRequest
from msrl.types import Floats
from msrl.workflows.rl.replay.responses import ResponseFile
from msrl.workflows.rl.update.values import forward_limits
from msrl.workflows.training.trainer_group import TrainerGroup

FILE_NAME = "initial_logprobs.npy"


def read_initial_logprobs(plan: RunPlan, recording: ResponseFile) -> Floats:  # of all tokens
    """Return the log-probabilities that the run has computed at its first start.

    Raises:
        MsrlError: The folder of the run lacks them, or has those of another record.
    """
    path = plan.run_dir / FILE_NAME
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _lost(path) from error
    if values.shape != (recording.num_tokens,) or values.dtype != np.float32:
        raise _lost(path)
    return values


def compute_initial_logprobs(
    plan: RunPlan, recording: ResponseFile, trainers: TrainerGroup
) -> Floats:  # of all tokens
    """Compute the log-probabilities under the weights of the ranks, and write them."""
    config, count = plan.config, recording.facts.num_groups
    batch, temperature = config.rollout.prompts_per_step, config.rollout.sampling.temperature
    print_note(
        f"{config.rollout.replay.path}: has no log-probabilities; computing those of its "
        f"{recording.num_tokens:,} response tokens under the initial weights"
    )
    request = TokenRequest(("logprobs",), "policy", temperature)
    values = list[Floats]()
    for start in range(0, count, batch):
        # A batch of the size of a step fits the data-parallel ranks.
        groups = [recording.group((start + n) % count) for n in range(batch)]
        arrays = rollout_arrays(groups)
        rows = trainers.forward(request, arrays.sequences, forward_limits(config))["logprobs"]
        size = int(arrays.lengths[: count - start].sum())
        values.append(arrays.gather(rows)[:size].astype(np.float32))
    logprobs = np.concatenate(values)
    with atomic_write(plan.run_dir / FILE_NAME) as temporary, Path(temporary).open("wb") as file:
        np.save(file, logprobs)
    return logprobs


def _lost(path: Path) -> MsrlError:
    return MsrlError(
        f"{path}: is missing or damaged. It has the log-probabilities under the initial weights, "
        "which a resumed run cannot compute. Restore it, or start a new run."
    )
