"""Trainings with the command line on a device, compared with the CPU or with each other.

The quickstart's small random model learns from its demonstrations, and from pairs of a right and a
wrong answer. Every training is deterministic and starts from the same weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("pydantic", "rich", "transformers", "typer", "yaml")  # modules besides the benchmark's
NUM_DEMONSTRATIONS, NUM_PAIRS = 600, 400
STEPS = {"sft": 40, "dpo": 12, "rm": 12}
HEAD = (
    "| command | compared with | largest difference of a loss | goal | reached |",
    "|---|---|---|---|---|",
)


@dataclass(frozen=True)
class CommandJob:
    """Training on the device. `reference` is the name of another job, or "cpu" for the same one.

    A resumed job continues a copy of its reference from the checkpoint in the middle.
    """

    name: str
    command: str  # sft, dpo or rm
    reference: str
    limit: float  # largest relative difference of a loss; 0 is equal bit for bit
    settings: tuple[str, ...] = ()
    is_resumed: bool = False


JOBS = (
    CommandJob("train-sft, float32", "sft", "cpu", 1e-4),
    CommandJob("train-sft, bfloat16", "sft", "cpu", 2e-2, ("model.dtype=bfloat16",)),
    CommandJob("train-sft, resumed", "sft", "train-sft, float32", 0.0, is_resumed=True),
    CommandJob(
        "train-sft, full recompute, offloaded optimizer",
        "sft",
        "train-sft, float32",
        0.0,
        ("train.recompute.granularity=full", "train.offload.optimizer=true"),
    ),
    CommandJob("train-dpo, float32", "dpo", "cpu", 1e-4),
    CommandJob("train-rm, float32", "rm", "cpu", 1e-4),
)


def missing_packages() -> list[str]:
    """Return the modules that the commands need and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def run_jobs(
    folder: Path, platform: str, jobs: Sequence[CommandJob] = JOBS
) -> Iterator[dict[str, Any]]:
    """Yield a row of results for each job. A failed command has the last line of its output.

    Replaces `folder`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        make_inputs(folder)
    except RuntimeError as error:
        yield from (row(job, str(error), []) for job in jobs)
        return
    losses: dict[str, list[float] | str] = {}
    for job in jobs:
        reference = f"{job.command} on cpu" if job.reference == "cpu" else job.reference
        if reference not in losses:
            losses[reference] = train(folder, job.command, reference, "cpu")
        if job.is_resumed:
            _copy_until_half(folder / "runs", reference, job.name, STEPS[job.command] // 2)
        losses[job.name] = train(
            folder, job.command, job.name, platform, job.settings, is_resumed=job.is_resumed
        )
        yield row(job, losses[job.name], losses[reference])


def row(job: CommandJob, ours: list[float] | str, reference: list[float] | str) -> dict[str, Any]:
    """Return the largest relative difference of a loss, or the error of a failed command."""
    result: dict[str, Any] = {
        "command": job.name,
        "reference": "the CPU" if job.reference == "cpu" else job.reference,
        "limit": job.limit,
    }
    if isinstance(ours, str) or isinstance(reference, str):
        return {**result, "error": ours if isinstance(ours, str) else reference}
    pairs = zip(ours, reference, strict=True)
    largest = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
    return {**result, "loss_off": largest, "reached": largest <= job.limit}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows as lines of Markdown."""
    return [*HEAD, *map(_line, rows)]


def _line(result: Mapping[str, Any]) -> str:
    goal = f"{result['limit']:g}" if result["limit"] else "equal bit for bit"
    if "error" in result:
        cells = (f"failed: {result['error']}", goal, "**no**")
    else:
        off = f"{result['loss_off']:.1e}" if result["loss_off"] else "none"
        cells = (off, goal, "yes" if result["reached"] else "**no**")
    return f"| {result['command']} | {result['reference']} | {' | '.join(cells)} |"


