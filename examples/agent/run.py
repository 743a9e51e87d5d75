"""Agent example: train a small random model on a task of several turns, on a laptop.

    python examples/agent/run.py [--task lake|calculator] [--estimator NAME...] [--seeds N...]

The script creates a tokenizer, a model, demonstrations and tasks (make_inputs.py). It then runs
preprocess, convert-ckpt hf2mcore, train-sft and, for each estimator, train-grpo, and prints the
success on held-out tasks. It exits with 1 unless every run is 25 points above its SFT start.
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

HERE = Path(__file__).resolve().parent
REQUIRED_GAIN = 0.25
# Copying an expression into a call takes longer to learn than eight words.
SFT_STEPS = {"lake": 300, "calculator": 1000}
TASKS = tuple(SFT_STEPS)
ESTIMATORS = ("group_norm", "gigpo")
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class AgentRunner:
    """Runner of msrl commands for one task and seed in one folder."""

    def __init__(self, folder: Path, task: str, seed: int) -> None:
        self.folder, self.task, self.seed = folder, task, seed

    def prepare(self) -> None:
        """Create the inputs and fine-tune the model on the demonstrations."""
        shutil.rmtree(self.folder, ignore_errors=True)
        make_inputs(self.folder / "inputs", self.task, self.seed)
        for name in ("sft.yaml", f"{self.task}.yaml"):
            shutil.copy(HERE / name, self.folder / name)
        self._preprocess("sft", "sharegpt", {"messages": "messages"})
        columns = {"prompt": "question", "response": "answer", "extra.question": "question"}
        for name in ("rl", "heldout"):
            self._preprocess(name, "r1", columns)
        self._msrl("convert-ckpt", "hf2mcore", "--load", "inputs/model", "--save", "mcore")
        changes = ("--steps", str(SFT_STEPS[self.task]), "--set", f"run.seed={self.seed}")
        self._msrl("train-sft", "-c", "sft.yaml", *changes)

    def train(self, estimator: str) -> tuple[float, float]:
        """Train with an estimator; return the success before and after."""
        name = f"{self.task}-{estimator}"
        sets = (
            f"run.name={name}",
            f"run.seed={self.seed}",
            f"algo.advantage.estimator={estimator}",
        )
        options = [argument for setting in sets for argument in ("--set", setting)]
        self._msrl("train-grpo", "-c", f"{self.task}.yaml", *options)
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line)["metrics"] for line in lines]
        successes = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
        return successes[0], successes[-1]

    def _preprocess(self, name: str, handler: str, columns: dict[str, str]) -> None:
        files = ("--input", f"inputs/{name}.jsonl", "--output-prefix", f"data/{name}")
        texts = ("--tokenizer", "inputs/model", "--template", "native", "--handler", handler)
        self._msrl("preprocess", *files, *texts, "--map-keys", json.dumps(columns))

    def _msrl(self, *arguments: str) -> None:
        """Run one command; if it fails, exit with its exit code."""
        print(f"\n$ msrl {shlex.join(arguments)}", flush=True)
        command = [sys.executable, "-m", "msrl", *arguments]
        environment = {**os.environ, **ENVIRONMENT}
        result = subprocess.run(command, cwd=self.folder, env=environment, check=False)
        if result.returncode:
            sys.exit(result.returncode)


def main() -> int:
    """Run the example and print a table."""
    arguments = parse_arguments()
    rows: list[str] = []
    has_failed = False
    for task in arguments.task:
        for seed in arguments.seeds:
            runner = AgentRunner(arguments.out / f"{task}-{seed}", task, seed)
            runner.prepare()
            for estimator in arguments.estimator:
                started = time.perf_counter()
                before, after = runner.train(estimator)
                seconds = time.perf_counter() - started
                has_failed |= after - before < REQUIRED_GAIN
                cells = (task, estimator, str(seed), f"{before:.1%}", f"{after:.1%}")
                rows.append(f"| {' | '.join(cells)} | {seconds:.0f} s |")
    print("\n| task | estimator | seed | after SFT | after RL | time |\n|---|---|---|---|---|---|")
    print("\n".join(rows))
    return int(has_failed)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small random model on tasks of several turns, on a laptop."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/agent"), help="Folder to create.")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS), help="Tasks.")
    parser.add_argument(
        "--estimator", nargs="+", default=list(ESTIMATORS), help="Advantage estimators."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="Seeds (default: 0).")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
