"""Simulation of synchronous, asynchronous and partial rollouts on a cluster, as a table.

The model is that of `msrl plan` (`msrl/layouts/simulation.py`) with simple devices: an engine
spends the time to read its weights, and the keys and values of its responses, on every token; an
update spends the FLOPs of its tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msrl.layouts.simulation import LogNormalLengths, Mode, Simulation, SimulationResult, Workload

LENGTHS = (
    LogNormalLengths(
        "GSM8K",
        median=452,
        sigma=0.266,
        limit=1_024,
        source="mean 468 and standard deviation 127 tokens (TAUR-dev/trace_analysis_2)",
    ),
    LogNormalLengths(
        "DAPO",
        median=3_000,
        sigma=0.9,
        limit=20_480,
        source="limit of arXiv:2503.14476; median and spread are assumptions",
    ),
    LogNormalLengths(
        "long tail",
        median=500,
        sigma=math.log(10) / 2.326,
        limit=16_384,
        source="median 500 and 99th percentile 5,000 tokens; the limit is an assumption",
    ),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and model. The defaults are 16 devices of the class of Ascend 910B and 7B weights."""

    num_devices: int = 16
    memory_bytes_per_s: float = 1.6e12
    flops: float = 354e12
    utilization: float = 0.4  # of the FLOPs, in updates and prefills
    parameters: float = 7e9
    kv_bytes_per_token: float = 57_344  # 28 layers, 4 groups of 128 channels, 2 bytes
    max_running: int = 256  # sequences of one engine
    transfer_s: float = 1.0  # of new weights to the engines

    def token_s(self, num_running: int, context: float) -> float:
        """Return the seconds of one token of every running sequence of an engine."""
        read = 2 * self.parameters + num_running * context * self.kv_bytes_per_token
        return read / self.memory_bytes_per_s

    def prefill_s(self, tokens: float) -> float:
        return 2 * self.parameters * tokens / (self.flops * self.utilization)

    def update_s(self, tokens: float, num_devices: int) -> float:
        """Return the seconds of log-probabilities (2 FLOPs) and an update (6) per parameter."""
        return 8 * self.parameters * tokens / (self.flops * self.utilization * num_devices)


MODES = (
    Mode("synchronous", 0),
    Mode("partial, S = 1", 1, is_partial=True),
    Mode("partial, S = 4", 4, is_partial=True),
    Mode("S = 1", 1, is_separate=True),
    Mode("S = 2", 2, is_separate=True),
    Mode("S = 4", 4, is_separate=True),
)


def simulate(cluster: Cluster, work: Workload, mode: Mode, num_engines: int) -> SimulationResult:
    """Return the result of a mode with a number of engines."""
    return Simulation(cluster, work, mode, num_engines, cluster.num_devices).run()


def best(cluster: Cluster, work: Workload, mode: Mode) -> SimulationResult:
    """Return the result with the number of engines that has the highest throughput."""
    counts: Sequence[int] = (cluster.num_devices,)
    step = max(cluster.num_devices // 8, 1)
    if mode.is_separate:
        counts = range(max(cluster.num_devices // 8, 1), cluster.num_devices, step)
    runs = (simulate(cluster, work, mode, count) for count in counts)
    return max(runs, key=lambda result: result.tokens_per_s)


def table(cluster: Cluster, works: Sequence[Workload]) -> Iterator[str]:
    """Yield the lines of a Markdown table of all modes."""
    yield (
        "| lengths | mode | engines of the devices | tokens/s | of synchronous | trainer idle | "
        "engines idle | devices idle | staleness, mean and max | recomputed |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for work in works:
        results = {mode.name: best(cluster, work, mode) for mode in MODES}
        reference = results[MODES[0].name].tokens_per_s
        for mode in MODES:
            yield _row(cluster, work, mode, results[mode.name], reference)


def _row(
    cluster: Cluster, work: Workload, mode: Mode, result: SimulationResult, reference: float
) -> str:
    engines = f"{result.num_engines} of {cluster.num_devices}"
    if not mode.is_separate:
        engines = f"all {cluster.num_devices}, shared"
    cells = (
        work.lengths.name,
        mode.name,
        engines,
        f"{result.tokens_per_s:,.0f}",
        f"{result.tokens_per_s / reference:.2f}",
        f"{result.trainer_idle:.0%}",
        f"{result.engine_idle:.0%}",
        f"{result.device_idle:.0%}",
        f"{result.staleness:.2f}, {result.max_staleness}",
        f"{result.recomputed:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    """Print the table of all modes and length distributions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulate", description=__doc__)
    parser.add_argument("--devices", type=int, default=16, help="Number of devices (default: 16).")
    parser.add_argument("--prompts", type=int, default=64, help="Prompts per step (default: 64).")
    parser.add_argument("--samples", type=int, default=8, help="Samples per prompt (default: 8).")
    parser.add_argument("--steps", type=int, default=40, help="Number of steps (default: 40).")
    parser.add_argument(
        "--reward", type=float, default=1.0, help="Seconds to score a group (default: 1)."
    )
    args = parser.parse_args(arguments)
    if min(args.devices - 1, args.prompts, args.samples) < 1 or args.steps < 10 or args.reward < 0:
        parser.error("--devices must be 2 or more, --steps 10 or more, and no number negative")
    works = [
        Workload(lengths, args.prompts, args.samples, args.reward, args.steps)
        for lengths in LENGTHS
    ]
    for line in table(Cluster(num_devices=args.devices), works):
        print(line, flush=True)
    return 0
