"""Checks of the `rollout` section and of `data.curriculum`."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks import plugins
from msrl.checks.evaluation import check_eval_source
from msrl.config.loader import Resolved
from msrl.config.sections.rollout import COLOCATED_TRANSFERS, DEVICE_TRANSFERS
from msrl.plan.derived import num_separate_devices
from msrl.platforms import get
from msrl.platforms.base import Platform
from msrl.registry import SAMPLERS
from msrl.registry.declarations import declaration
from msrl.rewards import sources

# vLLM raises temperatures between 0 and 0.01 to 0.01 (vllm/sampling_params.py).
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
_BOUNDS = {"none": (), "all_equal": (), "mean": ("low", "high"), "std": ("low",)}


def check_temperature(resolved: Resolved, key: str) -> Iterator[str]:
    """Check that the engine supports the temperature under `key`.

    Otherwise the recorded log-probabilities would belong to another temperature.
    """
    value = resolved.value(key)
    if isinstance(value, float) and value and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        yield resolved.mistake(
            key,
            f"the engine supports temperatures from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}. "
            "Set a value in this range.",
        )


def check_grpo_temperatures(resolved: Resolved) -> Iterator[str]:
    """Check the temperatures of rollouts and evaluations."""
    if resolved.config.rollout.sampling.temperature == 0:
        yield resolved.mistake(
            "rollout.sampling.temperature",
            "greedy sampling makes all samples of a prompt identical, and the trainer divides "
            "logits by the temperature. Set it above 0.",
        )
    yield from check_temperature(resolved, "rollout.sampling.temperature")
    yield from check_temperature(resolved, "eval.sampling.temperature")


def check_group_size(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting that compares the samples of a prompt if there is only one."""
    config = resolved.config
    if config.rollout.samples_per_prompt > 1:
        return
    for key, compares in (
        ("algo.mask.equal_groups", config.algo.mask.equal_groups),
        ("reward.length.coef", config.reward.length.coef),
        ("reward.norm.center", config.reward.norm.center == "group"),
        ("reward.norm.scale", config.reward.norm.scale == "group"),
        ("rollout.filter.kind", config.rollout.filter.kind not in ("none", "mean")),
    ):
        if compares:
            yield resolved.mistake(
                key,
                "compares the samples of a prompt. Set rollout.samples_per_prompt to 2 or more.",
            )


def check_rollout_filter(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each invalid setting of the filter, and for each one that has no effect."""
    section = resolved.config.rollout.filter
    if section.kind == "none":
        return
    yield from _check_bounds(resolved)
    known = [sources.Source.of(source).label for source in resolved.config.reward.sources]
    if section.source is not None and section.source not in known:
        yield resolved.mistake(
            "rollout.filter.source",
            f"is not a reward source. Choose one of reward.sources: {', '.join(known)}.",
        )


def _check_bounds(resolved: Resolved) -> Iterator[str]:
    section = resolved.config.rollout.filter
    bounds = _BOUNDS[section.kind]
    if bounds and all(getattr(section, name) is None for name in bounds):
        keys = " or ".join(f"rollout.filter.{name}" for name in bounds)
        yield resolved.mistake("rollout.filter.kind", f"needs a bound. Set {keys}.")
    if section.kind != "mean" or section.low is None or section.high is None:
        return
    if section.low >= section.high:
        message = f"must be below rollout.filter.high={section.high}"
        yield resolved.mistake("rollout.filter.low", message)


def check_curriculum(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each setting of the curriculum that is invalid or cannot be combined."""
    config = resolved.config
    name = config.data.curriculum.sampler
    if name is None:
        return
    key = "data.curriculum.options"
    mistakes = list(plugins.check_options(resolved, key, (SAMPLERS, name, "pools")))
    yield from mistakes
    defaults = declaration(SAMPLERS, name, key="data.curriculum.sampler").option_defaults("pools")
    options = {**defaults, **config.data.curriculum.options}
    if not mistakes and "low" in options and options["low"] > options["high"]:
        message = f"low={options['low']} must be at most high={options['high']}"
        yield resolved.mistake(key, message)
    if config.data.blend:
        yield resolved.mistake(
            "data.curriculum.sampler",
            "decides how often each prompt is sampled, which contradicts the weights of "
            "data.blend. Preprocess the datasets into one, or remove one of the two keys.",
        )
    yield from check_eval_source(resolved)
    yield from _check_judge(resolved)


def _check_judge(resolved: Resolved) -> Iterator[str]:
    """Check that a reward source or the environment decides which responses are right."""
    config = resolved.config
    scoring = [sources.Source.of(section) for section in config.reward.sources]
    if config.eval.source is None and scoring and not any(item.in_pool for item in scoring):
        yield resolved.mistake(
            "data.curriculum.sampler",
            "needs right and wrong responses, and scores of servers and models do not state them. "
            "Set eval.source to a reward source, and eval.right_from.",
        )


def check_weight_transfer(resolved: Resolved) -> Iterator[str]:
    """Yield a line if the ranks cannot reach the engines by the configured transfer."""
    config = resolved.config
    if config.rollout.weights.adapters_only:
        yield from _check_adapters_only(resolved)
    if config.rollout.weights.transfer == "shared_memory" and config.cluster.nodes > 1:
        yield resolved.mistake(
            "rollout.weights.transfer",
            f"needs all workers on one machine, but cluster.nodes is {config.cluster.nodes}. Set "
            "it to ray or auto.",
        )
    transfer, platform = config.rollout.weights.transfer, config.cluster.platform
    is_colocated = num_separate_devices(config.cluster.roles.rollout) == 0
    if (
        transfer in DEVICE_TRANSFERS
        and platform != "auto"
        and not _has_weight_engine(get(platform), transfer)
    ):
        yield resolved.mistake(
            "rollout.weights.transfer",
            f"needs an accelerator with this engine, but cluster.platform is {platform}. Set it to "
            "auto.",
        )
    elif transfer in DEVICE_TRANSFERS and is_colocated != (transfer in COLOCATED_TRANSFERS):
        relation = "share devices" if is_colocated else "are on separate devices"
        yield resolved.mistake(
            "rollout.weights.transfer",
            f"ranks and engines {relation} (cluster.roles.rollout.devices). Set it to auto.",
        )
    if transfer in DEVICE_TRANSFERS and config.rollout.asynchronous.is_on:
        yield resolved.mistake(
            "rollout.weights.transfer",
            "cannot send weights to engines that generate, as rollout.async requires. Set it to "
            "auto.",
        )


def _has_weight_engine(platform: Platform, transfer: str) -> bool:
    return transfer in platform.weight_engines and not platform.shares_main_memory


def _check_adapters_only(resolved: Resolved) -> Iterator[str]:
    """Yield a line if the ranks cannot send the adapters alone."""
    key = "rollout.weights.adapters_only"
    transfer = resolved.config.rollout.weights.transfer
    if transfer in DEVICE_TRANSFERS:
        problem = "needs a transfer through main memory"
        remedy = f"rollout.weights.transfer is {transfer}. Set it to auto."
        yield resolved.mistake(key, f"{problem}, but {remedy}")
