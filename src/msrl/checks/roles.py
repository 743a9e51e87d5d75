"""Checks of `cluster.roles`, and whether references and teachers fit the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msrl.checks.inputs import check_model_path
from msrl.checks.training import check_layout
from msrl.config.loader import Resolved
from msrl.config.sections.roles import DevicesConfig
from msrl.models.paths import is_hf, is_mcore
from msrl.models.shape import Shape
from msrl.plan.context import layout_problems, size_problems
from msrl.plan.derived import (
    critic_optimizer,
    needs_critic,
    num_separate_devices,
    samples_per_step,
    samples_per_update,
    world_size,
)
from msrl.plan.roles import MODEL_ROLES, SeparateModel, is_used, model_role, separate_model
from msrl.plan.run_plan import ModelPlan, RunPlan


@dataclass(frozen=True, slots=True)
class Longest:
    """Longest sequence of a run in tokens, with its description for messages."""

    tokens: int
    description: str

    @classmethod
    def sample(cls, plan: RunPlan) -> Longest:
        """Return the longest sample of a training with rollouts."""
        return cls(plan.max_model_len, "prompt plus response have")


def check_roles(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each invalid setting of a role and for each one without effect."""
    yield from _device_numbers(resolved)
    for role in MODEL_ROLES:
        key, section = f"cluster.roles.{role}", model_role(resolved.config, role)
        if not is_used(resolved.config, role):
            if role == "reward" and section != type(section)():
                yield (
                    f"{key}: has no effect: no source of reward.sources is a model with engine: "
                    "megatron. Remove it."
                )
        elif num_separate_devices(section):
            yield from _separate(resolved, plan, separate_model(resolved.config, role))
    yield from _reference(resolved, plan)


def _device_numbers(resolved: Resolved) -> Iterator[str]:
    """Check that listed devices are not those of training or of another role."""
    world, owners = world_size(resolved.config), dict[int, str]()
    for role in ("rollout", *MODEL_ROLES):
        section: DevicesConfig = getattr(resolved.config.cluster.roles, role)
        if section.devices is None or isinstance(section.devices, int):
            continue
        for number in section.devices:
            problem = None
            if number < world:
                problem = f"device {number} is one of the {world} of training. Remove the key to"
                problem += " share them, or list other numbers."
            elif number in owners:
                problem = f"device {number} is already one of {owners[number]}"
            owners[number] = f"cluster.roles.{role}"
            if problem is not None:
                yield resolved.mistake(f"cluster.roles.{role}.devices", problem)
                break


def _separate(resolved: Resolved, plan: RunPlan, model: SeparateModel) -> Iterator[str]:
    """Check the layout of a model on separate devices."""
    key = f"cluster.roles.{model.role}"
    if model.num_ranks % model.replica_size:
        yield resolved.mistake(
            f"{key}.devices",
            f"{model.num_ranks} devices are not a multiple of the {model.replica_size} ranks of "
            f"one copy of the model ({model.layout}). Set {key}.parallel.",
        )
        return
    if model.parallel.cp != plan.train.parallel.cp:
        for field, message in size_problems(model.parallel):
            yield f"{key}.parallel.cp={model.parallel.cp}: train.parallel.{field} {message}"
    for shape in _shapes(plan, model.role):
        for field, message in layout_problems(model.parallel, shape):
            yield f"{key}.parallel.{field}: {message}"
    samples = samples_per_step(resolved.config)
    if model.role == "critic":
        samples = samples_per_update(resolved.config)
    if model.role != "reward" and samples % model.dp_size:
        yield resolved.mistake(
            f"{key}.devices",
            f"the {samples} samples of a batch are not a multiple of the data-parallel size "
            f"{model.dp_size}",
        )


def _shapes(plan: RunPlan, role: str) -> list[Shape]:
    return [model.shape for model in plan.models(role) if model.shape is not None]


