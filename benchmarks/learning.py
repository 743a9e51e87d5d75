"""Check that presets and asynchronous modes learn: `nox -s learning -- [NAME...] [--seeds N...]`.

All runs start from one SFT checkpoint of the quickstart and train for its 30 steps, with its
learning rate and batch. A preset brings its `algo`, and held-out accuracy of the run's last
evaluation must rise by 10 points. `flipped` is the quickstart with negated rewards: it must not
pass, which shows that the check can fail. The asynchronous modes `async-1`, `async-4` and `partial`
use the default algorithm with truncated importance sampling; for each seed, they must end at
most 3 points below `async-0`, which is synchronous. `uncorrected` is `async-4` without the
importance sampling: it has no goal and shows what the correction changes. Results are kept in
results.jsonl and not computed again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from itertools import chain
from pathlib import Path

import yaml

from msrl.config.presets import preset_names

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))

from run import Runner, fine_tune  # noqa: E402  # pyright: ignore[reportMissingImports]

REQUIRED_GAIN = 0.10
ALLOWED_LOSS = 0.03  # of the asynchronous modes
STEPS = 30
FLIPPED = "flipped"
SYNCHRONOUS = "async-0"
_CORRECTED = ("algo.mismatch.weight=token",)
ASYNCHRONOUS: dict[str, tuple[str, ...]] = {
    SYNCHRONOUS: ("rollout.async.max_staleness=0", *_CORRECTED),
    "async-1": ("rollout.async.max_staleness=1", *_CORRECTED),
    "async-4": ("rollout.async.max_staleness=4", *_CORRECTED),
    "partial": ("rollout.async={max_staleness: 1, partial: true}", *_CORRECTED),
}
UNCORRECTED = "uncorrected"
SETTINGS = {
    UNCORRECTED: ("rollout.async={max_staleness: 4, allow_uncorrected: true}",),
    FLIPPED: ("reward.sources.0.weight=-0.9", "reward.sources.1.weight=-0.1"),
    **ASYNCHRONOUS,
}


def main() -> int:
    """Run missing trainings and print the table.

    Returns 1 if a run did not learn as it should, or the flipped one did.
    """
    parser = argparse.ArgumentParser(prog="nox -s learning --", description=__doc__)
    known = [*preset_names(), *SETTINGS]
    parser.add_argument("names", nargs="*", help=f"Runs (default: all): {', '.join(known)}.")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="Seeds of the GRPO runs (default: 0 1 2).",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "learning",
        help="Folder of the runs (default: %(default)s).",
    )
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(known))
    if unknown:
        parser.error(f"there is no run {', '.join(unknown)}; known: {', '.join(known)}")
    names = args.names or known
    runner = Runner(args.out, seed=0)
    start = sft_accuracy(runner)
    accuracies: dict[str, list[float]] = {}
    for name in names:
        accuracies[name] = [accuracy(runner, name, seed) for seed in args.seeds]
    print("\n".join(table(start, accuracies, args.seeds)))
    synchronous = accuracies.get(SYNCHRONOUS)
    return int(not all(passes(name, start, accuracies[name], synchronous) for name in names))


def passes(
    name: str, start: float, accuracies: list[float], synchronous: list[float] | None
) -> bool:
    """Return True if a run learned as the module's docstring asks of it."""
    if name == UNCORRECTED:
        return True
    if name in ASYNCHRONOUS and synchronous is not None:
        pairs = zip(accuracies, synchronous, strict=True)
        if any(value < reference - ALLOWED_LOSS for value, reference in pairs):
            return False
    return has_learned(start, accuracies) != (name == FLIPPED)


def sft_accuracy(runner: Runner) -> float:
    """Return the accuracy of the shared SFT checkpoint, which is trained if it is missing."""
    result = runner.folder / "start.json"
    if not result.exists():
        result.write_text(json.dumps(fine_tune(runner)["after SFT"]))
    if not list((runner.folder / "data").glob("heldout_*.idx")):
        runner.preprocess("heldout", "r1", {"prompt": "question", "response": "answer"})
    return float(json.loads(result.read_text()))


def accuracy(runner: Runner, preset: str, seed: int, steps: int = STEPS) -> float:
    """Return the held-out accuracy after some steps of a run, from results.jsonl if present.

    `preset` is the name of a preset or of another run that this module knows.
    """
    results = runner.folder / "results.jsonl"
    rows = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    for row in rows:
        if (row["preset"], row["seed"], row.get("steps", STEPS)) == (preset, seed, steps):
            return float(row["accuracy"])
    name = f"{preset}-{seed}" if steps == STEPS else f"{preset}-{seed}-{steps}"
    settings = SETTINGS.get(preset, (f"algo.preset={preset}",))
    config = without_algorithm(runner.folder)
    shutil.rmtree(runner.folder / "runs" / name, ignore_errors=True)
    settings += (f"run.name={name}", f"run.seed={seed}", f"train.steps={steps}")
    overrides = chain.from_iterable(("--set", setting) for setting in settings)
    runner.msrl(name, "train-grpo", "-c", config, *overrides)
    reached = evaluations(runner, name)[steps]
    with results.open("a") as file:
        file.write(
            json.dumps({"preset": preset, "seed": seed, "steps": steps, "accuracy": reached}) + "\n"
        )
    return reached


def evaluations(runner: Runner, name: str) -> dict[int, float]:
    """Return the greedy held-out accuracy of a run by step; step 0 is its start."""
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
    """Write the quickstart's configuration with evaluations and without `algo`.

    Its `algo` would override the values of the presets. Returns the name of the file in `folder`.
    """
    config = yaml.safe_load((folder / "grpo.yaml").read_text(encoding="utf-8"))
    del config["algo"]
    config["data"]["eval"] = "data/heldout"
    config["eval"] = {"every_steps": 5, "at_start": True}
    (folder / "learning.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return "learning.yaml"


def has_learned(start: float, accuracies: list[float]) -> bool:
    """Return True if the accuracy of every seed rose enough."""
    return min(accuracies) >= start + REQUIRED_GAIN


def table(start: float, accuracies: dict[str, list[float]], seeds: list[int]) -> list[str]:
    """Return the results as lines of Markdown."""
    head = [
        "| run | " + " | ".join(f"seed {seed}" for seed in seeds) + " | median gain |",
        "|---" * (len(seeds) + 2) + "|",
    ]
    rows = []
    for preset, values in accuracies.items():
        gain = f"{100 * (statistics.median(values) - start):+.1f} points"
        rows.append(f"| {' | '.join([preset, *(f'{value:.1%}' for value in values), gain])} |")
    return [f"Held-out accuracy after SFT, where all presets start: {start:.1%}", "", *head, *rows]


if __name__ == "__main__":
    sys.exit(main())
