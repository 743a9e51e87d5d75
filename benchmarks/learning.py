"""`nox -s learning -- [PRESET...] [--seeds N...]`: does every preset learn, and not only run?

One SFT checkpoint of the quickstart is the start of all; each preset then has the quickstart's 30 steps, whose learning rate and batch
stay as they are, while its `algo` is the preset's alone. Held-out accuracy, as the run's last evaluation tells it, must rise by 10 points.
`flipped` is the quickstart with the signs of its rewards turned: it must not pass, or the check would let anything through. What is done is
kept in results.jsonl and not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path

import yaml

from msrl.config.presets import preset_names

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))

from run import Runner, fine_tune  # noqa: E402  # pyright: ignore[reportMissingImports] - stands beside the maker of its inputs

NEEDED = 0.10
STEPS = 30
FLIPPED = "flipped"
_FLIP = ("--set", "reward.sources.0.weight=-0.9", "--set", "reward.sources.1.weight=-0.1")


def main() -> int:
    """Runs what is missing and prints the table; 1 when a preset did not learn, or the flipped one did."""
    parser = argparse.ArgumentParser(prog="nox -s learning --", description=__doc__)
    known = [*preset_names(), FLIPPED]
    parser.add_argument("presets", nargs="*", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="of the reinforcement (default: 0 1 2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "learning",
        help="folder of the runs (default: %(default)s)",
    )
    args = parser.parse_args()
    unknown = sorted(set(args.presets) - set(known))
    if unknown:
        parser.error(f"there is no preset {', '.join(unknown)}; known: {', '.join(known)}")
    presets = args.presets or known
    runner = Runner(args.out, seed=0)
    start = sft_accuracy(runner)
    found = {preset: [accuracy(runner, preset, seed) for seed in args.seeds] for preset in presets}
    print("\n".join(table(start, found, args.seeds)))
    return int(
        any(learnt(start, values) == (preset == FLIPPED) for preset, values in found.items())
    )


def sft_accuracy(runner: Runner) -> float:
    """Accuracy of the shared start, which is made where it is absent."""
    kept = runner.folder / "start.json"
    if not kept.exists():
        kept.write_text(json.dumps(fine_tune(runner)["after SFT"]))
    if not list((runner.folder / "data").glob("heldout_*.idx")):
        runner.preprocess("heldout", "r1", {"prompt": "question", "response": "answer"})
    return float(json.loads(kept.read_text()))


def accuracy(runner: Runner, preset: str, seed: int, steps: int = STEPS) -> float:
    """Held-out accuracy after so many steps of a preset; from the results, if it is there."""
    results = runner.folder / "results.jsonl"
    rows = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    for row in rows:
        if (row["preset"], row["seed"], row.get("steps", STEPS)) == (preset, seed, steps):
            return float(row["accuracy"])
    name = f"{preset}-{seed}" if steps == STEPS else f"{preset}-{seed}-{steps}"
    algorithm = _FLIP if preset == FLIPPED else ("--set", f"algo.preset={preset}")
    config = without_algorithm(runner.folder)
    shutil.rmtree(runner.folder / "runs" / name, ignore_errors=True)
    wanted = (
        "--set",
        f"run.name={name}",
        "--set",
        f"run.seed={seed}",
        "--set",
        f"train.steps={steps}",
    )
    runner.msrl(name, "train-grpo", "-c", config, *wanted, *algorithm)
    reached = evaluations(runner, name)[steps]
    with results.open("a") as file:
        file.write(
            json.dumps({"preset": preset, "seed": seed, "steps": steps, "accuracy": reached}) + "\n"
        )
    return reached


def evaluations(runner: Runner, name: str) -> dict[int, float]:
    """Share of the held-out problems that a run answered right, greedily, by step; 0 is its start."""
    rows = [
        json.loads(line)
        for line in (runner.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        row["step"]: row["metrics"]["eval/pass@1"]
        for row in rows
        if "eval/pass@1" in row["metrics"]
    }


def without_algorithm(folder: Path) -> str:
    """The quickstart's configuration without its `algo`, which would stand over what the presets fill in, and with evaluations; the file's
    name in `folder`."""
    kept = yaml.safe_load((folder / "grpo.yaml").read_text(encoding="utf-8"))
    del kept["algo"]
    kept["data"]["eval"] = "data/heldout"
    kept["eval"] = {"every_steps": 5, "at_start": True}
    (folder / "learning.yaml").write_text(yaml.safe_dump(kept), encoding="utf-8")
    return "learning.yaml"


def learnt(start: float, accuracies: list[float]) -> bool:
    """Whether every seed gained enough."""
    return min(accuracies) >= start + NEEDED


def table(start: float, found: dict[str, list[float]], seeds: list[int]) -> list[str]:
    """The results as Markdown."""
    head = [
        "| preset | " + " | ".join(f"seed {seed}" for seed in seeds) + " | median gain |",
        "|---" * (len(seeds) + 2) + "|",
    ]
    rows = [
        f"| {preset} | {' | '.join(f'{value:.1%}' for value in values)} | {100 * (statistics.median(values) - start):+.1f} points |"
        for preset, values in found.items()
    ]
    return [f"Held-out accuracy after SFT, the start of all: {start:.1%}", "", *head, *rows]


if __name__ == "__main__":
    sys.exit(main())
