"""Whether a training fits into the memory of the devices, before any is asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal

from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.memory.estimate import Memory, bytes_text, table, training_memory, with_engine
from msrl.models.shape import Shape
from msrl.plan.derived import model_shape, world_size
from msrl.platforms.base import Platform


@dataclass(frozen=True, slots=True)
class Fit:
    """How a training's memory stands to a device's, when passes are as full as the configuration allows (`memory`, `needed`), and however
    short they turn out (`least`, `certain`).
    """

    memory: Memory
    least: Memory
    needed: int  # bytes of one device; in main memory of all ranks and engines of a machine
    certain: int
    total: int

    @property
    def level(self) -> Literal["ok", "note", "wrong"]:
        """wrong: it cannot fit; note: it might not, when passes are as full as the configuration allows."""
        return "wrong" if self.certain > self.total else "note" if self.needed > self.total else "ok"

    @property
    def shown(self) -> Memory:
        """The one that a message is about."""
        return self.least if self.level == "wrong" else self.memory

    @property
    def head(self) -> str:
        """What is needed and what is there."""
        if self.level == "wrong":
            return f"the run takes {bytes_text(self.certain)} or more, and there are {bytes_text(self.total)}"
        return f"the run takes at most {bytes_text(self.needed)} of {bytes_text(self.total)}"


def fit(config: Config, command: str, platform: Platform, *, longest: int | None = None) -> Fit | None:
    """The memory of a training on this machine's devices; None where the model or the device's memory cannot be told.

    `longest`: tokens of the longest row that is certain to be trained on.
    """
    shape, total = model_shape(config), platform.memory_bytes()
    if shape is None or total is None:
        return None
    memory = training_memory(
        config, shape, command, longest=longest,
        temporary_elements=platform.elements_at_once, attention_bytes=4 if platform.upcast_attention else None,
    )  # fmt: skip
    memory = _with_engine(memory, config, shape, command, platform)
    least = _least(memory, config, shape, command, longest)
    return Fit(memory, least, _on_machine(memory, config, platform), _on_machine(least, config, platform), total)


def _least(memory: Memory, config: Config, shape: Shape, command: str, longest: int | None) -> Memory:
    """With a pass over the longest row alone, or, where no row is certain to be long, without activations."""
    if longest is None or command == "train-grpo":
        return replace(memory, activations=0, working=0, logits=0, forward=0)
    alone = config.train.model_copy(update={"micro_batch": 1, "max_tokens_per_micro_batch": None})
    return training_memory(config.model_copy(update={"train": alone}), shape, command, longest=longest)


def _with_engine(memory: Memory, config: Config, shape: Shape, command: str, platform: Platform) -> Memory:
    if command != "train-grpo":
        return memory
    sleeps = bool(platform.engine_arguments().get("enable_sleep_mode"))
    return with_engine(memory, config, shape, total=platform.memory_bytes(), is_shared=platform.shares_main_memory, sleeps=sleeps)


def _on_machine(memory: Memory, config: Config, platform: Platform) -> int:
    """Bytes that are counted against `Platform.memory_bytes`."""
    if not platform.shares_main_memory:
        return memory.peak
    ranks, engine = world_size(config) // config.cluster.nodes, config.rollout.engine
    alone = replace(memory, engine_weights=0, kv_cache=0, resting=frozenset())
    return alone.training * ranks + memory.engine * engine.tp * engine.dp


def cures(config: Config, found: Fit) -> str:
    """What would make the largest parts smaller, of what is not done yet."""
    train, memory = config.train, found.shown
    helps = {"raise train.parallel.tp or pp": memory.weights + memory.gradients + memory.optimizer}
    if not train.offload.optimizer:
        helps["set train.offload.optimizer"] = memory.optimizer
    if train.recompute.granularity != "full":
        helps["set train.recompute.granularity: full"] = memory.activations
    if train.chunk is None:
        helps["set train.chunk, such as 1024"] = memory.logits
    if found.level != "wrong" and (train.micro_batch > 1 or train.max_tokens_per_micro_batch is not None):
        key = "micro_batch" if train.max_tokens_per_micro_batch is None else "max_tokens_per_micro_batch"
        helps[f"lower train.{key}"] = memory.activations + memory.logits
    helps["lower rollout.engine.memory_fraction or kv_cache_bytes"] = memory.kv_cache
    best = sorted((cure for cure, size in helps.items() if size), key=lambda cure: helps[cure], reverse=True)
    return ", or ".join(best[:3])


def check_memory(config: Config, command: str, platform: Platform, *, longest: int | None = None) -> None:
    """Raises MsrlError for a training that cannot fit. On CPU, and where only the fullest passes would not fit, that is said instead."""
    found = fit(config, command, platform, longest=longest)
    if found is None or found.level == "ok":
        return
    parts = ", ".join(
        f"{name} {bytes_text(size)}" for name, size in (found.least if found.level == "wrong" else found.memory).rows().items()
    )
    message = f"memory: {found.head}; {cures(config, found)} (the fullest device: {parts})"
    if found.level == "wrong" and not platform.shares_main_memory:
        raise MsrlError(message)
    print(f"warning: {message}", file=sys.stderr)


def finding(found: Fit, config: Config) -> tuple[Literal["ok", "note", "wrong"], str, str]:
    """What doctor says: how the training stands to the device, and the table."""
    cure = "" if found.level == "ok" else f"; {cures(config, found)}"
    lines = "\n".join(f"         {line}" for line in table(found.memory.rows()))
    return found.level, "memory", f"{found.head}{cure}; on the fullest device:\n{lines}"
