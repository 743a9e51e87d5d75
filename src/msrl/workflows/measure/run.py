"""Measurement of a machine, and its profile (`layouts/profile.py`)."""

from __future__ import annotations

import platform as machine
from datetime import date
from functools import partial
from typing import Any

from msrl.errors import MsrlError
from msrl.layouts.cost import BACKWARD_KERNELS, KERNELS
from msrl.layouts.profile import Profile
from msrl.limits import print_note
from msrl.platforms.base import Platform, is_installed
from msrl.workflows.measure.rank import MeasuringRank
from msrl.workflows.training.transport.base import Workers
from msrl.workflows.training.transport.local import local_workers

_COLLECTIVES = ("gather", "exchange", "send")
_NO_ENGINE = {"value": 5e-3, "source": "assumption, since vllm was absent"}
_MAX_RANKS = 8  # of one machine; more take longer and say little more


def measure(platform: Platform) -> Profile:
    """Return the profile of this machine's devices, which takes minutes.

    Raises:
        MsrlError: A package is missing, or there is no device.
    """
    missing, count = platform.missing(), min(platform.device_count(), _MAX_RANKS)
    if missing or not count:
        raise MsrlError(f"--measure: {missing or f'no device of {platform.name}'}")
    dtypes = ("float32",) if platform.shares_main_memory else ("bfloat16", "float32")
    print_note(f"Measuring {count} devices of {platform.name}. This takes minutes.")
    with local_workers(
        partial(MeasuringRank, platform.name), num_workers=count, platform=platform, env={}
    ) as ranks:
        ranks.call("start", ranks.rendezvous())
        device = _device(ranks, dtypes, count)
        ranks.call("close")
    device |= _host(platform, dtypes[0])
    steps = _engine(platform, dtypes[0])
    if steps is not None:
        device["speeds"]["engine"] = steps
    step_s = _figure(steps[0][1], "one sequence") if steps else _NO_ENGINE
    memory = platform.memory_bytes() or 1
    if platform.shares_main_memory:
        memory //= count
    text = f"{count} devices of {platform.name}, {machine.node()}, {date.today().isoformat()}"
    return Profile.model_validate(
        {
            "title": text,
            "platform": platform.name,
            "is_measured": True,
            "memory_bytes": _figure(memory, "of one device, as the platform reports it"),
            "engine_step_s": step_s,
            "efficiency": _efficiency(),
            **device,
        }
    )


def _device(ranks: Workers, dtypes: tuple[str, ...], count: int) -> dict[str, Any]:
    """Return the figures of devices and links."""
    products = {dtype: ranks.call("products", dtype)[0] for dtype in dtypes}
    speeds: dict[str, Any] = {
        "products": products,
        "attention": ranks.call("attention", dtypes[0])[0],
    }
    memory = min(ranks.call("memory"))
    copies = min(ranks.call("host_copies"))
    link, latency = memory, 1e-6  # of one device, which has no links
    if count > 1:
        speeds |= {name: ranks.call("collectives", name)[0] for name in _COLLECTIVES}
        link = max(row[2] for row in speeds["gather"])
        latency = min(row[1] / row[2] for row in speeds["gather"])
    return {
        "peak_flops": {
            dtype: _figure(max(row[2] for row in rows), "the fastest product")
            for dtype, rows in products.items()
        },
        "memory_bytes_per_s": _figure(memory, "a sum of two vectors"),
        "link_bytes_per_s": _figure(link, "the fastest all-gather and reduce-scatter"),
        "host_bytes_per_s": _figure(copies, "copies from the host"),
        "collective_s": _figure(latency, "the fastest all-gather and reduce-scatter"),
        "speeds": speeds,
    }


def _host(platform: Platform, dtype: str) -> dict[str, Any]:
    """Return the figures of updates of small models."""
    from msrl.workflows.measure.small_model import host_times

    host = host_times(platform, dtype)
    kernel = host.layer / KERNELS / (1 + BACKWARD_KERNELS)
    return {
        "kernel_s": _figure(kernel, f"layers of a small model, each counted as {KERNELS} kernels"),
        "pass_s": _figure(host.micro_batch, "micro-batches of a small model"),
        "update_s": _figure(host.update, "updates of a small model"),
    }


def _engine(platform: Platform, dtype: str) -> list[tuple[float, float]] | None:
    """Return the seconds of engine steps by number of sequences; None without vLLM."""
    from msrl.workflows.measure.small_model import engine_steps

    if not is_installed("vllm"):
        print_note("Not measured: engines, which need vllm")
        return None
    return engine_steps(platform, dtype)


def _figure(value: float, source: str) -> dict[str, Any]:
    return {"value": float(f"{value:.4g}"), "source": f"measured: {source}"}


def _efficiency() -> dict[str, Any]:
    share = {"value": 1.0, "source": "included in the measured speeds"}
    names = ("products", "experts", "attention", "memory", "links", "network")
    return dict.fromkeys(names, share)
