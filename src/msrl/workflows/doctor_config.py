"""Findings of `msrl doctor` for a configuration: its checks, its files, and memory per device."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.checks.validate import find_errors, guess
from msrl.config.hub_names import with_local_folders
from msrl.config.loader import Resolved
from msrl.errors import MsrlError
from msrl.memory.estimate import GB
from msrl.memory.states import element_bytes
from msrl.models.kv_cache import kv_bytes_per_token, state_bytes_per_sequence
from msrl.plan.run_plan import RunPlan, resolve
from msrl.platforms.base import Level, Platform
from msrl.workflows.training.memory_check import finding, fit

ConfigFinding = tuple[Level, str, str]


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
    local = with_local_folders(resolved, name)
    resolved, plan = local.resolved, resolve(local.resolved.config, name)
    mistakes = tuple(local.errors.values()) or _mistakes(resolved, plan)
    for line in mistakes:
        yield "wrong", name, line
    if not mistakes:
        yield "ok", name, "batches, lengths, files, names and parallel layouts are consistent"
    if plan.is_training and platform is not None:
        yield from _devices(plan, platform)
        yield from _memory(plan, platform)
    if name != "cluster" and not mistakes:
        yield from _inputs(plan)


def _mistakes(resolved: Resolved, plan: RunPlan) -> tuple[str, ...]:
    """Return the errors that the checks of the command report."""
    try:
        return tuple(find_errors(resolved, plan))
    except MsrlError as error:
        return (str(error),)


def _devices(plan: RunPlan, platform: Platform) -> Iterator[ConfigFinding]:
    """Compare the devices of the run with the devices of this machine.

    On CPU, a device is a process. More processes than cores are slow, but not wrong.
    """
    needed = plan.num_local_devices
    available = platform.device_count()
    if needed <= available:
        yield "ok", "devices", f"the run uses {needed} of {available}"
    elif platform.shares_main_memory:
        yield "note", "devices", f"the run starts {needed} processes on {available} cores"
    else:
        text = (
            f"the run needs {needed} on this machine, which has {available}. Change "
            "cluster.devices_per_node, cluster.nodes and cluster.roles."
        )
        yield "wrong", "devices", text


def _memory(plan: RunPlan, platform: Platform) -> Iterator[ConfigFinding]:
    """Yield the memory of a run on one device, and the size of the KV cache."""
    is_known = plan.shape_or_none is not None and plan.dp_size > 0
    memory_fit = fit(plan, platform, has_images=plan.has_images) if is_known else None
    if memory_fit is not None:
        yield finding(memory_fit, plan.train)
        if plan.has_engines:
            yield from _cache(plan, memory_fit.memory.kv_cache)


def _cache(plan: RunPlan, cache_bytes: int) -> Iterator[ConfigFinding]:
    """Check that the KV cache can hold one sequence of maximum length."""
    sizes = plan.shape, element_bytes(plan), plan.rollout.engine.tp
    token, longest = kv_bytes_per_token(*sizes), plan.max_model_len
    sequence = token * longest + state_bytes_per_sequence(*sizes)
    if cache_bytes < sequence:
        text = (
            f"{cache_bytes / GB:.2f} GB hold {cache_bytes * longest // sequence} tokens, but one "
            f"sequence has up to {longest}"
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
            f"room for {cache_bytes * longest // sequence:,} tokens, {cache_bytes // sequence:,} "
            "of the longest sequences",
        )


def _inputs(plan: RunPlan) -> Iterator[ConfigFinding]:
    """Check all inputs as the command does before it starts anything."""
    from msrl.workflows import preflight

    try:
        summary = preflight.check(plan).summary
    except MsrlError as error:
        for line in str(error).splitlines():
            yield "wrong", "inputs", line
    else:
        yield "ok", "inputs", summary
