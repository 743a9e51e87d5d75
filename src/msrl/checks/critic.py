"""Checks of the critic and its keys."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks.inputs import check_model_path
from msrl.checks.training import check_layout
from msrl.config.loader import Resolved
from msrl.models.paths import is_hf, is_mcore
from msrl.plan import derived
from msrl.plan.context import layout_problems
from msrl.plan.run_plan import RunPlan

_KEYS = (
    "algo.value.aggregate",
    "algo.value.clip",
    "algo.value.warmup_steps",
    "cluster.roles.critic",
)


def check_critic(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each invalid setting of the critic and for each one without effect."""
    config = resolved.config
    if not derived.needs_critic(config):
        estimator = config.algo.advantage.estimator
        for key in (key for name in _KEYS for key in _set_keys(resolved, name)):
            yield resolved.mistake(
                key,
                f"has no effect with algo.advantage.estimator={estimator}, which has no critic. "
                "Use gae.",
            )
        return
    steps, warmup = config.train.steps, config.algo.value.warmup_steps
    if steps is not None and warmup >= steps:
        yield resolved.mistake(
            "algo.value.warmup_steps",
            f"must be below train.steps={steps}, or the policy is never trained",
        )
    optimizer = derived.critic_optimizer(config)
    if optimizer.min_lr > optimizer.lr:
        section = config.cluster.roles.critic.optimizer
        name = "lr" if section.min_lr is None else "min_lr"
        yield resolved.mistake(
            f"cluster.roles.critic.optimizer.{name}",
            f"the learning rate would decay from {optimizer.lr:g} to the higher "
            f"{optimizer.min_lr:g}. Set both lr and min_lr.",
        )
    yield from check_model_path(resolved, "cluster.roles.critic.load")
    yield from _fits(resolved, plan)


def _set_keys(resolved: Resolved, key: str) -> list[str]:
    """Return the keys whose default the user changed: `key`, or keys of the section `key`."""
    names = (name for name in resolved.origins if name == key or name.startswith(f"{key}."))
    return [name for name in names if resolved.is_changed(name)]


def _fits(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that a critic with other weights fits vocabulary, lengths and layout of the policy."""
    config, load = resolved.config, resolved.config.cluster.roles.critic.load
    if load is None or not (is_hf(load) or is_mcore(load)):
        return
    critic, policy = plan.critic, plan.shape_or_none
    if critic is None or policy is None:
        return
    shape = critic.shape
    if shape is None:
        yield critic.error
        return
    if shape.vocab_size < policy.vocab_size:
        yield resolved.mistake(
            "cluster.roles.critic.load",
            f"has {shape.vocab_size} tokens, fewer than the {policy.vocab_size} tokens of the "
            "policy",
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > shape.max_position_embeddings:
        message = (
            f"supports at most {shape.max_position_embeddings} tokens, but prompt plus response "
            f"have up to {longest}"
        )
        yield resolved.mistake("cluster.roles.critic.load", message)
    if plan.separate_model("critic") is not None:
        return  # the check of roles compares its layout
    problems = layout_problems(plan.train.parallel, shape)
    for line in check_layout(resolved, "train.parallel", problems):
        yield f"{line} (critic {load}, which has the parallel layout of the policy)"
