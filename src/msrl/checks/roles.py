"""Checks of `cluster.roles`: the devices, parallel layout and weights of models."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks.inputs import check_model_path
from msrl.config.loader import Resolved
from msrl.config.sections.roles import DevicesConfig
from msrl.models.paths import is_hf, is_mcore
from msrl.models.shape import Shape
from msrl.plan.context import layout_problems, size_problems
from msrl.plan.derived import (
    num_separate_devices,
    samples_per_step,
    samples_per_update,
    world_size,
)
from msrl.plan.roles import MODEL_ROLES, SeparateModel, is_used, model_role, separate_model
from msrl.plan.run_plan import ModelPlan, RunPlan

_UNUSED = {
    "reference": "without algo.kl.loss.coef or algo.kl.reward.coef, the run has no reference",
    # The check of the critic reports a critic that is not used.
    "reward": "no source of reward.sources is a model with engine: megatron",
}


def check_roles(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each invalid setting of a role and for each one without effect."""
    yield from _device_numbers(resolved)
    yield from _offload(resolved, plan)
    for role in MODEL_ROLES:
        key, section = f"cluster.roles.{role}", model_role(resolved.config, role)
        if not is_used(resolved.config, role):
            if role in _UNUSED and section != type(section)():
                yield f"{key}: has no effect: {_UNUSED[role]}. Remove it."
        elif num_separate_devices(section):
            yield from _separate(resolved, plan, separate_model(resolved.config, role))
        else:
            yield from _needs_devices(resolved, role)
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


def _needs_devices(resolved: Resolved, role: str) -> Iterator[str]:
    section = model_role(resolved.config, role)
    sizes = [f"parallel.{name}" for name, size in section.parallel if size is not None]
    names = [*sizes, *(["micro_batch"] if section.micro_batch is not None else [])]
    for name in names:
        yield resolved.mistake(
            f"cluster.roles.{role}.{name}",
            f"has no effect without cluster.roles.{role}.devices: the model shares the layout and "
            "micro-batches of the policy. Set the devices or remove it.",
        )


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
        yield from _fits(resolved, plan, plan.reference)


def _fits(resolved: Resolved, plan: RunPlan, reference: ModelPlan) -> Iterator[str]:
    key, policy = "cluster.roles.reference.load", plan.shape_or_none
    if reference.shape is None or policy is None:
        yield from () if reference.shape is not None else (reference.error,)
        return
    shape, longest = reference.shape, plan.max_model_len
    if shape.reward_head:
        yield resolved.mistake(key, f"{shape.architecture} generates scores instead of text")
    if shape.vocab_size != policy.vocab_size:
        yield resolved.mistake(
            key,
            f"has {shape.vocab_size} tokens and the policy has {policy.vocab_size}. Use a model "
            "with the same tokenizer.",
        )
    if longest > shape.max_position_embeddings:
        yield resolved.mistake(
            key,
            f"supports at most {shape.max_position_embeddings} tokens, but prompt plus response "
            f"have up to {longest}",
        )
    if plan.separate_model("reference") is None:
        for field, message in layout_problems(plan.train.parallel, shape):
            yield resolved.mistake(key, f"has the layout of the policy: {field} {message}")


def _offload(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that nothing is offloaded for engines that have separate devices."""
    for kind in ("grads", "params") if plan.has_separate_engines else ():
        if getattr(resolved.config.train.offload, kind):
            yield resolved.mistake(
                f"train.offload.{kind}",
                "has no effect with cluster.roles.rollout.devices: engines do not need the "
                "memory. Set it to false.",
            )
