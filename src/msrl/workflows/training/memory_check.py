"""Check that a training fits into the memory of the devices, before any device is requested."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msrl.config.sections.train import TrainConfig
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.memory.estimate import Memory, bytes_text, table, training_memory, with_engine
from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Level, Platform
from msrl.rollout.engine import sleep_level


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of a training compared with the device.

    `memory` and `needed` assume micro-batches as full as the configuration allows, `least` and
    `certain` the shortest possible ones.
    """

    memory: Memory
    least: Memory
    needed: int  # bytes of one device; in main memory of all ranks and engines of a machine
    certain: int
    total: int

    @property
    def level(self) -> Level:
        """`wrong`: the training cannot fit.

        `note`: it may not fit if micro-batches are as full as the configuration allows.
        """
        if self.certain > self.total:
            return "wrong"
        return "note" if self.needed > self.total else "ok"

    @property
    def shown(self) -> Memory:
        """Memory that a message describes."""
        return self.least if self.level == "wrong" else self.memory

    @property
    def head(self) -> str:
        """Needed and available memory as text."""
        total = bytes_text(self.total)
        if self.level == "ok":
            return f"the run needs at most {bytes_text(self.needed)} of {total}"
        if self.level == "note":
            return f"the run may need {bytes_text(self.needed)}, more than the available {total}"
        return f"the run needs at least {bytes_text(self.certain)}, more than the available {total}"


def fit(
    plan: RunPlan, platform: Platform, *, longest: int | None = None, has_images: bool = False
) -> Fit | None:
    """Return the memory of a training on this machine's devices.

    Returns None if the model or the device's memory is unknown. `longest` is the length in tokens
    of the longest row that is certainly trained on, and `has_images` is True if rows have images.
    """
    total = platform.memory_bytes()
    if plan.policy is None or total is None:
        return None
    memory = training_memory(
        plan,
        longest=longest,
        temporary_elements=platform.elements_at_once,
        attention_bytes=4 if platform.upcast_attention else None,
        has_images=has_images,
    )
    memory = _with_engine(memory, plan, platform)
    least = _least(memory, plan, longest)
    needed, certain = _on_machine(memory, plan, platform), _on_machine(least, plan, platform)
    return Fit(memory, least, needed, certain, total)


def _least(memory: Memory, plan: RunPlan, longest: int | None) -> Memory:
    """Return the memory with a micro-batch of the longest row alone.

    Activations are not counted if no row length is certain.
    """
    if longest is None or plan.has_rollouts:
        return replace(memory, activations=0, working=0, logits=0, forward=0)
    alone = plan.train.model_copy(update={"micro_batch": 1, "max_tokens_per_micro_batch": None})
    config = plan.config.model_copy(update={"train": alone})
    return training_memory(replace(plan, config=config), longest=longest)


def _with_engine(memory: Memory, plan: RunPlan, platform: Platform) -> Memory:
    if not plan.has_engines:
        return memory
    sleeps = sleep_level(plan.rollout.engine, platform) > 0
    return with_engine(
        memory,
        plan,
        total=platform.memory_bytes(),
        is_shared=platform.shares_main_memory,
        sleeps=sleeps,
    )


def _on_machine(memory: Memory, plan: RunPlan, platform: Platform) -> int:
    """Return the bytes that count against `Platform.memory_bytes`."""
    if not platform.shares_main_memory:
        return memory.peak
    ranks, engine = plan.world_size // plan.config.cluster.nodes, plan.rollout.engine
    alone = replace(memory, engine_weights=0, kv_cache=0, resting=frozenset())
    separate = sum(memory.separate[model.role] * model.num_ranks for model in plan.separate_models)
    return alone.training * ranks + memory.engine * engine.tp * plan.num_engines + separate


def remedies(train: TrainConfig, memory_fit: Fit) -> str:
    """Return the settings that would reduce the largest parts and are not used yet."""
    memory = memory_fit.shown
    savings = {
        "raise train.parallel.tp or pp": memory.weights + memory.gradients + memory.optimizer
    }
    if not train.offload.optimizer:
        savings["set train.offload.optimizer"] = memory.optimizer
    if train.recompute.granularity != "full":
        savings["set train.recompute.granularity: full"] = memory.activations
    if train.chunk is None:
        savings["set train.chunk, such as 1024"] = memory.logits
    if memory_fit.level != "wrong" and (
        train.micro_batch > 1 or train.max_tokens_per_micro_batch is not None
    ):
        key = (
            "micro_batch"
            if train.max_tokens_per_micro_batch is None
            else "max_tokens_per_micro_batch"
        )
        savings[f"lower train.{key}"] = memory.activations + memory.logits
    savings["lower rollout.engine.memory_fraction or kv_cache_bytes"] = memory.kv_cache
    best = sorted(
        (remedy for remedy, size in savings.items() if size),
        key=lambda remedy: savings[remedy],
        reverse=True,
    )
    return ", or ".join(best[:3])


def check_memory(
    plan: RunPlan, platform: Platform, *, longest: int | None = None, has_images: bool = False
) -> None:
    """Raise MsrlError for a training that cannot fit.

    On CPU, or if only full micro-batches would not fit, print a warning.
    """
    memory_fit = fit(plan, platform, longest=longest, has_images=has_images)
    if memory_fit is None or memory_fit.level == "ok":
        return
    usage = ", ".join(
        f"{name} {bytes_text(size)}" for name, size in memory_fit.shown.rows().items()
    )
    remedy = remedies(plan.train, memory_fit)
    message = f"memory: {memory_fit.head}; {remedy} (the fullest device: {usage})"
    if memory_fit.level == "wrong" and not platform.shares_main_memory:
        raise MsrlError(message)
    print_note(f"warning: {message}")


def finding(memory_fit: Fit, train: TrainConfig) -> tuple[Level, str, str]:
    """Return level, subject and text of doctor's finding on memory."""
    remedy = "" if memory_fit.level == "ok" else f"; {remedies(train, memory_fit)}"
    lines = "\n".join(f"         {line}" for line in table(memory_fit.memory.rows()))
    return memory_fit.level, "memory", f"{memory_fit.head}{remedy}; on the fullest device:\n{lines}"
