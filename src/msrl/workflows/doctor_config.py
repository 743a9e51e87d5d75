"""Whether a configuration would run on this machine: its own checks, the files that it names, and memory per device."""

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

Found = tuple[Literal["ok", "note", "wrong"], str, str]


def config_findings(resolved: Resolved, command: str | None, platform: Platform | None) -> Iterator[Found]:
    """Findings as (level, what, text): the checks of the command, then what only this machine and the files can tell."""
    name = command or guess(resolved)
    if name is None:
        yield "note", "configuration", "no command would read it; say which with --for"
        return
    mistakes = _mistakes(resolved, name)
    for line in mistakes:
        yield "wrong", name, line
    if not mistakes:
        yield "ok", name, "batches, lengths, files, names and cuts fit"
    if name in ("train-sft", "train-grpo") and platform is not None:
        yield from _devices(resolved.config, platform)
        yield from _memory(resolved.config, name, platform)
    if name == "train-grpo" and platform is not None and not mistakes:
        yield from _inputs(resolved.config)


def _mistakes(resolved: Resolved, command: str) -> tuple[str, ...]:
    """What the checks of the command say."""
    try:
        check(resolved, command)
    except ManyErrors as error:
        return error.messages
    except MsrlError as error:
        return (str(error),)
    return ()


def _devices(config: Config, platform: Platform) -> Iterator[Found]:
    """Devices that the run wants of this machine; on CPU a device is a process, and more than cores is slow, not wrong."""
    wanted, there = world_size(config) // config.cluster.nodes, platform.device_count()
    if wanted <= there:
        yield "ok", "devices", f"the run takes {wanted} of {there} here"
    elif platform.shares_main_memory:
        yield "note", "devices", f"the run takes {wanted} processes on {there} cores"
    else:
        text = f"the run wants {wanted} on this machine, which has {there}; set cluster.devices_per_node and cluster.nodes"
        yield "wrong", "devices", text


def _memory(config: Config, command: str, platform: Platform) -> Iterator[Found]:
    """Training, reference and engine on one device, and whether the engine's cache holds what it must."""
    shape = _shape(config)
    found = fit(config, command, platform) if shape is not None and dp_size(config) else None
    if shape is not None and found is not None:
        yield finding(found, config)
        if command == "train-grpo":
            yield from _cache(config, shape, found.memory.kv_cache)


def _cache(config: Config, shape: Shape, room: int) -> Iterator[Found]:
    """The KV cache must hold one sequence."""
    token, longest = kv_bytes_per_token(shape, element_bytes(config), config.rollout.engine.tp), max_model_len(config)
    if room < token * longest:
        text = f"{room / GB:.2f} GB hold {room // token} tokens, and one sequence has up to {longest}"
        yield "wrong", "KV cache", f"{text}; raise rollout.engine.memory_fraction or kv_cache_bytes"
    else:
        yield "ok", "KV cache", f"room for {room // token:,} tokens, {room // (token * longest):,} of the longest sequences"


def _shape(config: Config) -> Shape | None:
    try:
        return model_shape(config)
    except MsrlError:
        return None  # said by the checks


def _inputs(config: Config) -> Iterator[Found]:
    """The data, its tokenizer and template, and the placement, opened as a run opens them before Ray is asked for."""
    from msrl.workflows.rl.setup import prepare

    try:
        job = prepare(config)
    except (MsrlError, OSError) as error:
        for line in str(error).splitlines():
            yield "wrong", "inputs", line
    else:
        yield "ok", "inputs", f"{len(job.prompts.rows):,} prompts, {job.num_steps:,} steps, {job.placement.num_devices} devices placed"
