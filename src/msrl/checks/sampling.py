"""Checks of sampling settings."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.loader import Resolved

# vLLM raises temperatures between 0 and 0.01 to 0.01 (vllm/sampling_params.py).
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0


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
    yield from check_temperature(resolved, "rollout.sampling.temperature")
    yield from check_temperature(resolved, "eval.sampling.temperature")
