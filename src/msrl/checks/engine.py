"""Checks of the rollout engine: its devices, its parallel sizes and vLLM's engine arguments."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.loader import Resolved
from msrl.models.families import num_experts
from msrl.plan.derived import num_engine_devices, num_engines
from msrl.plan.run_plan import RunPlan
from msrl.rollout.engine_arguments import option_problem

_LAST_PORT = 65535


def check_engine_options(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each engine argument that is not an option of an engine."""
    yield from _option_mistakes(resolved, weights_change=False)


def check_rollout_options(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each engine argument that is not an option of an engine in a training."""
    yield from _option_mistakes(resolved, weights_change=True)


def _option_mistakes(resolved: Resolved, *, weights_change: bool) -> Iterator[str]:
    for name in resolved.config.rollout.engine.options:
        if problem := option_problem(name, weights_change=weights_change):
            yield resolved.mistake(f"rollout.engine.options.{name}", problem)


def check_engines(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check that the engines fit their devices and the model."""
    engine, devices = resolved.config.rollout.engine, num_engine_devices(resolved.config)
    count = num_engines(resolved.config)
    if engine.tp * count > devices:
        yield _too_few_devices(resolved, plan, count, devices)
    yield from _model_sizes(resolved, plan)
    port = resolved.config.log.prometheus
    if port is not None and port + count > _LAST_PORT:
        yield resolved.mistake(
            "log.prometheus",
            f"the {count} engines use the {count} ports after it, and the last port is "
            f"{_LAST_PORT}. Choose a lower port.",
        )
    if engine.ep not in (1, engine.tp):
        yield resolved.mistake(
            "rollout.engine.ep",
            f"must be 1 or rollout.engine.tp={engine.tp}: vLLM distributes experts over all "
            "devices of an engine",
        )


def _too_few_devices(resolved: Resolved, plan: RunPlan, count: int, devices: int) -> str:
    engine = resolved.config.rollout.engine
    owner = "the rollout" if plan.has_separate_engines else "training"
    remedy = "roles.rollout.devices" if plan.has_separate_engines else "devices_per_node"
    return resolved.mistake(
        "rollout.engine.tp" if engine.tp > devices else "rollout.engine.dp",
        f"{count} engines with {engine.tp} devices each need {engine.tp * count} devices, but "
        f"{owner} has {devices}. Set cluster.{remedy}.",
    )


def _model_sizes(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    engine, shape = resolved.config.rollout.engine, plan.shape_or_none
    if shape is None:
        return
    if shape.num_attention_heads % engine.tp:
        yield resolved.mistake(
            "rollout.engine.tp",
            f"must divide the model's {shape.num_attention_heads} attention heads",
        )
    if engine.ep > 1 and shape.moe is None:
        yield resolved.mistake("rollout.engine.ep", "the model has no experts. Remove it.")
    elif engine.ep > 1 and num_experts(shape) % engine.ep:
        yield resolved.mistake(
            "rollout.engine.ep", f"must divide the model's {num_experts(shape)} experts"
        )
