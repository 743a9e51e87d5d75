"""Checks of `cluster.roles`, and whether references and teachers fit the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


def check_unused_roles(resolved: Resolved, command: str, *, used: str = "") -> Iterator[str]:
    """Yield a line for each role that is set, besides a role that the command uses."""
    for name, section in resolved.config.cluster.roles:
        if name != used and section != type(section)():
            yield f"cluster.roles.{name}: has no effect in {command}. Remove it."


def check_no_roles(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Yield a line for each role of a training that has none."""
    yield from check_unused_roles(resolved, plan.command)


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
        yield from _layout(resolved, key, plan, model)


def _layout(resolved: Resolved, key: str, plan: RunPlan, model: ModelPlan) -> Iterator[str]:
    """Check that a model on the training ranks fits the layout of the policy."""
    shape, policy = model.require_shape(), plan.shape
    is_sequence_parallel = plan.train.parallel.sp or policy.moe is not None
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


def _offload(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that nothing is offloaded for engines that have separate devices."""
    for kind in ("grads", "params") if plan.has_separate_engines else ():
        if getattr(resolved.config.train.offload, kind):
            yield resolved.mistake(
                f"train.offload.{kind}",
                "has no effect with cluster.roles.rollout.devices: engines do not need the "
                "memory. Set it to false.",
            )
