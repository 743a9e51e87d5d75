"""Quickstart: train a small random model on arithmetic with SFT and GRPO, on a laptop.

    python examples/quickstart/run.py [--out FOLDER] [--seed N]

The script creates a tokenizer, a model and problems (make_inputs.py). It then runs preprocess,
convert-ckpt hf2mcore, train-sft, train-grpo, convert-ckpt mcore2hf and generate, printing each
command first, and ends with a table of the accuracy on held-out problems. It needs neither an
accelerator nor the Hugging Face Hub.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from make_inputs import make_inputs

from msrl.rewards.verifiers.base_acc import score

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
NUM_SAMPLES = 3
PARTIAL = ".inputs.partial"
# Files of the quickstart, and of the learning benchmark and the chain, which start with its stages.
KNOWN_FILES = {
    *("inputs", PARTIAL, "heldout.jsonl", "sft.yaml", "grpo.yaml", "data", "mcore", "runs"),
    *("reinforced", "start.json", "results.jsonl", "learning.yaml", "rm.yaml", "distill.yaml"),
}


class Runner:
    """Runner of msrl commands in one folder; `seconds` holds the duration of each stage."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.seconds: dict[str, float] = {}

    def msrl(self, stage: str, *arguments: str) -> None:
        """Run one command; if it fails, exit with its exit code."""
        print(f"\n$ msrl {shlex.join(arguments)}", flush=True)
        started = time.perf_counter()
        result = subprocess.run(
            [sys.executable, "-m", "msrl", *arguments],
            cwd=self.folder,
            env={**os.environ, **ENVIRONMENT},
            check=False,
        )
        if result.returncode:
            sys.exit(result.returncode)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def preprocess(self, source: str, handler: str, columns: dict[str, str]) -> None:
        """Preprocess `inputs/{source}.jsonl` into `data/{source}`."""
        files = ("--input", f"inputs/{source}.jsonl", "--output-prefix", f"data/{source}")
        texts = ("--tokenizer", "inputs/model", "--template", "native", "--handler", handler)
        options = ("--map-keys", json.dumps(columns), "--workers", "2")
        self.msrl("preprocess", "preprocess", *files, *texts, *options)

    def convert(self, direction: str, load: str, save: str, *options: str) -> None:
        """Convert the checkpoint `load` into `save`."""
        arguments = (direction, "--load", load, "--save", save, *options)
        self.msrl("convert-ckpt", "convert-ckpt", *arguments)

    def accuracy(self, stage: str, model: str) -> float:
        """Return the model's share of correct answers to held-out problems with greedy sampling."""
        output = f"answers_{stage}.jsonl"
        files = ("--model", model, "--input", "heldout.jsonl", "--output", output)
        self.msrl("generate", "generate", *files, "--max-tokens", "44")
        rows = read_rows(self.folder / output)
        return sum(score(row["completions"][0]["text"], row["answer"]) for row in rows) / len(rows)


def main() -> None:
    """Run the quickstart."""
    parser = argparse.ArgumentParser(
        description="Train a small random model on arithmetic with SFT and GRPO, on a laptop."
    )
    out = "Folder to create; a previous quickstart there is replaced (default: %(default)s)."
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help=out)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Random seed of the inputs and of both trainings (default: %(default)s).",
    )
    arguments = parser.parse_args()
    runner = Runner(arguments.out, arguments.seed)
    started = time.perf_counter()
    accuracies = run(runner)
    report(runner, accuracies, time.perf_counter() - started)


def run(runner: Runner) -> dict[str, float]:
    """Run all stages and return the accuracy after each."""
    accuracies = fine_tune(runner)
    runner.msrl("train-grpo", "train-grpo", "-c", "grpo.yaml", "--set", f"run.seed={runner.seed}")
    runner.convert("mcore2hf", "runs/grpo/checkpoints", "reinforced")
    accuracies["after GRPO"] = runner.accuracy("grpo", "reinforced")
    return accuracies


def remove_previous_run(folder: Path, known: Collection[str] = KNOWN_FILES) -> None:
    """Remove the folder of a previous run; exit with code 2 if it has other files than `known`."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    is_known = all(name in known or name.startswith("answers_") for name in names)
    is_previous = is_known and (folder / "inputs/heldout.jsonl").is_file()
    if not is_previous and not names <= {PARTIAL}:
        problem = "has files that do not belong to a previous run"
        remedy = "Remove it or specify another folder."
        print(f"--out {folder}: {problem}. {remedy}", file=sys.stderr)
        sys.exit(2)
    shutil.rmtree(folder)


def fine_tune(runner: Runner) -> dict[str, float]:
    """Create inputs, convert the model, run SFT, and return the accuracy before and after SFT."""
    folder = runner.folder
    remove_previous_run(folder)
    make_inputs(folder / "inputs", runner.seed)
    heldout = [
        json.dumps({"prompt": row["question"], "answer": row["answer"]})
        for row in read_rows(folder / "inputs/heldout.jsonl")
    ]
    (folder / "heldout.jsonl").write_text("\n".join(heldout) + "\n", encoding="utf-8")
    for name in ("sft", "grpo"):
        shutil.copy(HERE / f"{name}.yaml", folder)
    accuracies = {"before": runner.accuracy("before", "inputs/model")}
    runner.preprocess("sft", "alpaca", {})
    runner.convert("hf2mcore", "inputs/model", "mcore", "--tp", "2")
    runner.msrl("train-sft", "train-sft", "-c", "sft.yaml", "--set", f"run.seed={runner.seed}")
    accuracies["after SFT"] = runner.accuracy("sft", "runs/sft/checkpoints")
    runner.preprocess("rl", "r1", {"prompt": "question", "response": "answer"})
    return accuracies


def report(runner: Runner, accuracies: dict[str, float], seconds: float) -> None:
    """Print sample responses, accuracies, durations and the output folder."""
    print("\nResponses of the final model to held-out problems:")
    for row in read_rows(runner.folder / "answers_grpo.jsonl")[:NUM_SAMPLES]:
        print(f"  {row['prompt']}  {row['completions'][0]['text']}")
    print("\n| model | held-out accuracy |\n|---|---|")
    for stage, accuracy in accuracies.items():
        print(f"| {stage} | {accuracy:.1%} |")
    print("\nThe accuracies after training differ by a few points between machines.")
    print(", ".join(f"{stage} {duration:.0f} s" for stage, duration in runner.seconds.items()))
    print(f"Total: {seconds:.0f} s with seed {runner.seed}. Output folder: {runner.folder}")
    print("To chat with the final model, run:")
    print(f"  msrl chat --model {runner.folder / 'reinforced'}")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
