"""Rank code of the device benchmark: runs every job with a new worker.

Rank processes import it by name (`benchmarks.device_ranks:main`) after `platform.prepare()`.
"""

from __future__ import annotations

import gc
import platform as machine
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core
import numpy as np
import torch

from benchmarks.device_jobs import (
    STEPS,
    Facts,
    Job,
    Measured,
    Speed,
    Trained,
    Training,
    Work,
    classify_kernel,
)
from msrl.algorithms.packing import Sequences
from msrl.config.sections.train import OptimizerConfig
from msrl.memory.flops import training_flops
from msrl.platforms import get
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing import state as checkpoints
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.launch import RankContext
from msrl.trainer.model import fused_attention
from msrl.trainer.objective.batches import BatchLimits, micro_batches, num_loss_tokens
from msrl.trainer.objective.losses import SftLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.rank import TrainingRank
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from msrl.types import MicroBatch

SETTLE_STEPS = 3
_PROFILED = {
    "cpu": torch.profiler.ProfilerActivity.CPU,
    "cuda": torch.profiler.ProfilerActivity.CUDA,
}


def main(context: RankContext, work: Work) -> None:
    """Report the device and the software, then the result of each job."""
    platform = get(work.platform)
    context.report(_facts(platform))
    for number, job in enumerate(work.jobs):
        init = f"{context.init_method}-{number}"
        with _selected_attention(job, platform):
            if isinstance(job, Training):
                context.report(_train_repeatedly(work, job, init))
            else:
                context.report(_measure(work, job, init))
        gc.collect()  # models are in reference cycles
        device = _module(platform.device(0))
        if device is not None:
            device.empty_cache()


def _train_repeatedly(work: Work, job: Training, init: str) -> Trained:
    """Train once; a deterministic job twice. Raises RuntimeError if the results differ."""
    result = _train(work, job, init)
    if job.is_deterministic and result != _train(work, job, f"{init}-again"):
        raise RuntimeError("the second run has different losses or gradients")
    return result


def _facts(platform: Platform) -> Facts:
    device = _module(platform.device(0))
    name = (
        machine.processor() or machine.machine()
        if device is None
        else str(device.get_device_name())
    )
    software = {
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "Python": machine.python_version(),
    }
    return Facts(name, software)


def _module(device: torch.device) -> Any:
    """Return `torch.cuda`, `torch.npu` or similar; None for the CPU."""
    return None if device.type == "cpu" else getattr(torch, device.type)


@contextmanager
def _selected_attention(job: Job, platform: Platform) -> Iterator[None]:
    """Disable the platform's fused attention if the job uses torch's attention."""
    fused_attention.select_kernel.cache_clear()
    if isinstance(job, Training) and not job.fused:
        vars(platform)["varlen_attention"] = lambda dtype, head_dim: ""
    try:
        yield
    finally:
        vars(platform).pop("varlen_attention", None)


def _worker(
    work: Work, job: Job, init: str, *, root: Path | None = None, step: int | None = None
) -> TrainingRank:
    """Return a worker with the weights of the job's model or of a checkpoint."""
    training = job if isinstance(job, Training) else Training(job.name, job.model, "bfloat16")
    policy = ReplicaSettings(
        root or work.folder / job.model,
        iteration=step,
        optimizer=OptimizerConfig(lr=training.lr),
        **training.settings,
    )
    settings = RankSettings(
        work.platform,
        Layout(),
        training.dtype,
        seed=0,
        timeout_s=600,
        policy=policy,
        deterministic=training.is_deterministic,
    )
    return TrainingRank(settings, 0, 1, init)


