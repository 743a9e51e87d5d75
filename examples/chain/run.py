"""Chain: train a model, a reward model, a policy on its scores, and a smaller student, on a laptop.

    python examples/chain/run.py [--out FOLDER] [--seeds N]

The inputs are those of the quickstart. The script runs train-sft, train-rm on pairs of right and
wrong answers, train-grpo with the reward model as the only reward, and train-distill, which teaches
a smaller model with the result. It exits with 1 unless every stage reaches its goal.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import make_inputs as quickstart_inputs  # noqa: E402  # pyright: ignore[reportMissingImports]
from run import Runner, remove_previous_run  # noqa: E402  # pyright: ignore

NUM_PAIRS = 6000
PAIR_ACCURACY, RL_GAIN, DISTILLATION_GAIN, TEACHER_GAP = 0.90, 0.10, 0.10, 0.03
SLOPPY, WRONG_RESULT, WRONG_STEP = "sloppy", "wrong result", "wrong step"


@dataclass(frozen=True, slots=True)
class Results:
    """Accuracies of all stages of a seed, between 0 and 1."""

    sft: float
    pairs: float  # held-out pairs whose right answer has the higher score
    grpo: float
    student: float
    distilled: float

    def failures(self) -> list[str]:
        """Return one line for each goal that is missed."""
        goals = {
            f"the reward model ranks {PAIR_ACCURACY:.0%} of the pairs": self.pairs >= PAIR_ACCURACY,
            f"GRPO gains {RL_GAIN:.0%}": self.grpo - self.sft >= RL_GAIN,
            f"distillation gains {DISTILLATION_GAIN:.0%}": self.distilled - self.student
            >= DISTILLATION_GAIN,
            f"the student is within {TEACHER_GAP:.0%} of its teacher": self.distilled
            >= self.grpo - TEACHER_GAP,
        }
        return [goal for goal, is_reached in goals.items() if not is_reached]


class Chain:
    """All stages for one seed in one folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.runner = Runner(folder, seed)  # pyright: ignore[reportCallIssue]
        self.folder, self.seed = folder, seed

    def run(self) -> Results:
        """Run all stages; exit with the exit code of the first command that fails."""
        self._prepare()
        self._fine_tune("sft", "inputs/model")
        sft = self.runner.accuracy("sft", "runs/sft/checkpoints")
        self.runner.preprocess("pairs", "pairs", {})
        self._train("train-rm", "rm")
        self.runner.preprocess("rl", "r1", {"prompt": "question", "response": "answer"})
        self._train("train-grpo", "grpo")
        grpo = self.runner.accuracy("grpo", "runs/grpo/checkpoints")
        self._fine_tune("student", "inputs/student", "train.steps=400")
        student = self.runner.accuracy("student", "runs/student/checkpoints")
        self._train("train-distill", "distill")
        distilled = self.runner.accuracy("distilled", "runs/distill/checkpoints")
        return Results(sft, self._metric("rm", "eval/accuracy"), grpo, student, distilled)

    def _prepare(self) -> None:
        remove_previous_run(self.folder)
        inputs = self.folder / "inputs"
        quickstart_inputs.make_inputs(inputs, self.seed)
        write_student(inputs / "model", inputs / "student", self.seed)
        write_rows(inputs / "pairs.jsonl", make_pairs(self.seed))
        heldout = [
            {"prompt": row["question"], "answer": row["answer"]}
            for row in map(json.loads, (inputs / "heldout.jsonl").read_text().splitlines())
        ]
        write_rows(self.folder / "heldout.jsonl", heldout)
        for name in ("rm", "grpo", "distill"):
            shutil.copy(HERE / f"{name}.yaml", self.folder)
        shutil.copy(QUICKSTART / "sft.yaml", self.folder)
        self.runner.preprocess("sft", "alpaca", {})

    def _fine_tune(self, name: str, model: str, *sets: str) -> None:
        """Fine-tune a random model on the demonstrations of the quickstart."""
        self._train("train-sft", "sft", f"run.name={name}", f"model.path={model}", *sets)

    def _train(self, command: str, file: str, *sets: str) -> None:
        options = [f"--set={setting}" for setting in (f"run.seed={self.seed}", *sets)]
        self.runner.msrl(command, command, "-c", f"{file}.yaml", *options)

    def _metric(self, run: str, name: str) -> float:
        """Return the last value of a metric of a run."""
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line)["metrics"] for line in lines]
        return [row[name] for row in rows if name in row][-1]


def make_pairs(seed: int) -> list[dict[str, str]]:
    """Return pairs of a right and a wrong answer to problems that are not held out."""
    source = random.Random(seed + 1)
    problems = quickstart_inputs.distinct_problems(
        source, NUM_PAIRS, without=quickstart_inputs.heldout_problems()
    )
    return [
        {
            "prompt": problem.question,
            "chosen": quickstart_inputs.demonstration(problem, sloppy=False),
            "rejected": wrong_answer(source, problem),
        }
        for problem in problems
    ]


def wrong_answer(source: random.Random, problem: quickstart_inputs.Problem) -> str:
    """Return an answer with a mistake: a forgotten carry, a wrong result or a wrong step."""
    kinds = [WRONG_RESULT, WRONG_STEP]
    kind = source.choice([SLOPPY, SLOPPY, *kinds] if problem.has_carry else kinds)
    if kind == SLOPPY:
        return quickstart_inputs.demonstration(problem, sloppy=True)
    right = quickstart_inputs.demonstration(problem, sloppy=False)
    thinking, boxed, tail = right.partition("\\boxed{")
    if kind == WRONG_STEP:
        start, _, _ = thinking.rpartition(" </think>")
        head, equals, number = start.rpartition("=")
        thinking = f"{head}{equals}{other_number(source, int(number))} </think><answer> "
    wrong = other_number(source, problem.result)
    return f"{thinking}{boxed}{wrong}{tail.removeprefix(str(problem.result))}"


def other_number(source: random.Random, number: int) -> int:
    """Return another number, which is not negative."""
    difference = source.choice((1, 2, 5, 9, 10, 20))
    sign = 1 if number < difference else source.choice((-1, 1))
    return number + sign * difference


def write_student(teacher: Path, folder: Path, seed: int) -> None:
    """Write a random Qwen2 model with about half of the teacher's parameters and its tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config.from_pretrained(teacher)
    config.intermediate_size = 128
    torch.manual_seed(seed + 1)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for file in teacher.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    """Run the chain for every seed and print a table."""
    parser = argparse.ArgumentParser(
        description="Run SFT, a reward model, GRPO and a distillation, on a laptop."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/chain"), help="Folder to create.")
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds (default: 1).")
    arguments = parser.parse_args()
    rows, failures = list[str](), list[str]()
    for seed in range(arguments.seeds):
        started = time.perf_counter()
        results = Chain(arguments.out / f"seed-{seed}", seed).run()
        shares = (results.sft, results.pairs, results.grpo, results.student, results.distilled)
        cells = (str(seed), *(f"{share:.1%}" for share in shares))
        rows.append(f"| {' | '.join(cells)} | {time.perf_counter() - started:.0f} s |")
        failures += [f"seed {seed}: missed: {line}" for line in results.failures()]
    print("\n| seed | after SFT | pairs | after GRPO | student | distilled | time |")
    print("|---|---|---|---|---|---|---|\n" + "\n".join(rows))
    print("\n".join(failures))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
