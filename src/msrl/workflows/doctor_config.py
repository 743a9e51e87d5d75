"""Whether a configuration would run on this machine: its own checks, the files that it names, and memory per device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msrl.config.checks import check, guess
from msrl.config.derived import bytes_per_device, max_model_len, model_shape, parameters_per_rank, reference_bytes, world_size
from msrl.config.loader import Resolved
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.models.cut import Cut
from msrl.models.shape import Shape
from msrl.platforms.base import Platform

Found = tuple[Literal["ok", "note", "wrong"], str, str]
GB = 10**9


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
    if name == "train-grpo" and platform is not None:
        yield from _devices(resolved.config, platform)
        yield from _memory(resolved.config, platform)
        if not mistakes:
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


def _memory(config: Config, platform: Platform) -> Iterator[Found]:
    """Training, reference and engine on one device, all at once, as they stand there; activations come on top."""
    total, shape = platform.memory_bytes(), _shape(config)
    if total is None or shape is None:
        return
    held = bytes_per_device(config, shape)
    training = sum(held.values()) + reference_bytes(config, shape)
    weights = parameters_per_rank(shape, Cut()) // config.rollout.engine.tp * (2 if config.model.dtype == "bfloat16" else 4)
    engine = config.rollout.engine
    cache = engine.kv_cache_bytes
    taken = weights + cache if cache is not None else int(total * engine.memory_fraction)
    ranks = world_size(config) // config.cluster.nodes if platform.shares_main_memory else 1
    engines = engine.dp * engine.tp if platform.shares_main_memory else 1
    needed = training * ranks + taken * (engines if cache is not None else 1)
    text = f"{training * ranks / GB:.1f} GB of training and {(needed - training * ranks) / GB:.1f} GB of the engine"
    if needed > total:
        cure = "raise train.parallel or lower rollout.engine.memory_fraction"
        yield "wrong", "memory", f"{text} do not fit into {total / GB:.1f} GB; {cure}"
    else:
        yield "ok", "memory", f"{text} of {total / GB:.1f} GB, activations on top"
    yield from _cache(config, shape, cache if cache is not None else taken - weights)


def _cache(config: Config, shape: Shape, room: int) -> Iterator[Found]:
    """The KV cache must hold one sequence: keys and values of every layer (grouped-query attention)."""
    element = 2 if config.model.dtype == "bfloat16" else 4
    token = (
        2 * shape.num_layers * shape.num_query_groups * shape.head_dim * element // min(config.rollout.engine.tp, shape.num_query_groups)
    )
    longest = max_model_len(config)
    if room < token * longest:
        text = f"{max(room, 0) / GB:.2f} GB hold {max(room, 0) // token} tokens, and one sequence has up to {longest}"
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
    from msrl.workflows.grpo_job import prepare

    try:
        job = prepare(config)
    except (MsrlError, OSError) as error:
        for line in str(error).splitlines():
            yield "wrong", "inputs", line
    else:
        yield "ok", "inputs", f"{len(job.prompts.rows):,} prompts, {job.num_steps:,} steps, {job.placement.num_devices} devices placed"
