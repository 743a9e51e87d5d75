"""The quickstart: from a random model to one that learnt arithmetic, through the real commands, on a laptop.

    python examples/quickstart/run.py [--out FOLDER] [--seed N]

makes its own tokenizer, model and problems (make_inputs.py), then runs preprocess, convert-ckpt hf2mcore, train-sft, train-grpo,
convert-ckpt mcore2hf and generate one after another, each printed before it runs, and ends with a table of the accuracy on problems
that were held out. No hub and no accelerator are needed.
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
from pathlib import Path

from make_inputs import make_inputs

from msrl.rewards.verifiers.base_acc import score

HERE = Path(__file__).resolve().parent
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
SAMPLES = 3
PARTIAL = ".inputs.partial"
# What the quickstart and the learning benchmark, which begins with it, write into their folder.
OWN = {
    "inputs", PARTIAL, "heldout.jsonl", "sft.yaml", "grpo.yaml", "data", "mcore", "runs", "reinforced",
    "start.json", "results.jsonl", "learning.yaml",
}  # fmt: skip


class Runner:
    """Runs msrl's commands in one folder, and keeps how long each took."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.seconds: dict[str, float] = {}

    def msrl(self, stage: str, *arguments: str) -> None:
        """One command; its failure ends the quickstart with the command's own exit code."""
        print(f"\n$ msrl {shlex.join(arguments)}", flush=True)
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "msrl", *arguments],
            cwd=self.folder,
            env={**os.environ, **QUIET},
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def preprocess(self, source: str, handler: str, columns: dict[str, str]) -> None:
        self.msrl(
            "preprocess", "preprocess", "--input", f"inputs/{source}.jsonl", "--tokenizer", "inputs/model", "--handler", handler,
            "--template", "native", "--output-prefix", f"data/{source}", "--map-keys", json.dumps(columns), "--workers", "2",
        )  # fmt: skip

    def accuracy(self, stage: str, model: str) -> float:
        """The share of held-out problems that a model answers right, greedily."""
        output = f"answers_{stage}.jsonl"
        self.msrl(
            "generate",
            "generate",
            "--model",
            model,
            "--input",
            "heldout.jsonl",
            "--output",
            output,
            "--max-tokens",
            "44",
        )
        rows = [
            json.loads(line)
            for line in (self.folder / output).read_text(encoding="utf-8").splitlines()
        ]
        return sum(score(row["completions"][0]["text"], row["answer"]) for row in rows) / len(rows)


def main() -> None:
    """Everything, in order."""
    parser = argparse.ArgumentParser(
        description="From a random model to one that learnt arithmetic, on a laptop."
    )
    out = "folder to make; what an earlier quickstart left there goes (default: %(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help=out)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the inputs and of both trainings (default: %(default)s)",
    )
    arguments = parser.parse_args()
    runner = Runner(arguments.out, arguments.seed)
    started = time.perf_counter()
    accuracies = run(runner)
    report(runner, accuracies, time.perf_counter() - started)


def run(runner: Runner) -> dict[str, float]:
    """The pipeline. Returns the accuracy after each stage."""
    accuracies = fine_tune(runner)
    runner.msrl("train-grpo", "train-grpo", "-c", "grpo.yaml", "--set", f"run.seed={runner.seed}")
    runner.msrl(
        "convert-ckpt",
        "convert-ckpt",
        "mcore2hf",
        "--load",
        "runs/grpo/checkpoints",
        "--save",
        "reinforced",
    )
    accuracies["after GRPO"] = runner.accuracy("grpo", "reinforced")
    return accuracies


def begin_anew(folder: Path) -> None:
    """Takes away what an earlier quickstart left. A folder that holds anything else is nobody's to clear: one message, exit code 2."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    is_whole = (folder / "inputs/heldout.jsonl").is_file() and all(
        name in OWN or name.startswith("answers_") for name in names
    )
    if not is_whole and not names <= {PARTIAL}:
        print(
            f"--out {folder}: holds more than an earlier quickstart left; name another folder, or remove it",
            file=sys.stderr,
        )
        sys.exit(2)
    shutil.rmtree(folder)


def fine_tune(runner: Runner) -> dict[str, float]:
    """All that comes before reinforcement: inputs, conversion, SFT, prompts. Returns the accuracy before and after SFT."""
    folder = runner.folder
    begin_anew(folder)
    make_inputs(folder / "inputs", runner.seed)
    heldout = [
        json.loads(line)
        for line in (folder / "inputs/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    (folder / "heldout.jsonl").write_text(
        "".join(
            json.dumps({"prompt": r["question"], "answer": r["answer"]}) + "\n" for r in heldout
        )
    )
    for name in ("sft", "grpo"):
        shutil.copy(HERE / f"{name}.yaml", folder)
    accuracies = {"before": runner.accuracy("before", "inputs/model")}
    runner.preprocess("sft", "alpaca", {})
    runner.msrl(
        "convert-ckpt",
        "convert-ckpt",
        "hf2mcore",
        "--load",
        "inputs/model",
        "--save",
        "mcore",
        "--tp",
        "2",
    )
    runner.msrl("train-sft", "train-sft", "-c", "sft.yaml", "--set", f"run.seed={runner.seed}")
    accuracies["after SFT"] = runner.accuracy("sft", "runs/sft/checkpoints")
    runner.preprocess("rl", "r1", {"prompt": "question", "response": "answer"})
    return accuracies


def report(runner: Runner, accuracies: dict[str, float], seconds: float) -> None:
    """The table, some answers, and where things are."""
    print("\nThe reinforced model on held-out problems:")
    for line in (
        (runner.folder / "answers_grpo.jsonl").read_text(encoding="utf-8").splitlines()[:SAMPLES]
    ):
        row = json.loads(line)
        print(f"  {row['prompt']}  {row['completions'][0]['text']}")
    print("\n| model | held-out accuracy |\n|---|---|")
    for stage, accuracy in accuracies.items():
        print(f"| {stage} | {accuracy:.1%} |")
    print("\n" + ", ".join(f"{stage} {taken:.0f} s" for stage, taken in runner.seconds.items()))
    print(
        f"{seconds:.0f} s in all, seed {runner.seed}. Everything is in {runner.folder}; talk to the model with:"
    )
    print(f"  msrl chat --model {runner.folder / 'reinforced'}")


if __name__ == "__main__":
    main()