def _reference(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that a reference with other weights fits the policy, and its KL terms."""
    config, load = resolved.config, resolved.config.cluster.roles.reference.load
    loss = config.algo.kl.loss
    if plan.separate_model("reference") and loss.coef and loss.estimator == "full":
        yield resolved.mistake(
            "cluster.roles.reference.devices",
            "algo.kl.loss.estimator=full needs the reference on the training ranks. Use another "
            "estimator, or remove the devices.",
        )
    if plan.reference is None or load is None:
        return
    yield from check_model_path(resolved, "cluster.roles.reference.load")
    if is_hf(load) or is_mcore(load):
        yield from check_fit(
            resolved,
            "cluster.roles.reference.load",
            plan,
            plan.reference,
            longest=Longest.sample(plan),
            is_on_ranks=plan.separate_model("reference") is None,
        )


def check_fit(
    resolved: Resolved,
    key: str,
    plan: RunPlan,
    model: ModelPlan,
    *,
    longest: Longest | None,
    is_on_ranks: bool = True,
    remedy: str = "Use a model with the same number.",
) -> Iterator[str]:
    """Yield a line for each reason that a model does not fit the policy.

    Args:
        resolved: Configuration of the run.
        key: Key that names the model.
        plan: Plan of the run.
        model: Reference or teacher.
        longest: Longest sequence; None if it is not known before the data is read.
        is_on_ranks: Whether the model has the layout of the policy.
        remedy: What to do about another size of the vocabulary.
    """
    shape, policy = model.shape, plan.shape_or_none
    if shape is None:
        if plan.policy is None or model.hf_dir != plan.policy.hf_dir:  # else it is reported there
            yield resolved.mistake(key, model.error)
        return
    if shape.reward_head:
        yield resolved.mistake(key, f"{shape.architecture} generates scores instead of text")
        return
    if policy is None:
        return
    if shape.vocab_size != policy.vocab_size:
        yield resolved.mistake(
            key,
            f"has vocab_size={shape.vocab_size} in config.json, and the policy has "
            f"{policy.vocab_size}. The numbers must be equal, also where they include padding of "
            f"the embedding. {remedy}",
        )
    if longest is not None and longest.tokens > shape.max_position_embeddings:
        yield resolved.mistake(
            key,
            f"supports at most {shape.max_position_embeddings} tokens, but {longest.description} "
            f"up to {longest.tokens}",
        )
    if is_on_ranks:
        yield from check_shared_layout(resolved, key, plan, shape)


def check_shared_layout(resolved: Resolved, key: str, plan: RunPlan, shape: Shape) -> Iterator[str]:
    """Check that a model on the training ranks fits the layout of the policy."""
    policy = plan.shape_or_none
    is_mixture = policy is not None and policy.moe is not None
    is_sequence_parallel = plan.train.parallel.sp or is_mixture
    if shape.moe is not None and plan.layout.tp > 1 and not is_sequence_parallel:
        yield resolved.mistake(
            key,
            "has experts, which need train.parallel.sp with train.parallel.tp above 1. "
            "Set train.parallel.sp to true.",
        )
    for field, message in layout_problems(plan.train.parallel, shape):
        yield resolved.mistake(
            key, f"has the parallel layout of the policy: train.parallel.{field} {message}"
        )


def check_critic(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each invalid setting of the critic."""
    config = resolved.config
    if not needs_critic(config):
        return
    steps, warmup = config.train.steps, config.algo.value.warmup_steps
    if steps is not None and warmup >= steps:
        yield resolved.mistake(
            "algo.value.warmup_steps",
            f"must be below train.steps={steps}, or the policy is never trained",
        )
    optimizer = critic_optimizer(config)
    if optimizer.min_lr > optimizer.lr:
        section = config.cluster.roles.critic.optimizer
        name = "lr" if section.min_lr is None else "min_lr"
        yield resolved.mistake(
            f"cluster.roles.critic.optimizer.{name}",
            f"the learning rate would decay from {optimizer.lr:g} to the higher "
            f"{optimizer.min_lr:g}. Set both lr and min_lr.",
        )
    yield from check_model_path(resolved, "cluster.roles.critic.load")
    yield from _critic_fits(resolved, plan)


def _critic_fits(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
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
