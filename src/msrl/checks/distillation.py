"""Checks of `algo.distill`, and of the other keys of train-distill."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks import plugins
from msrl.checks.inputs import check_model_path
from msrl.checks.preference import changed_keys
from msrl.config.loader import Resolved
from msrl.models.paths import is_hf, is_mcore
from msrl.plan.context import layout_problems
from msrl.plan.distillation import IMPLIED
from msrl.plan.run_plan import ModelPlan, RunPlan
from msrl.registry import DIVERGENCES

# Keys of `algo` that train-distill reads, besides those that it implies.
_KEYS = ("distill", "aggregate", "entropy_coef", "mask.truncated")


def check_distill(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of `algo.distill` that is invalid or has no effect."""
    distill = resolved.config.algo.distill
    if not distill.is_on:
        for key in changed_keys(resolved, "algo.distill"):
            yield resolved.mistake(
                key, "has no effect without teachers. Set algo.distill.teachers."
            )
        return
    plugin = (DIVERGENCES, distill.divergence, "divergence")
    yield from plugins.check_options(resolved, "algo.distill.options", plugin)
    yield from plugins.check_ranges(resolved, "algo.distill.options", plugin)
    if not distill.coef:
        yield resolved.mistake(
            "algo.distill.coef", "disables the term, but there are teachers. Remove one of them."
        )
    models = [teacher.model for teacher in distill.teachers]
    for number, model in enumerate(models):
        if model in models[:number]:
            yield resolved.mistake(
                f"algo.distill.teachers.{number}.model", "is a duplicate. Add up the weights."
            )


def check_no_distillation(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each changed key of `algo.distill` in a training that does not read it."""
    for key in changed_keys(resolved, "algo.distill"):
        yield resolved.mistake(key, "is a key of train-distill and train-grpo only. Remove it.")


def check_teachers(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each teacher that does not fit the policy."""
    for number, section in enumerate(resolved.config.algo.distill.teachers):
        key = f"algo.distill.teachers.{number}.model"
        yield from check_model_path(resolved, key)
        if is_hf(section.model) or is_mcore(section.model):
            yield from _fits(resolved, key, plan, plan.teachers[section.model])


def _fits(resolved: Resolved, key: str, plan: RunPlan, teacher: ModelPlan) -> Iterator[str]:
    shape, policy = teacher.shape, plan.shape_or_none
    if shape is None:
        yield resolved.mistake(key, teacher.error)
        return
    if shape.reward_head:
        yield resolved.mistake(key, f"{shape.architecture} generates scores instead of text")
        return
    if policy is None:
        return
    if shape.vocab_size != policy.vocab_size:
        yield resolved.mistake(
            key,
            f"has {shape.vocab_size} tokens and the policy has {policy.vocab_size}. Use a teacher "
            "with the same tokenizer.",
        )
    if plan.max_model_len > shape.max_position_embeddings:
        yield resolved.mistake(
            key,
            f"supports at most {shape.max_position_embeddings} tokens, but prompt plus response "
            f"have up to {plan.max_model_len}",
        )
    if shape.moe is not None and plan.layout.tp > 1 and not plan.train.parallel.sp:
        yield resolved.mistake(
            key,
            "has experts, which need train.parallel.sp with train.parallel.tp above 1. "
            "Set train.parallel.sp to true.",
        )
    for field, message in layout_problems(plan.train.parallel, shape):
        yield resolved.mistake(
            key, f"has the parallel layout of the policy: train.parallel.{field} {message}"
        )


def check_train_distill(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting that train-distill needs or does not read."""
    config = resolved.config
    if not config.algo.distill.is_on:
        yield (
            "algo.distill.teachers: missing. Set at least one, as in "
            "algo: {distill: {teachers: [{model: runs/grpo/hf}]}}"
        )
    for key in changed_keys(resolved, "algo"):
        name = key.removeprefix("algo.")
        is_read = any(name == own or name.startswith(f"{own}.") for own in _KEYS)
        if not is_read and IMPLIED.get(key, ...) != resolved.value(key):
            yield resolved.mistake(
                key, "has no effect in train-distill, whose loss has no reward. Remove it."
            )
    if config.rollout.filter.kind != "none":
        yield resolved.mistake(
            "rollout.filter.kind", "has no effect in train-distill. Set it to none."
        )
    if config.rollout.asynchronous.is_on:
        yield resolved.mistake(
            "rollout.async.max_staleness",
            "is not supported in train-distill, which trains on samples of the current policy. "
            "Set it to 0.",
        )
    if config.environment.is_on and not config.environment.is_single_turn:
        yield resolved.mistake(
            "environment", "is not supported in train-distill. Remove the section."
        )
    if not config.reward.sources and (config.eval.every_steps or config.eval.at_start):
        yield (
            "reward.sources: missing. Evaluations score responses. Set at least one source, as in "
            "reward: {sources: [{verifier: acc}]}, or remove eval.every_steps and eval.at_start."
        )
