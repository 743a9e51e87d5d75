"""Checks of each command before it starts: missing keys, files, names and sizes.

Each check is a generator of lines. All of them run, so that one pass reports every error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from msrl.checks.algorithm import check_aggregate, check_algorithm, check_sft_aggregate
from msrl.checks.asynchronous import check_async, check_old_logprobs
from msrl.checks.cluster import check_tls
from msrl.checks.commands import check_chat, check_convert, check_generate, check_preprocess
from msrl.checks.distillation import (
    check_distill,
    check_teachers,
    check_train_distill,
)
from msrl.checks.effects import check_effects
from msrl.checks.engine import check_engine_options, check_engines, check_rollout_options
from msrl.checks.environment import check_environment
from msrl.checks.evaluate import (
    check_evaluate,
    check_evaluation_prompts,
    check_evaluation_sources,
)
from msrl.checks.evaluation import (
    check_evaluation,
    check_grpo_evaluation,
    check_sft_evaluation,
)
from msrl.checks.inputs import check_examples, check_prompts, check_rows
from msrl.checks.plugins import check_own_plugins
from msrl.checks.preference import check_preference, check_reward_model
from msrl.checks.rewards import check_rewards
from msrl.checks.roles import check_critic, check_roles
from msrl.checks.rollout import (
    check_curriculum,
    check_group_size,
    check_grpo_temperatures,
    check_rollout_filter,
    check_weight_transfer,
)
from msrl.checks.serve import check_serve
from msrl.checks.trackers import check_profile, check_tracker_options
from msrl.checks.training import (
    check_devices,
    check_freeze,
    check_grpo_batches,
    check_grpo_lengths,
    check_indexer_loss,
    check_lora,
    check_model,
    check_random_weights,
    check_recompute,
    check_replay,
    check_router,
    check_sft_batches,
    check_training_inputs,
    check_training_length,
    check_vision,
)
from msrl.config.facts import key_facts
from msrl.config.loader import Resolved
from msrl.config.secrets import redacted
from msrl.config.unknown import UnknownValueError
from msrl.errors import ManyErrors, MsrlError
from msrl.plan.derived import is_replay
from msrl.plan.run_plan import RunPlan, resolve

Check = Callable[[Resolved], Iterator[str]]
PlanCheck = Callable[[Resolved, RunPlan], Iterator[str]]


def check(resolved: Resolved, plan: RunPlan) -> None:
    """Check the configuration of a planned run.

    Raises:
        ManyErrors: with one line for each error.
    """
    errors = find_errors(resolved, plan)
    if errors:
        raise ManyErrors(errors)


def find_errors(resolved: Resolved, plan: RunPlan) -> list[str]:
    """Return one line for each error in the configuration of a planned run."""
    own = list(check_own_plugins(resolved, plan.command))
    if own:  # other checks read the declarations of these files
        return own
    checks = _all_checks(resolved, plan.command, plan)
    lines = [line for run_check in checks for line in run_check()]
    return list(dict.fromkeys(redacted(line, resolved.config) for line in lines))


def find_layout_errors(resolved: Resolved, plan: RunPlan) -> list[str]:
    """Return one line for each error that depends on the parallel layout of a training."""
    samples = check_grpo_batches if plan.has_rollouts else check_sft_batches
    errors = [*check_devices(resolved), *samples(resolved)]
    if not errors:
        plan_checks = (check_model, check_recompute, check_indexer_loss)
        if plan.has_rollouts:
            plan_checks += (check_engines, check_roles)
        errors = [line for plan_check in plan_checks for line in plan_check(resolved, plan)]
    return errors


def _all_checks(
    resolved: Resolved, command: str, plan: RunPlan | None
) -> Iterator[Callable[[], Iterable[str]]]:
    """Yield the checks of a command; those of the plan only with a plan."""
    skipped = _skipped_checks(resolved, command)
    for run_check in CHECKS.get(command, ()):
        if run_check not in skipped:
            yield partial(run_check, resolved)
    yield partial(check_effects, resolved, command)
    if plan is not None:
        for plan_check in PLAN_CHECKS.get(command, ()):
            if plan_check not in skipped:
                yield partial(plan_check, resolved, plan)


# Checks that read an unknown value raise them; TypeError is raised by functions written in C.
_UNKNOWN = (UnknownValueError, TypeError)


def find_known_errors(resolved: Resolved, command: str) -> list[str]:
    """Return the errors of a configuration that do not depend on its unknown values."""
    lines, plan = list[str](), None
    try:
        with suppress(*_UNKNOWN):
            plan = resolve(resolved.config, command)
        with suppress(*_UNKNOWN):
            if own := list(check_own_plugins(resolved, command)):
                return own
    except MsrlError as error:
        return [str(error)]
    for run_check in _all_checks(resolved, command, plan):
        with suppress(*_UNKNOWN):
            lines.extend(run_check())
    return list(dict.fromkeys(redacted(line, resolved.config) for line in lines))


def find_missing_paths(resolved: Resolved, command: str) -> list[str]:
    """Return the errors about files and folders that a configuration names and that do not exist.

    Invalid values were removed from the configuration, so its other errors may follow from that.
    """
    try:
        errors = find_errors(resolved, resolve(resolved.config, command))
    except MsrlError as error:
        errors = [str(error)]
    names = tuple(
        resolved.mistake(key, "") for key in resolved.origins if _is_missing(resolved, key)
    )
    return [line for line in errors if line.startswith(names) and "no effect" not in line]


def _is_missing(resolved: Resolved, key: str) -> bool:
    """Return True if the value of a key is free text that is no path."""
    facts = key_facts(".".join(name for name in key.split(".") if not name.isdigit()))
    is_free = facts is None or not facts.choices
    value = resolved.value(key) if resolved.origins[key].is_given and is_free else None
    return isinstance(value, str) and not Path(value).exists()


def _skipped_checks(resolved: Resolved, command: str) -> frozenset[Check | PlanCheck]:
    """Return the checks of keys that a replay of recorded rollouts does not read."""
    with suppress(*_UNKNOWN):
        if command == "train-grpo" and is_replay(resolved.config):
            return _OF_ENGINES
    return frozenset()


_OF_ENGINES: frozenset[Check | PlanCheck] = frozenset(
    (
        check_async,
        check_curriculum,
        check_engines,
        check_grpo_evaluation,
        check_prompts,
        check_rollout_options,
        check_rows,
        check_weight_transfer,
    )
)


def guess(resolved: Resolved) -> str | None:
    """Return the command that a configuration is meant for, based on the sections that it sets."""
    for has in (resolved.is_changed, resolved.is_set):
        for key, command in _COMMAND_BY_KEY.items():
            if has(key):
                return command
    return None


_COMMAND_BY_KEY = {
    "evaluate": "eval",
    "serve": "serve",
    "algo.preference": "train-dpo",
    "algo.reward_model": "train-rm",
    "reward.sources": "train-grpo",
    "algo.distill": "train-distill",
    "generate": "generate",
    "chat": "chat",
    "rollout": "train-grpo",
    "convert": "convert-ckpt",
    "preprocess": "preprocess",
    "data.train": "train-sft",
    "train": "train-sft",
}

_TRAINING: tuple[Check, ...] = (
    check_training_inputs,
    check_training_length,
    check_evaluation,
    check_devices,
    check_tls,
    check_tracker_options,
    check_profile,
)

CHECKS: dict[str, tuple[Check, ...]] = {
    "train-sft": (
        *_TRAINING,
        check_sft_batches,
        check_sft_evaluation,
        check_sft_aggregate,
    ),
    "train-dpo": (
        *_TRAINING,
        check_sft_batches,
        check_sft_evaluation,
    ),
    "train-rm": (
        *_TRAINING,
        check_sft_batches,
        check_sft_evaluation,
    ),
    "train-grpo": (
        *_TRAINING,
        check_algorithm,
        check_distill,
        check_old_logprobs,
        check_async,
        check_curriculum,
        check_environment,
        check_group_size,
        check_rollout_filter,
        check_weight_transfer,
        check_grpo_temperatures,
        check_grpo_batches,
        check_rollout_options,
    ),
    "train-distill": (
        *_TRAINING,
        check_aggregate,
        check_distill,
        check_train_distill,
        check_environment,
        check_group_size,
        check_weight_transfer,
        check_grpo_temperatures,
        check_grpo_batches,
        check_rollout_options,
    ),
    "convert-ckpt": (check_convert,),
    "preprocess": (check_preprocess,),
    "generate": (check_generate, check_environment, check_engine_options),
    "chat": (check_chat, check_engine_options),
    "serve": (check_serve, check_engine_options),
    "eval": (check_evaluate, check_environment, check_engine_options),
    "cluster": (check_tls,),
}

_MODEL: tuple[PlanCheck, ...] = (
    check_rows,
    check_model,
    check_freeze,
    check_recompute,
    check_router,
    check_replay,
    check_indexer_loss,
    check_lora,
    check_random_weights,
    check_vision,
)

# Commands that train on sampled responses.
_ROLLOUTS: tuple[PlanCheck, ...] = (
    *_MODEL,
    check_prompts,
    check_rewards,
    check_critic,
    check_grpo_lengths,
    check_grpo_evaluation,
    check_engines,
    check_roles,
    check_teachers,
)

PLAN_CHECKS: dict[str, tuple[PlanCheck, ...]] = {
    "train-sft": (*_MODEL, check_examples),
    "train-dpo": (*_MODEL, check_preference),
    "train-rm": (*_MODEL, check_reward_model),
    "train-grpo": _ROLLOUTS,
    "train-distill": _ROLLOUTS,
    "eval": (check_rows, check_evaluation_prompts, check_evaluation_sources),
}
