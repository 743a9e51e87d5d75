"""Seconds per step with a reward as slow as an update: `python -m benchmarks async`.

Synchronous and asynchronous trainings (S = 1) of the quickstart's model run alternately. Their
reward sleeps, so that the rewards of a step take as long as its update. The asynchronous trainings
must take at most 0.65 of the synchronous time per step, by the medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
MAX_RATIO = 0.65
STEPS = 24
WARM_UP = 4  # first steps, which are not measured: processes and buffer have to warm up
PROMPTS, SAMPLES = 4, 4
REWARD = """
import time


def score(response, answer, *, seconds=0.0):
    time.sleep(seconds)
    return float(len(response) % 3)
"""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Mean seconds of a run's steps and of their updates."""

    step: float
    update: float


def main(argv: Sequence[str]) -> int:
    """Print the table; return 1 if the goal is not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks async", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=3, help="Number of trainings of each kind (default: 3)."
    )
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    with tempfile.TemporaryDirectory(prefix="msrl-bench-async-") as name:
        folder = Path(name)
        make_inputs(folder)
        update_s = train(folder, "update", 0, sleep_s=0.0).update
        sleep_s = update_s * num_reward_workers() / (PROMPTS * SAMPLES)
        runs = measure(folder, args.rounds, sleep_s)
    print("\n".join(table(update_s, runs)))
    return int(ratio(runs) > MAX_RATIO)


def measure(folder: Path, rounds: int, sleep_s: float) -> dict[int, list[StepSeconds]]:
    """Return the seconds of all trainings by staleness bound."""
    runs: dict[int, list[StepSeconds]] = {0: [], 1: []}
    for number in range(1, rounds + 1):
        for staleness, seconds in runs.items():
            name = f"S{staleness}-{number}"
            seconds.append(train(folder, name, staleness, sleep_s=sleep_s))
            line = f"round {number} of {rounds}, S = {staleness}: {seconds[-1].step:.3g} s per step"
            print(line, file=sys.stderr, flush=True)
    return runs


def num_reward_workers() -> int:
    """Return the number of processes that call the reward function at the same time."""
    from msrl.platforms import get

    return max(1, min(8, get("cpu").device_count()))


def make_inputs(folder: Path) -> None:
    """Write the quickstart's model and problems, and the reward function."""
    script = ROOT / "examples" / "quickstart" / "make_inputs.py"
    run_python(folder, script, "--out", "inputs", "--seed", "0", log="inputs")
    files = ("--input", "inputs/rl.jsonl", "--output-prefix", "rl")
    texts = ("--tokenizer", "inputs/model", "--template", "native", "--handler", "r1")
    columns = ("--map-keys", json.dumps({"prompt": "question", "response": "answer"}))
    run_python(folder, "-m", "msrl", "preprocess", *files, *texts, *columns, log="preprocess")
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")


def train(folder: Path, name: str, staleness: int, *, sleep_s: float) -> StepSeconds:
    """Run a training; return its mean seconds."""
    file = folder / f"{name}.yaml"
    settings = configuration(name, staleness, f"{folder / 'rewards.py'}:score", sleep_s)
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    run_python(folder, "-m", "msrl", "train-grpo", "-c", file, log=name)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines][WARM_UP:]
    step, update = (statistics.mean(row[stage] for row in seconds) for stage in ("step", "update"))
    return StepSeconds(step, update)


def configuration(name: str, staleness: int, function: str, sleep_s: float) -> dict[str, Any]:
    """Return a training whose updates take longer than its generation."""
    source = {"function": function, "options": {"seconds": sleep_s}, "timeout_s": 60.0}
    return {
        "run": {"name": name, "dir": "runs", "seed": 0},
        "model": {"path": "inputs/model", "dtype": "float32"},
        "data": {"train": "rl"},
        "cluster": {"platform": "cpu", "devices_per_node": 1},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_prompt_tokens": 24,
            "max_response_tokens": 16,
            "async": {"max_staleness": staleness},
        },
        "reward": {"sources": [source]},
        "algo": {"mismatch": {"weight": "token"}},
        "train": {"steps": STEPS, "micro_batch": 2, "updates": {"epochs": 4}},
    }


def run_python(folder: Path, *arguments: str | Path, log: str) -> None:
    """Run this Python in a folder; exit with the end of its output if it fails."""
    path = folder / f"{log}.log"
    with path.open("w", encoding="utf-8") as output:
        result = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if result.returncode:
        sys.exit(f"{log} failed:\n{path.read_text(encoding='utf-8', errors='replace')[-3000:]}")


def ratio(runs: Mapping[int, Sequence[StepSeconds]]) -> float:
    """Return the asynchronous seconds per step relative to the synchronous ones."""
    return median_step(runs[1]) / median_step(runs[0])


def median_step(runs: Sequence[StepSeconds]) -> float:
    return statistics.median(run.step for run in runs)


def table(update_s: float, runs: Mapping[int, Sequence[StepSeconds]]) -> list[str]:
    """Return the results as lines of Markdown."""
    names = {0: "synchronous", 1: "asynchronous, S = 1"}
    rows: list[str] = []
    for staleness, name in names.items():
        steps = ", ".join(f"{run.step:.3g}" for run in runs[staleness])
        rows.append(f"| {name} | {median_step(runs[staleness]):.3g} s | {steps} |")
    reached = "yes" if ratio(runs) <= MAX_RATIO else "no"
    return [
        f"Update without other work, and rewards of a step: {update_s:.3g} s each",
        "",
        "| training | seconds per step, median | all rounds |",
        "|---|---|---|",
        *rows,
        "",
        f"Ratio: {ratio(runs):.2f}. Goal: at most {MAX_RATIO}. Reached: {reached}",
    ]
