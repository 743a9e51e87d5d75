"""What can be known wrong before any device is asked for, per command: missing keys and files, unknown names, sizes that do not fit.

Each check is a generator of lines; all of them run, so that one pass names every mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msrl.checks.algorithm import algorithm as _algorithm
from msrl.checks.commands import chat_checks, convert_checks, generate_checks, preprocess_checks
from msrl.checks.critic import critic as _critic
from msrl.checks.evaluation import evaluation, grpo_evaluation, grpo_only, sft_evaluation
from msrl.checks.inputs import holds_examples, holds_prompts
from msrl.checks.rewards import rewards as _rewards
from msrl.checks.rollout import rollout_filter
from msrl.checks.sampling import grpo_temperatures
from msrl.checks.training import (
    engines,
    enough_devices,
    frozen_names,
    grpo_batches,
    grpo_lengths,
    length_of_training,
    lora_fits,
    memory_options,
    model_fits,
    rollout_offload,
    router_fits,
    sft_batches,
    sft_only,
    training_inputs,
)
from msrl.config.loader import Resolved
from msrl.errors import ManyErrors

Check = Callable[[Resolved], Iterator[str]]


def check(resolved: Resolved, command: str) -> None:
    """Raises ManyErrors with one line for everything that `command` cannot do with this configuration."""
    lines = [line for one in CHECKS.get(command, ()) for line in one(resolved)]
    if lines:
        raise ManyErrors(list(dict.fromkeys(lines)))


def guess(resolved: Resolved) -> str | None:
    """The command that a configuration is meant for, by the sections that it sets."""
    for key, command in _TELLTALE.items():
        if resolved.is_set(key):
            return command
    return None


_TELLTALE = {
    "reward.sources": "train-grpo",
    "rollout": "train-grpo",
    "convert": "convert-ckpt",
    "preprocess": "preprocess",
    "generate": "generate",
    "chat": "chat",
    "data.train": "train-sft",
    "train": "train-sft",
}

_TRAINING: tuple[Check, ...] = (
    training_inputs, length_of_training, evaluation, enough_devices, model_fits, frozen_names, memory_options, router_fits, lora_fits,
)  # fmt: skip

CHECKS: dict[str, tuple[Check, ...]] = {
    "train-sft": (*_TRAINING, holds_examples, sft_batches, rollout_offload, grpo_only, sft_evaluation),
    "train-grpo": (
        *_TRAINING,
        holds_prompts,
        sft_only,
        _rewards,
        _algorithm,
        _critic,
        rollout_filter,
        grpo_temperatures,
        grpo_batches,
        grpo_lengths,
        grpo_evaluation,
        engines,
    ),
    "convert-ckpt": (convert_checks,),
    "preprocess": (preprocess_checks,),
    "generate": (generate_checks,),
    "chat": (chat_checks,),
    "cluster": (),
}
