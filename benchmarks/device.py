"""`python -m benchmarks device`: does the trainer compute on this machine's accelerator what it computes on the CPU, and how fast?

First every way to train that one device has, ten steps from the same weights on the same batch, in bfloat16 and in float32: losses and
norms of gradients beside those of the CPU in float32. Then time, memory and share of the peak (MFU) of real shapes in bfloat16, and where
the device's time goes. Random weights are made on the spot; neither vLLM nor Ray, nor any data, is needed. Exit code 1: something failed
or was off.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
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
# All that a process with a device imports. An image with torch and transformers lacks the first two.
NEEDED = {
    "msrl": "msrl (set PYTHONPATH=src, or pip install -e . --no-deps)", "megatron": "megatron-core 0.16.1", "torch": "torch",
    "numpy": "numpy", "packaging": "packaging", "safetensors": "safetensors", "setuptools": "setuptools",
}  # fmt: skip
PARITY_HEAD = (
    "| way | type | attention | loss, first and last | on the CPU | off at most | asked | first gradient's norm off | asked"
    " | last one's | reached |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
SPEED_HEAD = ("| shape | batch | step | tokens/s | memory | MFU |", "|---|---|---|---|---|---|")
COST_HEAD = ("| shape | what takes the device's time | share |", "|---|---|---|")
NUM_COSTS = 3
TARGET = "benchmarks.device_ranks:main"


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    lacking = missing()
    if lacking:
        print(f"not installed: {', '.join(lacking)}", file=sys.stderr)
        return 2
    from msrl.errors import MsrlError

    try:
        found = run(args)
    except MsrlError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(table(found)))
    if args.write is not None:
        args.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(
        any(
            row.get("error") or row.get("reached") is False
            for rows in (found["parity"], found["speed"])
            for row in rows
        )
    )


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks device", description=__doc__)
    parser.add_argument(
        "--platform",
        default="auto",
        help="npu, cuda or cpu (default: the first of these that is here)",
    )
    parser.add_argument(
        "--shapes",
        default="real",
        choices=("real", "tiny"),
        help="tiny: in seconds on a CPU, to try the command",
    )
    parser.add_argument(
        "--only", choices=("parity", "speed"), help="one of the two halves (default: both)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder of the models that are made, kept for the next time (default: a temporary one)",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=RESULTS,
        help=f"also write all figures as JSON (default: {RESULTS.relative_to(ROOT)})",
    )
    return parser.parse_args(argv)


def missing() -> list[str]:
    """What is needed and not installed."""
    return [
        package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured, as JSON has it. Raises MsrlError when the platform is not there."""
    from benchmarks.device_jobs import SCALES
    from msrl.platforms import resolve

    platform, scale = resolve(args.platform).name, SCALES[args.shapes]
    trainings = scale.trainings(has_fused=platform != "cpu") if args.only != "speed" else []
    speeds = scale.speed_jobs() if args.only != "parity" else []
    with tempfile.TemporaryDirectory(prefix="msrl-device-") as temporary:
        folder = args.work or Path(temporary)
        make_models(folder, scale.models, {job.model for job in (*trainings, *speeds)})
        plain = scale.references() if trainings else []
        here = [] if platform != "cpu" else plain  # in one start with the others
        found = dict(results(platform, folder, scale.lengths, [*here, *trainings, *speeds]))
        references = found if here else dict(results("cpu", folder, scale.lengths, plain))
    return {
        "date": date.today().isoformat(),
        "platform": platform,
        **found.pop("facts", {}),
        "parity": [
            parity_row(job, found[key(job)], references[job.reference, "float32"])
            for job in trainings
        ],
        "speed": [speed_row(job, found[key(job)]) for job in speeds],
    }


def key(job: Any) -> Any:
    return job.name, getattr(job, "dtype", "bfloat16")


def make_models(folder: Path, models: Mapping[str, Mapping[str, Any]], needed: set[str]) -> None:
    from benchmarks.checkpoints import make_trainable

    for name in sorted(needed):
        say(f"making {name}")
        make_trainable(folder / name, models[name])


def results(
    platform: str, folder: Path, lengths: tuple[int, ...], jobs: Sequence[Any]
) -> Iterator[tuple[Any, Any]]:
    """(key, result) of every job, and ("facts", ...). The result of one that failed is the last line of why; a process that fails is
    started again for what is left."""
    from benchmarks.device_jobs import Facts, Speed, Work
    from msrl.errors import MsrlError
    from msrl.platforms import get
    from msrl.trainer.launch import LocalRanks, RankError

    left, device = list(jobs), get(platform)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    while left:
        env = environment(left[0], device.deterministic_environment)
        alike = itertools.takewhile(
            lambda job, env=env: environment(job, device.deterministic_environment) == env, left
        )
        work = Work(platform, folder, lengths, tuple(alike))
        try:
            with LocalRanks(
                TARGET, work, num_ranks=1, platform=device, env={**env, "PYTHONPATH": path}
            ) as ranks:
                for message in ranks.messages():
                    if isinstance(message, Facts):
                        yield "facts", asdict(message)
                        continue
                    say(f"{platform}: {left[0].name}, {key(left[0])[1]}: {message}")
                    yield key(left.pop(0)), message
        except (RankError, MsrlError) as error:
            job, why = left.pop(0), str(error).strip().splitlines()[-1]
            smaller = (
                job.smaller()
                if isinstance(job, Speed) and "out of memory" in str(error).lower()
                else None
            )
            say(
                f"{platform}: {job.name}: {why}"
                + ("; again in smaller micro-batches" if smaller else "")
            )
            if smaller is not None:
                left.insert(0, smaller)
            else:
                yield key(job), why