def _train(work: Work, job: Training, init: str) -> Trained:
    worker = _worker(work, job, init)
    batch = _sequences(work.lengths, worker.policy.shape.vocab_size)
    batches = _batches(batch, len(work.lengths) if job.is_packed else 1)
    half = job.resumes_at or STEPS
    reports = _steps(worker, batches, batch, job.lr, half)
    if job.resumes_at is not None:
        root = work.folder / f"saved {job.name} {job.dtype}"
        checkpoints.save(worker, root, half, {}, hf_dir=work.folder / job.model)
        worker.close()
        worker = _worker(work, job, f"{init}-resumed", root=root, step=half)
        checkpoints.load_training_state(worker, SavedTraining(root, half))
        reports += _steps(worker, batches, batch, job.lr, STEPS - half)
    attention = _attention_used(worker)
    worker.close()
    return Trained(
        tuple(r["loss"] for r in reports), tuple(r["grad_norm"] for r in reports), attention
    )


def _steps(
    worker: TrainingRank, batches: Sequence[MicroBatch], batch: Sequences, lr: float, steps: int
) -> list[dict[str, float]]:
    reports: list[dict[str, float]] = []
    for _ in range(steps):
        reports.append(
            worker.update(batches, UpdateRequest(SftLoss(), lr, divisor=num_loss_tokens(batch)))
        )
        worker.offload()
    return reports


def _attention_used(worker: TrainingRank) -> str:
    mla = worker.policy.shape.mla
    head_dim = (
        worker.policy.shape.head_dim if mla is None else mla.nope_head_dim + mla.rope_head_dim
    )
    position = worker.position
    kernel = fused_attention.select_kernel(position.device.type, position.dtype, head_dim)
    return "torch" if kernel is None else "fused"


def _sequences(lengths: Sequence[int], vocab_size: int) -> Sequences:
    """Return sequences of random tokens, all of which are trained except the first ones."""
    random = np.random.default_rng(5)
    ids = tuple(random.integers(0, vocab_size, length).astype(np.int64) for length in lengths)
    return Sequences(ids, tuple(np.ones(len(row), np.bool_) for row in ids), {})


def _batches(batch: Sequences, size: int) -> list[MicroBatch]:
    limits = BatchLimits(size)
    return micro_batches(batch, limits.group([len(ids) for ids in batch.token_ids]), limits)


def _measure(work: Work, job: Speed, init: str) -> Measured:
    device = _module(get(work.platform).device(0))
    if device is not None:
        device.reset_peak_memory_stats()
    worker = _worker(work, job, init)
    batch = _sequences(job.row * job.num_rows, worker.policy.shape.vocab_size)
    batches, num_trained = _batches(batch, job.rows_at_once * len(job.row)), num_loss_tokens(batch)

    def step() -> float:
        started = time.perf_counter()
        worker.update(batches, UpdateRequest(SftLoss(), 1e-5, divisor=num_trained))
        worker.position.platform.synchronize()
        return time.perf_counter() - started

    seconds = [step() for _ in range(SETTLE_STEPS + job.steps)][SETTLE_STEPS:]
    peak = _peak_bytes(worker.position.device)
    costs = _costs(step, worker.position.device.type)
    lengths = [len(ids) for ids in batch.token_ids]
    measured = Measured(
        statistics.median(seconds),
        sum(lengths),
        peak,
        training_flops(worker.policy.shape, lengths, num_trained),
        worker.position.platform.peak_flops("bfloat16"),
        costs,
    )
    worker.close()
    return measured


def _peak_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on the device; on CPU, of the process."""
    module = _module(device)
    if module is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(module.max_memory_allocated())


def _costs(step: Callable[[], float], device: str) -> Mapping[str, float]:
    """Return shares of the device's time in one step by kind of kernel, largest first."""
    if device not in _PROFILED:
        return {}
    with torch.profiler.profile(activities=[_PROFILED[device]]) as profile:
        step()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        if event.device_type.name.lower() == device and not getattr(
            event, "is_user_annotation", False
        ):
            time_us = event.self_cpu_time_total if device == "cpu" else event.self_device_time_total
            kind = classify_kernel(event.key)
            times[kind] = times.get(kind, 0.0) + time_us
    total = sum(times.values()) or 1.0
    by_time = sorted(times.items(), key=lambda pair: -pair[1])
    return {name: time_us / total for name, time_us in by_time}
