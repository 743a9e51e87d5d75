"""Correctness and speed of the trainer on an accelerator: `python -m benchmarks device`.

- Parity: ten steps with every training option of one device, in bfloat16 and float32, from the same
  weights on the same batch. Losses and gradient norms are compared with float32 on the CPU.
- Speed: time, peak memory, MFU and most expensive kernels for real shapes in bfloat16.

The weights are random and created on demand. The benchmark needs no vLLM, no Ray and no data. It
exits with code 1 if a job fails or a result is out of tolerance.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "device.json"
# Imports of the process with the device. An image with torch and transformers lacks the first two.
REQUIRED = {
    "msrl": "msrl (set PYTHONPATH=src, or pip install -e . --no-deps)",
    "megatron": "megatron-core 0.16.1", "torch": "torch",
    "numpy": "numpy", "packaging": "packaging", "safetensors": "safetensors",
    "setuptools": "setuptools",
}  # fmt: skip
PARITY_HEAD = (
    "| training | dtype | attention | first and last loss | on the CPU | largest error | limit"
    " | error of first gradient norm | limit | error of last | reached |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
SPEED_HEAD = ("| shape | batch | step | tokens/s | memory | MFU |", "|---|---|---|---|---|---|")
COST_HEAD = ("| shape | kernel | share of device time |", "|---|---|---|")
NUM_COSTS = 3
TARGET = "benchmarks.device_ranks:main"


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    missing_packages = find_missing_packages()
    if missing_packages:
        print(f"not installed: {', '.join(missing_packages)}", file=sys.stderr)
        return 2
    from msrl.errors import MsrlError

    try:
        report = run(args)
    except MsrlError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(report)))
    if args.write is not None:
        args.write.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    rows = [*report["parity"], *report["speed"]]
    return int(any(row.get("error") or row.get("reached") is False for row in rows))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks device", description=__doc__)
    parser.add_argument(
        "--platform",
        default="auto",
        help="Platform: npu, cuda or cpu (default: the first available one).",
    )
    parser.add_argument(
        "--shapes",
        default="real",
        choices=("real", "tiny"),
        help="Model shapes. tiny runs in seconds on a CPU (default: %(default)s).",
    )
    parser.add_argument(
        "--only",
        choices=("parity", "speed"),
        help="Run only the parity or only the speed benchmark (default: both).",
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="Folder in which the models are kept for the next run (default: a temporary folder).",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=RESULTS,
        help=f"Also write all figures as JSON (default file: {RESULTS.relative_to(ROOT)}).",
    )
    return parser.parse_args(argv)


def find_missing_packages() -> list[str]:
    """Return the required packages that are not installed."""
    return [
        package for module, package in REQUIRED.items() if importlib.util.find_spec(module) is None
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all benchmarks and return the content of the JSON file.

    Raises:
        MsrlError: if the platform is not available.
    """
    from benchmarks.device_jobs import SCALES
    from msrl.platforms import resolve

    platform, scale = resolve(args.platform).name, SCALES[args.shapes]
    trainings = scale.trainings(has_fused=platform != "cpu") if args.only != "speed" else []
    speeds = scale.speed_jobs() if args.only != "parity" else []
    references = scale.references() if trainings else []
    with tempfile.TemporaryDirectory(prefix="msrl-device-") as temporary:
        folder = args.work or Path(temporary)
        make_models(folder, scale.models, {job.model for job in (*trainings, *speeds)})
        if platform == "cpu":  # the same process computes the references
            jobs = [*references, *trainings, *speeds]
            measured = expected = dict(results(platform, folder, scale.lengths, jobs))
        else:
            measured = dict(results(platform, folder, scale.lengths, [*trainings, *speeds]))
            expected = dict(results("cpu", folder, scale.lengths, references))
    return {
        "date": date.today().isoformat(),
        "platform": platform,
        **measured.pop("facts", {}),
        "parity": [
            parity_row(job, measured[key(job)], expected[job.reference, "float32"])
            for job in trainings
        ],
        "speed": [speed_row(job, measured[key(job)]) for job in speeds],
    }


def key(job: Any) -> Any:
    return job.name, getattr(job, "dtype", "bfloat16")


def make_models(folder: Path, models: Mapping[str, Mapping[str, Any]], needed: set[str]) -> None:
    from benchmarks.checkpoints import make_trainable

    for name in sorted(needed):
        log(f"creating {name}")
        make_trainable(folder / name, models[name])


