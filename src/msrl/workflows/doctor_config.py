"""Findings of `msrl doctor` for a configuration: its checks, its files, and memory per device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msrl.checks.validate import check, guess
from msrl.config.loader import Resolved
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.memory.estimate import GB
from msrl.memory.states import element_bytes
from msrl.models.kv_cache import kv_bytes_per_token
from msrl.models.shape import Shape
from msrl.plan.derived import dp_size, max_model_len, model_shape, world_size
from msrl.platforms.base import Platform
from msrl.workflows.training.memory_check import finding, fit

ConfigFinding = tuple[Literal["ok", "note", "wrong"], str, str]


def config_findings(
    resolved: Resolved, command: str | None, platform: Platform | None
) -> Iterator[ConfigFinding]:
    """Yield findings as (level, what, text).

    First come the checks of the command, then those that need this machine and the files.
    """
    name = command or guess(resolved)
    if name is None:
        yield "note", "configuration", "the command that uses it is unknown. Pass --for."
        return
    mistakes = _mistakes(resolved, name)
    for line in mistakes:
        yield "wrong", name, line
    if not mistakes:
        yield "ok", name, "batches, lengths, files, names and parallel layouts are consistent"
    if name in ("train-sft", "train-grpo") and platform is not None:
        yield from _devices(resolved.config, platform)
        yield from _memory(resolved.config, name, platform)
    if name != "cluster" and not mistakes:
        yield from _inputs(resolved.config, name)


def _mistakes(resolved: Resolved, command: str) -> tuple[str, ...]:
    """Return the errors that the checks of the command report."""
    try:
        check(resolved, command)
    except ManyErrors as error:
        return error.messages
    except MsrlError as error:
        return (str(error),)
    return ()


def _devices(config: Config, platform: Platform) -> Iterator[ConfigFinding]:
    """Compare the devices of the run with those of this machine.

    On CPU, a device is a process. More processes than cores are slow, but not wrong.
    """
    needed = world_size(config) // config.cluster.nodes
    available = platform.device_count()
    if needed <= available:
        yield "ok", "devices", f"the run uses {needed} of {available}"
    elif platform.shares_main_memory:
        yield "note", "devices", f"the run starts {needed} processes on {available} cores"
    else:
        text = (
            f"the run needs {needed} on this machine, which has {available}. Change "
            "cluster.devices_per_node and cluster.nodes."
        )
        yield "wrong", "devices", text


def _memory(config: Config, command: str, platform: Platform) -> Iterator[ConfigFinding]:
    """Yield the memory of a run on one device, and the size of the KV cache."""
    shape = _shape(config)
    memory_fit = fit(config, command, platform) if shape is not None and dp_size(config) else None
    if shape is not None and memory_fit is not None:
        yield finding(memory_fit, config)
        if command == "train-grpo":
            yield from _cache(config, shape, memory_fit.memory.kv_cache)


def _cache(config: Config, shape: Shape, cache_bytes: int) -> Iterator[ConfigFinding]:
    """Check that the KV cache can hold one sequence of maximum length."""
    token = kv_bytes_per_token(shape, element_bytes(config), config.rollout.engine.tp)
    longest = max_model_len(config)
    if cache_bytes < token * longest:
        text = (
            f"{cache_bytes / GB:.2f} GB hold {cache_bytes // token} tokens, but one sequence "
            f"has up to {longest}"
        )
        yield (
            "wrong",
            "KV cache",
            f"{text}. Raise rollout.engine.memory_fraction or kv_cache_bytes.",
        )
    else:
        yield (
            "ok",
            "KV cache",
            f"room for {cache_bytes // token:,} tokens, {cache_bytes // (token * longest):,} "
            "of the longest sequences",
        )


def _shape(config: Config) -> Shape | None:
    try:
        return model_shape(config)
    except MsrlError:
        return None  # the checks report it


def _inputs(config: Config, command: str) -> Iterator[ConfigFinding]:
    """Check all inputs as the command does before it starts anything."""
    from msrl.workflows import preflight

    try:
        summary = preflight.check(config, command)
    except MsrlError as error:
        for line in str(error).splitlines():
            yield "wrong", "inputs", line
    else:
        yield "ok", "inputs", summary