def environment(job: Any, deterministic: Mapping[str, str]) -> Mapping[str, str]:
    """What a process needs before it starts for this job."""
    return deterministic if getattr(job, "is_deterministic", False) else {}


def parity_row(job: Any, found: Any, reference: Any) -> dict[str, Any]:
    """What a way to train gave beside the CPU."""
    from benchmarks.device_jobs import LOSS_BARS, NORM_BARS

    row = {"way": job.name, "dtype": job.dtype}
    failure = next((result for result in (found, reference) if isinstance(result, str)), None)
    if failure is not None:
        return {**row, "error": failure}
    off = max(map(relative, found.losses, reference.losses))
    first, last = (relative(found.grad_norms[at], reference.grad_norms[at]) for at in (0, -1))
    return {
        **row, **asdict(found), "cpu": {"losses": reference.losses, "grad_norms": reference.grad_norms}, "loss_off": off,
        "first_grad_norm_off": first, "last_grad_norm_off": last, "reached": off <= LOSS_BARS[job.dtype] and first <= NORM_BARS[job.dtype],
    }  # fmt: skip


def relative(value: float, expected: float) -> float:
    """How far off, as a share; infinite for what is no number.

    >>> relative(1.5, 1.0), relative(float("nan"), 1.0)
    (0.5, inf)
    """
    off = abs(value - expected) / abs(expected)
    return off if off == off else float("inf")


def speed_row(job: Any, found: Any) -> dict[str, Any]:
    row = {
        "shape": job.name,
        "rows": job.num_rows,
        "rows_at_once": job.rows_at_once,
        "row": job.row,
    }
    if isinstance(found, str):
        return {**row, "error": found}
    mfu = None if found.peak_flops is None else found.flops / (found.step_s * found.peak_flops)
    return {**row, **asdict(found), "tokens_per_s": found.num_tokens / found.step_s, "mfu": mfu}


def table(found: Mapping[str, Any]) -> list[str]:
    """Markdown."""
    software = ", ".join(f"{name} {version}" for name, version in found.get("software", {}).items())
    lines = [f"# {found.get('device', found['platform'])}, {found['date']}", "", f"{software}.", ""]
    if found["parity"]:
        lines += [*PARITY_HEAD, *map(parity_line, found["parity"]), ""]
    if found["speed"]:
        costs = [line for row in found["speed"] for line in cost_lines(row)]
        lines += [
            *SPEED_HEAD,
            *map(speed_line, found["speed"]),
            "",
            *(costs and [*COST_HEAD, *costs, ""]),
        ]
    return lines[:-1]


def parity_line(row: Mapping[str, Any]) -> str:
    from benchmarks.device_jobs import LOSS_BARS, NORM_BARS

    name, dtype = row["way"], row["dtype"]
    if "error" in row:
        return f"| {name} | {dtype} | | failed: {row['error']} | | | {LOSS_BARS[dtype]:g} | | {NORM_BARS[dtype]:g} | | **no** |"
    ours, cpu = (
        f"{losses[0]:.4f}, {losses[-1]:.4f}" for losses in (row["losses"], row["cpu"]["losses"])
    )
    offs = f"{row['loss_off']:.1e} | {LOSS_BARS[dtype]:g} | {row['first_grad_norm_off']:.1e} | {NORM_BARS[dtype]:g}"
    reached = "yes" if row["reached"] else "**no**"
    return f"| {name} | {dtype} | {row['attention']} | {ours} | {cpu} | {offs} | {row['last_grad_norm_off']:.1e} | {reached} |"


def speed_line(row: Mapping[str, Any]) -> str:
    batch = f"{row['rows']} x {sum(row['row'])}, {row['rows_at_once']} at once"
    if "error" in row:
        return f"| {row['shape']} | {batch} | failed: {row['error']} | | | |"
    mfu = "peak not known" if row["mfu"] is None else f"{row['mfu']:.1%}"
    return f"| {row['shape']} | {batch} | {row['step_s']:.3f} s | {row['tokens_per_s']:,.0f} | {row['peak_bytes'] / 2**30:.1f} GiB | {mfu} |"


def cost_lines(row: Mapping[str, Any]) -> list[str]:
    return [
        f"| {row['shape']} | {name} | {share:.1%} |"
        for name, share in list(row.get("costs", {}).items())[:NUM_COSTS]
    ]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
