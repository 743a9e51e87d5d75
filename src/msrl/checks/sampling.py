"""What can be known wrong in how answers are sampled."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.loader import Resolved

COLDEST, HOTTEST = 0.01, 2.0  # of vLLM, which takes 0.01 for what lies between 0 and it (vllm/sampling_params.py)


def temperature(resolved: Resolved, key: str) -> Iterator[str]:
    """That the engine samples at the temperature under `key`: another one's log-probabilities would be learnt from."""
    value = resolved.value(key)
    if isinstance(value, float) and value and not COLDEST <= value <= HOTTEST:
        yield resolved.mistake(key, f"the engine samples at temperatures from {COLDEST} to {HOTTEST:g}; set one of them")


def grpo_temperatures(resolved: Resolved) -> Iterator[str]:
    """Those of rollouts and of evaluations."""
    yield from temperature(resolved, "rollout.sampling.temperature")
    yield from temperature(resolved, "eval.sampling.temperature")