def make_inputs(folder: Path) -> None:
    """Create the model, the preprocessed data and a configuration of each command."""
    script = ROOT / "examples" / "quickstart" / "make_inputs.py"
    folder.mkdir(parents=True, exist_ok=True)
    _run(folder, str(script), "--out", "inputs", "--seed", "0")
    lines = (folder / "inputs" / "sft.jsonl").read_text(encoding="utf-8").splitlines()
    demonstrations = [json.loads(line) for line in lines[:NUM_DEMONSTRATIONS]]
    _write_rows(folder / "inputs" / "few.jsonl", demonstrations)
    _write_rows(folder / "inputs" / "pairs.jsonl", map(_pair, demonstrations[:NUM_PAIRS]))
    for source, handler in (("few", "alpaca"), ("pairs", "pairs")):
        files = ("--input", f"inputs/{source}.jsonl", "--output-prefix", f"data/{source}")
        texts = ("--tokenizer", "inputs/model", "--template", "native", "--handler", handler)
        _run(folder, "-m", "msrl", "preprocess", *files, *texts)
    for command, steps in STEPS.items():
        text = json.dumps(configuration(command, steps))  # JSON is YAML
        (folder / f"{command}.yaml").write_text(text, encoding="utf-8")


def configuration(command: str, steps: int) -> dict[str, Any]:
    """Return the configuration of a training."""
    lengths = {
        "sft": {"global_batch": 32, "micro_batch": 16},
        "dpo": {"global_batch": 16, "max_tokens_per_micro_batch": 512},
    }
    rates = {
        "sft": {"lr": 2e-3, "schedule": "cosine", "warmup": 4},
        "dpo": {"lr": 5e-4, "schedule": "constant"},
    }
    kind = "sft" if command == "sft" else "dpo"
    return {
        "run": {"dir": "runs", "deterministic": True},
        "model": {"path": "inputs/model", "dtype": "float32"},
        "data": {"train": "data/few" if command == "sft" else "data/pairs"},
        "train": {"steps": steps, **lengths[kind], "optimizer": rates[kind]},
        "checkpoint": {"every_steps": steps // 2},
        "log": {"trackers": []},
    }


def train(
    folder: Path,
    command: str,
    name: str,
    platform: str,
    settings: Sequence[str] = (),
    *,
    is_resumed: bool = False,
) -> list[float] | str:
    """Return the losses of a training, or the last line of its output if it failed."""
    sets = (f"run.name={name}", f"cluster.platform={platform}", *settings)
    options = [argument for setting in sets for argument in ("--set", setting)]
    resume = ("--resume", "auto") if is_resumed else ()
    try:
        _run(folder, "-m", "msrl", f"train-{command}", "-c", f"{command}.yaml", *options, *resume)
    except RuntimeError as error:
        return str(error)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["metrics"] for line in lines]
    return [values["train/loss"] for values in rows if "train/loss" in values]


def _copy_until_half(runs: Path, source: str, target: str, step: int) -> None:
    """Copy a run without the checkpoints after `step`."""
    shutil.copytree(runs / source, runs / target)
    for checkpoint in (runs / target / "checkpoints").glob("iter_*"):
        if int(checkpoint.name.removeprefix("iter_")) > step:
            shutil.rmtree(checkpoint)


def _run(folder: Path, *arguments: str) -> None:
    """Run Python. Raises RuntimeError with the last line of the output if it fails."""
    paths = filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        lines = result.stdout.strip().splitlines() or [f"exit code {result.returncode}"]
        raise RuntimeError(lines[-1])


def _pair(demonstration: Mapping[str, str]) -> dict[str, str]:
    """Return an answer and the same answer with another last digit."""
    answer = demonstration["output"]
    digit = max(at for at, character in enumerate(answer) if character.isdigit())
    wrong = "1" if answer[digit] != "1" else "2"
    return {
        "prompt": demonstration["instruction"],
        "chosen": answer,
        "rejected": f"{answer[:digit]}{wrong}{answer[digit + 1 :]}",
    }


def _write_rows(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
