"""Learning check of all presets: `nox -s learning -- [PRESET...] [--seeds N...]`.

All runs start from one SFT checkpoint of the quickstart. Each preset trains for 30 steps with the
quickstart's learning rate and batch size and the preset's `algo` section. The held-out accuracy of
the last evaluation must rise by 10 points. The control `flipped` is the quickstart with negated
rewards, and it must fail. Finished runs are recorded in results.jsonl and not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

import yaml

from msrl.config.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))

from run import Runner, fine_tune  # noqa: E402  # pyright: ignore[reportMissingImports] - a script of the examples

MIN_GAIN = 0.10
STEPS = 30
FLIPPED = "flipped"
_NEGATED_REWARDS = (
    "--set",
    "reward.sources.0.weight=-0.9",
    "--set",
    "reward.sources.1.weight=-0.1",
)


def main() -> int:
    """Run what is missing and print a table; return 1 if a result is not as expected."""
    parser = argparse.ArgumentParser(prog="nox -s learning --", description=__doc__)
    known = [*PRESETS, FLIPPED]
    parser.add_argument(
        "presets", nargs="*", help=f"Presets to run: {', '.join(known)} (default: all)."
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="Random seeds of the GRPO runs (default: 0 1 2).",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "learning",
        help="Folder of the runs (default: %(default)s).",
    )
    args = parser.parse_args()
    unknown = sorted(set(args.presets) - set(known))
    if unknown:
        parser.error(f"no preset {', '.join(unknown)}. Choose from {', '.join(known)}.")
    presets = args.presets or known
    runner = Runner(args.out, seed=0)
    start = sft_accuracy(runner)
    accuracies = {
        preset: [accuracy(runner, preset, seed) for seed in args.seeds] for preset in presets
    }
    print("\n".join(table(start, accuracies, args.seeds)))
    for preset, values in accuracies.items():
        if has_learned(start, values) == (preset == FLIPPED):
            return 1
    return 0


def sft_accuracy(runner: Runner) -> float:
    """Return the accuracy of the shared SFT checkpoint, which is created if absent."""
    start_file = runner.folder / "start.json"
    if not start_file.exists():
        start_file.write_text(json.dumps(fine_tune(runner)["after SFT"]))
    if not list((runner.folder / "data").glob("heldout_*.idx")):
        runner.preprocess("heldout", "r1", {"prompt": "question", "response": "answer"})
    return float(json.loads(start_file.read_text()))


def accuracy(runner: Runner, preset: str, seed: int, steps: int = STEPS) -> float:
    """Return a preset's held-out accuracy after `steps` steps, from results.jsonl if recorded."""
    results = runner.folder / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    for row in map(json.loads, lines):
        if (row["preset"], row["seed"], row.get("steps", STEPS)) == (preset, seed, steps):
            return float(row["accuracy"])
    name = f"{preset}-{seed}" if steps == STEPS else f"{preset}-{seed}-{steps}"
    algorithm = _NEGATED_REWARDS if preset == FLIPPED else ("--set", f"algo.preset={preset}")
    config = without_algorithm(runner.folder)
    shutil.rmtree(runner.folder / "runs" / name, ignore_errors=True)
    values = (f"run.name={name}", f"run.seed={seed}", f"train.steps={steps}")
    options = [option for value in values for option in ("--set", value)]
    runner.msrl(name, "train-grpo", "-c", config, *options, *algorithm)
    final_accuracy = evaluations(runner, name)[steps]
    row = {"preset": preset, "seed": seed, "steps": steps, "accuracy": final_accuracy}
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return final_accuracy


def evaluations(runner: Runner, name: str) -> dict[int, float]:
    """Return a run's greedy held-out accuracy by step; step 0 is before training."""
    accuracies: dict[int, float] = {}
    for line in (runner.folder / "runs" / name / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "eval/pass@1" in row["metrics"]:
            accuracies[row["step"]] = row["metrics"]["eval/pass@1"]
    return accuracies


def without_algorithm(folder: Path) -> str:
    """Write the quickstart's configuration without `algo` and with evaluations; return its name.

    The file's `algo` would override the preset's values.
    """
    config = yaml.safe_load((folder / "grpo.yaml").read_text(encoding="utf-8"))
    del config["algo"]
    config["data"]["eval"] = "data/heldout"
    config["eval"] = {"every_steps": 5, "at_start": True}
    (folder / "learning.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return "learning.yaml"


def has_learned(start: float, accuracies: list[float]) -> bool:
    """Return True if every seed gained at least MIN_GAIN."""
    return min(accuracies) >= start + MIN_GAIN


def table(start: float, accuracies: dict[str, list[float]], seeds: list[int]) -> list[str]:
    """Return the results as Markdown lines."""
    columns = ["preset", *(f"seed {seed}" for seed in seeds), "median gain"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for preset, values in accuracies.items():
        cells = " | ".join(f"{value:.1%}" for value in values)
        gain = 100 * (statistics.median(values) - start)
        lines.append(f"| {preset} | {cells} | {gain:+.1f} points |")
    return [f"Held-out accuracy after SFT, where all runs start: {start:.1%}", "", *lines]


if __name__ == "__main__":
    sys.exit(main())
