"""Accuracy and speed of the trainer on an accelerator: `python -m benchmarks device`.

The accuracy part runs every way to train on one device for ten steps from the same weights on the
same batch, in bfloat16 and in float32, and compares losses and gradient norms with those of the CPU
in float32. The commands part trains with `msrl train-sft`, `train-dpo` and `train-rm`, and compares
the losses. The speed part reports time, memory and model FLOPs utilization (MFU) of real shapes in
bfloat16, and the kernels that take most of the device's time. Weights are random; neither vLLM, Ray
nor data is needed. The exit code is 1 if a job failed or missed its goal.
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

from benchmarks import device_commands
from benchmarks.results import README, replace_between

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "device.json"
BEGIN, END = "<!-- tables of device.json -->\n", "<!-- end of the tables -->\n"
# Imports of a process with a device. Images with torch and transformers lack the first two.
NEEDED = {
    "msrl": "msrl (set PYTHONPATH=src, or pip install -e . --no-deps)",
    "megatron": "megatron-core 0.16.1",
    "torch": "torch",
    "numpy": "numpy",
    "packaging": "packaging",
    "safetensors": "safetensors",
    "setuptools": "setuptools",
}
PARITY_HEAD = (
    "| way | type | attention | loss, first and last | on CPU | largest difference | goal"
    " | difference of first gradient norm | goal | of last | reached |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
SPEED_HEAD = ("| shape | batch | step | tokens/s | memory | MFU |", "|---|---|---|---|---|---|")
COST_HEAD = ("| shape | kernels | share of device time |", "|---|---|---|")
NUM_COSTS = 3
PARTS = ("parity", "commands", "speed")
TARGET = "benchmarks.device_ranks:main"


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    packages = missing_packages()
    if packages:
        print(f"not installed: {', '.join(packages)}", file=sys.stderr)
        return 2
    from msrl.errors import MsrlError

    try:
        measurements = run(args)
    except MsrlError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(measurements)))
    if args.write is not None:
        args.write.write_text(json.dumps(measurements, indent=1) + "\n", encoding="utf-8")
        if args.write == RESULTS:
            update_readme()
    return int(
        any(
            row.get("error") or row.get("reached") is False
            for rows in (measurements[part] for part in PARTS)
            for row in rows
        )
    )


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks device", description=__doc__)
    parser.add_argument(
        "--platform",
        default="auto",
        help="npu, cuda or cpu (default: the first available one).",
    )
    parser.add_argument(
        "--shapes",
        default="real",
        choices=("real", "tiny"),
        help="Sizes of the models. `tiny` takes seconds on a CPU (default: real).",
    )
    parser.add_argument("--only", choices=PARTS, help="Run only one of the parts (default: all).")
    parser.add_argument(
        "--work",
        type=Path,
        help="Folder of the models, reused by later runs (default: a temporary folder).",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=RESULTS,
        help=f"Also write all figures as JSON (default: {RESULTS.relative_to(ROOT)}, and the "
        "tables of benchmarks/README.md).",
    )
    return parser.parse_args(argv)


def missing_packages() -> list[str]:
    """Return the required packages that are not installed."""
    return [
        package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements as JSON values. Raises MsrlError if the platform is not available."""
    from benchmarks.device_jobs import SCALES
    from msrl.platforms import resolve

    platform, scale = resolve(args.platform).name, SCALES[args.shapes]
    parts = PARTS if args.only is None else (args.only,)
    trainings = scale.trainings(has_fused=platform != "cpu") if "parity" in parts else []
    speeds = scale.speed_jobs() if "speed" in parts else []
    with tempfile.TemporaryDirectory(prefix="msrl-device-") as temporary:
        folder = args.work or Path(temporary)
        make_models(folder, scale.models, {job.model for job in (*trainings, *speeds)})
        plain = scale.references() if trainings else []
        on_cpu = plain if platform == "cpu" else []  # the same process runs the references
        measurements = dict(
            results(platform, folder, scale.lengths, [*on_cpu, *trainings, *speeds])
        )
        references = measurements if on_cpu else dict(results("cpu", folder, scale.lengths, plain))
        commands = run_commands(folder, platform, scale.commands) if "commands" in parts else []
    return {
        "date": date.today().isoformat(),
        "platform": platform,
        **measurements.pop("facts", {}),
        "parity": [
            parity_row(job, measurements[key(job)], references[job.reference, "float32"])
            for job in trainings
        ],
        "commands": commands,
        "speed": [speed_row(job, measurements[key(job)]) for job in speeds],
    }