def results(
    platform: str, folder: Path, lengths: tuple[int, ...], jobs: Sequence[Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield (key, result) of every job, and ("facts", ...).

    The result of a failed job is the last line of its error. A failed process is started again for
    the remaining jobs.
    """
    from benchmarks.device_jobs import Facts, Speed, Work
    from msrl.errors import MsrlError
    from msrl.platforms import get
    from msrl.trainer.launch import LocalRanks, RankError

    pending, device = list(jobs), get(platform)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    while pending:
        env = environment(pending[0], device.deterministic_environment)
        batch = leading_jobs(pending, env, device.deterministic_environment)
        work = Work(platform, folder, lengths, tuple(batch))
        env = {**env, "PYTHONPATH": path}
        try:
            with LocalRanks(TARGET, work, num_ranks=1, platform=device, env=env) as ranks:
                for message in ranks.messages():
                    if isinstance(message, Facts):
                        yield "facts", asdict(message)
                        continue
                    log(f"{platform}: {pending[0].name}, {key(pending[0])[1]}: {message}")
                    yield key(pending.pop(0)), message
        except (RankError, MsrlError) as error:
            job, reason = pending.pop(0), str(error).strip().splitlines()[-1]
            log(f"{platform}: {job.name}: {reason}")
            is_out_of_memory = "out of memory" in str(error).lower()
            smaller = job.smaller() if isinstance(job, Speed) and is_out_of_memory else None
            if smaller is None:
                yield key(job), reason
                continue
            log(f"{platform}: {job.name}: retrying with smaller micro-batches")
            pending.insert(0, smaller)


def leading_jobs(
    jobs: Sequence[Any], env: Mapping[str, str], deterministic: Mapping[str, str]
) -> list[Any]:
    """Return the first jobs that one process can run, because they need the same environment."""
    return list(itertools.takewhile(lambda job: environment(job, deterministic) == env, jobs))


def environment(job: Any, deterministic: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment variables that the job's process needs at its start."""
    return deterministic if getattr(job, "settings", {}).get("deterministic") else {}


def parity_row(job: Any, result: Any, reference: Any) -> dict[str, Any]:
    """Return the results of a training and their errors relative to the CPU."""
    from benchmarks.device_jobs import LOSS_LIMITS, NORM_LIMITS

    row = {"way": job.name, "dtype": job.dtype}
    for failure in (result, reference):
        if isinstance(failure, str):
            return {**row, "error": failure}
    loss_error = max(map(relative_error, result.losses, reference.losses))
    first, last = (
        relative_error(result.grad_norms[step], reference.grad_norms[step]) for step in (0, -1)
    )
    is_close = loss_error <= LOSS_LIMITS[job.dtype] and first <= NORM_LIMITS[job.dtype]
    return {
        **row,
        **asdict(result),
        "cpu": {"losses": reference.losses, "grad_norms": reference.grad_norms},
        "loss_off": loss_error,
        "first_grad_norm_off": first,
        "last_grad_norm_off": last,
        "reached": is_close,
    }


def relative_error(value: float, expected: float) -> float:
    """Return the relative error; infinity for NaN.

    >>> relative_error(1.5, 1.0), relative_error(float("nan"), 1.0)
    (0.5, inf)
    """
    error = abs(value - expected) / abs(expected)
    return float("inf") if math.isnan(error) else error


def speed_row(job: Any, result: Any) -> dict[str, Any]:
    """Return the results of a speed job with its throughput and MFU."""
    row = {
        "shape": job.name,
        "rows": job.num_rows,
        "rows_at_once": job.rows_at_once,
        "row": job.row,
    }
    if isinstance(result, str):
        return {**row, "error": result}
    throughput = result.num_tokens / result.step_s
    mfu = None if result.peak_flops is None else result.flops / (result.step_s * result.peak_flops)
    return {**row, **asdict(result), "tokens_per_s": throughput, "mfu": mfu}


def table(report: Mapping[str, Any]) -> list[str]:
    """Return the results as Markdown lines."""
    versions = report.get("software", {})
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    device = report.get("device", report["platform"])
    lines = [f"# {device}, {report['date']}", "", f"{software}.", ""]
    if report["parity"]:
        lines += [*PARITY_HEAD, *map(parity_line, report["parity"]), ""]
    if report["speed"]:
        lines += [*SPEED_HEAD, *map(speed_line, report["speed"]), ""]
    costs = [line for row in report["speed"] for line in cost_lines(row)]
    if costs:
        lines += [*COST_HEAD, *costs, ""]
    return lines[:-1]


def parity_line(row: Mapping[str, Any]) -> str:
    from benchmarks.device_jobs import LOSS_LIMITS, NORM_LIMITS

    name, dtype = row["way"], row["dtype"]
    limits = f"{LOSS_LIMITS[dtype]:g}", f"{NORM_LIMITS[dtype]:g}"
    if "error" in row:
        failure = f"failed: {row['error']}"
        return table_line(name, dtype, "", failure, "", "", limits[0], "", limits[1], "", "**no**")
    ours, cpu = (
        f"{losses[0]:.4f}, {losses[-1]:.4f}" for losses in (row["losses"], row["cpu"]["losses"])
    )
    loss_error = f"{row['loss_off']:.1e}"
    first, last = f"{row['first_grad_norm_off']:.1e}", f"{row['last_grad_norm_off']:.1e}"
    reached = "yes" if row["reached"] else "**no**"
    errors = (loss_error, limits[0], first, limits[1], last)
    return table_line(name, dtype, row["attention"], ours, cpu, *errors, reached)


def speed_line(row: Mapping[str, Any]) -> str:
    batch = f"{row['rows']} x {sum(row['row'])}, micro-batches of {row['rows_at_once']}"
    if "error" in row:
        return table_line(row["shape"], batch, f"failed: {row['error']}", "", "", "")
    step, throughput = f"{row['step_s']:.3f} s", f"{row['tokens_per_s']:,.0f}"
    memory = f"{row['peak_bytes'] / 2**30:.1f} GiB"
    mfu = "unknown peak" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return table_line(row["shape"], batch, step, throughput, memory, mfu)


def table_line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def cost_lines(row: Mapping[str, Any]) -> list[str]:
    return [
        f"| {row['shape']} | {name} | {share:.1%} |"
        for name, share in list(row.get("costs", {}).items())[:NUM_COSTS]
    ]


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