def run_commands(folder: Path, platform: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the results of the commands; none if their packages are not installed."""
    missing = device_commands.missing_packages()
    if missing:
        log(f"the commands are skipped: not installed: {', '.join(missing)}")
        return []
    jobs = [job for job in device_commands.JOBS if job.name in names]
    rows: list[dict[str, Any]] = []
    for row in device_commands.run_jobs(folder / "commands", platform, jobs):
        log(f"{platform}: {row}")
        rows.append(row)
    return rows


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

    The result of a failed job is the last line of its error. After a failure, a new process runs
    the remaining jobs.
    """
    from benchmarks.device_jobs import Facts, Speed, Work
    from msrl.errors import MsrlError
    from msrl.platforms import get
    from msrl.trainer.launch import LocalRanks, RankError

    remaining, device = list(jobs), get(platform)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    while remaining:
        env = environment(remaining[0], device.deterministic_environment)
        same_environment = itertools.takewhile(
            lambda job, env=env: environment(job, device.deterministic_environment) == env,
            remaining,
        )
        work = Work(platform, folder, lengths, tuple(same_environment))
        try:
            with LocalRanks(
                TARGET, work, num_ranks=1, platform=device, env={**env, "PYTHONPATH": path}
            ) as ranks:
                for message in ranks.messages():
                    if isinstance(message, Facts):
                        yield "facts", asdict(message)
                        continue
                    log(f"{platform}: {remaining[0].name}, {key(remaining[0])[1]}: {message}")
                    yield key(remaining.pop(0)), message
        except (RankError, MsrlError) as error:
            job, reason = remaining.pop(0), str(error).strip().splitlines()[-1]
            is_too_large = isinstance(job, Speed) and "out of memory" in str(error).lower()
            smaller = job.smaller() if is_too_large else None
            if smaller is None:
                log(f"{platform}: {job.name}: {reason}")
                yield key(job), reason
            else:
                log(f"{platform}: {job.name}: {reason}; retrying with smaller micro-batches")
                remaining.insert(0, smaller)


def environment(job: Any, deterministic: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment variables that a process needs for a job."""
    return deterministic if getattr(job, "is_deterministic", False) else {}


def parity_row(job: Any, measurements: Any, reference: Any) -> dict[str, Any]:
    """Return the results of a way to train and their differences from the CPU."""
    from benchmarks.device_jobs import LOSS_BARS, NORM_BARS

    row = {"way": job.name, "dtype": job.dtype}
    failure = next(
        (result for result in (measurements, reference) if isinstance(result, str)), None
    )
    if failure is not None:
        return {**row, "error": failure}
    loss_off = max(map(relative, measurements.losses, reference.losses))
    first, last = (
        relative(measurements.grad_norms[at], reference.grad_norms[at]) for at in (0, -1)
    )
    return {
        **row,
        **asdict(measurements),
        "cpu": {"losses": reference.losses, "grad_norms": reference.grad_norms},
        "loss_off": loss_off,
        "first_grad_norm_off": first,
        "last_grad_norm_off": last,
        "reached": loss_off <= LOSS_BARS[job.dtype] and first <= NORM_BARS[job.dtype],
    }


def relative(value: float, expected: float) -> float:
    """Return the relative difference; infinite for NaN.

    >>> relative(1.5, 1.0), relative(float("nan"), 1.0)
    (0.5, inf)
    """
    difference = abs(value - expected) / abs(expected)
    return float("inf") if math.isnan(difference) else difference


def speed_row(job: Any, measurements: Any) -> dict[str, Any]:
    row = {
        "shape": job.name,
        "rows": job.num_rows,
        "rows_at_once": job.rows_at_once,
        "row": job.row,
    }
    if isinstance(measurements, str):
        return {**row, "error": measurements}
    mfu = (
        None
        if measurements.peak_flops is None
        else measurements.flops / (measurements.step_s * measurements.peak_flops)
    )
    return {
        **row,
        **asdict(measurements),
        "tokens_per_s": measurements.num_tokens / measurements.step_s,
        "mfu": mfu,
    }


def table(measurements: Mapping[str, Any]) -> list[str]:
    """Return the results as lines of Markdown."""
    software = ", ".join(
        f"{name} {version}" for name, version in measurements.get("software", {}).items()
    )
    lines = [
        f"# {measurements.get('device', measurements['platform'])}, {measurements['date']}",
        "",
        f"{software}.",
        "",
    ]
    if measurements["parity"]:
        lines += [*PARITY_HEAD, *map(parity_line, measurements["parity"]), ""]
    if measurements.get("commands"):
        lines += [*device_commands.table(measurements["commands"]), ""]
    if measurements["speed"]:
        costs = [line for row in measurements["speed"] for line in cost_lines(row)]
        lines += [
            *SPEED_HEAD,
            *map(speed_line, measurements["speed"]),
            "",
            *(costs and [*COST_HEAD, *costs, ""]),
        ]
    return lines[:-1]


def saved_tables(path: Path = RESULTS) -> str:
    """Return the tables of the saved results, below a line with the device and the software."""
    title, _, *lines = table(json.loads(path.read_text(encoding="utf-8")))
    return "\n".join([f"Measured: {title.removeprefix('# ')}, {lines[0]}", *lines[1:], ""])


def update_readme(path: Path = RESULTS, readme: Path = README) -> None:
    """Write the tables of the saved results into a page, between their markers."""
    replace_between(readme, BEGIN, END, saved_tables(path))


def parity_line(row: Mapping[str, Any]) -> str:
    from benchmarks.device_jobs import LOSS_BARS, NORM_BARS

    name, dtype = row["way"], row["dtype"]
    if "error" in row:
        goals = f"{LOSS_BARS[dtype]:g} | | {NORM_BARS[dtype]:g}"
        return f"| {name} | {dtype} | | failed: {row['error']} | | | {goals} | | **no** |"
    ours, cpu = (
        f"{losses[0]:.4f}, {losses[-1]:.4f}" for losses in (row["losses"], row["cpu"]["losses"])
    )
    cells = [
        *(name, dtype, row["attention"], ours, cpu),
        *(f"{row['loss_off']:.1e}", f"{LOSS_BARS[dtype]:g}"),
        *(f"{row['first_grad_norm_off']:.1e}", f"{NORM_BARS[dtype]:g}"),
        f"{row['last_grad_norm_off']:.1e}",
        "yes" if row["reached"] else "**no**",
    ]
    return f"| {' | '.join(cells)} |"


def speed_line(row: Mapping[str, Any]) -> str:
    batch = f"{row['rows']} x {sum(row['row'])}, {row['rows_at_once']} at once"
    if "error" in row:
        return f"| {row['shape']} | {batch} | failed: {row['error']} | | | |"
    mfu = "unknown peak" if row["mfu"] is None else f"{row['mfu']:.1%}"
    memory = f"{row['peak_bytes'] / 2**30:.1f} GiB"
    speed = f"{row['step_s']:.3f} s | {row['tokens_per_s']:,.0f}"
    return f"| {row['shape']} | {batch} | {speed} | {memory} | {mfu} |"


def cost_lines(row: Mapping[str, Any]) -> list[str]:
    return [
        f"| {row['shape']} | {name} | {share:.1%} |"
        for name, share in list(row.get("costs", {}).items())[:NUM_COSTS]
    ]


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
